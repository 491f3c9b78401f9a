"""From what a client wrote to token ids: messages through the chat template, text by the tokenizer, ids as they are.

Rendering happens in the template host's process. Tokenising happens on the loop while it is short, and in a thread
above `INLINE_CHARS`, so that one long prompt delays no other stream. A prompt that cannot fit the context is refused
before that: by its number of ids, or by more characters than its tokens could have.

Every id that leaves here is one of the model's: a tokenizer may know more tokens than the model has rows for, and a
rank refuses the whole plan that names one, which would fail everybody else's requests too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import msgspec

from homeserve.errors import ContextOverflow, InvalidField
from homeserve.server.bounds import Bounds
from homeserve.server.control import ControlTexts
from homeserve.server.fields import PROMPTS_LIMIT, Message
from homeserve.server.prefill import until_mark, with_mark

if TYPE_CHECKING:
    from homeserve.text.templates import TemplateHost
    from homeserve.text.tokenizer import Tokenizer

INLINE_CHARS = 1024
INLINE_TOKENS = 1024
INLINE_PARTS = 256
ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
_TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
_MIXED = "mixes texts and token ids"
_RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "self"})
"""Variables of a template that are set otherwise: by fields of a request, and `self` by the template language."""


_controls: WeakKeyDictionary[Tokenizer, ControlTexts] = WeakKeyDictionary()


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


async def check_ids(ids: list[int], vocab: int, field: str) -> None:
    """Raises InvalidField for a token id that the model does not have."""
    if len(ids) <= INLINE_TOKENS:
        _check_ids(ids, vocab, field)
    else:
        await asyncio.to_thread(_check_ids, ids, vocab, field)


def _check_ids(ids: list[int], vocab: int, field: str) -> None:
    if ids and not (0 <= min(ids) and max(ids) < vocab):
        place = next(i for i, token in enumerate(ids) if not 0 <= token < vocab)
        raise InvalidField(f"{field}[{place}]", f"{ids[place]} is no token id of this model (0 to {vocab - 1})")


async def check_length(text_len: int, tokenizer: Tokenizer, bounds: Bounds, field: str) -> None:
    """Raises ContextOverflow for a text that has more characters than all the tokens of a context."""
    if text_len <= max(INLINE_CHARS, bounds.context):
        return
    longest = await asyncio.to_thread(_longest_bytes, tokenizer)
    if text_len > bounds.context * longest:
        raise ContextOverflow(-(-text_len // longest), bounds.context - 1, field, at_least=True)


@lru_cache(maxsize=2)
def _longest_bytes(tokenizer: Tokenizer) -> int:
    """Bytes of the longest token, which has no more characters than that."""
    return max(len(tokenizer.token_bytes(token)) for token in range(tokenizer.vocab_size))


# ------------------------------------------------------------------------------------------------------------ chat


async def chat_prompt(
    templates: TemplateHost,
    tokenizer: Tokenizer,
    messages: list[Message],
    *,
    bounds: Bounds,
    tools: list[dict[str, Any]] | None,
    add_generation_prompt: bool,
    template_arguments: dict[str, Any],
    continue_last: bool = False,
    where: str = "messages",
) -> Prompt:
    """The conversation as the model's template writes it, in tokens. Raises InvalidField.

    The template writes the beginning-of-text token itself where it wants one; if the model wants one and the template
    wrote none, it is put in front, and there are never two. What a message, a tool or an argument of the template says
    is text: a control token's name in it is not obeyed (`ControlTexts`). With `continue_last` the prompt ends where the
    last message's text does.
    """
    taken = _RESERVED & template_arguments.keys()
    if taken:
        raise InvalidField(f"chat_template_kwargs.{min(taken)}", "is a variable of templates that is set otherwise")
    made = await _for_template(messages)
    await check_length(sum(len(m["content"]) for m in made), tokenizer, bounds, where)
    end = ""
    if continue_last:
        made, end = with_mark(made, where)
    control = await _control_of(tokenizer)
    with _called(where):
        marked = await control.mark(made, tools, template_arguments)
        text = await templates.render(
            marked.messages,
            tools=marked.tools or None,
            add_generation_prompt=add_generation_prompt,
            **marked.arguments,
        )
    if continue_last:
        text = until_mark(text, end, where)
    await check_length(len(text), tokenizer, bounds, where)
    if marked.mark is None:
        ids = await encode(tokenizer, text, add_special=False)
    else:
        ids = await asyncio.to_thread(_encode_marked, tokenizer, control, text, marked.mark)
        text = text.replace(marked.mark, "")
    if tokenizer.add_bos and tokenizer.bos_id is not None and ids[:1] != [tokenizer.bos_id]:
        ids.insert(0, tokenizer.bos_id)
    return _checked(ids, text, where, tokenizer, bounds)


@contextmanager
def _called(where: str) -> Iterator[None]:
    """An error about `messages` is one about `where`, as the route calls them."""
    try:
        yield
    except InvalidField as error:
        if error.field != "messages":
            raise
        raise InvalidField(where, error.message.removeprefix("messages: "), fix=error.fix) from error


async def _control_of(tokenizer: Tokenizer) -> ControlTexts:
    control = _controls.get(tokenizer)
    if control is None:
        control = _controls[tokenizer] = await asyncio.to_thread(_control_texts, tokenizer)
    return control


def _control_texts(tokenizer: Tokenizer) -> ControlTexts:
    return ControlTexts(tokenizer.token_text(token) for token in tokenizer.special_ids)


def _encode_marked(tokenizer: Tokenizer, control: ControlTexts, text: str, mark: str) -> list[int]:
    ids: list[int] = []
    for piece, obeyed in control.pieces(text, mark):
        ids += tokenizer.encode(piece, add_special=False, parse_special=obeyed)
    return ids


async def _for_template(messages: list[Message]) -> list[dict[str, Any]]:
    """Off the loop where they are many. Raises InvalidField."""
    parts = sum(len(m.content) if isinstance(m.content, list) else 1 for m in messages)
    if parts <= INLINE_PARTS:
        return _template_messages(messages)
    return await asyncio.to_thread(_template_messages, messages)


def _template_messages(messages: list[Message]) -> list[dict[str, Any]]:
    return [_template_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _template_message(message: Message, where: str) -> dict[str, Any]:
    """A message as templates expect it: text as one string, arguments of tool calls as objects."""
    if message.role not in ROLES:
        raise InvalidField(f"{where}.role", f"{message.role!r} is none of {', '.join(sorted(ROLES))}")
    role = "system" if message.role == "developer" else message.role
    made: dict[str, Any] = {"role": role, "content": _content(message, where)}
    for name in ("name", "tool_call_id"):
        value = getattr(message, name)
        if value is not None:
            made[name] = value
    made |= _thought(message)
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


def _thought(message: Message) -> dict[str, str]:
    """An earlier thought under all the names that templates know it by. `thinking` is refused by the template that
    reads it beside a text and calls in one message; the text is what the model went on from."""
    thought = message.reasoning if message.reasoning_content is None else message.reasoning_content
    if thought is None:
        return {}
    named = {"reasoning_content": thought, "reasoning": thought}
    return named if message.tool_calls and message.content else named | {"thinking": thought}


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
    if not arguments.strip():
        return {}
    try:
        return msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return arguments


# ------------------------------------------------------------------------------------------------------ completions


async def completion_prompts(
    tokenizer: Tokenizer, prompt: str | list[str | int | list[int]], bounds: Bounds
) -> list[Prompt]:
    """One Prompt each of: a text, a list of texts, token ids, a list of lists of token ids. Raises InvalidField,
    ContextOverflow."""
    if isinstance(prompt, str):
        return [await _from_text(prompt, tokenizer, bounds, "prompt")]
    if not prompt:
        raise InvalidField("prompt", "is empty")
    if isinstance(prompt[0], int):
        return [await _from_ids(prompt, tokenizer, bounds, "prompt")]
    if len(prompt) > PROMPTS_LIMIT:
        raise InvalidField("prompt", f"has {len(prompt)} entries, the limit is {PROMPTS_LIMIT}")
    if len({type(item) for item in prompt}) > 1:
        raise InvalidField("prompt", _MIXED)
    prompts = []
    for i, item in enumerate(prompt):
        if isinstance(item, str):
            prompts.append(await _from_text(item, tokenizer, bounds, f"prompt[{i}]"))
        elif isinstance(item, list):
            prompts.append(await _from_ids(item, tokenizer, bounds, f"prompt[{i}]"))
    return prompts


async def _from_text(text: str, tokenizer: Tokenizer, bounds: Bounds, where: str) -> Prompt:
    await check_length(len(text), tokenizer, bounds, where)
    return _checked(await encode(tokenizer, text, add_special=True), text, where, tokenizer, bounds)


async def _from_ids(items: Sequence[object], tokenizer: Tokenizer, bounds: Bounds, where: str) -> Prompt:
    """The length first: nothing that is longer than the context is looked at."""
    if len(items) >= bounds.context:
        raise ContextOverflow(len(items), bounds.context - 1, where)
    if len(items) <= INLINE_TOKENS:
        return _ids_prompt(items, tokenizer, bounds, where)
    return await asyncio.to_thread(_ids_prompt, items, tokenizer, bounds, where)


def _ids_prompt(items: Sequence[object], tokenizer: Tokenizer, bounds: Bounds, where: str) -> Prompt:
    ids = [item for item in items if isinstance(item, int)]
    if len(ids) < len(items):
        raise InvalidField(where, _MIXED)
    _check_ids(ids, bounds.vocab, where)
    return _checked(ids, None, where, tokenizer, bounds)


def _checked(ids: list[int], text: str | None, where: str, tokenizer: Tokenizer, bounds: Bounds) -> Prompt:
    """Raises InvalidField for no tokens, or for one that the tokenizer knows and the model does not."""
    if not ids:
        raise InvalidField(where, "has no tokens")
    if bounds.vocab < tokenizer.vocab_size and max(ids) >= bounds.vocab:
        token = max(ids)
        name = tokenizer.token_text(token)
        raise InvalidField(where, f"has the token {name!r} ({token}), for which the model has no weights")
    return Prompt(tuple(ids), text)
