"""A rank of the tensor layout builds what its share of a declared stage is; whatever differs is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import families_rig as rig
import pytest

from backends.base import Attention, DeltaNet, Experts, GatedActivation, Linear, MergeAttention, Op, SumRows, Zero
from homeserve.layouts.share import Share
from homeserve.models import bind as binding
from homeserve.models.conform import DeclarationMismatch, check_layers

LAST = 3


def checked(arch: str, rank: int, vector: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What `check_layers` was given for a rank of a model of four layers."""
    seen: list[Any] = []
    monkeypatch.setattr(binding, "check_layers", lambda *given: seen.append(given))
    binding.bind(*rig.made(arch, rig.STACKS["four"]), Share.tensor(rank, vector))
    declared, built, *rest = seen[-1]
    return [declared, {layer: list(ops) for layer, ops in built.items()}, *rest]


def matrix(op: Experts, **changes: Any) -> Experts:
    return replace(op, gate=replace(op.gate, **changes))


WRONG: list[tuple[str, int, type, Callable[[Any], Op], str]] = [
    (
        "qwen3",
        1,
        MergeAttention,
        lambda op: replace(op, first=0),
        r"merged is declared \(4, 16, 3, 1\), built \(4, 16, 0",
    ),
    ("qwen3", 1, MergeAttention, lambda op: replace(op, own=2), r"merged is declared \(4, 16, 3, 1\)"),
    ("qwen3", 0, Attention, lambda op: replace(op, scale=1.0), "scale is declared"),
    ("gemma3", 0, Attention, lambda op: replace(op, window=9), "window is declared"),
    ("gpt-oss", 0, MergeAttention, lambda op: replace(op, sinks=None), "sinks is declared True, built False"),
    ("qwen35", 0, MergeAttention, lambda op: replace(op, gate=None), "gated is declared True, built False"),
    ("qwen35", 0, DeltaNet, lambda op: replace(op, value_heads=1), "value_heads is declared 4, built 1"),
    (
        "qwen3",
        1,
        GatedActivation,
        lambda op: replace(op, out=replace(op.out, width=9)),
        "width is declared 12, built 9",
    ),
    ("qwen3moe", 1, Experts, lambda op: replace(op, held=(0, 1)), r"held is declared None, built \(0, 1\)"),
    ("qwen3moe", 1, Experts, lambda op: matrix(op, height=5), "width is declared 6, built 0"),
    ("qwen2moe", 0, GatedActivation, lambda op: replace(op, out=replace(op.out, width=9)), "shared is declared"),
    ("gpt-oss", 1, Experts, lambda op: replace(op, down=replace(op.down, bias=op.gate.bias)), "expert_biases"),
    ("qwen2", 0, Linear, lambda op: replace(op, parts=(replace(op.parts[0], bias=None), *op.parts[1:])), "biases"),
]


@pytest.mark.parametrize(("arch", "rank", "kind", "change", "said"), WRONG)
def test_a_part_that_is_not_the_ranks_share_is_named(
    arch: str, rank: int, kind: type, change: Callable[[Any], Op], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    declared, built, *rest = checked(arch, rank, (3, 1), monkeypatch)
    check_layers(declared, built, *rest)
    layer = max(at for at in built if any(isinstance(op, kind) for op in built[at]))
    index = next(at for at, op in enumerate(built[layer]) if isinstance(op, kind))
    built[layer][index] = change(built[layer][index])
    with pytest.raises(DeclarationMismatch, match=said) as caught:
        check_layers(declared, built, *rest)
    assert str(caught.value).startswith(f"layer {layer}, stage ")


@pytest.mark.parametrize("arch", rig.NAMES)
def test_a_rank_without_a_unit_builds_its_sums_alone(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its layers read, add zeros to every sum that is one, and change what is summed as all ranks do."""
    declared, built, *rest = checked(arch, 1, (99, 1), monkeypatch)
    check_layers(declared, built, *rest)
    for ops in built.values():
        sums = [op.label for op in ops if isinstance(op, SumRows)]
        inner = [op for op in ops if isinstance(op, GatedActivation | Experts | DeltaNet)]
        zeros = [op for op in ops if isinstance(op, Zero)]
        assert len(sums) == len(set(sums)) >= 2 and len(zeros) >= 1
        assert len(zeros) + len(inner) >= len(sums)


def test_zeros_where_a_rank_has_units_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    declared, built, *rest = checked("llama", 1, (1, 1), monkeypatch)
    ops = built[LAST]
    act = next(at for at, op in enumerate(ops) if isinstance(op, GatedActivation))
    ops[act - 1 : act + 2] = [Zero(ops[act + 1].parts[0].out)]
    with pytest.raises(DeclarationMismatch, match=r"stage 1 \(dense\): .*stage is declared 'dense', built 'nothing'"):
        check_layers(declared, built, *rest)
