"""One answer's text as it grows: token ids in, text that may be sent out, until a stop string or the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from homeserve.text.detokenizer import Detokenizer, Spells
from homeserve.text.stop import StopMatcher


class TextDelta(msgspec.Struct, frozen=True):
    """What one push gave.

    `text` may be sent. `stopped`: a stop string was found, its text is cut off and nothing follows. `tokens_used`: how
    many of the pushed ids belong to the answer (fewer than were pushed where a stop came before the last of them).
    `offsets[i]`: characters of the answer that were complete before used id i.
    """

    text: str
    stopped: bool
    tokens_used: int
    offsets: tuple[int, ...] = ()


class TextStream:
    """Detokenizer and StopMatcher in a row. `stop` is the stop string found, `tokens` the ids used so far. `shown`:
    control tokens that stand in the text, each as a character of its own (`Detokenizer`); no stop string has one."""

    def __init__(
        self,
        tokenizer: Spells,
        stops: Sequence[str] = (),
        *,
        skip_special: bool = True,
        shown: Mapping[int, str] | None = None,
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, skip_special, shown)
        self._matcher = StopMatcher(stops)
        self._chars = 0
        self._stopped = False
        self.tokens = 0

    @property
    def stop(self) -> str | None:
        return self._matcher.matched

    @property
    def has_stops(self) -> bool:
        return self._matcher.has_stops

    def push_plain(self, ids: Sequence[int]) -> str:
        """The text that `push` gives where there are no stops, and nothing else."""
        text = self._detokenizer.push(ids)
        self._chars += len(text)
        self.tokens += len(ids)
        return text

    def push(self, ids: Sequence[int]) -> TextDelta:
        """Add ids; they are looked at one by one, so that the token that completes a stop is known."""
        parts: list[str] = []
        offsets: list[int] = []
        for token in ids:
            if self._stopped:
                break
            offsets.append(self._chars)
            text = self._detokenizer.push_one(token)
            self._chars += len(text)
            safe, self._stopped = self._matcher.push(text)
            parts.append(safe)
        self.tokens += len(offsets)
        return TextDelta("".join(parts), self._stopped, len(offsets), tuple(offsets))

    def finish(self) -> TextDelta:
        """The end of the ids: gives out what was held back. Nothing after a stop."""
        if self._stopped:
            return TextDelta("", True, 0)
        safe, self._stopped = self._matcher.push(self._detokenizer.finish())
        return TextDelta(safe if self._stopped else safe + self._matcher.finish(), self._stopped, 0)
