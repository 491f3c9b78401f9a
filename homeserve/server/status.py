"""`/v1/homeserve/status` and `/v1/homeserve/census`: the whole machine in one object, for people and for tests.

Every key is always there. What is not known (no engine yet, a feature that this version lacks) is null, never 0: a
reader can tell "nothing happened" from "nobody counted".
"""

from __future__ import annotations

import asyncio
import importlib
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from aiohttp import web

from homeserve import __version__
from homeserve.errors import RequestFailed
from homeserve.server.bodies import json_response
from homeserve.server.context import ModelInfo, ServerContext
from homeserve.server.edge import current_request_id
from homeserve.server.parts import PARTS

if TYPE_CHECKING:
    from homeserve.engine.engine import EngineSnapshot
    from homeserve.fleet import RankStatus

log = logging.getLogger("homeserve.server")

MIB = 1 << 20
CENSUS_TIMEOUT_S = 30.0


async def get_status(request: web.Request) -> web.StreamResponse:
    context = request.app[PARTS].context
    ranks = list(context.fleet.ranks) if context.fleet is not None else []
    resident = await asyncio.to_thread(_resident_mib, [rank.pid for rank in ranks])
    return json_response(status_of(context, ranks, resident))


async def get_census(request: web.Request) -> web.StreamResponse:
    served = request.app[PARTS].served()
    try:
        return json_response(await served.engine.census(CENSUS_TIMEOUT_S))
    except TimeoutError:
        log.warning("census: the ranks did not answer within %.0f s", CENSUS_TIMEOUT_S)
        raise RequestFailed(current_request_id()) from None


def status_of(
    context: ServerContext, ranks: Sequence[RankStatus], resident_mib: Sequence[float | None]
) -> dict[str, Any]:
    """The status object. `resident_mib` runs parallel to `ranks`."""
    load = context.load()
    engine = context.engine.snapshot() if context.engine is not None else None
    return {
        "schema": 1,
        "version": __version__,
        "commit": None,
        "state": context.state(),
        "load": {"stage": load.stage, "done_bytes": load.done_bytes, "total_bytes": load.total_bytes},
        "model": _model(context.model),
        "layout": None,
        "epoch": engine.epoch if engine is not None else None,
        "vectors": {"weight": None, "token": None},
        "pipeline": {"ranges": None},
        "memory_domain": None,
        **_engine_part(engine),
        "draft": _DRAFT,
        "flip": _FLIP,
        "layouts_measured": {"pipeline": None, "tensor": None},
        "ranks": [_rank(i, rank, mib) for i, (rank, mib) in enumerate(zip(ranks, resident_mib, strict=True))],
        "events": list(engine.events) if engine is not None else [],
    }


_DRAFT_COUNTS = {"accept_len": None, "rounds": None}
_DRAFT = {
    "enabled": None,
    "why_not": None,
    "accept_len": None,
    "accept_rate": None,
    "by_position": None,
    "carried": _DRAFT_COUNTS,
    "uncarried": _DRAFT_COUNTS,
}
_FLIP = {"policy": None, "committed": None, "abandoned": None, "hold_reason": None, "unarmed_work_count": None}


def _model(model: ModelInfo | None) -> dict[str, Any]:
    names = ("id", "path", "arch", "quant", "context")
    return {name: getattr(model, name, None) for name in names}


def _engine_part(engine: EngineSnapshot | None) -> dict[str, Any]:
    """Requests, KV, prefix cache and the engine's own pace."""
    unknown = {"p50": None, "p99": None}
    return {
        "requests": _known(engine, "running", "waiting", "finished", "aborted"),
        "kv": _known(engine, "capacity_tokens", "used_tokens", "cached_tokens"),
        "prefix": _known(engine, "lookups", "hits", "hit_tokens", prefix="prefix_"),
        "engine": {
            **_known(engine, "plans_issued", "plans_acked"),
            "loop_lag_ms": engine.loop_lag_ms if engine is not None else unknown,
            "step_overhead_ms": engine.step_overhead_ms if engine is not None else unknown,
        },
    }


def _known(engine: EngineSnapshot | None, *names: str, prefix: str = "") -> dict[str, Any]:
    return {name: None if engine is None else getattr(engine, prefix + name) for name in names}


def _rank(index: int, rank: RankStatus, resident_mib: float | None) -> dict[str, Any]:
    facts = rank.facts
    return {
        "rank": index,
        "pid": rank.pid,
        "device": facts.device if facts else None,
        "backend": facts.backend if facts else None,
        "isa": facts.isa if facts else None,
        "threads": facts.threads if facts else None,
        "restarts": rank.restarts,
        "last_seq": rank.last_seq,
        "layers": None,
        "busy_ms": rank.busy_ms,
        "idle_ms": rank.idle_ms,
        "rss_mib": resident_mib,
        "lines_mib": {name: round(size / MIB, 3) for name, size in facts.lines} if facts else None,
        "copied_bytes": None,
        "collectives": {"count": None, "us_p50": None, "us_p99": None},
    }


def _resident_mib(pids: Sequence[int | None]) -> list[float | None]:
    """Resident memory of each process in MiB; None for one that is gone."""
    psutil: Any = importlib.import_module("psutil")

    found: list[float | None] = []
    for pid in pids:
        try:
            found.append(round(psutil.Process(pid).memory_info().rss / MIB, 1) if pid else None)
        except psutil.Error:
            found.append(None)
    return found
