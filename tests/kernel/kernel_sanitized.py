"""The native library under AddressSanitizer and UndefinedBehaviorSanitizer, and the gaps that make the first one see.

All memory of a program comes from a few large mappings, which AddressSanitizer knows nothing about: a write past the
end of a buffer would land in the next buffer unseen. So in a sanitized run every reservation of an arena (each
weight, each buffer, each scratch) is followed by a gap that is poisoned once the arena has its place: whoever touches
it is reported with the line. Buffers that Python hands in come from `malloc`, which the sanitizer replaces, with gaps
of its own.

A library is compiled file by file with little optimisation, for the best level below AVX-512 of this architecture;
what a test plants is a file of its own in front of `hs_run`. Objects and libraries are cached by their content. Tests
see the library through HOMESERVE_KERNEL_LIBRARY (kernel_rig.py) in a Python that has the sanitizer's runtime loaded
first.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import kernel_simde as simde

from backends.cpu.memory import Arena
from backends.host.memory import Mapping

CACHE = simde.ROOT / "build" / "sanitized"
LIBRARY = "HOMESERVE_KERNEL_LIBRARY"
GAP = 128
X86 = platform.machine() in ("x86_64", "AMD64", "amd64")
LEVEL = "avx2" if X86 else "baseline"
FLAGS = (
    *("-std=c++17", "-O1", "-g1", "-fPIC", "-pthread", "-ffp-contract=off", "-fno-math-errno", "-Wno-psabi"),
    *("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer"),
    *(("-mavx2", "-mfma", "-mf16c") if X86 else ()),
    *(f"-I{simde.NATIVE}", f"-I{simde.HOST}"),
    *("-DHS_KEEP_LOOPS", f"-DHS_LEVEL_IS_{LEVEL.upper()}", "-Dhs_run=hs_run_inner"),
)
PLAIN = """
int32_t hs_run(hs_team *team, const hs_program *program, hs_batch *batch) {
    return hs_run_inner(team, program, batch);
}
"""
WRITE_PAST_THE_END = """
int32_t hs_run(hs_team *team, const hs_program *program, hs_batch *batch) {
    const int32_t code = hs_run_inner(team, program, batch);
    const hs_step *last = program->steps + program->step_count - 1;
    last->dst[program->max_rows * last->dst_stride] = 1.0f;
    return code;
}
"""
SUM_THAT_OVERFLOWS = """
int32_t hs_run(hs_team *team, const hs_program *program, hs_batch *batch) {
    volatile int32_t largest = INT32_MAX;
    return hs_run_inner(team, program, batch) + (largest + batch->rows < 0);
}
"""
HEAD = '#include "hs_cpu.h"\n#undef hs_run\nextern "C" '


def library(entry: str = PLAIN) -> Path:
    """The sanitized library behind this `hs_run`. Raises CalledProcessError where it does not compile."""
    CACHE.mkdir(parents=True, exist_ok=True)
    sources = sorted([*simde.NATIVE.glob("*.cpp"), *simde.HOST.glob("*.cpp")])
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(_object, sources))
    front = CACHE / f"front-{_digest(entry.encode())}.cpp"
    front.write_text(HEAD + entry.strip() + "\n")
    objects.append(_object(front))
    target = CACHE / f"{_digest(*(each.name.encode() for each in objects))}.so"
    if not target.exists():
        _compile(target, "-shared", "-fsanitize=address,undefined", "-pthread", *map(str, objects))
    return target


def _object(source: Path) -> Path:
    headers = sorted([*simde.NATIVE.glob("*.h"), *simde.HOST.glob("*.h")])
    target = CACHE / f"{source.stem}-{_digest(*(each.read_bytes() for each in (source, *headers)))}.o"
    if not target.exists():
        _compile(target, *FLAGS, "-c", str(source))
    return target


def _digest(*parts: bytes) -> str:
    total = hashlib.sha256(" ".join(FLAGS).encode())
    for part in parts:
        total.update(hashlib.sha256(part).digest())
    return total.hexdigest()[:16]


def _compile(target: Path, *arguments: str) -> None:
    unfinished = target.with_suffix(f".{os.getpid()}")
    command = [simde.compiler() or "c++", *arguments, "-o", str(unfinished)]
    subprocess.run(command, check=True, timeout=simde.TIMEOUT_S)
    unfinished.replace(target)


def why_not() -> str:
    """Why there can be no sanitized run; empty where there can."""
    compiler = simde.compiler()
    if compiler is None:
        return "no C++ compiler"
    return "" if _runtime().is_file() else "the compiler has no AddressSanitizer runtime"


def _runtime() -> Path:
    found = subprocess.run(
        [simde.compiler() or "c++", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
    )
    return Path(found.stdout.strip()).resolve()


def pytest_run(found: Path, *arguments: str, timeout_s: float = 900) -> subprocess.CompletedProcess[str]:
    """pytest over these tests with that library, its output not captured: a sanitizer reports as the process ends.
    Leaks are not looked for: Python itself has some."""
    environment = os.environ | {
        LIBRARY: str(found),
        "LD_PRELOAD": str(_runtime()),
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    environment.pop("HOMESERVE_TEST_REPORT", None)
    pytest = shutil.which("pytest", path=str(Path(sys.executable).parent)) or "pytest"
    command = [pytest, "-q", "-s", "-p", "no:cacheprovider", "--tb=short", *arguments]
    return subprocess.run(
        command, cwd=simde.ROOT, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
    )


def open_gaps() -> None:
    """From here on arenas have poisoned gaps. Only where the runtime is loaded. Raises AttributeError elsewhere."""
    runtime = ctypes.CDLL(None)
    poison, heal = runtime.__asan_poison_memory_region, runtime.__asan_unpoison_memory_region
    for call in (poison, heal):
        call.argtypes, call.restype = [ctypes.c_void_p, ctypes.c_size_t], None
    reserve, place, close = Arena.reserve, Arena.place, Mapping.close

    def reserve_with_gap(self: Arena, size: int) -> int:
        offset = reserve(self, size)
        _gaps(self).append((self.size, GAP))
        reserve(self, GAP)
        return offset

    def place_and_poison(self: Arena, base: int) -> None:
        place(self, base)
        for offset, size in _gaps(self):
            poison(base + offset, size)

    def heal_and_close(self: Mapping) -> None:
        if self.address:
            heal(self.address, max(self.size, 1))
        close(self)

    Arena.reserve = reserve_with_gap  # type: ignore[method-assign]
    Arena.place = place_and_poison  # type: ignore[method-assign]
    Mapping.close = heal_and_close  # type: ignore[method-assign]


def _gaps(arena: Arena) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = arena.__dict__.setdefault("gaps", [])
    return found
