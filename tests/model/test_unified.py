"""Ranks that hold weights and KV rows together give the bits of ranks with memory of their own, and hold each weight
once.

What cannot be a view into the common arena is a copy: a few numbers for each head, biases of experts by columns, the
columns of a delta net whose value heads are tiled, of which no rank has one run, and parts that begin within a group of
16 rows, of which these small models have more than real ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import numpy as np
import pytest
from fleet_rig import Fleet
from ranks import Group, over_memory
from wide_models import FORMS, wide

from backends.base import Backend, Limits, OpenOptions, Program, StatePool
from backends.quant import QuantType
from backends.registry import open_backend

PROMPT = [(7 * at * at + 31 * at + 5) % 512 for at in range(41)]
VECTORS = ((1, 1), (2, 1, 1), (30, 17, 17), (28, 26, 20))


def cpu_rank() -> Backend:
    return open_backend("cpu", OpenOptions(threads=1))


@pytest.fixture
def acts() -> Iterator[Callable[[int], Group]]:
    with ExitStack() as stack:
        device = stack.enter_context(closing(cpu_rank()))
        yield lambda ranks: stack.enter_context(over_memory(device.library, ranks))


def fleet(form: str, layout: str, ratio: tuple[int, ...], group: Group, **more: Any) -> Fleet:
    model = wide(form)
    tokens = ratio[::-1]
    return Fleet(
        model.family, model.config, model.tensors, layout, ratio, tokens, backend=cpu_rank, group=group, **more
    )


def played(ranks: Fleet) -> list[np.ndarray]:
    out = [ranks.run([(0, 0, PROMPT[:33]), (2, 0, PROMPT[5:9])])]
    for step in range(3):
        out.append(ranks.run([(0, 33 + step, PROMPT[33 + step :][:1]), (2, 4 + step, PROMPT[20 + step :][:1])]))
    return out


CASES = [
    (form, layout, VECTORS[at % len(VECTORS)])
    for at, (form, layout) in enumerate(itertools.product(FORMS, ("tensor", "pipeline")))
]


@pytest.mark.parametrize(("form", "layout", "ratio"), CASES)
def test_ranks_that_share_memory_give_the_bits_of_ranks_that_do_not(
    form: str, layout: str, ratio: tuple[int, ...], acts: Callable[[int], Group]
) -> None:
    with closing(fleet(form, layout, ratio, acts(len(ratio)))) as apart:
        wanted = played(apart)
    with closing(fleet(form, layout, ratio, acts(len(ratio)), unified=True)) as together:
        got = played(together)
    for one, other in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(one, other)


def weights_of(ranks: Fleet) -> int:
    return sum(program.memory_lines()["weights"] for program in ranks.programs)


@pytest.mark.parametrize("form", FORMS)
def test_what_no_rank_can_view_is_held_by_each_in_parts_alone(form: str, acts: Callable[[int], Group]) -> None:
    """So the sum is one model, and the filling of groups of 16 rows, which small parts have much of."""
    with closing(fleet(form, "tensor", (2, 1, 1), acts(3), unified=True)) as together:
        with closing(cpu_rank()) as alone, closing(bound_alone(alone, together)) as one:
            whole = one.memory_lines()["weights"]
        assert whole <= weights_of(together) <= 1.25 * whole


@pytest.mark.parametrize("layout", ["tensor", "pipeline"])
@pytest.mark.parametrize("form", ["llama blocks", "llama experts"])
def test_where_parts_are_whole_groups_each_weight_is_held_once(
    form: str, layout: str, acts: Callable[[int], Group]
) -> None:
    with closing(fleet(form, layout, (2, 1, 1), acts(3), unified=True)) as together:
        with closing(cpu_rank()) as alone, closing(bound_alone(alone, together)) as one:
            whole = one.memory_lines()["weights"]
        assert whole <= weights_of(together) <= 1.01 * whole


def bound_alone(device: Backend, ranks: Fleet) -> Program:
    whole = ranks.whole
    return device.bind(
        whole.ops,
        whole.weights,
        whole.kv_pool(64, QuantType.F32),
        Limits(rows=8, logit_rows=8, lanes=2, lane_pages=2),
        lambda *_: None,
        StatePool(whole.state_layers, 2 if whole.state_layers else 0),
    )
