"""Partial attention: a rank with some of a sequence's pages gives what is here and its log-sum-exps, as the reference
does in float64; and the bits of a row depend on its sequence and on who keeps what, on nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import kernel_rig as rig
import numpy as np
import pytest

from backends.base import Attention, Batch, Buffer, KvLayer, KvPool, KvWindow, Limits, Op, OpenOptions, RopeStore
from backends.cpu.backend import CpuProgram
from backends.quant import QuantType
from backends.reference.backend import ReferenceBackend

KV_TYPES = ("F32", "F16", "BF16", "Q8_0", "F8")
LANES, LANE_PAGES = 2, 50
OTHERS = -1


@dataclass(frozen=True)
class Form:
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 32
    kv_type: str = "F32"
    window: int = 0
    softcap: float = 0.0
    q_step: int = 0


def every(pages: int) -> np.ndarray:
    return np.ones(pages, bool)


OWNERS = {
    "all": every(LANE_PAGES),
    "none": ~every(LANE_PAGES),
    "every other one": np.arange(LANE_PAGES) % 2 == 1,
    "pairs of five": np.arange(LANE_PAGES) % 5 > 2,
    "the first one": np.arange(LANE_PAGES) == 0,
    "late ones": np.arange(LANE_PAGES) > 33,
    "not the second partition": (np.arange(LANE_PAGES) < 16) | (np.arange(LANE_PAGES) >= 32),
    "the second partition": (np.arange(LANE_PAGES) >= 16) & (np.arange(LANE_PAGES) < 32),
}


class Share:
    """A rank that keeps pages `own` of every lane; rows of other ranks go into a page of padding behind the pool."""

    def __init__(self, form: Form, own: np.ndarray, length: int, seed: int = 0, partial: bool = True) -> None:
        self.form, self.own, self.length = form, own, length
        random = np.random.default_rng(seed)
        step, keys = form.q_step or form.head_dim, form.kv_heads * form.head_dim
        values = [
            random.standard_normal((length, width)).astype(np.float32) for width in (form.heads * step, keys, keys)
        ]
        self.q, self.k, self.v = values
        kept = int(own.sum()) * LANES
        numbers = random.permutation(kept).astype(np.int32).reshape(LANES, -1)
        self.tables = np.full((LANES, LANE_PAGES), OTHERS, np.int32)
        self.tables[:, own] = numbers
        self.padding = kept
        windows = (KvWindow(form.window, (kept + 1) * 16),) if form.window else ()
        layer = KvLayer(form.kv_heads, form.head_dim, len(windows))
        self.pool = KvPool((layer,), (kept + 1) * 16, QuantType[form.kv_type], windows)
        self.partial = partial

    def ops(self) -> tuple[list[Op], dict[str, object]]:
        f = self.form
        feeds = [rig.feed(name, values) for name, values in (("q", self.q), ("k", self.k), ("v", self.v))]
        q, k, v = (buffer for _, _, buffer in feeds)
        shape = (0, f.heads, f.kv_heads, f.head_dim)
        out = Buffer("out", f.heads * (f.head_dim + self.partial))
        attention = Attention(
            *(q, out, *shape, f.head_dim**-0.5, f.window), softcap=f.softcap, q_step=f.q_step, partial=self.partial
        )
        ops = [*(op for op, _, _ in feeds), RopeStore(q, k, v, *shape, None, q_step=f.q_step), attention]
        return ops, {table.name: table for _, table, _ in feeds}

    def batch(self, *wanted: tuple[int, Sequence[int]]) -> Batch:
        """Rows (lane, positions); the content of a position is the same in every lane."""
        lanes = np.concatenate([np.full(len(positions), lane, np.int32) for lane, positions in wanted])
        at = np.concatenate([np.array(positions, np.int32) for _, positions in wanted])
        pages = self.tables[lanes, at // 16]
        slots = np.where(pages == OTHERS, self.padding, pages) * 16 + at % 16
        groups = len(self.pool.group_slots)
        tables = np.broadcast_to(self.tables, (groups, LANES, LANE_PAGES))
        return Batch(at, at, np.tile(slots, (groups, 1)), lanes, tables, np.zeros(0, np.int32))

    def on_cpu(self, level: str, threads: int = 2) -> CpuProgram:
        ops, views = self.ops()
        return rig.backend(level, threads).bind(
            ops, views, self.pool, Limits(64, 1, LANES, LANE_PAGES), lambda *_: None
        )

    def prefill(self, program: CpuProgram, lane: int, end: int, chunk: int) -> rig.F32:
        cuts = [range(at, min(at + chunk, end)) for at in range(0, end, chunk)]
        return np.concatenate([program.run(self.batch((lane, cut))).copy() for cut in cuts])

    def reference(self) -> np.ndarray:
        opened = ReferenceBackend(OpenOptions(extra={"dtype": "float64"}))
        ops, views = self.ops()
        limits = Limits(self.length, 1, LANES, LANE_PAGES)
        program = opened.bind(ops, views, self.pool, limits, lambda *_: None)
        buffers = program.run_from(self.batch((0, range(self.length))), {})
        program.close()
        return buffers["out"].astype(np.float64)


def check(level: str, form: Form, own: np.ndarray, length: int, seed: int = 0) -> None:
    """Prefill in odd chunks but for the last three positions, which are decoded; outputs and log-sum-exps."""
    share = Share(form, own, length, seed)
    program = share.on_cpu(level)
    got = [share.prefill(program, 1, length - 3, 29)]
    got += [program.run(share.batch((1, [p]))).copy() for p in range(length - 3, length)]
    program.close()
    found, want, values = np.concatenate(got), share.reference(), form.heads * form.head_dim
    rig.close_to(found[:, :values], want[:, :values], np.full((length, values), np.abs(share.v).max()), 4e-6)
    lse, wanted = found[:, values:], want[:, values:]
    assert np.array_equal(np.isneginf(lse), np.isneginf(wanted))
    here = ~np.isneginf(wanted)
    assert np.allclose(lse[here], wanted[here], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", OWNERS)
def test_what_is_here_equals_the_reference(level: str, name: str) -> None:
    check(level, Form(), OWNERS[name], 600)


@pytest.mark.parametrize("kind", KV_TYPES)
def test_rows_of_every_type(level: str, kind: str) -> None:
    check(level, Form(heads=3, kv_heads=1, kv_type=kind, softcap=3.0), OWNERS["pairs of five"], 300)


@pytest.mark.parametrize("name", ("every other one", "late ones", "not the second partition"))
def test_a_window_over_what_is_here(level: str, name: str) -> None:
    for window in (1, 21, 300):
        check(level, Form(heads=4, window=window), OWNERS[name], 570)


@pytest.mark.parametrize("seed", range(16))
def test_random_forms_and_owners(level: str, seed: int) -> None:
    random = np.random.default_rng(seed)
    kind, kv_heads = str(random.choice(KV_TYPES)), int(random.integers(1, 4))
    dims = 32 * int(random.integers(1, 5)) if kind == "Q8_0" else int(random.integers(1, 130))
    yes = [bool(x) for x in random.integers(0, 2, 3)]
    form = Form(
        *(kv_heads * int(random.integers(1, 10)), kv_heads, dims, kind),
        window=int(random.integers(1, 60)) if yes[0] else 0,
        softcap=float(random.uniform(1, 20)) if yes[1] else 0.0,
        q_step=dims + int(random.integers(1, 20)) if yes[2] else 0,
    )
    check(level, form, random.uniform(size=LANE_PAGES) < random.choice([0.1, 0.5, 0.9]), 90, seed)


@pytest.mark.parametrize("kind", ("F32", "F16", "Q8_0"))
def test_a_rank_with_every_page_has_the_bits_of_whole_attention(level: str, kind: str) -> None:
    form = Form(heads=5, kv_heads=1, kv_type=kind)
    found = []
    for partial in (True, False):
        share = Share(form, OWNERS["all"], 530, partial=partial)
        program = share.on_cpu(level)
        found.append(share.prefill(program, 0, 530, 61))
        program.close()
    some, whole = found
    # 1 / sum is one number in both, but the rounding of the last product may differ from level to level: it must not.
    assert np.array_equal(rig.bits(some[:, : form.heads * form.head_dim]), rig.bits(whole))


def test_ranks_together_make_the_whole_attention(level: str) -> None:
    """Three owners of random pages: sum of exp(lse) out over sum of exp(lse) is what one rank with all pages gives."""
    form, length = Form(heads=4, kv_type="F16"), 400
    owner = np.random.default_rng(3).integers(0, 3, LANE_PAGES)
    parts = []
    for own in (*(owner == rank for rank in range(3)), OWNERS["all"]):
        share = Share(form, own, length)
        program = share.on_cpu(level)
        parts.append(share.prefill(program, 0, length, 50).astype(np.float64))
        program.close()
    values = form.heads * form.head_dim
    weights = np.exp(np.stack([part[:, values:] for part in parts[:3]]))
    outs = np.stack([part[:, :values].reshape(length, form.heads, -1) for part in parts[:3]])
    merged = (weights[..., None] * outs).sum(0) / weights.sum(0)[..., None]
    whole = parts[3][:, :values].reshape(merged.shape)
    assert np.abs(merged - whole).max() < 3e-6
    assert np.allclose(np.log(weights.sum(0)), parts[3][:, values:], atol=3e-6)


@pytest.mark.parametrize("kind", KV_TYPES)
def test_bits_do_not_depend_on_cut_neighbours_or_threads(level: str, kind: str) -> None:
    """Past two partitions, so that a lone row is split over the threads and merged; one partition has nothing here."""
    form, own = Form(5, 1, 32, kind, 0, 5.0), OWNERS["every other one"] & OWNERS["not the second partition"]
    share = Share(form, own, 620)
    whole = share.on_cpu(level, 1)
    want = rig.bits(share.prefill(whole, 0, 620, 64))
    whole.close()
    for threads, chunk in ((2, 61), (3, 23)):
        program = share.on_cpu(level, threads)
        assert np.array_equal(rig.bits(share.prefill(program, 1, 620, chunk)), want), (threads, chunk)
        share.prefill(program, 0, 40, 40)
        for position in (0, 15, 16, 255, 256, 300, 511, 512, 619):
            got = program.run(share.batch((1, [position]))).copy()
            assert np.array_equal(rig.bits(got), want[position : position + 1]), (threads, position)
        mixed = program.run(share.batch((0, [38, 39]), (1, range(600, 620)))).copy()
        assert np.array_equal(rig.bits(mixed), want[[38, 39, *range(600, 620)]]), threads
        program.close()


def test_rows_of_other_ranks_are_never_read(level: str) -> None:
    """What others keep is no number here: it goes into the padding, and no result knows of it."""
    for kind in ("F16", "Q8_0"):
        form, own = Form(heads=3, kv_heads=1, kv_type=kind), OWNERS["pairs of five"]
        clean, spoiled = Share(form, own, 300), Share(form, own, 300)
        elsewhere = ~own[np.arange(300) // 16]
        spoiled.k[elsewhere], spoiled.v[elsewhere] = np.nan, np.inf
        found = []
        for share in (clean, spoiled):
            program = share.on_cpu(level)
            found.append(share.prefill(program, 0, 297, 50))
            found[-1] = np.concatenate(
                [found[-1], *(program.run(share.batch((0, [p]))).copy() for p in range(297, 300))]
            )
            program.close()
        assert np.array_equal(rig.bits(found[0]), rig.bits(found[1]))


def test_a_row_without_any_row_here_is_zero_and_minus_infinity(level: str) -> None:
    share = Share(Form(), OWNERS["none"], 40)
    program = share.on_cpu(level)
    got = share.prefill(program, 0, 40, 40)
    program.close()
    assert (got[:, :192] == 0).all() and np.isneginf(got[:, 192:]).all() and got.shape == (40, 198)


# ------------------------------------------------------------------------------------------------------------ refusals


def run_with_table(level: str, share: Share, page: int) -> None:
    program = share.on_cpu(level)
    batch = share.batch((0, [20]))
    batch.tables = batch.tables.copy()
    batch.tables[:, 0, 0] = page
    try:
        program.run(batch)
    finally:
        program.close()


def test_pages_of_other_ranks_are_taken_in_partial_attention_alone(level: str) -> None:
    everything = OWNERS["all"]
    run_with_table(level, Share(Form(), everything, 40), OTHERS)
    run_with_table(level, Share(Form(), everything, 40), LANES * LANE_PAGES)  # the padding is a page of the pool
    for share, page in (
        (Share(Form(), everything, 40, partial=False), OTHERS),
        (Share(Form(), everything, 40), -2),
        (Share(Form(), everything, 40), LANES * LANE_PAGES + 1),
    ):
        with pytest.raises(ValueError, match="outside the pools"):
            run_with_table(level, share, page)


def test_one_whole_attention_among_partial_ones_wants_every_page(level: str) -> None:
    share = Share(Form(), OWNERS["all"], 40)
    ops, views = share.ops()
    last = ops[-1]
    assert isinstance(last, Attention)
    whole = replace(last, out=Buffer("whole", last.heads * last.head_dim), partial=False)
    program = rig.backend(level).bind(
        [*ops, whole], views, share.pool, Limits(64, 1, LANES, LANE_PAGES), lambda *_: None
    )
    batch = share.batch((0, [20]))
    program.run(batch)
    batch.tables = batch.tables.copy()
    batch.tables[0, 0, 0] = OTHERS
    with pytest.raises(ValueError, match="outside the pools"):
        program.run(batch)
    program.close()
