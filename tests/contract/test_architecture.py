"""docs/ARCHITECTURE.md is true of the checkout: its paths exist, and each invariant names tests that exist."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "ARCHITECTURE.md").read_text()
problem_of = runpy.run_path(str(ROOT / "tests" / "contract" / "test_claims.py"))["problem_of"]


def rows() -> list[list[str]]:
    """Cells of the invariants' table, without its head."""
    inside = TEXT.partition("<!-- invariants -->")[2].partition("<!-- end of invariants -->")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in inside.strip().splitlines()[2:]]


def test_every_invariant_names_a_test_that_exists() -> None:
    assert len(rows()) >= 10
    for invariant, tests in rows():
        named = re.findall(r"`([^`]+)`", tests)
        assert named, invariant
        assert not [problem for test in named if (problem := problem_of(f"tests/{test}"))]


def test_every_path_of_the_code_map_exists() -> None:
    table = TEXT.partition("## The code, in the order to read it")[2].partition("## ")[0]
    missing = []
    for line in re.findall(r"^\| (`.*?) \|", table, flags=re.MULTILINE):
        names = re.findall(r"`([^`]+)`", line)
        folder = Path(names[0]).parent
        for name in names:
            if not any((ROOT / place).exists() for place in (name, folder / name)):
                missing.append(name)
    assert not missing
