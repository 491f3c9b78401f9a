"""Several ranks give what one gives: every family, both layouts, uneven vectors, requests of which ranks keep nothing.

The fleet runs on the oracle, whose ranks exchange on paper, and on CPU ranks over shared memory (`fleet_rig`); the
models are made up and wide enough to be cut unevenly (`wide_models`). In the pipeline layout the logits are the same
bits; in the tensor layout sums are taken in another order.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from fleet_rig import LANES, Fleet, cut_near, kv_sources
from ranks import Group, over_memory
from wide_models import FORMS, save, wide

from backends.base import (
    Backend,
    EmbedRows,
    Experts,
    GatherRows,
    MergeAttention,
    Norm,
    Op,
    OpenOptions,
    ReceiveRows,
    SendRows,
    SumRows,
)
from backends.registry import open_backend
from budget.vectors import apportion
from homeserve import checkpoint
from homeserve.errors import SettingError
from homeserve.layouts.share import Share
from homeserve.models import bind as binding
from homeserve.models import registry, stage_shards
from homeserve.models.bind import bind
from homeserve.models.config import settle
from homeserve.models.conform import DeclarationMismatch
from homeserve.models.conform_sums import check_exchanges, check_streams
from homeserve.models.dividing import divided

SLOW = os.environ.get("HOMESERVE_TEST_TIER") == "slow"
TOLERANCE, COARSE = 1e-4, 1e-2
"""Logits lie within +-11, and 4e-5 was the most that another order of float32 sums changed. Where a kernel rounds rows
to 8 bits to multiply them with blocks of a matrix, a value that lies between two steps may fall to the other one."""
SHOWS = 1e-2
PROMPT = [(7 * at * at + 31 * at + 5) % 512 for at in range(53)]
VECTORS = ((1, 1), (2, 1), (2, 1, 1), (30, 17, 17), (28, 26, 20))
LEAST = (97, 2, 1)
"""Two ranks with next to nothing: no head, no expert, a column or two."""
SIZES = {
    (2, 1, 1): {16: (8, 4, 4), 8: (4, 2, 2), 48: (24, 12, 12)},
    (30, 17, 17): {16: (8, 4, 4), 8: (4, 2, 2), 48: (22, 13, 13)},
    (28, 26, 20): {16: (6, 6, 4), 8: (3, 3, 2), 48: (18, 17, 13)},
}


class Case(NamedTuple):
    form: str
    layout: str
    ratio: tuple[int, ...]
    tokens: tuple[int, ...]


def all_cases() -> list[Case]:
    """Every form and vector in both layouts; in the tensor layout with every token vector of as many ranks."""
    found = []
    for form, ratio in itertools.product(FORMS, VECTORS):
        found.append(Case(form, "pipeline", ratio, ()))
        found += [Case(form, "tensor", ratio, tokens) for tokens in VECTORS if len(tokens) == len(ratio)]
    return found


def pairwise_cases() -> list[Case]:
    """As many as there are forms twice over: one of each layout, the vectors dealt out in turn."""
    found = []
    for at, form in enumerate(FORMS):
        pipeline, tensor = VECTORS[at % 5], VECTORS[(at * 3 + 1) % 5]
        tokens = [each for each in VECTORS if len(each) == len(tensor)]
        found += [Case(form, "pipeline", pipeline, ()), Case(form, "tensor", tensor, tokens[at // 2 % len(tokens)])]
    return found


CASES = all_cases() if SLOW else pairwise_cases()


def shown(case: Case) -> str:
    vectors = "-".join(":".join(map(str, vector)) for vector in (case.ratio, case.tokens) if vector)
    return f"{case.form}-{case.layout}-{vectors}"


def fleet(form: str, layout: str = "pipeline", ratio: Sequence[int] = (1,), **more: Any) -> Fleet:
    model = wide(form)
    return Fleet(model.family, model.config, model.tensors, layout, ratio, **more)


def played(ranks: Fleet) -> list[np.ndarray]:
    """A long prompt in chunks beside short ones, then steps of all; lane 3 begins anew after it was given up."""
    out = [ranks.run([(0, 0, PROMPT[:17]), (3, 0, PROMPT[9:12])])]
    out.append(ranks.run([(1, 0, PROMPT[4:5]), (0, 17, PROMPT[17:50])], [0, 33]))
    out.append(ranks.run([(2, 0, PROMPT[20:31]), (3, 0, PROMPT[:2])]))
    for step in range(3):
        rows = [(0, 50 + step, PROMPT[50 + step :][:1]), (1, 1 + step, PROMPT[30 + step :][:1])]
        out.append(ranks.run([*rows, (2, 11 + step, PROMPT[40 + step :][:1]), (3, 2 + step, PROMPT[:1])]))
    return out


def furthest(got: Sequence[np.ndarray], right: Sequence[np.ndarray]) -> float:
    return max(float(np.abs(one - other).max()) for one, other in zip(got, right, strict=True))


@cache
def right(form: str, backend: str = "reference") -> list[np.ndarray]:
    """What one rank with everything gives."""
    one = fleet(form, **({"backend": cpu_rank} if backend == "cpu" else {}))
    got = played(one)
    one.close()
    return got


def cpu_rank() -> Backend:
    return open_backend("cpu", OpenOptions(threads=1))


@pytest.fixture
def cpu_acts() -> Iterator[Callable[[int], Group]]:
    """`cpu_acts(ranks)`: their exchanges over shared memory."""
    with ExitStack() as stack:
        device = stack.enter_context(closing(cpu_rank()))
        yield lambda ranks: stack.enter_context(over_memory(device.library, ranks))


# ------------------------------------------------------------------------------------------------------------- logits


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("case", CASES, ids=shown)
def test_ranks_give_the_logits_of_one(
    case: Case, backend: str, cpu_acts: Callable[[int], Group], measured: Callable[[str], None]
) -> None:
    on_cpu = {"backend": cpu_rank, "group": cpu_acts(len(case.ratio))} if backend == "cpu" else {}
    ranks = fleet(case.form, case.layout, case.ratio, token_vector=case.tokens, **on_cpu)
    got = played(ranks)
    ranks.close()
    error = furthest(got, right(case.form, backend))
    if case.layout == "pipeline":
        assert error == 0
        return
    measured(f"{shown(case)} on {backend}: logits within {error:.1e} of those of one rank")
    assert error < (COARSE if backend == "cpu" and FORMS[case.form].quantised else TOLERANCE)
    assert all(len(ranks.owners(lane, 4)) < len(case.ratio) for lane in range(LANES)), "a rank keeps no row of these"
    if len(case.tokens) == 2:
        assert len(ranks.owners(0, 53)) == 2


def test_the_chosen_cases_meet_every_pair_of_layout_and_vectors() -> None:
    chosen = pairwise_cases()
    assert 34 <= len(chosen) <= 46
    for pick in (lambda c: (c.layout, c.ratio), lambda c: (c.form, c.layout), lambda c: (len(c.ratio), c.tokens)):
        assert {pick(case) for case in chosen} == {pick(case) for case in all_cases()}


@pytest.mark.parametrize("form", FORMS)
def test_ranks_with_the_least_share_take_part(form: str) -> None:
    """A rank without a head, a column, an expert or a row of the vocabulary adds zeros, and keeps rows all the same."""
    ranks = fleet(form, "tensor", LEAST, token_vector=(1, 2, 3))
    merges = [op for op in ranks.bounds[2].ops if isinstance(op, MergeAttention)]
    assert merges and all(op.own == 0 for op in merges)
    assert not [op for op in ranks.bounds[2].ops if isinstance(op, EmbedRows) and op.first is not None]
    assert furthest(played(ranks), right(form)) < TOLERANCE


@pytest.mark.parametrize("form", FORMS)
def test_a_request_kept_by_one_rank_alone_is_attended_by_all(form: str) -> None:
    """One page: two of three ranks have no row of the request in the layers that keep every token."""
    ranks = fleet(form, "tensor", (2, 1, 1), token_vector=(1, 1, 1))
    one = fleet(form)
    for lane in range(LANES):
        assert len(ranks.owners(lane, 16)) == 1
        got, known = (each.logits(PROMPT[:15], chunk=4, lane=lane) for each in (ranks, one))
        assert np.abs(got - known).max() < TOLERANCE
    assert len(set.union(*(ranks.owners(lane, 16) for lane in range(LANES)))) > 1


def test_one_rank_in_the_tensor_layout_runs_the_whole_list() -> None:
    model = wide("qwen35")
    alone = bind(model.family, model.config, model.tensors, Share.tensor(0, (3,)))
    assert alone.ops == bind(model.family, model.config, model.tensors).ops
    assert alone.samples and alone.embeds


@pytest.mark.parametrize("form", FORMS)
def test_a_saved_model_is_the_same_model(form: str, tmp_path: Path) -> None:
    """What servers are started with is what is compared here."""
    model = wide(form)
    opened = checkpoint.open(str(save(form, tmp_path / "wide.gguf")), registry.folder_families)
    whole = settle(model.config, model.tensors.keys())
    assert opened.arch == model.family.name and opened.tensors.keys() == model.tensors.keys()
    assert settle(model.family.config_from(opened.metadata), opened.tensors.keys()) == whole
    for name, view in model.tensors.items():
        known = opened.tensors[name]
        assert (known.type, known.rows, known.cols) == (view.type, view.rows, view.cols), name
        assert np.array_equal(known.data, view.data), name
    opened.close()


# ------------------------------------------------------------------------------------------------------------- shards


@pytest.mark.parametrize("vector", SIZES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_shards_are_unequal_and_what_the_vector_says(form: str, vector: tuple[int, ...]) -> None:
    model = wide(form)
    config = settle(model.config, model.tensors.keys())
    division = divided(model.family, config, model.tensors, vector)
    parts = [part for stages in division.parts.values() for stage in stages for part in stage.values()]
    units = {part.units for part in parts}
    assert units & {8, 16} and max(units) >= 8
    for part in parts:
        assert part.parts == apportion(part.units, vector)
        if part.units in SIZES[vector]:
            assert part.parts == SIZES[vector][part.units] and len(set(part.parts)) > 1
    held = [bind(model.family, model.config, model.tensors, Share.tensor(rank, vector)) for rank in range(3)]
    sizes = [sum(view.nbytes for view in each.weights.values()) for each in held]
    whole = sum(view.nbytes for view in bind(model.family, model.config, model.tensors).weights.values())
    assert sizes[0] > sizes[2] and max(sizes) < whole < sum(sizes)
    if vector != (28, 26, 20):
        assert sizes[0] > 1.2 * sizes[1]


@pytest.mark.parametrize("form", FORMS)
def test_every_element_of_a_weight_is_held_once_or_by_all(form: str) -> None:
    """Of the bytes that the ranks were handed: the number of elements adds up, tensor by tensor."""
    model = wide(form)
    whole = bind(model.family, model.config, model.tensors)
    held = [bind(model.family, model.config, model.tensors, Share.tensor(rank, (28, 26, 20))) for rank in range(3)]
    for name, view in whole.weights.items():
        sizes = [each.weights[name].nbytes if name in each.weights else 0 for each in held]
        assert sum(sizes) == view.nbytes or sizes == [view.nbytes] * 3, name
        for each in held:
            if name in each.weights:
                assert each.weights[name].data.nbytes == each.weights[name].nbytes
    assert {name for each in held for name in each.weights} == set(whole.weights)


def test_ranks_hold_all_kv_heads_and_their_own_part_of_a_state() -> None:
    model = wide("qwen35moe")
    whole = bind(model.family, model.config, model.tensors)
    for vector in ((28, 26, 20), LEAST):
        held = [bind(model.family, model.config, model.tensors, Share.tensor(rank, vector)) for rank in range(3)]
        assert {each.kv_layers for each in held} == {whole.kv_layers}
        heads = [sum(state.heads for state in each.state_layers) for each in held]
        channels = [sum(state.channels for state in each.state_layers) for each in held]
        assert sum(heads) == sum(state.heads for state in whole.state_layers)
        assert sum(channels) == sum(state.channels for state in whole.state_layers)
        assert [len(each.state_layers) for each in held] == [len(whole.state_layers) if own else 0 for own in heads]


# ---------------------------------------------------------------------------------------------------------- exchanges


@pytest.mark.parametrize("vector", [*VECTORS, LEAST], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_all_ranks_exchange_the_same_in_the_same_order(form: str, vector: tuple[int, ...]) -> None:
    model = wide(form)
    ranks = range(len(vector))
    lists = [bind(model.family, model.config, model.tensors, Share.tensor(rank, vector)).ops for rank in ranks]
    check_exchanges(lists)
    labels = [op.label for op in lists[0] if isinstance(op, SumRows | GatherRows | MergeAttention)]
    assert len(set(labels)) == len(labels) and all(label.isascii() and len(label) <= 31 for label in labels)
    assert labels[0] == "embed" and labels[-1] == "logits"
    config = settle(model.config, model.tensors.keys())
    sources = kv_sources(model.family, config)
    ranges = cut_near(vector, config.layers, sources)
    rows = [bind(model.family, model.config, model.tensors, Share.pipeline(rank, ranges)) for rank in ranks]
    check_streams([each.ops for each in rows])
    assert [each.samples for each in rows] == [rank == len(vector) - 1 for rank in ranks]


def test_what_ranks_exchange_is_held_against_each_other() -> None:
    model = wide("llama")
    lists = [list(bind(model.family, model.config, model.tensors, Share.tensor(rank, (2, 1))).ops) for rank in (0, 1)]
    sums = [at for at, op in enumerate(lists[1]) if isinstance(op, SumRows)]
    wrong = list(lists[1])
    wrong[sums[1]], wrong[sums[2]] = wrong[sums[2]], wrong[sums[1]]
    with pytest.raises(DeclarationMismatch, match=r"exchange 3: rank 0 has .*attention 0.* rank 1 .*dense 0"):
        check_exchanges([lists[0], wrong])
    last = max(at for at, op in enumerate(lists[1]) if isinstance(op, GatherRows))
    with pytest.raises(DeclarationMismatch, match="15 exchanges|exchanges, rank 1"):
        check_exchanges([lists[0], [op for at, op in enumerate(lists[1]) if at != last]])
    rows = [bind(model.family, model.config, model.tensors, Share.pipeline(at, [(0, 1), (1, 4)])).ops for at in (0, 1)]
    check_streams(rows)
    (receive,) = (op for op in rows[1] if isinstance(op, ReceiveRows))
    with pytest.raises(DeclarationMismatch, match="rank 0 sends"):
        check_streams([rows[0], [replace(receive, buffers=receive.buffers[:1]), *rows[1][1:]]])
    with pytest.raises(DeclarationMismatch, match="rank 0 sends"):
        check_streams([[op for op in rows[0] if not isinstance(op, SendRows)], rows[1]])


def test_who_looks_up_tokens_is_told() -> None:
    """In the pipeline layout rank 0, or all of them where layers have inputs by token; else every rank."""
    for form, known in (("llama", (0,)), ("gemma4", (0, 1))):
        model = wide(form)
        bounds = [
            bind(model.family, model.config, model.tensors, Share.pipeline(at, [(0, 2), (2, 4)])) for at in (0, 1)
        ]
        assert {each.embedding_ranks for each in bounds} == {known}
        assert [any(isinstance(op, EmbedRows) for op in each.ops) for each in bounds] == [
            each.embeds for each in bounds
        ]
        tensor = bind(model.family, model.config, model.tensors, Share.tensor(1, (2, 1, 1)))
        assert tensor.embedding_ranks == (0, 1, 2) and tensor.embeds and not tensor.samples


# ------------------------------------------------------------------------------------ what is wrong shows in the logits


def kinds_of(ops: Sequence[Op]) -> dict[str, str]:
    """Of each kind of sum one label: `dense` -> `dense 0`."""
    return {op.label.split()[0]: op.label for op in reversed(ops) if isinstance(op, SumRows)}


Change = Callable[[int, tuple[Op, ...]], Sequence[Op]]


def summed_twice(label: str) -> Change:
    return lambda _, ops: [each for op in ops for each in ([op, op] if getattr(op, "label", "") == label else [op])]


def not_summed(label: str) -> Change:
    return lambda _, ops: [op for op in ops if getattr(op, "label", "") != label]


def before_a_norm(ops: Sequence[Op]) -> set[str]:
    """Labels of sums that an RMS norm reads at once, or behind a matrix: it takes a factor off again, and a sum that is
    taken twice is one by a factor."""
    return {"embedded"} | {
        op.label
        for op, behind in itertools.pairwise(ops)
        if isinstance(op, SumRows) and isinstance(behind, Norm) and behind.src == op.buffer
    }


@pytest.mark.parametrize("change", [summed_twice, not_summed])
@pytest.mark.parametrize("form", FORMS)
def test_a_sum_taken_twice_or_not_at_all_shows(form: str, change: Callable[[str], Change]) -> None:
    """No two ranks hold the same weights, so that a wrong sum changes the logits, whichever it is; and the builder's
    check finds it first (`test_models_sums`), also where a norm would hide it."""
    model = wide(form)
    one = fleet(form).logits(PROMPT[:9])
    ops = bind(model.family, model.config, model.tensors, Share.tensor(0, (2, 1))).ops
    hidden = before_a_norm(ops) if change is summed_twice else set()
    for label in set(kinds_of(ops).values()) - hidden:
        wrong = fleet(form, "tensor", (2, 1), token_vector=(1, 1), change=change(label)).logits(PROMPT[:9])
        assert np.abs(wrong - one).max() > SHOWS, f"{label} goes unnoticed"


def each_op(kind: type, change: Callable[[Any, int], Op]) -> Change:
    return lambda rank, ops: [change(op, rank) if isinstance(op, kind) else op for op in ops]


WRONG: dict[str, tuple[str, Change]] = {
    "heads of another rank": (
        "qwen3",
        each_op(MergeAttention, lambda op, rank: replace(op, first=8 - op.first)),
    ),
    "experts off by one": (
        "qwen2moe",
        each_op(Experts, lambda op, rank: replace(op, held=(1 - rank + op.held[0], 1 - rank + op.held[1]))),
    ),
    "rows of the vocabulary off by one": (
        "llama",
        each_op(EmbedRows, lambda op, rank: replace(op, first=op.first + 1)),
    ),
    "sinks of one rank forgotten": (
        "gpt-oss",
        each_op(MergeAttention, lambda op, rank: replace(op, sinks=None if rank else op.sinks)),
    ),
    "gates of one rank forgotten": (
        "qwen35",
        each_op(MergeAttention, lambda op, rank: replace(op, gate=None if rank else op.gate)),
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_part_shows(what: str) -> None:
    form, change = WRONG[what]
    wrong = fleet(form, "tensor", (1, 1), token_vector=(1, 1), change=change).logits(PROMPT[:9])
    assert np.abs(wrong - fleet(form).logits(PROMPT[:9])).max() > SHOWS


@pytest.mark.parametrize("form", ["llama biased", "gpt-oss"])
def test_a_bias_on_every_rank_is_refused_and_shows(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one = fleet(form).logits(PROMPT[:9])
    monkeypatch.setattr(stage_shards, "once", lambda bias, rank, ranks: stage_shards.copied(bias, ranks))
    with pytest.raises(DeclarationMismatch, match="on every rank"):
        fleet(form, "tensor", (2, 1))
    monkeypatch.setattr(binding, "check_sums", lambda *_: None)
    with pytest.raises(DeclarationMismatch, match="biases"):
        fleet(form, "tensor", (2, 1))
    monkeypatch.setattr(binding, "check_layers", lambda *_: None)
    wrong = fleet(form, "tensor", (2, 1), token_vector=(1, 1)).logits(PROMPT[:9])
    assert np.abs(wrong - one).max() > SHOWS


# ----------------------------------------------------------------------------------------------------------- bad input


def test_more_ranks_than_query_heads_are_refused_with_the_arithmetic() -> None:
    model = wide("llama")
    with pytest.raises(
        SettingError, match="17 ranks and this model an attention of 16 query heads: 1 ranks would never"
    ):
        bind(model.family, model.config, model.tensors, Share.tensor(0, (1,) * 17))


def test_a_vector_with_a_zero_is_refused() -> None:
    model = wide("llama")
    with pytest.raises(SettingError, match="rank 1 has 0 of 3 parts"):
        bind(model.family, model.config, model.tensors, Share.tensor(0, (2, 0, 1)))
