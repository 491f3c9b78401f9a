"""Ranks that hold weights, KV rows and states together give the bits of ranks with memory of their own, hold each byte
once, and change the layout without moving one: what a pipeline has left in the pools, ranks that divide every layer
read where it lies, and the other way round.

What cannot be a view into the common arena is a copy: a few numbers for each head, biases of experts by columns, the
columns of a delta net whose value heads are tiled, of which no rank has one run, and parts that begin within a group of
16 rows, of which these small models have more than real ones.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fleet_rig import LANES, Fleet, shares_of
from ranks import Group, over_memory
from wide_models import FORMS, wide

from backends.base import PAGE_LEN, Backend, DeltaNet, Limits, OpenOptions, PoolParts, Program, StatePart, StatePool
from backends.cpu.pools import checked_parts
from backends.quant import QuantType
from backends.registry import open_backend
from homeserve.models.bind import bind

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


# ------------------------------------------------------------------------------------------ both layouts on one memory

TOLERANCE, COARSE = 1e-4, 1e-2
"""As in test_ranks, where they come from."""
HYBRIDS = ("qwen35", "qwen35moe", "qwen3next")
OTHER = {"pipeline": "tensor", "tensor": "pipeline"}
TURNS = [
    (form, layout, VECTORS[(at + turn) % len(VECTORS)])
    for at, form in enumerate(FORMS)
    for turn, layout in enumerate(OTHER)
]


def shown(value: object) -> str:
    return ":".join(map(str, value)) if isinstance(value, tuple) else str(value)


def bytes_of(ranks: Fleet) -> dict[str, bytes]:
    """What lies in the pools of all ranks."""
    return {
        line: os.pread(fd, os.fstat(fd).st_size, 0) for line, fd in zip(("kv", "state"), ranks.memory[1:], strict=True)
    }


@contextmanager
def both(form: str, layout: str, ratio: tuple[int, ...], group: Group) -> Iterator[tuple[Fleet, Fleet]]:
    """Ranks that run in `layout`, and the same ranks in the other one."""
    other = OTHER[layout]
    with closing(fleet(form, layout, ratio, group, unified=True, later=(other, ratio))) as first:
        with closing(fleet(form, other, ratio, group, unified=True, over=first)) as second:
            yield first, second


@pytest.mark.parametrize(("form", "layout", "ratio"), TURNS, ids=shown)
def test_a_layout_is_left_for_the_other_and_no_byte_moves(
    form: str, layout: str, ratio: tuple[int, ...], acts: Callable[[int], Group], measured: Callable[[str], None]
) -> None:
    """A prompt in one layout, steps in the other, steps in the first again; lane 2 begins in the other one, and lane 1
    goes on from a copy of lane 0's state. One rank gives the same logits, but for the order of sums."""
    with both(form, layout, ratio, acts(len(ratio))) as (first, second):
        with closing(fleet(form, "pipeline", (1,), acts(1))) as one:
            got, wanted, places = [], [], (first, second, second, first, first, second)
            for step, ranks in enumerate(places):
                pieces = [(0, 0, PROMPT[:33])] if step == 0 else [(0, 32 + step, PROMPT[32 + step :][:1])]
                if step >= 2:
                    pieces.append((2, 0, PROMPT[5:9]) if step == 2 else (2, 1 + step, PROMPT[20 + step :][:1]))
                before = bytes_of(ranks)
                got.append(ranks.run(pieces))
                wanted.append(one.run(pieces))
                assert bytes_of(ranks) != before
    error = max(float(np.abs(a - b).max()) for a, b in zip(got, wanted, strict=True))
    measured(f"{form}, {layout} and back: logits within {error:.1e} of those of one rank")
    assert error < (COARSE if FORMS[form].quantised else TOLERANCE)


@pytest.mark.parametrize("form", HYBRIDS)
@pytest.mark.parametrize("layout", OTHER)
def test_the_second_layout_finds_what_the_first_has_written(
    form: str, layout: str, acts: Callable[[int], Group]
) -> None:
    """Neither its bind nor its end changes a byte, and both write the same states to the same places."""
    ratio = (30, 17, 17)
    with closing(fleet(form, layout, ratio, acts(3), unified=True, later=(OTHER[layout], ratio))) as first:
        first.run([(0, 0, PROMPT[:33])])
        written = bytes_of(first)
        assert any(written["kv"]) and any(written["state"])
        with closing(fleet(form, OTHER[layout], ratio, acts(3), unified=True, over=first)) as second:
            assert bytes_of(first) == written
            second.run([(0, 0, PROMPT[:33])])
            again = bytes_of(first)
        assert bytes_of(first) == again
    old, new = (keys_of(first, each["kv"]) for each in (written, again))
    np.testing.assert_allclose(new, old, atol=TOLERANCE, rtol=0)
    old, new = (states_in(each["state"]) for each in (written, again))
    np.testing.assert_allclose(new, old, atol=TOLERANCE, rtol=0)
    lane_0 = LANES - 1
    assert new[lane_0].any() and not new[:lane_0].any()


def keys_of(ranks: Fleet, pool: bytes) -> np.ndarray:
    """K of the first layer, without the page that takes rows of others."""
    layer, slots = ranks.whole.kv_layers[0], ranks.rows[0].slots
    shape = layer.kv_heads, slots + PAGE_LEN, layer.head_dim
    return np.frombuffer(pool, np.float32, math.prod(shape)).reshape(shape)[:, :slots]


def states_in(pool: bytes) -> np.ndarray:
    return np.frombuffer(pool, np.float32).reshape(LANES, -1)


@pytest.mark.parametrize("layout", OTHER)
@pytest.mark.parametrize("form", HYBRIDS)
def test_a_state_is_copied_by_each_rank_in_its_part_alone(form: str, layout: str, acts: Callable[[int], Group]) -> None:
    """So a rank may be at another plan than the next one; together they copy all of it."""
    with closing(fleet(form, layout, (2, 1, 1), acts(3), unified=True)) as ranks:
        ranks.run([(0, 0, PROMPT[:33])])
        source, target = LANES - 1, 0
        copied = 0
        for rank in (1, 2, 0):
            before = states_in(bytes_of(ranks)["state"])
            ranks.programs[rank].copy_states([(source, target)])
            after = states_in(bytes_of(ranks)["state"])
            changed = after != before
            assert not changed[np.arange(LANES) != target].any()
            assert changed[target].any() == bool(ranks.bounds[rank].state_parts)
            np.testing.assert_array_equal(after[target][changed[target]], before[source][changed[target]])
            copied += changed.sum()
        after = states_in(bytes_of(ranks)["state"])
        np.testing.assert_array_equal(after[target], after[source])
        assert copied == np.count_nonzero(after[source])


@pytest.mark.parametrize("layout", OTHER)
@pytest.mark.parametrize("form", ["qwen35", "llama", "gemma3 one kv head"])
def test_rows_and_states_of_all_ranks_are_counted_once(form: str, layout: str, acts: Callable[[int], Group]) -> None:
    with closing(fleet(form, layout, (2, 1, 1), acts(3), unified=True)) as ranks:
        for line, fd in zip(("kv", "state"), ranks.memory[1:], strict=True):
            told = [pools.memory_lines().get(line, 0) for pools in ranks.pools]
            mapped = [each.bytes for pools in ranks.pools for each in pools.memory_regions() if each.line == line]
            size = os.fstat(fd).st_size
            assert sum(told) == size and max(told) - min(told) <= 1 and mapped == ([size] * 3 if size else [])
            assert all(line not in program.memory_lines() for program in ranks.programs)


def test_parts_that_the_pools_do_not_have_are_refused(acts: Callable[[int], Group]) -> None:
    with closing(fleet("qwen35", "tensor", (2, 1, 1), acts(3), unified=True)) as ranks:
        bound, pools = ranks.bounds[1], ranks.pools[1]
        rows = ranks.whole.kv_pool(pools.kv.slots, QuantType.F32)
        right = PoolParts(pools, bound.kv_places, bound.state_parts)
        few, late = (StatePart(each.layer, each.first_key + 7) for each in bound.state_parts), bound.state_parts[:-1]
        other = replace(bound.state_layers[0], kernel=3)
        wrong = [
            (right, rows, (other, *bound.state_layers[1:]), "is no part of state layer 0"),
            (replace(right, states=tuple(few)), rows, bound.state_layers, "key heads from 11 on, 2 of them, of .*: 8"),
            (replace(right, states=late), rows, bound.state_layers, "1 parts of states for 2 recurrent layers"),
            (right, replace(rows, slots=rows.slots + 16), bound.state_layers, "takes KV rows for F32 in"),
            (replace(right, kv_layers=(1,)), rows, bound.state_layers, "layers .1,. of the KV pool are not"),
        ]
        for parts, kv, layers, why in wrong:
            with pytest.raises(ValueError, match=why):
                checked_parts(parts, kv, StatePool(layers, LANES))
        checked_parts(right, rows, StatePool(bound.state_layers, LANES))


@pytest.mark.parametrize("vector", VECTORS, ids=str)
@pytest.mark.parametrize("form", HYBRIDS)
def test_every_rank_knows_which_part_of_the_models_pools_is_its_own(form: str, vector: tuple[int, ...]) -> None:
    """In the pipeline layout its layers at full width, in the tensor layout of every layer its key heads."""
    model, ranks = wide(form), range(len(vector))
    whole = bind(model.family, model.config, model.tensors)
    layers, states = range(len(whole.kv_layers)), range(len(whole.state_layers))
    assert whole.kv_places == tuple(layers) and whole.state_parts == tuple(map(StatePart, states))
    shares = {layout: shares_of(layout, vector, model.family, model.config, model.tensors) for layout in OTHER}
    stacked, divided = (
        [bind(model.family, model.config, model.tensors, each) for each in of] for of in shares.values()
    )
    assert sum((each.kv_places for each in stacked), ()) == whole.kv_places
    assert sum((each.state_parts for each in stacked), ()) == whole.state_parts
    assert {each.kv_places for each in divided} == {whole.kv_places}
    for layer in states:
        keys = []
        for rank in ranks:
            op = [op for op in divided[rank].ops if isinstance(op, DeltaNet)][layer]
            part = divided[rank].state_parts[layer]
            assert part.layer == layer
            keys += range(part.first_key, part.first_key + op.key_heads)
        assert keys == list(range(8))
