"""Weights of each rank, as the ledger counts them, against what is bound for it: every family, both layouts."""

from __future__ import annotations

import families_rig as rig
import pytest

from budget.cuts import even_cut
from budget.job import Share as Held
from budget.job import settle
from budget.ledger import PIPELINE, TENSOR
from budget.options import CPU_STACKED
from budget.placement import Option, Shard, pipeline_shares, tensor_shares
from budget.wish import Wish
from homeserve.layouts.share import Share
from homeserve.models.bind import bind
from homeserve.models.shape import shape_of

FAMILIES = sorted(path.stem for path in rig.GOLDEN.glob("*.json"))


@pytest.mark.parametrize(("name", "vector"), [("pair, tied", (1, 1)), ("four, fused", (2, 1, 1))], ids=str)
@pytest.mark.parametrize("layout", [PIPELINE, TENSOR])
@pytest.mark.parametrize("arch", FAMILIES)
def test_a_rank_s_weights_are_what_is_bound_for_it(arch: str, layout: str, name: str, vector: tuple[int, ...]) -> None:
    """To a percent: a bias behind a sum, which one rank has, is counted with the columns."""
    family, config, tensors = rig.made(arch, rig.STACKS[name])
    shape = shape_of(family, config, tensors, name=name, quant="F32")
    job = settle(shape, Wish(draft=False))
    shares: list[Share]
    held: tuple[Held, ...]
    if layout == PIPELINE:
        cut = even_cut(job, len(vector))
        shares = [Share.pipeline(rank, cut.ranges) for rank in range(len(vector))]
        held = pipeline_shares(job, Option(CPU_STACKED, (0,) * len(vector), host_only=True), cut)
    else:
        shares = [Share.tensor(rank, vector) for rank in range(len(vector))]
        held = tensor_shares(job, Shard(vector, vector), on_cpu=True)
    for rank, share in enumerate(shares):
        bound = sum(view.nbytes for view in bind(family, config, tensors, share).weights.values())
        said = held[rank].weights + held[rank].kv_copies
        assert abs(said - bound) <= 0.01 * bound, rank
