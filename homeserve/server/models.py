"""`/v1/models`, and the routes that load and unload a model by hand.

    GET  /v1/models                          ─▶ all models, in or out, each with its state
    POST /v1/homeserve/models/{id}/load      ─▶ 200 it is in · 202 it comes in
    POST /v1/homeserve/models/{id}/unload    ─▶ 200 it is out · 202 it goes out · 409 it is in use, without `force`

Both POSTs answer at once; `/v1/models` tells what becomes of it. A model that nobody loads by hand comes in with the
first request for it.
"""

from __future__ import annotations

import time
from typing import Any
from urllib.parse import quote

import msgspec
from aiohttp import web

from homeserve.errors import UnknownModel
from homeserve.server.bodies import json_response, read_body
from homeserve.server.context import ModelTold, ServerContext
from homeserve.server.parts import PARTS

MODELS = "/v1/homeserve/models"
_DONE = {"load": "loaded", "unload": "unloaded"}


class UnloadRequest(msgspec.Struct):
    """The body of an unload, which may be empty."""

    force: bool | None = None
    """Also while it computes requests: those have `--drain-timeout-s` to end, then they are cut off. A load under way
    is ended."""


async def get_models(request: web.Request) -> web.StreamResponse:
    context = request.app[PARTS].context
    return json_response({"object": "list", "data": [_model_object(each, context) for each in context.models.tell()]})


async def get_model(request: web.Request) -> web.StreamResponse:
    """Raises UnknownModel."""
    context = request.app[PARTS].context
    asked, every = request.match_info["id"], context.models.tell()
    found = next((each for each in every if each.id == asked), None)
    if found is None:
        raise UnknownModel(asked, tuple(each.id for each in every))
    return json_response(_model_object(found, context))


async def post_load(request: web.Request) -> web.StreamResponse:
    """Raises UnknownModel."""
    parts = request.app[PARTS]
    parts.check_taking()
    return _begun(parts.context.models.begin_load(request.match_info["id"]), "load")


async def post_unload(request: web.Request) -> web.StreamResponse:
    """Raises UnknownModel, ModelInUse."""
    parts = request.app[PARTS]
    parts.check_taking()
    body = await read_body(request, parts.context.settings.body_limit_bytes)
    fields = await parts.decoder.read(body, UnloadRequest) if body.strip() else UnloadRequest()
    return _begun(parts.context.models.begin_unload(request.match_info["id"], force=bool(fields.force)), "unload")


def _begun(told: ModelTold, what: str) -> web.Response:
    body = {"schema": 1, "id": told.id, "state": told.state, "url": f"/v1/models/{quote(told.id, safe='')}"}
    return json_response(body, status=200 if told.state == _DONE[what] else 202)


def _model_object(told: ModelTold, context: ServerContext) -> dict[str, Any]:
    """What is known of a model that was never in is its name."""
    info = told.info
    own: dict[str, Any] = {
        "state": told.state,
        "arch": info.arch if info is not None else None,
        "quant": info.quant if info is not None else None,
    }
    if told.reason is not None:
        own["reason"] = told.reason
    return {
        "id": told.id,
        "object": "model",
        "created": info.created if info is not None else int(context.started),
        "owned_by": "homeserve",
        "max_model_len": info.context if info is not None else None,
        "homeserve": own,
    }


def models_json(context: ServerContext) -> list[dict[str, Any]]:
    """`models` of the status: one entry for each, in or out."""
    now = time.time()
    return [_entry(each, now) for each in context.models.tell()]


def _entry(told: ModelTold, now: float) -> dict[str, Any]:
    load = told.progress
    return {
        "id": told.id,
        "state": told.state,
        "reason": told.reason,
        "last_used": round(told.last_used, 3) if told.last_used is not None else None,
        "idle_s": round(now - told.last_used, 1) if told.last_used is not None and not told.running else None,
        "ttl_s": told.ttl_s or None,
        "running": told.running,
        "waiting": told.waiting,
        "planned_mib": {name: round(size / (1 << 20), 1) for name, size in told.planned.items()},
        "load": None
        if load is None
        else {"stage": load.stage, "done_bytes": load.done_bytes, "total_bytes": load.total_bytes},
    }
