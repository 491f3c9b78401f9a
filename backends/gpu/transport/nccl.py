"""Rows by NCCL or RCCL: a meeting on the host, then the library's own calls on the stream.

    sum      meeting ─▶ ncclAllReduce, in place
    gather   meeting ─▶ one group of ncclSend and ncclRecv: blocks of all ranks into slots of the own card ─▶ columns
    message  by way of the host, as `HostTransport` does it

The meetings are cheap: nothing is waited for on the card before them, and they carry one number for each row. They tell
ranks apart that are not at the same exchange, which the library cannot: it pairs calls by their order, and would fill
memory with whatever came, or wait for ever.

In the library waiting is done on the card, where no bound of the host's reaches. So the stream is looked at until it is
idle, and a communicator whose work is not done within `timeout_s` is aborted; then a peer counts as late, and nothing
more is exchanged. Messages do not go through it at all: its send is done when its receiver takes it, and a sender never
waits for a peer that is behind (backends/acts.py).

The order of a sum is the library's own; that it is the same on every rank is not promised (`ordered`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from backends.acts import ExchangeError, PeerLate
from backends.base import Collective, Stamp
from backends.gpu.device import StreamDevice
from backends.gpu.ops.buffers import Rows
from backends.gpu.transport.base import (
    MAILBOXES,
    Act,
    Kind,
    Part,
    Room,
    block,
    check_gather,
    check_sum,
    padded,
)
from backends.gpu.transport.columns import Columns, offsets
from backends.gpu.transport.host import HostTransport
from backends.gpu.transport.meeting import Meeting
from backends.gpu.transport.nccl_library import Communicator, NcclError, NcclLate

LOOKS = 200
"""At the stream, before it is looked at now and then only."""
NAP_S = 0.0001


class NcclTransport:
    """Over a communicator of all ranks, which becomes its own. Raises OutOfDeviceMemory, MemoryError, KernelError; then
    the communicator is the caller's still."""

    kind: Kind = "nccl"
    ordered = False

    def __init__(
        self,
        device: StreamDevice,
        collective: Collective,
        room: Room,
        communicator: Communicator,
        why: str,
        notes: Sequence[str] = (),
        *,
        timeout_s: float,
    ) -> None:
        self.why, self.notes = why, tuple(notes)
        self.rank, self.ranks = collective.rank, collective.ranks
        self._device = device
        self._room = room
        self._communicator = communicator
        self._timeout_s = timeout_s
        self._meeting = Meeting(collective, room.rows)
        messages = Room(room.rows, message_floats=room.message_floats, several=room.several)
        self._host = HostTransport(device, collective, messages, why)
        try:
            self._slot_bytes = -(-4 * max(room.own_floats, 1) // 256) * 256
            self._slots = device.allocate(self._slot_bytes * self.ranks, MAILBOXES)
        except BaseException:
            self._host.close()
            raise
        try:
            self._columns = Columns(device, room.rows)
        except BaseException:
            self._slots.close()
            self._host.close()
            raise

    def sum(self, stamp: Stamp, rows: Rows, width: int) -> None:
        check_sum(stamp, rows, width, self._room)
        self._meeting.all(stamp, [width] * self.ranks)
        count = stamp.rows * padded(width)
        if count:
            self._ask(stamp, lambda: self._communicator.all_reduce(rows.at, count, self._device.stream))

    def gather(self, stamp: Stamp, parts: Sequence[Part], target: int | None = None) -> None:
        check_gather(stamp, parts, target, self.rank, self.ranks, self._room)
        sizes = [4 * stamp.rows * sum(padded(part.widths[rank]) for part in parts) for rank in range(self.ranks)]
        self._meeting.all(stamp, [sum(part.widths[rank] for part in parts) for rank in range(self.ranks)])
        for part, offset in zip(parts, offsets(stamp.rows, parts, self.rank), strict=True):
            size = block(stamp.rows, part.src) if part.widths[self.rank] else 0
            if size:
                self._device.copy(self._slot(self.rank) + offset, part.src.at, size)
        wanted = target is None or target == self.rank
        to = [rank for rank in range(self.ranks) if rank != self.rank and target in (None, rank)]
        if any(sizes):
            self._ask(stamp, lambda: self._exchange(sizes, to if sizes[self.rank] else [], wanted))
        if wanted:
            blocks = [self._slot(rank) for rank in range(self.ranks)]
            self._device.launch(self._columns.place(stamp.rows, parts, blocks))

    def send(self, stamp: Stamp, target: int, buffers: Sequence[Act]) -> None:
        self._meeting.check()
        self._host.send(stamp, target, buffers)

    def receive(self, stamp: Stamp, source: int, buffers: Sequence[Act]) -> None:
        self._meeting.check()
        self._host.receive(stamp, source, buffers)

    def memory_lines(self) -> Mapping[str, int]:
        return {**self._host.memory_lines(), MAILBOXES: self._slots.nbytes + self._columns.nbytes}

    def close(self) -> None:
        self._communicator.close()
        self.close_memory()

    def close_memory(self) -> None:
        """All but the communicator."""
        self._columns.close()
        self._slots.close()
        self._host.close()

    # ---------------------------------------------------------------------------------------------------------- inside

    def _slot(self, rank: int) -> int:
        return self._slots.address + rank * self._slot_bytes

    def _exchange(self, sizes: Sequence[int], to: Sequence[int], wanted: bool) -> None:
        """This rank's block to the ranks `to`, and where they are wanted those of all others into their slots."""
        stream = self._device.stream
        with self._communicator.group():
            for rank in to:
                self._communicator.send(self._slot(self.rank), sizes[self.rank] // 4, rank, stream)
            for rank in range(self.ranks):
                if wanted and rank != self.rank and sizes[rank]:
                    self._communicator.receive(self._slot(rank), sizes[rank] // 4, rank, stream)

    def _ask(self, stamp: Stamp, calls: Callable[[], None]) -> None:
        """What the library is asked for, until it is done."""
        deadline = time.monotonic() + self._timeout_s
        try:
            calls()
            self._communicator.settle(stamp.label, deadline)
            late = not self._is_done(stamp, deadline)
        except NcclLate:
            late = True
        except NcclError as error:
            self._communicator.abort()
            raise self._meeting.fail(ExchangeError(error.message, stamp.label, -1)) from error
        if late:
            self._communicator.abort()
            what = f"{stamp.label!r} of plan {stamp.seq} in epoch {stamp.epoch}"
            raise self._meeting.fail(
                PeerLate(f"the cards did not finish {what} within {self._timeout_s:g} s", stamp.label, -1)
            )

    def _is_done(self, stamp: Stamp, deadline: float) -> bool:
        looks = 0
        while not self._device.idle():
            looks += 1
            if looks > LOOKS:
                self._communicator.check(stamp.label)
                if time.monotonic() > deadline:
                    return False
                time.sleep(NAP_S)
        return True
