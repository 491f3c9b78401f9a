"""The whole probe on recorded trees: the host and its lies, the system, the bus, and that nothing makes it fail."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from budget.box_page import box_page
from budget.disk import DiskRate, measure_disk
from budget.facts import GIB, MIB, Box, Link
from budget.host import examine_memory, read_cpu, read_memory
from budget.page import Style
from budget.probe import Sources, read_box
from budget.probe_pci import address
from budget.profile import box_from_json, box_to_json
from budget.system import read_system
from budget.tree import Tree, natural, whole
from homeserve.commands import probe as command
from homeserve.errors import SettingError

V2 = {"proc/self/mountinfo": "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"}
V1 = {"proc/self/mountinfo": "31 23 0:27 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"}


def tree(root: Path, files: dict[str, object]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(text))
    return root


def meminfo(total_kib: int, **others: int) -> dict[str, object]:
    lines = [f"MemTotal: {total_kib} kB", *(f"{name}: {size} kB" for name, size in others.items())]
    return {"proc/meminfo": "\n".join(lines) + "\n"}


def probe(root: Path) -> Box:
    return read_box(Sources(root=str(root)))


def said(box: Box) -> str:
    return " | ".join(f"{doubt.where}: {doubt.what} -> {doubt.taken}" for doubt in box.doubts)


def memory_doubts(root: Path) -> tuple[int | None, int | None, str]:
    """Limit, available, and all doubts of reading a tree's memory."""
    read = Tree(root)
    memory = examine_memory(read)
    return memory.limit_bytes, memory.available_bytes, " | ".join(f"{d.what} -> {d.taken}" for d in read.doubts)


# -------------------------------------------------------------------------------------------------------- host memory


def test_C1_page_cache_of_the_group_is_available(tmp_path: Path) -> None:
    """limit - current would say 2.9 GiB: the rest is cache that the kernel gives back before it kills anything."""
    files = meminfo(32 * 2**20, MemFree=1000, MemAvailable=32 * 2**20 - 1000) | V2 | {
        "proc/self/cgroup": "0::/pod\n",
        "sys/fs/cgroup/pod/memory.max": 32 * GIB,
        "sys/fs/cgroup/pod/memory.current": int(29.1 * GIB),
        "sys/fs/cgroup/pod/memory.stat": f"anon {100 * MIB}\nfile {29 * GIB}\ninactive_file {29 * GIB}\n",
    }  # fmt: skip
    available = read_memory(tree(tmp_path, files)).available_bytes
    assert available is not None and round(available / GIB, 1) == 31.9


def test_C3_a_limit_above_memtotal_is_no_memory_and_nothing_wraps(tmp_path: Path) -> None:
    files = meminfo(8 * 2**20, MemFree=1000, MemAvailable=2 * 2**20) | V2 | {
        "proc/self/cgroup": "0::/a\n",
        "sys/fs/cgroup/a/memory.max": 96 * GIB,
        "sys/fs/cgroup/a/memory.current": 97 * GIB,
    }  # fmt: skip
    memory = read_memory(tree(tmp_path, files))
    assert (memory.limit_bytes, memory.limit_source, memory.available_bytes) == (8 * GIB, "MemTotal", 0)


def test_C3_max_is_no_limit_and_what_the_group_holds_is_not_taken_off(tmp_path: Path) -> None:
    files = meminfo(8 * 2**20, MemFree=1000, MemAvailable=6 * 2**20) | V2 | {
        "proc/self/cgroup": "0::/a\n",
        "sys/fs/cgroup/a/memory.max": "max",
        "sys/fs/cgroup/a/memory.current": 7 * GIB,
    }  # fmt: skip
    assert read_memory(tree(tmp_path, files)).available_bytes == 6 * GIB


def test_C5_the_pods_limit_not_the_hosts_memory(tmp_path: Path) -> None:
    files = meminfo(810154872832 // 1024, MemFree=1000, MemAvailable=700000000) | V2 | {
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/memory.max": 96636764160,
        "sys/fs/cgroup/memory.current": 0,
    }  # fmt: skip
    memory = read_memory(tree(tmp_path, files))
    assert (memory.total_bytes, memory.limit_bytes, memory.available_bytes) == (810154872832, 96636764160, 96636764160)


def test_C7_the_inner_group_says_max_and_its_parent_does_not(tmp_path: Path) -> None:
    files = meminfo(32 * 2**20, MemFree=1000, MemAvailable=30 * 2**20) | V2 | {
        "proc/self/cgroup": "0::/user.slice/x.service/libpod-payload\n",
        "sys/fs/cgroup/user.slice/x.service/libpod-payload/memory.max": "max",
        "sys/fs/cgroup/user.slice/x.service/memory.max": 1073741824,
        "sys/fs/cgroup/user.slice/x.service/memory.current": 0,
    }  # fmt: skip
    assert read_memory(tree(tmp_path, files)).limit_bytes == 1073741824


@pytest.mark.parametrize(
    ("total_kib", "others", "mark"),
    [
        (262144, {"MemFree": 100000, "MemAvailable": 200000, "Active": 830952}, "Active 811 MiB of MemTotal 256 MiB"),
        (4194304, {"MemFree": 4760, "MemAvailable": 4760}, "MemAvailable is MemFree, 4 MiB"),
        (2097152, {"MemFree": 9999999, "MemAvailable": 5000}, "MemFree 9765 MiB of MemTotal 2048 MiB"),
    ],
)
def test_C9_what_lxcfs_rewrites_is_told_by_its_sums(
    tmp_path: Path, total_kib: int, others: dict[str, int], mark: str
) -> None:
    """The limited group's own counters are the truth then: a quarter is held, of that a half is cache."""
    limit = total_kib * 1024
    files = meminfo(total_kib, **others) | V2 | {
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/memory.max": limit,
        "sys/fs/cgroup/memory.current": limit // 4,
        "sys/fs/cgroup/memory.stat": f"inactive_file {limit // 8}\n",
    }  # fmt: skip
    found, available, doubts = memory_doubts(tree(tmp_path, files))
    assert (found, available) == (limit, limit - limit // 8)
    assert mark in doubts and "-> the control groups' counters" in doubts


def test_C9_without_a_limited_group_the_least_that_it_says_is_taken(tmp_path: Path) -> None:
    _, available, doubts = memory_doubts(tree(tmp_path, meminfo(4194304, MemFree=4760, MemAvailable=4760)))
    assert available == 4760 * 1024 and "nothing else tells" in doubts


def test_C17_a_peak_of_a_page_above_the_limit_is_normal(tmp_path: Path) -> None:
    files = meminfo(8 * 2**20, MemFree=1000, MemAvailable=6 * 2**20) | V1 | {
        "proc/self/cgroup": "9:memory:/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": 524288000,
        "sys/fs/cgroup/memory/memory.usage_in_bytes": 501346304,
        "sys/fs/cgroup/memory/memory.max_usage_in_bytes": 524292096,
    }  # fmt: skip
    assert memory_doubts(tree(tmp_path, files)) == (524288000, 524288000 - 501346304, "")


def test_a_kernel_without_memavailable(tmp_path: Path) -> None:
    files = meminfo(8 * 2**20, MemFree=2 * 2**20, Cached=3 * 2**20, Shmem=2**20)
    _, available, doubts = memory_doubts(tree(tmp_path, files))
    assert available == 4 * GIB and "MemFree + Cached - Shmem" in doubts


def test_nothing_about_free_memory_is_unknown(tmp_path: Path) -> None:
    limit, available, doubts = memory_doubts(tree(tmp_path, meminfo(8 * 2**20)))
    assert (limit, available) == (8 * GIB, None) and "says neither MemAvailable nor MemFree -> unknown" in doubts


def test_a_limited_group_that_does_not_say_what_it_holds(tmp_path: Path) -> None:
    files = meminfo(8 * 2**20, MemFree=1000, MemAvailable=6 * 2**20) | V2 | {
        "proc/self/cgroup": "0::/a\n",
        "sys/fs/cgroup/a/memory.max": 2 * GIB,
    }  # fmt: skip
    limit, available, doubts = memory_doubts(tree(tmp_path, files))
    assert (limit, available) == (2 * GIB, 2 * GIB) and "does not say how much it holds" in doubts


def test_groups_that_say_max_all_the_way_in_a_circle_of_links(tmp_path: Path) -> None:
    """A tree whose folders link to each other, ten thousand levels by name: bounded, and the limit above is found."""
    depth = 10000
    files = meminfo(8 * 2**20, MemFree=1000, MemAvailable=6 * 2**20) | V2 | {
        "proc/self/cgroup": f"0::/a{'/round' * depth}\n",
        "sys/fs/cgroup/a/memory.max": "max",
        "sys/fs/cgroup/memory.max": 3 * GIB,
        "sys/fs/cgroup/memory.current": 0,
    }  # fmt: skip
    root = tree(tmp_path, files)
    (root / "sys/fs/cgroup/a/round").symlink_to(".", target_is_directory=True)
    assert read_memory(root).limit_bytes == 3 * GIB


def test_a_group_folder_that_links_to_itself(tmp_path: Path) -> None:
    files = meminfo(8 * 2**20, MemFree=1000, MemAvailable=6 * 2**20) | V2 | {"proc/self/cgroup": "0::/a/b\n"}
    root = tree(tmp_path, files)
    (root / "sys/fs/cgroup").mkdir(parents=True)
    (root / "sys/fs/cgroup/a").symlink_to("a")
    (root / "sys/fs/cgroup/memory.max").symlink_to("memory.max")
    limit, _, doubts = memory_doubts(root)
    assert limit == 8 * GIB and "memory.max" not in doubts.replace("cannot be read", "")


def test_a_recorded_tree_is_never_filled_from_this_machine(tmp_path: Path) -> None:
    box = probe(tmp_path)
    assert (box.memory, box.cpu, box.cards, box.kernel, box.os, box.environment) == (None, None, (), None, None, None)
    assert "/proc/meminfo: it says no MemTotal -> how much memory there is is unknown" in said(box)


# ------------------------------------------------------------------------------------------------- cores and system


CPUINFO = "".join(f"processor\t: {n}\nmodel name\t: Some CPU\nflags\t\t: fpu avx2 fma f16c\n\n" for n in range(8))


def test_memory_nodes_with_cores_that_may_be_used_count(tmp_path: Path) -> None:
    """Node 2 is memory alone; a process that is bound to the first node gets one rank."""
    folder = "sys/devices/system/node"
    files: dict[str, object] = {"proc/cpuinfo": CPUINFO}
    files |= {f"{folder}/node{n}/cpulist": text for n, text in enumerate(["0-3\n", "4-5,6-7\n", "\n"])}
    root = tree(tmp_path, files)
    assert read_cpu(root, range(8)).numa_nodes == 2
    assert read_cpu(root, range(2)).numa_nodes == 1


@pytest.mark.parametrize("text", ["", "x", "7-3", "0-99999999999", "-1"])
def test_a_node_list_that_is_none_is_one_node(tmp_path: Path, text: str) -> None:
    files = {"proc/cpuinfo": CPUINFO, "sys/devices/system/node/node0/cpulist": text}
    assert read_cpu(tree(tmp_path, files), range(8)).numa_nodes == 1


def test_cores_of_a_recorded_tree_are_its_own(tmp_path: Path) -> None:
    root = tree(tmp_path, {"proc/cpuinfo": CPUINFO})
    assert read_cpu(root).usable == 8
    tree(tmp_path, {"proc/self/status": "Name:\tx\nCpus_allowed_list:\t2-4,7,900\n"})
    cpu = read_cpu(root)
    assert (cpu.usable, cpu.logical, cpu.source) == (4, 8, "affinity")


VIRTUAL = CPUINFO.replace("fpu", "fpu hypervisor")


@pytest.mark.parametrize(
    ("files", "environment", "notes"),
    [
        ({"proc/cpuinfo": CPUINFO}, "bare", ""),
        ({"proc/cpuinfo": VIRTUAL}, "vm", ""),
        ({"proc/cpuinfo": CPUINFO, ".dockerenv": ""}, "container", ""),
        ({"proc/cpuinfo": CPUINFO, "run/.containerenv": ""}, "container", ""),
        ({"proc/cpuinfo": CPUINFO, "proc/self/cgroup": "0::/kubepods.slice/x\n"}, "container", ""),
        ({"proc/cpuinfo": CPUINFO, "proc/self/cgroup": "0::/system.slice/docker.service\n"}, "bare", ""),
        ({"proc/cpuinfo": VIRTUAL, "run/systemd/container": "lxc"}, "vm", "in a container"),
        ({"proc/cpuinfo": VIRTUAL, "proc/sys/kernel/osrelease": "5.15.167.4-microsoft-standard-WSL2"}, "wsl2", ""),
        ({"proc/cpuinfo": "Features\t: asimd\n", "sys/class/dmi/id/sys_vendor": "QEMU"}, "vm", ""),
        ({"proc/cpuinfo": "Features\t: asimd\n", "proc/device-tree/compatible": "linux,dummy-virt\0"}, "vm", ""),
        ({"proc/cpuinfo": CPUINFO, "sys/class/dmi/id/sys_vendor": "Amazon EC2"}, "bare", ""),
        ({}, None, ""),
    ],
)
def test_environment(tmp_path: Path, files: dict[str, object], environment: str | None, notes: str) -> None:
    system = read_system(Tree(tree(tmp_path, files)))
    assert (system.environment, system.notes) == (environment, notes)


def test_names_of_system_and_kernel(tmp_path: Path) -> None:
    files = {
        "usr/lib/os-release": 'NAME=X\nPRETTY_NAME="Ubuntu 24.04.2 LTS"\n',
        "proc/sys/kernel/osrelease": "6.8.0-45\n",
    }
    box = probe(tree(tmp_path, files))
    assert (box.os, box.kernel) == ("Ubuntu 24.04.2 LTS", "6.8.0-45")


def test_wsl2_that_shares_a_gpu_which_nothing_names(tmp_path: Path) -> None:
    files = {"proc/cpuinfo": CPUINFO, "proc/sys/kernel/osrelease": "6.6-microsoft-standard-WSL2", "dev/dxg": ""}
    assert "Windows shares a GPU" in said(probe(tree(tmp_path, files)))


# --------------------------------------------------------------------------------------------------------- the PCI bus


def on_bus(root: Path, pci: str, vendor: int, device: int, ports: tuple[str, ...] = (), **files: object) -> Path:
    place = root / "/".join(["sys/devices/pci0000:00", *ports, pci])
    facts = {"vendor": hex(vendor), "device": hex(device), "class": "0x030000"} | files
    tree(place, {name: str(value) for name, value in facts.items() if name != "driver"})
    if "driver" in files:
        (root / f"sys/bus/pci/drivers/{files['driver']}").mkdir(parents=True, exist_ok=True)
        (place / "driver").symlink_to(os.path.relpath(root / f"sys/bus/pci/drivers/{files['driver']}", place))
    entry = root / "sys/bus/pci/devices" / pci
    entry.parent.mkdir(parents=True, exist_ok=True)
    entry.symlink_to(os.path.relpath(place, entry.parent))
    return place


@pytest.mark.parametrize(("driver", "what"), [(None, "it has no driver"), ("nouveau", "its driver is nouveau")])
def test_a_laptops_second_gpu_without_its_driver(tmp_path: Path, driver: str | None, what: str) -> None:
    tree(tmp_path, {"usr/share/misc/pci.ids": "10de  NVIDIA Corporation\n\t1d52  GP108BM [GeForce MX250]\n"})
    on_bus(tmp_path, "0000:01:00.0", 0x10DE, 0x1D52, **({"driver": driver} if driver else {}), **{"class": "0x030200"})
    box = probe(tmp_path)
    card = box.cards[0]
    assert (card.vendor, card.name, card.total_bytes) == ("nvidia", "NVIDIA GeForce MX250 (10de:1d52)", None)
    assert card.id == card.pci == "0000:01:00.0"
    assert f"is on the bus, {what}; nothing says its memory -> its memory is unknown" in said(box)


def test_a_card_that_is_lent_to_a_virtual_machine_says_so(tmp_path: Path) -> None:
    on_bus(tmp_path, "0000:0b:00.0", 0x1002, 0x744C, driver="vfio-pci")
    box = probe(tmp_path)
    assert [(card.vendor, card.total_bytes) for card in box.cards] == [("amd", None)]
    assert "its driver is vfio-pci" in said(box)


def test_intel_with_memory_of_its_own_by_both_drivers(tmp_path: Path) -> None:
    """The chip behind the card's bridge claims 2.5 GT/s x1: the upper bridge and the slot tell."""
    ports = ("0000:00:01.0", "0000:01:00.0", "0000:02:01.0")
    for depth, speed in enumerate(("32.0", "16.0", "2.5")):
        where = "/".join(["sys/devices/pci0000:00", *ports[: depth + 1]])
        facts = {"vendor": "0x8086", "max_link_speed": f"{speed} GT/s PCIe", "max_link_width": [16, 8, 1][depth]}
        tree(tmp_path, {f"{where}/{name}": value for name, value in facts.items()})
    slow = {"max_link_speed": "2.5 GT/s PCIe", "max_link_width": 1}
    place = on_bus(tmp_path, "0000:03:00.0", 0x8086, 0xE20B, ports, driver="xe", **slow)
    tree(place, {"tile0/physical_vram_size_bytes": 12168933376})
    on_bus(tmp_path, "0000:09:00.0", 0x8086, 0x56A2, driver="i915", **slow)
    tree(tmp_path, {"sys/class/drm/card1/lmem_total_bytes": 8096681984})
    (tmp_path / "sys/class/drm/card1/device").symlink_to("../../../devices/pci0000:00/0000:09:00.0")
    new, old = probe(tmp_path).cards
    assert (new.total_bytes, new.unified, new.link) == (12168933376, False, Link(4, 8))
    assert (old.total_bytes, old.unified, old.link) == (8096681984, False, None)


def test_intels_processor_graphics_share_the_hosts_memory(tmp_path: Path) -> None:
    on_bus(tmp_path, "0000:00:02.0", 0x8086, 0x8A52, driver="i915")
    card = probe(tmp_path).cards[0]
    assert (card.vendor, card.unified, card.total_bytes, card.link) == ("intel", True, None, None)


def test_a_discrete_intel_card_that_says_no_size_is_no_processor_graphics(tmp_path: Path) -> None:
    on_bus(tmp_path, "0000:03:00.0", 0x8086, 0x56A0, driver="i915")
    card = probe(tmp_path).cards[0]
    assert (card.unified, card.total_bytes) == (False, None)


def test_what_only_draws_is_no_device_and_other_bus_devices_are_not_looked_at(tmp_path: Path) -> None:
    for number, vendor in enumerate((0x1A03, 0x102B, 0x1234, 0x1AF4)):
        on_bus(tmp_path, f"0000:0{number}:00.0", vendor, 1)
    on_bus(tmp_path, "0000:08:00.0", 0x10DE, 0x10F0, **{"class": "0x040300"})
    assert probe(tmp_path).cards == ()


def test_nothing_is_listed_twice(tmp_path: Path) -> None:
    """The bus, drm and KFD all show this card."""
    place = on_bus(tmp_path, "0000:03:00.0", 0x1002, 0x744C, driver="amdgpu")
    tree(place, {"mem_info_vram_total": 25753026560, "uevent": "PCI_SLOT_NAME=0000:03:00.0\n"})
    (tmp_path / "sys/class/drm/card0").mkdir(parents=True)
    (tmp_path / "sys/class/drm/card0/device").symlink_to("../../../devices/pci0000:00/0000:03:00.0")
    node = "sys/class/kfd/kfd/topology/nodes/1/properties"
    tree(tmp_path, {node: "simd_count 384\ngfx_target_version 110000\nlocation_id 768\n"})
    assert [(card.pci, card.arch) for card in probe(tmp_path).cards] == [("0000:03:00.0", "gfx1100")]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("00000000:01:00.0", "0000:01:00.0"), ("0000:C4:00.0", "0000:c4:00.0"), ("01:00.0", "0000:01:00.0"),
        ("10000:e1:00.0", "10000:e1:00.0"), ("0000:01:00", "0000:01:00.0"), ("", None), (None, None), ("card0", None),
    ],
)  # fmt: skip
def test_addresses_in_every_spelling(text: str | None, found: str | None) -> None:
    assert address(text) == found


# --------------------------------------------------------------------------------------------------- it never fails


NAMES = (
    "proc/meminfo", "proc/cpuinfo", "proc/cmdline", "proc/self/cgroup", "proc/self/mountinfo", "proc/self/status",
    "proc/sys/kernel/osrelease", "etc/os-release", "sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current",
    "sys/fs/cgroup/memory.stat", "sys/fs/cgroup/cpu.max", "sys/class/drm/card0/device/vendor",
    "sys/class/drm/card0/device/uevent", "sys/class/drm/card0/device/mem_info_vram_total",
    "sys/class/drm/card0/device/mem_info_gtt_total", "sys/class/drm/card0/device/resource",
    "sys/class/kfd/kfd/topology/nodes/1/properties", "sys/class/kfd/kfd/topology/nodes/1/mem_banks/0/properties",
    "sys/bus/pci/devices/0000:01:00.0/class", "sys/bus/pci/devices/0000:01:00.0/vendor",
    "sys/module/ttm/parameters/pages_limit", "sys/devices/system/node/node0/cpulist",
)  # fmt: skip
WORDS = st.sampled_from(
    [
        "MemTotal: 8 kB\n", "0::/a/b\n", "max", "-1", "0x1002", "0x10de", "0x030000", "simd_count 8\n", "0-7", "\n",
        "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n", "PCI_SLOT_NAME=0000:01:00.0\n", "amdgpu.gttsize=x ",
        "gfx_target_version 110003\n", "size_in_bytes 99999999999999999999\n", "processor : 0\n", "9" * 30,
        "location_id 768\n",
    ]
)  # fmt: skip
CONTENT = st.one_of(st.lists(WORDS, max_size=4).map("".join), st.text(max_size=40), st.binary(max_size=40))


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(files=st.dictionaries(st.sampled_from(NAMES), CONTENT, max_size=14), serial=st.uuids())
def test_no_content_of_any_file_makes_it_fail(tmp_path: Path, files: dict[str, str | bytes], serial: object) -> None:
    root = tmp_path / str(serial)
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass"))
    box = probe(root)
    assert len({card.id for card in box.cards}) == len(box.cards)
    for card in box.cards:
        assert card.total_bytes is None or card.total_bytes > 0
        assert card.free_bytes is None or (card.total_bytes is not None and 0 <= card.free_bytes <= card.total_bytes)
    json.dumps(box_to_json(box), allow_nan=False)
    assert all(len(line) <= 100 or " " not in line.strip() for line in box_page(box, None, Style()))


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("12\n", 12),
        ("0x1f", 31),
        ("-1", -1),
        ("", None),
        ("1_000", None),
        ("1.5", None),
        ("٤", None),
        ("9" * 5000, None),
    ],
)
def test_numbers_as_the_kernel_writes_them(text: str, number: int | None) -> None:
    assert whole(text) == number


def test_names_with_numbers_come_in_their_order() -> None:
    assert sorted(["card10", "card2", "card1-DP-1", "card1"], key=natural) == ["card1", "card1-DP-1", "card2", "card10"]


# ------------------------------------------------------------------------------------------------ profile, page, disk


def laptop(root: Path) -> Path:
    """A 780M laptop with an NVIDIA card that has no driver."""
    place = on_bus(root, "0000:c4:00.0", 0x1002, 0x15BF, driver="amdgpu")
    on_bus(root, "0000:01:00.0", 0x10DE, 0x28E0)
    tree(place, {"mem_info_vram_total": GIB, "mem_info_vram_used": 200 * MIB, "mem_info_gtt_total": 24 * GIB,
                 "uevent": "PCI_SLOT_NAME=0000:c4:00.0\n"})  # fmt: skip
    (root / "sys/class/drm/card0").mkdir(parents=True)
    (root / "sys/class/drm/card0/device").symlink_to("../../../devices/pci0000:00/0000:c4:00.0")
    return tree(
        root, meminfo(30935848, MemFree=1000, MemAvailable=29253632, SwapTotal=8388608) | {"proc/cpuinfo": CPUINFO}
    )


def test_what_probe_prints_is_a_profile_that_budget_reads(tmp_path: Path) -> None:
    box = probe(laptop(tmp_path))
    again = box_from_json(json.loads(json.dumps(box_to_json(box))), "probe")
    assert replace(again, doubts=()) == replace(box, doubts=())
    assert set(box.doubts) <= set(again.doubts)


def run(capsys: pytest.CaptureFixture[str], **args: object) -> str:
    given_args = {"json": False, "disk": None, "root": "/", "nvml": None} | args
    assert command.run(SimpleNamespace(**given_args), {}) == 0  # type: ignore[arg-type]
    return capsys.readouterr().out


def test_the_page_for_a_person(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = run(capsys, root=str(laptop(tmp_path)))
    lines = page.splitlines()
    assert lines[0].startswith("cpu     Some CPU; 8 cores; avx2")
    assert "27.9 of 29.5 GiB available" in lines[1]
    assert "no hypervisor, no container" in page
    assert "AMD (1002:15bf)" in page and "gfx1103" in page and "shares host memory, up to 24.0 GiB" in page
    assert "NVIDIA (10de:28e0)" in page and "unknown" in page
    assert "What is in doubt" in page
    assert max(map(len, lines)) <= 100


def test_json_with_a_disk_rate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("budget.disk.measure_disk", lambda folder: DiskRate(folder, 869.04e6, GIB, True))
    said = json.loads(run(capsys, root=str(laptop(tmp_path)), json=True, disk="/tank"))
    assert said["schema"] == 1 and said["disk"] == {"path": "/tank", "read_mb_s": 869.0, "direct": True}
    assert said["gpus"][0]["vendor"] == "nvidia" and said["gpus"][1]["uma"] is True


def test_a_disk_is_measured_and_nothing_is_left_there(tmp_path: Path) -> None:
    rate = measure_disk(str(tmp_path), file_bytes=9 << 20)
    assert rate.read_bytes == 8 << 20 and rate.read_bytes_s > 0 and rate.path == str(tmp_path)
    assert os.listdir(tmp_path) == []


def test_a_slow_disk_is_left_after_a_while(tmp_path: Path) -> None:
    """Each look at the clock finds it six seconds later: two blocks are written, one is read."""
    seconds = iter(range(0, 10**6, 6))
    rate = measure_disk(str(tmp_path), file_bytes=64 << 20, clock=lambda: float(next(seconds)))
    assert rate.read_bytes == 4 << 20


@pytest.mark.parametrize("args", [{"disk": "/nonexistent/folder"}, {"root": "/nonexistent/folder"}])
def test_folders_that_are_not_there(args: dict[str, str]) -> None:
    given_args = {"json": False, "disk": None, "root": "/", "nvml": None} | args
    with pytest.raises(SettingError) as error:
        command.run(SimpleNamespace(**given_args), {})  # type: ignore[arg-type]
    assert error.value.field == next(iter(args)) and "/nonexistent/folder" in error.value.message
