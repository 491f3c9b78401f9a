"""Layers with a window: what their pools hold, that a plan counts exactly that, and what a report says of it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import families_rig as rig
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.cpu.pools import kv_layer_bytes
from backends.quant import QuantType
from budget.advice import Subject, answer, changed
from budget.ceilings import ceilings
from budget.document import document
from budget.facts import KV_BITS, MIB, Box, Card, CpuFacts, MemoryFacts, ModelShape
from budget.job import settle
from budget.ledger import ALWAYS, BOOT, FLIP, MOMENTS, PIPELINE, TENSOR, held_bytes, lines_at, peak_bytes
from budget.options import FLIPPING, STACKED, WishError
from budget.outcome import Plan, Refusal
from budget.placement import Cut, Option, Shard, pipeline_shares, tensor_shares
from budget.plan import plan
from budget.report import report
from budget.shape import load_shape, shape_from_json
from budget.solve import fits, room
from budget.terms import terms
from budget.wish import PAGE, Wish, pages, window_slots
from homeserve.errors import SettingError
from homeserve.models.bind import bind
from homeserve.models.shape import shape_of
from homeserve.settings import Settings
from homeserve.sizing import plan_of

CPU = CpuFacts("CPU", 8, 8, "processors", frozenset())
GEMMA = load_shape("gemma3-12b")
"""Five layers with a window of 1024 for each that keeps every token: 40 and 8, of 8 KiB a token in f16."""


def box(*cards: Card, ram_mib: int = 65536) -> Box:
    memory = MemoryFacts(ram_mib * MIB, ram_mib * MIB, "MemTotal", (ram_mib - 2048) * MIB, 0)
    return Box("box", memory, CPU, cards)


def card(number: int, mib: int) -> Card:
    size = mib * MIB
    name = "NVIDIA GeForce RTX 3090"
    return Card("nvidia", f"GPU-{number}", name, "sm_86", total_bytes=size, reserved_bytes=0, free_bytes=size)


def planned(where: Box, model: ModelShape, wish: Wish) -> Plan:
    outcome = plan(ceilings(where, wish.floor_bytes), model, wish)
    assert isinstance(outcome, Plan), outcome
    return outcome


def line(made: Plan, name: str) -> int:
    return sum(each.bytes for each in made.lines if each.name == name)


@cache
def windowed(**more: object) -> ModelShape:
    """24 layers, of which every third keeps every token."""
    fields: dict[str, object] = {
        "arch": "llama", "hidden": 2048, "ffn": 4096, "heads": 16, "kv_heads": 4, "vocab": 32000, "layers": 24,
        "quant": "Q8_0", "window": 512, "full_attention_every": 3, "context": 65536,
    }  # fmt: skip
    named = {name: list(value) if isinstance(value, tuple) else value for name, value in more.items()}
    return shape_from_json({**fields, **named}, "windowed")


# ---------------------------------------------------------------------------------------------------- slots of a window


@settings(max_examples=50)
@given(st.integers(1, 1 << 17), st.integers(1, 1 << 20), st.integers(1, 256), st.integers(16, 8192))
def test_a_window_s_pool_holds_the_windows_of_all_requests_and_one_chunk(
    window: int, tokens: int, running: int, chunk: int
) -> None:
    slots = window_slots(window, tokens, running, chunk)
    assert slots % PAGE == 0 and slots <= pages(tokens)
    assert slots == pages(tokens) or slots >= running * (window + PAGE) + chunk
    assert slots <= window_slots(window + 1, tokens, running, chunk)
    assert slots <= window_slots(window, tokens + 1, running, chunk)
    assert slots <= window_slots(window, tokens, running + 1, chunk)
    assert slots <= window_slots(window, tokens, running, chunk + 1)


@settings(max_examples=60)
@given(st.integers(1, 4096), st.integers(0, 1 << 16), st.integers(1, 512))
def test_one_request_fits_wherever_its_window_lies(window: int, start: int, chunk: int) -> None:
    """Pages from the first one that the chunk's first row sees to its last row's own."""
    first, last = max(0, start - window + 1) // PAGE, (start + chunk - 1) // PAGE
    assert (last - first + 1) * PAGE <= window_slots(window, 1 << 30, 1, chunk, kept=False)


def test_a_model_s_windows_are_told_once_and_ascending() -> None:
    assert GEMMA.windows == (1024,)
    kv = GEMMA.layers[0].kv
    assert kv is not None
    wider = replace(GEMMA.layers[0], kv=replace(kv, window=4096))
    assert replace(GEMMA, layers=(wider, *GEMMA.layers)).windows == (1024, 4096)
    assert load_shape("llama3.1-8b").windows == ()


# ------------------------------------------------------------------------------------------- what a plan counts of them


@pytest.mark.parametrize(("running", "chunk"), [(1, 64), (4, 256), (16, 256)])
@pytest.mark.parametrize("tokens", [1024, 16384, 131072])
def test_a_long_context_is_priced_with_its_windows_to_the_byte(tokens: int, running: int, chunk: int) -> None:
    made = planned(box(), GEMMA, Wish(kv_tokens=tokens, context=1024, running=running, chunk=chunk))
    slots = window_slots(1024, tokens, running, chunk)
    row = 2 * 8 * 256 * 2
    assert line(made, "kv") == row * (8 * tokens + 40 * slots)
    assert dict(made.window_slots) == {1024: slots}


def test_windows_are_what_makes_a_long_context_fit() -> None:
    """131 072 tokens of 48 layers are 48 GiB; of 8 layers, with the windows of 16 requests, they are 14.4."""
    wish = Wish(context=131072, kv_tokens=131072)
    made = planned(box(ram_mib=32768), GEMMA, wish)
    assert line(made, "kv") < 15 << 30
    whole = tuple(replace(each, kv=None if each.kv is None else replace(each.kv, window=0)) for each in GEMMA.layers)
    outcome = plan(ceilings(box(ram_mib=32768), None), replace(GEMMA, layers=whole), wish)
    assert isinstance(outcome, Refusal)
    assert sum(each.bytes for each in outcome.lines if each.name == "kv") == 48 << 30


@pytest.mark.parametrize("arch", ["gemma2", "gemma3", "gemma4", "gpt-oss", "qwen3"])
@pytest.mark.parametrize("kv_type", ["f16", "f32", "f8"])
def test_the_line_is_what_the_cpu_maps(arch: str, kv_type: str) -> None:
    """K and V of each layer in its group's slots, V rows padded to 16 dims, with nothing beside them."""
    stack = rig.Stack(6)
    family, config, tensors = rig.made(arch, stack)
    shape = shape_of(family, config, tensors, name="made", quant="F32")
    made = planned(box(), shape, Wish(kv_type=kv_type, kv_tokens=128, running=2, chunk=16, devices=("cpu",)))
    bound = bind(family, config, tensors)
    slots = made.window_slots
    assert tuple(slots) == bound.windows and (arch == "qwen3") == (not slots)
    pool = bound.kv_pool(made.kv_tokens, QuantType[kv_type.upper()], tuple(slots.values()))
    held = [kv_layer_bytes(pool, layer) for layer in range(len(pool.layers))]
    assert line(made, "kv") == sum(k + v for k, v in held)


def test_a_model_of_windows_alone_keeps_no_more_with_more_tokens() -> None:
    model = windowed(full_attention_every=0, window=512)
    small, large = (planned(box(), model, Wish(kv_tokens=tokens, running=4)) for tokens in (16384, 65536))
    assert line(small, "kv") == line(large, "kv") == 24 * 2 * 4 * 128 * 2 * window_slots(512, 65536, 4, 256)
    assert large.binds.why == "nothing: the model keeps no more tokens in memory"


def test_a_token_reads_no_further_back_than_its_window() -> None:
    near, far = (planned(box(), windowed(window=window), Wish(running=1)) for window in (64, 2048))
    assert near.speeds[PIPELINE].decode_tok_s > far.speeds[PIPELINE].decode_tok_s
    every = planned(box(), windowed(window=1 << 16), Wish(running=1))
    assert every.speeds == far.speeds, "decode is told at 2048 tokens"


def test_a_card_keeps_a_page_of_padding_and_the_cpu_none() -> None:
    model = windowed()
    wish = Wish(kv_tokens=8192, running=2)
    row = 2 * 4 * 128 * 2
    slots = window_slots(512, 8192, 2, 256)
    on_cpu = planned(box(), model, replace(wish, devices=("cpu",)))
    on_card = planned(box(card(0, 24576)), model, replace(wish, devices=("cuda:0",)))
    assert line(on_cpu, "kv") == row * (8 * 8192 + 16 * slots)
    assert line(on_card, "kv") == line(on_cpu, "kv") + row * 24 * PAGE


# -------------------------------------------------------------------------------------------------------- two layouts


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 23),
    st.sampled_from([64, 512, 4096]),
    st.sampled_from([(23,), (0,), (11, 23), (0, 1, 2, 3), ()]),
    st.tuples(st.integers(1, 40), st.integers(1, 40)),
    st.integers(1, 16),
    st.sampled_from([0, 16, 512, 4096, 1 << 16, 1 << 20]),
)
def test_a_flip_holds_the_larger_of_both_pools_whatever_the_tokens(
    first: int, window: int, full: tuple[int, ...], vector: tuple[int, int], running: int, tokens: int
) -> None:
    job = settle(windowed(window=window, full_attention_every=0, attention_layers=full), Wish(running=running))
    limits = ceilings(box(card(0, 16000), card(1, 16000)), None)
    option = Option(FLIPPING, (0, 1), (PIPELINE, TENSOR))
    before = pipeline_shares(job, option, Cut(((0, first), (first, 24))))
    found = terms(job, option, limits, before, tensor_shares(job, Shard((1, 1), vector)))
    pools = lines_at([term for term in found if term.name.startswith("kv")], tokens)
    for rank in option.ranks:
        held = {moment: held_bytes(pools, rank, moment) for moment in MOMENTS}
        assert min(held[BOOT], held[FLIP]) >= max(held[PIPELINE], held[TENSOR])


@settings(max_examples=12, deadline=None)
@given(st.sampled_from([1, 64, 100, 4096]), st.integers(1, 32), st.lists(st.integers(1, 30), min_size=2, max_size=3))
def test_the_tensor_layout_has_room_for_whole_rounds_of_its_vector(
    window: int, running: int, vector: list[int]
) -> None:
    """Every rank has the rows of its pages of each round, and a round that has begun counts whole."""
    job = settle(windowed(window=window), Wish(running=running))
    row = 2 * 4 * 128 * 2
    slots = window_slots(window, 1 << 30, running, 256)
    turns = -(-slots // (PAGE * sum(vector)))
    for share, entry in zip(tensor_shares(job, Shard((1,) * len(vector), tuple(vector))), vector, strict=True):
        (rows,) = share.windows
        assert rows.row * rows.slots == pytest.approx(16 * row * turns * entry * PAGE)


def test_uneven_cards_divide_windows_by_the_room_that_they_have() -> None:
    model = windowed(full_attention_every=0, window=8192, context=65536)
    made = planned(box(card(0, 20000), card(1, 6000), ram_mib=65536), model, Wish(layout="tensor", running=16))
    assert made.layouts == (TENSOR,) and made.token_vector[0] > 2 * made.token_vector[1]


# ---------------------------------------------------------------------------------------------------------- properties


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(3000, 30000), max_size=2),
    st.integers(3000, 60000),
    st.integers(0, 6000),
    st.sampled_from([64, 1024, 8192]),
    st.sampled_from([0, 2, 3]),
    st.integers(0, 16),
)
def test_more_memory_never_means_fewer_tokens_with_windows(
    cards: list[int], ram: int, more: int, window: int, every: int, running: int
) -> None:
    """On the CPU, and on one card beside which the host does not change; the plan is within every ceiling."""
    model = windowed(window=window, full_attention_every=every)
    wish = Wish(running=running, layout="pipeline", flip="off", devices=() if cards else ("cpu",))
    one = cards[:1]
    small, large = (
        plan(ceilings(box(*(card(0, mib + extra) for mib in one), ram_mib=ram + extra * (not one)), None), model, wish)
        for extra in (0, more)
    )
    for outcome in (small, large):
        if isinstance(outcome, Plan):
            for device in outcome.ceilings.devices:
                assert device.ceiling_bytes is not None
                assert all(held_bytes(outcome.lines, device.index, m) <= device.ceiling_bytes for m in MOMENTS)
    if isinstance(small, Plan):
        assert isinstance(large, Plan) and large.context >= small.context
        assert large.option != small.option or large.kv_tokens >= small.kv_tokens


@settings(max_examples=10, deadline=None)
@given(
    st.lists(st.integers(6000, 30000), min_size=1, max_size=3),
    st.one_of(st.none(), st.integers(4000, 100000)),
    st.sampled_from(["gemma3-12b", "gpt-oss-20b"]),
    st.sampled_from(["auto", "tensor", "pipeline"]),
    st.integers(0, 4),
)
def test_plans_with_windows_on_several_cards_are_proofs(
    cards: list[int], ram: int | None, name: str, layout: str, running: int
) -> None:
    where = box(*(card(n, size) for n, size in enumerate(cards)), ram_mib=ram or 65536)
    where = where if ram is not None else replace(where, memory=None)
    wish = Wish(running=running, layout="auto" if len(cards) == 1 else layout)
    outcome = plan(ceilings(where, None), load_shape(name), wish)
    if isinstance(outcome, Plan):
        assert fits(outcome.lines, outcome.ceilings) and outcome.context <= outcome.kv_tokens
        assert not running or outcome.running == running
    else:
        assert isinstance(outcome, Refusal) and outcome.needed_bytes > outcome.available_bytes


@settings(max_examples=20, deadline=None)
@given(st.integers(2500, 12000), st.integers(2500, 12000), st.integers(1, 23), st.integers(1, 16))
def test_the_room_of_a_cut_is_exact(first: int, second: int, at: int, running: int) -> None:
    """One page more does not fit, whichever straight piece the ceiling is reached in."""
    job = settle(windowed(window=2048), Wish(running=running))
    limits = ceilings(box(card(0, first), card(1, second)), None)
    option = Option(STACKED, (0, 1))
    found = terms(job, option, limits, pipeline_shares(job, option, Cut(((0, at), (at, 24)))), ())
    tokens = room(found, limits).tokens

    def over(number: int) -> bool:
        lines = lines_at(found, number)
        ceiling = [device.ceiling_bytes or 0 for device in limits.devices]
        return any(held_bytes(lines, index, moment) > ceiling[index] for index in range(3) for moment in MOMENTS)

    assert over(0) if tokens < 0 else not over(tokens) and over(tokens + 1)


# ------------------------------------------------------------------------------------------------------- what is told


def test_the_report_tells_windows_in_words_and_numbers() -> None:
    where = box()
    made = planned(where, GEMMA, Wish())
    text = "\n".join(report(made, where.memory, ()))
    flat = " ".join(text.split())
    assert "rows of f16; 40 layers keep at most 21 056 tokens (window 1024)" in flat
    assert "layers with one see only so many tokens" in flat
    plain = planned(where, load_shape("llama3.1-8b"), Wish())
    assert "layers with one see" not in " ".join(report(plain, where.memory, ()))
    assert document(made.ceilings, where.memory, made, ())["plan"]["kv_windows"] == [
        {"window_tokens": 1024, "layers": 40, "slots": 21056}
    ]
    assert document(plain.ceilings, where.memory, plain, ())["plan"]["kv_windows"] == []


def test_a_line_of_several_parts_is_one_line() -> None:
    made = planned(box(), GEMMA, Wish())
    assert [each.held for each in made.lines if each.name == "kv"] == [ALWAYS]


# ------------------------------------------------------------------------------------------------- rows of whole blocks

ODD = windowed(heads=16, kv_heads=4, head_dim=80)


def test_rows_of_blocks_that_no_head_fills_are_refused_by_name() -> None:
    """q8_0 keeps 32 dims of a head with one scale."""
    assert ODD.ragged("q8_0") == tuple(range(24)) and ODD.ragged("f8") == () and GEMMA.ragged("q8_0") == ()
    with pytest.raises(WishError, match="--kv-type q8_0 keeps a head in blocks of 32 dims") as caught:
        plan(ceilings(box(), None), ODD, Wish(kv_type="q8_0"))
    assert "heads of 80 in every attention layer" in caught.value.what
    assert (caught.value.field, caught.value.fix) == ("kv_type", "use --kv-type f8 or f16")
    kv = ODD.layers[0].kv
    assert kv is not None
    good = replace(ODD.layers[0], kv=replace(kv, head_dim=96))
    with pytest.raises(WishError, match=r"heads of 80 in layers 1, 2, 3, 4, 5, 6, 7, 8 and 15 more"):
        plan(ceilings(box(), None), replace(ODD, layers=(good, *ODD.layers[1:])), Wish(kv_type="q8_0"))


def test_up_says_so_before_it_loads_and_the_oracle_needs_no_blocks() -> None:
    facts: Any = SimpleNamespace(shape=ODD, why_no_drafts="")
    with pytest.raises(SettingError, match="--kv-type q8_0 keeps a head in blocks") as caught:
        plan_of(Settings(kv_type="q8_0"), facts, box())
    assert (caught.value.field, caught.value.fix) == ("kv_type", "use --kv-type f8 or f16")
    assert plan_of(Settings(kv_type="q8_0", backend="reference"), facts, box()).wish.kv_type == "f32"
    assert plan_of(Settings(kv_type="f8"), facts, box()).wish.kv_type == "f8"


def test_advice_and_nearest_wishes_have_no_rows_that_a_model_cannot_have() -> None:
    subject = Subject(box(ram_mib=12000), ODD, file_fixed=True)
    made = answer(subject, Wish(devices=("cpu",), kv_tokens=8192, context=8192))
    assert isinstance(made, Plan) and all(each.flags.get("kv_type") != "q8_0" for each in made.advice)
    asked = Wish(context=65536, kv_tokens=65536, running=1)
    needed = peak_bytes(planned(box(), ODD, asked).lines, 0) // MIB
    tight = Subject(box(ram_mib=needed + 2048 + 256 - 100), ODD, file_fixed=True)
    refused = answer(tight, asked)
    assert isinstance(refused, Refusal) and refused.nearest is not None
    assert refused.nearest["kv_type"] == "f8" and "with KV rows of f8" in refused.nearest_text
    assert isinstance(answer(*changed(tight, asked, refused.nearest)), Plan)


@pytest.mark.parametrize("kv_type", sorted(KV_BITS))
def test_every_other_type_holds_any_head(kv_type: str) -> None:
    assert (ODD.ragged(kv_type) != ()) == (kv_type == "q8_0")
