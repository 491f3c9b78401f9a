"""A copy between cards is verified, not believed: drivers have said that they do it and copied nothing.

Each rank writes a pattern into its slot of every peer's mailbox, all of the slot that a trial covers, both halves. The
numbers depend on where they stand, on the half, on who writes and to whom, so that nothing that lay there before, that
another rank wrote, or that arrived at another place, can pass. Then both ends look:

    who was written to    downloads what each peer left in the own memory
    who wrote             copies it back from the peer's memory, and downloads that

Copies run on a stream of their own with a deadline; one that does not end in time is a lie too, and the memory that it
may still write to is left alone for ever.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from backends.gpu.device import HostMemory, PeerDevice
from backends.gpu.errors import DeviceLost, DriverError
from backends.gpu.transport.base import EXCHANGE
from backends.gpu.transport.boot import Told, against
from backends.gpu.transport.mailboxes import HALVES, Mailboxes

TRIAL_BYTES = 4 << 20
"""The most of a slot that is tried, from both of its ends."""


def pattern(half: int, source: int, target: int, nbytes: int) -> npt.NDArray[np.uint8]:
    """`nbytes` bytes that say where they stand and whose they are."""
    places = np.arange(-(-nbytes // 4), dtype=np.uint32)
    key = ((half << 16 | source << 8 | target) + 1) * 0x9E3779B1 & 0xFFFFFFFF
    numbers = (places * np.uint32(2654435761)) ^ np.uint32(key)
    numbers ^= numbers >> np.uint32(15)
    return numbers.view(np.uint8)[:nbytes]


@dataclass(frozen=True)
class Span:
    """Part of a slot, in bytes."""

    at: int
    nbytes: int


def spans(slot_bytes: int) -> tuple[Span, ...]:
    """What of a slot is tried: all of it, or its beginning and its end."""
    if slot_bytes <= TRIAL_BYTES:
        return (Span(0, slot_bytes),)
    part = TRIAL_BYTES // 2
    return Span(0, part), Span(slot_bytes - part, part)


class Trial:
    """The copies of one rank. `why_not`: what went wrong first, empty so far; `hung`: a copy never ended."""

    def __init__(self, device: PeerDevice, mailboxes: Mailboxes, staging: HostMemory, timeout_s: float) -> None:
        self._device = device
        self._mail = mailboxes
        self._staging = staging
        self._timeout_s = timeout_s
        self._rank = mailboxes.rank
        self._others = [rank for rank in range(len(mailboxes.shapes)) if rank != self._rank]
        self.why_not = ""
        self.hung = False

    def write(self, half: int, span: Span) -> None:
        """To every peer, by way of the own slot."""
        self._tried(lambda: self._write(half, span))

    def look(self, half: int, span: Span) -> None:
        """At what the peers wrote here, then at what was written to them, as this card reads it there."""
        self._tried(lambda: self._look(half, span))
        self._tried(lambda: self._read_back(half, span))

    def _tried(self, work: Callable[[], None]) -> None:
        try:
            work()
        except DeviceLost:
            raise
        except DriverError as error:
            self.why_not = self.why_not or f"the driver refuses a copy between cards: {error.message}"

    def _write(self, half: int, span: Span) -> None:
        own = self._mail.slot(self._rank, half, self._rank) + span.at
        for target in self._others:
            if not self.why_not:
                self._upload(own, pattern(half, self._rank, target, span.nbytes))
                self._copy(self._mail.slot(target, half, self._rank) + span.at, own, span.nbytes, target)

    def _look(self, half: int, span: Span) -> None:
        for source in self._others:
            if not self.why_not:
                found = self._download(self._mail.slot(self._rank, half, source) + span.at, span.nbytes)
                wanted = pattern(half, source, self._rank, span.nbytes)
                self._compare(found, wanted, f"what rank {source} copied to this card is not there")

    def _read_back(self, half: int, span: Span) -> None:
        own = self._mail.slot(self._rank, half, self._rank) + span.at
        for target in self._others:
            if not self.why_not:
                self._device.fill(own, 0, span.nbytes)
                self._device.wait()
                self._copy(own, self._mail.slot(target, half, self._rank) + span.at, span.nbytes, target)
                if not self.why_not:
                    wanted = pattern(half, self._rank, target, span.nbytes)
                    found = self._download(own, span.nbytes)
                    self._compare(found, wanted, f"what was copied to the card of rank {target} reads back otherwise")

    def _copy(self, target: int, source: int, nbytes: int, peer: int) -> None:
        if not self._device.try_copy(target, source, nbytes, self._timeout_s):
            self.hung = True
            self.why_not = f"a copy between this card and that of rank {peer} did not end within {self._timeout_s:g} s"

    def _upload(self, target: int, data: npt.NDArray[np.uint8]) -> None:
        self._staging.bytes[: data.size] = data
        self._device.upload(target, self._staging.address, data.size)
        self._device.wait()

    def _download(self, source: int, nbytes: int) -> npt.NDArray[np.uint8]:
        self._device.download(self._staging.address, source, nbytes)
        self._device.wait()
        return self._staging.bytes[:nbytes]

    def _compare(self, found: npt.NDArray[np.uint8], wanted: npt.NDArray[np.uint8], what: str) -> None:
        wrong = np.flatnonzero(found != wanted)
        if len(wrong):
            self.why_not = f"{what}: {len(wrong)} of {len(wanted)} bytes are wrong, the first is byte {wrong[0]}"


def verify(device: PeerDevice, mailboxes: Mailboxes, told: Told, timeout_s: float) -> str:
    """Why copies between the cards cannot be used, the same on every rank; empty: on every rank they did what they
    should. Raises ExchangeError, DeviceLost."""
    staging, refused = _staging(device, mailboxes)
    why = told.agree("staging", refused)
    if staging is None or why:
        if staging is not None:
            staging.close()
        return why
    trial = Trial(device, mailboxes, staging, timeout_s)
    try:
        for half in range(HALVES):
            for span in spans(mailboxes.shapes[0].slot_bytes):
                trial.write(half, span)
                why = told.agree("written", trial.why_not)
                if not why:
                    trial.look(half, span)
                    why = told.agree("read", trial.why_not)
                if why:
                    _leave_what_hangs(trial, mailboxes, told)
                    return why
    finally:
        if not trial.hung:
            staging.close()
    return ""


def _staging(device: PeerDevice, mailboxes: Mailboxes) -> tuple[HostMemory | None, str]:
    size = max(span.nbytes for span in spans(mailboxes.shapes[0].slot_bytes))
    try:
        return device.pinned(size, EXCHANGE), ""
    except MemoryError as error:
        return None, f"no host memory for a trial: {error}"


def _leave_what_hangs(trial: Trial, mailboxes: Mailboxes, told: Told) -> None:
    """A copy that never ended on one rank may still write to the others'."""
    if against(["hung" if each["hung"] else "" for each in told.tell("hung", hung=trial.hung)]):
        mailboxes.abandon()
