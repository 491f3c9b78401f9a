"""Plans with drafts: several tokens of a request in one plan, and not one that would not have come without.

A row with drafts has one known token b, at position n. The plan drafts k more with the model's drafting block, computes
the target's rows of all k + 1, draws behind each, and answers what was drawn behind the rows that count:

    draft    b ─▶ t1 ─▶ … ─▶ tk    step j: one row of each lane that has more than j drafts, the largest logit is the
                                   next token; its hidden state goes on to the next step (`Batch.chain`)
    rows     b, t1 … tk at n … n+k, their states held, beside the ordinary rows of other lanes
    draw     behind row j: token j, with the random number of position n+j+1; row j+1 counts if token j is its input
    accept   the states become those behind the rows that count, 1 to k+1 of them; length, past, last token follow
    answer   the tokens drawn behind these rows

**Verify by drawing.** The target's own token is drawn at each position, with that position's own number and with the
past of the inputs before it, exactly as a plan without drafts draws it. Drafts decide nothing but how many of these
draws can be had from one plan: a row counts if its inputs are those that a plan without drafts would have had, so its
logits are those as well. The distribution is the target's, greedy or not, and a seeded answer is the same however much
was drafted. Drafting itself is always greedy and may be any nonsense, NaN included: that is a bad draft and no error.

**Nothing sticks that did not count.** K and V of rejected rows lie at positions behind the lane's length, which nobody
reads before they are written again. Recurrent states are held while the rows run, and the rows that count are replayed
from them (`Program.accept`). The lane's length, past and last token are set at the very end. So whatever is raised on
the way, an error of an exchange or logits that are no number in a row that counts, leaves the lane's committed state
as it was; a row that does not count is not even looked at.

**The drafting block's own K and V are complete without drafts**: its row of position p needs token p and the target's
hidden state of p - 1 alone, so every plan computes it for each row of its own (`JoinHidden` in the list of `run`), and
writes over what a step of drafting left there.

**Several ranks** (tensor layout): every rank runs each step, the last one has the logits. After each step it tells the
others what was drafted, and after the rows what was drawn (`homeserve.worker.drawn`); how many rows of a lane count is
how many tokens of it come. Before the first step all that earlier plans owe is taken, and this plan owes nothing. Every
message is followed by an exchange in which all ranks meet, or by the end of the plan: no channel ever holds two of one
plan.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from backends.base import Program
from homeserve.wire.faults import ForcedDrafts
from homeserve.wire.records import LaneRows, Plan, Sample
from homeserve.worker.answering import answer_of, answers_of_drafts, next_input
from homeserve.worker.drawn import NO_TOKEN, OUTCOME, Drawn, TokenReceiver, TokenSender, draft_label, request_bits
from homeserve.worker.faults import FaultPoint
from homeserve.worker.lanes import Group, Lanes
from homeserve.worker.pooling import pool

Ints = npt.NDArray[np.int32]
Logits = npt.NDArray[np.float32]
FROM_STATE = -1
"""`Batch.chain` of the first step."""


@dataclass(frozen=True)
class Drafting:
    """Plans with drafts on one rank, in the layout in force. `sender` where it draws and others have to know; it takes
    from `receiver` where another one draws."""

    lanes: Lanes
    faults: FaultPoint
    forced: ForcedDrafts = ForcedDrafts()
    sender: TokenSender | None = None
    receiver: TokenReceiver | None = None

    def compute(self, program: Program, plan: Plan) -> tuple[tuple[Sample, ...], int]:
        """The plan's answers (none where another rank draws), and the microseconds that its steps of drafting took.

        The lanes have the plan already, and states are restored. Raises what the program raises, ExchangeError and
        NotANumber.
        """
        if self.receiver is not None:
            self.receiver.drain()
        began = time.monotonic_ns()
        drafted = self._draft(program, plan)
        draft_us = (time.monotonic_ns() - began) // 1000
        self.faults.damaging("verify")
        batch, groups = self.lanes.batch(plan.rows, plan.epoch, plan.seq, drafted)
        for group in groups:
            self.lanes.foresee(group)
        self.lanes.make_masks()
        logits = program.run(batch)
        program.copy_states([(rows.lane, rows.save) for rows in plan.rows if rows.save >= 0])
        for group in groups:
            if not group.rows.drafts:
                self.lanes.advance(group)
        samples: tuple[Sample, ...] = ()
        if self.lanes.draws:
            samples = self._draw(groups, logits)
            self.lanes.make_masks()
            tokens = _tokens_of(samples)
            self._tell(plan, groups, tokens)
            samples += pool(self.lanes, program, batch, groups)
        else:
            tokens = self._told(plan, groups)
        self._settle(program, groups, tokens)
        return samples, draft_us

    # ------------------------------------------------------------------------------------------------------ drafting

    def _draft(self, program: Program, plan: Plan) -> dict[int, list[int]]:
        """The drafts of each lane that has any."""
        rows = [each for each in plan.rows if each.drafts]
        drafted: dict[int, list[int]] = {each.lane: [] for each in rows}
        tokens = np.array([np.frombuffer(each.tokens, "<i4")[0] for each in rows], np.int32)
        chain = np.full(len(rows), FROM_STATE, np.int32)
        for step in range(max(each.drafts for each in rows)):
            going_on = [at for at, each in enumerate(rows) if each.drafts > step]
            if step:
                chain = np.array(going_on, np.int32)
            rows, tokens = [rows[at] for at in going_on], tokens[going_on]
            self.faults.damaging("draft")
            logits = program.draft(self.lanes.draft_batch(rows, step, tokens, chain, plan.epoch, plan.seq))
            tokens = self._step_told(plan, rows, logits, draft_label(step))
            for each, token in zip(rows, tokens.tolist(), strict=True):
                drafted[each.lane].append(token)
        return drafted

    def _step_told(self, plan: Plan, rows: Sequence[LaneRows], logits: Logits, label: str) -> Ints:
        """What a step drafted for each of `rows`: from its logits, or from the rank that has them."""
        if self.lanes.draws:
            tokens = _largest(logits, self.forced)
            if self.sender is not None:
                told = [
                    Drawn(each.lane, request_bits(each.request), int(t)) for each, t in zip(rows, tokens, strict=True)
                ]
                self.sender.send(plan.epoch, plan.seq, told, label)
            return tokens
        assert self.receiver is not None, "every rank that drafts is told"
        known = self.receiver.receive(plan.epoch, plan.seq, [(each.lane, each.request) for each in rows], label)
        self._check(known, label)
        return np.array(known, np.int32)

    # ------------------------------------------------------------------------------------------------ what was drawn

    def _draw(self, groups: Sequence[Group], logits: Logits) -> tuple[Sample, ...]:
        found: list[Sample] = []
        for group in groups:
            own = logits[group.logits_first :][: group.logit_count]
            if group.rows.drafts:
                found += answers_of_drafts(self.lanes[group.lane], group, own, self.forced)
            elif group.logit_count:
                found.append(answer_of(self.lanes, group, own))
        return tuple(found)

    def _tell(self, plan: Plan, groups: Sequence[Group], tokens: Mapping[int, Sequence[int]]) -> None:
        """Tell the others what was drawn: a row for each token that a lane may have drawn."""
        if self.sender is None:
            return
        rows: list[Drawn] = []
        for group in groups:
            own = [*tokens.get(group.lane, ()), *[NO_TOKEN] * group.draws][: group.draws]
            rows += [Drawn(group.lane, request_bits(group.rows.request), token) for token in own]
        self.sender.send(plan.epoch, plan.seq, rows, OUTCOME)

    def _told(self, plan: Plan, groups: Sequence[Group]) -> dict[int, list[int]]:
        """The tokens drawn for each lane, from the rank that draws."""
        assert self.receiver is not None, "every rank that drafts is told"
        wanted = [(group.lane, group.rows.request) for group in groups for _ in range(group.draws)]
        told = deque(self.receiver.receive(plan.epoch, plan.seq, wanted, OUTCOME))
        tokens: dict[int, list[int]] = {}
        for group in groups:
            own = [told.popleft() for _ in range(group.draws)]
            drawn = own[: own.index(NO_TOKEN)] if NO_TOKEN in own else own
            self._check(drawn, OUTCOME)
            if not _may_count(group, own, drawn):
                raise self.receiver.wrong(OUTCOME, f"has {own} for rows {group.inputs.tolist()} of lane {group.lane}")
            tokens[group.lane] = drawn
        return tokens

    def _check(self, tokens: Sequence[int], label: str) -> None:
        """What another rank tells is in the vocabulary. Raises ExchangeError."""
        assert self.receiver is not None, "every rank that drafts is told"
        if any(not 0 <= token < self.lanes.vocab for token in tokens):
            raise self.receiver.wrong(label, f"has tokens {list(tokens)} of a vocabulary of {self.lanes.vocab}")

    def _settle(self, program: Program, groups: Sequence[Group], tokens: Mapping[int, Sequence[int]]) -> None:
        """The rows of drafts that count, in the states and then in the lanes."""
        self.faults.damaging("verify")
        held = [group for group in groups if group.rows.drafts]
        program.accept([(group.lane, len(tokens[group.lane])) for group in held])
        for group in groups:
            if group.rows.drafts:
                self.lanes.settle(group, tokens[group.lane])
            elif group.draws:
                self.lanes[group.lane].last_token = tokens[group.lane][-1]


def _tokens_of(samples: Sequence[Sample]) -> dict[int, list[int]]:
    """The tokens of each lane that drew any, and what stands in for one that could not be drawn."""
    tokens: dict[int, list[int]] = {}
    for sample in samples:
        if (token := next_input(sample)) != NO_TOKEN:
            tokens.setdefault(sample.lane, []).append(token)
    return tokens


def _may_count(group: Group, told: Sequence[int], drawn: Sequence[int]) -> bool:
    """Whether these may be the tokens of a group, of what is told of it: one at least, none behind the last, and each
    but the last one is the input of the row that counts behind it."""
    if set(told[len(drawn) :]) - {NO_TOKEN} or (told and not drawn):
        return False
    followed: list[int] = group.inputs[1 : len(drawn)].tolist()
    return followed == list(drawn[:-1])


def _largest(logits: Logits, forced: ForcedDrafts) -> Ints:
    """The most likely token of each row, int32 `[rows]`, of equal ones the lowest; of a row with NaN any one."""
    largest = logits.argmax(axis=1)
    if forced.wrong:
        least = logits.argmin(axis=1)
        largest = np.where(least == largest, (largest + 1) % logits.shape[1], least)
    tokens: Ints = largest.astype(np.int32)
    return tokens
