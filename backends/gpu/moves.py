"""Rows of pools as a payload, and back, through a buffer of bounded size.

    KV       each layer, each page: K of the page of head 0, 1, …, then V                   (`backends.gpu.pools`)
    states   each slot, each layer: row after row of the window its channels, then its heads     (`backends.states`)

Padding stays behind. These are the CPU's payloads, byte for byte, and their digest. A payload goes in *waves* of whole
blocks of the digest, so that it may be of any length. A wave's pieces are gathered on the card into one stream and
digested on the way; while that is copied to the host, the wave before it is copied out of pinned memory.

    pools ─gather─▶ card's part of the staging ─download─▶ a half of it ─▶ payload
    pools ◀─scatter─ card's part of the staging ◀─upload─ a half of it ◀─ payload

    in the staging:   | total | places, ends | stream … |
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from backends.base import PoolRuns
from backends.digest import BLOCK
from backends.gpu import states as layout
from backends.gpu.device import Device, HostMemory
from backends.gpu.launch import Symbol
from backends.gpu.ops import moves as ops
from backends.gpu.pools import GpuPools, kv_layer_bytes
from backends.gpu.staging import Staging

Int64s = npt.NDArray[np.int64]

SYMBOLS: tuple[Symbol, ...] = ops.SYMBOLS
WAVE_PIECES = BLOCK
"""Pieces of one wave. A block has no more, so a wave is never less than a block."""
TOTAL_BYTES, NUMBER_BYTES = 256, 8
STREAM_AT = TOTAL_BYTES + 2 * NUMBER_BYTES * WAVE_PIECES
LEAST_STAGING = STREAM_AT + BLOCK


class Pieces(NamedTuple):
    """Pieces of the card's memory that stand one behind the other in a payload: where each lies, and where it ends
    there. None is empty."""

    places: Int64s
    ends: Int64s

    @property
    def nbytes(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0


class Wave(NamedTuple):
    """`nbytes` of a payload from byte `first` on, and the pieces that they are."""

    first: int
    nbytes: int
    places: Int64s
    lengths: Int64s


class CardMoves:
    """What moves between the card's memory and the host's through `staging`."""

    def __init__(self, device: Device, staging: Staging) -> None:
        assert staging.nbytes >= LEAST_STAGING, "room for a block and its pieces"
        self._device, self._staging = device, staging
        device.prepare(SYMBOLS)
        self._wave_bytes = (staging.nbytes - STREAM_AT) // BLOCK * BLOCK

    def pack(self, pieces: Pieces, out: memoryview) -> int:
        """Copy pieces to `out`, which is as long as they are. Returns the payload's digest."""
        payload, sent = np.frombuffer(out, np.uint8), list[tuple[HostMemory, Wave]]()
        self._begin()
        for wave in waves(pieces, self._wave_bytes, WAVE_PIECES):
            half, on_card = self._with_pieces(wave)
            self._device.wait()
            self._gather(half, wave, on_card)
            self._staging.turn()
            self._copy_out(sent, payload)
            sent.append((half, wave))
        total = self._total()
        self._copy_out(sent, payload)
        return ops.digest_of_total(total, pieces.nbytes)

    def unpack(self, pieces: Pieces, payload: memoryview) -> None:
        """Copy a payload, which is as long as the pieces are, to where they lie."""
        source, card = np.frombuffer(payload, np.uint8), self._staging.card
        self._device.wait()
        for wave in waves(pieces, self._wave_bytes, WAVE_PIECES):
            half, on_card = self._with_pieces(wave)
            _stream(half)[: wave.nbytes] = source[wave.first : wave.first + wave.nbytes]
            self._device.wait()
            self._upload_pieces(half, wave)
            self._device.upload(card + STREAM_AT, half.address + STREAM_AT, wave.nbytes)
            self._device.launch(ops.scatter_rows(card + STREAM_AT, wave.nbytes, on_card))
            self._staging.turn()
        self._device.wait()

    def digest(self, address: int, nbytes: int) -> int:
        """Of the card's memory, read there."""
        self._begin()
        self._device.launch(ops.digest(address, nbytes, self._staging.card))
        return ops.digest_of_total(self._total(), nbytes)

    def turn_bit(self, address: int) -> None:
        """Make one bit of the card's memory another one: a fault for tests."""
        half = self._staging.half
        self._device.download(half.address, address, 1)
        self._device.wait()
        half.bytes[0] ^= 1
        self._device.upload(address, half.address, 1)
        self._device.wait()

    # ---------------------------------------------------------------------------------------------------------- inside

    def _begin(self) -> None:
        self._device.wait()
        self._device.fill(self._staging.card, 0, NUMBER_BYTES)

    def _total(self) -> int:
        """Of all that was digested since `_begin`."""
        half = self._staging.half
        self._device.download(half.address, self._staging.card, NUMBER_BYTES)
        self._device.wait()
        return int(half.bytes[:NUMBER_BYTES].view(np.uint64)[0])

    def _with_pieces(self, wave: Wave) -> tuple[HostMemory, ops.Pieces]:
        """The half that is the host's, with a wave's pieces in it, and where they will lie on the card."""
        half, card = self._staging.half, self._staging.card + TOTAL_BYTES
        places, ends = ops.piece_arrays(wave.places, wave.lengths)
        words = half.bytes[TOTAL_BYTES : TOTAL_BYTES + 2 * places.nbytes].view(np.uint64)
        words[: len(places)], words[len(places) :] = places, ends.view(np.uint64)
        return half, ops.Pieces(card, card + places.nbytes, len(places))

    def _upload_pieces(self, half: HostMemory, wave: Wave) -> None:
        nbytes = 2 * NUMBER_BYTES * len(wave.places)
        self._device.upload(self._staging.card + TOTAL_BYTES, half.address + TOTAL_BYTES, nbytes)

    def _gather(self, half: HostMemory, wave: Wave, on_card: ops.Pieces) -> None:
        card = self._staging.card
        self._upload_pieces(half, wave)
        self._device.launch(ops.gather_rows(card + STREAM_AT, wave.nbytes, on_card, card, wave.first // BLOCK))
        self._device.download(half.address + STREAM_AT, card + STREAM_AT, wave.nbytes)

    def _copy_out(self, sent: list[tuple[HostMemory, Wave]], payload: npt.NDArray[np.uint8]) -> None:
        """What the stream has brought to a half; it was waited for."""
        for half, wave in sent:
            payload[wave.first : wave.first + wave.nbytes] = _stream(half)[: wave.nbytes]
        sent.clear()


def _stream(half: HostMemory) -> npt.NDArray[np.uint8]:
    return half.bytes[STREAM_AT:]


def waves(pieces: Pieces, most_bytes: int, most_pieces: int) -> Iterator[Wave]:
    """A payload cut into waves of at most so many bytes and pieces, each but the last of whole blocks."""
    first, whole = 0, pieces.nbytes
    while first < whole:
        low = int(np.searchsorted(pieces.ends, first, "right"))
        end = min(first + most_bytes, whole)
        last = int(np.searchsorted(pieces.ends, end, "left"))
        if last - low >= most_pieces:
            last = low + most_pieces - 1
            end = int(pieces.ends[last]) // BLOCK * BLOCK
            last = int(np.searchsorted(pieces.ends, end, "left"))
        assert end > first, "a block has no more pieces than a wave"
        ends = np.minimum(pieces.ends[low : last + 1], end)
        starts = np.maximum(np.append(pieces.ends[low - 1] if low else 0, pieces.ends[low:last]), first)
        skipped = np.zeros(len(ends), np.int64)
        skipped[0] = first - (int(pieces.ends[low - 1]) if low else 0)
        yield Wave(first, end - first, pieces.places[low : last + 1] + skipped, ends - starts)
        first = end


# ------------------------------------------------------------------------------------------------------ rows as pieces


def pieces_of(pools: GpuPools, runs: PoolRuns) -> Pieces:
    """Raises ValueError for a layer, page, slot, channel or head that there is not."""
    parts = [_pages(pools, layer, pages) for layers, pages in runs.kv for layer in layers]
    if len(runs.states) and runs.parts:
        parts.append(_states(pools, runs))
    return joined(parts)


def joined(parts: Sequence[tuple[Int64s, Int64s]]) -> Pieces:
    """Of (places, lengths) one behind the other. Pieces whose memory goes on where the one before ends are one."""
    if not parts:
        return Pieces(np.zeros(0, np.int64), np.zeros(0, np.int64))
    places, lengths = (np.concatenate([part[which] for part in parts]) for which in (0, 1))
    some = lengths > 0
    places, lengths = places[some], lengths[some]
    begins = np.append(True, places[:-1] + lengths[:-1] != places[1:])[: len(places)]
    ends = np.cumsum(lengths, dtype=np.int64)
    return Pieces(places[begins], ends[np.append(begins[1:], True)[: len(places)]])


def _pages(pools: GpuPools, layer: int, pages: npt.NDArray[np.int32]) -> tuple[Int64s, Int64s]:
    """(places, lengths) of pages of one layer."""
    if not 0 <= layer < len(pools.kv.layers):
        raise ValueError(f"KV layer {layer} of {len(pools.kv.layers)}")
    shape, there = pools.kv.layers[layer], pools.kv_pages(layer)
    if len(pages) and not 0 <= int(pages.min()) <= int(pages.max()) < there:
        raise ValueError(f"pages {int(pages.min())} to {int(pages.max())} of layer {layer}, which has {there}")
    heads = np.arange(shape.kv_heads, dtype=np.int64)
    columns, sizes = [], []
    for base, size in zip(pools.kv_addresses(layer), kv_layer_bytes(pools.kv, layer), strict=True):
        each = size // max(1, shape.kv_heads * there)
        columns.append(base + heads * (each * there) + pages.astype(np.int64)[:, None] * each)
        sizes.append(np.full((len(pages), len(heads)), each, np.int64))
    return np.concatenate(columns, axis=1).reshape(-1), np.concatenate(sizes, axis=1).reshape(-1)


def _states(pools: GpuPools, runs: PoolRuns) -> tuple[Int64s, Int64s]:
    """(places, lengths) of parts of slots."""
    slots, held = runs.states.astype(np.int64), pools.states
    if not 0 <= int(slots.min()) <= int(slots.max()) < held.slots:
        raise ValueError(f"state slots {int(slots.min())} to {int(slots.max())} of {held.slots}")
    found = [part for layer, channels, heads in runs.parts for part in layout.layer_parts(held, layer, channels, heads)]
    offsets = np.array([offset for offset, _ in found], np.int64)
    lengths = np.array([length for _, length in found], np.int64)
    places = pools.state_base + slots[:, None] * layout.slot_bytes(held) + offsets
    return places.reshape(-1), np.tile(lengths, len(slots))
