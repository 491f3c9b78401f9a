"""`/v1/homeserve/budget` and `/v1/homeserve/corridor`: what was planned, what is held, and what stayed free."""

from __future__ import annotations

import asyncio

from aiohttp import web

from homeserve.errors import Loading
from homeserve.server.bodies import json_response
from homeserve.server.parts import PARTS


async def get_budget(request: web.Request) -> web.StreamResponse:
    """The plan, and predicted against measured for each line."""
    served = request.app[PARTS].served(request.query.get("model"))
    return json_response(await served.budget.as_json())


async def get_corridor(request: web.Request) -> web.StreamResponse:
    """Free memory of each device since before the load."""
    parts = request.app[PARTS]
    parts.check_loaded()
    corridor = parts.context.corridor
    if corridor is None:
        raise Loading()
    return json_response(await asyncio.to_thread(corridor.as_json))
