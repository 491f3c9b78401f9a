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
from homeserve.server.metrics import CONTENT_TYPE
from homeserve.server.metrics_reading import reading_of
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
    reading = reading_of(parts.context, parts.metrics.past, parts.limits.refused if parts.limits else {})
    body = await parts.metrics.render(reading)
    return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE})
