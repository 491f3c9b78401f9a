"""The room that a ledger's terms leave, against plain counting."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from budget.ceilings import Ceilings, Device
from budget.ledger import ALWAYS, BOOT, FLIP, MOMENTS, PIPELINE, TENSOR, Line, Term, held_bytes, lines_at, peak_bytes
from budget.solve import TOKENS_MAX, fits, room


def device(
    index: int, ceiling: int | None, *, kind: str = "discrete", pool: int | None = None, private: int = 0
) -> Device:
    return Device(
        index=index,
        id=f"d{index}",
        vendor="nvidia",
        name=f"card {index}",
        arch=None,
        kind=kind,
        usable=True,
        why_not=None,
        total_bytes=ceiling,
        reserved_bytes=None,
        free_bytes=None,
        gtt_bytes=None,
        ceiling_bytes=ceiling,
        floor_bytes=0,
        pool=index if pool is None else pool,
        private_bytes=private,
    )


def two_cards(first: int | None, second: int | None) -> Ceilings:
    return Ceilings((device(0, first), device(1, second)), (first, second), ())


def test_a_peak_is_the_largest_moment_not_the_sum_of_all() -> None:
    lines = (
        Line(0, "kv, pipeline", 100, (PIPELINE, FLIP, BOOT), "computed"),
        Line(0, "kv, tensor", 80, (TENSOR,), "computed"),
        Line(0, "staging", 30, (BOOT,), "reserve"),
        Line(1, "weights", 500, ALWAYS, "computed"),
    )
    assert held_bytes(lines, 0, BOOT) == 130 and held_bytes(lines, 0, TENSOR) == 80
    assert (peak_bytes(lines, 0), peak_bytes(lines, 1)) == (130, 500)
    assert lines[3].held_words == ("always",) and lines[2].held_words == ("boot",)


def test_the_tightest_device_and_moment_say_how_many_tokens_fit() -> None:
    terms = (
        Term(0, "weights", 100, ALWAYS, "computed"),
        Term(0, "kv", 0, (PIPELINE,), "computed", per_token=2.0),
        Term(1, "kv", 0, ALWAYS, "computed", per_token=5.0),
        Term(1, "staging", 300, (BOOT,), "reserve"),
    )
    found = room(terms, two_cards(1000, 1000))
    assert (found.device, found.moment, found.tokens) == (1, BOOT, 139)
    assert found.devices == (449, 139)


def test_a_slope_that_ends_leaves_its_share_to_the_others() -> None:
    """100 fixed, 2 a token, 5 more up to 40 tokens and 3 more up to 100: 10 a token, then 5, then 2."""
    terms = (
        Term(0, "weights", 99 - 2, ALWAYS, "computed"),
        Term(0, "kv", 0, ALWAYS, "computed", per_token=2.0),
        Term(0, "kv", 0, ALWAYS, "computed", per_token=5.0, until=40),
        Term(0, "kv", 0, ALWAYS, "computed", per_token=3.0, until=100),
    )
    fitting = {total: room(terms, two_cards(total, None)).tokens for total in (100, 499, 500, 504, 505, 800, 802)}
    assert fitting == {100: 0, 499: 39, 500: 40, 504: 40, 505: 41, 800: 100, 802: 101}
    assert [sum(line.bytes for line in lines_at(terms, n)) for n in (0, 40, 100, 101)] == [97, 497, 797, 799]
    (_, rows) = lines_at(terms, 50)
    assert (rows.name, rows.bytes) == ("kv", 2 * 50 + 5 * 40 + 3 * 50), "terms of one name and time are one line"


def test_what_stops_to_grow_bounds_nothing_beyond() -> None:
    terms = (Term(0, "kv", 0, ALWAYS, "computed", per_token=4.0, until=64),)
    assert room(terms, two_cards(256, None)).tokens == 63, "a growing term counts a byte more, so that its line fits"
    assert room(terms, two_cards(257, None)).tokens == TOKENS_MAX


@settings(max_examples=80, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 1),
            st.integers(0, 400),
            st.sets(st.sampled_from(MOMENTS), min_size=1),
            st.integers(0, 6),
            st.sampled_from([0, 1, 7, 16, 48, 49, 130]),
        ),
        max_size=8,
    ),
    st.integers(0, 3000),
    st.integers(0, 3000),
    st.booleans(),
)
def test_any_number_of_slopes_that_end_is_solved_exactly(
    raw: list[tuple[int, int, set[str], int, int]], first: int, second: int, shared: bool
) -> None:
    """So many tokens fit, and one more does not. (In units of 64 bytes: a byte of rounding a term is no matter.)"""
    terms = [
        Term(
            index, f"line {n % 3}", fixed * 64, tuple(m for m in MOMENTS if m in held), "computed", "", slope * 64, end
        )
        for n, (index, fixed, held, slope, end) in enumerate(raw)
    ]
    ceilings = two_cards(first * 64 + 32, second * 64 + 32)
    if shared:
        members = tuple(replace(each, pool=0, private_bytes=64 * 10 * each.index) for each in ceilings.devices)
        ceilings = Ceilings(members, (max(first, second) * 64 + 32,), ())
    found = room(terms, ceilings).tokens
    assert found < 0 or fits(lines_at(terms, min(found, 1 << 30)), ceilings)
    assert found == TOKENS_MAX or not fits(lines_at(terms, found + 1), ceilings)


def test_what_does_not_fit_says_how_much_lacks() -> None:
    found = room((Term(0, "weights", 1500, ALWAYS, "computed"),), two_cards(1000, 1000))
    assert found.tokens == -1 and found.short_bytes == 500 and found.device == 0


def test_an_unknown_ceiling_bounds_nothing() -> None:
    found = room((Term(0, "kv", 0, ALWAYS, "computed", per_token=1.0),), two_cards(None, None))
    assert found.tokens == TOKENS_MAX


def test_shared_memory_is_counted_once_and_a_carve_out_is_extra() -> None:
    """An APU with 100 of its own beside 1000 that it shares with the host; both may hold 1000."""
    apu = device(0, 1000, kind="uma", pool=0, private=100)
    shared = Ceilings((apu, device(1, 1000, kind="cpu", pool=0)), (1000,), ())
    terms = (
        Term(0, "kv", 0, ALWAYS, "computed", per_token=1.0),
        Term(1, "engine process", 400, ALWAYS, "reserve"),
    )
    found = room(terms, shared)
    assert found.tokens in (698, 699, 700) and found.device == 0
    assert fits([term.at(found.tokens) for term in terms], shared)
    assert not fits([term.at(found.tokens + 3) for term in terms], shared)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 1),
            st.integers(0, 2000),
            st.sets(st.sampled_from(MOMENTS), min_size=1),
            st.floats(0, 8, allow_nan=False),
        ),
        max_size=8,
    ),
    st.integers(0, 5000),
    st.integers(0, 5000),
    st.integers(0, 500),
)
def test_the_room_is_what_counting_finds(
    raw: list[tuple[int, int, set[str], float]], first: int, second: int, extra: int
) -> None:
    terms = [
        Term(index, f"line {n}", fixed, tuple(m for m in MOMENTS if m in held), "computed", "", round(slope, 2))
        for n, (index, fixed, held, slope) in enumerate(raw)
    ]
    ceilings = two_cards(first, second)
    found = room(terms, ceilings)

    def fit(tokens: int) -> bool:
        return fits([term.at(tokens) for term in terms], ceilings)

    if found.tokens < 0:
        assert not fit(0) or any(term.per_token for term in terms)
        return
    assert fit(min(found.tokens, 1 << 20))
    if found.tokens < 1 << 19:
        assert not fit(found.tokens + 2 + len(terms) * 200)
    wider = room(terms, two_cards(first + extra, second + extra))
    assert wider.tokens >= found.tokens, "more memory never holds fewer tokens"
