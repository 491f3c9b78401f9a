"""API keys: who may use the API. Without `--api-key-file` everybody who reaches the port may.

Keys are compared as digests in constant time, and every key is compared, so that the time tells neither how much of a
key was right nor which one. The file is looked at again while requests come, `LOOK_S` apart: a key that was added or
taken out counts without a restart. A file that cannot be used any more is told in the log, and the keys stay.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from homeserve.errors import SettingError, Unauthorized
from homeserve.settings import read_api_keys

OPEN_PATHS = frozenset({"/", "/health", "/openapi.json", "/ready"})
"""Routes that need no key: they tell nothing of the model's use."""
OPEN_PREFIX = "/static/"
LOOK_S = 1.0
"""At most so often the file's date is read."""

_log = logging.getLogger("homeserve.server")


def is_open(path: str) -> bool:
    """Whether it needs no key."""
    return path in OPEN_PATHS or path.startswith(OPEN_PREFIX)


@dataclass(frozen=True)
class Key:
    """Whose key a request has. `digest` tells keys apart without being one."""

    name: str
    digest: bytes


class KeyRing:
    """The keys of the file at `path`; None means that none is asked for. Raises SettingError."""

    def __init__(self, path: str | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._looked = clock()
        self._stamp = _stamp(path)
        self._keys = _keys(path)

    def __bool__(self) -> bool:
        return self._path is not None

    def check(self, path: str, headers: Mapping[str, str]) -> Key | None:
        """Whose key it is; None where none is needed. Raises Unauthorized where `Authorization: Bearer` or `x-api-key`
        has none of ours."""
        if self._path is None or is_open(path):
            return None
        self._look()
        given = _digest(_given_key(headers))
        matches = [key for key in self._keys if hmac.compare_digest(given, key.digest)]
        if not matches:
            raise Unauthorized("this server needs an API key: send it as 'Authorization: Bearer KEY'")
        return matches[0]

    def _look(self) -> None:
        """Read the file again if it has changed."""
        now = self._clock()
        if now - self._looked < LOOK_S:
            return
        self._looked = now
        stamp = _stamp(self._path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._keys = _keys(self._path)
        except SettingError as error:
            _log.error("the API keys stay as they were: %s", error.message)
        else:
            _log.info("the API keys were read again", extra={"count": len(self._keys)})


def _keys(path: str | None) -> list[Key]:
    return [Key(name, _digest(key)) for key, name in read_api_keys(path).items()]


def _stamp(path: str | None) -> tuple[int, ...] | None:
    """Changes when the file does; None where it cannot be looked at."""
    if path is None:
        return None
    try:
        found = os.stat(path)
    except OSError:
        return None
    return (found.st_mtime_ns, found.st_size, found.st_ino, found.st_dev)


def _given_key(headers: Mapping[str, str]) -> str:
    scheme, _, key = headers.get("Authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "").strip()


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
