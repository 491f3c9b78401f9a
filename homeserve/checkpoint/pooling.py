"""How a model's files say that its states become an embedding: a key of a GGUF, or the modules of sentence-transformers
beside a safetensors folder. Most language models say nothing."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import TypeVar

import msgspec

from homeserve.errors import InvalidModelFile

_KEYS = {1: "mean", 2: "cls", 3: "last"}
"""`{arch}.pooling_type`; 0 is none, 4 that of a reranker."""
_FLAGS = {"mean_tokens": "mean", "cls_token": "cls", "lasttoken": "last"}
"""`pooling_mode_*` of a module that pools."""
_FILE_BYTES_MAX = 1 << 20
_T = TypeVar("_T")
_log = logging.getLogger(__name__)


class _Module(msgspec.Struct):
    type: str
    path: str = ""


def pooling_of(path: str, arch: str, metadata: Mapping[str, object]) -> str:
    """mean, cls or last; empty where the files say nothing, or name a way that is not known here (which is logged).
    Raises InvalidModelFile."""
    if os.path.isdir(path):
        return _of_folder(path)
    said = metadata.get(f"{arch}.pooling_type", 0)
    found = _KEYS.get(said, "") if isinstance(said, int) else ""
    if said and not found:
        _log.warning("%s: %s.pooling_type %s is no pooling that is known here", path, arch, said)
    return found


def _of_folder(path: str) -> str:
    modules_path = os.path.join(path, "modules.json")
    if not os.path.isfile(modules_path):
        return ""
    modules = _read(modules_path, list[_Module])
    pooling = next((module for module in modules if module.type.rpartition(".")[2] == "Pooling"), None)
    if pooling is None:
        return ""
    if not pooling.path or os.path.basename(pooling.path) != pooling.path or pooling.path in (".", ".."):
        raise InvalidModelFile(modules_path, "path", f"{pooling.path!r} is no folder beside it")
    config_path = os.path.join(path, pooling.path, "config.json")
    config = _read(config_path, dict[str, object])
    on = [
        key.removeprefix("pooling_mode_") for key, value in config.items() if key.startswith("pooling_mode_") and value
    ]
    if len(on) == 1 and on[0] in _FLAGS:
        return _FLAGS[on[0]]
    _log.warning("%s: pools by %s, which is not known here", config_path, " and ".join(on) or "nothing")
    return ""


def _read(path: str, kind: type[_T]) -> _T:
    """Raises InvalidModelFile."""
    try:
        with open(path, "rb") as file:
            raw = file.read(_FILE_BYTES_MAX + 1)
    except OSError as error:
        raise InvalidModelFile(path, "the file", f"cannot be read: {error.strerror}") from None
    if len(raw) > _FILE_BYTES_MAX:
        raise InvalidModelFile(path, "the file", f"is larger than {_FILE_BYTES_MAX} bytes")
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise InvalidModelFile(path, "the file", f"is not what it should be: {error}") from None
