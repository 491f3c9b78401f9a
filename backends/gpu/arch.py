"""What is known of a card's arch from its name, by rule: there is no list of supported names.

NVIDIA's are `sm_86`: compute capability 8.6, perhaps with a letter for code that runs on that one alone (`sm_90a`).
AMD's are `gfx1103`: all digits but two are the generation, then one of the minor number and one of the stepping, both
hexadecimal; a driver adds what is switched on (`gfx90a:sramecc+:xnack-`), and compilers know names for whole groups
(`gfx11-generic`). A new card of a known generation needs nothing here. What kernels ask for:

    generation          warps     dot4                      matrix
    sm_75               32        dp4a                      mma of 8 k
    sm_80 and later     32        dp4a                      mma of 16 k
    gfx900 ... gfx909   64        sdot4 from gfx906 *       none
    gfx908, 90a, 94x, 95x  64     sdot4                     mfma
    gfx10.1             32        sdot4 on 1011, 1012       none
    gfx10.3             32        sdot4                     none
    gfx11               32        sudot4                    wmma, every half held twice
    gfx12.0             32        sudot4                    wmma
    gfx12.5             32        none                      none: other shapes than those of gfx12.0

    * but not on the integrated gfx909 and gfx90c

The device code finds the same by the compiler's macros, so a wrong line here makes a wrong report, and the gate's tests
hold the table against what clang says of every arch that it knows.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from backends.gpu.errors import UnknownArch

Vendor = Literal["nvidia", "amd"]
Dot4 = Literal["dp4a", "sdot4", "sudot4", "none"]
Matrix = Literal["mma8", "mma16", "wmma11", "wmma12", "mfma", "none"]

TREES: dict[Vendor, tuple[str, str]] = {"nvidia": ("cuda_kernels", ".cu"), "amd": ("hip_kernels", ".hip")}
"""Where a vendor's entries lie, and how their files end."""

_NVIDIA = re.compile(r"sm_(\d{2,3})([af]?)")
_AMD = re.compile(r"gfx(\d{1,2})([0-9a-f])([0-9a-f])((?::[a-z]+[+-])*)")
_AMD_GROUP = re.compile(r"gfx(\d{1,2})(?:-(\d))?-generic((?::[a-z]+[+-])*)")

_NVIDIA_BLOCK_KIB = {75: 64, 80: 163, 86: 99, 87: 163, 88: 99, 89: 99, 90: 227, 100: 227, 101: 227, 103: 227, 110: 227}
_NVIDIA_BLOCK_KIB_LEAST = 99
"""KiB of block memory that one block may ask for. Later cards than those of the table: no less than the smallest."""

SAMPLE: dict[Vendor, tuple[str, ...]] = {
    "nvidia": ("sm_86", "sm_75", "sm_89", "sm_90", "sm_120"),
    "amd": ("gfx1103", "gfx906", "gfx942", "gfx1030", "gfx1100", "gfx1151", "gfx1201"),
}
"""Arches that the compile gate goes through, each vendor's first one always; no limit to what a user's machine has."""


@dataclass(frozen=True)
class Arch:
    """`name` is what compilers are told. `major`, `minor`, `step`: as in the name, `step` 0 for NVIDIA. `warps`: widths
    that its code can be built for, the one that is built first. `block_bytes`: block memory that a block may have."""

    name: str
    vendor: Vendor
    major: int
    minor: int
    step: int
    warps: tuple[int, ...]
    dot4: Dot4
    matrix: Matrix
    block_bytes: int

    @property
    def base(self) -> str:
        """The name without what is switched on."""
        return self.name.partition(":")[0]

    @property
    def number(self) -> int:
        """Of NVIDIA's: 86 of sm_86."""
        return 10 * self.major + self.minor


def arch(name: str) -> Arch:
    """Raises UnknownArch for what is no arch's name, and for cards that are older than the kernels can run on."""
    if match := _NVIDIA.fullmatch(name):
        return _nvidia(name, int(match[1]))
    if match := _AMD.fullmatch(name):
        return _amd(name, int(match[1]), int(match[2], 16), int(match[3], 16))
    if match := _AMD_GROUP.fullmatch(name):
        return _amd(name, int(match[1]), int(match[2] or 0), 0)
    raise UnknownArch(
        f"{name!r} is no arch of a card",
        fix="NVIDIA's are named like sm_86 (compute capability 8.6), AMD's like gfx1103; `nvidia-smi"
        " --query-gpu=compute_cap --format=csv` and `rocminfo` tell a card's",
    )


def of_capability(major: int, minor: int) -> Arch:
    """The arch of a card of NVIDIA's by its compute capability."""
    return arch(f"sm_{major}{minor}")


def _nvidia(name: str, number: int) -> Arch:
    if number < 75:
        raise _too_old(name, "sm_75 (Turing)")
    kib = _NVIDIA_BLOCK_KIB.get(number, _NVIDIA_BLOCK_KIB_LEAST)
    matrix: Matrix = "mma8" if number < 80 else "mma16"
    return Arch(name, "nvidia", number // 10, number % 10, 0, (32,), "dp4a", matrix, kib * 1024)


def _amd(name: str, major: int, minor: int, step: int) -> Arch:
    if major < 9:
        raise _too_old(name, "gfx900 (Vega)")
    number = 256 * major + 16 * minor + step
    warps = (64,) if major == 9 else (32, 64)
    kib = 160 if 0x950 <= number < 0xA00 else 64
    return Arch(name, "amd", major, minor, step, warps, _amd_dot4(number), _amd_matrix(number), kib * 1024)


def _amd_dot4(number: int) -> Dot4:
    if number >= 0xC50:
        return "none"
    if number >= 0xB00:
        return "sudot4"
    if number >= 0xA30 or number in (0xA11, 0xA12):
        return "sdot4"
    return "sdot4" if number in (0x906, 0x908, 0x90A) or 0x940 <= number < 0xA00 else "none"


def _amd_matrix(number: int) -> Matrix:
    if number in (0x908, 0x90A) or 0x940 <= number < 0xA00:
        return "mfma"
    if 0xB00 <= number < 0xC00:
        return "wmma11"
    return "wmma12" if 0xC00 <= number < 0xC50 else "none"


def _too_old(name: str, oldest: str) -> UnknownArch:
    return UnknownArch(
        f"{name} is older than {oldest}, the oldest arch that the kernels are written for",
        fix="leave this card out of --devices, or run on the CPU alone",
    )
