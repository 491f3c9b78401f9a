"""The drill of a flip: what it believes, against a server that plays a script, and what it is not fooled by."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web

from homeserve import cli
from homeserve.commands import drill as drills
from homeserve.commands.drill import CannotDrill, Report, drill
from homeserve.commands.drill_answer import Count, Leg, Same, faults

# ------------------------------------------------------------------------------------------------------------- judges


@pytest.mark.parametrize(
    ("text", "numbers", "right", "wrong"),
    [
        (" 18 19 20 ", 3, 9, ""),
        (" 18 19 20", 2, 6, ""),
        (" 18, 19\n20.\n", 3, 10, ""),
        (" 18 19 21 22", 2, 6, "21 where 20 was due"),
        (" 18 18 ", 1, 3, "18 where 19 was due"),
        (" 17 18 ", 0, 0, "17 where 18 was due"),
        (" 18 19 2", 2, 6, ""),
        (" 18 19 020 ", 2, 6, "020 where 20 was due"),
        ("eighteen", 0, 0, ""),
        ("", 0, 0, ""),
    ],
)
def test_a_count_is_right_as_far_as_each_number_follows(text: str, numbers: int, right: int, wrong: str) -> None:
    judge = Count(17)
    assert (judge.numbers(text), judge.right(text), judge.wrong(text)) == (numbers, right, wrong)


def test_an_answer_without_numbers_is_compared_with_itself() -> None:
    judge = Same("once more with feeling")
    assert judge.right("once mo") == 7 and judge.wrong("once mo") == ""
    assert judge.right("once less") == 5 and judge.wrong("once less") == "'less' where 'more with feeling' was due"
    assert judge.wrong("once more with feeling and on") == "", "it was left earlier"


TEXT = "".join(f" {number}" for number in range(18, 60)) + " "
GOOD = Leg("tensor", 1, "committed", None, 30, 4.0, 1)


@pytest.mark.parametrize(
    ("text", "legs", "ended", "words"),
    [
        (TEXT, [GOOD], "", ""),
        (TEXT, [GOOD, Leg("pipeline", 2, "committed", None, 70, 4.0, 1)], "", ""),
        (TEXT, [Leg("tensor", 1, "abandoned", "rank 1 said no", 30)], "", "is abandoned, not committed: rank 1 said"),
        (TEXT, [Leg("tensor", 1, "committed", None, 30, 4.0, 0)], "", "carried no request"),
        (TEXT[:70] + " 7 ", [GOOD], "", "wrong after 69 characters: 7 where 41 was due"),
        (TEXT[:60], [GOOD], "it is silent", "57 characters are right, and 70 would have to be: it is silent"),
        (TEXT, [Leg("tensor", 1, "committed", None, len(TEXT) - 10, 4.0, 1)], "it ended (length)", "would have to be"),
    ],
)  # fmt: skip
def test_an_answer_counts_only_past_every_flip_that_is_on_record(
    text: str, legs: list[Leg], ended: str, words: str
) -> None:
    found = faults(Count(17), text, legs, margin=40, ended=ended)
    assert (words in found[0]) if words else found == []


def test_what_doctor_prints_of_a_drill(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = ({"rank": 0, "peak_mib": 3.0, "ledger_mib": 4.0}, {"rank": 1, "peak_mib": 5.0, "ledger_mib": 4.0})
    good = Report("http://x", "counting upward", (GOOD,), (), peaks)
    bad = Report("http://x", "counting upward", (GOOD,), ("it has been silent",), ({**peaks[0], "ledger_mib": None},))
    for report, code in ((good, 0), (bad, 3)):
        monkeypatch.setattr(drills, "run", lambda args, environ, report=report: report)
        assert cli.main(["doctor", "--flip-drill"]) == code
    first, second = capsys.readouterr().out.split("ok    to tensor")[1:]
    assert "committed in 4 ms, 30 characters into the answer" in first
    assert "ok    answer         right past every flip, by counting upward" in first and "the answer survived" in first
    assert "ok    rank 0         held 3.0 MiB at most while the layout changed; the plan has 4.0 MiB" in first
    assert "note  rank 1         held 5.0 MiB at most" in first
    assert "FAIL  answer         it has been silent" in second and "the plan has nothing for" in second
    assert cli.main(["doctor", "--flip-drill", "--json"]) == 3
    told = json.loads(capsys.readouterr().out)
    assert not told["ok"] and told["drill"]["legs"][0]["watermark"] == 30 and told["checks"][0]["name"] == "to tensor"


@pytest.mark.parametrize("flags", [["--round-trip"], ["--url", "http://x"], ["--model", "m"]])
def test_flags_of_the_drill_alone_are_refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", *flags]) == 2
    assert f"{flags[0]}: is of --flip-drill" in capsys.readouterr().err


class Temporary:
    """Instead of a server of the drill's own."""

    made: list[tuple[str | None, tuple[str, ...]]]
    stopped = 0

    def __init__(self, model: str | None, flags: tuple[str, ...]) -> None:
        Temporary.made.append((model, flags))

    def start(self) -> str:
        return "http://own"

    def stop(self) -> None:
        Temporary.stopped += 1


@pytest.mark.parametrize(
    ("flags", "urls", "asked", "own"),
    [
        ([], ["http://still", "http://flips"], ["http://still", "http://flips"], []),
        ([], ["http://still"], ["http://still", "http://own"], [None]),
        ([], [], ["http://own"], [None]),
        (["--model", "m"], ["http://flips"], ["http://own"], ["m"]),
        (["--url", "http://flips"], ["http://still"], ["http://flips"], []),
    ],
)
def test_a_drill_takes_a_running_server_that_can_flip_or_one_of_its_own(
    flags: list[str], urls: list[str], asked: list[str], own: list[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []

    async def drill(url: str, key: str | None, *, round_trip: bool) -> Report:
        tried.append(url)
        if "still" in url:
            raise CannotDrill("one rank has one layout")
        return Report(url, "counting upward", (GOOD,), (), ())

    monkeypatch.setattr(drills, "running_urls", lambda environ: urls)
    monkeypatch.setattr(drills, "drill", drill)
    monkeypatch.setattr(drills, "fixture_path", lambda: None)
    monkeypatch.setattr(drills, "TemporaryServer", Temporary)
    Temporary.made, Temporary.stopped = [], 0
    assert cli.main(["doctor", "--flip-drill", *flags]) == 0
    assert tried == asked and [model for model, _ in Temporary.made] == own and Temporary.stopped == len(own)
    assert all("manual" in flags for _, flags in Temporary.made)


def test_a_url_and_a_model_are_two_servers(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--flip-drill", "--url", "http://x", "--model", "m"]) == 2
    assert "--model is for a server of the drill's own" in capsys.readouterr().err


# ----------------------------------------------------------------------------------------- against a scripted server


@dataclass
class Script:
    """A server that counts, and how it misbehaves."""

    policy: str = "manual"
    hold: str | None = None
    counts: bool = True
    slip_at: int = 0
    """The number that is left out, of an answer that streams."""
    silent_after_flips: int = 99
    abandons: bool = False
    forgets: bool = False
    """Whether the list of flips does not have them."""
    layout: str = "pipeline"
    flips: list[dict[str, Any]] = field(default_factory=list)
    streams: int = 0

    async def status(self, request: web.Request) -> web.Response:
        flip = {"policy": self.policy, "hold_reason": self.hold}
        return web.json_response({"layout": self.layout, "flip": flip, "model": {"context": 4096}})

    async def complete(self, request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        if not asked.get("stream"):
            words = range(18, 18 + asked["max_tokens"]) if self.counts else ["and", "so", "on"] * 80
            text = "".join(f" {word}" for word in words)
            return web.json_response({"choices": [{"text": text}]})
        self.streams += 1
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        words = (["and", "so", "on"][n % 3] if not self.counts else 18 + n for n in range(5000))
        for word in words:
            if len(self.flips) >= self.silent_after_flips:
                await asyncio.sleep(60)
            if word != self.slip_at:
                body = json.dumps({"choices": [{"text": f" {word}", "finish_reason": None}]})
                await response.write(f"data: {body}\n\n".encode())
            await asyncio.sleep(0)
        return response

    async def flip(self, request: web.Request) -> web.Response:
        to = (await request.json())["to"]
        record = {"id": len(self.flips) + 1, "to": to, "state": "accepted", "reason": None}
        record |= {"live": {"requests": 1}, "ms": {"total": 3.5}}
        self.flips.append(record)
        return web.json_response({**record, "url": f"/v1/homeserve/flip/{record['id']}"}, status=202)

    async def record(self, request: web.Request) -> web.Response:
        record = self.flips[int(request.match_info["id"]) - 1]
        if self.abandons:
            record |= {"state": "abandoned", "reason": "rank 1, packing: no"}
        else:
            record["state"], self.layout = "committed", record["to"]
        return web.json_response(record)

    async def listed(self, request: web.Request) -> web.Response:
        return web.json_response({"policy": self.policy, "last": [] if self.forgets else self.flips})

    async def corridor(self, request: web.Request) -> web.Response:
        return web.json_response({"flips": {"ranks": [{"rank": 0, "peak_mib": 3.0, "ledger_mib": 4.0}]}})


@asynccontextmanager
async def serving(script: Script) -> AsyncIterator[str]:
    application = web.Application()
    application.router.add_get("/v1/homeserve/status", script.status)
    application.router.add_post("/v1/completions", script.complete)
    application.router.add_post("/v1/homeserve/flip", script.flip)
    application.router.add_get("/v1/homeserve/flip", script.listed)
    application.router.add_get("/v1/homeserve/flip/{id}", script.record)
    application.router.add_get("/v1/homeserve/corridor", script.corridor)
    runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def drilled(script: Script, *, round_trip: bool = True) -> Report:
    async with serving(script) as url:
        return await drill(url, None, round_trip=round_trip)


@pytest.mark.parametrize(("round_trip", "streams"), [(True, 1), (False, 2)])
async def test_there_and_back_under_one_answer_or_under_two(round_trip: bool, streams: int) -> None:
    script = Script()
    report = await drilled(script, round_trip=round_trip)
    assert report.faults == () and report.measure == "counting upward"
    assert [(leg.to, leg.state, leg.requests) for leg in report.legs] == [
        ("tensor", "committed", 1),
        ("pipeline", "committed", 1),
    ]
    assert script.layout == "pipeline" and script.streams == streams
    first, second = (leg.watermark for leg in report.legs)
    assert first >= drills.LEAD and (not round_trip or second >= first + drills.MARGIN)
    assert report.peaks[0]["peak_mib"] == 3.0 and report.as_json()["legs"][0]["to"] == "tensor"


async def test_a_model_that_does_not_count_is_compared_with_itself() -> None:
    report = await drilled(Script(counts=False, layout="tensor"))
    assert report.faults == () and report.measure == "the same greedy request without a flip"
    assert [leg.to for leg in report.legs] == ["pipeline", "tensor"]


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (Script(abandons=True), "the flip to tensor is abandoned, not committed: rank 1, packing: no"),
        (Script(forgets=True), "the flip to tensor is not on record as committed"),
        (Script(slip_at=30), "31 where 30 was due"),
        (Script(silent_after_flips=1), "it has been silent for"),
    ],
    ids=("abandoned", "forgotten", "slipped", "silent"),
)
async def test_what_is_no_proof_is_told(script: Script, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drills, "STALL_S", 0.05)
    report = await drilled(script)
    assert words in "; ".join(report.faults)


@pytest.mark.parametrize("policy", ["off", None])
async def test_a_server_that_cannot_flip_is_no_place_for_a_drill(policy: Any) -> None:
    with pytest.raises(CannotDrill, match="one rank has one layout"):
        await drilled(Script(policy=policy, hold="one rank has one layout"))
