"""The rules of declarations, each held by every family: plans against golden ones, ranks in a row, sums taken once."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from typing import Any

import families_rig as rig
import numpy as np
import pytest

from backends.base import (
    AddGated,
    Attention,
    Buffer,
    DeltaNet,
    EmbedRows,
    Experts,
    GatedActivation,
    Linear,
    Norm,
    Op,
    Rope,
    RopeStore,
    Scale,
)
from homeserve.errors import UnsupportedModel
from homeserve.models import attention_ops, stage_ops, stages
from homeserve.models.bind import Bound, bind
from homeserve.models.conform import DeclarationMismatch, before_hidden, check_layers, check_updates
from homeserve.models.rope import resolve_rope
from homeserve.models.stages import Stage

ARCHS = rig.NAMES
CASES = [(arch, name) for arch in ARCHS for name in rig.stacks_of(arch)]
RANKS = (1, 2, 3, 4)
BOUND_X = Buffer("x", rig.HIDDEN)


def bound_of(arch: str, name: str, at: range | None = None) -> Bound:
    return rig.bind_part(*rig.made(arch, rig.STACKS[name]), at)


# ------------------------------------------------------------------------------------------------ golden plans (rule 7)


@pytest.mark.parametrize(("arch", "name"), CASES)
def test_every_plan_equals_its_golden_one(arch: str, name: str) -> None:
    """All stack shapes, all pipeline cuts for one to four ranks, every op and every leaf of it."""
    golden = rig.read_golden(arch)[name]
    family, config, tensors = rig.made(arch, rig.STACKS[name])
    met = set()
    for ranks in RANKS:
        for cut in rig.cuts(config.layers, ranks):
            for at in cut:
                key = f"{at.start}:{at.stop}"
                if key not in met:
                    found = rig.plan(rig.bind_part(family, config, tensors, at))
                    assert not rig.first_difference(golden[key], found), f"{arch}, {name}, layers {key}"
                met.add(key)
    assert met == set(golden)


def test_golden_plans_are_of_all_families_and_stacks() -> None:
    assert {path.stem for path in rig.GOLDEN.glob("*.json")} == set(ARCHS)
    for arch in ARCHS:
        assert list(rig.read_golden(arch)) == rig.stacks_of(arch)


@pytest.mark.parametrize(
    ("kind", "change", "leaf"),
    [
        (Norm, lambda op: replace(op, add=None), "add=update:32"),
        (Norm, lambda op: replace(op, eps=1e-6), "eps=1e-06"),
        (RopeStore, lambda op: replace(op, q_norm=None), "q_norm"),
        (Attention, lambda op: replace(op, window=9), "window=9"),
        (Linear, lambda op: replace(op, parts=op.parts[::-1]), "LinearPart"),
    ],
)
def test_a_leaf_that_changed_is_found(kind: type, change: Callable[[Any], Op], leaf: str) -> None:
    bound = bound_of("gemma3", "pair, tied", range(1, 2))
    index = next(i for i, op in enumerate(bound.ops) if isinstance(op, kind))
    changed = replace(bound, ops=(*bound.ops[:index], change(bound.ops[index]), *bound.ops[index + 1 :]))
    told = rig.first_difference(rig.read_golden("gemma3")["pair, tied"]["1:2"], rig.plan(changed))
    assert told.startswith(f"op {index}") and leaf in told


# -------------------------------------------------------------------------------------------- immutable values (rule 1)


@pytest.mark.parametrize("arch", ARCHS)
def test_declarations_are_equal_immutable_values_without_tensors(arch: str) -> None:
    first, second = (rig.made(arch, rig.STACKS["four"])[:2] for _ in range(2))
    for layer in range(4):
        one, other = first[0].stage_facts(first[1], layer), second[0].stage_facts(second[1], layer)
        assert one == other and hash(one) == hash(other)
        for stage in one:
            _assert_plain(stage)
            with pytest.raises(AttributeError):
                stage.read = None  # type: ignore[misc, assignment]


def _assert_plain(value: object) -> None:
    """Numbers, words and values made of these: nothing that holds memory, a module or a plan."""
    if is_dataclass(value):
        assert value.__dataclass_params__.frozen  # type: ignore[attr-defined]
        for field in fields(value):
            _assert_plain(getattr(value, field.name))
    else:
        assert value is None or isinstance(value, bool | int | float | str | Enum), value


# ------------------------------------------------------------------------------------------------ one function (rule 2)


def test_one_function_decides_for_builder_and_neighbour() -> None:
    """A family whose layer 1 has no feed-forward and whose layer 2 has nothing: what is built and owed follows."""
    known, config, tensors = rig.made("qwen3", rig.STACKS["four"])

    def declare(config: Any, layer: int) -> tuple[Stage, ...]:
        return known.stage_facts(config, layer)[: {1: 1, 2: 0}.get(layer, 2)]

    family = replace(known, stage_facts=declare)
    gone = ("blk.1.ffn_", "blk.2.")
    own = {name: view for name, view in tensors.items() if not name.startswith(gone)}
    whole = bind(family, config, own)
    assert not [name for name in whole.weights if name.startswith(gone)]
    right = rig.run(whole)["logits"]
    for cut in (*rig.cuts(4, 2), *rig.cuts(4, 4)):
        bounds = [rig.bind_part(family, config, own, at) for at in cut]
        assert np.array_equal(rig.run_pipeline(bounds), right), cut


def test_a_layer_is_sparse_where_its_declaration_says_so() -> None:
    known, config, tensors = rig.made("qwen3moe", rig.STACKS["pair, tied"])
    plain, plain_config, plain_tensors = rig.made("qwen3", rig.STACKS["pair, tied"])

    def declare(config: Any, layer: int) -> tuple[Stage, ...]:
        return plain.stage_facts(plain_config, layer) if layer == 0 else known.stage_facts(config, layer)

    mixed = {n: v for n, v in plain_tensors.items() if not n.startswith("blk.1")}
    mixed |= {n: v for n, v in tensors.items() if n.startswith("blk.1")}
    bound = bind(replace(known, stage_facts=declare), config, mixed)
    kinds = [type(op) for op in bound.ops if isinstance(op, GatedActivation | Experts)]
    assert kinds == [GatedActivation, Experts]


# ---------------------------------------------------------------------------------- built is run, handoffs (rules 3, 5)


@pytest.mark.parametrize("arch", ARCHS)
def test_every_layer_that_a_rank_builds_is_one_that_it_runs(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neighbours are asked for their declaration and never built."""
    family, config, tensors = rig.made(arch, rig.STACKS["four"])
    built: list[str] = []
    kinds = [(attention_ops, "attention"), *((stage_ops, kind) for kind in ("delta_net", "dense", "experts"))]
    for module, kind in kinds:
        original = getattr(module, kind)

        def spy(out: Any, stage: Any, *rest: Any, original: Callable[..., None] = original) -> None:
            names = next(each for each in rest if isinstance(each, dict))
            built.append(names["ffn_norm"].split(".")[1])
            original(out, stage, *rest)

        monkeypatch.setattr(module, kind, spy)
    asked: list[int] = []

    def facts(config: Any, layer: int) -> tuple[Stage, ...]:
        asked.append(layer)
        return family.stage_facts(config, layer)

    for at in rig.ranges(4):
        built.clear()
        asked.clear()
        own = {n: v for n, v in tensors.items() if not n.startswith("blk.") or int(n.split(".")[1]) in at}
        rig.bind_part(replace(family, stage_facts=facts), rig.settled(family, config, tensors), own, at)
        parts = 3 if arch == "gemma4-experts" else 2
        assert built == [str(layer) for layer in at for _ in range(parts)]
        assert set(asked) == set(range(4)), "each rank knows the KV groups of the whole model"


@pytest.mark.parametrize(("arch", "name"), CASES)
def test_ranks_in_a_row_are_the_whole_list(arch: str, name: str) -> None:
    family, config, tensors = rig.made(arch, rig.STACKS[name])
    whole = bind(family, config, tensors)
    bound = {(at.start, at.stop): rig.bind_part(family, config, tensors, at) for at in rig.ranges(config.layers)}
    for ranks in RANKS:
        for cut in rig.cuts(config.layers, ranks):
            parts = [bound[at.start, at.stop] for at in cut]
            for left, right in zip(parts, parts[1:], strict=False):
                assert left.gives == right.takes and left.gives
            assert not parts[0].takes and not parts[-1].gives
            assert _unnumbered(_renumbered(parts)) == _unnumbered(whole.ops)
            assert sum((part.kv_layers for part in parts), ()) == whole.kv_layers
            assert sum((part.state_layers for part in parts), ()) == whole.state_layers


def _unnumbered(ops: Sequence[Op]) -> list[str]:
    """Ops as text; of a buffer that got another name for its width, the first part of the name."""
    return [re.sub(r"([a-z_]+)\.\d+:(\d+)", r"\1:\2", rig.shown(op)) for op in ops]


def _renumbered(parts: list[Bound]) -> list[Op]:
    """All ops of ranks in a row, pool layers counted through; what each rank looks up of its tokens, once."""
    ops: list[Op] = []
    kv = states = 0
    for part in parts:
        for op in rig.within(part.ops):
            if isinstance(op, EmbedRows) and op.out.name == "embedded" and part.layers.start:
                continue
            if isinstance(op, RopeStore | Attention):
                ops.append(replace(op, layer=op.layer + kv))
            elif isinstance(op, DeltaNet):
                ops.append(replace(op, layer=op.layer + states))
            else:
                ops.append(op)
        kv, states = kv + len(part.kv_layers), states + len(part.state_layers)
    return ops


@pytest.mark.parametrize("arch", ARCHS)
def test_ranks_give_the_whole_models_logits_and_a_doubled_sum_shows(arch: str) -> None:
    """Weights are seeded by rank and scaled. The receiver adds what it is handed once; twice changes the output."""
    family, config, tensors = rig.made(arch, rig.STACKS["four"], rank_of=(1, 2, 2, 3))
    alike = rig.made(arch, rig.STACKS["four"])[2]
    other = [name for name in tensors if not np.array_equal(tensors[name].data, alike[name].data)]
    assert {name.split(".")[1] for name in other} == {"0", "1", "2", "3"}
    whole = rig.run(bind(family, config, tensors))["logits"]
    bounds = [rig.bind_part(family, config, tensors, at) for at in (range(1), range(1, 3), range(3, 4))]
    assert np.array_equal(rig.run_pipeline(bounds), whole)
    for rank in (0, 1):
        if [buffer.name for buffer in bounds[rank].gives] == ["x"]:
            continue  # the residual takes a factor at the end of a layer: nothing is owed there
        assert np.abs(rig.run_pipeline(bounds, doubled=rank) - whole).max() > 1e-2, f"rank {rank} goes unnoticed"


@pytest.mark.parametrize("arch", ARCHS)
def test_every_sum_taken_twice_or_not_at_all_shows_and_is_refused(arch: str) -> None:
    bound = bound_of(arch, "pair, tied")
    right = rig.run(bound)["logits"]
    listed = before_hidden(bound.ops)
    sums = [i for i, op in enumerate(listed) if isinstance(op, AddGated) or getattr(op, "add", None) is not None]
    assert len(sums) >= 4
    for index in sums:
        op = bound.ops[index]
        twice = (*bound.ops[:index], op, *bound.ops[index:])
        left_out = replace(op, add=None) if not isinstance(op, AddGated) else None  # type: ignore[call-arg]
        never = (*bound.ops[:index], *((left_out,) if left_out else ()), *bound.ops[index + 1 :])
        for wrong in (never,) if type(op).__name__ == "SelectRows" else (twice, never):
            assert np.abs(rig.run(bound, ops=wrong)["logits"] - right).max() > 1e-3, f"op {index} goes unnoticed"
        if not isinstance(op, AddGated):
            with pytest.raises(DeclarationMismatch, match="nobody owes|one is owed|never added"):
                check_updates(twice, owed=False, handed_on=False)
            with pytest.raises(DeclarationMismatch, match="nobody owes|one is owed|never added"):
                check_updates(never, owed=False, handed_on=False)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda ops, join: [*ops[:join], *ops[join + 1 :]], "changes the residual while an output waits"),
        (lambda ops, join: [*ops[:join], _of_held(ops), *ops[join:]], "overwrites an output that nothing joined"),
        (lambda ops, join: [*ops[: join + 1], ops[join], *ops[join + 1 :]], "adds an output that does not wait"),
        (lambda ops, join: [*ops[:join], AddGated(ops[join].into, BOUND_X), *ops[join:]], "while an output waits"),
        (lambda ops, join: ops[:join], "waits at the end"),
    ],
    ids=["never", "written twice", "joined twice", "late", "unfinished"],
)
def test_an_output_that_waits_is_joined_once(change: Callable[[Any, int], list[Op]], said: str) -> None:
    bound = bound_of("gemma4-experts", "pair, tied")
    join = next(i for i, op in enumerate(bound.ops) if isinstance(op, AddGated) and op.src.name == "held")
    with pytest.raises(DeclarationMismatch, match=said):
        check_updates(change(list(bound.ops), join), owed=False, handed_on=True)


def _of_held(ops: list[Op]) -> Op:
    """What writes the output that waits."""
    return next(op for op in ops if isinstance(op, Linear) and op.parts[0].out.name == "held")


# ------------------------------------------------------------------------------------------------- conformance (rule 4)

Change = Callable[[Any], Op]
MISMATCHES: list[tuple[str, type, Change, str]] = [
    ("qwen3", RopeStore, lambda op: replace(op, q_norm=None), "stage 0 (attention): q_norm is declared True, built Fa"),
    ("qwen3", RopeStore, lambda op: replace(op, k_norm=None), "k_norm is declared True, built False"),
    ("qwen3", RopeStore, lambda op: replace(op, v_norm=True), "v_norm is declared False, built True"),
    ("qwen3", RopeStore, lambda op: replace(op, k=None, v=None), "own_kv is declared True, built False"),
    ("qwen3", RopeStore, lambda op: replace(op, layer=0), "layer where stored is declared None, built 0"),
    ("qwen3", Attention, lambda op: replace(op, layer=0), "kv_layer is declared 3, built 0"),
    ("qwen2", Linear, lambda op: replace(op, parts=(replace(op.parts[0], bias=None), *op.parts[1:])), "biases"),
    ("gemma2", Attention, lambda op: replace(op, softcap=0.0), "softcap is declared 50.0, built 0.0"),
    ("gemma2", Norm, lambda op: replace(op, eps=1.0), "eps is declared 1e-05, built 1.0"),
    ("gemma3", GatedActivation, lambda op: replace(op, kind="silu"), "activation is declared 'gelu', built 'silu'"),
    ("gpt-oss", Attention, lambda op: replace(op, sinks=None), "sinks is declared True, built False"),
    ("gpt-oss", Experts, lambda op: replace(op, kind="silu"), "(experts): activation is declared 'swiglu_oai'"),
    ("gpt-oss", Experts, lambda op: replace(op, down=replace(op.down, bias=None)), "expert_biases"),
    ("qwen35", Attention, lambda op: replace(op, gated=False), "gated is declared True, built False"),
    ("qwen35", Attention, lambda op: replace(op, q_step=0), "q_step is declared 32, built 16"),
    ("qwen35", DeltaNet, lambda op: replace(op, tiled=False), "(delta-net): tiled is declared True, built False"),
    ("qwen35", DeltaNet, lambda op: replace(op, value_heads=2), "value_heads is declared 4, built 2"),
    ("gemma4", Scale, lambda op: AddGated(op.src, op.src), "scales_residual is declared True, built False"),
    ("gemma4", EmbedRows, lambda op: _of_columns(op, "[,0:8]"), "(token-input): first is declared 24, built 0"),
    ("gemma4", RopeStore, lambda op: replace(op, v_norm=False), "v_norm is declared True, built False"),
    ("qwen2moe", AddGated, lambda op: replace(op, gate=None), "shared is declared SharedExpert(width=40, gated=True)"),
    ("qwen2moe", Experts, lambda op: _rerouted(op, normalise=True), "normalise is declared False, built True"),
    ("qwen3moe", Experts, lambda op: _rerouted(op, used=1), "used is declared 2, built 1"),
    ("gemma4-experts", Norm, lambda op: replace(op, eps=1.0), "(attention): eps is declared 1e-05, built 1.0"),
    ("gemma4-experts", Experts, lambda op: _rerouted(op, gains=None), "gains is declared True, built False"),
    ("qwen3moe", Experts, lambda op: _rerouted(op, func="sigmoid"), "func is declared 'softmax', built 'sigmoid'"),
]


def _of_columns(op: EmbedRows, part: str) -> Op:
    return replace(op, table=replace(op.table, name=op.table.name.partition("[")[0] + part))


def _rerouted(op: Experts, **changes: Any) -> Op:
    return replace(op, routing=replace(op.routing, **changes))


@pytest.mark.parametrize(("arch", "kind", "change", "said"), MISMATCHES)
def test_a_layer_that_differs_from_its_declaration_is_named(arch: str, kind: type, change: Change, said: str) -> None:
    """An op of the last layer that has one is changed: the layer, the stage and the field with both values are told."""
    layers = [layer for layer in range(4) if any(isinstance(op, kind) for op in _layer_ops(arch)[layer])]
    last = layers[-1]
    ops = {layer: list(each) for layer, each in _layer_ops(arch).items()}
    index = next(i for i, op in enumerate(ops[last]) if isinstance(op, kind))
    ops[last][index] = change(ops[last][index])
    family, config, tensors = rig.made(arch, rig.STACKS["four"])
    config = rig.settled(family, config, tensors)
    declared = {layer: family.stage_facts(config, layer) for layer in range(4)}
    with pytest.raises(DeclarationMismatch) as caught:
        check_layers(declared, ops, _resolver(tensors), _kv_index(declared))
    assert str(caught.value).startswith(f"layer {last}, stage ") and said in str(caught.value)


def _layer_ops(arch: str) -> dict[int, list[Op]]:
    """The ops of each layer, cut at the norms in front of the mixers."""
    ops = bound_of(arch, "four").ops
    starts = [i for i, op in enumerate(ops) if isinstance(op, Norm) and op.weight.name.endswith("attn_norm.weight")]
    end = next(i for i, op in enumerate(ops) if type(op).__name__ == "SelectRows")
    return {layer: list(ops[a:b]) for layer, (a, b) in enumerate(zip(starts, [*starts[1:], end], strict=True))}


def _resolver(tensors: rig.Tensors) -> Callable[[stages.RopeFacts], Rope]:
    return lambda facts: resolve_rope(facts, rig.factors(tensors) if facts.factor_tensor else ())


def _kv_index(declared: dict[int, tuple[Stage, ...]]) -> dict[int, int]:
    mixing = [layer for layer, (mixer, *_) in declared.items() if isinstance(mixer, stages.Attention)]
    return {layer: index for index, layer in enumerate(mixing)}


@pytest.mark.parametrize("arch", ARCHS)
def test_what_is_built_is_what_was_declared_and_a_lost_stage_is_named(arch: str) -> None:
    family, config, tensors = rig.made(arch, rig.STACKS["four"])
    config = rig.settled(family, config, tensors)
    declared = {layer: family.stage_facts(config, layer) for layer in range(4)}
    ops = _layer_ops(arch)
    resolved = _resolver(tensors)
    check_layers(declared, ops, resolved, _kv_index(declared))
    half = next(i for i, op in enumerate(ops[2][1:], 1) if isinstance(op, Norm) and op.src.name == "x")
    with pytest.raises(DeclarationMismatch, match=r"layer 2 declares .* and .*, .* was built"):
        check_layers(declared, ops | {2: ops[2][:half]}, resolved, _kv_index(declared))


# ------------------------------------------------------------------------------------ what a cut must not part (rule 6)


@pytest.mark.parametrize("arch", ["gemma2", "gemma3", "qwen2moe"])
def test_a_rank_that_would_finish_another_ranks_update_is_refused(arch: str) -> None:
    """A norm behind a stage, or a shared expert's share, belongs to the rank that wrote the update."""
    bound = bound_of(arch, "four", range(2, 4))
    check_updates(bound.ops, owed=True, handed_on=False)
    finishing = [op for op in bound.ops if isinstance(op, AddGated) or (isinstance(op, Norm) and op.src == op.out)]
    with pytest.raises(DeclarationMismatch, match="op 0 .* changes an update that the previous rank owes"):
        check_updates((finishing[0], *bound.ops), owed=True, handed_on=False)
    with pytest.raises(DeclarationMismatch, match="op 0 .* changes an update that nobody owes"):
        check_updates((finishing[0], *bound.ops), owed=False, handed_on=False)


def test_a_cut_never_parts_a_layer_from_the_one_whose_kv_it_reads() -> None:
    known, config, tensors = rig.made("qwen3", rig.STACKS["four"])

    def declare(config: Any, layer: int) -> tuple[Stage, ...]:
        mixer, feed = known.stage_facts(config, layer)
        assert isinstance(mixer, stages.Attention)
        return (replace(mixer, kv_source=1) if layer == 3 else mixer), feed

    family = replace(known, stage_facts=declare)
    own = {n: v for n, v in tensors.items() if n not in {f"blk.3.attn_{r}.weight" for r in ("k", "v", "k_norm")}}
    whole = bind(family, config, own)
    assert len(whole.kv_layers) == 3
    assert [op.layer for op in whole.ops if isinstance(op, Attention)] == [0, 1, 2, 1]
    shared = [op for op in whole.ops if isinstance(op, RopeStore)][3]
    assert shared.k is None and shared.v is None and shared.k_norm is None and shared.layer == 1
    rig.bind_part(family, config, own, range(1, 4))
    for at in (range(2, 4), range(3, 4)):
        with pytest.raises(UnsupportedModel, match="layer 3 reads the K and V of layer 1"):
            rig.bind_part(family, config, own, at)
