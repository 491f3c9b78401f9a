"""The routes of a flip and what status and metrics tell of flips, over an engine whose flips go as a script says."""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import aiohttp
import pytest
from standing import loaded, standing

from homeserve.engine.engine import Engine
from homeserve.engine.flip import RECORDS_KEPT, Flipper, FlipRecord, FlipRefused, LiveSet, RankPart
from homeserve.engine.flip_totals import FlipTotals
from homeserve.engine.request import EngineLimits, FlipLimits, LayoutLimits, NoFlip, Timings
from homeserve.fleet import RankStatus
from homeserve.layouts.ranks import RankPlan
from homeserve.server.application import HttpServer
from homeserve.server.metrics import Metrics
from homeserve.server.metrics_reading import Reading, Totals
from homeserve.server.shape import Counts
from homeserve.server.status import status_of
from homeserve.server.timing import timing_block
from homeserve.wire.records import FlipAnswer, FlipLive

FLIP = FlipLimits(
    layouts={"pipeline": LayoutLimits("pipeline", 2, 3), "tensor": LayoutLimits("tensor", 1, 2, (1, 1))},
    resting="pipeline", page_bytes=(1024,), state_bytes=0, transit_bytes=1 << 20, cache_bytes=1 << 16,
    policy="manual",
)  # fmt: skip
LIMITS = EngineLimits(
    context=256, kv_tokens=1024, running=4, waiting=8, chunk=64, prefill_delay=0, plans_in_flight=2, flip=FLIP
)
PLAN = RankPlan(2, "pipeline", ((0, 3), (3, 4)), (2, 1), (1, 1), 1, (), 3, 2, None, 0, flip=True)


class Flips:
    """Of an engine what the routes ask: flips that stay as `play` leaves them."""

    def __init__(self, limits: EngineLimits = LIMITS) -> None:
        self.limits = limits
        self.flipper = Flipper(limits.flip) if limits.flip is not None else None
        self.needed_bytes = 0

    def flip_ask(self, to: str, cause: str = "request") -> FlipRecord:
        if self.flipper is None:
            none = self.limits.no_flip
            raise FlipRefused(none.code, none.message, none.needed_mib, none.available_mib, none.device)
        return self.flipper.ask(to, cause, 10.0, self.needed_bytes)

    def flip_record(self, flip: int) -> FlipRecord | None:
        return self.flipper.get(flip) if self.flipper is not None else None

    def flip_records(self) -> list[FlipRecord]:
        return self.flipper.records() if self.flipper is not None else []

    def give_up(self) -> None:
        """The park deadline has passed."""
        assert self.flipper is not None
        self.flipper.tick(1e9)


@asynccontextmanager
async def serving(flips: Flips, state: str = "ready") -> AsyncIterator[Any]:
    """`ask(method, path, body)` gives status, headers and JSON."""
    models = [loaded(engine=flips)] if state != "loading" else []
    context = standing(*models, state=state)
    server = HttpServer(context)
    listener = socket.create_server(("127.0.0.1", 0))
    port = await server.start(listener)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(5)) as client:

        async def ask(method: str, path: str = "", body: Any = None) -> tuple[int, Any, Any]:
            data = body if isinstance(body, bytes) else json.dumps(body).encode() if body is not None else None
            url = f"http://127.0.0.1:{port}/v1/homeserve/flip{path}"
            async with client.request(method, url, data=data) as response:
                return response.status, response.headers, await response.json()

        try:
            yield ask
        finally:
            await client.close()
            await server.stop()
            listener.close()


async def test_a_flip_that_begins_is_accepted_at_once_and_its_url_tells_the_rest() -> None:
    flips = Flips()
    async with serving(flips) as ask:
        status, headers, body = await ask("POST", body={"to": "tensor"})
        assert status == 202 and headers["Location"] == body["url"] == "/v1/homeserve/flip/1"
        asked = {"id": 1, "epoch": 1, "from": "pipeline", "to": "tensor", "state": "accepted"}
        assert body == {"schema": 1, **asked, "url": "/v1/homeserve/flip/1"}
        status, _, body = await ask("GET", "/1")
        assert (status, body["cause"], body["reason"]) == (200, "request", None)
        assert body["state"] in ("accepted", "draining")
        flips.give_up()
        _, _, body = await ask("GET", "/1")
        assert body["state"] == "abandoned" and "30 s" in body["reason"] and body["ms"]["total"] > 0
        _, _, listed = await ask("GET")
        assert listed["policy"] == "manual" and [each["id"] for each in listed["last"]] == [1]


@pytest.mark.parametrize(
    ("to", "begin", "needed", "status", "code", "facts"),
    [
        ("rows", "", 0, 400, "bad_target", {}),
        ("pipeline", "", 0, 409, "already_there", {}),
        ("tensor", "tensor", 0, 409, "flip_running", {}),
        (
            "tensor",
            "",
            3 << 20,
            409,
            "does_not_fit",
            {"needed_mib": 3.0, "available_mib": 1.0, "device": "transit memory"},
        ),
    ],
)
async def test_a_flip_that_cannot_begin_says_why(
    to: str, begin: str, needed: int, status: int, code: str, facts: dict[str, Any]
) -> None:
    flips = Flips()
    if begin:
        flips.flip_ask(begin)
    flips.needed_bytes = needed
    before = len(flips.flip_records())
    async with serving(flips) as ask:
        found, _, body = await ask("POST", body={"to": to})
        error = body["error"]
        assert (found, error["code"]) == (status, code) and error["message"]
        assert {name: error[name] for name in ("needed_mib", "available_mib", "device") if name in error} == facts
    assert len(flips.flip_records()) == before, "nothing was begun"


@pytest.mark.parametrize(
    ("body", "field"),
    [({}, "to"), ({"to": 3}, "to"), ({"to": None}, "to"), ([], "body"), (b"{", "body"), (b"", "body")],
)
async def test_a_body_that_names_no_target_is_a_bad_field(body: Any, field: str) -> None:
    async with serving(Flips()) as ask:
        status, _, answer = await ask("POST", body=body)
        assert (status, answer["error"]["code"], answer["error"]["param"]) == (400, "invalid_field", field)


async def test_a_layout_that_stays_is_said_with_its_reason() -> None:
    why = NoFlip("does_not_fit", "both layouts need 9 MiB of 8", 9.0, 8.0, "cpu")
    limits = EngineLimits(256, 1024, 4, 8, 64, 0, 2, no_flip=why)
    async with serving(Flips(limits)) as ask:
        status, _, body = await ask("POST", body={"to": "tensor"})
        assert status == 409 and body["error"]["code"] == "does_not_fit"
        assert body["error"] | {"needed_mib": 9.0, "available_mib": 8.0, "device": "cpu"} == body["error"]
        assert (await ask("GET"))[2] == {"schema": 1, "policy": "off", "last": []}


@pytest.mark.parametrize("path", ["/2", "/0", "/-1", "/x", "/1e3", "/" + "9" * 40, "/%E0%A5%A7"])
async def test_a_flip_that_is_not_there_is_not_found(path: str) -> None:
    flips = Flips()
    flips.flip_ask("tensor")
    async with serving(flips) as ask:
        status, _, body = await ask("GET", path)
        assert (status, body["error"]["code"], body["error"]["param"]) == (404, "flip_not_found", "id")
        assert set(body["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(("state", "code"), [("loading", "loading"), ("draining", "draining")])
async def test_a_server_that_takes_no_requests_begins_no_flip(state: str, code: str) -> None:
    flips = Flips()
    async with serving(flips, state) as ask:
        status, _, body = await ask("POST", body={"to": "tensor"})
        assert (status, body["error"]["code"]) == (503, code) and not flips.flip_records()


async def test_the_list_is_bounded_and_what_fell_off_is_not_found() -> None:
    flips = Flips()
    for _ in range(RECORDS_KEPT + 2):
        flips.flip_ask("tensor")
        flips.give_up()
    async with serving(flips) as ask:
        ids = [each["id"] for each in (await ask("GET"))[2]["last"]]
        assert ids == list(range(3, RECORDS_KEPT + 3))
        assert (await ask("GET", "/2"))[0] == 404 and (await ask("GET", "/3"))[0] == 200


# ------------------------------------------------------------------------------------------------- status and metrics


def record(state: str, why: str | None = None) -> FlipRecord:
    live = LiveSet(FlipLive((b"\1",)), 2, (1,), 16, 0, 0, 1024)
    ranks = [
        RankPart(0, "yes", told=FlipAnswer(sent_bytes=100, local_bytes=24, refill_bytes=7), us={"refill": 2_000_000}),
        RankPart(1, "yes", told=FlipAnswer(received_bytes=100), us={"refill": 500_000, "map": 250_000}),
        RankPart(2),
    ]
    made = FlipRecord(
        1, 1, "pipeline", "tensor", "policy", 0.0, state, why and f"{why} 17", why, live=live, ranks=ranks
    )
    made.ms.update(drain=1500.0, refill=2000.0, total=4000.0)
    return made


async def test_metrics_sum_over_flips() -> None:
    totals = FlipTotals()
    for each in (record("committed"), record("committed"), record("abandoned", "park_deadline")):
        totals.add(each)
    text = (await Metrics().render(Reading(totals={"m": Totals(flips=totals)}))).decode()
    for line in (
        'homeserve_flips_total{cause="policy",reason="",result="committed",to="tensor"} 2.0',
        'homeserve_flips_total{cause="policy",reason="park_deadline",result="abandoned",to="tensor"} 1.0',
        'homeserve_flip_seconds_count{part="drain",rank="engine"} 3.0',
        'homeserve_flip_seconds_sum{part="drain",rank="engine"} 4.5',
        'homeserve_flip_seconds_sum{part="refill",rank="0"} 6.0',
        'homeserve_flip_seconds_sum{part="map",rank="1"} 0.75',
        'homeserve_flip_bytes_total{kind="sent",rank="0"} 300.0',
        'homeserve_flip_bytes_total{kind="local",rank="0"} 72.0',
        'homeserve_flip_bytes_total{kind="refill",rank="0"} 21.0',
        'homeserve_flip_bytes_total{kind="received",rank="1"} 300.0',
    ):
        assert line in text.splitlines(), line
    assert 'part="refill",rank="engine"' not in text, "what the slowest rank took is that rank's"
    assert "homeserve_flip" not in (await Metrics().render(Reading())).decode()


def status(engine: Any, plan: RankPlan | None) -> dict[str, Any]:
    ranks = [
        RankStatus(rank, 9, "cpu:0", "cpu", "avx2", 1, 0, 7, [0, 4], 0.0, 0.0, 0.0, None, {}, None) for rank in (0, 1)
    ]
    fleet: Any = type("Ranks", (), {"ranks": ranks})()
    shown = loaded(engine=engine, fleet=fleet, ranks=plan)
    return status_of(standing(shown), shown)


class Still:
    """A fleet that is never asked anything."""

    def credit(self) -> int:
        return 0

    def shared_memory_names(self) -> list[str]:
        return []


async def test_status_tells_the_layout_in_force() -> None:
    engine: Any = Engine(cast(Any, Still()), LIMITS)
    told = status(engine, PLAN)
    assert (told["layout"], told["epoch"]) == ("pipeline", 0)
    assert told["vectors"] == {"weight": [2, 1], "token": [1, 1]}
    assert told["pipeline"] == {"ranges": [[0, 3], [3, 4]]}
    assert [rank["layers"] for rank in told["ranks"]] == [[0, 3], [3, 4]]
    assert told["flip"]["policy"] == "manual" and told["flip"]["committed"] == 0 and told["flip"]["abandoned"] == {}
    assert set(told["flip"]) >= {"policy", "committed", "abandoned", "hold_reason", "unarmed_work_count"}
    assert set(told["layouts_measured"]) == {"pipeline", "tensor"}
    engine._flips.flipper.layout = "tensor"
    told = status(engine, PLAN)
    assert told["layout"] == "tensor" and [rank["layers"] for rank in told["ranks"]] == [None, None]
    assert told["pipeline"] == {"ranges": [[0, 3], [3, 4]]}, "the other layout's cut stays known"


async def test_status_of_a_layout_that_stays_says_why() -> None:
    limits = EngineLimits(256, 1024, 4, 8, 64, 0, 2, no_flip=NoFlip("does_not_fit", "9 MiB of 8"))
    told = status(Engine(cast(Any, Still()), limits), None)
    flip = {"policy": "off", "committed": 0, "abandoned": {}, "hold_reason": "9 MiB of 8", "unarmed_work_count": 0}
    assert told["flip"] == flip
    assert told["layouts_measured"] == {"pipeline": None, "tensor": None}
    assert [rank["layers"] for rank in told["ranks"]] == [[0, 4], [0, 4]]
    assert set(status_of(standing(), None)["flip"].values()) == {None}


def test_a_request_tells_the_most_flips_that_any_of_its_sequences_crossed() -> None:
    block = timing_block(
        "r", [Timings(0.0, flips_crossed=1), Timings(0.0, flips_crossed=3)],
        counts=Counts(1, 1, 0),
    )  # fmt: skip
    assert block["flips_crossed"] == 3
