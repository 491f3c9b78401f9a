"""Who may use a server that asks for no key: programs, and its own page. Not the pages of others.

A browser runs pages of strangers on the machine whose loopback address the server trusts. Two marks tell them apart.
`Host` is the name under which the browser found us: a stranger's name that was made to lead here (DNS rebinding) is not
one of ours. `Origin` is where the page that asks came from; a browser sends it with every POST, even with those that it
lets pages make without asking us first (`text/plain`). Programs send no `Origin`.

A server with keys needs none of this: no page of a stranger has one.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping
from urllib.parse import urlsplit

from homeserve.errors import Forbidden

_JSON_KINDS = frozenset({"", "application/json"})


class Door:
    """`host` is what the server was told to listen on (`--host`)."""

    def __init__(self, host: str) -> None:
        machine = socket.gethostname().lower()
        self._names = frozenset({"localhost", host.lower(), machine, f"{machine}.local"})

    def check(self, method: str, headers: Mapping[str, str]) -> None:
        """Raises Forbidden."""
        authority = headers.get("Host", "").strip().lower()
        name = _name_of(authority)
        # No Host at all is a program of old: every browser sends one.
        if authority and not (name in self._names or _is_address(name)):
            raise Forbidden(
                "forbidden_host",
                f"this server is not known as {name[:256]!r}: use its address, or start it with --host {name[:256]}, or"
                " with --api-key-file, which admits every name",
            )
        origin = headers.get("Origin")
        foreign = headers.get("Sec-Fetch-Site", "").strip().lower() in ("cross-site", "same-site")
        if origin is None and not (foreign and method != "GET"):
            return
        if origin is not None and _is_ours(origin, authority):
            if method != "POST" or _kind_of(headers) in _JSON_KINDS:
                return
            raise Forbidden("forbidden_origin", "a page has to send its body as application/json")
        raise Forbidden(
            "forbidden_origin",
            f"pages of {(origin or 'another site')[:256]} may not use this server: it has no API keys; start it with"
            " --api-key-file and let the page send a key",
        )


def _name_of(authority: str) -> str:
    """A host without its port; an IPv6 address without its brackets."""
    if authority.startswith("["):
        return authority[1:].partition("]")[0]
    return authority.rpartition(":")[0] if authority.rpartition(":")[2].isdigit() and ":" in authority else authority


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_ours(origin: str, authority: str) -> bool:
    try:
        return bool(authority) and urlsplit(origin.strip().lower()).netloc == authority
    except ValueError:
        return False


def _kind_of(headers: Mapping[str, str]) -> str:
    return headers.get("Content-Type", "").partition(";")[0].strip().lower()
