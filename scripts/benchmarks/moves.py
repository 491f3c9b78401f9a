"""How fast a flip moves: rows into a payload with its digest, a payload into rows, an arena from a copy, read back on
the way and in a second pass; beside memcpy.

    python scripts/benchmarks/moves.py [--mib 256] [--processes 2]

Each process has one thread and memory of its own, and all do the same at the same time. `memcpy` is one call over the
same bytes; the other lines are shares of it, measured alternately with it. Medians and quartiles of the rounds.
"""

from __future__ import annotations

import argparse
import ctypes
import multiprocessing
import statistics
import time
from collections.abc import Callable
from multiprocessing.synchronize import Barrier

import numpy as np

from backends.base import OpenOptions
from backends.cpu.backend import CpuBackend
from backends.cpu.pieces import Pieces
from backends.host.memory import Mapping

ROUNDS = 9
STREAMS = 16
"""Heads of K and of V, each a run of pages of its own."""


def kv_pieces(address: int, size: int, page: int) -> Pieces:
    pages = size // STREAMS // page
    places = address + np.arange(STREAMS)[None, :] * (size // STREAMS) + np.arange(pages)[:, None] * page
    return Pieces.of(np.ascontiguousarray(places.reshape(-1).astype(np.int64)), np.full(places.size, page, np.int64))


def column_pieces(address: int, size: int, run: int) -> Pieces:
    """Half of the columns of each group of rows of a copy."""
    places = address + np.arange(size // run, dtype=np.int64) * 2 * run
    return Pieces.of(places, np.full(len(places), run, np.int64))


def measured(size: int, together: Barrier, out: multiprocessing.Queue[dict[str, list[float]]]) -> None:
    backend = CpuBackend(OpenOptions(threads=1))
    library, team = backend.library, backend.team
    held = [Mapping(library, 2 * size, "source", ""), Mapping(library, size, "target", "")]
    for mapping in held:
        mapping.commit(team, lambda *_: None)
    source, target = (mapping.address for mapping in held)
    steps: dict[str, Callable[[], object]] = {"memcpy": lambda: ctypes.memmove(target, source, size)}
    for page in (4096, 8192):
        pieces = kv_pieces(source, size, page)
        steps[f"pack + digest, pages of {page}"] = lambda pieces=pieces: pieces.pack(library, team, target)
        steps[f"write, pages of {page}"] = lambda pieces=pieces: pieces.unpack(library, team, target)
    steps["digest"] = lambda: library.hs_digest(team, target, size)
    whole = Pieces(np.array([source], np.int64), np.array([size], np.int64))
    columns = column_pieces(source, size, 6912)
    for name, pieces in (("whole tensors", whole), ("columns", columns)):
        steps[f"refill, {name}"] = lambda pieces=pieces: pieces.fill(library, team, target)
        steps[f"in two passes, {name}"] = lambda pieces=pieces: (
            pieces.pack(library, team, target),
            library.hs_digest(team, target, size),
        )
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(ROUNDS):
        for name, step in steps.items():
            together.wait()
            began = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - began)
    out.put(seconds)
    for mapping in held:
        mapping.close()
    backend.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--processes", type=int, default=2)
    given = parser.parse_args()
    size = given.mib << 20
    context = multiprocessing.get_context("fork")
    together, out = context.Barrier(given.processes), context.Queue()
    ranks = [context.Process(target=measured, args=(size, together, out)) for _ in range(given.processes)]
    for rank in ranks:
        rank.start()
    found = [out.get() for _ in ranks]
    for rank in ranks:
        rank.join()
    copies = [each["memcpy"] for each in found]
    print(f"{given.processes} processes of one thread, {given.mib} MiB each, {ROUNDS} rounds")
    for name in found[0]:
        rates = sorted(size / each / 1e9 for one in found for each in one[name])
        shares = [c / t for one, copy in zip(found, copies, strict=True) for t, c in zip(one[name], copy, strict=True)]
        low, middle, high = statistics.quantiles(shares, n=4)
        print(f"{name:32} {statistics.median(rates):6.2f} GB/s   {middle:4.0%} of memcpy ({low:.0%} to {high:.0%})")


if __name__ == "__main__":
    main()
