"""Images of an arena: its bytes in each layout, kept by this rank. One is in memory, ready for the next flip; the other
is in a file. What the bytes mean is the backend's, and of what memory an image is made: the shelf is told both.

    serving in A      memory: image of B         file: image of A         a flip to B copies from memory
    after the flip    memory: B ─▶ A             file: B, if not written yet, then both
                              └ in the background: B to its file, then A from its file over it; until A is whole and
                                has its digest, `not_ready("A")` says how far it is

An image is written once, when it leaves memory for the first time: weights never change. What its file says of itself
is compared when it comes back (`backends.host.image_file`), and its bytes with their digest: a torn, cut, foreign or
decayed file is never filled in, and the rank says no to a flip, with the reason.

Where the disk is full the image stays in memory beside the other one, serving goes on, and `memory_lines` shows it.
Without a folder both stay there from the beginning.

An image that does not come back is not given up: a flip that asks for it is told why, and has it tried again, no sooner
than `RETRY_FIRST_S` after it failed, and after each further failure twice as long, up to `RETRY_MOST_S`. Where nobody
wants to flip nothing is tried.

At load a backend gives the shelf every layout's image, the active one last:

    address = shelf.keep(name, digest)     memory of the image, which the backend fills
    shelf.spill(name, address, digest)     of the active layout: from wherever its bytes lie, to its file
    shelf.leave(name)                      the same, of one that was kept, whose memory is given back
    shelf.activated(name)

and at a flip, where `not_ready(name)` does not say no, the bytes lie at `address(name)` until `activated(name)`.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from backends.base import MemoryRegion, WeightHome
from backends.host.image_file import Image, ImageFault, Room, read_image, write_image

LINE = "weights image"
"""Of the ledger."""
RETRY_FIRST_S, RETRY_MOST_S = 5.0, 600.0
"""Between a promotion that failed and the next try."""
Reserve = Callable[[str, int], Room]
"""Memory for the image of a layout, of so many bytes. Called in the background too. Raises MemoryError."""
DigestAt = Callable[[int, int], int]
"""Of so many bytes at an address. Called in the background: by the calling thread alone, since those of a rank run
plans meanwhile."""


class RankEnds(Exception):
    """What a rank that is closed was about need not be ended."""


class ImageShelf:
    """The images of one rank, the active layout's first. `home` has its folder, and whom to tell; `reserve` makes
    memory of an image, `digest_at` sees what lies there."""

    def __init__(self, images: Sequence[Image], home: WeightHome, reserve: Reserve, digest_at: DigestAt) -> None:
        self._active = images[0].name
        self._images = {image.name: image for image in images}
        self._reserve, self._digest_at = reserve, digest_at
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

    # ------------------------------------------------------------------------------------------------------ at load

    @property
    def active(self) -> str:
        """The layout whose image need not be in memory."""
        return self._active

    def size(self, name: str) -> int:
        """Bytes of the image of a layout."""
        return self._images[name].size

    def keep(self, name: str, digest: int) -> int:
        """Have memory for an image with this digest. Returns its address: the caller fills it. Raises MemoryError."""
        image = self._images[name]
        assert image.where is None, "an image is made once"
        image.digest = digest
        image.where = self._reserve(name, image.size)
        return image.where.address

    def spill(self, name: str, address: int, digest: int) -> bool:
        """Write an image with this digest, whose bytes lie at `address`, to its file. False: there is no folder, or it
        cannot be written there, which is no failure of a load, and `notes` says why."""
        image = self._images[name]
        image.digest = digest
        return self._spilt(image, address)

    def leave(self, name: str) -> bool:
        """Have an image leave memory for its file, which is written unless it was. False: it stays, as of `spill`."""
        image = self._images[name]
        self._leave(image)
        return image.where is None

    # ------------------------------------------------------------------------------------------------------- flips

    def address(self, name: str) -> int:
        """Where the bytes of an image lie that is ready."""
        where = self._images[name].where
        assert where is not None, "not_ready was asked"
        return where.address

    def not_ready(self, name: str) -> str:
        """Why an image is not in memory; empty: it is. To ask for one that failed to come back has it tried again, once
        it is time."""
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
            held = self._arriving + sum(image.size for image in self._images.values() if image.where is not None)
        return {LINE: held} if held else {}

    @property
    def notes(self) -> tuple[str, ...]:
        """What is not as it was asked for: an image that stays in memory, and why."""
        return tuple(_stays(image) for image in self._images.values() if image.why_not_written)

    def memory_regions(self) -> tuple[MemoryRegion, ...]:
        with self._lock:
            held = [(image.where, image.size) for image in self._images.values() if image.where is not None]
            return tuple(MemoryRegion(LINE, where.address, size) for where, size in held if size)

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
            room, image.where = image.where, None
        room.close()

    def _come(self, image: Image) -> None:
        """Raises OSError, ImageFault, MemoryError."""
        room = self._reserve(image.name, image.size)
        with self._lock:
            self._arriving = image.size
        try:
            read_image(image, room.address, self._at, lambda done: self._told(image, done))
            found = self._digest_at(room.address, image.size)
            if found != image.digest:
                raise ImageFault(f"it came back with the digest {found:016x}, not {image.digest:016x}")
        except BaseException:
            room.close()
            raise
        finally:
            with self._lock:
                self._arriving = 0
        with self._lock:
            image.where = room
            del self._coming[image.name]

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


def _stays(image: Image) -> str:
    return f"the image of the {image.name} layout, {image.size} bytes, stays in memory: {image.why_not_written}"
