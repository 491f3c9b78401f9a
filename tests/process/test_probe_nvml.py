"""NVIDIA cards through pynvml and a library that is built here: every answer that a driver has been seen to give.

The library's text file says which cards it plays (nvml_stub.c). It is the same library in every test, since a process
keeps the first one that it loads by that name.
"""

from __future__ import annotations

import shutil
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from budget.facts import MIB, Box, Card, Link
from budget.probe import Sources, read_box

SOURCE = Path(__file__).with_name("nvml_stub.c")
NOT_SUPPORTED, NO_PERMISSION, DRIVER_NOT_LOADED, FUNCTION_NOT_FOUND, LOST = 3, 4, 9, 13, 15
PATIENCE_S = 60.0
MEMINFO = "MemTotal: 125447168 kB\nMemFree: 1000 kB\nMemAvailable: 100000000 kB\n"

Play = Callable[..., Box]


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    assert compiler, "a C compiler builds the package, so there is one"
    built = tmp_path_factory.mktemp("nvml") / "libnvidia-ml.so.1"
    flags = ["-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-Wl,-soname,libnvidia-ml.so.1"]
    subprocess.run([compiler, *flags, "-o", str(built), str(SOURCE)], check=True, timeout=60)
    return built


@pytest.fixture
def play(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Play:
    """Probe a recorded host whose NVML plays these lines."""
    root = tmp_path / "root"
    (root / "proc").mkdir(parents=True)
    (root / "proc/meminfo").write_text(MEMINFO)

    def probe(*lines: str, deadline_s: float = PATIENCE_S) -> Box:
        script = tmp_path / "cards.txt"
        script.write_text("\n".join(lines) + "\n")
        monkeypatch.setenv("NVML_STUB", str(script))
        return read_box(Sources(root=str(root), nvml=str(library), deadline_s=deadline_s))

    return probe


def line(kind: str = "card", **facts: object) -> str:
    return " ".join([kind, *(f"{key}={str(value).replace(' ', '_')}" for key, value in facts.items())])


def rtx3090(number: int = 0, **changes: object) -> str:
    """A 3090 on a board without Resizable BAR, driver 525: sizes in bytes."""
    facts: dict[str, object] = {
        "uuid": f"GPU-{number}", "name": "NVIDIA GeForce RTX 3090", "pci": f"00000000:{number + 1:02X}:00.0",
        "total": 24576 * MIB, "reserved": 316 * MIB, "used": 7 * MIB, "bar1": 256 * MIB, "bar1used": 5 * MIB,
        "gen": 4, "width": 16, "display": 0, "major": 8, "minor": 6, "bits": 384, "clock": 9751, "mig": 0,
    }  # fmt: skip
    return line(**(facts | changes))


def only(box: Box) -> Card:
    assert len(box.cards) == 1, box.cards
    return box.cards[0]


def said(box: Box) -> str:
    return " | ".join(f"{doubt.where}: {doubt.what} -> {doubt.taken}" for doubt in box.doubts)


def about_nvml(box: Box) -> str:
    return " | ".join(f"{d.where}: {d.what} -> {d.taken}" for d in box.doubts if "NVML" in d.where)


def test_a_3090_without_resizable_bar(play: Play) -> None:
    box = play(rtx3090())
    assert only(box) == Card(
        vendor="nvidia",
        id="GPU-0",
        name="NVIDIA GeForce RTX 3090",
        arch="sm_86",
        total_bytes=24576 * MIB,
        reserved_bytes=316 * MIB,
        used_bytes=7 * MIB,
        free_bytes=24253 * MIB,
        bar1_total_bytes=256 * MIB,
        bar1_free_bytes=251 * MIB,
        link=Link(4, 16),
        display=False,
        pci="0000:01:00.0",
        bandwidth_bytes_s=384 / 8 * 9751e6 * 2,
    )
    assert about_nvml(box) == ""


def test_B13_bar1_is_not_memory(play: Play) -> None:
    card = only(play(rtx3090(bar1=32768 * MIB)))
    assert card.total_bytes == 24576 * MIB
    assert card.free_bytes is not None and card.free_bytes < card.total_bytes


def test_B17_each_card_is_asked_for_itself(play: Play) -> None:
    box = play(rtx3090(0), rtx3090(1, total=8192 * MIB, used=500 * MIB), rtx3090(2, used=20000 * MIB))
    free = [card.free_bytes for card in box.cards]
    assert free == [24253 * MIB, (8192 - 316 - 500) * MIB, (24576 - 316 - 20000) * MIB]


def test_six_equal_cards_of_which_one_has_a_smaller_bar1(play: Play) -> None:
    lines = [rtx3090(n, bar1=(8192 if n == 3 else 32768) * MIB, bar1used=0) for n in range(6)]
    box = play(*lines, "peer 0 1 1", "peer 1 0 1")
    assert [card.bar1_total_bytes for card in box.cards] == [(8192 if n == 3 else 32768) * MIB for n in range(6)]
    assert [card.id for card in box.cards] == [f"GPU-{n}" for n in range(6)]
    assert box.cards[0].peers == {"GPU-1": "CNS", "GPU-2": "OK", "GPU-3": "OK", "GPU-4": "OK", "GPU-5": "OK"}
    assert about_nvml(box) == ""


def test_cards_are_named_by_uuid_and_ordered_by_address_whatever_nvml_counts(play: Play) -> None:
    box = play(rtx3090(0, pci="00000000:81:00.0"), rtx3090(1, pci="00000000:02:00.0"))
    assert [(card.id, card.pci) for card in box.cards] == [("GPU-1", "0000:02:00.0"), ("GPU-0", "0000:81:00.0")]


@pytest.mark.parametrize(
    ("code", "peer"), [(0, "OK"), (1, "CNS"), (2, "GNS"), (3, "TNS"), (4, "DR"), (5, "NS"), (6, "U"), (77, "U")]
)
def test_peer_codes(play: Play, code: int, peer: str) -> None:
    box = play(rtx3090(0), rtx3090(1), f"peer 0 1 {code}")
    assert [dict(card.peers) for card in box.cards] == [{"GPU-1": peer}, {"GPU-0": "OK"}]


def test_C11_wsl2_has_the_first_memory_call_only(play: Play) -> None:
    """used of the first call contains what the driver reserves: neither is told, total and free are."""
    box = play(
        rtx3090(), f"fail nvmlDeviceGetMemoryInfo_v2 {NOT_SUPPORTED}", f"fail nvmlDeviceGetP2PStatus {NOT_SUPPORTED}"
    )
    card = only(box)
    assert (card.total_bytes, card.free_bytes) == (24576 * MIB, 24253 * MIB)
    assert (card.used_bytes, card.reserved_bytes) == (None, None)
    assert "does not say what it reserves; its used (323 MiB) may contain it" in said(box)


def test_a_driver_of_2018_has_no_reserve_and_no_second_call(play: Play) -> None:
    name = "GeForce GTX 1660 Ti"
    box = play(rtx3090(name=name, total=5912 * MIB, reserved=0, used=0, bar1=256 * MIB, major=7, minor=5),
               f"fail nvmlDeviceGetMemoryInfo_v2 {FUNCTION_NOT_FOUND}")  # fmt: skip
    card = only(box)
    assert (card.name, card.total_bytes, card.reserved_bytes, card.free_bytes) == (name, 5912 * MIB, None, 5912 * MIB)
    assert about_nvml(box) != ""


def test_gb10_says_no_memory_because_it_is_the_hosts(play: Play) -> None:
    box = play(line(uuid="GPU-gb", name="NVIDIA GB10", pci="0000000F:01:00.0", major=12, minor=1, mig=0))
    card = only(box)
    assert card.unified and card.total_bytes is None and card.free_bytes is None
    assert card.gtt_total_bytes == 125447168 * 1024
    assert card.pci == "000f:01:00.0" and card.link is None and card.bar1_total_bytes is None
    assert "computes in the host's memory" in said(box)


def test_a_card_that_says_no_memory_is_unknown_not_zero(play: Play) -> None:
    box = play(line(uuid="GPU-x", name="NVIDIA X", pci="00000000:01:00.0", major=8, minor=9), rtx3090(1, total=0))
    assert [card.total_bytes for card in box.cards] == [None, None]
    assert said(box).count("its memory is unknown") == 2
    assert not any(card.unified for card in box.cards)


def test_free_above_total_is_not_believed(play: Play) -> None:
    box = play(rtx3090(total=8192 * MIB, free=9000 * MIB))
    card = only(box)
    assert (card.total_bytes, card.free_bytes) == (8192 * MIB, None)
    assert "says 9000 MiB free of 8192 MiB" in said(box)


def test_a_lost_card_is_a_doubt_and_the_others_stay(play: Play) -> None:
    box = play(rtx3090(0, lost=LOST), rtx3090(1))
    assert [card.id for card in box.cards] == ["GPU-1"]
    assert "NVML card 0: cannot be opened" in said(box)


def test_every_call_but_name_and_count_may_fail(play: Play) -> None:
    silent = [
        "nvmlDeviceGetUUID", "nvmlDeviceGetPciInfo_v3", "nvmlDeviceGetMemoryInfo", "nvmlDeviceGetMemoryInfo_v2",
        "nvmlDeviceGetBAR1MemoryInfo", "nvmlDeviceGetMaxPcieLinkGeneration", "nvmlDeviceGetMaxPcieLinkWidth",
        "nvmlDeviceGetDisplayActive", "nvmlDeviceGetCudaComputeCapability", "nvmlDeviceGetMemoryBusWidth",
        "nvmlDeviceGetMaxClockInfo", "nvmlDeviceGetMigMode", "nvmlDeviceGetP2PStatus", "nvmlShutdown",
    ]  # fmt: skip
    box = play(rtx3090(0), rtx3090(1), *(f"fail {name} {NO_PERMISSION}" for name in silent))
    assert [card.id for card in box.cards] == ["nvidia-0", "nvidia-1"]
    assert box.cards[0] == Card("nvidia", "nvidia-0", "NVIDIA GeForce RTX 3090", peers={"nvidia-1": "U"})


def test_a_driver_that_does_not_answer_is_a_doubt(play: Play) -> None:
    for failure in (f"init {DRIVER_NOT_LOADED}", f"fail nvmlDeviceGetCount_v2 {NO_PERMISSION}"):
        box = play(rtx3090(), failure)
        assert box.cards == () and "NVML" in about_nvml(box)


def test_a_hung_driver_is_left_behind_at_the_deadline(play: Play, tmp_path: Path) -> None:
    released = tmp_path / "released"
    box = play(rtx3090(), f"hang nvmlDeviceGetCount_v2 {released}", deadline_s=0.05)
    released.touch()
    for thread in threading.enumerate():
        if thread.name == "nvml":
            thread.join(PATIENCE_S)
    assert box.cards == ()
    assert "NVML: did not answer within 0.05 s: the driver hangs" in said(box)


def test_a_mig_parent_gives_way_to_its_slices(play: Play) -> None:
    """Their BAR1 of 32767 MiB and their reserve of 0 are no facts."""
    part = {"name": "NVIDIA A100-SXM4-40GB MIG 3g.20gb", "total": 20096 * MIB, "used": 19 * MIB, "bar1": 32767 * MIB}
    parent = rtx3090(0, uuid="GPU-a100", name="NVIDIA A100-SXM4-40GB", total=40960 * MIB, major=8, minor=0, mig=1)
    box = play(parent, *(line("slice", uuid=f"MIG-{n}", **part) for n in range(2)), rtx3090(1))
    assert [card.id for card in box.cards] == ["GPU-1", "MIG-0", "MIG-1"]
    cut = box.cards[1]
    assert (cut.total_bytes, cut.free_bytes, cut.arch) == (20096 * MIB, 20077 * MIB, "sm_80")
    assert (cut.reserved_bytes, cut.bar1_total_bytes, cut.pci) == (None, None, None)
    assert "is cut into MIG slices: the whole card computes nothing -> its 2 slices" in said(box)


def test_a_mig_parent_without_slices_is_listed_with_nothing_to_use(play: Play) -> None:
    box = play(rtx3090(mig=1))
    assert only(box).total_bytes is None
    assert "its memory is unknown" in said(box)


def test_one_uuid_twice_is_two_cards_with_two_names(play: Play) -> None:
    box = play(rtx3090(0, uuid="GPU-same"), rtx3090(1, uuid="GPU-same"))
    assert [card.id for card in box.cards] == ["GPU-same", "nvidia-1"]


def test_a_library_that_is_none_is_no_card(tmp_path: Path) -> None:
    text = tmp_path / "libnvidia-ml.so.1"
    text.write_text("no library")
    box = read_box(Sources(root=str(tmp_path), nvml=str(text)))
    assert box.cards == () and "is no library that can be loaded" in said(box)
