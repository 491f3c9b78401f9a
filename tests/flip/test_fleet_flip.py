"""Three rank processes change the layout between plans, and every request goes on as if nothing had been: tokens are
those of one rank that knows no layouts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from flip_fleet import LANES, Play

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


@pytest.mark.parametrize("unified", [False, True], ids=["discrete", "unified"])
@pytest.mark.parametrize("model", MODELS)
def test_requests_go_on_over_four_flips_as_on_one_rank(run: Run, model: str, unified: bool) -> None:
    async def main() -> None:
        wanted = await alone(model)
        async with Play(model, ranges=RANGES, unified=unified, **MODELS[model]) as play:
            assert await script(play) == wanted
            assert play.flips == 4 and play.layout == "pipeline"

    run(main)
