"""What a rank with two layouts holds, read from the system: pools that take turns give their pages back, at addresses
that stay; and what its images do when the disk or a file is not what it should be."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from flipping_ranks import OTHER, Flipping, copy_home
from ranks import Group, over_memory

from backends.base import Backend, OpenOptions, WeightHome
from backends.host import image_file
from backends.host.images import ImageShelf
from backends.registry import open_backend

ALMOST_NOTHING = 64 * 1024
PROMPT = list(range(3, 40))


def cpu_rank() -> Backend:
    return open_backend("cpu", OpenOptions(threads=1))


@pytest.fixture
def acts() -> Iterator[Callable[[int], Group]]:
    with ExitStack() as stack:
        device = stack.enter_context(closing(cpu_rank()))
        yield lambda ranks: stack.enter_context(over_memory(device.library, ranks))


def resident(address: int) -> int:
    """Bytes of the mapping that begins there."""
    start = -1
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if match := re.match(r"([0-9a-f]+)-", line):
            start = int(match[1], 16)
        elif line.startswith("Rss:") and start == address:
            return int(line.split()[1]) * 1024
    raise AssertionError(f"no mapping at {address:x}")


@pytest.mark.parametrize("form", ["llama", "qwen35"])
def test_only_the_active_layouts_pools_hold_memory(acts: Callable[[int], Group], form: str) -> None:
    ranks = Flipping(form, (1, 1), acts(2), cpu_rank, copy_home)
    pools = [
        {name: bound.pools.memory_regions() for name, bound in layouts._bounds.items()} for layouts in ranks.layouts
    ]
    for _ in range(3):
        ranks.run([(0, 0, PROMPT)])
        ranks.flip({0: len(PROMPT)})
        for layouts, own in zip(ranks.layouts, pools, strict=True):
            layouts.settle()
            for name, regions in own.items():
                assert layouts._bounds[name].pools.memory_regions() == regions, "addresses stay"
                for region in regions:
                    held = resident(region.address)
                    if name == layouts.active:
                        assert held >= region.bytes, region
                    else:
                        assert held <= ALMOST_NOTHING, region
    ranks.close()


def test_the_copy_is_told_once_and_no_file_of_the_model_stays_open(acts: Callable[[int], Group]) -> None:
    ranks = Flipping("llama", (2, 1, 1), acts(3), cpu_rank, copy_home)
    lines = [layouts.memory_lines() for layouts in ranks.layouts]
    sizes = {r.bytes for layouts in ranks.layouts for r in layouts.memory_regions() if r.line == "weights copy"}
    assert {sum(each["weights copy"] for each in lines)} == sizes
    for layouts, each in zip(ranks.layouts, lines, strict=True):
        assert each["weights"] == max(bound.arena_bytes for bound in layouts._bounds.values())
    ranks.close()


# ---------------------------------------------------------------------------------------------------------- images


def with_images(acts: Callable[[int], Group], folder: Path, at: Callable[[str], bool] = lambda step: False) -> Flipping:
    def home(rank: int, ranks: int, whole: object, fd: int) -> WeightHome:
        return WeightHome("images", rank, ranks, folder=str(folder), at=at)

    return Flipping("llama", (1, 1), acts(2), cpu_rank, home)


def turned(ranks: Flipping) -> None:
    """Every rank in the other layout, and nothing on its way any more."""
    to = OTHER[ranks.active]
    for layouts in ranks.layouts:
        layouts.release()
        layouts.map(to)
        layouts.refill(to)
        layouts.activate(to)
        layouts._source.shelf.settled()


def image_bytes(ranks: Flipping) -> list[int]:
    return [layouts.memory_lines().get("weights image", 0) for layouts in ranks.layouts]


def test_one_image_is_in_memory_and_the_other_in_the_folder(acts: Callable[[int], Group], tmp_path: Path) -> None:
    ranks = with_images(acts, tmp_path)
    assert sorted(each.name for each in tmp_path.iterdir()) == [f"weights-rank{r}-pipeline.image" for r in (0, 1)]
    sizes = [{n: b.arena_bytes for n, b in layouts._bounds.items()} for layouts in ranks.layouts]
    assert image_bytes(ranks) == [each["tensor"] for each in sizes]
    turned(ranks)
    assert image_bytes(ranks) == [each["pipeline"] for each in sizes]
    assert len(list(tmp_path.iterdir())) == 4
    written = {each.name: each.stat().st_mtime_ns for each in tmp_path.iterdir()}
    turned(ranks)
    turned(ranks)
    assert {each.name: each.stat().st_mtime_ns for each in tmp_path.iterdir()} == written, "written once"
    ranks.close()
    assert not list(tmp_path.iterdir())


def full_disk(step: str) -> bool:
    if step == "spill":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return False


def test_a_full_disk_leaves_both_images_in_memory(acts: Callable[[int], Group], tmp_path: Path) -> None:
    ranks = with_images(acts, tmp_path, full_disk)
    assert not list(tmp_path.iterdir()), "no part of a file stays"
    both = [sum(bound.arena_bytes for bound in layouts._bounds.values()) for layouts in ranks.layouts]
    assert image_bytes(ranks) == both
    assert all("cannot be written: No space left" in layouts.notes[0] for layouts in ranks.layouts)
    for _ in range(3):
        turned(ranks)
    assert image_bytes(ranks) == both
    ranks.close()


Damage = Callable[[Path, Path], None]


def cut(path: Path, other: Path) -> None:
    os.truncate(path, path.stat().st_size - 5)


def torn(path: Path, other: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2].ljust(len(data), b"\0"))


def foreign(path: Path, other: Path) -> None:
    data, trailer = path.read_bytes(), bytearray(other.read_bytes()[-96:])
    trailer[16:24] = data[-80:-72]
    path.write_bytes(data[:-96] + trailer)


def other_layout(path: Path, other: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:-64] + b"tensor".ljust(32, b"\0") + data[-32:])


def other_weights(path: Path, other: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-72] ^= 1
    path.write_bytes(data)


def decayed(path: Path, other: Path) -> None:
    data = bytearray(path.read_bytes())
    data[1000] ^= 16
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (cut, "cut or torn"),
        (torn, "it is torn, or no image"),
        (foreign, "another rank or another model"),
        (other_layout, "an image of the tensor layout, not of the pipeline layout"),
        (other_weights, "an image of other weights"),
        (decayed, "came back with the digest"),
        (lambda path, other: path.unlink(), "No such file"),
    ],
    ids=["cut", "torn", "foreign", "other layout", "other weights", "decayed", "gone"],
)
def test_a_file_that_is_not_the_image_is_never_filled_in(
    acts: Callable[[int], Group], tmp_path: Path, damage: Damage, why: str
) -> None:
    ranks = with_images(acts, tmp_path)
    damage(*(tmp_path / f"weights-rank{rank}-pipeline.image" for rank in (0, 1)))
    turned(ranks)
    assert why in ranks.layouts[0].not_ready("pipeline")
    assert not ranks.layouts[1].not_ready("pipeline") and not ranks.layouts[0].not_ready("tensor") == ""
    ranks.close()


def test_a_spoilt_promotion_is_not_ready(acts: Callable[[int], Group], tmp_path: Path) -> None:
    ranks = with_images(acts, tmp_path, lambda step: step == "promote")
    turned(ranks)
    assert all("came back with the digest" in layouts.not_ready("pipeline") for layouts in ranks.layouts)
    ranks.close()


def test_an_image_that_did_not_come_back_is_tried_again_by_a_flip_that_asks(
    acts: Callable[[int], Group], tmp_path: Path
) -> None:
    """Later each time; and when it comes, flips go on as ever."""
    ranks = with_images(acts, tmp_path)
    ranks.run([(0, 0, PROMPT)])
    layouts = ranks.layouts[0]
    source, now = layouts._source.shelf, [1000.0]
    source._clock = lambda: now[0]
    file = tmp_path / "weights-rank0-pipeline.image"
    file.rename(tmp_path / "away")
    ranks.flip({0: len(PROMPT)})
    source.settled()

    def asked() -> str:
        why = layouts.not_ready("pipeline")
        assert "No such file" in why, why
        source.settled()
        return why

    for wait_s in (5, 10, 20):
        now[0] += wait_s - 1
        for _ in range(2):
            assert asked().endswith("not tried again for 1 s") and source._worker is None
        now[0] += 1
        assert asked().endswith("it is tried again now")
    now[0] += 40
    (tmp_path / "away").rename(file)
    assert asked().endswith("it is tried again now")
    assert not layouts.not_ready("pipeline") and len(image_bytes(ranks)) == 2 and all(image_bytes(ranks))
    for _ in range(3):
        ranks.flip({0: len(PROMPT)})
        source.settled()
    file.unlink()
    now[0] += 1000
    ranks.flip({0: len(PROMPT)})
    source.settled()
    assert asked().endswith("not tried again for 5 s"), "what went before is forgotten"
    ranks.close()


@pytest.mark.parametrize("step", ["spill", "promote"])
def test_a_rank_that_ends_waits_for_no_image(
    acts: Callable[[int], Group], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Neither for the rest of one that it writes nor for that of one that it reads, and it leaves no file."""
    monkeypatch.setattr(image_file, "PIECE", 4096)
    pieces: list[str] = []
    told: list[str] = []
    ending: list[ImageShelf] = []

    def at(of: str) -> bool:
        if ending and of == step:  # half of it is done
            for source in ending:
                source._closing.set()
            pieces.clear()
        return False

    def counted(of: str) -> Callable[..., None]:
        does = getattr(image_file, of)
        return lambda *given: (pieces.append(of), does(*given))[1]

    for name in ("_write", "_read"):
        monkeypatch.setattr(image_file, name, counted(name))

    def home(rank: int, ranks: int, whole: object, fd: int) -> WeightHome:
        return WeightHome("images", rank, ranks, folder=str(tmp_path), at=at, tell=told.append)

    ranks = Flipping("llama", (1, 1), acts(2), cpu_rank, home)
    ending.append(ranks.layouts[0]._source.shelf)
    layouts = ranks.layouts[0]
    layouts.release()
    layouts.map("tensor")
    layouts.refill("tensor")
    layouts.activate("tensor")
    layouts._source.shelf.settled()
    assert len(pieces) <= 1 and not told, (pieces, told)
    assert not list(tmp_path.glob("*.part"))
    ranks.close()
    assert not list(tmp_path.iterdir())
