"""NCCL and RCCL by ctypes: the dozen calls that a transport needs, the same names in both.

A communicator is made with `blocking = 0` (NCCL 2.14, RCCL 2.14): its calls return at once and may answer "in
progress", and whether it is done is asked for (`ncclCommGetAsyncError`). So nothing in here waits without a bound, and
a communicator that never comes about, because a peer died or the way between the cards is shut, is aborted at the
deadline. A library that is too old for that is not used.

Two variables are set before the first communicator of a process, unless the user has set them (`set_defaults`):

    NCCL_NVLS_ENABLE=0     no consumer card has NVLink-SHARP, and newer versions fail on some hosts instead of doing
                           without it
    NCCL_CUMEM_ENABLE=0    memory of the library's own then comes by the calls that IPC handles are made for
"""

from __future__ import annotations

import ctypes
import logging
import os
import time
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from ctypes import POINTER, byref, c_char, c_int, c_size_t, c_uint, c_void_p
from pathlib import Path

from backends.gpu.arch import Vendor
from backends.gpu.errors import DriverError, DriverMissing
from backends.gpu.jit import packages

log = logging.getLogger(__name__)

DEFAULTS = {"NCCL_NVLS_ENABLE": "0", "NCCL_CUMEM_ENABLE": "0"}
ID_BYTES = 128
OK, IN_PROGRESS = 0, 7
FLOAT32, SUM = 7, 0
CONFIG_MAGIC = 0xCAFEBEEF
VERSION_LEAST = 21400
"""2.14, as the library counts: the first one with communicators that do not block."""
NAP_S = 0.0005
FIX = "set NCCL_DEBUG=INFO to see what it did, or HOMESERVE_TRANSPORT=host to do without it"
TITLES: dict[Vendor, str] = {"nvidia": "NCCL", "amd": "RCCL"}
_INSTALL: dict[Vendor, str] = {
    "nvidia": "pip install nvidia-nccl-cu13 (a driver of CUDA 12: nvidia-nccl-cu12)",
    "amd": "install ROCm's rccl (Debian, Ubuntu: apt install librccl1 · AMD's packages: rccl)",
}


class NcclError(DriverError):
    """A call of the library that failed."""


class NcclLate(NcclError):
    """What was asked of the library did not come about by its deadline."""


class UniqueId(ctypes.Structure):
    """`ncclUniqueId`: passed by value."""

    _fields_ = [("internal", c_char * ID_BYTES)]


class Config(ctypes.Structure):
    """`ncclConfig_t` as 2.14 has it, and says so: later ones take their own defaults for what they have besides."""

    _fields_ = [("size", c_size_t), ("magic", c_uint), ("version", c_uint), ("blocking", c_int)]


def set_defaults(environ: MutableMapping[str, str]) -> dict[str, str]:
    """Set what the user has not, log and return the values in force. To be called before the first communicator: the
    library reads them once."""
    for name, value in DEFAULTS.items():
        environ.setdefault(name, value)
    effective = {name: environ[name] for name in DEFAULTS}
    log.info("collectives library: %s", ", ".join(f"{name}={value}" for name, value in effective.items()))
    return effective


class Library:
    """The library at `path`. Raises DriverMissing, DriverError for one that lacks a call or is too old."""

    def __init__(self, vendor: Vendor, path: str) -> None:
        self.vendor, self.path, self.title, self.version = vendor, path, TITLES[vendor], 0
        try:
            self._library = ctypes.CDLL(path)
        except OSError as error:
            raise DriverMissing(f"{self.title}: {path} does not load: {error}", fix=_INSTALL[vendor]) from error
        try:
            self._declare()
        except AttributeError as error:
            raise DriverError(f"{self.title} at {path} is too old: {error}", fix=_INSTALL[vendor]) from error
        version = c_int()
        self._call("ncclGetVersion", byref(version))
        self.version = version.value
        if self.version < VERSION_LEAST:
            raise DriverError(
                f"{self.title} {told(self.version)} is too old, {told(VERSION_LEAST)} is wanted", fix=_INSTALL[vendor]
            )

    def unique_id(self) -> bytes:
        """Names a communicator that is to be; one rank makes it, all others are told."""
        unique = UniqueId()
        self._call("ncclGetUniqueId", byref(unique))
        return bytes(bytearray(unique))

    def communicator(self, unique: bytes, rank: int, ranks: int, timeout_s: float) -> Communicator:
        """All ranks make it at once. Raises NcclError, also where it has not come about in time."""
        config = Config(ctypes.sizeof(Config), CONFIG_MAGIC, VERSION_LEAST, 0)
        handle = c_void_p()
        found = self._library.ncclCommInitRankConfig(
            byref(handle), ranks, UniqueId.from_buffer_copy(unique), rank, byref(config)
        )
        self.check("ncclCommInitRankConfig", found)
        if not handle.value:
            raise NcclError(self.words("ncclCommInitRankConfig gave no communicator"), fix=FIX)
        made = Communicator(self, handle.value)
        try:
            made.settle(f"a communicator of {ranks} ranks", time.monotonic() + timeout_s)
        except NcclError:
            made.abort()
            raise
        return made

    # ---------------------------------------------------------------------------------------------------------- inside

    def check(self, name: str, status: int) -> None:
        """Raises NcclError for a status that is neither success nor "in progress"."""
        if status not in (OK, IN_PROGRESS):
            raise NcclError(self.words(f"{name} failed: {self.text_of(status)}"), fix=FIX)

    def words(self, what: str) -> str:
        return f"{self.title} {told(self.version)}: {what}" if self.version else f"{self.title}: {what}"

    def text_of(self, status: int) -> str:
        text: bytes | None = self._library.ncclGetErrorString(status)
        return (text or b"status %d" % status).decode(errors="replace")

    def call(self, name: str, *arguments: object) -> None:
        self._call(name, *arguments)

    def end_group(self) -> None:
        """Of a group of which a call failed: the status is that call's once more."""
        self._library.ncclGroupEnd()

    def async_error(self, handle: int) -> int:
        """What a communicator is at: OK, IN_PROGRESS or an error."""
        found = c_int()
        self._call("ncclCommGetAsyncError", handle, byref(found))
        return int(found.value)

    def _call(self, name: str, *arguments: object) -> None:
        self.check(name, getattr(self._library, name)(*arguments))

    def _declare(self) -> None:
        pointer, size = c_void_p, c_size_t
        calls: dict[str, list[object]] = {
            "ncclGetVersion": [POINTER(c_int)],
            "ncclGetUniqueId": [POINTER(UniqueId)],
            "ncclCommInitRankConfig": [POINTER(c_void_p), c_int, UniqueId, c_int, POINTER(Config)],
            "ncclCommGetAsyncError": [pointer, POINTER(c_int)],
            "ncclCommAbort": [pointer],
            "ncclAllReduce": [pointer, pointer, size, c_int, c_int, pointer, pointer],
            "ncclSend": [pointer, size, c_int, c_int, pointer, pointer],
            "ncclRecv": [pointer, size, c_int, c_int, pointer, pointer],
            "ncclGroupStart": [],
            "ncclGroupEnd": [],
        }
        for name, arguments in calls.items():
            function = getattr(self._library, name)
            function.argtypes, function.restype = arguments, c_int
        self._library.ncclGetErrorString.argtypes = [c_int]
        self._library.ncclGetErrorString.restype = ctypes.c_char_p


class Communicator:
    """Of one rank. Counts are floats, addresses the card's, `stream` the driver's handle of one."""

    def __init__(self, library: Library, handle: int) -> None:
        self._library = library
        self._handle = handle

    def all_reduce(self, at: int, count: int, stream: int) -> None:
        """The sum over all ranks, in place."""
        self._library.call("ncclAllReduce", at, at, count, FLOAT32, SUM, self._handle, stream)

    @contextmanager
    def group(self) -> Iterator[None]:
        """Sends and receives within are one: none waits for another. The group is the calling thread's, so it ends
        whatever happens: all later calls of this thread would be part of one that was left open."""
        self._library.call("ncclGroupStart")
        try:
            yield
        except BaseException:
            self._library.end_group()
            raise
        self._library.call("ncclGroupEnd")

    def send(self, at: int, count: int, peer: int, stream: int) -> None:
        self._library.call("ncclSend", at, count, FLOAT32, peer, self._handle, stream)

    def receive(self, at: int, count: int, peer: int, stream: int) -> None:
        self._library.call("ncclRecv", at, count, FLOAT32, peer, self._handle, stream)

    def settle(self, what: str, deadline: float) -> None:
        """Until the library has taken what it was asked for (`time.monotonic`). Raises NcclError."""
        while True:
            status = self._library.async_error(self._handle)
            if status == OK:
                return
            self._library.check(what, status)
            if time.monotonic() > deadline:
                raise NcclLate(self._library.words(f"{what} did not come about in time"), fix=FIX)
            time.sleep(NAP_S)

    def check(self, what: str) -> None:
        """Raises NcclError where the communicator has failed since."""
        self._library.check(what, self._library.async_error(self._handle))

    def abort(self) -> None:
        """End it at once, whatever it is at. Never raises: it is how a failure is left."""
        if self._handle:
            handle, self._handle = self._handle, 0
            try:
                self._library.call("ncclCommAbort", handle)
            except NcclError as error:
                log.warning("%s", error.message)

    def close(self) -> None:
        """Nothing is under way any more. The library's own way to end one waits for the others, of whom some may be
        gone; this does not. Does nothing a second time."""
        self.abort()


def find(vendor: Vendor) -> Library:
    """Of the system, of ROCm's folder, or of a wheel in this environment: the first one that can be used. Raises
    DriverMissing, and for what is there and cannot be used DriverError of the first."""
    tried: list[str] = []
    refused: DriverError | None = None
    for path in _candidates(vendor):
        tried.append(path)
        if os.path.isabs(path) and not os.path.exists(path):
            continue
        try:
            return Library(vendor, path)
        except DriverError as error:
            if os.path.isabs(path) or not isinstance(error, DriverMissing):
                refused = refused or error
    if refused is not None:
        raise refused
    raise DriverMissing(f"{TITLES[vendor]} was not found; looked for {', '.join(tried)}", fix=_INSTALL[vendor])


def told(version: int) -> str:
    """`2.14.0`, of the number that the library gives."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def _candidates(vendor: Vendor) -> Iterator[str]:
    if vendor == "amd":
        yield "librccl.so.1"
        for root in (os.environ.get("ROCM_PATH", "/opt/rocm"), *packages("_rocm_sdk_libraries")):
            yield str(Path(root) / "lib" / "librccl.so.1")
        return
    yield "libnccl.so.2"
    for root in packages("nvidia"):
        yield str(Path(root) / "nccl" / "lib" / "libnccl.so.2")
