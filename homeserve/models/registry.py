"""Architecture name -> module, imported when asked for."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

from homeserve.checkpoint.hf_rules import FamilyRules
from homeserve.errors import UnknownArchitecture
from homeserve.models.family import Family

MODULES = {
    "gemma2": "homeserve.models.gemma2",
    "gemma3": "homeserve.models.gemma3",
    "gemma4": "homeserve.models.gemma4",
    "gpt-oss": "homeserve.models.gpt_oss",
    "llama": "homeserve.models.llama",
    "qwen2": "homeserve.models.qwen2",
    "qwen2moe": "homeserve.models.qwen2moe",
    "qwen3": "homeserve.models.qwen3",
    "qwen35": "homeserve.models.qwen35",
    "qwen35moe": "homeserve.models.qwen35moe",
    "qwen3moe": "homeserve.models.qwen3moe",
    "qwen3next": "homeserve.models.qwen3next",
}
"""`general.architecture` of a file -> the module whose FAMILY declares it."""


def known() -> tuple[str, ...]:
    return tuple(sorted(MODULES))


def family(arch: str) -> Family:
    """The family of `arch`. Raises UnknownArchitecture with the list of known ones."""
    if arch not in MODULES:
        raise UnknownArchitecture(arch, known())
    found = import_module(MODULES[arch]).FAMILY
    assert isinstance(found, Family)
    return found


def folder_families() -> Mapping[str, FamilyRules]:
    """By what rules a safetensors folder is read, by the `model_type` of its config (for `checkpoint.open`)."""
    from homeserve.models.hf_families import FAMILIES

    return FAMILIES
