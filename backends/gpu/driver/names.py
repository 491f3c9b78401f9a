"""The functions of a driver under names of ours, and what they take.

CUDA's driver and HIP agree in nearly all of it: the same functions in the same order of arguments, addresses and
handles of eight bytes, a status of four. So a signature stands here once, and a vendor's table (`backends.cuda.names`,
`backends.rocm.names`) gives each the symbol that the vendor's header gives it. CUDA's symbols carry versions that its
header hides behind macros: `cuMemAlloc` is `cuMemAlloc_v2`, and the function without the number is another one, of
32-bit addresses. The few that really differ have their signature in the vendor's table.

Sources: cuda.h of CUDA 13.0, by a compiler: the symbol behind each name, the sizes of its arguments, the structures and
the numbers (`cuEventElapsedTime` is the version before its latest, which drivers of CUDA 12 have too);
hip_runtime_api.h of ROCm 5.7 to 7.1, by reading: nothing here has run on HIP.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from ctypes import POINTER, c_char_p, c_float, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_void_p
from dataclasses import dataclass

from backends.gpu.arch import Vendor

IPC_BYTES = 64


class IpcHandle(ctypes.Structure):
    """CUipcMemHandle, hipIpcMemHandle_t. Passed by value."""

    _fields_ = (("bytes", ctypes.c_char * IPC_BYTES),)


class Uuid(ctypes.Structure):
    """CUuuid, hipUUID."""

    _fields_ = (("bytes", c_ubyte * 16),)


class Location(ctypes.Structure):
    """CUmemLocation, hipMemLocation."""

    _fields_ = (("type", c_int), ("id", c_int))


class AllocationProp(ctypes.Structure):
    """CUmemAllocationProp, hipMemAllocationProp: 32 bytes in both. The last eight are flags, of which none is set."""

    _fields_ = (
        ("type", c_int),
        ("handle_types", c_int),
        ("location", Location),
        ("win32", c_void_p),
        ("flags", c_ubyte * 8),
    )


class AccessDesc(ctypes.Structure):
    """CUmemAccessDesc, hipMemAccessDesc."""

    _fields_ = (("location", Location), ("flags", c_int))


PINNED, ON_DEVICE, READ_WRITE = 1, 1, 3
"""Of type, of Location.type, of AccessDesc.flags."""
NON_BLOCKING = 1
"""A stream that does not wait for the default one."""
CAPTURE_OF_THREAD = 1
"""Calls of other threads are none of a capture's business."""
REGISTER_PORTABLE = 1
LAZY_PEER_ACCESS = 1

_OUT = POINTER(c_void_p)
_INT, _SIZE, _FLOAT, _U64 = POINTER(c_int), POINTER(c_size_t), POINTER(c_float), POINTER(c_uint64)
_AT, _HANDLE = c_void_p, c_void_p

Signature = tuple[type, ...]

SIGNATURES: Mapping[str, Signature] = {
    "init": (c_uint,),
    "version": (_INT,),
    "device_count": (_INT,),
    "device_get": (_INT, c_int),
    "device_name": (c_char_p, c_int, c_int),
    "device_uuid": (POINTER(Uuid), c_int),
    "device_pci": (c_char_p, c_int, c_int),
    "device_attribute": (_INT, c_int, c_int),
    "device_total": (_SIZE, c_int),
    "device_reaches": (_INT, c_int, c_int),
    "memory_info": (_SIZE, _SIZE),
    "allocate": (_OUT, c_size_t),
    "free": (_AT,),
    "fill": (_AT, c_ubyte, c_size_t, _HANDLE),
    "upload": (_AT, _AT, c_size_t, _HANDLE),
    "download": (_AT, _AT, c_size_t, _HANDLE),
    "copy": (_AT, _AT, c_size_t, _HANDLE),
    "host_register": (_AT, c_size_t, c_uint),
    "host_unregister": (_AT,),
    "granularity": (_SIZE, POINTER(AllocationProp), c_int),
    "reserve": (_OUT, c_size_t, c_size_t, _AT, c_uint64),
    "unreserve": (_AT, c_size_t),
    "create": (_U64, c_size_t, POINTER(AllocationProp), c_uint64),
    "release": (c_uint64,),
    "map": (_AT, c_size_t, c_size_t, c_uint64, c_uint64),
    "unmap": (_AT, c_size_t),
    "set_access": (_AT, c_size_t, POINTER(AccessDesc), c_size_t),
    "load": (_OUT, c_void_p, c_uint, c_void_p, c_void_p),
    "unload": (_HANDLE,),
    "function": (_OUT, _HANDLE, c_char_p),
    "launch": (_HANDLE, *(c_uint,) * 7, _HANDLE, c_void_p, c_void_p),
    "stream_create": (_OUT, c_uint),
    "stream_wait": (_HANDLE,),
    "stream_query": (_HANDLE,),
    "stream_destroy": (_HANDLE,),
    "event_create": (_OUT, c_uint),
    "event_record": (_HANDLE, _HANDLE),
    "event_wait": (_HANDLE,),
    "event_elapsed": (_FLOAT, _HANDLE, _HANDLE),
    "event_destroy": (_HANDLE,),
    "capture_begin": (_HANDLE, c_int),
    "capture_end": (_HANDLE, _OUT),
    "graph_launch": (_HANDLE, _HANDLE),
    "graph_destroy": (_HANDLE,),
    "exec_destroy": (_HANDLE,),
    "ipc_get": (POINTER(IpcHandle), _AT),
    "ipc_open": (_OUT, IpcHandle, c_uint),
    "ipc_close": (_AT,),
}


@dataclass(frozen=True)
class Attributes:
    """Numbers of device attributes."""

    warp: int
    units: int
    integrated: int
    virtual_memory: int


@dataclass(frozen=True)
class Names:
    """A vendor's driver. `libraries`: names for the system's loader, the best one first; `oldest`: version below which
    it is refused, as the driver counts, `oldest_text` for people; `hiding`: variables that hide cards from a process;
    `symbols` of SIGNATURES and of `own`; `update`: what to install."""

    vendor: Vendor
    title: str
    libraries: tuple[str, ...]
    oldest: int
    oldest_text: str
    hiding: tuple[str, ...]
    attributes: Attributes
    symbols: Mapping[str, str]
    own: Mapping[str, Signature]
    install: str
    update: str

    def signature(self, key: str) -> Signature:
        return self.own[key] if key in self.own else SIGNATURES[key]
