"""Mailboxes in the memory of cards, which the cards of other ranks write to.

    mailbox of a rank    half 0: slot of rank 0 │ slot of rank 1 │ …     sums and gathers: halves are used in turn
                         half 1: slot of rank 0 │ slot of rank 1 │ …
                         route from rank 0: depth + 1 messages │ …       a place more than messages may be under way

Rank r alone writes the slots of rank r, in the mailboxes of all ranks, and the messages of its own routes. Nobody says
that a slot was read: a rank that has met the others in exchange n + 1 has waited for its stream, in which it read what
came with exchange n; so whoever writes for n + 2 has met those who are done with n. A message is taken behind a wait
for the stream too, so one place more than there is credit for is enough.

Memory of a card is opened by others through a handle. A driver puts small allocations together into blocks of 2 MiB,
and a handle shows a block as a whole; so a mailbox is whole blocks, and peers see nothing else of this card. Theirs are
closed before the own is given back, and where a trial never ended nothing is: the driver would wait for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from backends.gpu.device import Memory, PeerDevice
from backends.gpu.transport.aperture import Apertures
from backends.gpu.transport.base import MAILBOXES

ALIGNED = 256
BLOCK_BYTES = 2 << 20
"""What a driver hands out of a card's memory at once: an allocation of whole ones shares none with others."""
HALVES = 2


@dataclass(frozen=True)
class MailboxShape:
    """Of one rank's mailbox. `slot_bytes`: the most that a rank gives at once; `message_bytes`: the most of a message;
    `depths`: messages that may be under way from each rank to this one, 0 where none ever are."""

    slot_bytes: int
    message_bytes: int
    depths: tuple[int, ...]

    def slot_at(self, half: int, rank: int) -> int:
        return (half * len(self.depths) + rank) * _aligned(self.slot_bytes)

    def message_at(self, source: int, count: int) -> int:
        """Of message `count`, counted from 0, of rank `source`."""
        places = sum(depth + 1 for depth in self.depths[:source] if depth) + count % (self.depths[source] + 1)
        return self.slot_at(HALVES, 0) + places * _aligned(self.message_bytes)

    @property
    def total_bytes(self) -> int:
        routes = sum(depth + 1 for depth in self.depths if depth)
        nbytes = self.slot_at(HALVES, 0) + routes * _aligned(self.message_bytes)
        return max(-(-nbytes // BLOCK_BYTES), 1) * BLOCK_BYTES


class Mailboxes:
    """The own one, and those of the peers as this card sees them. `shapes` of all ranks, in their order. While they
    are open, `apertures` has the own one: that is what peers map of this card."""

    def __init__(self, device: PeerDevice, rank: int, shapes: Sequence[MailboxShape], apertures: Apertures) -> None:
        """Raises OutOfDeviceMemory, DriverError."""
        self.shapes = tuple(shapes)
        self.rank = rank
        self._device = device
        self.abandoned = False
        self._apertures = apertures
        self._counted = False
        self._peers: dict[int, Memory] = {}
        size = self.own_bytes
        self._own = device.allocate(size, MAILBOXES, f"{size} bytes of mailboxes for {len(shapes)} ranks")
        try:
            # New memory is zeroed in the stream: that is done before somebody else may write.
            device.wait()
            self.handle = device.export(self._own)
        except BaseException:
            self._own.close()
            raise

    @property
    def own_bytes(self) -> int:
        return self.shapes[self.rank].total_bytes

    def open(self, handles: Sequence[bytes]) -> None:
        """Map the mailboxes of all others. Raises DriverError, ValueError for what the window has no room for."""
        self._apertures.add(self.own_bytes)
        self._counted = True
        for rank, handle in enumerate(handles):
            if rank != self.rank:
                self._peers[rank] = self._device.open(handle, self.shapes[rank].total_bytes)

    def slot(self, owner: int, half: int, rank: int) -> int:
        """Address, here, of rank `rank`'s slot in the mailbox of `owner`."""
        return self._base(owner) + self.shapes[owner].slot_at(half, rank)

    def message(self, owner: int, source: int, count: int) -> int:
        return self._base(owner) + self.shapes[owner].message_at(source, count)

    def abandon(self) -> None:
        """Something never ended that may still write here: all of it stays as it is until the process ends."""
        self.abandoned = True

    def unmap(self) -> None:
        """Close what is others'."""
        if not self.abandoned:
            for memory in self._peers.values():
                memory.close()
            self._peers.clear()

    def close(self) -> None:
        self.unmap()
        if self.abandoned:
            return
        self._own.close()
        if self._counted:
            self._apertures.remove(self.own_bytes)
            self._counted = False

    def _base(self, owner: int) -> int:
        return self._own.address if owner == self.rank else self._peers[owner].address


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNED) * ALIGNED
