"""The folder of one server's images of layouts, below `--image-spill`: made at the start, gone with the server.

An image is as large as what a rank holds of the model, so what a killed server left must not stay. A folder's name has
the pid of its server and when that process began, as a pid alone is soon somebody else's; whoever makes one first
removes those of servers that are gone.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from homeserve.errors import SettingError
from homeserve.instances import process_birth

_NAME = re.compile(r"homeserve-images-(\d{1,10})-(\d{1,15})")


def make_folder(below: Path) -> Path:
    """A new folder for this process. Raises SettingError where there can be none."""
    try:
        below.mkdir(parents=True, exist_ok=True)
        sweep(below)
        made = below / _name(os.getpid(), process_birth(os.getpid()))
        made.mkdir(mode=0o700)
    except OSError as error:
        what = f"--image-spill: {below}: {error.strerror}"
        raise SettingError(what, field="image_spill", fix="name a folder that can be written, or off") from None
    return made


def sweep(below: Path) -> list[str]:
    """Remove the folders of servers that are gone; returns their names."""
    gone = []
    for path in sorted(below.iterdir()):
        match = _NAME.fullmatch(path.name)
        if match is None or path.is_symlink() or not path.is_dir():
            continue
        if _name(int(match[1]), process_birth(int(match[1]))) != path.name:
            remove_folder(path)
            gone.append(path.name)
    return gone


def remove_folder(path: Path) -> None:
    """With all that lies in it. What cannot be removed stays."""
    shutil.rmtree(path, ignore_errors=True)


def _name(pid: int, birth: float | None) -> str:
    return f"homeserve-images-{pid}-{round(100 * (birth or 0.0))}"
