"""Tokenizers that are slow to build, kept in the cache folder as the library's JSON.

An entry is a header line with the SHA-256 of the rest, then the rest. One that is damaged, of another version or not
readable counts as absent: the tokenizer is built again and the entry replaced. A folder that cannot be written costs
time on the next start and nothing else, so it is logged and not raised.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from pathlib import Path

from tokenizers import Tokenizer as Library

_log = logging.getLogger("homeserve.text")
HEAD_BYTES_MAX = 256
_MAGIC = "homeserve-tokenizer 2"


def load(folder: Path, digest: str) -> Library | None:
    """The tokenizer kept under `digest`, or None."""
    path = folder / f"{digest}.json"
    try:
        with open(path, "rb") as file:
            head = file.readline(HEAD_BYTES_MAX).removesuffix(b"\n")
            body = file.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        _log.warning("the cached tokenizer %s cannot be read: %s", path, error)
        return None
    if head.decode("ascii", "replace") != f"{_MAGIC} {hashlib.sha256(body).hexdigest()}":
        _log.warning("the cached tokenizer %s is damaged and is built again", path)
        return None
    try:
        return Library.from_buffer(body)
    except Exception as error:  # noqa: BLE001  the library raises bare `Exception` for what another version of it wrote
        _log.warning("the cached tokenizer %s cannot be used and is built again: %s", path, error)
        return None


def keep(folder: Path, digest: str, library: Library) -> None:
    """Write the entry beside its place, then move it there: a reader sees all of it or nothing."""
    body = library.to_str().encode()
    head = f"{_MAGIC} {hashlib.sha256(body).hexdigest()}\n".encode()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=folder, prefix=".tokenizer-")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(head + body)
            os.replace(temporary, folder / f"{digest}.json")
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        _log.warning("the tokenizer cannot be kept in %s: %s", folder, error)
