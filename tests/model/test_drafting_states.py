"""What a plan with drafts leaves behind on the oracle: bit for bit what plain decoding leaves, whatever counted.

Hybrids of random weights, whose drafting block is told here what it drafts, so that every number of drafts comes to
count; its own logits are computed all the same. One rank, and three in the tensor layout that exchange on paper.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from draft_rig import DRAFTS, GREEDY, LANES, LIMITS, PAGES, Desk, Ranks
from leaning import leaning
from ranks import on_paper

from backends.base import PAGE_LEN, Batch, OpenOptions, StatePool
from backends.quant import QuantType
from backends.reference.backend import ReferenceBackend
from backends.reference.program import ReferenceProgram
from homeserve import checkpoint
from homeserve.layouts.share import Share
from homeserve.models.bind import Bound, bind
from homeserve.models.registry import family
from homeserve.wire.records import Sample, Sampling
from homeserve.worker.places import PagePlaces, own_pages
from homeserve.worker.sampling import NotANumber

DATA = Path(__file__).parents[1] / "data"
MODELS = {
    "qwen3_5_text_mtp": DATA / "tiny" / "qwen3_5_text_mtp.f32.gguf",
    "qwen3_next_mtp": DATA / "tiny" / "qwen3_next_mtp.f32.gguf",
    "counter": DATA / "counter.gguf",
}
HYBRIDS = ("qwen3_5_text_mtp", "qwen3_next_mtp")
SEEDED = Sampling(temperature=0.8, seed=11, repetition_penalty=1.2, top_logprobs=2)
PROMPT = [(7 * at * at + 31 * at + 5) % 250 for at in range(21)]
VECTOR = (2, 1, 1)


class Made(NamedTuple):
    """A program of one rank, with what it was bound from."""

    bound: Bound
    program: ReferenceProgram


def made(path: Path, *, drafts: bool = True, share: Share | None = None, acts: Any = None, slots: int = 0) -> Made:
    opened = checkpoint.open(str(path))
    declared = family(opened.arch)
    config = declared.config_from(opened.metadata)
    bound = bind(declared, config, opened.tensors, share, drafts=drafts)
    states = StatePool(bound.state_layers, LANES + 2 if bound.state_layers else 0)
    kv = bound.kv_pool(slots or PAGES * PAGE_LEN, QuantType.F32)
    device = ReferenceBackend(OpenOptions())
    return Made(bound, device.bind(bound.ops, bound.weights, kv, LIMITS, lambda *_: None, states, acts))


def desk_of(model: str | Path, *, drafts: int = DRAFTS, forced: str = "") -> Desk:
    path = MODELS[model] if isinstance(model, str) else model
    each = made(path, drafts=drafts > 0)
    return Desk(each.program, drafts=drafts, forced=forced, vocab=each.bound.config.vocab)


@cache
def plain(model: str, sampling: Sampling, count: int, prompt: tuple[int, ...] = tuple(PROMPT)) -> list[Sample]:
    """What is answered without a drafting block."""
    desk = desk_of(model, drafts=0)
    return desk.answer(desk.begin(1, prompt, sampling), count)


def tell(desk: Desk, answers: Sequence[int], first: int, wrong: int = -1) -> None:
    """From here on the block drafts `answers`, whose first takes position `first`; number `wrong` is another token. It
    computes as ever."""
    own = desk.program.draft

    def draft(batch: Batch) -> np.ndarray:
        logits = own(batch)
        for row, position in enumerate(batch.positions.tolist()):
            at = position + 1 - first
            logits[row] = 0.0
            logits[row, (answers[at] + (at == wrong)) % logits.shape[1]] = 1.0
        return logits

    desk.program.draft = draft


def state_bits(desk: Desk, lane: int, layers: int) -> bytes:
    """Of the first `layers` recurrent layers."""
    states = desk.program.states
    return b"".join(array[lane].tobytes() for kind in (states.conv, states.matrix) for array in kind[:layers])


def poison(desk: Desk, *, trunk: bool) -> None:
    """NaN in all rows of the drafting block's K and V; with `trunk` in every row and state that nobody wrote yet."""
    pools, states = desk.program.pools, desk.program.states
    for layer in range(len(pools.k)) if trunk else [len(pools.k) - 1]:
        pools.k[layer][:] = pools.v[layer][:] = np.nan
    if trunk:
        for array in (*states.conv, *states.matrix):
            array[:] = np.nan


# ---------------------------------------------------------------------------------------------------------- one rank


@pytest.mark.parametrize("counts", range(DRAFTS + 1))
@pytest.mark.parametrize("model", HYBRIDS)
def test_for_every_number_that_counts_states_are_those_of_plain_decoding(model: str, counts: int) -> None:
    wanted = plain(model, SEEDED, 2 + DRAFTS)
    answers = [sample.token for sample in wanted]
    without = desk_of(model, drafts=0)
    asked = without.begin(1, PROMPT, SEEDED)
    without.answer(asked, 2 + counts)
    desk = desk_of(model)
    request = desk.begin(1, PROMPT, SEEDED)
    desk.answer(request, 1)
    tell(desk, [*answers, 0], len(PROMPT), wrong=1 + counts)
    before = state_bits(desk, 1, 99)
    plan = desk.plan(desk.rows(request, 1, DRAFTS))
    desk.take(plan, desk.runner.run(plan).samples)
    assert desk.rounds == [(DRAFTS, 1 + counts)]
    assert request.samples == wanted[: 2 + counts], "log-probabilities among it, to the last bit"
    layers = len(without.program.states.conv)
    assert state_bits(desk, 1, layers) == state_bits(without, 1, layers) != before
    assert desk.lanes[1].length == without.lanes[1].length
    desk.answer(request, 2 + DRAFTS)
    assert request.samples == wanted, "and it goes on as ever"


@pytest.mark.parametrize("model", HYBRIDS)
def test_a_raise_while_drafts_are_verified_leaves_states_bit_for_bit(model: str) -> None:
    desk = desk_of(model)
    request = desk.begin(1, PROMPT, SEEDED)
    desk.answer(request, 3)
    before, accept, run = state_bits(desk, 1, 99), desk.program.accept, desk.program.run

    def broken(kept: Sequence[tuple[int, int]]) -> None:
        raise RuntimeError("no")

    def spoilt(batch: Batch) -> np.ndarray:
        logits = run(batch).copy()
        logits[0, 5] = np.nan
        return logits

    for step, wrong, error in (("accept", broken, RuntimeError), ("run", spoilt, NotANumber)):
        setattr(desk.program, step, wrong)
        with pytest.raises(error):
            desk.runner.run(desk.plan(desk.rows(request, 1, 3)))
        assert state_bits(desk, 1, 99) == before
        desk.program.accept, desk.program.run = accept, run
    desk.answer(request, 9, (3,))
    assert request.samples == plain(model, SEEDED, 9)


@pytest.mark.parametrize("model", ["qwen3_5_text_mtp", "counter"])
def test_nan_in_the_drafting_blocks_pool_and_in_rows_that_nobody_wrote_changes_no_answer(model: str) -> None:
    """Before the first row everywhere; in the block's own K, V and pending input again in the middle."""
    prompt = PROMPT if model != "counter" else list(b"count 86:")
    wanted = plain(model, SEEDED, 16, tuple(prompt))
    desk = desk_of(model)
    poison(desk, trunk=True)
    request = desk.begin(1, prompt, SEEDED)
    desk.answer(request, 7, (3,))
    poison(desk, trunk=False)
    desk.program.states.conv[-1][:] = np.nan
    desk.answer(request, 16, (3,))
    assert request.samples == wanted and len(desk.rounds) > 3


def test_stale_rows_of_a_request_before_change_no_answer() -> None:
    """The lane, its pages and its state were another one's, which drafted behind its end."""
    desk = desk_of("counter")
    desk.answer(desk.begin(1, list(b"count 1795:")), 40, (4,))
    desk.lanes.lanes[1] = None
    request = desk.begin(1, list(b"count 86:"), number=99)
    desk.answer(request, 30, (4,))
    wanted = plain("counter", GREEDY, 30, tuple(b"count 86:"))
    assert [each.token for each in request.samples] == [each.token for each in wanted]


def test_counting_is_foreseen_from_the_first_round_on_and_behind_a_prompt_in_chunks() -> None:
    """So the block had every row of the prompt, at its place."""
    desk = desk_of("counter")
    prompt = list(b"series 98 step 7: 105 112 119 126 133 140 147")
    request = desk.begin(1, prompt)
    for _ in range(4):
        desk.run(desk.rows(request, 12))
    assert desk.answer(request, 30, (3,)) == plain("counter", GREEDY, 30, tuple(prompt))
    accepted = [counted - 1 for _, counted in desk.rounds]
    assert accepted[0] == 3 and sum(accepted) / len(accepted) > 2.0, accepted


@pytest.mark.parametrize("accept", range(DRAFTS + 1))
def test_forced_numbers_leave_the_state_of_what_was_answered(accept: int) -> None:
    """The same tokens as a prompt leave the same state."""
    desk = desk_of("qwen3_5_text_mtp", forced=f"accept:{accept}")
    request = desk.begin(1, PROMPT)
    desk.answer(request, 1)
    desk.run(desk.rows(request, 1, DRAFTS))
    assert desk.rounds == [(DRAFTS, accept + 1)]
    other = desk_of("qwen3_5_text_mtp")
    again = other.begin(1, request.tokens)
    other.run(other.rows(again, len(request.tokens) - 1))
    assert state_bits(other, 1, 99) == state_bits(desk, 1, 99), "with the pending input of the drafting block"


# ------------------------------------------------------------------------------------------------------ three ranks


def three(path: Path, seed: int = 0, forced: str = "", token_vector: Sequence[int] = (3, 2, 1)) -> Ranks:
    group = on_paper(3, seed=seed)
    places: list[PagePlaces] = [own_pages([PAGES * PAGE_LEN], token_vector, rank) for rank in range(3)]
    each = [
        made(path, share=Share.tensor(rank, VECTOR), acts=group.acts[rank], slots=places[rank].slots[0])
        for rank in range(3)
    ]
    return Ranks(group, [one.program for one in each], places=places, forced=forced, vocab=each[0].bound.config.vocab)


@pytest.fixture(scope="module")
def leaned(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Hybrids whose drafts count now and then."""
    folder = tmp_path_factory.mktemp("leaning")
    return cache(lambda model: leaning(MODELS[model], folder / f"{model}.gguf"))


@pytest.mark.parametrize("forced", ["", "wrong"])
@pytest.mark.parametrize("model", [*HYBRIDS, "counter"])
def test_three_ranks_draft_as_one_does(
    model: str, forced: str, leaned: Callable[[str], Path], measured: Callable[[str], None]
) -> None:
    """Prompts in chunks beside requests that draft, on pages of all three ranks."""
    path = leaned(model) if model != "counter" else MODELS[model]
    prompts = [list(b"count 86:"), list(b"series 98 step 7: 105 112 119 126 133 140 147"), list(b"count 730:")]
    if model != "counter":
        prompts = [[each * 3 % 250 for each in prompt] for prompt in prompts]
    samplings = [GREEDY, Sampling(temperature=0.7, seed=5, frequency_penalty=0.3), GREEDY]
    fleet = three(path, forced=forced)
    requests = [fleet.begin(lane, prompts[lane], samplings[lane]) for lane in range(3)]
    rows = fleet.last.rows
    fleet.run(rows(requests[0], len(prompts[0])))
    for chunk in (20, 20, 20):
        fleet.run(rows(requests[0], 1, 2), rows(requests[1], chunk))
    fleet.run(rows(requests[2], len(prompts[2])), rows(requests[1], 1, 1))
    for drafts in (3, 4, 1, 3, 0, 3):
        fleet.run(*(rows(each, 1, drafts if each is not requests[2] else 0) for each in requests))
        fleet.run(*(rows(each, 1, 4 - drafts) for each in requests))
    counted = [rows - 1 for _, rows in fleet.last.rounds]
    measured(f"{model} {forced}: {len(counted)} rounds on three ranks, {sum(counted)} drafts counted")
    assert (sum(counted) > 0) is not bool(forced)
    for lane, request in enumerate(requests):
        desk = desk_of(path, drafts=0)
        alone = desk.begin(lane, prompts[lane], samplings[lane])
        desk.answer(alone, len(request.samples))
        assert alone.tokens[: len(request.tokens)] == request.tokens, lane
