"""`homeserve up` with several ranks says what one rank says: SmolLM2 through the official client.

One fleet serves all tests of its shape, with a pool so small that a crowd is preempted; after each test the server is
idle and its census adds up, and at the end it leaves nothing. In the pipeline layout every number is the same. In the
tensor layout sums are taken in another order: log-probabilities differ by a little, and texts may part only where one
rank's best token leads by less than that.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# The test folders are no package (pytest's importlib mode); what tests of ranks share lies here.
sys.path.insert(0, str(Path(__file__).parent))

from rank_rig import NewBox, Said, Served, Shape, greedy, started

pytestmark = pytest.mark.timeout(300)

SLOW = os.environ.get("HOMESERVE_TEST_TIER") == "slow"
CHUNK = 32
ERROR_MAX = 0.1
"""Of a log-probability, in the tensor layout (model/test_smollm2_ranks.py measures logits)."""
FLAGS = ("--threads", "1", "--context", "512", "--kv-tokens", "512", "--chunk", str(CHUNK))
LONG = " ".join(f"Line {n}: the ferry leaves the harbour at {n % 12 + 1} and comes back at noon." for n in range(8))
PROMPTS = ("Hi", "The capital of France is", "def fibonacci(n):\n", LONG)
"""One token (most ranks keep none of its rows), a few, and more than four chunks."""


SHAPES = [
    Shape("pipeline", "discrete", "20,10"),
    Shape("tensor", "unified", "1,1", "1,1"),
    Shape("pipeline", "unified", "14,8,8"),
    Shape("tensor", "discrete", "30,17,17", "28,26,20"),
]
if SLOW:
    SHAPES += [
        Shape("pipeline", "unified", "15,15"),
        Shape("tensor", "discrete", "2,1", "1,3"),
        Shape("pipeline", "discrete", "12,10,8"),
        Shape("tensor", "unified", "28,26,20", "2,1,1"),
    ]


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory, new_box: NewBox, smollm2: str) -> Iterator[Served]:
    yield from started(new_box(tmp_path_factory.mktemp("one")), smollm2, FLAGS)


@pytest.fixture(scope="module", params=SHAPES, ids=str)
def ranks(
    tmp_path_factory: pytest.TempPathFactory, new_box: NewBox, smollm2: str, request: pytest.FixtureRequest
) -> Iterator[Served]:
    yield from started(new_box(tmp_path_factory.mktemp("ranks")), smollm2, FLAGS, request.param)


@pytest.fixture(autouse=True)
def idle_afterwards(ranks: Served, wait_until: Callable[..., Any]) -> Iterator[None]:
    yield
    ranks.check_idle(wait_until)


def compare(ranks: Served, got: list[Said], right: list[Said]) -> None:
    if ranks.shape is not None and ranks.shape.exact:
        assert got == right
        return
    same = [mine.agrees(known, ERROR_MAX) for mine, known in zip(got, right, strict=True)]
    assert sum(same) >= len(same) - 1, "texts part where one rank is not sure: once at most"


def test_streams_at_once_are_those_of_one_rank(ranks: Served, one: Served) -> None:
    """A prompt of one token, and one of several chunks that are in flight together."""
    asked = [greedy(prompt) for prompt in PROMPTS]
    compare(ranks, ranks.ask_all(*asked), [one.alone(each) for each in asked])


def test_a_next_turn_is_found_in_the_cache(ranks: Served, one: Served) -> None:
    first = ranks.whole(prompt=LONG, max_tokens=1)
    assert first.usage.prompt_tokens > 4 * CHUNK
    again = ranks.whole(prompt=LONG + " And then", max_tokens=1)
    assert again.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens // 16 * 16
    asked = greedy(LONG + " And then")
    compare(ranks, ranks.ask_all(asked), [one.alone(asked)])


def test_drawn_tokens_with_penalties_are_those_of_one_rank(ranks: Served, one: Served) -> None:
    """Counts and DRY's order live where tokens are drawn, on the last rank. In the tensor layout: as far as the first
    draw that another last digit could decide, numbers agree (server/test_ranks_families.py has weights without such
    noise)."""
    asked = greedy("1, 2, 3, 1, 2, 3, 1, 2, 3,", temperature=0.9, seed=7, presence_penalty=0.5, frequency_penalty=1.2)
    asked["extra_body"] = {"repetition_penalty": 1.2, "ignore_eos": True, "dry_multiplier": 0.8}
    plain = one.alone(greedy(asked["prompt"], temperature=0.9, seed=7))
    known = one.alone(asked)
    assert known.tokens != plain.tokens
    (got,) = ranks.ask_all(asked)
    if ranks.shape is not None and ranks.shape.exact:
        assert got == known
    else:
        got.agrees(known, ERROR_MAX, drawn=True)


def test_a_prompts_own_log_probabilities_are_those_of_one_rank(ranks: Served, one: Served) -> None:
    asked = {"prompt": LONG[:300], "max_tokens": 1, "logprobs": 0, "echo": True}
    got, known = (each.whole(**asked).choices[0] for each in (ranks, one))
    values, right = got.logprobs.token_logprobs, known.logprobs.token_logprobs
    assert len(right) > 2 * CHUNK and values[0] is None
    if ranks.shape is not None and ranks.shape.exact:
        assert (got.text, values) == (known.text, right)
    assert values[1:-1] == pytest.approx(right[1:-1], abs=ERROR_MAX)


def test_a_crowd_that_is_preempted_and_left_says_what_one_rank_says(ranks: Served, one: Served) -> None:
    """The pool holds two of the four that grow longest; two readers leave in the middle."""
    before = ranks.engine()["preemptions"]
    asked = [greedy(f"{n}. {LONG}"[:350], max_tokens=90, extra_body={"ignore_eos": True}) for n in range(4)]

    async def main() -> tuple[list[Said], list[int]]:
        crowd = asyncio.create_task(ranks.crowd(*asked))
        left = await asyncio.gather(ranks.leave("Once upon a time", 3), ranks.leave("A list of birds:", 1))
        return await crowd, left

    got, left = asyncio.run(main())
    assert left == [3, 1] and ranks.engine()["preemptions"] > before
    right = [one.alone(each) for each in asked]
    if ranks.shape is not None and ranks.shape.exact:
        assert got == right
    else:
        for mine, known in zip(got, right, strict=True):
            mine.agrees(known, ERROR_MAX)
