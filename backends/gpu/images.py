"""Images of a card's arena: its bytes in each layout in the host's memory, or in a file (`backends.host.images`).

A flip copies an image to the card as it is: no kernel packs anything, and the digest of the arena is that of the image.
An image in memory is pinned, exactly its pages, so that the card takes it from there at the speed of the bus. The shelf
brings images and takes them away in a thread of its own, and a card belongs to one thread. So they are pinned here, as
soon as a flip asks whether its image is ready, and pinned no longer before the shelf may take them.

    load      active layout: fill, download, to its file ─▶ the other: fill, download ─▶ active layout: fill once more
    flip      not_ready: pin ─▶ refill: upload ─▶ activated: this image is not pinned any more, and leaves

The active layout is filled twice at a load where its image goes to a file, so that there is never more than one image
in memory, and both times it must have one digest. Without a folder every image stays in memory, pinned.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping

from backends.base import LoadProgress, MemoryRegion, RefillFailed, WeightHome
from backends.gpu.device import Device, HostMemory
from backends.gpu.staging import Staging
from backends.gpu.weights import CardWeights, OfFile, fill
from backends.host.digest import digest_at
from backends.host.image_file import Image, identity_of
from backends.host.images import LINE, ImageShelf
from backends.host.memory import Mapping as MemoryMapping
from backends.host.team import Team


class ImageHome:
    """A `Home` (`backends.gpu.layouts`) of images. `layouts` are the placed weights of each, the active one first; they
    let go of the model's files when all was loaded."""

    def __init__(
        self,
        device: Device,
        staging: Staging,
        library: ctypes.CDLL,
        layouts: Mapping[str, CardWeights],
        home: WeightHome,
    ) -> None:
        self._device, self._staging, self._library = device, staging, library
        self._layouts = dict(layouts)
        self._on_disk = bool(home.folder)
        self._made: set[str] = set()
        self._pinned: dict[str, HostMemory] = {}
        self._alone = Team(library, 1)
        images = [
            Image(name, weights.nbytes, identity_of(home.rank, home.ranks, name, _lines(weights)))
            for name, weights in layouts.items()
        ]
        self.shelf = ImageShelf(images, home, self._reserve, self._digest_at)

    # ------------------------------------------------------------------------------------------------------ at a load

    @property
    def load_order(self) -> tuple[str, ...]:
        active, *others = self._layouts
        return (active, *others, active) if self._on_disk else (*others, active)

    def load(self, name: str, progress: LoadProgress) -> None:
        fill(self._device, self._staging, self._layouts[name], OfFile(), progress)

    def loaded(self, name: str, digest: int) -> None:
        """Raises RefillFailed where the image is not what lies on the card."""
        if name in self._made:
            return
        weights, address = self._layouts[name], self.shelf.keep(name, digest)
        self._pin(name)
        self._device.download(address, weights.base, weights.nbytes)
        self._device.wait()
        found = self._digest_at(address, weights.nbytes)
        if found != digest:
            raise RefillFailed(
                f"the image of the {name} layout has the digest {found:016x}, and on"
                f" {self._device.facts.told} its weights have {digest:016x}"
            )
        self._made.add(name)
        if self._on_disk and name == self.shelf.active:
            self._unpin(name)
            self.shelf.leave(name)

    # ------------------------------------------------------------------------------------------------------ at a flip

    def refill(self, name: str) -> int:
        weights, address = self._layouts[name], self.shelf.address(name)
        self._pin(name)
        self._device.upload(weights.base, address, weights.nbytes)
        self._device.wait()
        return weights.nbytes

    def not_ready(self, name: str) -> str:
        """Whoever asks is about to fill: an image that is in memory is pinned when this returns."""
        why = self.shelf.not_ready(name)
        if why:
            return why
        try:
            self._pin(name)
        except MemoryError as error:
            return f"the image of the {name} layout is in memory and cannot be pinned: {error}"
        return ""

    def activated(self, name: str) -> None:
        """The first time is the end of the load."""
        for weights in self._layouts.values():
            weights.forget_files()
        if self._on_disk:
            self._unpin(name)
        self.shelf.activated(name)

    @property
    def notes(self) -> tuple[str, ...]:
        return self.shelf.notes

    def memory_lines(self) -> Mapping[str, int]:
        return self.shelf.memory_lines()

    def memory_regions(self) -> tuple[MemoryRegion, ...]:
        return self.shelf.memory_regions()

    def close(self) -> None:
        for name in list(self._pinned):
            self._unpin(name)
        self.shelf.close()
        self._alone.close()

    # --------------------------------------------------------------------------------------------------------- inside

    def _pin(self, name: str) -> None:
        """Raises MemoryError."""
        size = self.shelf.size(name)
        if size and name not in self._pinned:
            self._pinned[name] = self._device.pin(self.shelf.address(name), size, LINE)

    def _unpin(self, name: str) -> None:
        pinned = self._pinned.pop(name, None)
        if pinned is not None:
            pinned.close()

    def _reserve(self, name: str, size: int) -> MemoryMapping:
        return MemoryMapping(self._library, size, LINE, f"the packed weights of the {name} layout")

    def _digest_at(self, address: int, nbytes: int) -> int:
        return digest_at(address, nbytes, self._alone)


def _lines(weights: CardWeights) -> Iterator[str]:
    for placed in weights.placed:
        view = placed.view
        yield f"{view.name} {view.type.name} {placed.form} {view.rows} {view.cols} {placed.offset} {placed.nbytes}"
