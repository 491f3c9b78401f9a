"""Plans with drafts answer what plans without them do: real models on the CPU, from one rank to three.

A *scene* has what may go wrong between plans: prompts in chunks beside others that draft, a repetition penalty, a
seed, a checkpoint and a hit of it that drafts at once, a client that leaves in the middle and another request on its
pages. It is played without drafts on one rank, and then with 1 to 4 of them on one to three ranks, in one memory or in
several, with the drafting block as it is and with every draft made wrong. Tokens must be the same, and on one rank the
log-probabilities bit for bit.

The model that counts drafts well. The hybrids of random weights lean towards a few tokens (`leaning`), so that every
number of drafts comes to count there. What was drafted and counted is printed.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "flip"))

from flip_fleet import LANES, Play
from leaning import leaning

from homeserve.wire.records import Logprobs

SLOW = os.environ.get("HOMESERVE_TEST_TIER") == "slow"
DATA = Path(__file__).parents[1] / "data"
MOST = 4
TOLERANCE = 1e-3
"""Of a log-probability where sums are taken in another order."""
LIMIT_S = 200.0
"""For hangs."""
COUNTER = "counter"
HYBRIDS = ("qwen3_5_text_mtp", "qwen3_next_mtp")
RANGES = {COUNTER: ((0, 2), (2, 4), (4, 6)), **dict.fromkeys(HYBRIDS, ((0, 2), (2, 3), (3, 4)))}
Texts = tuple[list[int], list[int], list[int], list[int], list[int]]
Run = Callable[[Callable[[], Awaitable[None]]], None]


def texts_of(model: str) -> Texts:
    """Prompts of the four requests, and what the one that goes on from a checkpoint adds."""
    if model == COUNTER:
        found = ("count 1795:", "series 98 step 7: 105 112 119 126 133 140 147", "count 730:", "copy hello:", " 133")
        return tuple(list(text.encode()) for text in found)  # type: ignore[return-value]
    lengths = (20, 45, 3, 30, 5)
    return tuple(  # type: ignore[return-value]
        [(7 * at * at + 31 * at + 3 * which) % 250 + 1 for at in range(count)] for which, count in enumerate(lengths)
    )


@dataclass
class Played:
    """What a scene gave: tokens and log-probabilities by request, and of each round how many of its drafts counted."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[Logprobs]] = field(default_factory=dict)
    rounds: list[tuple[int, int]] = field(default_factory=list)

    def take(self, play: Play, number: int) -> None:
        each = play.requests[number]
        self.tokens[number] = play.answer(number)
        self.logprobs[number] = [sample.logprobs for sample in each.answers if sample.logprobs is not None]
        self.rounds += each.rounds

    def told(self, what: str) -> str:
        counted = Counter(accepted for _, accepted in self.rounds)
        accepted = sum(accepted for _, accepted in self.rounds)
        return f"{what}: {len(self.rounds)} rounds, {accepted} accepted, {dict(sorted(counted.items()))}"


async def scene(play: Play, model: str, drafts: int, chunk: int = 16, flips: bool = False) -> Played:
    """`flips`: the layout changes between its parts."""
    found, texts = Played(), texts_of(model)

    async def turn() -> None:
        if flips:
            await play.flip()

    play.begin(1, 0, texts[0], top_logprobs=2)
    await play.run(64)
    await turn()
    play.begin(2, 2, texts[1], repetition_penalty=1.05, presence_penalty=0.1, top_logprobs=1)
    for at in range(chunk, 33, chunk):  # a prompt in chunks beside an answer that drafts
        await play.run(chunk, save={2: LANES} if at == 32 else None, drafts={1: drafts})
    play.begin(3, 1, texts[2], temperature=0.8, seed=77, top_logprobs=2)
    await play.until({1: 12, 3: 9}, 64, drafts)
    await turn()
    await play.until({2: 6, 3: 14}, 64, drafts)
    found.take(play, 3)
    play.give_up(3)
    play.begin(5, 1, texts[3], temperature=1.2, top_p=0.9, seed=5)
    play.begin_from(4, 3, LANES, texts[4])
    await play.until({4: 3, 5: 2}, chunk, drafts)
    await turn()
    await play.until({1: 22, 2: 12, 4: 7, 5: 6}, 64, drafts)
    await turn()
    await play.until({1: 40, 2: 24, 4: 20, 5: 20}, 64, drafts)
    for number in (1, 2, 4, 5):
        found.take(play, number)
    for number in (1, 2, 4, 5):
        play.give_up(number)
    play.saved.clear()
    return found


# ------------------------------------------------------------------------------------------------------------- models


@pytest.fixture(scope="module")
def file_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("leaning")
    made: dict[str, Path] = {COUNTER: DATA / "counter.gguf"}

    def file_of(model: str) -> Path:
        if model not in made:
            made[model] = leaning(DATA / "tiny" / f"{model}.f32.gguf", folder / f"{model}.gguf")
        return made[model]

    return file_of


@pytest.fixture
def run() -> Run:
    def run(main: Callable[[], Awaitable[None]]) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(LIMIT_S):
                await main()

        asyncio.run(bounded())

    return run


ALONE: dict[str, Played] = {}


async def alone(path: Path, model: str) -> Played:
    """Without drafts, on one rank that has loaded no drafting block."""
    if model not in ALONE:
        async with Play(path, 1, kv_type="f32", inside=True) as play:
            ALONE[model] = await scene(play, model, 0)
        assert not ALONE[model].rounds
    return ALONE[model]


def same(found: Played, wanted: Played, *, bits: bool = False) -> None:
    assert found.tokens == wanted.tokens
    if bits:
        assert found.logprobs == wanted.logprobs
        return
    for number, known in wanted.logprobs.items():  # last digits depend on which rank keeps a page
        assert [each.token for each in found.logprobs[number]] == [each.token for each in known]
        apart = [abs(one.logprob - other.logprob) for one, other in zip(found.logprobs[number], known, strict=True)]
        assert max(apart, default=0.0) < TOLERANCE


@pytest.fixture
def tell(capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[[str], None]]:
    """Lines that are printed whether the test passes or not."""
    lines: list[str] = []
    yield lines.append
    with capsys.disabled():
        print("".join(f"\n{line}" for line in lines))


# --------------------------------------------------------------------------------------------------------- one rank


@pytest.mark.parametrize("model", [COUNTER, *HYBRIDS])
def test_one_rank_answers_the_same_with_1_to_4_drafts(
    run: Run, file_of: Callable[[str], Path], model: str, tell: Callable[[str], None]
) -> None:
    async def main() -> None:
        path = file_of(model)
        wanted = await alone(path, model)
        counted: set[int] = set()
        async with Play(path, 1, kv_type="f32", drafts=MOST, inside=True) as play:
            same(await scene(play, model, 0), wanted, bits=True)
            for drafts in range(1, MOST + 1):
                for chunk in (8, 16, 32) if SLOW else (32 >> drafts % 3,):
                    found = await scene(play, model, drafts, chunk)
                    tell(found.told(f"{model}, {drafts} drafts, chunks of {chunk}"))
                    same(found, wanted, bits=True)
                    assert max(accepted for _, accepted in found.rounds) > 0
                    counted |= {accepted for asked, accepted in found.rounds if asked == MOST}
        assert counted >= ({0, MOST} if model == COUNTER else {0, 1, 2}), "of some numbers nothing was shown"

    run(main)


@pytest.mark.parametrize("model", [COUNTER, *HYBRIDS])
def test_one_rank_answers_the_same_where_every_draft_is_wrong(
    run: Run, file_of: Callable[[str], Path], model: str, tell: Callable[[str], None]
) -> None:
    async def main() -> None:
        path = file_of(model)
        wanted = await alone(path, model)
        async with Play(path, 1, kv_type="f32", drafts=MOST, drafts_test="wrong", inside=True) as play:
            for drafts in (1, MOST):
                found = await scene(play, model, drafts)
                tell(found.told(f"{model}, {drafts} wrong drafts"))
                same(found, wanted, bits=True)
                assert len(found.rounds) > 50

    run(main)


def test_counts_are_foreseen(run: Run, file_of: Callable[[str], Path]) -> None:
    """On a task that it was trained on nearly every draft counts, from the first round on."""

    async def main() -> None:
        async with Play(file_of(COUNTER), 1, kv_type="f32", drafts=3, inside=True) as play:
            play.begin(1, 0, list(b"count 86:"))
            await play.until({1: 97}, 64, 3)
            rounds = play.requests[1].rounds
            assert bytes(play.answer(1)).startswith(b" 87 88 89 90")
            assert rounds[0] == (3, 3) and sum(accepted for _, accepted in rounds) / len(rounds) > 2.5

    run(main)


# ---------------------------------------------------------------------------------------------------- several ranks

CASES = [
    (model, ranks, unified)
    for model in (COUNTER, *HYBRIDS)
    for ranks in (2, 3)
    for unified in (False, True)
    if SLOW or (model, ranks, unified) in ((COUNTER, 3, False), (HYBRIDS[0], 2, True), (HYBRIDS[1], 3, False))
]


def several(path: Path, model: str, ranks: int, unified: bool, **more: Any) -> Play:
    """Of three: uneven shares of the weights and of the rows. It rests in the layout in which it drafts."""
    ranges = RANGES[model] if ranks == 3 else (RANGES[model][0], (RANGES[model][1][0], RANGES[model][2][1]))
    vectors: dict[str, Any] = {"weight_vector": (2, 1, 1)[:ranks], "token_vector": (3, 2, 1)[:ranks]}
    more = {"layout": "tensor", "drafts": MOST, "kv_type": "f32"} | more
    return Play(path, ranks, ranges=ranges, unified=unified, **vectors, **more)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("model", "ranks", "unified"), CASES)
def test_ranks_answer_the_same_across_flips_with_drafts_and_without(
    run: Run, file_of: Callable[[str], Path], model: str, ranks: int, unified: bool, tell: Callable[[str], None]
) -> None:
    """In the tensor layout alone, where all ranks draft, and then with flips in between: there only the rank that has
    the block keeps it filled."""

    async def main() -> None:
        path = file_of(model)
        wanted = await alone(path, model)
        async with several(path, model, ranks, unified) as play:
            same(await scene(play, model, 0), wanted)
            for drafts in range(1, MOST + 1) if SLOW else (3,):
                for flips in (False, True):
                    found = await scene(play, model, drafts, flips=flips)
                    tell(found.told(f"{model}, {ranks} ranks, {drafts} drafts{', flips' if flips else ''}"))
                    same(found, wanted)
                    assert sum(accepted for _, accepted in found.rounds) > 0

    run(main)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("unified", [False, True] if SLOW else [False])
def test_ranks_answer_the_same_where_every_draft_is_wrong(
    run: Run, file_of: Callable[[str], Path], unified: bool, tell: Callable[[str], None]
) -> None:
    async def main() -> None:
        path = file_of(COUNTER)
        wanted = await alone(path, COUNTER)
        async with several(path, COUNTER, 3, unified, drafts_test="wrong") as play:
            found = await scene(play, COUNTER, 3, flips=True)
            tell(found.told("wrong drafts on 3 ranks"))
            same(found, wanted)
            assert found.rounds

    run(main)
