"""What a server tells the manager that started it, by the protocol of `sd_notify(3)`.

A manager of services (systemd, and those that speak as it does) names a datagram socket in NOTIFY_SOCKET. Whoever is
started with `Type=notify` counts as started only when READY=1 has come there, so that what waits for the server waits
for the model, too. Without the variable nothing is sent. A manager that cannot be told is no reason to stop serving:
it is said once, on stderr.
"""

from __future__ import annotations

import socket
import sys

SOCKET = "NOTIFY_SOCKET"
"""The variable. A leading `@` stands for the zero byte of a name without a file."""
STATUS_CHARACTERS = 200


class Notifier:
    """`address` is the value of NOTIFY_SOCKET, or None."""

    def __init__(self, address: str | None) -> None:
        self._address = address or None
        self._status = ""
        self._is_ready = False

    def ready(self, status: str) -> None:
        self._is_ready = True
        self._send("READY=1", _status(status))

    def stopping(self) -> None:
        self._send("STOPPING=1", _status("draining"))

    def status(self, text: str) -> None:
        """What `systemctl status` shows until the server is ready. The same text is not sent twice."""
        if text != self._status and not self._is_ready:
            self._status = text
            self._send(_status(text))

    def _send(self, *lines: str) -> None:
        if self._address is None:
            return
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
                out.setblocking(False)  # a manager that does not read holds nobody up
                out.sendto("\n".join(lines).encode("utf-8", "replace"), address)
        except BlockingIOError:
            self._status = ""  # the next one says it
        except OSError as error:
            self._address = None
            print(f"warning: {SOCKET} cannot be told: {error.strerror or error}", file=sys.stderr, flush=True)


def _status(text: str) -> str:
    """One line of the protocol: what is after a line break would be another one."""
    return "STATUS=" + " ".join(text.split())[:STATUS_CHARACTERS]
