"""Exchanges between ranks through memory of the host: `Collective` (backends/base.py), by `native/collective.cpp`.

Rows lie in host memory, or are brought there and back by whoever calls. Python checks shapes and keeps one record for
each label, which the native code adds its counts to; a call is one look-up, a few stores and one native call, in which
the interpreter is free. What goes wrong comes back as a code with both stamps.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Mapping, Sequence
from ctypes import byref, c_int32, pointer
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from backends.acts import (
    LABEL_BYTES_MOST,
    ActShape,
    Counts,
    ExchangeError,
    NoCredit,
    PeerLate,
    Stamp,
    StampMismatch,
)
from backends.host import abi

Floats = npt.NDArray[np.float32]

SPIN_US = 100
"""How long a wait spins before it sleeps: longer than peers with equal shares are usually apart, and than a wake-up."""

_KINDS = {1: "sum", 2: "gather", 3: "message"}


class HostCollective:
    """Rank `rank`'s end of the acts in the shared memory `fd`, which stays the caller's. `library` is any that has the
    ABI of host memory.

    `timeout_s` bounds each call. With more spinning ranks than cores, `spin_us` should be 0. Raises ValueError if the
    memory is not of this shape, or this rank was in it before.
    """

    def __init__(
        self, library: ctypes.CDLL, fd: int, shape: ActShape, rank: int, *, timeout_s: float, spin_us: int = SPIN_US
    ) -> None:
        if not 0 <= rank < shape.ranks:
            raise ValueError(f"rank {rank} of {shape.ranks}")
        self.rank = rank
        self.ranks = shape.ranks
        self._library = library
        self._shape = shape
        self._timeout_s = timeout_s
        self._spin_us = spin_us
        self._failed: ExchangeError | None = None
        self._exchanges: dict[str, abi.Exchange] = {}
        self._map = _mapped(fd, shape)
        self._anchor = ctypes.c_char.from_buffer(self._map)
        base = ctypes.addressof(self._anchor)
        self._mail = abi.Mail(base + shape.mailboxes_at, shape.piece_bytes, rank, shape.ranks)
        self._senders = {to: self._end(base, (rank, to), to) for source, to in shape.routes if source == rank}
        self._receivers = {source: self._end(base, (source, rank), source) for source, to in shape.routes if to == rank}
        if self._was_used(base):
            self.close()
            raise ValueError(f"rank {rank} has used this memory before: a life of a fleet has acts of its own")

    def sum(self, stamp: Stamp, buffer: Floats) -> None:
        exchange = self._enter(stamp, buffer)
        address, stride = _matrix(buffer)
        self._done(exchange, self._library.hs_sum(byref(self._mail), byref(exchange), address, stride))

    def gather(self, stamp: Stamp, part: Floats, out: Floats, widths: Sequence[int]) -> None:
        exchange = self._enter(stamp, part)
        wanted = (stamp.rows, sum(widths))
        if len(widths) != self.ranks or min(widths) < 0 or part.shape[1] != widths[self.rank] or out.shape != wanted:
            raise ValueError(
                f"{stamp.label}: a part {part.shape} of rank {self.rank} into {out.shape} does not go with the widths"
                f" {list(widths)} of {self.ranks} ranks"
            )
        source, source_stride = _matrix(part, written=False)
        target, target_stride = _matrix(out)
        of_ranks = (c_int32 * self.ranks)(*widths)
        each = abi.ActPart(source, target, source_stride, target_stride, of_ranks, part.shape[1])
        self._done(exchange, self._library.hs_gather(byref(self._mail), byref(exchange), byref(each), 1, -1))

    def send(self, stamp: Stamp, target: int, rows: Floats) -> None:
        channel = self._sender(target)
        exchange = self._enter(stamp, rows, most=self._shape.route_floats(self.rank, target))
        address, stride = _matrix(rows, written=False)
        part = abi.ActPart(src=address, src_stride=stride, width=rows.shape[1])
        code = self._library.hs_send(byref(channel), byref(exchange), byref(part), 1)
        if code == abi.E_CREDIT:
            raise NoCredit(
                f"the channel to rank {target} is full: {_text(exchange.stamp)} would be message"
                f" {channel.depth + 1} in it",
                stamp.label,
                target,
            )
        self._done(exchange, code)

    def receive(self, stamp: Stamp, source: int, out: Floats) -> None:
        channel = self._receiver(source)
        exchange = self._enter(stamp, out, most=self._shape.route_floats(source, self.rank))
        address, stride = _matrix(out)
        part = abi.ActPart(out=address, out_stride=stride, width=out.shape[1])
        self._done(exchange, self._library.hs_receive(byref(channel), byref(exchange), byref(part), 1))

    def credit(self, target: int) -> int:
        return int(self._library.hs_credit(byref(self._sender(target))))

    def counts(self) -> Mapping[str, Counts]:
        return {
            label: Counts(each.calls, each.bytes, each.spun_ns, each.slept_ns)
            for label, each in self._exchanges.items()
            if each.calls
        }

    # ------------------------------------------------------------------------------------- exchanges as native steps

    def act(
        self,
        label: str,
        parts: Sequence[abi.ActPart] = (),
        *,
        target: int = -1,
        to: int | None = None,
        source: int | None = None,
    ) -> abi.Act:
        """The exchange `label` for a step of a program: with every rank, or a message to rank `to` or from `source`.
        The record refers to this collective, which must outlive the program. Raises ValueError."""
        exchange = self._exchange_of(label)
        channel: abi.Channel | None = None
        if to is not None:
            channel = self._sender(to)
        elif source is not None:
            channel = self._receiver(source)
        array = (abi.ActPart * len(parts))(*parts)
        record = abi.Act(pointer(self._mail), None, pointer(exchange), array, len(parts), target)
        if channel is not None:
            record.channel = pointer(channel)
        return record

    def check_usable(self) -> None:
        """Raises the error that a former exchange failed with, or ValueError once it is closed."""
        if self._failed is not None:
            raise self._failed.with_traceback(None)
        if self._map.closed:
            raise ValueError("the collective is closed")

    def fail(self, label: str, code: int) -> NoReturn:
        """Raise what `code` stands for, which the exchange `label` of a program gave."""
        self._done(self._exchanges[label], code)
        raise AssertionError(f"{label}: code {code} is no failure")

    def totals(self) -> tuple[int, int, int]:
        """Calls, bytes moved, and ns of waiting for other ranks (spinning and asleep) since the beginning."""
        calls = moved = waited = 0
        for each in self._exchanges.values():
            calls += each.calls
            moved += each.bytes
            waited += each.spun_ns + each.slept_ns
        return calls, moved, waited

    def close(self) -> None:
        """Unmap the memory. Does nothing a second time; no exchange may follow."""
        if not self._map.closed:
            del self._anchor
            self._map.close()

    # ------------------------------------------------------------------------------------------------------- inside

    def _end(self, base: int, route: tuple[int, int], peer: int) -> abi.Channel:
        shape = self._shape
        return abi.Channel(base + shape.channel_at(*route), shape.message_bytes(*route), shape.depth, peer)

    def _was_used(self, base: int) -> bool:
        mailbox_bytes = (self._shape.channels_at - self._shape.mailboxes_at) // self.ranks
        lines = [self._shape.mailboxes_at + self.rank * mailbox_bytes]
        lines += [channel.memory - base for channel in self._senders.values()]
        return any(self._map[at : at + 4] != bytes(4) for at in lines)

    def _sender(self, target: int) -> abi.Channel:
        channel = self._senders.get(target)
        if channel is None:
            raise ValueError(f"there is no channel from rank {self.rank} to rank {target}")
        return channel

    def _receiver(self, source: int) -> abi.Channel:
        channel = self._receivers.get(source)
        if channel is None:
            raise ValueError(f"there is no channel from rank {source} to rank {self.rank}")
        return channel

    def _enter(self, stamp: Stamp, matrix: Floats, most: int | None = None) -> abi.Exchange:
        """Check what can be checked alone, and fill in the label's record."""
        self.check_usable()
        if matrix.ndim != 2 or len(matrix) != stamp.rows:
            raise ValueError(f"{stamp.label}: a matrix {matrix.shape} under a stamp of {stamp.rows} rows")
        if most is not None and matrix.size > most:
            raise ValueError(f"{stamp.label}: {stamp.rows} x {matrix.shape[1]} floats, a message holds {most}")
        exchange = self._exchange_of(stamp.label)
        record = exchange.stamp
        record.epoch, record.seq, record.rows, record.width = stamp.epoch, stamp.seq, stamp.rows, matrix.shape[1]
        return exchange

    def _exchange_of(self, label: str) -> abi.Exchange:
        exchange = self._exchanges.get(label)
        if exchange is None:
            exchange = self._exchanges[label] = self._new_exchange(label)
        return exchange

    def _new_exchange(self, label: str) -> abi.Exchange:
        if not label.isascii() or not label.isprintable() or not 1 <= len(label) <= LABEL_BYTES_MOST:
            raise ValueError(f"a label is 1 to {LABEL_BYTES_MOST} ASCII characters: {label!r}")
        exchange = abi.Exchange(int(self._timeout_s * 1e9), self._spin_us * 1000)
        exchange.stamp.label = label.encode()
        return exchange

    def _done(self, exchange: abi.Exchange, code: int) -> None:
        if code == abi.OK:
            return
        label = exchange.stamp.label.decode()
        peer = exchange.peer
        if code == abi.E_CREDIT:
            raise NoCredit(f"a channel is full: {_text(exchange.stamp)} does not go into it", label, -1)
        if code == abi.E_LATE:
            self._failed = PeerLate(
                f"rank {peer} did not come to {_text(exchange.wanted)} within {self._timeout_s:g} s", label, peer
            )
        elif code == abi.E_STAMP:
            self._failed = StampMismatch(label, peer, _text(exchange.wanted), _text(exchange.found))
        else:
            raise ValueError(f"{label}: the native library refuses {_text(exchange.stamp)}: {abi.ERRORS[code]}")
        raise self._failed


def _mapped(fd: int, shape: ActShape) -> mmap.mmap:
    found = os.fstat(fd).st_size
    if found != shape.total_bytes:
        raise ValueError(f"acts in shared memory of {found} bytes where {shape.total_bytes} were announced")
    mapped = mmap.mmap(fd, shape.total_bytes)
    header = shape.header()
    if mapped[: len(header)] != header:
        mapped.close()
        raise ValueError("the acts in shared memory are of another shape than announced")
    return mapped


def _matrix(matrix: Floats, *, written: bool = True) -> tuple[int, int]:
    """(address, floats between rows). Raises ValueError unless the floats of a row lie together and rows apart."""
    rows, width = matrix.shape
    between, within = matrix.strides
    joined = matrix.size == 0 or width == 1 or within == 4
    apart = matrix.size == 0 or rows == 1 or (between % 4 == 0 and between >= 4 * width)
    if matrix.dtype != np.float32 or not joined or not apart:
        raise ValueError(
            f"a matrix of {matrix.dtype} with strides {matrix.strides}: rows of float32, each in one piece, are wanted"
        )
    if written and not matrix.flags.writeable:
        raise ValueError("a matrix that is to be written is read-only")
    return matrix.ctypes.data, max(between // 4, width) if matrix.size else width


def _text(stamp: abi.Stamp) -> str:
    kind = _KINDS.get(stamp.kind, f"kind {stamp.kind}")
    piece = f", piece {stamp.piece}" if stamp.piece else ""
    label = stamp.label.decode("ascii", "replace")
    return f"{kind} {label!r} of plan {stamp.seq} in epoch {stamp.epoch}, {stamp.rows} x {stamp.width}{piece}"
