"""Images of an arena: its bytes in each layout, kept by this rank. One is in memory, ready for the next flip; the other
is in a file.

    serving in A      memory: image of B         file: image of A         a flip to B copies from memory
    after the flip    memory: B ─▶ A             file: B, if not written yet, then both
                              └ in the background: B to its file, then A from its file over it; until A is whole and
                                has its digest, `not_ready("A")` says how far it is

An image is written once, when it leaves memory for the first time: weights never change. The file bears a name only
when all of it is on the disk (a temporary name, fsync, rename), and ends with what it is: bytes, layout, digest, and
what it is of. All of that is compared when it comes back, and the bytes with their digest: a torn, cut, foreign or
decayed file is never filled in, and the rank says no to a flip, with the reason.

Where the disk is full the image stays in memory beside the other one, serving goes on, and `memory_lines` shows it.
Without a folder both stay there from the beginning.

An image that does not come back is not given up: a flip that asks for it is told why, and has it tried again, no sooner
than `RETRY_FIRST_S` after it failed, and after each further failure twice as long, up to `RETRY_MOST_S`. Where nobody
wants to flip nothing is tried.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import os
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from ctypes import byref, c_int32
from pathlib import Path

import numpy as np

from backends.base import LoadProgress, MemoryRegion, WeightHome
from backends.cpu.load import load_weights
from backends.cpu.memory import Mapping as MemoryMapping
from backends.cpu.pieces import Int64s, Pieces
from backends.cpu.stored import StoredWeight, StoredWeights

PIECE = 8 << 20
"""Bytes of one read or write: how finely a promotion says how far it is, and how soon a close ends it, or a write."""
RETRY_FIRST_S, RETRY_MOST_S = 5.0, 600.0
"""Between a promotion that failed and the next try."""
MAGIC = b"homeserve image\0"
_TRAILER = struct.Struct("<16s Q Q 32s 32s")
"""Magic, bytes, digest, layout, identity."""

At = Callable[[str], bool]
"""`WeightHome.at`."""


class ImageFault(Exception):
    """A file is not the image that it should be."""


class RankEnds(Exception):
    """What a rank that is closed was about need not be ended."""


def identity_of(rank: int, ranks: int, name: str, weights: Sequence[StoredWeight]) -> bytes:
    """Of what an image is: the rank, the layout, and each weight's name, type, form, shape and place."""
    lines = [f"rank {rank} of {ranks}, {name}"]
    for stored in weights:
        view = stored.view
        lines.append(
            f"{view.name} {view.type.name} {stored.form} {view.rows} {view.cols} {stored.offset} {stored.size}"
        )
    return hashlib.sha256("\n".join(lines).encode()).digest()


class Image:
    """The image of one layout: `bytes`, `identity`, and from `keep` on its digest. `where` is its memory, if it is
    there, `path` its file, if it was written."""

    def __init__(self, name: str, size: int, identity: bytes) -> None:
        self.name, self.size, self.identity = name, size, identity
        self.digest = 0
        self.where: MemoryMapping | None = None
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


class ImageSource:
    """A `Source` (`backends.cpu.layouts`) of images. `weights` of each layout, the active one first, are let go of as
    they are loaded."""

    def __init__(
        self,
        library: ctypes.CDLL,
        team: int,
        weights: Mapping[str, StoredWeights],
        home: WeightHome,
        progress: LoadProgress,
    ) -> None:
        self._library, self._team, self._progress = library, team, progress
        self._weights = dict(weights)
        self._active = next(iter(weights))
        self._images = {
            name: Image(name, each.arena.size, identity_of(home.rank, home.ranks, name, each.own))
            for name, each in weights.items()
        }
        self._folder = Path(home.folder) if home.folder else None
        self._rank, self._at, self._tell = home.rank, home.at, home.tell
        self._lock = threading.Lock()
        self._worker: threading.Thread | None = None
        self._closing = threading.Event()
        self._coming: dict[str, int] = {}
        """Layout -> bytes of its image that are back in memory."""
        self._arriving = 0
        """Bytes of memory that it comes to."""
        self._failed: dict[str, str] = {}
        """Layout -> why its image did not come back."""
        self._failures = 0
        """In a row,"""
        self._again_at = 0.0
        """and when the next try may be, by `_clock`."""
        self._clock: Callable[[], float] = time.monotonic

    # ------------------------------------------------------------------------------------------------- as a source

    def load(self, name: str, arena: int) -> int:
        """The image of the layout that will be active goes to the folder. One that cannot be written there is no
        failure of the load: it stays in memory."""
        load_weights(self._library, self._team, self._weights.pop(name).own, self._progress)
        image = self._images[name]
        image.digest = int(self._library.hs_digest(self._team, arena, image.size))
        if name == self._active and self._spilt(image, arena):
            return image.digest
        mapping = self._map(image)
        image.where = mapping
        return Pieces.of(*_one(arena, image.size)).pack(self._library, self._team, mapping.address)

    def pieces(self, name: str) -> Pieces:
        image = self._images[name]
        assert image.where is not None, "not_ready was asked"
        return Pieces.of(*_one(image.where.address, image.size))

    def not_ready(self, name: str) -> str:
        """To ask for an image that failed to come back has it tried again, once it is time."""
        with self._lock:
            image, why, wait_s = self._images[name], self._failed.get(name, ""), self._again_at - self._clock()
            coming, there = self._coming.get(name), image.where is not None
        if why:
            if wait_s <= 0:
                self._bring()
            again = f"not tried again for {math.ceil(wait_s)} s" if wait_s > 0 else "it is tried again now"
            return f"the image of the {name} layout is not in memory: {why}; {again}"
        if coming is not None:
            return f"promotion of the image of the {name} layout: {coming} of {image.size} bytes"
        return "" if there else f"the image of the {name} layout is on its way out of memory"

    def activated(self, name: str) -> None:
        """Have every other image come to memory, and this one leave it, in the background."""
        self._active, self._failures = name, 0
        self._bring()

    def _bring(self) -> None:
        self._join()
        absent = [image for image in self._images.values() if image.name != self._active and image.where is None]
        if not absent or self._folder is None:
            return
        with self._lock:
            self._coming = {image.name: 0 for image in absent}
            self._failed = {}
        work = threading.Thread(target=self._change_places, args=(self._active, absent), name="images", daemon=True)
        self._worker = work
        work.start()

    def memory_lines(self) -> Mapping[str, int]:
        """A second image in memory is one that could not be written: the line says so."""
        with self._lock:
            held = self._arriving + sum(image.where.size for image in self._images.values() if image.where is not None)
        return {"weights image": held} if held else {}

    @property
    def notes(self) -> tuple[str, ...]:
        """What is not as it was asked for: an image that stays in memory, and why."""
        return tuple(_stays(image) for image in self._images.values() if image.why_not_written)

    def memory_regions(self) -> tuple[MemoryRegion, ...]:
        with self._lock:
            held = [image.where for image in self._images.values() if image.where is not None]
            return tuple(MemoryRegion(each.purpose, each.address, each.size) for each in held if each.size)

    def close(self) -> None:
        """End what goes on in the background; give memory and files back."""
        self._closing.set()
        self._join()
        for image in self._images.values():
            if image.where is not None:
                image.where.close()
                image.where = None
            if image.path is not None:
                image.path.unlink(missing_ok=True)
                image.path = None

    def settled(self) -> None:
        """Wait until nothing goes on in the background."""
        self._join()

    # ------------------------------------------------------------------------------------------------------ inside

    def _join(self) -> None:
        if self._worker is not None:
            self._worker.join()
            self._worker = None

    def _change_places(self, active: str, absent: Sequence[Image]) -> None:
        """In the background: the active layout's image to its file, the others' from theirs. Uses no thread of the
        team, which runs plans meanwhile."""
        try:
            self._leave(self._images[active])
            for image in absent:
                self._come(image)
            self._failures = 0
        except RankEnds:
            pass  # nobody will ask for it
        except Exception as error:  # noqa: BLE001  the edge of a thread: it is told by `not_ready`
            with self._lock:
                self._again_at = self._clock() + min(RETRY_FIRST_S * 2**self._failures, RETRY_MOST_S)
                self._failures += 1
                for image in absent:
                    if image.where is None:
                        self._failed[image.name] = f"{type(error).__name__}: {error}"
                        self._tell(f"the image of the {image.name} layout does not come back: {error}")
        finally:
            with self._lock:
                self._coming = {}

    def _leave(self, image: Image) -> None:
        if image.where is None:
            return
        if image.path is None and not self._spilt(image, image.where.address):
            return
        with self._lock:
            mapping, image.where = image.where, None
        mapping.close()

    def _come(self, image: Image) -> None:
        """Raises OSError, ImageFault, MemoryError."""
        mapping = self._map(image)
        with self._lock:
            self._arriving = mapping.size
        try:
            read_image(image, mapping.address, self._at, lambda done: self._told(image, done))
            found = self._digest(mapping)
            if found != image.digest:
                raise ImageFault(f"it came back with the digest {found:016x}, not {image.digest:016x}")
        except BaseException:
            mapping.close()
            raise
        finally:
            with self._lock:
                self._arriving = 0
        with self._lock:
            image.where = mapping
            del self._coming[image.name]

    def _digest(self, mapping: MemoryMapping) -> int:
        """By this thread alone."""
        team = self._library.hs_team_create(1, None, 0, 0, byref(c_int32()))
        if not team:
            raise MemoryError("no memory for a digest")
        try:
            return int(self._library.hs_digest(team, mapping.address, mapping.size))
        finally:
            self._library.hs_team_destroy(team)

    def _goes_on(self) -> None:
        """Raises RankEnds."""
        if self._closing.is_set():
            raise RankEnds

    def _told(self, image: Image, done: int) -> None:
        self._goes_on()
        with self._lock:
            self._coming[image.name] = done

    def _spilt(self, image: Image, address: int) -> bool:
        """Write an image to its file; False: it could not be written, and `notes` says why."""
        if self._folder is None:
            return False
        path = self._folder / f"weights-rank{self._rank}-{image.name}.image"
        try:
            write_image(image, address, path, self._at, self._goes_on)
        except OSError as error:
            image.why_not_written = f"{path} cannot be written: {error.strerror}"
            self._tell(_stays(image))
            return False
        image.path, image.why_not_written = path, ""
        return True

    def _map(self, image: Image) -> MemoryMapping:
        return MemoryMapping(
            self._library, image.size, "weights image", f"the packed weights of the {image.name} layout"
        )


def _stays(image: Image) -> str:
    return f"the image of the {image.name} layout, {image.size} bytes, stays in memory: {image.why_not_written}"


def _one(address: int, size: int) -> tuple[Int64s, Int64s]:
    return np.array([address], np.int64), np.array([size], np.int64)
