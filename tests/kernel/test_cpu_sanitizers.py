"""The whole kernel tier once more under AddressSanitizer and UndefinedBehaviorSanitizer; and proof that both see."""

from __future__ import annotations

import os
import re

import kernel_sanitized as sanitized
import pytest

ONE = "tests/kernel/test_cpu_rows.py"
OTHER_SIZES = (
    "test_cpu_library.py",
    "test_cpu_memory.py::test_the_budget_foresees_what_a_program_maps",
    "test_cpu_memory.py::test_the_budget_foresees_a_packed_matrix_of_every_type",
    "test_cpu_rank_memory.py::test_the_budget_foresees_what_each_rank_maps",
    "test_cpu_experts.py::test_stacks_hold_the_bits_of_the_file_and_no_more",
    "test_cpu_drafts.py::test_kept_rows_are_a_line_of_their_own_with_the_bytes_of_the_formula",
    "test_cpu_draft_memory.py",
)
"""Tests of how long mappings are, which gaps make longer, and of the files of the shipped libraries."""
MINUTES = 60

pytestmark = [
    pytest.mark.timeout(20 * MINUTES),
    pytest.mark.skipif(bool(sanitized.why_not()), reason=f"sanitizers: {sanitized.why_not()}"),
    pytest.mark.skipif(bool(os.environ.get(sanitized.LIBRARY)), reason="this is the run under the sanitizers"),
]


def cases(output: str) -> int:
    found = re.search(r"kernel cases under the sanitizers: (\d+)", output)
    assert found, output[-4000:]
    return int(found[1])


def test_the_kernel_tier_is_clean_under_the_sanitizers(request: pytest.FixtureRequest) -> None:
    """Every test that takes a level, with the sanitized library as its level and gaps behind every buffer."""
    left_out = [f"--deselect=tests/kernel/{each}" for each in OTHER_SIZES]
    done = sanitized.pytest_run(sanitized.library(), "tests/kernel", *left_out)
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
    count = cases(done.stdout)
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print(f"\n   under AddressSanitizer and UBSan, {sanitized.LEVEL}: {count} kernel cases")
    assert count > 100


def test_a_planted_write_past_a_buffer_is_reported() -> None:
    """One float behind the last buffer of a program: in the middle of a mapping, where only the gaps can show it."""
    done = sanitized.pytest_run(sanitized.library(sanitized.WRITE_PAST_THE_END), ONE, "-x")
    assert done.returncode != 0
    assert re.search(r"AddressSanitizer: use-after-poison.*\n?WRITE of size 4", done.stdout + done.stderr, re.S)


def test_a_planted_overflow_is_reported() -> None:
    done = sanitized.pytest_run(sanitized.library(sanitized.SUM_THAT_OVERFLOWS), ONE, "-x")
    assert done.returncode != 0
    assert "runtime error: signed integer overflow" in done.stdout + done.stderr
