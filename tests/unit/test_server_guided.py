"""Constrained answers over sockets, on a fleet that answers from a script: what reaches the rank, and what the client
hears when its grammar lets no token be drawn."""

from __future__ import annotations

import json
from typing import Any

import pytest
from http_world import World, serving

from homeserve.wire.records import LaneRows, NewLane, Sample

WHY = "too many items"
CONSTRAINED = {"guided_regex": "[a-z]+"}


def guides_of(world: World) -> list[Any]:
    """Guides of the requests that come, in order."""
    seen: list[Any] = []
    issue = world.fleet.issue

    def watched(*args: Any, new: tuple[NewLane, ...] = (), **more: Any) -> int:
        seen.extend(lane.sampling.guide for lane in new)
        return issue(*args, new=new, **more)

    world.fleet.issue = watched  # type: ignore[method-assign]
    return seen


async def test_the_checked_grammar_reaches_the_rank_of_chats_and_completions() -> None:
    async with serving() as world:
        guides = guides_of(world)
        assert (await world.chat(max_tokens=2, **CONSTRAINED))[0] == 200
        assert (await world.complete(max_tokens=2, n=2, **CONSTRAINED))[0] == 200
        assert (await world.chat(max_tokens=2))[0] == 200
    asked = {"kind": "regex", "value": "[a-z]+"}
    assert [guide and json.loads(guide.grammar) for guide in guides] == [asked, asked, asked, None]


@pytest.mark.parametrize("route", ["chat", "completion"])
async def test_a_grammar_that_lets_nothing_be_drawn_is_the_clients_error(route: str) -> None:
    async with serving() as world:
        plain = world.fleet._sample

        def failing(row: LaneRows) -> Sample:
            if world.fleet.said.get(row.request, 0) < 2:
                return plain(row)
            return Sample(row.lane, row.request, row.start + 1, -1, failed=WHY)

        world.fleet._sample = failing  # type: ignore[method-assign]
        ask = world.chat if route == "chat" else world.complete
        status, body = await ask(max_tokens=9, **CONSTRAINED)
        assert (status, body["error"]["param"], body["error"]["code"]) == (400, "guided_regex", "invalid_field")
        assert WHY in body["error"]["message"]
        status, body = await ask(max_tokens=9)
        assert (status, body["error"]["code"]) == (500, "server_error") and WHY not in json.dumps(body)
        if route == "chat":
            events = await world.chat_stream(max_tokens=9, **CONSTRAINED)
            assert events[-1]["error"]["param"] == "guided_regex" and WHY in events[-1]["error"]["message"]
        await world.wait_for(lambda: world.running == 0)
