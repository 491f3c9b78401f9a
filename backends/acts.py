"""What ranks exchange inside one plan: the stamp on every message, the shared memory it travels through, the errors.

Bytes that go from rank to rank while they run a plan (partial sums, parts of a gather, activations, drawn tokens) are
called acts. They never pass the engine. Where the ranks are processes on one box they go through one piece of shared
memory that the parent makes and every rank inherits as a descriptor:

      ┌────────┬───────────┬───┬───────────────┬───────────┬───┐
      │ header │ mailbox 0 │ … │ mailbox ranks │ channel 0 │ … │        all offsets are multiples of 64 bytes
      └────────┴───────────┴───┴───────────────┴───────────┴───┘
    header    u64 magic │ u64 ranks │ u64 piece_floats │ u64 message_floats │ u64 depth │ u64 checksum of routes, sizes
    mailbox   one for each rank, which alone writes it; the others read. Sums and gathers: two pieces, used in turn
              line (u32 posted │ u32 sleepers) │ 2 x (stamp │ piece_floats x f32)
    channel   one for each route (from, to), one writer and one reader. Activations and tokens: `depth` messages
              line (u32 sent │ u32 sleepers) │ line (u32 taken) │ depth x (stamp │ message_floats x f32)

**Stamps.** A message is paired with its reader by position (the n-th of its mailbox or channel), and then has to prove
that it is the one that was meant: epoch, plan, rows, width, label and kind are compared before a byte is used. Two
ranks that are not at the same place of the same plan are told apart at their next exchange, with both stamps.

**Credit.** A sender never waits. A channel holds as many messages as plans may be in flight, and a plan sends at most
one message through each channel for each label it was sized for; the engine issues no plan without credit, so there is
always room. A send that finds none is a bug and raises. So a rank waits in one way only: for a peer that is at the same
place or behind it in the plan log, never for one that waits for it, as long as all ranks make the exchanges of a plan
in one order.

**One life.** A segment serves one life of a fleet. A rank that failed inside an exchange owes it for ever, so its
collective refuses every further call with the first error; the fleet is started again with new memory.
"""

from __future__ import annotations

import os
import struct
import sys
import tempfile
import zlib
from dataclasses import dataclass

from backends.base import Counts as Counts
from backends.base import Stamp as Stamp

LINE_BYTES = 64
STAMP_BYTES = 64
LABEL_BYTES_MOST = 31
RANKS_MOST = 64
_FLOATS_IN_LINE = 16
_HEADER = struct.Struct("=6Q")
_MAGIC = int.from_bytes(b"HSacts01", "little")


@dataclass(frozen=True)
class ActShape:
    """The shared memory of `ranks` ranks. `piece_floats`: what a mailbox takes at once (longer sums and gathers go in
    pieces); `message_floats`: the most that one send carries; `depth`: messages of a channel; `routes`: (from, to) of
    each channel; `sizes`: another `message_floats` for each route. Floats are rounded up to whole lines. Raises
    ValueError for a shape that makes no sense."""

    ranks: int
    piece_floats: int
    message_floats: int
    depth: int
    routes: tuple[tuple[int, int], ...] = ()
    sizes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= self.ranks <= RANKS_MOST:
            raise ValueError(f"acts of {self.ranks} ranks: there may be 1 to {RANKS_MOST}")
        if self.piece_floats < 1 or self.message_floats < 1 or self.depth < 1:
            raise ValueError(f"acts in pieces of {self.piece_floats} and {self.depth} x {self.message_floats} floats")
        ends = range(self.ranks)
        wrong = [route for route in self.routes if route[0] == route[1] or not set(route) <= set(ends)]
        if wrong or len(set(self.routes)) != len(self.routes):
            raise ValueError(f"routes {self.routes} between {self.ranks} ranks: each once, from one rank to another")
        if self.sizes and (len(self.sizes) != len(self.routes) or min(self.sizes) < 1):
            raise ValueError(f"messages of {self.sizes} floats for {len(self.routes)} routes")

    @property
    def piece_bytes(self) -> int:
        return _lines(self.piece_floats) * LINE_BYTES

    def route_floats(self, source: int, target: int) -> int:
        """The most that one message from `source` to `target` carries. Raises KeyError where there is no channel."""
        index = self._index(source, target)
        return self.sizes[index] if self.sizes else self.message_floats

    def message_bytes(self, source: int, target: int) -> int:
        """Room of such a message."""
        return _lines(self.route_floats(source, target)) * LINE_BYTES

    @property
    def mailboxes_at(self) -> int:
        """Offset of rank 0's mailbox; the others follow."""
        return LINE_BYTES

    def channel_at(self, source: int, target: int) -> int:
        """Offset of the channel from rank `source` to rank `target`. Raises KeyError where there is none."""
        before = self.routes[: self._index(source, target)]
        return self.channels_at + sum(self._channel_bytes(*route) for route in before)

    @property
    def total_bytes(self) -> int:
        """Size of the whole segment."""
        return self.channels_at + sum(self._channel_bytes(*route) for route in self.routes)

    def header(self) -> bytes:
        routes = zlib.crc32(repr((self.routes, self.sizes)).encode())
        return _HEADER.pack(_MAGIC, self.ranks, self.piece_floats, self.message_floats, self.depth, routes)

    @property
    def channels_at(self) -> int:
        """Offset of the first channel."""
        return self.mailboxes_at + self.ranks * (LINE_BYTES + 2 * (STAMP_BYTES + self.piece_bytes))

    def _channel_bytes(self, source: int, target: int) -> int:
        return 2 * LINE_BYTES + self.depth * (STAMP_BYTES + self.message_bytes(source, target))

    def _index(self, source: int, target: int) -> int:
        if (source, target) not in self.routes:
            raise KeyError((source, target))
        return self.routes.index((source, target))


def fleet_shape(ranks: int, piece_floats: int, message_floats: int, token_floats: int, depth: int) -> ActShape:
    """The shape for a fleet that runs either layout: activations go from each rank to the next one, drawn tokens from
    the last rank to each of the others."""
    stream = [(rank, rank + 1) for rank in range(ranks - 1)]
    tokens = [(ranks - 1, rank) for rank in range(ranks - 1)]
    sizes = (message_floats,) * len(stream) + (token_floats,) * len(tokens)
    return ActShape(ranks, piece_floats, message_floats, depth, (*stream, *tokens), sizes)


def make_memory(shape: ActShape) -> int:
    """A descriptor of new shared memory for the acts of one life, for the ranks to inherit. It has no name, so it goes
    with the last process that has it; its room is reserved. Raises OSError where there is none."""
    fd = nameless("homeserve-acts")
    try:
        if sys.platform == "linux":
            os.posix_fallocate(fd, 0, shape.total_bytes)
        else:
            os.ftruncate(fd, shape.total_bytes)
        os.pwrite(fd, shape.header(), 0)
    except OSError:
        os.close(fd)
        raise
    return fd


def nameless(label: str) -> int:
    """A descriptor of empty memory for processes to inherit and share; `label` is what the system shows for it where it
    shows any. Raises OSError."""
    if sys.platform == "linux":
        return os.memfd_create(label, os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            return os.dup(file.fileno())


def _lines(floats: int) -> int:
    return -(-floats // _FLOATS_IN_LINE)


class ExchangeError(Exception):
    """An exchange between ranks that did not happen. `label` names it, `peer` the rank that it was with (-1: none)."""

    def __init__(self, message: str, label: str, peer: int) -> None:
        self.label = label
        self.peer = peer
        super().__init__(message)


class PeerLate(ExchangeError):
    """The peer did not come within the bound: it died, hangs, or is somewhere else. Nothing more can be exchanged."""


class StampMismatch(ExchangeError):
    """The peer is at another place: `wanted` and `found` are both stamps as text. Nothing more can be exchanged."""

    def __init__(self, label: str, peer: int, wanted: str, found: str) -> None:
        self.wanted = wanted
        self.found = found
        super().__init__(f"rank {peer} exchanges {found} where this rank is at {wanted}", label, peer)


class NoCredit(ExchangeError):
    """A channel is full: more was sent than plans may be in flight, which is a bug of the caller. Nothing was sent."""
