"""Reading a tokenizer.json, a folder's or one that a GGUF carries as a text: the library builds the tokenizer, this
file learns what the library does not tell.

That is: how tokens spell bytes (from the decoder), and whether BOS or EOS are put around a text (from the
post-processor's template). Both are asked of the JSON itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
from tokenizers import Tokenizer as Library

from homeserve.errors import InvalidModelFile

FILE_BYTES_MAX = 64 << 20
TOKENS_MAX = 1 << 24
_FIX = "fetch the folder again, or use a GGUF of the model"


class _AddedToken(msgspec.Struct):
    id: int
    content: str
    special: bool = False


class _Root(msgspec.Struct):
    """The parts of tokenizer.json that are read here; the large rest is skipped, not built."""

    added_tokens: list[_AddedToken] = []
    post_processor: dict[str, Any] | None = None
    decoder: dict[str, Any] | None = None


@dataclass(frozen=True)
class JsonTokenizer:
    """`tokens[i]` is the text of id i ('' where there is none). `special`, `always`: ids matched literally in text."""

    library: Library
    tokens: tuple[str, ...]
    special: frozenset[int]
    always: frozenset[int]
    byte_alphabet: bool
    template_before: tuple[str, ...]
    template_after: tuple[str, ...]


def read_json(path: str) -> JsonTokenizer:
    """Raises InvalidModelFile where the file is missing, damaged or of a kind whose tokens cannot be spelled here."""
    try:
        with open(path, "rb") as file:
            raw = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise InvalidModelFile(path, "file", f"cannot be read: {error.strerror}", fix=_FIX) from error
    return parse_json(path, raw)


def parse_json(path: str, raw: bytes, key: str = "") -> JsonTokenizer:
    """The same of a text that lies under `key` of the file at `path`; without a key it is the file."""
    where = f"key {key!r}" if key else "file"
    if len(raw) > FILE_BYTES_MAX:
        raise InvalidModelFile(path, where, f"is larger than {FILE_BYTES_MAX >> 20} MiB")
    try:
        root = msgspec.json.decode(raw, type=_Root)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise InvalidModelFile(path, where, f"is no tokenizer.json: {error}", fix=_FIX) from error
    try:
        library = Library.from_buffer(raw)
    except Exception as error:  # the library raises bare `Exception`, so nothing narrower can be named
        raise InvalidModelFile(path, where, f"cannot be made into a tokenizer: {error}", fix=_FIX) from error
    library.no_truncation()
    library.no_padding()
    before, after = _template(root.post_processor)
    return JsonTokenizer(
        library=library,
        tokens=_tokens(path, library, key and where),
        special=frozenset(token.id for token in root.added_tokens if token.special),
        always=frozenset(token.id for token in root.added_tokens if not token.special),
        byte_alphabet=_byte_alphabet(path, root.decoder, key and where),
        template_before=before,
        template_after=after,
    )


def _tokens(path: str, library: Library, where: str) -> tuple[str, ...]:
    ids = library.get_vocab(with_added_tokens=True)
    size = max(ids.values(), default=-1) + 1
    if not 0 < size <= TOKENS_MAX:
        what = f"has {size} tokens (1 to {TOKENS_MAX} are allowed)"
        raise InvalidModelFile(path, where or "vocabulary", what, fix=_FIX)
    tokens = [""] * size
    for text, index in ids.items():
        tokens[index] = text
    return tuple(tokens)


def _steps(part: dict[str, Any] | None, inner: str) -> list[dict[str, Any]]:
    """A component as a flat list: itself, or the members of a Sequence."""
    if part is None:
        return []
    if part.get("type") != "Sequence":
        return [part]
    members = part.get(inner)
    return [member for member in members if isinstance(member, dict)] if isinstance(members, list) else []


def _byte_alphabet(path: str, decoder: dict[str, Any] | None, where: str) -> bool:
    kinds = [str(step.get("type")) for step in _steps(decoder, "decoders")]
    if "ByteLevel" in kinds:
        return True
    if {"ByteFallback", "Metaspace"} & set(kinds):
        return False
    what = f"decodes by {', '.join(kinds) or 'nothing'}; known: ByteLevel, ByteFallback, Metaspace"
    raise InvalidModelFile(path, where or "decoder", what, fix="use a GGUF of the model")


def _template(processor: dict[str, Any] | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Special tokens that the post-processor puts before and after a single text."""
    before: list[str] = []
    after: list[str] = []
    for step in _steps(processor, "processors"):
        if step.get("type") != "TemplateProcessing" or not isinstance(step.get("single"), list):
            continue
        target = before
        for piece in step["single"]:
            if not isinstance(piece, dict):
                continue
            if "Sequence" in piece:
                target = after
            elif isinstance(special := piece.get("SpecialToken"), dict) and isinstance(special.get("id"), str):
                target.append(special["id"])
    return tuple(before), tuple(after)
