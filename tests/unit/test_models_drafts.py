"""A drafting block as it is bound: on one rank, on the last of a pipeline, on every rank that has a part of each layer;
and what keeps a model from drafting, by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import families_rig as rig
import numpy as np
import pytest

from backends.base import (
    Attention,
    Batch,
    Buffer,
    DraftStep,
    EmbedRows,
    HiddenStep,
    JoinHidden,
    Limits,
    Linear,
    Norm,
    Op,
    OpenOptions,
    RopeStore,
    SelectRows,
    StateLayer,
    StatePart,
    StatePool,
    SumRows,
    TensorView,
    Zero,
)
from backends.quant import QuantType
from backends.reference.backend import ReferenceBackend
from homeserve.errors import InvalidModelFile, UnsupportedModel
from homeserve.layouts.partition import Run
from homeserve.layouts.shards import TensorForm, check_cover
from homeserve.layouts.share import Share
from homeserve.models import bind as binding
from homeserve.models.bind import Bound, bind, why_no_drafts
from homeserve.models.conform import DeclarationMismatch, before_hidden, check_updates
from homeserve.models.conform_drafts import check_fill, check_step
from homeserve.models.conform_sums import check_exchanges, check_sums, exchanges
from homeserve.models.dividing import divided
from homeserve.models.stage_shards import layer_shards

HYBRIDS = ("qwen35", "qwen35moe", "qwen3next")
STACK = rig.STACKS["three, nextn"]
VECTOR = (2, 1, 1)
HIDDEN, VOCAB = rig.HIDDEN, rig.VOCAB


def bound(arch: str = "qwen35", share: Share | None = None, **changes: TensorView | None) -> Bound:
    family, config, tensors = rig.made(arch, STACK)
    return bind(family, config, with_changes(tensors, changes), share, drafts=True)


def with_changes(tensors: rig.Tensors, changes: dict[str, TensorView | None]) -> rig.Tensors:
    """`__` in a name stands for a dot; None takes a tensor away."""
    named = {name.replace("__", "."): view for name, view in changes.items()}
    return {name: view for name, view in (tensors | named).items() if view is not None}


def view(name: str, rows: int, cols: int, seed: int = 0) -> TensorView:
    values = np.random.default_rng(seed).standard_normal((rows, cols)).astype(np.float32)
    return TensorView(name, QuantType.F32, rows, cols, np.frombuffer(values.tobytes(), np.uint8))


def lists(ops: Sequence[Op]) -> tuple[list[Op], list[Op]]:
    """The ops of a run, and those of a step of drafting."""
    ops = before_hidden(ops)
    at = next((index for index, op in enumerate(ops) if isinstance(op, DraftStep)), len(ops))
    return list(ops[:at]), list(ops[at + 1 :])


def of(kind: type, ops: Sequence[Op]) -> list[Any]:
    return [op for op in ops if isinstance(op, kind)]


# -------------------------------------------------------------------------------------------------- what is bound where


@pytest.mark.parametrize("arch", HYBRIDS)
def test_one_rank_fills_the_block_and_has_a_step_of_drafting(arch: str) -> None:
    plain = bind(*rig.made(arch, STACK))
    drafts = bound(arch)
    assert (plain.drafts, plain.drafting_block, drafts.drafts, drafts.drafting_block) == (False, False, True, True)
    run, step = lists(drafts.ops)
    end = next(at for at, op in enumerate(plain.ops) if isinstance(op, SelectRows))
    assert run[:end] == list(plain.ops[:end]), "the trunk is the same"
    behind = of(Norm, before_hidden(plain.ops))[-1]
    assert run[end] == replace(behind, src=Buffer("x", HIDDEN), add=Buffer("update", HIDDEN))
    assert [type(op) for op in run[end + 1 :]] == [
        *(EmbedRows, Norm, Norm, JoinHidden, Linear, Norm, Linear, RopeStore),
        *(SelectRows, Linear),
    ]
    store, last = of(RopeStore, run)[-1], len(drafts.kv_layers) - 1
    assert (store.heads, store.q.width, store.layer) == (0, 0, last) and len(of(Attention, run)) == last
    assert len(of(Attention, step)) == 1 and of(Attention, step)[0].layer == last and not of(SelectRows, step)
    assert drafts.kv_layers == (*plain.kv_layers, plain.kv_layers[0]) and drafts.kv_places == (0, 1)
    assert drafts.state_layers == (*plain.state_layers, StateLayer(HIDDEN, 2, 0, 0, 0))
    assert drafts.state_parts == (*plain.state_parts, StatePart(2))
    join, chained = (of(JoinHidden, ops)[0] for ops in (run, step))
    assert (join.layer, join.first, join.end, join.chained) == (2, 0, HIDDEN, False)
    assert chained == replace(join, right=Buffer("draft_hidden", HIDDEN), chained=True)
    assert step[-1].parts[0].out == Buffer("logits", VOCAB)
    block = {name for name in drafts.weights if name.startswith("blk.3.")}
    assert block == {name for name in rig.made(arch, STACK)[2] if name.startswith("blk.3.")}


def test_the_last_rank_of_a_pipeline_fills_the_block_and_does_not_draft() -> None:
    ranges = [(0, 1), (1, 3)]
    first, last = (bound("qwen35", Share.pipeline(rank, ranges)) for rank in (0, 1))
    plain = bind(*rig.made("qwen35", STACK), Share.pipeline(0, ranges))
    assert first.ops == plain.ops and not first.drafting_block and first.kv_places == ()
    assert last.drafting_block and not last.drafts and last.samples
    assert last.kv_places == (0, 1) and last.state_parts == (StatePart(1), StatePart(2))
    run, step = lists(last.ops)
    assert not step and [*run, HiddenStep(Buffer("final", HIDDEN))] == list(last.ops)
    whole, _ = lists(bound().ops)
    start = next(at for at, op in enumerate(whole) if isinstance(op, SelectRows))
    assert rig.shown(tuple(run[-2:])) == rig.shown(tuple(whole[start : start + 2]))
    assert last.weights["token_embd.weight"].rows == VOCAB, "it looks up its rows itself"
    assert last.embedding_ranks == (0,) and not last.embeds, "and nobody tells it what it has drawn"
    assert "blk.3.attn_q.weight" not in last.weights and "blk.3.attn_k.weight" in last.weights


def test_one_rank_in_the_pipeline_layout_drafts() -> None:
    alone = bound("qwen35", Share.pipeline(0, [(0, 3)]))
    assert alone.drafts and alone.ops == bound().ops
    assert bound("qwen35", Share.tensor(0, (1,))).ops == bound().ops


@pytest.mark.parametrize("arch", HYBRIDS)
def test_every_rank_of_the_tensor_layout_has_its_part(arch: str) -> None:
    ranks = [bound(arch, Share.tensor(rank, VECTOR)) for rank in range(3)]
    assert all(each.drafts and each.drafting_block and each.kv_places == (0, 1) for each in ranks)
    assert [each.state_layers[-1].channels for each in ranks] == [16, 8, 8]
    assert [each.state_parts[-1] for each in ranks] == [StatePart(2, first) for first in (0, 16, 24)]
    check_exchanges([each.ops for each in ranks])
    joining = rig.made(arch, STACK)[2]["blk.3.nextn.eh_proj.weight"]
    matrix = np.frombuffer(joining.data, np.float32).reshape(HIDDEN, 2 * HIDDEN)
    for each, (first, end) in zip(ranks, ((0, 16), (16, 24), (24, 32)), strict=True):
        own = each.weights[joining.name]
        both = [matrix[:, first:end], matrix[:, HIDDEN + first : HIDDEN + end]]
        found = np.frombuffer(np.array(own.data).tobytes(), np.float32).reshape(own.rows, own.cols)
        assert np.array_equal(found, np.concatenate(both, axis=1))
        for op in of(JoinHidden, each.ops):
            assert (op.first, op.end, op.out.width) == (first, end, 2 * (end - first))
    run, step = (exchanges(each) for each in lists(ranks[0].ops))
    labels = [each[1] for each in (*run, *step)]
    assert len(set(labels)) == len(labels) and all(len(str(label)) <= 31 for label in labels)
    assert all(str(each[1]).startswith("draft ") for each in step) and step[-1][1] == "draft logits"
    assert not any(str(each[1]).startswith("draft ") for each in run)


def test_a_rank_without_columns_adds_zeros_and_keeps_nothing() -> None:
    """A block of 32 is all of a half: one rank has both halves."""
    joining = TensorView("blk.3.nextn.eh_proj.weight", QuantType.Q8_0, HIDDEN, 2 * HIDDEN, np.zeros(0, np.uint8))
    changed = {"blk__3__nextn__eh_proj__weight": joining}
    ranks = [bound("qwen35", Share.tensor(rank, (1, 1)), **changed) for rank in range(2)]
    assert [(op.first, op.end) for op in of(JoinHidden, ranks[0].ops)] == [(0, HIDDEN)] * 2
    assert not of(JoinHidden, ranks[1].ops)
    assert [[layer.heads for layer in each.state_layers] for each in ranks] == [[2, 2, 0], [2, 2]]
    assert [op.out.name for op in of(Zero, ranks[1].ops)].count("x") == 3, "the table of 40 rows is one unit"
    check_exchanges([each.ops for each in ranks])


def test_tables_and_a_head_of_the_block_s_own_are_used_without_a_scale() -> None:
    own = {
        "blk__3__nextn__embed_tokens__weight": view("blk.3.nextn.embed_tokens.weight", VOCAB, HIDDEN, 1),
        "blk__3__nextn__shared_head_head__weight": view("blk.3.nextn.shared_head_head.weight", VOCAB, HIDDEN, 2),
        "blk__3__nextn__shared_head_norm__weight": view("blk.3.nextn.shared_head_norm.weight", 1, HIDDEN, 3),
    }
    for share in (None, Share.tensor(0, (1, 1))):
        run, step = lists(bound("qwen35", share, **own).ops)
        for ops in (run, step):
            assert of(EmbedRows, ops)[-1].table.name == "blk.3.nextn.embed_tokens.weight"
            assert of(EmbedRows, ops)[-1].scale == 1.0
        names = [op.weight.name for op in of(Norm, step)]
        assert names[-2:] == ["blk.3.nextn.shared_head_norm.weight", "blk.3.nextn.hnorm.weight"]
        assert of(Linear, step)[-1].parts[0].weight.name == "blk.3.nextn.shared_head_head.weight"
        assert of(Linear, run)[-1].parts[0].weight.name == "output.weight"
    family, config, tensors = rig.made("qwen35", STACK)
    scaled = bind(family, replace(config, embedding_scale=3.0), tensors, drafts=True)
    assert [op.scale for op in of(EmbedRows, scaled.ops)] == [3.0, 1.0, 1.0]


def test_k_and_v_come_from_their_rows_of_a_fused_tensor() -> None:
    """The logits of a step and the pool are those of three tensors of their own."""
    family, config, tensors = rig.made("qwen35", STACK)
    names = [f"blk.3.attn_{part}.weight" for part in "qkv"]
    rows = np.concatenate([np.frombuffer(tensors[name].data, np.float32).reshape(-1, HIDDEN) for name in names])
    packed = np.frombuffer(rows.tobytes(), np.uint8)
    fused = {name: each for name, each in tensors.items() if name not in names}
    fused["blk.3.attn_qkv.weight"] = TensorView("blk.3.attn_qkv.weight", QuantType.F32, *rows.shape, packed)
    found = []
    for given in (tensors, fused):
        program, batch = running(bind(family, config, given, drafts=True))
        program.run(batch)
        step = replace(batch, chain=np.full(rig.ROWS, -1, np.int32), positions=batch.positions + rig.ROWS)
        step.slots = step.slots + rig.ROWS
        found.append((program.pools.k[-1].copy(), program.draft(step).copy(), program.pools.v[-1].copy()))
    assert all(np.array_equal(one, other) for one, other in zip(*found, strict=True)) and found[0][0].any()


def running(made: Bound) -> tuple[Any, Batch]:
    pools = made.kv_pool(16, QuantType.F32), StatePool(made.state_layers, 1)
    limits = Limits(rows=16, logit_rows=16, lanes=1, lane_pages=1, held_rows=8)
    program = ReferenceBackend(OpenOptions()).bind(made.ops, made.weights, pools[0], limits, lambda *_: None, pools[1])
    return program, rig.batch()


# --------------------------------------------------------------------------------------------------- why not, by name


def test_a_model_that_can_draft_has_no_reason_not_to() -> None:
    for arch in HYBRIDS:
        assert why_no_drafts(*rig.made(arch, STACK)) == ""


def test_a_model_without_a_block_says_so() -> None:
    family, config, tensors = rig.made("qwen35", STACK)
    bare = {name: each for name, each in tensors.items() if not name.startswith("blk.3")}
    without = (
        rig.made("qwen35", rig.STACKS["four"]),
        rig.made("llama", rig.STACKS["four"]),
        (family, replace(config, nextn=0), bare),
    )
    for given in without:
        assert why_no_drafts(*given) == "the model has no drafting block"
        with pytest.raises(UnsupportedModel, match="the model has no drafting block") as told:
            bind(*given, drafts=True)
        assert told.value.field == "draft"
        with pytest.raises(UnsupportedModel, match="the model has no drafting block"):
            bind(*given, Share.tensor(0, (1, 1)), drafts=True)
    stripped = why_no_drafts(family, config, bare)
    assert stripped == "blk.3.nextn.eh_proj.weight is missing: there is no drafting block without it"


def test_of_two_blocks_none_is_used_and_the_model_runs_without() -> None:
    stack = rig.Stack(2, nextn=2)
    family, config, tensors = rig.made("qwen35", stack)
    assert why_no_drafts(family, config, tensors) == "the model has 2 drafting blocks, and one can be used"
    assert not bind(family, config, tensors).drafting_block


BLOCK = sorted(name for name in rig.made("qwen35", STACK)[2] if name.startswith("blk.3."))


@pytest.mark.parametrize("name", [name for name in BLOCK if "eh_proj" not in name])
def test_a_tensor_of_the_block_that_is_missing_or_misshapen_is_named_and_the_model_runs_without(name: str) -> None:
    family, config, tensors = rig.made("qwen35", STACK)
    right = tensors[name]
    rows, cols = (right.rows + 1, right.cols) if right.rows > 1 else (1, right.cols + 1)
    needed = f"[{right.cols}]" if right.rows == 1 else f"[{right.rows}, {right.cols}]"
    cases = {
        f"{name}: is missing; shape {needed} is needed": None,
        f"{name}: has shape {f'[{cols}]' if rows == 1 else f'[{rows}, {cols}]'}, {needed} is needed": view(
            name, rows, cols
        ),
    }
    for said, changed in cases.items():
        given = {key: each for key, each in (tensors | {name: changed}).items() if each is not None}
        assert said in why_no_drafts(family, config, given)
        for share in (None, Share.tensor(0, (1, 1))):
            with pytest.raises(InvalidModelFile) as told:
                bind(family, config, given, share, drafts=True)
            assert told.value.args and said in str(told.value)
        assert bind(family, config, given).ops == bind(family, config, tensors).ops


def test_a_block_without_its_joining_matrix_is_no_block_and_the_model_runs_without() -> None:
    family, config, tensors = rig.made("qwen35", STACK)
    name = "blk.3.nextn.eh_proj.weight"
    given = {key: each for key, each in tensors.items() if key != name}
    assert why_no_drafts(family, config, given) == f"{name} is missing: there is no drafting block without it"
    for share in (None, Share.tensor(0, (1, 1))):
        assert bind(family, config, given, share).ops == bind(family, config, tensors, share).ops


def test_a_misshapen_joining_matrix_is_named() -> None:
    family, config, tensors = rig.made("qwen35", STACK)
    name = "blk.3.nextn.eh_proj.weight"
    why = why_no_drafts(family, config, tensors | {name: view(name, HIDDEN, HIDDEN)})
    assert f"{name}: has shape [32, 32], [32, 64] is needed" in why


def test_a_part_of_the_block_that_nobody_asks_for_is_named() -> None:
    """A tensor by which the block would be another one: without drafts it is let lie, as all of them are."""
    family, config, tensors = rig.made("qwen35", STACK)
    for name in ("blk.3.attn_sinks.weight", "blk.3.ffn_gate_inp.weight"):
        given = tensors | {name: view(name, 1, 4)}
        assert name in why_no_drafts(family, config, given)
        assert not bind(family, config, given).drafts
    with pytest.raises(InvalidModelFile, match=r"blk\.3\.nextn\.odd"):
        why_no_drafts(family, config, tensors | {"blk.3.nextn.odd.weight": view("blk.3.nextn.odd.weight", 1, 4)})


def test_a_block_that_is_no_attention_with_its_own_k_and_v_cannot_draft() -> None:
    family, config, tensors = rig.made("qwen35", STACK)
    assert family.nextn_facts is not None
    facts = family.nextn_facts
    recurrent = replace(family, nextn_facts=lambda config, index: family.stage_facts(config, 0))
    borrowed = replace(
        family, nextn_facts=lambda config, at: (replace(facts(config, at)[0], kv_source=1), facts(config, at)[1])
    )
    for other in (recurrent, borrowed):
        assert "the drafting block 3 is no attention with K and V of its own" in why_no_drafts(other, config, tensors)


# --------------------------------------------------------------------------------------------------------- conformance


def kept(arch: str, monkeypatch: pytest.MonkeyPatch, share: Share | None = None) -> dict[str, list[Any]]:
    """What the checks of a block were given: (block, ops, state) to fill it, (block, ops) of a step."""
    seen: dict[str, list[Any]] = {}
    monkeypatch.setattr(binding, "check_fill", lambda *given: seen.setdefault("fill", list(given)))
    monkeypatch.setattr(binding, "check_step", lambda *given: seen.setdefault("step", list(given)))
    bound(arch, share)
    return seen


def renamed(buffer: Buffer, name: str) -> Buffer:
    return replace(buffer, name=name)


def other_weight(op: Any, name: str) -> Any:
    return replace(op, weight=replace(op.weight, name=name))


WRONG: list[tuple[str, type, int, Callable[[Any], Op], str]] = [
    ("fill", EmbedRows, 0, lambda op: replace(op, scale=2.0), "table is declared"),
    ("fill", EmbedRows, 0, lambda op: replace(op, table=replace(op.table, name="output.weight")), "table is declared"),
    ("fill", Norm, 0, lambda op: replace(op, eps=1.0), "enorm is declared"),
    ("fill", Norm, 0, lambda op: other_weight(op, "output_norm.weight"), "enorm is declared"),
    ("fill", Norm, 1, lambda op: replace(op, src=renamed(op.src, "x")), "hnorm is declared"),
    ("fill", Norm, 1, lambda op: replace(op, out=renamed(op.out, "draft_hidden")), "hnorm is declared"),
    ("fill", Norm, 2, lambda op: replace(op, eps=1.0), "attn_norm is declared 1e-05, built 1.0"),
    ("fill", JoinHidden, 0, lambda op: replace(op, first=1), "joined is declared"),
    ("fill", JoinHidden, 0, lambda op: replace(op, chained=True), "joined is declared"),
    ("fill", JoinHidden, 0, lambda op: replace(op, left=op.right, right=op.left), "joined is declared"),
    ("fill", JoinHidden, 0, lambda op: replace(op, right=renamed(op.right, "final")), "joined is declared"),
    ("fill", Linear, 0, lambda op: part(op, out=Buffer("update", HIDDEN)), "eh_proj is declared"),
    ("fill", Linear, 0, lambda op: part(op, weight=replace(op.parts[0].weight, name="blk.2.x")), "eh_proj is declared"),
    ("fill", RopeStore, 0, lambda op: replace(op, layer=0), "stored is declared (1, 0, 2, 16), built (0, 0, 2, 16)"),
    ("fill", RopeStore, 0, lambda op: replace(op, heads=4), "stored is declared (1, 0, 2, 16), built (1, 4, 2, 16)"),
    ("fill", RopeStore, 0, lambda op: replace(op, rope=None), "rope is declared rope(halves"),
    ("fill", RopeStore, 0, lambda op: replace(op, k_norm=None), "k_norm is declared True, built False"),
    ("fill", RopeStore, 0, lambda op: replace(op, norm_eps=1.0), "norm_eps is declared 1e-05, built 1.0"),
    ("step", EmbedRows, 0, lambda op: replace(op, scale=2.0), "table is declared"),
    ("step", JoinHidden, 0, lambda op: replace(op, chained=False), "joined is declared"),
    ("step", JoinHidden, 0, lambda op: replace(op, right=renamed(op.right, "hidden_in")), "joined is declared"),
    ("step", Norm, 1, lambda op: replace(op, eps=1.0), "final is declared"),
    ("step", Norm, 1, lambda op: replace(op, add=None), "final is declared"),
    ("step", Norm, 2, lambda op: replace(op, src=renamed(op.src, "x")), "hnorm is declared"),
    ("step", Linear, 1, lambda op: replace(op, src=renamed(op.src, "draft_hidden")), "head is declared"),
    ("step", Linear, 1, lambda op: part(op, weight=replace(op.parts[0].weight, name="token_embd.weight")), "head is"),
]


def part(op: Linear, **changes: Any) -> Linear:
    return replace(op, parts=(replace(op.parts[0], **changes), *op.parts[1:]))


@pytest.mark.parametrize("share", [None, Share.tensor(0, (3, 1))])
@pytest.mark.parametrize(("which", "kind", "at", "change", "said"), WRONG)
def test_a_block_that_differs_from_its_declaration_is_named(
    which: str,
    kind: type,
    at: int,
    change: Callable[[Any], Op],
    said: str,
    share: Share | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    block, ops, *state = kept("qwen35", monkeypatch, share)[which]
    check: Callable[..., None] = check_fill if which == "fill" else check_step
    check(block, ops, *state)
    index = [place for place, op in enumerate(ops) if isinstance(op, kind)][at]
    wrong = [*ops[:index], change(ops[index]), *ops[index + 1 :]]
    with pytest.raises(DeclarationMismatch) as told:
        check(block, wrong, *state)
    assert said in str(told.value) and str(told.value).startswith("layer 3, stage 0 (")


def test_a_state_of_another_shape_or_place_and_an_attention_that_nobody_asked_for_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    block, ops, (layer, where) = kept("qwen35", monkeypatch)["fill"]
    for state in (
        (replace(layer, channels=31), where),
        (replace(layer, kernel=3), where),
        (layer, StatePart(1)),
        (None, None),
    ):
        with pytest.raises(DeclarationMismatch, match="state is declared"):
            check_fill(block, ops, state)
    attention = of(Attention, bound().ops)[0]
    with pytest.raises(DeclarationMismatch, match="besides is declared None, built 'Attention'"):
        check_fill(block, [*ops, attention], (layer, where))


def test_a_layer_of_a_step_is_compared_like_every_other(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(binding, "check_layers", lambda *given: seen.append(given))
    bound()
    declared, built, *rest = seen[-1]
    monkeypatch.undo()
    assert set(declared) == set(built) == {0, 1, 2, 3}
    wrong = [replace(op, scale=9.0) if isinstance(op, Attention) else op for op in built[3]]
    with pytest.raises(DeclarationMismatch, match=r"layer 3, stage 0 \(attention\): scale is declared"):
        binding.check_layers(declared, {**built, 3: wrong}, *rest)


@pytest.mark.parametrize("arch", HYBRIDS)
def test_sums_of_both_lists_are_owed_exactly_once(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(binding, "check_sums", lambda ops, cut: seen.append((list(ops), cut)))
    for rank in (0, 1):
        bound(arch, Share.tensor(rank, (2, 1)))
    for ops, cut in seen:
        check_sums(ops, cut)
        mark = next(at for at, op in enumerate(ops) if isinstance(op, DraftStep))
        sums = [at for at, op in enumerate(ops) if isinstance(op, SumRows)]
        assert [at for at in sums if at > mark][:2] and any(ops[at].label == "join 3" for at in sums)
        for at in sums:
            with pytest.raises(DeclarationMismatch, match=rf"op {at + 1} \(SumRows\) needs a partial sum"):
                check_sums([*ops[: at + 1], *ops[at:]], cut)
            with pytest.raises(DeclarationMismatch, match="a partial sum"):
                check_sums([*ops[:at], *ops[at + 1 :]], cut)


def test_a_step_goes_on_from_nothing_but_what_the_step_before_left_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(binding, "check_sums", lambda ops, cut: seen.append((list(ops), cut)))
    bound("qwen35", Share.tensor(0, (2, 1)))
    ops, cut = seen[0]
    hidden = max(at for at, op in enumerate(ops) if isinstance(op, Norm))
    with pytest.raises(DeclarationMismatch, match="the next step of drafting reads draft_hidden, which nobody has"):
        check_sums([*ops[:hidden], *ops[hidden + 1 :]], cut)
    mark = next(at for at, op in enumerate(ops) if isinstance(op, DraftStep))
    early = [*ops[: mark + 1], *(op for op in ops[mark + 1 :] if not isinstance(op, EmbedRows | SumRows))]
    with pytest.raises(DeclarationMismatch, match="reads embedded, which nobody has written"):
        check_sums(early, cut)
    chained = next(at for at, op in enumerate(ops) if isinstance(op, JoinHidden) and op.chained)
    unchained = [*ops[:chained], replace(ops[chained], chained=False), *ops[chained + 1 :]]
    with pytest.raises(DeclarationMismatch, match="reads draft_hidden, which nobody has written"):
        check_sums(unchained, cut)


def test_an_update_that_is_owed_before_a_step_of_drafting_is_named() -> None:
    ops = list(bound().ops)
    check_updates(ops, owed=False, handed_on=False)
    mark = next(at for at, op in enumerate(ops) if isinstance(op, DraftStep))
    owes = next(op for op in ops if isinstance(op, Linear) and op.parts[0].out.name == "update")
    with pytest.raises(DeclarationMismatch, match=rf"op {mark + 1} \(DraftStep\) follows an update"):
        check_updates([*ops[:mark], owes, *ops[mark:]], owed=False, handed_on=False)
    final = next(at for at, op in enumerate(ops) if isinstance(op, Norm) and op.out.name == "draft_final")
    with pytest.raises(DeclarationMismatch, match="adds no update, and one is owed"):
        check_updates([*ops[:final], replace(ops[final], add=None), *ops[final + 1 :]], owed=False, handed_on=False)  # type: ignore[type-var]


# --------------------------------------------------------------------------------------------------------------- shards


@pytest.mark.parametrize("block", [1, 16, 32, 64, 256])
@pytest.mark.parametrize("vector", [(1,), (2, 1, 1), (30, 17, 17), (28, 26, 20), (1, 9)])
def test_the_joining_matrix_is_cut_by_the_same_whole_blocks_of_both_halves(vector: tuple[int, ...], block: int) -> None:
    hidden = 768
    form = TensorForm(hidden, 2 * hidden, block, block)
    found = layer_shards([], {"nextn.eh_proj": form, "nextn.enorm": TensorForm(1, hidden)}, vector)
    split, state = found.splits["nextn.eh_proj"], found.state
    assert (
        state is not None and state.heads == ((),) * len(vector) and (state.channel_bytes, state.head_bytes) == (4, 0)
    )
    check_cover(form, split)
    at = 0
    for pieces, runs in zip(split, state.channels, strict=True):
        assert bool(pieces) == bool(runs)
        for run in runs:
            assert run.first == at and not run.size % block
            at = run.end
            both = (run, Run(hidden + run.first, hidden + run.end))
            assert pieces[0].cols == (both if run.size < hidden else (Run(0, 2 * hidden),))
    assert at == hidden


def test_a_matrix_whose_halves_are_no_whole_blocks_stays_on_one_rank() -> None:
    form = TensorForm(48, 96, 32, 18)
    found = layer_shards([], {"nextn.eh_proj": form}, (1, 2))
    assert found.state is not None
    (holder,) = [rank for rank, pieces in enumerate(found.splits["nextn.eh_proj"]) if pieces]
    assert found.splits["nextn.eh_proj"][holder][0].cols == (Run(0, 96),)
    assert found.state.channels[holder] == (Run(0, 48),)
    check_cover(form, found.splits["nextn.eh_proj"])


def test_a_divided_model_has_the_block_only_with_drafts() -> None:
    family, config, tensors = rig.made("qwen35", STACK)
    plain, drafts = (divided(family, config, tensors, VECTOR, drafts=each) for each in (False, True))
    assert set(drafts.parts) - set(plain.parts) == {3} == set(drafts.states) - set(plain.states)
    assert {name for name in drafts.splits if name not in plain.splits} == set(BLOCK)
    assert max(drafts.states) == 3, "its state is the last one of the model"
    assert drafts.states[3].channels == ((Run(0, 16),), (Run(16, 24),), (Run(24, 32),))
