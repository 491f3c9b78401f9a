"""Every form of RopeStore and Attention against the reference backend in float64, on random shapes; and that the bits
of a row depend on its own sequence alone whatever the form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import kernel_rig as rig
import numpy as np
import pytest

from backends.base import (
    Attention,
    Batch,
    Buffer,
    KvLayer,
    KvPool,
    Limits,
    Linear,
    LinearPart,
    Op,
    OpenOptions,
    Rope,
    RopeStore,
    TensorView,
    Unsupported,
    Weight,
)
from backends.cpu.backend import CpuBackend, CpuProgram
from backends.quant import QuantType
from backends.reference.backend import ReferenceBackend

KV_TYPES = ("F32", "F16", "BF16", "Q8_0", "F8")
LANES, LANE_PAGES = 2, 36


@dataclass(frozen=True)
class Form:
    """A RopeStore and its Attention; `shared`: a second pair reads with other queries what the first one stored."""

    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    kv_type: str = "F32"
    q_step: int = 0
    pairs: int = 0
    interleaved: bool = False
    norms: bool = False
    v_norm: bool = False
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    gated: bool = False
    shared: bool = False

    @property
    def tolerance(self) -> float:
        """Of the largest value. Rows that are rotated or normed differ in float32 and float64 before a small KV type
        rounds them, so that a few of them land one step apart."""
        steps = {"F32": 0.0, "F16": 2**-10, "BF16": 2**-7, "Q8_0": 2**-6, "F8": 2**-3}
        return 4e-6 + (steps[self.kv_type] if self.pairs or self.norms or self.v_norm else 0.0)


class Pair:
    """One op list for both backends, over random rows: position p of every lane is row p of the tables."""

    def __init__(self, form: Form, length: int, seed: int = 0) -> None:
        self.form, self.length = form, length
        random = np.random.default_rng(seed)
        step = form.q_step or form.head_dim
        widths = {"q": form.heads * step, "k": form.kv_heads * form.head_dim, "v": form.kv_heads * form.head_dim}
        if form.shared:
            widths["q2"] = form.heads * step
        feeds = {
            name: rig.feed(name, random.standard_normal((length, width)).astype(np.float32) * 1.5)
            for name, width in widths.items()
        }
        vectors = {"qn": form.head_dim, "kn": form.head_dim, "sinks": form.heads}
        self.views = {table.name: table for _, table, _ in feeds.values()}
        for name, width in vectors.items():
            self.views[name] = rig.vector_of(name, random.standard_normal(width).astype(np.float32))
        self.ops: list[Op] = [op for op, _, _ in feeds.values()]
        buffers = {name: buffer for name, (_, _, buffer) in feeds.items()}
        self.ops += self._mixer(buffers["q"], buffers["k"], buffers["v"], "out")
        if form.shared:
            self.ops += self._mixer(buffers["q2"], None, None, "out2")
        self.pages = random.permutation(LANES * LANE_PAGES).astype(np.int32).reshape(LANES, -1)
        self.pool = KvPool((KvLayer(form.kv_heads, form.head_dim),), LANES * LANE_PAGES * 16, QuantType[form.kv_type])
        self.limits = Limits(64, 1, LANES, LANE_PAGES)
        self.top = float(np.abs(self.views["v.table"].data.view(np.float32)).max())

    def _mixer(self, q: Buffer, k: Buffer | None, v: Buffer | None, out: str) -> list[Op]:
        f = self.form
        frequencies = tuple(float(1000.0 ** (-i / f.pairs)) for i in range(f.pairs))
        store = RopeStore(
            *(q, k, v, 0, f.heads, f.kv_heads, f.head_dim),
            rope=Rope(f.interleaved, frequencies, 1.1) if f.pairs else None,
            q_step=f.q_step,
            q_norm=Weight("qn", 1, f.head_dim) if f.norms else None,
            k_norm=Weight("kn", 1, f.head_dim) if f.norms and k is not None else None,
            norm_eps=1e-5,
            v_norm=f.v_norm and v is not None,
        )
        attention = Attention(
            *(q, Buffer(out, f.heads * f.head_dim), 0, f.heads, f.kv_heads, f.head_dim, f.head_dim**-0.5, f.window),
            softcap=f.softcap,
            sinks=Weight("sinks", 1, f.heads) if f.sinks else None,
            q_step=f.q_step,
            gated=f.gated,
        )
        return [store, attention]

    def batch(self, lane: int, positions: Sequence[int]) -> Batch:
        at = np.array(positions, np.int32)
        slots = self.pages[lane, at // 16] * 16 + at % 16
        return Batch(at, at, slots[None], np.full(len(at), lane, np.int32), self.pages[None], np.zeros(0, np.int32))

    def on_cpu(self, level: str, threads: int = 2) -> CpuProgram:
        return rig.backend(level, threads).bind(self.ops, self.views, self.pool, self.limits, lambda *_: None)

    def prefill(self, program: CpuProgram, lane: int, end: int, chunk: int) -> rig.F32:
        cuts = [range(at, min(at + chunk, end)) for at in range(0, end, chunk)]
        return np.concatenate([program.run(self.batch(lane, cut)).copy() for cut in cuts])

    def reference(self) -> np.ndarray:
        """All positions of lane 0 in float64."""
        opened = ReferenceBackend(OpenOptions(extra={"dtype": "float64"}))
        limits = replace(self.limits, rows=self.length)
        program = opened.bind(self.ops, self.views, self.pool, limits, lambda *_: None)
        buffers = program.run_from(self.batch(0, range(self.length)), {})
        program.close()
        return buffers["out2" if self.form.shared else "out"].astype(np.float64)


def check(level: str, form: Form, length: int = 75, seed: int = 0) -> None:
    """Prefill in odd chunks but for the last three positions, which are decoded."""
    pair = Pair(form, length, seed)
    program = pair.on_cpu(level)
    got = [pair.prefill(program, 1, length - 3, 29)]
    got += [program.run(pair.batch(1, [p])).copy() for p in range(length - 3, length)]
    program.close()
    scale = max(1.0, pair.top if not form.v_norm else np.sqrt(form.head_dim))
    want = pair.reference()
    rig.close_to(np.concatenate(got), want, np.full(want.shape, scale), form.tolerance)


FORMS = {
    "head norms": Form(norms=True, pairs=16),
    "head norms, pairs side by side": Form(norms=True, pairs=16, interleaved=True),
    "head norms, part of the head turned": Form(norms=True, head_dim=64, pairs=8),
    "head norms, odd head": Form(norms=True, v_norm=True, head_dim=20, pairs=7),
    "norm of values": Form(v_norm=True, pairs=16),
    "shared rows": Form(shared=True, norms=True, v_norm=True, pairs=16),
    "softcap": Form(softcap=2.0),
    "sinks": Form(sinks=True),
    "sinks in a window": Form(sinks=True, window=13, heads=8, kv_heads=1),
    "gated": Form(gated=True, q_step=64),
    "gated, odd head": Form(gated=True, q_step=40, head_dim=20),
    "gated, more between heads": Form(gated=True, q_step=70),
    "apart": Form(q_step=37),
    "all of it": Form(6, 2, 64, "F16", 128, 12, False, True, True, 40, 5.0, True, True, True),
    **{f"rows of {kind}": Form(kv_type=kind, heads=6) for kind in KV_TYPES},
    **{f"one query, rows of {kind}": Form(kv_type=kind, heads=1, kv_heads=1, head_dim=96) for kind in KV_TYPES},
    "F8, odd head": Form(kv_type="F8", head_dim=20),
}


@pytest.mark.parametrize("name", FORMS)
def test_a_form_equals_the_reference(level: str, name: str) -> None:
    check(level, FORMS[name])


@pytest.mark.parametrize("kind", KV_TYPES)
def test_past_one_partition(level: str, kind: str) -> None:
    check(level, Form(kv_type=kind, heads=3, kv_heads=1, sinks=True, softcap=4.0), length=530)


def random_form(seed: int) -> Form:
    random = np.random.default_rng(seed)
    kind = str(random.choice(KV_TYPES))
    kv_heads = int(random.integers(1, 4))
    dims = 32 * int(random.integers(1, 5)) if kind == "Q8_0" else int(random.integers(1, 130))
    gated = bool(random.integers(2))
    least = 2 * dims if gated else dims
    yes = [bool(x) for x in random.integers(0, 2, 6)]
    return Form(
        *(kv_heads * int(random.integers(1, 10)), kv_heads, dims, kind),
        q_step=least + int(random.integers(0, 20)) if yes[0] or gated else 0,
        pairs=int(random.integers(0, dims // 2 + 1)),
        interleaved=yes[1],
        norms=yes[2] and dims > 1,
        v_norm=yes[3] and dims > 1,
        window=int(random.integers(1, 60)) if yes[4] else 0,
        softcap=float(random.uniform(1, 20)) if yes[5] else 0.0,
        sinks=bool(random.integers(2)),
        gated=gated,
        shared=bool(random.integers(2)),
    )


@pytest.mark.parametrize("seed", range(16))
def test_random_forms_equal_the_reference(level: str, seed: int) -> None:
    check(level, random_form(seed), seed=seed)


@pytest.mark.parametrize("kind", KV_TYPES)
def test_bits_do_not_depend_on_cut_neighbours_or_threads(level: str, kind: str) -> None:
    """All features at once, past two partitions, so that a lone row is split over the threads and merged."""
    form = Form(5, 1, 32, kind, 66, 10, True, True, True, 0, 5.0, True, True)
    pair = Pair(form, 530)
    whole = pair.on_cpu(level, 1)
    want = rig.bits(pair.prefill(whole, 0, 530, 64))
    whole.close()
    for threads, chunk in ((2, 61), (3, 23)):
        program = pair.on_cpu(level, threads)
        assert np.array_equal(rig.bits(pair.prefill(program, 1, 530, chunk)), want), (threads, chunk)
        for position in (0, 255, 256, 529):
            got = program.run(pair.batch(1, [position])).copy()
            assert np.array_equal(rig.bits(got), want[position : position + 1]), (threads, position)
        pair.prefill(program, 0, 17, 17)
        parts = [pair.batch(0, [17, 18]), pair.batch(1, [528]), pair.batch(0, [400])]
        fields = ("tokens", "positions", "slots", "lanes")
        mixed = Batch(
            *(np.concatenate([getattr(part, field) for part in parts], axis=-1) for field in fields),
            pair.pages[None],
            np.zeros(0, np.int32),
        )
        # Position 400 of lane 0 reads what nobody wrote: only that it touches no other row is asked.
        assert np.array_equal(rig.bits(program.run(mixed).copy())[:3], want[[17, 18, 528]])
        program.close()


def test_a_packed_projection_reads_what_the_gate_left(level: str) -> None:
    """Attention quantises its own output for the projection behind it: after the gate, not before."""
    form = Form(gated=True, q_step=64, sinks=True)
    pair = Pair(form, 21)
    plain = pair.on_cpu(level)
    mixed = pair.prefill(plain, 0, 21, 21)
    plain.close()
    view, meaning = rig.weights_of("Q8_0", 40, 128)
    pair.views[view.name] = view
    pair.ops.append(Linear(Buffer("out", 128), (LinearPart(Weight(view.name, 40, 128), Buffer("y", 40)),)))
    program = pair.on_cpu(level)
    got = pair.prefill(program, 0, 21, 8)
    program.close()
    seen, dense = rig.int16_rounded(mixed), meaning.astype(np.float64)
    rig.close_to(got, seen @ dense.T, np.abs(seen) @ np.abs(dense).T, 4e-6)


@pytest.mark.parametrize(("kind", "bits"), [("F32", 32), ("F16", 16), ("BF16", 16), ("Q8_0", 8.5), ("F8", 8)])
def test_the_pool_takes_the_bits_that_the_budget_counts(level: str, kind: str, bits: float) -> None:
    pair = Pair(Form(kv_type=kind, head_dim=96), 4)
    program = pair.on_cpu(level)
    assert program.memory_lines()["kv"] == LANES * LANE_PAGES * 16 * 2 * 2 * 96 * bits / 8
    program.close()


def test_unwritten_slots_of_small_types_are_never_seen(level: str) -> None:
    """A recycled page holds rows and scales of another sequence, here of no number and of infinities."""
    for kind in ("Q8_0", "F8"):
        pair = Pair(Form(kv_type=kind), 40)
        clean = pair.on_cpu(level)
        want = rig.bits(pair.prefill(clean, 0, 40, 11))
        clean.close()
        for name in ("k.table", "v.table"):
            good = pair.views[name]
            bad = np.full((40, good.cols), np.inf if name == "k.table" else np.nan, np.float32)
            pair.views[name] = rig.table_of(name, np.concatenate([good.data.view(np.float32).reshape(40, -1), bad]))
        pair.views["q.table"] = rig.table_of(
            "q.table", np.tile(pair.views["q.table"].data.view(np.float32).reshape(40, -1), (2, 1))
        )
        pair.ops[:3] = [replace(op, table=replace(op.table, rows=80)) for op in pair.ops[:3]]
        program = pair.on_cpu(level)
        for at in range(0, 48, 24):
            batch = pair.batch(0, range(at, at + 24))
            batch.tokens = 40 + batch.tokens % 40
            program.run(batch)
        assert np.array_equal(rig.bits(pair.prefill(program, 0, 40, 11)), want)
        program.close()


# ------------------------------------------------------------------------------------------------------------ refusals


def bound(level: str, form: Form, **spoiled: object) -> CpuProgram:
    pair = Pair(form, 4)
    pair.ops = [
        replace(op, **{k: v for k, v in spoiled.items() if hasattr(op, k)})
        if isinstance(op, RopeStore | Attention)
        else op
        for op in pair.ops
    ]
    return pair.on_cpu(level)


@pytest.mark.parametrize("kind", ("RopeStore", "Attention"))
def test_q8_0_of_a_head_that_is_no_whole_number_of_blocks_is_refused(level: str, kind: str) -> None:
    with pytest.raises(Unsupported) as refused:
        bound(level, Form(kv_type="Q8_0", head_dim=80))
    entries = {(entry.op, entry.type, entry.why) for entry in refused.value.missing}
    assert (kind, "head_dim 80", "Q8_0 rows are blocks of 32") in entries


@pytest.mark.parametrize(
    ("form", "spoiled", "words"),
    [
        (Form(), {"q_step": 16}, "q is 128 wide, not 64"),
        (Form(q_step=16), {}, "a head of q is 16 wide, not 32"),
        (Form(q_step=48), {"gated": True}, "a head of q is 48 wide, not 64"),
        (Form(), {"sinks": Weight("qn", 1, 32)}, "sinks is 32 wide, not 4"),
        (Form(), {"k_norm": Weight("sinks", 1, 4)}, "k_norm is 4 wide, not 32"),
        (Form(), {"out": Buffer("out", 96)}, "out is 96 wide, not 128"),
        (Form(), {"v": None}, "has one of k and v"),
    ],
)
def test_buffers_and_weights_that_do_not_fit_are_refused(
    level: str, form: Form, spoiled: dict[str, object], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        bound(level, form, **spoiled)


def test_values_may_be_the_keys_before_their_norm(level: str) -> None:
    """One projection for K and V: V is taken before K is normed and turned in the same buffer."""
    form = Form(norms=True, v_norm=True, pairs=16)
    apart, same = Pair(form, 40), Pair(form, 40)
    apart.views["v.table"] = TensorView("v.table", *_all_but_name(apart.views["k.table"]))
    same.ops = [replace(op, v=op.k) if isinstance(op, RopeStore) else op for op in same.ops]
    same.views = apart.views
    results = []
    for pair in (apart, same):
        program = pair.on_cpu(level)
        results.append(rig.bits(pair.prefill(program, 0, 40, 13)))
        program.close()
    assert np.array_equal(*results)


def _all_but_name(view: TensorView) -> tuple[QuantType, int, int, object]:
    return view.type, view.rows, view.cols, view.data


def test_every_kv_type_of_the_table_is_tested(level: str) -> None:
    opened: CpuBackend = rig.backend(level)
    kinds = {entry.type for entry in opened.capabilities() if entry.op == "Attention" and entry.ok}
    assert kinds == {*KV_TYPES, "softcap", "sinks", "gated", "partial"}
