"""Which server a command talks to, and with which key."""

from __future__ import annotations

import os
from collections.abc import Mapping

from homeserve.instances import running
from homeserve.settings import read_api_keys, runtime_dir, variable


def running_urls(environ: Mapping[str, str]) -> list[str]:
    """Of the servers that are ready, the newest first."""
    return [each.url for each in reversed(running(runtime_dir(environ))) if each.state == "ready"]


def first_key(path: str | None, environ: Mapping[str, str]) -> str | None:
    """Of the key file that a flag or the environment names; None without one. Raises SettingError."""
    named = path or environ.get(variable("api_key_file")) or None
    keys = read_api_keys(os.path.expanduser(named) if named else None)
    return sorted(keys)[0] if keys else None
