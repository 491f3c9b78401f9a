"""Paged attention, rope and the KV pool against float64 attention; and that a row's bits depend on nothing else."""

from __future__ import annotations

from dataclasses import dataclass, replace

import kernel_rig as rig
import numpy as np
import pytest

from backends.base import Attention, Batch, Buffer, KvLayer, KvPool, Op, Rope, RopeStore
from backends.cpu.backend import CpuProgram
from backends.quant import QuantType

RELATIVE = {"F32": 3e-6, "F16": 2e-3, "BF16": 1.2e-2}


@dataclass(frozen=True)
class Shape:
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 32
    window: int = 0
    kv_type: str = "F32"
    rope: Rope | None = None
    rows: int = 64
    lanes: int = 3
    lane_pages: int = 40

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5


class Case:
    """Random q, k, v for `length` positions; a program; runs over any cut of the positions into plans."""

    def __init__(self, level: str, shape: Shape, length: int, threads: int = 2, seed: int = 0) -> None:
        self.shape = shape
        random = np.random.default_rng(seed)
        self.q, self.k, self.v = (
            random.standard_normal((length, heads * shape.head_dim)).astype(np.float32)
            for heads in (shape.heads, shape.kv_heads, shape.kv_heads)
        )
        self.pages = random.permutation(shape.lanes * shape.lane_pages).astype(np.int32).reshape(shape.lanes, -1)
        self.program = self._bind(level, threads)

    def _bind(self, level: str, threads: int) -> CpuProgram:
        s = self.shape
        feeds = [rig.feed(name, values) for name, values in (("q", self.q), ("k", self.k), ("v", self.v))]
        q, k, v = (buffer for _, _, buffer in feeds)
        ops: list[Op] = [
            *(op for op, _, _ in feeds),
            RopeStore(q, k, v, 0, s.heads, s.kv_heads, s.head_dim, s.rope),
            Attention(q, Buffer("out", q.width), 0, s.heads, s.kv_heads, s.head_dim, s.scale, s.window),
        ]
        pool = KvPool((KvLayer(s.kv_heads, s.head_dim),), s.lanes * s.lane_pages * 16, QuantType[s.kv_type])
        tables = [table for _, table, _ in feeds]
        return rig.bind(rig.backend(level, threads), ops, tables, pool, s.rows, 1, s.lane_pages, s.lanes)

    def rows(self, *wanted: tuple[int, int]) -> rig.F32:
        """Run (lane, position) rows; the content of a position is the same in every lane."""
        lanes, positions = (np.array(column, np.int32) for column in zip(*wanted, strict=True))
        slots = self.pages[lanes, positions // 16] * 16 + positions % 16
        batch = Batch(positions, positions, slots[None], lanes, self.pages[None], np.zeros(0, np.int32))
        return self.program.run(batch).copy()

    def prefill(self, lane: int, length: int, chunk: int) -> rig.F32:
        parts = [self.rows(*((lane, p) for p in range(at, min(at + chunk, length)))) for at in range(0, length, chunk)]
        return np.concatenate(parts)

    def oracle(self, positions: range) -> np.ndarray:
        s = self.shape
        q, k, v = (x.astype(np.float64).reshape(len(x), -1, s.head_dim) for x in (self.q, self.k, self.v))
        if s.rope is not None:
            q, k = turn(q, s.rope), turn(k, s.rope)
        out = np.empty((len(positions), s.heads, s.head_dim))
        for row, p in enumerate(positions):
            first = max(0, p - s.window + 1) if s.window else 0
            for h in range(s.heads):
                kv = h // (s.heads // s.kv_heads)
                scores = k[first : p + 1, kv] @ q[p, h] * s.scale
                weights = np.exp(scores - scores.max())
                out[row, h] = weights @ v[first : p + 1, kv] / weights.sum()
        return out.reshape(len(positions), -1)


def turn(x: np.ndarray, rope: Rope) -> np.ndarray:
    """x [positions, heads, dim], position = index."""
    out, pairs = x.copy(), len(rope.frequencies)
    angles = np.arange(len(x))[:, None] * np.array(rope.frequencies)[None]
    cosine, sine = np.cos(angles)[:, None] * rope.magnitude, np.sin(angles)[:, None] * rope.magnitude
    a, b = (
        (slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2))
        if rope.interleaved
        else (slice(0, pairs), slice(pairs, 2 * pairs))
    )
    out[..., a], out[..., b] = x[..., a] * cosine - x[..., b] * sine, x[..., a] * sine + x[..., b] * cosine
    return out


def check(case: Case, got: rig.F32, positions: range) -> None:
    want = case.oracle(positions)
    rig.close_to(got, want, np.full(want.shape, np.abs(case.v).max()), RELATIVE[case.shape.kv_type])


FREQUENCIES = tuple(float(10000.0 ** (-i / 16)) for i in range(16))

SHAPES = {
    "grouped": Shape(),
    "one kv head": Shape(heads=9, kv_heads=1, head_dim=64),
    "head by head": Shape(heads=4, kv_heads=4, head_dim=80),
    "wide group": Shape(heads=16, kv_heads=1, head_dim=48),
    "small head": Shape(heads=4, kv_heads=2, head_dim=8),
    "odd head": Shape(heads=2, kv_heads=1, head_dim=20),
    "large head": Shape(heads=2, kv_heads=1, head_dim=256),
    "largest head": Shape(heads=5, kv_heads=1, head_dim=512),
    "seven heads in a group": Shape(heads=14, kv_heads=2, kv_type="F16"),
    "window": Shape(window=21),
    "window of one": Shape(window=1),
    "long window": Shape(window=270),
    "half": Shape(kv_type="F16"),
    "bfloat": Shape(kv_type="BF16"),
    "rope in halves": Shape(rope=Rope(False, FREQUENCIES)),
    "rope in pairs": Shape(rope=Rope(True, FREQUENCIES, 1.25), kv_type="F16"),
    "rope in part": Shape(head_dim=64, rope=Rope(False, FREQUENCIES)),
}


@pytest.mark.parametrize("name", SHAPES)
def test_prefill_and_decode_equal_plain_attention(level: str, name: str) -> None:
    case = Case(level, SHAPES[name], 300)
    check(case, case.prefill(1, 290, 64), range(290))
    for p in range(290, 300):
        check(case, case.rows((1, p)), range(p, p + 1))
    case.program.close()


@pytest.mark.parametrize("name", ("grouped", "window", "long window", "wide group", "half", "seven heads in a group"))
def test_a_row_has_the_same_bits_however_the_prompt_was_cut(level: str, name: str) -> None:
    length = 561
    whole = Case(level, SHAPES[name], length)
    want = rig.bits(whole.prefill(0, length, 64))
    whole.program.close()
    for threads, chunk in ((1, 64), (2, 23), (3, 7)):
        case = Case(level, SHAPES[name], length, threads)
        assert np.array_equal(rig.bits(case.prefill(2, length, chunk)), want), (threads, chunk)
        case.program.close()


def test_a_decoded_row_has_the_bits_of_the_prefilled_one(level: str) -> None:
    """Past one partition of 256 positions, where a single row is split over the threads and merged."""
    length = 620
    for name in ("one kv head", "grouped", "long window"):
        case = Case(level, SHAPES[name], length)
        want = rig.bits(case.prefill(0, length, 64))
        for p in (0, 15, 16, 255, 256, 511, 512, 619):
            assert np.array_equal(rig.bits(case.rows((0, p))), want[p : p + 1]), (name, p)
        case.program.close()


def test_rows_of_many_sequences_do_not_touch_each_other(level: str) -> None:
    case = Case(level, Shape(heads=3, kv_heads=1), 300)
    alone = rig.bits(case.prefill(0, 300, 50))
    case.prefill(1, 280, 61)
    case.prefill(2, 17, 17)
    mixed = case.rows((1, 280), (2, 17), (2, 18), (2, 19), (1, 281), (0, 299))
    assert np.array_equal(rig.bits(mixed), alone[[280, 17, 18, 19, 281, 299]])
    case.program.close()


def test_garbage_in_unwritten_slots_is_never_seen(level: str) -> None:
    """A recycled page holds another sequence's rows; here they are infinite and not a number."""
    shape = Shape(lanes=2)
    case = Case(level, shape, 40)
    want = case.prefill(0, 40, 11)
    bad = Case(level, replace(shape), 40)
    good_k, good_v = bad.k.copy(), bad.v.copy()
    bad.program.close()
    bad.k = np.concatenate([good_k, np.full((40, good_k.shape[1]), np.inf, np.float32)])
    bad.v = np.concatenate([good_v, np.full((40, good_v.shape[1]), np.nan, np.float32)])
    bad.q = np.concatenate([bad.q, bad.q])
    bad.program = bad._bind(level, 2)
    slots = bad.pages[0, np.arange(48) // 16] * 16 + np.arange(48) % 16
    poison = np.array([40 + i % 40 for i in range(48)], np.int32)
    # Tokens choose rows of the poisoned tables; the slots are those of lane 0's first pages.
    batch = Batch(
        poison, np.zeros(48, np.int32), slots[None], np.ones(48, np.int32), bad.pages[None], np.zeros(0, np.int32)
    )
    bad.program.run(batch)
    assert np.array_equal(rig.bits(bad.prefill(0, 40, 11)), rig.bits(want))
    case.program.close()
    bad.program.close()
