"""Rates of devices, the roofline of each layout against published speeds, flips and when they pay."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from budget.cards import known_rates, link_gb_s
from budget.ceilings import Device
from budget.facts import Card, Link, ModelShape
from budget.shape import load_shape
from budget.speed import (
    FLIP_FIXED_S,
    SURE,
    UNSURE,
    DeviceRates,
    LayoutSpeed,
    Work,
    break_even,
    flip_seconds,
    pipeline_speed,
    rates_of,
    tensor_speed,
)

BOXES = Path(__file__).parent.parent / "data/boxes/boxes.json"
few = settings(max_examples=40, deadline=None)


def device(name: str, kind: str = "discrete", card: Card | None = None, arch: str | None = None) -> Device:
    return Device(0, "x", "nvidia", name, arch, kind, True, None, None, None, None, None, None, 0, card=card)


def card(**known: object) -> Card:
    return replace(Card("nvidia", "x", "a card"), **known)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------------------ rates


def test_a_known_card_on_a_known_link_is_sure() -> None:
    rates = rates_of(device("NVIDIA GeForce RTX 3090", card=card(link=Link(4, 16))))
    assert (rates.read_bytes_s, rates.int8_ops_s, rates.sure) == (936e9, 285e12, True)
    assert rates.link_bytes_s == pytest.approx(31.5e9, rel=0.001)
    assert "3090" in rates.source


@pytest.mark.parametrize("link", [None, Link(None, 16), Link(4, None), Link(9, 16)], ids=str)
def test_a_link_that_nobody_describes_is_a_guess(link: Link | None) -> None:
    rates = rates_of(device("NVIDIA GeForce RTX 3090", card=card(link=link)))
    assert not rates.sure and "link is a guess" in rates.source
    assert rates.link_bytes_s > 0


def test_a_card_that_is_in_no_table_is_a_guess_by_its_architecture() -> None:
    by_arch = rates_of(device("Graphics Device", arch="sm_86", card=card(link=Link(4, 8))))
    nothing = rates_of(device("Graphics Device", card=card(link=Link(4, 8))))
    assert not by_arch.sure and "sm_86" in by_arch.source
    assert not nothing.sure and "no table" in nothing.source


def test_a_card_that_tells_clock_and_width_of_its_memory_is_believed() -> None:
    rates = rates_of(device("NVIDIA GeForce RTX 3080", card=card(link=Link(4, 16), bandwidth_bytes_s=912e9)))
    assert rates.read_bytes_s == 912e9
    assert rates.int8_ops_s == 238e12


def test_memory_of_an_integrated_device_is_never_sure() -> None:
    rates = rates_of(device("AMD Radeon 780M", "uma", arch="gfx1103"))
    assert (rates.read_bytes_s, rates.sure) == (90e9, False)
    assert "usual memory" in rates.source
    assert rates_of(device("AMD Radeon Graphics", "uma", arch="gfx1103")).read_bytes_s == 90e9


@pytest.mark.parametrize(
    ("name", "gb_s"),
    [
        ("AMD EPYC 7763 64-Core Processor", 200),
        ("AMD RYZEN AI MAX+ 395 w/ Radeon 8060S", 110),
        ("AMD Ryzen 7 PRO 8840HS w/ Radeon 780M Graphics", 65),
        ("12th Gen Intel(R) Core(TM) i7-12700K", 65),
        ("Intel(R) Core(TM) i5-3570K CPU @ 3.40GHz", 40),
        ("Intel(R) Celeron(R) J4125 CPU", 12),
        ("CPU", 40),
    ],
)
def test_memory_of_a_cpu_is_a_guess_by_its_kind(name: str, gb_s: int) -> None:
    rates = rates_of(device(name, "cpu"), cores=64)
    assert (rates.read_bytes_s, rates.sure) == (gb_s * 1e9, False)


def test_few_cores_do_not_read_all_of_the_memory() -> None:
    one, two = (rates_of(device("AMD EPYC 9454", "cpu"), cores) for cores in (1, 2))
    assert two.read_bytes_s == 2 * one.read_bytes_s < 40e9
    assert two.int8_ops_s == 2 * one.int8_ops_s
    assert "taken" in rates_of(device("CPU", "cpu")).source


def test_a_part_of_a_card_is_not_the_card() -> None:
    assert known_rates("NVIDIA H100 80GB HBM3", "sm_90", False).sure
    assert not known_rates("NVIDIA H100 80GB HBM3 MIG slice", "sm_90", False).sure
    assert not known_rates("NVIDIA GeForce GTX 1650 Mobile", "sm_75", False).sure
    laptop, desktop = (known_rates(f"NVIDIA GeForce RTX 3060{kind}", None, False) for kind in (" Laptop GPU", ""))
    assert laptop.sure and laptop.gb_s < desktop.gb_s


def test_the_longest_name_counts() -> None:
    assert known_rates("NVIDIA GeForce RTX 4070 Ti SUPER", None, False).gb_s == 672
    assert known_rates("NVIDIA GeForce RTX 4070", None, False).gb_s == 504
    assert known_rates("AMD Radeon RX 7900 XT", None, False).gb_s == 800


def test_every_recorded_card_that_has_a_name_is_known() -> None:
    named = {(card["name"], card["arch"], card["uma"]) for box in json.loads(BOXES.read_text()) for card in box["gpus"]}
    unknown = {name for name, arch, uma in named if "no table" in known_rates(name, arch, uma).source}
    assert unknown == {"AMD Radeon APU", "Intel iGPU", "unnamed 4 GB AMD GPU"}
    assert all(known_rates(name, arch, uma).gb_s > 0 < known_rates(name, arch, uma).tops for name, arch, uma in named)


def test_links() -> None:
    assert link_gb_s(3, 16) == pytest.approx(15.76, rel=0.001)
    assert link_gb_s(1, 1) == 0.25
    assert link_gb_s(None, 8) is link_gb_s(4, 0) is link_gb_s(7, 8) is None


# ------------------------------------------------------------------------------------------------ published speeds


def rates(name: str, lanes_gb_s: float = 15.75) -> DeviceRates:
    known = known_rates(name, None, False)
    return DeviceRates(known.gb_s * 1e9, known.tops * 1e12, lanes_gb_s * 1e9, known.sure, known.source)


def layout(shape: ModelShape, cards: list[DeviceRates], parts: list[float], tensor: bool) -> LayoutSpeed:
    ops = 0.0
    for layer in shape.layers:
        ops += 2 * layer.params * layer.read_bytes / layer.bytes
    work = [Work(shape.read_bytes * part, 0, ops * part) for part in parts]
    return (tensor_speed if tensor else pipeline_speed)(work, cards, shape.hidden, len(shape.layers))


RIG = [("rtx 5090", 15.75), ("rtx 3080", 7.9), ("rtx 3080", 7.9)]
PUBLISHED: list[tuple[str, str, list[tuple[str, float]], list[float], bool, float]] = [
    ("decode", "qwen3.6-27b:Q5_K_M", [("rtx 3090", 16)], [1], False, 21),
    ("decode", "qwen3-32b", [("rx 7900 xtx", 16)], [1], False, 31.6),
    ("decode", "qwen3-30b-a3b", [("rx 7900 xtx", 16)], [1], False, 151.8),
    ("decode", "qwen3-32b", [("rtx 3090", 16)] * 2, [0.5, 0.5], False, 42.3),
    ("decode", "qwen3.6-27b", [("rx 7900 xtx", 16)] * 2, [0.5, 0.5], False, 34.5),
    ("decode", "qwen3.6-27b", [("rx 7900 xtx", 16)] * 2, [0.5, 0.5], True, 41.6),
    ("decode", "qwen3.6-27b:Q8_0", RIG, [0.5, 0.25, 0.25], False, 31),
    ("decode", "qwen3.6-27b:Q8_0", RIG, [30 / 64, 17 / 64, 17 / 64], True, 40.3),
    ("decode", "qwen3.6-27b", [("780m", 16)], [1], False, 4.1),
    ("decode", "qwen3.6-27b", [("8060s", 16)], [1], False, 11),
    ("decode", "qwen3.6-35b-a3b:Q6_K", [("8060s", 16)], [1], False, 43),
    ("prefill", "qwen3.6-27b", [("rtx 3090", 16)], [1], False, 1025),
    ("prefill", "qwen3.6-27b", [("rtx 4090", 16)], [1], False, 2311),
    ("prefill", "qwen3.6-27b:Q8_0", RIG, [0.5, 0.25, 0.25], False, 7439),
    ("prefill", "qwen3.6-27b:Q8_0", RIG, [30 / 64, 17 / 64, 17 / 64], True, 1681),
    ("prefill", "qwen3.6-27b", [("rtx 3090", 7.9)] * 2, [0.5, 0.5], True, 1446),
    ("prefill", "qwen3.6-27b", [("rtx 3090", 15.75)] * 2, [0.5, 0.5], True, 1680),
    ("prefill", "qwen3-32b", [("rtx 3090", 16)] * 2, [0.5, 0.5], False, 1338),
]
"""phase, model, cards with their links in GB/s, part of each, tensor layout?, published tokens per second."""


def ratio(row: tuple[str, str, list[tuple[str, float]], list[float], bool, float]) -> float:
    phase, model, cards, parts, tensor, published = row
    speed = layout(load_shape(model), [rates(*each) for each in cards], parts, tensor)
    return published / (speed.decode_tok_s if phase == "decode" else speed.prefill_tok_s)


@pytest.mark.parametrize("row", PUBLISHED, ids=[f"{row[0]}-{row[1]}-{len(row[2])}x{row[2][0][0]}" for row in PUBLISHED])
def test_published_speeds_lie_in_what_is_believed(
    row: tuple[str, str, list[tuple[str, float]], list[float], bool, float],
) -> None:
    low, high = SURE
    assert low <= ratio(row) <= high


def test_published_speeds_are_met_in_the_middle() -> None:
    ratios = [ratio(row) for row in PUBLISHED]
    assert 0.9 <= median(ratios) <= 1.1


def test_the_rig_prefills_in_a_pipeline_and_decodes_in_shards() -> None:
    shape, cards = load_shape("qwen3.6-27b:Q8_0"), [rates(*each) for each in RIG]
    pipeline = layout(shape, cards, [0.5, 0.25, 0.25], False)
    tensor = layout(shape, cards, [30 / 64, 17 / 64, 17 / 64], True)
    assert pipeline.prefill_tok_s > 2 * tensor.prefill_tok_s
    assert tensor.decode_tok_s > 1.3 * pipeline.decode_tok_s


# ------------------------------------------------------------------------------------------------------- properties


def some_work(scale: float = 1.0) -> Work:
    return Work(4e9 * scale, 1e8 * scale, 14e9 * scale)


def test_doubt_follows_the_least_known_rank() -> None:
    sure, guess = rates("rtx 3090"), replace(rates("rtx 3090"), sure=False, source="a guess")
    both = pipeline_speed([some_work(), some_work()], [sure, guess], 4096, 32)
    assert (both.low, both.high) == UNSURE and "a guess" in both.note
    one = pipeline_speed([some_work()], [sure], 4096, 32)
    assert (one.low, one.high) == SURE and UNSURE[0] < SURE[0] < 1 < SURE[1] < UNSURE[1]


def test_one_rank_pays_for_no_neighbour() -> None:
    work, cards = [some_work()], [rates("rtx 3090")]
    assert tensor_speed(work, cards, 4096, 32) == pipeline_speed(work, cards, 4096, 32)
    slow = [replace(cards[0], link_bytes_s=1.0)]
    assert pipeline_speed(work, slow, 4096, 32) == pipeline_speed(work, cards, 4096, 32)


def test_a_prompt_in_tiny_chunks_is_bound_by_reading() -> None:
    work, cards = [some_work()], [rates("rtx 3090")]
    small, large = (pipeline_speed(work, cards, 4096, 32, chunk=chunk) for chunk in (1, 4096))
    assert small.prefill_tok_s < 200 < 5000 < large.prefill_tok_s


def test_a_model_that_reads_nothing_has_a_speed() -> None:
    nothing = pipeline_speed([Work(0, 0, 0), Work(0, 0, 0)], [rates("rtx 3090")] * 2, 64, 2)
    assert nothing.decode_tok_s > 0 and nothing.prefill_tok_s > 0
    assert pipeline_speed([Work(0, 0, 0)], [rates("rtx 3090")], 64, 2).prefill_tok_s == 0


@few
@given(
    st.lists(st.floats(0.01, 1), min_size=1, max_size=6),
    st.floats(1.01, 8),
    st.integers(1, 100),
    st.booleans(),
)
def test_more_work_and_slower_devices_are_never_faster(
    parts: list[float], more: float, layers: int, tensor: bool
) -> None:
    speed = tensor_speed if tensor else pipeline_speed
    cards = [rates("rtx 3090")] * len(parts)
    work = [some_work(part) for part in parts]
    base = speed(work, cards, 4096, layers)
    for other in (
        speed([some_work(part * more) for part in parts], cards, 4096, layers),
        speed(work, [replace(card, read_bytes_s=card.read_bytes_s / more) for card in cards], 4096, layers),
        speed(work, [replace(card, int8_ops_s=card.int8_ops_s / more) for card in cards], 4096, layers),
        speed(work, [replace(card, link_bytes_s=card.link_bytes_s / more) for card in cards], 4096, layers),
        speed(work, cards, 4096, layers + 1),
    ):
        assert 0 < other.decode_tok_s <= base.decode_tok_s * (1 + 1e-9)
        assert 0 < other.prefill_tok_s <= base.prefill_tok_s * (1 + 1e-9)


# ------------------------------------------------------------------------------------------------------------ flips


def test_a_flip_takes_what_the_slowest_link_needs() -> None:
    """Images of 14, 8 and 8 GB were refilled in about 1.0, 1.2 and 1.7 s."""
    cards = [rates(*each) for each in RIG]
    seconds = flip_seconds([14e9, 8e9, 8e9], cards)
    assert 1.0 <= seconds <= 2.0
    assert flip_seconds([14e9, 8e9, 16e9], cards) > seconds


def test_ranks_that_are_filled_at_once_share_the_hosts_memory() -> None:
    cards = [rates("rtx 5090", 63)] * 4
    assert flip_seconds([10e9] * 4, cards) > 3 * flip_seconds([10e9, 0, 0, 0], cards)


def test_a_flip_in_which_nothing_moves_is_not_free() -> None:
    assert flip_seconds([0, 0], [rates("rtx 3090")] * 2) == flip_seconds([], []) == FLIP_FIXED_S


def test_break_even_of_a_flip() -> None:
    assert break_even(3.2, 1681, 7245.5) == 7004
    assert break_even(5.918, 1354.4, 4036) == 12064


@pytest.mark.parametrize(
    ("cost", "tensor", "pipeline"),
    [
        (3.2, 7245.5, 1681),
        (3.2, 1681, 1681),
        (0, 1681, 7245.5),
        (-1, 1681, 7245.5),
        (3.2, 0, 7245.5),
        (3.2, -5, 7245.5),
        (3.2, float("nan"), 7245.5),
        (float("nan"), 1681, 7245.5),
        (3.2, 1681, float("inf")),
    ],
)
def test_break_even_needs_a_faster_pipeline_and_positive_numbers(cost: float, tensor: float, pipeline: float) -> None:
    with pytest.raises(ValueError, match="no break-even"):
        break_even(cost, tensor, pipeline)
