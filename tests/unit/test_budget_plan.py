"""The planner on made-up boxes: what fits, what is chosen, what is never done; and the figures that it must
reproduce."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from budget import host_lines
from budget.advice import Subject, answer, changed
from budget.ceilings import ceilings
from budget.facts import GIB, MIB, Box, Card, CpuFacts, MemoryFacts, ModelShape
from budget.ledger import MOMENTS, held_bytes, peak_bytes
from budget.plan import Plan, Refusal, Unknown, WishError, plan
from budget.shape import load_shape
from budget.vectors import capacity, units
from budget.wish import Wish

SHAPES = Path(__file__).parents[1] / "data" / "shapes"
ANY = Wish()
CPU = CpuFacts("CPU", 8, 8, "processors", frozenset())


@cache
def shape(name: str) -> ModelShape:
    return load_shape(str(SHAPES / f"{name}.json"))


def host(total_mib: int, available_mib: int | None = None) -> MemoryFacts:
    free = None if available_mib is None else available_mib * MIB
    return MemoryFacts(total_mib * MIB, total_mib * MIB, "MemTotal", free, 0)


def card(number: int, total_mib: int, name: str = "NVIDIA GeForce RTX 3090", **more: object) -> Card:
    fields = {
        "total_bytes": total_mib * MIB,
        "reserved_bytes": 0,
        "free_bytes": total_mib * MIB,
        "arch": "sm_86",
    } | more
    return Card("nvidia", f"GPU-{number}", name, **fields)  # type: ignore[arg-type]


def box(*cards: Card, ram_mib: int | None = 65536) -> Box:
    return Box("box", None if ram_mib is None else host(ram_mib, ram_mib - 2048), CPU, cards)


def planned(where: Box, model: ModelShape, wish: Wish = ANY) -> Plan | Refusal | Unknown:
    return plan(ceilings(where, wish.floor_bytes), model, wish)


def fitting(where: Box, model: ModelShape, wish: Wish = ANY) -> Plan:
    outcome = planned(where, model, wish)
    assert isinstance(outcome, Plan), outcome
    return outcome


def proven(made: Plan) -> None:
    """The sums again, from the lines alone."""
    for device in made.ceilings.devices:
        if device.ceiling_bytes is not None:
            assert peak_bytes(made.lines, device.index) <= device.ceiling_bytes
    for pool, size in enumerate(made.ceilings.pools):
        members = [device for device in made.ceilings.devices if device.pool == pool]
        for moment in MOMENTS:
            held = sum(max(0, held_bytes(made.lines, d.index, moment) - d.private_bytes) for d in members)
            assert size is None or len(members) == 1 or held <= size
    assert all(line.bytes > 0 for line in made.lines)
    assert not {"other", "misc", "overhead"} & {line.name for line in made.lines}


TWO = (card(0, 24576), card(1, 12288, "NVIDIA GeForce RTX 3060"))


# ------------------------------------------------------------------------------------------------------------ choices


def test_one_card_holds_a_model_that_fits_it() -> None:
    made = fitting(box(card(0, 24576)), shape("dense8b"))
    proven(made)
    assert (made.option, made.layouts, made.ranks) == ("one card", ("pipeline",), (0,))
    assert made.binds.device == 0 and made.kv_tokens == made.rank_tokens[0] // 16 * 16


def test_uneven_cards_serve_both_layouts_with_a_flip() -> None:
    made = fitting(box(*TWO, ram_mib=131072), shape("dense8b"))
    proven(made)
    assert made.layouts == ("pipeline", "tensor") and made.ranks == (0, 1)
    assert len(made.token_vector) == len(made.weight_vector) == 2 and made.token_vector[0] > made.token_vector[1]
    assert made.ranges[0][0] == 0 and made.ranges[0][1] == made.ranges[1][0] and made.ranges[1][1] == 32
    assert made.flip_s is not None and made.flip_s > 0


def test_a_host_too_small_for_the_image_gets_one_layout() -> None:
    made = fitting(box(*TWO, ram_mib=8192), shape("dense8b"))
    assert len(made.layouts) == 1 and made.flip_s is None


def test_a_model_larger_than_the_cards_takes_the_cpu_in() -> None:
    made = fitting(box(card(0, 12288)), shape("dense27b"))
    proven(made)
    assert made.option == "cards and a CPU rank" and made.ceilings.devices[made.ranks[0]].kind == "cpu"
    assert made.ranges[0][0] == 0 and 0 < made.ranges[0][1] < 64
    assert made.kv_tokens == 8192, "a way out gets a comfortable pool, however much the host has"


def test_experts_go_to_the_cpu_where_that_is_faster() -> None:
    made = fitting(box(card(0, 12288)), shape("moe35b"))
    proven(made)
    assert made.option == "cards, experts on the CPU" and 0 < made.expert_layers <= 40
    names = {priced.option for priced in made.priced}
    assert {"cards and a CPU rank", "CPU"} <= names, "what was not taken is told as well"


def test_no_card_is_the_cpu_alone() -> None:
    made = fitting(box(ram_mib=65536), shape("moe35b"))
    proven(made)
    assert made.option == "CPU" and made.ranks == (0,)


def test_a_card_that_all_others_would_wait_for_is_left_out() -> None:
    made = fitting(box(card(0, 24576), card(1, 2048, "Quadro P400")), shape("dense8b"))
    assert made.ranks == (0,)


def test_nothing_known_is_neither_a_plan_nor_a_refusal() -> None:
    nameless = Box("box", None, None, (Card("nvidia", "GPU-0", "NVIDIA GeForce RTX 3090"),))
    outcome = planned(nameless, shape("dense8b"))
    assert isinstance(outcome, Unknown) and "RTX 3090" in outcome.why


def test_requests_at_once_that_were_asked_for_are_never_fewer() -> None:
    made = fitting(box(card(0, 24576)), shape("dense27b"), Wish(running=3))
    assert made.running == 3
    assert isinstance(planned(box(card(0, 20480), ram_mib=2048), shape("dense27b"), Wish(running=64)), Refusal)


def test_a_pool_that_was_asked_for_is_never_smaller() -> None:
    alone = box(card(0, 24576), ram_mib=None)
    most = fitting(alone, shape("dense8b")).most_tokens
    assert fitting(alone, shape("dense8b"), Wish(kv_tokens=most, running=16)).kv_tokens == most
    assert isinstance(planned(alone, shape("dense8b"), Wish(kv_tokens=most + 16, running=16)), Refusal)


@pytest.mark.parametrize(
    ("field", "wish"),
    [
        ("context", Wish(context=1 << 20)),
        ("kv_tokens", Wish(context=4096, kv_tokens=2048)),
        ("devices", Wish(devices=("cuda:7",))),
        ("devices", Wish(devices=("cuda:0", "GPU-0"))),
        ("weight_vector", Wish(weight_vector=(1, 2, 3))),
        ("token_vector", Wish(token_vector=(0, 1))),
        ("pipeline_ratio", Wish(pipeline_ratio=(64, 1))),
        ("cpu_moe", Wish(cpu_moe=4)),
    ],
)
def test_a_wish_that_contradicts_itself_is_named(field: str, wish: Wish) -> None:
    with pytest.raises(WishError) as caught:
        planned(box(*TWO, ram_mib=131072), shape("dense27b"), wish)
    assert caught.value.field == field and caught.value.fix


def test_b11_a_ratio_sums_to_the_backbone_and_not_to_the_block_count() -> None:
    """40 backbone layers and one drafting block: 41 is refused, 40 is taken as it stands."""
    with pytest.raises(WishError, match="backbone has 40"):
        planned(box(*TWO, ram_mib=131072), shape("moe35b"), Wish(pipeline_ratio=(27, 14)))
    made = fitting(box(*TWO, ram_mib=131072), shape("moe35b"), Wish(pipeline_ratio=(30, 10), running=1))
    assert made.ranges == ((0, 30), (30, 40))


def test_devices_that_are_named_are_the_ranks() -> None:
    made = fitting(box(*TWO), shape("dense8b"), Wish(devices=("cuda:0", "cpu"), context=4096))
    assert [made.ceilings.devices[rank].kind for rank in made.ranks] == ["cpu", "discrete"]
    made = fitting(box(*TWO), shape("dense8b"), Wish(devices=("cpu",), context=4096))
    assert made.option == "CPU"


# ------------------------------------------------------------------------------------------------------------ figures

LAPTOP = Box(
    "780m",
    host(30211, 28568),
    CPU,
    (
        Card(
            "amd",
            "0000:c4:00.0",
            "AMD Radeon 780M",
            "gfx1103",
            unified=True,
            total_bytes=1024 * MIB,
            gtt_total_bytes=24576 * MIB,
        ),
    ),
)


def lines_of(made: Plan, *names: str) -> int:
    return sum(line.bytes for line in made.lines if line.name in names)


@pytest.mark.parametrize(("kv_type", "thousands"), [("f16", 82), ("f8", 164)])
def test_b5_the_laptop_holds_a_35b_with_vision_and_82k_tokens(kv_type: str, thousands: int) -> None:
    wish = Wish(kv_type=kv_type, running=1, state_bits=16, vision=True)
    model = shape("moe35b")
    made = fitting(LAPTOP, model, wish)
    assert made.ceilings.devices[0].ceiling_bytes == 25600 * MIB
    room = 25600 - (model.weights_bytes + lines_of(made, "vision", "state")) / MIB
    assert room == pytest.approx(3137, abs=1)
    assert (room - 1500) * MIB / (model.kv_bytes_per_token(kv_type) - drafting_row(model, kv_type)) / 1024 == (
        pytest.approx(thousands, rel=0.01)
    )
    # The plan itself counts the drafting block's rows and its buffers as well.
    assert made.kv_tokens / 1024 == pytest.approx(thousands, rel=0.08)
    proven(made)


def test_b5_the_smaller_quantisation_leaves_12758_mib() -> None:
    model = shape("moe35b")
    states = model.state_bytes_per_request(16)
    assert 25600 - (12574128416 + model.vision_bytes + states) / MIB == pytest.approx(12758, abs=1)


def drafting_row(model: ModelShape, kv_type: str) -> float:
    return model.kv_bytes_per_token(kv_type) - replace(model, nextn=()).kv_bytes_per_token(kv_type)


def test_b8_a_backend_that_materialises_dense_is_refused_with_both_numbers() -> None:
    outcome = planned(LAPTOP, shape("moe35b"), Wish(devices=("cpu",), dense=2, running=1, vision=True))
    assert isinstance(outcome, Refusal)
    weights = sum(line.bytes for line in outcome.lines if line.name in ("weights", "vision"))
    assert weights / GIB == pytest.approx(67, rel=0.01)
    assert weights / (30211 * MIB) == pytest.approx(2.27, rel=0.01)
    for number in ("506", "1604", "3.17", "66.9 GiB", "29.5 GiB", "2.27"):
        assert number in outcome.reason, outcome.reason


def test_f7_the_capacity_under_one_vector() -> None:
    rows, vector = (12750, 68646, 30515), (30, 17, 17)
    assert units(rows, vector) == (425, 4038, 1795) and capacity(rows, vector) == 27200


RIG = box(
    card(0, 32607, "NVIDIA GeForce RTX 5090", arch="sm_120"),
    card(1, 20480, "NVIDIA GeForce RTX 3080"),
    card(2, 20480, "NVIDIA GeForce RTX 3080"),
    ram_mib=98 * 1024,
)


def test_f9_the_capacity_proportional_vector_is_used() -> None:
    """R12: nobody has to restart with a hint; the vector follows what the weights leave on each card."""
    wish = Wish(weight_vector=(30, 17, 17), running=4)
    made = fitting(RIG, shape("dense27b"), wish)
    held = fitting(RIG, shape("dense27b"), replace(wish, token_vector=(30, 17, 17)))
    round_of_pages = 16 * sum(made.token_vector)  # a pool is whole rounds of its own vector
    assert made.token_vector != (30, 17, 17) and made.kv_tokens > held.kv_tokens - round_of_pages


def test_q14_exclusive_backing_gives_at_least_a_third_more_than_two_resident_pools() -> None:
    wish = Wish(running=4, kv_type="f8", layout="auto")
    alone = fitting(RIG, shape("dense27b"), wish)
    both = fitting(RIG, shape("dense27b"), replace(wish, exclusive=False))
    assert len(alone.layouts) == len(both.layouts) == 2
    assert alone.most_tokens >= 1.3 * both.most_tokens


def test_b24_apertures_are_a_budget_of_their_own() -> None:
    wish = Wish(peer_groups=(96 * MIB,) * 4)
    small = box(card(0, 24576, bar1_total_bytes=256 * MIB, bar1_free_bytes=216 * MIB), card(1, 24576))
    refused = planned(small, shape("dense8b"), wish)
    assert isinstance(refused, Refusal) and "384" in refused.reason and "216" in refused.reason
    assert isinstance(
        planned(small, shape("dense8b"), Wish(peer_groups=(96 * MIB, 48 * MIB, 32 * MIB, 24 * MIB))), Plan
    )


def test_b12_every_rank_tells_its_own_number_and_the_least_binds() -> None:
    made = fitting(RIG, shape("dense27b"))
    assert len(made.rank_tokens) == 3 and made.kv_tokens <= min(made.rank_tokens) + 16 * sum(made.token_vector)
    binding = made.ranks.index(made.binds.device)
    assert made.rank_tokens[binding] == min(made.rank_tokens)


def test_a_row_is_2048_bytes_in_f8_and_a_request_holds_its_states() -> None:
    made = fitting(box(card(0, 49152)), shape("dense27b"), Wish(kv_type="f8", running=1, draft=False))
    row = shape("dense27b").kv_bytes_per_token("f8") - drafting_row(shape("dense27b"), "f8")
    assert row == 16 * 2048
    assert lines_of(made, "kv") == (made.kv_tokens + 16) * row
    assert lines_of(made, "state") / MIB == pytest.approx(144 + 3.75, abs=0.1)


# --------------------------------------------------------------------------------------------------------- properties


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(4000, 50000), min_size=0, max_size=3),
    st.one_of(st.none(), st.integers(2000, 200000)),
    st.sampled_from(["dense27b", "moe35b", "dense8b"]),
    st.sampled_from(["f16", "q8_0", "f8"]),
    st.integers(0, 3),
    st.sampled_from([0, 4096, 40000]),
)
def test_a_plan_is_a_proof_and_a_wish_is_never_cut(
    cards: list[int], ram: int | None, name: str, kv_type: str, running: int, context: int
) -> None:
    wish = Wish(kv_type=kv_type, running=running, context=context)
    outcome = planned(box(*(card(n, size) for n, size in enumerate(cards)), ram_mib=ram), shape(name), wish)
    if isinstance(outcome, Plan):
        proven(outcome)
        assert not running or outcome.running == running
        assert not context or outcome.context == context
        assert outcome.context <= outcome.kv_tokens <= outcome.most_tokens + 1024
    elif isinstance(outcome, Refusal):
        assert outcome.needed_bytes > outcome.available_bytes
    else:
        assert ram is None and not cards


@settings(max_examples=25, deadline=None)
@given(
    st.integers(2000, 60000),
    st.integers(0, 8000),
    st.sampled_from(["dense27b", "moe35b", "dense8b"]),
    st.one_of(st.none(), st.integers(4000, 100000)),
)
def test_more_memory_on_a_card_never_means_a_smaller_context(size: int, more: int, name: str, ram: int | None) -> None:
    small, large = (planned(box(card(0, mib), ram_mib=ram), shape(name)) for mib in (size, size + more))
    if isinstance(small, Plan):
        assert isinstance(large, Plan) and large.context >= small.context


@settings(max_examples=20, deadline=None)
@given(st.integers(6000, 150000), st.integers(0, 8000), st.sampled_from(["dense27b", "moe35b", "dense8b"]))
def test_more_host_memory_never_means_a_smaller_context(size: int, more: int, name: str) -> None:
    small, large = (planned(box(ram_mib=mib), shape(name)) for mib in (size, size + more))
    if isinstance(small, Plan):
        assert isinstance(large, Plan)
        # A drafting block is left out only where nothing fits with it.
        assert large.context >= small.context or large.drafts > small.drafts == 0


# ------------------------------------------------------------------------------------------------ advice and nearest


@pytest.mark.parametrize("name", ["dense27b", "moe35b", "dense8b"])
def test_each_advice_gives_its_gain_when_it_is_followed(name: str) -> None:
    subject = Subject(box(card(0, 24576), ram_mib=32768), shape(name), load_shape("smollm2-135m-q4_1"))
    made = answer(subject, Wish())
    assert isinstance(made, Plan) and made.advice
    for advice in made.advice:
        other, wish = changed(subject, made.wish, advice.flags)
        again = answer(other, wish, advise=False)
        assert isinstance(again, Plan)
        gain = again.context - made.context if advice.of == "context" else again.kv_tokens - made.kv_tokens
        assert gain == pytest.approx(advice.gain_tokens, rel=0.01) and gain > 0


def test_a_backend_without_a_type_is_not_told_to_use_it() -> None:
    subject = Subject(box(ram_mib=16384), shape("dense8b"), cpu_kv_types=frozenset({"f32", "f16", "bf16"}))
    made = answer(subject, Wish())
    assert isinstance(made, Plan)
    assert all(advice.flags.get("kv_type") not in ("q8_0", "f8") for advice in made.advice)


def test_the_limit_that_is_told_fits_and_one_page_more_does_not() -> None:
    """Buffers grow with the longest request: the limit counts them at its own length, not at the model's."""
    alone = box(card(0, 20480), ram_mib=None)
    wish = Wish(running=1, draft=False)
    most = fitting(alone, shape("dense27b"), wish).most_tokens
    assert fitting(alone, shape("dense27b"), replace(wish, context=most)).context == most
    assert isinstance(planned(alone, shape("dense27b"), replace(wish, context=most + 32)), Refusal)


def test_every_plan_has_what_comes_with_a_first_guided_answer() -> None:
    """From the start on and at any moment: nobody asks before whether there will be one."""
    roomy = Box("box", MemoryFacts(4 * GIB, 4 * GIB, "MemTotal", 3 * GIB, 0), CPU)
    outcome = answer(Subject(roomy, load_shape("smollm2-135m-q4_1"), file_fixed=True), Wish(devices=("cpu",)))
    assert isinstance(outcome, Plan)
    found = {line.name: line for line in outcome.lines}
    wanted = {"vocabulary": host_lines.vocabulary_bytes(outcome.shape), "grammar process": host_lines.grammar_bytes()}
    assert {name: found[name].bytes for name in wanted} == wanted
    assert all(found[name].held == MOMENTS and found[name].source == "measured" for name in wanted)


def test_a_floor_that_binds_is_lowered_at_the_end() -> None:
    small = Box("box", MemoryFacts(414 * MIB, 414 * MIB, "memory.max", 403 * MIB, 0), CPU)
    subject = Subject(small, load_shape("smollm2-135m-q4_1"), file_fixed=True)
    outcome = answer(subject, Wish(devices=("cpu",)))
    assert isinstance(outcome, Refusal) and outcome.nearest is not None and int(outcome.nearest["floor_mib"]) < 256
    other, wish = changed(subject, Wish(devices=("cpu",)), outcome.nearest)
    assert isinstance(answer(other, wish, advise=False), Plan)
