"""The oracle on several ranks: sums, gathers and messages complete what each rank computed of its part, once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import pytest
from ranks import Deadlock, Group, on_paper

from backends.acts import StampMismatch
from backends.base import (
    Batch,
    Buffer,
    Collective,
    EmbedRows,
    ExpertMatrix,
    Experts,
    GatedActivation,
    GatherPart,
    GatherRows,
    KvPool,
    Limits,
    Linear,
    LinearPart,
    Norm,
    Op,
    OpenOptions,
    ReceiveRows,
    Routing,
    SelectRows,
    SendRows,
    SumRows,
    TensorView,
    Weight,
    Zero,
)
from backends.quant import QuantType
from backends.reference.backend import ReferenceBackend
from backends.reference.program import ReferenceProgram

WIDTH, INNER, VOCAB, ROWS = 24, 40, 30, 6
EXACT = 1e-12
NO_KV = KvPool((), 0, QuantType.F32)
X, UPDATE = Buffer("x", WIDTH), Buffer("update", WIDTH)
SHARES_OF_INNER = [(20, 20), (23, 17), (40, 0), (18, 11, 11), (0, 1, 39), (0, 0, 40)]
Values = Mapping[str, np.ndarray]


@cache
def device(dtype: str = "float64") -> ReferenceBackend:
    return ReferenceBackend(OpenOptions(extra={"dtype": dtype}))


def values() -> dict[str, np.ndarray]:
    """Weights of a small model, `[out, in]`."""
    random = np.random.default_rng(6)
    shapes = {"embed": (VOCAB, WIDTH), "gate": (INNER, WIDTH), "up": (INNER, WIDTH), "down": (WIDTH, INNER)}
    shapes |= {"head": (VOCAB, WIDTH), "router": (5, WIDTH), "norm": (1, WIDTH), "e.gate": (5 * 8, WIDTH)}
    shapes |= {"e.up": (5 * 8, WIDTH), "e.down": (5 * WIDTH, 8), "e.bias": (1, 5 * WIDTH), "bias": (1, WIDTH)}
    return {name: 0.3 * random.standard_normal(shape) for name, shape in shapes.items()}


def bound(
    ops: Sequence[Op], weights: Values, acts: Collective | None = None, dtype: str = "float64"
) -> ReferenceProgram:
    kind = QuantType.F64 if dtype == "float64" else QuantType.F32
    views = {}
    for name, matrix in weights.items():
        rows, cols = matrix.shape
        raw = matrix.astype(dtype).tobytes()
        views[name] = TensorView(name, kind, rows, cols, np.frombuffer(raw, np.uint8))
    limits = Limits(ROWS, ROWS, 1, 1)
    return device(dtype).bind(ops, views, NO_KV, limits, lambda *_: None, collective=acts)


def batch(rows: int = ROWS, logit_rows: Sequence[int] = (1, 4, 5), seq: int = 3, epoch: int = 2) -> Batch:
    return Batch(
        tokens=(np.arange(rows, dtype=np.int32) * 7 + 2) % VOCAB,
        positions=np.arange(rows, dtype=np.int32),
        slots=np.zeros((1, rows), np.int32),
        lanes=np.zeros(rows, np.int32),
        tables=np.zeros((1, 1, 1), np.int32),
        logit_rows=np.array(logit_rows, np.int32),
        epoch=epoch,
        seq=seq,
    )


def on_all(
    group: Group, ops_of: Callable[[int], tuple[Sequence[Op], Values]], dtype: str = "float64"
) -> list[dict[str, np.ndarray]]:
    """All buffers of each rank after one batch."""
    programs = [bound(*ops_of(acts.rank), acts, dtype) for acts in group.acts]
    return group.together(lambda rank: programs[rank].run_from(batch(), {}))


def runs(shares: Sequence[int]) -> list[tuple[int, int]]:
    return list(pairwise(accumulate(shares, initial=0)))


def weight(name: str, weights: Values) -> Weight:
    return Weight(name, *weights[name].shape)


EMBED = EmbedRows(Weight("embed", VOCAB, WIDTH), X, scale=1.5)


def dense(weights: Values, *, bias: bool = False) -> list[Op]:
    """update = down(silu(gate x) * up x), of as many inner columns as `weights` have."""
    inner = weights["gate"].shape[0]
    if not inner:
        return [Zero(UPDATE)]
    gate, up, mixed = (Buffer(name, inner) for name in ("gate", "up", "mixed"))
    end = LinearPart(weight("down", weights), UPDATE, weight("bias", weights) if bias else None)
    return [
        Linear(X, (LinearPart(weight("gate", weights), gate), LinearPart(weight("up", weights), up))),
        GatedActivation(gate, up, mixed),
        Linear(mixed, (end,)),
    ]


def cut_dense(first: int, end: int) -> dict[str, np.ndarray]:
    whole = values()
    cut = {"gate": whole["gate"][first:end], "up": whole["up"][first:end], "down": whole["down"][:, first:end]}
    return whole | cut


# ------------------------------------------------------------------------------------------------------- sums


@pytest.mark.parametrize(("dtype", "error"), [("float64", EXACT), ("float32", 5e-6)])
@pytest.mark.parametrize("shares", SHARES_OF_INNER, ids=str)
def test_partial_sums_of_columns_complete_the_whole(shares: tuple[int, ...], dtype: str, error: float) -> None:
    """The bias behind the sum is on one rank alone; a rank without a column gives zeros."""
    whole = bound([EMBED, *dense(values(), bias=True)], values(), None, dtype).run_from(batch(), {})["update"]

    biased = max(rank for rank, share in enumerate(shares) if share)

    def ops_of(rank: int) -> tuple[list[Op], Values]:
        weights = cut_dense(*runs(shares)[rank])
        return [EMBED, *dense(weights, bias=rank == biased), SumRows(UPDATE, "dense 0")], weights

    gave = [buffers["update"] for buffers in on_all(on_paper(len(shares)), ops_of, dtype)]
    for update in gave:
        assert np.abs(update - whole).max() < error
        assert np.array_equal(update, gave[0])


def test_a_sum_taken_twice_shows() -> None:
    whole = bound([EMBED, *dense(values())], values()).run_from(batch(), {})["update"]

    def ops_of(rank: int) -> tuple[list[Op], Values]:
        weights = cut_dense(*runs((23, 17))[rank])
        return [EMBED, *dense(weights), SumRows(UPDATE, "dense 0"), SumRows(UPDATE, "dense 0")], weights

    for buffers in on_all(on_paper(2), ops_of):
        assert np.abs(buffers["update"] - 2 * whole).max() < EXACT
        assert np.abs(buffers["update"] - whole).max() > 0.5


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("shares", [(12, 18), (30, 0, 0), (1, 28, 1)], ids=str)
def test_each_token_is_embedded_by_the_rank_that_has_its_row(shares: tuple[int, ...], dtype: str) -> None:
    """Exact: all others give zeros."""
    whole = bound([EMBED], values(), None, dtype).run_from(batch(), {})["x"]

    def ops_of(rank: int) -> tuple[list[Op], Values]:
        first, end = runs(shares)[rank]
        weights = values() | {"embed": values()["embed"][first:end]}
        return [replace(EMBED, table=weight("embed", weights), first=first), SumRows(X, "embed")], weights

    for buffers in on_all(on_paper(len(shares)), ops_of, dtype):
        assert np.array_equal(buffers["x"], whole)


@pytest.mark.parametrize("func", ["softmax", "sigmoid", "chosen"])
@pytest.mark.parametrize("shares", [(3, 2), (5, 0), (1, 1, 3)], ids=str)
def test_experts_of_all_ranks_add_up(shares: tuple[int, ...], func: str) -> None:
    """Each rank routes over all experts and runs the chosen ones that it holds, biases with them."""

    def experts(weights: Values, held: tuple[int, int] | None) -> list[Op]:
        logits = Buffer("logits", 5)
        gate, up = (ExpertMatrix(weight(name, weights), 8, 8) for name in ("e.gate", "e.up"))
        down = ExpertMatrix(weight("e.down", weights), WIDTH, WIDTH, bias=weight("e.bias", weights))
        routing = Routing(5, 2, func)
        router = Linear(X, (LinearPart(weight("router", weights), logits),))
        return [EMBED, router, Experts(X, logits, UPDATE, routing, gate, up, down, held=held)]

    whole = bound(experts(values(), None), values()).run_from(batch(), {})["update"]

    def ops_of(rank: int) -> tuple[list[Op], Values]:
        first, end = runs(shares)[rank]
        cut = {name: values()[name][first * 8 : end * 8] for name in ("e.gate", "e.up")}
        cut["e.down"] = values()["e.down"][first * WIDTH : end * WIDTH]
        cut["e.bias"] = values()["e.bias"][:, first * WIDTH : end * WIDTH]
        weights = values() | cut
        return [*experts(weights, (first, end)), SumRows(UPDATE, "experts 0")], weights

    for buffers in on_all(on_paper(len(shares)), ops_of):
        assert np.abs(buffers["update"] - whole).max() < EXACT


# ------------------------------------------------------------------------------------------- gathers and messages


@pytest.mark.parametrize("target", [None, 0, 1, 2])
def test_logits_come_to_the_target_alone(target: int | None) -> None:
    """And where none are wanted, the others' shape is the same: no rows of the whole vocabulary."""
    last = Buffer("last", WIDTH)
    start: list[Op] = [EMBED, SelectRows(X, last)]
    head = Linear(last, (LinearPart(weight("head", values()), Buffer("logits", VOCAB)),))
    whole = bound([*start, head], values()).run(batch())
    shares = (13, 0, 17)

    def program(acts: Collective) -> ReferenceProgram:
        first, end = runs(shares)[acts.rank]
        weights = values() | {"head": values()["head"][first:end]}
        own, logits = Buffer("own", end - first), Buffer("logits", VOCAB)
        parts = (LinearPart(weight("head", weights), own),) if own.width else ()
        gather = GatherRows((GatherPart(own, logits, shares),), "logits", target)
        return bound([*start, Linear(last, parts), gather], weights, acts)

    group = on_paper(3)
    for rank, logits in enumerate(group.run([program(acts) for acts in group.acts], batch())):
        assert logits.shape == ((3, VOCAB) if target in (None, rank) else (0, VOCAB))
        assert target not in (None, rank) or np.array_equal(logits, whole)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_several_gathers_are_one_exchange(dtype: str) -> None:
    widths = {"q": (8, 0, 16), "k": (4, 4, 0), "v": (0, 0, 5)}
    random = np.random.default_rng(9)
    own = [{name: random.standard_normal((ROWS, width[rank])) for name, width in widths.items()} for rank in range(3)]
    group = on_paper(3)

    def step(rank: int) -> dict[str, np.ndarray]:
        parts = tuple(
            GatherPart(Buffer(f"own {name}", width[rank]), Buffer(name, sum(width)), width)
            for name, width in widths.items()
        )
        given = {f"own {name}": matrix for name, matrix in own[rank].items() if matrix.shape[1]}
        program = bound([GatherRows(parts, "qkv 0")], {}, group.acts[rank], dtype)
        return program.run_from(batch(), given)

    for rank, buffers in enumerate(group.together(step)):
        for name in widths:
            wanted = np.concatenate([each[name] for each in own], axis=1).astype(dtype)
            assert np.array_equal(buffers[name], wanted)
        assert group.acts[rank].counts()["qkv 0"].calls == 1


def in_a_row(acts: Collective | None) -> list[Op]:
    """Two norms, the dense part between them, and the head; cut in three by ranks where there are some."""
    first, last = Buffer("first", WIDTH), Buffer("last", WIDTH)
    weights = values()
    stages: list[list[Op]] = [
        [EMBED, *dense(weights)],
        [Norm(X, weight("norm", weights), 1e-5, first, add=UPDATE), *dense(weights)],
        [
            SelectRows(X, Buffer("chosen", WIDTH), add=UPDATE),
            Norm(Buffer("chosen", WIDTH), weight("norm", weights), 1e-5, last),
            Linear(last, (LinearPart(weight("head", weights), Buffer("logits", VOCAB)),)),
        ],
    ]
    if acts is None:
        return [op for stage in stages for op in stage]
    ops = stages[acts.rank]
    if acts.rank > 0:
        ops = [ReceiveRows((X, UPDATE), acts.rank - 1, f"stream {acts.rank - 1}"), *ops]
    if acts.rank < 2:
        ops = [*ops, SendRows((X, UPDATE), acts.rank + 1, f"stream {acts.rank}")]
    return ops


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_ranks_in_a_row_give_the_bits_of_one(dtype: str) -> None:
    whole = bound(in_a_row(None), values(), None, dtype).run(batch())
    group = on_paper(3)
    programs = [bound(in_a_row(acts), values(), acts, dtype) for acts in group.acts]
    for seq in (3, 4):
        first, second, last = group.run(programs, batch(seq=seq))
        assert first.shape == second.shape == (0, 0)
        assert np.array_equal(last, whole)
    calls = [{label: count.calls for label, count in acts.counts().items()} for acts in group.acts]
    assert calls == [{"stream 0": 2}, {"stream 0": 2, "stream 1": 2}, {"stream 1": 2}]


# ----------------------------------------------------------------------------------------------------- stamps, rows


def vocabulary(acts: Collective) -> ReferenceProgram:
    """Half a vocabulary on each of two ranks: a sum of all rows, and a gather of those with logits."""
    first, end = runs((14, 16))[acts.rank]
    weights = values() | {name: values()[name][first:end] for name in ("embed", "head")}
    own, last = Buffer("own", end - first), Buffer("last", WIDTH)
    ops: list[Op] = [
        replace(EMBED, table=weight("embed", weights), first=first),
        SumRows(X, "embed"),
        SelectRows(X, last),
        Linear(last, (LinearPart(weight("head", weights), own),)),
        GatherRows((GatherPart(own, Buffer("logits", VOCAB), (14, 16)),), "logits", 1),
    ]
    return bound(ops, weights, acts, "float32")


def test_exchanges_are_stamped_with_plan_label_and_the_rows_of_their_place() -> None:
    group = on_paper(2)
    programs = [vocabulary(acts) for acts in group.acts]
    with pytest.raises(StampMismatch, match=r"Stamp\(epoch=2, seq=9, rows=6, label='embed'\)") as caught:
        group.run(programs, [batch(seq=9), batch(seq=8)])
    assert "seq=8" in str(caught.value)
    group = on_paper(2)
    programs = [vocabulary(acts) for acts in group.acts]
    with pytest.raises(StampMismatch, match=r"epoch=2, seq=3, rows=1, label='logits'"):
        group.run(programs, [batch(logit_rows=(5,)), batch(logit_rows=(4, 5))])


def test_what_has_no_rows_is_not_exchanged() -> None:
    group = on_paper(2)
    programs = [vocabulary(acts) for acts in group.acts]
    for logits in group.run(programs, batch(logit_rows=())):
        assert logits.shape == (0, VOCAB)
    assert [set(acts.counts()) for acts in group.acts] == [{"embed"}, {"embed"}]
    for logits in group.run(programs, batch(rows=0, logit_rows=())):
        assert logits.shape == (0, VOCAB)
    assert [acts.counts()["embed"].calls for acts in group.acts] == [1, 1]


# --------------------------------------------------------------------------------------------------- the rig itself


def test_the_first_error_of_a_rank_is_raised_and_says_of_which() -> None:
    group = on_paper(2)

    def step(rank: int) -> Any:
        if rank == 1:
            raise KeyError("lost")
        return bound([SumRows(X, "x")], {}, group.acts[rank]).run_from(batch(), {"x": np.ones((ROWS, WIDTH))})

    with pytest.raises(KeyError, match="lost") as caught:
        group.together(step)
    assert caught.value.__notes__ == ["on rank 1 of 2"]


def test_a_rank_that_leaves_an_exchange_out_is_a_deadlock_not_a_hang() -> None:
    group = on_paper(2)
    programs = [bound([EMBED, SumRows(X, "x")], values(), group.acts[0]), bound([EMBED], values())]
    with pytest.raises(Deadlock, match="rank 0 waits for rank 1 at .*label='x'"):
        group.run(programs, batch())
