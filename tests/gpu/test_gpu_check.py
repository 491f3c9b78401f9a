"""The card of this machine, by scripts/gpu_check: one test for each part that must be right whatever its speed.

    scripts/gpu_check --quick       makes the environment and says the same as a table
    pytest tests/gpu                in an environment that has homeserve and its test packages

HOMESERVE_TEST_CARD names another card than the first (`cuda:1`, `rocm:0`, a UUID). Fractions of bandwidth, and of a
product by torch, are told by the script; a card that misses a goal is slow, not wrong, and no test is about that.
"""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "benchmarks" / "gpu_check.py"


@pytest.mark.timeout(150)
@pytest.mark.parametrize("part", ["numerics", "launches", "fleet", "tokens"])
def test_a_part_of_gpu_check_is_ok(part: str, tmp_path: Path) -> None:
    table = tmp_path / "rows.csv"
    given = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    command = [sys.executable, str(SCRIPT), "--quick", "--parts", part, "--csv", str(table)]
    command += ["--device", os.environ.get("HOMESERVE_TEST_CARD", "")]
    done = subprocess.run(command, cwd=tmp_path, env=given, capture_output=True, text=True, timeout=140, check=False)
    assert done.returncode in (0, 1), done.stderr
    wrong = [f"{row['what']}: {row['note']}" for row in csv.DictReader(table.open()) if row["ok"] != "yes"]
    assert not wrong and done.returncode == 0, "\n".join(wrong)
