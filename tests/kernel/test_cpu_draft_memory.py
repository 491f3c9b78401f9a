"""What the budget foresees of drafting, against what the recorder lays out: one rank, and several in either layout."""

from __future__ import annotations

from collections.abc import Iterator
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
from budget.job import Job, settle
from budget.ledger import PIPELINE, TENSOR
from budget.options import CPU_ONLY, CPU_SPLIT, CPU_STACKED
from budget.placement import Cut, Option, Shard, pipeline_shares, tensor_shares
from budget.terms import terms
from budget.wish import Wish
from homeserve import checkpoint
from homeserve.layouts.share import Share
from homeserve.models.bind import Bound, bind
from homeserve.models.config import ModelConfig
from homeserve.models.family import Family
from homeserve.models.registry import family
from homeserve.models.shape import shape_of

DATA = Path(__file__).parents[1] / "data"
MODELS = {path.name.split(".")[0]: path for path in (*sorted(DATA.glob("tiny/*mtp*.f32.gguf")), DATA / "counter.gguf")}
THREADS, RUNNING, CONTEXT, DRAFTS = 2, 16, 512, 3
BOX = Box("b", MemoryFacts(8192 * MIB, 8192 * MIB, "MemTotal", None, 0), CpuFacts("x", 8, 8, "all", frozenset()))
Model = tuple[Family, ModelConfig, Any, ModelShape]


@pytest.fixture(params=sorted(MODELS))
def model(request: pytest.FixtureRequest) -> Iterator[Model]:
    opened = checkpoint.open(str(MODELS[request.param]))
    declared = family(opened.arch)
    config = declared.config_from(opened.metadata)
    yield declared, config, opened.tensors, shape_of(declared, config, opened.tensors, name="m", quant="F32")
    opened.close()


def job_of(shape: ModelShape, drafts: int = DRAFTS) -> Job:
    wish = Wish(running=RUNNING, context=CONTEXT, threads=THREADS, drafts=drafts, prefix_cache=False)
    return settle(shape, wish)


def laid_out(bound: Bound, job: Job, rank: int | None) -> Plan:
    """By the limits that a load has (`LoadSpec`), which are the same in every layout."""
    limits = Limits(job.rows, job.logit_rows, RUNNING, CONTEXT // 16, RUNNING * (1 + job.drafts))
    library = rig.backend(rig.native_levels()[-1]).library
    kv, states = KvPool(bound.kv_layers, 64, QuantType.F16), StatePool(bound.state_layers, RUNNING)
    acts: Any = None if rank is None else SimpleNamespace(rank=rank)
    return Plan(library, bound.ops, bound.weights, kv, limits, THREADS, states, acts)


def filling(plan: Plan) -> int:
    """Matrices of these small models often end within a group of 16 rows."""
    return sum(stored.size - stored.source_bytes for stored in plan.weights.own)


def test_one_rank(model: Model) -> None:
    declared, config, tensors, shape = model
    job = job_of(shape)
    option = Option(CPU_ONLY, (0,), host_only=True)
    shares = pipeline_shares(job, option, Cut(((0, len(job.layers)),)))
    lines = {
        term.name: term.exact(CONTEXT)
        for term in terms(job, option, ceilings(BOX, None), shares, ())
        if term.name in (host_lines.WEIGHTS, host_lines.WORKSPACE, host_lines.DRAFTS, host_lines.STATE)
    }
    bound = bind(declared, config, tensors, drafts=True)
    plan = laid_out(bound, job, None)
    rows = 3 * 4 * plan.limits.rows  # of each row its lane's run and its place
    assert abs(plan.workspace.size - lines["workspace"] - rows) < 64 * 60, "but for what aligning each buffer costs"
    assert abs(plan.weights.arena.size - lines["weights"] - filling(plan)) < 64 * len(plan.weights.own)
    assert 0 <= plan.kept.arena.size - lines["drafts"] < 64 * 20
    assert abs(slot_bytes(StatePool(bound.state_layers, 1)) * RUNNING - lines["state"]) <= RUNNING * 64
    assert len(bound.kv_layers) == sum(layer.kv is not None for layer in (*job.layers, *job.drafting))


@pytest.mark.parametrize("vector", [(1, 1), (2, 1, 1)], ids=str)
@pytest.mark.parametrize("layout", [PIPELINE, TENSOR])
def test_several_ranks(model: Model, layout: str, vector: tuple[int, ...]) -> None:
    """The block is on the last rank of a pipeline, with the embedding that it reads, and everywhere in the tensor
    layout, the only one with room for drafts."""
    declared, config, tensors, shape = model
    job, ranks = job_of(shape), len(vector)
    name = CPU_SPLIT if layout == TENSOR else CPU_STACKED
    option = Option(name, (0,) * ranks, (layout,), host_only=True)
    if layout == TENSOR:
        shares = [Share.tensor(rank, vector) for rank in range(ranks)]
        found = terms(job, option, ceilings(BOX, None), (), tensor_shares(job, Shard(vector, vector), on_cpu=True))
    else:
        cut = even_cut(job, ranks)
        shares = [Share.pipeline(rank, cut.ranges) for rank in range(ranks)]
        found = terms(job, option, ceilings(BOX, None), pipeline_shares(job, option, cut), ())
    for rank, share in enumerate(shares):
        own: dict[str, float] = {}
        for term in found:
            if term.name.endswith(host_lines.of_rank("", rank)):
                line = term.name.partition(", rank ")[0]
                own[line] = own.get(line, 0) + term.exact(CONTEXT)
        bound = bind(declared, config, tensors, share, drafts=True)
        plan = laid_out(bound, job, rank)
        said = own["workspace"] + 3 * 4 * plan.limits.rows
        assert plan.workspace.size - 64 * 60 <= said <= 2 * plan.workspace.size, (rank, "workspace")
        said = own["weights"] + own.get(host_lines.COPIES, 0.0) + filling(plan)
        slack = 64 * len(plan.weights.own) + 0.01 * plan.weights.arena.size
        assert abs(plan.weights.arena.size - said) < slack, (rank, "weights", plan.weights.arena.size, said)
        states = slot_bytes(StatePool(bound.state_layers, 1)) * RUNNING
        assert abs(states - own.get("state", 0.0)) <= RUNNING * 64 * 2, (rank, "state")
        held = own.get("drafts", 0.0)
        assert (held > 0) == (layout == TENSOR) == bound.drafts
        copies = 4 * THREADS * shape.held_thread_elements  # a rank may have no delta net
        kept = plan.kept.arena.size
        assert -0.1 * kept - 64 * 20 <= held - kept <= 0.1 * kept + 64 * 20 + copies, (rank, "drafts")


def test_without_drafts_nothing_of_it_is_held(model: Model) -> None:
    declared, config, tensors, shape = model
    job = settle(shape, Wish(running=RUNNING, context=CONTEXT, threads=THREADS, draft=False))
    assert (job.drafts, job.rows, job.logit_rows) == (0, 256 + RUNNING, RUNNING + 32)
    assert not laid_out(bind(declared, config, tensors), job, None).kept.arena.size
