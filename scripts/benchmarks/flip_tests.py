"""What a flip costs: `flip` of scripts/bench, on two ranks with one thread each. It needs no llama-server.

    flip            ms of a flip with nothing live, beyond filling the arena
    flip_total      ms of the same flip from the ask to the end, filling the arena included
    flip_refill     GB/s of filling the arenas and reading back what lies there: bytes of both ranks over the time of
                    the slower one
    flip_move       GB/s of moving KV rows and states: every byte is copied twice, into the transit memory and out of
                    it, so twice the bytes over the slower rank's times of both, the digest of what it packs among them
    flip_mib        ms for each MiB that is live, beyond a flip with nothing live: all that grows with the bytes, also
                    mapping, the second digest and the reading back

A run is a round trip: each number is the mean of both ways. Then the ranks are given prompts, whose rows the prefix
cache keeps, and the round trips are made again. In every run, beside each of them, the machine's own copying of memory
is measured by as many threads (`copy_gb_s` of the engine `machine`: bytes copied, not read and written): the rates are
told in percent of it. Each way once before does not count.

Everything is read from the server's records (GET /v1/homeserve/flip/ID).
"""

from __future__ import annotations

import ctypes
import mmap
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rank_tests import RANKS, Keep
from servers import Server, homeserve

from homeserve.bench.flips import (
    LAYOUTS,
    MIB,
    FlipFailed,
    Record,
    beside_refill_ms,
    flip,
    move_gb_s,
    moved_bytes,
    refill_gb_s,
    total_ms,
)
from homeserve.bench.prompts import Prompts

FLIP, TOTAL, REFILL, MOVE, PER_MIB = "flip", "flip_total", "flip_refill", "flip_move", "flip_mib"
TESTS = (FLIP, TOTAL, REFILL, MOVE, PER_MIB)
MODELS = ("SmolLM2-135M-Instruct.Q4_1", "llama-1.5b.Q4_K_M", "qwen35.Q4_K_M")
"""Where no others are asked for: a small one, a large one, and one with recurrent states."""
CONTEXT, LANES = 2048, 4
PROMPT = 1000
"""Tokens of each prompt whose rows are kept, one for each lane."""
COPY_BYTES = 256 * MIB
COPY_ROUNDS = 5
FLIPPING = ("--devices", f"cpu:{RANKS}", "--layout", "pipeline", "--flip", "manual")


def server_of(path: Path, threads: int, folder: Path, program: Sequence[str], isa: str) -> Server:
    found = homeserve(str(path), max(1, threads // RANKS), CONTEXT, folder, program)
    at = found.command.index("--prefix-cache")
    found.command[at : at + 2] = ["--prefix-cache", "on"]
    for name, value in (("--kv-tokens", LANES * CONTEXT), ("--max-running", LANES)):
        found.command[found.command.index(name) + 1] = str(value)
    found.command += [*FLIPPING, *(("--isa", isa) if isa else ())]
    found.settings = " ".join((*FLIPPING, "--threads", str(max(1, threads // RANKS))))
    return found


def measure_flips(server: Server, runs: int, prompts: Prompts, threads: int, keep: Keep) -> None:
    """`runs` round trips with nothing live, and as many with the rows of prompts. Raises FlipFailed."""
    round_trip(server)
    empty = []
    for run in range(runs):
        copy_gb_s(threads, run, keep)
        trip = round_trip(server)
        empty.append(trip)
        keep("homeserve", FLIP, "ms", run, statistics.mean(map(beside_refill_ms, trip)), server.settings)
        keep("homeserve", TOTAL, "ms", run, statistics.mean(map(total_ms, trip)), server.settings)
        keep("homeserve", REFILL, "GB/s", run, statistics.mean(map(refill_gb_s, trip)), server.settings)
    for _ in range(LANES):
        ask(server, prompts.draw(PROMPT))
    round_trip(server)
    alone = statistics.median(statistics.mean(map(beside_refill_ms, trip)) for trip in empty)
    for run in range(runs):
        copy_gb_s(threads, runs + run, keep)
        trip = round_trip(server)
        if not all(moved_bytes(each) for each in trip):
            raise FlipFailed(f"a flip moved nothing, though rows were live: {trip[0]['live']}")
        keep("homeserve", MOVE, "GB/s", run, statistics.mean(map(move_gb_s, trip)), server.settings)
        more = statistics.mean(map(beside_refill_ms, trip)) - alone
        mib = statistics.mean(map(moved_bytes, trip)) / MIB
        keep("homeserve", PER_MIB, "ms/MiB", run, more / mib, server.settings)


def round_trip(server: Server) -> list[Record]:
    return [flip(server, to) for to in LAYOUTS]


def ask(server: Server, prompt: list[int]) -> None:
    """A prompt whose rows the prefix cache keeps."""
    server.post("/v1/completions", {"prompt": prompt, "max_tokens": 1, "temperature": 0})


# ------------------------------------------------------------------------------------------------------ of the machine


def copy_gb_s(threads: int, run: int, keep: Keep) -> None:
    keep("machine", "copy_gb_s", "GB/s", run, copied_gb_s(threads, COPY_BYTES))


def copied_gb_s(threads: int, size: int) -> float:
    """Memory copied by the C library, by all threads together, each its own part: the median of some rounds."""
    part = size // threads // 4096 * 4096
    with mmap.mmap(-1, size) as source, mmap.mmap(-1, size) as target:
        held = [ctypes.c_char.from_buffer(each) for each in (source, target)]
        here, there = (ctypes.addressof(each) for each in held)
        for address in (here, there):
            ctypes.memset(address, 1, size)
        taken = []
        with ThreadPoolExecutor(threads) as pool:
            for _ in range(COPY_ROUNDS + 1):
                began = time.perf_counter()
                list(pool.map(lambda n: ctypes.memmove(there + n * part, here + n * part, part), range(threads)))
                taken.append(time.perf_counter() - began)
        del held
    return part * threads / statistics.median(taken[1:]) / 1e9
