"""Liveness, readiness, version and metrics: what supervisors and load balancers ask.

`/health` is 200 while requests are taken, also when a worker is being restarted (open streams pause and go on).
`/ready` is 200 only when a request sent now would be computed now.
"""

from __future__ import annotations

from typing import Any

from aiohttp import web

from homeserve import __version__
from homeserve.server.bodies import json_response
from homeserve.server.context import ServerContext, State
from homeserve.server.metrics import CONTENT_TYPE, Reading
from homeserve.server.parts import PARTS

_RETRY = {"Retry-After": "1"}


async def get_health(request: web.Request) -> web.StreamResponse:
    context = request.app[PARTS].context
    state = context.state()
    if state == State.LOADING.value:
        return json_response(_loading(context), status=503, headers=_RETRY)
    if state == State.DRAINING.value:
        return json_response({"schema": 1, "status": state}, status=503)
    return json_response({"schema": 1, "status": "ok"})


async def get_ready(request: web.Request) -> web.StreamResponse:
    context = request.app[PARTS].context
    state = context.state()
    if state == State.READY.value:
        return json_response({"schema": 1, "status": "ready"})
    body = _loading(context) if state == State.LOADING.value else {"schema": 1, "status": state}
    return json_response(body, status=503, headers=_RETRY)


def _loading(context: ServerContext) -> dict[str, Any]:
    load = context.load()
    return {
        "schema": 1,
        "status": State.LOADING.value,
        "stage": load.stage,
        "done_bytes": load.done_bytes,
        "total_bytes": load.total_bytes,
    }


async def get_version(request: web.Request) -> web.StreamResponse:
    return json_response({"schema": 1, "version": __version__, "commit": None})


async def get_metrics(request: web.Request) -> web.StreamResponse:
    parts = request.app[PARTS]
    body = await parts.metrics.render(reading_of(parts.context))
    return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE})


def reading_of(context: ServerContext) -> Reading:
    """What a scrape reads of engine and fleet, taken on the loop."""
    first = context.first
    engine, ranks = (first.engine, first.fleet.ranks) if first is not None else (None, [])
    return Reading(
        engine=engine.snapshot() if engine is not None else None,
        restarts=tuple((i, rank.restarts) for i, rank in enumerate(ranks)),
        free=context.corridor.least_bytes() if context.corridor is not None else (),
        flips=engine.flip_totals if engine is not None else None,
        drafting=engine.drafting if engine is not None and engine.drafting.most else None,
    )
