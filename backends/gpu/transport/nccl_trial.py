"""NCCL or RCCL, from nothing to a transport: the library, a communicator, a sum that is right; each step agreed on."""

from __future__ import annotations

from collections.abc import MutableMapping
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from backends.acts import ExchangeError
from backends.base import Collective, Stamp
from backends.gpu.device import StreamDevice
from backends.gpu.errors import DeviceLost, DriverError
from backends.gpu.ops.buffers import Rows
from backends.gpu.transport import nccl_library
from backends.gpu.transport.base import EXCHANGE, MAILBOXES, PAD, Room
from backends.gpu.transport.boot import WORDS_MOST, Bounds, Told, against
from backends.gpu.transport.nccl import NcclTransport
from backends.gpu.transport.nccl_library import Communicator, Library, set_defaults

TRIAL_ROWS, TRIAL_WIDTH = 4, 64 * PAD


@dataclass(frozen=True)
class Words:
    """What a transport says of itself: why it is this one, and its notes."""

    why: str
    notes: tuple[str, ...] = ()


def open_nccl(
    device: StreamDevice,
    collective: Collective,
    told: Told,
    room: Room,
    environ: MutableMapping[str, str],
    words: Words,
    bounds: Bounds,
) -> NcclTransport | str:
    """The transport, or why there is none, the same on every rank. Raises PeerLate, StampMismatch, DeviceLost."""
    refused, library = _library(device)
    against_it = told.agree("library", refused)
    if library is None or against_it:
        return against_it
    set_defaults(environ)
    refused, communicator = _communicator(device, library, told, bounds.communicator_s)
    against_it = told.agree("communicator", refused)
    if communicator is None or against_it:
        if communicator is not None:
            communicator.abort()
        return against_it
    return _tried(device, collective, told, room, communicator, words, bounds)


def _tried(
    device: StreamDevice,
    collective: Collective,
    told: Told,
    room: Room,
    communicator: Communicator,
    words: Words,
    bounds: Bounds,
) -> NcclTransport | str:
    """Raises as `open_nccl` does."""
    transport, refused = None, ""
    trial = Room(TRIAL_ROWS, TRIAL_ROWS * TRIAL_WIDTH, TRIAL_ROWS * TRIAL_WIDTH)
    try:
        transport = NcclTransport(
            device, collective, room | trial, communicator, words.why, words.notes, timeout_s=bounds.work_s
        )
    except MemoryError as error:
        refused = f"no memory for it: {error}"
    against_it = told.agree("memory", refused)
    if transport is None or against_it:
        communicator.abort()
        if transport is not None:
            transport.close_memory()
        return against_it
    against_it = told.agree("trial sum", _sum(device, transport))
    if against_it:
        communicator.abort()
        transport.close_memory()
        return against_it
    return transport


def _library(device: StreamDevice) -> tuple[str, Library | None]:
    try:
        return "", nccl_library.find(device.facts.vendor)
    except DriverError as error:
        return error.message, None


def _communicator(
    device: StreamDevice, library: Library, told: Told, timeout_s: float
) -> tuple[str, Communicator | None]:
    unique, why = b"", ""
    if told.rank == 0:
        try:
            unique = library.unique_id()
        except DriverError as error:
            why = error.message
    records = told.tell("communicator id", id=unique.hex(), why_not=why[:WORDS_MOST])
    why = against([str(record["why_not"]) for record in records])
    if why:
        return why, None
    device.wait()  # its card is that of this thread then, which is the one that the library takes
    try:
        made = library.communicator(bytes.fromhex(records[0]["id"]), told.rank, told.ranks, timeout_s)
    except DeviceLost:
        raise
    except DriverError as error:
        return error.message, None
    return "", made


def _sum(device: StreamDevice, transport: NcclTransport) -> str:
    """What is wrong with a sum of whole numbers, which has the same bits in any order; empty: nothing."""
    size = 4 * TRIAL_ROWS * TRIAL_WIDTH
    with ExitStack() as held:
        try:
            memory = device.allocate(size, MAILBOXES)
            held.callback(memory.close)
            staging = device.pinned(size, EXCHANGE)
            held.callback(staging.close)
        except MemoryError as error:
            return f"no memory for it: {error}"
        numbers = staging.bytes[:size].view(np.float32)
        places = np.arange(len(numbers), dtype=np.float32)
        numbers[:] = places * (transport.rank + 1) + transport.rank
        device.upload(memory.address, staging.address, size)
        try:
            transport.sum(Stamp(0, 0, TRIAL_ROWS, "transport trial"), Rows(memory.address, TRIAL_WIDTH), TRIAL_WIDTH)
        except ExchangeError as error:
            return str(error)
        device.download(staging.address, memory.address, size)
        device.wait()
        ranks = transport.ranks
        wanted = places * (ranks * (ranks + 1) // 2) + ranks * (ranks - 1) // 2
        wrong = np.flatnonzero(numbers != wanted)
        return f"a sum of all ranks is wrong in {len(wrong)} of {len(wanted)} places" if len(wrong) else ""
