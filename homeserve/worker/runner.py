"""Runs plans on this rank's device: load once, then rows to logits to tokens.

    LOAD     checkpoint ─▶ family ─▶ bind ─▶ Backend ─▶ programs, pools, lanes (`load`)
    rows     LaneRows ─▶ Lanes.check, apply ─▶ Batch ─▶ Program.run ─▶ logits ─▶ draw ─▶ Sample
             with drafts: the same with more steps (`drafting`)
    FLIP_*   RankFlip ─▶ another program, and lanes that follow (`flip`)
    CENSUS   what the lanes hold        FLUSH   forget all lanes

Every plan carries the epoch of the layout that it was made for, and none is run in another one.

Raises what ended a plan; the plan loop turns it into the plan's one answer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from backends.base import Backend, Counts, CountsLaunches, LoadProgress, Program
from homeserve.wire.records import (
    PACK,
    Boot,
    FlipAnswer,
    LoadSpec,
    Plan,
    PlanKind,
    PoolCensus,
    RankFacts,
    Sample,
)
from homeserve.worker.answering import answer_of, next_input
from homeserve.worker.drafting import Drafting
from homeserve.worker.drawn import Drawn, TokenReceiver, TokenSender, request_bits
from homeserve.worker.faults import FaultPoint
from homeserve.worker.flip import FlipRefused
from homeserve.worker.lanes import LaneRefused, Lanes
from homeserve.worker.load import Loaded, load
from homeserve.worker.pooling import pool
from homeserve.worker.side import Side

FLIPS = (PlanKind.FLIP_PREPARE, PlanKind.FLIP_COMMIT, PlanKind.FLIP_ABANDON)


@dataclass(frozen=True)
class Answer:
    """What a plan gives beside its number."""

    samples: tuple[Sample, ...] = ()
    facts: RankFacts | None = None
    census: tuple[PoolCensus, ...] = ()
    exchanges: tuple[tuple[str, int, int, int], ...] = ()
    """(label, calls, bytes moved, microseconds waited) of each exchange with other ranks since the load."""
    launches: tuple[tuple[str, int], ...] | None = None
    """(symbol, launches) of each kernel since the load; None on a device that counts none."""
    flip: FlipAnswer | None = None
    draft_us: int = 0
    """Microseconds for steps of drafting."""
    notes: tuple[str, ...] = ()
    """What is not as it was asked for, and was not told yet."""


class Runner:
    """The model on this rank. Holds nothing before its LOAD plan."""

    def __init__(self, boot: Boot, progress: LoadProgress, faults: FaultPoint | None = None) -> None:
        self._boot = boot
        self._progress = progress
        self._faults = faults or FaultPoint(None)
        self._loaded: Loaded | None = None
        self._epoch: int | None = None
        """Of the layout in force: that of the first plan after the load, then of the last flip."""
        self._sender: TokenSender | None = None
        self._receiver: TokenReceiver | None = None

    def run(self, plan: Plan) -> Answer:
        """Execute one plan. Raises HomeserveError, LaneRefused, FlipRefused or NotANumber: the reason that goes into
        its answer."""
        if plan.kind == PlanKind.LOAD:
            if plan.load is None:
                raise LaneRefused("a load plan without a load")
            return Answer(facts=self._load(plan.load))
        if plan.kind == PlanKind.STOP:
            return Answer()
        loaded = self._loaded
        if loaded is None:
            raise LaneRefused(f"plan kind {plan.kind} before any load")
        given = self._run(loaded, plan)
        if not loaded.notes:
            return given
        return replace(given, notes=tuple(loaded.notes.popleft() for _ in range(len(loaded.notes))))

    def _run(self, loaded: Loaded, plan: Plan) -> Answer:
        self._check_layout(loaded, plan)
        lanes = loaded.lanes
        lanes.check(plan)
        lanes.apply(plan)
        if plan.kind in FLIPS:
            return Answer(flip=self._flip(loaded, plan))
        if plan.kind == PlanKind.CENSUS:
            return Answer(census=self._census(loaded), exchanges=self._exchanges(), launches=_launches(loaded.backend))
        if plan.kind == PlanKind.FLUSH:
            lanes.lanes[:] = [None] * len(lanes.lanes)
            return Answer()
        return self._compute(loaded, plan) if plan.rows else Answer()

    def close(self) -> None:
        """Give the device back."""
        if self._loaded is not None:
            self._loaded.close()
        self._loaded = self._epoch = self._sender = self._receiver = None

    def exchanged(self) -> tuple[int, int, int]:
        """Since the load: exchanges with other ranks, bytes that they moved, microseconds waited in them."""
        collective = self._loaded.collective if self._loaded is not None else None
        calls, moved, waited_ns = collective.totals() if collective is not None else (0, 0, 0)
        return calls, moved, waited_ns // 1000

    def _exchanges(self) -> tuple[tuple[str, int, int, int], ...]:
        collective = self._loaded.collective if self._loaded is not None else None
        counts = collective.counts() if collective is not None else {}
        return tuple((label, each.calls, each.moved_bytes, _waited_us(each)) for label, each in counts.items())

    @staticmethod
    def _census(loaded: Loaded) -> tuple[PoolCensus, ...]:
        """What the lanes address. Rows of the drafting block lie at the kv pool's slots, which are counted once: the
        pool `draft` is told by ranks that have the block, with the same numbers."""
        pools = ("kv", "draft") if loaded.sides[loaded.layouts.active].drafting_block else ("kv",)
        return tuple(PoolCensus(pool, loaded.kv_slots, loaded.lanes.occupied()) for pool in pools)

    # --------------------------------------------------------------------------------------------- load and layouts

    def _load(self, spec: LoadSpec) -> RankFacts:
        self.close()
        self._loaded = loaded = load(self._boot, spec, self._progress, self._faults)
        self._exchange_tokens(loaded, loaded.sides[loaded.layouts.active])
        return loaded.facts

    def _exchange_tokens(self, loaded: Loaded, side: Side) -> None:
        self._sender = side.sender(loaded.collective)
        self._receiver = side.receiver(loaded.collective, self._boot.log_slots, loaded.lanes.take_token)

    def _check_layout(self, loaded: Loaded, plan: Plan) -> None:
        """That the plan is for the layout in force, and that this is one in which rows can be computed."""
        if self._epoch is None:
            self._epoch = plan.epoch
        commits = plan.kind == PlanKind.FLIP_COMMIT and plan.flip is not None
        due = plan.flip.epoch if commits and plan.flip is not None else self._epoch
        if plan.epoch != due:
            raise LaneRefused(f"the plan is for a layout of epoch {plan.epoch}, and this is {due}")
        if plan.rows and loaded.flip is not None and loaded.flip.blocked:
            raise LaneRefused(f"rows cannot be computed: {loaded.flip.blocked}")

    def _flip(self, loaded: Loaded, plan: Plan) -> FlipAnswer | None:
        """Raises FlipRefused where this rank does not follow the order."""
        order, flip = plan.flip, loaded.flip
        if order is None or flip is None or plan.rows:
            raise FlipRefused("a plan of a flip has an order and no rows, and is for ranks that have two layouts")
        if plan.kind == PlanKind.FLIP_PREPARE:
            if order.stage == PACK and self._receiver is not None:
                self._receiver.drain()
            return flip.prepare(order, plan.epoch)
        if plan.kind == PlanKind.FLIP_ABANDON:
            flip.abandon(order)
            return None
        answer = flip.commit(order, lambda: self._turn(loaded, loaded.sides[order.to]))
        self._epoch = order.epoch
        return answer

    def _turn(self, loaded: Loaded, side: Side) -> None:
        loaded.lanes.turn(side.places, embeds=side.embeds, drafts=side.drafts)
        self._exchange_tokens(loaded, side)

    # ---------------------------------------------------------------------------------------------------- computing

    def _compute(self, loaded: Loaded, plan: Plan) -> Answer:
        lanes, program = loaded.lanes, loaded.layouts.program
        program.copy_states([(new.restore, new.lane) for new in plan.new if new.restore >= 0])
        if any(rows.drafts for rows in plan.rows):
            drafting = Drafting(lanes, self._faults, loaded.forced, self._sender, self._receiver)
            samples, draft_us = drafting.compute(program, plan)
            return Answer(samples=samples, draft_us=draft_us)
        return Answer(samples=self._compute_rows(lanes, program, plan))

    def _compute_rows(self, lanes: Lanes, program: Program, plan: Plan) -> tuple[Sample, ...]:
        """A plan without drafts."""
        if self._receiver is not None:
            self._receiver.before(plan.seq, [rows.lane for rows in plan.rows if not rows.tokens])
        batch, groups = lanes.batch(plan.rows, plan.epoch, plan.seq)
        for group in groups:
            lanes.foresee(group)
        lanes.make_masks()
        logits = program.run(batch)
        program.copy_states([(rows.lane, rows.save) for rows in plan.rows if rows.save >= 0])
        for group in groups:
            lanes.advance(group)
        if self._receiver is not None:
            self._receiver.expect(plan.epoch, plan.seq, [group.lane for group in groups if group.draws])
        if not lanes.draws:
            return ()
        samples = tuple(
            answer_of(lanes, group, logits[group.logits_first :][: group.logit_count])
            for group in groups
            if group.logit_count
        )
        lanes.make_masks()
        if self._sender is not None:
            told = [(each, next_input(each)) for each in samples]
            drawn = [Drawn(each.lane, request_bits(each.request), token) for each, token in told if token >= 0]
            self._sender.send(plan.epoch, plan.seq, drawn)
        return samples + pool(lanes, program, batch, groups)


def _launches(backend: Backend) -> tuple[tuple[str, int], ...] | None:
    return tuple(sorted(backend.launch_counts().items())) if isinstance(backend, CountsLaunches) else None


def _waited_us(counts: Counts) -> int:
    return (counts.spun_ns + counts.slept_ns) // 1000
