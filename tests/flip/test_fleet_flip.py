"""Three rank processes change the layout between plans, and every request goes on as if nothing had been: tokens are
those of one rank that knows no layouts."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from flip_fleet import LANES, Play

from homeserve.wire.faults import PREPARE_STEPS
from homeserve.wire.records import Result

MEMORY = ("discrete", "unified")
Run = Callable[[Callable[[], Awaitable[None]]], None]
LENGTHS = (20, 45, 3)
PROMPTS = [
    [(7 * at * at + 31 * at + 3 * which) % 250 + 1 for at in range(count)] for which, count in enumerate(LENGTHS)
]
RANGES = ((0, 2), (2, 3), (3, 4))
HYBRID, DENSE, WINDOWED = "qwen3_5_text", "llama", "gpt_oss"
MODELS: dict[str, dict[str, Any]] = {
    DENSE: {},
    HYBRID: {},
    WINDOWED: {"windows": (8,)},
}


async def script(play: Play) -> list[list[int]]:
    """Prompts in chunks, answers, a checkpoint and a hit of it, with a flip between any two of them; the answers."""
    play.begin(1, 0, PROMPTS[0])
    play.begin(2, 2, PROMPTS[1], repetition_penalty=1.3)
    await play.run(16)
    await play.flip()  # both prompts half computed
    await play.run(16, save={2: LANES})
    await play.run(16)
    await play.flip()
    play.begin(3, 1, PROMPTS[2], temperature=1.0, seed=77)
    for _ in range(3):
        await play.run()
    await play.flip()
    play.begin_from(4, 3, LANES, PROMPTS[1][:5])
    await play.run(16, only=[4])
    for _ in range(4):
        await play.run()
    await play.flip()
    for _ in range(3):
        await play.run()
    return [play.answer(number) for number in (1, 2, 3, 4)]


ALONE: dict[str, list[list[int]]] = {}


async def alone(model: str) -> list[list[int]]:
    if model not in ALONE:
        async with Play(model, 1, **MODELS[model]) as play:
            ALONE[model] = await script(play)
    return ALONE[model]


@pytest.mark.parametrize("unified", [False, True], ids=MEMORY)
@pytest.mark.parametrize("model", MODELS)
def test_requests_go_on_over_four_flips_as_on_one_rank(run: Run, model: str, unified: bool) -> None:
    async def main() -> None:
        wanted = await alone(model)
        async with Play(model, ranges=RANGES, unified=unified, **MODELS[model]) as play:
            assert await script(play) == wanted
            assert play.flips == 4 and play.layout == "pipeline"

    run(main)


# ----------------------------------------------------------------------------------------- what a flip is given up for


async def started(play: Play) -> None:
    """One prompt whose answer has begun, and one that is half computed."""
    play.begin(1, 0, PROMPTS[0])
    await play.run(20)
    play.begin(2, 2, PROMPTS[1])
    await play.run(16)


async def finished(play: Play) -> list[list[int]]:
    for _ in range(6):
        await play.run(16)
    return [play.answer(number) for number in (1, 2)]


UNDISTURBED: dict[str, list[list[int]]] = {}


async def undisturbed(model: str) -> list[list[int]]:
    if model not in UNDISTURBED:
        async with Play(model, 1, **MODELS[model]) as play:
            await started(play)
            UNDISTURBED[model] = await finished(play)
    return UNDISTURBED[model]


def told(results: tuple[Result, ...]) -> list[bool]:
    return [result.ok for result in results]


@pytest.mark.parametrize("unified", [False, True], ids=MEMORY)
@pytest.mark.parametrize("step", PREPARE_STEPS)
def test_h13_one_no_gives_a_flip_up_and_serving_goes_on(run: Run, step: str, unified: bool) -> None:
    async def main() -> None:
        wanted = await undisturbed(HYBRID)
        fault = f"rank=1,step={step},action=refuse"
        async with Play(HYBRID, ranges=RANGES, unified=unified, fault=fault) as play:
            await started(play)
            order = play.order()
            results = await play.pack(order)
            if all(told(results)):
                results = await play.verify(order, results)
            assert told(results) == [True, False, True] and step in results[1].reason
            await play.abandon(order)
            assert play.losses == [] and play.layout == "pipeline"
            await play.flip()
            assert await finished(play) == wanted and play.layout == "tensor"

    run(main)


@pytest.mark.parametrize("step", ["prepare.pack", "prepare.exchange", "prepare.digest"])
def test_a_byte_that_turned_on_its_way_gives_a_flip_up(run: Run, step: str) -> None:
    async def main() -> None:
        wanted = await undisturbed(HYBRID)
        async with Play(HYBRID, ranges=RANGES, fault=f"rank=0,step={step},action=corrupt") as play:
            await started(play)
            order = play.order()
            packed = await play.pack(order)
            assert all(told(packed))
            compared = await play.verify(order, packed)
            assert "has the digest" in next(result.reason for result in compared if not result.ok)
            await play.abandon(order)
            await play.flip()
            assert await finished(play) == wanted

    run(main)


@pytest.mark.parametrize("unified", [False, True], ids=MEMORY)
def test_the_transit_memory_is_kept_and_used_again(run: Run, unified: bool) -> None:
    async def main() -> None:
        async with Play(HYBRID, ranges=RANGES, unified=unified) as play:
            await started(play)
            order = play.order()
            packed = await play.pack(order)
            moved = sum(each.nbytes for result in packed if result.flip for each in result.flip.digests)
            assert moved == 0 if unified else 0 < moved <= play.lies_in_transit()
            await play.verify(order, packed)
            held = play.lies_in_transit()
            answers = await play.commit(order)
            for _ in range(4):
                await play.flip()
                assert play.lies_in_transit() <= held * 2, "the same pages again, and those of rows that came since"
            sent, received, local = (
                sum(getattr(answer, name) for answer in answers)
                for name in ("sent_bytes", "received_bytes", "local_bytes")
            )
            assert sent == received and sent + local == moved

    run(main)


def test_more_than_the_transit_memory_is_a_no(run: Run) -> None:
    async def main() -> None:
        async with Play(DENSE, ranges=RANGES, transit_bytes=4096) as play:
            await started(play)
            results = await play.pack(play.order())
            assert all("bytes are to move, the transit memory has 4096" in result.reason for result in results)

    run(main)


# ------------------------------------------------------------------------------------------------- what ends a life


@pytest.mark.parametrize("unified", [False, True], ids=MEMORY)
@pytest.mark.parametrize(
    ("rank", "fault"),
    [
        (0, "step=prepare.pack,action=kill"),
        (2, "step=commit.release,action=kill"),
        (1, "step=commit.map,action=refuse"),
        (2, "step=commit.rebind,action=enospc"),
        (1, "step=commit.rebind,action=corrupt"),
    ],
)
def test_a_life_that_ends_in_a_flip_is_told_once_and_the_next_one_rests(
    run: Run, tmp_path: Path, rank: int, fault: str, unified: bool
) -> None:
    async def main() -> None:
        wanted = await undisturbed(HYBRID)
        given = f"rank={rank},{fault}"
        async with Play(HYBRID, ranges=RANGES, unified=unified, fault=given, captures=str(tmp_path)) as play:
            await started(play)
            with pytest.raises(AssertionError):
                await play.flip()
            (loss,) = play.losses
            assert loss.rank == rank and loss.folder is not None
            await play.again()
            assert play.layout == "pipeline"
            await started(play)
            await play.flip()
            assert await finished(play) == wanted

    run(main)


# ------------------------------------------------------------------------------------------------- weights at a flip


def test_d13_weights_that_turned_in_the_arena_are_filled_in_once_more(run: Run) -> None:
    async def main() -> None:
        wanted = await undisturbed(HYBRID)
        async with Play(HYBRID, ranges=RANGES, fault="rank=1,step=commit.refill,action=corrupt") as play:
            await started(play)
            answers = await play.flip()
            assert [answer.refill_tries for answer in answers] == [1, 2, 1]
            assert await finished(play) == wanted

    run(main)


async def flipped_when_ready(play: Play) -> str:
    """A flip as soon as every rank has the image that it needs; why not, where one never will."""
    while True:
        order = play.order()
        packed = await play.pack(order)
        if all(told(packed)):
            assert all(told(await play.verify(order, packed)))
            await play.commit(order)
            return ""
        await play.abandon(order)
        for result in packed:
            if not result.ok and "promotion of the image" not in result.reason:
                return f"rank {result.rank}: {result.reason}"


@pytest.mark.parametrize("model", [DENSE, HYBRID])
def test_images_take_turns_in_memory_and_on_disk(run: Run, model: str, tmp_path: Path) -> None:
    async def main() -> None:
        wanted = await undisturbed(model)
        async with Play(model, ranges=RANGES, image_dir=str(tmp_path)) as play:
            assert {path.name for path in tmp_path.iterdir()} == {f"weights-rank{r}-pipeline.image" for r in range(3)}
            await started(play)
            for _ in range(3):
                assert await flipped_when_ready(play) == ""
            assert await finished(play) == wanted
        assert list(tmp_path.iterdir()) == [], "images are gone with the life"

    run(main)


@pytest.mark.parametrize(
    ("step", "flips", "says"),
    [
        ("spill,nth=1", 1, "rank 1: the image of the pipeline layout .* it came back with the digest"),
        ("spill,nth=2", 2, "rank 1: the image of the tensor layout .* it came back with the digest"),
        ("promote,nth=1", 1, "rank 1: the image of the pipeline layout .* it came back with the digest"),
    ],
)
def test_a_damaged_image_is_a_no_with_the_reason_and_serving_goes_on(
    run: Run, tmp_path: Path, step: str, flips: int, says: str
) -> None:
    async def main() -> None:
        wanted = await undisturbed(DENSE)
        fault = f"rank=1,step={step},action=corrupt"
        async with Play(DENSE, ranges=RANGES, image_dir=str(tmp_path), fault=fault) as play:
            await started(play)
            for _ in range(flips):
                assert await flipped_when_ready(play) == ""
            assert re.search(says, await flipped_when_ready(play))
            assert await finished(play) == wanted and play.losses == []

    run(main)


def test_where_the_disk_is_full_an_image_stays_in_memory_and_flips_go_on(run: Run, tmp_path: Path) -> None:
    async def main() -> None:
        wanted = await undisturbed(DENSE)
        fault = "rank=1,step=spill,nth=1,action=enospc"
        async with Play(DENSE, ranges=RANGES, image_dir=str(tmp_path), fault=fault) as play:
            assert {path.name for path in tmp_path.iterdir()} == {f"weights-rank{r}-pipeline.image" for r in (0, 2)}
            await started(play)
            for _ in range(3):
                assert await flipped_when_ready(play) == ""
            assert await finished(play) == wanted and play.losses == []

    run(main)
