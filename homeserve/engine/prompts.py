"""Prompt rows: whose prompt goes on in a plan, and who is admitted to begin.

A chunk is divided between the oldest prompt that is not finished (at least half, so that it never starves) and those
behind it (so that a short one does not wait for a long one). A newcomer takes a lane and its cached prefix, and comes
only where there is room for its whole prompt.

Pure.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

from backends.base import PAGE_LEN
from homeserve.engine.draft import Draft
from homeserve.engine.memory import Memory
from homeserve.engine.request import EngineLimits
from homeserve.engine.sequence import Sequence, SequenceState
from homeserve.engine.sizes import PLAN_EMBEDDINGS, PROMPT_LOGPROB_ROWS, new_lane_bytes, new_lanes_bytes_limit
from homeserve.engine.states import checkpoint_after
from homeserve.wire.records import LaneRows, NewLane, Sampling, needs_all_rows


@dataclass
class PrefixCounts:
    """Prefix-cache lookups since start."""

    lookups: int = 0
    hits: int = 0
    hit_tokens: int = 0

    def count(self, hit_tokens: int) -> None:
        self.lookups += 1
        self.hits += hit_tokens > 0
        self.hit_tokens += hit_tokens


class Prompts:
    """Those that wait, and the prompt rows of those that `running` has, by key, oldest first. `grow` makes a sequence's
    tables cover so many rows, or says no."""

    def __init__(self, running: OrderedDict[int, Sequence], grow: Callable[[Sequence, int], bool]) -> None:
        self.waiting: deque[Sequence] = deque()
        self.prefix = PrefixCounts()
        self._running = running
        self._grow = grow
        self._limits: EngineLimits
        self._memory: Memory

    def begin(self, limits: EngineLimits, memory: Memory) -> None:
        """A life of the fleet, or another layout."""
        self._limits, self._memory = limits, memory

    @property
    def none(self) -> bool:
        """No prompt is to be computed."""
        return not self.waiting and all(s.state is not SequenceState.PREFILL for s in self._running.values())

    def draft(self, draft: Draft) -> None:
        """Prompt rows: those already begun, oldest first, then new ones. The first gets at least half of the chunk."""
        budget = self._limits.chunk
        begun = [s for s in self._running.values() if s.state is SequenceState.PREFILL and not s.held]
        share = budget - budget // 2 if len(begun) + len(self.waiting) > 1 else budget
        for sequence in begun:
            budget -= self.chunk(draft, sequence, min(budget, share))
            share = budget
        while budget > 0:
            # One whose reader stalls may have been preempted to the head of the queue: it holds up nobody there.
            newcomer = next((s for s in self.waiting if not s.held), None)
            if newcomer is None or not self.admit(draft, newcomer):
                break
            budget -= self.chunk(draft, newcomer, min(budget, share))
            share = budget

    def chunk(self, draft: Draft, sequence: Sequence, budget: int) -> int:
        """Put the next rows of a prompt into the draft; returns how many."""
        if sequence.state is not SequenceState.PREFILL:
            return 0  # preempted for one before it in this very draft
        start = sequence.issued
        if sequence.call.prompt_logprobs >= 0:
            if draft.logprob_rows:
                return 0
            budget = min(budget, PROMPT_LOGPROB_ROWS)
        end = min(sequence.target, start + budget, max(self._memory.tables.room(sequence), sequence.issued + 1))
        place = checkpoint_after(start, sequence.target) if self._memory.keeps_checkpoints else sequence.target
        end = min(end, place)
        brings = bool(sequence.call.pooling) and end == sequence.target
        if brings and draft.embeddings == PLAN_EMBEDDINGS:
            return 0
        if end <= start or not self._grow(sequence, end):
            return 0
        draft.embeddings += brings
        if sequence.call.prompt_logprobs >= 0:
            draft.logprob_rows = end - start
        last = end == sequence.target
        pages = self._memory.tables.unsent(sequence)
        tokens = sequence.tokens[start:end].tobytes()
        save = self._memory.save_slot(draft, sequence, end) if end == place < sequence.target else -1
        logprobs = sequence.call.prompt_logprobs
        draft.rows.append(
            LaneRows(sequence.lane, sequence.key, start, tokens, pages, last, save=save, prompt_logprobs=logprobs)
        )
        draft.name(sequence)
        draft.reach[sequence.key] = sequence.issued = end
        self._memory.tables.share(sequence)
        if last:
            sequence.pending += 1
            sequence.move(SequenceState.DECODE)
        return end - start

    def admit(self, draft: Draft, sequence: Sequence) -> bool:
        """Give a waiting sequence a lane and its cached prefix, if there is room for its prompt."""
        if not self._memory.free_lanes or any(s.state is SequenceState.PREEMPTED for s in self._running.values()):
            return False
        path = self._memory.pool.match(sequence.tokens, self._hit_limit(sequence))
        known = len(path)
        del path[self._memory.pool.usable(path, with_state=self._limits.recurrent) :]
        hit_tokens = len(path) * PAGE_LEN
        if self._running and not self._memory.tables.fits(
            sequence.target, path, self._limits.chunk, len(self._running)
        ):
            return False
        history = sequence.tokens[:hit_tokens].tobytes() if _needs_history(sequence.call.sampling) else b""
        size = len(history) + new_lane_bytes(sequence.call.sampling)
        if draft.new and draft.new_bytes + size > new_lanes_bytes_limit(self._limits):
            return False
        self.waiting.remove(sequence)
        sequence.move(SequenceState.PREFILL)
        sequence.lane = self._memory.free_lanes.pop()
        self._memory.tables.begin(sequence, path, known)
        sequence.issued = hit_tokens
        sequence.hit_tokens = max(sequence.hit_tokens, min(hit_tokens, sequence.prompt_len))
        self._running[sequence.key] = sequence
        for key in sorted(self._running):
            self._running.move_to_end(key)
        restore = path[-1].state if path and self._limits.recurrent else -1
        if restore >= 0:
            self._memory.states.touch(path[-1])
        draft.new.append(
            NewLane(
                *(sequence.lane, sequence.key, sequence.prompt_len, sequence.call.sampling, history, restore),
                pooling=sequence.call.pooling,
            )
        )
        draft.new_bytes += size
        draft.name(sequence)
        if self._limits.prefix_cache:
            self.prefix.count(hit_tokens)
        return True

    def _hit_limit(self, sequence: Sequence) -> int:
        """Pages that may come from the cache: the last token is always computed, and a prompt whose own
        log-probabilities are asked for, or an embedding of all its states, is computed whole."""
        call = sequence.call
        if not self._limits.prefix_cache or call.prompt_logprobs >= 0 or needs_all_rows(call.pooling):
            return 0
        return (sequence.target - 1) // PAGE_LEN


def _needs_history(sampling: Sampling) -> bool:
    """Penalties, DRY and guides look back at tokens that a prefix hit does not send."""
    if sampling.dry is not None or sampling.guide is not None:
        return True
    return sampling.repetition_penalty != 1.0 or sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0
