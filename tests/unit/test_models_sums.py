"""Every partial sum is completed once: the check of a rank's list in the tensor layout, for every family and sum."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import families_rig as rig
import pytest

from backends.base import (
    AddGated,
    Buffer,
    Experts,
    GatherRows,
    Linear,
    MergeAttention,
    Norm,
    Op,
    RopeStore,
    Softcap,
    SumRows,
    Zero,
)
from homeserve.layouts.share import Share
from homeserve.models import bind as binding
from homeserve.models.conform import DeclarationMismatch
from homeserve.models.conform_sums import check_sums

Built = tuple[tuple[Op, ...], Collection[str]]


def built(arch: str, monkeypatch: pytest.MonkeyPatch, rank: int = 0, vector: tuple[int, ...] = (2, 1)) -> Built:
    """The ops of a rank and the names of weights of which it has a part."""
    seen: list[Built] = []
    monkeypatch.setattr(binding, "check_sums", lambda ops, cut: seen.append((ops, cut)))
    binding.bind(*rig.made(arch, rig.STACKS["pair, tied"]), Share.tensor(rank, vector))
    return seen[0]


@pytest.mark.parametrize("arch", rig.NAMES)
def test_every_sum_that_is_missing_or_taken_twice_is_named(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in (0, 1):
        ops, cut = built(arch, monkeypatch, rank)
        check_sums(ops, cut)
        sums = [at for at, op in enumerate(ops) if isinstance(op, SumRows)]
        assert len(sums) >= 5
        for at in sums:
            twice = (*ops[: at + 1], *ops[at:])
            with pytest.raises(DeclarationMismatch, match=rf"op {at + 1} \(SumRows\) needs a partial sum"):
                check_sums(twice, cut)
            with pytest.raises(DeclarationMismatch, match="a partial sum"):
                check_sums((*ops[:at], *ops[at + 1 :]), cut)


@pytest.mark.parametrize("arch", rig.NAMES)
def test_every_other_exchange_that_is_missing_is_named(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ops, cut = built(arch, monkeypatch)
    others = [at for at, op in enumerate(ops[:-1]) if isinstance(op, GatherRows | MergeAttention)]
    assert others
    for at in others:
        with pytest.raises(DeclarationMismatch, match="which nobody has written|needs|multiplies"):
            check_sums((*ops[:at], *ops[at + 1 :]), cut)


def changed(ops: Sequence[Op], kind: type, change: Callable[[Any], Op | tuple[Op, ...]], which: int = 0) -> list[Op]:
    at = [index for index, op in enumerate(ops) if isinstance(op, kind)][which]
    new = change(ops[at])
    return [*ops[:at], *(new if isinstance(new, tuple) else (new,)), *ops[at + 1 :]]


def part(op: Linear, **changes: Any) -> Linear:
    return replace(op, parts=(replace(op.parts[0], **changes), *op.parts[1:]))


def _feeding(ops: Sequence[Op], src: Buffer) -> Linear:
    """The first matrix of a feed-forward, with another input."""
    return replace(next(op for op in ops if isinstance(op, Linear) and op.parts[0].out.name == "gate"), src=src)


UPDATE, X = Buffer("update", rig.HIDDEN), Buffer("x", rig.HIDDEN)
WRONG: dict[str, tuple[str, Callable[[Sequence[Op]], list[Op]], str]] = {
    "q before it is gathered": (
        "qwen3",
        lambda ops: changed(ops, RopeStore, lambda op: replace(op, q=Buffer("own_q", 0))),
        r"\(RopeStore\) needs the whole in own_q, there is this rank's columns",
    ),
    "logits gathered of the whole": (
        "llama",
        lambda ops: changed(
            ops, GatherRows, lambda op: replace(op, parts=(replace(op.parts[0], src=Buffer("normed", 1)),))
        ),
        r"\(GatherRows\) needs this rank's columns in normed, there is the whole",
    ),
    "a part multiplied by a whole matrix": (
        "llama",
        lambda ops: changed(ops, Linear, lambda op: part(op, weight=replace(op.parts[0].weight, name="all")), 1),
        "multiplies all by this rank's columns, mixed",
    ),
    "a partial sum multiplied": (
        "llama",
        lambda ops: changed(ops, SumRows, lambda op: (_feeding(ops, op.buffer), op), 1),
        "multiplies blk.0.ffn_gate.weight by a partial sum, update",
    ),
    "experts that every rank has": (
        "qwen3moe",
        lambda ops: changed(
            ops, Experts, lambda op: replace(op, up=replace(op.up, weight=replace(op.up.weight, name="all")))
        ),
        r"\(Experts\) uses all, which every rank has",
    ),
    "a share added to what is summed": (
        "qwen2moe",
        lambda ops: changed(ops, AddGated, lambda op: replace(op, into=X)),
        r"\(AddGated\) needs the whole in shared_out, there is a partial sum",
    ),
    "an update overwritten": (
        "llama",
        lambda ops: changed(ops, SumRows, lambda op: (Zero(op.buffer), op), 1),
        "overwrites update, a partial sum that nobody completed",
    ),
    "a buffer of nobody": (
        "llama",
        lambda ops: changed(ops, Norm, lambda op: replace(op, src=Buffer("y", 1))),
        r"op 2 \(Norm\) reads y, which nobody has written",
    ),
    "logits capped before they are there": (
        "gemma2",
        lambda ops: changed(ops, Softcap, lambda op: replace(op, src=X)),
        r"\(Softcap\) needs this rank's columns in x, there is the whole",
    ),
    "a sum left at the end": ("llama", lambda ops: [*ops, Zero(UPDATE)], "update is left a partial sum"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_reads_or_leaves_the_wrong_thing_is_named(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arch, change, said = WRONG[what]
    ops, cut = built(arch, monkeypatch)
    with pytest.raises(DeclarationMismatch, match=said):
        check_sums(change(ops), cut)


def test_a_bias_that_every_rank_would_add_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    ops, cut = built("gpt-oss", monkeypatch)
    biased = next(op for op in ops if isinstance(op, Linear) and op.src.name.startswith("mixed"))
    assert biased.parts[0].bias is not None
    with pytest.raises(DeclarationMismatch, match=r"adds blk.0.attn_output.bias on every rank"):
        check_sums(ops, set(cut) - {biased.parts[0].bias.name})


def test_an_op_of_the_pipeline_layout_has_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    ops, cut = built("llama", monkeypatch)
    row = rig.bind_part(*rig.made("llama", rig.STACKS["pair, tied"]), range(1)).ops[-1]
    with pytest.raises(DeclarationMismatch, match=r"\(SendRows\) has no place in the tensor layout"):
        check_sums([*ops, row], cut)
