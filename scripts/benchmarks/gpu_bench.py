"""A card to measure on: memory with something in it, times by the card's own events, and how much is far.

Times are those between two events on the stream, the median of as many rounds as fit into a share of a second, after
one that does not count. What is read lies over more memory than twice the largest cache (`far_bytes`), so that a
matrix or a page that is read again has left it meanwhile.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from backends.gpu.card import Card
from backends.gpu.device import HostMemory, Memory
from backends.gpu.errors import DriverError
from backends.gpu.launch import Launch, Symbol
from backends.quant import QuantType

MIB = 1 << 20
GIGA = 1e9
L2_ATTRIBUTE = {"nvidia": 38, "amd": 19}
"""The number of the L2 cache's size among a driver's attributes."""
FAR_LEAST = 512 * MIB
"""Twice the largest cache behind an L2 that no driver tells of: 256 MiB (MI300)."""
STAGING = 16 * MIB
TOGETHER = 16
"""Kernels that are compiled at once."""
HARMLESS = 0x3F
"""Bits of a random byte that are kept: as halves, floats or scales they are numbers below 2."""


@dataclass(frozen=True)
class Sizes:
    """How much is measured. `linear`: (outputs, columns) of matrices of models of 7 to 8 thousand million weights;
    `contexts`: tokens behind a decoded one; `prefill`: rows and matrix; `judged`: whether goals count."""

    far_bytes: int = FAR_LEAST
    linear: tuple[tuple[int, int], ...] = ((4096, 4096), (14336, 4096), (4096, 14336))
    contexts: tuple[int, ...] = (4096, 32768)
    lanes: tuple[int, ...] = (1, 8)
    heads: tuple[int, int, int] = (32, 8, 128)
    prefill: tuple[int, int, int] = (512, 14336, 4096)
    crossing: tuple[int, int] = (4096, 4096)
    rows: tuple[int, ...] = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
    launches: int = 256
    vmm_bytes: int = 256 * MIB
    cycles: int = 16
    staging: int = STAGING
    round_s: float = 0.08
    least_rounds: int = 5
    judged: bool = True

    def goal(self, fraction: float) -> float | None:
        return fraction if self.judged else None


FULL = Sizes()
QUICK = Sizes(
    linear=((14336, 4096),), lanes=(1,), rows=(1, 4, 8, 16, 32), round_s=0.03, least_rounds=3, cycles=6
)  # fmt: skip
TINY = Sizes(
    far_bytes=1 << 14,
    linear=((16, 512),),
    contexts=(64,),
    lanes=(1,),
    heads=(4, 2, 64),
    prefill=(40, 32, 256),
    crossing=(16, 256),
    rows=(1, 4),
    launches=8,
    vmm_bytes=4 * MIB,
    cycles=2,
    staging=1 << 16,
    round_s=0.0,
    least_rounds=1,
    judged=False,
)
"""For tests over emulated cards, whose times mean nothing."""

TYPES = tuple(
    QuantType[name]
    for name in (
        "Q4_K Q8_0 Q6_K Q4_0 F16 Q5_K Q4_1 MXFP4 IQ4_XS BF16 Q3_K Q2_K IQ4_NL Q5_0 Q5_1 F32 NVFP4"
        " IQ3_XXS IQ3_S IQ2_XXS IQ2_XS IQ2_S IQ1_S IQ1_M TQ1_0 TQ2_0"
    ).split()
)
"""The most used ones first: where time is over, the others are left out."""
QUICK_TYPES = TYPES[:5]


class OutOfTime(Exception):
    """A part has had its share."""


@dataclass
class Bench:
    """`until`: on the monotonic clock; later nothing is begun. `far_bytes`: more than twice the largest cache, and no
    more than half of the memory that was free at first."""

    card: Card
    sizes: Sizes
    until: float
    l2_bytes: int = field(init=False)
    l2_told: str = field(init=False, default="")
    far_bytes: int = field(init=False)
    _staging: HostMemory | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.l2_bytes = self._l2()
        self.far_bytes = min(max(self.sizes.far_bytes, 2 * self.l2_bytes), self.card.free_bytes() // 2)

    def _l2(self) -> int:
        facts = self.card.facts
        try:
            return self.card.driver.attribute(L2_ATTRIBUTE[facts.vendor], facts.index)
        except DriverError as error:
            self.l2_told = f"the size of the L2 cache is not known ({error.message})"
            return 0

    def check_time(self) -> None:
        """Raises OutOfTime."""
        if time.monotonic() > self.until:
            raise OutOfTime

    def prepare(self, symbols: Iterable[Symbol]) -> None:
        """Compiles several at once, as many as there is time for. Raises OutOfTime, KernelError."""
        wanted = list(symbols)
        for at in range(0, len(wanted), TOGETHER):
            self.check_time()
            self.card.prepare(wanted[at : at + TOGETHER])

    def memory(self, nbytes: int, line: str = "gpu_check") -> Memory:
        """Random bytes that are harmless as numbers of any type."""
        memory = self.card.allocate(nbytes, line)
        if self._staging is None:
            self._staging = self.card.pinned(self.sizes.staging, "gpu_check")
            random = np.random.default_rng(1).integers(0, 256, self.sizes.staging, np.uint8)
            self._staging.bytes[:] = random & HARMLESS
        have = min(nbytes, self._staging.nbytes)
        self.card.upload(memory.address, self._staging.address, have)
        while have < nbytes:
            more = min(have, nbytes - have)
            self.card.copy(memory.address + have, memory.address, more)
            have += more
        self.card.wait()
        return memory

    def numbers(self, array: np.ndarray) -> Memory:
        """An array of indices, as it is."""
        staging = self.card.pinned(array.nbytes, "gpu_check")
        staging.bytes[:] = array.reshape(-1).view(np.uint8)
        memory = self.card.allocate(array.nbytes, "gpu_check")
        self.card.upload(memory.address, staging.address, array.nbytes)
        self.card.wait()
        staging.close()
        return memory

    def seconds(self, work: Callable[[], None]) -> float:
        """Of one call of `work`, which puts something on the stream."""
        driver, stream = self.card.driver, self.card.stream
        work()
        self.card.wait()
        begin, end = driver.event(), driver.event()
        times: list[float] = []
        over = time.monotonic() + self.sizes.round_s
        try:
            while len(times) < self.sizes.least_rounds or time.monotonic() < over:
                driver.record_event(begin, stream)
                work()
                driver.record_event(end, stream)
                driver.wait_event(end)
                times.append(driver.elapsed_ms(begin, end) / 1e3)
        finally:
            driver.end_event(begin)
            driver.end_event(end)
        return max(statistics.median(times), 1e-9)

    def seconds_of(self, launches: Sequence[Launch]) -> float:
        """Of launches as a program makes them: recorded once, replayed."""
        self.check_time()
        recording = self.card.record(launches)
        try:
            return self.seconds(lambda: self.card.replay(recording))
        finally:
            recording.close()

    def copy_gb_s(self) -> float:
        """Of a copy within the card over far memory: bytes read and bytes written."""
        size = self.far_bytes // 2
        source, target = self.memory(size), self.memory(size)
        try:
            return 2 * size / self.seconds(lambda: self.card.copy(target.address, source.address, size)) / GIGA
        finally:
            source.close()
            target.close()
