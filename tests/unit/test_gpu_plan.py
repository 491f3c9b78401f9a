"""What a program on a card needs, before any memory is had: offsets, scratch, outputs, and its symbols."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from backends.base import (
    Attention,
    Buffer,
    EmbedRows,
    GatherPart,
    GatherRows,
    KvLayer,
    KvPool,
    Limits,
    Linear,
    LinearPart,
    Norm,
    Op,
    ReceiveRows,
    Rope,
    RopeStore,
    SelectRows,
    SendRows,
    StatePool,
    TensorView,
    Weight,
)
from backends.gpu.arch import arch
from backends.gpu.device import CardFacts
from backends.gpu.forms import Forms
from backends.gpu.plan import ALIGN, Plan, sketched
from backends.gpu.recorder import segments, symbols
from backends.gpu.steps import attention
from backends.gpu.steps.base import BatchShape, Stored
from backends.quant import QuantType

X, H, Q, K, V, OUT, Y = (Buffer(name, 64) for name in ("x", "h", "q", "k", "v", "out", "y"))
LOGITS = Buffer("logits", 100)
ROPE = Rope(False, (1.0, 0.1))
LIMITS = Limits(rows=48, logit_rows=6, lanes=4, lane_pages=8)
KV = KvPool((KvLayer(2, 32), KvLayer(2, 32)), 4 * 8 * 16, QuantType.F16)
NO_STATES = StatePool()


def facts(name: str = "sm_86") -> CardFacts:
    kind = arch(name)
    return CardFacts(
        *(kind.vendor, 0, "GPU-1", "0000:01:00.0", "A card", kind, kind.warps[0], 80),
        *(8 << 30, False, "12.4", True, 1 << 21),
    )


def view(weight: Weight, quant: QuantType = QuantType.Q8_0) -> TensorView:
    own = QuantType.F32 if weight.rows == 1 else quant
    data = np.zeros(weight.rows * own.row_bytes(weight.cols), np.uint8)
    return TensorView(weight.name, own, weight.rows, weight.cols, data)


def matrix(name: str, rows: int) -> Weight:
    return Weight(name, rows, 64)


def layer(at: int) -> list[Op]:
    return [
        Norm(X, Weight(f"norm {at}", 1, 64), 1e-5, H, OUT if at else None),
        Linear(H, tuple(LinearPart(matrix(f"{buffer.name} {at}", 64), buffer) for buffer in (Q, K, V))),
        RopeStore(Q, K, V, at, 2, 2, 32, ROPE),
        Attention(Q, OUT, at, 2, 2, 32, 0.2),
    ]


def ops_of(layers: int = 2) -> list[Op]:
    return [
        EmbedRows(matrix("table", 100), X),
        *(op for at in range(layers) for op in layer(at)),
        SelectRows(X, Y, OUT),
        Linear(Y, (LinearPart(matrix("head", 100), LOGITS),)),
    ]


def weights_of(ops: list[Op]) -> dict[str, TensorView]:
    found: dict[str, TensorView] = {}
    for op in ops:
        match op:
            case EmbedRows(table=table):
                found[table.name] = view(table)
            case Norm(weight=weight):
                found[weight.name] = view(weight)
            case Linear(parts=parts):
                found |= {part.weight.name: view(part.weight) for part in parts}
    return found


def plan(ops: list[Op] | None = None, limits: Limits = LIMITS, **more: object) -> Plan:
    ops = ops_of() if ops is None else ops
    return Plan(facts(), ops, weights_of(ops), KV, limits, NO_STATES, **more)  # type: ignore[arg-type]


def test_nothing_of_a_workspace_lies_on_anything_else() -> None:
    made = plan()
    at = [offset for _, offset in made.buffers.values()]
    at += [*made.scratch.values(), *made.turns.values(), made.block_at]
    assert len(set(at)) == len(at) and all(offset % ALIGN == 0 for offset in at)
    assert made.workspace.nbytes >= max(at) + made.block.nbytes
    assert not made.kept and not made.drafts.nbytes


def test_layers_share_buffers_scratch_and_turns() -> None:
    one, two = plan(ops_of(1)), plan(ops_of(2))
    assert one.workspace.nbytes == two.workspace.nbytes
    assert len(two.turns) == 1
    assert set(two.scratch) == {
        *("quantised hi", "quantised lo", "quantised scale", "quantised sum"),
        *("halves", "halves scales", "attention stats", "attention values"),
    }


def test_rows_behind_the_selection_are_those_whose_logits_are_wanted() -> None:
    made, more = plan(), plan(limits=replace(LIMITS, logit_rows=38))
    assert made.op_rows[-1] == 6 and made.op_rows[0] == LIMITS.rows
    stride = 4 * 112
    assert more.buffers["logits"][1] - made.buffers["logits"][1] == 4 * 64 * (38 - 6), "of y, before it"
    ends = [each.scratch["quantised hi"] - each.buffers["logits"][1] for each in (made, more)]
    assert 6 * stride <= ends[0] < 6 * stride + ALIGN and 38 * stride <= ends[1] < 38 * stride + ALIGN


def test_what_a_section_leaves() -> None:
    assert plan().output(0).buffer == LOGITS
    sends = [*ops_of()[:-2], SendRows((X,), 1, "stream 0")]
    assert plan(sends, rank=0, ranks=2).output(0).buffer is None
    gathered = Buffer("gathered", 200)
    gathers = [*ops_of(), GatherRows((GatherPart(LOGITS, gathered, (100, 100)),), "logits", 1)]
    assert plan(gathers, rank=1, ranks=2).output(0).buffer == gathered
    other = plan(gathers, rank=0, ranks=2).output(0)
    assert other.buffer is None and other.width == 200
    with pytest.raises(ValueError, match="cannot end with ReceiveRows"):
        plan([*ops_of()[:-2], ReceiveRows((X,), 0, "stream 0")], rank=1, ranks=2).output(0)


@pytest.mark.parametrize("more", [{"rows": 65536}, {"lanes": 65536}, {"logit_rows": 65536}], ids=str)
def test_batches_are_no_larger_than_a_grid(more: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="65536.*at most 65535 of each"):
        plan(limits=replace(LIMITS, **more))


@pytest.mark.parametrize("lane_pages", [8, 4096, 65536])
def test_parts_of_attention_fit_however_long_a_sequence_may_be(lane_pages: int) -> None:
    made = plan(limits=replace(LIMITS, lanes=64, lane_pages=lane_pages))
    op = next(op for op in made.ops if isinstance(op, Attention))
    sizes = attention.scratch(op, made.context(made.ops.index(op)))
    assert 0 < sum(sizes.values()) <= max(attention.PART_BYTES, 65536 * 64 * 16)


def test_only_what_batches_may_launch_is_compiled() -> None:
    few = {symbol.name for symbol in symbols(plan(limits=Limits(4, 4, 4, 8)))}
    many = {symbol.name for symbol in symbols(plan(limits=Limits(200, 4, 4, 8)))}
    assert {"linear_few_q8_0_r1", "linear_few_q8_0_r2", "linear_few_q8_0_r4"} <= few
    assert not any(name.startswith(("linear_many", "linear_few_q8_0_r8", "halve_rows")) for name in few)
    assert {"linear_many_q8_0_r32", "linear_many_q8_0_r128", "attention_many_f16_d32", "halve_rows"} <= many
    assert few < many


def test_a_norm_quantises_for_few_rows_alone() -> None:
    made = plan()
    places = sketched(made)

    def launched(rows: int) -> list[str]:
        shape = BatchShape(rows, 1, 4, few=(1, 1)) if rows < 5 else BatchShape(rows, 1, 4, many=(1, 64))
        (only,) = segments(made, places, 0, shape)
        return [launch.symbol.name for launch in only.launches]

    few, many = launched(1), launched(40)
    assert few.count("quantize_rows") == 1, "for the head alone, behind a selection of rows"
    assert many.count("halve_rows") == 2 and many.count("quantize_rows") == 1
    assert few[:5] == ["embed_rows_q8_0", "norm_rows", *["linear_few_q8_0_r1"] * 3]


@pytest.mark.parametrize(("name", "most"), [("sm_86", 8), ("gfx1103", 8), ("gfx1030", 16)])
def test_the_crossover_of_linear_layers(name: str, most: int) -> None:
    forms, matrix = Forms(arch(name)), Stored(QuantType.Q4_K, 0, 512, 256)
    assert forms.is_few(matrix, most) and not forms.is_few(matrix, most + 1)


def test_rows_that_nobody_wants_launch_nothing_behind_the_selection() -> None:
    made = plan()
    (only,) = segments(made, sketched(made), 0, BatchShape(2, 0, 4, few=(2, 1)))
    assert only.launches[-1].symbol.name == "attention_merge"
