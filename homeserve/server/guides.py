"""What an answer has to look like, as a `Guide` for the rank that draws it."""

from __future__ import annotations

from homeserve.server.chat_call import ChatCall
from homeserve.server.parts import Served
from homeserve.server.prompts import Prompt
from homeserve.wire.records import Guide


async def guide_of(served: Served, call: ChatCall, prompt: Prompt) -> Guide | None:
    """None where the model may write what it likes. Raises InvalidField, SchemaUnsatisfiable."""
    return None
