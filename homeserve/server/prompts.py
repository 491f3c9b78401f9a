"""From what a client wrote to token ids: messages through the chat template, text by the tokenizer, ids as they are.

Rendering happens in the template host's process. Tokenising happens on the loop while it is short, and in a thread
above `INLINE_CHARS`, so that one long prompt delays no other stream.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from homeserve.errors import InvalidField
from homeserve.server.fields import PROMPTS_LIMIT, Message

if TYPE_CHECKING:
    from homeserve.text.templates import TemplateHost
    from homeserve.text.tokenizer import Tokenizer

INLINE_CHARS = 1024
INLINE_TOKENS = 1024
ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
_TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
_RESERVED = frozenset({"messages", "tools", "add_generation_prompt"})


@dataclass(frozen=True)
class Prompt:
    """Token ids, and the text that `echo` gives back (None: decode the ids)."""

    ids: tuple[int, ...]
    text: str | None = None


async def encode(tokenizer: Tokenizer, text: str, *, add_special: bool) -> list[int]:
    """Token ids of `text`, special tokens in it recognised."""
    if len(text) <= INLINE_CHARS:
        return tokenizer.encode(text, add_special=add_special, parse_special=True)
    return await asyncio.to_thread(tokenizer.encode, text, add_special=add_special, parse_special=True)


async def decode(tokenizer: Tokenizer, ids: list[int]) -> str:
    if len(ids) <= INLINE_TOKENS:
        return tokenizer.decode(ids)
    return await asyncio.to_thread(tokenizer.decode, ids)


def check_ids(ids: list[int], vocab_size: int, field: str) -> None:
    """Raises InvalidField for a token id that the model does not have."""
    if ids and not (0 <= min(ids) and max(ids) < vocab_size):
        place = next(i for i, token in enumerate(ids) if not 0 <= token < vocab_size)
        raise InvalidField(f"{field}[{place}]", f"{ids[place]} is no token id of this model (0 to {vocab_size - 1})")


# ------------------------------------------------------------------------------------------------------------ chat


async def chat_prompt(
    templates: TemplateHost,
    tokenizer: Tokenizer,
    messages: list[Message],
    *,
    tools: list[dict[str, Any]] | None,
    add_generation_prompt: bool,
    template_arguments: dict[str, Any],
) -> Prompt:
    """The conversation as the model's template writes it, in tokens. Raises InvalidField.

    The template writes the beginning-of-text token itself where it wants one; if the model wants one and the template
    wrote none, it is put in front, and there are never two.
    """
    taken = _RESERVED & template_arguments.keys()
    if taken:
        raise InvalidField(f"chat_template_kwargs.{min(taken)}", "is set by its own field")
    text = await templates.render(
        [_template_message(m, f"messages[{i}]") for i, m in enumerate(messages)],
        tools=tools or None,
        add_generation_prompt=add_generation_prompt,
        **template_arguments,
    )
    ids = await encode(tokenizer, text, add_special=False)
    if tokenizer.add_bos and tokenizer.bos_id is not None and ids[:1] != [tokenizer.bos_id]:
        ids.insert(0, tokenizer.bos_id)
    return _checked(ids, text, "messages")


def _template_message(message: Message, where: str) -> dict[str, Any]:
    """A message as templates expect it: text as one string, arguments of tool calls as objects."""
    if message.role not in ROLES:
        raise InvalidField(f"{where}.role", f"{message.role!r} is none of {', '.join(sorted(ROLES))}")
    role = "system" if message.role == "developer" else message.role
    made: dict[str, Any] = {"role": role, "content": _content(message, where)}
    for name in ("name", "tool_call_id", "reasoning_content"):
        value = getattr(message, name)
        if value is not None:
            made[name] = value
    if message.tool_calls:
        made["tool_calls"] = [
            {
                "id": call.id,
                "type": call.type or "function",
                "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
            }
            for call in message.tool_calls
        ]
    return made


def _content(message: Message, where: str) -> str:
    content = message.content
    if content is None:
        if message.role != "assistant":
            raise InvalidField(f"{where}.content", "is required")
        return ""
    if isinstance(content, str):
        return content
    texts = []
    for i, part in enumerate(content):
        if part.type not in _TEXT_PARTS:
            raise InvalidField(f"{where}.content[{i}].type", f"{part.type!r} is not supported: only text is read here")
        if part.text is None:
            raise InvalidField(f"{where}.content[{i}].text", "is required")
        texts.append(part.text)
    return "\n".join(texts)


def _arguments(arguments: str | dict[str, Any] | None) -> Any:
    """Clients send a string of JSON; templates write an object. What is not JSON goes on as text."""
    if not isinstance(arguments, str):
        return arguments or {}
    try:
        return msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return arguments


# ------------------------------------------------------------------------------------------------------ completions


async def completion_prompts(tokenizer: Tokenizer, prompt: str | list[str | int | list[int]]) -> list[Prompt]:
    """One Prompt each of: a text, a list of texts, token ids, a list of lists of token ids. Raises InvalidField."""
    if isinstance(prompt, str):
        return [_checked(await encode(tokenizer, prompt, add_special=True), prompt, "prompt")]
    if not prompt:
        raise InvalidField("prompt", "is empty")
    kinds = {type(item) for item in prompt}
    if len(kinds) > 1:
        raise InvalidField("prompt", "mixes texts and token ids")
    if kinds == {int}:
        return [_from_ids([item for item in prompt if isinstance(item, int)], tokenizer, "prompt")]
    if len(prompt) > PROMPTS_LIMIT:
        raise InvalidField("prompt", f"has {len(prompt)} entries, the limit is {PROMPTS_LIMIT}")
    prompts = []
    for i, item in enumerate(prompt):
        if isinstance(item, str):
            ids = await encode(tokenizer, item, add_special=True)
            prompts.append(_checked(ids, item, f"prompt[{i}]"))
        elif isinstance(item, list):
            prompts.append(_from_ids(item, tokenizer, f"prompt[{i}]"))
    return prompts


def _from_ids(ids: list[int], tokenizer: Tokenizer, where: str) -> Prompt:
    check_ids(ids, tokenizer.vocab_size, where)
    return _checked(ids, None, where)


def _checked(ids: list[int], text: str | None, where: str) -> Prompt:
    if not ids:
        raise InvalidField(where, "has no tokens")
    return Prompt(tuple(ids), text)
