"""How models are cut over ranks: the fullest cut against all cuts, ways out that exist are found, wishes that
contradict themselves are named, and what each rank holds whatever the cut."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from budget.ceilings import ceilings
from budget.cuts import cuts, fullest
from budget.facts import MIB, Box, Card, CpuFacts, MemoryFacts, ModelShape
from budget.geometry import requantised
from budget.job import LOGPROB_ROWS, settle
from budget.ledger import BOOT, FLIP, PIPELINE, TENSOR
from budget.options import FLIPPING, STACKED
from budget.placement import Cut, Option, Shard, pipeline_shares, tensor_shares
from budget.plan import Plan, Refusal, Unknown, WishError, plan
from budget.shape import load_shape, shape_from_json
from budget.solve import fits, room
from budget.terms import terms
from budget.wish import DEFAULT_HOST_FLOOR, DEFAULT_RUNNING, PAGE, Wish

SHAPES = Path(__file__).parents[1] / "data" / "shapes"
CPU = CpuFacts("CPU", 8, 8, "processors", frozenset())


@cache
def shape(name: str) -> ModelShape:
    return load_shape(str(SHAPES / f"{name}.json"))


def card(number: int, mib: int, name: str = "NVIDIA GeForce RTX 3090") -> Card:
    size = mib * MIB
    return Card("nvidia", f"GPU-{number}", name, "sm_86", total_bytes=size, reserved_bytes=0, free_bytes=size)


def box(*cards: Card, ram_mib: int | None = 65536) -> Box:
    memory = None
    if ram_mib is not None:
        memory = MemoryFacts(ram_mib * MIB, ram_mib * MIB, "MemTotal", (ram_mib - 2048) * MIB, 0)
    return Box("box", memory, CPU, cards)


def planned(where: Box, model: ModelShape, wish: Wish) -> Plan | Refusal | Unknown:
    return plan(ceilings(where, wish.floor_bytes), model, wish)


def fitting(where: Box, model: ModelShape, wish: Wish = Wish()) -> Plan:  # noqa: B008  a frozen value
    outcome = planned(where, model, wish)
    assert isinstance(outcome, Plan), outcome
    return outcome


TWO = (card(0, 24576), card(1, 12288))
RIG = box(card(0, 32607), card(1, 20480), card(2, 20480), ram_mib=98 * 1024)


def small(layers: int, **more: object) -> ModelShape:
    fields = {"arch": "llama", "hidden": 2048, "ffn": 8192, "heads": 16, "kv_heads": 4, "vocab": 64000}
    return shape_from_json({**fields, "layers": layers, "quant": "Q8_0", **more}, "small")


def all_cuts(layers: int, ranks: int) -> list[Cut]:
    if ranks == 2:
        return [Cut(((0, a), (a, layers))) for a in range(1, layers)]
    return [Cut(((0, a), (a, b), (b, layers))) for a in range(1, layers - 1) for b in range(a + 1, layers)]


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(1800, 4000), min_size=2, max_size=3), st.integers(3, 9), st.sampled_from([0, 512]))
@example([1800, 2692, 1800], 9, 0)  # buffers grow with the tokens up to the longest request: here no pool is as long
def test_the_fullest_cut_is_the_best_of_all_cuts(cards: list[int], layers: int, window: int) -> None:
    mixed = {"window": window, "full_attention_every": 3} if window else {}
    job = settle(small(layers, **mixed), Wish(running=2))
    limits = ceilings(box(*(card(n, size) for n, size in enumerate(cards))), None)
    option = Option(STACKED, tuple(range(len(cards))))

    def tokens(cut: Cut) -> int:
        return room(terms(job, option, limits, pipeline_shares(job, option, cut), ()), limits).tokens

    best = max(tokens(cut) for cut in all_cuts(layers, len(cards)))
    found = fullest(job, option, limits)
    assert (found is not None) == (best >= 0)
    if found is not None:
        assert abs(tokens(found) - best) <= 1  # a line rounds up to whole bytes
        assert found in cuts(job, option, limits)


@pytest.mark.parametrize(
    ("cards", "ram", "name", "wish", "option"),
    [
        # Neither the cut by speed nor that by memory fits, one in between does.
        ((3280, 7218, 5954), None, "gpt-oss-20b", Wish(running=4, layout="pipeline"), "cards, pipeline layout"),
        # Host memory holds a part of the experts, never all of them.
        ((13000,), 17500, "moe35b", Wish(running=1), "cards, experts on the CPU"),
        # Experts of the second card's layers have to go as well: the cut follows what stays.
        ((4973, 4363), 24000, "moe35b", Wish(), "cards, experts on the CPU"),
        # A card that is left out at first, as too small, holds what lacks.
        ((16700, 2900), None, "dense27b", Wish(running=1), "all cards, pipeline layout"),
    ],
)
def test_a_way_that_exists_is_found(
    cards: tuple[int, ...], ram: int | None, name: str, wish: Wish, option: str
) -> None:
    model = load_shape(name) if name == "gpt-oss-20b" else shape(name)
    made = fitting(box(*(card(n, size) for n, size in enumerate(cards)), ram_mib=ram), model, wish)
    assert made.option == option and fits(made.lines, made.ceilings)


@pytest.mark.parametrize("layout", ["pipeline", "tensor", "auto"])
@settings(max_examples=8, deadline=None)
@given(
    st.lists(st.integers(6000, 30000), min_size=2, max_size=3),
    st.integers(0, 2),
    st.integers(0, 8000),
    st.sampled_from(["dense27b", "dense8b"]),
)
def test_more_memory_on_one_of_several_cards_never_means_less(
    layout: str, cards: list[int], which: int, more: int, name: str
) -> None:
    grown = list(cards)
    grown[which % len(cards)] += more
    wish = Wish(layout=layout, flip="off", running=4)
    before, after = (
        planned(box(*(card(n, size) for n, size in enumerate(sizes)), ram_mib=None), shape(name), wish)
        for sizes in (cards, grown)
    )
    if isinstance(before, Plan):
        assert isinstance(after, Plan)
        # A pool is whole rounds of the token vector on all ranks: at most one of them less.
        slack = PAGE * max(1, sum(after.token_vector)) if layout != "pipeline" else PAGE
        assert after.context >= min(before.context, after.shape.context) - slack


def test_a_slow_second_card_never_costs_context() -> None:
    slow, quick = "Tesla P40", "NVIDIA GeForce RTX 3060"
    one = fitting(box(card(0, 5017, slow), card(1, 36136, quick), ram_mib=70713), shape("moe35b"), Wish(running=16))
    two = fitting(box(card(0, 6017, slow), card(1, 36136, quick), ram_mib=70713), shape("moe35b"), Wish(running=16))
    assert two.context >= one.context == 262144
    assert "one card" in {priced.option for priced in two.priced}, "the large one alone is always looked at"


def test_a_small_host_keeps_its_requests_at_once() -> None:
    """It gives a quarter of its room unasked, but never fewer requests for the sake of a quarter."""
    made = fitting(box(ram_mib=14000), shape("dense8b"))
    assert (made.running, made.context) == (DEFAULT_RUNNING, 8192) and made.most_tokens > 8192


@pytest.mark.parametrize(
    ("field", "wish"),
    [
        ("layout", Wish(devices=("cuda:0", "cpu"), layout="tensor")),
        ("weight_vector", Wish(layout="pipeline", weight_vector=(2, 1))),
        ("pipeline_ratio", Wish(layout="tensor", pipeline_ratio=(2, 1))),
        ("token_vector", Wish(token_vector=(1, 2, 3))),
        ("devices", Wish(devices=("cuda:0", "cuda:1", "cpu"))),
    ],
)
def test_what_no_layout_reads_is_named_and_not_ignored(field: str, wish: Wish) -> None:
    with pytest.raises(WishError) as caught:
        planned(box(*TWO), small(2), wish)
    assert caught.value.field == field and caught.value.fix


def test_a_ratio_of_the_cards_is_never_read_as_one_with_the_cpu() -> None:
    outcome = planned(
        box(card(0, 6000), card(1, 6000), ram_mib=12000), shape("dense27b"), Wish(pipeline_ratio=(40, 24))
    )
    assert isinstance(outcome, Refusal) and {"CPU", "cards and a CPU rank"}.isdisjoint(p.option for p in outcome.priced)


def test_more_cards_than_layers_are_no_crash() -> None:
    made = fitting(box(*(card(n, 8000) for n in range(4))), small(2))
    assert len(made.ranks) <= 2


def test_rows_of_logits_lie_on_the_rank_that_has_the_head() -> None:
    made = fitting(RIG, shape("dense27b"), Wish(layout="pipeline", running=4))
    sizes = [line.bytes for line in made.lines if line.name == "workspace"]
    assert sizes[0] == sizes[1] and sizes[2] - sizes[0] >= (4 + LOGPROB_ROWS) * made.shape.vocab * 4


def test_experts_on_the_host_take_buffers_there_and_a_way_back() -> None:
    made = fitting(box(card(0, 12288)), shape("moe35b"))
    host = len(made.ceilings.devices) - 1
    assert {"experts", "workspace", "state checkpoints"} <= {line.name for line in made.lines if line.device == host}
    whole = fitting(box(card(0, 49152)), shape("moe35b"))
    assert made.speeds[PIPELINE].prefill_tok_s < whole.speeds[PIPELINE].prefill_tok_s / 2
    assert made.speeds[PIPELINE].decode_tok_s < whole.speeds[PIPELINE].decode_tok_s / 2


def test_a_flip_holds_the_larger_pool_of_either_layout_windows_included() -> None:
    """Of 24 layers the last alone keeps every token: the first rank has more windows in one layout, and rows only in
    the other."""
    job = settle(small(24, window=8192, attention_layers=[23], context=65536), Wish(running=16))
    limits = ceilings(box(card(0, 16000), card(1, 16000)), None)
    option = Option(FLIPPING, (0, 1), (PIPELINE, TENSOR))
    before = pipeline_shares(job, option, Cut(((0, 20), (20, 24))))
    found = terms(job, option, limits, before, tensor_shares(job, Shard((1, 1), (1, 1))))
    for rank in option.ranks:
        pools = [term.at(4096) for term in found if term.device == rank and term.name.startswith("kv")]
        held = {m: sum(line.bytes for line in pools if m in line.held) for m in (BOOT, PIPELINE, TENSOR, FLIP)}
        assert min(held[BOOT], held[FLIP]) >= max(held[PIPELINE], held[TENSOR])


def test_constants_of_two_rooms_are_one_number() -> None:
    from backends.base import PAGE_LEN
    from homeserve.engine.scheduler import PROMPT_LOGPROB_ROWS
    from homeserve.settings import Settings

    assert (PAGE, LOGPROB_ROWS) == (PAGE_LEN, PROMPT_LOGPROB_ROWS)
    assert Settings().max_running == DEFAULT_RUNNING
    assert Settings().floor_mib * MIB == DEFAULT_HOST_FLOOR


@pytest.mark.parametrize("context", [0, 4096, 8192])
def test_coarse_heads_are_evened_out_over_uneven_cards(context: int) -> None:
    """Two groups of heads over 4 and 18 GB: the vector by memory puts a whole group where half of it has room."""
    model = requantised(shape("moe35b"), "IQ4_XS")
    cards = card(0, 4149, "NVIDIA GeForce RTX 4090"), card(1, 18382, "Tesla P40")
    made = fitting(box(*cards, ram_mib=None), model, Wish(running=8, kv_type="q8_0", context=context))
    assert made.layouts == (TENSOR,) and made.context == (context or 8192) and fits(made.lines, made.ceilings)
