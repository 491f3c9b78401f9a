"""A folder of `config.json`, `*.safetensors` and tokenizer files as a `Checkpoint`, in GGUF's names and keys.

Tensor bytes are the files' own. Rows of q and k stand in the order of `transformers` there, which pairs dims i and
i + n/2 for rope: the key `homeserve.rope_interleaved` = False says so.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping

import msgspec

from backends.base import TensorView
from homeserve.checkpoint import hf_config, safetensors_header
from homeserve.checkpoint.hf_config import FamilyRules
from homeserve.checkpoint.safetensors_header import SafetensorsFile
from homeserve.checkpoint.view import Checkpoint, TokenizerSource, quant_label
from homeserve.errors import CheckpointError

JSON_BYTES_MAX = 64 << 20
SHARDS_MAX = 10_000
TEMPLATE_BYTES_MAX = 4 << 20
_INDEX = "model.safetensors.index.json"
_END_IDS = "tokenizer.homeserve.end_token_ids"


def open_folder(path: str) -> Checkpoint:
    """Raises CheckpointError, UnknownArchitecture."""
    config = _json(os.path.join(path, "config.json"), required=True)
    config_path = os.path.join(path, "config.json")
    rules = hf_config.rules_for(config_path, config)
    metadata = hf_config.metadata_from(config_path, config, rules)
    metadata["general.name"] = os.path.basename(os.path.abspath(path))
    tokenizer_config = _json(os.path.join(path, "tokenizer_config.json"))
    generation = _json(os.path.join(path, "generation_config.json"))
    vocabulary = _tokenizer_keys(config, generation, tokenizer_config)
    files, tensors = _tensors(path, config, rules)
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
    path: str, config: Mapping[str, object], rules: FamilyRules
) -> tuple[list[SafetensorsFile], dict[str, TensorView]]:
    files: list[SafetensorsFile] = []
    tensors: dict[str, TensorView] = {}
    try:
        for shard, wanted in _shards(path).items():
            shard_path = os.path.join(path, shard)
            if not os.path.exists(shard_path):
                raise CheckpointError(shard_path, "file", "is missing", fix="fetch the whole folder")
            file = safetensors_header.read(shard_path)
            files.append(file)
            missing = sorted(wanted - file.tensors.keys()) if wanted is not None else []
            if missing:
                where = f"tensor {missing[0]!r}"
                raise CheckpointError(file.file.path, where, "is missing", fix="fetch all files again")
            for name in wanted if wanted is not None else file.tensors:
                _place(file, name, rules, tensors)
        if config.get("tie_word_embeddings", False) is True:
            tensors.pop("output.weight", None)
        elif "output.weight" not in tensors:
            raise CheckpointError(path, "tensor 'lm_head.weight'", "is missing", fix="fetch the folder again")
    except CheckpointError:
        for file in files:
            file.file.close()
        raise
    return files, tensors


def _place(file: SafetensorsFile, name: str, rules: FamilyRules, tensors: dict[str, TensorView]) -> None:
    canonical = hf_config.canonical_name(name, rules)
    if canonical is None:
        what = f"has no place in architecture {rules.arch}"
        raise CheckpointError(file.file.path, f"tensor {name!r}", what, fix="use a GGUF of the model")
    if canonical in tensors:
        raise CheckpointError(file.file.path, f"tensor {name!r}", "is in an earlier file too")
    if canonical:
        view = file.tensors[name]
        tensors[canonical] = TensorView(canonical, view.type, view.rows, view.cols, view.data)


def _shards(path: str) -> dict[str, set[str] | None]:
    """File name -> the tensors that the index expects there (None: all that it holds)."""
    index_path = os.path.join(path, _INDEX)
    if not os.path.exists(index_path):
        names = sorted(name for name in os.listdir(path) if name.endswith(".safetensors"))
        if len(names) != 1:
            what = f"holds {len(names)} safetensors files and no {_INDEX}"
            raise CheckpointError(path, "folder", what, fix="fetch the index as well")
        return {names[0]: None}
    weights = _json(index_path, required=True).get("weight_map")
    if not isinstance(weights, dict) or not weights:
        raise CheckpointError(index_path, "weight_map", "is missing or empty", fix="fetch the index again")
    shards: dict[str, set[str] | None] = {}
    for name, shard in weights.items():
        if not isinstance(shard, str) or not shard.endswith(".safetensors") or os.path.basename(shard) != shard:
            raise CheckpointError(index_path, f"weight_map {name!r}", f"is {shard!r}, not a file of the folder")
        wanted = shards.setdefault(shard, set())
        assert wanted is not None, "only sets are put in here"
        wanted.add(name)
    if len(shards) > SHARDS_MAX:
        raise CheckpointError(index_path, "weight_map", f"names {len(shards)} files ({SHARDS_MAX} are the limit)")
    return shards


def _json(path: str, *, required: bool = False) -> dict[str, object]:
    """A JSON object from a file; empty where the file is absent and not required."""
    try:
        with open(path, "rb") as file:
            raw = file.read(JSON_BYTES_MAX + 1)
        if len(raw) > JSON_BYTES_MAX:
            raise CheckpointError(path, "file", f"is larger than {JSON_BYTES_MAX >> 20} MiB")
        return msgspec.json.decode(raw, type=dict[str, object])
    except FileNotFoundError as error:
        if not required:
            return {}
        raise CheckpointError(path, "file", "is missing", fix="fetch the whole folder") from error
    except OSError as error:
        raise CheckpointError(path, "file", f"cannot be read: {error.strerror}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(path, "file", f"is no JSON object: {error}", fix="fetch it again") from error


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
            raise CheckpointError(path, "file", f"is larger than {TEMPLATE_BYTES_MAX >> 20} MiB")
        return raw.decode("utf-8")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(path, "file", f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise CheckpointError(path, "file", f"is no UTF-8 text: {error.reason}") from error


def _digest(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(path, "file", f"cannot be read: {error.strerror}") from error
