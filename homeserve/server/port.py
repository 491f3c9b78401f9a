"""The listening socket, bound before anything else: one that cannot be had is said at once, and by whom it is held."""

from __future__ import annotations

import errno
import ipaddress
import socket
from pathlib import Path

from homeserve.errors import SettingError
from homeserve.instances import running

BACKLOG = 512
"""Connections that wait in the kernel while the loop is busy."""


def listen(host: str, port: int, records: Path) -> socket.socket:
    """A listening socket. Raises SettingError that names who holds a taken port where that is known."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (socket.gaierror, UnicodeError) as error:
        raise SettingError(f"--host {host}: {error}", field="host", fix="use 127.0.0.1 or 0.0.0.0") from None
    listener = socket.socket(family, kind)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise _port_error(host, port, error, records) from None
    listener.setblocking(False)
    return listener


def _port_error(host: str, port: int, error: OSError, records: Path) -> SettingError:
    if error.errno == errno.EADDRINUSE:
        holder = next((instance for instance in running(records) if instance.port == port), None)
        by = f" by homeserve (pid {holder.pid})" if holder else ""
        stop = f"stop it with homeserve down --port {port}, or " if holder else ""
        return SettingError(
            f"port {port} is in use{by}", field="port", fix=f"{stop}use another one: --port 0 finds one"
        )
    if error.errno in (errno.EACCES, errno.EPERM):
        return SettingError(f"port {port}: {error.strerror}", field="port", fix="use a port over 1023")
    return SettingError(f"cannot listen on {host}: {error.strerror}", field="host", fix="use 127.0.0.1 or 0.0.0.0")


def url_of(listener: socket.socket) -> str:
    """How this machine reaches the socket."""
    address, port = listener.getsockname()[:2]
    if ipaddress.ip_address(address).is_unspecified:
        address = "::1" if ":" in address else "127.0.0.1"
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"


def is_loopback(listener: socket.socket) -> bool:
    return ipaddress.ip_address(listener.getsockname()[0]).is_loopback
