"""What a real worker holds, line by line, before its first request; and what a small box does to it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from budget.facts import MIB
from budget.host import own_group
from homeserve.measure import Members, Region, Worker, measure
from homeserve.wire import segments
from homeserve.wire.records import LoadSpec

GIB = 1 << 30
TINY = Path(__file__).parents[1] / "data" / "tiny" / "llama.f32.gguf"
HUGE_PAGE = 2 * MIB

IN_A_SMALL_BOX = """
import asyncio, sys
from homeserve.errors import WorkerOutOfMemory
from homeserve.fleet import Fleet, FleetSpec
from homeserve.wire.records import LoadSpec

class Nobody:
    def on_results(self, seq, results): ...
    def on_lost(self, loss): ...

async def main():
    spec = FleetSpec(1, "cpu", 0, 1, "", 2, 60.0, 4096, 4096)
    fleet = Fleet(spec, Nobody())
    try:
        await fleet.start()
        await fleet.load(LoadSpec(sys.argv[1], int(sys.argv[2]), "f32", 64, 64, 4, 40))
        print("loaded")
    except WorkerOutOfMemory as error:
        print("out of memory:", error.message)
    finally:
        await fleet.stop()

asyncio.run(main())
"""
"""Loads a model with a KV pool of argv[2] slots of 1 KiB."""


def test_each_line_of_a_worker_is_found_alone_and_held_before_the_first_request(driver: Any, run_once: Any) -> None:
    async def main() -> None:
        async with driver(backend="cpu", threads=2) as fleet:
            await fleet.fleet.start()
            spec = LoadSpec(str(TINY), 1 << 16, "f32", rows=256, logit_rows=64, lanes=4, lane_pages=40)
            facts = (await fleet.fleet.load(spec))[0]
            ((rank, pid, regions),) = fleet.fleet.regions()
            assert rank == 0 and {name for name, _, _ in regions} == {"weights", "kv", "workspace"}
            assert dict(facts.lines) == {name: size for name, _, size in regions}
            assert dict(facts.lines)["kv"] == 64 * MIB
            names = fleet.fleet.shared_memory_names()
            files = tuple(Path(segments.folder(), name) for name in names)
            worker = Worker(pid, 0, tuple(Region(*region) for region in regions))
            found = measure(Members(0, os.getpid(), (worker,), None, files, {str(TINY)}))
            held = {line.line: line for line in found.lines}
            for name, size in facts.lines:
                resident = held[name].bytes
                assert resident is not None, name
                # In huge pages the last one is whole; in small ones what alignment left out is not touched.
                assert size - MIB <= resident <= size + HUGE_PAGE, (name, size, resident)
            process = held["worker processes"].bytes
            assert process is not None and 10 * MIB < process < 64 * MIB
            assert held["plan log"].bytes == sum(os.stat(path).st_blocks * 512 for path in files) > 0
            counted = [line.bytes for line in found.lines if line.line != "model file (page cache)"]
            assert found.smaps_bytes == sum(size for size in counted if size is not None)
            assert all(line.how for line in found.lines)

    run_once(main)


def test_a_program_in_the_interpreters_heap_is_not_measured(driver: Any, run_once: Any) -> None:
    async def main() -> None:
        async with driver() as fleet:  # the reference backend
            await fleet.up()
            ((_, pid, regions),) = fleet.fleet.regions()
            assert regions == ()
            held = {line.line: line for line in measure(Members(0, os.getpid(), (Worker(pid, 0, ()),))).lines}
            assert held["worker processes"].bytes is None and held["worker processes"].how is None

    run_once(main)


def test_a_control_group_of_2_gib_is_the_limit_that_is_seen(limited_group: Callable[[int], Any]) -> None:
    group = limited_group(2 * GIB)
    script = (
        "import json; from budget.host import read_memory, AvailableMemory; m = read_memory();"
        "print(json.dumps([m.limit_bytes, m.limit_source, m.available_bytes, AvailableMemory().read()]))"
    )
    done = group.run(sys.executable, "-c", script)
    assert done.returncode == 0, done.stderr
    limit, source, available, sampled = json.loads(done.stdout)
    assert limit == 2 * GIB and source.startswith(str(group.folder))
    assert GIB < available <= 2 * GIB and GIB < sampled <= 2 * GIB


def test_the_probe_sees_a_control_group_of_2_gib(limited_group: Callable[[int], Any], tmp_path: Path) -> None:
    group = limited_group(2 * GIB)
    done = group.run(
        sys.executable, "-P", "-m", "homeserve", "probe", "--json", env=os.environ | {"HOME": str(tmp_path)}
    )
    assert done.returncode == 0, done.stderr
    profile = json.loads(done.stdout)
    assert profile["mem_limit_mib"] == 2048 and profile["mem_limit_source"].startswith(str(group.folder))
    assert 1024 < profile["mem_available_mib"] <= 2048


def test_memory_that_lacks_is_told_while_the_pool_is_made(limited_group: Callable[[int], Any]) -> None:
    """Not by a request that is the first to need a page: nothing was computed yet."""
    group = limited_group(512 * MIB)
    done = group.run(sys.executable, "-c", IN_A_SMALL_BOX, str(TINY), str(1 << 18))
    assert done.stdout.splitlines() == ["loaded"], done.stderr
    done = group.run(sys.executable, "-c", IN_A_SMALL_BOX, str(TINY), str(1 << 20))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("out of memory: rank 0 was killed by SIGKILL for want of memory"), done.stderr


def test_the_own_group_is_told_with_who_is_in_it(limited_group: Callable[[int], Any]) -> None:
    group = limited_group(GIB)
    script = (
        "import json, os; from budget.host import own_group; g = own_group();"
        "print(json.dumps([g.folder, g.held_bytes, sorted(g.pids) == [os.getpid()]]))"
    )
    folder, held, alone = json.loads(group.run(sys.executable, "-c", script).stdout)
    assert (folder, alone) == (str(group.folder), True) and 0 < held < GIB
    ours = own_group()
    assert ours is None or os.getpid() in ours.pids
