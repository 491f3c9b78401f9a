"""Bars as one SVG file: no script, no font of its own, readable on a light and on a dark ground."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEAD, LINE = 720, 40, 22
LEFT = 280
"""Where bars begin; their titles end a little before."""
LONGEST = 390.0
"""What is longer is cut here; its number says how long it is."""
_STYLE = (
    "<style>text{fill:#24292f}.bar{fill:#2f7ed8}.low{fill:#c2703d}line{stroke:#6e7781}"
    "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.bar{fill:#58a6ff}.low{fill:#e0925f}line{stroke:#8b949e}}</style>"
)


@dataclass(frozen=True)
class Bar:
    """`said` stands behind it. `low`: in the other colour."""

    title: str
    value: float
    said: str
    low: bool = False


def bars(title: str, rows: Sequence[Bar | str], scale: float, mark: float | None = None) -> str:
    """Each row a bar of `scale` units of the picture for 1, or a heading. `mark`: a dashed line at this value."""
    height = HEAD + 20 + LINE * len(rows)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="system-ui, sans-serif" '
        'font-size="13">',
        _STYLE,
        f'<text x="10" y="22" font-weight="600">{escape(title)}</text>',
    ]
    for index, row in enumerate(rows):
        y = HEAD + LINE * index
        if isinstance(row, str):
            parts.append(f'<text x="10" y="{y + 13}" font-weight="600">{escape(row)}</text>')
        else:
            parts += _bar(y, row, scale)
    if mark is not None:
        at = f"{LEFT + mark * scale:.1f}"
        parts.append(f'<line x1="{at}" x2="{at}" y1="32" y2="{height - 16}" stroke-dasharray="3 3"/>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _bar(y: int, row: Bar, scale: float) -> list[str]:
    width = min(row.value * scale, LONGEST)
    kind = "low" if row.low else "bar"
    return [
        f'<text x="{LEFT - 10}" y="{y + 13}" text-anchor="end">{escape(row.title)}</text>',
        f'<rect class="{kind}" x="{LEFT}" y="{y}" width="{width:.1f}" height="15" rx="2"/>',
        f'<text x="{LEFT + 6 + width:.1f}" y="{y + 13}">{escape(row.said)}</text>',
    ]
