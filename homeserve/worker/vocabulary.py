"""The vocabulary on a rank that draws: how each token is spelled, and the form in which llguidance wants to know it.

Ranks draw ids and know nothing of text, with two exceptions: a grammar is about bytes, and so are the texts that break
a repetition. Both need what the checkpoint says of its tokenizer. Reading that takes from a tenth of a second to some
seconds and tens of MiB, so nothing of it is done before the first request that needs it, and then in a thread beside
the plans that go on meanwhile (`homeserve.worker.guide`).

    TokenizerSource ─▶ Tokenizer ─▶ spellings ─▶ LLTokenizer (a trie of them)

**Padding.** A row of logits may be longer than the vocabulary. Ids past its end have no spelling; no grammar allows
them.

**One end of our own.** llguidance knows one token that ends a text. Which tokens end an answer differs by request, so
the trie gets one id more than a row has logits (`end`): in a mask its bit says that the grammar is complete here, and
nothing else. No token of the model is an end to llguidance.

**Forced bytes.** Where a grammar allows one continuation alone (a key of an object), llguidance asks for its canonical
tokens and allows only these: what a model has seen in training, not any cut of the same bytes. The model's own
tokenizer gives them. Where what it gives does not spell these very bytes (SentencePiece puts a space before a text),
the longest tokens that fit are taken. Either is a function of the bytes alone.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np

if TYPE_CHECKING:
    from llguidance import LLTokenizer
    from llguidance._tokenizer import TokenizerWrapper

    from homeserve.checkpoint.view import TokenizerSource
    from homeserve.text.tokenizer import Tokenizer


TEXTS_KEPT = 256
"""Texts whose tokens are remembered; a request names a few."""


@dataclass(frozen=True)
class Source:
    """What of a checkpoint stays when its files are closed. `cache_dir`: slow tokenizers are kept there."""

    path: str
    tokenizer: TokenizerSource
    cache_dir: str = ""


class Vocabulary:
    """Of `size` ids: as many as a row of logits has. Safe to use from several threads; each part is built once, by
    whoever asks first, and the others wait. Raises InvalidModelFile where the checkpoint has no tokenizer."""

    def __init__(self, source: Source, size: int) -> None:
        self.size = size
        self.end = size
        """The id that stands for the end of a text in `trie`."""
        self._source = source
        self._lock = threading.RLock()
        self._tokenizer: Tokenizer | None = None
        self._spellings: tuple[bytes, ...] | None = None
        self._trie: LLTokenizer | None = None
        self._spelled: Spelled | None = None
        self._containing: dict[str, frozenset[int]] = {}

    @property
    def spellings(self) -> tuple[bytes, ...]:
        """The bytes of each id; empty past the vocabulary's end."""
        with self._lock:
            if self._spellings is None:
                tokenizer = self._built_tokenizer()
                self._spellings = tuple(tokenizer.token_bytes(token) for token in range(self.size))
            return self._spellings

    @property
    def trie(self) -> LLTokenizer:
        """For llguidance's matchers, over `size` + 1 ids."""
        with self._lock:
            if self._trie is None:
                self._trie = trie_of(self.spellings, self._built_tokenizer().special_ids, self._encode)
            return self._trie

    def containing(self, text: str) -> frozenset[int]:
        """Ids of all tokens whose spelling has `text` in it."""
        with self._lock:
            known = self._containing.get(text)
            if known is None:
                if self._spelled is None:
                    self._spelled = Spelled(self.spellings)
                known = self._spelled.containing(text.encode("utf-8", "surrogatepass"))
                if len(self._containing) >= TEXTS_KEPT:
                    self._containing.clear()
                self._containing[text] = known
            return known

    def _built_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            # Imported here: a rank that guides nobody does not load it.
            from homeserve.text.tokenizer import Tokenizer

            cache = Path(self._source.cache_dir) if self._source.cache_dir else None
            self._tokenizer = Tokenizer.from_checkpoint(self._source, cache_dir=cache)
        return self._tokenizer

    def _encode(self, text: str) -> list[int]:
        assert self._tokenizer is not None, "the trie was made of it"
        return self._tokenizer.encode(text, add_special=False, parse_special=False)


class Spelled:
    """The spellings of all tokens in one piece, to be searched: a text costs about a millisecond, and not as much time
    of the interpreter as there are tokens."""

    def __init__(self, spellings: Sequence[bytes]) -> None:
        self._bytes = np.frombuffer(b"".join(spellings), np.uint8)
        self._ends = np.cumsum(np.fromiter(map(len, spellings), np.int64, len(spellings)))

    def containing(self, wanted: bytes) -> frozenset[int]:
        """Tokens with `wanted`, which is not empty, in their spelling."""
        places = np.flatnonzero(self._bytes[: max(0, len(self._bytes) - len(wanted) + 1)] == wanted[0])
        for at, byte in enumerate(wanted[1:], 1):
            places = places[self._bytes[places + at] == byte]
        tokens = np.searchsorted(self._ends, places, side="right")
        return frozenset(tokens[places + len(wanted) <= self._ends[tokens]].tolist())


class Encodes(Protocol):
    """What a trie needs to know of encoding: text to ids."""

    def __call__(self, text: str) -> Sequence[int]: ...


def trie_of(spellings: Sequence[bytes], special: frozenset[int], encode: Encodes) -> LLTokenizer:
    """A trie over ids [0, len(spellings)], the last of which is its end."""
    from llguidance import LLTokenizer

    wrapped = _Wrapped(spellings, special, encode)
    wrapped.trie = LLTokenizer(cast("TokenizerWrapper", wrapped))
    return wrapped.trie


class _Wrapped:
    """The attributes are those that LLTokenizer looks for (its class TokenizerWrapper)."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, spellings: Sequence[bytes], special: frozenset[int], encode: Encodes) -> None:
        self.tokens = [*spellings, b""]
        self.eos_token_id = len(spellings)
        self.special_token_ids = sorted(token for token in special if token < len(spellings))
        self.trie: LLTokenizer
        self._encode = encode

    def __call__(self, text: str) -> list[int]:
        tokens = list(self._encode(text))
        if b"".join(self.tokens[token] for token in tokens) == text.encode():
            return tokens
        return self.trie.greedy_tokenize(text)
