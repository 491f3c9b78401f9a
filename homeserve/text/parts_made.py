"""Parts of an answer as they are made: texts of one kind in a row, and what space and marks between them mean."""

from __future__ import annotations

from collections.abc import Callable

from homeserve.text.answer import Part, PartKind, merged
from homeserve.text.marks import visible


class PartsMade:
    """`kind`: what text is now, text or thought. `said`: whether text came since the last mark. `holds_space`: whether
    space waits for what comes behind it: in front of a mark, and behind one, it is no text. `calling`: whether the last
    call has not ended."""

    def __init__(self, new_id: Callable[[], str], *, several: bool) -> None:
        self._new_id = new_id
        self._several = several
        self._made: list[Part] = []
        self._space = ""
        self._drops_space = False
        self._ids: set[str] = set()
        self.kind = PartKind.TEXT
        self.said = False
        self.holds_space = True
        self.calls = 0
        self.calling = False

    @property
    def may_begin(self) -> bool:
        """Whether the answer may have one more call."""
        return self._several or self.calls == 0

    def take(self) -> list[Part]:
        taken, self._made = self._made, []
        return list(merged(taken))

    def text(self, text: str) -> None:
        """Text of the current kind. What stands for a control token is none."""
        text = visible(text)
        bare = text.rstrip() if self.holds_space else text
        if bare:
            if self._drops_space and not self.said:
                self._space, bare = "", bare.lstrip()
            self._made.append(Part(self.kind, self._space + bare))
            self._space, self.said = text[len(text.rstrip()) :] if self.holds_space else "", True
        else:
            self._space += text

    def begin(self, name: str, id: str = "") -> None:
        """A call. An id that the model wrote is kept where it is the only one of its name."""
        self.mark_passed()
        if not id or id in self._ids:
            id = self._new_id()
        self._ids.add(id)
        self._made.append(Part(PartKind.CALL, call=self.calls, name=name, id=id))
        self.calls += 1
        self.calling = True

    def ended(self) -> None:
        """The last call is whole."""
        self.calling = False

    def arguments(self, text: str) -> None:
        text = visible(text)
        if text:
            self._made.append(Part(PartKind.CALL, text, call=self.calls - 1))

    def turn_to(self, kind: PartKind) -> None:
        """What follows is of this kind."""
        self.mark_passed()
        self.kind = kind

    def mark_passed(self) -> None:
        """Space before and behind a mark is no text."""
        self._space = ""
        self.said = False
        self._drops_space = True

    def end(self) -> None:
        """The end of the answer: space behind the last text is text, that of a thought or behind a mark is not."""
        if self._space and self.kind is PartKind.TEXT and (self.said or not self._drops_space):
            self._made.append(Part(self.kind, self._space))
        self._space = ""
