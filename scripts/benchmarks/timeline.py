"""Which rank was busy when: a table and a picture of the last plans of a server, and how well its ranks overlap.

    rank 0  ▓chunk 0▓▓chunk 1▓▓chunk 2▓▓chunk 3▓
    rank 1           ▓chunk 0▓▓chunk 1▓▓chunk 2▓▓chunk 3▓
                     |        the window         |

The figure is of the longest row of plans that bring prompt tokens. Its *window* begins when every rank has begun with
the first of them (the pipeline is full) and ends when the first rank is done with the last one. In the window,

    overlap = sum of the ranks' busy time / (ranks x wall)

and `whole` is the same from the first moment to the last. Busy time is without waiting for other ranks. Where in a plan
a rank waited is not recorded; it is drawn first, as a rank of the pipeline layout does, which waits for its input.

    PYTHON scripts/benchmarks/timeline.py (--url URL | --read CSV) [--csv FILE] [--svg FILE]
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
import urllib.request
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

COLUMNS = ("life", "seq", "kind", "rows", "prompt_rows", "rank", "began_ms", "busy_ms", "waited_ms")
WIDTH, LANE, LEFT, TOP = 960, 34, 64, 44
COLOURS = {"prefill": ("#2a6f97", "#61a5c2"), "mixed": ("#2a6f97", "#61a5c2"), "decode": ("#bc6c25", "#dda15e")}
WAITING = "#e0e0e0"


@dataclass(frozen=True)
class Span:
    """One rank's time on one plan, in milliseconds."""

    life: int
    seq: int
    kind: str
    rows: int
    prompt_rows: int
    rank: int
    began_ms: float
    busy_ms: float
    waited_ms: float

    @property
    def start_ms(self) -> float:
        """When it began to compute."""
        return self.began_ms + self.waited_ms

    @property
    def end_ms(self) -> float:
        return self.start_ms + self.busy_ms

    def busy_within(self, first_ms: float, last_ms: float) -> float:
        return max(0.0, min(self.end_ms, last_ms) - max(self.start_ms, first_ms))


@dataclass(frozen=True)
class Overlap:
    """Of one row of plans. Shares of 1; `window_ms` from full to the first rank done."""

    ranks: int
    plans: int
    prompt_rows: int
    window_ms: float
    overlap: float
    whole: float


def spans_of(plans: Iterable[dict[str, Any]]) -> list[Span]:
    """From `plans` of a status."""
    return [
        Span(plan["life"], plan["seq"], plan["kind"], plan["rows"], plan["prompt_rows"], *rank)
        for plan in plans
        for rank in plan["ranks"]
    ]


def read_csv(path: Path) -> list[Span]:
    with path.open(newline="") as file:
        return [
            Span(
                *(int(row[name]) for name in ("life", "seq")),
                row["kind"],
                *(int(row[name]) for name in ("rows", "prompt_rows", "rank")),
                *(float(row[name]) for name in ("began_ms", "busy_ms", "waited_ms")),
            )
            for row in csv.DictReader(file)
        ]


def write_csv(path: Path, spans: Sequence[Span]) -> None:
    """Times count from the first moment."""
    start = min(span.began_ms for span in spans)
    with path.open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(COLUMNS)
        for span in spans:
            times = (span.began_ms - start, span.busy_ms, span.waited_ms)
            head = (span.life, span.seq, span.kind, span.rows, span.prompt_rows, span.rank)
            table.writerow((*head, *(f"{each:.3f}" for each in times)))


def longest_prompt(spans: Sequence[Span]) -> list[Span]:
    """The spans of the row of consecutive plans with the most prompt tokens."""
    plans: dict[tuple[int, int], list[Span]] = {}
    for span in spans:
        if span.prompt_rows:
            plans.setdefault((span.life, span.seq), []).append(span)
    rows: list[list[Span]] = []
    before = (-1, -1)
    for place in sorted(plans):
        if before != (place[0], place[1] - 1):
            rows.append([])
        rows[-1] += plans[place]
        before = place
    return max(rows, key=lambda row: sum(span.prompt_rows for span in row), default=[])


def overlap_of(row: Sequence[Span]) -> Overlap | None:
    """None where there are fewer than two plans, or the first rank is done before the last has begun."""
    seqs = sorted({span.seq for span in row})
    ranks = {span.rank for span in row}
    if len(seqs) < 2:
        return None
    full = max(span.start_ms for span in row if span.seq == seqs[0])
    done = min(span.end_ms for span in row if span.seq == seqs[-1])
    first, last = min(span.start_ms for span in row), max(span.end_ms for span in row)
    if done <= full:
        return None
    within = sum(span.busy_within(full, done) for span in row)
    whole = sum(span.busy_ms for span in row)
    prompt_rows = sum({span.seq: span.prompt_rows for span in row}.values())
    shares = within / (len(ranks) * (done - full)), whole / (len(ranks) * (last - first))
    return Overlap(len(ranks), len(seqs), prompt_rows, done - full, *shares)


def picture(row: Sequence[Span], title: str) -> str:
    """The spans as SVG: a lane for each rank, plans in turn lighter and darker, waiting grey."""
    first = min(span.began_ms for span in row)
    wall = max(span.end_ms for span in row) - first
    ranks = sorted({span.rank for span in row})
    scale = (WIDTH - LEFT - 16) / max(wall, 1e-9)
    height = TOP + LANE * len(ranks) + 34
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="system-ui, sans-serif" '
        'font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{LEFT}" y="20">{escape(title)}</text>',
    ]
    for lane, rank in enumerate(ranks):
        parts.append(f'<text x="8" y="{TOP + lane * LANE + 18}">rank {rank}</text>')
    for span in row:
        y = TOP + ranks.index(span.rank) * LANE
        colour = COLOURS.get(span.kind, COLOURS["decode"])[span.seq % 2]
        for start, length, fill, name in (
            (span.began_ms, span.waited_ms, WAITING, "waiting"),
            (span.start_ms, span.busy_ms, colour, "busy"),
        ):
            what = f"rank {span.rank}, plan {span.seq} ({span.kind}, {span.rows} rows): {name} {length:.1f} ms"
            x = LEFT + (start - first) * scale
            parts.append(
                f'<rect x="{x:.2f}" y="{y}" width="{length * scale:.2f}" height="{LANE - 10}" fill="{fill}">'
                f"<title>{escape(what)}</title></rect>"
            )
    base = TOP + LANE * len(ranks) + 16
    for share in range(5):
        x = LEFT + share / 4 * wall * scale
        parts.append(f'<text x="{x:.0f}" y="{base}" text-anchor="middle">{share / 4 * wall:.0f} ms</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="who was busy when")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--url", help="a running server")
    source.add_argument("--read", type=Path, help="a CSV of an earlier run")
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--svg", type=Path)
    asked = parser.parse_args(argv)
    if asked.url:
        with urllib.request.urlopen(f"{asked.url.rstrip('/')}/v1/homeserve/status", timeout=30) as answer:
            spans = spans_of(json.load(answer)["plans"])
    else:
        spans = read_csv(asked.read)
    row = longest_prompt(spans)
    if not row:
        print("no plan with prompt tokens is known", file=sys.stderr)
        return 1
    found = overlap_of(row)
    if asked.csv:
        write_csv(asked.csv, row)
    if found is None:
        title = f"{len({span.seq for span in row})} plan: nothing to overlap"
    else:
        title = (
            f"{found.prompt_rows} prompt tokens in {found.plans} plans over {found.ranks} ranks: overlap"
            f" {found.overlap:.1%} of {found.window_ms:.0f} ms once full, {found.whole:.1%} with fill and drain"
        )
    if asked.svg:
        asked.svg.write_text(picture(row, title))
    print(title)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
