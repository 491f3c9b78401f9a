"""Rows by copies between the cards: into mailboxes in the peers' memory, a meeting on the host, then a sum on the card.

    sum      rows ──copy──▶ slot in every peer's mailbox ─ wait ─ meeting ─▶ sum_rows over the own mailbox, by rank
    gather   parts ──copy─▶ slot in the mailbox of all, or of the target ─ wait ─ meeting ─▶ columns of `out`
    message  buffers ─copy▶ place in the receiver's mailbox ─ wait ─ message on the host ─▶ copied to its buffers

A rank copies, waits until its card says that this is done, and only then meets the others. So what they read behind the
meeting is there, in whatever order the ranks came, and a rank that never comes is late on the host, where waits are
bounded. Nothing on a card ever waits for another card.

What opening says is not believed: `backends.gpu.transport.verify` has copied to every peer before this is used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from backends.base import Collective, Stamp
from backends.gpu.device import Device
from backends.gpu.ops.buffers import Rows
from backends.gpu.ops.many import SUM_PARTS, sum_rows
from backends.gpu.transport.base import (
    MAILBOXES,
    Act,
    Kind,
    Part,
    Room,
    block,
    check_gather,
    check_message,
    check_sum,
    padded,
)
from backends.gpu.transport.columns import Columns, offsets
from backends.gpu.transport.mailboxes import HALVES, Mailboxes
from backends.gpu.transport.meeting import Meeting


class PeerTransport:
    """Over mailboxes that are open on all ranks and were verified, which become its own, as `columns` does."""

    kind: Kind = "peer"
    ordered = True

    def __init__(
        self,
        device: Device,
        collective: Collective,
        room: Room,
        mailboxes: Mailboxes,
        columns: Columns,
        why: str,
        notes: Sequence[str] = (),
    ) -> None:
        self.why, self.notes = why, tuple(notes)
        self.rank, self.ranks = collective.rank, collective.ranks
        self._device = device
        self._room = room
        self._mail = mailboxes
        self._columns = columns
        self._meeting = Meeting(collective, room.rows)
        self._rounds = 0
        self._sent = [0] * self.ranks
        self._taken = [0] * self.ranks

    def sum(self, stamp: Stamp, rows: Rows, width: int) -> None:
        check_sum(stamp, rows, width, self._room)
        self._meeting.check()
        half, size = self._rounds % HALVES, block(stamp.rows, rows) if width else 0
        # Its own part is read from the rows themselves, unless the sum takes several launches: the first writes them.
        own_too = self.ranks > SUM_PARTS
        for owner in range(self.ranks):
            if size and (owner != self.rank or own_too):
                self._device.copy(self._mail.slot(owner, half, self.rank), rows.at, size)
        self._meet(stamp, [width] * self.ranks)
        parts = [self._mail.slot(self.rank, half, rank) for rank in range(self.ranks)]
        if not own_too:
            parts[self.rank] = rows.at
        self._device.launch(sum_rows(rows.at, parts, size // 4))

    def gather(self, stamp: Stamp, parts: Sequence[Part], target: int | None = None) -> None:
        check_gather(stamp, parts, target, self.rank, self.ranks, self._room)
        self._meeting.check()
        half = self._rounds % HALVES
        for owner in range(self.ranks) if target is None else (target,):
            slot = self._mail.slot(owner, half, self.rank)
            for part, offset in zip(parts, offsets(stamp.rows, parts, self.rank), strict=True):
                size = block(stamp.rows, part.src) if part.widths[self.rank] else 0
                if size:
                    self._device.copy(slot + offset, part.src.at, size)
        self._meet(stamp, [sum(part.widths[rank] for part in parts) for rank in range(self.ranks)])
        if target is None or target == self.rank:
            blocks = [self._mail.slot(self.rank, half, rank) for rank in range(self.ranks)]
            self._device.launch(self._columns.place(stamp.rows, parts, blocks))

    def send(self, stamp: Stamp, target: int, buffers: Sequence[Act]) -> None:
        check_message(stamp, buffers, self._room)
        self._meeting.check_credit(stamp, target)
        at = self._mail.message(target, self.rank, self._sent[target])
        for each in buffers:
            size = block(stamp.rows, each.place) if each.width else 0
            if size:
                self._device.copy(at, each.place.at, size)
            at += size
        self._device.wait()
        self._meeting.send(stamp, target, sum(each.width for each in buffers))
        self._sent[target] += 1

    def receive(self, stamp: Stamp, source: int, buffers: Sequence[Act]) -> None:
        check_message(stamp, buffers, self._room)
        self._meeting.check()
        # What was taken before is read out of its place before the sender may come to hold credit for that again.
        self._device.wait()
        self._meeting.receive(stamp, source, sum(each.width for each in buffers))
        at = self._mail.message(self.rank, source, self._taken[source])
        self._taken[source] += 1
        for each in buffers:
            size = 4 * stamp.rows * padded(each.width)
            if size:
                self._device.copy(each.place.at, at, size)
            at += size

    def memory_lines(self) -> Mapping[str, int]:
        return {MAILBOXES: self._mail.own_bytes + self._columns.nbytes}

    def close(self) -> None:
        self._columns.close()
        self._mail.close()

    def _meet(self, stamp: Stamp, widths: Sequence[int]) -> None:
        self._device.wait()
        self._meeting.all(stamp, widths)
        self._rounds += 1
