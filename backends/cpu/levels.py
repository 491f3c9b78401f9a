"""ISA levels: which there are, which this CPU can run, which library serves each.

A level is a set of instructions that one build of the native source may use. The choice is made once, when a worker
opens its device: the best that the CPU has, or the one that was asked for, which is refused if the CPU lacks it.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

from backends.cpu import abi

LEVELS = ("baseline", "avx2", "avx512", "avx512vnni")
"""From slowest to fastest; the index is the bit of `hs_host_levels`."""

LIBRARY_FOLDER = Path(__file__).parent / "lib"


class LevelError(ValueError):
    """A level that does not exist, that this CPU lacks, or that was not built."""


def library_path(level: str) -> Path:
    return LIBRARY_FOLDER / f"libhomeserve_cpu_{level}.so"


def host_levels() -> tuple[str, ...]:
    """The levels that this CPU can run and whose library is there, slowest first. Raises abi.NativeLibraryError."""
    probe = abi.load(library_path("baseline"))
    bits = probe.hs_host_levels()
    return tuple(name for bit, name in enumerate(LEVELS) if bits >> bit & 1 and library_path(name).exists())


def choose(asked: str, available: tuple[str, ...]) -> str:
    """`asked`, or the best of `available` where it is empty or "auto". Raises LevelError."""
    if asked in ("", "auto"):
        return available[-1]
    if asked not in LEVELS:
        raise LevelError(f"ISA level {asked!r} is not known; known: {', '.join(LEVELS)}")
    if asked not in available:
        raise LevelError(f"this CPU cannot run ISA level {asked!r}; it can run: {', '.join(available)}")
    return asked


def load(level: str) -> ctypes.CDLL:
    return abi.load(library_path(level))
