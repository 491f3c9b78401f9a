"""What the memory of a server is told, and when: phases of the load, breaches before there is an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from budget.corridor import Breach, Sample
from budget.facts import MIB
from budget.ledger import ALWAYS, Line
from homeserve.memory import UNTOLD_MAX, MemoryWatch, card_lines
from homeserve.server.context import LoadProgress, ServerContext
from homeserve.settings import Settings


def breach(number: int) -> Breach:
    return Breach(0, 256 * MIB, Sample(float(number), number * MIB, "weights"))


def watched(state: str = "loading") -> tuple[MemoryWatch, ServerContext]:
    context = ServerContext(Settings(), state=lambda: state, load=lambda: LoadProgress("weights", 3, 10))
    return MemoryWatch(context), context


def test_breaches_from_before_the_engine_become_its_events() -> None:
    watch, context = watched()
    for number in range(UNTOLD_MAX + 4):
        watch._on_breach(breach(number))
    events: list[tuple[str, str]] = []
    engine: Any = SimpleNamespace(note=lambda kind, text: events.append((kind, text)))
    context.engine = engine
    watch.tell()
    watch.tell()
    assert len(events) == UNTOLD_MAX, "the first ones of very many are forgotten"
    assert events[0] == (
        "corridor_breach",
        "free memory of device 0 is down to 4 MiB, below the floor of 256 MiB (weights)",
    )
    watch._on_breach(breach(200))
    assert len(events) == UNTOLD_MAX + 1 and "200 MiB" in events[-1][1]


def test_a_sample_has_the_stage_of_the_load_and_then_the_state() -> None:
    assert watched()[0]._phase() == "weights"
    assert watched("ready")[0]._phase() == "ready"
    assert watched("draining")[0]._phase() == "draining"


async def test_without_a_plan_there_are_no_rows_and_stop_is_right_at_any_time() -> None:
    watch, _ = watched()
    assert await watch.rows() == []
    await watch.stop()
    watch, context = watched()
    watch.start()
    assert context.corridor is not None
    await watch.stop()
    await watch.stop()
    assert context.corridor.as_json()["taken"] >= 0


def test_what_ranks_on_cards_counted_are_lines_of_the_plan() -> None:
    """The arena is the plan's, rows are those of the layout that it begins with; what the plan lacks is left out, and
    memory of the host is no line of a card."""
    plan = SimpleNamespace(
        ranks=(0, 1),
        layouts=("pipeline", "tensor"),
        lines=(
            Line(0, "weights arena", 9, ALWAYS, "computed"),
            Line(0, "kv, pipeline", 8, ("boot", "pipeline"), "computed"),
            Line(0, "kv, tensor", 7, ("tensor",), "computed"),
            Line(0, "context", 6, ALWAYS, "reserve"),
            Line(1, "weights arena", 5, ALWAYS, "computed"),
            Line(2, "weights copy", 4, ALWAYS, "computed"),
        ),
    )
    counted = {"weights": 100, "kv": 50, "staging": 1, "weights copy": 4}
    assert card_lines(plan, 0, counted) == ((0, "weights arena", 100), (0, "kv, pipeline", 50))  # type: ignore[arg-type]
    assert card_lines(plan, 1, counted) == ((1, "weights arena", 100),)  # type: ignore[arg-type]
