"""Several layouts of one model on a CPU rank, one of them active: what a flip does to this rank's memory.

    arena     one mapping, as long as the longest layout's weights. Every program addresses it from the same base, and
              it holds the weights of the active one
    pools     KV rows and states of each layout in mappings of their own. Addresses are reserved once; only the active
              layout's hold memory (`release` gives the pages back, `map` has the system hold the other's; where nothing
              is live they come beside the work that follows: `backends.cpu.backing`)
    programs  recorded once each, at load. Nothing of them changes at a flip: not an address in them moves

Where weights come from (`Source`): one packed copy of the model that all ranks hold together (`CopySource`), or an
image of each layout (`backends.cpu.images`). A load fills the arena as a flip does, once for each layout, the active
one last; what it reads back from there is the digest that each later filling has to have.

    load      pack the copy with the others ─▶ for each layout: fill the arena, read it back, keep its digest
    flip      release ─▶ map ─▶ write ─▶ refill (once more where the digest differs) ─▶ activate

The digest of a refill is of the arena, not of the source: each block is loaded from there again as soon as the next one
is copied (`Pieces.fill`), so a second pass over all of it is not needed to know what lies there. A source that has
changed, a copy that went to the wrong place and a store that did not arrive are all found by it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from backends.base import (
    Binding,
    LoadProgress,
    MemoryRegion,
    PoolRuns,
    Refilled,
    RefillFailed,
    Shared,
    WeightHome,
)
from backends.cpu.backing import Backing, can_populate
from backends.cpu.fills import Fill
from backends.cpu.images import ImageSource
from backends.cpu.moves import pieces_of
from backends.cpu.pieces import Pieces, address_of
from backends.cpu.pools import CpuPools, all_of
from backends.cpu.record import Plan
from backends.cpu.shared import SharedWeights, pack_together
from backends.host.collective import HostCollective
from backends.host.memory import Mapping as MemoryMapping
from backends.host.memory import SharedMapping

if TYPE_CHECKING:
    from backends.cpu.backend import CpuBackend, CpuProgram

TRIES = 2
"""How often an arena is filled before the rank gives up."""


class Source(Protocol):
    """Where the weights of each layout come from."""

    def load(self, name: str, arena: int) -> int:
        """Fill the arena, which is all zeros, for the first time. Returns the digest of what was put there."""
        ...

    def pieces(self, name: str) -> Pieces:
        """Where the bytes of the arena in layout `name` lie now."""
        ...

    def not_ready(self, name: str) -> str:
        """Why there are no `pieces` now; empty: there are. Whoever asks wants them: what has failed may be tried
        again."""
        ...

    def activated(self, name: str) -> None:
        """The arena holds the weights of `name`, and will until it is filled again."""
        ...

    def memory_lines(self) -> Mapping[str, int]: ...

    @property
    def notes(self) -> tuple[str, ...]: ...

    def memory_regions(self) -> tuple[MemoryRegion, ...]: ...

    def close(self) -> None: ...


@dataclass
class Bound:
    """One layout: its pools, the bytes and the digest of its weights in the arena, its program once it is recorded."""

    pools: CpuPools
    arena_bytes: int
    digest: int = 0
    program: CpuProgram | None = None


class CopySource:
    """One packed copy of the whole model in memory of all ranks."""

    def __init__(
        self,
        backend: CpuBackend,
        plans: Mapping[str, Plan],
        together: SharedWeights,
        collective: HostCollective,
        progress: LoadProgress,
    ) -> None:
        self._library, self._team = backend.library, backend.team
        self._fills: dict[str, Fill] = {}
        self._copy: SharedMapping = pack_together(
            backend.library, backend.team, together, collective, "weights copy", progress
        )
        try:
            for name, plan in plans.items():
                self._fills[name] = Fill(backend.library, backend.team, plan.weights, together, progress)
        except BaseException:
            self.close()
            raise

    def load(self, name: str, arena: int) -> int:
        return self.pieces(name).pack(self._library, self._team, arena)

    def pieces(self, name: str) -> Pieces:
        return self._fills[name].pieces

    def not_ready(self, name: str) -> str:
        return ""

    def activated(self, name: str) -> None:
        """The copy serves every layout."""

    @property
    def notes(self) -> tuple[str, ...]:
        return ()

    def memory_lines(self) -> Mapping[str, int]:
        """Of the copy each rank tells what it has packed, so that together they tell all of it."""
        sides = sum(fill.side.size for fill in self._fills.values())
        return {self._copy.purpose: self._copy.filled_here} | ({"weights side": sides} if sides else {})

    def memory_regions(self) -> tuple[MemoryRegion, ...]:
        held: list[MemoryMapping | SharedMapping] = [self._copy, *(fill.side for fill in self._fills.values())]
        return tuple(MemoryRegion(each.purpose, each.address, each.size) for each in held if each.size)

    def close(self) -> None:
        for fill in self._fills.values():
            fill.close()
        self._copy.close()


class CpuLayouts:
    """`Layouts` of a CPU rank."""

    def __init__(
        self,
        backend: CpuBackend,
        bindings: Sequence[Binding],
        plans: Mapping[str, Plan],
        collective: HostCollective,
        home: WeightHome,
        progress: LoadProgress,
    ) -> None:
        self._library, self._team = backend.library, backend.team
        self._bounds: dict[str, Bound] = {}
        self._progress = progress
        self._source: Source | None = None
        self._backing: Backing | None = None
        self.active = bindings[0].name
        sizes = {name: plan.weights.arena.size for name, plan in plans.items()}
        of = " and ".join(f"{size} bytes of the {name} layout" for name, size in sizes.items())
        self._arena = MemoryMapping(backend.library, max(sizes.values()), "weights", f"the larger of {of}")
        try:
            for each in bindings:
                pools = CpuPools(backend.library, each.kv, each.states)
                self._bounds[each.name] = Bound(pools, sizes[each.name])
            for plan in plans.values():
                plan.weights.arena.place(self._arena.address)
            self._source = _open_source(backend, bindings, plans, collective, home, progress)
            for name in reversed(list(plans)):
                self._fill_first(name)
            self._source.activated(self.active)
            self._bounds[self.active].pools.commit(self._team, progress)
            for name, plan in plans.items():
                bound = self._bounds[name]
                bound.program = backend.program(plan, progress, all_of(bound.pools), self._arena.address)
        except BaseException:
            self.close()
            raise

    @property
    def program(self) -> CpuProgram:
        """Raises MemoryError where the memory of its pools did not come."""
        if self._backing is not None and self._backing.failure is not None:
            raise self._backing.failure
        program = self._bounds[self.active].program
        assert program is not None, "made with this"
        return program

    def not_ready(self, name: str) -> str:
        if name not in self._bounds:
            return f"there is no {name} layout here, there is {' and '.join(self._bounds)}"
        return self._weights.not_ready(name)

    def run_bytes(self, name: str, runs: PoolRuns) -> int:
        return pieces_of(self._bounds[name].pools, runs).nbytes

    def pack(self, runs: PoolRuns, out: memoryview) -> int:
        pieces = pieces_of(self._bounds[self.active].pools, runs)
        if pieces.nbytes != out.nbytes:
            raise ValueError(f"room for {out.nbytes} bytes, the rows are {pieces.nbytes}")
        return pieces.pack(self._library, self._team, address_of(out))

    def digest(self, payload: memoryview) -> int:
        return int(self._library.hs_digest(self._team, address_of(payload), payload.nbytes))

    def release(self) -> None:
        self._end_backing()
        self._bounds[self.active].pools.release()

    def map(self, name: str, *, writes: bool = True) -> None:
        """Rows that are written lie in nearly every huge page of a pool, so all of it is had before; without any, it
        can come beside the work that follows."""
        if writes or not can_populate():
            self._bounds[name].pools.commit(self._team, self._progress)

    def settle(self) -> None:
        """Wait until all of the active layout's pools is held. Raises MemoryError."""
        if self._backing is not None:
            self._backing.join()
            if self._backing.failure is not None:
                raise self._backing.failure

    def _end_backing(self) -> None:
        if self._backing is not None:
            self._backing.end()
            self._backing = None

    def write(self, name: str, runs: PoolRuns, payload: memoryview) -> None:
        pieces = pieces_of(self._bounds[name].pools, runs)
        if pieces.nbytes != payload.nbytes:
            raise ValueError(f"a payload of {payload.nbytes} bytes for rows of {pieces.nbytes}")
        pieces.unpack(self._library, self._team, address_of(payload))

    def refill(self, name: str, *, spoilt: bool = False) -> Refilled:
        wanted, found = self._bounds[name].digest, []
        for tries in range(1, TRIES + 1):
            pieces = self._weights.pieces(name)
            if spoilt and tries == 1:
                pieces = pieces.spoilt()
            digest = pieces.fill(self._library, self._team, self._arena.address)
            if digest == wanted:
                return Refilled(pieces.nbytes, tries, digest)
            found.append(f"{digest:016x}")
        raise RefillFailed(
            f"the weights of the {name} layout were filled in {TRIES} times and have the digests {', '.join(found)}"
            f" where they lie; at load it was {wanted:016x}"
        )

    def arena_digest(self, name: str) -> int:
        """Of the weights of layout `name`, read from where programs read them."""
        size = self._bounds[name].arena_bytes
        return int(self._library.hs_digest(self._team, self._arena.address, size))

    def activate(self, name: str) -> None:
        self.active = name
        self._weights.activated(name)
        if can_populate():
            self._backing = Backing(self._bounds[name].pools.own_mappings())
            self._backing.start()

    @property
    def notes(self) -> tuple[str, ...]:
        """What of the weights' home is not as it was asked for."""
        return self._weights.notes

    def memory_lines(self) -> Mapping[str, int]:
        lines = {"weights": self._arena.size} | dict(self._weights.memory_lines())
        lines |= self._bounds[self.active].pools.memory_lines()
        for program in self._programs:
            for line, size in program.memory_lines().items():
                lines[line] = lines.get(line, 0) + size
        return lines

    def memory_regions(self) -> tuple[MemoryRegion, ...]:
        """Those of pools that hold no memory among them: their addresses are reserved."""
        arena = MemoryRegion("weights", self._arena.address, self._arena.size)
        pools = [region for bound in self._bounds.values() for region in bound.pools.memory_regions()]
        programs = [region for program in self._programs for region in program.memory_regions()]
        return (*([arena] if arena.bytes else []), *self._weights.memory_regions(), *pools, *programs)

    def close(self) -> None:
        """Give the memory back, and the source its files."""
        self._end_backing()
        for program in self._programs:
            program.close()
        if self._source is not None:
            self._source.close()
        for bound in self._bounds.values():
            bound.pools.close()
        self._arena.close()

    @property
    def _weights(self) -> Source:
        assert self._source is not None, "opened with this"
        return self._source

    @property
    def _programs(self) -> list[CpuProgram]:
        return [bound.program for bound in self._bounds.values() if bound.program is not None]

    def _fill_first(self, name: str) -> None:
        """Fill the arena at load. What is read back from there must be what was put there."""
        bound = self._bounds[name]
        self._arena.release()
        copied = self._weights.load(name, self._arena.address)
        bound.digest = self.arena_digest(name)
        if bound.digest != copied:
            raise RefillFailed(
                f"the weights of the {name} layout have the digest {bound.digest:016x} where they lie, {copied:016x}"
                " was put there"
            )


def _open_source(
    backend: CpuBackend,
    bindings: Sequence[Binding],
    plans: Mapping[str, Plan],
    collective: HostCollective,
    home: WeightHome,
    progress: LoadProgress,
) -> Source:
    """Nothing that it keeps refers to the files of the model once every layout was loaded."""
    if home.kind == "images":
        weights = {name: plan.weights for name, plan in plans.items()}
        return ImageSource(backend.library, backend.team, weights, home, progress)
    if home.kind != "copy":
        raise ValueError(f"weights of layouts cannot come from {home.kind!r}: there is copy and images")
    fleet = [run for binding in bindings for run in binding.fleet]
    shared = Shared(home.rank, home.ranks, home.ops, home.weights, home.weights_fd, fleet)
    return CopySource(backend, plans, SharedWeights(backend.library, shared), collective, progress)
