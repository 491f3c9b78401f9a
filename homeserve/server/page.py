"""The page at `/` and its files: read once at start from the package, served from memory with a strict content policy.

Only the files listed here exist; no path of a request is ever looked up on disk.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

from homeserve.server.bodies import json_response
from homeserve.server.context import ServerContext
from homeserve.server.parts import PARTS

_FOLDER = Path(__file__).parent / "page"
SCRIPTS = (
    "app",
    "dom",
    "settings",
    "watch",
    "chat",
    "turn",
    "stream",
    "kept",
    "markdown",
    "inline",
    "highlight",
    "box",
    "charts",
    "nodes",
    "scales",
    "facts",
    "head",
    "bars",
    "timeline",
    "panels",
    "memory",
    "flips",
)
SHEETS = ("base", "chat", "box")
FILES = {
    "/": ("index.html", "text/html"),
    **{f"/static/{name}.js": (f"{name}.js", "text/javascript") for name in SCRIPTS},
    **{f"/static/{name}.css": (f"{name}.css", "text/css") for name in SHEETS},
}
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self' data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)


@dataclass(frozen=True)
class _File:
    body: bytes
    kind: str
    tag: str


class Page:
    """The page's files in memory."""

    def __init__(self) -> None:
        self._files = {}
        for path, (name, kind) in FILES.items():
            body = (_FOLDER / name).read_bytes()
            self._files[path] = _File(body, kind, '"' + hashlib.sha256(body).hexdigest()[:24] + '"')

    def answer(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/" and _wants_json(request):
            return json_response(_introduction(request.app[PARTS].context))
        file = self._files[request.path]
        headers = {
            "Content-Security-Policy": POLICY,
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-cache",
            "ETag": file.tag,
        }
        if request.headers.get("If-None-Match") == file.tag:
            return web.Response(status=304, headers=headers)
        return web.Response(body=file.body, content_type=file.kind, charset="utf-8", headers=headers)


PAGE = web.AppKey("page", Page)


async def get_file(request: web.Request) -> web.StreamResponse:
    return request.app[PAGE].answer(request)


def _wants_json(request: web.Request) -> bool:
    accept = request.headers.get("Accept", "")
    return "application/json" in accept and "text/html" not in accept


def _introduction(context: ServerContext) -> dict[str, object]:
    return {
        "schema": 1,
        "name": "homeserve",
        "state": context.state(),
        "model": context.first.model.id if context.first is not None else None,
        "api": "/v1",
    }
