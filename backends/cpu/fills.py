"""How the arena of a layout is filled from one packed copy of the model.

    copy       whole tensors, packed                       arena of rank 1 of 2, tensor layout
    attn_q     ▒▒▒▒▒▒▒▒▒▒▒▒                                rows of some groups: one piece
    ffn_down   ▒▒▒▒▒▒|▒▒▒▒▒▒   columns of each group       as many pieces as there are groups
    dt_bias    cannot be read from there                   packed by this rank at load, into a side of its own

What stands between two weights, and behind a vector, is filled with zeros: a filled arena has the same bytes whatever
it held before, those of a rank that has the layout alone, and so one digest.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from backends.base import LoadProgress
from backends.cpu.load import load_weights
from backends.cpu.memory import Arena
from backends.cpu.pieces import Int64s, Pieces, joined
from backends.cpu.shared import GROUP_ROWS, SharedWeights
from backends.cpu.stored import MATRIX, STACK, VECTOR, StoredRun, StoredWeight, StoredWeights
from backends.cpu.widths import FLOAT_BYTES
from backends.host.memory import Mapping


class Fill:
    """The pieces of the arena of `weights`. What `together` has no view of is packed here, in a mapping that stays
    (`side`)."""

    def __init__(
        self,
        library: ctypes.CDLL,
        team: int,
        weights: StoredWeights,
        together: SharedWeights,
        progress: LoadProgress,
    ) -> None:
        own, aside = sorted(weights.own, key=lambda stored: stored.offset), Arena()
        found = [together.find(stored.view, stored.form, stored.rows) for stored in own]
        lacking = [at for at, seen in enumerate(found) if seen is None]
        packed = {at: _moved(own[at], aside) for at in lacking}
        self.side = Mapping(library, aside.size, "weights side", f"{len(packed)} tensors that no copy has as they are")
        try:
            aside.place(self.side.address)
            load_weights(library, team, list(packed.values()), progress)
        except BaseException:
            self.side.close()
            raise
        sources = [seen if seen is not None else packed[at] for at, seen in enumerate(found)]
        self.pieces = _pieces(own, sources, weights.arena.size)

    def close(self) -> None:
        self.side.close()


def _moved(stored: StoredWeight, arena: Arena) -> StoredWeight:
    """The same weight in another arena."""
    return replace(stored, arena=arena, runs=(StoredRun(0, stored.view.rows, arena.reserve(stored.size)),))


def _pieces(own: Sequence[StoredWeight], sources: Sequence[StoredWeight], size: int) -> Pieces:
    parts: list[tuple[Int64s, Int64s]] = []
    at = 0
    for stored, source in zip(own, sources, strict=True):
        places, lengths = _places(stored, source)
        length = int(lengths.sum())
        assert stored.offset >= at and length <= stored.size, f"{stored.view.name}: {length} bytes for {stored.size}"
        assert length == stored.size or stored.form == VECTOR, f"{stored.view.name}: {length} bytes of {stored.size}"
        parts += [_zeros(stored.offset - at), (places, lengths)]
        at = stored.offset + length
    return joined([*parts, _zeros(size - at)])


def _zeros(length: int) -> tuple[Int64s, Int64s]:
    return np.zeros(1, np.int64), np.array([length], np.int64)


def _places(stored: StoredWeight, source: StoredWeight) -> tuple[Int64s, Int64s]:
    """(places, lengths) of a weight in the memory of `source`."""
    view = stored.view
    if stored.form == MATRIX:
        parts = [_groups(source, source.arena.address(run.offset), run.count) for run in source.runs]
        return np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])
    if stored.form == STACK and stored.rows is not None:
        places, lengths = _groups(source, source.address, stored.rows.height)
        count = view.rows // stored.rows.pitch
        experts = np.arange(count, dtype=np.int64)[:, None] * source.expert_bytes
        return (experts + places).reshape(-1), np.tile(lengths, count)
    length = view.rows * view.cols * FLOAT_BYTES if stored.form == VECTOR else stored.size
    return np.array([source.address], np.int64), np.array([length], np.int64)


def _groups(source: StoredWeight, address: int, rows: int) -> tuple[Int64s, Int64s]:
    """Groups of 16 rows of a packed matrix, which may be some columns of a wider one."""
    view, count = source.view, -(-rows // GROUP_ROWS)
    each = GROUP_ROWS * view.type.row_bytes(view.cols)
    step = GROUP_ROWS * view.type.row_bytes(source.stored_cols or view.cols)
    return address + np.arange(count, dtype=np.int64) * step, np.full(count, each, np.int64)
