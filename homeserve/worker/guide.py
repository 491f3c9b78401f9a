"""What an answer may look like, on the rank that draws: a mask over each row of its logits.

    Guides          of a rank: vocabulary, compiled grammars, threads
      └ LaneGuide   of a lane: the tokens of its answer so far, and the mask that is on its way
          └ Course  of an answer: where it stands behind these tokens (`homeserve.worker.course`)

**A mask is a function of the answer's tokens.** A `Course` begins at the first token of the output, takes one token
after the other, and says what may come next. Nothing else goes into it: no clock, no plan, no layout. So it is made
again from history and inputs after a restart, a preemption or a prefix hit, and says what it said before.

**Tokens are told by their place.** A token that is drawn is told at once, and comes again as the input of the next row:
what is known already is passed over (`LaneGuide.told`). Drafts are not told before they are drawn, so nothing has to be
taken back when they are rejected. Where a plan failed half-way and its rows come again, the course begins anew
(`LaneGuide.mask`).

**A mask is made beside the plan.** As soon as the inputs of rows are known (when they were drawn, or when a plan brings
them) a thread takes them and makes the masks of these rows (`Guides.make_due`), while this plan ends and the next one
computes; llguidance lets other threads run meanwhile. When a row is drawn its mask is there, or on its way and waited
for, or the plan loop makes it itself: it never waits for a thread to be woken, which takes longer than the mask where
all cores are busy. Grammars are compiled, and the vocabulary's trie is built, in a thread of their own: a lane that
needs them waits, and so do the lanes in the same plan.

**Grammars are kept** by their text, compiled, and each answer gets a copy. Copies share what the lexer has found out
(its automaton grows as texts come), which makes the second answer faster, and would make limits depend on what others
asked. So a grammar is compiled anew after `COPIES_MAX` copies, and when it seems to be beyond its limits the answer so
far is tried once more with a grammar of its own: what fails then fails by its own doing.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt

from homeserve.errors import HomeserveError
from homeserve.text.grammar_wire import PARSER_LIMITS
from homeserve.wire.records import Guide, unpack_ints
from homeserve.worker.course import Course, GuideFailed, Mask, Thoughts, reason
from homeserve.worker.thought import Mark
from homeserve.worker.vocabulary import Vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher

log = logging.getLogger(__name__)

T = TypeVar("T")

GRAMMARS_KEPT = 32
COPIES_MAX = 256
MARKS_KEPT = 8
"""A model has two."""
MASK_THREADS = 2
MASKS_A_THREAD = 8
SLOW_S = 0.25
"""A grammar that takes longer is told of in the log."""


class LaneGuide:
    """The guide of one lane. The plan loop tells it tokens and asks for masks; a thread may be making one."""

    def __init__(self, guide: Guide, guides: Guides) -> None:
        self._guide = guide
        self._guides = guides
        self._tokens: list[int] = []
        """Of the output, from its first one on."""
        self._due = -1
        """The output token whose mask was asked for ahead."""
        self._lock = threading.Lock()
        """Holds what follows: whoever makes a mask has it."""
        self._course: Course | None = None
        self._made: tuple[int, Mask | None] | None = None
        """The last mask, and the output token that it is over."""
        self._alone = False
        """The grammar is compiled for this answer alone."""
        self._failure = ""

    def begin(self) -> None:
        """Let the grammar be compiled, if it is not known, and the vocabulary be read."""
        if self._guide.grammar:
            self._guides.grammars.begin(self._guide.grammar)
        elif self._guide.thought_closes:
            self._guides.grammars.begin_vocabulary()

    def told(self, first: int, tokens: Sequence[int]) -> None:
        """Tokens of the sequence, the first of which is output token `first` (negative: of the prompt)."""
        new = tokens[max(0, len(self._tokens) - first) :]
        assert not len(new) or first <= len(self._tokens), f"{first} output tokens, and {len(self._tokens)} are known"
        self._tokens.extend(map(int, new))

    def prepare(self) -> None:
        """The mask of the row whose input was told last will be needed: `Guides.make_due` has it made."""
        if self._due != len(self._tokens):
            self._due = len(self._tokens)
            self._guides.due(self)

    def make(self) -> None:
        """The mask that is due, if it is not made yet. For a thread; what fails is told by `mask`."""
        with self._lock, suppress(GuideFailed):
            if self._due == len(self._tokens):
                self._mask_at(self._due)

    def mask(self, index: int) -> Mask | None:
        """Over output token `index`: what a thread has made or is making, else it is made now. Raises GuideFailed."""
        with self._lock:
            if index < len(self._tokens):  # a plan failed behind the draw, and its rows come again
                del self._tokens[index:]
                self._course = self._made = None
            assert index == len(self._tokens), f"the mask of output token {index}, and {len(self._tokens)} are known"
            return self._mask_at(index)

    def apply(self, index: int, logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """The row `[vocab]` that output token `index` is drawn from. Raises GuideFailed."""
        mask = self.mask(index)
        return logits if mask is None else logits + mask

    def _mask_at(self, index: int) -> Mask | None:
        if self._made is None or self._made[0] != index:
            self._made = index, self._followed(index)
        return self._made[1]

    def _followed(self, index: int) -> Mask | None:
        if self._failure:
            raise GuideFailed(self._failure)
        if not self._alone:
            try:
                return self._walked(index)
            except GuideFailed:
                self._alone, self._course = True, None
                self._guides.grammars.forget(self._guide.grammar)
        try:
            return self._walked(index)
        except GuideFailed as error:
            self._failure = str(error)
            raise

    def _walked(self, index: int) -> Mask | None:
        if self._course is None:
            guide, matchers = self._guide, self._matchers()
            thoughts = self._guides.thoughts(guide) if guide.thought_closes else None
            self._course = Course(guide, self._guides.size, matchers, thoughts)
        for token in self._tokens[self._course.consumed : index]:
            self._course.take(token)
        return self._course.mask()

    def _matchers(self) -> Callable[[], LLMatcher] | None:
        grammar = self._guide.grammar
        if not grammar:
            return None
        grammars = self._guides.grammars
        return grammars.compiled(grammar).deep_copy if self._alone else grammars.copier(grammar)


class Grammars:
    """Compiled grammars by their text, the last `GRAMMARS_KEPT`. For any thread."""

    def __init__(self, vocabulary: Vocabulary, pool: ThreadPoolExecutor | None) -> None:
        self._vocabulary = vocabulary
        self._pool = pool
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, Future[LLMatcher]] = OrderedDict()
        self._copies: dict[str, int] = {}

    def begin(self, grammar: str) -> Future[LLMatcher]:
        """The compiled grammar, perhaps on its way."""
        with self._lock:
            found = self._kept.get(grammar)
            if found is None:
                found = self._kept[grammar] = _submitted(self._pool, lambda: self.compiled(grammar))
                self._copies[grammar] = 0
                if len(self._kept) > GRAMMARS_KEPT:
                    self._drop(next(iter(self._kept)))
            self._kept.move_to_end(grammar)
            return found

    def begin_vocabulary(self) -> None:
        """Read the vocabulary ahead, where there is a thread for it. What fails is told to whoever needs it."""
        if self._pool is not None:
            self._pool.submit(lambda: self._vocabulary.spelled)

    def copier(self, grammar: str) -> Callable[[], LLMatcher]:
        """Makes copies of a grammar, once it is compiled. Raises GuideFailed."""
        found = self.begin(grammar).result()
        with self._lock:
            if grammar in self._copies:
                self._copies[grammar] += 1
                if self._copies[grammar] >= COPIES_MAX:
                    self._drop(grammar)
        return found.deep_copy

    def compiled(self, grammar: str) -> LLMatcher:
        """A grammar, compiled now. Raises GuideFailed."""
        from llguidance import LLMatcher, LLParserLimits

        began = time.monotonic()
        limits = LLParserLimits(**PARSER_LIMITS, verbose_errors=False)
        try:
            matcher = LLMatcher(self._vocabulary.trie, grammar, log_level=0, limits=limits)
        except HomeserveError as error:
            raise GuideFailed(error.message) from error
        if matcher.is_error():
            raise GuideFailed(reason(matcher))
        if (took := time.monotonic() - began) > SLOW_S:
            log.info("a grammar of %d bytes took %.2f s, with the vocabulary if it was the first", len(grammar), took)
        return matcher

    def forget(self, grammar: str) -> None:
        with self._lock:
            self._drop(grammar)

    def _drop(self, grammar: str) -> None:
        self._kept.pop(grammar, None)
        self._copies.pop(grammar, None)


class Guides:
    """Guides of one rank. `threads` 0: masks and grammars are made when they are needed. To be closed."""

    def __init__(self, vocabulary: Vocabulary, threads: int = MASK_THREADS) -> None:
        self.size = vocabulary.size
        self._vocabulary = vocabulary
        self._threads = threads
        self._masks = ThreadPoolExecutor(threads, "mask") if threads else None
        self._compiling = ThreadPoolExecutor(1, "grammar") if threads else None
        self.grammars = Grammars(vocabulary, self._compiling)
        self._due: list[LaneGuide] = []
        self._marks: dict[bytes, Mark] = {}
        """Of thoughts, by their ids."""

    def lane(self, guide: Guide) -> LaneGuide:
        return LaneGuide(guide, self)

    def thoughts(self, guide: Guide) -> Thoughts:
        """What its course has to know of thoughts. Raises GuideFailed."""
        try:
            trie = self._vocabulary.trie if guide.grammar else None
            return Thoughts(self._mark(guide.thought_opens), self._mark(guide.thought_closes), trie)
        except HomeserveError as error:
            raise GuideFailed(error.message) from error

    def _mark(self, ids: bytes) -> Mark:
        """For any thread: two may make the same one at once, and either is kept."""
        found = self._marks.get(ids)
        if found is None:
            found = Mark(unpack_ints(ids), self._vocabulary)
            if len(self._marks) >= MARKS_KEPT:
                self._marks.clear()
            self._marks[ids] = found
        return found

    def due(self, lane: LaneGuide) -> None:
        """A mask of this lane will be needed."""
        self._due.append(lane)

    def make_due(self) -> None:
        """Begin to make the masks that are due. Each thread that is woken costs the plan loop something, so several
        are only where there is much to do."""
        due, self._due = self._due, []
        if self._masks is None or not due:
            return
        parts = min(self._threads, -(-len(due) // MASKS_A_THREAD))
        for part in range(parts):
            self._masks.submit(_make_all, due[part::parts])

    def close(self) -> None:
        """End the threads; what they are at is finished, what waits is not begun."""
        for pool in (self._masks, self._compiling):
            if pool is not None:
                pool.shutdown(cancel_futures=True)


def _make_all(lanes: Sequence[LaneGuide]) -> None:
    for lane in lanes:
        lane.make()


def _submitted(pool: ThreadPoolExecutor | None, make: Callable[[], T]) -> Future[T]:
    if pool is not None:
        return pool.submit(make)
    done: Future[T] = Future()
    try:
        done.set_result(make())
    except GuideFailed as error:
        done.set_exception(error)
    return done
