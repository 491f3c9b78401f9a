"""Embeddings of whole models: in chunks beside others as alone, on ranks of both layouts, through flips, on emulated
cards; and a rank that is started again has lost nothing that does not come again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
from card_play import CUDA, ROCM, facts_of
from fake_cards import fake_cards
from pooled_play import LENGTHS, POOLINGS, PooledCardPlay, PooledPlay, Vector, alone, play_on, prompt_of, talk

LIMIT_S = 240.0
MODELS = ("llama", "gemma3_text", "qwen3_moe", "qwen3_5_text")
NEAR = 1e-4
"""Between layouts, and between the CPU and the oracle: sums in other orders."""
CARD_NEAR = 4e-3
"""Prompts are multiplied as halves there."""
pytestmark = pytest.mark.timeout(LIMIT_S + 60)


def run(main: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(LIMIT_S):
            await main()

    asyncio.run(bounded())


def close(found: Mapping[str, Vector], wanted: Mapping[str, Vector], near: float) -> None:
    assert found.keys() == wanted.keys()
    for pooling, vector in found.items():
        assert abs(float(np.linalg.norm(vector.astype(np.float64))) - 1) < 1e-6
        np.testing.assert_allclose(vector, wanted[pooling], atol=near, err_msg=pooling)


def equal(found: Mapping[str, Vector], wanted: Mapping[str, Vector]) -> None:
    for pooling, vector in found.items():
        np.testing.assert_array_equal(vector, wanted[pooling], err_msg=pooling)


async def of_oracle(model: str) -> dict[str, Vector]:
    async with play_on(model, "reference") as play:
        return await alone(play)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_in_chunks_beside_others_it_is_what_it_is_alone(model: str, backend: str) -> None:
    async def main() -> None:
        async with play_on(model, backend) as play:
            wanted = await alone(play)
            equal(await talk(play), wanted)
            assert not np.array_equal(wanted["mean"], wanted["last"])
        close(wanted, await of_oracle(model), NEAR)

    run(main)


def test_poolings_are_of_the_rows_that_they_name() -> None:
    """From prefixes: the last state of a prefix is a state of the whole; a mean is their sum over its length."""

    async def main() -> None:
        prompt = prompt_of(11, 2)
        async with play_on("llama", "reference") as play:
            states = [await play.embed(20 + n, 0, prompt[: n + 1], "last") for n in range(len(prompt))]
            np.testing.assert_array_equal(await play.embed(40, 0, prompt, "cls"), states[0])
            np.testing.assert_array_equal(await play.embed(41, 0, prompt, "last", rows=4), states[-1])
            mean = await play.embed(42, 1, prompt, "mean", rows=4)
            assert max(float(mean @ state) for state in states) < 1 - 1e-3, "it is none of them"
            np.testing.assert_array_equal(await play.embed(43, 2, prompt[:1], "mean"), states[0])

    run(main)


def shares(model: str, ranks: int, layout: str, unified: bool) -> dict[str, Any]:
    layers, windows = facts_of(model)
    cut = layers // ranks
    ranges = tuple((rank * cut, layers if rank == ranks - 1 else (rank + 1) * cut) for rank in range(ranks))
    vectors = ((1, 1), (2, 1)) if ranks == 2 else ((2, 1, 1), (3, 2, 1))
    return {
        "layout": layout, "ranges": ranges, "weight_vector": vectors[0], "token_vector": vectors[1],
        "windows": windows, "kv_type": "f32", "unified": unified,
    }  # fmt: skip


@pytest.mark.parametrize("layout", ["pipeline", "tensor"])
@pytest.mark.parametrize(("model", "ranks", "unified"), [
    ("llama", 2, False), ("llama", 2, True), ("qwen3_5_text", 2, False), ("gemma3_text", 2, False),
])  # fmt: skip
def test_ranks_give_what_one_does_through_flips_in_the_middle(
    model: str, ranks: int, unified: bool, layout: str
) -> None:
    async def main() -> None:
        async with play_on(model) as one:
            wanted = await alone(one)
        async with PooledPlay(model, ranks, **shares(model, ranks, layout, unified)) as play:
            found = await alone(play)
            close(found, wanted, NEAR)
            if layout == "pipeline":
                equal(await talk(play), found)
            else:  # whose bits depend on which rank keeps a page
                close(await talk(play), found, NEAR / 100)
            close(await talk(play, flip_each=1), wanted, NEAR)
            assert play.flips > 3 and not play.losses

    run(main)


@pytest.mark.parametrize("layout", ["pipeline", "tensor"])
def test_three_ranks_do_so_too(layout: str) -> None:
    async def main() -> None:
        async with play_on("qwen3_5_text") as one:
            wanted = await alone(one)
        async with PooledPlay("qwen3_5_text", 3, **shares("qwen3_5_text", 3, layout, False)) as play:
            close(await alone(play), wanted, NEAR)
            close(await talk(play, flip_each=2), wanted, NEAR)
            assert play.flips and not play.losses

    run(main)


def test_a_lane_begins_again_behind_a_loss() -> None:
    """What it had gathered is gone with the rank, and comes again with its rows."""

    async def main() -> None:
        prompt = prompt_of(LENGTHS["mean"], 0)
        async with PooledPlay("llama", 2, **shares("llama", 2, "pipeline", False)) as play:
            wanted = await play.embed(1, 0, prompt, "mean")
            play.begin_pooled(2, 0, prompt, "mean")
            await play.run(16, only=[2])
            await play.again()
            np.testing.assert_array_equal(await play.embed(3, 0, prompt, "mean", rows=16), wanted)

    run(main)


def test_a_lane_whose_beginning_is_cached_pools_the_last_state_and_no_mean() -> None:
    async def main() -> None:
        prompt = prompt_of(40, 4)
        async with play_on("llama") as play:
            wanted = await play.embed(1, 0, prompt, "last")
            play.begin(2, 1, prompt[:32])
            await play.run(32, only=[2])
            for number, lane, pooling in ((3, 2, "last"), (4, 3, "mean"), (5, 0, "cls")):
                play.begin_pooled(number, lane, prompt, pooling)
                request = play.requests[number]
                request.computed, request.pages = 32, list(play.requests[2].pages[:2])
                if pooling == "last":
                    await play.run(32, only=[number])
                    np.testing.assert_array_equal(play.embeddings[number], wanted)
                else:
                    with pytest.raises(Exception, match=f"{pooling} pooling needs the rows before 32"):
                        await play.run(32, only=[number])
                    del play.requests[number]

    run(main)


@pytest.mark.parametrize("model", ["qwen3_5_text_mtp", "qwen3_next_mtp"])
def test_beside_rounds_of_drafts_it_is_what_it_is_alone(model: str) -> None:
    async def main() -> None:
        async with play_on(model, drafts=3) as play:
            wanted = await play.embed(1, 0, prompt_of(37, 0), "mean")
            play.begin(2, 1, prompt_of(9, 1))
            await play.until({2: 1}, 16)
            play.begin_pooled(3, 2, prompt_of(37, 0), "mean")
            while 3 not in play.embeddings:
                await play.run(5, only=[2, 3], drafts={2: 2})
            assert len(play.requests[2].rounds) > 3
            np.testing.assert_array_equal(play.embeddings[3], wanted)

    run(main)


# --------------------------------------------------------------------------------------------------------------- cards


@pytest.fixture
def cards(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    made = fake_cards(tmp_path_factory.mktemp("cards"))
    for name, value in made.environment.items():
        monkeypatch.setenv(name, value)
    yield


@pytest.mark.parametrize(("model", "devices"), [
    ("llama", (CUDA,)), ("qwen3_5_text", (ROCM,)), ("llama", (CUDA, ROCM)),
], ids=["cuda", "rocm", "cuda+rocm"])  # fmt: skip
def test_a_worker_with_cards_pools_as_the_oracle_does(cards: None, model: str, devices: Any) -> None:
    async def main() -> None:
        wanted = await of_oracle(model)
        async with PooledCardPlay(model, devices) as play:
            close(await alone(play), wanted, CARD_NEAR)
            close(await talk(play, flip_each=2), wanted, CARD_NEAR)
            assert (play.flips > 1) == (len(devices) > 1) and not play.losses

    run(main)


def test_every_pooling_has_a_lane() -> None:
    assert tuple(LENGTHS) == POOLINGS
