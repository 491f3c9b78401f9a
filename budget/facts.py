"""Facts about a box and a model, as plain values. Bytes everywhere; None is unknown, never 0."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_AVX512 = frozenset({"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512dq"})

ISA_LEVELS: Mapping[str, frozenset[str]] = {
    "avx512vnni": _AVX512 | {"avx512_vnni"},
    "avx512": _AVX512,
    "avx2": frozenset({"avx2", "fma", "f16c"}),
    "baseline": frozenset(),
}
"""Levels of CPU kernels, the best first, and the flags that each needs. This is what is told to people before anything
is loaded; the backend asks the CPU itself."""


@dataclass(frozen=True)
class MemoryFacts:
    """Host memory as this process may use it.

    `limit_bytes` is the least of MemTotal and every control group's limit; `limit_source` names the one that binds.
    `available_bytes` is what may still be taken: the least of MemAvailable and, for each limited group, its limit minus
    what it holds, with page cache that the kernel gives back first (`inactive_file`) not counted as held.
    """

    total_bytes: int
    limit_bytes: int
    limit_source: str
    available_bytes: int
    swap_bytes: int | None


@dataclass(frozen=True)
class CpuFacts:
    """What computes here. `logical` counts hardware threads of the machine.

    `usable` is how many cores a worker that has them to itself computes on, and its number of threads unless it is told
    one: a hardware thread of each physical core that the affinity allows, and no more than the control groups' quota.
    `source` names what binds: "processors" (all of them), "affinity", "physical cores", or the quota's file.
    `flags` are the instruction-set words of the first processor, as the kernel spells them.
    """

    name: str
    logical: int
    usable: int
    source: str
    flags: frozenset[str]

    @property
    def levels(self) -> tuple[str, ...]:
        """The levels of CPU kernels that the flags allow, the best first."""
        return tuple(name for name, needed in ISA_LEVELS.items() if needed <= self.flags)

    @property
    def isa(self) -> str:
        """The best level."""
        return self.levels[0]


@dataclass(frozen=True)
class HostFacts:
    memory: MemoryFacts
    cpu: CpuFacts


@dataclass(frozen=True)
class ModelShape:
    """What a plan needs of a model. Filled from a checkpoint by the caller: `budget` imports nothing of homeserve."""

    name: str
    weights_bytes: int
    kv_bytes_per_token: int
    context: int
    hidden: int
    ffn: int
    vocab: int
