"""Facts about a box and a model, as plain values. Bytes everywhere; None is unknown, never 0."""

from __future__ import annotations

from dataclasses import dataclass


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
    """Cores that this process may use: `usable` = min(affinity, control-group quota), `source` names which binds.

    `flags` are the instruction-set words of the first processor, as the kernel spells them.
    """

    name: str
    logical: int
    usable: int
    source: str
    flags: frozenset[str]

    @property
    def isa(self) -> str:
        """The best level of x86 kernels that the flags allow, or "baseline"."""
        levels = (
            ("avx512vnni", {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni"}),
            ("avx512", {"avx512f", "avx512bw", "avx512vl", "avx512dq"}),
            ("avx2", {"avx2", "fma", "f16c"}),
        )
        return next((name for name, needed in levels if needed <= self.flags), "baseline")


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
