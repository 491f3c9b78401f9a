"""`/v1/homeserve/budget` and `/v1/homeserve/corridor`: what was planned, what is held, and what stayed free."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from aiohttp import web

from budget.facts import MIB
from budget.host_lines import ENGINE_PROCESS, engine_base_bytes
from homeserve.errors import Loading
from homeserve.server.bodies import json_response
from homeserve.server.parts import PARTS


async def get_budget(request: web.Request) -> web.StreamResponse:
    """The plan, and predicted against measured for each line."""
    parts = request.app[PARTS]
    served = parts.served(request.query.get("model"))
    body = await served.budget.as_json()
    loaded = parts.context.loaded
    if len(loaded) > 1:
        every = await asyncio.gather(*(each.budget.as_json() for each in loaded))
        body = body | {"measured_all": together(every)}
    return json_response(body)


def together(budgets: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What the models that are in hold of the host's memory, all of them: predicted (with what a first guided answer
    takes later) and measured, in MiB. The engine's process is in the budget of each; here what they share of it, which
    a plan counts whole, is counted once."""
    totals = [budget["measured_total"] for budget in budgets]
    engine = [row["measured_mib"] for row in budgets[0]["measured"] if row["line"] == ENGINE_PROCESS]
    more = len(budgets) - 1
    measured = [each["smaps_mib"] for each in totals]
    known = None not in (*measured, *engine)
    return {
        "models": len(budgets),
        "predicted_mib": round(
            sum(each["predicted_mib"] + each["later_mib"] for each in totals) - more * engine_base_bytes() / MIB, 2
        ),
        "smaps_mib": round(sum(measured) - more * sum(engine), 2) if known else None,
    }


async def get_corridor(request: web.Request) -> web.StreamResponse:
    """Free memory of each device since before the load."""
    parts = request.app[PARTS]
    parts.check_loaded()
    corridor = parts.context.corridor
    if corridor is None:
        raise Loading()
    return json_response(await asyncio.to_thread(corridor.as_json))
