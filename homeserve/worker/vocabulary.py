"""The vocabulary on a rank that draws: how each token is spelled, and the form in which llguidance wants to know it.

Ranks draw ids and know nothing of text, with two exceptions: a grammar is about bytes, and so are the texts that break
a repetition. Both need what the checkpoint says of its tokenizer. Reading that takes from a tenth of a second to some
seconds and tens of MiB, so nothing of it is done before the first request that needs it, and then in a thread beside
the plans that go on meanwhile (`homeserve.worker.guide`).

    TokenizerSource ─▶ Tokenizer ─▶ Spelled, literal encoder ─▶ LLTokenizer (tries of the spellings)

**What is kept.** The spellings in one piece, the tokenizer's library for what is forced (below), llguidance's tries.
The tokenizer itself, with each token as an object or two, is let go before the tries are made, and so are the keys of
the checkpoint; freed memory goes back to the system, because whoever is next to need it may be another process. What
all of this may take at its worst moment is a line of the plan (`budget.host_lines.vocabulary_bytes`).

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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np

from homeserve.heap import return_freed_heap

if TYPE_CHECKING:
    from llguidance import LLTokenizer
    from llguidance._tokenizer import TokenizerWrapper

    from homeserve.checkpoint.view import TokenizerSource

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
        self._source: Source | None = source
        """Until it is read."""
        self._lock = threading.RLock()
        self._read: Read | None = None
        self._trie: LLTokenizer | None = None
        self._containing: dict[str, frozenset[int]] = {}

    @property
    def spelled(self) -> Spelled:
        """The bytes of each id; empty past the vocabulary's end."""
        return self._known().spelled

    @property
    def special(self) -> frozenset[int]:
        """Control tokens: what they spell is no text."""
        return self._known().special

    @property
    def trie(self) -> LLTokenizer:
        """For llguidance's matchers, over `size` + 1 ids."""
        with self._lock:
            if self._trie is None:
                read = self._known()
                self._trie = trie_of(read.spelled, read.special, read.encode)
                return_freed_heap()
            return self._trie

    def containing(self, text: str) -> frozenset[int]:
        """Ids of all tokens whose spelling has `text` in it."""
        with self._lock:
            known = self._containing.get(text)
            if known is None:
                known = self.spelled.containing(text.encode("utf-8", "surrogatepass"))
                if len(self._containing) >= TEXTS_KEPT:
                    self._containing.clear()
                self._containing[text] = known
            return known

    def _known(self) -> Read:
        with self._lock:
            if self._read is None:
                assert self._source is not None, "it is let go once it is read"
                self._read = _read(self._source, self.size)
                self._source = None
                return_freed_heap()
            return self._read


@dataclass(frozen=True)
class Read:
    """What is needed of a checkpoint's tokenizer."""

    spelled: Spelled
    special: frozenset[int]
    encode: Encodes


def _read(source: Source, size: int) -> Read:
    # Imported here: a rank that guides nobody does not load it.
    from homeserve.text.tokenizer import Tokenizer

    # Merges that are in the file are quicker put together than read from the cache, in half of the memory.
    cached = source.cache_dir and not source.tokenizer.metadata.get("tokenizer.ggml.merges")
    cache = Path(source.cache_dir) if cached else None
    tokenizer = Tokenizer.from_checkpoint(source, cache_dir=cache)
    spelled = Spelled([tokenizer.token_bytes(token) for token in range(size)])
    return Read(spelled, tokenizer.special_ids, tokenizer.literal_encoder())


class Spelled:
    """The spellings of all tokens in one piece: eight bytes beside each token's own, and fast to search. A text costs
    about a millisecond, and not as much time of the interpreter as there are tokens."""

    def __init__(self, spellings: Sequence[bytes]) -> None:
        self._joined = b"".join(spellings)
        self._bytes = np.frombuffer(self._joined, np.uint8)
        self._ends = np.cumsum(np.fromiter(map(len, spellings), np.int64, len(spellings)))

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, token: int) -> bytes:
        """Of a token in [0, len)."""
        return self._joined[self._ends[token - 1] if token else 0 : self._ends[token]]

    def __iter__(self) -> Iterator[bytes]:
        return (self[token] for token in range(len(self)))

    def containing(self, wanted: bytes) -> frozenset[int]:
        """Tokens with `wanted`, which is not empty, in their spelling."""
        places = np.flatnonzero(self._bytes[: max(0, len(self._bytes) - len(wanted) + 1)] == wanted[0])
        for at, byte in enumerate(wanted[1:], 1):
            places = places[self._bytes[places + at] == byte]
        tokens = np.searchsorted(self._ends, places, side="right")
        return frozenset(tokens[places + len(wanted) <= self._ends[tokens]].tolist())


class Encodes(Protocol):
    """What a trie needs to know of encoding: text to ids."""

    def __call__(self, text: str, /) -> Sequence[int]: ...


def trie_of(spelled: Spelled, special: frozenset[int], encode: Encodes) -> LLTokenizer:
    """A trie over ids [0, len(spelled)], the last of which is its end."""
    from llguidance import LLTokenizer

    wrapped = _Wrapped(spelled, special, encode)
    wrapped.trie = LLTokenizer(cast("TokenizerWrapper", wrapped))
    wrapped.tokens = []  # it has read them
    return wrapped.trie


class _Wrapped:
    """The attributes are those that LLTokenizer looks for (its class TokenizerWrapper)."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, spelled: Spelled, special: frozenset[int], encode: Encodes) -> None:
        self.tokens = [*spelled, b""]
        self.eos_token_id = len(spelled)
        self.special_token_ids = sorted(token for token in special if token < len(spelled))
        self.trie: LLTokenizer
        self._spelled = spelled
        self._encode = encode

    def __call__(self, text: str) -> list[int]:
        tokens = list(self._encode(text))
        if b"".join(self._spelled[token] for token in tokens) == text.encode():
            return tokens
        return self.trie.greedy_tokenize(text)
