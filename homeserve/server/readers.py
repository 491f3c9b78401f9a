"""How the answer of a chat is read: which formats of the model its text may be in."""

from __future__ import annotations

from collections.abc import Callable

from homeserve.server.chat_call import ChatCall
from homeserve.server.prompts import Prompt
from homeserve.text.answer import AnswerReader, PlainReader
from homeserve.text.dialects import Dialect


def reader_maker(dialect: Dialect, call: ChatCall, prompt: Prompt) -> Callable[[], AnswerReader]:
    """Makes the reader of one choice."""
    return PlainReader
