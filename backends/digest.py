"""The digest of what a flip moves, in NumPy: 64 bits that see where a byte stands.

A sum of bytes cannot tell rows that changed places; this one can (`backends/host/native/move.cpp` draws it, and is the
same in native code). Bytes are taken in bounded pieces, so that a digest of gigabytes needs megabytes.

    block    16 KiB of the stream, in stripes of 8 words of 64 bits; the last stripe is filled up with zeros
    sum[j]   over stripes s of a block: low(x) * high(x) + w, where x = w ^ (KEYS[j] + s * STEP)
    digest   mix(sum over blocks b and j of mix(sum[j] + (8 b + j + 1) * GOLDEN), xor bytes * STEP)

All arithmetic is modulo 2^64. It finds faults, not forgers.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

BLOCK = 16384
WORDS = 8
MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
STEP = 0xD1342543DE82EF95
KEYS = (
    0x243F6A8885A308D3,
    0x13198A2E03707344,
    0xA4093822299F31D0,
    0x082EFA98EC4E6C89,
    0x452821E638D01377,
    0xBE5466CF34E90C6C,
    0xC0AC29B7C97C50DD,
    0x3F84D5B5B5470917,
)
BLOCKS_AT_ONCE = 64

Words = npt.NDArray[np.uint64]


def digest(data: memoryview | bytes | bytearray) -> int:
    """Of contiguous bytes."""
    stream = np.frombuffer(data, np.uint8)
    total = 0
    step = BLOCK * BLOCKS_AT_ONCE
    for first in range(0, len(stream), step):
        part = stream[first : first + step]
        whole = len(part) // BLOCK * BLOCK
        if whole:
            total += _blocks(part[:whole].view(np.uint64).reshape(-1, BLOCK // 8 // WORDS, WORDS), first // BLOCK)
        if whole < len(part):
            last = np.zeros(-(-(len(part) - whole) // 64) * 64, np.uint8)
            last[: len(part) - whole] = part[whole:]
            total += _blocks(last.view(np.uint64).reshape(1, -1, WORDS), (first + whole) // BLOCK)
    return _mixed_int((total & MASK) ^ (len(stream) * STEP & MASK))


def _blocks(words: Words, first: int) -> int:
    """`words` [blocks, stripes, 8], the blocks from number `first` on."""
    blocks, stripes, _ = words.shape
    keys = np.array(KEYS, np.uint64) + np.arange(stripes, dtype=np.uint64)[:, None] * np.uint64(STEP)
    turned = words ^ keys
    terms = (turned & np.uint64(0xFFFFFFFF)) * (turned >> np.uint64(32)) + words
    places = np.arange(first * WORDS + 1, (first + blocks) * WORDS + 1, dtype=np.uint64).reshape(blocks, WORDS)
    sums = terms.sum(axis=1, dtype=np.uint64) + places * np.uint64(GOLDEN)
    return int(_mixed(sums).sum(dtype=np.uint64))


def _mixed(x: Words) -> Words:
    x = x ^ (x >> np.uint64(33))
    x = x * np.uint64(0xFF51AFD7ED558CCD)
    x = x ^ (x >> np.uint64(33))
    x = x * np.uint64(0xC4CEB9FE1A85EC53)
    return x ^ (x >> np.uint64(33))


def _mixed_int(x: int) -> int:
    return int(_mixed(np.array([x], np.uint64))[0])
