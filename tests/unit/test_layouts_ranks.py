"""What each rank is: cores that nobody else has, plans in flight, parts that cover the model, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from budget.facts import MIB, Box, CpuFacts, MemoryFacts
from budget.ranks import ActSizes, largest
from budget.shape import load_shape
from homeserve.errors import BudgetError, SettingError
from homeserve.layouts.ranks import RankPlan, pinned_cores, rank_plan
from homeserve.settings import Settings, load
from homeserve.sizing import engine_limits, plan_of, ranks_of_plan, row_limit, wish_of

ACTS = ActSizes(65536, 1000, 64, 4)
PARTS: dict[str, Any] = {
    "layout": "pipeline", "ranks": 3, "layers": 12, "ranges": ((0, 6), (6, 9), (9, 12)), "kv_sources": {},
    "weight_vector": (), "token_vector": (), "threads": 0, "usable": 8, "cores": (0, 2, 4, 6, 8, 10, 12, 14),
    "acts": ACTS,
}  # fmt: skip
TENSOR = PARTS | {"layout": "tensor", "ranges": (), "weight_vector": (2, 1, 1), "token_vector": (4, 2, 2)}
ONE = PARTS | {"ranks": 1, "ranges": ((0, 12),)}


def made(parts: dict[str, Any], **more: Any) -> RankPlan:
    return rank_plan(**(parts | more))


class Facts:
    """What sizing reads of a model."""

    shape = load_shape("qwen3-4b")
    why_no_drafts = ""


def box(cores: int, mib: int = 65536) -> Box:
    facts = CpuFacts("CPU", cores, cores, "processors", frozenset())
    return Box("box", MemoryFacts(mib * MIB, mib * MIB, "MemTotal", mib * MIB, 0), facts)


def of_words(words: str, cores: int, mib: int = 65536) -> tuple[Settings, RankPlan, Any]:
    where, said = box(cores, mib), load(words.split(), {}, "/")
    plan = plan_of(said, Facts, where)  # type: ignore[arg-type]
    return said, ranks_of_plan(said, plan, where, tuple(range(cores))), plan


# ------------------------------------------------------------------------------------------------------------ one plan


def test_a_pipeline_has_one_plan_more_than_ranks_in_flight_and_a_group_for_each() -> None:
    plan = made(PARTS)
    assert (plan.layout, plan.ranges, plan.weight_vector, plan.token_vector) == ("pipeline", PARTS["ranges"], (), ())
    assert (plan.plans_in_flight, plan.decode_groups, plan.acts) == (4, 3, ACTS)
    assert (plan.threads, plan.cores, plan.spin_us) == (2, ((0, 2), (4, 6), (8, 10)), 100)
    assert plan.memory_domain == "discrete" and not plan.shares_cores


def test_a_tensor_layout_has_two_vectors_and_no_ranges() -> None:
    plan = made(TENSOR)
    assert (plan.layout, plan.ranges) == ("tensor", ())
    assert (plan.weight_vector, plan.token_vector) == ((2, 1, 1), (2, 1, 1)), "the owner rule's vector is reduced"
    assert (plan.plans_in_flight, plan.decode_groups) == (2, 1)


def test_one_rank_is_as_if_there_were_no_others() -> None:
    plan = made(ONE, threads=0)
    assert (plan.plans_in_flight, plan.decode_groups, plan.acts) == (2, 1, None)
    assert (plan.threads, plan.cores, plan.spin_us) == (0, (), 0)
    assert not plan.shares_cores and made(ONE, threads=5).threads == 5
    assert made(ONE | {"layout": "tensor"}).layout == "pipeline"


def test_with_a_flip_there_are_the_parts_of_both_layouts() -> None:
    both = PARTS | {"weight_vector": (2, 1, 1), "token_vector": (4, 2, 2), "flip": True}
    plan = made(both)
    assert (plan.layout, plan.layouts, plan.flip) == ("pipeline", ("pipeline", "tensor"), True)
    assert (plan.ranges, plan.weight_vector, plan.token_vector) == (PARTS["ranges"], (2, 1, 1), (2, 1, 1))
    assert (plan.plans_in_flight, plan.decode_groups) == (4, 3)
    other = made(both | {"layout": "tensor"})
    assert (other.layout, other.layouts) == ("tensor", ("tensor", "pipeline")) and other.ranges == PARTS["ranges"]
    assert (other.plans_in_flight, other.decode_groups) == (4, 1), "the log holds the plans of either"
    assert made(PARTS).layouts == ("pipeline",) and not made(PARTS).flip
    moving = both | {"transit_bytes": 640}
    assert made(moving).transit_bytes == 640 and made(PARTS | {"transit_bytes": 640}).transit_bytes == 0
    assert made(moving | {"memory_domain": "unified"}).transit_bytes == 0, "nothing moves"
    alone = made(ONE | {"flip": True})
    assert not alone.flip and alone.layouts == ("pipeline",)


def test_the_parts_of_the_layout_that_is_not_at_rest_are_checked_too() -> None:
    with pytest.raises(SettingError, match="weight_vector: there is no number"):
        made(PARTS | {"flip": True})
    with pytest.raises(SettingError):
        made(TENSOR | {"flip": True})


def test_what_is_exchanged_is_sized_for_the_larger_layout() -> None:
    assert largest((ActSizes(5, 9, 1, 5), ActSizes(7, 3, 1, 3))) == ActSizes(7, 9, 1, 5)


def test_ranks_that_lack_cores_are_not_pinned_and_do_not_spin() -> None:
    crowded = made(PARTS, usable=2, cores=(0, 1))
    assert (crowded.threads, crowded.cores, crowded.spin_us) == (1, (), 0) and crowded.shares_cores
    quota = made(PARTS, usable=5, threads=2)
    assert quota.cores == () and quota.spin_us == 0, "the control group's quota is less than the cores"
    assert made(PARTS, usable=6, threads=2).cores == ((0, 2), (4, 6), (8, 10))


@settings(max_examples=30)
@given(st.integers(1, 16), st.integers(1, 8), st.integers(1, 64), st.integers(1, 64))
def test_no_core_is_given_twice(ranks: int, threads: int, usable: int, cores: int) -> None:
    pinned = pinned_cores(ranks, threads, usable, tuple(range(0, 2 * cores, 2)))
    every = [core for own in pinned for core in own]
    assert len(every) == len(set(every)) and len(every) <= min(usable, cores)
    assert bool(pinned) == (ranks > 1 and ranks * threads <= min(usable, cores))
    assert all(len(own) == threads for own in pinned) and len(pinned) in (0, ranks)


@pytest.mark.parametrize(
    ("parts", "more", "message"),
    [
        (PARTS, {"ranges": ((0, 6), (6, 9), (9, 11))}, "end with layer 10, and there are 12"),
        (PARTS, {"ranges": ((0, 6), (7, 9), (9, 12))}, "layers 6 to 6 are on no rank"),
        (PARTS, {"kv_sources": {7: 5}}, "layer 7 reads the K and V of layer 5"),
        (TENSOR, {"token_vector": (4, 0, 2)}, "token_vector 4,0,2: rank 1 has 0 of 6 parts"),
        (TENSOR, {"weight_vector": (4, 0, 2)}, "weight_vector 4,0,2: rank 1 has 0"),
        (TENSOR, {"weight_vector": ()}, "weight_vector: there is no number"),
    ],
)
def test_parts_that_do_not_cover_the_model_are_refused(
    parts: dict[str, Any], more: dict[str, Any], message: str
) -> None:
    with pytest.raises(SettingError, match=message):
        made(parts, **more)


@pytest.mark.parametrize(
    ("parts", "more"), [(PARTS, {"ranks": 2}), (TENSOR, {"ranks": 4}), (TENSOR, {"token_vector": (1, 1)})]
)
def test_parts_for_other_ranks_are_a_bug(parts: dict[str, Any], more: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="entries for"):
        made(parts, **more)


# ------------------------------------------------------------------------------------------------- from settings on


def test_words_become_ranks() -> None:
    said, ranks, plan = of_words("--devices cpu:3 --layout pipeline --pipeline-ratio 2,1,1 --max-running 4", cores=6)
    assert (ranks.layout, ranks.ranges, ranks.threads) == ("pipeline", ((0, 18), (18, 27), (27, 36)), 2)
    assert ranks.cores == ((0, 1), (2, 3), (4, 5)) and ranks.spin_us == 100
    assert row_limit(said, plan) == 260
    assert ranks.acts == ActSizes(65536, 260 * 2 * 2560, 16, 5)
    limits = engine_limits(said, plan, ranks)
    assert (limits.plans_in_flight, limits.decode_groups, limits.kv_tokens) == (4, 3, plan.kv_tokens)


def test_vectors_become_ranks() -> None:
    words = "--devices cpu:3 --weight-vector 30,17,17 --token-vector 28,26,20 --threads 1"
    said, ranks, plan = of_words(words, cores=2)
    assert (ranks.layout, ranks.weight_vector, ranks.token_vector) == ("tensor", (30, 17, 17), (14, 13, 10))
    assert plan.kv_tokens % (16 * 37) == 0
    assert ranks.shares_cores and (ranks.threads, ranks.spin_us) == (1, 0)
    assert engine_limits(said, plan, ranks).plans_in_flight == 2


def test_nothing_said_is_one_rank_as_ever() -> None:
    said, ranks, plan = of_words("", cores=4)
    assert (ranks.ranks, ranks.ranges, ranks.acts, ranks.threads) == (1, ((0, 36),), None, 0)
    assert engine_limits(said, plan, ranks).plans_in_flight == 2


@pytest.mark.parametrize(
    ("words", "field", "part"),
    [
        (
            "--devices cpu:3 --layout pipeline --pipeline-ratio 20,10,10",
            "pipeline_ratio",
            "= 40, and the backbone has 36",
        ),
        ("--devices cpu:2 --context 999999", "context", "--context 999999 is more than"),
    ],
)
def test_what_the_model_cannot_have_is_a_setting(words: str, field: str, part: str) -> None:
    with pytest.raises(SettingError) as caught:
        of_words(words, cores=4)
    assert caught.value.field == field and part in caught.value.message
    assert caught.value.message.startswith(f"--{field.replace('_', '-')}")


def test_ranks_that_do_not_fit_are_refused_with_the_sum_and_the_way_out() -> None:
    with pytest.raises(BudgetError) as caught:
        of_words("--devices cpu:8 --weight-vector 1,1,1,1,1,1,1,1 --max-running 1", cores=8, mib=3300)
    message = caught.value.message
    assert "MiB are left: rank 0 needs " in message and "rank 7 needs " in message
    assert "weights, rank 7" in message, "the whole sum"
    assert "--devices cpu" in (caught.value.fix or "") and "without --weight-vector" in (caught.value.fix or "")


def test_a_vector_that_does_not_fit_is_told_and_the_ranks_stay() -> None:
    with pytest.raises(BudgetError) as caught:
        of_words("--devices cpu:3 --layout tensor --token-vector 500000,1,1 --max-running 1", cores=6)
    fix = caught.value.fix or ""
    assert caught.value.field == "token_vector" and fix.endswith("without --token-vector") and "--devices" not in fix


# ---------------------------------------------------------------------------------------------------------- the flip


BOTH = "--pipeline-ratio 2,1,1 --weight-vector 30,17,17 --token-vector 28,26,20"


@pytest.mark.parametrize(
    ("words", "resting", "policy"),
    [
        (f"--devices cpu:3 --layout pipeline --flip manual {BOTH}", "pipeline", "manual"),
        (f"--devices cpu:3 --layout tensor --flip auto {BOTH}", "tensor", "auto"),
        (f"--devices cpu:3 {BOTH}", None, "auto"),
    ],
)
def test_words_become_both_layouts(words: str, resting: str | None, policy: str) -> None:
    said, ranks, plan = of_words(f"{words} --flip-dwell-s 3 --park-deadline-s 4", cores=6)
    assert ranks.flip and resting in (None, ranks.layout)
    assert (ranks.ranges, ranks.weight_vector, ranks.token_vector) == (
        ((0, 18), (18, 27), (27, 36)),
        (30, 17, 17),
        (14, 13, 10),
    )
    assert ranks.plans_in_flight == 4 and ranks.acts is not None and ranks.acts.depth == 5
    limits = engine_limits(said, plan, ranks)
    flip = limits.flip
    assert flip is not None and set(flip.layouts) == {"pipeline", "tensor"}
    assert (flip.resting, flip.policy, flip.dwell_s, flip.park_deadline_s) == (ranks.layout, policy, 3.0, 4.0)
    own = flip.layouts[ranks.layout]
    at_rest = (limits.layout, limits.plans_in_flight, limits.decode_groups, limits.token_vector)
    assert at_rest == (own.name, own.plans_in_flight, own.decode_groups, own.token_vector)
    assert (flip.layouts["pipeline"].token_vector, flip.layouts["tensor"].token_vector) == ((), (14, 13, 10))
    assert flip.group_layers == (36,) and flip.state_layers == 0 and set(flip.estimates) == {"pipeline", "tensor"}
    assert flip.page_bytes == plan.flip.page_bytes and flip.cost_s > 0
    assert 0 < flip.transit_bytes <= ranks.transit_bytes, "the memory has room for whole lines"


@pytest.mark.parametrize(
    ("words", "code", "part"),
    [
        ("", "single_rank", "one rank has one layout"),
        ("--devices cpu:2 --flip off", "flip_off", "--flip off"),
        ("--devices cpu:2 --layout tensor", "flip_off", "the layout is chosen by --layout"),
        ("--devices cpu:2 --token-vector 2,1", "flip_off", "the layout is chosen by --token-vector"),
        ("--devices cpu:2 --deterministic", "flip_off", "--deterministic"),
    ],
)
def test_a_layout_that_stays_has_a_reason(words: str, code: str, part: str) -> None:
    said, ranks, plan = of_words(words, cores=4)
    limits = engine_limits(said, plan, ranks)
    assert limits.flip is None and not ranks.flip and ranks.transit_bytes == 0
    assert limits.no_flip.code == code and part in limits.no_flip.message


def test_a_flip_that_nobody_asked_for_is_left_out_where_it_does_not_fit_and_one_that_was_is_refused() -> None:
    words, mib = "--devices cpu:2 --context 2048 --max-running 1", 3600
    said, ranks, plan = of_words(words, cores=4, mib=mib)
    why = engine_limits(said, plan, ranks).no_flip
    assert not ranks.flip and why.code == "does_not_fit" and why.device == "cpu"
    assert why.needed_mib is not None and why.available_mib is not None and why.needed_mib > why.available_mib
    assert "MiB are missing" in why.message
    with pytest.raises(BudgetError) as caught:
        of_words(f"{words} --flip manual", cores=4, mib=mib)
    assert caught.value.field == "flip" and "weights copy 2347" in caught.value.message, "the whole sum"
    assert "MiB are missing" in caught.value.message and "without --flip" in (caught.value.fix or "")


def test_in_unified_memory_a_flip_has_no_transit_memory() -> None:
    said, ranks, plan = of_words("--devices cpu:2 --memory unified", cores=4)
    flip = engine_limits(said, plan, ranks).flip
    assert ranks.flip and ranks.transit_bytes == 0 and flip is not None and flip.unified


def test_images_are_asked_for_where_there_is_a_folder() -> None:
    where = box(4)
    assert wish_of(load("--devices cpu:2 --image-spill x".split(), {}, "/"), where).image_spill
    assert not wish_of(load("--devices cpu:2".split(), {}, "/"), where).image_spill
    flips = {words: wish_of(load(f"--devices cpu:2 {words}".split(), {}, "/"), where).flip for words in (
        "", "--flip auto", "--flip manual", "--flip off", "--layout tensor",
    )}  # fmt: skip
    assert list(flips.values()) == ["auto", "on", "on", "off", "off"]


def test_a_refusal_whose_way_out_keeps_the_flip_does_not_name_it() -> None:
    """A smaller pool fits with both layouts."""
    with pytest.raises(BudgetError) as caught:
        of_words("--devices cpu:2 --flip manual --kv-tokens 200000 --max-running 1", cores=4, mib=12000)
    assert "--kv-tokens" in (caught.value.fix or "") and "without" not in (caught.value.fix or "")
