"""What embeddings are made of: the rows behind the output norm, of every family, on the rank that samples alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import families_rig as rig
import numpy as np
import pytest

from backends.base import Buffer, DraftStep, EmbedRows, HiddenStep, Limits, Norm, Op, OpenOptions, SelectRows, StatePool
from backends.quant import QuantType
from backends.reference.backend import ReferenceBackend
from backends.reference.program import ReferenceProgram
from backends.sections import hidden_rows, rows_of, scopes_of, sections_of
from homeserve.layouts.share import Share
from homeserve.models.bind import Bound, bind
from homeserve.models.conform import DeclarationMismatch, before_hidden, check_hidden

HIDDEN = rig.HIDDEN
CASES = [(arch, name, False) for arch in rig.NAMES for name in ("one", "pair, tied")]
CASES += [(arch, "three, nextn", True) for arch in rig.NAMES if "three, nextn" in rig.stacks_of(arch)]


def program_of(bound: Bound) -> ReferenceProgram:
    kv, states = bound.kv_pool(16, QuantType.F32), StatePool(bound.state_layers, 1 if bound.state_layers else 0)
    limits = Limits(rows=16, logit_rows=16, lanes=1, lane_pages=1)
    made = ReferenceBackend(OpenOptions()).bind(bound.ops, bound.weights, kv, limits, lambda *_: None, states)
    assert isinstance(made, ReferenceProgram)
    return made


@pytest.mark.parametrize(("arch", "stack", "drafts"), CASES)
def test_rows_behind_the_output_norm_are_those_that_the_head_reads(arch: str, stack: str, drafts: bool) -> None:
    bound = bind(*rig.made(arch, rig.STACKS[stack]), drafts=drafts)
    program, batch = program_of(bound), rig.batch(groups=1 + len(bound.windows))
    left = program.run_from(batch, {})
    read = left["selected" if drafts else "final"]
    found = program.hidden(batch)
    assert found.dtype == np.float32 and found.shape == (rig.ROWS, HIDDEN)
    np.testing.assert_array_equal(found, read)
    few = replace(batch, logit_rows=batch.logit_rows[:0])
    assert program.run(few).shape[0] == 0, "a plan of pooled rows alone has no logits"
    np.testing.assert_array_equal(program.hidden(few), read)


def test_rows_are_those_of_the_last_run_and_of_no_other() -> None:
    bound = bind(*rig.made("llama", rig.STACKS["one"]))
    program, batch = program_of(bound), rig.batch()
    with pytest.raises(ValueError, match="not that of the last run"):
        program.hidden(batch)
    program.run(batch)
    with pytest.raises(ValueError, match="not that of the last run"):
        program.hidden(rig.batch(rows=2))
    program.hidden(batch)
    with pytest.raises(ValueError, match="not that of the last run"):
        program.hidden(batch)  # the residual has its last update: once more would add it twice


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_rank_that_samples_has_the_rows_and_no_other(ranks: int) -> None:
    family, config, tensors = rig.made("llama", rig.STACKS["four"])
    ranges = [(0, 1), (1, 4)] if ranks == 2 else [(0, 1), (1, 2), (2, 4)]
    lists = {
        "pipeline": [bind(family, config, tensors, Share.pipeline(rank, ranges)) for rank in range(ranks)],
        "tensor": [bind(family, config, tensors, Share.tensor(rank, (1,) * ranks)) for rank in range(ranks)],
    }
    for bounds in lists.values():
        assert [hidden_rows(bound.ops) is not None for bound in bounds] == [bound.samples for bound in bounds]
    first = program_of(replace(lists["pipeline"][0], ops=rig.within(lists["pipeline"][0].ops)))
    first.run(rig.batch())
    with pytest.raises(ValueError, match="no rows behind the output norm"):
        first.hidden(rig.batch())


def test_no_buffer_is_held_for_them() -> None:
    bound = bind(*rig.made("llama", rig.STACKS["pair, tied"]))
    alone = program_of(replace(bound, ops=tuple(before_hidden(bound.ops))))
    assert program_of(bound).memory_lines() == alone.memory_lines()


def test_a_section_of_hidden_rows_has_all_rows_of_a_plan() -> None:
    limits = Limits(rows=9, logit_rows=4, lanes=2, lane_pages=1)
    plain = bind(*rig.made("llama", rig.STACKS["one"])).ops
    assert len(sections_of(plain)) == 2 and list(scopes_of(plain))[-1] == 0 and rows_of(plain, limits)[-1] == (9, 4)
    drafting = bind(*rig.made("qwen35", rig.STACKS["three, nextn"]), drafts=True).ops
    assert len(sections_of(drafting)) == 2 and rows_of(drafting, limits)[-1] == (9, 4)
    assert hidden_rows(drafting) == (Buffer("final", HIDDEN), None)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda ops: [*ops, ops[-1], next(op for op in ops if isinstance(op, SelectRows))], "cannot follow HiddenStep"),
        (lambda ops: [*ops, DraftStep(), ops[-1]], "last mark"),
        (lambda ops: [*ops, ops[-2], ops[-1]], "last mark"),
    ],
)
def test_sections_that_cannot_be_are_refused(change: Any, why: str) -> None:
    ops = list(bind(*rig.made("llama", rig.STACKS["one"])).ops)
    with pytest.raises(ValueError, match=why):
        sections_of(change(ops))


def _without_add(ops: list[Op]) -> list[Op]:
    norm = ops[-1]
    assert isinstance(norm, Norm) and norm.add is not None
    return [*ops[:-1], replace(norm, add=None)]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_without_add, "not the head's norm"),
        (lambda ops: [*ops[:-1], replace(ops[-1], eps=1.0)], "not the head's norm"),
        (lambda ops: ops[:-1], "not those that the head reads"),
        (lambda ops: ops[:-2], "has mark None"),
        (lambda ops: [*ops[:-2], ops[1], next(op for op in ops if isinstance(op, EmbedRows)), *ops[-2:]],
         "x is written between"),
    ],
)  # fmt: skip
def test_rows_that_are_not_the_heads_are_named(change: Any, said: str) -> None:
    ops = list(bind(*rig.made("llama", rig.STACKS["one"])).ops)
    check_hidden(ops, samples=True)
    with pytest.raises(DeclarationMismatch, match=said):
        check_hidden(change(ops), samples=True)
    with pytest.raises(DeclarationMismatch, match="does not sample"):
        check_hidden(ops, samples=False)


def test_rows_of_a_list_that_drafts_are_what_the_head_selects_from() -> None:
    ops = list(bind(*rig.made("qwen35", rig.STACKS["three, nextn"]), drafts=True).ops)
    check_hidden(ops, samples=True)
    with pytest.raises(DeclarationMismatch, match="not those that the head reads"):
        check_hidden([*ops[:-1], HiddenStep(Buffer("normed", HIDDEN))], samples=True)
