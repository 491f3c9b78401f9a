"""The shelf of images, over plain arrays: whoever's weights they are, one is in memory and the other in its file."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from backends.base import WeightHome
from backends.digest import digest
from backends.host.image_file import Image, identity_of
from backends.host.images import LINE, ImageShelf

SIZES = {"pipeline": 5000, "tensor": 3000}
BYTES = {name: np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8) for name, size in SIZES.items()}
DIGESTS = {name: digest(data.tobytes()) for name, data in BYTES.items()}
Step = Callable[[str], bool]


class Slab:
    """Memory of an image, which remembers whether it was given back."""

    def __init__(self, size: int) -> None:
        self.bytes = np.zeros(size, np.uint8)
        self.address: int = self.bytes.ctypes.data
        self.closed = False

    def close(self) -> None:
        self.closed = True


class Rig:
    """A shelf of two layouts, pipeline first, filled as a backend fills it that cannot write from where its weights
    lie: both images are kept, and the active one leaves."""

    def __init__(self, folder: Path | None, at: Step = lambda step: False) -> None:
        self.slabs: list[Slab] = []
        self.told: list[str] = []
        self.refused = False
        images = [Image(name, size, identity_of(0, 1, name, [name])) for name, size in SIZES.items()]
        home = WeightHome("images", 0, 1, folder=str(folder or ""), at=at, tell=self.told.append)
        self.shelf = ImageShelf(images, home, self.reserve, self.digest_at)
        for name in reversed(SIZES):
            self.write(self.shelf.keep(name, DIGESTS[name]), BYTES[name])
        self.left = self.shelf.leave("pipeline")
        self.shelf.activated("pipeline")
        self.shelf.settled()

    def reserve(self, name: str, size: int) -> Slab:
        if self.refused:
            raise MemoryError(f"no room for the image of {name}")
        self.slabs.append(Slab(size))
        return self.slabs[-1]

    def slab_at(self, address: int) -> Slab:
        (found,) = [slab for slab in self.slabs if slab.address == address and not slab.closed]
        return found

    def digest_at(self, address: int, nbytes: int) -> int:
        return digest(self.slab_at(address).bytes[:nbytes].tobytes())

    def write(self, address: int, data: np.ndarray) -> None:
        self.slab_at(address).bytes[:] = data

    def read(self, name: str) -> bytes:
        return self.slab_at(self.shelf.address(name)).bytes.tobytes()

    def flip(self, name: str) -> bytes:
        """What a flip to `name` finds there."""
        assert not self.shelf.not_ready(name)
        found = self.read(name)
        self.shelf.activated(name)
        self.shelf.settled()
        return found

    @property
    def held(self) -> int:
        return sum(len(slab.bytes) for slab in self.slabs if not slab.closed)


def test_one_image_is_in_memory_and_what_comes_back_is_what_was_kept(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    assert rig.left and [path.name for path in tmp_path.iterdir()] == ["weights-rank0-pipeline.image"]
    for name in ("tensor", "pipeline", "tensor"):
        assert rig.flip(name) == BYTES[name].tobytes()
        other = next(each for each in SIZES if each != name)
        assert rig.shelf.memory_lines() == {LINE: SIZES[other]} and rig.held == SIZES[other]
        assert [region.bytes for region in rig.shelf.memory_regions()] == [SIZES[other]]
    rig.shelf.close()
    assert rig.held == 0 and not list(tmp_path.iterdir()) and not rig.told


def test_without_a_folder_both_stay_and_no_reason_is_needed() -> None:
    rig = Rig(None)
    assert not rig.left and not rig.shelf.notes
    assert rig.flip("tensor") == BYTES["tensor"].tobytes() and rig.flip("pipeline") == BYTES["pipeline"].tobytes()
    assert rig.shelf.memory_lines() == {LINE: sum(SIZES.values())}
    rig.shelf.close()
    assert rig.held == 0


def test_an_image_that_cannot_be_written_stays_and_says_why(tmp_path: Path) -> None:
    def full(step: str) -> bool:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    rig = Rig(tmp_path, full)
    assert not rig.left and not list(tmp_path.iterdir())
    assert "cannot be written: No space left" in rig.shelf.notes[0] and rig.told == list(rig.shelf.notes)
    assert rig.held == sum(SIZES.values()) == rig.shelf.memory_lines()[LINE]
    assert rig.flip("tensor") == BYTES["tensor"].tobytes()
    rig.shelf.close()


@pytest.mark.parametrize("step", ["spill", "promote"])
def test_a_bit_that_turned_on_its_way_is_never_filled_in(tmp_path: Path, step: str) -> None:
    rig = Rig(tmp_path, lambda of: of == step)
    assert rig.flip("tensor") == BYTES["tensor"].tobytes()
    why = rig.shelf.not_ready("pipeline")
    assert "came back with the digest" in why and f"not {DIGESTS['pipeline']:016x}" in why
    assert rig.told and "pipeline" in rig.told[0]
    assert rig.held == 0 == rig.shelf.memory_lines().get(LINE, 0), "what is not believed is not held"
    rig.shelf.close()


def test_memory_that_lacks_is_a_no_and_is_tried_again_when_it_is_time(tmp_path: Path) -> None:
    rig, now = Rig(tmp_path), [100.0]
    rig.shelf._clock = lambda: now[0]
    rig.refused = True
    rig.flip("tensor")
    assert "no room for the image of pipeline; not tried again for 5 s" in rig.shelf.not_ready("pipeline")
    rig.refused = False
    now[0] += 5
    assert rig.shelf.not_ready("pipeline").endswith("it is tried again now")
    rig.shelf.settled()
    assert rig.flip("pipeline") == BYTES["pipeline"].tobytes()
    rig.shelf.close()


def test_what_an_image_is_of_depends_on_rank_layout_and_every_weight() -> None:
    of = [
        identity_of(0, 2, "tensor", ["a", "b"]),
        identity_of(1, 2, "tensor", ["a", "b"]),
        identity_of(0, 3, "tensor", ["a", "b"]),
        identity_of(0, 2, "pipeline", ["a", "b"]),
        identity_of(0, 2, "tensor", ["b", "a"]),
        identity_of(0, 2, "tensor", ["a"]),
    ]
    assert len(set(of)) == len(of) and of[0] == identity_of(0, 2, "tensor", iter(("a", "b")))
