"""API keys: who may use the API. Without `--api-key-file` everybody who reaches the port may.

Keys are compared as digests in constant time, and every key is compared, so that the time tells neither how much of a
key was right nor which one.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping

from homeserve.errors import Unauthorized

OPEN_PATHS = frozenset({"/", "/health", "/openapi.json", "/ready"})
"""Routes that need no key: they tell nothing of the model's use."""
OPEN_PREFIX = "/static/"


def is_open(path: str) -> bool:
    """Whether it needs no key."""
    return path in OPEN_PATHS or path.startswith(OPEN_PREFIX)


class KeyRing:
    """The keys of this server; empty means that none is asked for."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def check(self, path: str, headers: Mapping[str, str]) -> None:
        """Raises Unauthorized where a key is needed and `Authorization: Bearer` or `x-api-key` has none of ours."""
        if not self._digests or is_open(path):
            return
        given = _digest(_given_key(headers))
        matches = [hmac.compare_digest(given, known) for known in self._digests]
        if not any(matches):
            raise Unauthorized("this server needs an API key: send it as 'Authorization: Bearer KEY'")


def _given_key(headers: Mapping[str, str]) -> str:
    scheme, _, key = headers.get("Authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "").strip()


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
