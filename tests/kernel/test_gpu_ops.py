"""Ops that no tiny checkpoint has, or not in that form, as small lists: an emulated card against the oracle.

Many query heads to a kv head (decoding takes the blocks of many rows, in parts), gates, sinks and soft caps in
attention, soft caps and factors of rows, layers that read what another one stored, sums without a gate, heads that are
normed, ropes of either pairing or none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import simt_rig as rig
from emulated_device import EmulatedDevice

from backends.base import (
    PAGE_LEN,
    AddGated,
    Attention,
    Batch,
    Buffer,
    EmbedRows,
    GatedActivation,
    KvLayer,
    KvPool,
    Limits,
    Linear,
    LinearPart,
    Norm,
    Op,
    OpenOptions,
    Rope,
    RopeStore,
    Scale,
    SelectRows,
    Softcap,
    TensorView,
    Weight,
    Zero,
)
from backends.gpu.backend import GpuBackend
from backends.quant import QuantType
from backends.reference.backend import ReferenceBackend

LANES, LANE_PAGES, VOCAB, WIDTH = 2, 20, 40, 32
TOLERANCE = 2e-2
"""Logits lie within +-3, and halves were seen 8e-3 away in models as wild as these."""
LIMITS = Limits(24, 24, LANES, LANE_PAGES)
ROPE = Rope(False, tuple(10000.0 ** (-i / 8) for i in range(8)), 1.25)

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(rig.compiler() is None, reason="no C++ compiler"),
]


@dataclass
class Made:
    """Random weights by name, made when an op wants them."""

    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(3))
    views: dict[str, TensorView] = field(default_factory=dict)

    def matrix(self, name: str, rows: int, cols: int, scale: float = 1.0) -> Weight:
        floats = (self.rng.standard_normal((rows, cols)) * scale / np.sqrt(cols)).astype(np.float32)
        self.views[name] = TensorView(name, QuantType.F32, rows, cols, floats.reshape(-1).view(np.uint8))
        return Weight(name, rows, cols)

    def vector(self, name: str, cols: int, around: float = 1.0) -> Weight:
        floats = (around + self.rng.standard_normal(cols) / 4).astype(np.float32)
        self.views[name] = TensorView(name, QuantType.F32, 1, cols, floats.view(np.uint8))
        return Weight(name, 1, cols)


def list_of(
    made: Made,
    heads: int,
    kv_heads: int,
    dims: int,
    *,
    rope: Rope | None = ROPE,
    gated: bool = False,
    norms: bool = False,
    **more: object,
) -> list[Op]:
    """A layer of attention whose rows another one reads, between an embedding and a head."""
    step = dims * (2 if gated else 1)
    x, h, up = Buffer("x", WIDTH), Buffer("h", WIDTH), Buffer("up", WIDTH)
    q, k, v = Buffer("q", heads * step), Buffer("k", kv_heads * dims), Buffer("v", kv_heads * dims)
    out, sink = Buffer("out", heads * dims), made.vector("sinks", heads, 0.0)
    head_norms = {"q_norm": made.vector("q_norm", dims), "k_norm": made.vector("k_norm", dims)} if norms else {}
    own = {"norm_eps": 1e-6, "v_norm": norms, "q_step": step if gated else 0, **head_norms}
    seen = {"scale": dims**-0.5, "gated": gated, "q_step": step if gated else 0, **more}
    if seen.pop("with_sinks", False):
        seen["sinks"] = sink
    shape = (heads, kv_heads, dims)
    again = {name: value for name, value in own.items() if name != "k_norm" and name != "v_norm"}
    return [
        EmbedRows(made.matrix("table", VOCAB, WIDTH, 4.0), x, 1.5),
        Norm(x, made.vector("norm", WIDTH), 1e-6, h),
        Linear(
            h,
            tuple(
                LinearPart(made.matrix(f"w{b.name}", b.width, WIDTH), b, made.vector(f"b{b.name}", b.width, 0.0))
                for b in (q, k, v)
            ),
        ),
        RopeStore(q, k, v, 0, *shape, rope, **own),  # type: ignore[arg-type]
        Attention(q, out, 0, *shape, **seen),  # type: ignore[arg-type]
        Linear(out, (LinearPart(made.matrix("wo", WIDTH, heads * dims), up),)),
        AddGated(up, x),
        Zero(up),
        AddGated(up, x),
        Norm(x, made.vector("norm 2", WIDTH), 1e-6, h, up),
        Linear(h, (LinearPart(made.matrix("wq 2", q.width, WIDTH), q),)),
        RopeStore(q, None, None, 0, *shape, rope, **again),  # type: ignore[arg-type]
        Attention(q, out, 0, *shape, **seen),  # type: ignore[arg-type]
        Linear(out, (LinearPart(made.matrix("wo 2", WIDTH, heads * dims), up),)),
        GatedActivation(up, h, h, "gelu"),
        Scale(h, made.vector("factor", 1)),
        SelectRows(x, Buffer("y", WIDTH), h),
        Linear(Buffer("y", WIDTH), (LinearPart(made.matrix("head", VOCAB, WIDTH, 4.0), Buffer("logits", VOCAB)),)),
        Softcap(Buffer("logits", VOCAB), 3.0),
    ]


def batch(pieces: Sequence[tuple[int, int, int]]) -> Batch:
    """Rows of (lane, first position, rows), pages of each lane in descending order."""
    lanes = np.concatenate([np.full(rows, lane, np.int32) for lane, _, rows in pieces])
    positions = np.concatenate([np.arange(at, at + rows, dtype=np.int32) for _, at, rows in pieces])
    tables = np.arange(LANES * LANE_PAGES, dtype=np.int32)[::-1].reshape(1, LANES, LANE_PAGES).copy()
    slots = tables[:, lanes, positions // PAGE_LEN] * PAGE_LEN + positions % PAGE_LEN
    tokens = (positions * 7 + lanes * 3) % VOCAB
    return Batch(tokens, positions, slots, lanes, tables, np.arange(len(tokens), dtype=np.int32))


TALK = ([(0, 0, 20)], [(0, 20, 1)], [(1, 0, 3), (0, 21, 9)], [(0, 30, 1), (1, 3, 1)], [(1, 4, 1), (0, 31, 4)])


@pytest.mark.parametrize("arch", ["sm_86", "gfx1103"])
@pytest.mark.parametrize(
    ("heads", "options"),
    [
        ((20, 1, 16), {"with_sinks": True}),
        ((4, 2, 32), {"gated": True, "softcap": 2.0, "norms": True}),
        ((6, 2, 16), {"window": 11, "rope": Rope(True, ROPE.frequencies[:5])}),
        ((2, 2, 64), {"rope": None}),
    ],
    ids=["group of 20", "gated and capped", "window", "no rope"],
)
def test_a_list_of_ops(arch: str, heads: tuple[int, int, int], options: dict[str, object]) -> None:
    made, device = Made(), EmulatedDevice(arch)
    ops = list_of(made, *heads, **options)  # type: ignore[arg-type]
    kv = KvPool((KvLayer(heads[1], heads[2]),), LANES * LANE_PAGES * PAGE_LEN, QuantType.F32)
    backend = GpuBackend(device)
    given = (ops, made.views, kv, LIMITS, lambda *_: None)
    card, oracle = backend.bind(*given), ReferenceBackend(OpenOptions()).bind(*given)
    for pieces in TALK:
        got, wanted = card.run(batch(pieces)), oracle.run(batch(pieces))
        assert np.abs(got - wanted).max() < TOLERANCE, pieces
    few = bool(device.counts[f"attention_few_f32_d{heads[2]}"])
    assert few == (heads[0] // heads[1] <= 16) and device.counts["attention_merge"]
    assert all(device.counts[name] for name in ("softcap", "scale", "zero", "add_gated"))
    card.close()
    backend.close()


def test_long_sequences_are_attended_to_in_parts() -> None:
    """Parts of 256 positions: the second one begins, and decoding reads both."""
    made, device = Made(), EmulatedDevice()
    heads = (4, 2, 16)
    ops = list_of(made, *heads)
    kv = KvPool((KvLayer(2, 16),), LANES * LANE_PAGES * PAGE_LEN, QuantType.F32)
    backend = GpuBackend(device)
    given = (ops, made.views, kv, LIMITS, lambda *_: None)
    card, oracle = backend.bind(*given), ReferenceBackend(OpenOptions()).bind(*given)
    for at in range(0, 264, 24):
        for program in (card, oracle):
            program.run(batch([(0, at, 24)]))
    for at in (254, 264):
        got, wanted = card.run(batch([(0, at, 1), (1, 0, 2)])), oracle.run(batch([(0, at, 1), (1, 0, 2)]))
        assert np.abs(got - wanted).max() < TOLERANCE
    card.close()
    backend.close()


def test_ops_that_do_not_fit_the_pool_are_refused() -> None:
    made, backend = Made(), GpuBackend(EmulatedDevice())
    ops = list_of(made, 4, 2, 32)
    for kv, said in (
        (KvPool((KvLayer(2, 16),), 64, QuantType.F32), "holds 2 heads of 16"),
        (KvPool((KvLayer(2, 32),), 65, QuantType.F32), "no whole number of pages"),
        (KvPool((), 64, QuantType.F32), "layer 0 of 0"),
    ):
        with pytest.raises(ValueError, match=said):
            backend.bind(ops, made.views, kv, LIMITS, lambda *_: None)
    kv = KvPool((KvLayer(2, 32),), 64, QuantType.F32)
    with pytest.raises(ValueError, match="65535"):
        backend.bind(ops, made.views, kv, Limits(70000, 1, 1, 1), lambda *_: None)
    other = [*ops[:-1], Softcap(Buffer("logits", VOCAB + 1), 1.0)]
    with pytest.raises(ValueError, match="logits is used with widths"):
        backend.bind(other, made.views, kv, LIMITS, lambda *_: None)
    backend.close()
