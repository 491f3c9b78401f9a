"""What the budget foresees of each of several CPU ranks, against what the recorder lays out for it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kernel_rig as rig
import pytest

from backends.base import KvPool, Limits, StatePool
from backends.cpu.delta import slot_bytes
from backends.cpu.record import Plan
from backends.quant import QuantType
from budget import host_lines
from budget.ceilings import ceilings
from budget.cuts import even_cut
from budget.facts import MIB, Box, CpuFacts, MemoryFacts, ModelShape
from budget.job import settle
from budget.ledger import PIPELINE, TENSOR
from budget.options import CPU_SPLIT, CPU_STACKED
from budget.placement import Option, Shard, pipeline_shares, tensor_shares
from budget.terms import terms
from budget.wish import Wish
from homeserve import checkpoint
from homeserve.layouts.share import Share
from homeserve.models.bind import bind
from homeserve.models.registry import family
from homeserve.models.shape import shape_of

TINY = Path(__file__).parents[1] / "data" / "tiny"
THREADS, RUNNING, CONTEXT = 2, 16, 512
BOX = Box("b", MemoryFacts(8192 * MIB, 8192 * MIB, "MemTotal", None, 0), CpuFacts("x", 8, 8, "all", frozenset()))


def foreseen(shape: ModelShape, layout: str, vector: tuple[int, ...]) -> tuple[list[dict[str, float]], list[Share]]:
    """Bytes of each line of each rank, and what each rank runs."""
    wish = Wish(running=RUNNING, logit_rows=48, context=CONTEXT, threads=THREADS, draft=False, prefix_cache=False)
    job, ranks = settle(shape, wish), len(vector)
    option = Option(CPU_SPLIT if layout == TENSOR else CPU_STACKED, (0,) * ranks, (layout,), host_only=True)
    limits = ceilings(BOX, None)
    if layout == TENSOR:
        shares = [Share.tensor(rank, vector) for rank in range(ranks)]
        found = terms(job, option, limits, (), tensor_shares(job, Shard(vector, vector), on_cpu=True))
    else:
        cut = even_cut(job, ranks)
        shares = [Share.pipeline(rank, cut.ranges) for rank in range(ranks)]
        found = terms(job, option, limits, pipeline_shares(job, option, cut), ())
    sums: list[dict[str, float]] = [{} for _ in range(ranks)]
    for term in found:
        name, _, rank = term.name.partition(", rank ")
        if rank:
            sums[int(rank)][name] = sums[int(rank)].get(name, 0) + term.exact(CONTEXT)
    return sums, shares


@pytest.mark.parametrize("vector", [(1, 1), (2, 1, 1)], ids=str)
@pytest.mark.parametrize("layout", [PIPELINE, TENSOR])
@pytest.mark.parametrize("name", sorted(path.name.removesuffix(".f32.gguf") for path in TINY.glob("*.f32.gguf")))
def test_the_budget_foresees_what_each_rank_maps(name: str, layout: str, vector: tuple[int, ...]) -> None:
    """Buffers never less than they are, but for what aligning costs, and no more than a quarter above: they are counted
    for all kinds of layers that the model has, of which a rank may lack some."""
    opened = checkpoint.open(str(TINY / f"{name}.f32.gguf"))
    try:
        declared = family(opened.arch)
        config = declared.config_from(opened.metadata)
        shape = shape_of(declared, config, opened.tensors, name=name, quant="F32")
        lines, shares = foreseen(shape, layout, vector)
        library = rig.backend(rig.native_levels()[0]).library
        for rank, share in enumerate(shares):
            bound = bind(declared, config, opened.tensors, share)
            states = StatePool(bound.state_layers, RUNNING)
            acts: Any = SimpleNamespace(rank=rank)
            limits = Limits(256 + RUNNING, 48, RUNNING, CONTEXT // 16)
            kv = KvPool(bound.kv_layers, 64, QuantType.F16)
            plan = Plan(library, bound.ops, bound.weights, kv, limits, THREADS, states, acts)
            own = lines[rank]
            said = own["workspace"] + (2 * 4 * limits.rows if states.layers else 0)
            most = 2.0 if shape.state_bytes_per_request() else 1.25
            assert plan.workspace.size - 64 * 50 <= said <= most * plan.workspace.size, (rank, "workspace")
            filling = sum(stored.size - stored.source_bytes for stored in plan.weights.own)
            said = own["weights"] + own.get(host_lines.COPIES, 0.0) + filling
            slack = 64 * len(plan.weights.own) + 0.01 * plan.weights.arena.size
            assert abs(plan.weights.arena.size - said) < slack, (rank, "weights")
            assert abs(slot_bytes(states) * RUNNING - own.get("state", 0.0)) <= RUNNING * 16, (rank, "state")
    finally:
        opened.close()
