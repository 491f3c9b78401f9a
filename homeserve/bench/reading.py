"""How fast this machine reads its memory: what bounds the decode of one stream on the CPU.

A token reads every weight once, so a decode cannot give more tokens per second than this over the model's bytes. It is
measured with NumPy's largest-of-all, which reads each word once and has vector code for every CPU; scripts/bench has a
kernel of its own for that (limits.cpp), which needs a compiler.
"""

from __future__ import annotations

import statistics
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

MIB = 1 << 20
MOST_BYTES, LEAST_BYTES = 512 * MIB, 128 * MIB
"""Far more than most caches hold; with less room than the least, nothing is said."""
SHARE = 4
"""At most this part of what is free is taken for it."""
ROUNDS = 7


def size_for(free_bytes: int) -> int | None:
    """Bytes to read; None where there is no room for a figure that means something."""
    size = min(MOST_BYTES, free_bytes // SHARE)
    return size if size >= LEAST_BYTES else None


def read_gb_s(threads: int, size: int) -> float:
    """By all threads together, each its own part: the median of some rounds."""
    words = size // threads // 4
    with ThreadPoolExecutor(threads) as pool:
        # Each thread touches its part first, so that it lies near it.
        parts = list(pool.map(lambda _: np.ones(words, np.int32), range(threads)))
        _round(pool, parts)
        taken = [_round(pool, parts) for _ in range(ROUNDS)]
    return 4 * words * threads / statistics.median(taken) / 1e9


def _round(pool: ThreadPoolExecutor, parts: list[npt.NDArray[np.int32]]) -> float:
    began = time.perf_counter()
    list(pool.map(np.max, parts))
    return time.perf_counter() - began
