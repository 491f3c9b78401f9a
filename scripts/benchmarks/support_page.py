"""Writes what backends can do from their tables: backends/support.json and docs/SUPPORT.md (`scripts/support`).

With `--check` nothing is written: exit code 1 where a file is not what the tables say.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from backends import support
from backends.cpu.capability import TABLE as CPU
from backends.gpu import capability as gpu
from backends.gpu.arch import SAMPLE
from backends.reference.backend import capability_table

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "SUPPORT.md"
ANY = "any"
MAIN_TYPES = (
    *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("IQ4_NL", "IQ4_XS", "MXFP4"),
)
"""What files that people run are made of; the rest is rare."""
WEIGHTED = ("EmbedRows", "Linear", "Experts")
SIGNS = {True: "yes", False: "no", None: "unknown"}

INTRO = """# What each backend can do

Made from the capability tables by `scripts/support`; a test holds page and tables equal. `homeserve doctor --support`
prints the same, with `--json` for programs.

A table has an entry for each op and each type or feature that it may have to do with (`backends/needs.py`). A model
that needs an entry which reads *no* is refused before anything is loaded, with every missing entry named. *Unknown* is
no yes: `homeserve up` by itself leaves such a card out, and where it is named its kernels are compiled on the machine
first.

**reference** is the oracle, **cpu** serves everywhere. **cuda** and **rocm** are cards ([GPU.md](GPU.md)): a *yes*
means that every kernel of the entry compiles for the arch without a spilled register and equals the oracle under
emulation. **None of them has run on a card.** An arch that has no column is *unknown*.
"""


def tables() -> tuple[support.Table, ...]:
    """Of all backends. The reference's as it is where the tests' packages are installed."""
    found = [
        support.Table("reference", (ANY,), capability_table(has_gguf=True)),
        support.Table("cpu", (ANY,), CPU),
    ]
    for backend, vendor in (("cuda", "nvidia"), ("rocm", "amd")):
        arches = sorted(SAMPLE[vendor], key=lambda name: (len(name), name))
        found += support.merged({name: gpu.table(name) for name in arches}, backend)
    return tuple(found)


def page(of: Sequence[support.Table]) -> str:
    """The document."""
    lines = [INTRO, "## In numbers", "", "| backend | arches | yes | no | unknown |", "|---|---|---:|---:|---:|"]
    for table in of:
        counts = " | ".join(str(table.count(ok)) for ok in (True, False, None))
        lines.append(f"| {table.backend} | {' '.join(table.arches)} | {counts} |")
    lines += ["", "## Types of weights", "", *_header(of, "type")]
    for kind in _types(of):
        cells = [
            _word({entry.ok for entry in table.entries if (entry.type, entry.op in WEIGHTED) == (kind, True)})
            for table in of
        ]
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    lines += [
        "",
        "In an embedding, a linear layer and an expert alike.",
        "",
        "## Everything else",
        "",
        *_header(of, "op | of"),
    ]
    rest = dict.fromkeys(
        (entry.op, entry.type) for table in of for entry in table.entries if not _is_weight(entry.op, entry.type)
    )
    told: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for op, kind in rest:
        cells = tuple(
            _word({entry.ok for entry in table.entries if (entry.op, entry.type) == (op, kind)}) for table in of
        )
        told.setdefault((op, cells), []).append(kind)
    for (op, cells), kinds in told.items():
        if any(cell == "yes" for cell in cells):
            lines.append(f"| {op} | {', '.join(kinds)} | {' | '.join(cells)} |")
    lines += ["", "## Why not", ""]
    for table in of:
        for run in support.runs(table.entries):
            if run["ok"] is not True and run["op"] in WEIGHTED and set(run["types"]) & set(_types(of)):
                where = table.backend if table.arches == (ANY,) else f"{table.backend} ({' '.join(table.arches)})"
                lines.append(f"- {where}, {run['op']} of {', '.join(run['types'])}: {run['why'] or 'unknown'}")
    return "\n".join(lines) + "\n"


def _header(of: Sequence[support.Table], first: str) -> list[str]:
    names = [table.backend if table.arches == (ANY,) else f"{table.backend} {' '.join(table.arches)}" for table in of]
    return [f"| {first} | {' | '.join(names)} |", "|---" * (len(of) + 1 + first.count("|")) + "|"]


def _types(of: Sequence[support.Table]) -> list[str]:
    """Those that hold weights: one backend takes them at least."""
    every = dict.fromkeys(entry.type for table in of for entry in table.entries if entry.op == "Linear" and entry.ok)
    return [*MAIN_TYPES, *(kind for kind in every if kind not in MAIN_TYPES)]


def _is_weight(op: str, kind: str) -> bool:
    return op in WEIGHTED and kind in _QUANTS


_QUANTS = frozenset(entry.type for entry in CPU if entry.op == "Linear")


def _word(oks: set[bool | None]) -> str:
    if not oks:
        return "-"
    return SIGNS[oks.pop()] if len(oks) == 1 else "in part"


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="scripts/support", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, say what differs")
    given = parser.parse_args(argv)
    found = tables()
    wanted = {ROOT / "backends" / "support.json": support.dumped(found), PAGE: page(found)}
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text() != text]
    for path in stale:
        if not given.check:
            path.write_text(wanted[path])
        print(f"{path.relative_to(ROOT)} {'is stale' if given.check else 'written'}")
    for table in found:
        counts = ", ".join(f"{table.count(ok)} {SIGNS[ok]}" for ok in SIGNS)
        print(f"{table.backend} {' '.join(table.arches)}: {counts}")
    return 1 if given.check and stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
