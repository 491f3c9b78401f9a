"""The whole of a fleet on a paper wire: the shipped engine, plan log, plan book, plan loops, runners, lanes and rank
flips; only processes, pools and arithmetic are played.

    Engine ─▶ PlanLogWriter ═bell═▶ run_plans ─▶ Runner ─▶ Lanes, RankFlip, Adding ─▶ PaperCollective
       ▲                                                                                  │
       └─ PlanBook ◀═bell═ ReportReader ◀═════════════════════════════════════════════════┘

Every order in which the four may run is a function of the seed, and where all of them wait, that is a deadlock, which
says who waits for what (`paper_wire`). The model stores each token's number in its pools, one byte a row and layer, and
draws from the sum over all rows of a sequence: a row that is lost, stale or in another place changes the answer, and
the right one is known without the system (`total`).
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

# The test folders are no package (pytest's importlib mode); what is shared lies among the tests that came first.
sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
sys.path.insert(0, str(Path(__file__).parents[1] / "process"))

from engine_flip_rig import RANKS, SimFleet, Timers, flip_limits, limits
from flip_rig import PAGES, FakeLayouts
from paper_wire import PaperCollective, Wire
from test_collective_schedules import PaperBell
from test_engine_flip_engine import Asked
from test_engine_traces import answer

from backends.acts import Stamp, fleet_shape
from backends.base import PAGE_LEN, Batch, Limits
from homeserve.engine.engine import Engine
from homeserve.engine.flip_record import FlipRecord
from homeserve.engine.request import GenerateCall
from homeserve.engine.stream import TokenStream
from homeserve.fleet import Loss
from homeserve.fleet.book import PlanBook
from homeserve.fleet.life import _may_refuse
from homeserve.layouts.moves import FlipGeometry, KvHome
from homeserve.layouts.owner import OwnerRule
from homeserve.layouts.share import PIPELINE as PIPELINE
from homeserve.layouts.share import TENSOR as TENSOR
from homeserve.wire.records import Boot, FlipOrder, LaneRows, NewLane, Plan, PlanKind, Result, Sampling
from homeserve.wire.ring import (
    PROGRESS_SLOTS,
    PlanLogReader,
    PlanLogWriter,
    ReportReader,
    ReportWriter,
    Slots,
    ring_bytes,
)
from homeserve.worker.faults import FaultPoint
from homeserve.worker.flip import RankFlip
from homeserve.worker.lanes import Lanes
from homeserve.worker.load import Loaded
from homeserve.worker.loop import Reports, run_plans
from homeserve.worker.places import own_pages
from homeserve.worker.runner import Answer, Runner
from homeserve.worker.side import Side
from homeserve.worker.transit import Transit

IN_FLIGHT = RANKS + 1
SLOT_BYTES = 4096
TRANSIT_BYTES = 1 << 16
VOCAB = 50
LAYERS = (0, 0, 1, 2)
"""Of each attention layer the pipeline rank that has it."""
EVERY = tuple(range(RANKS))
LIVE, HELD = ({0, 1, 2, 3, 7, 22}, {0, 5, 8}), {0, 3}
"""Pages of each KV group and state slots that are live, for the rank flips of `flip_rig`."""


def total(tokens: list[int]) -> int:
    """What the model makes of a sequence: the next token."""
    return (sum(token * (at % 5 + 1) for at, token in enumerate(tokens)) + 1) % VOCAB


def right(prompt: tuple[int, ...], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(total(tokens))
    return tokens[len(prompt) :]


class Adding:
    """The program of one rank in whichever layout is active: rows travel from rank to rank, or are summed by all."""

    def __init__(self, layouts: FakeLayouts, acts: PaperCollective) -> None:
        self.layouts, self.acts = layouts, acts

    def run(self, batch: Batch) -> npt.NDArray[np.float32]:
        acts, count, last = self.acts, len(batch.tokens), self.acts.ranks - 1
        rows = np.zeros((count, 2), np.float32)
        rows[:, 0] = batch.tokens
        if self.layouts.active == TENSOR:
            self._add(batch, rows)
            sums = np.ascontiguousarray(rows[:, 1:])
            acts.sum(Stamp(batch.epoch, batch.seq, count, "sums"), sums)
            rows[:, 1:] = sums
        else:
            stamp = Stamp(batch.epoch, batch.seq, count, "rows")
            if acts.rank > 0:
                acts.receive(stamp, acts.rank - 1, rows)
            self._add(batch, rows)
            if acts.rank < last:
                acts.send(stamp, acts.rank + 1, rows)
        logits = np.zeros((len(batch.logit_rows), VOCAB), np.float32)
        for at, row in enumerate(batch.logit_rows.tolist()):
            logits[at, (int(rows[row, 1]) // len(LAYERS) + 1) % VOCAB] = 1.0
        return logits

    def _add(self, batch: Batch, rows: npt.NDArray[np.float32]) -> None:
        """Store every row of a layer, then add up what each row sees of it."""
        for layer in self.layouts.pools[self.layouts.active].kv:
            slots = batch.slots[0]
            layer[slots // PAGE_LEN, slots % PAGE_LEN] = rows[:, 0]
            for row, (lane, position) in enumerate(zip(batch.lanes.tolist(), batch.positions.tolist(), strict=True)):
                seen = np.arange(position + 1)
                pages = batch.tables[0, lane, seen // PAGE_LEN]
                seen, pages = seen[pages >= 0], pages[pages >= 0]
                rows[row, 1] += (layer[pages, seen % PAGE_LEN].astype(np.int64) * (seen % 5 + 1)).sum()

    def copy_states(self, pairs: list[tuple[int, int]]) -> None:
        pass

    def close(self) -> None:
        pass


class NotedRunner(Runner):
    """Says when plans begin and end, and what they exchanged."""

    def __init__(self, fleet: PaperFleet, boot: Boot) -> None:
        super().__init__(boot, lambda *_: None)
        self._fleet, self._rank = fleet, boot.rank

    def run(self, plan: Plan) -> Answer:
        acts = self._fleet.acts[self._rank]
        before = {label: each.calls for label, each in acts.counts().items()}
        self._fleet.events.append(("begins", self._rank, plan.seq))
        given = super().run(plan)
        for _ in range(self._fleet.lags.get(self._rank, 0)):
            self._fleet.wire.wait(lambda: True, "nobody")
        after = {label: each.calls - before.get(label, 0) for label, each in acts.counts().items()}
        self._fleet.exchanged[self._rank, plan.seq] = {label: calls for label, calls in after.items() if calls}
        self._fleet.events.append(("ends", self._rank, plan.seq))
        return given


def unread(stream: TokenStream) -> list[int]:
    """The tokens that its reader has not taken yet."""
    return [token for event in stream._unread for token in event.tokens]


class PaperFleet:
    """Three ranks and their engine. `run(script)` has `script` play in the engine's place, and then stops all."""

    def __init__(self, seed: int = 0, *, lags: dict[int, int] | None = None, **sizes: Any) -> None:
        """`lags`: of a rank, steps of the wire that pass before it answers a plan that it has run."""
        self.wire = Wire(seed)
        self.lags = lags or {}
        self.timers = Timers()
        self.events: list[tuple[Any, ...]] = []
        """("issue", seq), ("begins", rank, seq), ("ends", rank, seq), ("told", seq) as they happened,"""
        self.plans: dict[int, Plan] = {}
        self.exchanged: dict[tuple[int, int], dict[str, int]] = {}
        """and calls by label of each (rank, plan)."""
        self.geometry = FlipGeometry(
            OwnerRule.of((2, 1, 1)), tuple(KvHome(stage, 0, PAGE_LEN) for stage in LAYERS), (), (PAGES,)
        )
        shape = fleet_shape(RANKS, 64, 128, 64, IN_FLIGHT + 1)
        self.acts = [PaperCollective(self.wire, shape, rank) for rank in EVERY]
        self.layouts = [FakeLayouts(self.geometry, rank) for rank in EVERY]
        self.runners: list[NotedRunner] = []
        self._fd = os.memfd_create("transit")
        os.ftruncate(self._fd, TRANSIT_BYTES)
        memory = memoryview(bytearray(ring_bytes(IN_FLIGHT, SLOT_BYTES)))
        self._log = PlanLogWriter(Slots(memory, IN_FLIGHT, SLOT_BYTES, create=True), RANKS)
        self.book = PlanBook(RANKS)
        self._readers: list[ReportReader] = []
        flips = replace(flip_limits(transit_bytes=TRANSIT_BYTES), state_bytes=0, group_layers=(len(LAYERS),))
        plain = {"kv_tokens": PAGES * PAGE_LEN, "recurrent": False, "checkpoints": 0}
        self.engine = Engine(self, limits(flips, **{**plain, **sizes}), lambda: self.timers.now, self.timers.later)
        self.engine.on_lost = self._lost  # type: ignore[method-assign]
        self.scripted: set[int] = set()
        """Plans that the script issued: the engine knows nothing of them."""
        self._script: Callable[[PaperFleet], None] = lambda fleet: None
        self.wire.act("engine", self._play)
        for rank in EVERY:
            self._add_rank(rank, memory)

    def run(self, script: Callable[[PaperFleet], None]) -> PaperFleet:
        """Raises what a rank or the script raised, or Deadlock."""
        self._script = script
        try:
            self.wire.run()
        finally:
            for runner in self.runners:
                loaded = runner._loaded
                if loaded is not None and loaded.flip is not None:
                    loaded.flip.close()
            os.close(self._fd)
        return self

    def _add_rank(self, rank: int, log: memoryview) -> None:
        slots = IN_FLIGHT + PROGRESS_SLOTS
        memory = memoryview(bytearray(ring_bytes(slots, SLOT_BYTES)))
        writer = ReportWriter(Slots(memory, slots, SLOT_BYTES, create=True), IN_FLIGHT)
        self._readers.append(ReportReader(Slots(memory, slots, SLOT_BYTES, create=False)))
        plans = PlanLogReader(Slots(log, IN_FLIGHT, SLOT_BYTES, create=False))
        reports: Any = Reports(writer, PaperBell(self.wire, "report", rank))  # type: ignore[arg-type]
        bell: Any = PaperBell(self.wire, "plan", rank)
        runner = self._runner(rank)
        self.runners.append(runner)
        self.wire.act(f"rank {rank}", lambda: run_plans(rank, plans, bell, reports, runner, FaultPoint(None)))

    def _runner(self, rank: int) -> NotedRunner:
        layouts, acts = self.layouts[rank], self.acts[rank]
        program: Any = Adding(layouts, acts)
        layouts.computes = program
        places = own_pages([PAGES * PAGE_LEN], (2, 1, 1), rank)
        draws = rank == RANKS - 1
        span = (LAYERS.index(rank), len(LAYERS) - LAYERS[::-1].index(rank))
        sides = {
            PIPELINE: Side(PIPELINE, rank, RANKS, span, None, (0,), draws),
            TENSOR: Side(TENSOR, rank, RANKS, None, places, EVERY, draws),
        }
        lanes = Lanes(Limits(64, 64, 4, 16), VOCAB, (PAGES,), draws=draws, embeds=rank == 0)
        flip = RankFlip(rank, self.geometry, layouts, Transit(self._fd, TRANSIT_BYTES), FaultPoint(None))
        runner = NotedRunner(self, Boot(rank, RANKS, IN_FLIGHT, SLOT_BYTES, IN_FLIGHT, SLOT_BYTES, "paper", 0, 1, ()))
        facts: Any = None
        collective: Any = acts
        runner._loaded = Loaded(program, collective, layouts, sides, lanes, PAGES * PAGE_LEN, facts, flip)
        runner._exchange_tokens(runner._loaded, sides[PIPELINE])
        return runner

    # ---------------------------------------------------------------------------------- what the engine asks of a fleet

    def credit(self) -> int:
        return self._log.credit()

    def issue(
        self,
        kind: PlanKind,
        *,
        epoch: int,
        ranks: tuple[int, ...] = EVERY,
        drop: tuple[int, ...] = (),
        new: tuple[NewLane, ...] = (),
        rows: tuple[LaneRows, ...] = (),
        flip: FlipOrder | None = None,
    ) -> int:
        mask = sum(1 << rank for rank in ranks)
        plan = Plan(self._log.issued + 1, epoch, kind, mask, drop, new, rows, None, flip)
        self._log.write(plan)
        self.book.issue(plan, 0.0)
        self.plans[plan.seq] = plan
        self.events.append(("issue", plan.seq))
        for rank in EVERY:
            PaperBell(self.wire, "plan", rank).ring()
        return plan.seq

    async def restart(self, kv_slots: int, window_slots: tuple[tuple[int, int], ...]) -> None:
        raise AssertionError("nobody is to start these ranks again")

    def _lost(self, loss: Loss) -> None:
        raise AssertionError(f"a life was lost, on a wire that loses none: {loss.why}")

    def shared_memory_names(self) -> list[str]:
        return []

    # ------------------------------------------------------------------------------------------ in the engine's place

    def _play(self) -> None:
        self._script(self)
        while self.credit() < IN_FLIGHT:
            self.hear()
        self.aside(PlanKind.STOP)
        while self.credit() < IN_FLIGHT:
            self.hear()

    def aside(self, kind: PlanKind, ranks: tuple[int, ...] = EVERY) -> int:
        """A plan that is not the engine's."""
        seq = self.issue(kind, epoch=self.epoch, ranks=ranks)
        self.scripted.add(seq)
        return seq

    @property
    def epoch(self) -> int:
        return self.engine.snapshot().epoch

    @property
    def layout(self) -> str:
        """Of every rank, which is one."""
        (layout,) = {each.active for each in self.layouts}
        return layout

    def hear(self) -> None:
        """Wait for a report, and take all that have come."""
        bells = [PaperBell(self.wire, "report", rank) for rank in EVERY]
        self.wire.wait(lambda: any(bell.heard() for bell in bells), "a report")
        for rank, bell in enumerate(bells):
            while bell.heard():
                bell.wait()
                result = self._readers[rank].take()
                assert isinstance(result, Result)
                kind = PlanKind(self.plans[result.seq].kind)
                assert result.ok or _may_refuse(kind, result), f"rank {rank}, plan {result.seq}: {result.reason}"
                completed = self.book.answer(rank, result, 0.0)
                self._log.acknowledge(rank, result.seq)
                for seq, results in completed:
                    self.events.append(("told", seq))
                    if seq not in self.scripted:
                        self.engine.on_results(seq, results)

    def hear_until(self, holds: Callable[[], bool]) -> None:
        """Bounded: what never comes fails the test."""
        for _ in range(2000):
            if holds():
                return
            assert self.book.in_flight, "nothing is in flight, and nothing more will come"
            self.hear()
        raise AssertionError("it goes on without an end")

    def submit(self, prompt: tuple[int, ...], count: int) -> TokenStream:
        return self.engine.submit(GenerateCall("r", prompt, Sampling(temperature=0.0), count, frozenset()))

    def finish(self, *streams: TokenStream) -> list[list[int]]:
        self.hear_until(lambda: all(stream.finished for stream in streams))
        return [unread(stream) for stream in streams]

    def flip(self, to: str) -> FlipRecord:
        """To its end; it has to be committed."""
        record = self.engine.flip_ask(to)
        self.hear_until(lambda: record.over)
        assert record.state == "committed", record.reason
        return record

    def flip_plans(self) -> list[int]:
        return [seq for seq, plan in self.plans.items() if plan.flip is not None]

    def lying(self, label: str) -> list[Stamp]:
        """Stamps of messages under a label that were sent and not taken."""
        queues = [queue for key, queue in self.wire.arrivals.items() if key[0] == "channel"]
        return [mark[1] for queue in queues for _, (mark, _) in queue if mark[1].label == label]


# ----------------------------------------------------------------- of an engine over a fleet that is played by hand


def answered(fleet: SimFleet, record: FlipRecord, most: int) -> int:
    """How many answers the flip needed to end; it may take `most`."""
    for count in range(most):
        if record.over:
            return count
        assert fleet.plans, f"the flip is {record.state}, and nothing more will come"
        fleet.answer()
    assert record.over, f"the flip is still {record.state} after {most} answers"
    return most


def committed(fleet: SimFleet, to: str) -> int:
    """A flip: how many answers it needed. What was in flight, and four plans of its own, are the most."""
    in_flight = len(fleet.plans)
    record = fleet.engine.flip_ask(to)
    count = answered(fleet, record, in_flight + 4)
    assert record.state == "committed", record.reason
    return count


async def ends_right(fleet: SimFleet, *calls: Asked) -> None:
    fleet.answer_all()
    for each in calls:
        assert each.stream.finished
        await asyncio.wait_for(each.read(), 5)
        each.check()


def long_prompt(count: int) -> tuple[int, ...]:
    return tuple(n % 40 + 8 for n in range(count))


def long_answers(count: int, tokens: int = 40) -> list[tuple[int, ...]]:
    found = [prompt for n in range(200) if len(answer(prompt := (9, 8, n), tokens)) == tokens]
    return found[:count]
