"""Which native libraries were built, seen from the engine process: their files, never their contents."""

from __future__ import annotations

from pathlib import Path

import backends
from budget.facts import ISA_LEVELS, CpuFacts
from homeserve.errors import SettingError

COMPILER = "a C++ compiler is needed (Debian, Ubuntu: apt install g++)"


def build_fix() -> str:
    """How the libraries come to be: by an installation, or in place where homeserve runs from its source tree."""
    root = kernel_folder().parents[2]
    if not (root / "CMakeLists.txt").is_file():
        return f"install homeserve again; {COMPILER}"
    build = root / "build" / "native"
    return (
        f"this is a source tree that was not built: install it (pip install {root}), or build it in place: cmake"
        f" -S {root} -B {build} && cmake --build {build} && cmake --install {build} --prefix {root}; {COMPILER}"
    )


def kernel_folder() -> Path:
    """Where the build puts the native CPU libraries. The backend itself is the worker's to import."""
    return Path(backends.__file__ or "").parent / "cpu" / "lib"


def kernel_levels() -> tuple[str, ...]:
    """The levels that were built, the best first."""
    found = {path.stem for path in kernel_folder().glob("libhomeserve_cpu_*")}
    return tuple(level for level in ISA_LEVELS if f"libhomeserve_cpu_{level}" in found)


def host_library() -> Path:
    """What every backend uses of host memory: exchanges, copies, digests."""
    return Path(backends.__file__ or "").parent / "host" / "lib" / "libhomeserve_host.so"


def check_host_library() -> None:
    """Raises SettingError where it was not built."""
    if not host_library().is_file():
        raise SettingError(f"no native library {host_library()}", field="backend", fix=build_fix())


def check_kernels(isa: str | None, cpu: CpuFacts) -> None:
    """Raises SettingError where no level was built, or the one that was asked for cannot be had here."""
    there = kernel_levels()
    if not there:
        raise SettingError(f"no native CPU library in {kernel_folder()}", field="backend", fix=build_fix())
    usable = [level for level in there if level in cpu.levels]
    if isa is not None and isa not in usable:
        why = "this CPU cannot run it" if isa in there else "it was not built"
        raise SettingError(f"--isa {isa}: {why}", field="isa", fix=f"leave it out, or use {' or '.join(usable)}")
