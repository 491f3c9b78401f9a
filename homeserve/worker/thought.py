"""Where a thought begins and ends among tokens.

**By what is written, not by ids.** A mark is a text, and a model cuts it as it likes: where `</think>` is no token of
its own, `>` and a line's end may be one, and so may `.</`. Whoever waits for the ids that a tokenizer makes of the mark
alone never sees that end. So what tokens spell is followed, and the mark is found wherever it is complete, be it inside
a token (what stands behind it there belongs to the answer).

**Control tokens are characters of their own.** A mark that is one counts as that one and not as its letters: a thought
may speak of it. It is what who reads the answer does (`homeserve.text.marks`), so both see the same end.
"""

from __future__ import annotations

from collections.abc import Sequence

from homeserve.worker.vocabulary import Vocabulary

BLANK = " \t\r\n"
"""What may stand around a thought's marks: it belongs to the format."""
_BYTES = 256


class Mark:
    """A text that opens or closes thoughts, over one vocabulary. `ids`: what a tokenizer makes of it alone.

    Texts are of `spelled`: a character for each byte (0 to 255) and one for each control token (256 + its id). A space
    in front is the tokenizer's own doing and no part of the mark; `text` is empty where the ids spell nothing.
    """

    def __init__(self, ids: Sequence[int], vocabulary: Vocabulary) -> None:
        self.ids = tuple(ids)
        self._vocabulary = vocabulary
        self.text = "".join(map(self.spelled, ids)).lstrip(" ")
        self._borders = _borders(self.text)
        self._completing: dict[int, dict[int, str]] = {}

    def spelled(self, token: int) -> str:
        """Empty for an id without a spelling."""
        if token in self._vocabulary.special:
            return chr(_BYTES + token)
        spelled = self._vocabulary.spelled
        return spelled[token].decode("latin-1") if token < len(spelled) else ""

    def begun(self, text: str) -> str:
        """The longest end of `text` that is a beginning of the mark and not all of it."""
        for length in range(min(len(self.text) - 1, len(text)), 0, -1):
            if text.endswith(self.text[:length]):
                return self.text[:length]
        return ""

    def behind(self, text: str) -> str | None:
        """What follows the first mark in `text`; None where there is none."""
        at = text.find(self.text)
        return text[at + len(self.text) :] if at >= 0 else None

    def completing(self, begun: str) -> dict[int, str]:
        """The tokens in which the mark is complete behind what has `begun` it, each with what follows it there."""
        known = self._completing.get(len(begun))
        if known is None:
            lengths = [0, *(n for n in (len(begun), *self._borders[len(begun)]) if n)]
            tokens = {token for n in lengths for token in self._tokens(self.text[n:], anywhere=not n)}
            known = {token: self.behind(begun + self.spelled(token)) or "" for token in sorted(tokens)}
            self._completing[len(begun)] = known
        return known

    def _tokens(self, text: str, *, anywhere: bool) -> list[int]:
        """That begin with a text, or have it `anywhere`. Several control tokens are in no one token."""
        if len(text) == 1 and ord(text) >= _BYTES:
            return [ord(text) - _BYTES]
        if any(ord(char) >= _BYTES for char in text):
            return []
        found = self._vocabulary.spelled.containing(text.encode("latin-1"))
        ordinary = (token for token in found if token not in self._vocabulary.special)
        return [token for token in ordinary if anywhere or self.spelled(token).startswith(text)]


def _borders(text: str) -> list[list[int]]:
    """For each beginning of `text`, by its length: the lengths of its own proper beginnings that it ends with."""
    beginnings = [text[:length] for length in range(len(text))]
    return [[n for n in range(len(begin) - 1, 0, -1) if begin.endswith(text[:n])] for begin in beginnings]
