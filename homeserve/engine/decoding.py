"""Decode rows: whose turn it is in a plan, with how many drafts, and what comes back of them.

A *plain* row computes one position and draws one token. It may be issued before the sequence's last token is known, so
plain rows run ahead of their answers. A *round* begins with the one token that is known, drafts k more, computes k + 1
positions and draws as many tokens as the drafts were right, and one (`LaneRows.drafts`). How many is known when it is
back, so a round is its sequence's only row in flight, and nothing runs ahead of a plan with rounds: a plan that was put
in between would only have some of the sequences, and make the round wait.

How many drafts. The policy says how many pay (`speculation`), of as many as there may be:

    limits       of the layout, and none for a call that does not want any
    max_tokens   a round may draw one token more than it drafts
    token_limit  likewise
    checkpoints  a round never computes the place at which a state is to be saved, nor beyond: how far it comes is not
                 known when it is drafted. The row that ends there is a plain one
    pages        drafts are computed at positions that the table covers already, or that free and cached pages can cover
                 while one is left for every other sequence: a draft displaces nobody

Positions. A round issued at position n counts as one row (`issued` n + 1, one token `pending`) until it is back with m
tokens, then as m. Pages that it reserved stay in the table: the next rows need them.

Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Several
from dataclasses import dataclass, field

from homeserve.engine.draft import Draft
from homeserve.engine.memory import Memory
from homeserve.engine.request import EngineLimits
from homeserve.engine.sequence import Sequence, SequenceState
from homeserve.engine.speculation import Drafting, Row
from homeserve.wire.records import LaneRows, Sample, pack_ints


class BadRound(Exception):
    """A rank answered a round with what no round can draw: nothing that it computed can be trusted. Names no rank."""


@dataclass(frozen=True)
class Rounds:
    """How many drafts sequences are to have in the next plan, by key; those without any are left out."""

    drafts: dict[int, int] = field(default_factory=dict)
    usual: dict[int, int] = field(default_factory=dict)
    """How many of them without a probe."""


NO_ROUNDS = Rounds()


class Decoding:
    """The decode rows of one engine's plans. `grow` makes a sequence's tables cover so many rows, or says no."""

    def __init__(self, limits: EngineLimits, drafting: Drafting, grow: Callable[[Sequence, int], bool]) -> None:
        self.longest_skip = 0
        self._drafting = drafting
        self._grow = grow
        self._plans = limits.decode_groups
        """Drafts with decode rows, counted on from a round of the groups."""
        self._limits = limits
        self._memory: Memory

    def begin(self, limits: EngineLimits, memory: Memory) -> None:
        """A life of the fleet."""
        self._limits, self._memory = limits, memory

    def turn(self, limits: EngineLimits, running: Iterable[Sequence]) -> None:
        """Another layout. The next row of each decoding sequence brings its token, because the rank that drew it may be
        another one than the one that needs it now."""
        self._limits = limits
        self._plans += limits.decode_groups  # everybody's round is over
        for sequence in running:
            sequence.resumed = sequence.state is SequenceState.DECODE
            sequence.skipped = sequence.passed_over = 0
            sequence.drafted.crossed(sequence.resumed)

    # ----------------------------------------------------------------------------------------------------- drafts

    def ready(self, running: Iterable[Sequence]) -> list[Sequence]:
        """Those that a decode row can be drafted for, oldest first."""
        decoding: list[Sequence] = []
        for sequence in running:
            if sequence.wants_decode:
                decoding.append(sequence)
            else:
                sequence.skipped = sequence.passed_over = 0
        return decoding

    def choose(self, decoding: Several[Sequence], alone: bool) -> Rounds:
        """What the next plan is to draft; nothing changes by asking. A token that is still on its way is taken for
        known: the round can wait for it. `alone`: no prompt is to be computed."""
        if not self._limits.drafts:
            return NO_ROUNDS
        asked = [(sequence.drafted, self._most(sequence)) for sequence in decoding]
        choice = self._drafting.choose(self._limits.layout, asked, alone=alone)
        both = [
            {sequence.key: drafts for sequence, drafts in zip(decoding, each, strict=True) if drafts > 0}
            for each in (choice.drafts, choice.usual)
        ]
        return Rounds(*both)

    def _most(self, sequence: Sequence) -> int:
        """The most drafts that a round of the sequence may have now, whatever pages there are."""
        if not sequence.call.drafts or sequence.suspect or sequence.barred:
            return 0
        left = sequence.call.max_tokens - sequence.generated - sequence.pending
        most = min(self._limits.drafts, left - 1, self._memory.token_limit - sequence.issued - 2)
        boundary = self._memory.rows_to_checkpoint(sequence.issued)
        return max(0, most if boundary is None else min(most, boundary - 2))

    # ------------------------------------------------------------------------------------------------------- rows

    def draft(self, draft: Draft, decoding: Several[Sequence], rounds: Rounds, running: int) -> None:
        """A row of each, or with groups of a share of them: those that were longest in no plan, none that was in this
        round already, and whoever was passed over so often that its round would end without it."""
        groups = self._limits.decode_groups
        share = -(-len(decoding) // groups)
        round_plans = -(-len(decoding) // max(1, share))
        for sequence in decoding if groups == 1 else sorted(decoding, key=lambda s: (s.turn, s.key)):
            due = self._plans - sequence.decode_turn >= round_plans or not draft.rows
            if (due and len(draft.rows) < share) or sequence.passed_over >= groups - 1:
                self.row(draft, sequence, rounds.drafts.get(sequence.key, 0), running)
                if rounds.usual:
                    draft.usual[sequence.key] = rounds.usual.get(sequence.key, 0)
        if draft.rows:
            for sequence in decoding:
                sequence.passed_over += sequence.turn != draft.number
            self._plans += 1

    def row(self, draft: Draft, sequence: Sequence, drafts: int = 0, running: int = 1) -> None:
        """The sequence's next row, with at most so many drafts. `running`: sequences that hold pages."""
        if not sequence.wants_decode or sequence.issued >= self._memory.token_limit:
            return
        if not self._grow(sequence, sequence.issued + 1):
            return
        drafts = self._reserve(sequence, drafts, running - 1) if not sequence.pending else 0
        pages = self._memory.tables.unsent(sequence)
        save, tokens = -1, b""
        if self._memory.rows_to_checkpoint(sequence.issued) == 1:
            save = self._memory.save_slot(draft, sequence, sequence.issued + 1)
        if sequence.resumed or drafts:  # nothing of it is in flight, so its last token is known
            tokens, sequence.resumed = pack_ints([sequence.tokens[sequence.issued]]), False
        draft.rows.append(
            LaneRows(sequence.lane, sequence.key, sequence.issued, tokens, pages, sample=True, save=save, drafts=drafts)
        )
        draft.decodes.add(sequence.key)
        draft.name(sequence)
        sequence.issued += 1
        draft.reach[sequence.key] = sequence.issued + drafts
        sequence.pending += 1
        sequence.skipped = sequence.passed_over = 0
        sequence.decode_turn = self._plans
        if drafts:
            sequence.round = draft.rounds[sequence.key] = drafts

    def _reserve(self, sequence: Sequence, drafts: int, others: int) -> int:
        """How many drafts have pages, taken if there are enough for everybody."""
        tables = self._memory.tables
        if drafts > 0 and self._memory.pool.room > others:
            tables.grow(sequence, sequence.issued + 1 + drafts)
        return max(0, min(drafts, tables.covered(sequence) - sequence.issued - 1))

    def count_skips(self, running: Iterable[Sequence], left_out: set[int]) -> None:
        """Count plans in a row that could have carried a sequence's decode row and did not."""
        for sequence in running:
            if sequence.key in left_out and sequence.state is SequenceState.DECODE:
                sequence.skipped += 1
                self.longest_skip = max(self.longest_skip, sequence.skipped)

    # ----------------------------------------------------------------------------------------------- what comes back

    @staticmethod
    def check(draft: Draft, drawn: Mapping[int, Several[Sample]]) -> None:
        """Raise BadRound unless every round of the plan drew what a round can."""
        if not draft.rounds:
            return
        for row in draft.rows:
            places = [sample.position for sample in drawn.get(row.request, ())] if row.drafts else []
            first, many = row.start + 1, len(places)
            if row.drafts and (places != list(range(first, first + many)) or not 1 <= many <= row.drafts + 1):
                raise BadRound(f"drew tokens at {places} in a round of {row.drafts} drafts at position {row.start}")

    def returned(self, draft: Draft, sequence: Sequence, many: int) -> None:
        """A round is back with so many tokens: from now on it counts as the rows that it turned out to be."""
        sequence.round = 0
        sequence.issued += many - 1
        sequence.pending = many
        draft.reach[sequence.key] = sequence.issued
        if sequence.finish is None and sequence.state is SequenceState.DECODE:
            self._memory.tables.advance(sequence)

    def judge(self, draft: Draft, drawn: Mapping[int, Several[Sample]], seconds: float) -> None:
        """Tell the policy what was drawn for each decode row, and how long the plan took."""
        if not self._limits.drafts:
            return
        by_key = {sequence.key: sequence for sequence in draft.named}
        rows = [
            Row(by_key[key].drafted, row.drafts, len(drawn[key]) - 1 if key in drawn else 0, draft.usual.get(key, 0))
            for row in draft.rows
            if (key := row.request) in draft.decodes
        ]
        whole = len(rows) == len(draft.rows) and not draft.saves
        self._drafting.back(self._limits.layout, rows, seconds if whole else 0.0)
