"""A page of text for a terminal: aligned columns, numbers grouped by thousands, bars, colour that nothing depends on.

A cell is text, or text with the name of a paint. Widths are counted on the text alone, so a coloured page and a plain
one have every character in the same place.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO

from budget.facts import MIB

WIDTH = 100
INDENT = "  "

PAINTS: Mapping[str, str] = {
    "good": "1;32",
    "bad": "1;31",
    "unsure": "1;33",
    "head": "1",
    "mark": "33",
    "bar": "36",
    "soft": "2",
}
"""Paint -> SGR codes. No background and no white or black: both kinds of terminal show them."""

Cell = str | tuple[str, str]
"""Text, or (text, paint)."""

_GROUPS = re.compile(r"(?<=\d) (?=\d{3}(?!\d))")
"""The space within a number."""
_COUNTS = re.compile(
    r"(?<![\w.,:/=#-])(\d{4,12})"
    r"(?=(?:\.\d+)?(?: and tensor \d+)?(?: |-)(?:MiB|MB|GB|tokens?|prompt|layers?)\b)"
)
"""A number without its spaces, in a text that was written elsewhere."""
_ONES = re.compile(r"(?<![\w.,:/=#-])(?<!\d )1 (request|layer|token|device|card|rank|core)s\b")


@dataclass(frozen=True)
class Style:
    """What a stream can show. Neither is needed to read a page."""

    colour: bool = False
    blocks: bool = False

    def paint(self, text: str, paint: str) -> str:
        text = safe(text)
        if not self.colour or not paint or not text.strip():
            return text
        return f"\x1b[{PAINTS[paint]}m{text}\x1b[0m"

    def bar(self, share: float, width: int) -> str:
        """`width` characters, filled by `share` (0 to 1; more is full). Less than half a character is none."""
        full, empty = ("█", "░") if self.blocks else ("#", ".")
        filled = int(min(1.0, max(0.0, share)) * width + 0.5)
        return full * filled + empty * (width - filled)


def style_of(stream: IO[str] | None, environ: Mapping[str, str]) -> Style:
    """What `stream` shows (None: it is closed): colour on a terminal that has it, unless NO_COLOR is set and not empty;
    blocks where the encoding has them."""
    if stream is None:
        return Style()
    colour = stream.isatty() and not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"
    try:
        "█░".encode(getattr(stream, "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return Style(colour, False)
    return Style(colour, True)


# ------------------------------------------------------------------------------------------------------------ numbers


def grouped(number: float, digits: int = 0) -> str:
    """41000 -> '41 000'."""
    return f"{number:,.{digits}f}".replace(",", " ")


def regrouped(text: str) -> str:
    """A text that was written elsewhere, its amounts spelt as on the rest of a page: 'of 28512 tokens' -> '28 512', and
    one of a thing as one."""
    return _COUNTS.sub(lambda found: grouped(int(found[1])), _ONES.sub(r"1 \1", text))


def counted(number: int, what: str) -> str:
    """'1 request', '2 requests', '16 384 tokens'."""
    return f"{grouped(number)} {what}{'s' * (number != 1)}"


def a(word: str) -> str:
    """'a Q2_K', 'an IQ2_XXS': by how the first letter of an abbreviation is said."""
    return f"{'an' if word[:1] in 'AEFHILMNORSX' else 'a'} {word}"


def tenths(count: int) -> int:
    """Bytes as tenths of a MiB: what a page shows, so that what a reader adds up is what stands below the line."""
    return round(count * 10 / MIB)


def shown(tenth: int) -> str:
    return grouped(tenth / 10, 1)


def mib(count: int | None) -> str:
    """Bytes as MiB with one digit; 'unknown' for None."""
    return "unknown" if count is None else shown(tenths(count))


def gained(tokens: int) -> str:
    """+41 000, -512, 0."""
    return f"{'+' if tokens > 0 else ''}{grouped(tokens)}"


# --------------------------------------------------------------------------------------------------------------- text


def safe(text: str) -> str:
    """A text of others as a terminal may see it: what is no letter, mark or space is written as its number."""
    return text if text.isprintable() else "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


# ------------------------------------------------------------------------------------------------------------- tables


@dataclass(frozen=True)
class Column:
    """`right` aligns numbers; `limit` is the widest the column may be (its text is wrapped), 0 for no limit."""

    head: str
    right: bool = False
    limit: int = 0


def table(style: Style, columns: Sequence[Column], rows: Sequence[Sequence[Cell]], indent: str = INDENT) -> list[str]:
    """Lines of a table with its heads; a column in which nothing stands is left out. The last column takes what is left
    of the page and is wrapped there."""
    used = [at for at in range(len(columns)) if any(_text(row[at]) for row in rows)]
    columns = [columns[at] for at in used]
    cells = [[_wrapped(row[at], column.limit) for at, column in zip(used, columns, strict=True)] for row in rows]
    widths = [
        max([len(column.head), *(len(line) for row in cells for line in row[at][0])])
        for at, column in enumerate(columns)
    ]
    left = WIDTH - len(indent) - sum(width + 2 for width in widths[:-1])
    if widths and widths[-1] > left:
        widths[-1] = max(16, left)
        for row in cells:
            row[-1] = _wrapped((" ".join(row[-1][0]), row[-1][1]), widths[-1])
    heads: list[Cell] = [(column.head, "soft") for column in columns]
    lines = [_row(style, columns, widths, heads, indent)] if any(column.head for column in columns) else []
    for row in cells:
        for line in range(max((len(cell[0]) for cell in row), default=0)):
            parts: list[Cell] = [(cell[0][line] if line < len(cell[0]) else "", cell[1]) for cell in row]
            lines.append(_row(style, columns, widths, parts, indent))
    return lines


def wrapped(text: str, indent: str = "", hanging: str | None = None) -> list[str]:
    """A paragraph within the page's width. Words and numbers are never cut: a long path stays whole."""
    lines = textwrap.wrap(
        _joined(safe(text)),
        WIDTH,
        initial_indent=indent,
        subsequent_indent=indent if hanging is None else hanging,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [_parted(line) for line in lines]


def _text(cell: Cell) -> str:
    return cell if isinstance(cell, str) else cell[0]


def _wrapped(cell: Cell, limit: int) -> tuple[list[str], str]:
    text, paint = (cell, "") if isinstance(cell, str) else cell
    text = safe(text)
    if limit <= 0 or len(text) <= limit:
        return [text], paint
    return [_parted(line) for line in textwrap.wrap(_joined(text), limit, break_on_hyphens=False)] or [""], paint


def _joined(text: str) -> str:
    """So that no line ends within a number."""
    return _GROUPS.sub("\xa0", text)


def _parted(text: str) -> str:
    return text.replace("\xa0", " ")


def _row(style: Style, columns: Sequence[Column], widths: Sequence[int], cells: Sequence[Cell], indent: str) -> str:
    parts = []
    for column, width, cell in zip(columns, widths, cells, strict=True):
        text, paint = (cell, "") if isinstance(cell, str) else cell
        blank = " " * (width - len(text))
        painted = style.paint(text, paint)
        parts.append(blank + painted if column.right else painted + blank)
    return (indent + "  ".join(parts)).rstrip()
