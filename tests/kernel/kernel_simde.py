"""The AVX-512 levels built against SIMDe, so that a machine without AVX-512 proves their arithmetic too.

The source is the product's, every line of it; only the intrinsics come from `simde/intrinsics.h`. Loops are kept as
loops (HS_KEEP_LOOPS): unrolled, SIMDe takes minutes to compile. Libraries are cached by the content of all they are
made of.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NATIVE = ROOT / "backends" / "cpu" / "native"
HOST = ROOT / "backends" / "host" / "native"
SHIM = Path(__file__).parent / "simde"
CACHE = ROOT / "build" / "simde"

LEVELS = ("avx512", "avx512vnni")
TIMEOUT_S = 600
FLAGS = (
    *("-std=c++17", "-O1", "-fPIC", "-shared", "-pthread", "-ffp-contract=off", "-fno-math-errno", "-Wno-psabi"),
    *("-mavx2", "-mfma", "-mf16c", "-DHS_KEEP_LOOPS"),
)


def compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "c++"))


def why_not() -> str:
    """Why the levels cannot be built here; empty where they can."""
    found = compiler()
    if found is None:
        return "no C++ compiler"
    probe = subprocess.run(
        [found, "-x", "c++", "-E", "-", "-o", os.devnull],
        input=b"#include <simde/x86/avx512.h>\n",
        capture_output=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    return "" if probe.returncode == 0 else "no SIMDe headers (Debian, Ubuntu: apt install libsimde-dev)"


@cache
def libraries() -> dict[str, Path]:
    """Level -> library. Builds what the cache lacks, both at once. Raises CalledProcessError where that fails."""
    with ThreadPoolExecutor() as pool:
        return dict(zip(LEVELS, pool.map(_build, LEVELS), strict=True))


def _build(level: str) -> Path:
    digest = hashlib.sha256(" ".join(FLAGS).encode())
    for source in sorted([*NATIVE.iterdir(), *HOST.iterdir(), *SHIM.iterdir()]):
        digest.update(source.name.encode() + source.read_bytes())
    target = CACHE / f"{level}-{digest.hexdigest()[:16]}.so"
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f"{level}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of several test processes one builds, the others wait for it
        if not target.exists():
            _compile(level, target)
    return target


def _compile(level: str, target: Path) -> None:
    unfinished = target.with_suffix(f".{os.getpid()}")
    subprocess.run(
        [
            compiler() or "c++",
            *FLAGS,
            f"-DHS_LEVEL_IS_{level.upper()}",
            f'-DHS_INTRINSICS_HEADER="{SHIM / "intrinsics.h"}"',
            f"-I{NATIVE}",
            f"-I{HOST}",
            str(SHIM / "all.cpp"),
            "-o",
            str(unfinished),
        ],
        check=True,
        timeout=TIMEOUT_S,
    )
    unfinished.replace(target)
