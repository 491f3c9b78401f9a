"""Copies between cards, from nothing to a transport: sizes, memory, handles, mappings, a trial; each step agreed on.

A rank that fails at a step says so in the record that ends it. Then every rank takes back what it has of this, mappings
of others' memory before its own, and the caller looks for another transport.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from backends.base import Collective
from backends.gpu.device import PeerDevice
from backends.gpu.errors import DeviceLost, DriverError
from backends.gpu.transport.aperture import Apertures
from backends.gpu.transport.base import Room
from backends.gpu.transport.boot import WORDS_MOST, Record, Told, against
from backends.gpu.transport.columns import Columns
from backends.gpu.transport.mailboxes import Mailboxes, MailboxShape
from backends.gpu.transport.peer import PeerTransport
from backends.gpu.transport.verify import verify

SLOT_LEAST = 64 << 10
"""Bytes: a trial needs a place, also where nothing is ever summed or gathered."""


@dataclass(frozen=True)
class Refused:
    """`lied`: the driver had said yes until a copy was tried. `left_bytes` of the card stay held for a copy that never
    ended."""

    why: str
    lied: bool = False
    left_bytes: int = 0


def open_peer(
    device: PeerDevice, collective: Collective, told: Told, room: Room, apertures: Apertures, timeout_s: float
) -> PeerTransport | Refused:
    """`timeout_s` bounds each copy that is tried. Raises ExchangeError, DeviceLost, KernelError, OutOfDeviceMemory."""
    shapes = _shapes(told, collective, room)
    own = shapes[told.rank].total_bytes
    why, mailboxes = _mapped(device, told, shapes, apertures)
    if mailboxes is None:
        return Refused(why)
    lied = verify(device, mailboxes, told, timeout_s)
    if lied:
        mailboxes.unmap()
        told.agree("unmapped")
        mailboxes.close()
        return Refused(lied, lied=True, left_bytes=own if mailboxes.abandoned else 0)
    try:
        columns = Columns(device, room.rows)
    except BaseException:
        mailboxes.close()
        raise
    return PeerTransport(device, collective, room, mailboxes, columns, "copies between all cards were seen to arrive")


def _shapes(told: Told, collective: Collective, room: Room) -> list[MailboxShape]:
    """Of every rank's mailbox, from what all say of their exchanges."""
    credit = [_credit(collective, target) for target in range(told.ranks)]
    records = told.tell("sizes", own=room.own_floats, message=room.message_floats, credit=credit)
    slot = max(SLOT_LEAST, *(4 * int(record["own"]) for record in records))
    message = max(4 * int(record["message"]) for record in records)
    return [MailboxShape(slot, message, _depths(records, rank, message)) for rank in range(told.ranks)]


def _depths(records: Sequence[Record], rank: int, message: int) -> tuple[int, ...]:
    return tuple(int(record["credit"][rank]) if message else 0 for record in records)


def _credit(collective: Collective, target: int) -> int:
    """Messages that may be under way to a rank: before the first one that is all there will be room for."""
    try:
        return collective.credit(target)
    except ValueError:
        return 0


def _mapped(
    device: PeerDevice, told: Told, shapes: Sequence[MailboxShape], apertures: Apertures
) -> tuple[str, Mailboxes | None]:
    """The mailboxes, open on every rank; or why they are not, and then on none."""
    own = shapes[told.rank].total_bytes
    why = apertures.refusal(own)
    mailboxes: Mailboxes | None = None
    if not why:
        why, mailboxes = _made(device, told.rank, shapes, apertures)
    handle = mailboxes.handle.hex() if mailboxes is not None else ""
    records = told.tell("handles", handle=handle, why_not=why[:WORDS_MOST])
    why = against([str(record["why_not"]) for record in records])
    if mailboxes is None or why:
        if mailboxes is not None:
            mailboxes.close()
        return why, None
    why = told.agree("mapped", _opened(mailboxes, [bytes.fromhex(record["handle"]) for record in records]))
    if why:
        mailboxes.unmap()
        told.agree("unmapped")
        mailboxes.close()
        return why, None
    return "", mailboxes


def _made(
    device: PeerDevice, rank: int, shapes: Sequence[MailboxShape], apertures: Apertures
) -> tuple[str, Mailboxes | None]:
    try:
        return "", Mailboxes(device, rank, shapes, apertures)
    except DeviceLost:
        raise
    except DriverError as error:
        return error.message, None


def _opened(mailboxes: Mailboxes, handles: Sequence[bytes]) -> str:
    try:
        mailboxes.open(handles)
    except DeviceLost:
        raise
    except DriverError as error:
        return error.message
    return ""
