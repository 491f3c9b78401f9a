"""What the next plan computes. Pure: events in, plans and emits out; no clock, no I/O, no randomness.

One plan carries at most one row run of each sequence:

    decode rows     one for each sequence that may go on, oldest first (`decoding`; with groups, of some)
    prefill rows    up to `chunk` prompt tokens (`prompts`)

The two travel together (continuous batching): a prompt delays an open stream by the length of a mixed plan, never by
more than one. With `prefill_delay` N > 0 up to N plans in a row may leave the decode rows out, which finishes prompts
sooner and streams later. Where the layout may change, its policy says which kind goes alone for a while (`first`).

The schedule runs ahead. A plan may be issued before the previous one is back: a decode row whose input is still unknown
says so, and the rank uses the token that it drew itself. If the previous plan turns out to end a sequence, its row in
the next one is discarded when it comes back. Only a plan with rounds of drafting goes out alone, with nothing before or
behind it in flight (`decoding`).

Groups. A sequence's next decode row needs the token of its last one, so where several ranks work one behind the other
(the pipeline layout) plans that all carry the same sequences would keep one rank busy and the others waiting. With
`decode_groups` G a plan takes the decode rows of a G-th part of the sequences, those that were longest in none, so that
G plans in a row have different ones. `prefill_delay` counts for a whole round then: no sequence is left out of more
than (N + 1) G - 1 plans in a row. Chunks of a prompt need no answer and go out one behind the other in any case.

Memory. A sequence takes pages as it grows, and where layers have a window lets go of those before it as soon as a plan
is issued (`tables`). When none is left the newest one (or one whose reader stalls) is preempted: its pages go back once
no plan in flight names it, and it waits at the head of the queue to be prefilled again from its tokens. The oldest can
always displace the others, so something always finishes.

After a lost worker everything is prefilled again from tokens. Those that were in flight are *suspects*: each is tried
alone until it has come past the place where it was at the death. So the one that kills workers is found, and only it is
failed: when it was the only one in flight at two deaths without coming past that place in between. It is tried without
drafts, and if it was in a round of drafting at the death it never drafts again: else one that kills workers by its
drafts alone would come past that place, draft, and kill the next one, for ever. A death that no
request can bring about (somebody stopped the process, or asked it to end) makes no suspects.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import replace

from backends.base import PAGE_LEN
from homeserve.engine.decoding import NO_ROUNDS, Decoding
from homeserve.engine.draft import Draft as Draft
from homeserve.engine.draft import Emit as Emit
from homeserve.engine.flip import LiveSet
from homeserve.engine.live import live_set, resident_bytes, shed
from homeserve.engine.memory import Memory
from homeserve.engine.pages import PageCensus
from homeserve.engine.policy import ANSWERS, PROMPTS, Demand
from homeserve.engine.prompts import Prompts
from homeserve.engine.request import EngineLimits, FinishReason, GenerateCall
from homeserve.engine.sequence import RUNNING, Sequence, SequenceState
from homeserve.engine.sizes import PROMPT_LOGPROB_ROWS as PROMPT_LOGPROB_ROWS
from homeserve.engine.sizes import plan_bytes_limit as plan_bytes_limit
from homeserve.engine.sizes import result_bytes_limit as result_bytes_limit
from homeserve.engine.speculation import Drafting
from homeserve.engine.states import StateCensus
from homeserve.layouts.owner import OwnerRule
from homeserve.wire.records import Logprobs, Sample

STRIKES_OUT = 2
"""Deaths in a row, alone in flight, after which a request is failed."""


class Scheduler:
    """Sequences, lanes and pages of one engine."""

    def __init__(self, limits: EngineLimits) -> None:
        self.limits = limits
        self.preemptions = 0
        self.drafting = Drafting(limits.most_drafts, adapts=limits.drafts_adapt)
        self.first = ""
        """Of two kinds of work, the one that plans have alone while there is any (`policy`)."""
        self._key = 0
        self._running: OrderedDict[int, Sequence] = OrderedDict()
        """Sequences that hold a lane, by key, oldest first (PREFILL, DECODE, PREEMPTED, ENDING)."""
        self._flight: OrderedDict[int, Draft] = OrderedDict()
        self._delayed = 0
        self._drafts = 0
        self._prompts = Prompts(self._running, self._grow)
        self._waiting, self.prefix = self._prompts.waiting, self._prompts.prefix
        self._decoding = Decoding(limits, self.drafting, self._grow)
        self._any_suspect = False
        self._reset_memory()

    # ------------------------------------------------------------------------------------------------- questions

    @property
    def waiting_count(self) -> int:
        return len(self._waiting)

    @property
    def running_count(self) -> int:
        return sum(sequence.state in RUNNING for sequence in self._running.values())

    @property
    def idle(self) -> bool:
        """Nothing waits, runs, or is in flight."""
        return not (self._waiting or self._running or self._flight)

    @property
    def token_limit(self) -> int:
        """Most tokens that one sequence may have."""
        return self._memory.token_limit

    @property
    def longest_skip(self) -> int:
        """Most plans in a row that could have carried a sequence's decode row and did not."""
        return self._decoding.longest_skip

    def census(self) -> tuple[PageCensus, ...]:
        """Of each KV group; the first keeps every token."""
        return self._pool.census()

    def census_by_rank(self) -> list[tuple[PageCensus, ...]]:
        """Of each KV group on each rank that keeps a part of the pages; empty where every rank has all of them."""
        vector = self.limits.token_vector
        if not vector:
            return []
        rule = OwnerRule(vector, PAGE_LEN)
        return self._pool.census_by_owner(lambda page: rule.place(page * PAGE_LEN)[0], len(vector))

    def state_census(self) -> StateCensus | None:
        """Of the recurrent states; None for a model without any."""
        return self._states.census(len(self._running)) if self.limits.recurrent else None

    def holdings(self) -> list[tuple[int, str, int]]:
        """(lane, request id, pages in its table) of each lane in use."""
        return [(s.lane, s.call.request_id, len(s.tables[0])) for s in self._running.values()]

    def lanes(self) -> dict[int, tuple[int, int]]:
        """Lane -> (sequence, entries of its table that the ranks know), of each lane in use."""
        return {s.lane: (s.key, s.sent_pages) for s in self._running.values()}

    def in_rounds(self) -> list[Sequence]:
        """Those that a plan in flight drafts for."""
        return [s for draft in self._flight.values() for s in draft.named if s.key in draft.rounds]

    def open_sequences(self) -> list[Sequence]:
        """Every sequence that is not finished, oldest first."""
        both = [*self._waiting, *self._running.values()]
        return sorted((s for s in both if s.finish is None), key=lambda s: s.key)

    # ---------------------------------------------------------------------------------------------------- events

    def add(self, call: GenerateCall) -> Sequence:
        """Queue a call. The caller has checked the limits."""
        self._key += 1
        sequence = Sequence(self._key, call, self.drafting.begin())
        self._waiting.append(sequence)
        return sequence

    def next_plan(self) -> Draft | None:
        """The next plan, its pages taken; None when there is nothing to do until something comes back."""
        self._drafts += 1
        draft = Draft(self._drafts)
        suspects = [s for s in self.open_sequences() if s.suspect] if self._any_suspect else []
        self._any_suspect = bool(suspects)
        if suspects and self._flight:
            return None
        if suspects:
            self._draft_suspect(draft, suspects)
        if not draft.rows:
            self._draft_all(draft)
        if not draft.rows and not draft.new:
            return None
        draft.drop = self.take_drops()
        return draft

    def on_issued(self, draft: Draft, seq: int) -> None:
        """The draft became plan `seq`. Every draft must."""
        self._flight[seq] = draft
        for sequence in draft.named:  # what these rows still saw, the next plan may give to others
            self._tables.advance(sequence)
        for sequence, computed, slot in draft.saves:
            sequence.saves.append((computed, slot))
            self._memory.attach_checkpoints(sequence)

    def take_drops(self) -> tuple[int, ...]:
        """Lanes released since the last plan, for a plan that is not drafted here (census)."""
        return self._memory.take_drops()

    def apply(self, seq: int, samples: Iterable[Sample], seconds: float = 0.0) -> list[Emit]:
        """Plan `seq` came back, which took the ranks so many seconds (0: unknown). Raises BadRound, before anything has
        changed, where the answer cannot be."""
        draft = self._flight.get(seq)
        if draft is None:
            return []
        emits: list[Emit] = []
        drawn: dict[int, list[Sample]] = {key: [] for key in draft.rounds}
        for sample in samples:
            drawn.setdefault(sample.request, []).append(sample)
        self._decoding.check(draft, drawn)
        del self._flight[seq]
        for key, of_it in drawn.items():
            sequence = self._running.get(key)
            if sequence is not None:
                self._apply_samples(draft, sequence, of_it, emits)
        self._decoding.judge(draft, drawn, seconds)
        for sequence in draft.named:
            sequence.in_flight -= 1
            if draft.reach.get(sequence.key, 0) >= sequence.died_at:
                sequence.suspect = False
                sequence.strikes = 0
            if not sequence.in_flight:
                self._settle(sequence)
        return emits

    def end(self, sequence: Sequence, reason: FinishReason, error: str | None = None) -> list[Emit]:
        """End a sequence from outside. Idempotent."""
        if sequence.finish is not None:
            return []
        sequence.finish = reason
        if sequence.state is SequenceState.WAITING:
            self._waiting.remove(sequence)
            sequence.move(SequenceState.DONE)
        else:
            sequence.move(SequenceState.ENDING)
            self._settle(sequence)
        return [Emit(sequence, finish=reason, error=error)]

    def lose_fleet(self, limits: EngineLimits | None = None, why: str = "", *, outside: bool = False) -> list[Emit]:
        """Every worker's state is gone: forget pages and lanes, queue every open sequence again, oldest first.

        `limits` are the next ones, if the pool is to be smaller; what cannot fit it is failed. `why` is for those who
        are told of it; `outside`: no request can have been the reason.
        """
        self.limits = limits or self.limits
        self.first = ""
        named: dict[int, Sequence] = {}
        for draft in () if outside else self._flight.values():
            for sequence in draft.named:
                if sequence.finish is None and sequence.key not in named:
                    named[sequence.key] = sequence
                    sequence.died_at = max(sequence.died_at, draft.reach.get(sequence.key, 0))
        alone = len(named) == 1
        if not outside and (drafted := self.in_rounds()):
            self.drafting.lost(why)
            for sequence in drafted:
                sequence.barred = True
        emits: list[Emit] = []
        for sequence in named.values():
            sequence.suspect = True
            self._any_suspect = True
            sequence.strikes += alone
        self._flight.clear()
        again = self.open_sequences()
        ending = [s for s in self._running.values() if s.finish is not None]
        self._waiting.clear()
        self._running.clear()
        self._reset_memory()
        for sequence in ending:
            sequence.move(SequenceState.DONE)
        for sequence in again:
            self._requeue(sequence)
            error = self._why_not_again(sequence, why)
            if error:
                sequence.finish = FinishReason.ERROR
                sequence.move(SequenceState.DONE)
                emits.append(Emit(sequence, finish=FinishReason.ERROR, error=error))
            else:
                self._waiting.append(sequence)
        return emits

    def _why_not_again(self, sequence: Sequence, why: str) -> str:
        """Why a sequence is not tried once more after a loss; empty where it is."""
        if sequence.strikes >= STRIKES_OUT:
            return f"the worker died each time it was computed, {STRIKES_OUT} times alone; the last time: {why}"
        if sequence.target + (not sequence.call.pooling) > self.token_limit:
            return f"its {sequence.target} tokens do not fit the KV pool that is left, of {self.token_limit} tokens"
        return ""

    # ------------------------------------------------------------------------------------------------------ flips

    @property
    def drained(self) -> bool:
        """No plan is in flight. Requests may be resident, prompts half computed."""
        return not self._flight

    def demand(self) -> Demand:
        """What there is to do: prompt tokens not computed yet, of calls that wait and of prompts half done; sequences
        that decode, and how many tokens they may still draw at most. Held ones count as nothing: they wait for their
        readers."""
        pending = decoding = left = 0
        for sequence in (*self._waiting, *self._running.values()):
            if sequence.held or sequence.finish is not None:
                continue
            if sequence.state is SequenceState.DECODE:
                decoding += not sequence.call.pooling  # whose last rows are on their way
                left += sequence.call.max_tokens - sequence.generated
            else:
                pending += sequence.target - sequence.issued
        return Demand(pending, decoding, left)

    def resident_bytes(self) -> int:
        """The least that a flip would have to carry now: what the cache keeps can be dropped."""
        flip = self.limits.flip
        return 0 if flip is None else resident_bytes(self._pool, self._states, len(self._running), flip)

    def shed(self) -> bool:
        """Drop a part of what the cache keeps beyond the room for it in a flip; whether more has to go."""
        flip = self.limits.flip
        return flip is not None and shed(self._pool, self._states, len(self._running), flip)

    def live(self) -> LiveSet:
        """What a flip carries, all plans being answered. Cached pages and checkpoints beyond what the flip has room for
        leave the cache, least recently used first."""
        assert self.drained and self.limits.flip is not None
        running = self._running.values()
        live = live_set(self._pool, self._states, [s.lane for s in running], self.limits.flip)
        decoding = sum(s.state is SequenceState.DECODE for s in running)
        half_done = sum(s.state is SequenceState.PREFILL and s.issued > 0 for s in running)
        draft_rows = live.pages[0] * PAGE_LEN if self.limits.most_drafts else 0
        return replace(live, decoding=decoding, half_done=half_done, draft_rows=draft_rows)

    def turn(self, layout: str) -> None:
        """The ranks have another layout: nothing else changes. Slots are what they were, so tables, cache and
        checkpoints stay."""
        assert self.drained and self.limits.flip is not None
        to = self.limits.flip.layouts[layout]
        self.limits = replace(
            self.limits,
            layout=layout,
            decode_groups=to.decode_groups,
            plans_in_flight=to.plans_in_flight,
            token_vector=to.token_vector,
            drafts=to.drafts,
        )
        self.first = ""
        self._prompts.begin(self.limits, self._memory)
        self._decoding.turn(self.limits, self._running.values())

    # -------------------------------------------------------------------------------------------------- drafting

    def _draft_all(self, draft: Draft) -> None:
        decoding = self._decoding.ready(self._running.values())
        if any(other.rounds for other in self._flight.values()):
            return
        if decoding and (self.first == PROMPTS or self._delayed < self.limits.prefill_delay):
            self._prompts.draft(draft)
        if draft.rows:
            self._delayed += 1
        else:
            rounds = NO_ROUNDS
            if self.limits.drafts and self.first != PROMPTS:
                rounds = self._decoding.choose(decoding, self._prompts.none)
            if self._flight and rounds.drafts:
                return
            self._delayed = 0
            self._decoding.draft(draft, decoding, rounds, self.running_count if rounds.drafts else 1)
            if self.first != ANSWERS or not draft.rows:
                self._prompts.draft(draft)
        some_left_out = bool(draft.rows) and len(draft.decodes) < len(decoding)
        if some_left_out and self.first != PROMPTS:  # those that wait for a policy are not passed over
            left_out = {s.key for s in decoding} - {row.request for row in draft.rows}
            self._decoding.count_skips(self._running.values(), left_out)

    def _draft_suspect(self, draft: Draft, suspects: list[Sequence]) -> None:
        """Rows of one suspect alone, without drafts: that with the most strikes, then the oldest."""
        sequence = max(suspects, key=lambda s: (s.strikes, -s.key))
        if sequence.state is SequenceState.WAITING and not self._prompts.admit(draft, sequence):
            return
        if sequence.state is SequenceState.PREFILL:
            self._prompts.chunk(draft, sequence, self.limits.chunk)
        else:
            self._decoding.row(draft, sequence)

    # ----------------------------------------------------------------------------------------------------- pages

    def _grow(self, sequence: Sequence, token_count: int) -> bool:
        """Let the page tables cover `token_count` rows, preempting somebody if it must; False if that cannot be
        now."""
        while not self._tables.grow(sequence, token_count):
            if not self._preempt_for(sequence):
                return False
        return True

    def _preempt_for(self, sequence: Sequence) -> bool:
        """Preempt one sequence for another. True if its pages came back at once, so that it is worth trying again."""
        if any(s.state is SequenceState.PREEMPTED for s in self._running.values()):
            return False
        running = [s for s in self._running.values() if s.state in RUNNING]
        held = [s for s in running if s.held and s is not sequence]
        victim = held[-1] if held else running[-1]
        if victim is sequence and len(running) == 1:
            return False  # alone: what it waits for are sequences that are ending
        self.preemptions += 1
        victim.move(SequenceState.PREEMPTED)
        self._settle(victim)
        return victim is not sequence and victim.state is SequenceState.WAITING

    def _release(self, sequence: Sequence) -> None:
        """Give back lane and pages. Nothing in flight names the sequence."""
        self._memory.release(sequence)
        del self._running[sequence.key]

    def _reset_memory(self) -> None:
        self._memory = Memory(self.limits)
        self._states, self._pool, self._tables = self._memory.states, self._memory.pool, self._memory.tables
        self._prompts.begin(self.limits, self._memory)
        self._decoding.begin(self.limits, self._memory)

    # ----------------------------------------------------------------------------------------------- transitions

    def _apply_samples(self, draft: Draft, sequence: Sequence, samples: list[Sample], emits: list[Emit]) -> None:
        """What a plan drew for a sequence, in order. Behind the token that ends it, the rest is nobody's."""
        drafts, before = draft.rounds.get(sequence.key, 0), sequence.generated
        if drafts:
            self._decoding.returned(draft, sequence, len(samples))
        for sample in samples:
            self._apply_sample(sequence, sample, emits)
        if drafts and sequence.generated > before:
            self.drafting.count(sequence.drafted, drafts, sequence.generated - before)

    def _apply_sample(self, sequence: Sequence, sample: Sample, emits: list[Emit]) -> None:
        about_prompt = self._fresh_prompt_logprobs(sequence, sample)
        if sample.token < 0:  # a chunk that drew nothing
            if about_prompt and sequence.finish is None:
                emits.append(Emit(sequence, prompt_logprobs=about_prompt))
            if sample.failed:
                self._fail(sequence, sample.failed, emits)
            elif sample.embedding:
                self._embed(sequence, sample.embedding, emits)
            return
        sequence.pending -= 1
        if sequence.finish is not None:
            return  # issued ahead, before the end was known
        sequence.tokens.append(sample.token)
        finish: FinishReason | None = None
        if sample.token in sequence.call.end_tokens:
            finish = FinishReason.STOP
        elif sequence.generated >= sequence.call.max_tokens or len(sequence.tokens) >= self.token_limit:
            finish = FinishReason.LENGTH
        shown = () if finish is FinishReason.STOP else (sample.token,)
        logprobs = (sample.logprobs,) if sample.logprobs is not None and shown else ()
        emits.append(Emit(sequence, shown, logprobs, about_prompt, finish))
        if finish is not None:
            sequence.finish = finish
            sequence.move(SequenceState.ENDING)
        elif sequence.state in RUNNING:
            self._tables.share(sequence)
            self._memory.attach_checkpoints(sequence)

    @staticmethod
    def _embed(sequence: Sequence, embedding: bytes, emits: list[Emit]) -> None:
        """All that a call with pooling asks for."""
        sequence.pending -= 1
        if sequence.finish is None:
            sequence.finish = FinishReason.STOP
            sequence.move(SequenceState.ENDING)
            emits.append(Emit(sequence, finish=FinishReason.STOP, embedding=embedding))

    def _fail(self, sequence: Sequence, why: str, emits: list[Emit]) -> None:
        """No token could be drawn for it: it ends, and it alone."""
        sequence.pending -= 1
        if sequence.finish is None:
            guided = sequence.call.sampling.guide is not None
            sequence.finish = FinishReason.UNDRAWN if guided else FinishReason.ERROR
            sequence.move(SequenceState.ENDING)
            emits.append(Emit(sequence, finish=sequence.finish, error=why))

    def _fresh_prompt_logprobs(self, sequence: Sequence, sample: Sample) -> tuple[Logprobs, ...]:
        """Those that the reader lacks: a prompt computed a second time reports the same positions again."""
        entries = sample.prompt_logprobs
        if not entries:
            return ()
        first = sample.position - len(entries)
        fresh = entries[max(0, sequence.logprobs_seen - first) : max(0, sequence.prompt_len - first)]
        sequence.logprobs_seen += len(fresh)
        return fresh

    def _settle(self, sequence: Sequence) -> None:
        """Finish what had to wait until no plan in flight names the sequence."""
        if sequence.in_flight:
            return
        if sequence.state is SequenceState.ENDING:
            self._release(sequence)
            sequence.move(SequenceState.DONE)
        elif sequence.state is SequenceState.PREEMPTED:
            self._release(sequence)
            self._requeue(sequence)
            self._waiting.appendleft(sequence)

    def _requeue(self, sequence: Sequence) -> None:
        if sequence.state is not SequenceState.WAITING:
            sequence.move(SequenceState.WAITING)
        sequence.forget_memory()
