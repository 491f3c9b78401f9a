"""What drafting takes in a plan: which rank has the block, the room for rows of drafts, and when it is left out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from budget import host_lines
from budget.advice import Subject, answer
from budget.ceilings import ceilings
from budget.document import document
from budget.facts import MIB, Box, CpuFacts, MemoryFacts, ModelShape
from budget.job import settle
from budget.ledger import PIPELINE, TENSOR
from budget.options import CPU_SPLIT, CPU_STACKED
from budget.placement import Cut, Option, Shard, pipeline_shares, tensor_shares
from budget.plan import Plan, Refusal, plan
from budget.question import Question, run_settings, settings_of
from budget.ranks import TOKEN_FLOATS, act_sizes
from budget.report import summary
from budget.shape import shape_from_json
from budget.terms import terms, transit_states
from budget.wish import NO_DRAFTS_IN_A_PIPELINE, Wish

CPU = CpuFacts("CPU", 8, 8, "processors", frozenset())
HYBRID = {
    "arch": "qwen35", "name": "hybrid", "quant": "Q8_0", "layers": 8, "hidden": 1024, "ffn": 4096, "heads": 8,
    "kv_heads": 4, "head_dim": 128, "vocab": 64000, "context": 8192, "nextn_layers": 1, "full_attention_every": 4,
    "linear": {"key_heads": 8, "value_heads": 16, "key_dim": 128, "value_dim": 128, "conv": 4},
}  # fmt: skip


def shape(**more: object) -> ModelShape:
    return shape_from_json(HYBRID | more, "hybrid")


def box(mib: int = 65536) -> Box:
    return Box("box", MemoryFacts(65536 * MIB, 65536 * MIB, "MemTotal", mib * MIB, 0), CPU)


def planned(wish: Wish, of: ModelShape | None = None, mib: int = 65536) -> Plan:
    made = plan(ceilings(box(mib), 0), of or shape(), wish)
    assert isinstance(made, Plan), made
    return made


ONE = Wish(devices=("cpu",), threads=2, cores=8, running=4, chunk=64, context=2048, kv_tokens=4096)
TWO = replace(ONE, cpu_ranks=2)


def bytes_of(made: Plan, name: str) -> int:
    return sum(line.bytes for line in made.lines if line.name == name)


@pytest.mark.parametrize("drafts", [0, 1, 8])
def test_a_plan_has_room_for_every_requests_drafts(drafts: int) -> None:
    job = settle(shape(), replace(ONE, drafts=drafts))
    each = 1 + (drafts or 3)
    assert (job.drafts, job.decode_rows, job.rows, job.logit_rows) == (each - 1, 4 * each, 64 + 4 * each, 4 * each + 32)
    off = settle(shape(), replace(ONE, draft=False, drafts=drafts))
    assert (off.drafts, off.rows, off.logit_rows, off.drafting_bytes) == (0, 64 + 4, 4 + 32, 0)
    assert settle(shape(nextn_layers=0), ONE).drafts == 0, "a model that cannot"


def test_the_block_is_one_more_layer_of_weights_rows_and_states() -> None:
    with_block, without = planned(ONE), planned(replace(ONE, draft=False))
    model, (layer,) = shape(), shape().nextn
    assert layer.kv is not None
    grown = {name: bytes_of(with_block, name) - bytes_of(without, name) for name in ("weights", "kv", "state")}
    assert grown["weights"] == layer.bytes + model.nextn_bytes
    assert grown["kv"] == with_block.kv_tokens * layer.kv.elements * 2
    assert grown["state"] == 3 * 4 * (4 * model.hidden), "a row of floats for 4 requests and 8 checkpoints"
    assert with_block.drafts == 3 and without.drafts == 0
    held = sum(each.held_elements for each in (*model.layers, layer))
    assert bytes_of(with_block, host_lines.DRAFTS) == 4 * 4 * (1 + 3) * held and held > model.hidden
    assert bytes_of(without, host_lines.DRAFTS) == 0
    more = bytes_of(with_block, "plan log") - bytes_of(without, "plan log")
    assert more >= 6 * 4 * 3 * (32 + 16 * 21), "room for four samples of a request in each answer"


def test_of_a_pipeline_the_last_rank_fills_the_block_and_reads_the_embedding() -> None:
    job = settle(shape(), TWO)
    option = Option(CPU_STACKED, (0, 0), host_only=True)
    cut = Cut(((0, 4), (4, 8)))
    with_block, without = (
        pipeline_shares(each, option, cut) for each in (job, settle(shape(), replace(TWO, draft=False)))
    )
    model, (layer,) = shape(), shape().nextn
    assert with_block[0] == without[0]
    filled = layer.kv_bytes + layer.mixer_copies + model.nextn_bytes + model.embedding_bytes
    assert (
        with_block[1].weights - without[1].weights == filled < layer.bytes + model.nextn_bytes + model.embedding_bytes
    )
    assert with_block[1].state - without[1].state == 4 * 4 * model.hidden
    tied = settle(replace(model, tied=True, head_bytes=0), TWO)
    own = settle(replace(model, nextn_embeds=True), TWO)
    for each in (tied, own):
        last = pipeline_shares(each, option, cut)[1].weights
        plain = pipeline_shares(settle(each.shape, replace(TWO, draft=False)), option, cut)[1].weights
        assert last - plain == filled - model.embedding_bytes, "the head is the embedding, or the block has its own"


def test_in_the_tensor_layout_the_block_is_divided_by_columns() -> None:
    job = settle(shape(), TWO)
    for vector in ((1, 1), (3, 1)):
        parts = tensor_shares(job, Shard(vector, (1, 1)), on_cpu=True)
        plain = tensor_shares(settle(shape(), replace(TWO, draft=False)), Shard(vector, (1, 1)), on_cpu=True)
        states = [have.state - had.state for have, had in zip(parts, plain, strict=True)]
        assert sum(states) == 4 * 4 * job.shape.hidden
        assert states[0] / sum(states) == vector[0] / sum(vector)
        assert all(have.held > 0 for have in parts)


def test_only_the_layout_that_drafts_holds_rows_of_drafts() -> None:
    job, limits = settle(shape(), TWO), ceilings(box(), 0)
    stacked = Option(CPU_STACKED, (0, 0), (PIPELINE,), host_only=True)
    split = Option(CPU_SPLIT, (0, 0), (TENSOR,), host_only=True)
    pipeline = pipeline_shares(job, stacked, Cut(((0, 4), (4, 8))))
    tensor = tensor_shares(job, Shard((1, 1), (1, 1)), on_cpu=True)
    held = [[t for t in found if t.name.startswith(host_lines.DRAFTS)] for found in (
        terms(job, stacked, limits, pipeline, ()), terms(job, split, limits, (), tensor)
    )]  # fmt: skip
    assert held[0] == [] and [term.name for term in held[1]] == ["drafts, rank 0", "drafts, rank 1"]


def test_a_flip_carries_the_block_and_its_states() -> None:
    both, plain = (planned(replace(TWO, flip="on", draft=draft)) for draft in (True, False))
    (layer,) = shape().nextn
    assert layer.kv is not None
    assert both.flip.page_bytes[0] - plain.flip.page_bytes[0] == 16 * layer.kv.elements * 2
    assert both.flip.state_bytes - plain.flip.state_bytes == 4 * shape().hidden
    job, off = (settle(shape(), replace(TWO, draft=draft)) for draft in (True, False))
    assert transit_states(job, 1.0) - transit_states(off, 1.0) == (4 + 8) * 4 * shape().hidden
    sizes = [act_sizes(each.shape, 2, TENSOR, each.rows, 4, each.drafts) for each in (job, off)]
    assert [each.token_floats for each in sizes] == [TOKEN_FLOATS * 4 * 4, TOKEN_FLOATS * 4]


def test_ranks_that_stay_in_a_pipeline_leave_the_block_out_and_say_why() -> None:
    made = planned(replace(TWO, layout=PIPELINE))
    assert (made.layouts, made.drafts, made.no_drafts) == ((PIPELINE,), 0, NO_DRAFTS_IN_A_PIPELINE)
    assert bytes_of(made, "weights, rank 1") == bytes_of(
        planned(replace(TWO, layout=PIPELINE, draft=False)), "weights, rank 1"
    )
    assert f"nothing is drafted: {NO_DRAFTS_IN_A_PIPELINE}" in summary(made)
    body = document(made.ceilings, None, made, (), Question("m"))["plan"]
    assert body["drafting"] == {"drafts": 0, "why_not": NO_DRAFTS_IN_A_PIPELINE}
    assert planned(replace(TWO, layout=TENSOR)).no_drafts == "" and planned(ONE).no_drafts == ""


def tight() -> int:
    """Memory in MiB for all but the drafting block."""
    sizes = [sum(line.bytes for line in planned(replace(ONE, draft=draft)).lines) for draft in (True, False)]
    assert sizes[0] - sizes[1] > 4 * MIB
    return (sizes[0] + sizes[1]) // 2 // MIB


def test_where_only_without_it_anything_fits_the_block_is_left_out_unless_a_number_was_asked_for() -> None:
    mib = tight()
    made = planned(ONE, mib=mib)
    assert made.drafts == 0 and made.wish.draft is False
    assert made.no_drafts.startswith("the drafting block does not fit beside the rest: ")
    assert run_settings(made)["draft"] == "off", "asked again it is the same plan"
    refused = plan(ceilings(box(mib), 0), shape(), replace(ONE, drafts=2))
    assert isinstance(refused, Refusal) and refused.wish.drafts == 2


def test_advice_of_a_plan_without_its_block_keeps_it_out() -> None:
    asked = replace(ONE, kv_tokens=0, context=0)
    sizes = [sum(line.bytes for line in planned(replace(asked, draft=draft, kv_tokens=512)).lines) for draft in (0, 1)]
    outcome = answer(Subject(box((sum(sizes) // 2) // MIB), shape()), replace(asked, floor_bytes=0, kv_tokens=512))
    assert isinstance(outcome, Plan) and outcome.no_drafts
    assert all(advice.flags["draft"] == "off" for advice in outcome.advice)


def test_words_of_a_command_line_come_back() -> None:
    words = {(True, 0): "auto", (True, 3): 3, (False, 0): "off"}
    for (draft, drafts), word in words.items():
        assert settings_of(Wish(draft=draft, drafts=drafts))["draft"] == word
    assert Question("m.gguf").up_line({"draft": 2}) == "homeserve up m.gguf --draft 2"
    assert Question("m.gguf").up_line({"draft": "auto"}) == "homeserve up m.gguf"
