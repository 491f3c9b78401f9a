"""Plays in which some requests are for embeddings: their lanes pool, their answers are vectors (`flip_fleet.Play`)."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from card_play import CardPlay, facts_of

from homeserve.wire.records import LaneRows, NewLane, Result

sys.path.insert(0, str(Path(__file__).parents[1] / "flip"))

from flip_fleet import Play, Request

POOLINGS = ("mean", "last", "cls")
LENGTHS = {"mean": 37, "last": 20, "cls": 41}
"""Tokens of the prompts of `talk`, a lane each; the fourth lane decodes."""
DECODING = 9
Vector = np.ndarray[Any, np.dtype[np.float32]]


def prompt_of(length: int, seed: int, vocab: int = 61) -> list[int]:
    return [(7 * at * at + 31 * at + 5 * seed) % vocab for at in range(length)]


class PooledPlay(Play):
    """`embeddings` by request."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.poolings: dict[int, str] = {}
        self.embeddings: dict[int, Vector] = {}
        self.failed: dict[int, str] = {}

    def begin_pooled(self, number: int, lane: int, prompt: Sequence[int], pooling: str) -> None:
        self.begin(number, lane, list(prompt))
        self.poolings[number] = pooling
        self.embeddings.pop(number, None)

    def _new(self, each: Request) -> NewLane:
        return msgspec.structs.replace(super()._new(each), pooling=self.poolings.get(each.number, ""))

    def _rows(self, each: Request, rows: int, save: int) -> LaneRows:
        assert each.number not in self.embeddings, "its embedding is there"
        return super()._rows(each, rows, save)

    def on_results(self, seq: int, results: tuple[Result, ...]) -> None:
        assert all(result.ok for result in results), [result.reason for result in results]
        assert not any(result.samples for result in results[:-1]), "the last rank has the rows"
        for sample in results[-1].samples:
            if sample.embedding:
                assert sample.token == -1 and sample.request in self.poolings
                self.embeddings[sample.request] = np.frombuffer(sample.embedding, "<f4")
            elif sample.failed:
                self.failed[sample.request] = sample.failed
        super().on_results(seq, results)

    def open(self) -> list[int]:
        """Requests of which something is still to come."""
        return [number for number in self.requests if number not in self.embeddings]

    async def embed(self, number: int, lane: int, prompt: Sequence[int], pooling: str, rows: int = 64) -> Vector:
        """Of one prompt, alone in its plans."""
        self.begin_pooled(number, lane, prompt, pooling)
        while number not in self.embeddings:
            await self.run(rows, only=[number])
        self.give_up(number)
        return self.embeddings[number]


class PooledCardPlay(PooledPlay, CardPlay):
    """The same on cards."""


def play_on(model: str | Path, backend: str = "cpu", **more: Any) -> PooledPlay:
    """One rank in this process."""
    return PooledPlay(model, 1, backend=backend, inside=True, kv_type="f32", windows=facts_of(model)[1], **more)


async def talk(play: PooledPlay, chunk: int = 7, flip_each: int = 0) -> dict[str, Vector]:
    """All poolings at once, in chunks, beside one that decodes; a flip behind every `flip_each` plans."""
    for lane, (pooling, length) in enumerate(LENGTHS.items()):
        play.begin_pooled(lane + 1, lane, prompt_of(length, lane), pooling)
    play.begin(DECODING, 3, prompt_of(5, 3))
    plans = 0
    while wanted := play.open():
        if wanted == [DECODING]:
            break
        await play.run(chunk, only=wanted)
        plans += 1
        if flip_each and plans % flip_each == 0:
            await play.flip()
    assert len(play.answer(DECODING)) >= plans - 1, "it went on meanwhile"
    found = {pooling: play.embeddings[lane + 1] for lane, pooling in enumerate(LENGTHS)}
    for number in list(play.requests):
        play.give_up(number)
    return found


async def alone(play: PooledPlay) -> dict[str, Vector]:
    """The same prompts one by one, each in one chunk."""
    return {
        pooling: await play.embed(11 + lane, lane, prompt_of(length, lane), pooling)
        for lane, (pooling, length) in enumerate(LENGTHS.items())
    }
