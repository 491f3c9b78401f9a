"""Where models are kept."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """HOMESERVE_CACHE, else XDG_CACHE_HOME/homeserve, else ~/.cache/homeserve. Not created here."""
    if named := os.environ.get("HOMESERVE_CACHE"):
        return Path(named).expanduser()
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base).expanduser() / "homeserve"
    return Path("~/.cache/homeserve").expanduser()
