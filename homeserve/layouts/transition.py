"""What a flip moves: from the pipeline layout to the tensor layout, and back.

    KV rows      stage s -> rank r: the layers of s, the live slots that r owns       one layer's K and V of a slot
    states       stage s -> rank r: the linear layers of s, the heads of r            one request's, for each live lane
    weights      image  -> rank r: what r holds in the target layout                  never from rank to rank

A plan is a list of *legs* (source rank, source rows, target rank, target rows). It is a function of the two layouts and
of what is live: every rank makes the same plan, and no plan travels. Order: layers ascending, then slots ascending.

A rank gives to itself what it keeps: that is a leg too (`local`), because it moves between two pools in one memory.
Legs of both directions are the same with source and target exchanged, so `sent` and `received` swap. In unified memory
row = slot and a rank's heads are a range of the one state, in both layouts: each leg's source *is* its target, and the
bytes to move are 0. The legs are the same ones.

Checked by `check_cover`, which a flip asks before a byte moves: every row that is live goes to exactly one place, no
place is written twice, and none lies outside of its pool.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from homeserve.layouts.owner import OwnerRule
from homeserve.layouts.partition import Run
from homeserve.layouts.shards import Piece, Split, TensorForm


class Toward(Enum):
    TENSOR = "tensor"
    PIPELINE = "pipeline"


@dataclass(frozen=True)
class Leg:
    """Rows (of `row_bytes` each) of one pool, from one rank to one rank.

    `pool` names the pool on either side: ("kv", layer), or ("conv", layer, slot) and ("heads", layer, slot) for the
    channels and the heads of one state slot.
    """

    pool: tuple[str | int, ...]
    source: int
    source_rows: Run
    target: int
    target_rows: Run
    row_bytes: int
    in_place: bool = False

    @property
    def moved_bytes(self) -> int:
        return 0 if self.in_place else self.source_rows.size * self.row_bytes

    @property
    def local(self) -> bool:
        return self.source == self.target

    @property
    def turned(self) -> Leg:
        """The same leg of the way back."""
        return Leg(
            self.pool, self.target, self.target_rows, self.source, self.source_rows, self.row_bytes, self.in_place
        )


@dataclass(frozen=True)
class KvLive:
    """One KV group at a flip: `stages[s]` are the attention layers of pipeline rank s that belong to it, `pages` its
    live pages, `row_bytes` a slot's K and V of each layer."""

    stages: tuple[tuple[int, ...], ...]
    pages: tuple[int, ...]
    row_bytes: Mapping[int, int]


@dataclass(frozen=True)
class StateForm:
    """A linear layer's state and who has which part of it in the tensor layout: `channels[r]` of the convolution's
    window and `heads[r]` are runs of the full-width state, packed on rank r one behind the other. A state without
    heads has none on any rank."""

    channels: tuple[tuple[Run, ...], ...]
    heads: tuple[tuple[Run, ...], ...]
    channel_bytes: int
    head_bytes: int


def kv_legs(live: KvLive, rule: OwnerRule, toward: Toward, *, unified: bool = False) -> tuple[Leg, ...]:
    """Of one KV group."""
    stretches = rule.stretches(live.pages)
    stage_of = {layer: stage for stage, layers in enumerate(live.stages) for layer in layers}
    found = [
        Leg(
            ("kv", layer),
            stage_of[layer],
            each.slots,
            each.rank,
            each.slots if unified else each.rows,
            live.row_bytes[layer],
            unified,
        )
        for layer in sorted(stage_of)
        for each in stretches
    ]
    return _directed(found, toward)


def state_legs(
    stages: Sequence[Sequence[int]],
    forms: Mapping[int, StateForm],
    slots: Iterable[int],
    toward: Toward,
    *,
    unified: bool = False,
) -> tuple[Leg, ...]:
    """Of the linear layers `stages[s]` of each pipeline rank, for the live state slots (requests and checkpoints)."""
    stage_of = {layer: stage for stage, layers in enumerate(stages) for layer in layers}
    live, found = sorted(set(slots)), []
    for layer in sorted(stage_of):
        form = forms[layer]
        for slot in live:
            for kind, runs, size in (
                ("conv", form.channels, form.channel_bytes),
                ("heads", form.heads, form.head_bytes),
            ):
                for rank, own in enumerate(runs):
                    for run, packed in _packed(own):
                        to = run if unified else packed
                        found.append(Leg((kind, layer, slot), stage_of[layer], run, rank, to, size, unified))
    return _directed(found, toward)


def _packed(runs: Iterable[Run]) -> Iterable[tuple[Run, Run]]:
    """Each run that is not empty, and where it lies when they lie one behind the other."""
    first = 0
    for run in runs:
        if run.size:
            yield run, Run(first, first + run.size)
            first += run.size


def _directed(legs: Iterable[Leg], toward: Toward) -> tuple[Leg, ...]:
    return tuple(legs if toward is Toward.TENSOR else (leg.turned for leg in legs))


# ------------------------------------------------------------------------------------------------------------- weights


@dataclass(frozen=True)
class Fill:
    """A strided copy from the host's image of a tensor into a rank's arena: `rows` of the tensor, of each the bytes
    [first, first + length), to `offset` + i * `pitch` of the rank's shard of it."""

    rank: int
    tensor: str
    rows: Run
    first: int
    length: int
    offset: int
    pitch: int

    @property
    def nbytes(self) -> int:
        return self.rows.size * self.length


def tensor_fills(tensor: str, form: TensorForm, split: Split) -> tuple[Fill, ...]:
    """How each rank's shard of a tensor is filled for the tensor layout: pieces one behind the other."""
    found: list[Fill] = []
    for rank, pieces in enumerate(split):
        offset = 0
        for piece in pieces:
            found += _piece_fills(rank, tensor, form, piece, offset)
            offset += piece.nbytes(form)
    return tuple(found)


def whole_fill(tensor: str, form: TensorForm, rank: int) -> Fill:
    """The pipeline layout holds a tensor whole, on the rank of its layer."""
    length = form.row_bytes(form.cols)
    return Fill(rank, tensor, Run(0, form.rows), 0, length, 0, length)


def _piece_fills(rank: int, tensor: str, form: TensorForm, piece: Piece, offset: int) -> Iterable[Fill]:
    pitch = piece.nbytes(form) // piece.height
    top = offset
    for rows in piece.rows:
        left = top
        for cols in piece.cols:
            first, end = form.row_bytes(cols.first), form.row_bytes(cols.end)
            yield Fill(rank, tensor, rows, first, end - first, left, pitch)
            left += end - first
        top += rows.size * pitch


# -------------------------------------------------------------------------------------------------------------- totals


@dataclass(frozen=True)
class Totals:
    """Bytes of a plan. Sum of `sent` = sum of `received`; with `local`, all that is live."""

    sent: tuple[int, ...]
    received: tuple[int, ...]
    local: int

    @property
    def total(self) -> int:
        return sum(self.sent) + self.local


def totals(legs: Iterable[Leg], ranks: int) -> Totals:
    sent, received, local = [0] * ranks, [0] * ranks, 0
    for leg in legs:
        if leg.local:
            local += leg.moved_bytes
        else:
            sent[leg.source] += leg.moved_bytes
            received[leg.target] += leg.moved_bytes
    return Totals(tuple(sent), tuple(received), local)


def check_cover(
    legs: Iterable[Leg], live: Mapping[tuple[str | int, ...], int], limits: Mapping[int, int] | None
) -> None:
    """Raises ValueError where the legs of a pool do not carry its `live` rows exactly once each, where two of them
    write one row, or (with `limits`, rows of each rank's KV pool) where one ends outside of its pool."""
    reads: dict[tuple[tuple[str | int, ...], int], list[Run]] = {}
    writes: dict[tuple[tuple[str | int, ...], int], list[Run]] = {}
    carried = dict.fromkeys(live, 0)
    for leg in legs:
        if leg.source_rows.size != leg.target_rows.size:
            raise ValueError(f"{leg}: {leg.source_rows.size} rows to {leg.target_rows.size}")
        reads.setdefault((leg.pool, leg.source), []).append(leg.source_rows)
        writes.setdefault((leg.pool, leg.target), []).append(leg.target_rows)
        carried[leg.pool] = carried.get(leg.pool, 0) + leg.source_rows.size
        if limits is not None and leg.target_rows.end > limits[leg.target]:
            raise ValueError(
                f"{leg.pool}: rank {leg.target} has {limits[leg.target]} rows, needed {leg.target_rows.end}"
            )
    for what, sides in (("read", reads), ("written", writes)):
        for (pool, rank), runs in sides.items():
            ordered = sorted(runs)
            for before, after in zip(ordered, ordered[1:], strict=False):
                if after.first < before.end:
                    raise ValueError(f"{pool}: row {after.first} of rank {rank} is {what} twice")
    for pool, rows in carried.items():
        if rows != live.get(pool):
            raise ValueError(f"{pool}: {live.get(pool, 0)} rows are live and {rows} move")
