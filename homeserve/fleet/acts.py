"""The memory through which the ranks of one life exchange acts, as the engine holds it: made, handed on, looked at.

Beside the acts a life may have memory for weights, KV rows and states that its ranks hold together, and for what they
hand each other at a flip (the transit memory). None of it has a name: it goes with the last process that has it.

The engine writes nothing there after it was made. While answers are owed it looks now and then whether any count has
moved (`marks`). When none has, the counters and the last stamp of every mailbox and channel (`positions`) tell who
waits for whom (`homeserve.fleet.blame`): who has posted what, and what was sent and not taken.
"""

from __future__ import annotations

import os
import struct
from typing import Any

from backends.acts import LINE_BYTES, STAMP_BYTES, ActShape, fleet_shape, make_memory, nameless
from homeserve.fleet.spec import ActSizes

_COUNTS = struct.Struct("=II")
_STAMP = struct.Struct("=qqiiii32s")
_KINDS = {1: "sum", 2: "gather", 3: "message", 4: "merge"}


class ActsMemory:
    """The acts of one life; with `unified` memory for the weights, KV rows and states that ranks hold together, with
    `copy` for weights alone (both empty here: the ranks give them their size); and `transit_bytes` for flips, of which
    only what is written takes memory. `fd`, `weights_fd`, `kv_fd`, `state_fd` and `transit_fd` are for the ranks
    to inherit. Raises OSError where there is no memory for it."""

    def __init__(
        self, ranks: int, sizes: ActSizes, *, unified: bool = False, copy: bool = False, transit_bytes: int = 0
    ) -> None:
        self.sizes = sizes
        self.transit_bytes = transit_bytes
        self.shape: ActShape = fleet_shape(
            ranks, sizes.piece_floats, sizes.message_floats, sizes.token_floats, sizes.depth
        )
        self.weights_fd = self.kv_fd = self.state_fd = self.transit_fd = -1
        self.fd = make_memory(self.shape)
        try:
            if unified or copy:
                self.weights_fd = nameless("homeserve-weights")
            if transit_bytes:
                self.transit_fd = nameless("homeserve-transit")
                os.ftruncate(self.transit_fd, transit_bytes)
            if unified:
                self.kv_fd = nameless("homeserve-kv")
                self.state_fd = nameless("homeserve-state")
        except OSError:
            self.close()
            raise

    @property
    def fds(self) -> tuple[int, ...]:
        every = (self.fd, self.weights_fd, self.kv_fd, self.state_fd, self.transit_fd)
        return tuple(fd for fd in every if fd >= 0)

    def marks(self) -> tuple[int, ...]:
        """How far everything is: two looks are equal where no rank took part in an exchange between them."""
        shape = self.shape
        lines = [self._mailbox_at(rank) for rank in range(shape.ranks)]
        for route in shape.routes:
            at = shape.channel_at(*route)
            lines += [at, at + LINE_BYTES]
        return tuple(_COUNTS.unpack(self._read(at, _COUNTS.size))[0] for at in lines)

    def positions(self) -> dict[str, Any]:
        """Counters and last stamps, as plain data. They are read while ranks may write: each value is whole, and two of
        them need not be of the same moment."""
        return {
            "mailboxes": [self._mailbox(rank, self._mailbox_at(rank)) for rank in range(self.shape.ranks)],
            "channels": [self._channel(*route) for route in self.shape.routes],
        }

    def close(self) -> None:
        """Give the memory up: it goes with the last rank that has it."""
        for fd in self.fds:
            os.close(fd)
        self.fd = self.weights_fd = self.kv_fd = self.state_fd = self.transit_fd = -1

    def _mailbox_at(self, rank: int) -> int:
        shape = self.shape
        return shape.mailboxes_at + rank * ((shape.channels_at - shape.mailboxes_at) // shape.ranks)

    def _mailbox(self, rank: int, at: int) -> dict[str, Any]:
        """Piece number n, counted from 1, lies in half n mod 2."""
        posted, sleepers = _COUNTS.unpack(self._read(at, _COUNTS.size))
        half = at + LINE_BYTES + (posted & 1) * (STAMP_BYTES + self.shape.piece_bytes)
        return {"rank": rank, "posted": posted, "sleepers": sleepers, "last": self._stamp(half) if posted else None}

    def _channel(self, source: int, target: int) -> dict[str, Any]:
        """Message number n, counted from 0, lies in place n mod depth."""
        at = self.shape.channel_at(source, target)
        sent, sleepers = _COUNTS.unpack(self._read(at, _COUNTS.size))
        taken, _ = _COUNTS.unpack(self._read(at + LINE_BYTES, _COUNTS.size))
        step = STAMP_BYTES + self.shape.message_bytes(source, target)
        last = self._stamp(at + 2 * LINE_BYTES + (sent - 1) % self.shape.depth * step) if sent else None
        return {"from": source, "to": target, "sent": sent, "taken": taken, "sleepers": sleepers, "last": last}

    def _stamp(self, at: int) -> dict[str, Any]:
        epoch, seq, kind, rows, width, piece, label = _STAMP.unpack(self._read(at, _STAMP.size))
        text = label.partition(b"\0")[0].decode("ascii", "replace")
        name = _KINDS.get(kind, str(kind))
        return {"epoch": epoch, "seq": seq, "kind": name, "rows": rows, "width": width, "piece": piece, "label": text}

    def _read(self, at: int, size: int) -> bytes:
        return os.pread(self.fd, size, at)
