"""One attention layer, undivided and divided over ranks: random geometry, ownership and plans, for every backend.

Queries, keys and values of token t come from row t of tables (`EmbedRows`), so every rank has the same ones. In the
divided form a rank keeps the rows that the owner rule of the token vector gives it, attends to those alone, merges its
own query heads (there may be none) and gathers those of all: the last buffer, `out`, is on every rank that of the whole
layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from backends.base import (
    PAGE_LEN,
    Attention,
    Backend,
    Batch,
    Buffer,
    Collective,
    EmbedRows,
    GatherPart,
    GatherRows,
    KvLayer,
    KvPool,
    Limits,
    MergeAttention,
    Op,
    Program,
    Rope,
    RopeStore,
    SelectRows,
    TensorView,
    Weight,
)
from backends.quant import QuantType
from homeserve.layouts.owner import GroupRows, OwnerRule

VECTORS = ((1, 1), (2, 1, 1), (30, 17, 17), (28, 26, 20), (1, 3), (3, 1, 1, 1), (1,))
POOL_PAGES = 80
LANE_PAGES = 4
CHUNK = 16
ROPE = Rope(interleaved=False, frequencies=(1.0, 0.3, 0.09, 0.027))
Values = npt.NDArray[Any]
Piece = tuple[int, int, int]
"""Lane, first position, end."""


@dataclass(frozen=True)
class Case:
    """`own[r]` query heads are rank r's; `pages[lane]` are global; `plans` are pieces of sequences, in order."""

    seed: int
    vector: tuple[int, ...]
    own: tuple[int, ...]
    kv_heads: int
    head_dim: int
    window: int
    softcap: float
    sinks: bool
    gated: bool
    lengths: tuple[int, ...]
    pages: tuple[tuple[int, ...], ...]
    plans: tuple[tuple[Piece, ...], ...]

    @property
    def ranks(self) -> int:
        return len(self.vector)

    @property
    def heads(self) -> int:
        return sum(self.own)

    @property
    def q_step(self) -> int:
        return (2 if self.gated else 1) * self.head_dim

    @property
    def rows_kept(self) -> GroupRows:
        return GroupRows(POOL_PAGES * PAGE_LEN, OwnerRule.of(self.vector))

    def owners(self, lane: int) -> set[int]:
        """The ranks that keep a row of a lane's sequence."""
        used = self.pages[lane][: -(-self.lengths[lane] // PAGE_LEN)]
        return {self.rows_kept.rule.place(page * PAGE_LEN)[0] for page in used}


def random_case(seed: int, head_dims: Sequence[int] = (16, 32)) -> Case:
    random = np.random.default_rng(seed)
    vector = VECTORS[seed % len(VECTORS)]
    kv_heads = int(random.integers(1, 4))
    heads = kv_heads * int(random.integers(1, 4))
    lengths = tuple(int(length) for length in random.integers(1, LANE_PAGES * PAGE_LEN, 3))
    pages = random.permutation(POOL_PAGES) if random.random() < 0.7 else np.arange(POOL_PAGES)
    return Case(
        seed=seed,
        vector=vector,
        own=tuple(int(own) for own in random.multinomial(heads, random.dirichlet(np.ones(len(vector))))),
        kv_heads=kv_heads,
        head_dim=int(random.choice(list(head_dims))),
        window=int(random.choice([0, 0, 5, 20])),
        softcap=float(random.choice([0.0, 3.0])),
        sinks=bool(random.random() < 0.5),
        gated=bool(random.random() < 0.5),
        lengths=lengths,
        pages=tuple(tuple(map(int, pages[lane * LANE_PAGES : (lane + 1) * LANE_PAGES])) for lane in range(3)),
        plans=tuple(_plans(random, lengths)),
    )


def _plans(random: np.random.Generator, lengths: Sequence[int]) -> Iterator[tuple[Piece, ...]]:
    """Chunks of all sequences, each from where the last one ended, until nothing is left."""
    at = [0] * len(lengths)
    while any(done < length for done, length in zip(at, lengths, strict=True)):
        plan = []
        for lane, length in enumerate(lengths):
            if at[lane] < length and random.random() < 0.7:
                end = min(length, at[lane] + int(random.integers(1, CHUNK + 1)))
                plan.append((lane, at[lane], end))
                at[lane] = end
        if plan:
            yield tuple(plan)


def weights_of(case: Case, kind: QuantType) -> dict[str, Values]:
    """The tables `[tokens, width]` and sinks, of F32 or F64."""
    random = np.random.default_rng(case.seed)
    tokens = len(case.lengths) * LANE_PAGES * PAGE_LEN
    widths = {"q": case.heads * case.q_step, "k": case.kv_heads * case.head_dim, "v": case.kv_heads * case.head_dim}
    dtype = np.float64 if kind is QuantType.F64 else np.float32
    made: dict[str, Values] = {
        name: random.standard_normal((tokens, width)).astype(dtype) for name, width in widths.items()
    }
    return made | {"sinks": 2 * random.standard_normal((1, case.heads)).astype(dtype)}


def bind_whole(case: Case, device: Backend, kind: QuantType = QuantType.F32) -> Program:
    """The undivided layer."""
    weights = weights_of(case, kind)
    out = Buffer("attended", case.heads * case.head_dim)
    attention = _attention(case, out, weights, partial=False)
    ops = [*_inputs(case, weights), attention, SelectRows(out, Buffer("out", out.width))]
    return _bind(case, device, ops, weights, kind, POOL_PAGES * PAGE_LEN)


def bind_rank(case: Case, device: Backend, acts: Collective, kind: QuantType = QuantType.F32) -> Program:
    """The part of rank `acts.rank`."""
    rank, dim = acts.rank, case.head_dim
    first, end = tuple(pairwise(accumulate(case.own, initial=0)))[rank]
    weights = weights_of(case, kind)
    weights["own sinks"] = weights["sinks"][:, first:end]
    weights["own q"] = weights["q"][:, first * case.q_step : end * case.q_step]
    ops: list[Op] = _inputs(case, weights)
    part, own = Buffer("part", case.heads * (dim + 1)), Buffer("own", case.own[rank] * dim)
    sinks = _weight("own sinks", weights) if case.sinks and own.width else None
    gate = Buffer("own q", case.own[rank] * case.q_step) if case.gated and own.width else None
    if gate is not None:
        ops.append(EmbedRows(_weight("own q", weights), gate))
    every = Buffer("attended", case.heads * dim)
    ops += [
        _attention(case, part, weights, partial=True),
        MergeAttention(part, own, case.heads, dim, first, case.own[rank], "merge 0", sinks, gate),
        GatherRows((GatherPart(own, every, tuple(heads * dim for heads in case.own)),), "attention 0"),
        SelectRows(every, Buffer("out", every.width)),
    ]
    return _bind(case, device, ops, weights, kind, case.rows_kept.tensor_rows[rank], acts)


def whole_batch(case: Case, plan: int) -> Batch:
    """Plan number `plan` of the undivided layer."""
    pages = np.array(case.pages, np.int32)
    return _batch(case, plan, pages, lambda slot: slot)


def rank_batch(case: Case, plan: int, rank: int) -> Batch:
    """The same as rank `rank` sees it: -1 for pages of others, their rows into the padding."""
    kept = case.rows_kept
    padding = kept.tensor_padding[rank]

    def local(slot: int) -> int:
        owner, row = kept.rule.place(slot)
        return row if owner == rank else padding + slot % PAGE_LEN

    places = [[kept.rule.place(page * PAGE_LEN) for page in lane] for lane in case.pages]
    pages = [[row // PAGE_LEN if owner == rank else -1 for owner, row in lane] for lane in places]
    return _batch(case, plan, np.array(pages, np.int32), local)


def _batch(case: Case, plan: int, tables: npt.NDArray[np.int32], place: Callable[[int], int]) -> Batch:
    rows = [(lane, position) for lane, first, end in case.plans[plan] for position in range(first, end)]
    slots = [place(case.pages[lane][position // PAGE_LEN] * PAGE_LEN + position % PAGE_LEN) for lane, position in rows]
    tokens = [lane * LANE_PAGES * PAGE_LEN + position for lane, position in rows]
    return Batch(
        tokens=np.array(tokens, np.int32),
        positions=np.array([position for _, position in rows], np.int32),
        slots=np.array([slots], np.int32),
        lanes=np.array([lane for lane, _ in rows], np.int32),
        tables=tables[None],
        logit_rows=np.arange(len(rows), dtype=np.int32),
        seq=plan,
    )


def _inputs(case: Case, weights: Mapping[str, Values]) -> list[Op]:
    q, k, v = (Buffer(name, weights[name].shape[1]) for name in "qkv")
    shape = case.heads, case.kv_heads, case.head_dim
    embeds: list[Op] = [EmbedRows(_weight(buffer.name, weights), buffer) for buffer in (q, k, v)]
    return [*embeds, RopeStore(q, k, v, 0, *shape, ROPE, q_step=case.q_step)]


def _attention(case: Case, out: Buffer, weights: Mapping[str, Values], *, partial: bool) -> Attention:
    return Attention(
        Buffer("q", case.heads * case.q_step),
        out,
        0,
        *(case.heads, case.kv_heads, case.head_dim),
        scale=0.5,
        window=case.window,
        softcap=case.softcap,
        sinks=_weight("sinks", weights) if case.sinks and not partial else None,
        q_step=case.q_step,
        gated=case.gated and not partial,
        partial=partial,
    )


def _weight(name: str, weights: Mapping[str, Values]) -> Weight:
    return Weight(name, *weights[name].shape)


def _bind(
    case: Case,
    device: Backend,
    ops: Sequence[Op],
    weights: Mapping[str, Values],
    kind: QuantType,
    slots: int,
    acts: Collective | None = None,
) -> Program:
    views = {}
    for name, values in weights.items():
        rows, cols = values.shape
        views[name] = TensorView(name, kind, rows, cols, np.frombuffer(values.tobytes(), np.uint8))
    kv = KvPool((KvLayer(case.kv_heads, case.head_dim),), slots, QuantType.F32)
    limits = Limits(3 * CHUNK, 3 * CHUNK, len(case.lengths), LANE_PAGES)
    return device.bind(ops, views, kv, limits, lambda *_: None, collective=acts)
