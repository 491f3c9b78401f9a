"""What `up` asks of the planner."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from without_tensor import without_tensor

from budget import host_lines
from budget.facts import Box, Card, CpuFacts, MemoryFacts
from budget.job import settle
from budget.plan import Plan
from homeserve.errors import BudgetError, SettingError
from homeserve.layouts.ranks import RankPlan
from homeserve.model_facts import ModelFacts, read_model
from homeserve.settings import Settings, load
from homeserve.sizing import (
    engine_limits,
    logit_row_limit,
    plan_of,
    ranks_of_plan,
    row_limit,
    state_slots,
    why_nothing_is_drafted,
    wish_of,
)

BOX = Box("box", MemoryFacts(1 << 33, 1 << 33, "MemTotal", 1 << 32, 0), CpuFacts("CPU", 4, 3, "affinity", frozenset()))


def test_the_cpu_is_asked_for_with_its_cores_and_packed_weights() -> None:
    wish = wish_of(Settings(), BOX)
    assert (wish.devices, wish.threads, wish.dense, wish.kv_type) == (("cpu",), 3, 0, "f16")


def test_the_reference_backend_is_priced_with_what_it_holds() -> None:
    """Weights and KV rows as float32, whatever the file and --kv-type say."""
    wish = wish_of(Settings(backend="reference"), BOX)
    assert (wish.dense, wish.kv_type) == (4, "f32")


# ------------------------------------------------------------------------------------------------------------ drafting

COUNTER = Path(__file__).parents[1] / "data" / "counter.gguf"
LLAMA = Path(__file__).parents[1] / "data" / "tiny" / "llama.f32.gguf"
LARGE = replace(BOX, memory=MemoryFacts(1 << 36, 1 << 36, "MemTotal", 1 << 36, 0))


@pytest.fixture(scope="module")
def counter() -> Iterator[ModelFacts]:
    facts = read_model(str(COUNTER), Settings())
    yield facts
    facts.checkpoint.close()


@pytest.fixture(scope="module")
def llama() -> Iterator[ModelFacts]:
    facts = read_model(str(LLAMA), Settings())
    yield facts
    facts.checkpoint.close()


def planned(facts: ModelFacts, words: str = "", box: Box = LARGE) -> tuple[Settings, Plan, RankPlan]:
    settings = load(words.split(), {}, Path("/"))
    plan = plan_of(settings, facts, box)
    return settings, plan, ranks_of_plan(settings, plan, box, range(4))


@pytest.mark.parametrize(("word", "drafts", "adapts"), [("auto", 3, True), ("1", 1, False), ("8", 8, False)])
def test_one_rank_has_room_for_its_drafts(counter: ModelFacts, word: str, drafts: int, adapts: bool) -> None:
    settings, plan, ranks = planned(counter, f"--draft {word} --max-running 5 --chunk 32")
    limits = engine_limits(settings, plan, ranks)
    assert (plan.drafts, limits.drafts, limits.drafts_adapt, limits.most_drafts) == (drafts, drafts, adapts, drafts)
    assert row_limit(settings, plan) == 32 + 5 * (1 + drafts)
    assert logit_row_limit(plan) == 5 * (1 + drafts) + 32
    job = settle(plan.shape, plan.wish, plan.running)
    assert (job.rows, job.logit_rows) == (row_limit(settings, plan), logit_row_limit(plan)), "what was planned for"
    assert why_nothing_is_drafted(settings, counter, plan) == ""
    assert limits.recurrent and state_slots(plan) == 5 + plan.checkpoints > 5


def test_off_is_a_server_as_without_a_drafting_block(counter: ModelFacts) -> None:
    settings, plan, ranks = planned(counter, "--draft off --max-running 5 --chunk 32")
    limits = engine_limits(settings, plan, ranks)
    assert (plan.drafts, limits.drafts, limits.most_drafts) == (0, 0, 0)
    assert (row_limit(settings, plan), logit_row_limit(plan)) == (32 + 5, 5 + 32)
    assert why_nothing_is_drafted(settings, counter, plan) == "--draft off"
    assert not [line for line in plan.lines if line.name == host_lines.DRAFTS]


@pytest.mark.parametrize(
    ("words", "layout", "pipeline", "tensor"),
    [
        ("--layout tensor", "tensor", None, 3),
        ("--layout pipeline --flip manual", "pipeline", 0, 3),
        ("--layout tensor --flip manual --draft 2", "tensor", 0, 2),
    ],
)
def test_several_ranks_draft_in_the_tensor_layout(
    counter: ModelFacts, words: str, layout: str, pipeline: int | None, tensor: int
) -> None:
    settings, plan, ranks = planned(counter, f"--devices cpu:2 {words}")
    limits = engine_limits(settings, plan, ranks)
    assert plan.drafts == limits.most_drafts == tensor
    assert limits.drafts == (tensor if layout == "tensor" else pipeline)
    assert ranks.acts is not None and ranks.acts.token_floats == 4 * plan.running * (1 + tensor)
    if pipeline is not None:
        assert limits.flip is not None
        assert {name: of.drafts for name, of in limits.flip.layouts.items()} == {"pipeline": pipeline, "tensor": tensor}
        # 3 attention layers and the drafting block's, 3 delta nets and its state
        assert (limits.flip.group_layers, limits.flip.state_layers) == ((4,), 4)


def test_what_a_flip_carries_counts_the_drafting_block(counter: ModelFacts) -> None:
    of = {
        word: planned(counter, f"--devices cpu:2 --layout tensor --flip manual --draft {word}")[1].flip
        for word in ("off", "auto")
    }
    assert of["auto"].page_bytes == tuple(size * 4 // 3 for size in of["off"].page_bytes)
    assert of["auto"].state_bytes == of["off"].state_bytes + 4 * counter.shape.hidden


def test_ranks_that_stay_in_a_pipeline_do_not_load_the_block(counter: ModelFacts) -> None:
    settings, plan, ranks = planned(counter, "--devices cpu:2 --layout pipeline")
    assert (plan.layouts, plan.drafts, engine_limits(settings, plan, ranks).most_drafts) == (("pipeline",), 0, 0)
    why = "several ranks draft in the tensor layout, and they stay in the pipeline layout"
    assert why_nothing_is_drafted(settings, counter, plan) == plan.no_drafts == why


def test_a_model_without_a_block_is_served_without_and_refuses_a_number(llama: ModelFacts) -> None:
    settings, plan, _ = planned(llama)
    assert plan.drafts == 0 and why_nothing_is_drafted(settings, llama, plan) == "the model has no drafting block"
    with pytest.raises(SettingError) as caught:
        planned(llama, "--draft 3")
    assert caught.value.message == "--draft 3: the model has no drafting block" and caught.value.field == "draft"


def test_a_block_that_lacks_a_tensor_is_named_and_not_planned_for(tmp_path: Path) -> None:
    lacking = "blk.6.nextn.hnorm.weight"
    path = without_tensor(COUNTER, tmp_path / "cut.gguf", lacking)
    facts = read_model(str(path), Settings())
    try:
        assert lacking in facts.why_no_drafts and facts.shape.nextn == ()
        settings, plan, _ = planned(facts)
        assert plan.drafts == 0 and lacking in why_nothing_is_drafted(settings, facts, plan)
        with pytest.raises(SettingError, match=re.escape(lacking)) as caught:
            planned(facts, "--draft 1")
        assert caught.value.field == "draft"
    finally:
        facts.checkpoint.close()


def test_where_only_without_the_block_anything_fits_auto_leaves_it_out(counter: ModelFacts) -> None:
    """And says so. A number is refused: less memory is no reason to do less than was asked for."""
    words = "--kv-tokens 4096 --floor-mib 0"
    needs = {word: held(planned(counter, f"{words} --draft {word}")[1]) for word in ("off", "auto")}
    size = (needs["off"] + needs["auto"]) // 2
    tight = replace(BOX, memory=MemoryFacts(1 << 36, 1 << 36, "MemTotal", size, 0))
    settings, plan, _ = planned(counter, words, tight)
    assert plan.drafts == 0 and plan.no_drafts.startswith("the drafting block does not fit beside the rest: ")
    assert why_nothing_is_drafted(settings, counter, plan) == plan.no_drafts
    with pytest.raises(BudgetError) as caught:
        planned(counter, f"{words} --draft 3", tight)
    assert (caught.value.fix or "").startswith("the nearest that fits is "), caught.value.fix


@pytest.mark.parametrize("words", ["--kv-tokens 1048576", "--kv-tokens 1048576 --devices cpu:2", "--devices cuda:0"])
def test_the_arithmetic_of_a_refusal_is_that_of_the_memory_that_lacks(counter: ModelFacts, words: str) -> None:
    """What is held elsewhere, and at other moments, is no part of the sum that is told."""
    card = Card("nvidia", "GPU-0", "RTX 3090", "sm_86", total_bytes=160 << 20, free_bytes=160 << 20)
    small = replace(BOX, memory=MemoryFacts(1 << 36, 1 << 36, "MemTotal", 1 << 29, 0))
    if "cuda" in words:
        small = replace(LARGE, cards=(card,))
    with pytest.raises(BudgetError) as caught:
        planned(counter, f"{words} --floor-mib 0", small)
    reason, _, sum_ = caught.value.message.rpartition(": ")
    told = [int(part.rpartition(" ")[2].replace(",", "")) for part in sum_.split(" + ")]
    found = re.search(r"it would hold ([\d,]+) MiB", reason)
    assert found, reason
    needed = int(found[1].replace(",", ""))
    assert needed <= sum(told) <= needed + len(told), caught.value.message
    assert ("worker processes" in sum_) == ("cuda" not in words), sum_


def held(plan: Plan) -> int:
    return max(sum(line.bytes for line in plan.lines if moment in line.held) for moment in ("boot", "pipeline"))
