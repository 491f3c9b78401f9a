"""`[[models]]` of homeserve.toml: several models of one server, and the settings that each has for itself.

    [[models]]
    id = "small"                  # its name in the API
    path = "/models/small.gguf"   # whatever MODEL may be
    ttl_s = 600                   # unloaded when idle for so long; without: it stays until its memory is needed
    context = 4096                # any setting of a model: those of the groups Model, Box, Ranks and Requests

What is said above the first entry is said for all of them; an entry's own word counts more. A flag or a variable is
said for this run, and counts most, as ever.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from homeserve.errors import HomeserveError, SettingError
from homeserve.settings.option import Option, near
from homeserve.settings.table import MODEL_GROUPS, Settings, options
from homeserve.settings.together import check_together

MODELS_MOST = 64
ID_CHARS_MOST = 200
TTL_MOST_S = 30 * 86400.0
OF_THE_BOX = frozenset({"floor_mib"})
"""Settings of a model's groups that are the same for all models of a server."""
_OWN = ("id", "path", "ttl_s")
_NAMED = {"path": "model", "id": "model_id"}
"""What an entry calls otherwise than a flag does."""
_TTL = Option("float", "how long a model may be idle", "Model", low=0, high=TTL_MOST_S, zero="for ever")


@dataclass(frozen=True)
class ModelEntry:
    """One of `[[models]]`, checked. `values` are its own settings by name, `said` where each stands."""

    id: str
    path: str
    ttl_s: float = 0.0
    values: Mapping[str, Any] = field(default_factory=dict)
    said: Mapping[str, str] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return {"id": self.id, "path": self.path, "ttl_s": self.ttl_s, **self.values}


def read_entries(given: object, where: str) -> tuple[ModelEntry, ...]:
    """What stands under `models` in the file `where`. Raises SettingError."""
    if not isinstance(given, list) or not all(isinstance(each, dict) for each in given):
        raise SettingError(f"{where}: models: is no list of tables", field="models", fix="write [[models]] before each")
    if len(given) > MODELS_MOST:
        raise SettingError(f"{where}: models: {len(given)} entries", field="models", fix=f"name at most {MODELS_MOST}")
    entries = tuple(_entry(each, f"{where}: models[{index}]") for index, each in enumerate(given))
    ids = [entry.id for entry in entries]
    twice = next((each for each in ids if ids.count(each) > 1), None)
    if twice is not None:
        raise SettingError(f"{where}: models: two are called {twice!r}", field="models", fix="name each differently")
    return entries


def _entry(given: Mapping[str, object], where: str) -> ModelEntry:
    missing = next((name for name in ("id", "path") if name not in given), None)
    if missing is not None:
        raise SettingError(f"{where}: has no {missing}", field="models", fix='write id = "NAME" and path = "MODEL"')
    table = own_options()
    values: dict[str, Any] = {}
    said: dict[str, str] = {}
    for key, value in given.items():
        name = key.replace("-", "_")
        if name in _OWN:
            continue
        if name not in table:
            raise SettingError(f"{where}: {key}: {_no_such(name)}", field="models", fix="correct or remove it")
        values[name] = table[name].convert(value, f"{where}: {key}", name)
        said[name] = f"{where}: {key}"
    every = options()
    id_, path = (every[_NAMED[key]].convert(given[key], f"{where}: {key}", "models") for key in ("id", "path"))
    if len(id_) > ID_CHARS_MOST or not id_.isprintable():
        raise SettingError(f"{where}: id: is too long, or has control characters", field="models", fix="shorten it")
    ttl_s = _TTL.convert(given.get("ttl_s", 0.0), f"{where}: ttl_s", "models")
    return ModelEntry(id_, path, float(ttl_s), values, said)


def own_options() -> dict[str, Option]:
    """Settings that an entry may have."""
    return {
        name: option
        for name, option in options().items()
        if option.group in MODEL_GROUPS and name not in OF_THE_BOX and name not in _NAMED.values()
    }


def _no_such(name: str) -> str:
    if name in options():
        return "is a setting of the whole server: say it above the first [[models]]"
    return f"no such setting of a model{near(name, [*_OWN, *own_options()])}"


def settings_of(settings: Settings, entry: ModelEntry) -> Settings:
    """The settings that one model of several is loaded by. Raises SettingError for those that contradict each other."""
    own = {name: value for name, value in entry.values.items() if not _is_of_this_run(settings, name)}
    sources = {**settings.sources, **{name: entry.said[name] for name in own}}
    made = replace(settings, **own, model=entry.path, model_id=entry.id, models=(), sources=sources, warnings=())
    try:
        return check_together(made)
    except HomeserveError as error:
        error.message = f"model {entry.id!r}: {error.message}"
        raise


def _is_of_this_run(settings: Settings, name: str) -> bool:
    """Said by a flag or a variable."""
    source = settings.sources.get(name, "")
    return bool(source) and ": " not in source


def chosen(settings: Settings) -> tuple[ModelEntry, ...]:
    """The entries that are served, the one that is loaded first first; none: MODEL alone is.

    MODEL may be the id or the path of an entry, which is then the first one. Another MODEL is served alone.
    """
    entries = settings.models
    if settings.model is None:
        return entries
    first = next((each for each in entries if settings.model in (each.id, each.path)), None)
    if first is None:
        return ()
    return (first, *(each for each in entries if each is not first))


def requests_most(settings: Settings) -> int:
    """Requests that all models together may compute and keep waiting."""
    every = [settings_of(settings, entry) for entry in chosen(settings)] or [settings]
    return sum(each.max_running + each.max_waiting for each in every)
