"""Blocks of rows side by side on the card, as a gather leaves them: by the kernel that selects rows, told to take all
of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from backends.gpu.device import Device
from backends.gpu.launch import Launch
from backends.gpu.ops import many, mixers
from backends.gpu.ops.buffers import Rows
from backends.gpu.transport.base import EXCHANGE, MAILBOXES, Part, padded

SYMBOLS = (mixers.SELECT_ROWS, many.SUM)
"""What transports launch."""


class Columns:
    """For at most `rows` rows. Raises OutOfDeviceMemory, KernelError."""

    def __init__(self, device: Device, rows: int) -> None:
        device.prepare(SYMBOLS)
        size = 4 * max(rows, 1)
        self._indices = device.allocate(size, MAILBOXES)
        self.nbytes = self._indices.nbytes
        try:
            staging = device.pinned(size, EXCHANGE)
        except MemoryError:
            self._indices.close()
            raise
        try:
            staging.bytes[:size].view(np.int32)[:] = np.arange(size // 4, dtype=np.int32)
            device.upload(self._indices.address, staging.address, size)
            device.wait()
        finally:
            staging.close()

    def place(self, rows: int, parts: Sequence[Part], blocks: Sequence[int]) -> list[Launch]:
        """Launches that fill `out` of each part. `blocks`: where what each rank gave lies, its parts one behind the
        other as `offsets` has them."""
        if not rows:
            return []
        launches = []
        for rank, block in enumerate(blocks):
            for part, offset in zip(parts, offsets(rows, parts, rank), strict=True):
                width = part.widths[rank]
                if not width:
                    continue
                column = sum(part.widths[:rank])
                out = Rows(part.out.at + 4 * column, part.out.stride)
                src = Rows(block + offset, padded(width))
                launches.append(mixers.select_rows(rows, width, src, self._indices.address, out))
        return launches

    def close(self) -> None:
        self._indices.close()


def offsets(rows: int, parts: Sequence[Part], rank: int) -> Iterator[int]:
    """Where each part of a rank begins in what it gives, in bytes."""
    at = 0
    for part in parts:
        yield at
        at += 4 * rows * padded(part.widths[rank])
