"""An answer that the client has begun: the prompt ends in the middle of the assistant's last turn.

Only the template knows what stands before such a turn (an empty thought, the name of a channel), and it also closes the
turn. So it renders the whole conversation, with a mark behind the last message's text: a noncharacter, which templates
neither trim nor know. The prompt is what stands before the mark.

A template that opens a thought in every turn cannot be gone on from: the text would be one of the thought's.
"""

from __future__ import annotations

from typing import Any

from homeserve.errors import InvalidField
from homeserve.server.fields import Message
from homeserve.text.dialects import Dialect

_MARKS = tuple(chr((plane << 16) + low) for plane in range(1, 17) for low in (0xFFFE, 0xFFFF))


def with_mark(messages: list[dict[str, Any]], where: str) -> tuple[list[dict[str, Any]], str]:
    """The messages with a mark at the end of the last one's text, and the mark. Raises InvalidField."""
    *before, last = messages
    mark = next((mark for mark in _MARKS if not any(mark in message["content"] for message in messages)), None)
    if mark is None:
        raise InvalidField(where, "have every noncharacter of Unicode")
    return [*before, {**last, "content": last["content"] + mark}], mark


def until_mark(text: str, mark: str, where: str) -> str:
    """What of a rendered conversation comes before the mark. Raises InvalidField where a template wrote it elsewhere
    than at one place."""
    prompt, *rest = text.split(mark)
    if len(rest) != 1:
        what = "end with a turn of the assistant, which this model's chat template cannot go on from"
        raise InvalidField(where, what, fix="end with a turn of the user")
    return prompt


def refuse_in_thought(dialect: Dialect, prompt: str, begun: Message, where: str) -> None:
    """Raises InvalidField where the text of `begun`, the end of the prompt, stands in a thought that the template has
    opened."""
    text = begun.content if isinstance(begun.content, str) else ""
    if dialect.starts_in_thought(prompt.removesuffix(text.lstrip())):
        what = "end with a turn of the assistant, which this model's chat template puts into a thought"
        raise InvalidField(where, what, fix="end with a turn of the user")
