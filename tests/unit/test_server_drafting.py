"""What bodies, status and metrics tell of drafting."""

from __future__ import annotations

from typing import Any, cast

import pytest
from engine_flip_rig import SimFleet, flip_limits, limits
from prometheus_client.parser import text_string_to_metric_families
from standing import loaded, standing

from homeserve.engine.engine import Engine
from homeserve.engine.request import EngineLimits, Timings
from homeserve.engine.speculation import DraftCounts, Drafting
from homeserve.server.context import Loaded
from homeserve.server.metrics import Metrics
from homeserve.server.metrics_reading import Reading, Totals
from homeserve.server.shape import Counts
from homeserve.server.status import status_of
from homeserve.server.timing import timing_block

DRAFT_KEYS = {
    *("enabled", "why_not", "most", "adapts", "accept_len", "accept_rate", "by_position"),
    *("carried", "uncarried", "first"),
}
UNKNOWN = {"accept_len": None, "rounds": None}


class NoFleet:
    """An engine that is only asked needs no ranks."""

    ranks: tuple[()] = ()


def model_of(drafts: int, **more: Any) -> Loaded:
    alone = EngineLimits(
        context=256, kv_tokens=1024, running=4, waiting=8, chunk=64, prefill_delay=0, plans_in_flight=2, drafts=drafts
    )
    engine = Engine(cast(Any, NoFleet()), alone)
    return loaded(engine=engine, **more)


def status_with(model: Loaded) -> dict[str, Any]:
    return status_of(standing(model), model)


def rounds(*each: tuple[int, int], carried: bool = False) -> DraftCounts:
    counts = DraftCounts()
    for drafts, accepted in each:
        counts.count(drafts, accepted, carried=carried)
    return counts


def block(drafts: list[DraftCounts] | None) -> Any:
    told = timing_block("r", [Timings(1.0)], counts=Counts(1, 1, 0), drafts=drafts)
    return told["draft"]


def test_a_body_has_the_rounds_of_all_its_choices() -> None:
    of_choices = [rounds((3, 3), (3, 1)), rounds((2, 0)), rounds((3, 2), carried=True)]
    assert block(of_choices) == {
        "rounds": 4,
        "drafted": 11,
        "accepted": 6,
        "accept_len": 2.5,
        "by_position": [0.75, 0.5, pytest.approx(1 / 3, abs=1e-4)],
        "carried": 1,
    }
    assert [counts.rounds for counts in of_choices] == [2, 1, 1], "summed up beside them, not into them"


def test_a_body_without_a_round_has_no_accept_length() -> None:
    none = {"rounds": 0, "drafted": 0, "accepted": 0, "accept_len": None, "by_position": [], "carried": 0}
    assert block([DraftCounts(), DraftCounts()]) == none


def test_a_body_of_a_server_that_drafts_nothing_says_nothing() -> None:
    assert block(None) is None


def test_status_says_why_nothing_is_drafted_and_counts_nothing() -> None:
    told = status_with(model_of(0, no_drafts="the model has no drafting block"))["draft"]
    assert set(told) == DRAFT_KEYS
    assert (told["enabled"], told["why_not"]) == (False, "the model has no drafting block")
    assert all(told[name] is None for name in ("most", "accept_len", "accept_rate", "by_position"))
    assert told["carried"] == told["uncarried"] == told["first"] == UNKNOWN


def test_status_before_there_is_an_engine_knows_nothing_of_drafting() -> None:
    told = status_of(standing(state="loading"), None)["draft"]
    assert set(told) == DRAFT_KEYS and told["enabled"] is None and told["why_not"] is None


def test_status_has_carried_and_uncarried_apart() -> None:
    model = model_of(3)
    drafting = model.engine.drafting
    plain, carried = drafting.begin(), drafting.begin()
    drafting.count(plain, 3, 4)
    drafting.count(plain, 3, 1)
    carried.crossed(True)
    drafting.count(carried, 3, 3)
    drafting.count(carried, 1, 2)
    told = status_with(model)["draft"]
    assert set(told) == DRAFT_KEYS
    assert (told["enabled"], told["why_not"], told["most"], told["adapts"]) == (True, None, 3, True)
    assert told["accept_len"] == 2.5 and told["accept_rate"] == 0.6
    assert told["uncarried"] == {"accept_len": 2.5, "rounds": 2}
    assert told["carried"] == {"accept_len": 2.5, "rounds": 2}
    assert told["first"] == {"accept_len": 3.0, "rounds": 1}


async def test_status_is_of_the_layout_in_force() -> None:
    """What was drafted in the other one stays counted."""
    fleet = SimFleet(limits(flip_limits(drafts=3)))
    model = loaded(engine=fleet.engine)
    drafting = fleet.engine.drafting
    drafting.count(drafting.begin(), 3, 4)
    for layout, other, enabled in (("pipeline", "tensor", False), ("tensor", "pipeline", True)):
        told = status_with(model)
        assert told["layout"] == layout
        why = None if enabled else "the ranks are in the pipeline layout"
        assert (told["draft"]["enabled"], told["draft"]["why_not"], told["draft"]["most"]) == (enabled, why, 3)
        assert told["draft"]["uncarried"]["rounds"] == 1
        record = fleet.engine.flip_ask(other)
        while not record.over:
            fleet.answer()
        assert fleet.engine.state == "ready"


def test_status_says_why_drafting_was_ended() -> None:
    model = model_of(3)
    model.engine.drafting.off_because = "a worker was lost"
    told = status_with(model)["draft"]
    assert (told["enabled"], told["why_not"], told["most"]) == (False, "a worker was lost", 3)


async def scraped(drafting: Drafting | None) -> dict[tuple[str, str], float]:
    counted = Totals.drafted(drafting) if drafting is not None else None
    text = (await Metrics().render(Reading(totals={"m": Totals(drafts=counted)}))).decode()
    families = text_string_to_metric_families(text)
    samples = [sample for family in families for sample in family.samples if sample.name.startswith("homeserve_draft")]
    return {(sample.name, sample.labels.get("carried", "")): sample.value for sample in samples}


async def test_metrics_count_rounds_and_drafts() -> None:
    drafting = Drafting(3)
    plain, carried = drafting.begin(), drafting.begin()
    drafting.count(plain, 3, 4)
    carried.crossed(True)
    drafting.count(carried, 2, 1)
    drafting.count(carried, 2, 2)
    assert await scraped(drafting) == {
        ("homeserve_draft_rounds_total", "true"): 2,
        ("homeserve_draft_rounds_total", "false"): 1,
        ("homeserve_draft_drafted_total", ""): 7,
        ("homeserve_draft_accepted_total", ""): 4,
    }
    assert await scraped(None) == {}
