"""Several layouts of one model on a card, one of them active: what a flip does to this rank's memory.

    arena     one allocation, as long as the longest layout's weights. Every program addresses it from one base, and
              it holds the weights of the active one
    pools     KV rows and states of each layout behind addresses of their own, reserved once. Only the active layout's
              hold memory: `release` gives it back to the card, and then `map` has the other's, zeroed
    programs  bound once each, at load, while the arena holds their weights. Nothing of them changes at a flip: not an
              address in a recording moves

Where weights come from (`Home`): one copy of the model's file that all ranks hold together (`backends.gpu.copies`), or
an image of the arena in each layout (`backends.gpu.images`). A load fills the arena as a flip does, once for each
layout, the active one last; the digest of what lies on the card then is the one that each later filling has to have.

    load      fill the copy with the others ─▶ for each layout: fill the arena, keep its digest
    flip      release ─▶ map ─▶ write ─▶ refill (once more where the digest differs) ─▶ activate

The digest is of the arena, read on the card: a source that has changed, bytes that were lost on the bus, a kernel that
packed them elsewhere, and a store that did not arrive are all found by it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from backends.base import (
    Binding,
    Collective,
    LoadProgress,
    MemoryRegion,
    PoolRuns,
    Program,
    Refilled,
    RefillFailed,
    WeightHome,
)
from backends.gpu.copies import FileCopy
from backends.gpu.device import Device, Memory
from backends.gpu.images import ImageHome
from backends.gpu.moves import CardMoves, Pieces, pieces_of
from backends.gpu.pools import GpuPools
from backends.gpu.staging import FLIP_LINE, STAGING_BYTES, Staging
from backends.gpu.weights import CardWeights, fill
from backends.host import library
from backends.host.digest import digest
from backends.host.team import Team

TRIES = 2
"""How often an arena is filled before the rank gives up."""

MakeProgram = Callable[[Binding, CardWeights, GpuPools], Program]
"""The program of a layout, whose weights lie in the arena at that moment and whose pools have addresses and may hold no
memory."""


class Home(Protocol):
    """Where the weights of each layout come from. Arenas are placed."""

    @property
    def load_order(self) -> Sequence[str]:
        """Layouts in the order in which a load fills the arena; the active one is the last."""
        ...

    def load(self, name: str, progress: LoadProgress) -> None:
        """Fill the arena from the model's files, or from what was made of them together."""
        ...

    def loaded(self, name: str, digest: int) -> None:
        """It is filled with `name`, and has this digest."""
        ...

    def refill(self, name: str) -> int:
        """Fill it again; returns the bytes that were copied."""
        ...

    def not_ready(self, name: str) -> str:
        """Why there can be no `refill` now; empty: there can. Whoever asks wants it: what has failed may be tried
        again."""
        ...

    def activated(self, name: str) -> None:
        """The arena holds the weights of `name`, and will until it is filled again."""
        ...

    @property
    def notes(self) -> tuple[str, ...]: ...

    def memory_lines(self) -> Mapping[str, int]: ...

    def memory_regions(self) -> tuple[MemoryRegion, ...]: ...

    def close(self) -> None: ...


@dataclass
class Bound:
    """One layout: its weights and pools, the digest of the weights where they lie, its program once it is bound."""

    weights: CardWeights
    pools: GpuPools
    digest: int = 0
    program: Program | None = None


class CopyHome:
    """One copy of the model's file in memory of all ranks."""

    def __init__(self, device: Device, staging: Staging, copy: FileCopy, layouts: Mapping[str, CardWeights]) -> None:
        self._device, self._staging, self._copy = device, staging, copy
        self._layouts = dict(layouts)
        for weights in layouts.values():
            weights.forget_files()

    @property
    def load_order(self) -> Sequence[str]:
        return tuple(reversed(self._layouts))

    def load(self, name: str, progress: LoadProgress) -> None:
        fill(self._device, self._staging, self._layouts[name], self._copy.of(name), progress)

    def loaded(self, name: str, digest: int) -> None:
        """The copy keeps nothing of an arena."""

    def refill(self, name: str) -> int:
        fill(self._device, self._staging, self._layouts[name], self._copy.of(name))
        return self._layouts[name].source_bytes

    def not_ready(self, name: str) -> str:
        return ""

    def activated(self, name: str) -> None:
        """The copy serves every layout."""

    @property
    def notes(self) -> tuple[str, ...]:
        return ()

    def memory_lines(self) -> Mapping[str, int]:
        return self._copy.memory_lines()

    def memory_regions(self) -> tuple[MemoryRegion, ...]:
        return self._copy.memory_regions()

    def close(self) -> None:
        self._copy.close()


class GpuLayouts:
    """`Layouts` of a card. Raises what a bind raises: MemoryError with the arithmetic, ExchangeError, ValueError,
    NativeLibraryError; DriverError on a card without virtual memory; RefillFailed where what was loaded does not lie
    there."""

    def __init__(
        self,
        device: Device,
        bindings: Sequence[Binding],
        collective: Collective,
        home: WeightHome,
        progress: LoadProgress,
        make_program: MakeProgram,
        staging_bytes: int = STAGING_BYTES,
    ) -> None:
        self._device = device
        self._bounds: dict[str, Bound] = {}
        self._home: Home | None = None
        self._staging: Staging | None = None
        self._arena: Memory | None = None
        self._team = Team(library.load(), 1)
        self.active = bindings[0].name
        try:
            for each in bindings:
                weights = CardWeights(each.ops, each.weights)
                self._bounds[each.name] = Bound(weights, GpuPools(device, each.kv, each.states, in_turns=True))
            self._arena = self._allocate()
            self._staging = Staging(device, FLIP_LINE, staging_bytes)
            self._moves = CardMoves(device, self._staging)
            self._home = self._open_home(bindings, collective, home, progress)
            by_name = {each.name: each for each in bindings}
            for name in self._home.load_order:
                self._fill_first(name, progress)
                bound = self._bounds[name]
                if bound.program is None:
                    bound.program = make_program(by_name[name], bound.weights, bound.pools)
            self._home.activated(self.active)
            self._bounds[self.active].pools.commit()
        except BaseException:
            self.close()
            raise

    def _allocate(self) -> Memory:
        sizes = {name: bound.weights.nbytes for name, bound in self._bounds.items()}
        of = " and ".join(f"{size} bytes of the {name} layout" for name, size in sizes.items())
        arena = self._device.allocate(max(*sizes.values(), 1), "weights", f"the larger of {of}")
        for bound in self._bounds.values():
            bound.weights.place(arena.address)
        return arena

    def _open_home(
        self, bindings: Sequence[Binding], collective: Collective, home: WeightHome, progress: LoadProgress
    ) -> Home:
        weights = {name: bound.weights for name, bound in self._bounds.items()}
        if home.kind == "images":
            return ImageHome(self._device, self._held_staging, self._team.library, weights, home)
        if home.kind != "copy":
            raise ValueError(f"weights of layouts cannot come from {home.kind!r}: there is copy and images")
        fleet = [run for binding in bindings for run in binding.fleet]
        copy = FileCopy(self._device, home, fleet, weights, collective, progress)
        return CopyHome(self._device, self._held_staging, copy, weights)

    def _fill_first(self, name: str, progress: LoadProgress) -> None:
        bound = self._bounds[name]
        self._weights.load(name, progress)
        found = self.arena_digest(name)
        if bound.digest not in (0, found):
            raise RefillFailed(
                f"the weights of the {name} layout were loaded twice to {self._device.facts.told}, and have the digests"
                f" {bound.digest:016x} and {found:016x} there"
            )
        bound.digest = found
        self._weights.loaded(name, found)

    # ------------------------------------------------------------------------------------------------------ as Layouts

    @property
    def program(self) -> Program:
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
        pieces = self._pieces(self.active, runs)
        if pieces.nbytes != out.nbytes:
            raise ValueError(f"room for {out.nbytes} bytes, the rows are {pieces.nbytes}")
        return self._moves.pack(pieces, out)

    def digest(self, payload: memoryview) -> int:
        return digest(payload, self._team)

    def release(self) -> None:
        self._bounds[self.active].pools.release()

    def map(self, name: str, *, writes: bool = True) -> None:
        """All of it at once: a card backs addresses in a few calls, and has nobody else to do it."""
        self._bounds[name].pools.commit()

    def write(self, name: str, runs: PoolRuns, payload: memoryview) -> None:
        pieces = self._pieces(name, runs)
        if pieces.nbytes != payload.nbytes:
            raise ValueError(f"a payload of {payload.nbytes} bytes for rows of {pieces.nbytes}")
        self._moves.unpack(pieces, payload)

    def _pieces(self, name: str, runs: PoolRuns) -> Pieces:
        """A card that reads or writes where no memory is is lost, so that is found here."""
        pools = self._bounds[name].pools
        if not pools.backed:
            raise ValueError(f"the pools of the {name} layout hold no memory now")
        return pieces_of(pools, runs)

    def refill(self, name: str, *, spoilt: bool = False) -> Refilled:
        wanted, found = self._bounds[name].digest, []
        for tries in range(1, TRIES + 1):
            nbytes = self._weights.refill(name)
            if spoilt and tries == 1:
                self._moves.turn_bit(self._held_arena.address)
            lies_there = self.arena_digest(name)
            if lies_there == wanted:
                return Refilled(nbytes, tries, lies_there)
            found.append(f"{lies_there:016x}")
        raise RefillFailed(
            f"the weights of the {name} layout were filled in {TRIES} times and have the digests {', '.join(found)}"
            f" where they lie on {self._device.facts.told}; at load it was {wanted:016x}"
        )

    def arena_digest(self, name: str) -> int:
        """Of the weights of layout `name`, read from where programs read them."""
        return self._moves.digest(self._held_arena.address, self._bounds[name].weights.nbytes)

    def activate(self, name: str) -> None:
        self.active = name
        self._weights.activated(name)

    @property
    def notes(self) -> tuple[str, ...]:
        """What of the weights' home is not as it was asked for."""
        return self._weights.notes

    def memory_lines(self) -> Mapping[str, int]:
        lines = {"weights": self._held_arena.nbytes, FLIP_LINE: self._held_staging.card_bytes}
        lines |= dict(self._weights.memory_lines())
        lines |= self._bounds[self.active].pools.memory_lines()
        for program in self._programs:
            for line, size in program.memory_lines().items():
                lines[line] = lines.get(line, 0) + size
        return lines

    def memory_regions(self) -> tuple[MemoryRegion, ...]:
        """Of the host's memory alone."""
        programs = [region for program in self._programs for region in program.memory_regions()]
        return (*self._weights.memory_regions(), *programs)

    def close(self) -> None:
        """Give the memory back, and the home its files."""
        for program in self._programs:
            program.close()
        if self._home is not None:
            self._home.close()
        for bound in self._bounds.values():
            bound.pools.close()
        if self._staging is not None:
            self._staging.close()
        if self._arena is not None:
            self._arena.close()
        self._team.close()

    @property
    def _weights(self) -> Home:
        assert self._home is not None, "opened with this"
        return self._home

    @property
    def _held_staging(self) -> Staging:
        assert self._staging is not None, "had with this"
        return self._staging

    @property
    def _held_arena(self) -> Memory:
        assert self._arena is not None, "had with this"
        return self._arena

    @property
    def _programs(self) -> list[Program]:
        return [bound.program for bound in self._bounds.values() if bound.program is not None]
