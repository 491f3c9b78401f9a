"""One rank of the tests of transports, as a process: `transport_rank.py FD SHAPE RANK JOB OPTIONS`.

Says that it is up and waits for a line, then prints one JSON document for each thing that it was told to do. OPTIONS,
as JSON: `arch` and `uuid` of each rank's card, `lie` of each (peer_device.py), `fleet`, `plain` (a card without peers
and stream), `timeout_s`, `window` of each card in bytes; `driver`: instead of such cards, vendor and number of each
rank's card, by the driver that the system's loader finds (tests/fake_cards.py).
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

# Modules of the test folders, which are no package.
sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "kernel"))

from emulated_device import EmulatedDevice
from peer_device import PeerEmulatedDevice

from backends.acts import ActShape, ExchangeError, Stamp
from backends.gpu.card import open_card
from backends.gpu.device import Device
from backends.gpu.errors import GpuError
from backends.gpu.ops.buffers import NONE, Rows
from backends.gpu.transport.aperture import Apertures
from backends.gpu.transport.base import Act, Part, Room, Transport, padded
from backends.gpu.transport.boot import Bounds
from backends.gpu.transport.columns import SYMBOLS
from backends.gpu.transport.probe import open_transport
from backends.host import library
from backends.host.collective import HostCollective

SUMS = ((1, 16), (3, 40), (0, 64), (5, 0), (37, 300), (2, 1000))
"""Rows and width."""
SHARES = ((30, 17, 17), (16, 0, 20), (0, 5, 1), (0, 0, 0), (100, 0, 20))
TWO_PARTS = ((30, 17, 17), (2, 0, 3))
TARGETS = (None, 0, 1)
ROWS = 40
ROOM = Room(ROWS, ROWS * 1008, ROWS * 1008, ROWS * 128, several=True)
SPREAD = 1e6
"""Parts of very different size: another order of the sum has other bits."""


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def part_of(seed: int, rank: int, rows: int, width: int) -> npt.NDArray[np.float32]:
    numbers = np.random.default_rng([seed, rank])
    scale = SPREAD ** numbers.uniform(-1, 1, (rows, width))
    return (numbers.standard_normal((rows, width)) * scale).astype(np.float32)


def digest(*matrices: npt.NDArray[np.float32]) -> str:
    found = hashlib.sha256()
    for matrix in matrices:
        found.update(np.ascontiguousarray(matrix).tobytes())
    return found.hexdigest()


class Card:
    """Buffers on a card, one behind the other."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._memory = device.allocate(4 << 20, "workspace")
        self._staging = device.pinned(1 << 20, "tests")
        self._used = 0

    def rows(self, matrix: npt.NDArray[np.float32], stride: int = 0) -> Rows:
        """A buffer that holds this, and zeros beside it."""
        rows, width = matrix.shape
        if not matrix.size:
            return NONE
        whole = np.zeros((rows, stride or padded(width)), np.float32)
        whole[:, :width] = matrix
        at = self._memory.address + self._used
        self._used += -(-whole.nbytes // 256) * 256
        self._staging.bytes[: whole.nbytes] = whole.view(np.uint8).reshape(-1)
        self.device.upload(at, self._staging.address, whole.nbytes)
        self.device.wait()
        return Rows(at, whole.shape[1])

    def read(self, place: Rows, rows: int, width: int) -> npt.NDArray[np.float32]:
        """With what lies beside it, which has to be zeros."""
        size = 4 * rows * place.stride
        if not size or not width:
            return np.zeros((rows, width), np.float32)
        self.device.download(self._staging.address, place.at, size)
        self.device.wait()
        whole = self._staging.bytes[:size].view(np.float32).reshape(rows, place.stride).copy()
        assert not whole[:, width:].any(), "padding is zero"
        return whole[:, :width]

    def reuse(self) -> None:
        self._used = 0

    def close(self) -> None:
        self._staging.close()
        self._memory.close()


def exchanges(transport: Transport, card: Card) -> None:
    """Every kind, in turn."""
    sums(transport, card)
    gathers(transport, card)
    stream(transport, card)


def sums(transport: Transport, card: Card) -> None:
    late = np.random.default_rng(transport.rank)
    for seed, (rows, width) in enumerate(SUMS * 3):
        card.reuse()
        place = card.rows(part_of(seed, transport.rank, rows, width))
        if late.random() < 0.3:
            time.sleep(late.random() * 0.002)
        transport.sum(Stamp(1, seed, rows, f"sum {seed % len(SUMS)}"), place, width)
        say(digest=digest(card.read(place, rows, width)))


def gathers(transport: Transport, card: Card) -> None:
    for seed, shares in enumerate(SHARES):
        for target in TARGETS:
            card.reuse()
            found = gather(transport, card, seed, [shares], target)
            say(digest=digest(*found) if found else None)
    for target in TARGETS:
        card.reuse()
        found = gather(transport, card, 99, TWO_PARTS, target)
        say(digest=digest(*found) if found else None)


def gather(
    transport: Transport, card: Card, seed: int, shares: Any, target: int | None
) -> list[npt.NDArray[np.float32]]:
    rank, rows, parts = transport.rank, 4, []
    wanted = target is None or target == rank
    for index, of in enumerate(shares):
        widths = of[: transport.ranks]
        src = card.rows(part_of(seed + index, rank, rows, widths[rank]))
        blank = np.zeros((rows, sum(widths)), np.float32)
        # The second one has no space between its rows.
        out = card.rows(blank, sum(widths) if index else 0) if wanted else NONE
        parts.append(Part(src, out, widths))
    transport.gather(Stamp(1, seed, rows, "heads"), parts, target)
    return [card.read(part.out, rows, sum(part.widths)) for part in parts] if wanted else []


def stream(transport: Transport, card: Card) -> None:
    """Messages from each rank to the next, as many ahead as there is credit: of two buffers, one of them alone."""
    rank, last = transport.rank, transport.ranks - 1
    for first in range(0, 12, 3):
        for seq in range(first, first + 3):
            card.reuse()
            of_two = seq % 2 == 0
            hidden, more = part_of(seq, 0, 2, 40), part_of(seq, 1, 2, 3)
            blank = 0 if rank else 1
            buffers = [Act(card.rows(hidden * blank), 40), *([Act(card.rows(more * blank), 3)] if of_two else [])]
            if rank:
                transport.receive(Stamp(1, seq, 2, "rows"), rank - 1, buffers)
            if rank < last:
                transport.send(Stamp(1, seq, 2, "rows"), rank + 1, buffers)
            if rank == last:
                say(digest=digest(*(card.read(each.place, 2, each.width) for each in buffers)))
        # Rank 0 goes on when all of them were taken.
        one = card.rows(np.ones((1, 16), np.float32))
        transport.sum(Stamp(1, first, 1, "round"), one, 16)


def too_many(transport: Transport, card: Card) -> None:
    """Rank 0 sends until there is no credit; then the others take what was sent."""
    sent = 0
    if transport.rank == 0:
        try:
            while True:
                place = card.rows(np.full((1, 16), sent, np.float32))
                transport.send(Stamp(1, sent, 1, "rows"), 1, [Act(place, 16)])
                sent += 1
        except ExchangeError as error:
            say(error=type(error).__name__, sent=sent)
    one = card.rows(np.ones((1, 16), np.float32))
    transport.sum(Stamp(1, 99, 1, "met"), one, 16)
    if transport.rank == 1:
        values = []
        for seq in range(3):
            place = card.rows(np.ones((1, 16), np.float32))
            transport.receive(Stamp(1, seq, 1, "rows"), 0, [Act(place, 16)])
            values.append(float(card.read(place, 1, 16)[0, 5]))
        say(values=values)


def for_ever(transport: Transport, card: Card) -> None:
    place = card.rows(np.ones((1, 64), np.float32))
    seq = 0
    while True:
        seq += 1
        transport.sum(Stamp(1, seq, 1, "for ever"), place, 64)
        if seq == 20:
            say(ready=True)


def another_plan(transport: Transport, card: Card) -> None:
    seq = 8 if transport.rank == transport.ranks - 1 else 7
    transport.sum(Stamp(1, seq, 1, "ffn"), card.rows(np.ones((1, 16), np.float32)), 16)


def another_width(transport: Transport, card: Card) -> None:
    width = 32 if transport.rank == transport.ranks - 1 else 16
    transport.sum(Stamp(1, 7, 1, "ffn"), card.rows(np.ones((1, width), np.float32)), width)


def refused(transport: Transport, card: Card) -> None:
    """What is wrong alone is told before the peers know of it; then all goes on."""
    for width, stride in ((2000, 2000), (16, 32)):
        try:
            transport.sum(Stamp(1, 1, ROWS, "sum"), Rows(card.rows(np.ones((ROWS, 16), np.float32)).at, stride), width)
        except ValueError as error:
            say(refused=str(error))
    place = card.rows(np.ones((1, 16), np.float32))
    transport.sum(Stamp(1, 2, 1, "sum"), place, 16)
    say(value=float(card.read(place, 1, 16)[0, 3]))


def nothing(transport: Transport, card: Card) -> None:
    pass


JOBS: dict[str, Callable[[Transport, Card], None]] = {
    each.__name__: each
    for each in (exchanges, sums, gathers, stream, too_many, for_ever, another_plan, another_width, refused, nothing)
}


def device_of(rank: int, options: dict[str, Any]) -> Device:
    if options.get("driver"):
        vendor, index = options["driver"][rank]
        return open_card(vendor, index=index, say=print)
    arch = options.get("arch", ["sm_86"] * 8)[rank]
    uuid = options.get("uuid", [f"GPU-{n}" for n in range(8)])[rank]
    if options.get("plain"):
        return EmulatedDevice(arch, uuid=uuid)
    return PeerEmulatedDevice(arch, uuid=uuid, lie=options.get("lie", [""] * 8)[rank])


def main(fd: str, shape: str, rank: str, job: str, words: str) -> None:
    facts, options = json.loads(shape), json.loads(words)
    routes = tuple((source, target) for source, target in facts.pop("routes"))
    shape_ = ActShape(**facts | {"sizes": tuple(facts["sizes"])}, routes=routes)
    acts = HostCollective(library.load(), int(fd), shape_, int(rank), timeout_s=options["timeout_s"], spin_us=0)
    device = device_of(int(rank), options)
    device.prepare(SYMBOLS)  # compiled before bounds hold
    say(up=True)
    sys.stdin.readline()
    told: list[str] = []
    try:
        fleet = options.get("fleet", ())
        bounds = Bounds(2.0, 2.0, 6.0)
        window = Apertures(options["window"], 1 << 40) if "window" in options else None
        transport = open_transport(device, acts, ROOM, fleet, apertures=window, tell=told.append, bounds=bounds)
    except (GpuError, ExchangeError) as error:
        say(refused=type(error).__name__, words=str(error))
        return
    say(kind=transport.kind, why=transport.why, notes=list(transport.notes), told=told, lines=transport.memory_lines())
    card = Card(device)
    try:
        JOBS[job](transport, card)
    except ExchangeError as error:
        again = ""
        try:
            transport.sum(Stamp(1, 10**6, 1, "later"), card.rows(np.ones((1, 16), np.float32)), 16)
        except ExchangeError as second:
            again = str(second)
        say(error=type(error).__name__, peer=error.peer, label=error.label, words=str(error), again=again)
        return
    transport.close()
    card.close()
    mapped = {"mapped": window.mapped_bytes} if window else {}
    say(closed=True, held=device.held if isinstance(device, EmulatedDevice) else 0, **mapped)
    acts.close()
    if (
        transport.kind != "host" or "mailboxes" not in transport.memory_lines()
    ):  # what a copy hangs on is never given back
        device.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
