"""The text by which requests are alike: what a router compares to send those of one conversation to one replica.

A replica keeps the KV rows of prompts in a tree of prefixes, so whoever has answered the beginning of a conversation
answers its next turn sooner. The text is in the order in which a template writes: system, tools, then message by
message, each behind its role. It only has to be the same where prompts begin the same; nobody computes with it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

ROUTED_CHARACTERS = 1 << 14
"""Where longer prompts are cut: by then it is decided whose conversation it is."""


def prefix_text(path: str, body: bytes) -> str:
    """Of a request's body; never empty. What is no JSON object has the path alone: its answer is an error anyway."""
    try:
        fields = json.loads(body) if body else {}
    except (ValueError, RecursionError):
        fields = {}
    text = ""
    for part in _parts(fields) if isinstance(fields, dict) else ():
        text += part
        if len(text) >= ROUTED_CHARACTERS:
            break
    return text[:ROUTED_CHARACTERS] or path


def _parts(fields: dict[str, Any]) -> Iterator[str]:
    for name in ("system", "instructions"):
        yield from _texts(fields.get(name))
    if fields.get("tools"):
        yield json.dumps(fields["tools"], sort_keys=True)
    for name in ("messages", "input", "prompt"):
        yield from _texts(fields.get(name))


def _texts(value: Any, depth: int = 0) -> Iterator[str]:
    """Texts in a prompt, a message, a part of one, or a list of any of these; numbers of tokens as they are."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list) and depth < 4:
        for each in value:
            yield from _texts(each, depth + 1)
    elif isinstance(value, dict) and depth < 4:
        if isinstance(value.get("role"), str):
            yield f"\n{value['role']}: "
        for name in ("content", "text", "output", "arguments", "tool_calls", "function"):
            yield from _texts(value.get(name), depth + 1)
    elif isinstance(value, int) and not isinstance(value, bool):
        yield f"{value},"
