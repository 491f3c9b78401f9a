"""What launches cost one by one and as a graph, and memory that comes and goes behind an address that stays.

launches   the host's time until the card is done, for each of many launches that do next to nothing
virtual    a cycle of backing and releasing; the address, the zeros and the card's free memory are looked at
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np
from gpu_bench import MIB, Bench
from gpu_rows import Teller

from backends.gpu.card import Card
from backends.gpu.ops import mixers
from backends.gpu.ops.buffers import Rows

WIDTH = 64
MOST = 0.75
"""Of what was backed, so much at least is seen to be held and to be returned: others use the card meanwhile."""


def run(bench: Bench, tell: Teller) -> None:
    tell.at("graph replay")
    _graphs(bench, tell)
    tell.at("virtual memory")
    _virtual(bench, tell)


def _graphs(bench: Bench, tell: Teller) -> None:
    card, count = bench.card, bench.sizes.launches
    memory = card.allocate(4 * WIDTH * count, "gpu_check")
    launches = [mixers.zero(1, WIDTH, Rows(memory.address + 4 * WIDTH * row, WIDTH)) for row in range(count)]
    recording = card.record(launches)
    plain = _host_us(bench, lambda: card.launch(launches)) / count
    replayed = _host_us(bench, lambda: card.replay(recording)) / count
    told = "" if recording.graph else "the driver records no launches: a replay makes them one by one"
    tell.row(f"plain launches, {count} behind each other", plain, "us each")
    tell.row(f"graph replay, {count} launches", replayed, "us each", of=plain, ok=bool(recording.graph), note=told)
    card.fill(memory.address, 0xFF, memory.nbytes)
    card.replay(recording)
    left = int(np.count_nonzero(_fetched(card, memory.address, memory.nbytes)))
    note = f"{left} bytes were not written" if left else ""
    tell.row("a replay writes what its launches do", float(memory.nbytes - left), "bytes", ok=not left, note=note)
    recording.close()
    memory.close()


def _host_us(bench: Bench, work: Callable[[], None]) -> float:
    work()
    bench.card.wait()
    times: list[float] = []
    over = time.monotonic() + 2 * bench.sizes.round_s
    while len(times) < bench.sizes.least_rounds or time.monotonic() < over:
        begin = time.perf_counter()
        work()
        bench.card.wait()
        times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e6


def _fetched(card: Card, address: int, nbytes: int) -> np.ndarray:
    staging = card.pinned(nbytes, "gpu_check")
    card.download(staging.address, address, nbytes)
    card.wait()
    found = staging.bytes.copy()
    staging.close()
    return found


# ------------------------------------------------------------------------------------------------------- virtual memory


def _virtual(bench: Bench, tell: Teller) -> None:
    card = bench.card
    if not card.facts.virtual_memory:
        tell.row("virtual memory", ok=False, note=f"{card.facts.told} has none: its layouts cannot flip")
        return
    before = card.free_bytes()
    size = min(bench.sizes.vmm_bytes, before // 4)
    memory = card.reserve(size, "gpu_check")
    address, back_ms, release_ms, moved = memory.address, [], [], False
    for _ in range(bench.sizes.cycles):
        back_ms.append(_timed_ms(card, memory.back))
        held = before - card.free_bytes()
        card.fill(address, 0xAB, size)
        release_ms.append(_timed_ms(card, memory.release))
        moved |= memory.address != address
    returned = card.free_bytes() - (before - held)
    mib = f"{size / MIB:.0f} MiB"
    tell.row(f"back {mib}, and zero it", statistics.median(back_ms), "ms")
    tell.row(f"release {mib}", statistics.median(release_ms), "ms")
    tell.row("the address stays", float(address), "address", ok=not moved)
    tell.row(
        "memory is the card's again after a release",
        returned / MIB,
        "MiB",
        of=size / MIB,
        ok=min(returned, held) >= MOST * size,
        note=f"{held / MIB:.0f} MiB were held",
    )
    memory.back()
    left = int(np.count_nonzero(_fetched(card, address, min(size, MIB))))
    tell.row(
        "memory that is backed again is zeros", float(left), "bytes", ok=not left, note="" if not left else "not 0"
    )
    memory.close()


def _timed_ms(card: Card, work: Callable[[], None]) -> float:
    begin = time.perf_counter()
    work()
    card.wait()
    return (time.perf_counter() - begin) * 1e3
