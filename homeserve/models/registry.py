"""Architecture name -> module, imported when asked for."""

from __future__ import annotations

from importlib import import_module

from homeserve.errors import UnknownArchitecture
from homeserve.models.family import Family

MODULES = {
    "llama": "homeserve.models.llama",
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
