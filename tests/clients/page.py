"""Writes docs/verification/clients.md from the rows of the last runs (build/clients/rows.json).

    HOMESERVE_TEST_TIER=slow pytest tests/clients      # without the variable: those of CI alone
    python3 tests/clients/page.py

A tool that has not run on this checkout keeps no row, and all rows are of one commit.
"""

from __future__ import annotations

import json
import platform
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROWS = ROOT / "build" / "clients" / "rows.json"
PAGE = ROOT / "docs" / "verification" / "clients.md"
HEAD = """# Clients of others, against a real server

Each row is one run against `homeserve up` with the default model (SmolLM2-135M-Instruct Q4_1) on a CPU. *Requests* is
what the server answered, *errors* how many of those were errors that the client did not provoke on purpose; *provoked*
counts the others (a model that is not here, for example). Commands are as in `tests/clients`; `URL` is the server's.

"""


def main() -> int:
    if not ROWS.exists():
        print(f"{ROWS} is missing: run the tests of clients first", file=sys.stderr)
        return 1
    rows = json.loads(ROWS.read_text())
    runs = {(row["day"], row["commit"]) for row in rows}
    if len({commit for _, commit in runs}) != 1:
        print(f"rows of several commits: {sorted(runs)}; remove {ROWS} and run all again", file=sys.stderr)
        return 1
    day, commit = max(runs)
    lines = [
        HEAD + f"{day}, commit {commit}, {platform.machine()}, Python {platform.python_version()}.\n",
        "| tool | version | tier | command | exit code | requests | errors | provoked |",
        "|---|---|---|---|---:|---:|---:|---:|",
    ]
    for row in sorted(rows, key=lambda row: (row["tier"] != "full", row["tool"].lower())):
        cells = [row["tool"], row["version"], row["tier"], f"`{row['command']}`", row["code"], row["requests"]]
        lines.append("| " + " | ".join(str(cell) for cell in [*cells, row["errors"], row["refused"]]) + " |")
    PAGE.write_text("\n".join(lines) + "\n")
    print(f"{PAGE.relative_to(ROOT)}: {len(rows)} rows")
    return 0


if __name__ == "__main__":
    sys.exit(main())
