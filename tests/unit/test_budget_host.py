"""Host memory and cores, read from recorded trees of /proc and /sys."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from backends.cpu import cores as cpu_cores
from budget.facts import CpuFacts
from budget.host import AvailableMemory, oom_kills, own_group, parse_meminfo, physical_cores, read_cpu, read_memory

GIB = 1 << 30
MEMINFO = "MemTotal: {total} kB\nMemFree: 1000 kB\nMemAvailable: {free} kB\nSwapTotal: 2097152 kB\n"
V2_MOUNT = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MEMORY = "31 23 0:27 {root} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
V1_CPU = "32 23 0:28 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"


def tree(root: Path, files: dict[str, object]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(text))
    return root


def box(total_gib: float = 32, free_gib: float = 30) -> dict[str, object]:
    return {"proc/meminfo": MEMINFO.format(total=int(total_gib * 2**20), free=int(free_gib * 2**20))}


def test_no_control_groups(tmp_path: Path) -> None:
    memory = read_memory(tree(tmp_path, box()))
    assert (memory.total_bytes, memory.limit_bytes, memory.limit_source) == (32 * GIB, 32 * GIB, "MemTotal")
    assert memory.available_bytes == 30 * GIB
    assert memory.swap_bytes == 2 * GIB


def test_units_are_read_not_assumed() -> None:
    assert parse_meminfo("MemTotal: 16262132 kB\nMemFree: 240226304\nHuge: 3 MB\n") == {
        "MemTotal": 16262132 * 1024,
        "MemFree": 240226304,
    }


def test_unknown_swap_is_none(tmp_path: Path) -> None:
    files = {"proc/meminfo": "MemTotal: 1024 kB\nMemAvailable: 512 kB\n"}
    assert read_memory(tree(tmp_path, files)).swap_bytes is None


def test_version_2_parent_binds_while_own_group_says_max(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/machine.slice/box.service"
    files = box() | {
        "proc/self/cgroup": "0::/machine.slice/box.service/payload\n",
        "proc/self/mountinfo": V2_MOUNT,
        f"{group}/payload/memory.max": "max",
        f"{group}/payload/memory.current": 500,
        f"{group}/memory.max": 1 * GIB,
        f"{group}/memory.current": 900 << 20,
        f"{group}/memory.stat": f"anon 1\nfile 2\ninactive_file {400 << 20}\n",
        "sys/fs/cgroup/machine.slice/memory.max": "max",
    }
    memory = read_memory(tree(tmp_path, files))
    assert memory.limit_bytes == 1 * GIB
    assert memory.limit_source.endswith("box.service/memory.max")
    assert memory.available_bytes == (1024 - 500) << 20, "inactive_file is given back"


def test_lxcfs_says_120_and_the_group_98(tmp_path: Path) -> None:
    files = box(120, 119) | {
        "proc/self/cgroup": "0::/\n",
        "proc/self/mountinfo": V2_MOUNT,
        "sys/fs/cgroup/memory.max": 98 * GIB,
        "sys/fs/cgroup/memory.current": GIB,
    }
    memory = read_memory(tree(tmp_path, files))
    assert (memory.limit_bytes, memory.available_bytes) == (98 * GIB, 97 * GIB)


def test_meminfo_below_the_group_limit_stays_the_truth(tmp_path: Path) -> None:
    files = box(8, 6) | {
        "proc/self/cgroup": "0::/a\n",
        "proc/self/mountinfo": V2_MOUNT,
        "sys/fs/cgroup/a/memory.max": 96 * GIB,
        "sys/fs/cgroup/a/memory.current": 0,
    }
    memory = read_memory(tree(tmp_path, files))
    assert (memory.limit_bytes, memory.limit_source, memory.available_bytes) == (8 * GIB, "MemTotal", 6 * GIB)


def test_memory_high_counts_as_a_limit(tmp_path: Path) -> None:
    files = box() | {
        "proc/self/cgroup": "0::/a\n",
        "proc/self/mountinfo": V2_MOUNT,
        "sys/fs/cgroup/a/memory.max": 20 * GIB,
        "sys/fs/cgroup/a/memory.high": 10 * GIB,
        "sys/fs/cgroup/a/memory.current": 0,
    }
    memory = read_memory(tree(tmp_path, files))
    assert memory.limit_bytes == 10 * GIB and memory.limit_source.endswith("memory.high")


def test_version_1_sentinel_is_no_limit(tmp_path: Path) -> None:
    files = box() | {
        "proc/self/cgroup": "4:memory:/\n0::/\n",
        "proc/self/mountinfo": V1_MEMORY.format(root="/"),
        "sys/fs/cgroup/memory/memory.limit_in_bytes": 9223372036854771712,
        "sys/fs/cgroup/memory/memory.usage_in_bytes": 31 * GIB,
    }
    memory = read_memory(tree(tmp_path, files))
    assert (memory.limit_source, memory.available_bytes) == ("MemTotal", 30 * GIB)


def test_version_1_ancestor_through_hierarchical_limit(tmp_path: Path) -> None:
    """Inside a container the ancestors' folders are not there, but memory.stat still says what they allow."""
    files = box() | {
        "proc/self/cgroup": "9:memory:/docker/abc\n",
        "proc/self/mountinfo": V1_MEMORY.format(root="/docker/abc"),
        "sys/fs/cgroup/memory/memory.limit_in_bytes": 9223372036854771712,
        "sys/fs/cgroup/memory/memory.usage_in_bytes": 3 * GIB,
        "sys/fs/cgroup/memory/memory.stat": f"hierarchical_memory_limit {4 * GIB}\ntotal_inactive_file {2 * GIB}\n",
    }
    memory = read_memory(tree(tmp_path, files))
    assert (memory.limit_bytes, memory.available_bytes) == (4 * GIB, 3 * GIB)


def test_usage_above_the_limit_is_zero_available_never_negative(tmp_path: Path) -> None:
    files = box() | {
        "proc/self/cgroup": "9:memory:/\n",
        "proc/self/mountinfo": V1_MEMORY.format(root="/"),
        "sys/fs/cgroup/memory/memory.limit_in_bytes": 524288000,
        "sys/fs/cgroup/memory/memory.usage_in_bytes": 524292096,
    }
    assert read_memory(tree(tmp_path, files)).available_bytes == 0


@pytest.mark.parametrize("path", ["/gone/from/here", "/../../outside"])
def test_a_path_of_another_namespace_is_shortened(tmp_path: Path, path: str) -> None:
    files = box() | {
        "proc/self/cgroup": f"0::{path}\n",
        "proc/self/mountinfo": V2_MOUNT,
        "sys/fs/cgroup/memory.max": 2 * GIB,
        "sys/fs/cgroup/memory.current": GIB,
    }
    assert read_memory(tree(tmp_path, files)).limit_bytes == 2 * GIB


def test_garbage_is_no_limit(tmp_path: Path) -> None:
    files = box() | {
        "proc/self/cgroup": "nonsense\n0::/a\n",
        "proc/self/mountinfo": "nonsense\n" + V2_MOUNT,
        "sys/fs/cgroup/a/memory.max": "lots",
        "sys/fs/cgroup/a/memory.stat": "inactive_file many\nx\n",
    }
    assert read_memory(tree(tmp_path, files)).limit_source == "MemTotal"


# ------------------------------------------------------------------------------------------------------------- cores

CPUINFO = "".join(
    f"processor\t: {n}\nmodel name\t: Some CPU @ 3 GHz\nflags\t\t: fpu avx2 fma f16c\n\n" for n in range(8)
)


def test_affinity_binds(tmp_path: Path) -> None:
    cpu = read_cpu(tree(tmp_path, {"proc/cpuinfo": CPUINFO}), range(3))
    assert (cpu.name, cpu.logical, cpu.usable, cpu.source) == ("Some CPU @ 3 GHz", 8, 3, "affinity")
    assert cpu.isa == "avx2"


@pytest.mark.parametrize(("quota", "cores"), [("max 100000", 8), ("250000 100000", 2), ("50000 100000", 1), ("x", 8)])
def test_version_2_quota(tmp_path: Path, quota: str, cores: int) -> None:
    files = {
        "proc/cpuinfo": CPUINFO,
        "proc/self/cgroup": "0::/a/b\n",
        "proc/self/mountinfo": V2_MOUNT,
        "sys/fs/cgroup/a/b/cpu.max": "max 100000",
        "sys/fs/cgroup/a/cpu.max": quota,
    }
    cpu = read_cpu(tree(tmp_path, files), range(8))
    assert cpu.usable == cores
    assert cpu.source == ("processors" if cores == 8 else f"{tmp_path}/sys/fs/cgroup/a/cpu.max")


def test_version_1_quota(tmp_path: Path) -> None:
    files = {
        "proc/cpuinfo": CPUINFO,
        "proc/self/cgroup": "2:cpu,cpuacct:/\n",
        "proc/self/mountinfo": V1_CPU,
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "400000",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
    }
    assert read_cpu(tree(tmp_path, files), range(8)).usable == 4


@pytest.mark.parametrize(
    ("flags", "level"),
    [
        ("", "baseline"),
        ("avx2 fma f16c", "avx2"),
        ("avx2", "baseline"),
        ("avx2 fma f16c avx512f avx512bw avx512vl avx512dq", "avx512"),
        ("avx512f avx512bw avx512vl avx512dq avx512_vnni", "baseline"),
        ("avx2 fma f16c avx512f avx512bw avx512vl avx512dq avx512_vnni", "avx512vnni"),
    ],
)
def test_isa_level(flags: str, level: str) -> None:
    assert CpuFacts("x", 1, 1, "affinity", frozenset(flags.split())).isa == level


def topology(count: int) -> dict[str, object]:
    """`count` hardware threads on half as many cores: i and i + count / 2 are siblings."""
    half = count // 2
    folder = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    return {folder.format(n): f"{n % half},{n % half + half}\n" for n in range(count)}


@pytest.mark.parametrize(
    ("allowed", "first", "source"),
    [(range(8), (0, 1, 2, 3), "physical cores"), ((1, 5, 6), (1, 6), "physical cores"), ((0, 3), (0, 3), "affinity")],
)
def test_one_hardware_thread_of_each_physical_core_counts(
    tmp_path: Path, allowed: Sequence[int], first: tuple[int, ...], source: str
) -> None:
    root = tree(tmp_path, {"proc/cpuinfo": CPUINFO, **topology(8)})
    assert physical_cores(allowed, root) == first
    cpu = read_cpu(root, allowed)
    assert (cpu.usable, cpu.source, cpu.logical) == (len(first), source, 8)


V1_BOTH = "30 29 0:27 / {point} rw shared:9 - cgroup cgroup rw,cpu,cpuacct\n" + V2_MOUNT


@pytest.mark.parametrize("point", ["/sys/fs/cgroup/cpu,cpuacct", "/cgroups/cpu stuff"])
@pytest.mark.parametrize(("own", "parent", "threads"), [("-1", "250000", 2), ("150000", "300000", 1), ("-1", "-1", 4)])
def test_the_worker_takes_as_many_threads_as_are_announced(
    tmp_path: Path, point: str, own: str, parent: str, threads: int
) -> None:
    """Wherever the controller is mounted, whichever ancestor has the quota, and with two threads on a core."""
    folder = f"{point.lstrip('/')}/jobs"
    files = topology(8) | {
        "proc/cpuinfo": CPUINFO,
        "proc/self/cgroup": "4:cpu,cpuacct:/jobs/mine\n0::/\n",
        "proc/self/mountinfo": V1_BOTH.format(point=point.replace(" ", "\\040")),
        f"{folder}/mine/cpu.cfs_quota_us": own,
        f"{folder}/mine/cpu.cfs_period_us": 100000,
        f"{folder}/cpu.cfs_quota_us": parent,
        f"{folder}/cpu.cfs_period_us": 100000,
    }
    root = tree(tmp_path, files)
    assert cpu_cores.thread_count(root, range(8)) == read_cpu(root, range(8)).usable == threads


# ---------------------------------------------------------------------------------------------------- killed for memory

EVENTS = "low 0\noom 3\noom_kill {}\n"


def test_kills_of_version_2_are_the_own_groups_or_the_nearest_that_tells(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/user.slice/app"
    files = {"proc/self/cgroup": "0::/user.slice/app\n", "proc/self/mountinfo": V2_MOUNT, f"{group}/cgroup.procs": ""}
    assert oom_kills(tree(tmp_path, files)) is None
    assert oom_kills(tree(tmp_path, {"proc/vmstat": "pgfault 9\noom_kill 8\n"})) == 8, "nobody else tells"
    assert oom_kills(tree(tmp_path, {"sys/fs/cgroup/user.slice/memory.events": EVENTS.format(5)})) == 5
    assert oom_kills(tree(tmp_path, {f"{group}/memory.events": EVENTS.format(2)})) == 2, "5 counts a neighbour's"
    assert oom_kills(tree(tmp_path, {f"{group}/memory.events": "oom_kill many\n"})) == 5


def test_kills_of_version_1_where_the_mount_shows_a_part(tmp_path: Path) -> None:
    files: dict[str, object] = {
        "proc/self/cgroup": "9:name=systemd:/\n4:memory:/docker/abc\n0::/\n",
        "proc/self/mountinfo": V1_MEMORY.format(root="/docker/abc"),
        "sys/fs/cgroup/memory/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 5\n",
    }
    assert oom_kills(tree(tmp_path, files)) == 5
    files["proc/self/mountinfo"] = V1_MEMORY.format(root="/")
    files["sys/fs/cgroup/memory/docker/abc/memory.oom_control"] = "oom_kill_disable 0\noom_kill 7\n"
    assert oom_kills(tree(tmp_path, files)) == 7


V1_GROUP = "sys/fs/cgroup/memory/box"
V2_GROUP = "sys/fs/cgroup/box"
SAMPLED = {
    "no group": box(),
    "version 1": box()
    | {
        "proc/self/cgroup": "4:memory:/box\n",
        "proc/self/mountinfo": V1_MEMORY.format(root="/"),
        f"{V1_GROUP}/memory.limit_in_bytes": 2 * GIB,
        f"{V1_GROUP}/memory.usage_in_bytes": GIB,
        f"{V1_GROUP}/memory.stat": f"total_inactive_file {GIB // 4}\n",
    },
    "version 2": box()
    | {
        "proc/self/cgroup": "0::/box\n",
        "proc/self/mountinfo": V2_MOUNT,
        f"{V2_GROUP}/memory.max": 2 * GIB,
        f"{V2_GROUP}/memory.current": GIB,
        f"{V2_GROUP}/memory.stat": f"inactive_file {GIB // 4}\n",
    },
    "no meminfo": {"proc/meminfo": "nothing"},
}


@pytest.mark.parametrize("name", SAMPLED)
def test_a_sampled_reading_is_that_of_a_whole_look_and_follows_the_files(tmp_path: Path, name: str) -> None:
    root = tree(tmp_path, SAMPLED[name])
    sampled = AvailableMemory(root)
    assert sampled.read() == (None if name == "no meminfo" else read_memory(root).available_bytes)
    for changed in ("memory/box/memory.usage_in_bytes", "box/memory.current"):
        path = root / "sys/fs/cgroup" / changed
        if path.exists():
            path.write_text(str(3 * GIB // 2))
            assert sampled.read() == read_memory(root).available_bytes == 3 * GIB // 4
    sampled.close()
    sampled.close()


def test_the_own_group_says_what_it_holds_and_who_is_in_it(tmp_path: Path) -> None:
    assert own_group(tree(tmp_path / "none", box())) is None
    files = SAMPLED["version 2"] | {f"{V2_GROUP}/cgroup.procs": "7\n8\n", f"{V2_GROUP}/below/cgroup.procs": "9\n"}
    found = own_group(tree(tmp_path / "some", files))
    assert found is not None and (found.held_bytes, found.pids) == (3 * GIB // 4, {7, 8, 9})
    assert found.folder == str(tmp_path / "some" / V2_GROUP)
