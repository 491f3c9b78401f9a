"""The machine that a server is measured on, before the run: its processor, how busy it is, how fast it reads."""

from __future__ import annotations

from dataclasses import dataclass

from budget.host import read_cpu, read_memory
from homeserve.bench.origin import Quiet, quietness
from homeserve.bench.reading import read_gb_s, size_for


@dataclass(frozen=True)
class Machine:
    """`cores`: that a worker computes on. `read_gb_s`: of host memory by all of them; None without room to measure."""

    cpu: str
    cores: int
    load: Quiet
    read_gb_s: float | None

    def words(self) -> str:
        reads = f", reads {self.read_gb_s:.0f} GB/s" if self.read_gb_s is not None else ""
        return f"{self.cpu}, {self.cores} core{'s' * (self.cores != 1)}{reads}"


def examine() -> Machine:
    """Takes about a second. The load is read first, which the rest adds to."""
    cpu = read_cpu()
    load = quietness(cpu.usable)
    size = size_for(read_memory().available_bytes or 0)
    return Machine(cpu.name, cpu.usable, load, None if size is None else round(read_gb_s(cpu.usable, size), 1))
