"""SentencePiece's table of character replacements, checked before a library that trusts it walks through it.

    length u32 | double array: u32 each | replacements: UTF-8, each ended by a zero byte

The double array is a trie over bytes (Shunsuke Kanda, "Space- and time-efficient string dictionaries", 2018). From
the unit at `at` the walk goes to `at ^ offset(unit)`, then for a byte `c` to that `^ c`, where the unit must carry the
label `c`. A unit with the leaf bit has, at `at ^ offset`, a unit that holds the place of a replacement.

A hostile table leads out of the array, or into the middle of a code point. So everything that can be reached is walked
once, level by level; the work is bounded by the units that there are.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

CHARSMAP_BYTES_MAX = 1 << 20
"""Four times the largest table that is in use."""
DEPTH_MAX = 256
"""Bytes of the longest text that a table replaces: bounds the walk where a hostile table leads in a circle."""
_LEAF = np.uint32(1 << 8)
_LABEL = np.uint32(1 << 31 | 0xFF)
_Units = npt.NDArray[np.uint32]


def charsmap_flaw(raw: bytes) -> str | None:
    """What is wrong with the table, None for a sound one."""
    if len(raw) < 4:
        return "is shorter than its own length"
    length = int.from_bytes(raw[:4], "little")
    if length % 4 or not 1024 <= length <= len(raw) - 4:
        return f"promises a double array of {length} bytes in {len(raw)} bytes"
    units = np.frombuffer(raw, "<u4", length // 4, 4).astype(np.uint32)
    replacements = raw[4 + length :]
    try:
        replacements.decode("utf-8")
    except UnicodeDecodeError as error:
        return f"has replacements that are no UTF-8 text ({error.reason})"
    return _walk(units, replacements)


def _walk(units: _Units, replacements: bytes) -> str | None:
    seen = np.zeros(len(units), bool)
    frontier = np.zeros(1, np.uint32)
    labels = np.arange(1, 256, dtype=np.uint32)
    for _ in range(DEPTH_MAX):
        if not len(frontier):
            return None
        bases = frontier ^ _offset(units[frontier])
        if int((bases | np.uint32(0xFF)).max()) >= len(units):
            return "leads out of its double array"
        leaves = (units[frontier] & _LEAF) != 0
        leaves[frontier == 0] = False
        flaw = _places_flaw(units[bases[leaves]] & np.uint32((1 << 31) - 1), replacements)
        if flaw:
            return flaw
        children = bases[:, None] ^ labels
        found = np.unique(children[(units[children] & _LABEL) == labels])
        frontier = found[~seen[found]]
        seen[frontier] = True
    return f"replaces texts of more than {DEPTH_MAX} bytes"


def _offset(units: _Units) -> _Units:
    """10 bits of flags, then the offset, in steps of 256 where bit 9 is set."""
    shifted: _Units = (units >> np.uint32(10)) << ((units & np.uint32(1 << 9)) >> np.uint32(6))
    return shifted


def _places_flaw(places: _Units, replacements: bytes) -> str | None:
    if not len(places):
        return None
    if int(places.max()) >= len(replacements) or replacements[-1]:
        return "names a replacement past its end"
    first = np.frombuffer(replacements, np.uint8)[places]
    return "names a replacement that begins inside a character" if ((first & 0xC0) == 0x80).any() else None
