"""Pieces of memory that stand one behind the other in a stream: what a flip copies (`backends/host/native/move.cpp`).

payload   rows of the pools          pieces: a page of one head; channels and heads of a state
arena     weights of one layout      pieces: rows and columns of the packed copy, an image, zeros in between
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref, c_uint64
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from backends.cpu import abi
from backends.host.memory import address_of as address_of

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Pieces:
    """`places[i]` is where piece i lies, 0 for zeros; in the stream it ends at `ends[i]`."""

    places: Int64s
    ends: Int64s
    held: npt.NDArray[np.uint8] | None = None
    """Memory of a piece that nobody else has."""

    @classmethod
    def of(cls, places: Int64s, lengths: Int64s) -> Pieces:
        """Pieces whose memory goes on where the one before ends are one."""
        kept = lengths > 0
        places, lengths = places[kept], lengths[kept]
        ends = np.cumsum(lengths, dtype=np.int64)
        if len(places) > 1:
            goes_on = (places[:-1] + lengths[:-1] == places[1:]) & (places[:-1] != 0)
            last = np.append(~goes_on, True)
            first = np.append(True, ~goes_on)
            places, ends = places[first], ends[last]
        return cls(np.ascontiguousarray(places), np.ascontiguousarray(ends))

    @property
    def nbytes(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def pack(self, library: ctypes.CDLL, team: int, stream: int) -> int:
        """Copy the pieces to address `stream`. Returns the stream's digest."""
        digest = c_uint64()
        _check(library.hs_pack(team, byref(self._record()), stream, byref(digest)))
        return digest.value

    def fill(self, library: ctypes.CDLL, team: int, stream: int) -> int:
        """Copy the pieces to address `stream`. Returns the digest of what lies there then, loaded from there: a little
        slower than `pack`, and faster than reading all of it afterwards."""
        digest = c_uint64()
        _check(library.hs_fill(team, byref(self._record()), stream, byref(digest)))
        return digest.value

    def unpack(self, library: ctypes.CDLL, team: int, stream: int) -> None:
        """Copy what stands at address `stream` to the pieces."""
        _check(library.hs_unpack(team, byref(self._record()), stream))

    def spoilt(self) -> Pieces:
        """For a fault of tests: the same bytes, but the first one that lies anywhere has one bit that is another."""
        at = int(np.flatnonzero(self.places)[0])
        before = int(self.ends[at - 1]) if at else 0
        turned = np.ctypeslib.as_array((ctypes.c_uint8 * 1).from_address(int(self.places[at]))) ^ np.uint8(1)
        places = np.insert(self.places, at, turned.ctypes.data)
        places[at + 1] += 1
        return Pieces(places, np.insert(self.ends, at, before + 1), turned)

    def _record(self) -> abi.Pieces:
        return abi.Pieces(self.places.ctypes.data, self.ends.ctypes.data, len(self.ends), 0)


def joined(parts: Sequence[tuple[Int64s, Int64s]]) -> Pieces:
    """Of (places, lengths) one behind the other."""
    if not parts:
        return Pieces(np.zeros(0, np.int64), np.zeros(0, np.int64))
    return Pieces.of(np.concatenate([each[0] for each in parts]), np.concatenate([each[1] for each in parts]))


def _check(code: int) -> None:
    if code != abi.OK:
        raise ValueError(abi.ERRORS[code])
