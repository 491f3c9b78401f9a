"""`homeserve up` with several ranks and models of every kind: states, windows, K and V of other layers, experts, sinks.

The models are made up and wide enough to be cut unevenly (model/wide_models.py). Each fleet goes through the same: a
prefix hit (of recurrent layers: their checkpoint), drawn tokens with penalties, a prompt's own log-probabilities, a
crowd that is preempted, and thirty requests of mixed lengths of which some readers leave. All of it is compared with
one rank, which was asked one thing at a time.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

# The test folders are no package (pytest's importlib mode); the models lie among the model tests.
sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "model"))

from rank_rig import NewBox, Said, Served, Shape, greedy, started
from wide_models import FORMS, save

pytestmark = pytest.mark.timeout(300)

SLOW = os.environ.get("HOMESERVE_TEST_TIER") == "slow"
SEED = int(os.environ.get("HOMESERVE_TEST_SEED", "0") or "0", 16)
ERROR_MAX = 2e-3
"""Of a log-probability: weights and KV rows are float32, and only the order of sums differs."""
COARSE = 0.2
"""The same where weights are packed: a value between two steps of 8 bits may fall to the other one."""
FLAGS = ("--threads", "1", "--kv-type", "f32", "--context", "128", "--kv-tokens", "192",
         "--chunk", "16", "--max-running", "8")  # fmt: skip
LENGTHS = (1, 9, 40, 56, 64, 72, 70, 75)
"""Of the prompts: one token, of which most ranks keep nothing; several chunks that are in flight together."""
STEPS, REQUESTS = 48, 30
TWO = (Shape("pipeline", "discrete", "3,1"), Shape("tensor", "unified", "2,1", "1,1"),
       Shape("pipeline", "unified", "1,1"), Shape("tensor", "discrete", "1,1", "2,1"))  # fmt: skip
THREE = (Shape("tensor", "discrete", "30,17,17", "28,26,20"), Shape("pipeline", "unified", "2,1,1"),
         Shape("tensor", "unified", "28,26,20", "2,1,1"), Shape("pipeline", "discrete", "1,1,2"))  # fmt: skip
EARLY = Shape("pipeline", "discrete", "2,6")
"""Layers that read the K and V of others stay with them: a rank may end before layer 1, 2 or 3 of 8."""
CHOSEN = [
    ("llama", TWO[0]), ("llama", TWO[1]), ("qwen35", THREE[0]), ("qwen35", THREE[1]), ("qwen35moe", TWO[1]),
    ("gemma3 one kv head", THREE[2]), ("gemma4 shared kv", EARLY), ("gpt-oss", THREE[0]), ("gpt-oss", TWO[2]),
]  # fmt: skip


def cases() -> list[tuple[str, Shape]]:
    if not SLOW:
        return CHOSEN
    every = itertools.product(FORMS, TWO + THREE)
    return [(form, EARLY if (form, shape.exact) == ("gemma4 shared kv", True) else shape) for form, shape in every]


def prompt_of(length: int) -> list[int]:
    return [(7 * at * at + 31 * at + length) % 480 + 16 for at in range(length)]


def asked_of(length: int, **more: Any) -> dict[str, Any]:
    return greedy(prompt_of(length), max_tokens=STEPS, extra_body={"ignore_eos": True}, **more)


DRAWN = asked_of(40) | {"temperature": 0.8, "seed": 11, "presence_penalty": 0.4, "frequency_penalty": 0.9}
NEXT = greedy([*prompt_of(72), *prompt_of(9)])
ECHO = {"prompt": prompt_of(56), "max_tokens": 1, "logprobs": 0, "echo": True}


@dataclass(frozen=True)
class Known:
    """What one rank said."""

    crowd: list[Said]
    drawn: Said
    next: Said
    echo: list[float]


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory, new_box: NewBox) -> Callable[[str], tuple[str, Known]]:
    """`known(form)`: the model's file, and what one rank says."""

    @cache
    def ask(form: str) -> tuple[str, Known]:
        folder = tmp_path_factory.mktemp("one")
        path = str(save(form, folder / "wide.gguf"))
        for one in started(new_box(folder), path, FLAGS):
            crowd = [one.alone(asked_of(length)) for length in LENGTHS]
            echo = one.whole(**ECHO).choices[0].logprobs.token_logprobs
            found = Known(crowd, one.alone(DRAWN), one.alone(NEXT), echo)
        return path, found

    return ask


@pytest.fixture
def ranks(tmp_path: Path, new_box: NewBox, known: Any, form: str, shape: Shape) -> Iterator[Served]:
    yield from started(new_box(tmp_path), known(form)[0], FLAGS, shape)


@pytest.mark.parametrize(("form", "shape"), cases(), ids=lambda value: str(value).replace(" ", "_"))
def test_ranks_of_every_kind_say_what_one_says(
    ranks: Served, known: Callable[[str], tuple[str, Known]], wait_until: Callable[..., Any], form: str, shape: Shape
) -> None:
    one = known(form)[1]
    error_max = COARSE if FORMS[form].quantised else ERROR_MAX

    def same(got: Said, right: Said, **how: bool) -> bool:
        if shape.exact:
            assert got == right
            return True
        return got.agrees(right, error_max, **how)

    def cached() -> int:
        answer = ranks.whole(**NEXT | {"max_tokens": 1})
        return int(answer.usage.prompt_tokens_details.cached_tokens)

    ranks.whole(prompt=prompt_of(72), max_tokens=1)
    assert cached() == 64, "whole pages, and with them the state behind the last of them"
    assert same(ranks.alone(NEXT), one.next)
    ranks.check_idle(wait_until)
    values = ranks.whole(**ECHO).choices[0].logprobs.token_logprobs
    assert values[1:-1] == (one.echo[1:-1] if shape.exact else pytest.approx(one.echo[1:-1], abs=error_max))
    agreed = [same(ranks.alone(DRAWN), one.drawn, drawn=True)]
    got = ranks.ask_all(*(asked_of(length) for length in LENGTHS))
    agreed += [same(mine, right) for mine, right in zip(got, one.crowd, strict=True)]
    assert FORMS[form].quantised or sum(agreed) >= len(agreed) - 1, (
        "texts part where one rank is not sure: once at most"
    )
    assert ranks.engine()["preemptions"] > 0
    ranks.check_idle(wait_until)
    for mine, right in asyncio.run(load(ranks, one)):
        same(mine, right)
    ranks.check_idle(wait_until)


LOST = CHOSEN if SLOW else [CHOSEN[2], ("gemma3 one kv head", THREE[1])]


@pytest.mark.parametrize(("form", "shape"), LOST, ids=lambda value: str(value).replace(" ", "_"))
def test_a_lost_rank_costs_states_and_windows_of_streams_nothing(
    ranks: Served, known: Callable[[str], tuple[str, Known]], wait_until: Callable[..., Any], form: str, shape: Shape
) -> None:
    """One rank is killed when all streams are in the middle of their answers."""
    one = known(form)[1]

    async def main() -> list[Said]:
        crowd = asyncio.create_task(ranks.crowd(*(asked_of(length) for length in LENGTHS)))
        while ranks.engine()["plans_acked"] < LENGTHS[-1] and not crowd.done():
            await asyncio.sleep(0.01)
        pids = [rank["pid"] for rank in ranks.run.get("/v1/homeserve/status")[1]["ranks"]]
        os.kill(random.Random(f"{SEED} {form}").choice(pids), signal.SIGKILL)
        return await crowd

    for mine, right in zip(asyncio.run(main()), one.crowd, strict=True):
        if shape.exact:
            assert mine == right
        else:
            mine.agrees(right, ERROR_MAX)
    ranks.check_idle(wait_until, restarts=1)


async def load(ranks: Served, one: Known) -> list[tuple[Said, Said]]:
    """Many requests of mixed lengths, some of whose readers leave in the middle: what the others got, and what one rank
    said up to there."""
    chance = random.Random(f"{SEED} {ranks.shape}")

    async def ask(at: int, steps: int) -> tuple[Said, Said]:
        await asyncio.sleep(chance.random() / 4)
        (got,) = await ranks.crowd(asked_of(LENGTHS[at]) | {"max_tokens": steps})
        whole = one.crowd[at]
        return got, Said(got.text, whole.tokens[:steps], whole.values[:steps], whole.tops[:steps])

    async def leave(at: int, after: int) -> None:
        await asyncio.sleep(chance.random() / 4)
        assert await ranks.leave(prompt_of(LENGTHS[at]), after) == after

    staying, leaving = [], []
    for _ in range(REQUESTS):
        at, steps = chance.randrange(len(LENGTHS)), chance.randint(1, STEPS)
        if chance.random() < 0.3:
            leaving.append(leave(at, min(steps, 20)))
        else:
            staying.append(ask(at, steps))
    answers, _ = await asyncio.gather(asyncio.gather(*staying), asyncio.gather(*leaving))
    return list(answers)
