"""The memory of a running server: what stays free is sampled from before the boot, what is held is measured on request.

    MemoryWatch   of the process   its corridor, from the first moment on; breaches of the floor
    ModelMemory   of one model     its plan's lines, where their bytes are found, and the steps of its flips

A breach of the floor becomes an event of `status`; those from before there is an engine to keep them wait for it.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping
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

if TYPE_CHECKING:
    from budget.plan import Plan
    from homeserve.engine.engine import Engine
    from homeserve.fleet import Fleet
    from homeserve.layouts.ranks import RankPlan
    from homeserve.text.grammars import GrammarHost
    from homeserve.text.templates import TemplateHost

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
    """Of one process. All methods are for the loop's thread. `phase` is what samples are marked with; it is called in
    the sampler's thread."""

    def __init__(self, floor_bytes: int, phase: Callable[[], str]) -> None:
        self.corridor = CorridorSampler(floor_bytes, phase, self._on_breach)
        self.model_files: Counter[str] = Counter()
        """Real paths of the files of every model that is in: their pages are cache, in whichever process they lie."""
        self._untold: deque[Breach] = deque(maxlen=UNTOLD_MAX)
        self._engines: list[Engine] = []
        self._plans: list[Plan] = []

    def start(self) -> None:
        self.corridor.start()

    async def stop(self) -> None:
        await asyncio.to_thread(self.corridor.stop)

    def planned(self, plan: Plan, files: Collection[str]) -> None:
        """A load goes by this plan: its floor holds from here on. `files`: real paths of the model's."""
        self._plans.append(plan)
        self.model_files.update(files)
        self._watch(plan)

    def forget(self, plan: Plan, files: Collection[str]) -> None:
        """The model of this plan is out."""
        self._plans = [each for each in self._plans if each is not plan]
        self.model_files.subtract(files)
        if self._plans:
            self._watch(self._plans[-1])

    def tell(self, engine: Engine) -> None:
        """There is an engine: what happened before becomes an event now, what happens from now on at once."""
        self._engines.append(engine)
        while self._untold:
            self._on_breach(self._untold.popleft())

    def tell_no_more(self, engine: Engine) -> None:
        self._engines.remove(engine)

    def _watch(self, plan: Plan) -> None:
        """The host is looked at by the highest floor of the plans; what is told of flips is of `plan`'s ranks."""
        cpu = plan.ceilings.devices[-1]
        floor = max(each.ceilings.devices[-1].floor_bytes for each in self._plans)
        # What ranks on cards hold at a flip lies there, and is not looked at.
        at_flip = flip_bytes(plan) if set(plan.ranks) == {cpu.index} else {}
        self.corridor.watch(HostFree(), (floor,), (cpu.index,), at_flip)

    def _on_breach(self, breach: Breach) -> None:
        if not self._engines:
            self._untold.append(breach)
        for engine in self._engines:
            engine.note("corridor_breach", text=words(breach))


class ModelMemory:
    """Of one loaded model."""

    def __init__(
        self,
        watch: MemoryWatch,
        plan: Plan,
        ranks: RankPlan,
        fleet: Fleet,
        engine: Engine,
        helpers: tuple[TemplateHost, GrammarHost],
    ) -> None:
        self._watch = watch
        self._plan = plan
        self._ranks = ranks
        self._fleet = fleet
        self._engine = engine
        self._templates, self._grammars = helpers
        self._host = plan.ceilings.devices[-1].index

    def budget(self, document: Mapping[str, Any], cards_root: str) -> MeasuredBudget:
        """The plan's document with what is held now beside it. `cards_root`: `Settings.cards_root`."""
        return MeasuredBudget(
            document,
            self._plan.lines,
            self.members,
            layout=lambda: self._engine.snapshot().layout or self._plan.layouts[0],
            cards=lambda: cards_free(self._plan, cards_root),
        )

    def watch_flips(self) -> None:
        """Look closely at every step of a flip."""
        self._engine.watch_flips(self._on_flip)

    def members(self) -> Members:
        """The processes of this model, and the engine's."""
        from homeserve.wire import segments

        on_cards = self._ranks.on_cards
        lines = self._fleet.lines() if on_cards else {}
        workers = tuple(
            Worker(
                pid,
                self._host,
                tuple(self._region(rank, *each) for each in regions),
                on_cards,
                card_lines(self._plan, rank, lines[rank]) if rank in lines else (),
            )
            for rank, pid, regions in self._fleet.regions()
        )
        folder = segments.folder()
        return Members(
            self._host,
            os.getpid(),
            workers,
            self._templates.pid,
            tuple(Path(folder, name) for name in self._fleet.shared_memory_names()),
            frozenset(+self._watch.model_files),
            self._templates.due,
            self._grammars.pid,
        )

    def _region(self, rank: int, line: str, address: int, size: int) -> Region:
        """A mapping of a rank under its line's name: of several ranks each has its own, but for what they share."""
        together = _TOGETHER if self._ranks.memory_domain == UNIFIED else ()
        own = self._ranks.ranks > 1 and not self._ranks.on_cards and line not in (*together, WEIGHTS_COPY)
        return Region(of_rank(line, rank) if own else line, address, size)

    def _on_flip(self, step: str | None) -> None:
        if step is None:
            self._watch.corridor.flip(None)
            return
        pids = tuple((rank, pid) for rank, pid, _ in self._fleet.regions())
        moment = ""
        if step != _DRAINING:
            record = self._engine.flip_records()[-1]
            moment = f"{COMMIT}, {record.to}" if step in _CHANGING else f"{PREPARE}, {record.source}"
        self._watch.corridor.flip(FlipStep(f"flip {step}", moment, pids))


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
