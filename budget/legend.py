"""What the words of a report mean: a few lines at its end, and only of words that stand on this page."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from budget.page import Column, Style, table

_CODES = re.compile(r"\x1b\[[0-9;]*m")
_MEANINGS: Mapping[str, str] = {
    "boot": "the moment at which weights are placed and buffers made",
    "pipeline": "every device holds some layers whole: good for prompts (with one device: the server at work)",
    "tensor": "every device holds a part of each layer: good for answers",
    "flip": "the way from one of these layouts to the other, and the moment of it",
    "floor": "what must stay free at the peak, for others (--floor-mib)",
    "carve-out": "what the firmware took of the memory for the graphics alone; the system does not see it",
    "GTT": "how much of the host's memory the graphics may pin beside it",
    "weights arena": "the place that holds one layout's weights at a time, as large as the larger of them",
    "communicators": "buffers through which devices exchange what they computed",
    "drafts": "what recurrent layers keep until it is known which drafted tokens are right",
    "window": "layers with one see only so many tokens, the last ones, and keep no others",
    "state": "what recurrent layers remember of a request, whatever its length",
    "state checkpoints": "copies of it, so that a prompt that was seen before need not be read again",
    "staging": "pinned memory through which cards get their batches and give their logits",
    "exchange": "pinned memory through which a card's rows go to other devices",
    "plan log": "shared memory in which the engine writes down each step for all workers",
    "rank": "one worker process and its device",
}
"""In the order in which they are told."""
_PATTERNS: Mapping[str, str] = {
    # A line of a ledger, not the word in a sentence.
    "state": r"(?m)^  (?:[ +]\s+[\d .]+  )?state\s{2,}",
    "staging": r"(?m)^  (?:[ +]\s+[\d .]+  )?staging\s{2,}",
    "exchange": r"(?m)^  (?:[ +]\s+[\d .]+  )?exchange\s{2,}",
    "drafts": r"(?m)^  (?:[ +]\s+[\d .]+  )?drafts(?:, rank \d+)?\s{2,}",
    # Of layers, not of a bus.
    "window": r"\(\s*window\s+\d",
    "rank": r"(?i)\branks?\b",
}


def legend_lines(style: Style, parts: Iterable[Sequence[str]]) -> list[str]:
    """The words of a page (its parts) that nobody has to know."""
    text = _CODES.sub("", "\n".join(line for part in parts for line in part))
    used = [word for word in _MEANINGS if re.search(_PATTERNS.get(word, rf"\b{re.escape(word)}\b"), text)]
    if not used:
        return []
    rows: Sequence[Sequence[tuple[str, str] | str]] = [[(word, "head"), _MEANINGS[word]] for word in used]
    return [style.paint("Words", "head"), *table(style, [Column(""), Column("")], rows)]
