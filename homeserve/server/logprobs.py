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


class CompletionLogprobs:
    """Writes the lists of one choice piece by piece, keeping the place in its text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer)
        self._offset = 0

    def echo(self, ids: Sequence[int], text: str, entries: Sequence[Logprobs]) -> dict[str, Any]:
        """Lists of the prompt's own tokens: the first has no log-probability. `text` is what `echo` writes of them."""
        lists = self.piece([Logprobs(token=ids[0], logprob=0.0), *entries])
        lists["token_logprobs"][0] = None
        lists["top_logprobs"][0] = None
        self._detokenizer = Detokenizer(self._tokenizer)
        self._offset = len(text)
        return lists

    def piece(self, entries: Sequence[Logprobs]) -> dict[str, Any]:
        offsets = []
        for entry in entries:
            offsets.append(self._offset)
            self._offset += len(self._detokenizer.push([entry.token]))
        return {
            "tokens": [self._name(entry.token) for entry in entries],
            "token_logprobs": [max(entry.logprob, LEAST) for entry in entries],
            "top_logprobs": [self._top(entry) for entry in entries],
            "text_offset": offsets,
        }

    def _top(self, entry: Logprobs) -> dict[str, float]:
        """The most likely tokens and, if it is none of them, the drawn one."""
        top = {self._name(token): max(value, LEAST) for token, value in entry.top}
        top.setdefault(self._name(entry.token), max(entry.logprob, LEAST))
        return top

    def _name(self, token: int) -> str:
        """Text of a token; bytes that are no whole characters are spelled `bytes:\\xe2\\x80`."""
        spelled = self._tokenizer.token_bytes(token)
        try:
            return spelled.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


def join_lists(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Several pieces' lists as one."""
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return {name: [value for part in parts for value in part[name]] for name in names}
