"""Which transport a fleet's ranks use: rules in their order, then trials, and words for what was found.

    a rank alone                            host     nothing is exchanged
    nobody said what the others run on      host
    other vendors, or a CPU rank            host     there is nothing that both can do
    two ranks on one card                   host     NCCL and RCCL refuse it, and there is no other card to copy to
    HOMESERVE_TRANSPORT=host|peer|nccl      that one, or an error: an explicit choice is met or refused
    no IPC, another generation, a window
    that is smaller than the card's memory,
    no room in it, the driver's no          not peer
    a copy that was tried and is not there  not peer, and that is told: a driver that lies is worth knowing of
    no library, no communicator, a sum that
    was tried and is wrong                  not nccl
    else                                    peer, nccl, host: the first that is left

Ranks must take the same one. So a rule is asked of what all ranks were told of all (`backends.gpu.transport.boot`), and
the outcome of a trial is what the weakest rank saw. Until every rank is known to take part nothing is exchanged at all,
because a CPU rank would not answer; that is why the fleet's backends are asked for.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass

from backends.base import Collective
from backends.gpu.device import Device, PeerDevice, StreamDevice
from backends.gpu.errors import GpuError
from backends.gpu.transport import aperture
from backends.gpu.transport.aperture import Apertures
from backends.gpu.transport.base import Kind, Room, Transport
from backends.gpu.transport.boot import Bounds, Record, Told
from backends.gpu.transport.host import HostTransport
from backends.gpu.transport.nccl_trial import Words, open_nccl
from backends.gpu.transport.peer_trial import Refused, open_peer

log = logging.getLogger(__name__)

VARIABLE = "HOMESERVE_TRANSPORT"
BOUNDS = Bounds()
CHOICES = ("auto", "host", "peer", "nccl")
VENDORS = {"cuda": "nvidia", "rocm": "amd"}
"""Of the backends that have cards."""


class TransportRefused(GpuError):
    """A transport that was asked for by name cannot be had."""


@dataclass(frozen=True)
class Said:
    """What a rank says of its card. `window` None: unknown; `ipc` and `stream`: what its driver's code can do; `asked`:
    the user's choice."""

    vendor: str
    uuid: str
    name: str
    arch: str
    total_bytes: int
    window: int | None
    ipc: bool
    stream: bool
    asked: str

    @classmethod
    def of(cls, record: Record) -> Said:
        return cls(**record)


def fleet_of(extra: str) -> tuple[str, ...]:
    """The backends of all ranks by rank, of `cuda,cuda,cpu`; empty where nobody said."""
    return tuple(name for name in extra.split(",") if name)


def asked_for(environ: MutableMapping[str, str]) -> str:
    """The user's choice. Raises TransportRefused for one that does not exist."""
    choice = environ.get(VARIABLE, "") or "auto"
    if choice not in CHOICES:
        raise TransportRefused(f"{VARIABLE}={choice} is no transport", fix=f"use one of {', '.join(CHOICES)}")
    return choice


def without_asking(fleet: Sequence[str], ranks: int) -> str:
    """Why it is the host's transport whatever the cards say; empty: they have to be asked."""
    if ranks == 1:
        return "a rank alone exchanges nothing"
    if len(fleet) != ranks:
        return "it is not known what the other ranks run on"
    vendors = [VENDORS.get(backend, "") for backend in fleet]
    if len(set(vendors)) > 1 or not vendors[0]:
        return f"ranks on {', '.join(fleet)} have only the host in common"
    return ""


def one_card(said: Sequence[Said]) -> str:
    """Why neither peers nor the library can work; empty: every rank has a card of its own."""
    for rank, each in enumerate(said):
        for other, before in enumerate(said[:rank]):
            if before.uuid == each.uuid:
                return f"ranks {other} and {rank} share one card, {each.name} ({each.uuid})"
    return ""


def not_peer(said: Sequence[Said]) -> str:
    """Why copies between the cards are not even tried; empty: they are."""
    for rank, each in enumerate(said):
        if not each.ipc:
            return f"rank {rank}'s driver has no memory handles for other processes"
        if each.arch != said[0].arch:
            return f"{each.name} is of another generation than {said[0].name} ({each.arch} and {said[0].arch})"
        if each.window is not None and aperture.is_narrow(each.window, each.total_bytes):
            return (
                f"the window of {each.name} on rank {rank} ({each.window >> 20} MiB) is smaller than its memory"
                f" ({each.total_bytes >> 20} MiB): enable Resizable BAR"
            )
    return ""


def not_nccl(said: Sequence[Said]) -> str:
    return "" if all(each.stream for each in said) else "not every rank's driver shows its stream"


def open_transport(
    device: Device,
    collective: Collective,
    room: Room,
    fleet: Sequence[str] = (),
    *,
    environ: MutableMapping[str, str] = os.environ,
    apertures: Apertures | None = None,
    tell: Callable[[str], None] = lambda what: log.warning("%s", what),
    bounds: Bounds = BOUNDS,
) -> Transport:
    """The transport of this rank, for exchanges of up to `room`. Every rank of a fleet of cards calls it at once, with
    the same `fleet`: the backends of all ranks. `tell` hears what has to be known (Transport.notes). Raises
    TransportRefused, ExchangeError, MemoryError, DeviceLost, KernelError."""
    return _Probe(device, collective, room, fleet, environ, apertures, tell, bounds).run()


class _Probe:
    def __init__(
        self,
        device: Device,
        collective: Collective,
        room: Room,
        fleet: Sequence[str],
        environ: MutableMapping[str, str],
        apertures: Apertures | None,
        tell: Callable[[str], None],
        bounds: Bounds,
    ) -> None:
        self._device = device
        self._collective = collective
        self._room = room
        self._fleet = fleet
        self._environ = environ
        self._tell = tell
        self._bounds = bounds
        self._told = Told(collective)
        facts = device.facts
        self._window = aperture.window_bytes(facts.pci, facts.vendor)
        self._apertures = apertures or Apertures(self._window, facts.total_bytes)
        self._reasons: list[str] = []
        self._notes: list[str] = []
        self._left_bytes = 0

    def run(self) -> Transport:
        transport = self._run()
        log.info("transport of rank %d of %d: %s (%s)", transport.rank, transport.ranks, transport.kind, transport.why)
        return transport

    def _run(self) -> Transport:
        asked = asked_for(self._environ)
        why = without_asking(self._fleet, self._collective.ranks)
        if why:
            self._refuse_unless(asked in ("auto", "host") or self._collective.ranks == 1, asked, why)
            return self._host(why)
        said = [Said.of(record) for record in self._told.tell("cards", **vars(self._said(asked)))]
        choices = {each.asked for each in said}
        if len(choices) > 1:
            raise TransportRefused(
                f"the ranks were asked for different transports: {', '.join(sorted(choices))}",
                fix=f"set {VARIABLE} the same for all of them",
            )
        if asked == "host":
            return self._host(f"{VARIABLE}=host")
        shared = one_card(said)
        if shared:
            self._refuse_unless(asked == "auto", asked, shared)
            return self._host(shared)
        return self._tried(asked, said)

    def _tried(self, asked: str, said: Sequence[Said]) -> Transport:
        attempts: dict[Kind, Callable[[Sequence[Said]], Transport | None]] = {"peer": self._peer, "nccl": self._nccl}
        for kind, attempt in attempts.items():
            if asked in ("auto", kind):
                transport = attempt(said)
                if transport is not None:
                    return transport
        self._refuse_unless(asked == "auto", asked, "; ".join(self._reasons))
        return self._host("; ".join(self._reasons))

    def _peer(self, said: Sequence[Said]) -> Transport | None:
        why = not_peer(said)
        if not why:
            why = self._told.agree("reach", self._reached(said))
        if why:
            self._reasons.append(f"no copies between the cards: {why}")
            return None
        assert isinstance(self._device, PeerDevice), "every rank said so"
        found = open_peer(self._device, self._collective, self._told, self._room, self._apertures, self._bounds.copy_s)
        if not isinstance(found, Refused):
            return found
        self._left_bytes = found.left_bytes
        self._reasons.append(f"no copies between the cards: {found.why}")
        if found.lied:
            self._note(f"copies between the cards cannot be trusted: {found.why}; another transport is used")
        return None

    def _reached(self, said: Sequence[Said]) -> str:
        assert isinstance(self._device, PeerDevice), "every rank said so"
        for rank, each in enumerate(said):
            refused = self._device.reaches(each.uuid) if rank != self._told.rank else ""
            if refused:
                return f"the driver says no to {each.name} of rank {rank}: {refused}"
        return ""

    def _nccl(self, said: Sequence[Said]) -> Transport | None:
        why = not_nccl(said)
        if not why:
            assert isinstance(self._device, StreamDevice), "every rank said so"
            words = Words("; ".join([*self._reasons, "a sum by the library was right"]), tuple(self._notes))
            shared = self._collective, self._told, self._room
            found = open_nccl(self._device, *shared, self._environ, words, self._bounds)
            if not isinstance(found, str):
                return found
            why = found
        self._reasons.append(f"no collectives library: {why}")
        return None

    def _said(self, asked: str) -> Said:
        facts, device = self._device.facts, self._device
        ipc, stream = isinstance(device, PeerDevice), isinstance(device, StreamDevice)
        named = (facts.vendor, facts.uuid, facts.name[:100], facts.arch.name)
        return Said(*named, facts.total_bytes, self._window, ipc, stream, asked)

    def _host(self, why: str) -> Transport:
        return HostTransport(self._device, self._collective, self._room, why, self._notes, left_bytes=self._left_bytes)

    def _note(self, what: str) -> None:
        self._notes.append(what)
        self._tell(what)

    def _refuse_unless(self, fits: bool, asked: str, why: str) -> None:
        if not fits:
            raise TransportRefused(
                f"{VARIABLE}={asked} cannot be had: {why}", fix=f"leave {VARIABLE} out, or set it to host"
            )
