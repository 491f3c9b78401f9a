"""What was measured on a card, on disk: a number for everything that it depends on.

    entries.get(about)            None: it was never measured, or its file says something else
    entries.put(about, border)    a file of its own, moved to its place in one step

`about` is all that decides the number, as texts. Its digest is the file's name, and it stands in the file as well: a
file of other words under the name is foreign, one that is no JSON is broken, and either reads as nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

VERSION = 1
PREFIX = "tuned-"
MOST_BYTES = 1 << 16
About = Mapping[str, str]


class Entries:
    """`say` is told once where the folder cannot be used: then each start measures."""

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self.folder = folder
        self._say = say
        self._said = False

    def get(self, about: About) -> int | None:
        try:
            with open(self.path(about), "rb") as file:
                raw = file.read(MOST_BYTES)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._unusable(error)
            return None
        try:
            told = json.loads(raw)
        except ValueError:
            return None
        if not isinstance(told, dict) or told.get("about") != dict(about) or told.get("version") != VERSION:
            return None
        border = told.get("border")
        return border if type(border) is int and border >= 0 else None

    def put(self, about: About, border: int) -> None:
        text = json.dumps({"version": VERSION, "about": dict(about), "border": border}, indent=1)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self.folder, prefix=".making-")
        except OSError as error:
            self._unusable(error)
            return
        try:
            with os.fdopen(handle, "w") as file:
                file.write(text)
            os.replace(name, self.path(about))
        except OSError as error:
            with suppress(FileNotFoundError):
                os.unlink(name)
            self._unusable(error)

    def path(self, about: About) -> Path:
        text = json.dumps([VERSION, *sorted(about.items())])
        return self.folder / (PREFIX + hashlib.sha256(text.encode()).hexdigest())

    def _unusable(self, error: OSError) -> None:
        if not self._said:
            self._said = True
            self._say(
                f"what was measured cannot be kept in {self.folder} ({error.strerror}): each start measures again"
            )
