"""A run of `homeserve bench` with a server that is played: what is asked in which order, what counts, what is kept."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from homeserve.bench import flips, measures, run, steps, subject
from homeserve.bench.client import Refused, Target, Timing, Unmeasured
from homeserve.bench.document import Row
from homeserve.bench.names import parse
from homeserve.bench.prompts import Prompts
from homeserve.bench.run import Run, WentAway
from homeserve.bench.subject import Subject

ONE = Subject("homeserve", "m", ours=True, quant="Q4_1", ranks=1, draft="off", context=4096, kv_tokens=65536)
TWO = replace(ONE, ranks=2, layout="tensor", flip="manual")


class Played:
    """A server, its host and who is told. `speed`: of the answers; `fails`: what is raised by the request of a number,
    from 1 on."""

    target = Target(engine="homeserve", url="http://127.0.0.1:1")
    pid: int | None = 7

    def __init__(self, monkeypatch: pytest.MonkeyPatch, layout: str | None = None) -> None:
        self.layout, self.epoch = layout, 0
        self.told: list[str] = []
        self.asked: list[tuple[str, int, int]] = []
        self.fails: dict[int, BaseException] = {}
        self.cached = 0
        self.now = 0.0
        self.restless = False
        for module in (measures, run):
            monkeypatch.setattr(module, "complete", self.complete)
        monkeypatch.setattr(
            measures, "complete_at_once", lambda _, drawn, answer: [self.timing(32, answer)] * len(drawn)
        )
        monkeypatch.setattr(subject, "status", lambda _: {"layout": self.layout, "epoch": self.epoch})
        monkeypatch.setattr(flips, "flip", self.flip)
        monkeypatch.setattr(run, "memory_mib", lambda pid: 200.0 + pid)

    def timing(self, prompt: int, answer: int) -> Timing:
        return Timing(0.0, 1.0, 2.0, answer, prompt, cached_tokens=self.cached)

    def complete(self, target: Target, prompt: list[int], answer: int, counted: bool = False) -> Timing:
        assert target is self.target and len(set(map(tuple, [prompt]))) == 1
        self.asked.append((str(self.layout), len(prompt), answer))
        if (error := self.fails.get(len(self.asked))) is not None:
            raise error
        if self.restless:
            self.epoch += 1
        return self.timing(len(prompt), answer)

    def flip(self, target: Target, to: str) -> dict[str, Any]:
        self.layout, self.epoch = to, self.epoch + 1
        self.told.append(f"flip to {to}")
        rank = {"refill_bytes": 3 << 20, "sent_bytes": 1 << 20, "local_bytes": 0}
        return {"ms": {"total": 100.0 if to == "tensor" else 50.0}, "ranks": [rank, rank]}

    def restart(self) -> float:
        self.now += 5.0
        return self.now - 2.0

    def row(self, row: Row) -> None:
        self.told.append(row.label)

    def doing(self, test: str, number: int, runs: int) -> None:
        pass

    def note(self, text: str) -> None:
        self.told.append(f"note: {text}")

    def run(self, tests: str, about: Subject = ONE, repeat: int = 2, prompts: Any = None) -> Run:
        drawn = prompts or Prompts(random.Random(1), range(100))
        return Run(self, about, drawn, repeat, self, lambda: self.now)

    def rows(self, tests: str, about: Subject = ONE, repeat: int = 2, prompts: Any = None) -> list[Row]:
        made = self.run(tests, about, repeat, prompts)
        made.go(parse(tests))
        return made.rows


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Played:
    return Played(monkeypatch)


def figures(rows: list[Row]) -> dict[str, tuple[float | None, str, int]]:
    return {row.label: (row.median, row.unit, row.runs) for row in rows}


def test_each_test_is_run_once_more_than_counts_and_those_of_a_prompt_share_it(played: Played) -> None:
    found = figures(played.rows("pp64,ttft64,tg9@32,conc4,start,rss"))
    assert found == {
        "start": (2.0, "s", 2),
        "pp64": (64.0, "tok/s", 2),
        "ttft64": (1000.0, "ms", 2),
        "tg9@32": (8.0, "tok/s", 2),
        "conc4": (256.0, "tok/s", 2),
        "rss": (207.0, "MiB", 2),
    }
    assert played.asked == [("None", 8, 1)] * 2 + [("None", 64, 1)] * 3 + [("None", 32, 9)] * 3


def test_the_first_run_does_not_count(played: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter((100.0, 1.0, 2.0, 3.0))
    monkeypatch.setattr(measures, "complete", lambda *_, **__: Timing(0.0, next(seconds), 9.0, 1, 60))
    (row,) = played.rows("ttft60", repeat=3)
    assert (row.median, row.p10, row.p90, row.runs) == (2000.0, 1200.0, 2800.0, 3)


def test_a_prompt_that_lay_in_the_cache_is_no_prefill(played: Played) -> None:
    played.cached = 16
    rows = played.rows("pp64,tg9@32,pp32,tg9@0")
    told = {row.test: row.why for row in rows}
    assert "16 of 64 prompt tokens in its cache" in str(told["pp64"]) and told["pp32"] and told["tg9@32"]
    assert told["tg9@0"] is None, "nothing of it is of the prompt"


def test_what_is_refused_is_a_row_that_says_why_and_the_run_goes_on(played: Played) -> None:
    played.fails[1] = Refused(400, "context_overflow", "2048 tokens are more than the context of 1024")
    played.fails[3] = Refused(429, "queue_full", "4 wait")
    rows = played.rows("pp2048,pp64,rss")
    assert [(row.test, row.median is None) for row in rows] == [("pp2048", True), ("pp64", True), ("rss", False)]
    assert rows[0].why == "the server answered 400: 2048 tokens are more than the context of 1024"
    assert rows[1].why == "the server's queue is full, the server answered 429: 4 wait"


def test_a_server_without_tokens_to_draw_from_is_measured_in_what_needs_none(played: Played) -> None:
    rows = played.rows("pp64,rss", prompts=Unmeasured("no /tokenize"))
    assert [(row.test, row.why, row.runs) for row in rows] == [("pp64", "no /tokenize", 0), ("rss", None, 2)]


@pytest.mark.parametrize(("error", "raised"), [(ConnectionResetError("gone"), WentAway), (KeyboardInterrupt(), None)])
def test_what_is_known_when_it_ends_is_kept(played: Played, error: BaseException, raised: type | None) -> None:
    played.fails[6] = error
    made = played.run("")
    with pytest.raises(raised or KeyboardInterrupt):
        made.go(parse("pp64,tg9@0,rss"))
    known = {row.test: (row.runs, row.why) for row in made.rows}
    assert known["pp64"] == (2, None) and known["tg9@0"][0] == 1 and "rss" not in known
    words = "went away: gone" if raised else "interrupted after 1 of 2 runs"
    assert words in str(known["tg9@0"][1])


def test_an_interrupted_test_without_a_run_is_no_row(played: Played) -> None:
    played.fails[1] = KeyboardInterrupt()
    made = played.run("")
    with pytest.raises(KeyboardInterrupt):
        made.go(parse("pp64"))
    assert made.rows == []


# ------------------------------------------------------------------------------------------------------------- layouts


def test_both_layouts_are_measured_and_the_first_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    played = Played(monkeypatch, "tensor")
    rows = played.rows("pp64,conc2,rss", TWO)
    labels = ["pp64 tensor", "conc2 tensor", "rss", "flip to pipeline", "pp64 pipeline", "conc2 pipeline"]
    assert played.told == [*labels, "flip to tensor"]
    assert [layout for layout, _, _ in played.asked] == ["tensor"] * 3 + ["pipeline"] * 3
    assert [row.layout for row in rows] == ["tensor", "tensor", None, "pipeline", "pipeline"]


def test_the_layout_is_restored_also_where_the_run_ends_early(monkeypatch: pytest.MonkeyPatch) -> None:
    played = Played(monkeypatch, "tensor")
    played.fails[5] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        played.rows("pp64", TWO)
    assert played.told[-1] == "flip to tensor" and played.layout == "tensor"


def test_ranks_that_do_not_flip_have_one_layout_and_it_is_said_why(monkeypatch: pytest.MonkeyPatch) -> None:
    played = Played(monkeypatch, "tensor")
    rows = played.rows("pp64,flip", replace(TWO, flip="off", no_flip="--layout"))
    assert [row.label for row in rows] == ["pp64 tensor", "flip"]
    assert played.told[1] == "note: one layout is measured, tensor: --layout"
    assert "does not flip: --layout" in str(rows[1].why)


def test_a_flip_that_fails_leaves_rows_that_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    played = Played(monkeypatch, "tensor")

    def refused(*_: Any) -> Any:
        raise flips.FlipFailed("it does not fit")

    monkeypatch.setattr(flips, "flip", refused)
    rows = played.rows("pp64,flip", TWO)
    assert [(row.label, row.why) for row in rows[:2]] == [("pp64 tensor", None), ("pp64 pipeline", "it does not fit")]
    assert {row.why for row in rows[2:]} == {"it does not fit"}


def test_runs_during_which_the_layout_changed_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    played = Played(monkeypatch, "tensor")
    played.restless = True
    (row, *_) = played.rows("pp64", TWO, repeat=1)
    assert row.runs == 0 and "changed its layout meanwhile" in str(row.why)
    assert len(played.asked) == 2 * run.MOVED_TRIES


def test_a_flip_has_a_time_and_a_rate_for_each_direction(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Played(monkeypatch, "tensor").rows("flip", TWO)
    found = {(row.layout, row.unit): row.median for row in rows}
    assert found == {
        ("pipeline", "ms"): 50.0,
        ("pipeline", "MiB/s"): 160.0,
        ("tensor", "ms"): 100.0,
        ("tensor", "MiB/s"): 80.0,
    }


def test_one_rank_and_other_servers_say_why_they_do_not_flip(played: Played) -> None:
    assert "needs at least 2 ranks, and this server has 1" in str(played.rows("flip")[0].why)
    other = Subject("llama-server", "m")
    rows = played.rows("flip,step,pp64", other)
    assert {row.why for row in rows if row.test != "pp64"} == {subject.NOT_OURS}
    assert [row.runs for row in rows if row.test == "pp64"] == [2]


# --------------------------------------------------------------------------------------------------------------- steps


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, float]]:
    """(Streams, answer, seconds) of each window. Streams last for a second."""
    seen: list[tuple[int, int, float]] = []

    def step(target: Target, pid: int, streams: int, prompts: Prompts, answer: int, window_s: float) -> Any:
        seen.append((streams, answer, window_s))
        if window_s > 1:
            raise steps.StreamsEnded("over")
        return 0.25 * streams, 0.1

    monkeypatch.setattr(steps, "step", step)
    return seen


def test_steps_are_taken_in_a_window_that_the_streams_outlast(
    played: Played, windows: list[tuple[int, int, float]]
) -> None:
    found = figures(played.rows("step", repeat=1))
    assert found == {
        "step": (0.25, "ms", 1),
        "step_gap": (0.1, "ms", 1),
        "step64": (16.0, "ms", 1),
        "step_gap64": (0.1, "ms", 1),
    }
    assert windows == [(1, 960, 4.0), (1, 960, 1.0), (64, 200, 6.0), (64, 200, 2.0), (64, 200, 0.5)]


@pytest.mark.parametrize(
    ("room", "answer", "why"),
    [
        ({"context": 128}, (119, 119), None),
        ({"kv_tokens": 64 * 48}, (960, 39), None),
        ({"kv_tokens": 64 * 16}, (960, None), "64 streams have room for 7 tokens each (--context, --kv-tokens)"),
    ],
)
def test_streams_have_answers_for_which_there_is_room(
    played: Played, windows: list[tuple[int, int, float]], room: Any, answer: Any, why: str | None
) -> None:
    rows = played.rows("step", replace(ONE, **room), repeat=1)
    asked = {streams: tokens for streams, tokens, _ in windows}
    assert (asked[1], asked.get(64)) == answer
    assert rows[-1].why == why


def test_processes_that_are_not_known_are_said(played: Played, windows: Callable[..., Any]) -> None:
    played.pid = None
    assert all("homeserve ps" in str(row.why) for row in played.rows("rss,step"))
