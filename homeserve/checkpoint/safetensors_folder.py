"""A folder of `config.json`, `*.safetensors` and tokenizer files as a `Checkpoint`, in GGUF's names and keys.

Tensor bytes are the files' own, but where GGUF has another form (`safetensors_forms`). Two things stay as they are in
`transformers` and are told by a key: rows of q and k pair dims i and i + n/2 for rope (`homeserve.rope_interleaved` is
False), and value heads of delta nets lie grouped by key head (`homeserve.delta_tiled` is False).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from backends.base import TensorView
from homeserve.checkpoint import hf_config, hf_names, safetensors_header
from homeserve.checkpoint.hf_names import Piece
from homeserve.checkpoint.hf_rules import BlockedPlace, FamilyRules
from homeserve.checkpoint.safetensors_forms import Stored, blocked, formed, stacked, vector
from homeserve.checkpoint.safetensors_header import SafetensorsFile
from homeserve.checkpoint.view import Checkpoint, TokenizerSource, quant_label
from homeserve.errors import InvalidModelFile, ModelError

JSON_BYTES_MAX = 4 << 20
"""Several times the largest of these files. JSON of empty lists takes some twenty times its length in memory."""
INDEX_BYTES_MAX = 24 << 20
"""Twice the largest index in use. It is read as names and files alone, which do not unfold."""
SHARDS_MAX = 10_000
TEMPLATE_BYTES_MAX = 4 << 20
_INDEX = "model.safetensors.index.json"
_Kind = TypeVar("_Kind")


class _Index(msgspec.Struct):
    """The part of an index that is read here: tensor -> file."""

    weight_map: dict[str, str] = {}


_ROPE_FREQS = "rope_freqs.weight"
_END_IDS = "tokenizer.homeserve.end_token_ids"


def open_folder(path: str, families: Mapping[str, FamilyRules]) -> Checkpoint:
    """`families`: the rules of each `model_type`. Raises InvalidModelFile, UnknownArchitecture."""
    config_path = os.path.join(path, "config.json")
    whole = _json(config_path, required=True)
    config = hf_config.text_config(config_path, whole)
    rules = hf_config.rules_for(config_path, config, families)
    layers = hf_config.trunk_layers(config_path, config, rules)
    hf_config.metadata_from(config_path, config, rules)  # A wrong setting is told before any tensor is looked at.
    files, tensors, drafts = _tensors(path, config, rules, layers, wrapped=config is not whole)
    try:
        metadata = hf_config.metadata_from(config_path, config, rules, drafts)
        factors = hf_config.rope_factors(config_path, config, rules)
        if factors is not None:
            tensors[_ROPE_FREQS] = vector(_ROPE_FREQS, factors)
        return _checkpoint(path, config, rules, metadata, files, tensors)
    except ModelError:
        _close(files)
        raise


def _checkpoint(
    path: str,
    config: Mapping[str, object],
    rules: FamilyRules,
    metadata: dict[str, object],
    files: list[SafetensorsFile],
    tensors: dict[str, TensorView],
) -> Checkpoint:
    metadata["general.name"] = os.path.basename(os.path.abspath(path))
    tokenizer_config = _json(os.path.join(path, "tokenizer_config.json"))
    generation = _json(os.path.join(path, "generation_config.json"))
    vocabulary = _tokenizer_keys(config, generation, tokenizer_config)
    json_path = os.path.join(path, "tokenizer.json")
    has_json = os.path.isfile(json_path)
    return Checkpoint(
        path=path,
        arch=rules.arch,
        metadata=metadata | vocabulary,
        tensors=tensors,
        tokenizer=TokenizerSource(vocabulary, json_path if has_json else None, _digest(json_path) if has_json else ""),
        chat_templates=_templates(path, tokenizer_config),
        file_bytes=sum(file.file.size for file in files),
        quant_label=quant_label(None, tensors),
        files=tuple(file.file for file in files),
    )


def _tensors(
    path: str, config: Mapping[str, object], rules: FamilyRules, layers: int, *, wrapped: bool
) -> tuple[list[SafetensorsFile], dict[str, TensorView], int]:
    """The open files, the tensors in GGUF's form, and how many drafting blocks they hold."""
    files: list[SafetensorsFile] = []
    parts = _Parts(rules)
    names: list[str] = []
    try:
        for shard, wanted in _shards(path).items():
            file = _open_shard(os.path.join(path, shard), wanted)
            files.append(file)
            for name in wanted if wanted is not None else file.tensors:
                pieces = hf_names.pieces_of(name, rules, layers, wrapped=wrapped)
                parts.put(file, name, pieces)
                names.append(name)
        tensors = parts.made()
        if _ties_head(config, rules, tensors):
            tensors.pop("output.weight", None)
        elif "output.weight" not in tensors:
            raise InvalidModelFile(path, "tensor 'lm_head.weight'", "is missing", fix="fetch the folder again")
    except InvalidModelFile:
        _close(files)
        raise
    return files, tensors, hf_names.draft_blocks(names)


def _ties_head(config: Mapping[str, object], rules: FamilyRules, tensors: Mapping[str, TensorView]) -> bool:
    """Whether the embedding is the head as well. A config that does not say so means what its family means by it, or
    what the tensors show."""
    tied = config.get("tie_word_embeddings")
    return tied is True or (tied is None and rules.tied and "output.weight" not in tensors)


def _close(files: list[SafetensorsFile]) -> None:
    for file in files:
        file.file.close()


def _open_shard(path: str, wanted: set[str] | None) -> SafetensorsFile:
    if not os.path.exists(path):
        raise InvalidModelFile(path, "file", "is missing", fix="fetch the whole folder")
    file = safetensors_header.read(path)
    missing = sorted(wanted - file.tensors.keys()) if wanted is not None else []
    if missing:
        file.file.close()
        raise InvalidModelFile(path, f"tensor {missing[0]!r}", "is missing", fix="fetch all files again")
    return file


@dataclass
class _Parts:
    """What was found of each tensor, whole or in pieces; `made` puts them together.

    Everything is kept under GGUF's name with the file and the name that it came from, for the complaint.
    """

    rules: FamilyRules
    whole: dict[str, TensorView] = field(default_factory=dict)
    experts: dict[str, dict[int, TensorView]] = field(default_factory=dict)
    blocks: dict[tuple[str, bool], tuple[Stored, BlockedPlace]] = field(default_factory=dict)
    source: dict[str, tuple[str, str]] = field(default_factory=dict)

    def put(self, file: SafetensorsFile, name: str, pieces: tuple[Piece, ...] | None) -> None:
        path = file.file.path
        if pieces is None:
            what = f"has no place in architecture {self.rules.arch}"
            raise InvalidModelFile(path, f"tensor {name!r}", what, fix="use a GGUF of the model")
        stored = Stored(file.tensors[name], file.shapes[name])
        for piece in pieces:
            if self._has(piece):
                raise InvalidModelFile(path, f"tensor {name!r}", "is in an earlier file too")
            self.source[piece.target] = path, name
            with _blaming(path, name):
                self._put(piece, stored)

    def made(self) -> dict[str, TensorView]:
        tensors = dict(self.whole)
        for target, found in self.experts.items():
            path, name = self.source[target]
            with _blaming(path, name):
                if target in tensors:
                    raise ValueError("is there as a stack as well")
                if len(found) != max(found) + 1:
                    raise ValueError(f"is one of {max(found) + 1} experts of which {len(found)} are there")
                tensors[target] = stacked(target, [found[expert] for expert in range(len(found))])
        for (target, scales), (stored, place) in self.blocks.items():
            path, name = self.source[target]
            with _blaming(path, name):
                other = self.blocks.get((target, not scales))
                if target in self.whole:
                    raise ValueError("is there in another form as well")
                if other is None:
                    raise ValueError(f"has no {'blocks' if scales else 'scales'}")
                if not scales:
                    tensors[target] = blocked(target, stored, other[0], place)
        return tensors

    def _has(self, piece: Piece) -> bool:
        if piece.blocked is not None:
            return (piece.target, piece.scales) in self.blocks
        if piece.expert is not None:
            return piece.expert in self.experts.get(piece.target, {})
        return piece.target in self.whole

    def _put(self, piece: Piece, stored: Stored) -> None:
        if piece.blocked is not None:
            self.blocks[piece.target, piece.scales] = stored, piece.blocked
        elif piece.expert is not None:
            self.experts.setdefault(piece.target, {})[piece.expert] = stored.view
        else:
            self.whole[piece.target] = formed(piece.target, stored, piece.form)


@contextmanager
def _blaming(path: str, name: str) -> Iterator[None]:
    """A ValueError about a tensor's form is about the file that holds it."""
    try:
        yield
    except ValueError as error:
        raise InvalidModelFile(path, f"tensor {name!r}", str(error), fix="use a GGUF of the model") from error


def _shards(path: str) -> dict[str, set[str] | None]:
    """File name -> the tensors that the index expects there (None: all that it holds)."""
    index_path = os.path.join(path, _INDEX)
    if not os.path.exists(index_path):
        names = sorted(name for name in os.listdir(path) if name.endswith(".safetensors"))
        if len(names) != 1:
            what = f"holds {len(names)} safetensors files and no {_INDEX}"
            raise InvalidModelFile(path, "folder", what, fix="fetch the index as well")
        return {names[0]: None}
    weights = _decoded(index_path, _read(index_path, INDEX_BYTES_MAX), _Index).weight_map
    if not weights:
        raise InvalidModelFile(index_path, "weight_map", "is missing or empty", fix="fetch the index again")
    shards: dict[str, set[str] | None] = {}
    for name, shard in weights.items():
        if not shard.endswith(".safetensors") or os.path.basename(shard) != shard:
            what = f"is {shard[:80]!r}, not a file of the folder"
            raise InvalidModelFile(index_path, f"weight_map {name[:80]!r}", what)
        wanted = shards.setdefault(shard, set())
        assert wanted is not None, "only sets are put in here"
        wanted.add(name)
    if len(shards) > SHARDS_MAX:
        raise InvalidModelFile(index_path, "weight_map", f"names {len(shards)} files ({SHARDS_MAX} are the limit)")
    return shards


def _json(path: str, *, required: bool = False) -> dict[str, object]:
    """A JSON object from a file; empty where the file is absent and not required."""
    if not required and not os.path.lexists(path):
        return {}
    return _decoded(path, _read(path, JSON_BYTES_MAX), dict[str, object])


def _read(path: str, most: int) -> bytes:
    try:
        with open(path, "rb") as file:
            raw = file.read(most + 1)
    except FileNotFoundError as error:
        raise InvalidModelFile(path, "file", "is missing", fix="fetch the whole folder") from error
    except OSError as error:
        raise InvalidModelFile(path, "file", f"cannot be read: {error.strerror}") from error
    if len(raw) > most:
        raise InvalidModelFile(path, "file", f"is larger than {most >> 20} MiB")
    return raw


def _decoded(path: str, raw: bytes, kind: type[_Kind]) -> _Kind:
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidModelFile(path, "file", f"is no such JSON: {error}", fix="fetch it again") from error


def _tokenizer_keys(
    config: Mapping[str, object], generation: Mapping[str, object], tokenizer: Mapping[str, object]
) -> dict[str, object]:
    """BOS, EOS and end tokens: by text from tokenizer_config.json, by id from the configs."""
    keys: dict[str, object] = {}
    for which in ("bos", "eos"):
        text = tokenizer.get(f"{which}_token")
        if isinstance(text, dict):
            text = text.get("content")
        if isinstance(text, str):
            keys[f"tokenizer.homeserve.{which}_text"] = text
        number = _ids(config.get(f"{which}_token_id"))
        if number:
            keys[f"tokenizer.ggml.{which}_token_id"] = number[0]
        add = tokenizer.get(f"add_{which}_token")
        if isinstance(add, bool):
            keys[f"tokenizer.ggml.add_{which}_token"] = add
    ends = _ids(generation.get("eos_token_id")) or _ids(config.get("eos_token_id"))
    if ends:
        keys[_END_IDS] = ends
    return keys


def _ids(value: object) -> tuple[int, ...]:
    """One id or a list of them."""
    values = value if isinstance(value, list) else [value]
    return tuple(each for each in values if isinstance(each, int) and not isinstance(each, bool) and each >= 0)


def _templates(path: str, tokenizer: Mapping[str, object]) -> dict[str, str]:
    """Chat templates by name: of tokenizer_config.json, over which the folder's *.jinja files win."""
    stored = tokenizer.get("chat_template")
    templates: dict[str, str] = {"default": stored} if isinstance(stored, str) else {}
    for each in stored if isinstance(stored, list) else ():
        if isinstance(each, dict):
            name, template = each.get("name"), each.get("template")
            if isinstance(name, str) and isinstance(template, str):
                templates[name] = template
    more = os.path.join(path, "additional_chat_templates")
    names = sorted(os.listdir(more))[:100] if os.path.isdir(more) else []
    files = {name.removesuffix(".jinja"): os.path.join(more, name) for name in names if name.endswith(".jinja")}
    files["default"] = os.path.join(path, "chat_template.jinja")
    for name, template_path in files.items():
        text = _text(template_path)
        if text is not None:
            templates[name] = text
    return templates


def _text(path: str) -> str | None:
    try:
        with open(path, "rb") as file:
            raw = file.read(TEMPLATE_BYTES_MAX + 1)
        if len(raw) > TEMPLATE_BYTES_MAX:
            raise InvalidModelFile(path, "file", f"is larger than {TEMPLATE_BYTES_MAX >> 20} MiB")
        return raw.decode("utf-8")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InvalidModelFile(path, "file", f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidModelFile(path, "file", f"is no UTF-8 text: {error.reason}") from error


def _digest(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise InvalidModelFile(path, "file", f"cannot be read: {error.strerror}") from error
