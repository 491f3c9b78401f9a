"""Scales of charts and what the box view derives from routes: pure functions, run where they run, in the browser."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from box import Box
from box_view import COUNTER, SIZES, View


@pytest.fixture(scope="module")
def page(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A page of a server, that may import the page's modules."""
    box = Box(tmp_path_factory.mktemp("facts"))
    try:
        run = box.up(str(COUNTER), *SIZES)
        made = browser.new_context(timezone_id="Europe/Berlin").new_page()
        made.goto(run.url)
        yield made
        made.context.close()
    finally:
        box.close()


@pytest.fixture
def call(page: Any, wait_until: Callable[..., Any]) -> Callable[..., Any]:
    """`call(module, script, *values)`: `script` is the body of a function whose `m` is the module, `a` the values."""
    return View(page, page.url.rstrip("/#"), wait_until).module


def runs(*values: float | None, gap: int = -1) -> list[dict[str, Any]]:
    return [{"from": at, "to": at + 1, "value": value, "gap": at == gap} for at, value in enumerate(values)]


# -------------------------------------------------------------------------------------------------------------- scales


@pytest.mark.parametrize(
    ("low", "high", "count", "wanted"),
    [
        (0, 100, 4, [0, 50, 100]),
        (0, 4, 4, [0, 1, 2, 3, 4]),
        (0, 1, 4, [0, 0.5, 1]),
        (0, 22736, 4, [0, 10000, 20000]),
        (0.1, 0.3, 2, [0.1, 0.2, 0.3]),
        (21980, 22020, 4, [21980, 21990, 22000, 22010, 22020]),
    ],
)
def test_ticks_are_round_and_no_more_than_asked(
    call: Callable[..., Any], low: float, high: float, count: int, wanted: list[float]
) -> None:
    assert call("scales", "return m.ticks(...a)", low, high, count) == wanted


def test_a_linear_scale_is_its_own_way_back(call: Callable[..., Any]) -> None:
    script = "const s = m.linear([10, 30], [100, 0]); return [s(10), s(20), s(30), s.invert(25)]"
    assert call("scales", script) == [100, 50, 0, 25]
    assert call("scales", "return m.linear([5, 5], [0, 9])(5)") == 0, "a range of nothing"


def test_times_are_whole_moments_of_the_local_clock(call: Callable[..., Any]) -> None:
    base = 1_780_000_000  # 2026-05-28 22:26:40 in Berlin
    script = "const t = m.timeTicks(...a); return [t.step, t.at.map((at) => m.timeLabel(at, t.step))]"
    assert call("scales", script, base, base + 600, 4) == [300, ["22:30", "22:35"]]
    assert call("scales", script, base, base + 60, 4) == [15, ["22:26:45", "22:27:00", "22:27:15", "22:27:30"]]
    step, labels = call("scales", script, base, base + 10 * 86400, 4)
    assert step == 604800 or labels == sorted(labels)
    assert call("scales", "return m.timeLabel(...a)", base, 86400) == "2026-05-28"


@pytest.mark.parametrize(("how", "wanted"), [("min", 1), ("max", 9), ("mean", 4)])
def test_many_values_become_one_without_losing_what_matters(call: Callable[..., Any], how: str, wanted: float) -> None:
    few = call("scales", "return m.thin(...a)", runs(2, 9, 1, 4), 0, 4, 1, how)
    assert few == [{"from": 0, "to": 4, "value": wanted, "gap": False}]


def test_thinning_keeps_holes_gaps_and_the_window(call: Callable[..., Any]) -> None:
    told = call("scales", "return m.thin(...a)", runs(1, 2, None, None, 5, 6, 7, 8, gap=4), 1, 7, 3, "max")
    assert [each["value"] for each in told] == [2, None, 5, 7] and [each["gap"] for each in told] == [
        False,
        False,
        True,
        False,
    ]
    assert call("scales", "return m.reduce(...a)", runs(None, None), "min") is None
    whole = runs(1, 2, 3)
    assert call("scales", "return m.thin(...a)", whole, 0, 3, 100, "min") == whole, "few enough"


def test_a_run_is_found_by_its_time(call: Callable[..., Any]) -> None:
    script = "return [m.runAt(...a), m.runAt(a[0], -1), m.runAt(a[0], 9), m.runAt([], 1)]"
    told = call("scales", script, runs(1, 2, 3), 1.5)
    assert told == [{"from": 1, "to": 2, "value": 2, "gap": False}, None, None, None]


# --------------------------------------------------------------------------------------------------------------- words


@pytest.mark.parametrize(
    ("asked", "wanted"),
    [
        ("number(1234567.891, 1)", "1\u202f234\u202f567.9"),
        ("number(-0.04, 1)", "0.0"),
        ("mib(null)", "unknown"),
        ("mib(999.94)", "999.9"),
        ("mib(22736.1)", "22\u202f736"),
        ("signed(-20.7)", "−20.7"),
        ("signed(0)", "±0.0"),
        ("rate(null)", "unknown"),
        ("rate(4.26)", "4.3"),
        ("share(1, 0)", "unknown"),
        ("share(1, 8)", "13 %"),
        ("milliseconds(0.391)", "0.39 ms"),
        ("milliseconds(12_345)", "12.3 s"),
        ("duration(7265)", "2 h 1 min"),
    ],
)
def test_numbers_are_words_and_unknown_is_no_zero(call: Callable[..., Any], asked: str, wanted: str) -> None:
    assert call("facts", f"return m.{asked}") == wanted


# ---------------------------------------------------------------------------------------------------------------- ring


def status(
    at: float, generated: int | None, started: float = 1.0, model: str = "m", running: int = 1
) -> dict[str, Any]:
    unknown = {"p50": None, "p99": None}
    return {
        "at": at,
        "started": started,
        "model": {"id": model},
        "tokens": {"prompt": 0, "generated": generated},
        "requests": {"running": running, "waiting": 0},
        "kv": {"used_tokens": 0, "cached_tokens": 0},
        "engine": {"loop_lag_ms": unknown, "step_overhead_ms": unknown},
    }


PUSH = "const r = new m.Ring(a[1] ?? 3600); for (const s of a[0]) r.push(s); "


def test_a_counter_becomes_a_rate_between_two_looks(call: Callable[..., Any]) -> None:
    told = call("facts", PUSH + "return r.rates('generated')", [status(10, 100), status(11, 150), status(13, 250)])
    assert told == [
        {"from": 10, "to": 11, "value": 50, "gap": False},
        {"from": 11, "to": 13, "value": 50, "gap": False},
    ]


def test_over_a_time_without_a_look_a_rate_is_the_mean_and_a_value_is_unknown(call: Callable[..., Any]) -> None:
    looks = [status(10, 100), status(110, 1100, running=3)]
    assert call("facts", PUSH + "return r.rates('generated')", looks) == [
        {"from": 10, "to": 110, "value": 10, "gap": True}
    ]
    assert call("facts", PUSH + "return r.values('running')", looks) == [
        {"from": 10, "to": 110, "value": None, "gap": True}
    ]


@pytest.mark.parametrize("other", [{"started": 2.0}, {"model": "another"}])
def test_another_server_or_model_is_not_compared(call: Callable[..., Any], other: dict[str, Any]) -> None:
    looks = [status(10, 100), status(11, 900, **other), status(12, 910, **other)]
    assert [each["value"] for each in call("facts", PUSH + "return r.rates('generated')", looks)] == [None, 10]
    assert call("facts", PUSH + "return r.recent('generated', 60)", looks) == 10


def test_the_ring_is_bounded_and_an_answer_that_is_older_is_dropped(call: Callable[..., Any]) -> None:
    looks = [status(at, at) for at in (1, 2, 3, 4, 5, 4.5)]
    assert call("facts", PUSH + "return r.samples.map((each) => each.at)", looks, 3) == [3, 4, 5]


def test_shares_of_a_rank_are_of_the_time_that_passed(call: Callable[..., Any]) -> None:
    def at(seconds: float, busy: float, waited: float, restarts: int = 0) -> dict[str, Any]:
        return {
            "at": seconds,
            "ranks": [{"rank": 0, "pid": 7, "restarts": restarts, "busy_ms": busy, "waited_ms": waited}],
        }

    script = "return m.rankShares(...a)"
    (part,) = call("facts", script, at(1, 100, 0), at(3, 600, 500))
    assert part == {"busy": 0.25, "waited": 0.25, "idle": 0.5}
    assert call("facts", script, at(1, 100, 0), at(3, 0, 0, restarts=1)) == [None], "it was started in between"
    assert call("facts", script, None, at(3, 0, 0)) == [None]


# -------------------------------------------------------------------------------------------------------------- memory


def line(device: int, name: str, mib: float, *held: str) -> dict[str, Any]:
    return {"device": device, "line": name, "mib": mib, "held": list(held), "source": "computed", "note": ""}


def measured(device: int, name: str, predicted: float | None, found: float | None) -> dict[str, Any]:
    return {"device": device, "line": name, "predicted_mib": predicted, "measured_mib": found, "how": None}


def device(index: int, name: str, total: float, free: float | None, ceiling: float | None, kind: str) -> dict[str, Any]:
    floor = 256.0 if kind == "cpu" else 1024.0
    sizes = {"total_mib": total, "free_mib": free, "ceiling_mib": ceiling, "floor_mib": floor}
    return {"index": index, "id": str(index), "name": name, "kind": kind, **sizes}


CARDS = {
    "host": {"limit_mib": 64000.0},
    "devices": [
        device(0, "RTX 5090", 32607.0, 32000.0, 30000.0, "discrete"),
        device(1, "RTX 3080", 10240.0, None, None, "discrete"),
        device(2, "GT 710", 1024.0, 900.0, None, "discrete"),
        device(3, "Ryzen", 64000.0, 60000.0, 59744.0, "cpu"),
    ],
    "plan": {
        "peak_mib": [21500.0, 6000.0, 0.0, 900.0],
        "ledger": [
            line(0, "weights arena", 18000, "always"),
            line(0, "kv, pipeline", 2000, "pipeline"),
            line(0, "kv, tensor", 3000, "tensor", "flip"),
            line(0, "context", 500, "always"),
            line(1, "weights arena", 6000, "always"),
            line(3, "engine process", 900, "always"),
        ],
    },
    "measured": [
        measured(0, "weights arena", 18000, 17900.5),
        measured(0, "kv, pipeline", 2000, 2000),
        measured(0, "context", 500, None),
        measured(1, "weights arena", 6000, 6000),
        measured(3, "engine process", 900, 800),
        measured(3, "model file (page cache)", None, 4000),
    ],
    "measured_total": {"smaps_mib": 810.0, "later_mib": 0},
    "measured_cards": [
        {"device": 0, "predicted_mib": 20500, "driver_mib": 20480.0, "how": "driver"},
        {"device": 1, "predicted_mib": 6000, "driver_mib": None, "how": None},
    ],
}  # fmt: skip


def bars(call: Callable[..., Any], layout: str = "pipeline", free: list[list[float]] | None = None) -> Any:
    return call("facts", "return m.barsOf(a[0], a[1], new Map(a[2]))", CARDS, layout, free or [])


def test_each_device_of_the_plan_has_bars_and_an_unused_card_has_none(call: Callable[..., Any]) -> None:
    figures = bars(call, free=[[3, 50000.0]])
    assert [each["name"] for each in figures] == ["RTX 5090", "RTX 3080", "Ryzen"]
    card, uneven, host = figures
    predicted, found, peak = card["bars"]
    assert predicted["sum"] == 20500 and [each["line"] for each in predicted["parts"]] == [
        "weights arena",
        "kv, pipeline",
        "context",
    ]
    assert found["sum"] == 19900.5 and found["unknown"] == 1, "what is unknown is in no sum, and counted"
    assert (peak["name"], peak["sum"], card["peakMoment"]) == ("planned, tensor", 21500, "tensor")
    assert [each["key"] for each in uneven["bars"]] == ["predicted", "measured"], "its peak is what is held now"
    assert host["bars"][1]["sum"] == 800, "cache is in no sum"


def test_the_whole_device_is_known_from_the_corridor_or_the_driver_or_not_at_all(call: Callable[..., Any]) -> None:
    card, uneven, host = bars(call, free=[[3, 50000.0]])
    assert card["whole"] | {"total": 0} == {
        "total": 0,
        "held": 20480,
        "free": 11520,
        "others": 607,
        "floor": 1024,
        "ceiling": 30000,
        "from": "driver",
    }
    assert uneven["whole"]["free"] is None and uneven["whole"]["others"] is None
    assert (host["whole"]["held"], host["whole"]["free"], host["whole"]["others"]) == (810, 50000, 13190)


def test_rows_tell_what_is_planned_at_other_times(call: Callable[..., Any]) -> None:
    rows = {row["line"]: row for row in bars(call)[0]["rows"]}
    assert rows["kv, tensor"]["here"] is False and rows["kv, tensor"]["elsewhere"] == "3\u202f000 at tensor, flip"
    assert rows["context"]["measured"] is None and rows["context"]["difference"] is None
    assert rows["weights arena"]["difference"] == -99.5


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("weights, rank 0", "weights"), ("weights copy", "copies"), ("weights side, rank 1", "copies"),
        ("kv, windows of the other layout", "kv"), ("flip transit", "copies"), ("load staging", "buffers"),
        ("engine process", "processes"), ("vocabulary", "processes"), ("context", "driver"), ("drafts", "state"),
        ("something new", "other"),
    ],
)  # fmt: skip
def test_every_line_has_a_kind(call: Callable[..., Any], name: str, kind: str) -> None:
    assert call("facts", "return m.kindOf(a[0])", name) == kind


# ------------------------------------------------------------------------------------------------------------ timeline


def flip(number: int, at: float, to: str, state: str = "committed", ms: float | None = 1000) -> dict[str, Any]:
    other = {"pipeline": "tensor", "tensor": "pipeline"}
    return {"id": number, "at": at, "from": other[to], "to": to, "state": state, "ms": {"total": ms}}


def spans(
    call: Callable[..., Any], flips: list[dict[str, Any]], layout: str, events: list[dict[str, Any]] | None = None
) -> list[list[Any]]:
    told = {"flips": flips, "events": events or [], "layout": layout, "from": 0, "now": 100}
    script = "return m.layoutSpans(a[0]).map((each) => [each.from, each.to, each.layout])"
    return list(call("facts", script, told))


def test_layouts_follow_from_flips(call: Callable[..., Any]) -> None:
    assert spans(call, [], "pipeline") == [[0, 100, "pipeline"]]
    there_and_back = [flip(1, 10, "tensor"), flip(2, 40, "pipeline")]
    assert spans(call, there_and_back, "pipeline") == [[0, 11, "pipeline"], [11, 41, "tensor"], [41, 100, "pipeline"]]


def test_a_flip_that_was_given_up_changes_nothing(call: Callable[..., Any]) -> None:
    assert spans(call, [flip(1, 10, "tensor", "abandoned"), flip(2, 20, "tensor", "preparing", None)], "pipeline") == [
        [0, 100, "pipeline"]
    ]


def test_a_life_that_begins_again_rests_in_its_layout_from_the_loss_on(call: Callable[..., Any]) -> None:
    lost = [{"kind": "worker_lost", "at": 60}]
    assert spans(call, [flip(1, 10, "tensor")], "pipeline", lost) == [
        [0, 11, "pipeline"],
        [11, 60, "tensor"],
        [60, 100, "pipeline"],
    ]
    again = [flip(1, 10, "tensor"), flip(2, 80, "tensor")]
    assert spans(call, again, "tensor", lost)[1:] == [[11, 60, "tensor"], [60, 81, "pipeline"], [81, 100, "tensor"]]


def test_of_flips_that_are_forgotten_nothing_is_claimed(call: Callable[..., Any]) -> None:
    assert spans(call, [flip(7, 30, "tensor")], "tensor") == [[30, 31, "pipeline"], [31, 100, "tensor"]]
    assert spans(call, [], None) == []  # type: ignore[arg-type]


def test_bands_are_of_loads_and_of_flips_as_they_were(call: Callable[..., Any]) -> None:
    samples = [
        [1, 9, "starting"],
        [2, 9, "weights of 2 ranks"],
        [3, 8, "ready"],
        [4, 8, "flip packing"],
        [5, 7, "recovering"],
        [40, 7, "recovering"],
    ]
    told = call("facts", "return m.phaseBands(...a)", samples, 1000, [flip(3, 1003.5, "tensor", ms=500)])
    assert [(each["class"], each["from"], each["to"]) for each in told] == [
        ("loading", 1000, 1002), ("recovering", 1004, 1005), ("flip", 1003.5, 1004),
    ]  # fmt: skip


def test_a_breach_is_where_a_dip_below_the_floor_begins(call: Callable[..., Any]) -> None:
    device = {
        "floor_mib": 100,
        "samples": [
            [1, 200, "ready"],
            [2, 90, "ready"],
            [3, 80, "ready"],
            [4, None, "ready"],
            [5, 150, "ready"],
            [6, 99, "flip packing"],
        ],
    }
    told = call("facts", "return m.breachesOf(...a)", device, 1000)
    assert [each["at"] for each in told] == [1002, 1006]


def test_a_refusal_is_told_with_what_lacks(call: Callable[..., Any]) -> None:
    script = "return m.refusalText(...a)"
    error = {"message": "no", "needed_mib": 10, "available_mib": 4.5, "device": "cpu"}
    assert call("flips", script, 409, error) == "Not begun: no (needed 10.0 MiB on cpu, 4.5 MiB there: 5.5 MiB lack)"
    assert call("flips", script, 409, {"message": "a flip is running"}) == "Not begun: a flip is running"
    assert call("flips", script, 500, None) == "The server answered 500."


# ------------------------------------------------------------------------------------------------------------ markdown


@pytest.mark.parametrize("text", ["a|b\n" + " " * 60_000 + "x", ("[a](" + " " * 2000 + "x y) ") * 200])
def test_spaces_of_an_answer_cost_no_more_than_letters(call: Callable[..., Any], text: str) -> None:
    """Seconds where a pattern looks at each of them from each of them; milliseconds where it does not."""
    script = "const t = performance.now(); m.renderMarkdown(document.createElement('div'), a[0]);"
    assert call("markdown", script + "return performance.now() - t", text) < 1500
