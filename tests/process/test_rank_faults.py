"""Faults of one of three ranks that exchange inside every plan, under a real engine with open streams.

Each case: one rank dies, stops, is slow or refuses at some plan. The loss is told once and names that rank and the
plan it owed, not the ones that starved meanwhile; the folder has all ranks; the fleet comes up again and every stream
goes on to the tokens of a single rank. Eight cases by the seed, all of them in the slow tier. Nothing is left behind
(conftest.py).
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import signal
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from budget.ranks import TOKEN_FLOATS, decode_groups, plans_in_flight
from homeserve.engine.engine import Engine
from homeserve.engine.request import EngineLimits, FinishReason, GenerateCall
from homeserve.engine.scheduler import plan_bytes_limit, result_bytes_limit
from homeserve.engine.stream import TokenStream
from homeserve.fleet import ActSizes, Fleet, FleetSpec
from homeserve.resident import Relay
from homeserve.wire.records import LoadSpec, Sampling

Run = Callable[[Callable[[], Awaitable[None]]], None]
TINY = Path(__file__).parents[1] / "data" / "tiny" / "llama.f32.gguf"
SLOW = os.environ.get("HOMESERVE_TEST_TIER") == "slow"
SEED = int(os.environ.get("HOMESERVE_TEST_SEED", "0") or "0", 16)
RANKS, ROWS, HIDDEN = 3, 24, 64
LAYOUTS = ("pipeline", "tensor")
ACTIONS = ("kill", "stop", "refuse", "delay:60000")
SHARES: dict[str, dict[str, Any]] = {
    "pipeline": {"ranges": ((0, 2), (2, 3), (3, 4))},
    "tensor": {"weight_vector": (2, 1, 1), "token_vector": (2, 1, 1)},
}
CALLS = [tuple(range(7, 7 + length)) for length in (3, 20, 45)]
LENGTH, LONG = 10, 70


def cases() -> list[tuple[str, int, str, int, str]]:
    """(layout, rank, step, nth, action): every action in every layout, the rest drawn."""
    steps = [("prefill", 1), ("prefill", 2), ("decode", 1), ("decode", 4)]
    if SLOW:
        every = itertools.product(LAYOUTS, range(RANKS), steps, ACTIONS)
        return [(layout, rank, step, nth, action) for layout, rank, (step, nth), action in every]
    chance = random.Random(SEED)
    pairs = itertools.product(LAYOUTS, ACTIONS)
    return [(layout, chance.randrange(RANKS), *chance.choice(steps), action) for layout, action in pairs]


@asynccontextmanager
async def served(layout: str | None, captures: Path, fault: str = "", timeout_s: float = 2.0) -> Any:
    """An engine on a fleet of RANKS in the layout, or on one rank."""
    ranks = RANKS if layout else 1
    shares = SHARES.get(layout or "", {})
    flight = plans_in_flight(ranks, layout or "pipeline")
    limits = EngineLimits(
        context=128, kv_tokens=1024, running=4, waiting=8, chunk=16, prefill_delay=0, plans_in_flight=flight,
        decode_groups=decode_groups(ranks, layout or "pipeline"), token_vector=shares.get("token_vector", ()),
    )  # fmt: skip
    relay = Relay()
    spec = FleetSpec(
        ranks=ranks, backend="cpu", device_index=0, threads=1, isa="", plans_in_flight=flight, plan_timeout_s=timeout_s,
        slot_bytes=plan_bytes_limit(limits), report_slot_bytes=result_bytes_limit(limits), fault=fault,
        capture_dir=str(captures),
        acts=ActSizes(4096, ROWS * 2 * HIDDEN, TOKEN_FLOATS * limits.running, flight + 1) if layout else None,
    )  # fmt: skip
    fleet = Fleet(spec, relay)
    try:
        await fleet.start()
        await fleet.load(
            LoadSpec(
                str(TINY), limits.kv_tokens, "f16", ROWS, limits.running, limits.running, 8,
                layout=layout or "pipeline", **shares,
            )
        )  # fmt: skip
        engine = Engine(fleet, limits)
        relay.attach(engine)
        await engine.start()
        yield engine, fleet
        await engine.stop()
    finally:
        await fleet.stop()


async def recovered(engine: Engine, times: int, every_s: float = 0.02) -> None:
    async with asyncio.timeout(60.0):
        while [event["kind"] for event in engine.snapshot().events].count("recovered") < times:
            await asyncio.sleep(every_s)


async def _tokens(stream: TokenStream) -> list[int]:
    tokens: list[int] = []
    async for event in stream:
        tokens.extend(event.tokens)
    assert event.finish is FinishReason.LENGTH, event
    return tokens


async def tokens_of(engine: Engine) -> list[list[int]]:
    """What the three prompts are answered with, at the same time."""

    streams = [
        engine.submit(GenerateCall(f"r{n}", prompt, Sampling(temperature=0.0), LENGTH, frozenset()))
        for n, prompt in enumerate(CALLS)
    ]
    return list(await asyncio.gather(*map(_tokens, streams)))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """The tokens of one rank."""

    async def main() -> list[list[int]]:
        async with served(None, tmp_path_factory.mktemp("captures")) as (engine, _):
            return await tokens_of(engine)

    return asyncio.run(main())


@pytest.mark.parametrize(("layout", "rank", "step", "nth", "action"), cases())
def test_a_fault_names_its_rank_and_plan_and_every_stream_goes_on(
    run_once: Run, alone: list[list[int]], tmp_path: Path, layout: str, rank: int, step: str, nth: int, action: str
) -> None:
    async def main() -> None:
        fault = f"rank={rank},step={step},nth={nth},action={action}"
        async with served(layout, tmp_path, fault) as (engine, fleet):
            assert await tokens_of(engine) == alone
            events = engine.snapshot().events
            assert [event["kind"] for event in events] == ["worker_lost", "recovered"]
            lost = events[0]
            assert lost["rank"] == rank, lost
            assert f"plan {lost['seq']} " in lost["text"]
            check_folder(Path(lost["folder"]), lost, rank, step, action)
            assert [status.restarts for status in fleet.ranks] == [1] * RANKS
            census = await engine.census()
            assert census["ok"] and census["idle"], census

    run_once(main)


def check_folder(folder: Path, lost: dict[str, Any], rank: int, step: str, action: str) -> None:
    """Stacks of all ranks, the rings, and the plan that the named rank did not run."""
    told = json.loads((folder / "event.json").read_text())
    assert (told["rank"], told["seq"]) == (rank, lost["seq"])
    for each in range(RANKS):
        text = (folder / f"rank{each}.stack").read_text()
        if each == rank and action == "kill":
            assert text == "its process has ended\n"
        else:
            assert "run_plans" in text and "== status" in text, text
    if action == "stop":
        assert "was stopped" in lost["text"]
        assert "T (stopped)" in (folder / f"rank{rank}.stack").read_text()
    plans = {plan["seq"]: plan for plan in json.loads((folder / "plans.json").read_text())}
    plan = plans[lost["seq"]]
    assert any(bool(row["tokens"]) is (step == "prefill") for row in plan["rows"])
    assert (rank in plan["owed_by"]) is (action != "refuse")
    rings = json.loads((folder / "rings.json").read_text())
    assert [each["rank"] for each in rings["ranks"]] == list(range(RANKS))
    assert rings["ranks"][rank]["answered"] == lost["seq"] - (action != "refuse")
    assert len(rings["acts"]["mailboxes"]) == RANKS and len(rings["acts"]["channels"]) == 2 * (RANKS - 1)
    for used in (*rings["acts"]["mailboxes"], *rings["acts"]["channels"]):
        count = used["posted"] if "posted" in used else used["sent"]
        assert (used["last"] is not None) is (count > 0)
        assert used["last"] is None or (2 <= used["last"]["seq"] <= max(plans) and used["last"]["label"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_that_waits_in_vain_is_not_named_for_the_one_that_it_waits_for(
    run_once: Run, tmp_path: Path, layout: str
) -> None:
    """Every rank but one is past its exchanges or starves; the answers of those that starve come first."""

    async def main() -> None:
        async with served(layout, tmp_path, "rank=1,step=decode,nth=2,action=stop") as (engine, _):
            await tokens_of(engine)
            lost = engine.snapshot().events[0]
            assert lost["rank"] == 1 and "was stopped and kept rank " in lost["text"]
            waits = json.loads((Path(lost["folder"]) / "event.json").read_text())["waits"]
            assert waits and all(wait["rank"] != 1 for wait in waits)

    run_once(main)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_that_is_slow_is_no_loss(run_once: Run, alone: list[list[int]], tmp_path: Path, layout: str) -> None:
    """It stands for most of what a plan may take, and the others wait for it as long."""

    async def main() -> None:
        fault = "rank=1,step=decode,nth=2,action=delay:2000"
        async with served(layout, tmp_path, fault, timeout_s=5.0) as (engine, _):
            assert await tokens_of(engine) == alone
            assert engine.snapshot().events == ()

    run_once(main)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_stream_survives_any_number_of_stops_from_outside(
    run_once: Run, alone: list[list[int]], tmp_path: Path, layout: str
) -> None:
    """The request is alone in flight and comes past no place in between: what nobody computes cannot be its fault."""

    async def main() -> None:
        async with served(layout, tmp_path, "rank=2,step=prefill,action=stop") as (engine, fleet):
            stream = engine.submit(GenerateCall("r", CALLS[2], Sampling(temperature=0.0), LONG, frozenset()))
            reading = asyncio.create_task(_tokens(stream))
            for times in (1, 2):
                await recovered(engine, times, every_s=0.0)  # the stop has to come before the answer's end
                if times < 2:
                    os.kill(fleet.ranks[2].pid, signal.SIGSTOP)
            tokens = await reading
            assert len(tokens) == LONG and tokens[:LENGTH] == alone[2]
            losses = [event for event in engine.snapshot().events if event["kind"] == "worker_lost"]
            assert [loss["rank"] for loss in losses] == [2, 2]
            assert all("was stopped" in loss["text"] for loss in losses), losses

    run_once(main)


def test_a_stopped_rank_is_found_long_before_a_slow_one_would_be(
    run_once: Run, monkeypatch: pytest.MonkeyPatch, alone: list[list[int]], tmp_path: Path
) -> None:
    monkeypatch.setattr("homeserve.fleet.life.STOPPED_S", 0.5)
    monkeypatch.setattr("homeserve.fleet.life.LOOK_PERIOD_S", 0.1)

    async def main() -> None:
        fault = "rank=1,step=decode,nth=3,action=stop"
        async with served("pipeline", tmp_path, fault, timeout_s=3600.0) as (engine, _):
            assert await tokens_of(engine) == alone
            lost = engine.snapshot().events[0]
            assert lost["rank"] == 1 and "was stopped" in lost["text"]

    run_once(main)
