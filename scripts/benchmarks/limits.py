"""The limits of the machine, measured beside what is compared with them: bytes read per second and integer peaks.

`limits.cpp` is compiled once for this CPU into the cache folder. Each of `threads` threads works on its own part of one
anonymous mapping in huge pages where the system gives them (read), or in registers alone (peaks); what is reported is
the median of several short rounds. Percentages in tables are of these figures of the same run, never of a data sheet.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

SOURCE = Path(__file__).with_name("limits.cpp")
FLAGS = ("-std=c++17", "-O3", "-march=native", "-funroll-loops", "-fPIC", "-shared")
READ_BYTES = 1 << 30
"""Far more than any cache."""
ROUND_S = 0.15
ROUNDS = 5
GIGA = 1e9


@dataclass(frozen=True)
class Limits:
    """By all threads together: GB/s of reading DRAM, GB/s of reading again what fits the last cache (`cached_bytes`),
    GOP/s of int16 pairs and of int8 products into int32, a multiplication and an addition counted as two."""

    read_gb_s: float
    int16_gop_s: float
    int8_gop_s: float
    instructions: str


def library(folder: Path) -> ctypes.CDLL:
    """The compiled routines, from `folder` or built into it. Raises RuntimeError where there is no compiler."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        raise RuntimeError("no C++ compiler, which the measurement of the machine's limits needs")
    facts = Path("/proc/cpuinfo")
    flags = [line for line in facts.read_text().splitlines() if line.startswith("flags")][:1] if facts.exists() else []
    digest = hashlib.sha256(SOURCE.read_bytes() + " ".join([*FLAGS, *flags]).encode()).hexdigest()[:16]
    target = folder / f"limits-{digest}.so"
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = target.with_suffix(f".{os.getpid()}")
        subprocess.run([compiler, *FLAGS, str(SOURCE), "-o", str(unfinished)], check=True, timeout=120)
        unfinished.replace(target)
    found = ctypes.CDLL(str(target))
    found.limits_instructions.restype = ctypes.c_char_p
    found.limits_read.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    for kind in ("int16", "int8"):
        getattr(found, f"limits_{kind}_ops").restype = ctypes.c_int64
        getattr(found, f"limits_{kind}").argtypes = [ctypes.c_int64]
    return found


def measure(threads: int, folder: Path) -> Limits:
    """All limits; takes about four seconds."""
    native = library(folder)
    with ThreadPoolExecutor(threads) as pool:
        return Limits(
            read_gb_s=_read(native, pool, threads),
            int16_gop_s=_peak(native, pool, threads, "int16"),
            int8_gop_s=_peak(native, pool, threads, "int8"),
            instructions=native.limits_instructions().decode(),
        )


def _read(native: ctypes.CDLL, pool: ThreadPoolExecutor, threads: int) -> float:
    with mmap.mmap(-1, READ_BYTES) as memory:
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        address = ctypes.addressof(held := ctypes.c_char.from_buffer(memory))
        ctypes.memset(address, 1, READ_BYTES)
        part = READ_BYTES // threads // 4096 * 4096
        seconds = _seconds(pool, threads, lambda thread: native.limits_read(address + thread * part, part))
        del held
    return part * threads / seconds / GIGA


def _peak(native: ctypes.CDLL, pool: ThreadPoolExecutor, threads: int, kind: str) -> float:
    run, ops = getattr(native, f"limits_{kind}"), getattr(native, f"limits_{kind}_ops")()
    taken, tried = 0.0, 1 << 15
    while taken < ROUND_S / 4:
        tried *= 2
        taken = _seconds(pool, 1, partial(_work, run, tried), 1)
    rounds = max(1, int(tried * ROUND_S / taken))
    return float(threads * rounds * ops / _seconds(pool, threads, partial(_work, run, rounds)) / GIGA)


def _work(run: Callable[[int], None], rounds: int, thread: int) -> None:
    run(rounds)


def _seconds(pool: ThreadPoolExecutor, threads: int, work: Callable[[int], None], rounds: int = ROUNDS) -> float:
    """Median time in which all threads did `work(thread)`, over some rounds; one before them warms up."""
    taken = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        list(pool.map(work, range(threads)))
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:] if rounds > 1 else taken)
