"""The memory of a running server: what stays free is sampled from before the boot, what is held is measured on request.

    start ─▶ CorridorSampler          from the first moment on
    planned ─▶ MeasuredBudget         once there is a plan: its document, its lines, and where their bytes are found

A breach of the floor becomes an event of `status`; those from before there is an engine to keep them wait for it.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from budget.corridor import Breach
from budget.facts import MIB
from budget.flip import COMMIT, PREPARE
from budget.host_lines import EXCHANGE, KV, SIDE, STAGING, STATE, WEIGHTS, WEIGHTS_COPY, WORKER_PROCESSES, of_rank
from budget.ledger import PIPELINE, TENSOR
from homeserve.corridor import CorridorSampler, FlipStep, HostFree, words
from homeserve.layouts.ranks import UNIFIED
from homeserve.measure import MeasuredBudget, Members, Region, Worker
from homeserve.server.context import ServerContext, State

if TYPE_CHECKING:
    from budget.facts import MemoryFacts
    from budget.plan import Plan
    from homeserve.checkpoint import Checkpoint
    from homeserve.engine.engine import Engine

UNTOLD_MAX = 16
HUGE_PAGE = 2 * MIB
_TOGETHER = (WEIGHTS, KV, STATE)
"""Lines that ranks of one memory hold together; a copy of the weights is held together in any case."""
_COUNTED_AS = {"weights arena": WEIGHTS}
"""Lines of the plan that a rank on a card calls otherwise."""
_UNFORESEEN = ("library",)
"""Lines of a card that no plan has: what a library that multiplies takes, where one is found and ahead."""
_PINNED = (STAGING, EXCHANGE, SIDE)
"""Lines of the host that a rank on a card counts."""
_DRAINING, _CHANGING = "draining", ("committing", "checking")
"""Steps of a flip (`engine.flip.FlipState`): before anything is packed, and from where the other layout's pools are."""


class MemoryWatch:
    """Of one application, whose context it fills in. All methods are for the loop's thread."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._sampler = CorridorSampler(context.settings.floor_mib * MIB, self._phase, self._on_breach)
        self._untold: deque[Breach] = deque(maxlen=UNTOLD_MAX)
        self._files: frozenset[str] = frozenset()
        self._host = 0
        self._plan: Plan | None = None

    def start(self) -> None:
        self._sampler.start()
        self._context.corridor = self._sampler

    async def stop(self) -> None:
        await asyncio.to_thread(self._sampler.stop)

    def planned(self, plan: Plan, memory: MemoryFacts | None, checkpoint: Checkpoint) -> None:
        """The plan that the load goes by: its floor holds from here on, and its lines will be measured."""
        from budget.document import document
        from budget.question import Question

        cpu = plan.ceilings.devices[-1]
        self._host, self._plan = cpu.index, plan
        self._files = frozenset(os.path.realpath(file.path) for file in checkpoint.files)
        # What ranks on cards hold at a flip lies there, and is not looked at.
        at_flip = flip_bytes(plan) if set(plan.ranks) == {cpu.index} else {}
        self._sampler.watch(HostFree(), (cpu.floor_bytes,), (cpu.index,), at_flip)
        body = document(plan.ceilings, memory, plan, plan.doubts, Question(self._context.settings.model))
        root = self._context.settings.cards_root
        self._context.budget = MeasuredBudget(
            body,
            plan.lines,
            self._members,
            layout=lambda: self._layout() or plan.layouts[0],
            cards=lambda: cards_free(plan, root),
        )

    def _layout(self) -> str:
        """The one that is in force, as far as there is an engine to say so."""
        engine = self._context.engine
        return engine.snapshot().layout if engine is not None else ""

    def tell(self) -> None:
        """There is an engine: what happened before becomes an event now."""
        while self._untold:
            self._on_breach(self._untold.popleft())

    def watch_flips(self, engine: Engine) -> None:
        """Look closely at every step of a flip of this engine."""
        engine.watch_flips(self._on_flip)

    async def rows(self) -> list[dict[str, Any]]:
        """Predicted against measured, line by line; empty before there is a plan."""
        budget = self._context.budget
        return [] if budget is None else list((await budget.as_json())["measured"])

    # ------------------------------------------------------------------------------------------------------- inside

    def _members(self) -> Members:
        from homeserve.wire import segments

        fleet, templates, grammars = self._context.fleet, self._context.templates, self._context.grammars
        assert fleet is not None, "what is loaded is measured"
        ranks = self._context.ranks
        several = ranks is not None and ranks.ranks > 1
        ranks_on_cards = ranks is not None and ranks.on_cards
        together = _TOGETHER if ranks is not None and ranks.memory_domain == UNIFIED else ()

        def region(rank: int, line: str, address: int, size: int) -> Region:
            own = several and not ranks_on_cards and line not in (*together, WEIGHTS_COPY)
            return Region(of_rank(line, rank) if own else line, address, size)

        lines = fleet.lines() if ranks_on_cards else {}
        workers = tuple(
            Worker(
                pid,
                self._host,
                tuple(region(rank, *each) for each in regions),
                ranks_on_cards,
                card_lines(self._plan, rank, lines[rank]) if rank in lines and self._plan is not None else (),
            )
            for rank, pid, regions in fleet.regions()
        )
        folder = segments.folder()
        return Members(
            self._host,
            os.getpid(),
            workers,
            templates.pid if templates is not None else None,
            tuple(Path(folder, name) for name in fleet.shared_memory_names()),
            self._files,
            templates is not None and templates.due,
            grammars.pid if grammars is not None else None,
        )

    def _phase(self) -> str:
        """Of the load its stage, afterwards the state. Called in the sampler's thread."""
        state = self._context.state()
        return self._context.load().stage if state == State.LOADING.value else state

    def _on_flip(self, step: str | None) -> None:
        fleet, engine = self._context.fleet, self._context.engine
        if step is None or fleet is None or engine is None:
            self._sampler.flip(None)
            return
        pids = tuple((rank, pid) for rank, pid, _ in fleet.regions())
        moment = ""
        if step != _DRAINING:
            record = engine.flip_records()[-1]
            moment = f"{COMMIT}, {record.to}" if step in _CHANGING else f"{PREPARE}, {record.source}"
        self._sampler.flip(FlipStep(f"flip {step}", moment, pids))

    def _on_breach(self, breach: Breach) -> None:
        engine = self._context.engine
        if engine is None:
            self._untold.append(breach)
        else:
            engine.note("corridor_breach", text=words(breach))


def card_lines(plan: Plan, rank: int, counted: Mapping[str, int]) -> tuple[tuple[int, str, int], ...]:
    """(device, line of the plan, bytes) of what a rank on a card has counted at its load, in the layout that the plan
    begins with: its arena is the plan's `weights arena`, its rows are those of that layout. What it pins of the host's
    memory are lines there; a copy of the weights is found by its address (`homeserve.measure`)."""
    device, first, host = plan.ranks[rank], plan.layouts[0], plan.ceilings.devices[-1].index
    found = []
    for line in plan.lines:
        name, _, layout = line.name.partition(", ")
        size = counted.get(_COUNTED_AS.get(name, name))
        there = line.device == device or (line.device == host and name in _PINNED)
        if there and first in line.held and layout in ("", first) and size is not None:
            found.append((line.device, line.name, size))
    found += [(device, name, counted[name]) for name in _UNFORESEEN if counted.get(name)]
    return tuple(dict.fromkeys(found))


def cards_free(plan: Plan, root: str) -> dict[int, tuple[int, int] | None]:
    """Of each card that has ranks the free bytes that its driver told when the plan was made, and tells now; None where
    it does not. `root`: where the probe looks for cards (`Settings.cards_root`)."""
    from budget.ceilings import ceilings
    from budget.probe import Sources, read_box

    devices = [plan.ceilings.devices[index] for index in plan.ranks]
    cards = [device for device in devices if device.kind != "cpu"]
    if not cards:
        return {}
    seen = ceilings(read_box(Sources(cards=root or None)), None).devices
    now = {device.id: device.free_bytes for device in seen}
    found: dict[int, tuple[int, int] | None] = {}
    for device in cards:
        before, after = device.free_bytes, now.get(device.id)
        found[device.index] = None if before is None or after is None else (before, after)
    return found


def flip_bytes(plan: Plan) -> dict[tuple[int, str], int]:
    """What each rank may hold by itself at each moment of a flip, its process included. Lines that ranks hold together
    lie in shared memory, and are no rank's own; of its own ones each is a mapping, in whole huge pages. A commit begins
    with the pools of the layout that is left and ends with those of the other one: the larger ones count."""
    process = sum(line.bytes for line in plan.lines if line.name == WORKER_PROCESSES) // len(plan.ranks)
    allowed = {}
    for rank in range(len(plan.ranks)):
        mappings = len({line.name for line in plan.lines if line.name.endswith(of_rank("", rank))})
        for moment, of_ranks in plan.flip.peaks.items():
            most = of_ranks[rank]
            step, _, layout = moment.partition(", ")
            if step == COMMIT:
                source = TENSOR if layout == PIPELINE else PIPELINE
                most = max(most, plan.flip.peaks[f"{PREPARE}, {source}"][rank])
            allowed[rank, moment] = most + process + mappings * HUGE_PAGE
    return allowed
