"""What may be held on each device of a box: figures, rules, properties, and all collected boxes."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from budget.belief import believe
from budget.ceilings import HOST_USE_BYTES, WSL_RESERVE_BYTES, Ceilings, Device, ceilings
from budget.facts import GIB, MIB, Box, Card, CpuFacts, Doubt, MemoryFacts
from budget.host import read_memory
from budget.profile import box_from_json
from budget.wish import DEFAULT_CARD_FLOOR, DEFAULT_HOST_FLOOR

BOXES: list[dict[str, Any]] = json.loads((Path(__file__).parents[1] / "data/boxes/boxes.json").read_text())


def host(total: int, available: int | None = None, limit: int | None = None, source: str = "MemTotal") -> MemoryFacts:
    """MiB."""
    return MemoryFacts(
        total * MIB, (limit or total) * MIB, source, None if available is None else available * MIB, None
    )


def nvidia(total: int | None = 24576, free: int | None = None, **more: Any) -> Card:
    """MiB."""
    sizes = {f"{key}_bytes": value * MIB for key, value in more.items() if isinstance(value, int) and key in SIZES}
    others = {key: value for key, value in more.items() if key not in SIZES}
    return Card(
        vendor=others.pop("vendor", "nvidia"),
        id=others.pop("id", "GPU-0"),
        name=others.pop("name", "RTX 3090"),
        arch=others.pop("arch", "sm_86"),
        total_bytes=None if total is None else total * MIB,
        free_bytes=None if free is None else free * MIB,
        **sizes,
        **others,
    )


SIZES = ("reserved", "used", "visible", "gtt_total", "gtt_used", "bar1_total", "bar1_free")


def apu(carve_out: int | None = 1024, **more: Any) -> Card:
    """MiB."""
    return nvidia(carve_out, vendor="amd", name="Radeon 780M", arch="gfx1103", unified=True, **{"id": "apu", **more})


def a_box(*cards: Card, memory: MemoryFacts | None = None, **more: Any) -> Box:
    return Box(id="test", memory=memory, cpu=None, cards=cards, **more)


def only(found: Ceilings) -> Device:
    """The one device beside the CPU."""
    assert len(found.devices) == 2
    return found.devices[0]


def said(found: Ceilings, *words: str) -> Doubt:
    """The one doubt that has all these words."""
    matching = [doubt for doubt in found.doubts if all(word in " ".join(vars(doubt).values()) for word in words)]
    assert len(matching) == 1, found.doubts
    return matching[0]


# ------------------------------------------------------------------------------------------------------ discrete cards


def test_free_memory_less_the_floor() -> None:
    device = only(ceilings(a_box(nvidia(16376, 15348, reserved=434, used=596)), None))
    assert device.ceiling_bytes == (15348 - 1024) * MIB
    assert (device.kind, device.usable, device.why_not) == ("discrete", True, None)
    assert device.floor_bytes == DEFAULT_CARD_FLOOR
    assert device.made_of == "15348 MiB free - 1024 MiB floor"


def test_the_floor_is_the_callers_and_taken_off_once() -> None:
    card = nvidia(24576, 20000, reserved=450)
    for floor in (0, 1, 512 * MIB, 4096 * MIB):
        device = only(ceilings(a_box(card), floor))
        assert device.ceiling_bytes == 20000 * MIB - floor and device.floor_bytes == floor


def test_what_homeserve_holds_would_be_free_without_it() -> None:
    card = nvidia(24576, 4000, reserved=450)
    device = only(ceilings(a_box(card), None, {"GPU-0": 20000 * MIB}))
    assert device.ceiling_bytes == (24000 - 1024) * MIB
    assert "+ 20000 MiB held by homeserve" in device.made_of


def test_never_more_than_the_driver_leaves() -> None:
    device = only(ceilings(a_box(nvidia(24576, 4000, reserved=450)), None, {"GPU-0": 90000 * MIB}))
    assert device.ceiling_bytes == (24576 - 450 - 1024) * MIB
    assert device.made_of == "24576 MiB - 450 MiB kept back - 1024 MiB floor"


def test_a_full_card_has_a_ceiling_of_zero_and_not_less() -> None:
    assert only(ceilings(a_box(nvidia(24576, 900)), None)).ceiling_bytes == 0


def test_unknown_total_is_unknown_and_not_zero() -> None:
    device = only(ceilings(a_box(nvidia(None, 20000)), None))
    assert device.ceiling_bytes is None and device.total_bytes is None
    assert (device.usable, device.why_not) == (False, "its memory is unknown")


def test_unknown_free_is_total_less_reserved_less_used() -> None:
    found = ceilings(a_box(nvidia(12288, reserved=368, used=116)), None)
    assert only(found).ceiling_bytes == (12288 - 368 - 116 - 1024) * MIB
    assert said(found, "how much is free is not said").taken.endswith("= 11804 MiB")


def test_unknown_reserved_takes_nothing_off_and_says_so() -> None:
    found = ceilings(a_box(nvidia(5912, used=0)), None)
    assert only(found).ceiling_bytes == (5912 - 1024) * MIB
    assert said(found, "keeps for itself", "66 to 869").taken == "nothing; the floor of 1024 MiB has to cover it"
    assert not [doubt for doubt in ceilings(a_box(nvidia(5912, 5800)), None).doubts if "keeps" in doubt.what], (
        "what is free is known: nothing has to be assumed"
    )


def test_unknown_use_is_taken_as_none_and_a_screen_is_named() -> None:
    found = ceilings(a_box(nvidia(20475, reserved=460, display=True)), None)
    assert only(found).ceiling_bytes == (20475 - 460 - 1024) * MIB
    assert "screen" in said(found, "how much others hold is not known").what
    assert only(found).free_bytes is None, "what was assumed is not told as known"


def test_wsl2_keeps_its_share_of_every_card_whatever_the_driver_says() -> None:
    for reserved in (None, 300):
        card = nvidia(24463, reserved=reserved) if reserved else nvidia(24463)
        found = ceilings(a_box(card, environment="wsl2"), None)
        assert only(found).ceiling_bytes == 24463 * MIB - WSL_RESERVE_BYTES - 1024 * MIB
        assert "WSL2" in said(found, "1.31 GiB").what


def test_native_windows_is_a_doubt_and_wsl2_the_way_out() -> None:
    found = ceilings(a_box(nvidia(8192, 7286), environment="windows"), None)
    assert only(found).usable and "WSL2 works" in said(found, "native Windows").taken


def test_equal_cards_raise_one_doubt() -> None:
    cards = [nvidia(49140, reserved=632, used=1, id=f"GPU-{n}") for n in range(4)]
    assert [doubt.where for doubt in ceilings(a_box(*cards), None).doubts] == ["4 x RTX 3090"]


@pytest.mark.parametrize("vendor", ["intel", "other"])
def test_a_card_without_a_backend_is_listed_with_its_reason(vendor: str) -> None:
    found = ceilings(a_box(nvidia(15473, vendor=vendor)), None)
    assert (only(found).usable, only(found).why_not) == (False, f"no backend for {vendor} devices")
    assert not found.doubts, "nothing is planned there: nothing has to be doubted"


# ----------------------------------------------------------------------------------------------------- unified devices


def test_the_780m_laptop() -> None:
    """Carve-out 1024, GTT 24576, MemTotal 30211, MemAvailable 28568: 25600 MiB."""
    found = ceilings(a_box(apu(1024, gtt_total=24576), memory=host(30211, 28568)), None)
    device, cpu = found.devices
    assert device.ceiling_bytes == 25600 * MIB
    assert (device.kind, device.gtt_bytes, device.floor_bytes) == ("uma", 24576 * MIB, 0)
    assert device.made_of == "1024 MiB carve-out + 24576 MiB pinned of the host (GTT)"
    assert cpu.ceiling_bytes == (28568 - 256) * MIB
    assert (device.pool, cpu.pool, device.private_bytes) == (0, 0, 1024 * MIB)
    assert found.pools == (cpu.ceiling_bytes,)


def test_the_host_binds_where_it_has_less_than_gtt_allows() -> None:
    device = ceilings(a_box(apu(1024, gtt_total=24576), memory=host(30211, 8000)), None).devices[0]
    assert device.ceiling_bytes == (1024 + 8000 - 256) * MIB
    assert device.made_of == "1024 MiB carve-out + 7744 MiB that the host can give"


def test_a_control_group_binds_an_apu_as_well() -> None:
    box = a_box(apu(1024, gtt_total=24576), memory=host(30211, 4000, 4096, "/sys/fs/cgroup/memory.max"))
    assert ceilings(box, None).devices[0].ceiling_bytes == (1024 + 4000 - 256) * MIB


def test_what_others_use_of_carve_out_and_gtt_is_taken_off() -> None:
    card = apu(512, used=490, gtt_total=15679, gtt_used=3764)
    device = ceilings(a_box(card, memory=host(31358, 25000)), None).devices[0]
    assert device.ceiling_bytes == (22 + 11915) * MIB
    assert device.private_bytes == 22 * MIB and device.free_bytes == 22 * MIB


def test_gtt_above_the_hosts_memory_is_cut_down() -> None:
    found = ceilings(a_box(apu(512, gtt_total=131072), memory=host(127918, 120000)), None)
    assert only(found).gtt_bytes == 127918 * MIB
    assert only(found).ceiling_bytes == (512 + 120000 - 256) * MIB
    assert "131072" in said(found, "more than the 127918 MiB").what


@pytest.mark.parametrize(
    ("kernel", "carve_out", "memory", "gtt"),
    [
        (None, 512, 32000, 16000),
        ("6.8.0-49-generic", 8192, 24000, 12000),
        ("6.17.0-35", 512, 4096, 3072),
        ("7.0.0", 512, 2048, 2048),
        ("5.19.17", 512, 32000, 3072),
        ("5.15.0-185-generic", 8192, 24000, 8192),
        ("5.15.0-185-generic", 16384, 16000, 12000),
    ],
)
def test_unsaid_gtt_is_the_kernels_default(kernel: str | None, carve_out: int, memory: int, gtt: int) -> None:
    found = ceilings(a_box(apu(carve_out), memory=host(memory, memory), kernel=kernel), None)
    assert only(found).gtt_bytes == gtt * MIB
    assert said(found, "(GTT) is not said").taken == f"{gtt} MiB"


def test_gtt_without_knowing_the_host_is_taken_with_a_doubt() -> None:
    found = ceilings(a_box(apu(4096, gtt_total=98304)), None)
    assert only(found).ceiling_bytes == 102400 * MIB
    assert said(found, "not a promise").taken == "all of GTT: 98304 MiB"
    assert found.pools == (98304 * MIB,), "and all devices together may not pin more"
    assert found.devices[-1].ceiling_bytes is None, "the host itself stays unknown"


def test_only_the_carve_out_known() -> None:
    found = ceilings(a_box(apu(8192)), None)
    assert only(found).ceiling_bytes == 8192 * MIB and only(found).gtt_bytes is None
    assert said(found, "neither the host's memory nor").taken == "the carve-out alone"
    assert found.pools == (None,)


def test_nothing_known_of_an_apu() -> None:
    found = ceilings(a_box(apu(None)), None)
    assert only(found).ceiling_bytes is None and only(found).why_not == "its memory is unknown"


def test_since_linux_6_10_both_pools_are_shown() -> None:
    box = a_box(apu(65536, gtt_total=31949), memory=host(63488, 60000))
    assert not [doubt for doubt in ceilings(replace(box, kernel="6.9.3"), None).doubts if "6.10" in doubt.what]
    doubt = said(ceilings(replace(box, kernel="6.17.0-35"), None), "6.10")
    assert "carve-out 65536 MiB, GTT 31949 MiB" in doubt.what and "from the carve-out" in doubt.what
    small = a_box(apu(512, gtt_total=31949), memory=host(63488, 60000), kernel="6.10.1")
    assert "from GTT of 31949 MiB" in said(ceilings(small, None), "6.10").what


def test_an_integrated_gpu_beside_a_card_is_used_when_it_is_named() -> None:
    box = a_box(apu(512, gtt_total=15602, pci="0000:10:00.0"), nvidia(16304, 16000), memory=host(31200, 30000))
    device = ceilings(box, None).devices[0]
    assert not device.usable and device.why_not == "integrated, beside RTX 3090; --devices apu would use it"
    for name in ("apu", "0000:10:00.0"):
        assert ceilings(box, None, named=frozenset({name})).devices[0].usable
    assert ceilings(box, None, named=frozenset({"GPU-0"})).devices[0].usable is False
    assert ceilings(box, None).devices[1].usable


def test_an_integrated_gpu_beside_a_card_without_backend_is_used() -> None:
    box = a_box(apu(512, gtt_total=15602), nvidia(15473, vendor="intel", name="Arc"), memory=host(31200, 30000))
    assert [device.usable for device in ceilings(box, None).devices] == [True, False, True]


def test_an_explicit_floor_holds_on_an_apu_and_its_host() -> None:
    box = a_box(apu(1024, gtt_total=24576), memory=host(30211, 28568))
    device, cpu = ceilings(box, 4096 * MIB).devices
    assert device.ceiling_bytes == (25600 - 4096) * MIB and cpu.ceiling_bytes == (28568 - 4096) * MIB


def test_what_homeserve_holds_through_an_apu_is_given_back_to_both() -> None:
    card = apu(1024, used=1024, gtt_total=24576, gtt_used=12000)
    box = a_box(card, memory=host(30211, 16000))
    device, cpu = ceilings(box, None, {"apu": 10000 * MIB}).devices
    assert device.ceiling_bytes == (24576 - 3024) * MIB, "of 13024 in use, 3024 are others'"
    assert cpu.ceiling_bytes == (16000 + 10000 - 1024 - 256) * MIB


# ------------------------------------------------------------------------------------------------------------ the host


def test_the_host_is_always_listed_last() -> None:
    for box in (a_box(), a_box(nvidia()), a_box(memory=host(8192, 6000)), a_box(apu(), nvidia())):
        cpu = ceilings(box, None).devices[-1]
        assert (cpu.id, cpu.kind, cpu.vendor, cpu.index, cpu.pool) == ("cpu", "cpu", "cpu", len(box.cards), 0)


def test_the_host_has_what_is_available_less_the_floor() -> None:
    facts = CpuFacts("EPYC 7302P", 32, 16, "physical cores", frozenset({"avx2", "fma", "f16c"}))
    cpu = ceilings(replace(a_box(memory=host(8192, 6000)), cpu=facts), None).devices[0]
    assert cpu.ceiling_bytes == (6000 - 256) * MIB and cpu.floor_bytes == DEFAULT_HOST_FLOOR
    assert (cpu.name, cpu.arch, cpu.usable) == ("EPYC 7302P", "avx2", True)


def test_held_host_memory_counts_but_never_past_the_limit() -> None:
    box = a_box(memory=host(8192, 2000, 4096, "memory.max"))
    assert ceilings(box, 0, {"cpu": 1000 * MIB}).devices[0].ceiling_bytes == 3000 * MIB
    assert ceilings(box, 0, {"cpu": 9000 * MIB}).devices[0].ceiling_bytes == 4096 * MIB


def test_unknown_available_leaves_the_system_its_share() -> None:
    found = ceilings(a_box(memory=host(8192)), None)
    assert found.devices[0].ceiling_bytes == 8192 * MIB - HOST_USE_BYTES - 256 * MIB
    assert "1024 MiB for the running system" in said(found, "is available is not known").taken


def test_unknown_available_under_a_control_group_is_the_limit() -> None:
    found = ceilings(a_box(memory=host(79872, None, 8192, "control group")), None)
    assert found.devices[0].ceiling_bytes == (8192 - 256) * MIB
    assert "8192 MiB (control group)" in said(found, "is available is not known").what


def test_unknown_memory_is_unknown_and_not_zero() -> None:
    found = ceilings(a_box(), None)
    assert found.devices[0].ceiling_bytes is None and found.pools == (None,)
    assert (found.devices[0].usable, found.devices[0].why_not) == (False, "its memory is unknown")


def test_a_limit_without_a_total_leaves_the_total_unknown() -> None:
    found = ceilings(a_box(memory=MemoryFacts(None, 47104 * MIB, "control group", None)), None)
    assert found.devices[0].total_bytes is None and found.devices[0].ceiling_bytes == (47104 - 256) * MIB
    assert "only a limit of 47104 MiB" in said(found, "is not known, only a limit").what


def test_lxcfs_says_120_gib_and_the_control_group_98(tmp_path: Path) -> None:
    """The number of the control group counts, whatever /proc/meminfo says."""
    files = {
        "proc/meminfo": f"MemTotal: {120 * GIB // 1024} kB\nMemAvailable: {119 * GIB // 1024} kB\nSwapTotal: 0 kB\n",
        "proc/self/cgroup": "0::/lxc\n",
        "proc/self/mountinfo": "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
        "sys/fs/cgroup/lxc/memory.max": f"{98 * GIB}\n",
        "sys/fs/cgroup/lxc/memory.current": f"{6 * GIB}\n",
        "sys/fs/cgroup/lxc/memory.stat": f"anon {1 * GIB}\ninactive_file {5 * GIB}\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    memory = read_memory(tmp_path)
    assert memory.limit_bytes == 98 * GIB
    cpu = ceilings(a_box(memory=memory), None).devices[0]
    assert cpu.ceiling_bytes == 97 * GIB - 256 * MIB, "98 GiB less 1 GiB that is held; page cache is given back"


# ---------------------------------------------------------------------------------------------------------- each once


def test_one_device_that_is_listed_six_times_is_one() -> None:
    cards = [apu(4096, id=f"amd-{n}", pci="0000:04:00.0") for n in range(6)]
    found = ceilings(a_box(*cards, memory=host(28000, 20000)), None)
    assert only(found).ceiling_bytes == 4096 * MIB + 14000 * MIB
    assert said(found, "listed more than once at 0000:04:00.0").taken == "one card: Radeon 780M"


def test_of_two_entries_the_one_that_knows_more_stays_under_the_first_name() -> None:
    cards = (nvidia(None, id="GPU-1"), nvidia(24576, 24000, id="GPU-1", name="RTX 3090 again"))
    device = only(ceilings(a_box(*cards), None))
    assert (device.id, device.name, device.ceiling_bytes) == ("GPU-1", "RTX 3090 again", (24000 - 1024) * MIB)


def test_slices_of_a_card_are_devices_and_the_card_they_are_cut_from_is_not() -> None:
    cards = (
        nvidia(81559, 80000, id="GPU-1", pci="0000:01:00.0", name="H100"),
        nvidia(40448, 40423, id="MIG-1", pci="0000:01:00.0", name="H100 MIG slice"),
        nvidia(20096, 20080, id="MIG-2", pci="0000:01:00.0", name="H100 MIG slice"),
    )
    found = ceilings(a_box(*cards), None)
    assert [device.id for device in found.devices] == ["MIG-1", "MIG-2", "cpu"]
    assert [device.bar1.p2p for device in found.devices[:2] if device.bar1] == ["no", "no"]
    assert said(found, "cut into MIG slices").taken == "the slices alone"


# ------------------------------------------------------------------------------------------------- contradictory boxes


def test_more_free_than_there_is_is_cut_down() -> None:
    found = ceilings(a_box(nvidia(32106, 55372)), None)
    assert only(found).ceiling_bytes == (32106 - 1024) * MIB
    assert said(found, "55372 MiB are said to be free").taken == "32106 MiB"


def test_more_in_use_than_there_is_leaves_nothing() -> None:
    assert only(ceilings(a_box(nvidia(8192, used=9000)), None)).ceiling_bytes == 0
    assert only(ceilings(a_box(nvidia(8192, reserved=9000)), None)).ceiling_bytes == 0


@pytest.mark.parametrize("value", [0, -1, 1 << 60])
def test_what_is_no_size_is_unknown(value: int) -> None:
    found = ceilings(a_box(replace(nvidia(), total_bytes=value)), None)
    assert only(found).ceiling_bytes is None and only(found).total_bytes is None
    assert found.doubts


def test_a_host_that_contradicts_itself() -> None:
    facts = MemoryFacts(8 * GIB, 16 * GIB, "memory.max", 12 * GIB, -1)
    found = ceilings(a_box(memory=facts), 0)
    assert found.devices[0].ceiling_bytes == 8 * GIB
    assert [doubt.where for doubt in found.doubts] == ["host memory, memory.max", "host memory", "swap"]
    nothing = ceilings(a_box(memory=MemoryFacts(None, -1, "memory.max", None)), 0)
    assert nothing.devices[0].ceiling_bytes is None and nothing.doubts


def test_memory_that_nobody_answers_for_is_named() -> None:
    found = ceilings(a_box(nvidia(16304, 8000, used=35)), None)
    assert "the other 8269 MiB are" in said(found, "nobody says where").what
    assert not ceilings(a_box(nvidia(24576, 24118, used=7, reserved=450)), None).doubts


# ---------------------------------------------------------------------------------------------------------- properties

EXAMPLES = 25
sizes = st.integers(0, 256 * 1024).map(lambda mib: mib * MIB)
some = st.none() | sizes
whole = st.none() | st.integers(1, 256 * 1024).map(lambda mib: mib * MIB)
floors = st.none() | st.integers(0, 8192).map(lambda mib: mib * MIB)


@st.composite
def cards(draw: st.DrawFn, number: int) -> Card:
    vendor = draw(st.sampled_from(["nvidia", "amd", "amd", "intel"]))
    return Card(
        vendor=vendor,
        id=f"card-{number}",
        name=draw(st.sampled_from(["one", "two"])),
        arch=draw(st.sampled_from([None, "sm_86", "sm_120"])),
        unified=draw(st.booleans()),
        total_bytes=draw(whole),
        reserved_bytes=draw(some),
        used_bytes=draw(some),
        free_bytes=draw(some),
        visible_bytes=draw(whole),
        gtt_total_bytes=draw(whole),
        gtt_used_bytes=draw(some),
        bar1_total_bytes=draw(whole),
        bar1_free_bytes=draw(some),
        pci=draw(st.sampled_from([None, f"0000:0{number}:00.0"])),
    )


@st.composite
def memories(draw: st.DrawFn) -> MemoryFacts | None:
    total, group = draw(whole), draw(whole)
    if total is None and group is None:
        return None
    limit = min(size for size in (total, group) if size is not None)
    source = "MemTotal" if limit == total else "memory.max"
    return MemoryFacts(total, limit, source, draw(some), draw(some))


@st.composite
def boxes(draw: st.DrawFn) -> Box:
    count = draw(st.integers(0, 2))
    return Box(
        id="any",
        memory=draw(memories()),
        cpu=None,
        cards=tuple(draw(cards(number)) for number in range(count)),
        kernel=draw(st.sampled_from([None, "5.15.0", "6.8.1", "6.17.0"])),
        environment=draw(st.sampled_from([None, "bare", "vm", "container", "wsl2", "windows"])),
        p2p=draw(st.sampled_from([None, "works", "topo: OK", "CNS"])),
    )


helds = st.dictionaries(st.sampled_from(["cpu", "card-0", "card-1"]), sizes)


@given(boxes(), floors, helds)
@settings(max_examples=EXAMPLES)
def test_no_ceiling_is_larger_than_its_box(box: Box, floor: int | None, held: dict[str, int]) -> None:
    found = ceilings(box, floor, held)
    ram = None if box.memory is None else box.memory.limit_bytes
    for device, card in zip(found.devices, box.cards, strict=False):
        if device.ceiling_bytes is None:
            assert device.usable is False and device.why_not
            continue
        assert 0 <= device.private_bytes <= device.ceiling_bytes
        if device.kind == "discrete":
            assert card.total_bytes is not None and device.ceiling_bytes <= card.total_bytes
        elif ram is not None:
            assert device.ceiling_bytes <= (card.total_bytes or 0) + ram
        else:
            assert device.ceiling_bytes <= (card.total_bytes or 0) + (card.gtt_total_bytes or 0)
    cpu = found.devices[-1]
    assert (cpu.ceiling_bytes is None) == (ram is None)
    if ram is not None and cpu.ceiling_bytes is not None:
        assert 0 <= cpu.ceiling_bytes <= ram


@given(boxes(), floors, helds)
@settings(max_examples=EXAMPLES)
def test_a_shared_pool_is_never_larger_than_its_memory(box: Box, floor: int | None, held: dict[str, int]) -> None:
    found = ceilings(box, floor, held)
    assert [device.pool for device in found.devices if device.kind != "discrete"] == [0] * sum(
        device.kind != "discrete" for device in found.devices
    )
    own = [device.pool for device in found.devices if device.kind == "discrete"]
    assert own == list(range(1, len(found.pools))), "each card has a pool of its own"
    for device in found.devices:
        size = found.pools[device.pool]
        if device.ceiling_bytes is not None and device.kind == "discrete":
            assert size == device.ceiling_bytes
        elif device.ceiling_bytes is not None:
            assert device.ceiling_bytes - device.private_bytes <= (size or 0)
    if found.pools[0] is not None and box.memory is not None:
        carved = sum(card.total_bytes or 0 for card in box.cards if card.unified)
        private = sum(device.private_bytes for device in found.devices)
        assert private <= carved and private + found.pools[0] <= carved + box.memory.limit_bytes


@given(boxes(), floors)
@settings(max_examples=EXAMPLES)
def test_unknown_stays_unknown(box: Box, floor: int | None) -> None:
    found = ceilings(box, floor)
    for device, card in zip(found.devices, box.cards, strict=False):
        if card.total_bytes is None:
            assert device.total_bytes is None
            if device.kind == "discrete":
                assert device.ceiling_bytes is None
        if card.reserved_bytes is None:
            assert device.reserved_bytes is None
        if card.free_bytes is None and card.used_bytes is None:
            assert device.free_bytes is None
        if device.bar1 is not None and card.bar1_total_bytes is None:
            assert device.bar1.total_bytes is None
    if box.memory is None:
        assert found.devices[-1].total_bytes is None and found.devices[-1].free_bytes is None


GROWS = ("total_bytes", "free_bytes", "gtt_total_bytes")


@given(boxes(), floors, helds, st.data())
@settings(max_examples=EXAMPLES)
def test_more_memory_never_lowers_a_ceiling(
    box: Box, floor: int | None, held: dict[str, int], data: st.DataObject
) -> None:
    """Where more is said to be in use than there is, nothing is known of whose it is: there, for held = 0 only."""
    more = data.draw(st.integers(1, 64 * 1024)) * MIB
    for card in box.cards:
        if (card.gtt_used_bytes or 0) > (card.gtt_total_bytes or 0) or (card.used_bytes or 0) > (card.total_bytes or 0):
            held = {}
    memory = box.memory
    choices: list[Box] = []
    for index, card in enumerate(box.cards):
        for field in GROWS:
            # Two known figures forbid it here: free is believed a little past what is not in use (drivers round), and
            # far past it (a driver that cannot tell) the rest alone counts.
            if field == "free_bytes" and _over_full(card):
                continue
            if (size := getattr(card, field)) is not None:
                grown: dict[str, Any] = {field: size + more}
                changed = (*box.cards[:index], replace(card, **grown), *box.cards[index + 1 :])
                choices.append(replace(box, cards=changed))
    if memory is not None and memory.available_bytes is not None:
        choices.append(replace(box, memory=replace(memory, available_bytes=memory.available_bytes + more)))
    if memory is not None and memory.total_bytes is not None:
        limit = memory.limit_bytes + more if memory.limit_source == "MemTotal" else memory.limit_bytes
        grown_host = replace(memory, total_bytes=memory.total_bytes + more, limit_bytes=limit)
        choices.append(replace(box, memory=grown_host))
    if memory is not None and memory.limit_source != "MemTotal":
        limit = min(memory.limit_bytes + more, memory.total_bytes or memory.limit_bytes + more)
        choices.append(replace(box, memory=replace(memory, limit_bytes=limit)))
    for larger in choices:
        for before, after in zip(
            ceilings(box, floor, held).devices, ceilings(larger, floor, held).devices, strict=True
        ):
            if before.ceiling_bytes is not None:
                assert after.ceiling_bytes is not None and after.ceiling_bytes >= before.ceiling_bytes


def _over_full(card: Card) -> bool:
    """Whether free, used and kept back are already more than there is."""
    parts = (card.free_bytes or 0) + (card.used_bytes or 0) + (card.reserved_bytes or 0)
    return card.total_bytes is not None and parts > card.total_bytes


def test_a_carve_out_gives_no_more_than_is_not_in_use() -> None:
    """Free and used may add up to more than there is by what drivers round. If that much were believed, a little more
    that is said to be free would be a contradiction, and so less."""
    for free in (0, 32, 64, 65):
        card = Card(
            "amd", "card-0", "one", unified=True, total_bytes=65 * MIB, used_bytes=40 * MIB, free_bytes=free * MIB
        )
        assert only(ceilings(a_box(card), 0)).ceiling_bytes == min(free, 25) * MIB


@given(boxes(), helds, st.integers(0, 8192), st.integers(0, 8192))
@settings(max_examples=EXAMPLES)
def test_a_larger_floor_never_raises_a_ceiling(box: Box, held: dict[str, int], one: int, two: int) -> None:
    low, high = sorted((one * MIB, two * MIB))
    for less, more in zip(ceilings(box, low, held).devices, ceilings(box, high, held).devices, strict=True):
        if less.ceiling_bytes is not None and more.ceiling_bytes is not None:
            assert more.ceiling_bytes <= less.ceiling_bytes


@given(boxes(), st.data())
@settings(max_examples=EXAMPLES)
def test_no_device_is_counted_twice(box: Box, data: st.DataObject) -> None:
    if not box.cards:
        return
    copies = data.draw(st.lists(st.sampled_from(box.cards), max_size=3))
    found = ceilings(replace(box, cards=(*box.cards, *copies)), None)
    assert Counter(device.id for device in found.devices) == Counter([*(card.id for card in box.cards), "cpu"])


@given(boxes())
@settings(max_examples=EXAMPLES)
def test_believing_twice_is_believing_once(box: Box) -> None:
    once = believe(box)
    assert believe(once) == once


# -------------------------------------------------------------------------------------------------- all collected boxes


@pytest.mark.parametrize("profile", BOXES, ids=[profile["id"] for profile in BOXES])
def test_every_collected_box(profile: dict[str, Any]) -> None:
    found = ceilings(box_from_json(profile, profile["id"]), None)
    *devices, cpu = found.devices
    assert (cpu.id, cpu.kind) == ("cpu", "cpu") and [device.index for device in found.devices] == list(
        range(len(found.devices))
    )
    assert [device.name for device in devices] == [gpu["name"] for gpu in profile["gpus"]], "each card once"
    assert len({device.id for device in found.devices}) == len(found.devices)
    ram = min((profile[key] for key in ("mem_total_mib", "cgroup_limit_mib") if profile[key]), default=None)
    assert (cpu.ceiling_bytes is None) == (ram is None)
    if ram is not None and cpu.ceiling_bytes is not None:
        assert 0 < cpu.ceiling_bytes < ram * MIB
    for device, gpu in zip(devices, profile["gpus"], strict=True):
        total, gtt = gpu["vram_total_mib"], gpu["gtt_total_mib"]
        assert (device.total_bytes is None) == (total is None)
        assert device.kind == ("uma" if gpu["uma"] else "discrete") and device.vendor == gpu["vendor"]
        if device.bar1 is not None:
            assert (device.bar1.total_bytes is None) == (gpu["bar1_total_mib"] is None)
        if device.ceiling_bytes is None:
            assert not device.usable and total is None and (device.kind == "discrete" or gtt is None)
        elif device.kind == "discrete":
            assert 0 < device.ceiling_bytes <= (total - 1024) * MIB
        else:
            assert device.ceiling_bytes <= ((total or 0) + (ram if ram is not None else gtt or 0)) * MIB
        if device.usable:
            assert device.made_of
    for doubt in found.doubts:
        assert doubt.where and doubt.what and doubt.taken


def test_there_are_97_collected_boxes() -> None:
    assert len(BOXES) == len({profile["id"] for profile in BOXES}) == 97
