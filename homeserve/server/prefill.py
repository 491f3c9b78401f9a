"""An answer that the client has begun: the prompt ends in the middle of the assistant's last turn.

Only the template knows what stands before such a turn (an empty thought, the name of a channel), and it also closes the
turn. So it renders the whole conversation, with a mark behind the last message's text: a noncharacter, which templates
neither trim nor know. The prompt is what stands before the mark.
"""

from __future__ import annotations

from typing import Any

from homeserve.errors import InvalidField

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
