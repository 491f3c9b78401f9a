"""Log-probabilities as the two OpenAI routes write them.

Chat lists an object per token, with the token's bytes; completions write four parallel lists, where `text_offset` is
the place of each token's text, in characters, in the text of the choice. JSON has no -inf: a token that could not be
drawn reads -9999.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from homeserve.text.detokenizer import Detokenizer
from homeserve.wire.records import Logprobs

if TYPE_CHECKING:
    from homeserve.text.tokenizer import Tokenizer

LEAST = -9999.0


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[Logprobs]) -> dict[str, Any]:
    """The `logprobs` object of a chat choice or chunk."""
    content = []
    for entry in entries:
        item = _chat_token(tokenizer, entry.token, entry.logprob)
        item["top_logprobs"] = [_chat_token(tokenizer, token, value) for token, value in entry.top]
        content.append(item)
    return {"content": content, "refusal": None}


def _chat_token(tokenizer: Tokenizer, token: int, value: float) -> dict[str, Any]:
    spelled = tokenizer.token_bytes(token)
    return {"token": spelled.decode("utf-8", "replace"), "logprob": max(value, LEAST), "bytes": list(spelled)}


def completion_logprobs(tokenizer: Tokenizer, entries: Sequence[Logprobs], offsets: Sequence[int]) -> dict[str, Any]:
    """The `logprobs` lists of a completion choice or chunk; `offsets` runs parallel to `entries`."""
    return {
        "tokens": [_name(tokenizer, entry.token) for entry in entries],
        "token_logprobs": [max(entry.logprob, LEAST) for entry in entries],
        "top_logprobs": [_top(tokenizer, entry) for entry in entries],
        "text_offset": list(offsets),
    }


def prompt_logprobs(tokenizer: Tokenizer, ids: Sequence[int], entries: Sequence[Logprobs]) -> dict[str, Any]:
    """The lists of a prompt's own tokens (`echo`). The first token has no log-probability."""
    detokenizer, offset, offsets = Detokenizer(tokenizer), 0, []
    for token in ids:
        offsets.append(offset)
        offset += len(detokenizer.push((token,)))
    lists = completion_logprobs(tokenizer, [Logprobs(token=ids[0], logprob=0.0), *entries], offsets)
    lists["token_logprobs"][0] = None
    lists["top_logprobs"][0] = None
    return lists


def _top(tokenizer: Tokenizer, entry: Logprobs) -> dict[str, float]:
    """The most likely tokens and, if it is none of them, the drawn one."""
    top = {_name(tokenizer, token): max(value, LEAST) for token, value in entry.top}
    top.setdefault(_name(tokenizer, entry.token), max(entry.logprob, LEAST))
    return top


def _name(tokenizer: Tokenizer, token: int) -> str:
    """Text of a token; bytes that are no whole characters are spelled `bytes:\\xe2\\x80`."""
    spelled = tokenizer.token_bytes(token)
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


def join_lists(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Several pieces' lists as one."""
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return {name: [value for part in parts for value in part[name]] for name in names}
