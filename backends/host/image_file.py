"""The file of an image: bytes of an arena, and behind them what they are.

    bytes of the image │ magic │ u64 bytes │ u64 digest │ layout │ identity

The file bears a name only when all of it is on the disk (a temporary name, fsync, rename). What it says of itself is
compared when it is read; whether its bytes have the digest is for the caller to see, where they lie then.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

PIECE = 8 << 20
"""Bytes of one read or write: how finely a promotion says how far it is, and how soon a close ends it, or a write."""
MAGIC = b"homeserve image\0"
_TRAILER = struct.Struct("<16s Q Q 32s 32s")
"""Magic, bytes, digest, layout, identity."""

At = Callable[[str], bool]
"""`WeightHome.at`."""


class Room(Protocol):
    """Memory of an image: a `backends.host.memory.Mapping`, or host memory that a card reads by itself. It may be made
    and given back by the thread that brings images, and by another one than made it."""

    address: int

    def close(self) -> None: ...


class ImageFault(Exception):
    """A file is not the image that it should be."""


def identity_of(rank: int, ranks: int, name: str, weights: Iterable[str]) -> bytes:
    """Of what an image is: the rank, the layout, and a line for each weight: its name, form, shape and place."""
    lines = [f"rank {rank} of {ranks}, {name}", *weights]
    return hashlib.sha256("\n".join(lines).encode()).digest()


class Image:
    """The image of one layout: `size` in bytes, `identity`, and once it was made its digest. `where` is its memory, if
    it is there, `path` its file, if it was written."""

    def __init__(self, name: str, size: int, identity: bytes) -> None:
        self.name, self.size, self.identity = name, size, identity
        self.digest = 0
        self.where: Room | None = None
        self.path: Path | None = None
        self.why_not_written = ""

    @property
    def trailer(self) -> bytes:
        return _TRAILER.pack(MAGIC, self.size, self.digest, self.name.encode(), self.identity)


def write_image(image: Image, address: int, path: Path, at: At, goes_on: Callable[[], None]) -> None:
    """Write `image`, whose bytes lie at `address`, to `path`; nothing has that name before all is on the disk. Raises
    OSError, and whatever `goes_on` raises, which is called before each piece; no file is left then."""
    temporary = path.with_suffix(".part")
    view = _view(address, image.size)
    try:
        with open(temporary, "wb", buffering=0) as file:
            half = image.size // 2 // PIECE * PIECE
            for first in range(0, image.size, PIECE):
                goes_on()
                piece = view[first : first + PIECE]
                if first == half and at("spill"):
                    piece = memoryview(bytes([piece[0] ^ 1]) + bytes(piece[1:]))
                _write(file.fileno(), piece)
            goes_on()
            _write(file.fileno(), memoryview(image.trailer))
            os.fsync(file.fileno())
            _forget(file.fileno())
        os.replace(temporary, path)
        _sync_folder(path.parent)
    except BaseException:
        for left in (temporary, path):
            left.unlink(missing_ok=True)
        raise


def read_image(image: Image, address: int, at: At, told: Callable[[int], None]) -> None:
    """Read the file of `image` to `address`; `told` hears how many bytes are there. Raises OSError, ImageFault."""
    assert image.path is not None, "written before it is read"
    with open(image.path, "rb", buffering=0) as file:
        found = os.fstat(file.fileno()).st_size
        if found != image.size + _TRAILER.size:
            raise ImageFault(
                f"{image.path.name} has {found} bytes, not {image.size + _TRAILER.size}: it is cut or torn"
            )
        _check_trailer(image, os.pread(file.fileno(), _TRAILER.size, image.size))
        view = _view(address, image.size)
        half = image.size // 2 // PIECE * PIECE
        for first in range(0, image.size, PIECE):
            piece = view[first : first + PIECE]
            _read(file.fileno(), piece, first, image.path.name)
            if first == half and at("promote"):
                piece[0] ^= 1
            told(first + len(piece))
        _forget(file.fileno())


def _check_trailer(image: Image, found: bytes) -> None:
    assert image.path is not None
    where = image.path.name
    if len(found) < _TRAILER.size:
        raise ImageFault(f"{where} has a trailer of {len(found)} bytes: it is cut or torn")
    magic, size, digest, name, identity = _TRAILER.unpack(found)
    if magic != MAGIC or size != image.size:
        raise ImageFault(f"{where} does not end as an image of {image.size} bytes ends: it is torn, or no image")
    told = name.rstrip(b"\0").decode(errors="replace")
    if told != image.name:
        raise ImageFault(f"{where} is an image of the {told} layout, not of the {image.name} layout")
    if identity != image.identity:
        raise ImageFault(f"{where} is an image of another rank or another model")
    if digest != image.digest:
        raise ImageFault(f"{where} is an image of other weights: digest {digest:016x}, not {image.digest:016x}")


def _view(address: int, size: int) -> memoryview:
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")


def _write(fd: int, data: memoryview) -> None:
    while data.nbytes:
        data = data[os.write(fd, data) :]


def _read(fd: int, piece: memoryview, first: int, name: str) -> None:
    done = 0
    while done < len(piece):
        count = os.preadv(fd, [piece[done:]], first + done)
        if count == 0:
            raise ImageFault(f"{name} ended after {first + done} bytes while it was read")
        done += count


def _forget(fd: int) -> None:
    """The system need not keep what it has read or written: it would be one more copy of the weights."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
