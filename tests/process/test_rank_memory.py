"""What three real ranks hold of one model: each its own shard (discrete), or all of it once together (unified).

Read from outside, in /proc/PID/smaps and /proc/PID/mem, of workers that have loaded SmolLM2 and computed with it. What
a rank is to hold comes from the declarations (`bind` of its share), not from the worker.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

# The test folders are no package (pytest's importlib mode); the models lie among the model tests.
sys.path.insert(0, str(Path(__file__).parents[1] / "model"))

from wide_models import save

from backends.base import StatePool
from backends.cpu.delta import slot_bytes
from budget.facts import MIB
from homeserve import checkpoint
from homeserve.fleet import ActSizes
from homeserve.layouts.share import Share
from homeserve.models import registry
from homeserve.models.bind import bind
from homeserve.wire.records import LoadSpec, PlanKind

pytestmark = pytest.mark.timeout(240)

RANKS, ROWS, RUNNING, SLOTS = 3, 64, 4, 4096
RANGES = ((0, 10), (10, 22), (22, 30))
VECTOR = (2, 1, 1)
"""With these each shard ends well within its last huge page, which is resident as a whole."""
SPECS: dict[str, dict[str, Any]] = {
    "pipeline": {"ranges": RANGES},
    "tensor": {"weight_vector": VECTOR, "token_vector": (28, 26, 20)},
}
ACTS = ActSizes(piece_floats=1 << 17, message_floats=ROWS * 2 * 576, token_floats=64, depth=6)
STATES = 600
"""State slots: of the made-up model some MiB."""
ELSE_MIB = 64
"""A worker without its weights, pool and buffers: the interpreter and its libraries. A second copy would be more."""


@dataclass
class Area:
    """One mapping: sizes in bytes, by the name of the field."""

    start: int
    end: int
    flags: str
    name: str
    sizes: dict[str, int] = field(default_factory=dict)

    @property
    def private(self) -> int:
        return self.sizes["Private_Clean"] + self.sizes["Private_Dirty"]


def areas_of(pid: int) -> list[Area]:
    found: list[Area] = []
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        words = line.split(None, 5)
        if not words[0].endswith(":"):
            start, end = (int(word, 16) for word in words[0].split("-"))
            found.append(Area(start, end, words[1], words[5] if len(words) > 5 else ""))
        elif words[-1] == "kB":
            found[-1].sizes[words[0][:-1]] = int(words[1]) * 1024
    return found


@dataclass
class Held:
    """A rank: its process, and where it says that its lines lie."""

    pid: int
    regions: tuple[tuple[str, int, int], ...]

    def areas(self, line: str) -> list[Area]:
        """Mappings that begin in the regions of `line`."""
        of_line = [(address, address + size) for name, address, size in self.regions if name == line]
        return [area for area in areas_of(self.pid) if any(first <= area.start < end for first, end in of_line)]

    def largest(self, line: str) -> tuple[int, int]:
        """(address, bytes) of the largest region of `line`."""
        _, address, size = max((region for region in self.regions if region[0] == line), key=lambda each: each[2])
        return address, size

    def digest(self) -> bytes:
        """Of every byte of its weights."""
        return hashlib.blake2b(self.read()).digest()

    def read(self) -> bytes:
        address, size = self.largest("weights")
        with open(f"/proc/{self.pid}/mem", "rb", buffering=0) as memory:
            memory.seek(address)
            data = b"".join(iter(lambda: memory.read(min(8 * MIB, address + size - memory.tell())), b""))
        assert len(data) == size
        return data

    def overwrite(self) -> None:
        """All of its weights with zeros: numbers stay numbers."""
        address, size = self.largest("weights")
        with open(f"/proc/{self.pid}/mem", "r+b", buffering=0) as memory:
            memory.seek(address)
            for done in range(0, size, 8 * MIB):
                memory.write(bytes(min(8 * MIB, size - done)))


def held_by(fleet: Any) -> list[Held]:
    return [Held(pid, regions) for _, pid, regions in sorted(fleet.fleet.regions())]


async def load(fleet: Any, model: str, layout: str) -> None:
    await fleet.fleet.start()
    spec = LoadSpec(model, SLOTS, "f16", ROWS, RUNNING, RUNNING, 40, layout=layout, **SPECS[layout])
    await fleet.fleet.load(spec)


def share_of(rank: int, layout: str) -> Share:
    return Share.tensor(rank, VECTOR) if layout == "tensor" else Share.pipeline(rank, RANGES)


@dataclass(frozen=True)
class Model:
    path: str
    whole: int
    """Bytes of all weights,"""
    shards: Mapping[str, list[int]]
    """and of each rank's, by layout."""
    kv: int
    """Bytes of `SLOTS` rows of all layers in f16."""


@pytest.fixture(scope="module")
def model(smollm2: str) -> Model:
    opened = checkpoint.open(smollm2, registry.folder_families)
    family = registry.family(opened.arch)
    config = family.config_from(opened.metadata)

    def weights(share: Share | None) -> int:
        return sum(view.nbytes for view in bind(family, config, opened.tensors, share).weights.values())

    shards = {layout: [weights(share_of(rank, layout)) for rank in range(RANKS)] for layout in SPECS}
    shapes = bind(family, config, opened.tensors).kv_layers
    kv = SLOTS * 2 * sum(2 * shape.kv_heads * shape.head_dim for shape in shapes)
    found = Model(smollm2, weights(None), shards, kv)
    opened.close()
    return found


@pytest.mark.parametrize("layout", SPECS)
def test_ranks_that_share_nothing_hold_their_shard_alone_and_no_page_of_the_file(
    driver: Any, run_once: Any, model: Model, layout: str
) -> None:
    """What is written over one rank's weights changes its text, and no byte of another one's."""

    async def main() -> None:
        async with driver(RANKS, backend="cpu", acts=ACTS) as fleet:
            await load(fleet, model.path, layout)
            before = await fleet.generate(6)
            ranks = held_by(fleet)
            assert len(set(model.shards[layout])) > 1
            for rank, shard in zip(ranks, model.shards[layout], strict=True):
                arena = rank.areas("weights")
                assert arena and all(area.flags == "rw-p" and not area.name for area in arena)
                assert sum(area.private for area in arena) == pytest.approx(shard, rel=0.05)
                every = areas_of(rank.pid)
                assert not [area for area in every if os.path.basename(model.path) in area.name]
                lines = [area.start for line in ("weights", "kv", "workspace") for area in rank.areas(line)]
                rest = sum(area.private for area in every if area.start not in lines)
                assert rest < ELSE_MIB * MIB < model.whole
            kept = sum(area.private for rank in ranks for area in rank.areas("kv"))
            assert model.kv <= kept < 1.05 * model.kv + RANKS * 2 * MIB
            digests = [rank.digest() for rank in ranks]
            ranks[0].overwrite()
            assert [rank.digest() == known for rank, known in zip(ranks, digests, strict=True)] == [False, True, True]
            fleet.results.clear()
            fleet.fleet.issue(PlanKind.FLUSH, epoch=0)
            await fleet.until(lambda: fleet.lost or fleet.results)
            assert await fleet.generate(6) != before and not fleet.lost

    run_once(main)


@pytest.mark.parametrize("layout", SPECS)
def test_ranks_of_one_memory_hold_the_weights_once(driver: Any, run_once: Any, model: Model, layout: str) -> None:
    """And KV rows once. What is written through one rank's mapping is seen by another."""

    async def main() -> None:
        async with driver(RANKS, backend="cpu", acts=ACTS, unified=True) as fleet:
            await load(fleet, model.path, layout)
            await fleet.generate(6)
            ranks = held_by(fleet)
            weights = sum(area.sizes["Pss"] for rank in ranks for area in rank.areas("weights"))
            assert 0.99 * model.whole <= weights <= 1.05 * model.whole
            mapped = [max(rank.areas("weights"), key=lambda area: area.end - area.start) for rank in ranks]
            assert all(area.flags == "rw-s" and area.name.startswith("/memfd:homeserve-weights") for area in mapped)
            assert all(area.end - area.start >= model.whole for area in mapped)
            for rank in ranks:
                assert not [area for area in areas_of(rank.pid) if os.path.basename(model.path) in area.name]
                assert all(area.name.startswith("/memfd:homeserve-kv") for area in rank.areas("kv"))
                assert sum(area.end - area.start for area in rank.areas("kv")) >= model.kv
            kept = sum(area.sizes["Pss"] for rank in ranks for area in rank.areas("kv"))
            assert model.kv <= kept < 1.05 * model.kv + RANKS * 2 * MIB
            before = ranks[1].digest()
            assert before == ranks[0].digest() == ranks[2].digest()
            ranks[0].overwrite()
            assert before != ranks[1].digest() == ranks[0].digest() == ranks[2].digest()

    run_once(main)


@pytest.mark.parametrize("layout", SPECS)
def test_ranks_of_one_memory_hold_every_state_once(driver: Any, run_once: Any, tmp_path: Path, layout: str) -> None:
    """Of made-up delta nets. A rank changes what another rank maps."""
    path = save("qwen35", tmp_path / "wide.gguf")
    opened = checkpoint.open(str(path), registry.folder_families)
    family = registry.family(opened.arch)
    each = slot_bytes(StatePool(bind(family, family.config_from(opened.metadata), opened.tensors).state_layers, 1))
    opened.close()
    shares = {"pipeline": {"ranges": ((0, 2), (2, 3), (3, 4))}, "tensor": SPECS["tensor"]}

    async def main() -> None:
        async with driver(RANKS, backend="cpu", acts=ACTS, unified=True) as fleet:
            await fleet.fleet.start()
            spec = LoadSpec(str(path), 1024, "f16", ROWS, RUNNING, RUNNING, 40, layout=layout, state_slots=STATES,
                            **shares[layout])  # fmt: skip
            facts = await fleet.fleet.load(spec)
            told = [dict(rank.lines)["state"] for rank in facts]
            assert sum(told) == STATES * each and max(told) - min(told) <= 1
            await fleet.generate(6)
            areas = [area for rank in held_by(fleet) for area in rank.areas("state")]
            assert len(areas) == RANKS and all(area.name.startswith("/memfd:homeserve-state") for area in areas)
            assert all(area.end - area.start >= STATES * each for area in areas)
            kept = sum(area.sizes["Pss"] for area in areas)
            assert 0.99 * STATES * each <= kept < STATES * each + RANKS * 2 * MIB

    run_once(main)
