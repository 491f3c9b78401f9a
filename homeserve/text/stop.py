"""Stop strings in a stream of text.

A stop may arrive in pieces, so the end of the text is held back for as long as it could be the beginning of one; no
part of a stop is ever given out. Of several stops the one that is *complete* first wins (of two complete at once, the
longer): the only rule that does not depend on how the text was cut into pushes.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Looks for `stops` (empty ones are ignored) in the text pushed."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(dict.fromkeys(stop for stop in stops if stop))
        self._held = ""
        self.matched: str | None = None
        """The stop that was found."""

    @property
    def has_stops(self) -> bool:
        return bool(self._stops)

    def push(self, text: str) -> tuple[str, bool]:
        """(text safe to send, whether a stop was found): with a stop, the text ends before it, the rest is dropped."""
        if not self._stops:
            return text, False
        if self.matched is not None:
            return "", True
        buffer = self._held + text
        found: tuple[int, int] | None = None
        for stop in self._stops:
            at = buffer.find(stop)
            if at >= 0 and (found is None or (at + len(stop), at) < found):
                found = (at + len(stop), at)
                self.matched = stop
        if found is not None:
            self._held = ""
            return buffer[: found[1]], True
        safe = len(buffer) - self._possible(buffer)
        self._held = buffer[safe:]
        return buffer[:safe], False

    def finish(self) -> str:
        """The text held back: no stop came of it."""
        held, self._held = self._held, ""
        return held

    def _possible(self, buffer: str) -> int:
        """Length of the longest end of `buffer` that begins a stop."""
        longest = 0
        for stop in self._stops:
            at = max(0, len(buffer) - len(stop) + 1)
            while 0 <= (at := buffer.find(stop[0], at)) < len(buffer) - longest:
                if stop.startswith(buffer[at:]):
                    longest = len(buffer) - at
                    break
                at += 1
        return longest
