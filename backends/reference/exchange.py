"""What the oracle exchanges with other ranks: each op's matrix through a `Collective`, in the backend's dtype.

A collective moves float32. In double precision the bits of a number travel as two floats, so nothing is rounded on the
way: gathers and messages move them as they are, and a sum is a gather whose parts are added here, in the order of the
ranks, as a collective adds floats. Everything is then twice as wide on the wire: messages need that much more room.

    op               on the wire
    SumRows          a sum of the buffer
    GatherRows       one gather: a rank's parts side by side, in the order of `parts`
    MergeAttention   one gather of the whole partial result; each rank merges its own heads out of it
    SendRows         one message: the rows of its buffers side by side

Without rows nothing is exchanged: all ranks of a plan have the same rows, so all of them pass it over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

import numpy as np

from backends.base import Buffer, Collective, GatherRows, MergeAttention, ReceiveRows, SendRows, Stamp, SumRows
from backends.reference.compute import Array, merge_parts, sigmoid


class Exchanges:
    """A rank's collective for matrices of `dtype`. All matrices are `[stamp.rows, width]`."""

    def __init__(self, collective: Collective, dtype: np.dtype[np.floating]) -> None:
        self.rank = collective.rank
        self.ranks = collective.ranks
        self._collective = collective
        self._dtype = dtype
        self._floats = dtype.itemsize // 4

    def sum(self, stamp: Stamp, own: Array) -> Array:
        if self._floats == 1:
            total = own.astype(np.float32)
            if stamp.rows:
                self._collective.sum(stamp, total)
            return total
        every = self.gather(stamp, own, (own.shape[1],) * self.ranks)
        parts = np.split(every, self.ranks, axis=1)
        total = parts[0].copy()
        for part in parts[1:]:
            total += part
        return total

    def gather(self, stamp: Stamp, own: Array, widths: Sequence[int]) -> Array:
        """The parts of all ranks side by side; that of rank r is `widths[r]` wide."""
        out = np.empty((stamp.rows, sum(widths)), self._dtype)
        if stamp.rows:
            self._collective.gather(stamp, _wire(own), _wire(out), [self._floats * width for width in widths])
        return out

    def send(self, stamp: Stamp, target: int, rows: Array) -> None:
        if stamp.rows:
            self._collective.send(stamp, target, _wire(rows))

    def receive(self, stamp: Stamp, source: int, width: int) -> Array:
        out = np.empty((stamp.rows, width), self._dtype)
        if stamp.rows:
            self._collective.receive(stamp, source, _wire(out))
        return out


def sum_rows(op: SumRows, acts: Exchanges, stamp: Stamp, buffers: Mapping[str, Array]) -> dict[str, Array]:
    return {op.buffer.name: acts.sum(stamp, buffers[op.buffer.name])}


def gather_rows(op: GatherRows, acts: Exchanges, stamp: Stamp, buffers: Mapping[str, Array]) -> dict[str, Array]:
    """Every part's `out`; nothing on a rank that is not the target, which takes part all the same."""
    own = np.concatenate([_rows_of(part.src, stamp.rows, buffers) for part in op.parts], axis=1)
    widths = [sum(part.widths[rank] for part in op.parts) for rank in range(acts.ranks)]
    every = np.split(acts.gather(stamp, own, widths), _ends(widths), axis=1)
    if op.target not in (None, acts.rank):
        return {}
    pieces = [
        np.split(every[rank], _ends([part.widths[rank] for part in op.parts]), axis=1) for rank in range(acts.ranks)
    ]
    return {
        part.out.name: np.concatenate([of_rank[at] for of_rank in pieces], axis=1) for at, part in enumerate(op.parts)
    }


def merge_attention(
    op: MergeAttention, acts: Exchanges, stamp: Stamp, buffers: Mapping[str, Array], sinks: Array | None
) -> dict[str, Array]:
    width = op.heads * (op.head_dim + 1)
    every = acts.gather(stamp, buffers[op.src.name], (width,) * acts.ranks).reshape(stamp.rows, acts.ranks, width)
    own = slice(op.first, op.first + op.own)
    outs = every[..., : op.heads * op.head_dim].reshape(stamp.rows, acts.ranks, op.heads, op.head_dim)[:, :, own]
    lses = every[..., op.heads * op.head_dim :][:, :, own]
    merged = merge_parts(outs, lses, sinks)
    if op.gate is not None:
        gates = _rows_of(op.gate, stamp.rows, buffers).reshape(stamp.rows, op.own, 2 * op.head_dim)
        merged = merged * sigmoid(gates[..., op.head_dim :])
    return {op.out.name: merged.reshape(stamp.rows, op.own * op.head_dim)}


def send_rows(op: SendRows, acts: Exchanges, stamp: Stamp, buffers: Mapping[str, Array]) -> dict[str, Array]:
    acts.send(stamp, op.target, np.concatenate([buffers[buffer.name] for buffer in op.buffers], axis=1))
    return {}


def receive_rows(op: ReceiveRows, acts: Exchanges, stamp: Stamp) -> dict[str, Array]:
    widths = [buffer.width for buffer in op.buffers]
    parts = np.split(acts.receive(stamp, op.source, sum(widths)), _ends(widths), axis=1)
    return {buffer.name: part.copy() for buffer, part in zip(op.buffers, parts, strict=True)}


def _rows_of(buffer: Buffer, rows: int, buffers: Mapping[str, Array]) -> Array:
    """A buffer's rows. One of width 0 is never written by anyone."""
    return buffers[buffer.name] if buffer.width else np.empty((rows, 0), next(iter(buffers.values())).dtype)


def _ends(widths: Sequence[int]) -> list[int]:
    """Where to split columns of `widths` that lie side by side."""
    return list(accumulate(widths))[:-1]


def _wire(matrix: Array) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    """The same memory as float32, or a copy where rows are not in one piece (then only to be read)."""
    floats = np.ascontiguousarray(matrix).view(np.float32)
    return floats.reshape(len(matrix), -1) if matrix.size else np.empty((len(matrix), 0), np.float32)
