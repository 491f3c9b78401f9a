"""Shards of every stage kind: each element of each tensor is held once or by everybody, and cuts respect blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.base import TensorView
from homeserve import checkpoint
from homeserve.errors import SettingError, UnsupportedModel
from homeserve.layouts.partition import Run
from homeserve.layouts.shards import (
    Piece,
    Split,
    TensorForm,
    along,
    by_columns,
    by_rows,
    check_cover,
    copied,
    held_bytes,
    once,
)
from homeserve.models import registry
from homeserve.models.config import settle
from homeserve.models.stage_shards import LayerShards, layer_shards, model_shards
from homeserve.models.stages import Attention, Dense, Experts, GatedDeltaNet, Read, SharedExpert, Stage, TokenInput

few = settings(max_examples=20, deadline=None)
VECTORS = ((2, 1, 1), (30, 17, 17), (28, 26, 20))
vectors = st.one_of(st.sampled_from(VECTORS), st.lists(st.integers(1, 9), min_size=1, max_size=4).map(tuple))
HIDDEN = 256
READ = Read(1e-6)
Forms = dict[str, TensorForm]

BLOCKS = {1: 4, 32: 18, 64: 36, 256: 144}


def form(rows: int, cols: int, block: int = 1) -> TensorForm:
    return TensorForm(rows, cols, block, BLOCKS[block])


def covered(stages: Sequence[Stage], present: Forms, vector: tuple[int, ...]) -> LayerShards:
    found = layer_shards(stages, present, vector)
    assert set(found.splits) == set(present)
    for role, split in found.splits.items():
        check_cover(present[role], split)
    return found


def sizes(split: Split) -> list[tuple[int, int]]:
    """Rows and columns of each rank's first piece."""
    return [(pieces[0].height, pieces[0].width) if pieces else (0, 0) for pieces in split]


# ----------------------------------------------------------------------------------------------------------- attention


def attention_forms(stage: Attention, block: int, fused: bool) -> Forms:
    q, kv, out = stage.heads * stage.q_step, stage.kv_heads * stage.head_dim, stage.heads * stage.head_dim
    found = {"attn_norm": form(1, HIDDEN), "attn_q_norm": form(1, stage.head_dim), "attn_sinks": form(1, stage.heads)}
    found |= {"attn_output": form(HIDDEN, out, block), "attn_output.bias": form(1, HIDDEN)}
    if stage.kv_source is not None:
        return found | {"attn_q": form(q, HIDDEN, block)}
    if fused:
        return found | {"attn_qkv": form(q + 2 * kv, HIDDEN, block), "attn_qkv.bias": form(1, q + 2 * kv)}
    for role, rows in (("attn_q", q), ("attn_k", kv), ("attn_v", kv)):
        found |= {role: form(rows, HIDDEN, block), f"{role}.bias": form(1, rows)}
    return found


@few
@given(st.data(), vectors)
def test_attention_is_covered_once(data: st.DataObject, vector: tuple[int, ...]) -> None:
    kv_heads = data.draw(st.integers(1, 6))
    heads = kv_heads * data.draw(st.integers(1, 4))
    stage = Attention(heads, kv_heads, 64, 1.0, READ, gated=data.draw(st.booleans()))
    if data.draw(st.booleans()):
        stage = replace(stage, kv_source=3)
    block = data.draw(st.sampled_from([block for block in BLOCKS if heads * 64 % block == 0]))
    present = attention_forms(stage, block, data.draw(st.booleans()))
    if len(vector) > heads:
        with pytest.raises(SettingError, match="query heads"):
            layer_shards([stage], present, vector)
        return
    covered([stage], present, vector)


@pytest.mark.parametrize(
    ("vector", "heads"), list(zip(VECTORS, ((12, 6, 6), (11, 7, 6), (9, 8, 7)), strict=True)), ids=str
)
def test_query_rows_and_output_columns_follow_the_same_heads(vector: tuple[int, ...], heads: tuple[int, ...]) -> None:
    """24 query heads and 4 KV heads of 256, with a gate: q has twice the rows."""
    stage = Attention(24, 4, 256, 1.0, READ, gated=True)
    found = covered([stage], attention_forms(stage, 256, False), vector)
    assert sizes(found.splits["attn_q"]) == [(512 * own, HIDDEN) for own in heads]
    assert sizes(found.splits["attn_output"]) == [(HIDDEN, 256 * own) for own in heads]
    assert sizes(found.splits["attn_k"]) == [(256 * own, HIDDEN) for own in (2, 1, 1)]
    assert [len(pieces) for pieces in found.splits["attn_output.bias"]] == [1, 0, 0]


def test_one_kv_head_is_copied_and_its_queries_are_split() -> None:
    stage = Attention(4, 1, 256, 1.0, READ)
    found = covered([stage], attention_forms(stage, 1, False), (2, 1, 1))
    assert all(piece.copied for pieces in found.splits["attn_k"] for piece in pieces)
    assert sizes(found.splits["attn_q"]) == [(512, HIDDEN), (256, HIDDEN), (256, HIDDEN)]
    present = attention_forms(stage, 1, False)["attn_k"]
    assert held_bytes(present, found.splits["attn_k"]) == (present.nbytes,) * 3


def test_a_fused_projection_is_cut_at_each_of_its_parts() -> None:
    stage = Attention(4, 2, 64, 1.0, READ)
    found = covered([stage], attention_forms(stage, 1, True), (1, 1))
    assert found.splits["attn_qkv"][1] == (
        Piece((Run(128, 256),), (Run(0, HIDDEN),)),
        Piece((Run(320, 384), Run(448, 512)), (Run(0, HIDDEN),)),
    )


# ----------------------------------------------------------------------------------------------------------- delta net


def delta_forms(stage: GatedDeltaNet, block: int, fused: bool) -> Forms:
    values, step = stage.value_heads * stage.value_dim, stage.channels + stage.value_heads * stage.value_dim
    found = {"attn_norm": form(1, HIDDEN), "ssm_norm": form(1, stage.value_dim)}
    found |= {"ssm_out": form(HIDDEN, values, block), "ssm_conv1d": form(stage.channels, stage.kernel)}
    found |= {role: form(1, stage.value_heads) for role in ("ssm_dt", "ssm_a")}
    if fused:
        return found | {"ssm_in": form(step, HIDDEN, block), "ssm_ba": form(2 * stage.value_heads, HIDDEN)}
    found |= {"attn_qkv": form(stage.channels, HIDDEN, block), "attn_gate": form(values, HIDDEN, block)}
    return found | {role: form(stage.value_heads, HIDDEN) for role in ("ssm_beta", "ssm_alpha")}


@few
@given(st.data(), vectors)
def test_delta_nets_are_covered_once(data: st.DataObject, vector: tuple[int, ...]) -> None:
    keys, share = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 3))
    stage = GatedDeltaNet(keys, keys * share, 32, 64, 4, READ, tiled=data.draw(st.booleans()))
    fitting = [block for block in BLOCKS if stage.value_heads * 64 % block == 0]
    present = delta_forms(stage, data.draw(st.sampled_from(fitting)), data.draw(st.booleans()))
    found = covered([stage], present, vector)
    assert found.state is not None
    for runs, whole in ((found.state.channels, stage.channels), (found.state.heads, stage.value_heads)):
        every = sorted(thing for own in runs for run in own for thing in range(run.first, run.end))
        assert every == list(range(whole))
    (keys,) = found.partitions
    for own, heads in zip(keys.runs, found.state.heads, strict=True):  # each value head lies with its key head
        every = [head for run in heads for head in range(run.first, run.end)]
        assert {head % stage.key_heads if stage.tiled else head // share for head in every} == set(
            range(own.first, own.end)
        )
    out = [[run for piece in pieces for run in piece.cols] for pieces in found.splits["ssm_out"]]
    assert out == [[run.times(64) for run in heads] for heads in found.state.heads]


def test_value_heads_of_a_tiled_order_are_one_run_in_each_tile() -> None:
    """Key heads 2 and 3 of 4 have value heads 2 and 3 in the first tile, 6 and 7 in the second."""
    tiled = GatedDeltaNet(4, 8, 32, 64, 4, READ, tiled=True)
    grouped = replace(tiled, tiled=False)
    present = delta_forms(tiled, 1, False)
    assert covered([tiled], present, (1, 1)).splits["ssm_a"][1] == (Piece((Run(0, 1),), (Run(2, 4), Run(6, 8))),)
    assert covered([grouped], present, (1, 1)).splits["ssm_a"][1] == (Piece((Run(0, 1),), (Run(4, 8),)),)


def test_g3_the_convolution_is_cut_in_each_of_q_k_and_v() -> None:
    stage = GatedDeltaNet(16, 48, 128, 128, 4, READ, tiled=True)
    found = covered([stage], delta_forms(stage, 256, False), (30, 17, 17))
    (first,) = found.splits["ssm_conv1d"][0]
    assert first.rows[:3] == (Run(0, 1024), Run(2048, 3072), Run(4096, 5120))
    assert [pieces[0].height for pieces in found.splits["ssm_conv1d"]] == [5120, 2560, 2560]
    assert [pieces[0].width for pieces in found.splits["ssm_dt"]] == [24, 12, 12]


# ------------------------------------------------------------------------------------------------------- feed-forwards


def dense_forms(width: int, block: int) -> Forms:
    found = {f"ffn_{role}": form(width, HIDDEN, block) for role in ("gate", "up")}
    found |= {"ffn_gate.bias": form(1, width), "ffn_down.bias": form(1, HIDDEN), "ffn_norm": form(1, HIDDEN)}
    return found | {"ffn_down": form(HIDDEN, width, block)}


@few
@given(st.integers(1, 12), st.sampled_from(tuple(BLOCKS)), vectors)
def test_a_dense_stage_is_covered_once(units: int, block: int, vector: tuple[int, ...]) -> None:
    found = covered([Dense(units * block, READ)], dense_forms(units * block, block), vector)
    gates = [[run for piece in pieces for run in piece.rows] for pieces in found.splits["ffn_gate"]]
    assert gates == [[run for piece in pieces for run in piece.cols] for pieces in found.splits["ffn_down"]]


def expert_forms(stage: Experts, block: int, fused: bool) -> Forms:
    count, width = stage.count, stage.width
    found = {"ffn_gate_inp": form(count, HIDDEN), "ffn_gate_inp.bias": form(1, count), "ffn_norm": form(1, HIDDEN)}
    found |= {"ffn_down_exps": form(count * HIDDEN, width, block), "ffn_down_exps.bias": form(count, HIDDEN)}
    inner = {"ffn_gate_up_exps": 2 * width} if fused else {"ffn_gate_exps": width, "ffn_up_exps": width}
    for role, rows in inner.items():
        found |= {role: form(count * rows, HIDDEN, block), f"{role}.bias": form(count, rows)}
    if stage.shared is not None:
        shared = stage.shared.width
        found |= {f"ffn_{role}_shexp": form(shared, HIDDEN, block) for role in ("gate", "up")}
        found |= {"ffn_down_shexp": form(HIDDEN, shared, block), "ffn_gate_inp_shexp": form(1, HIDDEN)}
    return found


@few
@given(st.data(), vectors)
def test_experts_are_covered_once(data: st.DataObject, vector: tuple[int, ...]) -> None:
    block = data.draw(st.sampled_from((1, 32)))
    shared = SharedExpert(64, gated=True) if data.draw(st.booleans()) else None
    stage = Experts(data.draw(st.integers(2, 6)), 2, block * data.draw(st.integers(1, 10)), READ, shared=shared)
    covered([stage], expert_forms(stage, block, data.draw(st.booleans())), vector)


@pytest.mark.parametrize(
    ("vector", "counts"), list(zip(VECTORS, ((8, 4, 4), (8, 4, 4), (6, 6, 4)), strict=True)), ids=str
)
def test_experts_of_few_blocks_are_dealt_out_whole(vector: tuple[int, ...], counts: tuple[int, ...]) -> None:
    """Sixteen experts of 512 columns: two blocks of 256 each."""
    stage = Experts(16, 2, 512, READ)
    found = covered([stage], expert_forms(stage, 256, False), vector)
    assert sizes(found.splits["ffn_gate_exps"]) == [(512 * own, HIDDEN) for own in counts]
    assert sizes(found.splits["ffn_down_exps"]) == [(HIDDEN * own, 512) for own in counts]
    assert sizes(found.splits["ffn_gate_inp"]) == [(16, HIDDEN)] * 3


def test_experts_of_many_blocks_are_cut_by_columns() -> None:
    """Ninety blocks of 32: every rank has a part of each expert, and its bias of the sum is added once."""
    stage = Experts(4, 2, 2880, READ)
    found = covered([stage], expert_forms(stage, 32, True), (2, 1))
    assert sizes(found.splits["ffn_down_exps"]) == [(4 * HIDDEN, 1920), (4 * HIDDEN, 960)]
    assert sizes(found.splits["ffn_gate_up_exps"]) == [(8 * 1920, HIDDEN), (8 * 960, HIDDEN)]
    assert [len(pieces) for pieces in found.splits["ffn_down_exps.bias"]] == [1, 0]


def test_an_input_by_token_is_whole_on_every_rank_but_for_its_table() -> None:
    present = {"inp_gate": form(64, HIDDEN), "proj": form(HIDDEN, 64), "token_post_norm": form(1, HIDDEN)}
    found = covered([TokenInput(64, 640, 0, 1e-6, READ)], present, (3, 1))
    assert all(piece.copied for split in found.splits.values() for pieces in split for piece in pieces)
    assert sizes(found.splits["proj"]) == [(HIDDEN, 64)] * 2
    beside = {"per_layer_token_embd.weight": form(192, 640), "per_layer_model_proj.weight": form(640, HIDDEN)}
    table, projection = model_shards(beside, (2, 1)).values()
    assert sizes(table) == [(128, 640), (64, 640)]
    assert all(piece.copied for pieces in projection for piece in pieces)


def test_a_matrix_of_one_row_is_no_vector() -> None:
    """One value head: its row of beta is held whole by one rank, its decay is one number."""
    stage = GatedDeltaNet(1, 1, 32, 64, 4, READ)
    found = covered([stage], delta_forms(stage, 1, False), (1, 1))
    assert sizes(found.splits["ssm_beta"]) == [(1, HIDDEN), (0, 0)]
    assert sizes(found.splits["ssm_dt"]) == [(1, 1), (0, 0)]


def test_a_weight_vector_with_a_zero_is_refused() -> None:
    with pytest.raises(SettingError, match="weight_vector 2,0: rank 1 has 0 of 2 parts"):
        layer_shards([Dense(64, READ)], dense_forms(64, 1), (2, 0))
    with pytest.raises(SettingError, match="weight_vector"):
        model_shards({}, ())


def test_a_tensor_that_no_stage_divides_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="how to divide odd"):
        layer_shards([Dense(64, READ)], dense_forms(64, 1) | {"odd": form(1, 1)}, (1, 1))
    with pytest.raises(UnsupportedModel, match=r"how to divide odd\.weight"):
        model_shards({"odd.weight": form(1, 1)}, (1, 1))
    with pytest.raises(UnsupportedModel, match="ffn_down is missing"):
        layer_shards([Dense(64, READ)], {}, (1, 1))


# ----------------------------------------------------------------------------------------------------------- vocabulary


@few
@given(st.integers(1, 700), vectors)
def test_head_and_embedding_are_cut_by_rows_of_the_vocabulary(vocab: int, vector: tuple[int, ...]) -> None:
    present = {"token_embd.weight": form(vocab, HIDDEN, 256), "output.weight": form(vocab, HIDDEN, 32)}
    present |= {"output.bias": form(1, vocab), "output_norm.weight": form(1, HIDDEN)}
    found = model_shards(present, vector)
    assert set(found) == set(present)
    for name, split in found.items():
        check_cover(present[name], split)
    rows = [pieces[0].height if pieces else 0 for pieces in found["output.weight"]]
    assert rows == [pieces[0].width if pieces else 0 for pieces in found["output.bias"]]


# -------------------------------------------------------------------------------------------------------- real families


TINY = Path(__file__).parent.parent / "data/tiny"
FAMILIES = (
    "gemma3_text",
    "gpt_oss",
    "llama",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_moe",
    "qwen3_5_text_mtp",
    "qwen3_next_mtp",
)


def forms(tensors: Mapping[str, TensorView]) -> Mapping[str, TensorForm]:
    return {
        name: TensorForm(view.rows, view.cols, view.type.block_len, view.type.row_bytes(view.type.block_len))
        for name, view in tensors.items()
    }


def own_and_shared(present: Mapping[str, TensorForm], splits: Mapping[str, Split]) -> tuple[int, int]:
    """Bytes that one rank alone holds, over all ranks, and bytes that each has a copy of."""
    own = shared = 0
    for role, split in splits.items():
        own += sum(piece.nbytes(present[role]) for pieces in split for piece in pieces if not piece.copied)
        shared += sum(piece.nbytes(present[role]) for piece in split[0] if piece.copied)
    return own, shared


@pytest.mark.parametrize("name", FAMILIES)
def test_every_byte_of_a_checkpoint_is_held_once_or_copied(name: str) -> None:
    opened = checkpoint.open(str(TINY / f"{name}.f32.gguf"))
    family = registry.family(opened.arch)
    config = settle(family.config_from(opened.metadata), opened.tensors.keys())
    every = forms(opened.tensors)
    opened.close()
    stages = [family.stage_facts(config, layer) for layer in range(config.layers)]
    if family.nextn_facts is not None:
        stages += [family.nextn_facts(config, index) for index in range(config.nextn)]
    ranks = min([3, *(stage.heads for layer in stages for stage in layer if isinstance(stage, Attention))])
    for vector in VECTORS:
        total, left = 0, dict(every)
        for layer, facts in enumerate(stages):
            names = {of: role for role, of in family.tensor_names(config, layer).items() if of in every}
            present = {role: left.pop(of) for of, role in names.items()}
            own, shared = own_and_shared(present, covered(facts, present, vector[:ranks]).splits)
            assert own > 3 * shared
            total += own + shared
        beside = model_shards(left, vector[:ranks])
        for of, split in beside.items():
            check_cover(left[of], split)
        assert total + sum(own_and_shared(left, beside)) == sum(form.nbytes for form in every.values())


# ------------------------------------------------------------------------------------------------------------ the check


def test_the_check_sees_a_hole_an_overlap_a_missing_copy_and_half_a_block() -> None:
    matrix = form(8, 64, 32)
    with pytest.raises(ValueError, match=r"row 4, column 0 of 8 x 64 is held 0 times"):
        check_cover(matrix, by_rows(matrix, [[Run(0, 4)], [Run(5, 8)]]))
    with pytest.raises(ValueError, match=r"row 4, column 0 of 8 x 64 is held 2 times"):
        check_cover(matrix, by_rows(matrix, [[Run(0, 5)], [Run(4, 8)]]))
    with pytest.raises(ValueError, match="another rank lacks"):
        check_cover(matrix, (copied(matrix, 2)[0], ()))
    with pytest.raises(ValueError, match="no whole number of blocks of 32"):
        check_cover(matrix, by_columns(matrix, [[Run(0, 16)], [Run(16, 64)]]))
    with pytest.raises(ValueError, match="reaches from 0 to 9"):
        check_cover(matrix, by_rows(matrix, [[Run(0, 9)], []]))


def test_what_is_held_is_counted_with_copies() -> None:
    vector = form(1, 100)
    assert held_bytes(vector, copied(vector, 3)) == (400, 400, 400)
    assert held_bytes(vector, once(vector, 1, 3)) == (0, 400, 0)
    assert held_bytes(vector, along(vector, [[Run(0, 60)], [], [Run(60, 100)]], vector=True)) == (240, 0, 160)
