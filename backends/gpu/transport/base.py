"""How rows on a card get to the other ranks of the fleet: what every transport does, and what it is sized for.

A program's op list is cut where ranks exchange rows (`backends.ops.EXCHANGES`). Between two of its recordings the
program calls the transport, which has the same four calls as a `Collective` (backends/base.py), of rows on the card
instead of rows in memory. There are three:

    host    download to pinned memory, `Collective` over shared memory, upload          every pair of ranks
    peer    copies into mailboxes in the peers' memory, then a meeting on the host      cards of one vendor that really
            and a sum on the card                                                       reach each other
    nccl    a meeting on the host, then NCCL or RCCL                                    cards of one vendor

`backends.gpu.transport.probe` chooses, all ranks the same one, and says why.

Rules
- Every exchange is a meeting in the host's collective under its `Stamp`, whatever the rows travel by: so two ranks that
  are not at the same place of the same plan are told apart by both stamps, a peer that died is late within a bound, and
  after either nothing more is exchanged. Errors are those of `Collective`: ValueError before anything is written or
  waited for; PeerLate, StampMismatch, NoCredit; and those of the device (backends.gpu.errors).
- A sum is added in the order of the ranks, so that it has the same bits on every rank. host and peer keep that; of nccl
  only the same bits may be hoped for, and `ordered` says no.
- Rows are whole buffers: what lies between a row's width and its stride is padding that nobody else uses, and zero on
  every rank. So a buffer travels as one block of `rows * stride` floats, and a stride is `padded(width)`; only `out` of
  a gather may have another one.
- What a call needs is had at bind, for the largest exchange of all (`Room`). No call allocates.
- After a call the rows may be used by whatever the stream is given next. It may return before they are there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from backends import ops
from backends.base import Stamp
from backends.gpu.ops.buffers import Rows

Kind = Literal["host", "peer", "nccl"]

EXCHANGE = "exchange"
"""Ledger line of host memory that rows pass through."""
MAILBOXES = "mailboxes"
"""Ledger line of the card's memory that peers write to, or that rows pass through."""
PAD = 16
"""Floats: a row's stride is a multiple."""


@dataclass(frozen=True)
class Act:
    """Rows `[stamp.rows, width]` at `place`, as one of the buffers of a message."""

    place: Rows
    width: int


@dataclass(frozen=True)
class Part:
    """One matrix of a gather (backends.ops.GatherPart): `src` `[rows, widths[rank]]` of each rank, side by side in
    `out` `[rows, sum(widths)]`. Without a part `src`, and where nothing is wanted `out`, may be NONE."""

    src: Rows
    out: Rows
    widths: tuple[int, ...]


@dataclass(frozen=True)
class Room:
    """What a transport is sized for: the most `rows` of an exchange, and the most floats of one, padding among them. Of
    a sum or gather: what a rank gives (`own_floats`, of whichever gives most), and all that comes (`out_floats`).
    `message_floats`: of a message. `several`: some exchange has more than one buffer."""

    rows: int = 0
    own_floats: int = 0
    out_floats: int = 0
    message_floats: int = 0
    several: bool = False

    def __or__(self, other: Room) -> Room:
        """Enough for either: programs that take turns share one transport."""
        return Room(
            max(self.rows, other.rows),
            max(self.own_floats, other.own_floats),
            max(self.out_floats, other.out_floats),
            max(self.message_floats, other.message_floats),
            self.several or other.several,
        )


def padded(width: int) -> int:
    """Floats from one row to the next."""
    return -(-width // PAD) * PAD


def room_of(exchanges: Iterable[tuple[ops.Op, int]], ranks: int) -> Room:
    """For (op, the most rows that it ever has). Ops that exchange nothing need nothing."""
    room = Room()
    for op, rows in exchanges:
        room |= _room(op, rows, ranks)
    return room


def _room(op: ops.Op, rows: int, ranks: int) -> Room:
    match op:
        case ops.SumRows(buffer):
            size = rows * padded(buffer.width)
            return Room(rows, size, size)
        case ops.GatherRows(parts):
            own = max(sum(padded(part.widths[rank]) for part in parts) for rank in range(ranks))
            every = sum(padded(sum(part.widths)) for part in parts)
            return Room(rows, rows * own, rows * every, several=len(parts) > 1)
        case ops.MergeAttention():
            return Room(rows, rows * padded(op.src.width), rows * padded(ranks * op.src.width))
        case ops.SendRows(buffers) | ops.ReceiveRows(buffers):
            size = rows * sum(padded(buffer.width) for buffer in buffers)
            return Room(rows, message_floats=size, several=len(buffers) > 1)
    return Room()


class Transport(Protocol):
    """A rank's end. `why` says in words how it came to be this one; `ordered`: sums are added in the order of the
    ranks."""

    kind: Kind
    why: str
    notes: tuple[str, ...]
    ordered: bool
    rank: int
    ranks: int

    def sum(self, stamp: Stamp, rows: Rows, width: int) -> None:
        """rows `[stamp.rows, width]` = the sum of all ranks' rows. Raises ValueError, PeerLate, StampMismatch."""
        ...

    def gather(self, stamp: Stamp, parts: Sequence[Part], target: int | None = None) -> None:
        """All parts as one exchange; `widths` are the same on every rank, and any of them may be 0. With `target` only
        that rank's `out` is written. Raises ValueError, PeerLate, StampMismatch."""
        ...

    def send(self, stamp: Stamp, target: int, buffers: Sequence[Act]) -> None:
        """The buffers side by side as one message to rank `target`. Waits for the own card, never for the peer. Raises
        ValueError, NoCredit, StampMismatch."""
        ...

    def receive(self, stamp: Stamp, source: int, buffers: Sequence[Act]) -> None:
        """The next message from rank `source`, which must bear this stamp and width. Raises ValueError, PeerLate,
        StampMismatch."""
        ...

    def memory_lines(self) -> Mapping[str, int]:
        """Bytes held, by ledger line: `EXCHANGE` of the host's memory, `MAILBOXES` of the card's."""
        ...

    def close(self) -> None:
        """Give back what it holds; the collective and the device stay the caller's. Does nothing a second time."""
        ...


# --------------------------------------------------------------------------------------------------------------- checks


def block(rows: int, place: Rows) -> int:
    """Bytes of a whole buffer."""
    return 4 * rows * place.stride


def check_rows(stamp: Stamp, place: Rows, width: int) -> None:
    """Raises ValueError for rows that cannot be meant."""
    if stamp.rows < 0 or width < 0:
        raise ValueError(f"{stamp.label}: {stamp.rows} rows of {width}")
    if width and stamp.rows and (not place.at or place.stride < width):
        raise ValueError(f"{stamp.label}: rows of {width} floats at {place.at:#x}, {place.stride} apart")


def check_block(stamp: Stamp, place: Rows, width: int) -> None:
    """The same, of a buffer that travels as one block."""
    check_rows(stamp, place, width)
    if width and stamp.rows and place.stride != padded(width):
        raise ValueError(f"{stamp.label}: rows of {width} floats lie {place.stride} apart and not {padded(width)}")


def check_sum(stamp: Stamp, rows: Rows, width: int, room: Room) -> None:
    check_block(stamp, rows, width)
    _check_fits(stamp, "a sum", padded(width), min(room.own_floats, room.out_floats), room)


def check_gather(stamp: Stamp, parts: Sequence[Part], target: int | None, rank: int, ranks: int, room: Room) -> None:
    if not parts:
        raise ValueError(f"{stamp.label}: a gather of nothing")
    if len(parts) > 1 and not room.several:
        raise ValueError(f"{stamp.label}: {len(parts)} buffers, and no exchange was to have more than one")
    if target is not None and not 0 <= target < ranks:
        raise ValueError(f"{stamp.label}: to rank {target} of {ranks}")
    for part in parts:
        if len(part.widths) != ranks or min(part.widths) < 0:
            raise ValueError(f"{stamp.label}: widths {list(part.widths)} of {ranks} ranks")
        check_block(stamp, part.src, part.widths[rank])
        if target is None or target == rank:
            check_rows(stamp, part.out, sum(part.widths))
    own = max(sum(padded(part.widths[of]) for part in parts) for of in range(ranks))
    every = sum(padded(sum(part.widths)) for part in parts)
    _check_fits(stamp, "what a rank gives", own, room.own_floats, room)
    _check_fits(stamp, "a gather", every, room.out_floats, room)
    strides = sum(part.out.stride if sum(part.widths) else 0 for part in parts)
    if target is None or target == rank:
        _check_fits(stamp, "a gather", strides, room.out_floats, room)


def check_message(stamp: Stamp, buffers: Sequence[Act], room: Room) -> None:
    if not buffers:
        raise ValueError(f"{stamp.label}: a message without a buffer")
    if len(buffers) > 1 and not room.several:
        raise ValueError(f"{stamp.label}: {len(buffers)} buffers, and no exchange was to have more than one")
    for each in buffers:
        check_block(stamp, each.place, each.width)
    _check_fits(stamp, "a message", sum(padded(each.width) for each in buffers), room.message_floats, room)


def _check_fits(stamp: Stamp, what: str, row_floats: int, most: int, room: Room) -> None:
    if stamp.rows > room.rows or stamp.rows * row_floats > most:
        raise ValueError(
            f"{stamp.label}: {what} of {stamp.rows} x {row_floats} floats, and the transport was bound for"
            f" {room.rows} rows and {most} floats"
        )
