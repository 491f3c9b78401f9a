"""One event stream: what a write says of a client that is gone."""

from __future__ import annotations

import pytest
from aiohttp import ClientConnectionResetError
from aiohttp.test_utils import make_mocked_request

from homeserve.server.shape import Event
from homeserve.server.sse import ClientLeft, EventStream


async def test_a_client_that_left_between_two_events_is_no_error_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its handler is cancelled as a rule; where the write comes first, the connection is closing under it."""
    stream = EventStream(make_mocked_request("POST", "/v1/completions"), 1.0, lambda: None)

    async def closing(data: bytes) -> None:
        raise ClientConnectionResetError("Cannot write to closing transport")

    monkeypatch.setattr(stream.response, "write", closing)
    with pytest.raises(ClientLeft, match="closing transport"):
        await stream.send([Event({})])


async def test_a_client_that_left_before_the_first_byte_is_none_either(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = EventStream(make_mocked_request("POST", "/v1/completions"), 1.0, lambda: None)

    async def closing(request: object) -> None:
        raise ClientConnectionResetError("Cannot write to closing transport")

    monkeypatch.setattr(stream.response, "prepare", closing)
    with pytest.raises(ClientLeft, match="closing transport"):
        await stream.start("id")
