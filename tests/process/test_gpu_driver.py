"""How a card is found and opened, and what is said where that goes wrong: the real calls, against fake drivers."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest
from fake_cards import fake_cards

from backends.gpu import jit, kernel_store, sources
from backends.gpu.arch import Vendor, arch
from backends.gpu.driver import Driver, open_driver
from backends.gpu.errors import (
    CardMissing,
    CompileFailed,
    CompilerMissing,
    DeviceLost,
    DriverError,
    DriverMissing,
    DriverTooOld,
    OutOfDeviceMemory,
)
from backends.gpu.ops import mixers
from backends.gpu.sources import Program

VENDORS: tuple[Vendor, ...] = get_args(Vendor)
HIDING = {"nvidia": "CUDA_VISIBLE_DEVICES", "amd": "HIP_VISIBLE_DEVICES"}
PATIENCE_S = 60.0


@pytest.fixture(autouse=True)
def nothing_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


# ------------------------------------------------------------------------------------------------------ what is found


def test_a_card_of_nvidias_is_what_its_driver_says(tmp_path: Path) -> None:
    card = fake_cards(tmp_path, cuda=2, mib=300, facts={"cuda1": {"units": 82, "arch": "sm_89"}}).open("nvidia", 1)
    facts = card.facts
    assert (facts.vendor, facts.index, facts.name) == ("nvidia", 1, "NVIDIA GeForce RTX 3090")
    assert facts.uuid == "GPU-5ee1c0de-0000-4000-8000-000000000001"
    assert (facts.pci, facts.arch.name, facts.warp, facts.units) == ("0000:02:00.0", "sm_89", 32, 82)
    assert (facts.total_bytes, facts.unified, facts.driver) == (300 << 20, False, "CUDA 13.0")
    assert (facts.virtual_memory, facts.granularity) == (True, 2 << 20)
    card.close()


def test_a_card_of_amds_is_what_hip_says(tmp_path: Path) -> None:
    usual = {"arch": "gfx90a:sramecc+:xnack-", "warp": 64, "integrated": 1, "vmm": 0}
    card = fake_cards(tmp_path, facts={"rocm0": usual}).open("amd")
    facts = card.facts
    assert (facts.vendor, facts.name, facts.uuid) == ("amd", "AMD Radeon 780M Graphics", "GPU-00000000a11d0000")
    assert (facts.arch.name, facts.warp, facts.unified) == ("gfx90a:sramecc+:xnack-", 64, True)
    assert (facts.pci, facts.driver, facts.virtual_memory) == ("0000:41:00.0", "HIP 7.1", False)
    with pytest.raises(DriverError, match="no virtual memory of its own, so kv cannot be given back"):
        card.reserve(1 << 20, "kv")
    card.close()


def test_hip_before_6_tells_the_arch_at_another_place(tmp_path: Path) -> None:
    cards = fake_cards(tmp_path, rocm_driver=50_731_921, without=("hipGetDevicePropertiesR0600",))
    driver = open_driver("amd", cards.driver("amd"))
    assert (driver.version_text, driver.arch_name(0)) == ("5.7", "gfx1103")


def test_the_product_finds_the_libraries_by_the_loaders_names(tmp_path: Path) -> None:
    code = (
        "from backends.gpu.card import open_card\n"
        "for vendor in ('nvidia', 'amd'):\n"
        "    card = open_card(vendor, say=print)\n"
        "    print(card.facts.told, card.driver.path)\n"
        "    card.close()\n"
    )
    environment = os.environ | fake_cards(tmp_path).environment | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.stdout.splitlines() == [
        "NVIDIA GeForce RTX 3090 (GPU-5ee1c0de-0000-4000-8000-000000000000) libcuda.so.1",
        "AMD Radeon 780M Graphics (GPU-00000000a11d0000) libamdhip64.so.7",
    ], done.stderr


def test_hip_is_found_in_rocms_own_folder(tmp_path: Path) -> None:
    cards = fake_cards(tmp_path)
    (tmp_path / "rocm/lib").mkdir(parents=True)
    for name in ("libamdhip64.so.7", "rocm.cards"):
        shutil.copy(cards.folder / name, tmp_path / "rocm/lib")
    driver = open_driver("amd", environ={"ROCM_PATH": str(tmp_path / "rocm")})
    assert driver.path == str(tmp_path / "rocm/lib/libamdhip64.so.7")
    assert driver.find().name == "AMD Radeon 780M Graphics"


def test_a_card_is_asked_for_by_uuid_or_address(tmp_path: Path) -> None:
    driver = open_driver("nvidia", fake_cards(tmp_path, cuda=3).driver("nvidia"))
    assert driver.find(uuid="GPU-5ee1c0de-0000-4000-8000-000000000002").index == 2
    assert driver.find(uuid="0000:02:00.0").index == 1
    assert driver.find().index == 0
    with pytest.raises(CardMissing, match="shows no card GPU-0; it shows 0: NVIDIA GeForce RTX 3090") as caught:
        driver.find(uuid="GPU-0")
    assert caught.value.card == "GPU-0" and "restart the machine" in caught.value.fix


def test_chips_without_a_number_are_known_by_their_addresses(tmp_path: Path) -> None:
    same = {"uuid": "GPU-XX"}
    driver = open_driver("amd", fake_cards(tmp_path, rocm=2, facts={"rocm0": same, "rocm1": same}).driver("amd"))
    assert [card.uuid for card in driver.identities()] == ["0000:41:00.0", "0000:42:00.0"]


def test_cards_reach_each_other_as_the_driver_says(tmp_path: Path) -> None:
    driver = open_driver("nvidia", fake_cards(tmp_path, cuda=3, facts={"cuda2": {"peers": 0}}).driver("nvidia"))
    assert driver.reaches(0, 1) and not driver.reaches(0, 2)


@pytest.mark.parametrize("vendor", VENDORS)
def test_time_passes_between_events(vendor: Vendor, tmp_path: Path) -> None:
    driver = open_driver(vendor, fake_cards(tmp_path).driver(vendor))
    driver.use(driver.find())
    stream, begin, end = driver.stream(), driver.event(), driver.event()
    memory = driver.allocate(1 << 20)
    driver.record_event(begin, stream)
    driver.fill(memory, 1, 1 << 20, stream)
    driver.record_event(end, stream)
    with pytest.raises(DriverError, match="EventElapsedTime failed"):
        driver.elapsed_ms(begin, end)
    driver.wait_event(end)
    assert driver.elapsed_ms(begin, end) > 0
    driver.free(memory)
    for event in (begin, end):
        driver.end_event(event)
    driver.end_stream(stream)
    driver.leave()


# ------------------------------------------------------------------------------------------------------- what is wrong


@pytest.mark.parametrize("vendor", VENDORS)
def test_a_driver_that_is_not_there(vendor: Vendor, tmp_path: Path) -> None:
    with pytest.raises(DriverMissing, match="driver cannot be loaded") as caught:
        open_driver(vendor, str(tmp_path / "libnone.so"))
    assert "libnone.so" in caught.value.log and "install" in caught.value.fix


@pytest.mark.parametrize("vendor", VENDORS)
def test_a_driver_without_any_card(vendor: Vendor, tmp_path: Path) -> None:
    with pytest.raises(DriverMissing, match="driver finds no card") as caught:
        open_driver(vendor, fake_cards(tmp_path, cuda=0, rocm=0).driver(vendor))
    assert "homeserve probe" in caught.value.fix


def test_hip_that_starts_with_its_first_call_and_finds_no_card(tmp_path: Path) -> None:
    cards = fake_cards(tmp_path)
    cards.fail("amd", "hipRuntimeGetVersion", 100)
    with pytest.raises(DriverMissing, match="HIP's driver finds no card"):
        cards.open("amd")


@pytest.mark.parametrize("vendor", VENDORS)
def test_a_variable_that_hides_all_cards_is_named(
    vendor: Vendor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(HIDING[vendor], "")
    with pytest.raises(CardMissing, match=f"shows no card with {HIDING[vendor]}='' set") as caught:
        open_driver(vendor, fake_cards(tmp_path).driver(vendor))
    assert f"unset {HIDING[vendor]}" in caught.value.fix


def test_a_variable_that_hides_the_wanted_card_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    cards = fake_cards(tmp_path, cuda=2)
    with pytest.raises(CardMissing) as caught:
        cards.open("nvidia", uuid="GPU-5ee1c0de-0000-4000-8000-000000000000")
    said = str(caught.value)
    assert "no card GPU-5ee1c0de-0000-4000-8000-000000000000 with CUDA_VISIBLE_DEVICES='1' set" in said
    assert "it shows 0: NVIDIA GeForce RTX 3090 (GPU-5ee1c0de-0000-4000-8000-000000000001)" in said
    assert "unset CUDA_VISIBLE_DEVICES, or name the card in it" in said


@pytest.mark.parametrize(("vendor", "name"), [("nvidia", "cuda"), ("amd", "rocm")])
def test_two_cards_of_one_uuid_are_both_named(vendor: Vendor, name: str, tmp_path: Path) -> None:
    same = {"uuid": "GPU-1111222233334444" if vendor == "amd" else "GPU-11112222-3333-4444-5555-666677778888"}
    cards = fake_cards(tmp_path, cuda=3, rocm=3, facts={f"{name}0": same, f"{name}2": same | {"name": "Other Card"}})
    with pytest.raises(DriverError, match="two cards of the UUID GPU-1111") as caught:
        cards.open(vendor)
    first, second = ("0000:01:00.0", "0000:03:00.0") if vendor == "nvidia" else ("0000:41:00.0", "0000:43:00.0")
    assert f"at {first} and Other Card at {second}" in caught.value.message
    assert "hide one of them" in caught.value.fix


@pytest.mark.parametrize(
    ("vendor", "told", "oldest"), [("nvidia", "CUDA 11.4", "12.0"), ("amd", "HIP 5.6", "5.7")], ids=VENDORS
)
def test_a_driver_that_is_too_old(vendor: Vendor, told: str, oldest: str, tmp_path: Path) -> None:
    cards = fake_cards(tmp_path, cuda_driver=11040, rocm_driver=50_631_061)
    with pytest.raises(DriverTooOld, match=f"{told} is older than {oldest}") as caught:
        cards.open(vendor)
    assert "update" in caught.value.fix


@pytest.mark.parametrize(("vendor", "function"), [("nvidia", "cuGraphInstantiateWithFlags"), ("amd", "hipMemCreate")])
def test_a_driver_that_lacks_a_function(vendor: Vendor, function: str, tmp_path: Path) -> None:
    with pytest.raises(DriverTooOld, match=f"has no {function}; homeserve needs") as caught:
        fake_cards(tmp_path, without=(function,)).open(vendor)
    assert "update" in caught.value.fix


def test_a_driver_that_cannot_start(tmp_path: Path) -> None:
    cards = fake_cards(tmp_path)
    cards.fail("nvidia", "cuInit", 803, count=0)
    with pytest.raises(DriverError, match="cuInit failed") as caught:
        cards.open("nvidia")
    assert "of different versions: restart the machine" in caught.value.fix


def test_an_arch_that_no_structure_holds(tmp_path: Path) -> None:
    with pytest.raises(DriverError, match="HIP 7.1 tells the arch of card 0 as 'Radeon'"):
        fake_cards(tmp_path, facts={"rocm0": {"arch": "Radeon"}}).open("amd")


def test_waves_that_no_kernel_is_for(tmp_path: Path) -> None:
    with pytest.raises(DriverError, match="its waves have 64 lanes; of sm_86 they have 32"):
        fake_cards(tmp_path, facts={"cuda0": {"warp": 64}}).open("nvidia")


# --------------------------------------------------------------------------------------------------- what statuses mean


@pytest.fixture
def driver(tmp_path: Path) -> Driver:
    opened = open_driver("nvidia", fake_cards(tmp_path).driver("nvidia"))
    opened.use(opened.find())
    return opened


@pytest.mark.parametrize(
    ("status", "kind", "word"),
    [
        (2, OutOfDeviceMemory, "CUDA_ERROR_OUT_OF_MEMORY"),
        (209, DriverTooOld, "CUDA_ERROR_NO_BINARY_FOR_GPU"),
        (222, DriverTooOld, "CUDA_ERROR_UNSUPPORTED_PTX_VERSION"),
        (214, DeviceLost, "CUDA_ERROR_ECC_UNCORRECTABLE"),
        (700, DeviceLost, "CUDA_ERROR_ILLEGAL_ADDRESS"),
        (719, DeviceLost, "CUDA_ERROR_LAUNCH_FAILED"),
        (999, DeviceLost, "CUDA_ERROR_UNKNOWN"),
        (801, DriverError, "CUDA_ERROR_NOT_SUPPORTED"),
        (12345, DriverError, "status 12345"),
    ],
)
def test_a_status_is_an_error_with_the_drivers_word_and_the_card(
    driver: Driver, status: int, kind: type[DriverError], word: str
) -> None:
    error = driver.failed(status, "allocate")
    assert type(error) is kind
    assert f"{driver.find().told if not driver.lost else error.card}: cuMemAlloc_v2 failed: {word}" in error.message
    assert error.fix and error.card == "NVIDIA GeForce RTX 3090 (GPU-5ee1c0de-0000-4000-8000-000000000000)"


def test_a_lost_card_stays_lost_even_if_its_driver_forgets(tmp_path: Path) -> None:
    cards = fake_cards(tmp_path)
    card = cards.open("nvidia")
    memory = card.allocate(4096, "weights")
    cards.fail("nvidia", "cuMemGetInfo_v2", 719)
    for _ in range(2):
        with pytest.raises(DeviceLost, match="cuMemGetInfo_v2 failed: CUDA_ERROR_LAUNCH_FAILED"):
            card.free_bytes()
    with pytest.raises(DeviceLost, match="nothing of this card is usable any more"):
        card.allocate(4096, "more")
    with pytest.raises(DeviceLost):
        card.wait()
    memory.close()
    card.close()
    cards.end_process("nvidia")


# ---------------------------------------------------------------------------------------- what drivers do not forgive


@pytest.mark.parametrize("vendor", VENDORS)
def test_what_a_recording_thread_may_not_do_spoils_the_recording_and_no_more(vendor: Vendor, tmp_path: Path) -> None:
    cards = fake_cards(tmp_path)
    card = cards.open(vendor)
    driver, memory, staging = card.driver, card.allocate(4096, "weights"), card.pinned(4096, "staging")
    card.wait()
    stream = driver.stream()
    forbidden: tuple[Callable[[], object], ...] = (
        lambda: driver.allocate(4096),
        lambda: driver.free(memory.address),
        lambda: driver.host_register(staging.address, 4096),
        lambda: driver.host_unregister(staging.address),
        lambda: driver.back(0, 2 << 20),
        lambda: driver.load(b"fake"),
        lambda: driver.wait(stream),
        lambda: driver.is_done(stream),
    )
    for call in forbidden:
        with pytest.raises(DriverError, match="STREAM_CAPTURE_UNSUPPORTED|hipErrorStreamCaptureUnsupported"):
            driver.capture(stream, call)
    graph = driver.capture(stream, lambda: None)
    assert graph
    driver.end_graph(graph)
    driver.end_stream(stream)
    card.close()


def test_a_context_is_there_as_long_as_somebody_holds_it(tmp_path: Path) -> None:
    cards = fake_cards(tmp_path)
    first, second = cards.open("nvidia"), cards.open("nvidia")
    first.close()
    assert second.free_bytes()
    second.close()
    with pytest.raises(DriverError, match="CUDA_ERROR_INVALID_CONTEXT"):
        first.driver.memory_info()


def test_hip_keeps_the_code_object_of_a_module_as_long_as_it_lives(tmp_path: Path) -> None:
    cards = fake_cards(tmp_path)
    card = cards.open("amd")
    program = sources.program(mixers.NORM, "amd")
    image = cards.compiler("amd").compile(program, card.facts.arch).data
    held = sys.getrefcount(image)
    module = card.driver.load(image)
    assert sys.getrefcount(image) == held + 1
    card.driver.unload(module)
    assert sys.getrefcount(image) == held
    card.close()


# --------------------------------------------------------------------------------------------------------- compilers


def test_ptx_that_the_driver_does_not_know_is_told_with_its_log(tmp_path: Path) -> None:
    cards = fake_cards(tmp_path, cuda_driver=12040, facts={"cuda0": {"arch": "sm_199"}})
    card = cards.open("nvidia")
    with pytest.raises(DriverTooOld, match="CUDA_ERROR_UNSUPPORTED_PTX_VERSION") as caught:
        card.prepare([mixers.NORM])
    assert "fatal   : Unsupported .version" in caught.value.log
    assert "update NVIDIA's driver" in caught.value.fix
    card.close()


@pytest.mark.parametrize(("driver_major", "tried"), [(12, [12]), (13, [13, 12]), (15, [13, 12])])
def test_nvrtc_is_never_newer_than_the_driver(
    driver_major: int, tried: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def find(vendor: Vendor, major: int | None = None) -> jit.Jit:
        asked.append(major or 0)
        raise CompilerMissing(f"NVRTC {major}", fix="pip install")

    monkeypatch.setattr(jit, "find", find)
    with pytest.raises(CompilerMissing, match=f"NVRTC {tried[0]}"):
        kernel_store.find_compiler("nvidia", driver_major)
    assert asked == tried


@pytest.mark.parametrize("vendor", VENDORS)
def test_the_fake_compilers_know_what_they_are_given_and_no_more(vendor: Vendor, tmp_path: Path) -> None:
    compiler = fake_cards(tmp_path).compiler(vendor)
    name = "sm_86" if vendor == "nvidia" else "gfx1103"
    with pytest.raises(CompileFailed, match=re.escape("device.h")):
        compiler.compile(Program(vendor, "norm.cu", '#include "device.h"\n', ()), arch(name))
