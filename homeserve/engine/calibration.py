"""Measuring both layouts before anybody waits for it: a request of the engine's own, in one layout and then the other.

It goes the ordinary way, through plans like any other's, when nothing has been asked for a while; the flip between the
two is an ordinary one of the policy. Nobody reads it, and nothing of it is drafted: its text
is no text. The first real request ends it at once, and it is tried again at
another idle moment, `TRIES` times in each layout, with no more than `TRIES` flips to get there.

Pure.
"""

from __future__ import annotations

from collections import Counter

from homeserve.engine.request import EngineLimits, FinishReason, GenerateCall
from homeserve.engine.scheduler import Scheduler
from homeserve.engine.sequence import Sequence
from homeserve.wire.records import Sampling

TRIES = 3
PROMPT_CHUNKS = 3
PROMPT_MOST = 1536
"""Tokens of its prompt, at most: chunks enough to fill a pipeline, few enough to be over in a moment."""
DRAWN = 16
SMALL_IDS = 16
"""Token ids that every vocabulary has."""
NAME = "calibration"


class Calibration:
    """The request that measures, and how often it was tried in each layout."""

    def __init__(self, limits: EngineLimits) -> None:
        self.tries: Counter[str] = Counter()
        self.flips: Counter[str] = Counter()
        self.begun = False
        """The idle time was waited for, and nobody has come since."""
        self._limits = limits
        self._asked = 0
        self._sequence: Sequence | None = None

    @property
    def running(self) -> bool:
        return self._sequence is not None and self._sequence.finish is None

    def may_try(self, layout: str, *, away: bool = False) -> bool:
        """`away`: a flip has to come first, which may be given up each time."""
        return self.tries[layout] < TRIES and not (away and self.flips[layout] >= TRIES)

    def going(self, layout: str) -> None:
        """A flip to `layout` is asked for, to measure there."""
        self.flips[layout] += 1

    def begin(self, layout: str, scheduler: Scheduler) -> None:
        self.tries[layout] += 1
        self.begun = True
        self._sequence = scheduler.add(self._call(scheduler.token_limit))

    def cancel(self, scheduler: Scheduler) -> bool:
        """Somebody has come: end what is running; False where nothing is."""
        self.begun = False
        sequence, self._sequence = self._sequence, None
        if sequence is None or sequence.finish is not None:
            return False
        scheduler.end(sequence, FinishReason.ABORT)  # nobody is told: it has no reader
        return True

    def _call(self, token_limit: int) -> GenerateCall:
        """Another prompt each time: one that is known would not be computed."""
        length = max(1, min(PROMPT_CHUNKS * self._limits.chunk, PROMPT_MOST, token_limit - DRAWN - 1))
        self._asked += 1
        prompt = tuple((self._asked + step * step) % SMALL_IDS for step in range(length))
        return GenerateCall(NAME, prompt, Sampling(temperature=0.0), DRAWN, frozenset(), drafts=False)
