"""`open`: a path to a `Checkpoint`, by what lies there: a GGUF file, the first part of a split one, a folder."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from backends.base import TensorView
from homeserve.checkpoint import gguf
from homeserve.checkpoint.gguf import GgufFile
from homeserve.checkpoint.view import Checkpoint, TokenizerSource, chat_templates, quant_label
from homeserve.errors import InvalidModelFile, ModelNotFound

if TYPE_CHECKING:
    from homeserve.checkpoint.hf_rules import FamilyRules

Families = Callable[[], "Mapping[str, FamilyRules]"]
"""Gives the rules by which a safetensors folder is read, by `model_type`; asked for only where there is a folder."""

PARTS_MAX = 10_000
_PART = re.compile(r"^(?P<prefix>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$", re.DOTALL)
_NO_MODEL: dict[str, str] = {
    "mmproj": "a vision or audio projector",
    "adapter": "a LoRA adapter",
    "imatrix": "an importance matrix",
}


def no_families() -> Mapping[str, FamilyRules]:
    """For who reads GGUF files only: every folder is of an unknown architecture."""
    return {}


def open(path: str, families: Families = no_families) -> Checkpoint:
    """Open what lies at `path`; `families` gives what is known of safetensors folders (`models.registry`). Raises
    ModelNotFound where nothing does, InvalidModelFile where it cannot be used, UnknownArchitecture.

    Everything is validated here; what is returned can be read without further checks of lengths.
    """
    path = os.fspath(path)
    if os.path.isdir(path):
        return _open_folder(path, families)
    if path.endswith(".safetensors"):
        fix = f"give the folder: {os.path.dirname(path) or '.'}"
        raise InvalidModelFile(path, "file", "is one part of a safetensors folder", fix=fix)
    return _open_gguf(path)


def _open_folder(path: str, families: Families) -> Checkpoint:
    names = _listed(path)
    if any(name.endswith(".safetensors") for name in names):
        # Imported on demand: a GGUF, the common case, starts without it.
        from homeserve.checkpoint import safetensors_folder

        return safetensors_folder.open_folder(path, families())
    files = [name for name in names if name.endswith(".gguf")]
    starts = [name for name in files if not (part := _PART.match(name)) or int(part["number"]) == 1]
    if len(starts) == 1:
        return _open_gguf(os.path.join(path, starts[0]))
    if starts:
        raise InvalidModelFile(path, "folder", f"holds several models: {', '.join(starts[:8])}", fix="name one of them")
    fix = "give a GGUF file, or a folder with config.json and *.safetensors"
    raise ModelNotFound(f"the folder {path} holds no model", field="model", fix=fix)


def _listed(path: str) -> list[str]:
    try:
        return sorted(os.listdir(path))
    except OSError as error:
        what = f"cannot be read: {error.strerror}"
        raise InvalidModelFile(path, "folder", what, fix="check its permissions") from error


def _open_gguf(path: str) -> Checkpoint:
    first = gguf.read(path)
    parts = [first]
    try:
        arch = _architecture(first)
        count = _part_count(first)
        if count > 1:
            parts += _other_parts(first, count)
        tensors = _merged(parts)
        _check_total(first, len(tensors))
    except InvalidModelFile:
        for part in parts:
            part.file.close()
        raise
    vocabulary = {key: value for key, value in first.metadata.items() if key.startswith("tokenizer.")}
    return Checkpoint(
        path=path,
        arch=arch,
        metadata=first.metadata,
        tensors=tensors,
        tokenizer=TokenizerSource(vocabulary, None, digest_of(vocabulary)),
        chat_templates=chat_templates(first.metadata),
        file_bytes=sum(part.file.size for part in parts),
        quant_label=quant_label(first.metadata.get("general.file_type"), tensors),
        files=tuple(part.file for part in parts),
    )


def _architecture(file: GgufFile) -> str:
    kind = file.metadata.get("general.type", "model")
    if isinstance(kind, str) and kind in _NO_MODEL:
        what = f"this is {_NO_MODEL[kind]}, not a model"
        raise InvalidModelFile(file.file.path, "key 'general.type'", what, fix="give the model's own GGUF")
    arch = file.metadata.get("general.architecture")
    if isinstance(arch, str) and arch:
        return arch
    number = file.metadata.get("split.no")
    if isinstance(number, int) and number > 0:
        what = f"this is part {number + 1} of a split model"
        raise InvalidModelFile(file.file.path, "key 'split.no'", what, fix="give the first part (-00001-of-...)")
    what = "is missing" if arch is None else f"is {arch!r}, not the name of an architecture"
    raise InvalidModelFile(file.file.path, "key 'general.architecture'", what, fix="use a GGUF of a language model")


def _part_count(first: GgufFile) -> int:
    """Parts of the model, 1 for a file that is not split. Raises where the file is not the first part."""
    path = first.file.path
    count = _whole(first, "split.count", 1)
    if count <= 1:
        return 1
    if _whole(first, "split.no", 0) != 0:
        what = f"this is part {_whole(first, 'split.no', 0) + 1} of {count}"
        raise InvalidModelFile(path, "key 'split.no'", what, fix="give the first part (-00001-of-...)")
    part = _PART.match(path)
    if count > PARTS_MAX or not part or int(part["number"]) != 1 or int(part["count"]) != count:
        what = f"the file says that it is part 1 of {count}, its name does not"
        raise InvalidModelFile(path, "name", what, fix=f"name it PREFIX-00001-of-{count:05d}.gguf, as it was published")
    return count


def _other_parts(first: GgufFile, count: int) -> list[GgufFile]:
    part = _PART.match(first.file.path)
    assert part is not None, "_part_count has matched the name"
    parts: list[GgufFile] = []
    try:
        for number in range(2, count + 1):
            path = f"{part['prefix']}-{number:05d}-of-{count:05d}.gguf"
            if not os.path.exists(path):
                raise InvalidModelFile(path, "file", f"part {number} of {count} is missing", fix="fetch all parts")
            other = gguf.read(path)
            parts.append(other)
            if _whole(other, "split.count", -1) != count or _whole(other, "split.no", -1) != number - 1:
                what = f"does not say that it is part {number} of {count}"
                raise InvalidModelFile(path, "key 'split.no'", what, fix="fetch all parts from one place")
    except InvalidModelFile:
        for other in parts:
            other.file.close()
        raise
    return parts


def _merged(parts: list[GgufFile]) -> dict[str, TensorView]:
    tensors: dict[str, TensorView] = {}
    for part in parts:
        for name, view in part.tensors.items():
            if name in tensors:
                raise InvalidModelFile(part.file.path, f"tensor {name!r}", "is in an earlier part too")
            tensors[name] = view
    return tensors


def _check_total(first: GgufFile, found: int) -> None:
    total = _whole(first, "split.tensors.count", found)
    if total != found:
        what = f"promises {total} tensors, the parts hold {found}"
        raise InvalidModelFile(first.file.path, "key 'split.tensors.count'", what, fix="fetch all parts again")


def _whole(file: GgufFile, key: str, default: int) -> int:
    value = file.metadata.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidModelFile(file.file.path, f"key {key!r}", f"is {value!r}, not a whole number")
    return value


def digest_of(metadata: Mapping[str, object]) -> str:
    """SHA-256 (hex) over keys and values, for caches of what is made from them."""
    digest = hashlib.sha256()
    for key in sorted(metadata):
        value = metadata[key]
        raw = value.raw if isinstance(value, gguf.Array) else repr(value).encode("utf-8", "surrogatepass")
        head = f"{len(key)}:{key}:{type(value).__name__}:{len(raw)}:".encode()
        digest.update(head)
        digest.update(raw)
    return digest.hexdigest()
