"""Two layouts on emulated cards: what lies in the arena and in the pools before and behind a flip, and what is found
when it is not what it should be."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gpu_weights
import numpy as np
import pytest
from emulated_device import EmulatedDevice
from ranks import Group, on_paper

from backends.base import (
    PAGE_LEN,
    Binding,
    Buffer,
    KvLayer,
    KvPool,
    Linear,
    LinearPart,
    MemoryRegion,
    Norm,
    Op,
    PartOf,
    PoolRuns,
    RefillFailed,
    StateLayer,
    StatePool,
    TensorView,
    Weight,
    WeightHome,
)
from backends.digest import BLOCK, digest
from backends.gpu import planes, weights
from backends.gpu.copies import Directory, FileCopy
from backends.gpu.errors import OutOfDeviceMemory
from backends.gpu.images import ImageHome
from backends.gpu.layouts import GpuLayouts
from backends.gpu.moves import LEAST_STAGING
from backends.gpu.weights import CardWeights, OfFile
from backends.host.images import ImageShelf
from backends.host.memory import Mapping as MemoryMapping
from backends.quant import QuantType
from homeserve import checkpoint
from homeserve.layouts.partition import Run
from homeserve.layouts.share import PIPELINE, TENSOR, Share
from homeserve.models.bind import bind
from homeserve.models.held_views import held_view
from homeserve.models.registry import family

TINY = Path(__file__).parents[1] / "data" / "tiny"
OUT = Buffer("out", 8)
Views = dict[str, TensorView]
Loaded = tuple[Sequence[Op], Mapping[str, TensorView]]


# ------------------------------------------------------------------------------------------------- a model of few parts


def whole_model() -> Views:
    """Every tensor, of which all but one say where they are from."""
    rng, found = np.random.default_rng(21), {}
    for name, quant, rows, cols in (
        ("table", QuantType.Q4_0, 40, 32),
        ("up", QuantType.Q8_0, 24, 64),
        ("gate", QuantType.F16, 10, 24),
        ("down", QuantType.Q4_0, 16, 128),
        ("norm", QuantType.F32, 1, 48),
        ("made", QuantType.F32, 1, 6),
    ):
        file = gpu_weights.matrix(quant, rows, cols, rng).file.reshape(-1).copy()
        part = PartOf(name, ((0, rows),), ((0, cols),)) if name != "made" else None
        found[name] = TensorView(name, quant, rows, cols, file, part)
    return found


def run_of(views: Sequence[TensorView]) -> Loaded:
    """Ops that use them."""
    ops: list[Op] = []
    for view in views:
        weight = Weight(view.name, view.rows, view.cols)
        if view.name in ("norm", "made"):
            ops.append(Norm(OUT, weight, 0.0, OUT))
        else:
            ops.append(Linear(OUT, (LinearPart(weight, Buffer(view.name, view.rows)),)))
    return ops, {view.name: view for view in views}


def layers_of(model: Views, rank: int) -> Loaded:
    """Of the pipeline layout: whole tensors."""
    names = (("table", "up", "norm", "made"), ("gate", "down", "norm"))[rank]
    return run_of([model[name] for name in names])


def shards_of(model: Views, rank: int) -> Loaded:
    """Of the tensor layout: rows in one run and in two, columns, a whole vector."""
    high, low = ([Run(0, 4), Run(12, 20)], [Run(4, 12), Run(20, 24)])[rank], [Run(64 * rank, 64 * rank + 64)]
    return run_of(
        [
            held_view(model["table"], "table", [Run(20 * rank, 20 * rank + 20)], [Run(0, 32)]),
            held_view(model["up"], "up", high, [Run(0, 64)]),
            held_view(model["gate"], "gate", [Run(0, 10)], [Run(13 * rank, (13, 24)[rank])]),
            held_view(model["down"], "down", [Run(0, 16)], low),
            model["norm"],
            model["made"],
        ]
    )


CUTS: dict[str, Callable[[Views, int], Loaded]] = {PIPELINE: layers_of, TENSOR: shards_of}


def wanted(loaded: Loaded) -> np.ndarray:
    """The arena by `planes.pack`, from the file's bytes."""
    out = []
    for placed in CardWeights(*loaded).placed:
        view, data = placed.view, np.ascontiguousarray(placed.view.data)
        packed = planes.pack(view.type, data, view.rows, view.cols) if placed.form == weights.MATRIX else data
        out.append(np.pad(packed, (0, -len(packed) % weights.ALIGN)))
    return np.concatenate(out)


# -------------------------------------------------------------------------------------------------------- a fleet of it

POOLS = {
    PIPELINE: (
        KvPool((KvLayer(2, 32),) * 2, 6 * PAGE_LEN, QuantType.F16),
        StatePool((StateLayer(72, 4, 2, 16, 20),), 4),
    ),
    TENSOR: (KvPool((KvLayer(2, 32),) * 4, 4 * PAGE_LEN, QuantType.F16), StatePool((StateLayer(36, 4, 1, 16, 20),), 4)),
}


class FakeProgram:
    """Of a layout: it keeps what it was made with."""

    def __init__(self, binding: Binding, own: CardWeights, pools: Any) -> None:
        self.binding, self.weights, self.pools = binding, own, pools
        self.closed = False

    def memory_lines(self) -> dict[str, int]:
        return {"workspace": 1000}

    def memory_regions(self) -> tuple[MemoryRegion, ...]:
        return ()

    def close(self) -> None:
        self.closed = True


class Fleet:
    """Two ranks with both layouts, the pipeline layout active. `home` changes what their weights come from."""

    def __init__(
        self,
        capacity: int = 1 << 32,
        staging: int = LEAST_STAGING,
        make: Any = FakeProgram,
        home: Callable[[WeightHome], WeightHome] = lambda home: home,
    ) -> None:
        self.model, self.fd = whole_model(), os.memfd_create("weights")
        self.devices = [EmulatedDevice(arch, capacity=capacity) for arch in ("sm_86", "gfx1103")]
        self.wanted = {(name, rank): wanted(CUTS[name](self.model, rank)) for name in CUTS for rank in (0, 1)}
        self._staging, self._make, self._home = staging, make, home
        self.told: list[str] = []
        self.stages: set[str] = set()
        group: Group = on_paper(2)
        self.group = group
        self.layouts: list[GpuLayouts] = group.together(self._bind)

    def bindings(self, rank: int) -> list[Binding]:
        fleets = {name: [CUTS[name](self.model, each) for each in (0, 1)] for name in CUTS}
        return [Binding(name, *fleets[name][rank], *POOLS[name], fleet=fleets[name]) for name in CUTS]

    def _bind(self, rank: int) -> GpuLayouts:
        home = WeightHome(
            "copy", rank, 2, *run_of(list(self.model.values())), weights_fd=self.fd, tell=self.told.append
        )
        return GpuLayouts(
            *(self.devices[rank], self.bindings(rank), self.group.acts[rank], self._home(home)),
            *(lambda stage, *_: self.stages.add(stage), self._make, self._staging),
        )

    def arena(self, rank: int) -> np.ndarray:
        layouts, device = self.layouts[rank], self.devices[rank]
        device.settle()
        found = layouts._bounds[layouts.active].weights
        return np.frombuffer(ctypes.string_at(found.address(found.placed[0]), found.nbytes), np.uint8)

    def change(self, rank: int, to: str) -> None:
        layouts = self.layouts[rank]
        layouts.release()
        layouts.map(to)
        layouts.refill(to)
        layouts.activate(to)

    def close(self) -> None:
        for layouts, device in zip(self.layouts, self.devices, strict=True):
            layouts.close()
            device.close()
        os.close(self.fd)


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    made = Fleet()
    yield made
    made.close()


def test_either_layout_is_filled_from_one_copy_and_the_file_is_not_needed(fleet: Fleet) -> None:
    """On cards of both vendors. What lies between weights is what it was at load, whatever layout was there before."""
    assert fleet.stages == {"weights copy", "weights"}
    for view in fleet.model.values():
        view.data[:] = 0xEE
    for to in (TENSOR, PIPELINE, TENSOR):
        for rank, layouts in enumerate(fleet.layouts):
            assert np.array_equal(fleet.arena(rank), fleet.wanted[layouts.active, rank])
            fleet.change(rank, to)
            assert np.array_equal(fleet.arena(rank), fleet.wanted[to, rank])
    lines = [layouts.memory_lines() for layouts in fleet.layouts]
    assert sum(each["weights copy"] for each in lines) == sum(
        view.nbytes for name, view in fleet.model.items() if name != "made"
    ), "each rank tells what it has filled"
    assert [each["weights side"] for each in lines] == [48, 24], "in each layout that uses it"
    assert all(abs(a["weights copy"] - b["weights copy"]) < 1000 for a, b in zip(lines, lines[::-1], strict=True))
    assert {region.line for layouts in fleet.layouts for region in layouts.memory_regions()} == {"weights copy"}


def test_what_a_layout_holds_is_told_by_line(fleet: Fleet) -> None:
    layouts = fleet.layouts[0]
    lines = dict(layouts.memory_lines())
    longest = max(len(fleet.wanted[name, 0]) for name in CUTS)
    assert {name: lines[name] for name in ("weights", "workspace", "flip buffer")} == {
        "weights": longest,
        "workspace": 2000,
        "flip buffer": LEAST_STAGING,
    }
    pools = layouts._bounds[PIPELINE].pools
    assert lines["kv"] + lines["state"] == sum(pools.memory_lines().values()) > 0
    assert lines.keys() == {"weights", "flip buffer", "weights copy", "weights side", "kv", "state", "workspace"}


@pytest.mark.parametrize("kind", ["copy", "images in memory", "images on disk"])
def test_flips_there_and_back_leave_as_much_held_as_there_was(tmp_path: Path, kind: str) -> None:
    """Of the card's memory, of runs of pinned memory, and of what the ledger is told."""
    folder = str(tmp_path) if kind == "images on disk" else ""
    fleet = Fleet() if kind == "copy" else Fleet(home=images(folder))
    layouts, device = fleet.layouts[0], fleet.devices[0]

    def round_trip() -> tuple[int, int, int]:
        for to in (TENSOR, PIPELINE):
            if kind != "copy":
                shelf_of(layouts).settled()
            assert layouts.not_ready(to) == ""
            scribble(fleet, 0, layouts.active)
            payload = memoryview(bytearray(layouts.run_bytes(layouts.active, HERE if to == TENSOR else THERE)))
            layouts.pack(HERE if to == TENSOR else THERE, payload)
            layouts.release()
            layouts.map(to)
            layouts.write(to, THERE if to == TENSOR else HERE, payload)
            layouts.refill(to)
            layouts.activate(to)
        if kind != "copy":
            shelf_of(layouts).settled()
        return device.held, device.pinned_memory.count, sum(layouts.memory_lines().values())

    round_trip()
    first = round_trip()
    assert [round_trip() for _ in range(3)] == [first] * 3
    fleet.close()


def test_addresses_never_move(fleet: Fleet) -> None:
    def addresses(rank: int) -> list[Any]:
        bounds = fleet.layouts[rank]._bounds.values()
        return [
            [each.pools.kv_pool(1), each.pools.state(0), each.weights.address(each.weights.placed[1])]
            for each in bounds
        ]

    before = [addresses(rank) for rank in (0, 1)]
    assert before[0][0][2] - before[0][1][2] != 0, "weights of both lie at places of their own"
    for to in (TENSOR, PIPELINE):
        for rank in (0, 1):
            fleet.change(rank, to)
            assert addresses(rank) == before[rank]


# ----------------------------------------------------------------------------------------------------------------- rows

PAGES = np.array([3, 0, 2], np.int32)
HERE = PoolRuns(
    kv=(((0, 1), PAGES),),
    states=np.array([2, 0], np.int32),
    parts=((0, ((0, 16), (32, 52)), ((1, 2),)),),
)
THERE = PoolRuns(
    kv=(((3, 1), np.array([1, 2, 0], np.int32)),),
    states=np.array([1, 3], np.int32),
    parts=((0, ((0, 36),), ((0, 1),)),),
)
"""The same rows of both layouts."""


def scribble(fleet: Fleet, rank: int, name: str) -> None:
    """Random bytes in the pools of a layout."""
    pools = fleet.layouts[rank]._bounds[name].pools
    fleet.devices[rank].settle()
    for line, at in (("kv", pools.kv_addresses(0)[0]), ("state", pools.state_base)):
        data = np.random.default_rng(31).integers(0, 256, pools.memory_lines()[line], np.uint8)
        ctypes.memmove(at, data.ctypes.data, data.nbytes)


def packed(layouts: GpuLayouts, runs: PoolRuns) -> tuple[bytes, int]:
    payload = bytearray(layouts.run_bytes(layouts.active, runs))
    told = layouts.pack(runs, memoryview(payload))
    assert told == digest(payload) == layouts.digest(memoryview(payload))
    return bytes(payload), told


def test_rows_survive_a_flip_there_and_back(fleet: Fleet) -> None:
    layouts = fleet.layouts[0]
    scribble(fleet, 0, PIPELINE)
    payload, told = packed(layouts, HERE)
    assert len(payload) == layouts.run_bytes(TENSOR, THERE) > BLOCK
    for to, runs in ((TENSOR, THERE), (PIPELINE, HERE)):
        layouts.release()
        layouts.map(to)
        layouts.write(to, runs, memoryview(payload))
        assert layouts.refill(to).tries == 1
        layouts.activate(to)
        assert packed(layouts, runs) == (payload, told)
    other = replace(HERE, kv=(((0, 1), np.array([1, 4, 5], np.int32)),), states=np.array([1, 3], np.int32))
    assert not any(packed(layouts, other)[0]), "what was not carried is gone"


def test_rows_that_changed_places_have_another_digest(fleet: Fleet) -> None:
    layouts = fleet.layouts[1]
    scribble(fleet, 1, PIPELINE)
    _, told = packed(layouts, HERE)
    swapped = replace(HERE, kv=(((0, 1), PAGES[[1, 0, 2]]),))
    other, told_of_other = packed(layouts, swapped)
    assert told_of_other != told
    layouts.write(PIPELINE, HERE, memoryview(other))
    assert packed(layouts, HERE)[1] == told_of_other


def test_payloads_of_another_length_are_refused(fleet: Fleet) -> None:
    layouts = fleet.layouts[0]
    room = bytearray(layouts.run_bytes(PIPELINE, HERE) + 1)
    with pytest.raises(ValueError, match=f"room for {len(room)} bytes, the rows are {len(room) - 1}"):
        layouts.pack(HERE, memoryview(room))
    with pytest.raises(ValueError, match=f"a payload of {len(room)} bytes for rows of {len(room) - 1}"):
        layouts.write(PIPELINE, HERE, memoryview(room))


def test_released_pools_hold_nothing_and_are_not_touched(fleet: Fleet) -> None:
    layouts, device = fleet.layouts[0], fleet.devices[0]
    before, lines = device.held, layouts.memory_lines()
    pools = layouts._bounds[PIPELINE].pools
    at = pools.kv_addresses(0)[0]
    layouts.release()
    assert before - device.held >= lines["kv"] + lines["state"] > 0
    assert not device.memory.holds(at) and layouts.memory_lines()["kv"] == 0
    room = memoryview(bytearray(layouts.run_bytes(PIPELINE, HERE)))
    device.launch = refuse  # type: ignore[method-assign]
    for name, step in ((PIPELINE, layouts.pack), (TENSOR, lambda runs, out: layouts.write(TENSOR, THERE, out))):
        with pytest.raises(ValueError, match=f"pools of the {name} layout hold no memory now"):
            step(HERE, room)
    layouts.map(TENSOR)
    with pytest.raises(ValueError, match="hold no memory"):
        layouts.pack(HERE, room)
    del device.launch  # type: ignore[method-assign]
    held = sum(layouts._bounds[TENSOR].pools.memory_lines().values())
    assert device.held >= held > 0 and not device.memory.holds(at), "one layout's pools alone"


def test_pools_for_which_there_is_no_room_say_so_and_hold_nothing() -> None:
    fleet = Fleet()
    layouts, device = fleet.layouts[0], fleet.devices[0]
    layouts.release()
    device.capacity = device.held + 70_000
    held = device.held
    with pytest.raises(OutOfDeviceMemory, match="4 states of"):
        layouts.map(TENSOR)
    assert device.held == held
    device.capacity = 1 << 32
    layouts.map(TENSOR)
    fleet.close()


# -------------------------------------------------------------------------------------------------------------- refills


def test_a_spoilt_refill_is_filled_once_more(fleet: Fleet) -> None:
    layouts = fleet.layouts[0]
    layouts.release()
    layouts.map(TENSOR)
    plain = layouts.refill(TENSOR)
    spoilt = layouts.refill(TENSOR, spoilt=True)
    assert (plain.tries, spoilt.tries) == (1, 2) and plain.digest == spoilt.digest == layouts.arena_digest(TENSOR)
    assert plain.nbytes == sum(view.nbytes for view in shards_of(fleet.model, 0)[1].values())
    layouts.activate(TENSOR)
    assert np.array_equal(fleet.arena(0), fleet.wanted[TENSOR, 0])


@pytest.mark.parametrize("what", ["a bit", "rows that changed places"])
def test_a_copy_that_is_no_longer_what_it_was_ends_the_rank(fleet: Fleet, what: str) -> None:
    layouts = fleet.layouts[1]
    right = layouts.arena_digest(PIPELINE)
    home = Directory(
        WeightHome("copy", 0, 2, *run_of(list(fleet.model.values()))),
        [CUTS[name](fleet.model, rank) for name in CUTS for rank in (0, 1)],
    )
    (down,) = (whole for whole in home.wholes if whole.view.name == "down")
    row = down.view.nbytes // down.view.rows
    first, other = (os.pread(fleet.fd, row, down.offset + at * row) for at in (2, 5))
    if what == "a bit":
        os.pwrite(fleet.fd, bytes([first[0] ^ 4]) + first[1:], down.offset + 2 * row)
    else:
        os.pwrite(fleet.fd, other, down.offset + 2 * row)
        os.pwrite(fleet.fd, first, down.offset + 5 * row)
    layouts.release()
    layouts.map(PIPELINE)
    with pytest.raises(
        RefillFailed, match=f"filled in 2 times and have the digests .* Emulated gfx1103 .* {right:016x}"
    ):
        layouts.refill(PIPELINE)


def test_a_kernel_that_leaves_rows_as_they_were_is_found(fleet: Fleet) -> None:
    """The arena is zeros before, so what was not packed is not what another filling left there."""
    layouts, device = fleet.layouts[0], fleet.devices[0]
    launch = device.launch
    layouts.release()
    layouts.map(PIPELINE)
    device.launch = lambda launches: launch([each for each in launches if each.symbol.name != "pack_q8_0"])  # type: ignore[method-assign]
    with pytest.raises(RefillFailed):
        layouts.refill(PIPELINE)


# --------------------------------------------------------------------------------------------------------------- images


def images(folder: str) -> Callable[[WeightHome], WeightHome]:
    return lambda home: WeightHome("images", home.rank, home.ranks, folder=folder, tell=home.tell)


def shelf_of(layouts: GpuLayouts) -> ImageShelf:
    home = layouts._home
    assert isinstance(home, ImageHome)
    return home.shelf


@pytest.mark.parametrize("on_disk", [False, True], ids=["memory", "disk"])
def test_either_layout_is_filled_from_its_image(tmp_path: Path, on_disk: bool) -> None:
    fleet = Fleet(home=images(str(tmp_path) if on_disk else ""))
    packs = [sum(device.counts.values()) - device.counts["digest"] for device in fleet.devices]
    for view in fleet.model.values():
        view.data[:] = 0xEE
    for to in (TENSOR, PIPELINE, TENSOR):
        for rank, layouts in enumerate(fleet.layouts):
            assert np.array_equal(fleet.arena(rank), fleet.wanted[layouts.active, rank])
            shelf_of(layouts).settled()
            assert layouts.not_ready(to) == ""
            sizes = [len(fleet.wanted[name, rank]) for name in ((to,) if on_disk else CUTS)]
            assert layouts.memory_lines()["weights image"] == sum(sizes)
            fleet.change(rank, to)
            assert np.array_equal(fleet.arena(rank), fleet.wanted[to, rank])
    assert [sum(device.counts.values()) - device.counts["digest"] for device in fleet.devices] == packs, (
        "no kernel packs"
    )
    assert len(list(tmp_path.iterdir())) == (4 if on_disk else 0) and not fleet.told
    fleet.close()
    assert not list(tmp_path.iterdir())


def test_there_is_never_more_than_one_image_in_memory_while_they_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: dict[int, int] = {}
    most: list[int] = []

    class Counted(MemoryMapping):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            held[id(self)] = self.size
            most.append(sum(1 for _ in held))

        def close(self) -> None:
            held.pop(id(self), None)
            super().close()

    monkeypatch.setattr("backends.gpu.images.MemoryMapping", Counted)
    fleet = Fleet(home=images(str(tmp_path)))
    for to in (TENSOR, PIPELINE):
        for rank, layouts in enumerate(fleet.layouts):
            shelf_of(layouts).settled()
            assert layouts.not_ready(to) == ""
            fleet.change(rank, to)
            shelf_of(layouts).settled()
    assert max(most) == 2, "one of each of two ranks"
    fleet.close()
    assert not held


def test_an_image_is_pinned_when_it_is_asked_for_and_no_longer_when_it_leaves(tmp_path: Path) -> None:
    fleet = Fleet(home=images(str(tmp_path)))
    layouts, device = fleet.layouts[0], fleet.devices[0]
    shelf = shelf_of(layouts)
    first = shelf.address(TENSOR)
    assert device.pinned_memory.holds(first, shelf.size(TENSOR)), "from the load on"
    fleet.change(0, TENSOR)
    assert not device.pinned_memory.holds(first)
    shelf.settled()
    came = shelf.address(PIPELINE)
    assert not device.pinned_memory.holds(came), "a thread of its own has brought it"
    device.pin = refuse  # type: ignore[method-assign]
    assert layouts.not_ready(PIPELINE) == "the image of the pipeline layout is in memory and cannot be pinned: no more"
    del device.pin  # type: ignore[attr-defined]
    assert layouts.not_ready(PIPELINE) == "" and device.pinned_memory.holds(came, shelf.size(PIPELINE))
    fleet.close()


def refuse(*_: Any) -> Any:
    raise MemoryError("no more")


def test_a_bad_image_is_copied_once_more_and_ends_the_rank_if_it_stays_bad() -> None:
    fleet = Fleet(home=images(""))
    layouts, shelf = fleet.layouts[0], shelf_of(fleet.layouts[0])
    layouts.release()
    layouts.map(TENSOR)
    assert layouts.refill(TENSOR, spoilt=True).tries == 2
    ctypes.c_uint8.from_address(shelf.address(TENSOR) + 300).value ^= 16
    with pytest.raises(RefillFailed, match="the weights of the tensor layout were filled in 2 times"):
        layouts.refill(TENSOR)
    fleet.close()


def test_an_image_that_is_not_what_lies_on_the_card_is_found_at_load(tmp_path: Path) -> None:
    class Lossy(EmulatedDevice):
        def download(self, target: int, source: int, nbytes: int) -> None:
            super().download(target, source, nbytes - 600 if nbytes > 2000 else nbytes)

    binding = Binding(PIPELINE, *layers_of(whole_model(), 0), *POOLS[PIPELINE])
    device, acts = Lossy(), on_paper(1).acts[0]
    with pytest.raises(RefillFailed, match="the image of the pipeline layout has the digest"):
        GpuLayouts(
            *(device, [binding], acts, WeightHome("images", 0, 1, folder=str(tmp_path))),
            *(lambda *_: None, FakeProgram, LEAST_STAGING),
        )
    assert device.held == 0 and not list(tmp_path.iterdir())


def test_weights_that_load_in_two_ways_are_found(tmp_path: Path) -> None:
    """The active layout is filled twice: the second time one bit of the file is another one."""
    model = whole_model()
    binding, filled = Binding(PIPELINE, *layers_of(model, 0), *POOLS[PIPELINE]), [0]

    def progress(stage: str, done: int, total: int) -> None:
        filled[0] += done == total
        model["up"].data[7] ^= int(done == total and filled[0] == 1)

    acts: Any = on_paper(1).acts[0]
    with pytest.raises(RefillFailed, match="were loaded twice to Emulated sm_86 .* and have the digests"):
        GpuLayouts(
            *(EmulatedDevice(), [binding], acts, WeightHome("images", 0, 1, folder=str(tmp_path))),
            *(progress, FakeProgram, LEAST_STAGING),
        )


# ------------------------------------------------------------------------------------------------------- boot and close


def test_what_layouts_cannot_be_had_is_said_and_nothing_is_kept() -> None:
    device = EmulatedDevice()
    model = whole_model()
    binding = Binding(PIPELINE, *layers_of(model, 0), *POOLS[PIPELINE])
    acts: Any = on_paper(1).acts[0]

    def made(home: WeightHome, make: Any = FakeProgram) -> GpuLayouts:
        return GpuLayouts(device, [binding], acts, home, lambda *_: None, make, LEAST_STAGING)

    with pytest.raises(ValueError, match="cannot come from 'disk'"):
        made(WeightHome("disk", 0, 1))
    whole = run_of(list(model.values()))

    def broken(*_: Any) -> Any:
        raise ValueError("no program")

    with pytest.raises(ValueError, match="no program"):
        made(WeightHome("copy", 0, 1, *whole, weights_fd=os.memfd_create("weights")), broken)
    assert device.held == 0
    device.capacity = 1 << 10
    with pytest.raises(OutOfDeviceMemory, match="the larger of"):
        made(WeightHome("copy", 0, 1, *whole, weights_fd=os.memfd_create("weights")))
    assert device.held == 0


@pytest.mark.parametrize("kind", ["copy", "images"])
@pytest.mark.parametrize("step", ["pin", "launch", "download"])
def test_a_load_that_fails_says_why_and_keeps_nothing(tmp_path: Path, kind: str, step: str) -> None:
    device, model = EmulatedDevice(), whole_model()
    binding = Binding(PIPELINE, *layers_of(model, 0), *POOLS[PIPELINE])
    whole = run_of(list(model.values()))
    home = WeightHome(kind, 0, 1, *whole, weights_fd=os.memfd_create("weights"), folder=str(tmp_path))
    acts: Any = on_paper(1).acts[0]
    setattr(device, step, refuse)
    with pytest.raises(MemoryError, match="no more"):
        GpuLayouts(device, [binding], acts, home, lambda *_: None, FakeProgram, LEAST_STAGING)
    assert device.held == 0 and not list(tmp_path.iterdir())


def test_close_gives_all_of_it_back_and_a_layout_that_there_is_not_is_named() -> None:
    fleet = Fleet()
    assert fleet.layouts[0].not_ready("ring") == "there is no ring layout here, there is pipeline and tensor"
    assert fleet.layouts[0].not_ready(TENSOR) == "" and fleet.layouts[0].notes == ()
    programs = [bound.program for layouts in fleet.layouts for bound in layouts._bounds.values()]
    assert fleet.layouts[0].program is programs[0]
    fleet.close()
    assert all(program.closed for program in programs)  # type: ignore[union-attr]
    assert [device.held for device in fleet.devices] == [0, 0]


# -------------------------------------------------------------------------------------------------- copies of real cuts


def assembled(view: TensorView, source: weights.Source) -> np.ndarray:
    lines = np.full((view.rows, view.type.row_bytes(view.cols)), 0xEE, np.uint8)
    for each in source.rectangles(view):
        at, (rows, nbytes) = view.type.row_bytes(each.first_col), each.lines.shape
        lines[each.first_row : each.first_row + rows, at : at + nbytes] = each.lines
    return lines.reshape(-1)


@pytest.mark.parametrize("vector", [(1, 1), (2, 1, 1)], ids=str)
@pytest.mark.parametrize("name", sorted(path.name.removesuffix(".f32.gguf") for path in TINY.glob("*.f32.gguf")))
def test_the_copy_has_every_part_of_every_rank_in_both_layouts(name: str, vector: tuple[int, ...]) -> None:
    """The cuts of real models: fused tensors, stacks of experts, tiled heads. Each tensor is in the copy once."""
    opened = checkpoint.open(str(TINY / f"{name}.f32.gguf"))
    try:
        declared = family(opened.arch)
        config = declared.config_from(opened.metadata)

        def bound(share: Share | None) -> Loaded:
            made = bind(declared, config, opened.tensors, share) if share else bind(declared, config, opened.tensors)
            return made.ops, made.weights

        shares = [Share.tensor(rank, vector) for rank in range(len(vector))]
        fleet, whole = [bound(share) for share in shares], bound(None)
        copies = on_paper(len(vector))
        fd = os.memfd_create("weights")

        def filled(rank: int) -> FileCopy:
            own = {TENSOR: CardWeights(*fleet[rank]), PIPELINE: CardWeights(*whole)}
            home = WeightHome("copy", rank, len(vector), *whole, weights_fd=fd)
            return FileCopy(EmulatedDevice(), home, [*fleet, whole], own, copies.acts[rank], lambda *_: None)

        made = copies.together(filled)
        for rank, copy in enumerate(made):
            for layout, loaded in ((TENSOR, fleet[rank]), (PIPELINE, whole)):
                source = copy.of(layout)
                for placed in CardWeights(*loaded).placed:
                    assert np.array_equal(assembled(placed.view, source), assembled(placed.view, OfFile())), (
                        placed.view.name
                    )
            del source
        whole_bytes = sum(view.nbytes for view in opened.tensors.values())
        assert sum(copy.memory_lines()["weights copy"] for copy in made) <= whole_bytes
        for copy, loaded in zip(made, fleet, strict=True):
            aside = {placed.view.name for placed in CardWeights(*loaded).placed if placed.view.part is None}
            assert copy._side[TENSOR].keys() == aside, "what says where it is from is in the copy as it is"
            assert copy.memory_lines().get("weights side", 0) < whole_bytes // 16
        for copy in made:
            copy.close()
        os.close(fd)
    finally:
        opened.close()
