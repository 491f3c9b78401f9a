"""Whole small models on workers with cards: tokens and log-probabilities are those of the oracle.

Everything is real up to the edge of the driver: worker processes, the ctypes calls of both vendors, compilers, memory,
recordings, exchanges, flips. Drivers and compilers are fakes whose launches run the emulation (tests/fake_cards.py).
Two ranks are a card of each vendor, so rows go by way of the host; they change the layout four times while requests are
computed. The oracle is one rank of `reference`, in a process of its own.

Each run also tells what it launched: every op of every plan, on every rank, as the op list has it
(card_play.CardPlay.missing), and nothing that the compile gate does not know.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from card_play import COUNTER, CUDA, ROCM, SYMBOLS, TOLERANCE, CardPlay, agreeing, oracle, talk
from fake_cards import fake_cards
from flip_fleet import LANES, Play
from leaning import LARGER, leaning

from homeserve.layouts.ranks import RankDevice
from homeserve.wire.records import Sample
from homeserve.wire.segments import names

SLOW = os.environ.get("HOMESERVE_TEST_TIER") == "slow"
LIMIT_S = 240.0
"""A bound on a test's waiting. It is for hangs: nothing is measured with it."""
TOKENS = 21
"""That `talk` compares."""
FLEETS: dict[str, tuple[RankDevice, ...]] = {
    "cuda": (CUDA,),
    "rocm": (ROCM,),
    "cuda+rocm": (CUDA, ROCM),
    "rocm+cuda": (ROCM, CUDA),
}
FAMILIES = (
    "gemma3_text",
    "gpt_oss",
    "llama",
    "llama3rope",
    "qwen2",
    "qwen3",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_moe",
    "qwen3_next",
)
TENSOR_FIRST: dict[str, Any] = {"layout": "tensor"}
UNEVEN: dict[str, Any] = {"vector": (3, 1)}
TOLD = {"": "pipeline", "layout": "tensor", "vector": "uneven"}
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("llama", "cuda", {}),
    ("qwen3", "rocm", {}),
    ("gpt_oss", "cuda", {}),
    ("qwen3_moe", "rocm", {}),
    ("qwen3_5_text", "cuda", {}),
    ("llama", "cuda+rocm", {}),
    ("qwen3", "rocm+cuda", UNEVEN),
    ("qwen3_moe", "cuda+rocm", {}),
    ("gpt_oss", "rocm+cuda", TENSOR_FIRST),
    ("qwen3_5_moe_text", "cuda+rocm", TENSOR_FIRST),
]
if SLOW:
    CASES = [
        (name, fleet, more)
        for name in FAMILIES
        for fleet, devices in FLEETS.items()
        for more in ({}, TENSOR_FIRST, UNEVEN)[: 3 if len(devices) > 1 else 1]
    ]
DRAFTS = 3
COUNTS = {1: (730, 0), 2: (8, 2)}
"""Of each request that counts: where it begins, and its lane."""

pytestmark = pytest.mark.timeout(LIMIT_S + 60)


@pytest.fixture(scope="module", autouse=True)
def cards(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A card of each vendor, for the workers that tests start."""
    made = fake_cards(tmp_path_factory.mktemp("cards"))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in made.environment.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """After each test: no child, no shared memory of ours."""
    yield
    assert not psutil.Process().children(recursive=True)
    assert names() == []


def run(main: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(LIMIT_S):
            await main()

    asyncio.run(bounded())


KNOWN: dict[str, Mapping[int, Sequence[Sample]]] = {}


async def known(model: str) -> Mapping[int, Sequence[Sample]]:
    """What the oracle says, asked once."""
    if model not in KNOWN:
        KNOWN[model] = await oracle(model)
    return KNOWN[model]


def told(value: str | dict[str, Any]) -> str:
    return value if isinstance(value, str) else TOLD[next(iter(value), "")]


async def launched_all(play: CardPlay) -> None:
    """On every rank: every op in every plan, and only kernels that the gate compiles."""
    assert play.plans["tensor"] if play.ranks > 1 else not play.plans["tensor"]
    assert play.plans["pipeline"] > 2 and bool(play.plans["drafting"]) == bool(play.load_spec.drafts)
    counted = await play.counted()
    assert [len(each.launches) > 10 for each in counted] == [True] * play.ranks
    assert play.missing(counted) == []
    assert {name for each in counted for name in each.launches} <= SYMBOLS


@pytest.mark.parametrize(("model", "fleet", "more"), CASES, ids=told)
def test_a_model_answers_as_the_oracle_does(model: str, fleet: str, more: dict[str, Any]) -> None:
    devices = FLEETS[fleet]

    async def main() -> None:
        wanted = await known(model)
        async with CardPlay(model, devices, **more) as play:
            assert [each.backend for each in play.facts] == [each.backend for each in devices]
            found = await talk(play)
            assert play.flips == (4 if len(devices) > 1 else 0) and not play.losses
            same = agreeing(found, wanted)
            assert same > TOKENS // 2, "near ties left too little to compare"
            await launched_all(play)
        print(f"{model} on {fleet}: {same} of {TOKENS} tokens compared")

    run(main)


@pytest.mark.parametrize(("fleet", "first"), [
    ("cuda", "pipeline"), ("rocm", "pipeline"), ("cuda+rocm", "pipeline"), ("rocm+cuda", "tensor"),
])  # fmt: skip
def test_the_model_that_counts_counts_on_through_drafts_and_flips(fleet: str, first: str) -> None:
    """A hybrid with a drafting block, whose answers are known without any oracle."""

    async def main() -> None:
        devices = FLEETS[fleet]
        async with CardPlay(COUNTER, devices, drafts=DRAFTS, layout=first) as play:
            for number, (start, lane) in COUNTS.items():
                play.begin(number, lane, list(f"count {start}:".encode()))
            while not all(each.answers for each in play.requests.values()):
                await play.run(6)
            for length in (6, 18, 24, 36):
                await play.until(dict.fromkeys(COUNTS, length), drafts=DRAFTS)
                await play.flip()
            for number, (start, _) in COUNTS.items():
                text = "".join(f" {start + at}" for at in range(1, 40)).encode()
                assert bytes(play.answer(number)) == text[:36]
            rounds = [each for of in play.requests.values() for each in of.rounds]
            accepted = 1 + sum(count for _, count in rounds) / len(rounds)
            print(f"{fleet}, {first} first: {len(rounds)} rounds of drafts, accept length {accepted:.2f}")
            assert len(rounds) > 4 and accepted > 2
            assert play.flips == (4 if len(devices) > 1 else 0) and not play.losses
            await launched_all(play)

    run(main)


@pytest.mark.parametrize("fleet", ["cuda+rocm", *(["cuda", "rocm", "rocm+cuda"] if SLOW else [])])
def test_drafts_of_which_some_are_wrong_change_no_answer(fleet: str, tmp_path: Path) -> None:
    """Random weights whose head prefers a few tokens, so that every number of drafts comes to count."""
    model = leaning(COUNTER.parent / "tiny" / "qwen3_5_text_mtp.f32.gguf", tmp_path / "qwen3_5_text_leaning.gguf")

    async def counting(play: Play) -> Mapping[int, Sequence[Sample]]:
        for number, lane in ((1, 0), (2, LANES - 1)):
            play.begin(number, lane, [(7 * at * at + 3 * number) % 250 + 1 for at in range(9)], top_logprobs=2)
        await play.run(16)
        await play.flip()
        await play.until({1: 14, 2: 10}, drafts=DRAFTS)
        await play.flip()
        await play.until({1: 16, 2: 14})
        return {number: each.answers for number, each in play.requests.items()}

    async def main() -> None:
        async with Play(model, 1, backend="reference", kv_type="f32") as plain:
            wanted = await counting(plain)
        async with CardPlay(model, FLEETS[fleet], drafts=DRAFTS) as play:
            found = await counting(play)
            rounds = [each for of in play.requests.values() for each in of.rounds]
            same = agreeing(found, wanted, LARGER * TOLERANCE)
            print(f"{fleet}: {same} tokens compared, rounds {rounds}")
            assert same > 15 and 0 < sum(count for _, count in rounds) < sum(drafts for drafts, _ in rounds)
            await launched_all(play)

    run(main)
