"""What scripts/gpu_check decides without a card: goals, order of cases, agreement of answers, addresses of a case."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "benchmarks"))

import gpu_check
import gpu_numerics
import gpu_tokens
from gpu_bandwidth import spread
from gpu_bench import FULL, QUICK, TINY, TYPES
from gpu_rows import Row, judged, line_of

from backends.gpu.launch import Launch, Symbol, params
from backends.gpu.ops.quants import MATRICES


def test_a_fraction_below_its_goal_is_not_ok() -> None:
    assert judged(Row("p", "w", 84.0, "GB/s", 100.0, 0.85)).ok is False
    assert judged(Row("p", "w", 85.0, "GB/s", 100.0, 0.85)).ok is True
    assert judged(Row("p", "w", None, "", None, 0.85)).ok is False, "what was not measured meets no goal"
    assert judged(Row("p", "w", 1.0, ok=False)).ok is False
    assert " NO" in line_of(judged(Row("p", "w", 1.0, "", 2.0, 0.9))) and "50 %" in line_of(Row("p", "w", 1.0, "", 2.0))


def test_goals_are_judged_on_real_sizes_alone() -> None:
    assert FULL.goal(0.85) == QUICK.goal(0.85) == 0.85 and TINY.goal(0.85) is None


def test_every_type_of_matrix_is_measured() -> None:
    assert set(TYPES) == set(MATRICES)


@pytest.mark.parametrize("size", ["full", "quick"])
def test_all_parts_together_keep_their_time(size: str) -> None:
    shares, most_s = gpu_check.SIZES[size]
    assert set(shares) == set(gpu_check.SECONDS)
    assert sum(shares.values()) <= most_s <= {"full": 480, "quick": 120}[size]


def test_a_sample_has_seen_every_file_before_it_sees_one_twice() -> None:
    files = {"a": "one", "b": "one", "c": "two", "d": "three"}
    names = ["a", "a:x", "b", "c", "d", "d:y"]
    order = gpu_numerics.in_order(names, files, 5)
    assert sorted(order) == sorted(names) and order == gpu_numerics.in_order(names, files, 5)
    assert {files[name.partition(":")[0]] for name in order[:3]} == {"one", "two", "three"}


def test_addresses_of_a_case_are_turned_into_the_cards_and_nothing_else() -> None:
    values, table = np.arange(6, dtype=np.float32), np.zeros(2, np.uint64)
    table[0] = values.ctypes.data + 8
    places = gpu_numerics.Places(SimpleNamespace(arrays=(values,), tables=(table,)))
    symbol = Symbol("s", "f", "op", params("at, none, i64 number"), 32)
    base = 1 << 40
    turned = places.turned(Launch(symbol, (1, 1, 1), (values.ctypes.data + 4, 0, values.ctypes.data)), base)
    staging = np.zeros(places.nbytes, np.uint8)
    places.put(staging, base)
    at = int(turned.args[0]) - base - 4
    assert turned.args[1:] == (0, values.ctypes.data), "a null and a number stay what they are"
    np.testing.assert_array_equal(staging[at : at + 24].view(np.float32), np.arange(6))
    words = [int(word) for word in staging.view(np.uint64)]
    assert base + at + 8 in words, "the table's word"
    staging[at : at + 24].view(np.float32)[:] = 7
    places.take(staging)
    assert (values == 7).all() and table[0] == values.ctypes.data + 8 and places.guarded
    staging[at + 24] ^= 1
    places.take(staging)
    assert not places.guarded, "a byte behind the array"
    with pytest.raises(ValueError, match="in no array"):
        places.turned(Launch(symbol, (1, 1, 1), (values.ctypes.data + 4096, 0, 0)), base)


@pytest.mark.parametrize(
    ("tokens", "values", "gaps", "equal", "excused"),
    [
        ("abc", (-1.0, -2.0, -3.0), (1.0, 1.0, 1.0), 3, True),
        ("abx", (-1.01, -2.0, -3.0), (1.0, 1.0, 0.015), 2, True),
        ("abx", (-1.01, -2.0, -3.0), (1.0, 1.0, 0.03), 2, False),
        ("xbc", (-1.0, -2.0, -3.0), (0.001, 1.0, 1.0), 0, False),
        ("ab", (-1.0, -2.0), (1.0, 1.0, 1.0), 2, False),
    ],
)
def test_answers_may_part_where_either_token_is_right_and_nowhere_else(
    tokens: str, values: tuple[float, ...], gaps: tuple[float, ...], equal: int, excused: bool
) -> None:
    oracle = gpu_tokens.Said(tuple("abc"), (-1.0, -2.0, -3.0), gaps)
    found = gpu_tokens.agreement(gpu_tokens.Said(tuple(tokens), values, gaps), oracle)
    assert (found.equal, found.total, found.excused) == (equal, 3, excused)


def test_what_is_read_lies_over_far_memory_and_within_the_arena() -> None:
    arena = SimpleNamespace(address=4096, nbytes=10_000)
    places = spread(arena, 1000, 5000)
    assert len(places) == 5 and places[1] - places[0] == 1024 and places[-1] + 1000 <= 4096 + 10_000
    assert len(spread(arena, 9000, 5000)) == 1


def test_cases_are_counted_and_the_wrong_ones_named() -> None:
    tally = gpu_numerics.Tally(5, {"a": 0.2, "b": 0.9}, {"c": "is off"})
    rows = list(tally.rows())
    assert (rows[0].value, rows[0].of, rows[0].ok) == (2.0, 3.0, False) and "2 were left" in rows[0].note
    assert rows[1].what == "worst: b" and (rows[2].what, rows[2].note, rows[2].ok) == ("wrong: c", "is off", False)
    assert not all(row.ok for row in gpu_numerics.Tally(5).rows()), "none at all is no success"
