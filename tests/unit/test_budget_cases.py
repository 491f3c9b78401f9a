"""Bug reports of other programs as cases: what each of them counted wrong, and the right value here.

Named after their rows in the list of collected cases: A are devices that share the host's memory, B discrete and mixed
ones, C the host, containers and WSL2. The cases of the probe (what is read, and how) are with the probe's tests. Where
a row bundles several reports, each of them is a test.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from budget.ceilings import Ceilings, Device, ceilings
from budget.facts import MIB, Box
from budget.ledger import ALWAYS, Term
from budget.profile import box_from_json
from budget.solve import fits
from budget.terms import context_bytes

BOXES: dict[str, dict[str, Any]] = {
    box["id"]: box for box in json.loads((Path(__file__).parents[1] / "data/boxes/boxes.json").read_text())
}
FLOOR, HOST_FLOOR = 1024, 256


def box(*gpus: dict[str, Any], **fields: Any) -> Box:
    return box_from_json({"id": "case", "gpus": list(gpus), **fields}, "case")


def collected(name: str, **fields: Any) -> Box:
    return box_from_json({**BOXES[name], **fields}, name)


def card(total: float | None, vendor: str = "nvidia", name: str = "card", **fields: Any) -> dict[str, Any]:
    """Sizes in MiB."""
    return {"vendor": vendor, "name": name, "uma": False, "vram_total_mib": total, **fields}


def apu(carve_out: float | None, gtt: float | None = None, **fields: Any) -> dict[str, Any]:
    return {**card(carve_out, "amd", "Radeon APU", uma=True, gtt_total_mib=gtt), **fields}


def mib(device: Device) -> float | None:
    return None if device.ceiling_bytes is None else device.ceiling_bytes / MIB


def usable(found: Ceilings) -> list[float | None]:
    """Ceilings of the cards that something is planned on."""
    return [mib(device) for device in found.devices if device.usable and device.id != "cpu"]


def doubts(found: Ceilings, *words: str) -> list[str]:
    texts = [f"{doubt.where}: {doubt.what}; {doubt.taken}" for doubt in found.doubts]
    return [text for text in texts if all(word in text for word in words)]


# ------------------------------------------------------------------------------------------------- A: unified devices


def test_A1_the_hosts_memory_never_replaces_a_cards() -> None:
    """A 5090 was taken for a unified device: 55372 free of 32106 MiB."""
    found = ceilings(box(card(32106, name="RTX 5090", vram_free_mib=55372), mem_total_mib=64000), None)
    assert mib(found.devices[0]) == 32106 - FLOOR
    assert found.devices[0].free_bytes == 32106 * MIB and doubts(found, "55372", "32106")


def test_A3_the_least_of_the_bounds_counts() -> None:
    """TTM allows 122880 MiB, the host has about 89 GiB left."""
    found = ceilings(box(apu(512, 122880), mem_total_mib=128000, mem_available_mib=89 * 1024), None)
    assert mib(found.devices[0]) == 512 + 89 * 1024 - HOST_FLOOR


def test_A5_carve_out_and_gtt_are_both_told() -> None:
    """6 GiB carve-out and 40 GiB GTT of 96 GiB: one runtime saw 6368 MiB, another 53281."""
    device = ceilings(collected("890m-6g-carveout", mem_total_mib=90 * 1024), None).devices[0]
    assert (device.total_bytes, device.gtt_bytes) == (6144 * MIB, 40960 * MIB)
    assert mib(device) == 6144 + 40960


@pytest.mark.parametrize("held", [13000, 14000])
def test_A7_device_and_host_are_one_pool(held: int) -> None:
    """Each of them may hold its ceiling, but not both: 2 x 13000 MiB of 26000 fit, 2 x 14000 do not."""
    found = ceilings(box(apu(1024, 24576), mem_total_mib=30000, mem_available_mib=25256), None)
    assert [mib(device) for device in found.devices] == [25600, 25000] and found.pools == (25000 * MIB,)
    lines = [Term(device, "weights", held * MIB, ALWAYS, "computed").at(0) for device in (0, 1)]
    assert fits(lines, found) is (held == 13000)


def test_A9_a_carve_out_of_zero_is_unknown_and_gtt_counts() -> None:
    """The firmware's "Auto" reads as 0."""
    for carve_out in (0, None):
        found = ceilings(box(apu(carve_out, 16000), mem_total_mib=32000, mem_available_mib=30000), None)
        assert mib(found.devices[0]) == 16000 and found.devices[0].total_bytes is None
        assert bool(doubts(found, "0 is what a driver says when it does not know")) is (carve_out == 0)


def test_A11_gtt_is_added_to_a_small_carve_out() -> None:
    """512 MiB were offered where 108 GiB may be pinned."""
    found = ceilings(box(apu(512, 108 * 1024), mem_total_mib=125 * 1024, mem_available_mib=120 * 1024), None)
    assert mib(found.devices[0]) == 512 + 108 * 1024


def test_A13_the_pool_is_not_what_the_host_has_free() -> None:
    """17.8 GiB of the host are free; the device reaches 71 GiB, most of them carved out."""
    found = ceilings(box(apu(56 * 1024, 15 * 1024), mem_total_mib=40 * 1024, mem_available_mib=17.8 * 1024), None)
    assert mib(found.devices[0]) == 71 * 1024


def test_A17_free_memory_is_counted_in_its_own_pool() -> None:
    """Carve-out 64 GiB, GTT 31.2 GiB; 23.19 GiB were called free."""
    device, cpu = ceilings(collected("halo-kyuz0-64g", mem_available_mib=60000), None).devices
    assert device.total_bytes == 65536 * MIB
    assert mib(device) == pytest.approx(65536 + 31948.8) and mib(cpu) == 60000 - HOST_FLOOR
    used = ceilings(box(apu(65536, 31948.8, vram_used_idle_mib=60000), mem_total_mib=63488), None).devices[0]
    assert used.free_bytes == 5536 * MIB, "what the carve-out is used for takes nothing from the host, nor back"


def test_A19_a_number_says_where_it_is_from() -> None:
    """Of 124 GiB, 80 or 83 were shown; of a half and half box 32 GiB, half of the half that was left."""
    found = ceilings(box(apu(65536), mem_total_mib=64000, mem_available_mib=62000), None)
    assert doubts(found, "(GTT) is not said", "half of 64000 MiB", "32000 MiB")
    assert found.devices[0].made_of == "65536 MiB carve-out + 32000 MiB pinned of the host (GTT)"


def test_A23_a_unified_device_leaves_headroom() -> None:
    """GB10: no memory while 22 GiB were said to be available. Its driver says [N/A] for its memory."""
    gpu = {"vendor": "nvidia", "name": "GB10", "arch": "sm_121", "uma": True, "vram_total_mib": "[N/A]"}
    found = ceilings(box(gpu, mem_total_mib=121 * 1024, mem_available_mib=22 * 1024), None)
    device, cpu = found.devices
    assert mib(device) == 22 * 1024 - FLOOR and device.usable and device.total_bytes is None
    assert mib(cpu) == 22 * 1024 - HOST_FLOOR and found.pools == (cpu.ceiling_bytes,)
    assert doubts(found, "allocations have failed") and doubts(found, "[N/A]")


def test_A23_a_total_that_is_the_hosts_memory_is_no_second_pool() -> None:
    """CUDA says 121 GiB for a GB10: the same 121 GiB that the host has."""
    gpu = {"vendor": "nvidia", "name": "GB10", "uma": True, "vram_total_mib": 121 * 1024}
    found = ceilings(box(gpu, mem_total_mib=121 * 1024, mem_available_mib=110 * 1024), None)
    assert mib(found.devices[0]) == 110 * 1024 - FLOOR and found.devices[0].private_bytes == 0


def test_A25_an_apu_without_carve_out_has_the_unified_memory() -> None:
    """MI300A: no VRAM at all was shown."""
    gpu = apu(0, 460 * 1024, name="Instinct MI300A", arch="gfx942")
    found = ceilings(box(gpu, mem_total_mib=500 * 1024, mem_available_mib=480 * 1024), None)
    assert mib(found.devices[0]) == 460 * 1024 and found.devices[0].usable


def test_A27_what_is_shared_is_called_shared() -> None:
    """An 860M was sold as "16 GB VRAM": 459 MiB are its own, 15.6 GiB the host's."""
    found = ceilings(box(apu(459, 15.6 * 1024), mem_total_mib=31000, mem_available_mib=28000), None)
    device = found.devices[0]
    assert (device.kind, device.total_bytes, device.private_bytes) == ("uma", 459 * MIB, 459 * MIB)
    assert mib(device) == pytest.approx(459 + 15.6 * 1024)
    assert device.made_of == "459 MiB carve-out + 15974 MiB pinned of the host (GTT)"
    alone = ceilings(collected("860m-win"), None)
    assert mib(alone.devices[0]) == 459 and doubts(alone, "the carve-out alone") and doubts(alone, "WSL2 works")


# ---------------------------------------------------------------------------------------------- B: discrete and mixed


def test_B3_each_card_has_its_own_ceiling() -> None:
    """A 3090 and a 3070: the smaller one's 7.79 GiB bound what is split evenly."""
    found = ceilings(collected_sized("3090-plus-3070", 24576, 7977), None)
    assert usable(found) == [24576 - FLOOR, 7977 - FLOOR]


def collected_sized(name: str, *totals: float) -> Box:
    """A collected box whose source does not say what its cards have."""
    gpus = [{**gpu, "vram_total_mib": total} for gpu, total in zip(BOXES[name]["gpus"], totals, strict=True)]
    return collected(name, gpus=gpus)


def test_B5_an_integrated_gpu_is_no_second_card() -> None:
    """A 9800X3D's graphics were counted as a second 7900 XTX: 47.97 GiB instead of 24."""
    found = ceilings(box(card(24560, "amd", "RX 7900 XTX"), apu(512, 15600), mem_total_mib=31200), None)
    assert usable(found) == [24560 - FLOOR]
    assert found.devices[1].why_not is not None and "integrated" in found.devices[1].why_not


def listed(found: Ceilings) -> list[tuple[str, str]]:
    return [(device.vendor, device.name) for device in found.devices if device.id != "cpu"]


def test_B7_550_two_amd_cards_of_different_size() -> None:
    """A R9700 and a RX 7600 were shown as two R9700."""
    gpus = (
        card(8573157376 / MIB, "amd", "RX 7600", vram_used_idle_mib=60448768 / MIB),
        card(34208743424 / MIB, "amd", "R9700", vram_used_idle_mib=33732509696 / MIB),
    )
    found = ceilings(box(*gpus), None)
    assert listed(found) == [("amd", "RX 7600"), ("amd", "R9700")]
    free = (8573157376 - 60448768, 34208743424 - 33732509696)
    assert usable(found) == [free[0] / MIB - FLOOR, 0], "454 MiB free are less than the floor"


def test_B7_835_a_full_card_offers_what_is_free() -> None:
    """27.98 GiB were offered in total, 11.7 were free."""
    gpus = (
        card(20464, "amd", "RX 7900 XT", vram_used_idle_mib=16417),
        card(8192, name="RTX 2080", vram_used_idle_mib=1, vram_free_mib=7967),
    )
    assert usable(ceilings(box(*gpus), None)) == [20464 - 16417 - FLOOR, 7967 - FLOOR]


def test_B7_13_cards_of_two_vendors_are_both_listed() -> None:
    gpus = (card(16311, name="RTX 5060 Ti"), card(24560, "amd", "0x744c"))
    found = ceilings(box(*gpus, mem_total_mib=125.72 * 1024), None)
    assert listed(found) == [("nvidia", "RTX 5060 Ti"), ("amd", "0x744c")]
    assert usable(found) == [16311 - FLOOR, 24560 - FLOOR]


@pytest.mark.parametrize("report", ["45", "46", "68"])
def test_B7_two_equal_cards_are_two_ceilings_and_no_sum(report: str) -> None:
    """#45 and #46: 2 x 24 GiB are not one of 48. #68: nor are they one of 24."""
    found = ceilings(collected("2x3090-kvm"), None)
    assert usable(found) == [24576 - FLOOR] * 2
    assert found.pools[1:] == ((24576 - FLOOR) * MIB,) * 2, f"#{report}: each has its own memory"


def test_B7_102_a_unified_nvidia_device_is_one() -> None:
    """GB10 and GB20: the host's memory, not none."""
    gpu = {"vendor": "nvidia", "name": "NVIDIA GB10", "uma": True, "vram_total_mib": None}
    found = ceilings(box(gpu, mem_total_mib=121.69 * 1024, mem_available_mib=118.3 * 1024), None)
    assert usable(found) == [pytest.approx(118.3 * 1024 - FLOOR)]


def test_B7_194_the_boxs_own_names_and_sizes_are_listed() -> None:
    """It gives no sizes. Nothing is guessed from a name: cards with a generic one keep what their driver says."""
    found = ceilings(collected("mi50x2-mixed-cezanne"), None)
    assert [mib(device) for device in found.devices[:2]] == [32752 - FLOOR, 16368 - FLOOR]
    assert usable(found) == [32752 - FLOOR, 16368 - FLOOR], "the third one is integrated"


def test_B7_239_five_cards_with_the_size_that_the_driver_says() -> None:
    """5 x A4000 with 16 GB were shown as 8 GB each."""
    found = ceilings(box(*[card(16376, name="RTX A4000")] * 5), None)
    assert len(listed(found)) == 5 and usable(found) == [16376 - FLOOR] * 5


def test_B7_25_the_card_is_used_and_not_the_apu() -> None:
    """A GTX 1650 and an APU with half a GiB, which was called 8 GB and came first."""
    found = ceilings(collected_sized("gtx1650-plus-apu-win", 4096, 512), None)
    assert usable(found) == [4096 - FLOOR] and len(listed(found)) == 2


def test_B7_964_a_large_carve_out_counts() -> None:
    """96 GiB carve-out: only the other 31 GiB were shown."""
    device, cpu = ceilings(collected("halo-llmfit-964", mem_available_mib=25.53 * 1024), None).devices
    assert mib(device) == pytest.approx(98304 + 31723.5 / 2) and device.private_bytes == 98304 * MIB
    assert mib(cpu) == pytest.approx(25.53 * 1024 - HOST_FLOOR)


def test_B9_a_discrete_card_adds_no_host_memory() -> None:
    """A RX 6800 XT was called a unified device of 32 GB."""
    found = ceilings(box(card(16368, "amd", "RX 6800 XT", gtt_total_mib=16008), mem_total_mib=32016), None)
    assert (found.devices[0].kind, mib(found.devices[0])) == ("discrete", 16368 - FLOOR)


def test_B11_memory_that_nobody_has_is_named() -> None:
    """Of 16 GiB a runtime gives out 8."""
    found = ceilings(box(card(16304, "amd", "RX 9060 XT", vram_used_idle_mib=35, vram_free_mib=8150)), None)
    assert mib(found.devices[0]) == 8150 - FLOOR
    assert doubts(found, "16304 MiB", "8150 MiB are free", "the other 8119 MiB")


def test_B13_a_window_is_no_memory() -> None:
    """The BAR1 was added: 55 to 58 GB of 24."""
    for window in (256, 32768, None):
        found = ceilings(box(card(24576, name="RTX 3090", bar1_total_mib=window)), None)
        assert mib(found.devices[0]) == 24576 - FLOOR


@pytest.mark.parametrize("free", [46.76, 62.47, 120.0])
def test_B19_free_above_total_is_cut_down(free: float) -> None:
    """46.76 of 36.20 GiB, and 120.00 of 62.47."""
    total = 36.2 if free < 60 else 60.0
    found = ceilings(box(card(total * 1024, vram_free_mib=free * 1024)), None)
    assert mib(found.devices[0]) == pytest.approx(total * 1024 - FLOOR) and doubts(found, "are said to be free")


def test_B21_free_equal_to_total_beside_what_is_in_use_is_unknown() -> None:
    """An interface without a memory budget answers the total; 104 MiB of this card are in use."""
    found = ceilings(box(card(4080, "amd", vram_used_idle_mib=103.77, vram_free_mib=4080)), None)
    assert mib(found.devices[0]) == pytest.approx(4080 - 103.77 - FLOOR, abs=1) and doubts(found, "free is not known")
    assert found.devices[0].free_bytes != 4080 * MIB


def test_B23_a_wide_window_and_ok_prove_no_transfer() -> None:
    """BAR1 32768 above 32607, the driver grants it, and the first collective hangs."""
    gpus = [
        card(32607, name="RTX 5090", arch="sm_120", id=f"GPU-{n}", bar1_total_mib=32768, peers={f"GPU-{1 - n}": "OK"})
        for n in (0, 1)
    ]
    bar1 = ceilings(box(*gpus), None).devices[0].bar1
    assert bar1 is not None and bar1.p2p == "unknown" and "only a transfer tells" in bar1.why


def test_B25_no_peers_across_generations_nor_to_a_4060_ti() -> None:
    wide = {"bar1_total_mib": 32768}
    for other in (
        card(24576, name="NVIDIA GeForce RTX 3090", arch="sm_86", **wide),
        card(16380, name="NVIDIA GeForce RTX 4060 Ti", arch="sm_89", **wide),
    ):
        own = card(24564, name="NVIDIA GeForce RTX 4090", arch="sm_89", **wide)
        for device in ceilings(box(own, other), None).devices[:2]:
            assert device.bar1 is not None and device.bar1.p2p == "no"


def test_B27_every_device_keeps_its_margin() -> None:
    """2 x 126976 MiB were filled to the last MiB."""
    found = ceilings(box(card(126976), card(126976)), None)
    assert usable(found) == [126976 - FLOOR] * 2
    unified = ceilings(box(apu(None, 126976), mem_total_mib=126976, mem_available_mib=126976), None)
    assert usable(unified) == [126976 - HOST_FLOOR]


def test_B29_a_ceiling_is_capped_by_capacity() -> None:
    """54 GB were called usable on a card of 33.6."""
    found = ceilings(box(card(32607, name="RTX 5090", vram_free_mib=54e9 / MIB)), None, {"nvidia-0": 13 << 30})
    assert mib(found.devices[0]) == 32607 - FLOOR


# ----------------------------------------------------------------------------------------- C: host, containers, WSL2


def test_C11_wsl2_keeps_1_31_gib_of_a_card() -> None:
    """0.95 of 24463 MiB fails at boot, 0.944 boots."""
    for fields in ({"os": "Ubuntu 24.04.4 on WSL2"}, {"kernel": "6.6.87.2-microsoft-standard-WSL2"}):
        found = ceilings(box(card(24463, name="RTX 3090"), **fields), 0)
        share = found.devices[0].ceiling_bytes or 0
        assert share == (24463 - 1341) * MIB and 0.944 < share / (24463 * MIB) < 0.95
    assert usable(ceilings(collected("wsl2-2x3090-15g"), None)) == [24576 - 1341 - FLOOR] * 2


@given(
    fixed=st.floats(0, 1e14),
    per_token=st.floats(0, 1e6),
    tokens=st.integers(0, 1 << 24),
    total=st.floats(-1e9, 1e9),
    free=st.floats(-1e9, 1e9),
)
@settings(max_examples=40)
def test_C13_nothing_that_is_planned_is_negative(
    fixed: float, per_token: float, tokens: int, total: float, free: float
) -> None:
    """An estimate of -35.69 GiB for graphs."""
    assert Term(0, "graphs", fixed, ALWAYS, "reserve", per_token=per_token).at(tokens).bytes >= 0
    found = ceilings(box(card(total, vram_free_mib=free), apu(total, free), mem_total_mib=free), None)
    assert all(device.ceiling_bytes is None or device.ceiling_bytes >= 0 for device in found.devices)
    assert all(pool is None or pool >= 0 for pool in found.pools)


def test_C15_a_context_is_counted_for_each_card_of_a_mixed_pair() -> None:
    """A Turing card beside an Ampere one took 3 GB more than two Turing cards."""
    gpus = (card(22027, name="RTX 2080 Ti", arch="sm_75"), card(24576, name="RTX 3090", arch="sm_86"))
    turing, ampere, _ = ceilings(box(*gpus), None).devices
    assert (turing.arch, ampere.arch) == ("sm_75", "sm_86")
    assert context_bytes(ampere) >= context_bytes(turing) > 107 * MIB
    pair = ceilings(box(gpus[0], gpus[0]), None).devices
    assert context_bytes(pair[0]) == context_bytes(turing), "and a card's is its own, whoever stands beside it"
