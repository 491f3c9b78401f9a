"""`/v1/homeserve/flip`: ask for a change of the layout, and see what came of it.

    POST /v1/homeserve/flip {"to": "tensor"}  ─▶ 202 accepted, with the URL that tells the rest
    GET  /v1/homeserve/flip/{id}              ─▶ how far it is, and in the end committed or abandoned, and why
    GET  /v1/homeserve/flip                   ─▶ the policy, and the last flips

Accepted is not committed. The answer goes out before anything has moved, and a flip that is given up later costs nobody
anything: the layout is what it was, and every request goes on. Whoever asked reads the record.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from homeserve.engine.flip import RECORDS_KEPT, FlipRefused
from homeserve.errors import FlipNotBegun, UnknownFlip
from homeserve.server.bodies import json_response, read_body
from homeserve.server.parts import PARTS

if TYPE_CHECKING:
    from homeserve.engine.flip_record import FlipRecord

ROUTE = "/v1/homeserve/flip"
CAUSE = "request"
_FACTS = ("needed_mib", "available_mib", "device")


class FlipRequest(msgspec.Struct):
    """The body of a POST."""

    to: str


async def post_flip(request: web.Request) -> web.StreamResponse:
    """Begin a flip. Raises FlipNotBegun."""
    parts = request.app[PARTS]
    parts.check_taking()
    served = parts.served(request.query.get("model"))
    body = await read_body(request, parts.context.settings.body_limit_bytes)
    fields = await parts.decoder.read(body, FlipRequest)
    try:
        record = served.engine.flip_ask(fields.to, CAUSE)
    except FlipRefused as refused:
        facts = {name: getattr(refused, name) for name in _FACTS}
        known = {name: value for name, value in facts.items() if value is not None}
        raise FlipNotBegun(refused.code, refused.message, known) from None
    url = f"{ROUTE}/{record.id}"
    # What it is by now is the record's to say: an engine with nothing in flight has begun already.
    told = {"id": record.id, "epoch": record.epoch, "from": record.source, "to": record.to, "state": "accepted"}
    return json_response({"schema": 1, **told, "url": url}, status=202, headers={"Location": url})


async def get_flip(request: web.Request) -> web.StreamResponse:
    """One flip. Raises UnknownFlip, also for one that is so old that it was forgotten."""
    served = request.app[PARTS].served(request.query.get("model"))
    asked = request.match_info["id"]
    record = served.engine.flip_record(int(asked)) if asked.isascii() and asked.isdigit() and len(asked) < 16 else None
    if record is None:
        raise UnknownFlip(asked[:40], RECORDS_KEPT)
    return json_response({"schema": 1, **_told(record)})


async def get_flips(request: web.Request) -> web.StreamResponse:
    """The policy, and the last flips, oldest first."""
    engine = request.app[PARTS].served(request.query.get("model")).engine
    limits = engine.limits.flip
    records = [_told(record) for record in engine.flip_records()]
    return json_response({"schema": 1, "policy": limits.policy if limits is not None else "off", "last": records})


def _told(record: FlipRecord) -> dict[str, Any]:
    """A flip with the time at which it was asked for. The engine's clock is monotonic, as this one is."""
    return {**record.as_json(), "at": round(time.time() - (time.monotonic() - record.asked), 3)}
