"""Calls of CUDA's driver that HIP has in another form: contexts, PTX and its log, block memory beyond 48 KiB."""

from __future__ import annotations

import ctypes
import os
import uuid
from ctypes import byref, c_char_p, c_void_p

from backends.cuda.names import NAMES
from backends.gpu.driver.driver import Driver, text_of
from backends.gpu.errors import DeviceLost, DriverError

_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76
_MAX_DYNAMIC_SHARED = 8
_UNASKED_SHARED = 48 << 10
"""Block memory that any launch may ask for."""
_LOG_BUFFER, _LOG_BUFFER_BYTES = 5, 6
"""CU_JIT_ERROR_LOG_BUFFER, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES."""
_LOG_BYTES = 16384


class CudaDriver(Driver):
    names = NAMES
    _context: int = 0

    def _prepare(self) -> None:
        """Kernels are loaded with their module: a kernel that is loaded by its first launch may not come while launches
        are recorded, and the first step of a request waits for it."""
        os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")

    @property
    def version_text(self) -> str:
        return f"{self.version // 1000}.{self.version % 1000 // 10}"

    def arch_name(self, index: int) -> str:
        return f"sm_{self.attribute(_CAPABILITY_MAJOR, index)}{self.attribute(_CAPABILITY_MINOR, index)}"

    def _uuid(self, raw: bytes, pci: str) -> str:
        return f"GPU-{uuid.UUID(bytes=raw)}"

    def _open(self, index: int) -> None:
        self._context = self._out("context_retain", index)

    def enter(self) -> None:
        self._call("context_set", self._context)

    def leave(self) -> None:
        if self._context:
            self._context = 0
            self.calls["context_set"](None)
            self.calls["context_release"](self._index)

    def load(self, image: bytes) -> int:
        """PTX is compiled by the driver here; what its compiler says of a failure is in the error."""
        log = ctypes.create_string_buffer(_LOG_BYTES)
        options = (ctypes.c_int * 2)(_LOG_BUFFER, _LOG_BUFFER_BYTES)
        values = (c_void_p * 2)(ctypes.addressof(log), _LOG_BYTES)
        try:
            return self._out("load", image, 2, options, values)
        except DeviceLost:
            raise
        except DriverError as error:
            if not log.value:
                raise
            said = log.value.decode(errors="replace")
            raise type(error)(error.message, fix=error.fix, log=said, card=error.card) from error

    def allow_shared(self, function: int, nbytes: int) -> None:
        if nbytes > _UNASKED_SHARED:
            self._call("function_set", function, _MAX_DYNAMIC_SHARED, nbytes)

    def _instantiate(self, graph: c_void_p) -> int:
        return self._out("instantiate", graph, 0)

    def _error(self, key: str, status: int) -> str:
        told = c_char_p()
        self.calls[key](status, byref(told))
        return text_of(told.value, status)
