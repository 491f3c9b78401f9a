"""Files that a command writes its result to: looked at before the work, replaced in one step behind it.

What is there already is replaced only where it is of the same kind: a name that was mistyped costs nobody a model.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from homeserve.errors import SettingError
from homeserve.instances import target_of, write_atomically

_LOOKED_AT = 256
_MARKS = b"\xef\xbb\xbf \r\n\t"
"""What may stand before the first sign of a text."""

PICTURE, JSON, CSV = "picture", "JSON", "CSV"
_STARTS = {PICTURE: (b"<svg", b"<?xml", b"<!--"), JSON: (b"{",), CSV: (b"engine,",)}


def check(flag: str, path: str, kind: str) -> None:
    """Raises SettingError where `path` of `flag` cannot be written, or holds something else than a `kind`."""
    if not path.strip() or "\0" in path:
        what = "that shall be drawn" if kind == PICTURE else "that shall be written"
        raise SettingError(f"{flag}: is no name of a file", field=_field(flag), fix=f"name the file {what}")
    try:
        real = target_of(Path(path))
        if not real.exists():
            if not real.parent.is_dir():
                raise _cannot(flag, path, os.strerror(errno.ENOENT))
            return
        with open(real, "rb") as file:
            start = file.read(_LOOKED_AT).lstrip(_MARKS)
    except OSError as error:
        raise _cannot(flag, path, error.strerror or str(error)) from None
    if start and not start.startswith(_STARTS[kind]):
        raise _cannot(flag, path, f"there is a file that is no {kind}, and it is not replaced")


def write(flag: str, path: str, text: str) -> None:
    """Raises SettingError."""
    try:
        write_atomically(Path(path), text)
    except OSError as error:
        raise _cannot(flag, path, error.strerror or str(error)) from None


def _cannot(flag: str, path: str, why: str) -> SettingError:
    fix = "name a new file in a folder that can be written"
    return SettingError(f"{flag}: {path}: {why}", field=_field(flag), fix=fix)


def _field(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_")
