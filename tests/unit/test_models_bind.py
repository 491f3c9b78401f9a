"""Binding: shapes, optional parts, leftovers, the rules of declarations, and ranks that hold part of the layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from families_rig import bind_part, within

from backends.base import (
    Attention,
    Batch,
    Buffer,
    EmbedRows,
    HiddenStep,
    Limits,
    Linear,
    Norm,
    Op,
    OpenOptions,
    RopeStore,
    SelectRows,
    TensorView,
    Unsupported,
)
from backends.quant import QuantType
from backends.reference.backend import ReferenceBackend
from backends.reference.program import ReferenceProgram
from homeserve.errors import InvalidModelFile
from homeserve.models import registry
from homeserve.models.bind import Bound, bind
from homeserve.models.config import ModelConfig, settle
from homeserve.models.conform import DeclarationMismatch, before_hidden, check_layers, check_updates
from homeserve.models.rope import resolve_rope

LLAMA = registry.family("llama")
LAYERS, HIDDEN, WIDTH, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 3, 32, 48, 4, 2, 8, 50
Q, KV = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
METADATA: dict[str, Any] = {
    "llama.block_count": LAYERS,
    "llama.context_length": 128,
    "llama.embedding_length": HIDDEN,
    "llama.feed_forward_length": WIDTH,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.vocab_size": VOCAB,
}
CONFIG = LLAMA.config_from(METADATA)
SHAPES = {
    "attn_norm": (1, HIDDEN),
    "attn_q": (Q, HIDDEN),
    "attn_k": (KV, HIDDEN),
    "attn_v": (KV, HIDDEN),
    "attn_output": (HIDDEN, Q),
    "ffn_norm": (1, HIDDEN),
    "ffn_gate": (WIDTH, HIDDEN),
    "ffn_up": (WIDTH, HIDDEN),
    "ffn_down": (HIDDEN, WIDTH),
}
KV_INDEX = {layer: layer for layer in range(LAYERS)}
Tensors = dict[str, TensorView]


def view(name: str, values: np.ndarray) -> TensorView:
    """A float32 tensor; a vector has one row."""
    dense = np.atleast_2d(np.asarray(values, np.float32))
    return TensorView(name, QuantType.F32, *dense.shape, np.frombuffer(dense.tobytes(), np.uint8))


def dense(tensor: TensorView) -> np.ndarray:
    return np.frombuffer(tensor.data.tobytes(), np.float32).reshape(tensor.rows, tensor.cols)


def tensors(*, head: bool = True) -> Tensors:
    """Weights seeded by name and scaled so that a wrong sum shows (norms near 1)."""
    shapes = {"token_embd.weight": (VOCAB, HIDDEN), "output_norm.weight": (1, HIDDEN)}
    if head:
        shapes["output.weight"] = (VOCAB, HIDDEN)
    for layer in range(LAYERS):
        shapes |= {f"blk.{layer}.{role}.weight": shape for role, shape in SHAPES.items()}
    made = {}
    for seed, (name, shape) in enumerate(shapes.items()):
        values = np.random.default_rng(seed).standard_normal(shape)
        made[name] = view(name, 1 + 0.1 * values if "norm" in name else 0.2 * values)
    return made


def program(ops: tuple[Op, ...], weights: Mapping[str, TensorView], bound: Bound) -> ReferenceProgram:
    kv = bound.kv_pool(64, QuantType.F32)
    limits = Limits(rows=16, logit_rows=16, lanes=1, lane_pages=4)
    return ReferenceBackend(OpenOptions()).bind(ops, weights, kv, limits, lambda *_: None)


def run(
    bound: Bound, ops: tuple[Op, ...] | None = None, given: Mapping[str, np.ndarray] | None = None
) -> dict[str, Any]:
    """All buffers after six rows of one sequence."""
    made = program(within(ops or bound.ops), bound.weights, bound)
    return made.run_from(rows(6, 1 + len(bound.windows)), given or {})


def rows(count: int, groups: int = 1) -> Batch:
    positions = np.arange(count, dtype=np.int32)
    tokens = (positions * 7 + 3) % VOCAB
    return Batch(
        tokens=tokens.astype(np.int32),
        positions=positions,
        slots=np.tile(positions, (groups, 1)),
        lanes=np.zeros(count, np.int32),
        tables=np.tile(np.arange(4, dtype=np.int32), (groups, 1, 1)),
        logit_rows=positions.copy(),
    )


# --------------------------------------------------------------------------------------------------------- op lists


def test_the_whole_model_is_one_list_from_embedding_to_head() -> None:
    bound = bind(LLAMA, CONFIG, tensors())
    assert isinstance(bound.ops[0], EmbedRows)
    select, norm, head = before_hidden(bound.ops)[-3:]
    assert isinstance(select, SelectRows) and isinstance(norm, Norm) and isinstance(head, Linear)
    assert head.parts[0].out.width == VOCAB
    every = replace(norm, src=select.src, add=select.add, out=Buffer("normed", HIDDEN))
    assert bound.ops[-2:] == (HiddenStep(every.out), every), "and the same norm of all rows, for embeddings"
    assert len(bound.kv_layers) == LAYERS and not bound.takes and not bound.gives
    assert [op.layer for op in bound.ops if isinstance(op, Attention)] == [0, 1, 2]
    assert set(bound.weights) == set(tensors())


def test_q_k_and_v_share_their_input() -> None:
    linears = [op for op in bind(LLAMA, CONFIG, tensors()).ops if isinstance(op, Linear)]
    assert [part.out.name for part in linears[0].parts] == ["q", "k", "v"]
    assert [part.out.name for part in linears[2].parts] == ["gate", "up"]


def test_a_missing_head_reads_the_embedding_table() -> None:
    bound = bind(LLAMA, CONFIG, tensors(head=False))
    assert bound.config.tied_head
    assert before_hidden(bound.ops)[-1].parts[0].weight.name == "token_embd.weight"  # type: ignore[union-attr]
    assert not bind(LLAMA, CONFIG, tensors()).config.tied_head


# ----------------------------------------------------------------------------------------------------------- shapes


@pytest.mark.parametrize("name", sorted(tensors()))
def test_a_missing_or_misshapen_tensor_is_named_with_both_shapes(name: str) -> None:
    given = tensors()
    right = given[name]
    del given[name]
    if name != "output.weight":  # without it the head is tied
        with pytest.raises(InvalidModelFile, match="is missing") as caught:
            bind(LLAMA, CONFIG, given)
        assert caught.value.where == name
    given[name] = view(name, np.zeros((right.rows + 1, right.cols)))
    with pytest.raises(InvalidModelFile) as caught:
        bind(LLAMA, CONFIG, given)
    needed = f"[{right.cols}]" if right.rows == 1 else f"[{right.rows}, {right.cols}]"
    assert caught.value.where == name
    assert f"[{right.rows + 1}, {right.cols}]" in caught.value.message and needed in caught.value.message


@pytest.mark.parametrize(
    "extra", ["blk.1.attn_q_norm.weight", "blk.2.ffn_gate_exps.weight", "blk.0.attn_q.scale", "embd_norm.weight"]
)
def test_a_tensor_that_nobody_asked_for_is_refused_by_name(extra: str) -> None:
    with pytest.raises(InvalidModelFile, match=extra):
        bind(LLAMA, CONFIG, tensors() | {extra: view(extra, np.ones(HIDDEN))})


def test_known_ballast_is_ignored() -> None:
    extra = "blk.0.attn_rot_embd.weight"
    assert extra not in bind(LLAMA, CONFIG, tensors() | {extra: view(extra, np.ones(4))}).weights


# --------------------------------------------------------------------------------------------------- optional parts


def test_biases_are_used_where_the_file_has_them() -> None:
    given = tensors()
    plain = run(bind(LLAMA, CONFIG, given))["logits"]
    for role, width in (("attn_q", Q), ("attn_output", HIDDEN), ("ffn_down", HIDDEN), ("ffn_gate", WIDTH)):
        name = f"blk.1.{role}.bias"
        bound = bind(LLAMA, CONFIG, given | {name: view(name, np.ones(width))})
        assert name in bound.weights
        assert np.abs(run(bound)["logits"] - plain).max() > 1e-3


def test_a_fused_qkv_equals_its_three_parts() -> None:
    given = tensors()
    bias = np.linspace(-1, 1, Q + 2 * KV)
    apart, fused = dict(given), dict(given)
    start = 0
    for role, width in (("attn_q", Q), ("attn_k", KV), ("attn_v", KV)):
        name = f"blk.0.{role}.bias"
        apart[name] = view(name, bias[start : start + width])
        del fused[f"blk.0.{role}.weight"]
        start += width
    stacked = np.concatenate([dense(given[f"blk.0.{role}.weight"]) for role in ("attn_q", "attn_k", "attn_v")])
    fused["blk.0.attn_qkv.weight"] = view("blk.0.attn_qkv.weight", stacked)
    fused["blk.0.attn_qkv.bias"] = view("blk.0.attn_qkv.bias", bias)
    bound = bind(LLAMA, CONFIG, fused)
    assert f"blk.0.attn_qkv.weight[{Q}:{Q + KV}]" in bound.weights
    assert np.array_equal(run(bound)["logits"], run(bind(LLAMA, CONFIG, apart))["logits"])


def test_the_rope_factor_tensor_divides_the_frequencies() -> None:
    factors = np.array([1, 2, 4, 8], np.float32)
    bound = bind(LLAMA, CONFIG, tensors() | {"rope_freqs.weight": view("rope_freqs.weight", factors)})
    plain = resolve_rope(CONFIG.rope).frequencies
    ropes = [op.rope for op in bound.ops if isinstance(op, RopeStore)]
    assert [rope and rope.frequencies for rope in ropes] == [pytest.approx(np.array(plain) / factors)] * LAYERS


@pytest.mark.parametrize("bad", [np.array([1, 2, 0, 8]), np.array([1, np.nan, 4, 8]), np.array([1, 2, 4, np.inf])])
def test_bad_rope_factors_are_refused(bad: np.ndarray) -> None:
    with pytest.raises(InvalidModelFile, match=r"rope_freqs.weight"):
        bind(LLAMA, CONFIG, tensors() | {"rope_freqs.weight": view("rope_freqs.weight", bad)})


def test_a_window_reaches_the_op_and_hides_old_keys() -> None:
    windowed = LLAMA.config_from(METADATA | {"llama.attention.sliding_window": 2})
    bound = bind(LLAMA, windowed, tensors())
    assert {op.window for op in bound.ops if isinstance(op, Attention)} == {2}
    seen, plain = run(bound)["logits"], run(bind(LLAMA, CONFIG, tensors()))["logits"]
    assert np.array_equal(seen[:2], plain[:2])
    assert np.abs(seen[2:] - plain[2:]).max() > 1e-3


# ----------------------------------------------------------------------------------------- ranks with part of a model


@pytest.mark.parametrize("cut", [1, 2])
def test_a_rank_builds_exactly_the_layers_that_it_runs(cut: int) -> None:
    """Rule 3. The other layers' tensors are not even there."""
    whole = tensors()
    for layers in (range(cut), range(cut, LAYERS)):
        own = {n: t for n, t in whole.items() if not n.startswith("blk.") or int(n.split(".")[1]) in layers}
        bound = bind_part(LLAMA, CONFIG, own, layers)
        blocks = {int(name.split(".")[1]) for name in bound.weights if name.startswith("blk.")}
        assert blocks == set(layers)
        assert len(bound.kv_layers) == len(layers)
        assert isinstance(bound.ops[0], EmbedRows) == (layers.start == 0)
        assert ("output.weight" in bound.weights) == (layers.stop == LAYERS)


@pytest.mark.parametrize("cut", [1, 2])
def test_two_ranks_give_the_whole_models_logits_bit_for_bit(cut: int) -> None:
    whole = run(bind(LLAMA, CONFIG, tensors()))["logits"]
    first = bind_part(LLAMA, CONFIG, tensors(), range(cut))
    second = bind_part(LLAMA, CONFIG, tensors(), range(cut, LAYERS))
    assert first.gives == second.takes and [buffer.name for buffer in first.gives] == ["x", "update"]
    left = run(first)
    handed = {buffer.name: left[buffer.name] for buffer in first.gives}
    assert np.array_equal(run(second, given=handed)["logits"], whole)
    # The receiver adds the update once: were it added before the handoff as well, the logits would tell.
    doubled = handed | {"x": handed["x"] + handed["update"]}
    assert np.abs(run(second, given=doubled)["logits"] - whole).max() > 1e-2


# ------------------------------------------------------------------------------------------------------ conformance


def layer_ops(bound: Bound) -> dict[int, list[Op]]:
    """The ops of each layer: from one attention norm to the next."""
    starts = [i for i, op in enumerate(bound.ops) if isinstance(op, Norm) and "attn_norm" in op.weight.name]
    ends = [*starts[1:], len(before_hidden(bound.ops)) - 3]
    return {layer: list(bound.ops[a:b]) for layer, (a, b) in enumerate(zip(starts, ends, strict=True))}


def declared(config: ModelConfig) -> dict[int, Any]:
    return {layer: LLAMA.stage_facts(config, layer) for layer in range(LAYERS)}


Change = Callable[[Op], Op]


@pytest.mark.parametrize(
    ("kind", "change", "said"),
    [
        (Attention, lambda op: replace(op, window=7), "window is declared 0, built 7"),
        (Attention, lambda op: replace(op, scale=1.0), "scale is declared 0.35"),
        (Attention, lambda op: replace(op, kv_heads=1), "kv_heads is declared 2, built 1"),
        (RopeStore, lambda op: replace(op, rope=None), "rope is declared rope(interleaved, 4 pairs"),
        (Norm, lambda op: replace(op, eps=1e-6), "eps is declared 1e-05, built 1e-06"),
    ],
)
def test_a_layer_that_differs_from_its_declaration_is_named(kind: type, change: Change, said: str) -> None:
    """Rule 4: the layer, the stage and the field with both values."""
    bound = bind(LLAMA, CONFIG, tensors())
    config = settle(CONFIG, tensors())
    built = layer_ops(bound)
    check_layers(declared(config), built, resolve_rope, KV_INDEX)
    index = next(i for i, op in enumerate(built[1]) if isinstance(op, kind))
    built[1][index] = change(built[1][index])
    with pytest.raises(DeclarationMismatch) as caught:
        check_layers(declared(config), built, resolve_rope, KV_INDEX)
    message = str(caught.value)
    assert message.startswith("layer 1, stage 0 (attention): ") and said in message


def test_every_differing_field_is_named() -> None:
    bound = bind(LLAMA, CONFIG, tensors())
    built = layer_ops(bound)
    built[2] = [replace(op, window=3, scale=2.0) if isinstance(op, Attention) else op for op in built[2]]
    with pytest.raises(DeclarationMismatch, match=r"scale is declared .*; window is declared 0, built 3"):
        check_layers(declared(bound.config), built, resolve_rope, KV_INDEX)


def test_a_stage_too_few_and_a_layer_too_few_are_named() -> None:
    bound = bind(LLAMA, CONFIG, tensors())
    built = layer_ops(bound)
    half = built | {1: built[1][:5]}
    with pytest.raises(DeclarationMismatch, match="layer 1 declares attention and dense, attention was built"):
        check_layers(declared(bound.config), half, resolve_rope, KV_INDEX)
    with pytest.raises(DeclarationMismatch, match=r"layers \[0, 1, 2\] were declared, \[0, 1\] were built"):
        check_layers(declared(bound.config), {0: built[0], 1: built[1]}, resolve_rope, KV_INDEX)


def test_a_doubled_residual_add_changes_the_output_and_is_refused() -> None:
    """A sum taken twice must show, or no test of sums means anything; and the builder's check finds it first."""
    bound = bind(LLAMA, CONFIG, tensors())
    right = run(bound)["logits"]
    for index, op in enumerate(before_hidden(bound.ops)):
        if not isinstance(op, Norm) or op.add is None:
            continue
        doubled = (*bound.ops[: index + 1], op, *bound.ops[index + 1 :])
        assert np.abs(run(bound, doubled)["logits"] - right).max() > 1e-2, f"op {index} added twice goes unnoticed"
        with pytest.raises(DeclarationMismatch, match="nobody owes"):
            check_updates(doubled, owed=False, handed_on=False)
        left_out = (*bound.ops[:index], replace(op, add=None), *bound.ops[index + 1 :])
        assert np.abs(run(bound, left_out)["logits"] - right).max() > 1e-2
        with pytest.raises(DeclarationMismatch, match="one is owed"):
            check_updates(left_out, owed=False, handed_on=False)


def test_an_update_that_nobody_adds_is_refused() -> None:
    ops = before_hidden(bind(LLAMA, CONFIG, tensors()).ops)
    with pytest.raises(DeclarationMismatch, match="owed at the end"):
        check_updates(ops[:-3], owed=False, handed_on=False)
    check_updates(ops[:-3], owed=False, handed_on=True)


# ------------------------------------------------------------------------------------------------------- capability


def test_every_missing_entry_is_named_not_the_first() -> None:
    given = tensors()
    for name in ("blk.0.attn_q.weight", "blk.1.ffn_norm.weight"):
        old = given[name]
        size = old.rows * old.cols
        given[name] = TensorView(name, QuantType.I8, old.rows, old.cols, np.zeros(size, np.uint8))
    bound = bind(LLAMA, CONFIG, given)
    with pytest.raises(Unsupported) as caught:
        program(bound.ops, bound.weights, bound)
    assert [(entry.op, entry.type) for entry in caught.value.missing] == [("Linear", "I8"), ("Norm", "I8")]
