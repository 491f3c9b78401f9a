"""Cases of backends.gpu.ops.sampling: each stage against NumPy, whole draws against homeserve.worker.sampling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from backends.gpu.ops import sampling as ops
from gpu_cases import Array, Case, Maker, address, aligned, nothing
from homeserve.wire.records import Sampling
from homeserve.worker import sampling as host
from homeserve.worker.past import Past, TokenCounts

UNITS = 2.0**44


@dataclass
class Setting:
    """Logits, what is asked of them, and the memory of the launches."""

    logits: Array
    asked: Sequence[ops.Draw | ops.Tell]
    counts: Array = field(default_factory=lambda: aligned(np.zeros((1, 2, 1), np.int32)))
    inputs: Array = field(default_factory=lambda: aligned(np.zeros(1, np.int32)))
    masks: Array = field(default_factory=lambda: aligned(np.zeros(1, np.uint32)))
    pad: int = 0

    def __post_init__(self) -> None:
        lines, self.vocab = self.logits.shape
        self.table = ops.table_of(self.asked, self.vocab)
        rows, self.pitch = len(self.asked), self.vocab + self.pad
        padded = nothing((lines, self.pitch))
        padded[:, : self.vocab] = self.logits
        self.padded, self.rows, self.lists = padded, aligned(self.table.rows), aligned(self.table.lists)
        self.z = nothing((max(self.table.adjusted, 1), ops.adjusted_bytes(1, self.vocab) // 4))
        self.work = nothing((rows, ops.work_bytes(1, self.vocab)), np.uint8)
        self.tokens, self.statuses = nothing((rows,), np.int32), nothing((rows,), np.int32)
        self.told = aligned(np.zeros(rows, ops.TOLD))

    @property
    def arrays(self) -> tuple[Array, ...]:
        own = (self.padded, self.rows, self.lists, self.z, self.work, self.tokens, self.statuses, self.told)
        return (*own, self.counts, self.inputs, self.masks)

    @property
    def launches(self) -> tuple[Any, ...]:
        memory = ops.Memory(
            *(address(each) for each in (self.padded, self.rows, self.work, self.tokens, self.statuses)),
            *(address(each) for each in (self.z, self.lists, self.inputs, self.counts, self.masks, self.told)),
        )
        return ops.sample(memory, self.table, self.vocab, self.pitch)

    # What the launches hand on, as sample.h lays it out.

    def histogram(self, row: int) -> tuple[Array, Array]:
        """Mass and count of each bin."""
        mass, count = self.work[row, : ops.BINS * 8], self.work[row, ops.BINS * 8 : ops.BINS * 12]
        return mass.view(np.uint64), count.view(np.uint32)

    def listed(self, row: int) -> Array:
        """The keys in the list, sorted."""
        size = int(self.work[row, ops.BINS * 12 :][:4].view(np.uint32)[0])
        return np.sort(self.work[row, -ops.LIST * 8 :].view(np.uint64)[:size])


def logits_of(rng: np.random.Generator, rows: int, vocab: int) -> Array:
    """Rows as models give them, flat ones, and ones full of equal logits."""
    logits = rng.standard_normal((rows, vocab)) * rng.choice([0.02, 1.0, 3.0, 9.0], (rows, 1))
    flat = rng.random(rows) < 0.3
    logits[flat] = np.round(logits[flat])
    return logits.astype(np.float32)


def vocab_of(rng: np.random.Generator) -> int:
    """Sometimes of one chunk, sometimes of three, with tails."""
    return int(rng.choice([int(rng.integers(33, 900)), int(rng.integers(8193, 9000))]))


def settings_of(rng: np.random.Generator) -> dict[str, Any]:
    """Temperature and a random part of the filters."""
    found: dict[str, Any] = {
        "temperature": float(rng.choice([0.0, 0.3, 0.7, 1.0, 1.5, 3.0])),
        "seed": int(rng.integers(0, 2**63)) * 2 + int(rng.integers(2)),
    }
    for name, value in (
        ("top_k", int(rng.integers(1, 200))),
        ("top_p", float(rng.random())),
        ("min_p", float(rng.random() * 0.3)),
        ("typical_p", float(rng.random())),
    ):
        if rng.random() < 0.4:
            found[name] = value
    return found


@dataclass(frozen=True)
class Adjusting:
    """A row with every kind of adjustment, for both sides. `seen` are the tokens behind its counts."""

    draw: ops.Draw
    sampling: Sampling
    counts: TokenCounts
    seen: Array
    generated: Array
    mask: Array | None

    def expected(self, logits: Array) -> Array:
        """The logits after the steps before temperature."""
        z = host.adjusted(logits, self.sampling, Past(self.counts), 0)
        return z if self.mask is None else np.where(self.mask, z, np.float32(-np.inf))


def adjusting_of(rng: np.random.Generator, row: int, vocab: int, inputs: Array, masks: int) -> Adjusting:
    """Row `row` with the counts of slot `row`, and some of the plan's `inputs` beside them."""
    counts = TokenCounts(vocab)
    seen = rng.integers(0, vocab, 40).astype(np.int32)
    generated = np.arange(40) >= 15
    counts.add(seen, generated)
    first, size = int(rng.integers(0, 4)), int(rng.integers(0, 7))
    from_which = int(rng.integers(0, 3))
    counts.add(inputs[first : first + size], np.arange(size) >= from_which)
    chance = rng.random(5) < 0.6
    biased = rng.integers(0, vocab, 6)
    penalties = {
        "repetition_penalty": float(rng.choice([1.0, 1.1, 0.7, 2.0])),
        "presence_penalty": float(np.round(rng.normal(), 1)) * bool(chance[0]),
        "frequency_penalty": float(np.round(rng.normal(), 1)) * bool(chance[1]),
    }
    biases = tuple((int(token), float(np.round(rng.normal() * 9, 1))) for token in biased) if chance[2] else ()
    bans = tuple(int(token) for token in rng.integers(0, vocab, 5)) if chance[3] else ()
    mask = rng.random(vocab) < 0.7 if masks and chance[4] else None
    shared = settings_of(rng)
    draw = ops.Draw(
        *(row, int(rng.integers(0, 1 << 20))),
        **shared,
        slot=row,
        inputs=(first, size, from_which),
        repetition=penalties["repetition_penalty"],
        presence=penalties["presence_penalty"],
        frequency=penalties["frequency_penalty"],
        biases=biases,
        bans=bans,
        mask=row if mask is not None else ops.NONE,
    )
    sampling = Sampling(**shared, **penalties, logit_bias=biases, forbidden=bans, min_tokens=1)
    return Adjusting(draw, sampling, counts, seen, generated, mask)


def adjusting_setting(rng: np.random.Generator, rows: int, vocab: int) -> tuple[Setting, list[Adjusting]]:
    """Rows with every kind of adjustment; the counts on the card are those without the plan's inputs."""
    logits = logits_of(rng, rows, vocab)
    inputs = aligned(rng.integers(0, min(vocab, 6), 12).astype(np.int32))
    each = [adjusting_of(rng, row, vocab, inputs, rows) for row in range(rows)]
    counts = aligned(np.zeros((rows, 2, vocab), np.int32))
    masks = aligned(np.zeros((rows, -(-vocab // 32)), np.uint32))
    for row, one in enumerate(each):
        np.add.at(counts[row, 0], one.seen, 1)
        np.add.at(counts[row, 1], one.seen[one.generated], 1)
        if one.mask is not None:
            bits = np.packbits(one.mask, bitorder="little")
            masks[row].view(np.uint8)[: len(bits)] = bits
    pad = int(rng.integers(0, 5))
    return Setting(logits, [one.draw for one in each], counts, inputs, masks, pad), each


# -------------------------------------------------------------------------------------------------------------- cases


def _adjust(rng: np.random.Generator, warp: int) -> Case:
    vocab = vocab_of(rng)
    setting, each = adjusting_setting(rng, 3, vocab)

    def check() -> None:
        for row, one in enumerate(each):
            np.testing.assert_array_equal(setting.z[row, :vocab], one.expected(setting.logits[row]))

    return Case(setting.launches[:1], setting.arrays, check)


def _below(logits: Array, temperature: float) -> Array:
    return (logits.max() - logits) / np.float32(temperature) + np.float32(0.0)  # no minus zeros


def _bins(below: Array) -> Array:
    return np.where(below < (ops.BINS - 1) / 16, np.minimum(below, 40) * 16, ops.BINS - 1).astype(np.int64)


def _count(rng: np.random.Generator, warp: int) -> Case:
    vocab = vocab_of(rng)
    logits = logits_of(rng, 2, vocab)
    temperatures = [0.2, 1.3]
    setting = Setting(logits, [ops.Draw(row, temperature=temperatures[row]) for row in range(2)])

    def check() -> None:
        for row in range(2):
            below = _below(logits[row], temperatures[row])
            mass, count = setting.histogram(row)
            np.testing.assert_array_equal(count, np.bincount(_bins(below), minlength=ops.BINS))
            weights = np.exp(-below.astype(np.float64))
            want = np.bincount(_bins(below), weights, minlength=ops.BINS)
            np.testing.assert_allclose(mass / UNITS, want, rtol=2e-7, atol=vocab / UNITS)

    return Case(setting.launches[:2], setting.arrays, check)


def _gather(rng: np.random.Generator, warp: int) -> Case:
    vocab = vocab_of(rng)
    logits = logits_of(rng, 3, vocab)
    top_k, reach = int(rng.integers(1, 30)), float(rng.uniform(0.01, 0.5))
    asked = [ops.Draw(0, top_k=top_k), ops.Draw(1, min_p=reach), ops.Draw(2, top_p=0.6)]
    setting = Setting(logits, asked)

    def check() -> None:
        for row in range(3):
            below = _below(logits[row], 1.0)
            order = np.sort(below)
            mass = np.cumsum(np.exp(-order.astype(np.float64)))
            needed = [order[min(top_k, vocab) - 1], np.float32(-np.log(reach)), order[mass >= 0.6 * mass[-1]][0]][row]
            keys = below.view(np.uint32).astype(np.uint64) << 20 | np.arange(vocab, dtype=np.uint64)
            kept = _bins(below) <= _bins(np.array([needed]))[0]
            np.testing.assert_array_equal(setting.listed(row), np.sort(keys[kept]))

    return Case(setting.launches[:3], setting.arrays, check)


def _draw(rng: np.random.Generator, warp: int) -> Case:
    vocab = vocab_of(rng)
    setting, each = adjusting_setting(rng, 3, vocab)

    def check() -> None:
        for row, one in enumerate(each):
            want = host.draw(one.expected(setting.logits[row]), _plain(one.sampling), None, one.draw.position, 0)
            assert setting.tokens[row] == want, one
            assert setting.statuses[row] == ops.DRAWN

    return Case(setting.launches, setting.arrays, check)


def _plain(sampling: Sampling) -> Sampling:
    """The steps from temperature on."""
    return Sampling(
        *(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, sampling.typical_p), seed=sampling.seed
    )


def _broken(rng: np.random.Generator, warp: int) -> Case:
    """Rows that no token can be drawn from, an infinite logit, and greedy rows with equal logits."""
    vocab = vocab_of(rng)
    logits = logits_of(rng, 5, vocab)
    at = rng.integers(0, vocab, 5)
    logits[0, at[0]] = np.nan
    logits[0, at[1]] = np.inf
    logits[1] = -np.inf
    logits[2, at[2:]] = np.inf
    logits[3] = np.where(np.arange(vocab) % 7 == 3, np.float32(0.0), np.float32(-0.0))
    asked = [ops.Draw(row, temperature=1.0 if row < 3 else 0.0, top_p=0.9) for row in range(5)]
    setting = Setting(logits, asked)

    def check() -> None:
        np.testing.assert_array_equal(setting.tokens, logits.argmax(axis=1))
        want = [ops.NOT_A_NUMBER, ops.NOTHING, ops.DRAWN, ops.DRAWN, ops.DRAWN]
        np.testing.assert_array_equal(setting.statuses, want)

    return Case(setting.launches, setting.arrays, check)


def _told(rng: np.random.Generator, warp: int) -> Case:
    vocab = vocab_of(rng)
    logits = logits_of(rng, 2, vocab)
    logits[1, rng.integers(0, vocab, 9)] = -np.inf
    given, top = int(rng.integers(vocab)), int(rng.integers(1, ops.TOP + 1))
    asked = [ops.Draw(0, 5, 9), ops.Tell(0, top, drawn_by=0), ops.Tell(1, ops.TOP, given), ops.Tell(1, 0, given)]
    setting = Setting(logits, asked)

    def check() -> None:
        drawn = host.draw(logits[0], Sampling(seed=9), None, 5, 0)
        for row, line, token, count in ((1, 0, drawn, top), (2, 1, given, ops.TOP), (3, 1, given, 0)):
            told, want = setting.told[row], host.logprobs(logits[line], token, count)
            assert (told["status"], told["count"], told["token"]) == (ops.DRAWN, len(want.top), token)
            assert tuple(told["ids"][: told["count"]]) == tuple(each for each, _ in want.top)
            values = [told["value"], *told["values"][: told["count"]]]
            np.testing.assert_allclose(values, [want.logprob, *(each for _, each in want.top)], rtol=3e-7, atol=3e-6)

    return Case(setting.launches, setting.arrays, check)


def _counts(rng: np.random.Generator, warp: int) -> Case:
    vocab, slots, entries = int(rng.integers(5, 60)), 3, int(rng.integers(1, 700))
    counts = aligned(rng.integers(5, 9, (slots, 2, vocab)).astype(np.int32))
    tokens = aligned(rng.integers(0, vocab, entries).astype(np.int32))
    of = aligned(rng.integers(-1, slots, entries).astype(np.int32))
    generated = aligned(rng.integers(0, 2, entries).astype(np.uint8))
    want, back = counts.copy(), bool(rng.integers(2))
    for token, slot, output in zip(tokens, of, generated, strict=True):
        if slot >= 0:
            want[slot, : 1 + output, token] += -1 if back else 1
    launch = ops.add_counts(
        *(address(each) for each in (counts, tokens, of, generated)), entries=entries, vocab=vocab, back=back
    )

    def check() -> None:
        np.testing.assert_array_equal(counts, want)

    return Case((launch,), (counts, tokens, of, generated), check)


CASES: dict[str, Maker] = {
    "sample_adjust": _adjust,
    "sample_count": _count,
    "sample_gather": _gather,
    "sample_draw": _draw,
    "sample_draw:broken": _broken,
    "sample_told": _told,
    "counts_add": _counts,
}
