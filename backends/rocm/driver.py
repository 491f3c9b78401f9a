"""Calls of HIP that CUDA has in another form: the card of a thread, the arch's name, code objects, graphs."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator, Mapping
from ctypes import byref, c_char_p, c_int, c_void_p
from pathlib import Path

from backends.gpu.driver.driver import Driver, text_of
from backends.gpu.errors import DriverError
from backends.gpu.jit import libraries, packages
from backends.rocm.names import ARCH_BYTES, NAMES, PROPERTIES, PROPERTIES_BYTES

_ARCH = re.compile(r"gfx[0-9a-f]{3,5}(:[a-z]+[+-])*")
_UNIQUE = re.compile(r"[0-9a-f]{16}")


class RocmDriver(Driver):
    names = NAMES

    def __init__(self, path: str | None, environ: Mapping[str, str]) -> None:
        self._images: dict[int, bytes] = {}
        super().__init__(path, environ)

    def _places(self, environ: Mapping[str, str]) -> Iterator[str]:
        """ROCm's own folder is seldom among the loader's; its wheels never are."""
        yield from self.names.libraries
        for root in (environ.get("ROCM_PATH", "/opt/rocm"), *packages("_rocm_sdk_core")):
            yield from libraries(Path(root) / "lib", self.names.libraries[-1])

    @property
    def version_text(self) -> str:
        return f"{self.version // 10_000_000}.{self.version // 100_000 % 100}"

    def _prepare(self) -> None:
        """Names and words of statuses are returned, not written."""
        for key in ("error_name", "error_text"):
            self.calls[key].restype = c_char_p  # type: ignore[attr-defined]

    def arch_name(self, index: int) -> str:
        """As HIP says, which loads code of that name alone: with HSA_OVERRIDE_GFX_VERSION that is another one than the
        kernel driver's. Raises DriverError where the structure is not as known."""
        function, begin = next((getattr(self._library, name), at) for name, at in PROPERTIES if self._has(name))
        function.argtypes = (c_void_p, c_int)
        room = ctypes.create_string_buffer(PROPERTIES_BYTES)
        self._check(function(room, index), "device_attribute")
        told = room.raw[begin : begin + ARCH_BYTES].partition(b"\0")[0].decode(errors="replace")
        if not _ARCH.fullmatch(told):
            raise DriverError(
                f"HIP {self.version_text} tells the arch of card {index} as {told[:40]!r}",
                fix="report this with the version of ROCm; leave the card out of --devices until then",
            )
        return told

    def _has(self, name: str) -> bool:
        return hasattr(self._library, name)

    def _uuid(self, raw: bytes, pci: str) -> str:
        """HIP gives the sixteen digits that rocminfo prints behind `GPU-`. A chip without a number of its own, as APUs
        are, has none of them: it is known by its address."""
        told = raw.rstrip(b"\0").decode("ascii", errors="replace").lower()
        return f"GPU-{told}" if _UNIQUE.fullmatch(told) and int(told, 16) else pci

    def _open(self, index: int) -> None:
        """A card's context comes with its first use."""

    def enter(self) -> None:
        self._call("device_set", self._index)

    def leave(self) -> None:
        """Nothing is held."""

    def load(self, image: bytes) -> int:
        """HIP does not copy a code object: it looks into this very memory as long as the module lives."""
        module = super().load(image)
        self._images[module] = image
        return module

    def unload(self, module: int) -> None:
        super().unload(module)
        del self._images[module]

    def allow_shared(self, function: int, nbytes: int) -> None:
        """All that a block can have may be asked for."""

    def _instantiate(self, graph: c_void_p) -> int:
        return self._out("instantiate", graph, byref(c_void_p()), None, 0)

    def _error(self, key: str, status: int) -> str:
        told: object = self.calls[key](status)
        return text_of(told if isinstance(told, bytes) else None, status)
