"""When each rank was busy: what the engine keeps of plans, and what is made of it."""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from homeserve.engine.timeline import PLANS_KEPT, Timeline
from homeserve.fleet.spec import Exchanges
from homeserve.wire.records import LaneRows, PlanKind, Result, pack_ints

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "benchmarks"))

from timeline import Span, longest_prompt, main, overlap_of, read_csv, spans_of, write_csv

CHUNK = LaneRows(0, 1, 0, pack_ints([1, 2, 3]))
ROW = LaneRows(1, 2, 9, b"", sample=True)


def result(rank: int, seq: int, began: int, busy: int, waited: int) -> Result:
    return Result(rank, seq, 0, busy_us=busy, began_us=began, waited_us=waited)


def test_the_engine_keeps_who_began_when_without_the_waiting() -> None:
    timeline = Timeline()
    timeline.issued(2, PlanKind.MIXED, (CHUNK, ROW))
    timeline.issued(3, PlanKind.CENSUS, ())
    timeline.answered(2, (result(0, 2, 1000, 500, 0), result(1, 2, 1100, 900, 400)))
    timeline.answered(3, (result(0, 3, 1600, 5, 0),))
    (plan,) = timeline.recent()
    assert plan.as_json() == {
        "life": 0, "seq": 2, "kind": "mixed", "rows": 4, "prompt_rows": 3, "drafts": 0, "drawn": 0,
        "ranks": [[0, 1.0, 0.5, 0.0], [1, 1.1, 0.5, 0.4]],
    }  # fmt: skip


def test_plans_of_a_lost_life_are_not_answered_by_the_next_one() -> None:
    timeline = Timeline()
    timeline.issued(2, PlanKind.PREFILL, (CHUNK,))
    timeline.lost()
    timeline.answered(2, (result(0, 2, 1, 1, 0),))
    assert timeline.recent() == ()
    for seq in range(2, PLANS_KEPT + 10):
        timeline.issued(seq, PlanKind.DECODE, (ROW,))
        timeline.answered(seq, (result(0, seq, seq, 1, 0),))
    assert len(timeline.recent()) == PLANS_KEPT and timeline.recent()[0].seq == 10
    assert {plan.life for plan in timeline.recent()} == {1}


def test_exchanges_are_told_from_plans_and_a_census_adds_none() -> None:
    exchanges = Exchanges()
    exchanges.count(Result(0, 1, 0))
    assert exchanges.shown() == {"count": None, "us_p50": None, "us_p99": None} and exchanges.moved_bytes is None
    for plan in range(1, 101):
        waited = 1000 if plan == 100 else 40
        exchanges.count(Result(0, plan + 1, 0, waited_us=waited, exchanges=(("", 4 * plan, 512 * plan, 0),)))
    assert exchanges.shown() == {"count": 400, "us_p50": 10.0, "us_p99": 10.0} and exchanges.moved_bytes == 51200
    exchanges.count(Result(0, 102, 0, exchanges=(("sum a", 300, 50000, 9), ("sum b", 100, 1200, 9))))
    assert exchanges.shown()["count"] == 400 and exchanges.moved_bytes == 51200
    exchanges.count(Result(0, 103, 0, waited_us=1000, exchanges=(("", 404, 51712, 0),)))
    assert exchanges.shown() == {"count": 404, "us_p50": 10.0, "us_p99": 250.0}


def pipeline(chunks: int, in_flight: int, first_seq: int = 2) -> list[Span]:
    """Two ranks that take 10 ms each for a chunk; rank 0 begins one when fewer than `in_flight` are open."""
    spans, done = [], list[float]()
    free = [0.0, 0.0]
    for n in range(chunks):
        took = max(free[0], done[n - in_flight] if n >= in_flight else 0.0)
        free[0] = took + 10
        came = max(free[1], free[0])
        spans.append(Span(0, first_seq + n, "prefill", 64, 64, 0, took, 10, 0))
        spans.append(Span(0, first_seq + n, "prefill", 64, 64, 1, free[1], 10, came - free[1]))
        free[1] = came + 10
        done.append(free[1])
    return spans


@pytest.mark.parametrize(("in_flight", "overlap", "whole"), [(3, 1.0, 20 / 21), (1, 0.5, 0.5)])
def test_overlap_is_whole_with_plans_in_flight_and_half_with_one(in_flight: int, overlap: float, whole: float) -> None:
    found = overlap_of(pipeline(20, in_flight))
    assert found is not None and (found.ranks, found.plans, found.prompt_rows) == (2, 20, 1280)
    assert found.overlap == pytest.approx(overlap, abs=0.03)
    assert found.whole == pytest.approx(whole, abs=0.01)


def test_the_longest_prompt_is_found_among_others() -> None:
    other = Span(0, 40, "decode", 1, 0, 0, 1000, 1, 0)
    assert longest_prompt([*pipeline(3, 3, first_seq=50), other, *pipeline(5, 3)]) == pipeline(5, 3)
    assert longest_prompt([other]) == [] and overlap_of(pipeline(1, 1)) is None


def test_a_table_that_was_written_is_read_again_and_drawn(tmp_path: Path) -> None:
    table, image = tmp_path / "t.csv", tmp_path / "t.svg"
    write_csv(table, pipeline(4, 3))
    assert read_csv(table) == pipeline(4, 3)
    assert main(["--read", str(table), "--svg", str(image)]) == 0
    boxes = list(ElementTree.parse(image).getroot().iter("{http://www.w3.org/2000/svg}rect"))
    assert len(boxes) == 1 + 2 * 2 * 4


def test_what_status_tells_becomes_spans() -> None:
    plan = {"life": 1, "seq": 7, "kind": "prefill", "rows": 5, "prompt_rows": 4, "ranks": [[0, 3.5, 2.0, 0.5]]}
    assert spans_of([plan]) == [Span(1, 7, "prefill", 5, 4, 0, 3.5, 2.0, 0.5)]
