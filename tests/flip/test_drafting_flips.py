"""Drafting through flips: what the drafting block knows of a request goes with it.

*Plan by plan* (`flip_fleet`): requests whose prompts were computed in the pipeline layout, where nobody drafts, draft
at full acceptance in their first round behind a flip. Rows of the drafting block that hold NaN change no answer,
wherever they lie; and where they hold it before anybody wrote there, nothing at all: no stale row is ever read.

*Under load*: a server of three ranks with drafts that are flipped by request, over and over, while it answers. Every
answer is the one that a server gives which never flips nor drafts; requests that were carried over a flip draft as well
as those that were not. What is drafted and accepted is printed, the first rounds behind a flip apart.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from box import Box, Run
from flip_fleet import LANES, Play, poison
from load import AT_ONCE, SIZES, STAYS, Answer, Ask, Client, Compared, counting, dealt, reference, stopped

from backends.cpu.held import HeldStore
from homeserve import checkpoint as checkpoints
from homeserve.fleet import Fleet
from homeserve.layouts.share import Share
from homeserve.models import registry
from homeserve.models.bind import bind

COUNTER = Path(__file__).parents[1] / "data" / "counter.gguf"
RANGES = ((0, 2), (2, 4), (4, 6))
SLOW = os.environ.get("HOMESERVE_TEST_TIER") == "slow"
SEED = int(os.environ.get("HOMESERVE_TEST_SEED") or "0", 16)
FLIPS, ASKS = (1000, 120) if SLOW else (40, 30)
CARRIED, TOKENS = (200, 401) if SLOW else (12, 201)
"""Requests carried over a flip whose accept length is compared, and the tokens of each: the last round of a request has
fewer drafts, and the longer the requests the less that is."""
APART = 0.02 if SLOW else 0.05
"""How far it may be from the others'."""
LIMIT_S = 3600.0 if SLOW else 300.0
DRAFTS = 3
MEMORY = ("discrete", "unified")
Runner = Callable[[Callable[[], Awaitable[None]]], None]


def ranks(unified: bool, layout: str = "pipeline", **more: Any) -> Play:
    return Play(COUNTER, ranges=RANGES, unified=unified, layout=layout, kv_type="f32", drafts=DRAFTS, **more)


def starts(play: Play) -> dict[int, bytes]:
    """Three counts begin, of unequal lengths; what each is to answer first."""
    wanted = {}
    for number, (start, lane) in enumerate(((8, 0), (1795, 2), (730, 1)), 1):
        play.begin(
            number, lane, list(f"count {start}: {' '.join(str(start + at) for at in range(1, 4 * number))}".encode())
        )
        wanted[number] = "".join(f" {start + at}" for at in range(4 * number, 4 * number + 30)).encode()
    return wanted


async def prompts(play: Play) -> None:
    """Compute what is left of them."""
    while not all(each.answers for each in play.requests.values()):
        await play.run(16)


def right(play: Play, wanted: dict[int, bytes]) -> None:
    for number, text in wanted.items():
        answer = bytes(play.answer(number))
        assert answer == text[: len(answer)], (number, answer)


# ----------------------------------------------------------------------------------------------------- plan by plan


@pytest.mark.parametrize("unified", [False, True], ids=MEMORY)
def test_the_first_round_behind_a_flip_has_full_acceptance(run: Runner, unified: bool) -> None:
    """Behind prompts that the pipeline layout computed, whole or in part, and behind tokens that were decoded there."""

    async def main() -> None:
        async with ranks(unified) as play:
            wanted = starts(play)
            await play.run(16)
            await play.run(16)
            assert not all(each.answers for each in play.requests.values()), "one prompt is half computed"
            for _ in range(3):
                for _ in range(2):
                    await play.run(64, drafts=dict.fromkeys(wanted, DRAFTS))
                assert not any(each.rounds for each in play.requests.values()), "nothing is drafted in this layout"
                await play.flip()
                for _ in range(2):
                    await play.run(64, drafts=dict.fromkeys(wanted, DRAFTS))
                rounds = [each.rounds for each in play.requests.values()]
                print(f"behind flip {play.flips}: {rounds}")
                assert all(each[0] == (DRAFTS, DRAFTS) for each in rounds), rounds
                right(play, wanted)
                for each in play.requests.values():
                    each.rounds.clear()
                await play.flip()

    run(main)


@pytest.mark.parametrize(("ranks_", "layout", "unified"), [
    (1, "pipeline", False), (3, "tensor", False), (3, "pipeline", False), (3, "tensor", True),
])  # fmt: skip
def test_rows_that_nobody_wrote_are_never_read(run: Runner, ranks_: int, layout: str, unified: bool) -> None:
    """All rows of the drafting block in all pools hold NaN before the first request: had one of them been read, the
    drafts behind it would be nonsense."""

    async def main() -> None:
        made = ranks(unified, layout) if ranks_ > 1 else Play(COUNTER, 1, kv_type="f32", drafts=DRAFTS)
        async with made as play:
            poison(play.drafting_rows())
            wanted = starts(play)
            await prompts(play)
            if layout == "pipeline" and ranks_ > 1:
                await play.flip()
            await play.until(dict.fromkeys(wanted, 24), 64, DRAFTS)
            rounds = [each.rounds for each in play.requests.values()]
            print(rounds)
            assert all(accepted == drafts for of in rounds for drafts, accepted in of[:3]), rounds
            right(play, wanted)
            gone = play.give_up(2)
            play.begin(4, gone.lane, list(b"count 86:"))  # on pages of the one that went, and with a longer table
            await play.until({4: 20}, 64, DRAFTS)
            assert play.requests[4].rounds[0] == (DRAFTS, DRAFTS)
            right(play, {4: b" 87 88 89 90 91 92 93 94"})

    run(main)


@pytest.mark.parametrize("unified", [False, True], ids=MEMORY)
def test_rows_that_hold_nan_change_no_answer(run: Runner, unified: bool) -> None:
    """Written over those of running requests too, in either layout, and carried over flips as they are."""

    async def main() -> None:
        async with ranks(unified) as play:
            wanted = starts(play)
            await prompts(play)
            for at in range(4):
                poison(play.drafting_rows())
                await play.flip()
                await play.until(dict.fromkeys(wanted, 8 * at + 8), 64, DRAFTS)
            rounds = [each for of in play.requests.values() for each in of.rounds]
            print(rounds)
            assert len(rounds) > 10 and sum(accepted for _, accepted in rounds) < len(rounds) // 2, "not poisoned"
            right(play, wanted)

    run(main)


@pytest.mark.parametrize("unified", [False, True], ids=MEMORY)
def test_a_rank_holds_rows_of_drafts_for_the_layout_that_drafts_alone(run: Runner, unified: bool) -> None:
    """What a rank says of its line, and what lies in its memory. Two layouts, and the rows of one."""
    opened = checkpoints.open(str(COUNTER))
    family = registry.family(opened.arch)
    config, shares = family.config_from(opened.metadata), [Share.tensor(rank, (2, 1, 1)) for rank in range(3)]
    bounds = [bind(family, config, opened.tensors, share, drafts=True) for share in shares]
    wanted = [HeldStore(bound.ops, LANES * (1 + DRAFTS), 1).arena.size for bound in bounds]
    opened.close()

    async def main() -> None:
        async with ranks(unified) as play:
            assert [dict(each.lines)["drafts"] for each in play.facts] == wanted
            assert isinstance(play.fleet, Fleet)
            regions = [of_rank for _, _, of_rank in sorted(play.fleet.regions())]
            assert [sum(size for line, _, size in each if line == "drafts") for each in regions] == wanted

    run(main)


# -------------------------------------------------------------------------------------------------------- under load


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Box]:
    made = Box(tmp_path)
    yield made
    made.close()


@dataclass
class Load:
    """Asks without end, and what their answers say of drafting."""

    asks: Sequence[Ask]
    known: Sequence[Answer]
    compared: Compared = field(default_factory=Compared)
    crossed: Counter[int] = field(default_factory=Counter)
    rounds: Counter[str] = field(default_factory=Counter)
    carried: int = 0
    """Answers with rounds behind a flip,"""
    uncarried: int = 0
    """and those with others."""
    over: bool = False

    async def more(self, answers: int) -> None:
        """Until there are so many answers more."""
        end = self.compared.answers.total() + answers
        while self.compared.answers.total() < end:
            await asyncio.sleep(0.01)

    async def one(self, client: Client, turns: Iterator[int]) -> None:
        while not self.over:
            at = next(turns)
            answer = await client.ask(self.asks[at])
            self.compared.add(self.asks[at], self.known[at], answer)
            self.crossed[answer.crossed] += answer.whole
            behind = answer.draft.get("carried", 0)
            self.carried += behind > 0
            self.uncarried += answer.draft.get("rounds", 0) > behind
            for name in ("rounds", "drafted", "accepted", "carried"):
                self.rounds[name] += answer.draft.get(name, 0)


async def flip(client: Client, to: str) -> dict[str, Any]:
    """By request; its record when it is committed."""
    async with client._session.post(f"{client.url}/v1/homeserve/flip", json={"to": to}) as answer:
        told = await answer.json()
        assert answer.status == 202, told
    while True:
        record: dict[str, Any] = await client.get(told["url"])
        if record["state"] in ("committed", "abandoned"):
            assert record["state"] == "committed", record
            return record
        await asyncio.sleep(0.005)


async def flipped(
    run: Run, load: Load, enough: Callable[[list[dict[str, Any]]], bool], answers: int = 0
) -> dict[str, Any]:
    """Flips there and back under the load until there were enough; the status behind it. It stays a moment in each
    layout, and where it drafts until there were so many answers."""
    draw = random.Random(SEED)
    turns = dealt(draw, range(len(load.asks)))
    records: list[dict[str, Any]] = []
    async with Client(run) as client, asyncio.timeout(LIMIT_S):
        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(load.one(client, turns))
            while not enough(records):
                for to in ("tensor", "pipeline"):
                    await asyncio.sleep(draw.uniform(0.02, 0.2))
                    records.append(await flip(client, to))
                    if to == "tensor":
                        await load.more(answers)
            load.over = True
        census = await client.idle()
        status: dict[str, Any] = await client.get("/v1/homeserve/status")
    load.compared.judge()
    assert census["ok"] and all(pool["leaks"] == [] for pool in census["ranks"]), census
    assert {pool["pool"] for pool in census["ranks"]} >= {"kv", "draft"}
    assert [rank["restarts"] for rank in status["ranks"]] == [0] * 3, status["events"]
    assert status["flip"]["committed"] == len(records) and status["flip"]["abandoned"] == {}
    told(load, records, status["draft"])
    return status


def told(load: Load, records: Sequence[dict[str, Any]], draft: dict[str, Any]) -> None:
    rows = sum(record["live"]["draft_rows"] for record in records)
    print(f"{len(records)} flips with {rows} rows of the drafting block, {dict(load.compared.answers)} answers")
    print(
        f"flips_crossed {dict(sorted(load.crossed.items()))}, {load.carried} answers with rounds behind a flip,"
        f" {load.uncarried} with others"
    )
    print(f"in answers: {dict(load.rounds)}; since the start: {draft}")


def servers(box: Box, tmp_path: Path, asks: Sequence[Ask]) -> tuple[Run, Load]:
    """The one that drafts and can flip, behind what one answered that does neither."""
    print(f"HOMESERVE_TEST_SEED={SEED:x}")
    sizes = (*SIZES, "--context", "1536", "--kv-tokens", "16384")
    still = box.up(str(COUNTER), *sizes, *STAYS, "--draft", "off")
    known = asyncio.run(reference(still, asks))
    stopped(still)
    assert not any(answer.draft for answer in known)
    return box.up(str(COUNTER), *sizes, *STAYS, "--draft", str(DRAFTS)), Load(asks, known)


@pytest.mark.timeout(LIMIT_S + 120)
def test_every_answer_with_drafts_under_flips_is_the_one_without_either(box: Box, tmp_path: Path) -> None:
    run, load = servers(box, tmp_path, counting(SEED, ASKS))
    status = asyncio.run(flipped(run, load, lambda records: len(records) >= FLIPS))
    stopped(run)
    assert {"long", "count", "drawn", "penalised", "left"} <= load.compared.answers.keys()
    assert load.rounds["rounds"] > 100 and load.rounds["accepted"] > load.rounds["rounds"] and load.carried > 5
    assert status["draft"]["carried"]["rounds"] > 50 and status["draft"]["first"]["rounds"] >= 10
    assert status["draft"]["accept_len"] > 2
    assert status["draft"]["why_not"] == "the ranks are in the pipeline layout", "where the last flip went"


@pytest.mark.timeout(LIMIT_S + 120)
def test_requests_that_were_carried_draft_as_well_as_those_that_were_not(box: Box, tmp_path: Path) -> None:
    """Counts alone, of which each round has the same chances. The first round behind a flip is not worse either."""
    draw = random.Random(f"{SEED} carried")
    bodies = [
        {"prompt": f"count {draw.randrange(100, 9000)}:", "max_tokens": TOKENS, "temperature": 0} for _ in range(24)
    ]
    run, load = servers(box, tmp_path, [Ask("count", body, sure=True) for body in bodies])
    status = asyncio.run(flipped(run, load, lambda _: min(load.carried, load.uncarried) >= CARRIED, AT_ONCE + 4))
    stopped(run)
    draft = status["draft"]
    carried, others, first = (draft[name]["accept_len"] for name in ("carried", "uncarried", "first"))
    print(f"accept length: carried {carried}, others {others}, first behind a flip {first}")
    assert draft["uncarried"]["rounds"] > 50 and draft["carried"]["rounds"] > 50 and first > 3
    assert abs(carried / others - 1) < APART
    assert abs(first / others - 1) < 2 * APART
