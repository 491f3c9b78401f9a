"""What the CPU backend maps: resident when the bind is over, and each line a mapping that can be found from outside."""

from __future__ import annotations

import errno
import re
from pathlib import Path
from types import SimpleNamespace

import kernel_rig as rig
import numpy as np
import pytest

from backends.base import KvLayer, KvPool, Limits, RopeStore, StatePool
from backends.cpu.delta import slot_bytes
from backends.cpu.memory import floats_at
from backends.cpu.record import Plan
from backends.host.memory import Mapping
from backends.quant import QuantType
from budget import host_lines
from homeserve import checkpoint
from homeserve.models.bind import bind
from homeserve.models.registry import family
from homeserve.models.shape import shape_of

TINY = Path(__file__).parents[1] / "data" / "tiny"
HUGE = 2 << 20
PAGE = 4096


def rope_store() -> tuple[list[object], list[object]]:
    feed, table, q = rig.feed("q", np.ones((2, 64), np.float32))
    return [feed, RopeStore(q, q, q, 0, 1, 1, 64, None)], [table]


def test_every_line_is_resident_when_it_is_bound_and_a_mapping_of_its_own(level: str) -> None:
    ops, weights = rope_store()
    pool = KvPool((KvLayer(1, 64),), 2**17, QuantType.F32)
    program = rig.bind(rig.backend(level), ops, weights, pool)
    regions = {region.line: region for region in program.memory_regions()}
    assert {line: region.bytes for line, region in regions.items()} == program.memory_lines()
    assert regions["kv"].bytes == 2**17 * 64 * 4 * 2
    mappings = resident_mappings()
    for line, region in regions.items():
        end, resident = mappings[region.address]
        rounded = -(-region.bytes // HUGE) * HUGE
        assert end == region.address + rounded, line
        assert region.bytes <= resident + PAGE - 1 and resident <= rounded, line
    program.close()
    left = resident_mappings()
    assert not any(region.address in left for region in regions.values())


def test_a_commit_keeps_what_is_there(level: str) -> None:
    backend = rig.backend(level)
    mapping = Mapping(backend.library, 3 * HUGE + 1, "weights", "three and a bit")
    floats_at(mapping.address + HUGE, 4)[:] = (1, 2, 3, 4)
    told: list[tuple[str, int, int]] = []
    mapping.commit(backend.team, lambda *progress: told.append(progress))
    assert floats_at(mapping.address + HUGE, 4).tolist() == [1, 2, 3, 4]
    assert not floats_at(mapping.address, 4).any() and not floats_at(mapping.address + 2 * HUGE, 4).any()
    assert told == [("weights", 3 * HUGE + 1, 3 * HUGE + 1)]
    mapping.close()


def test_a_commit_that_the_system_refuses_is_an_error_with_arithmetic() -> None:
    library = SimpleNamespace(
        hs_map=lambda *_: 1 << 30, hs_unmap=lambda *_: None, hs_commit=lambda team, address, size: errno.ENOMEM
    )
    mapping = Mapping(library, HUGE, "kv", "2 slots of a MiB")  # type: ignore[arg-type]
    with pytest.raises(MemoryError, match=r"kv needs 2097152 bytes .* = 2 slots of a MiB, and the system refused: Can"):
        mapping.commit(0, lambda *_: None)
    mapping.close()


@pytest.mark.parametrize("name", sorted(path.name.removesuffix(".f32.gguf") for path in TINY.glob("*.f32.gguf")))
@pytest.mark.parametrize(
    ("rows", "logit_rows", "threads", "pages"), [(272, 48, 2, 32), (17, 1, 8, 4), (64, 64, 1, 1000)]
)
def test_the_budget_foresees_what_a_program_maps(
    name: str, rows: int, logit_rows: int, threads: int, pages: int
) -> None:
    opened = checkpoint.open(str(TINY / f"{name}.f32.gguf"))
    try:
        declared = family(opened.arch)
        config = declared.config_from(opened.metadata)
        bound = bind(declared, config, opened.tensors)
        shape = shape_of(declared, config, opened.tensors, name=name, quant="F32")
        kv = KvPool(bound.kv_layers, 64, QuantType.F16)
        library = rig.backend(rig.native_levels()[0]).library
        states = StatePool(bound.state_layers, 5)
        plan = Plan(library, bound.ops, bound.weights, kv, Limits(rows, logit_rows, 4, pages), threads, states)
        foreseen = host_lines.workspace_bytes(shape, rows, logit_rows, threads, pages * 16)
        foreseen += 2 * 4 * rows if states.layers else 0
        assert abs(plan.workspace.size - foreseen) < 64 * 50, "but for what aligning each buffer costs"
        # Drafting blocks are counted and not run; matrices of these small models often end within a group of 16 rows.
        drafting = sum(layer.bytes for layer in shape.nextn) + shape.nextn_bytes
        filling = sum(stored.size - stored.source_bytes for stored in plan.weights.own)
        held = host_lines.packed_bytes(shape) - drafting + filling
        difference = plan.weights.arena.size - held  # factors of a rope are counted and become part of its frequencies
        assert -64 <= difference < 64 * len(plan.weights.own), "but for what aligning each weight costs"
        assert slot_bytes(states) == shape.state_bytes_per_request()
    finally:
        opened.close()


@pytest.mark.parametrize("kind", rig.ALL_TYPES)
@pytest.mark.parametrize("rows", [1, 16, 37])
def test_the_budget_foresees_a_packed_matrix_of_every_type(kind: str, rows: int) -> None:
    quant = QuantType[kind]
    library = rig.backend(rig.native_levels()[0]).library
    packed = library.hs_packed_bytes(quant.gguf_id, rows, 512)
    assert host_lines.packed_tensor_bytes(quant.block_bytes, quant.block_len, rows, 512) == -(-packed // 64) * 64
    in_file = rows * quant.row_bytes(512)
    assert packed >= in_file and (rows % 16 or packed == in_file)


def resident_mappings() -> dict[int, tuple[int, int]]:
    """Start of each mapping of this process: its end, and what of it is resident."""
    found: dict[int, tuple[int, int]] = {}
    start = end = 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            start, end = (int(part, 16) for part in match.groups())
        elif line.startswith("Rss:"):
            found[start] = (end, int(line.split()[1]) * 1024)
    return found
