"""The images of a CPU rank (`backends.host.images`): packed weights, in mappings."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from backends.base import LoadProgress, MemoryRegion, WeightHome
from backends.cpu.load import load_weights
from backends.cpu.pieces import Int64s, Pieces
from backends.cpu.stored import StoredWeight, StoredWeights
from backends.host.digest import digest_at
from backends.host.image_file import Image, identity_of
from backends.host.images import LINE, ImageShelf
from backends.host.memory import Mapping as MemoryMapping
from backends.host.team import Team


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
        self._alone = Team(library, 1)
        images = [
            Image(name, each.arena.size, identity_of(home.rank, home.ranks, name, _lines(each.own)))
            for name, each in weights.items()
        ]
        self.shelf = ImageShelf(images, home, self._reserve, self._digest_at)

    def load(self, name: str, arena: int) -> int:
        """The image of the layout that will be active goes to the folder, straight from the arena. One that cannot be
        written there is no failure of the load: it stays in memory."""
        load_weights(self._library, self._team, self._weights.pop(name).own, self._progress)
        size = self.shelf.size(name)
        digest = int(self._library.hs_digest(self._team, arena, size))
        if name == self.shelf.active and self.shelf.spill(name, arena, digest):
            return digest
        return Pieces.of(*_one(arena, size)).pack(self._library, self._team, self.shelf.keep(name, digest))

    def pieces(self, name: str) -> Pieces:
        return Pieces.of(*_one(self.shelf.address(name), self.shelf.size(name)))

    def not_ready(self, name: str) -> str:
        return self.shelf.not_ready(name)

    def activated(self, name: str) -> None:
        self.shelf.activated(name)

    def memory_lines(self) -> Mapping[str, int]:
        return self.shelf.memory_lines()

    @property
    def notes(self) -> tuple[str, ...]:
        return self.shelf.notes

    def memory_regions(self) -> tuple[MemoryRegion, ...]:
        return self.shelf.memory_regions()

    def close(self) -> None:
        self.shelf.close()
        self._alone.close()

    def _reserve(self, name: str, size: int) -> MemoryMapping:
        return MemoryMapping(self._library, size, LINE, f"the packed weights of the {name} layout")

    def _digest_at(self, address: int, nbytes: int) -> int:
        return digest_at(address, nbytes, self._alone)


def _lines(weights: Sequence[StoredWeight]) -> Iterator[str]:
    for stored in weights:
        view = stored.view
        yield f"{view.name} {view.type.name} {stored.form} {view.rows} {view.cols} {stored.offset} {stored.size}"


def _one(address: int, size: int) -> tuple[Int64s, Int64s]:
    return np.array([address], np.int64), np.array([size], np.int64)
