"""Where files lie: homeserve.toml, the cache, the records of running servers, their logs, the API keys."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from homeserve.errors import SettingError
from homeserve.settings.table import Settings, flag

TOML_NAME = "homeserve.toml"
KEY_FILE_LIMIT_BYTES = 1 << 16


def toml_paths(environ: Mapping[str, str], cwd: str | Path) -> list[Path]:
    """Existing homeserve.toml files, the strongest first."""
    config = environ.get("XDG_CONFIG_HOME") or os.path.join(_home(environ), ".config")
    candidates = [Path(cwd) / TOML_NAME, Path(config) / "homeserve" / TOML_NAME]
    return [path for path in candidates if path.is_file()]


def environment() -> Mapping[str, str]:
    """The process environment, for the composition root to hand down; nobody else reads it."""
    return dict(os.environ)


def cache_dir(settings: Settings, environ: Mapping[str, str]) -> Path:
    """The folder of what is fetched and of tokenizers that are slow to build. Not created here."""
    return Path(settings.cache_dir) if settings.cache_dir else default_cache_dir(environ)


def default_cache_dir(environ: Mapping[str, str]) -> Path:
    """The cache folder where no flag and no file names one: HOMESERVE_CACHE, else XDG_CACHE_HOME, else ~/.cache."""
    if named := environ.get("HOMESERVE_CACHE"):
        return Path(os.path.expanduser(named))
    return Path(environ.get("XDG_CACHE_HOME") or os.path.join(_home(environ), ".cache")) / "homeserve"


def runtime_dir(environ: Mapping[str, str]) -> Path:
    """Folder of the records of running servers: per user, emptied at logout where the system has such a folder."""
    runtime = environ.get("XDG_RUNTIME_DIR")
    if runtime and os.path.isdir(runtime):
        return Path(runtime) / "homeserve"
    return default_cache_dir(environ) / "run"


def log_dir(named: str | None, environ: Mapping[str, str]) -> Path | None:
    """The folder of servers' logs as `--log-dir` names it: auto, a folder, or None for none. Not created here."""
    if named is None:
        return None
    if named != "auto":
        return Path(named)
    return state_dir(environ)


def state_dir(environ: Mapping[str, str]) -> Path:
    """Folder of what outlives a server and is no cache: logs, and what was typed. Not created here."""
    state = environ.get("XDG_STATE_HOME") or os.path.join(_home(environ), ".local", "state")
    return Path(state) / "homeserve"


def read_api_keys(path: str | None) -> dict[str, str]:
    """Key -> name, of `--api-key-file`: on each line a key, or its name and the key; `#` starts a comment line. A key
    without a name is called by its line. Raises SettingError for a file without a key, or with a line of more words."""
    if path is None:
        return {}
    said = flag("api_key_file")
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(KEY_FILE_LIMIT_BYTES + 1)
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "is not UTF-8 text"
        raise SettingError(f"{said}: {path}: {why}", field="api_key_file", fix="name a readable text file") from None
    if len(text) > KEY_FILE_LIMIT_BYTES:
        raise SettingError(f"{said}: {path}: is larger than {KEY_FILE_LIMIT_BYTES} bytes", field="api_key_file")
    keys: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = [] if line.startswith("#") else line.split()
        if len(words) > 2:
            what = f"{said}: {path}: line {number} has {len(words)} words"
            raise SettingError(what, field="api_key_file", fix="write a key, or its name and the key")
        if words:
            keys.setdefault(words[-1], words[0] if len(words) == 2 else f"line-{number}")
    if not keys:
        raise SettingError(f"{said}: {path}: holds no key", field="api_key_file", fix="write one key a line")
    return keys


def _home(environ: Mapping[str, str]) -> str:
    return environ.get("HOME") or os.path.expanduser("~")
