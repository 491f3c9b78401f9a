"""`/v1/homeserve/status` and `/v1/homeserve/census`: the whole machine in one object, for people and for tests.

Every key is always there. What is not known (no engine yet, a feature that this version lacks) is null, never 0: a
reader can tell "nothing happened" from "nobody counted".
"""

from __future__ import annotations

import logging
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from aiohttp import web

from budget.ledger import PIPELINE
from homeserve import __version__
from homeserve.errors import InvalidField, RequestFailed
from homeserve.server.bodies import json_response
from homeserve.server.context import Loaded, ModelInfo, ServerContext
from homeserve.server.edge import current_request_id
from homeserve.server.models import models_json
from homeserve.server.parts import PARTS

if TYPE_CHECKING:
    from homeserve.engine.engine import EngineSnapshot
    from homeserve.layouts.ranks import RankPlan

log = logging.getLogger("homeserve.server")

CENSUS_TIMEOUT_S = 30.0


async def get_status(request: web.Request) -> web.StreamResponse:
    parts = request.app[PARTS]
    asked = request.query.get("model")
    shown = parts.context.first if asked is None or parts.context.state() == "loading" else parts.served(asked)
    return json_response(status_of(parts.context, shown, _plans_asked(request.query.get("plans"))))


async def get_census(request: web.Request) -> web.StreamResponse:
    served = request.app[PARTS].served(request.query.get("model"))
    try:
        return json_response(await served.engine.census(CENSUS_TIMEOUT_S))
    except TimeoutError:
        log.warning("census: the ranks did not answer within %.0f s", CENSUS_TIMEOUT_S)
        raise RequestFailed(current_request_id()) from None


def _plans_asked(text: str | None) -> int | None:
    """How many of the last plans to tell; None: all that are kept. Raises InvalidField."""
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 6):
        raise InvalidField("plans", f"{text[:40]!r} is not a number of plans")
    return int(text)


def status_of(context: ServerContext, shown: Loaded | None, plans: int | None = None) -> dict[str, Any]:
    """The status object, which tells of the model `shown`; None: none is in. `plans`: the most plans that it lists,
    which are most of its bytes (None: all)."""
    load = context.load()
    ranks = shown.fleet.ranks if shown is not None else []
    engine = shown.engine.snapshot() if shown is not None else None
    plan = shown.ranks if shown is not None else None
    kept = engine.plans if engine is not None else ()
    listed = kept if plans is None else kept[max(0, len(kept) - plans) :]
    layout = engine.layout if engine is not None and engine.layout else plan.layout if plan is not None else None
    return {
        "schema": 1,
        "version": __version__,
        "commit": None,
        "started": round(context.started, 3),
        "at": round(time.time(), 3),
        "state": context.state(),
        "load": {"stage": load.stage, "done_bytes": load.done_bytes, "total_bytes": load.total_bytes},
        "models": models_json(context),
        "model": _model(shown.model if shown is not None else None),
        "layout": layout,
        "epoch": engine.epoch if engine is not None else None,
        "vectors": {
            "weight": list(plan.weight_vector) or None if plan is not None else None,
            "token": list(plan.token_vector) or None if plan is not None else None,
        },
        "pipeline": {"ranges": _ranges(plan, [rank.layers for rank in ranks])},
        "memory_domain": plan.memory_domain if plan is not None else None,
        **_engine_part(engine),
        "draft": _draft(shown, layout),
        "flip": _flip(shown, engine),
        "layouts_measured": _MEASURED | (engine.layouts_measured if engine is not None else {}),
        "ranks": [_rank(asdict(rank), plan, layout) for rank in ranks],
        "plans": [times.as_json() for times in listed],
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
    "first": _DRAFT_COUNTS,
    "most": None,
    "adapts": None,
}
_FLIP = {"policy": None, "committed": None, "abandoned": None, "hold_reason": None, "unarmed_work_count": None}
_MEASURED: dict[str, Any] = {"pipeline": None, "tensor": None}


def _flip(shown: Loaded | None, engine: EngineSnapshot | None) -> dict[str, Any]:
    """What the engine says of flips. Where there is none to be, why."""
    if shown is None or engine is None:
        return _FLIP
    if engine.flip:
        return _FLIP | engine.flip
    off = {"policy": "off", "committed": 0, "abandoned": {}, "unarmed_work_count": 0}
    return _FLIP | off | {"hold_reason": shown.engine.limits.no_flip.message}


def _draft(shown: Loaded | None, layout: str | None) -> dict[str, Any]:
    """What the engine has counted of drafting. Where nothing is ever drafted, why, and nothing else. `enabled` is of
    the layout in force: what was drafted in the other one stays counted."""
    if shown is None:
        return _DRAFT
    drafting, limits = shown.engine.drafting, shown.engine.limits
    if not drafting.most:
        return _DRAFT | {"enabled": False, "why_not": shown.no_drafts}
    here = limits.flip.layouts[layout].drafts if limits.flip is not None and layout else limits.drafts
    why_not = drafting.off_because or (None if here else f"the ranks are in the {layout} layout")
    own = {"enabled": why_not is None, "why_not": why_not, "most": drafting.most, "adapts": drafting.adapts}
    return _DRAFT | own | drafting.as_json()


def _ranges(plan: RankPlan | None, layers: list[list[int] | None]) -> list[list[int]] | None:
    """Layers [first, end) of each rank: as planned for the pipeline layout where ranks change between two, else as the
    ranks tell; None until every rank has told."""
    if plan is not None and plan.flip:
        return [list(each) for each in plan.ranges]
    known = [of_rank for of_rank in layers if of_rank is not None]
    return known if known and len(known) == len(layers) else None


def _rank(told: dict[str, Any], plan: RankPlan | None, layout: str | None) -> dict[str, Any]:
    """A rank as the fleet has it. What it says of its layers is of its load: where the layout changes, that tells."""
    if plan is None or not plan.flip or told["isa"] is None:
        return told
    return told | {"layers": list(plan.ranges[told["rank"]]) if layout == PIPELINE else None}


def _model(model: ModelInfo | None) -> dict[str, Any]:
    names = ("id", "path", "arch", "quant", "context")
    return {name: getattr(model, name, None) for name in names}


def _engine_part(engine: EngineSnapshot | None) -> dict[str, Any]:
    """Requests, KV, prefix cache and the engine's own pace."""
    unknown = {"p50": None, "p99": None}
    return {
        "requests": _known(engine, "running", "waiting", "finished", "aborted", "failed"),
        "tokens": {
            "prompt": engine.prompt_tokens if engine is not None else None,
            "generated": engine.generated_tokens if engine is not None else None,
        },
        "kv": {
            **_known(engine, "capacity_tokens", "used_tokens", "cached_tokens"),
            "windows": list(engine.kv_windows) if engine is not None else None,
        },
        "prefix": _known(engine, "lookups", "hits", "hit_tokens", prefix="prefix_"),
        "engine": {
            **_known(engine, "plans_issued", "plans_acked", "preemptions", "decode_skips_max"),
            "loop_lag_ms": engine.loop_lag_ms if engine is not None else unknown,
            "step_overhead_ms": engine.step_overhead_ms if engine is not None else unknown,
        },
    }


def _known(engine: EngineSnapshot | None, *names: str, prefix: str = "") -> dict[str, Any]:
    return {name: None if engine is None else getattr(engine, prefix + name) for name in names}
