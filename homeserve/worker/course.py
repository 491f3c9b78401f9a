"""One answer under its guide: what may come next, as a function of its tokens.

              what opens a thought         what closes it
    OPENING ──────────────▶ THOUGHT ─────────────────────────▶ ANSWER ─────────────────▶ ENDED
       └───── any other text ───────────────────────────────────▲      an end, where the grammar is complete

    OPENING   what opens a thought, or what the grammar begins with; both while the text could be either
    THOUGHT   anything but what ends the answer; once the thought has its budget, what closes it
    ANSWER    what the grammar allows, and `ends` where it is complete
    ENDED     `ends` alone: rows that were sent out before the end was known draw here, and nobody reads them

Without a grammar OPENING and ANSWER allow everything, and there is no ENDED.

A thought may end within a token (`homeserve.worker.thought`). What follows its mark there is the grammar's beginning,
or blank; a token with anything else behind the mark is not allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from homeserve.wire.records import Guide, unpack_ints
from homeserve.worker.thought import BLANK, Mark

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

Mask = npt.NDArray[np.float32]
"""To be added to a row of logits `[vocab]`: 0 where a token is allowed, minus infinity elsewhere. NaN stays NaN."""

REASON_CHARS_MAX = 200
NO_TOKEN_FITS = "no token of this model's vocabulary goes on with what the grammar asks for"
NO_END = "the grammar is complete, and no token ends the answer"
NO_MARK = "the model's vocabulary does not spell what closes a thought"

_LOW_BIT_FIRST = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_BIASES = np.where(_LOW_BIT_FIRST, np.float32(0), np.float32(-np.inf)).astype(np.float32)
"""float32 `[256, 8]`: the part of a mask that each byte of a bit mask stands for."""


class GuideFailed(Exception):
    """An answer cannot go on under its guide. The message is for whoever asked."""


class Phase(Enum):
    OPENING = "opening"
    THOUGHT = "thought"
    ANSWER = "answer"
    ENDED = "ended"


@dataclass(frozen=True)
class Thoughts:
    """What is known of a guide's thoughts: their marks, and the trie that cuts a text into tokens."""

    opens: Mark
    closes: Mark
    trie: LLTokenizer | None = None
    """None where there is no grammar."""


class Course:
    """One answer under its guide, behind the `consumed` tokens that it has taken. `matcher` gives a matcher at the
    grammar's beginning, None where there is no grammar; `size` is the length of a mask. `thoughts` for a guide that
    knows of some.

    Raises GuideFailed; a course that failed is of no more use.
    """

    def __init__(
        self, guide: Guide, size: int, matcher: Callable[[], LLMatcher] | None, thoughts: Thoughts | None = None
    ) -> None:
        self.consumed = 0
        self._size = size
        self._ends = list(unpack_ints(guide.ends))
        self._budget = guide.thought_budget
        self._new_matcher = matcher
        self._matcher = matcher() if matcher is not None else None
        self._written = ""
        """Of the answer while it is OPENING; in a THOUGHT, the part of the closing mark that it ends with."""
        self._thought_len = 0
        self._matched = 0
        """Of the ids of the mark that is waited for: those that the last tokens were; -1: it began with others."""
        self._fits: dict[str, bool] = {}
        self._phase = Phase.ANSWER
        if guide.thought_closes and (guide.in_thought or guide.thought_opens):
            assert thoughts is not None, "a guide with thoughts comes with their marks"
            if not thoughts.closes.text or not (guide.in_thought or thoughts.opens.text):
                raise GuideFailed(NO_MARK)
            self._thoughts = thoughts
            self._phase = Phase.THOUGHT if guide.in_thought else Phase.OPENING

    @property
    def phase(self) -> Phase:
        return self._phase

    def take(self, token: int) -> None:
        """The next token of the answer."""
        self.consumed += 1
        if self._phase is Phase.OPENING:
            self._take_opening(token)
        elif self._phase is Phase.THOUGHT:
            self._take_thought(token)
        elif self._phase is Phase.ANSWER and self._matcher is not None:
            self._take_answer(self._matcher, token)

    def mask(self) -> Mask | None:
        """float32 `[size]`, over the next token; None where all are allowed."""
        if self._phase is Phase.THOUGHT:
            return self._thought_mask()
        if self._phase is Phase.ENDED:
            return self._only(self._ends)
        opening = self._phase is Phase.OPENING
        if self._new_matcher is None:
            return None
        opens = [self._thoughts.opens.ids[self._matched]] if opening and self._matched >= 0 else []
        if self._matcher is None:  # the grammar does not begin like this
            return self._only(opens)
        mask = self._grammar_mask(self._matcher, dead_end=bool(opens))
        mask[opens] = 0
        return mask

    # -------------------------------------------------------------------------------------------------------- tokens

    def _take_opening(self, token: int) -> None:
        """What opens a thought goes before what the grammar begins with, where a text could be either."""
        mark = self._thoughts.opens
        self._written = (self._written + mark.spelled(token)).lstrip(BLANK)
        if self._matched >= 0 and token == mark.ids[self._matched]:
            self._matched += 1
        else:
            self._matched = -1 if self._written else 0
        if self._written.startswith(mark.text):
            behind, self._written = self._written[len(mark.text) :], ""
            self._phase, self._matched = Phase.THOUGHT, 0
            self._think(behind)
        elif not mark.text.startswith(self._written):
            self._phase = Phase.ANSWER
            if self._matcher is not None:
                self._take_answer(self._matcher, token)
            elif self._new_matcher is not None:
                raise GuideFailed("the answer begins as a thought and goes on as none")
        elif self._matcher is not None and self._matcher.try_consume_tokens([token]) == 0:
            self._matcher = None

    def _take_thought(self, token: int) -> None:
        closes = self._thoughts.closes.ids
        self._thought_len += 1
        while self._matched and token != closes[self._matched]:
            self._matched = _border(closes[: self._matched])
        self._matched += token == closes[self._matched]
        self._think(self._thoughts.closes.spelled(token))

    def _think(self, text: str) -> None:
        """What is written goes on with `text`, in which the thought may end."""
        closes = self._thoughts.closes
        behind = closes.behind(self._written + text)
        if behind is None:
            self._written = closes.begun(self._written + text)
            return
        self._phase = Phase.ANSWER
        if self._new_matcher is not None:
            self._matcher = self._matcher_behind(behind)
            if self._matcher is None:
                raise GuideFailed("the token that ends the thought goes on with what the grammar does not begin with")

    def _matcher_behind(self, text: str) -> LLMatcher | None:
        """Behind the beginning of an answer; None where the grammar begins otherwise. Blanks may be the format's."""
        assert self._new_matcher is not None and self._thoughts.trie is not None, "there is a grammar"
        for begin in dict.fromkeys((text, text.lstrip(BLANK))):
            matcher = self._new_matcher()
            tokens = self._cut(self._thoughts.trie, begin)
            if tokens is not None and matcher.try_consume_tokens(tokens) == len(tokens):
                return matcher
        return None

    def _cut(self, trie: LLTokenizer, text: str) -> list[int] | None:
        """A text as tokens, any that spell it; None where there are none."""
        try:
            tokens = trie.greedy_tokenize(text.encode("latin-1").decode())
        except UnicodeError:  # a part of a character, or a control token
            return None
        spelled = "".join(map(self._thoughts.closes.spelled, tokens))
        return list(tokens) if spelled == text else None

    def _take_answer(self, matcher: LLMatcher, token: int) -> None:
        if token in self._ends and matcher.is_accepting():
            self._phase = Phase.ENDED
        elif not matcher.consume_token(token):
            raise GuideFailed(reason(matcher) or f"token {token} does not go on with what its grammar asks for")

    # --------------------------------------------------------------------------------------------------------- masks

    def _thought_mask(self) -> Mask | None:
        closes = self._thoughts.closes
        if 0 <= self._budget <= self._thought_len:
            return self._only([closes.ids[self._matched]])
        if self._new_matcher is None:
            return None
        mask = np.zeros(self._size, np.float32)
        mask[[token for token in self._ends if token not in closes.ids]] = -np.inf
        completing = closes.completing(self._written)
        mask[[token for token, behind in completing.items() if not self._may_be_behind(behind)]] = -np.inf
        return mask

    def _may_be_behind(self, text: str) -> bool:
        """Whether an answer may begin so, in the token that ends the thought."""
        if text not in self._fits:
            self._fits[text] = not text or self._matcher_behind(text) is not None
        return self._fits[text]

    def _grammar_mask(self, matcher: LLMatcher, *, dead_end: bool) -> Mask:
        """`dead_end`: whether no token at all may be allowed."""
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        if matcher.is_error():
            raise GuideFailed(reason(matcher))
        mask: Mask = _BIASES.take(bits, axis=0).reshape(-1)
        complete = mask[self._size] == 0  # the bit of the vocabulary's own end
        mask = mask[: self._size]
        mask[self._ends] = 0 if complete else -np.inf
        if not dead_end and not (mask == 0).any():
            raise GuideFailed(NO_END if complete else NO_TOKEN_FITS)
        return mask

    def _only(self, tokens: list[int]) -> Mask:
        mask = np.full(self._size, -np.inf, np.float32)
        mask[tokens] = 0
        return mask


def reason(matcher: LLMatcher) -> str:
    """llguidance's words, without traces of its own code."""
    return matcher.get_error().partition("\n")[0][:REASON_CHARS_MAX]


def _border(ids: Sequence[int]) -> int:
    """The length of the longest proper beginning of `ids` that is also their end."""
    return next(n for n in range(len(ids) - 1, -1, -1) if ids[:n] == ids[len(ids) - n :])
