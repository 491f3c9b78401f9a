"""Rows by way of the host: download to pinned memory, the collective over shared memory, upload.

Every rank can do this, whatever card its peers have or whether they have one at all: the bytes in shared memory are
those that a CPU rank would write. It costs the card's bus twice and one wait for the stream.

    card   [rows, stride] ──download──▶ own ─▶ Collective ─▶ out ──upload──▶ card         one buffer: no copy between
           several buffers              own ─▶ beside ─▶ Collective ─▶ together ─▶ out     packed and unpacked by NumPy

A buffer is transferred as one block with the padding of its rows; the collective is given the columns that count.
Memory that an upload reads is left alone until the stream was waited for, which the next exchange does before it fills
`out`. A sum uploads from where it was downloaded to, so there the two change places.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from backends.base import Collective, Stamp
from backends.gpu.device import Device, HostMemory
from backends.gpu.ops.buffers import Rows
from backends.gpu.transport.base import (
    EXCHANGE,
    MAILBOXES,
    Act,
    Kind,
    Part,
    Room,
    block,
    check_gather,
    check_message,
    check_sum,
)

Floats = npt.NDArray[np.float32]


class HostTransport:
    """Over `collective`, which stays the caller's, sized for `room`. `left_bytes` of the card's memory are held by a
    trial of another transport that never ended. Raises MemoryError."""

    kind: Kind = "host"
    ordered = True

    def __init__(
        self,
        device: Device,
        collective: Collective,
        room: Room,
        why: str,
        notes: Sequence[str] = (),
        *,
        left_bytes: int = 0,
    ) -> None:
        self.why, self.notes = why, tuple(notes)
        self.rank, self.ranks = collective.rank, collective.ranks
        self._device = device
        self._collective = collective
        self._room = room
        self._left_bytes = left_bytes
        floats = max(room.own_floats, room.out_floats, room.message_floats)
        self._own = Staging(device, floats)
        try:
            self._out = Staging(device, floats)
        except MemoryError:
            self._own.close()
            raise
        self._beside: Floats = np.zeros(max(room.own_floats, room.message_floats) if room.several else 0, np.float32)
        self._together: Floats = np.zeros(max(room.out_floats, room.message_floats) if room.several else 0, np.float32)

    def sum(self, stamp: Stamp, rows: Rows, width: int) -> None:
        check_sum(stamp, rows, width, self._room)
        (own,) = self._download(stamp, [Act(rows, width)])
        self._collective.sum(stamp, own)
        self._upload(self._own, stamp, [Act(rows, width)])
        self._own, self._out = self._out, self._own

    def gather(self, stamp: Stamp, parts: Sequence[Part], target: int | None = None) -> None:
        check_gather(stamp, parts, target, self.rank, self.ranks, self._room)
        given = [Act(part.src, part.widths[self.rank]) for part in parts]
        own = _beside(self._beside, self._download(stamp, given), stamp.rows)
        widths = [sum(part.widths[rank] for part in parts) for rank in range(self.ranks)]
        if target is not None and target != self.rank:
            self._collective.gather(stamp, own, _matrix(self._out.floats, stamp.rows, sum(widths)), widths)
            return
        taken = [Act(part.out, sum(part.widths)) for part in parts]
        outs = self._out.cleared(stamp.rows, taken)
        if len(parts) == 1:
            self._collective.gather(stamp, own, outs[0], widths)
        else:
            together = _matrix(self._together, stamp.rows, sum(widths))
            self._collective.gather(stamp, own, together, widths)
            _sort_parts(together, outs, parts)
        self._upload(self._out, stamp, taken)

    def send(self, stamp: Stamp, target: int, buffers: Sequence[Act]) -> None:
        check_message(stamp, buffers, self._room)
        views = self._download(stamp, buffers)
        self._collective.send(stamp, target, _beside(self._beside, views, stamp.rows))

    def receive(self, stamp: Stamp, source: int, buffers: Sequence[Act]) -> None:
        check_message(stamp, buffers, self._room)
        self._settle()
        views = self._out.cleared(stamp.rows, buffers)
        if len(buffers) == 1:
            self._collective.receive(stamp, source, views[0])
        else:
            together = _matrix(self._together, stamp.rows, sum(each.width for each in buffers))
            self._collective.receive(stamp, source, together)
            _divide(together, views)
        self._upload(self._out, stamp, buffers)

    def memory_lines(self) -> Mapping[str, int]:
        host = self._own.nbytes + self._out.nbytes + self._beside.nbytes + self._together.nbytes
        return {EXCHANGE: host, **({MAILBOXES: self._left_bytes} if self._left_bytes else {})}

    def close(self) -> None:
        self._own.close()
        self._out.close()

    # ---------------------------------------------------------------------------------------------------------- inside

    def _download(self, stamp: Stamp, given: Sequence[Act]) -> list[Floats]:
        """What this rank gives, in host memory now, and `_out` free to be written."""
        at = self._own.address
        for each in given:
            size = block(stamp.rows, each.place) if each.width else 0
            if size:
                self._device.download(at, each.place.at, size)
            at += size
        self._settle()
        return self._own.views(stamp.rows, given)

    def _settle(self) -> None:
        """Also where nothing was downloaded: an upload of before may still be reading the staging."""
        self._device.wait()

    def _upload(self, staging: Staging, stamp: Stamp, taken: Sequence[Act]) -> None:
        at = staging.address
        for each in taken:
            size = block(stamp.rows, each.place) if each.width else 0
            if size:
                self._device.upload(each.place.at, at, size)
            at += size


class Staging:
    """Pinned host memory for blocks of rows, one behind the other. `floats` of it, of at least one page's worth."""

    def __init__(self, device: Device, floats: int) -> None:
        self._memory: HostMemory = device.pinned(max(4 * floats, 4), EXCHANGE)
        self.address = self._memory.address
        self.nbytes = self._memory.nbytes
        self.floats: Floats = self._memory.bytes[: 4 * floats].view(np.float32)

    def views(self, rows: int, acts: Sequence[Act]) -> list[Floats]:
        """The columns that count, of each block in its order."""
        return [whole[:, : act.width] for whole, act in zip(self._blocks(rows, acts), acts, strict=True)]

    def cleared(self, rows: int, acts: Sequence[Act]) -> list[Floats]:
        """The same, for blocks that are to be filled: what is not a column of theirs becomes zero, since the staging
        held blocks of other strides before."""
        blocks = self._blocks(rows, acts)
        for whole, act in zip(blocks, acts, strict=True):
            whole[:, act.width :] = 0
        return [whole[:, : act.width] for whole, act in zip(blocks, acts, strict=True)]

    def _blocks(self, rows: int, acts: Sequence[Act]) -> list[Floats]:
        found, at = [], 0
        for act in acts:
            stride = act.place.stride if act.width else 0
            found.append(self.floats[at : at + rows * stride].reshape(rows, stride))
            at += rows * stride
        return found

    def close(self) -> None:
        self.floats = np.zeros(0, np.float32)
        self._memory.close()


def _matrix(floats: Floats, rows: int, width: int) -> Floats:
    return floats[: rows * width].reshape(rows, width)


def _beside(room: Floats, views: Sequence[Floats], rows: int) -> Floats:
    """Matrices side by side in `room`; one alone where it is."""
    if len(views) == 1:
        return views[0]
    return np.concatenate(views, axis=1, out=_matrix(room, rows, sum(view.shape[1] for view in views)))


def _divide(together: Floats, views: Sequence[Floats]) -> None:
    """Columns of a message to its buffers."""
    at = 0
    for view in views:
        view[:] = together[:, at : at + view.shape[1]]
        at += view.shape[1]


def _sort_parts(together: Floats, outs: Sequence[Floats], parts: Sequence[Part]) -> None:
    """Columns of a gather of several parts, rank by rank and in each part by part, to the parts' own matrices."""
    filled = [0] * len(parts)
    at = 0
    for rank in range(len(parts[0].widths)):
        for index, part in enumerate(parts):
            width = part.widths[rank]
            outs[index][:, filled[index] : filled[index] + width] = together[:, at : at + width]
            filled[index] += width
            at += width
