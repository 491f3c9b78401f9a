"""Reading /proc and /sys below a root folder: the live ones, or a recorded tree.

A probe meets files that are not there, folders where a file should be, files padded with NUL bytes, numbers of four
thousand digits and links that go round in circles. None of it may end in a stack trace, and none may become a wrong
number. So every read is bounded and answers None for what it cannot say, and a file that *is* there but cannot be read
or understood leaves a doubt. A file that is not there leaves none: what its absence means, only the caller knows.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from pathlib import Path

from budget.facts import Doubt

_FILE_LIMIT_BYTES = 1 << 22
_PIECE_BYTES = 1 << 16
_NAMES_LIMIT = 4096
_LARGEST = 1 << 64
"""No file of the kernel holds a larger number."""


class Tree:
    """A folder that stands for `/`. `doubts` collects what was there and could not be read."""

    def __init__(self, root: str | Path = "/") -> None:
        self.root = Path(root)
        self.live = os.path.realpath(root) == os.sep
        self.doubts: list[Doubt] = []

    def path(self, name: str) -> Path:
        return self.root / name.lstrip("/")

    def text(self, name: str) -> str | None:
        """A small file's text without NUL bytes; None where it is not there or cannot be read."""
        try:
            return _bytes(self.path(name)).decode("utf-8", "replace").replace("\0", "")
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR):
                self.doubt(name, f"cannot be read: {error.strerror or error}", "unknown")
            return None

    def line(self, name: str) -> str | None:
        """A file's text without the white space around it; None where there is none."""
        return (self.text(name) or "").strip() or None

    def number(self, name: str) -> int | None:
        """A file that holds one number, decimal or with 0x; None, and a doubt, where it holds anything else."""
        text = self.text(name)
        if text is None:
            return None
        number = whole(text)
        if number is None:
            self.doubt(name, f"holds no number but {clip(text)}", "unknown")
        return number

    def pairs(self, name: str) -> dict[str, int] | None:
        """A file of lines `name number`; None where it cannot be read. Lines of another form are left out."""
        text = self.text(name)
        if text is None:
            return None
        found: dict[str, int] = {}
        for line in text.splitlines():
            words = line.split()
            number = whole(words[1]) if len(words) == 2 else None
            if number is not None:
                found[words[0]] = number
        return found

    def names(self, folder: str, pattern: str = ".*") -> list[str]:
        """Entries of a folder whose whole name matches, numbers in them in order; empty where there is no folder."""
        try:
            with os.scandir(self.path(folder)) as entries:
                found = [entry.name for entry, _ in zip(entries, range(_NAMES_LIMIT), strict=False)]
        except OSError:
            return []
        return sorted((name for name in found if re.fullmatch(pattern, name)), key=natural)

    def link(self, name: str) -> str | None:
        """The last part of what a link points at (a driver's name, say); None where it is no link."""
        try:
            return os.path.basename(os.readlink(self.path(name))) or None
        except OSError:
            return None

    def there(self, name: str) -> bool:
        return os.path.exists(self.path(name))

    def doubt(self, where: str, what: str, taken: str) -> None:
        self.doubts.append(Doubt("/" + where.lstrip("/"), what, taken))


def whole(text: str) -> int | None:
    """A whole number, decimal or hexadecimal with 0x, as the kernel writes it; None for anything else."""
    text = text.strip()
    if not re.fullmatch(r"-?[0-9]{1,20}|0x[0-9a-fA-F]{1,16}", text):
        return None
    number = int(text, 0) if text.startswith("0x") else int(text)
    return number if abs(number) < _LARGEST else None


def natural(name: str) -> tuple[tuple[str, int], ...]:
    """A sort key by which card2 comes before card10."""
    return tuple((letters, int(digits or -1)) for letters, digits in re.findall(r"([^0-9]*)([0-9]{0,18})", name))


def clip(text: str, length: int = 40) -> str:
    """Text for a message: on one line, quoted, not endless."""
    flat = " ".join(text.split())
    return repr(flat if len(flat) <= length else flat[: length - 3] + "...")


def _bytes(path: Path) -> bytes:
    """A regular file's first bytes. It does not wait: in a recorded tree a pipe may lie in a file's place. And it reads
    in small pieces: the kernel refuses to fill a large buffer from some files of /proc/sys."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "no regular file", str(path))
        found = b""
        while len(found) < _FILE_LIMIT_BYTES and (piece := os.read(descriptor, _PIECE_BYTES)):
            found += piece
        return found
    finally:
        os.close(descriptor)
