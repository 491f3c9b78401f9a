"""Several layouts of one model on the reference backend: programs with arrays of their own.

`release` drops the arrays of pools and `map` makes zeros again; a refill dequantises the weights anew. A payload holds
rows as they lie in the arrays: of each layer and page K [16, kv_heads, head_dim], then V; of each state slot and layer
the window's channels row by row, then the heads, if it has some. Slow, and obvious.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from backends.base import NO_STATES, PAGE_LEN, Binding, KvPool, MemoryRegion, PoolRuns, Refilled, RefillFailed
from backends.digest import digest
from backends.reference.compute import Array
from backends.reference.delta import States
from backends.reference.pools import Pools
from backends.reference.program import ReferenceProgram

Make = Callable[[Binding], ReferenceProgram]
TRIES = 2


class ReferenceLayouts:
    """`Layouts` of the reference backend. `make` binds one layout."""

    def __init__(self, bindings: Sequence[Binding], make: Make) -> None:
        self._bindings = {each.name: each for each in bindings}
        self._make = make
        self._programs = {each.name: make(each) for each in bindings}
        self._digests = {name: self.arena_digest(name) for name in self._programs}
        self.active = bindings[0].name
        for name in self._programs:
            if name != self.active:
                self._empty(name)
                self._programs[name].weights = {}

    @property
    def program(self) -> ReferenceProgram:
        return self._programs[self.active]

    def not_ready(self, name: str) -> str:
        return "" if name in self._programs else f"there is no {name} layout here"

    def run_bytes(self, name: str, runs: PoolRuns) -> int:
        binding = self._bindings[name]
        size = self._programs[name].dtype.itemsize
        shapes = binding.kv.layers
        storage = Pools(KvPool((), 0, binding.kv.type), self._programs[name].dtype).itemsize
        rows = sum(
            len(pages) * PAGE_LEN * 2 * shapes[layer].kv_heads * shapes[layer].head_dim
            for layers, pages in runs.kv
            for layer in layers
        )
        floats = 0
        for layer, channels, heads in runs.parts:
            shape = binding.states.layers[layer]
            floats += (shape.kernel - 1) * _count(channels) + _count(heads) * shape.key_dim * shape.value_dim
        return rows * storage + len(runs.states) * floats * size

    def pack(self, runs: PoolRuns, out: memoryview) -> int:
        parts = [np.ascontiguousarray(view).reshape(-1).view(np.uint8) for view in self._views(self.active, runs)]
        data = np.concatenate(parts) if parts else np.zeros(0, np.uint8)
        if len(data) != out.nbytes:
            raise ValueError(f"room for {out.nbytes} bytes, the rows are {len(data)}")
        out.cast("B")[:] = data.tobytes()
        return self.digest(out)

    def digest(self, payload: memoryview) -> int:
        return digest(payload)

    def release(self) -> None:
        self._empty(self.active)

    def map(self, name: str, *, writes: bool = True) -> None:
        binding, program = self._bindings[name], self._programs[name]
        program.pools = Pools(binding.kv, program.dtype)
        program.states = States(binding.states, program.dtype)

    def write(self, name: str, runs: PoolRuns, payload: memoryview) -> None:
        wanted = self.run_bytes(name, runs)
        if payload.nbytes != wanted:
            raise ValueError(f"a payload of {payload.nbytes} bytes for rows of {wanted}")
        data, at = np.frombuffer(payload, np.uint8), 0
        for view in self._views(name, runs):
            view[...] = data[at : at + view.nbytes].view(view.dtype).reshape(view.shape)
            at += view.nbytes

    def refill(self, name: str, *, spoilt: bool = False) -> Refilled:
        program = self._programs[name]
        if name != self.active:
            self.program.weights = {}
        found = 0
        for tries in range(1, TRIES + 1):
            program.weights = self._make(self._bindings[name]).weights
            if spoilt and tries == 1:
                program.weights = _spoilt(program.weights)
            found = self.arena_digest(name)
            if found == self._digests[name]:
                return Refilled(sum(array.nbytes for array in program.weights.values()), tries, found)
        raise RefillFailed(f"the weights of {name} have the digest {found:016x}, at load {self._digests[name]:016x}")

    def arena_digest(self, name: str) -> int:
        arrays = self._programs[name].weights
        each = [digest(memoryview(np.ascontiguousarray(arrays[key]).tobytes())) for key in sorted(arrays)]
        return digest(np.array(each, np.uint64).tobytes())

    def activate(self, name: str) -> None:
        self.active = name

    def memory_lines(self) -> Mapping[str, int]:
        lines = dict(self.program.memory_lines())
        others = [program for name, program in self._programs.items() if name != self.active]
        for line in ("workspace", "drafts"):
            if more := sum(program.memory_lines().get(line, 0) for program in others):
                lines[line] = lines.get(line, 0) + more
        return lines

    def memory_regions(self) -> tuple[MemoryRegion, ...]:
        """None: as of a program."""
        return ()

    def close(self) -> None:
        for program in self._programs.values():
            program.close()

    def _empty(self, name: str) -> None:
        program, binding = self._programs[name], self._bindings[name]
        program.pools = Pools(KvPool((), 0, binding.kv.type), program.dtype)
        program.states = States(NO_STATES, program.dtype)

    def _views(self, name: str, runs: PoolRuns) -> Iterator[npt.NDArray[np.generic]]:
        """Parts of the arrays, in the order of a payload."""
        program = self._programs[name]
        for layers, pages in runs.kv:
            for layer in layers:
                for page in pages:
                    rows = slice(int(page) * PAGE_LEN, (int(page) + 1) * PAGE_LEN)
                    yield program.pools.k[layer][rows]
                    yield program.pools.v[layer][rows]
        for slot in runs.states:
            for layer, channels, heads in runs.parts:
                for row in program.states.conv[layer][slot]:
                    yield from (row[first:end] for first, end in channels)
                yield from (program.states.matrix[layer][slot][first:end] for first, end in heads)


def _count(runs: Sequence[tuple[int, int]]) -> int:
    return sum(end - first for first, end in runs)


def _spoilt(weights: Mapping[str, Array]) -> Mapping[str, Array]:
    """The same, but for one bit."""
    first = next(iter(weights))
    spoilt = weights[first].copy()
    spoilt.reshape(-1).view(np.uint8)[0] ^= 1
    return {**weights, first: spoilt}
