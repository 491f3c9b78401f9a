"""Both layouts on the same devices: what each moment holds, what a flip may carry, and when there is none."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_budget_document import valid
from test_budget_ranks import LAYOUTS, THREE, box, line, outcome_of, planned, shape, small

from budget import host_lines
from budget.advice import Subject, answer, changed
from budget.ceilings import ceilings
from budget.document import document
from budget.facts import MIB, Card
from budget.flip import COMMIT, PHASES, PREPARE, REST
from budget.ledger import FLIP, MOMENTS, PIPELINE, TENSOR, held_bytes, peak_bytes
from budget.options import CPU_FLIPPING
from budget.plan import Plan, Refusal, WishError, plan
from budget.question import Question, run_settings, settings_of
from budget.ranks import act_bytes, act_sizes, largest
from budget.report import report
from budget.trial import job_seconds
from budget.wish import PAGE, Wish
from homeserve.layouts.owner import GroupRows, OwnerRule

BOTH = replace(THREE, flip="auto")
ASKED = replace(THREE, flip="on")
GUIDED_MIB = (host_lines.vocabulary_bytes(small()) + host_lines.grammar_bytes()) // MIB
"""What every plan has for guided answers."""


def held(made: Plan, name: str, rank: int, moment: str) -> int:
    wanted = host_lines.of_rank(name, rank)
    return sum(each.bytes for each in made.lines if each.name == wanted and moment in each.held)


# --------------------------------------------------------------------------------------------------------- what is held


def test_an_arena_is_as_large_as_the_larger_layout_s_weights() -> None:
    made = planned(4096, small(), BOTH)
    assert made.option == CPU_FLIPPING and set(made.layouts) == set(LAYOUTS)
    alone = {
        layout: planned(4096, small(), replace(THREE, layout=layout, kv_tokens=made.kv_tokens)) for layout in LAYOUTS
    }
    for rank in range(3):
        each = [line(alone[layout], "weights", rank) for layout in LAYOUTS]
        assert held(made, "weights", rank, FLIP) == max(each), rank
        assert all(held(made, "weights", rank, moment) == max(each) for moment in MOMENTS)
        assert held(made, "workspace", rank, FLIP) == sum(line(alone[layout], "workspace", rank) for layout in LAYOUTS)


@pytest.mark.parametrize("model", ["small", "dense27b"])
def test_pools_are_exclusive_and_on_the_way_at_most_the_larger(model: str) -> None:
    of = small(window=512, full_attention_every=5) if model == "small" else shape(model)
    made = planned(100_000, of, replace(ASKED, kv_tokens=8256, running=2))
    for rank in range(3):
        for layout in LAYOUTS:
            alone = planned(100_000, of, replace(THREE, layout=layout, kv_tokens=8256, running=2))
            for name in ("kv", "state"):
                assert held(made, name, rank, layout) == line(alone, name, rank), (name, rank, layout)
        sums = {
            moment: sum(
                each.bytes
                for each in made.lines
                if each.name.startswith(("kv", "state")) and each.name.endswith(f"rank {rank}") and moment in each.held
            )
            for moment in MOMENTS
        }
        most = max(sums[PIPELINE], sums[TENSOR])
        assert most <= sums[FLIP] < sums[PIPELINE] + sums[TENSOR] or most == 0
        assert sums["boot"] == sums[made.flip.resting], "the pools at rest are made"


def test_the_host_has_one_copy_of_the_weights_or_an_image_for_each_rank() -> None:
    copy = planned(4096, small(), BOTH)
    assert copy.flip.home == "copy" and copy.flip.image_bytes == ()
    assert line(copy, "weights copy") == copy.flip.copy_bytes == small().weights_bytes
    images = planned(4096, small(), replace(BOTH, image_spill=True))
    assert images.flip.home == "images" and line(images, "weights copy") == images.flip.copy_bytes == 0
    assert images.flip.image_bytes == tuple(held(images, "weights", rank, FLIP) for rank in range(3))


def test_in_unified_memory_nothing_is_copied_and_nothing_moves() -> None:
    made = planned(4096, small(), replace(BOTH, unified=True))
    assert made.flip.fits and made.flip.home == "unified" and made.flip.transit_bytes == 0
    assert not [each for each in made.lines if each.name in ("weights copy", "flip transit") or FLIP not in each.held]
    assert line(made, "weights") == small().weights_bytes, "once for both layouts"
    assert len({held_bytes(made.lines, 0, moment) for moment in MOMENTS}) == 1


def test_what_ranks_exchange_and_the_log_serve_either_layout() -> None:
    made = planned(4096, small(), BOTH)
    sizes = [act_sizes(small(), 3, layout, 272, 16) for layout in LAYOUTS]
    assert line(made, "acts") == act_bytes(3, largest(sizes)) >= max(act_bytes(3, each) for each in sizes)
    logs = [line(planned(4096, small(), replace(THREE, layout=layout)), "plan log") for layout in LAYOUTS]
    assert line(made, "plan log") > max(logs)


def test_columns_that_no_copy_has_together_are_kept_aside() -> None:
    made = planned(100_000, shape("dense27b"), replace(BOTH, running=2))
    assert made.flip.home == "copy"
    mixers = sum(layer.mixer_bytes for layer in made.shape.layers if layer.state_elements)
    assert 0 < sum(line(made, "weights side", rank) for rank in range(3)) < mixers / 2
    assert not [each for each in planned(4096, small(), BOTH).lines if each.name.startswith("weights side")]


# ------------------------------------------------------------------------------------------------------ what it carries


def test_all_of_the_pool_may_be_carried_where_there_is_room_and_less_where_there_is_not() -> None:
    made = planned(4096, small(), BOTH)
    row = sum(layer.kv.elements * 2 for layer in small().layers if layer.kv)
    assert made.flip.page_bytes == (PAGE * row,)
    assert made.flip.transit_bytes == made.flip.cache_bytes == made.kv_tokens * row
    tight = planned(900 + GUIDED_MIB, small(), ASKED)
    assert tight.flip.fits and tight.flip.transit_bytes == tight.kv_tokens // PAGE * (PAGE * row) // 4
    for each in (made, tight):
        assert each.flip.transit_bytes <= each.flip.transit_file_bytes <= line(each, "flip transit")


def test_states_of_all_running_requests_are_carried_whatever_happens() -> None:
    model = shape("dense27b")
    made = planned(200_000, model, replace(ASKED, running=2, kv_tokens=8256))
    assert made.checkpoints == 4 and made.flip.state_bytes == model.state_bytes_per_request()
    rows = made.kv_tokens // PAGE * made.flip.page_bytes[0]
    assert made.flip.transit_bytes == rows + 6 * made.flip.state_bytes
    without = held_bytes(made.lines, 0, PIPELINE) - line(made, "flip transit")
    tight = planned(without // MIB + 1500, model, replace(ASKED, running=2, kv_tokens=8256))
    assert tight.flip.transit_bytes < made.flip.transit_bytes
    assert tight.flip.transit_bytes >= rows / 4 + 2 * tight.flip.state_bytes


def test_a_page_of_each_group_is_told_with_that_of_layers_that_keep_all_first() -> None:
    model = small(window=512, full_attention_every=5)
    made = planned(4096, model, BOTH)
    rows = {
        window: sum(layer.kv.elements * 2 for layer in model.layers if layer.kv and layer.kv.window == window)
        for window in (0, 512)
    }
    assert made.flip.page_bytes == (PAGE * rows[0], PAGE * rows[512])
    slots = made.window_slots[512]
    assert made.flip.transit_bytes == made.kv_tokens * rows[0] + slots * rows[512]


# ------------------------------------------------------------------------------------------------------------ the peaks


@settings(max_examples=8, deadline=None)
@given(
    st.integers(700, 6000),
    st.integers(2, 5),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["auto", "pipeline", "tensor"]),
)
def test_the_figure_of_every_phase_is_in_the_ledger(
    mib: int, ranks: int, unified: bool, spill: bool, rest: str
) -> None:
    wish = replace(ASKED, cpu_ranks=ranks, unified=unified, image_spill=spill and not unified, layout=rest)
    made = outcome_of(mib, small(), wish)
    if not isinstance(made, Plan):
        assert isinstance(made, Refusal) and made.needed_bytes > made.available_bytes
        return
    assert made.flip.fits and made.flip.resting == made.layouts[0] and rest in ("auto", made.flip.resting)
    assert set(made.flip.peaks) == set(made.flip.shared_peaks) == set(PHASES)
    for layout in LAYOUTS:
        at_rest, prepare, commit = (f"{step}, {layout}" for step in (REST, PREPARE, COMMIT))
        total = {
            phase: sum(made.flip_peak(rank, phase) for rank in range(ranks)) + made.flip.shared_peaks[phase]
            for phase in (at_rest, prepare, commit)
        }
        assert total[at_rest] == held_bytes(made.lines, 0, layout)
        assert total[prepare] == total[commit] == total[at_rest], "transit memory is kept, and pools are exclusive"
        assert unified or made.flip.shared_peaks[at_rest] > line(made, "flip transit") > 0
        assert total[prepare] <= held_bytes(made.lines, 0, FLIP) <= peak_bytes(made.lines, 0)
        assert made.flip_peak(0, prepare) == sum(
            each.bytes for each in made.lines if each.name.endswith("rank 0") and layout in each.held
        )
    with pytest.raises(KeyError):
        planned(4096, small(), THREE).flip_peak(0, PHASES[0])


# ------------------------------------------------------------------------------------------------------ with or without


@settings(max_examples=8, deadline=None)
@given(st.integers(400, 6000), st.integers(0, 2000), st.integers(2, 6), st.sampled_from([1, 4, 16]), st.booleans())
def test_more_memory_never_means_a_smaller_context_with_a_flip_or_without(
    mib: int, more: int, ranks: int, running: int, unified: bool
) -> None:
    wish = replace(BOTH, cpu_ranks=ranks, running=running, unified=unified)
    less, larger = (outcome_of(size, small(), wish) for size in (mib, mib + more))
    if isinstance(less, Plan):
        assert isinstance(larger, Plan) and larger.context >= less.context
        assert larger.kv_tokens >= less.kv_tokens
        assert larger.flip.fits or not less.flip.fits
        without = planned(mib, small(), replace(wish, flip="off"))
        assert without.kv_tokens <= less.kv_tokens < without.kv_tokens + PAGE * ranks, "it costs no tokens"
    for made in (less, larger):
        if isinstance(made, Plan):
            (ceiling,) = (device.ceiling_bytes for device in made.ceilings.devices)
            assert ceiling is not None and peak_bytes(made.lines, 0) <= ceiling
            assert min(made.rank_tokens) >= made.kv_tokens
            assert min(made.flip.addressable.values(), default=made.kv_tokens) >= made.kv_tokens


def test_both_layouts_have_rows_for_every_token_of_the_pool() -> None:
    wish = replace(ASKED, kv_tokens=6000, token_vector=(28, 26, 20), pipeline_ratio=(1, 2, 3))
    made = planned(4096, small(), wish)
    rule = OwnerRule.of(made.flip.token_vector)
    assert made.kv_tokens >= 6000 and made.kv_tokens % rule.round_slots == 0
    rows = GroupRows(made.kv_tokens, rule).tensor_rows
    each = small().layers[0].kv
    assert each is not None
    for rank, (first, end) in enumerate(made.flip.ranges):
        assert held(made, "kv", rank, PIPELINE) == made.kv_tokens * (end - first) * each.elements * 2
        assert abs(held(made, "kv", rank, TENSOR) - rows[rank] * 30 * each.elements * 2) <= 1
    assert made.flip.ranges == ((0, 5), (5, 15), (15, 30)) and made.flip.weight_vector == (1, 1, 1)


def test_a_flip_that_would_cost_tokens_is_left_out_with_the_sum() -> None:
    made = planned(900 + GUIDED_MIB, small(), BOTH)
    assert made.layouts == ("tensor",) and not made.flip.fits
    assert made.kv_tokens == planned(900 + GUIDED_MIB, small(), THREE).kv_tokens
    short = made.flip.needed_bytes - made.flip.available_bytes
    assert made.flip.available_bytes == made.ceilings.devices[0].ceiling_bytes and made.flip.short_device == 0
    assert f"{-(-short // MIB)} MiB are missing" in made.flip.why_not
    assert "137 for a second copy of the weights" in made.flip.why_not and "for what moves" in made.flip.why_not
    page = " ".join(" ".join(report(made, None, ())).split())
    assert "No flip between the layouts: a flip would take 137 for a second copy" in page


def test_a_flip_that_was_asked_for_is_had_with_fewer_tokens_or_refused_with_the_sum() -> None:
    made = planned(900 + GUIDED_MIB, small(), ASKED)
    assert made.flip.fits and made.kv_tokens < planned(900 + GUIDED_MIB, small(), THREE).kv_tokens
    refused = outcome_of(700 + GUIDED_MIB, small(), ASKED)
    assert isinstance(refused, Refusal) and refused.option == CPU_FLIPPING
    assert {"weights copy", "flip transit"} <= {each.name for each in refused.lines}
    assert isinstance(outcome_of(700 + GUIDED_MIB, small(), THREE), Plan)
    pinned = outcome_of(900 + GUIDED_MIB, small(), replace(ASKED, kv_tokens=8192))
    assert isinstance(pinned, Refusal) and pinned.needed_bytes > pinned.available_bytes


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_that_was_chosen_stays_unless_a_flip_is_asked_for_too(layout: str) -> None:
    assert planned(4096, small(), replace(BOTH, layout=layout)).layouts == (layout,)
    assert planned(4096, small(), replace(BOTH, token_vector=(2, 1, 1))).layouts == ("tensor",)
    made = planned(4096, small(), replace(ASKED, layout=layout))
    assert made.layouts[0] == made.flip.resting == layout and len(made.layouts) == 2


def test_a_model_that_one_layout_cannot_have_has_no_flip() -> None:
    few = small(heads=2, kv_heads=1)
    made = planned(4096, few, BOTH)
    assert made.layouts == ("pipeline",) and "1 would never attend" in made.flip.why_not
    with pytest.raises(WishError, match="1 would never attend") as caught:
        planned(4096, few, ASKED)
    assert caught.value.field == "flip"


def test_the_layout_that_could_address_more_is_held_to_the_other_and_that_is_said() -> None:
    """Of a card's rows in the pipeline layout, a vector that does not follow the memory left makes fewer."""
    cards = [
        Card("nvidia", f"GPU-{each}", "NVIDIA GeForce RTX 3090", "sm_86", total_bytes=size * MIB, reserved_bytes=0,
             free_bytes=size * MIB)
        for each, size in enumerate((24576, 24576))
    ]  # fmt: skip
    where = box(65536, *cards)
    wish = Wish(flip="on", kv_type="f16", draft=False, running=4, token_vector=(7, 1), pipeline_ratio=(32, 32))
    made = plan(ceilings(where, None), shape("dense27b"), wish)
    assert isinstance(made, Plan) and made.flip.fits
    least, most = sorted(made.flip.addressable.values())
    assert made.flip.addressable["tensor"] == least < most and made.kv_tokens == made.most_tokens <= least
    page = " ".join(" ".join(report(made, None, ())).split()).replace(" ", "")
    words = f"thepipelinelayoutcouldaddress{most}tokensandthetensorlayout{least}:bothareheldto{made.kv_tokens}"
    assert words in page and "--token-vector" in page


def test_cards_without_room_for_both_layouts_say_what_lacks() -> None:
    cards = [
        Card("nvidia", f"GPU-{each}", "NVIDIA GeForce RTX 3090", "sm_86", total_bytes=24576 * MIB, reserved_bytes=0,
             free_bytes=24576 * MIB)
        for each in range(2)
    ]  # fmt: skip
    enough, little = (plan(ceilings(box(mib, *cards), None), shape("dense27b"), Wish()) for mib in (65536, 12000))
    assert isinstance(enough, Plan) and enough.flip.fits and enough.flip.transit_bytes > 0
    assert enough.flip.copy_bytes > 0 and enough.flip.ranges == enough.ranges
    assert isinstance(little, Plan) and not little.flip.fits
    assert "MiB for a copy of the weights" in little.flip.why_not
    assert little.flip.needed_bytes > little.flip.available_bytes and little.flip.short_device == 2
    small_cards = [replace(each, total_bytes=12000 * MIB, free_bytes=12000 * MIB) for each in cards]
    refused = plan(ceilings(box(12000, *small_cards), None), shape("dense27b"), Wish(flip="on"))
    assert isinstance(refused, Refusal) and "MiB are missing" in refused.reason
    with pytest.raises(WishError, match="nothing to flip to"):
        plan(ceilings(box(65536, cards[0]), None), shape("dense27b"), Wish(flip="on"))


def mixed(flip: str) -> Plan:
    """A small model on two cards that exchange by way of the host: every layer's sum costs more than it saves."""
    memory = {"total_bytes": 24576 * MIB, "reserved_bytes": 0, "free_bytes": 24576 * MIB, "bandwidth_bytes_s": 936e9}
    cards = [
        Card("nvidia", "GPU-1", "NVIDIA GeForce RTX 3090", "sm_86", **memory),  # type: ignore[arg-type]
        Card("amd", "GPU-2", "AMD Radeon RX 7900 XTX", "gfx1100", **memory),  # type: ignore[arg-type]
    ]
    wish = Wish(devices=("cuda:0", "rocm:0"), in_order=True, cpu_moe=0, flip=flip, resident=False, like_cpu=True)
    made = plan(ceilings(box(65536, *cards), None), small(), wish)
    assert isinstance(made, Plan)
    return made


def test_cards_that_are_faster_with_one_layout_say_so_with_the_times_of_both() -> None:
    alone, both = mixed("auto"), mixed("on")
    assert alone.layouts == ("pipeline",) and both.flip.fits
    alone_s, both_s = job_seconds(alone.speeds), job_seconds(both.speeds)
    assert alone_s < both_s
    for said in (f"takes {alone_s:.2g} s in the pipeline layout alone", f"{both_s:.2g} s with a flip in between"):
        assert said in alone.flip.why_not
    assert "--flip manual" in alone.flip.why_not and not alone.flip.needed_bytes
    told = valid(document(alone.ceilings, None, alone, ()))["plan"]["flip"]
    assert told["fits"] is False and told["why_not"] == alone.flip.why_not and told["needed_mib"] is None
    assert mixed("off").flip.why_not == ""


# ------------------------------------------------------------------------------------------------------------- told


def test_the_document_tells_of_the_flip_and_of_its_peaks() -> None:
    made = planned(4096, small(), BOTH)
    told = valid(document(made.ceilings, None, made, ()))["plan"]["flip"]
    assert told["fits"] is True and told["why_not"] is None and told["weights_from"] == "copy"
    assert told["resting"] == made.layouts[0] and told["transit_mib"] == round(made.flip.transit_bytes / MIB, 2)
    assert [each["phase"] for each in told["peaks"]] == list(PHASES)
    assert all(len(each["rank_mib"]) == 3 and each["shared_mib"] > 0 for each in told["peaks"])
    without = valid(document(made.ceilings, None, planned(900 + GUIDED_MIB, small(), BOTH), ()))["plan"]["flip"]
    assert without["fits"] is False and without["why_not"] and without["seconds"] is None
    assert without["needed_mib"] > without["available_mib"]
    assert document(made.ceilings, None, planned(4096, small(), THREE), ())["plan"]["flip"] is None


def test_the_nearest_of_a_refused_flip_is_a_plan_again() -> None:
    where = Subject(box(600), small(), file_fixed=True)
    refused = answer(where, ASKED)
    assert isinstance(refused, Refusal) and refused.nearest is not None
    subject, wish = changed(where, refused.wish, refused.nearest)
    found = answer(subject, wish)
    assert isinstance(found, Plan) and settings_of(ASKED)["flip"] == "manual"


def test_a_plan_s_command_asks_for_the_flip_again() -> None:
    made = planned(900 + GUIDED_MIB, small(), ASKED)
    assert "--flip manual" in Question("m.gguf").up_line(run_settings(made))
    _, again = changed(Subject(box(900 + GUIDED_MIB), small()), replace(made.wish, flip="off"), {"flip": "manual"})
    assert again.flip == "on"
