"""A route as data: what is registered, and what is told of it, are the same entry.

`routes.py` has the table, `application.py` registers it, `openapi.py` describes it. So no route can be missing in the
description, and none can be described that is not there. What an entry says of answers and errors is held against real
answers by the contract tests of the server.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import msgspec
from aiohttp.typedefs import Handler

from homeserve.errors import (
    BodyTooLarge,
    DoesNotFit,
    Draining,
    InvalidField,
    Loading,
    ModelLoadFailed,
    ModelNotLoaded,
    ModelUnloaded,
    ModelWaits,
    QueueFull,
    RequestError,
    RequestFailed,
    SchemaUnsatisfiable,
    UnknownModel,
)

JSON = "application/json"
EVENTS = "text/event-stream"

READS_BODY: tuple[type[RequestError], ...] = (InvalidField, BodyTooLarge)
LEASES: tuple[type[RequestError], ...] = (
    Loading,
    UnknownModel,
    QueueFull,
    Draining,
    ModelWaits,
    ModelUnloaded,
    ModelLoadFailed,
    DoesNotFit,
)
"""Of routes that compute with a model, which is loaded for them if it is out."""
LOOKS: tuple[type[RequestError], ...] = (Loading, UnknownModel, ModelNotLoaded)
"""Of routes that look at a model that is in."""
GENERATES: tuple[type[RequestError], ...] = (SchemaUnsatisfiable, *LEASES, RequestFailed)
"""Errors of routes that do so; those of the edge (401, 403, 405, 500) every route has."""


class ErrorShape(StrEnum):
    """Whose shape the errors of a route have."""

    OPENAI = "openai"
    ANTHROPIC = "anthropic"


@dataclass(frozen=True)
class Answer:
    """An answer that is no error. `schema` is a type that msgspec can describe; None: bytes of `kind`, or no body."""

    says: str
    schema: Any = None
    status: int = 200
    kind: str = JSON
    """Its media type; empty: it has no body."""
    also: tuple[str, ...] = ()
    """Media types that it may have instead, with bytes that nothing is said of."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Name of a header that this answer has -> what it says."""


@dataclass(frozen=True)
class Stream:
    """The same answer as events, where the body asks for it by `stream: true`."""

    says: str
    events: Mapping[str, tuple[Any, ...]]
    """Name of an event -> types of its data, one of which it has. Where an API gives events no names, the one name is
    empty, and its last event is `[DONE]`."""


@dataclass(frozen=True)
class Route:
    """One method at one path. `path` is in aiohttp's form, `/v1/models/{id:.+}`."""

    method: str
    path: str
    handler: Handler
    says: str
    """One sentence; the first word is a verb."""
    tag: str
    body: type[msgspec.Struct] | None = None
    bare: bool = False
    """The body may be left out."""
    answers: tuple[Answer, ...] = ()
    stream: Stream | None = None
    errors: tuple[type[RequestError], ...] = ()
    """What it may raise beside the errors of the edge."""
    error_shape: ErrorShape = ErrorShape.OPENAI
