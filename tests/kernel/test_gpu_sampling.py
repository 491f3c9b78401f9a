"""Draws on a card (emulated) are the host's: the same token for the same logits, settings, seed and position.

Sums differ in the last bits: the host adds up doubles, the card integers. So a token may differ where the random
number, or the end of a filter, falls between the two sums. How often is counted; each such draw must be near an edge.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest
import simt_rig as rig
from gpu_cases import Array, address, aligned, sampling
from gpu_cases.sampling import Setting

from backends.gpu.ops import sampling as ops
from homeserve.wire.records import Sampling
from homeserve.worker import sampling as host
from homeserve.worker.filters import candidates

SEED = int(os.environ.get("HOMESERVE_TEST_SEED") or "9", 16)
SLOW = os.environ.get("HOMESERVE_TEST_TIER") == "slow"
DRAWS = 6000 if SLOW else 480
ROWS = 12
ROUNDING = 4e-6
"""Of the mass of all tokens: how far the host's sums and the card's may part."""

pytestmark = pytest.mark.skipif(rig.compiler() is None, reason="no C++ compiler")
WIDTHS = (("cuda", 32), ("hip", 64))


@pytest.fixture(params=WIDTHS, ids=["32", "64"])
def kernels(request: pytest.FixtureRequest) -> rig.Kernels:
    vendor, warp = request.param
    return rig.load("sample", vendor, warp)


def _settings(rng: np.random.Generator) -> Iterator[tuple[Setting, list[Sampling]]]:
    for _ in range(DRAWS // ROWS // len(WIDTHS)):
        vocab = sampling.vocab_of(rng)
        logits = sampling.logits_of(rng, ROWS, vocab)
        each = [sampling.settings_of(rng) for _ in range(ROWS)]
        positions = rng.integers(0, 1 << 20, ROWS)
        asked = [ops.Draw(row, int(positions[row]), **each[row]) for row in range(ROWS)]
        yield Setting(logits, asked), [Sampling(**settings) for settings in each]


def _edges(logits: Array, wanted: Sampling, tokens: tuple[int, int]) -> float:
    """How far apart, in the row's mass, the places of two tokens are at least."""
    ids, weights = candidates(logits, logits, float(logits.max()), wanted)
    places = np.array(tokens) if ids is None else np.searchsorted(ids, tokens)
    ends = np.cumsum(weights, dtype=np.float64) / weights.sum(dtype=np.float64)
    low, high = sorted(places)
    return float(ends[min(high, len(ends)) - 1] - ends[low]) if high > low else 0.0


def test_draws_are_those_of_the_host(kernels: rig.Kernels) -> None:
    rng = np.random.default_rng([SEED, kernels.warp])
    drawn = other = 0
    for setting, wanted in _settings(rng):
        kernels.run(*setting.launches)
        for row, one in enumerate(wanted):
            want = host.draw(setting.logits[row], one, None, setting.asked[row].position, 0)
            drawn += 1
            if setting.tokens[row] != want:
                other += 1
                assert one.temperature > 0.0, (row, setting.tokens[row], want)
                apart = _edges(setting.logits[row], one, (int(setting.tokens[row]), want))
                assert apart < ROUNDING, (row, one, setting.tokens[row], want)
    print(f"{drawn} draws at warps of {kernels.warp}, {other} of them another token than the host's")
    assert drawn >= DRAWS // len(WIDTHS) - ROWS
    assert other <= 1 + drawn // 1000


def test_random_numbers_are_the_hosts_to_the_bit(kernels: rig.Kernels) -> None:
    """Of equal logits every token is as wide as all others, so the token is the number's first bits."""
    rng = np.random.default_rng(SEED)
    seeds = [0, 1, 2**63, 2**64 - 1, *(int(each) for each in rng.integers(0, 2**63, 12))]
    positions = [0, 1, 2**31, 2**40, *(int(each) for each in rng.integers(0, 2**40, 12))]
    pairs = list(zip(seeds, positions, strict=True))
    asked = [ops.Draw(0, position, seed) for seed, position in pairs]
    setting = Setting(np.zeros((1, 1 << 15), np.float32), asked)
    kernels.run(*setting.launches)
    want = [int(host.uniform(seed, position) * (1 << 15)) for seed, position in pairs]
    np.testing.assert_array_equal(setting.tokens, want)


@pytest.mark.parametrize("vocab", [151936, 262144])
def test_whole_vocabularies(vocab: int) -> None:
    """With a list, without one (more than LIST tokens are left), and by chunks."""
    kernels = rig.load("sample", "cuda", 32)
    rng = np.random.default_rng([SEED, vocab])
    logits = np.stack([rng.standard_normal(vocab) * 2.5, rng.standard_normal(vocab) * 0.1]).astype(np.float32)
    logits[0, rng.integers(0, vocab, 5)] += 12.0
    each = [
        (0, {"top_p": 0.95}),
        (0, {"top_k": 40, "top_p": 0.9, "min_p": 0.02}),
        (1, {"top_p": 0.9}),
        (1, {"top_k": 50_000}),
        (0, {"temperature": 0.8}),
        (1, {}),
    ]
    asked = [ops.Draw(line, 77 + row, SEED, **settings) for row, (line, settings) in enumerate(each)]
    setting = Setting(logits, [*asked, ops.Tell(1, 20, drawn_by=2)])
    kernels.run(*setting.launches)
    for row, (line, settings) in enumerate(each):
        wanted = Sampling(**settings, seed=SEED)
        want = host.draw(logits[line], wanted, None, asked[row].position, 0)
        got = int(setting.tokens[row])
        assert got == want or _edges(logits[line], wanted, (got, want)) < ROUNDING, settings
    told, want_told = setting.told[6], host.logprobs(logits[1], int(setting.tokens[2]), 20)
    assert tuple(told["ids"]) == tuple(token for token, _ in want_told.top)
    np.testing.assert_allclose(told["values"], [value for _, value in want_told.top], rtol=0, atol=1e-5)


def test_a_row_does_not_depend_on_others_nor_on_the_order_of_blocks() -> None:
    rng = np.random.default_rng(SEED)
    setting, each = sampling.adjusting_setting(rng, 5, 5000)
    for vendor, warp in WIDTHS:
        rig.load("sample", vendor, warp).run(*setting.launches)
        together = setting.tokens.copy()
        rig.load("sample", vendor, warp).run(*setting.launches, backwards=True)
        np.testing.assert_array_equal(setting.tokens, together)
    for row, one in enumerate(each):
        alone = Setting(setting.logits, [one.draw], setting.counts, setting.inputs, setting.masks)
        rig.load("sample", "cuda", 32).run(*alone.launches)
        assert alone.tokens[0] == together[row]


def test_rows_of_drafts_draw_as_if_each_were_the_last(kernels: rig.Kernels) -> None:
    """With the inputs of the rows before, against counts to which those were added, and from which they are taken."""
    rng, vocab, drafts = np.random.default_rng(SEED), 300, 4
    logits = np.round(rng.standard_normal((drafts, vocab)) * 2).astype(np.float32)
    inputs = aligned(rng.integers(0, 9, drafts).astype(np.int32))
    generated = aligned((np.arange(drafts) >= 1).astype(np.uint8))
    before = rng.integers(0, 3, (1, 2, vocab)).astype(np.int32)
    penalties = {"slot": 0, "repetition": 1.3, "presence": 0.4, "frequency": 0.3}
    rows = [ops.Draw(row, 50 + row, SEED, inputs=(0, row + 1, 1), **penalties) for row in range(drafts)]
    at_once = Setting(logits, rows, aligned(before), inputs)
    kernels.run(*at_once.launches)

    counts, slots = aligned(before), aligned(np.zeros(drafts, np.int32))
    at = [address(each) for each in (counts, inputs, slots, generated)]
    for row in range(drafts):
        entry = [at[0], at[1] + 4 * row, at[2] + 4 * row, at[3] + row]
        added = ops.add_counts(*entry, 1, vocab)
        one = Setting(logits, [ops.Draw(row, 50 + row, SEED, **penalties)], counts)
        kernels.run(added, *one.launches)
        assert one.tokens[0] == at_once.tokens[row]
        np.testing.assert_array_equal(one.z[0], at_once.z[row])
    kernels.run(ops.add_counts(*at, drafts, vocab, back=True))
    np.testing.assert_array_equal(counts, before)


def test_greedy_rows_want_two_launches_and_what_is_outside_is_refused() -> None:
    greedy = Setting(np.zeros((1, 40), np.float32), [ops.Draw(0, temperature=0.0)])
    assert [each.symbol.name for each in greedy.launches] == ["sample_adjust", "sample_draw"]
    for wrong in (ops.Draw(0, bans=(40,)), ops.Draw(0, biases=((-1, 2.0),)), ops.Tell(0, 21, 3), ops.Tell(0, 2)):
        with pytest.raises(ValueError, match="of a vocabulary of 40"):
            ops.table_of([wrong], 40)
    with pytest.raises(ValueError, match="in rows of 39"):
        ops.sample(ops.Memory(0, 0, 0, 0, 0), ops.table_of([ops.Draw(0)], 40), 40, 39)
