"""A layout as one rank lives in it, and the programs of a model that are there at once.

A rank is bound to one layout, or to two that take turns. What differs for the worker is small and all of it here: where
the engine's pages lie (`places`), whether the rank looks up rows by token, and who is told of drawn tokens. The last
rank draws in both layouts, so sampling, penalties and seeds know nothing of a flip.

    Side "pipeline"   pages at their own places     rank 0 embeds and is told
    Side "tensor"     pages by the owner rule       every rank embeds, all but the last are told
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from backends.base import Collective, MemoryRegion, PoolRuns, Pools, Program, Refilled
from homeserve.worker.drawn import Drawn, TokenReceiver, TokenSender
from homeserve.worker.places import PagePlaces


@dataclass(frozen=True)
class Side:
    """Layout `name` on `rank` of `ranks`. `layers` are [first, end) of the pipeline layout, None where every rank has a
    part of each. `embedding_ranks` look up rows by token; `draws`: the logits come here. `drafting_block`: some or all
    of the block that drafts is here; `drafts`: the most tokens that a row may draft in this layout (0: none)."""

    name: str
    rank: int
    ranks: int
    layers: tuple[int, int] | None
    places: PagePlaces | None
    embedding_ranks: tuple[int, ...]
    draws: bool
    drafting_block: bool = False
    drafts: int = 0

    @property
    def embeds(self) -> bool:
        return self.rank in self.embedding_ranks

    def sender(self, collective: Collective | None) -> TokenSender | None:
        """This rank's end, where it draws."""
        if collective is None or not self.draws:
            return None
        return TokenSender(collective, [target for target in self.embedding_ranks if target != self.rank])

    def receiver(
        self, collective: Collective | None, in_flight: int, take: Callable[[Drawn], None]
    ) -> TokenReceiver | None:
        """This rank's end, where it embeds what another one draws."""
        if collective is None or self.draws or not self.embeds:
            return None
        return TokenReceiver(collective, self.ranks - 1, in_flight, take)


class InPlace:
    """Layouts whose programs, weights and rows are all there at once: one alone, or several over memory that the ranks
    hold together. Nothing is given back, filled or moved when they take turns."""

    def __init__(self, programs: Mapping[str, Program], active: str, pools: Pools | None = None) -> None:
        self._programs = programs
        self._pools = pools
        self.active = active

    @property
    def program(self) -> Program:
        return self._programs[self.active]

    def not_ready(self, name: str) -> str:
        return "" if name in self._programs else f"there is no {name} layout here"

    def run_bytes(self, name: str, runs: PoolRuns) -> int:
        return 0

    def pack(self, runs: PoolRuns, out: memoryview) -> int:
        raise AssertionError("rows of memory that ranks hold together do not move")

    def digest(self, payload: memoryview) -> int:
        raise AssertionError("rows of memory that ranks hold together do not move")

    def release(self) -> None:
        """Both layouts use the same pools."""

    def map(self, name: str, *, writes: bool = True) -> None:
        """They are mapped."""

    def write(self, name: str, runs: PoolRuns, payload: memoryview) -> None:
        raise AssertionError("rows of memory that ranks hold together do not move")

    def refill(self, name: str, *, spoilt: bool = False) -> Refilled:
        return Refilled(0, 0, 0)

    def activate(self, name: str) -> None:
        self.active = name

    def memory_lines(self) -> Mapping[str, int]:
        lines: dict[str, int] = {}
        for held in self._held:
            for line, size in held.memory_lines().items():
                lines[line] = lines.get(line, 0) + size
        return lines

    def memory_regions(self) -> tuple[MemoryRegion, ...]:
        return tuple(region for held in self._held for region in held.memory_regions())

    def close(self) -> None:
        for held in self._held:
            held.close()

    @property
    def _held(self) -> Sequence[Program | Pools]:
        return [*self._programs.values(), *([self._pools] if self._pools is not None else [])]
