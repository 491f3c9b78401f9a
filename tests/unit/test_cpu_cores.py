"""How many threads a worker takes: affinity, siblings and quotas, read from trees made for the test."""

from __future__ import annotations

from pathlib import Path

import pytest

from backends.cpu import cores


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Eight hardware threads on four cores: i and i + 4 are siblings."""
    for core in range(8):
        write(
            tmp_path / f"sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list", f"{core % 4},{core % 4 + 4}"
        )
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n", encoding="ascii")


def test_one_thread_for_each_physical_core_that_is_allowed(root: Path) -> None:
    assert cores.physical_cores(range(8), root) == (0, 1, 2, 3)
    assert cores.physical_cores((1, 5, 6), root) == (1, 6)
    assert cores.thread_count(root, (1, 5, 6)) == 2


def test_without_a_topology_every_hardware_thread_counts(tmp_path: Path) -> None:
    assert cores.thread_count(tmp_path, (0, 1, 2)) == 3


@pytest.mark.parametrize(
    ("quota", "threads"), [("max 100000", 4), ("200000 100000", 2), ("50000 100000", 1), ("", 4), ("x y", 4)]
)
def test_quota_of_cgroups_version_2(root: Path, quota: str, threads: int) -> None:
    write(root / "proc/self/cgroup", "0::/a/b")
    write(root / "sys/fs/cgroup/a/cpu.max", quota)
    assert cores.thread_count(root, range(8)) == threads


def test_the_least_quota_of_all_levels_holds(root: Path) -> None:
    write(root / "proc/self/cgroup", "0::/a/b")
    write(root / "sys/fs/cgroup/a/b/cpu.max", "300000 100000")
    write(root / "sys/fs/cgroup/a/cpu.max", "200000 100000")
    assert cores.cpu_quota(root) == 2.0


def test_inside_a_container_the_mount_itself_is_the_group(root: Path) -> None:
    write(root / "proc/self/cgroup", "0::/system.slice/container")
    write(root / "sys/fs/cgroup/cpu.max", "150000 100000")
    assert cores.cpu_quota(root) == 1.5 and cores.thread_count(root, range(8)) == 1


@pytest.mark.parametrize(("quota", "threads"), [("200000", 2), ("-1", 4)])
def test_quota_of_cgroups_version_1(root: Path, quota: str, threads: int) -> None:
    write(root / "proc/self/cgroup", "4:cpu,cpuacct:/job\n0::/")
    write(root / "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us", quota)
    write(root / "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us", "100000")
    assert cores.thread_count(root, range(8)) == threads


def test_this_machine_gives_at_least_one_thread_and_a_name() -> None:
    assert 1 <= cores.thread_count() <= len(cores.allowed_cores())
    assert cores.cpu_name()
