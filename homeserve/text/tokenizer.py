"""Text to token ids and back, for one checkpoint.

The `tokenizers` library does the splitting and merging. What it would do in ways that a server cannot use is done here:
- BOS and EOS, because a chat template may have written BOS already, and a model that sees two answers worse;
- whether control tokens that stand in the text are obeyed (`parse_special`): text of users should not be able to close
  its own turn;
- decoding to bytes, token by token (`Spelling`), because a stream must not break a code point.

Safe to use from several threads.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Protocol

from tokenizers import Tokenizer as Library

from homeserve.checkpoint.view import TokenizerSource
from homeserve.errors import InvalidField, InvalidModelFile
from homeserve.text import token_cache
from homeserve.text.assembly import assemble, assemble_literal
from homeserve.text.endings import end_ids
from homeserve.text.json_source import JsonTokenizer, parse_json, read_json
from homeserve.text.spelling import Spelling
from homeserve.text.vocabulary import (
    WHOLE,
    NamedTokens,
    TokenType,
    Vocabulary,
    read_named_tokens,
    read_vocabulary,
    shortcoming,
)

# Read by the library at each batch: one text needs no pool of threads.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

_log = logging.getLogger("homeserve.text")
_SURROGATE = re.compile("[\ud800-\udfff]")
_SLOW_MODELS = ("llama", "gemma4")
"""Vocabularies that take seconds to build when they are large, and are therefore cached."""


class HasTokenizer(Protocol):
    """The part of a Checkpoint that is used here."""

    @property
    def path(self) -> str: ...
    @property
    def tokenizer(self) -> TokenizerSource: ...


class Tokenizer:
    """See the module's head. Ids run from 0 to `vocab_size` - 1; `bos_id`, `eos_id` are None where there is none.

    `literal` makes the library that `encode` uses without `parse_special`; where it gives none, `library` without its
    control tokens serves. `end_ids` end an answer. `add_bos`: `encode` begins with BOS unless the text does.
    `special_ids`: control tokens, which are no part of an answer's text.
    """

    def __init__(
        self,
        library: Library,
        tokens: tuple[str, ...],
        *,
        special: frozenset[int],
        always: frozenset[int],
        byte_alphabet: bool,
        bos_id: int | None,
        eos_id: int | None,
        named_end_ids: Iterable[int],
        add_bos: bool,
        add_eos: bool,
        space_prefix: bool = False,
        literal: Callable[[], Library | None] = lambda: None,
    ) -> None:
        self._obeying = library
        self._literal: Library | None = None
        self._make_literal = literal
        self._lock = threading.Lock()
        self._tokens = tokens
        self._spelling = Spelling(tokens, special | always, byte_alphabet)
        self._space_prefix = space_prefix
        self.vocab_size = len(tokens)
        self.special_ids = special
        self.bos_id = bos_id
        self.eos_id = eos_id
        self.add_bos = add_bos and bos_id is not None
        self.add_eos = add_eos and eos_id is not None
        marked = ((index, tokens[index]) for index in special | always if index < len(tokens))
        self.end_ids = end_ids(named_end_ids, marked)

    @classmethod
    def from_checkpoint(cls, checkpoint: HasTokenizer, *, cache_dir: Path | None = None) -> Tokenizer:
        """Build from a GGUF's metadata or a folder's tokenizer.json. Takes 0.1 s and more: call it off the loop.

        A GGUF may carry a whole tokenizer.json besides. Its own keys are what is taken all the same where they say all
        that is needed; the carried one serves where they name a kind or a pre-tokenizer that is not known, or none.

        What is slow to build is kept below `cache_dir`; without one it is built each time.

        Raises InvalidModelFile: no tokenizer, an unknown kind or pre-tokenizer (named), or damaged data.
        """
        source = checkpoint.tokenizer
        if source.json_path is not None:
            return _from_json(source.json_path, source)
        if WHOLE in source.metadata and (why := shortcoming(checkpoint.path, source.metadata)):
            _log.warning("%s: %s; the tokenizer.json that it carries is used", checkpoint.path, why)
            return _from_carried(checkpoint.path, source.metadata)
        if "tokenizer.ggml.model" not in source.metadata:
            fix = "add the model's tokenizer.json, or use a GGUF of it"
            raise InvalidModelFile(checkpoint.path, "tokenizer", "there is none in this model", fix=fix)
        return _from_vocabulary(read_vocabulary(checkpoint.path, source.metadata), source.digest, cache_dir)

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of `text`. Surrogates that stand alone are read as U+FFFD.

        `add_special` puts BOS and EOS where the model wants them (never a second BOS). Without `parse_special`, control
        tokens in the text are taken as the characters that they are written with.
        """
        ids = _encoded(self._obeying if parse_special else self._literal_library(), text)
        if add_special:
            if self.add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
                ids.insert(0, self.bos_id)
            if self.add_eos and self.eos_id is not None:
                ids.append(self.eos_id)
        return ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        """Text of `ids`, taken as a whole text; broken UTF-8 becomes U+FFFD. Raises InvalidField('tokens')."""
        parts = []
        for token in ids:
            if not 0 <= token < self.vocab_size:
                raise InvalidField("tokens", f"{token} is no token id (0 to {self.vocab_size - 1})")
            if not (skip_special and token in self.special_ids):
                parts.append(self._spelling[token])
        text = b"".join(parts).decode("utf-8", "replace")
        # Encoding puts a space before the text; taking it off here makes the way there and back come out even.
        return text[1:] if self._space_prefix and text.startswith(" ") else text

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for: perhaps a part of a code point. Empty past the vocabulary's end."""
        return self._spelling[token]

    def token_text(self, token: int) -> str:
        """`token_bytes` as text, U+FFFD for parts of code points."""
        return self._spelling[token].decode("utf-8", "replace")

    def token_name(self, token: int) -> str:
        """The token as the vocabulary spells it; '' for an id that it lacks."""
        return self._tokens[token] if 0 <= token < self.vocab_size else ""

    def literal_encoder(self) -> Callable[[str], list[int]]:
        """`encode` without special tokens of either sort, for whoever needs nothing else of this tokenizer and lets it
        go: what it returns keeps the library alone."""
        library = self._literal_library()
        return lambda text: _encoded(library, text)

    def _literal_library(self) -> Library:
        """A tokenizer of the same parts that does not know the control tokens: the library cannot choose per call."""
        with self._lock:
            if self._literal is None:
                self._literal = self._make_literal() or _without_control_tokens(self._obeying)
            return self._literal


def _encoded(library: Library, text: str) -> list[int]:
    if not text.isascii():
        text = _SURROGATE.sub("\ufffd", text)
    # As a batch of one: the library lets other threads run during a batch, not during a single text.
    ids: list[int] = library.encode_batch_fast([text], add_special_tokens=False)[0].ids
    return ids


def _without_control_tokens(whole: Library) -> Library:
    literal = Library(whole.model)
    if whole.normalizer is not None:
        literal.normalizer = whole.normalizer
    if whole.pre_tokenizer is not None:
        literal.pre_tokenizer = whole.pre_tokenizer
    added = whole.get_added_tokens_decoder().values()
    literal.add_tokens([token for token in added if not token.special])
    return literal


def _from_vocabulary(vocabulary: Vocabulary, digest: str, cache_dir: Path | None) -> Tokenizer:
    return Tokenizer(
        _cached(vocabulary, digest, cache_dir),
        vocabulary.tokens,
        special=_of_type(vocabulary, TokenType.CONTROL, TokenType.UNKNOWN),
        always=_of_type(vocabulary, TokenType.USER_DEFINED),
        byte_alphabet=vocabulary.byte_alphabet,
        bos_id=vocabulary.bos_id,
        eos_id=vocabulary.eos_id,
        named_end_ids=vocabulary.extra_end_ids,
        add_bos=vocabulary.add_bos,
        add_eos=vocabulary.add_eos,
        space_prefix=vocabulary.add_space_prefix,
        literal=lambda: assemble_literal(vocabulary),
    )


def _cached(vocabulary: Vocabulary, digest: str, cache_dir: Path | None) -> Library:
    if cache_dir is None or vocabulary.model not in _SLOW_MODELS:
        return assemble(vocabulary)
    folder = cache_dir / "tokenizers"
    library = token_cache.load(folder, digest)
    if library is None:
        library = assemble(vocabulary)
        token_cache.keep(folder, digest, library)
    return library


def _of_type(vocabulary: Vocabulary, *kinds: TokenType) -> frozenset[int]:
    return frozenset(index for index, kind in enumerate(vocabulary.types) if kind in kinds)


def _from_json(path: str, source: TokenizerSource) -> Tokenizer:
    read = read_json(path)
    lookup = {text: index for index, text in enumerate(read.tokens)}
    metadata = source.metadata
    bos = _named_token(lookup, metadata, "bos", len(read.tokens))
    eos = _named_token(lookup, metadata, "eos", len(read.tokens))
    told = metadata.get("tokenizer.homeserve.end_token_ids", ())
    ends = {index for index in told if isinstance(index, int)} if isinstance(told, tuple) else set()
    flags = (metadata.get(f"tokenizer.ggml.add_{which}_token") for which in ("bos", "eos"))
    add_bos, add_eos = (None if flag is None else bool(flag) for flag in flags)
    return _whole(read, NamedTokens(bos, eos, frozenset(ends if eos is None else ends | {eos}), add_bos, add_eos))


def _from_carried(path: str, metadata: Mapping[str, object]) -> Tokenizer:
    """From the tokenizer.json that a GGUF carries as a text; which tokens begin and end a text its keys say."""
    text = metadata[WHOLE]
    if not isinstance(text, str):
        raise InvalidModelFile(path, f"key {WHOLE!r}", "is not a text")
    read = parse_json(path, text.encode("utf-8", "surrogatepass"), WHOLE)
    return _whole(read, read_named_tokens(path, metadata, read.tokens))


def _whole(read: JsonTokenizer, named: NamedTokens) -> Tokenizer:
    """A tokenizer.json, and what is said beside it; where nothing is said of begin and end, its own template counts."""
    lookup = {token: index for index, token in enumerate(read.tokens)}
    before = [lookup[token] for token in read.template_before if token in lookup]
    after = [lookup[token] for token in read.template_after if token in lookup]
    return Tokenizer(
        read.library,
        read.tokens,
        special=read.special,
        always=read.always,
        byte_alphabet=read.byte_alphabet,
        bos_id=named.bos_id if named.bos_id is not None or not before else before[0],
        eos_id=named.eos_id,
        named_end_ids=named.end_ids,
        add_bos=bool(before) if named.add_bos is None else named.add_bos,
        add_eos=named.eos_id in after if named.add_eos is None else named.add_eos,
    )


def _named_token(lookup: dict[str, int], metadata: Mapping[str, object], which: str, count: int) -> int | None:
    """The id of `bos` or `eos`: by its text in tokenizer_config.json, else by the id in the model's config."""
    text = metadata.get(f"tokenizer.homeserve.{which}_text")
    if isinstance(text, str) and text in lookup:
        return lookup[text]
    index = metadata.get(f"tokenizer.ggml.{which}_token_id")
    return index if isinstance(index, int) and 0 <= index < count else None
