"""Several ranks on the CPU: one host ledger with each rank's lines, what all can hold, and what is refused with its
sum."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.acts import fleet_shape
from budget import host_lines
from budget.advice import Subject, answer, changed
from budget.ceilings import ceilings
from budget.document import document
from budget.facts import MIB, Box, Card, CpuFacts, MemoryFacts, ModelShape
from budget.ledger import held_bytes, peak_bytes
from budget.options import CPU_SPLIT, CPU_STACKED
from budget.plan import Plan, Refusal, Unknown, WishError, plan
from budget.ranks import ActSizes, act_bytes, act_sizes, decode_groups, plans_in_flight
from budget.report import report, summary
from budget.shape import load_shape, shape_from_json
from budget.vectors import legal_ends
from budget.wish import PAGE, Wish
from homeserve.layouts.owner import GroupRows, OwnerRule

SHAPES = Path(__file__).parents[1] / "data" / "shapes"
CPU = CpuFacts("CPU", 8, 8, "processors", frozenset())
THREE = Wish(devices=("cpu",), cpu_ranks=3, threads=1, cores=8, flip="off", draft=False)
LAYOUTS = ("pipeline", "tensor")


@cache
def shape(name: str) -> ModelShape:
    return load_shape(str(SHAPES / f"{name}.json"))


@cache
def small(**more: object) -> ModelShape:
    """A model of 30 layers that fits a small box in any way."""
    fields: dict[str, object] = {
        "arch": "llama", "name": "small", "hidden": 576, "ffn": 1536, "heads": 9, "kv_heads": 3, "head_dim": 64,
        "vocab": 49152, "layers": 30, "quant": "Q8_0", "context": 8192, "tied": True,
    }  # fmt: skip
    return shape_from_json({**fields, **more}, "small")


def box(mib: int, *cards: Card) -> Box:
    """With so much host memory free."""
    return Box("box", MemoryFacts(mib * MIB, mib * MIB, "MemTotal", mib * MIB, 0), CPU, cards)


def outcome_of(mib: int, model: ModelShape, wish: Wish, *cards: Card) -> Plan | Refusal | Unknown:
    return plan(ceilings(box(mib, *cards), wish.floor_bytes), model, wish)


def planned(mib: int, model: ModelShape, wish: Wish) -> Plan:
    outcome = outcome_of(mib, model, wish)
    assert isinstance(outcome, Plan), outcome
    return outcome


def line(made: Plan | Refusal, name: str, rank: int | None = None) -> int:
    wanted = name if rank is None else host_lines.of_rank(name, rank)
    return sum(each.bytes for each in made.lines if each.name == wanted)


def over_ranks(made: Plan, name: str) -> int:
    return sum(line(made, name, rank) for rank in range(len(made.ranks)))


# ------------------------------------------------------------------------------------------------ what ranks exchange


@given(
    st.integers(2, 16), st.integers(1, 1 << 20), st.integers(1, 1 << 22), st.integers(1, 4096), st.integers(2, 20)
)  # fmt: skip
def test_the_line_of_acts_is_the_memory_that_is_made(
    ranks: int, piece: int, message: int, token: int, deep: int
) -> None:
    assert (
        act_bytes(ranks, ActSizes(piece, message, token, deep))
        == fleet_shape(ranks, piece, message, token, deep).total_bytes
    )


def test_sizes_follow_the_widest_row_the_largest_plan_and_the_plans_in_flight() -> None:
    assert act_sizes(small(), 3, "pipeline", 272, 16) == ActSizes(65536, 272 * 2 * 576, 64, 5)
    wide = replace(small(), attended_elements=128 * 513)
    assert act_sizes(wide, 3, "tensor", 272, 16) == ActSizes(65664, 272 * 2 * 576, 64, 3)
    unknown = replace(small(), attended_elements=0, mixer_width=100_000)
    assert act_sizes(unknown, 2, "tensor", 1, 1).piece_floats == 101_024
    assert act_sizes(small(), 3, "tensor", 272, 16, drafts=3).token_floats == 4 * 16 * (1 + 3)


def test_plans_in_flight_fill_every_rank_of_a_pipeline() -> None:
    assert [plans_in_flight(ranks, "pipeline") for ranks in (1, 2, 3, 16)] == [2, 3, 4, 17]
    assert [plans_in_flight(ranks, "tensor") for ranks in (1, 2, 16)] == [2, 2, 2]
    assert [decode_groups(ranks, "pipeline") for ranks in (1, 2, 3)] == [1, 2, 3]
    assert decode_groups(3, "tensor") == 1


def test_a_shape_s_attention_is_told_once() -> None:
    assert (small().query_heads, small().attended_elements) == (9, 9 * 65)
    assert small(shared_kv_layers=10).kv_sources == tuple((layer, 19) for layer in range(20, 30))
    both = small(shared_kv_layers=4, window=512, full_attention_every=5).kv_sources
    assert both == ((26, 25), (27, 25), (28, 25), (29, 24)), "the last layer of the same kind that has some"
    assert shape("dense27b").query_heads == 24


# ------------------------------------------------------------------------------------------------- one ledger for all


@pytest.mark.parametrize("tied", [True, False])
def test_a_pipeline_s_ranks_hold_the_model_once_and_a_table_that_is_embedding_and_head_twice(tied: bool) -> None:
    model = small(tied=tied)
    one = planned(4096, model, replace(THREE, cpu_ranks=1))
    made = planned(4096, model, replace(THREE, layout="pipeline", kv_tokens=one.kv_tokens))
    assert made.option == CPU_STACKED and made.ranges == ((0, 10), (10, 20), (20, 30))
    twice = model.embedding_bytes if tied else 0
    assert over_ranks(made, "weights") == one.shape.weights_bytes + twice
    assert over_ranks(made, "kv") == line(one, "kv"), "every rank has all slots of its own layers"
    assert over_ranks(made, "state") == line(one, "state") == 0
    tables = line(made, "weights", 0) + line(made, "weights", 2) - 2 * line(made, "weights", 1)
    assert abs(tables - model.embedding_bytes - (model.embedding_bytes if tied else model.head_bytes)) <= 4096


def test_a_tensor_rank_holds_its_units_and_copies_of_what_cannot_be_cut() -> None:
    model = small(tied=False)
    made = planned(4096, model, replace(THREE, layout="tensor", weight_vector=(2, 1, 1), kv_tokens=6144))
    assert made.option == CPU_SPLIT and made.ranges == () and made.weight_vector == (2, 1, 1)
    copies = model.other_bytes + sum(layer.mixer_copies + layer.ffn_copies for layer in model.layers)
    assert 0 < copies < model.weights_bytes // 1000
    assert abs(over_ranks(made, "weights") - model.weights_bytes - 2 * copies) <= 3
    assert over_ranks(made, "k and v copies") == 0, "there is a KV head for each"
    few = planned(4096, small(tied=False, kv_heads=1, heads=12), replace(THREE, layout="tensor", kv_tokens=6144))
    kv = sum(layer.kv_bytes for layer in few.shape.layers)
    assert abs(over_ranks(few, "k and v copies") - 2 * kv) < 4096


@settings(max_examples=10, deadline=None)
@given(
    st.lists(st.integers(1, 30), min_size=2, max_size=5),
    st.integers(512, 8192),
    st.sampled_from(["f16", "f32", "q8_0"]),
)
def test_the_pool_of_a_tensor_rank_is_what_the_owner_rule_gives_it(
    vector: list[int], tokens: int, kv_type: str
) -> None:
    ranks, model = len(vector), small()
    wish = replace(
        THREE, cpu_ranks=ranks, layout="tensor", token_vector=tuple(vector), kv_tokens=tokens, kv_type=kv_type
    )
    made = planned(16384, model, wish)
    rule = OwnerRule.of(vector)
    assert made.token_vector == rule.vector and made.kv_tokens % rule.round_slots == 0
    assert tokens <= made.kv_tokens < tokens + rule.round_slots
    rows = GroupRows(made.kv_tokens, rule).tensor_rows
    row = sum(layer.kv.elements for layer in model.layers if layer.kv) * {"f16": 2, "f32": 4, "q8_0": 34 / 32}[kv_type]
    for rank in range(ranks):
        assert abs(line(made, "kv", rank) - rows[rank] * row) <= 1


def test_rows_of_windows_follow_the_token_vector_too() -> None:
    model = small(window=512, full_attention_every=5)
    wish = replace(THREE, layout="tensor", token_vector=(2, 1, 1), kv_tokens=8192, running=1)
    made = planned(4096, model, wish)
    rule = OwnerRule.of((2, 1, 1))
    for rank in range(3):
        full, windowed = (GroupRows(slots, rule).tensor_rows[rank] for slots in (8192, 2944))
        counts = (
            sum(bool(layer.kv and bool(layer.kv.window) == seen) for layer in model.layers) for seen in (False, True)
        )
        every, some = counts
        assert made.window_slots == {512: 2896}  # a round of the vector has 64 slots: 2944
        assert abs(line(made, "kv", rank) - 2 * 384 * (every * full + some * windowed)) <= 2


def test_states_of_a_tensor_rank_go_by_heads_and_its_checkpoints_with_them() -> None:
    model = shape("dense27b")
    one = planned(65536, model, replace(THREE, cpu_ranks=1, running=2))
    for layout in LAYOUTS:
        made = planned(65536, model, replace(THREE, layout=layout, running=2))
        assert over_ranks(made, "state") == pytest.approx(line(one, "state"), abs=64), layout
    assert line(one, "state") > 0


def test_processes_acts_and_the_log_are_counted_once_for_all() -> None:
    one = planned(4096, small(), replace(THREE, cpu_ranks=1))
    made = planned(4096, small(), replace(THREE, layout="pipeline"))
    names = [each.name for each in made.lines]
    assert names.count("worker processes") == names.count("acts") == names.count("plan log") == 1
    assert line(made, "worker processes") == 3 * line(one, "worker processes")
    assert line(made, "acts") == act_bytes(3, act_sizes(small(), 3, "pipeline", 272, 16))
    assert line(one, "acts") == 0 and "weights" in [each.name for each in one.lines]
    assert line(made, "workspace", 2) > line(made, "workspace", 0) == line(made, "workspace", 1), (
        "the last has the head"
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_of_one_memory_hold_the_model_once(layout: str) -> None:
    model = shape("dense27b")
    wish = replace(THREE, layout=layout, kv_tokens=8256, running=2)
    one, apart = planned(65536, model, replace(wish, cpu_ranks=1, layout="auto")), planned(65536, model, wish)
    made = planned(65536, model, replace(wish, unified=True))
    row = line(one, "kv") // one.kv_tokens
    assert line(made, "weights") == line(one, "weights") and line(made, "state") == line(one, "state")
    assert line(made, "kv") == line(one, "kv") + (made.kv_tokens - one.kv_tokens + PAGE) * row
    assert over_ranks(made, "weights") == over_ranks(made, "kv") == over_ranks(made, "k and v copies") == 0
    assert [line(made, "workspace", rank) for rank in range(3)] == [line(apart, "workspace", rank) for rank in range(3)]
    assert made.most_tokens + PAGE >= apart.most_tokens and len(set(made.rank_tokens)) == 1
    refused = outcome_of(12000, model, replace(wish, unified=True))
    assert isinstance(refused, Refusal) and "MiB are missing" in refused.reason


# ------------------------------------------------------------------------------------------------- what all can hold


@settings(max_examples=10, deadline=None)
@given(
    st.integers(400, 6000),
    st.integers(0, 4000),
    st.integers(2, 6),
    st.sampled_from(LAYOUTS),
    st.sampled_from([1, 4, 16]),
)
def test_more_memory_never_holds_less_and_what_is_promised_fits(
    mib: int, more: int, ranks: int, layout: str, running: int
) -> None:
    wish = replace(THREE, cpu_ranks=ranks, layout=layout, running=running)
    less, larger = (outcome_of(size, small(), wish) for size in (mib, mib + more))
    if isinstance(less, Plan):
        assert isinstance(larger, Plan) and larger.most_tokens >= less.most_tokens
        assert larger.kv_tokens >= less.kv_tokens and larger.context >= less.context
    for made in (less, larger):
        if isinstance(made, Plan):
            (ceiling,) = (device.ceiling_bytes for device in made.ceilings.devices)
            assert ceiling is not None and peak_bytes(made.lines, 0) <= ceiling
            assert min(made.rank_tokens) >= made.kv_tokens
        else:
            assert isinstance(made, Refusal) and made.needed_bytes > made.available_bytes


@settings(max_examples=8, deadline=None)
@given(st.integers(600, 6000), st.integers(1, 15), st.sampled_from(LAYOUTS))
def test_more_ranks_hold_more_beside_the_pool_so_the_pool_is_never_larger(mib: int, ranks: int, layout: str) -> None:
    model = small(heads=16, kv_heads=16)
    fewer, more = (
        outcome_of(mib, model, replace(THREE, cpu_ranks=count, layout=layout if count > 1 else "auto"))
        for count in (ranks, ranks + 1)
    )
    if isinstance(more, Plan):
        assert isinstance(fewer, Plan) and fewer.most_tokens >= more.most_tokens


def test_the_largest_pool_fits_and_one_round_of_the_vector_more_does_not() -> None:
    wish = replace(THREE, layout="tensor", token_vector=(28, 26, 20), running=16)
    most = planned(1024, small(), wish).most_tokens
    assert most % (PAGE * 37) == 0
    assert planned(1024, small(), replace(wish, kv_tokens=most)).kv_tokens == most
    assert isinstance(outcome_of(1024, small(), replace(wish, kv_tokens=most + 1)), Refusal)


def test_b12_every_rank_tells_its_own_number_and_the_least_binds() -> None:
    wish = replace(THREE, layout="pipeline", pipeline_ratio=(5, 20, 5), kv_tokens=0)
    free = planned(1024, small(), wish)
    full = planned(1024, small(), replace(wish, kv_tokens=free.most_tokens))
    assert full.rank_tokens.index(min(full.rank_tokens)) == 1, "it has the most layers"
    assert min(full.rank_tokens) >= full.kv_tokens
    assert full.binds.line == "kv, rank 1" and "rank 1 needs most" in full.binds.why
    page = "\n".join(report(full, None, ()))
    assert "<- binds" in next(row for row in page.splitlines() if row.lstrip().startswith("1  device"))
    found = document(full.ceilings, None, full, ())["plan"]
    assert found["ranks"] == [0, 0, 0] and found["rank_tokens"] == list(full.rank_tokens)


# -------------------------------------------------------------------------------------------------------- the layout


def test_ranks_are_even_where_nothing_is_asked() -> None:
    made = planned(4096, small(), replace(THREE, layout="tensor"))
    assert made.weight_vector == made.token_vector == (1, 1, 1)
    four = planned(4096, small(), replace(THREE, cpu_ranks=4, layout="pipeline"))
    assert sorted(end - first for first, end in four.ranges) == [7, 7, 8, 8]


def test_layers_that_read_the_k_and_v_of_others_stay_with_them() -> None:
    model = small(shared_kv_layers=18)  # layers 12 to 29 read layer 11
    assert legal_ends(30, model.kv_sources) == tuple(range(1, 12))
    made = planned(4096, model, replace(THREE, layout="pipeline"))
    assert made.ranges == ((0, 10), (10, 11), (11, 30))
    with pytest.raises(WishError, match="rank 1 would end before layer 20, and layer 20 reads the K and V of layer 11"):
        planned(4096, model, replace(THREE, layout="pipeline", pipeline_ratio=(10, 10, 10)))
    nowhere = small(shared_kv_layers=29)
    with pytest.raises(
        WishError, match="30 layers, and layers that read the K and V of others can be parted in 0 places"
    ):
        planned(4096, nowhere, replace(THREE, layout="pipeline"))


def test_the_layout_is_chosen_by_the_estimate_and_says_why() -> None:
    made = planned(4096, small(), THREE)
    assert made.layouts == ("tensor",) and made.choice.startswith("tensor layout: by estimate ")
    assert any(made.choice in row for row in summary(made))
    assert {each.option for each in made.priced} == {CPU_SPLIT, CPU_STACKED}
    assert document(made.ceilings, None, made, ())["plan"]["choice"] == made.choice
    asked = planned(4096, small(), replace(THREE, layout="tensor"))
    assert asked.choice == "" and asked.kv_tokens == made.kv_tokens


def test_a_layout_that_is_not_clearly_faster_is_not_left_for() -> None:
    """Layers so small that the sums between ranks take longer than the layers."""
    tiny = small(hidden=64, ffn=64, heads=16, kv_heads=1, head_dim=8, vocab=256)
    made = planned(4096, tiny, replace(THREE, cpu_ranks=16, threads=1, cores=16))
    assert made.layouts == ("pipeline",) and "not clearly faster" in made.choice


def test_vectors_say_which_layout_is_meant() -> None:
    assert planned(4096, small(), replace(THREE, token_vector=(2, 1, 1))).layouts == ("tensor",)
    assert planned(4096, small(), replace(THREE, pipeline_ratio=(2, 1, 1))).layouts == ("pipeline",)


def test_a_model_that_one_layout_cannot_have_gets_the_other() -> None:
    few = small(heads=2, kv_heads=1)
    made = planned(4096, few, THREE)
    assert made.layouts == ("pipeline",)
    assert made.choice == "pipeline layout: this model cannot be divided among so many ranks in the tensor layout"
    short = small(layers=2)
    assert planned(4096, short, THREE).layouts == ("tensor",)


def test_ranks_that_share_cores_are_slower_and_that_is_in_doubt() -> None:
    own, shared = (planned(4096, small(), replace(THREE, layout="tensor", cores=cores)) for cores in (3, 2))
    assert shared.speeds["tensor"].decode_tok_s < own.speeds["tensor"].decode_tok_s
    assert [doubt.what for doubt in shared.doubts if doubt.where == "CPU ranks"] == ["3 ranks of 1 thread on 2 cores"]
    assert not [doubt for doubt in own.doubts if doubt.where == "CPU ranks"]


# --------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("wish", "model", "field", "words"),
    [
        (
            replace(THREE, layout="tensor"),
            {"heads": 2, "kv_heads": 1},
            "devices",
            "the tensor layout has 3 ranks and small an attention of 2 query heads: 1 would never attend",
        ),
        (replace(THREE, layout="pipeline"), {"layers": 2}, "devices", "has 3 ranks and small 2 layers"),
        (THREE, {"layers": 2, "heads": 2, "kv_heads": 1}, "devices", "2 layers; and the tensor layout has 3 ranks"),
        (
            replace(THREE, pipeline_ratio=(10, 10, 11)),
            {"nextn_layers": 1},
            "pipeline_ratio",
            "10+10+11 = 31, and the backbone has 30 layers; 31 counts the drafting block",
        ),
        (replace(THREE, pipeline_ratio=(20, 20, 20)), {}, "pipeline_ratio", "20+20+20 = 60, and the backbone has 30"),
        (replace(THREE, token_vector=(2, 1)), {}, "token_vector", "2 numbers for 3 ranks"),
        (replace(THREE, weight_vector=(2, 0, 1)), {}, "weight_vector", "2,0,1 holds a number below 1"),
        (replace(THREE, layout="pipeline", weight_vector=(2, 1, 1)), {}, "weight_vector", "pipeline layout has no"),
        (replace(THREE, layout="tensor", pipeline_ratio=(2, 1, 1)), {}, "pipeline_ratio", "tensor layout has no"),
        (replace(THREE, pipeline_ratio=(2, 1, 1), token_vector=(2, 1, 1)), {}, "pipeline_ratio", "one layout serves"),
        (replace(THREE, cpu_ranks=17), {}, "devices", "cpu:17 is more ranks than 16"),
        (replace(THREE, cpu_ranks=1, token_vector=(2, 1)), {}, "token_vector", "2 numbers for 1 rank"),
    ],
)
def test_what_contradicts_itself_is_refused_by_name(
    wish: Wish, model: dict[str, object], field: str, words: str
) -> None:
    with pytest.raises(WishError) as caught:
        planned(4096, small(**model), wish)
    assert caught.value.field == field and words in caught.value.what and caught.value.fix


def test_cards_beside_several_cpu_ranks_are_refused() -> None:
    card = Card("nvidia", "GPU-0", "NVIDIA GeForce RTX 3090", "sm_86", total_bytes=24576 * MIB, reserved_bytes=0)
    with pytest.raises(WishError, match="3 ranks on the CPU beside cards"):
        outcome_of(65536, small(), replace(THREE, devices=("cuda:0", "cpu")), card)
    made = outcome_of(65536, small(), THREE, card)
    assert isinstance(made, Plan) and made.ranks == (1, 1, 1), "cards that nobody named stay out of it"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_for_which_too_little_is_left_is_named_with_the_sum(layout: str) -> None:
    refused = outcome_of(620, small(), replace(THREE, layout=layout))
    assert isinstance(refused, Refusal)
    needs = [sum(each.bytes for each in refused.lines if each.name.endswith(f", rank {rank}")) for rank in range(3)]
    common = sum(each.bytes for each in refused.lines) - sum(needs)
    left, rank = refused.available_bytes - common, 0
    while needs[rank] <= left:
        left, rank = left - needs[rank], rank + 1
    assert refused.needed_bytes == common + sum(needs) == held_bytes(refused.lines, 0, "boot")
    shown = ", ".join(f"rank {each} needs {-(-need // MIB)} MiB" for each, need in enumerate(needs))
    assert f"For rank {rank} {left // MIB} MiB are left: {shown}" in refused.reason


@pytest.mark.parametrize("mib", [480, 560])
def test_the_nearest_of_a_refusal_is_on_the_cpu_and_fits(mib: int) -> None:
    where = Subject(box(mib), small(), file_fixed=True)
    refused = answer(where, replace(THREE, running=16, weight_vector=(2, 1, 1)))
    assert isinstance(refused, Refusal) and refused.nearest is not None
    assert refused.nearest["devices"] == "cpu" and refused.nearest["weight_vector"] == "auto"
    subject, wish = changed(where, refused.wish, refused.nearest)
    assert wish.cpu_ranks == 1 and isinstance(answer(subject, wish), Plan)
