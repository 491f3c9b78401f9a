"""A worker that drafts, over a program whose logits show whatever goes wrong: every token that it has seen is in them.

`Toy` computes the logits of a row from the tokens that lie in its KV rows, read through the page table, and from a
recurrent state, so a row at a wrong place, a state that took a row too many and a slot that was not written each make
other numbers. Its drafting block knows the model by heart, with K and V of its own, and is mistaken where it is told to
be. `Desk` plays the engine: it knows its requests, makes plans and keeps the answers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from ranks import Group

from backends.base import PAGE_LEN, Batch, Collective, DeviceFacts, Limits, Stamp
from homeserve.wire.faults import parse, parse_drafts
from homeserve.wire.records import Boot, LaneRows, NewLane, Plan, PlanKind, Sample, Sampling, pack_ints
from homeserve.worker.faults import FaultPoint
from homeserve.worker.lanes import Lanes
from homeserve.worker.load import Loaded
from homeserve.worker.places import PagePlaces
from homeserve.worker.runner import Answer, Runner
from homeserve.worker.side import InPlace, Side

VOCAB, LANES, LANE_PAGES, PAGES, DRAFTS = 24, 4, 6, 26, 4
LIMITS = Limits(rows=64, logit_rows=40, lanes=LANES, lane_pages=LANE_PAGES, held_rows=LANES * (1 + DRAFTS))
STALE = -7
"""What lies in a slot that nobody wrote."""
GREEDY = Sampling(temperature=0.0)
SHUFFLED: list[int] = np.random.default_rng(5).permutation(PAGES).tolist()
"""Pages are dealt in this order, so that no lane has neighbours."""
Logits = npt.NDArray[np.float32]
Wrong = Callable[[int], bool]


@dataclass
class Toy:
    """A program. `wrong(position)`: whether the draft for that position is another token than the likeliest one.
    `spoilt(position)`: whether logits that draw for it hold NaN. Of several ranks only the last one gives logits."""

    wrong: Wrong = lambda position: False
    spoilt: Wrong = lambda position: False
    draft_spoilt: Wrong = lambda position: False
    collective: Collective | None = None
    fails: str = ""
    kv: list[int] = field(default_factory=lambda: [STALE] * PAGES * PAGE_LEN)
    draft_kv: list[int] = field(default_factory=lambda: [STALE] * PAGES * PAGE_LEN)
    states: list[int] = field(default_factory=lambda: [STALE] * (LANES + 2))
    batches: list[Batch] = field(default_factory=list)
    drafts: list[tuple[list[int], list[int], list[int]]] = field(default_factory=list)
    """Of each step: tokens, positions, chain."""
    accepted: list[tuple[int, int]] = field(default_factory=list)
    _held: dict[int, list[int]] = field(default_factory=dict)
    _hidden: list[int] = field(default_factory=list)

    def run(self, batch: Batch) -> Logits:
        kept = {name: getattr(batch, name).copy() for name in ("tokens", "lanes", "hold")}
        self.batches.append(replace(batch, **kept))  # arrays of a batch are used again
        self._meet(batch, "trunk")
        if self.fails == "run":
            raise RuntimeError("the rows failed")
        for slot, token in zip(batch.slots[0].tolist(), batch.tokens.tolist(), strict=True):
            self.kv[slot] = self.draft_kv[slot] = token
        self._held, rows, state = {}, [], 0
        for row, (lane, position) in enumerate(zip(batch.lanes.tolist(), batch.positions.tolist(), strict=True)):
            if not row or batch.lanes[row - 1] != lane:
                state = self.states[batch.states[lane]] if position else 0
            state = mixed(state, int(batch.tokens[row]))
            if len(batch.hold) and batch.hold[lane] >= 0:
                self._held.setdefault(lane, []).append(state)
            else:
                self.states[batch.states[lane]] = state
            rows.append(logits_of(self._seen(self.kv, batch, lane, position), state, self.spoilt(position + 1)))
        self._check_places(batch)
        return self._given(np.array([rows[at] for at in batch.logit_rows]))

    def draft(self, batch: Batch) -> Logits:
        assert len(set(batch.lanes.tolist())) == len(batch.lanes) == len(batch.chain) == len(batch.logit_rows)
        self.drafts.append((batch.tokens.tolist(), batch.positions.tolist(), batch.chain.tolist()))
        self._meet(batch, "draft")
        if self.fails == "draft":
            raise RuntimeError("the step failed")
        for slot, token in zip(batch.slots[0].tolist(), batch.tokens.tolist(), strict=True):
            self.draft_kv[slot] = token
        hidden, rows = [], []
        for row, (lane, position) in enumerate(zip(batch.lanes.tolist(), batch.positions.tolist(), strict=True)):
            before = self._hidden[batch.chain[row]] if batch.chain[row] >= 0 else self.states[batch.states[lane]]
            hidden.append(mixed(before if position else 0, int(batch.tokens[row])))
            seen = self._seen(self.draft_kv, batch, lane, position)
            logits = logits_of(seen, hidden[-1], self.draft_spoilt(position + 1))
            rows.append(np.roll(logits, 1) if self.wrong(position + 1) else logits)
        self._hidden = hidden
        return self._given(np.array(rows))

    def accept(self, kept: Sequence[tuple[int, int]]) -> None:
        if self.fails == "accept":
            raise RuntimeError("nothing was accepted")
        for lane, rows in kept:
            if not 0 <= rows <= len(self._held.get(lane, ())):
                raise ValueError(f"lane {lane} has not held {rows} rows")
        for lane, rows in kept:
            if rows:
                self.states[lane] = self._held[lane][rows - 1]
        self.accepted += kept

    def copy_states(self, pairs: Sequence[tuple[int, int]]) -> None:
        for source, target in pairs:
            self.states[target] = self.states[source]

    def close(self) -> None:
        pass

    def _seen(self, kv: list[int], batch: Batch, lane: int, position: int) -> tuple[int, ...]:
        pages = batch.tables[0][lane]
        return tuple(kv[pages[at // PAGE_LEN] * PAGE_LEN + at % PAGE_LEN] for at in range(position + 1))

    def _check_places(self, batch: Batch) -> None:
        """Held rows of different lanes lie at different places, within the limit."""
        places = [int(batch.hold[lane]) + at for lane, rows in self._held.items() for at in range(len(rows))]
        assert len(set(places)) == len(places) and max(places, default=-1) < LIMITS.held_rows

    def _meet(self, batch: Batch, label: str) -> None:
        """An exchange with the other ranks: it stands for all those of a forward."""
        if self.collective is not None:
            whole = batch.tokens.astype(np.float32).reshape(-1, 1)
            mine = whole.copy()
            self.collective.sum(Stamp(batch.epoch, batch.seq, len(mine), label), mine)
            assert np.array_equal(mine, whole * self.collective.ranks), "ranks computed other tokens"

    def _given(self, logits: Logits) -> Logits:
        ends = self.collective is None or self.collective.rank == self.collective.ranks - 1
        return logits if ends else np.zeros((0, VOCAB), np.float32)


def tokens_with(text: str) -> frozenset[int]:
    """Token n reads as the number n does."""
    return frozenset(token for token in range(VOCAB) if text in str(token))


def mixed(state: int, token: int) -> int:
    return (state * 1_000_003 + token + 1) & 0xFFFFFFFF


def logits_of(seen: tuple[int, ...], state: int, spoilt: bool) -> Logits:
    rng = np.random.default_rng(abs(hash((seen, state))))
    logits: Logits = (3.0 * rng.standard_normal(VOCAB)).astype(np.float32)
    if spoilt:
        logits[3] = np.nan
    return logits


@dataclass
class Request:
    """`tokens` are prompt and answer, of which `computed` were inputs."""

    lane: int
    number: int
    tokens: list[int]
    prompt_len: int
    sampling: Sampling
    computed: int = 0
    samples: list[Sample] = field(default_factory=list)


class Desk:
    """One rank with `program`, and the engine that gives it plans. Ranks of a fleet each have one."""

    def __init__(
        self,
        program: Any,
        *,
        forced: str = "",
        fault: str = "",
        drafts: int = DRAFTS,
        collective: Any = None,
        limits: Limits = LIMITS,
        vocab: int = VOCAB,
        places: PagePlaces | None = None,
    ) -> None:
        rank, ranks = (0, 1) if collective is None else (collective.rank, collective.ranks)
        self.program, self.faults = program, FaultPoint(parse(fault))
        side = Side("tensor", rank, ranks, None, places, tuple(range(ranks)), rank == ranks - 1, True, drafts)
        slots = limits.lanes + 2
        self.lanes = Lanes(limits, vocab, (PAGES,), (0,), slots, places, draws=side.draws, embeds=True, drafts=drafts)
        self.lanes.tokens_with = tokens_with
        self.runner = Runner(Boot(rank, ranks, 3, 4096, 4, 4096, "fake", 0, 1, ()), lambda *_: None, self.faults)
        facts: Any = DeviceFacts("fake", "", "", 1, True)
        loaded = Loaded(
            program, collective, InPlace({"tensor": program}, "tensor"), {"tensor": side}, self.lanes,
            PAGES * PAGE_LEN, facts, None, parse_drafts(forced),
        )  # fmt: skip
        self.runner._loaded = loaded
        self.runner._exchange_tokens(loaded, side)
        self.requests: dict[int, Request] = {}
        self.seq = 0
        self.rounds: list[tuple[int, int]] = []
        """(drafts, rows that counted) of each row with drafts."""

    def begin(self, lane: int, prompt: Sequence[int], sampling: Sampling = GREEDY, number: int = 0) -> Request:
        request = Request(lane, number or 10 + lane, list(prompt), len(prompt), sampling)
        self.requests[lane] = request
        return request

    def rows(self, request: Request, count: int = 1, drafts: int = 0, *, told: bool = True, save: int = -1) -> LaneRows:
        """The next `count` rows of a request; not `told`: the rank knows its last token."""
        first = request.computed
        known = request.tokens[first : first + count]
        pages = SHUFFLED[request.lane * LANE_PAGES :][:LANE_PAGES]
        return LaneRows(
            request.lane,
            request.number,
            first,
            pack_ints(known) if told else b"",
            b"" if first else pack_ints(pages),
            first + count >= len(request.tokens),
            save=save,
            drafts=drafts,
        )

    def plan(self, *rows: LaneRows) -> Plan:
        self.seq += 1
        first = [self.requests[each.lane] for each in rows if not each.start]
        new = tuple(NewLane(each.lane, each.number, each.prompt_len, each.sampling) for each in first)
        return Plan(self.seq, 0, PlanKind.MIXED, 7, (), new, rows)

    def flush(self) -> Plan:
        """All lanes are free behind it."""
        self.seq += 1
        self.requests.clear()
        return Plan(self.seq, 0, PlanKind.FLUSH, 7)

    def run(self, *rows: LaneRows) -> Answer:
        plan = self.plan(*rows)
        answer = self.runner.run(plan)
        self.take(plan, answer.samples)
        return answer

    def take(self, plan: Plan, samples: Sequence[Sample]) -> None:
        for rows in plan.rows:
            request = self.requests[rows.lane]
            own = [sample for sample in samples if sample.lane == rows.lane]
            request.samples += own
            request.tokens += [sample.token for sample in own]
            request.computed = len(request.tokens) - 1 if own else rows.start + len(rows.tokens) // 4
            assert [sample.position for sample in own] == list(range(len(request.tokens)))[-len(own) :] or not own
            if rows.drafts:
                self.rounds.append((rows.drafts, len(own)))

    def answer(self, request: Request, count: int, drafts: Sequence[int] = (0,)) -> list[Sample]:
        """The first `count` answers of a request, drafting `drafts` in turn, with the prompt in one chunk."""
        while len(request.samples) < count:
            known = len(request.tokens) - request.computed
            asked = drafts[self.seq % len(drafts)] if request.samples else 0
            self.run(self.rows(request, known, min(asked, count - len(request.samples) - 1)))
        return request.samples


class Ranks:
    """The desks of a fleet in the tensor layout, which all are given the same plans; the last one has the answers."""

    def __init__(self, group: Group, programs: Sequence[Any], **more: Any) -> None:
        self.group = group
        places = more.pop("places", [None] * len(programs))
        self.desks = [
            Desk(program, collective=acts, places=own, **more)
            for program, acts, own in zip(programs, group.acts, places, strict=True)
        ]
        self.last = self.desks[-1]

    def begin(self, lane: int, prompt: Sequence[int], sampling: Sampling = GREEDY) -> Request:
        for desk in self.desks[:-1]:
            desk.begin(lane, prompt, sampling)
        return self.last.begin(lane, prompt, sampling)

    def run(self, *rows: LaneRows) -> None:
        self.run_all([rows])

    def run_all(self, plans: Sequence[Sequence[LaneRows]]) -> None:
        """Several plans, each rank as far ahead as it can; only the last of them may have been made from answers."""
        made = [self.last.plan(*rows) for rows in plans]
        answers = self.group.together(lambda rank: [self.desks[rank].runner.run(plan).samples for plan in made])
        for plan, samples in zip(made, answers[-1], strict=True):
            self.last.take(plan, samples)
        assert all(not samples for rank in answers[:-1] for samples in rank)


def plainly(prompt: Sequence[int], count: int, sampling: Sampling = GREEDY, lane: int = 1) -> list[Sample]:
    """What is answered without drafts."""
    desk = Desk(Toy(), drafts=0)
    return desk.answer(desk.begin(lane, prompt, sampling), count)
