"""The vocabulary of a GGUF: its `tokenizer.*` keys, checked and in the form that the rest of `text` works with."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import cast

from homeserve.errors import InvalidModelFile
from homeserve.text.charsmap import CHARSMAP_BYTES_MAX, charsmap_flaw
from homeserve.text.pretokenizers import PRE_TOKENIZERS, PreTokenizer

_log = logging.getLogger("homeserve.text")

MODELS = ("gpt2", "llama", "gemma4", "t5", "bert")
NOT_BUILT = {
    "rwkv": "a greedy trie over bytes",
    "plamo2": "a lattice over its own table",
    "whitespace": "words alone",
    "hybriddna": "pieces of genomes",
    "none": "no vocabulary at all",
    "no_vocab": "no vocabulary at all",
}
"""Tokenizer models that files may name and that cannot be built here, in a few words."""

WHOLE = "tokenizer.huggingface.json"
"""The key under which some files hold a whole tokenizer.json besides."""
TOKENS_MAX = 1 << 22
"""Eight times the largest vocabularies that are in use, and what ids of 32 bits and a row of logits can bear."""
MERGES_MAX = 1 << 22


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class _Defaults:
    """What is meant where a file of a tokenizer model does not say (the reference program's own defaults)."""

    bos: int | None = None
    eos: int | None = None
    unk: int | None = None
    add_bos: bool = False
    add_eos: bool = False
    space_prefix: bool = False


_DEFAULTS = {
    "gpt2": _Defaults(),
    "gemma4": _Defaults(add_bos=True),
    "llama": _Defaults(bos=1, eos=2, unk=0, add_bos=True, space_prefix=True),
    "t5": _Defaults(eos=1, unk=2, add_eos=True, space_prefix=True),
    "bert": _Defaults(bos=101, eos=102, unk=100, add_bos=True, add_eos=True, space_prefix=True),
}


@dataclass(frozen=True)
class TextForms:
    """How a text is brought into the form that a vocabulary was made on (`t5` and `bert` only).

    `charsmap`: replacements of characters, in SentencePiece's format; empty where there are none.
    """

    charsmap: bytes = b""
    merge_spaces: bool = False
    lowercase: bool = False
    strip_accents: bool = False


@dataclass(frozen=True)
class Vocabulary:
    """A checked vocabulary. `tokens[i]` is the text of id i; `types` and (`llama`, `t5`) `scores` run parallel to it.

    `byte_alphabet`: normal tokens spell bytes in GPT-2's alphabet; otherwise they are text with ▁ for space, and byte
    tokens `<0xXX>` stand in for what has no token.
    """

    path: str
    model: str
    tokens: tuple[str, ...]
    types: tuple[int, ...]
    scores: tuple[float, ...]
    merges: tuple[str, ...]
    pre: PreTokenizer
    bos_id: int | None
    eos_id: int | None
    unk_id: int | None
    extra_end_ids: frozenset[int]
    add_bos: bool
    add_eos: bool
    add_space_prefix: bool
    forms: TextForms = TextForms()

    @property
    def byte_alphabet(self) -> bool:
        return self.model == "gpt2" and self.pre.byte_alphabet


def read_vocabulary(path: str, metadata: Mapping[str, object]) -> Vocabulary:
    """Raises InvalidModelFile that names the key where a value is missing, of a wrong kind or out of range."""
    keys = _Keys(path, metadata)
    model = _model(keys)
    tokens = keys.strings("tokenizer.ggml.tokens", TOKENS_MAX)
    if not tokens:
        raise keys.error("tokenizer.ggml.tokens", "is missing or empty")
    types = keys.integers("tokenizer.ggml.token_type", len(tokens)) or (TokenType.NORMAL,) * len(tokens)
    scores = keys.numbers("tokenizer.ggml.scores", len(tokens)) or (0.0,) * len(tokens)
    if not all(map(math.isfinite, scores)):
        raise keys.error("tokenizer.ggml.scores", "has an entry that is no finite number")
    merges = keys.strings("tokenizer.ggml.merges", MERGES_MAX)
    if model in ("gpt2", "gemma4") and not merges and len(tokens) > 512:
        raise keys.error("tokenizer.ggml.merges", "is missing")
    pre = _pre_tokenizer(keys, model)
    usual = _DEFAULTS[model]
    bert = model == "bert"
    bos = keys.token("tokenizer.ggml.bos_token_id", len(tokens), usual.bos)
    eos = keys.token("tokenizer.ggml.eos_token_id", len(tokens), usual.eos)
    return Vocabulary(
        path=path,
        model=model,
        tokens=tokens,
        types=types,
        scores=scores,
        merges=merges,
        pre=pre,
        # A WordPiece model puts its class mark before a text and its separator after it.
        bos_id=keys.token("tokenizer.ggml.cls_token_id", len(tokens), bos) if bert else bos,
        eos_id=keys.token("tokenizer.ggml.seperator_token_id", len(tokens), eos) if bert else eos,
        unk_id=keys.token("tokenizer.ggml.unknown_token_id", len(tokens), usual.unk),
        extra_end_ids=keys.end_ids(len(tokens)),
        # Gemma 4 files say false, because the template of the family writes <bos>; bare text needs it all the same.
        add_bos=model == "gemma4" or keys.flag("tokenizer.ggml.add_bos_token", usual.add_bos or pre.add_bos),
        add_eos=keys.flag(f"tokenizer.ggml.add_{'sep' if bert else 'eos'}_token", usual.add_eos),
        add_space_prefix=usual.space_prefix and keys.flag("tokenizer.ggml.add_space_prefix", True),
        forms=_forms(keys, model),
    )


def shortcoming(path: str, metadata: Mapping[str, object]) -> str:
    """Why no tokenizer can be built that is surely the model's own, in a few words: its kind, or the way in which it
    cuts text, is not told or not known. Empty where one can. Raises InvalidModelFile for keys of a wrong kind."""
    keys = _Keys(path, metadata)
    model = keys.text("tokenizer.ggml.model", "")
    if model not in MODELS:
        return f"the tokenizer model {model!r} cannot be built" if model else "no tokenizer model is named"
    pre = keys.text("tokenizer.ggml.pre", "") if model == "gpt2" else None
    if pre is None or pre in PRE_TOKENIZERS:
        return ""
    return f"the pre-tokenizer {pre!r} is not known" if pre else "no pre-tokenizer is named"


@dataclass(frozen=True)
class NamedTokens:
    """What a GGUF's keys say of a tokenizer that they do not hold themselves; `add_*` None: nothing."""

    bos_id: int | None
    eos_id: int | None
    end_ids: frozenset[int]
    add_bos: bool | None
    add_eos: bool | None


def read_named_tokens(path: str, metadata: Mapping[str, object], tokens: Sequence[str]) -> NamedTokens:
    """For a tokenizer of `tokens`, which must be those of the file's own list where it has one: ids index the rows of
    its embeddings. Raises InvalidModelFile naming the key."""
    keys = _Keys(path, metadata)
    listed = keys.strings("tokenizer.ggml.tokens", TOKENS_MAX)
    if listed:
        _check_listed(keys, listed, tokens)
    flags = (
        keys.flag(name, False) if name in metadata else None
        for name in ("tokenizer.ggml.add_bos_token", "tokenizer.ggml.add_eos_token")
    )
    return NamedTokens(
        keys.token("tokenizer.ggml.bos_token_id", len(tokens), None),
        keys.token("tokenizer.ggml.eos_token_id", len(tokens), None),
        keys.end_ids(len(tokens)),
        *flags,
    )


def _check_listed(keys: _Keys, listed: tuple[str, ...], tokens: Sequence[str]) -> None:
    if len(tokens) > len(listed):
        raise keys.error(WHOLE, f"has {len(tokens)} tokens, tokenizer.ggml.tokens has {len(listed)}")
    for index, token in enumerate(tokens):
        if token and token != listed[index]:
            what = f"token {index} is {token[:40]!r}, in tokenizer.ggml.tokens it is {listed[index][:40]!r}"
            raise keys.error(WHOLE, what)


def _model(keys: _Keys) -> str:
    model = keys.text("tokenizer.ggml.model", "")
    if model in NOT_BUILT:
        what = f"the tokenizer model {model!r} ({NOT_BUILT[model]}) cannot be built"
        raise keys.error("tokenizer.ggml.model", f"{what}; supported: {', '.join(MODELS)}")
    if model not in MODELS:
        known = f"supported: {', '.join(MODELS)}"
        raise keys.error("tokenizer.ggml.model", f"the tokenizer model {model!r} is not supported; {known}")
    return model


def _forms(keys: _Keys, model: str) -> TextForms:
    if model == "bert":
        lowercase = keys.flag("tokenizer.ggml.normalizer.lowercase", True)
        accents = keys.flag("tokenizer.ggml.normalizer.strip_accents", lowercase)
        return TextForms(lowercase=lowercase, strip_accents=accents)
    if model != "t5":
        return TextForms()
    charsmap = keys.raw_bytes("tokenizer.ggml.precompiled_charsmap", CHARSMAP_BYTES_MAX)
    flaw = charsmap_flaw(charsmap) if charsmap else None
    if flaw:
        raise keys.error("tokenizer.ggml.precompiled_charsmap", flaw)
    return TextForms(charsmap, merge_spaces=keys.flag("tokenizer.ggml.remove_extra_whitespaces", False))


def _pre_tokenizer(keys: _Keys, model: str) -> PreTokenizer:
    if model in ("llama", "t5", "bert"):
        return PreTokenizer(())
    if model == "gemma4":
        return PRE_TOKENIZERS["gemma4"]
    name = keys.text("tokenizer.ggml.pre", "")
    if not name:
        _log.warning(
            "%s has no tokenizer.ggml.pre: the default pre-tokenizer is used, which may lower the quality", keys.path
        )
        return PRE_TOKENIZERS["default"]
    known = PRE_TOKENIZERS.get(name)
    if known is None:
        what = f"the pre-tokenizer {name!r} is not known; known: {', '.join(sorted(PRE_TOKENIZERS))}"
        raise keys.error("tokenizer.ggml.pre", what)
    return known


class _Keys:
    """Typed access to metadata; every complaint names the key.

    A list is a lazy `Array` of the file, and cheap until it is decoded: its length is judged before that.
    """

    def __init__(self, path: str, metadata: Mapping[str, object]) -> None:
        self.path = path
        self._metadata = metadata

    def error(self, key: str, what: str) -> InvalidModelFile:
        return InvalidModelFile(self.path, f"key {key!r}", what, fix="use a GGUF with a complete, supported tokenizer")

    def text(self, key: str, default: str) -> str:
        value = self._metadata.get(key, default)
        if not isinstance(value, str):
            raise self.error(key, f"is {value!r}, not a text")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._metadata.get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, f"is {value!r}, not true or false")
        return value

    def token(self, key: str, count: int, default: int | None) -> int | None:
        """A token id; None where the file has none. llama.cpp writes -1 (as u32) for "none"."""
        value = self._metadata.get(key, default)
        if value is None or value in (-1, 0xFFFFFFFF):
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < count:
            if key not in self._metadata:
                return None
            raise self.error(key, f"is {value!r}, not the id of one of {count} tokens")
        return value

    def end_ids(self, count: int) -> frozenset[int]:
        names = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
        ids = (self.token(f"tokenizer.ggml.{name}_token_id", count, None) for name in names)
        return frozenset(token for token in ids if token is not None)

    def strings(self, key: str, most: int) -> tuple[str, ...]:
        lazy = self._sequence(key)
        if len(lazy) > most:
            raise self.error(key, f"has {len(lazy)} entries; {most} are the limit")
        values = tuple(lazy)
        if set(map(type, values)) - {str}:
            raise self.error(key, "is not a list of texts")
        return cast(tuple[str, ...], values)

    def raw_bytes(self, key: str, most: int) -> bytes:
        """A list of bytes, stored as unsigned or signed numbers of 8 bits; empty where there is none."""
        lazy = self._sequence(key)
        if len(lazy) > most:
            raise self.error(key, f"has {len(lazy)} entries; {most} are the limit")
        values = tuple(lazy)
        if not all(type(value) is int and -128 <= value < 256 for value in values):
            raise self.error(key, "is not a list of bytes")
        return bytes(value & 0xFF for value in cast(tuple[int, ...], values))

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        """One number per token, or none at all."""
        return cast(tuple[float, ...], self._of_types(key, count, {int, float}, "numbers"))

    def integers(self, key: str, count: int) -> tuple[int, ...]:
        """One whole number per token, or none at all."""
        return cast(tuple[int, ...], self._of_types(key, count, {int}, "whole numbers"))

    def _of_types(self, key: str, count: int, types: set[type], words: str) -> tuple[object, ...]:
        lazy = self._sequence(key)
        if len(lazy) not in (0, count):
            raise self.error(key, f"has {len(lazy)} entries for {count} tokens")
        values = tuple(lazy)
        if set(map(type, values)) - types:
            raise self.error(key, f"is not a list of {words}")
        return values

    def _sequence(self, key: str) -> Sequence[object]:
        value = self._metadata.get(key, ())
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise self.error(key, f"is {value!r}, not a list")
        return value
