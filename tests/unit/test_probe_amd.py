"""AMD GPUs read from recorded trees of sysfs and KFD: real boxes, and every way in which their files mislead."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from budget.ceilings import ceilings
from budget.facts import GIB, MIB, Box, Card, Link
from budget.probe import Sources, read_box
from budget.probe_gtt import gtt_limits
from budget.probe_kfd import arch_of, kfd_gpus
from budget.tree import Tree

PAGES = GIB // 4096
AMD = "0x1002"


class Recorded:
    """A recorded tree: `gpu` and `node` add what amdgpu and KFD show of one GPU."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write("proc/meminfo", "MemTotal: 30935848 kB\nMemFree: 1000 kB\nMemAvailable: 29253632 kB\n")

    def write(self, name: str, text: object) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")

    def gpu(self, pci: str, device: int, drm: int = 0, ports: tuple[str, ...] = (), **files: object) -> None:
        """Files are named without mem_info_; None leaves one out. `ports` are the bridges above the card."""
        place = "/".join(["sys/devices/pci0000:00", *ports, pci])
        facts: dict[str, object] = {"vendor": AMD, "device": hex(device), "class": "0x030000", "revision": "0xc4"}
        facts["uevent"] = f"DRIVER=amdgpu\nPCI_ID=1002:{device:04X}\nPCI_SLOT_NAME={pci}"
        for name, value in files.items():
            known = name in ("vram_total", "vram_used", "vis_vram_total", "vis_vram_used", "gtt_total", "gtt_used")
            facts[f"mem_info_{name}" if known else name] = value
        for name, value in facts.items():
            if value is not None:
                self.write(f"{place}/{name}", value)
        self.write(f"{place}/drm/renderD{128 + drm}/dev", "226:128")
        self.link(f"sys/class/drm/card{drm}/device", place)
        self.link(f"sys/bus/pci/devices/{pci}", place)

    def link(self, name: str, target: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(os.path.relpath(self.root / target, path.parent))

    def node(self, index: int, bank_bytes: int, bank: str = "heap_type 1", **facts: int) -> None:
        folder = f"sys/class/kfd/kfd/topology/nodes/{index}"
        self.write(f"{folder}/properties", "\n".join(f"{name} {value}" for name, value in facts.items()))
        self.write(
            f"{folder}/mem_banks/0/properties", f"{bank}\nsize_in_bytes {bank_bytes}\nflags 0".replace(", ", "\n")
        )

    def probe(self) -> Box:
        return read_box(Sources(root=str(self.root), allowed=(0,)))

    def card(self) -> Card:
        box = self.probe()
        assert len(box.cards) == 1, box.cards
        return box.cards[0]


@pytest.fixture
def recorded(tmp_path: Path) -> Recorded:
    return Recorded(tmp_path)


def said(box: Box) -> str:
    return " | ".join(f"{doubt.where}: {doubt.what} -> {doubt.taken}" for doubt in box.doubts)


def cpu_node(tree: Recorded, index: int = 0, size: int = 67155521536) -> None:
    tree.node(index, size, "heap_type 0, width 64, mem_clk_max 2666", cpu_cores_count=20, simd_count=0, vendor_id=0)


def phoenix(tree: Recorded, **changes: object) -> None:
    facts: dict[str, object] = {
        "vram_total": 4294967296, "vram_used": 1272893440, "vis_vram_total": 4294967296, "gtt_total": 31433977856,
        "gtt_used": 211398656, "max_link_speed": "16.0 GT/s PCIe", "max_link_width": 16,
    }  # fmt: skip
    tree.gpu("0000:c4:00.0", 0x15BF, **(facts | changes))


def kfd_phoenix(tree: Recorded, size: int = 31433977856) -> None:
    tree.node(1, size, simd_count=24, gfx_target_version=110003, location_id=0xC400, domain=0, device_id=0x15BF)


# ----------------------------------------------------------------------------------------------------- recorded boxes


def test_the_780m_laptop(recorded: Recorded) -> None:
    phoenix(recorded)
    cpu_node(recorded)
    kfd_phoenix(recorded)
    box = recorded.probe()
    card = box.cards[0]
    assert card == Card(
        vendor="amd",
        id="0000:c4:00.0",
        name="AMD (1002:15bf)",
        arch="gfx1103",
        unified=True,
        total_bytes=4294967296,
        used_bytes=1272893440,
        free_bytes=4294967296 - 1272893440,
        visible_bytes=4294967296,
        gtt_total_bytes=31433977856,
        gtt_used_bytes=211398656,
        link=None,
        pci="0000:c4:00.0",
        order=1,
    )
    assert said(box).count("amdgpu") == 0 and "kfd" not in said(box)


def test_the_target_laptop_of_the_figures(recorded: Recorded) -> None:
    """Carve-out 1024, GTT 24576, MemTotal 30211, MemAvailable 28568 MiB."""
    phoenix(recorded, vram_total=1024 * MIB, vram_used=0, vis_vram_total=1024 * MIB, gtt_total=24576 * MIB, gtt_used=0)
    kfd_phoenix(recorded, 24576 * MIB)
    box = recorded.probe()
    assert box.memory is not None and box.memory.total_bytes is not None and box.memory.available_bytes is not None
    assert (box.memory.total_bytes >> 20, box.memory.available_bytes >> 20) == (30210, 28568)
    card = box.cards[0]
    assert (card.total_bytes, card.gtt_total_bytes, card.unified) == (1024 * MIB, 24576 * MIB, True)
    assert ceilings(box, None).devices[0].ceiling_bytes == 25600 * MIB


def test_strix_point(recorded: Recorded) -> None:
    recorded.gpu("0000:65:00.0", 0x150E, vram_total=536870912, vram_used=514580480, vis_vram_total=536870912,
                 gtt_total=16441004032, gtt_used=3946811392)  # fmt: skip
    recorded.node(1, 16441004032, simd_count=32, gfx_target_version=110500, location_id=0x6500, domain=0)
    card = recorded.card()
    assert (card.arch, card.unified, card.total_bytes, card.free_bytes) == ("gfx1150", True, 536870912, 22290432)


def test_rx_6900_xt_behind_its_own_bridge_in_a_gen_3_slot(recorded: Recorded) -> None:
    """The chip claims gen 4 x16 always; what counts is the card's upper bridge and the slot."""
    ports = ("0000:00:01.1", "0000:01:00.0", "0000:02:00.0")
    folder = "sys/devices/pci0000:00"
    for depth, (vendor, speed, width) in enumerate([("0x1022", "8.0", 16), (AMD, "16.0", 16), (AMD, "16.0", 16)]):
        place = "/".join([folder, *ports[: depth + 1]])
        recorded.write(f"{place}/vendor", vendor)
        recorded.write(f"{place}/max_link_speed", f"{speed} GT/s PCIe")
        recorded.write(f"{place}/max_link_width", width)
    recorded.gpu("0000:03:00.0", 0x73BF, ports=ports, vram_total=17163091968, vram_used=668274688,
                 vis_vram_total=17163091968, gtt_total=16786171904, gtt_used=62369792, max_link_speed="16.0 GT/s PCIe",
                 max_link_width=16, unique_id="4a6d9d4a1b2c3d4e", numa_node=-1)  # fmt: skip
    recorded.node(1, 17163091968, "heap_type 1, width 256, mem_clk_max 1000", simd_count=160, gfx_target_version=100300,
                  location_id=0x300, domain=0)  # fmt: skip
    recorded.write("sys/class/drm/card0-DP-1/status", "connected")
    recorded.write("sys/class/drm/card0-DP-1/enabled", "enabled")
    card = recorded.card()
    assert (card.arch, card.unified, card.id) == ("gfx1030", False, "GPU-4a6d9d4a1b2c3d4e")
    assert card.link == Link(3, 16)
    assert card.bandwidth_bytes_s == 512e9
    assert card.display is True and card.numa_node is None
    assert (card.total_bytes, card.visible_bytes, card.free_bytes) == (17163091968, 17163091968, 16494817280)


@pytest.mark.parametrize(
    ("device", "version", "total", "used", "visible", "gtt"),
    [
        (0x67DF, 80003, 4294967296, 536870912, 268435456, 8342712320),
        (0x687F, 90000, 8573157376, 16613376, 268435456, 8342863872),
    ],
    ids=["rx580", "vega56"],
)
def test_a_card_without_a_large_window(
    recorded: Recorded, device: int, version: int, total: int, used: int, visible: int, gtt: int
) -> None:
    recorded.gpu("0000:0b:00.0", device, vram_total=total, vram_used=used, vis_vram_total=visible, gtt_total=gtt,
                 gtt_used=12337152, max_link_speed="8.0 GT/s PCIe", max_link_width=16)  # fmt: skip
    recorded.node(1, total, simd_count=144, gfx_target_version=version, location_id=0xB00, domain=0)
    card = recorded.card()
    assert (card.unified, card.total_bytes, card.visible_bytes) == (False, total, visible)
    assert card.link == Link(3, 16)


def test_old_kernels_give_gtt_the_size_of_vram_and_it_is_still_the_hosts(recorded: Recorded) -> None:
    recorded.gpu("0000:01:00.0", 0x67DF, vram_total=4294967296, vram_used=1, gtt_total=4294967296, gtt_used=0)
    recorded.node(1, 4294967296, simd_count=128, gfx_target_version=80003, location_id=0x100)
    card = recorded.card()
    assert (card.total_bytes, card.unified, card.gtt_total_bytes) == (4096 * MIB, False, 4096 * MIB)


def test_two_vega_10_on_an_old_kernel_by_kfd_alone(recorded: Recorded) -> None:
    cpu_node(recorded)
    for index, location in ((1, 6400), (2, 10240)):
        recorded.node(index, 17163091968, "heap_type 1, width 2048, mem_clk_max 945", simd_count=256, vendor_id=4098,
                      device_id=26720, location_id=location, drm_render_minor=127 + index,
                      local_mem_size=17163091968)  # fmt: skip
    box = recorded.probe()
    assert [(card.pci, card.total_bytes) for card in box.cards] == [
        ("0000:19:00.0", 17163091968),
        ("0000:28:00.0", 17163091968),
    ]
    assert box.cards[0].bandwidth_bytes_s == 2048 / 8 * 945e6 * 2
    assert not any(card.unified for card in box.cards)
    assert "a GPU that /sys/class/drm does not list" in said(box)


# --------------------------------------------------------------------------------------------------------- the cases


def test_B1_a_cpu_node_of_kfd_is_no_gpu(recorded: Recorded) -> None:
    cpu_node(recorded, size=66982842368)
    recorded.node(1, 25753026560, simd_count=384, gfx_target_version=110000, location_id=0x300, device_id=0x744C)
    assert [card.total_bytes for card in recorded.probe().cards] == [25753026560]


def test_B1_there_is_a_cpu_node_for_each_socket(recorded: Recorded) -> None:
    """The MI210 box: nodes 0 and 1 are CPUs, local_mem_size is 0, the bank tells what is used."""
    cpu_node(recorded, 0)
    cpu_node(recorded, 1)
    recorded.node(2, 68702699520, "heap_type 1, width 4096, mem_clk_max 1600", simd_count=416, gfx_target_version=90010,
                  device_id=29711, drm_render_minor=128, local_mem_size=0, location_id=0xC100)  # fmt: skip
    recorded.write("sys/class/kfd/kfd/topology/nodes/2/mem_banks/0/used_memory", 14102528)
    card = recorded.card()
    assert (card.arch, card.total_bytes, card.used_bytes) == ("gfx90a", 68702699520, 14102528)
    assert card.free_bytes == 68702699520 - 14102528


def test_B5_the_processors_own_gpu_is_no_second_card(recorded: Recorded) -> None:
    """Ryzen 9800X3D beside a 7900 XTX: 24 GB, not 48."""
    recorded.gpu("0000:03:00.0", 0x744C, 0, vram_total=24560 * MIB, vram_used=0, gtt_total=15602 * MIB)
    recorded.gpu("0000:0e:00.0", 0x13C0, 1, vram_total=512 * MIB, vram_used=0, gtt_total=15602 * MIB)
    recorded.node(1, 24560 * MIB, simd_count=384, gfx_target_version=110000, location_id=0x300)
    recorded.node(2, 15602 * MIB, simd_count=4, gfx_target_version=100306, location_id=0xE00)
    xtx, own = recorded.probe().cards
    assert (xtx.arch, xtx.unified, xtx.total_bytes) == ("gfx1100", False, 24560 * MIB)
    assert (own.arch, own.unified, own.total_bytes) == ("gfx1036", True, 512 * MIB)


def test_rx_9060_xt_beside_raphael_share_one_gtt(recorded: Recorded) -> None:
    recorded.gpu("0000:03:00.0", 0x7590, 1, vram_total=16304 * MIB, vram_used=0, gtt_total=16361 * MIB)
    recorded.gpu("0000:7c:00.0", 0x164E, 0, vram_total=512 * MIB, vram_used=0, gtt_total=16361 * MIB)
    recorded.node(1, 16304 * MIB, simd_count=64, gfx_target_version=120000, location_id=0x300)
    assert [(card.pci, card.unified) for card in recorded.probe().cards] == [
        ("0000:03:00.0", False),
        ("0000:7c:00.0", True),
    ]


def test_cezanne_beside_two_mi50_that_share_its_name(recorded: Recorded) -> None:
    """0x1638 and a 32 GB card are both 'AMD Radeon Graphics': address and target tell them apart, names never do."""
    recorded.write("usr/share/libdrm/amdgpu.ids", "1638,\tC4,\tAMD Radeon Graphics\n66A0,\tC4,\tAMD Radeon Graphics")
    for drm, (pci, device, size) in enumerate(
        [("0000:03:00.0", 0x66A0, 32752), ("0000:06:00.0", 0x66A1, 16368), ("0000:0a:00.0", 0x1638, 512)]
    ):
        recorded.gpu(pci, device, drm, vram_total=size * MIB, vram_used=0, gtt_total=15000 * MIB)
    for index, (location, version, size) in enumerate([(0x300, 90006, 32752), (0x600, 90006, 16368)], 1):
        recorded.node(index, size * MIB, simd_count=240, gfx_target_version=version, location_id=location)
    cards = recorded.probe().cards
    assert [(card.arch, card.unified, card.total_bytes) for card in cards] == [
        ("gfx906", False, 32752 * MIB),
        ("gfx906", False, 16368 * MIB),
        ("gfx90c", True, 512 * MIB),
    ]
    assert cards[0].name == cards[2].name == "AMD Radeon Graphics"


def test_A21_one_gpu_listed_six_times_is_one(recorded: Recorded) -> None:
    recorded.gpu("0000:e4:00.0", 0x1681, 0, vram_total=4096 * MIB, vram_used=0, gtt_total=14000 * MIB)
    for number in range(1, 6):
        recorded.link(f"sys/class/drm/card{number}/device", "sys/devices/pci0000:00/0000:e4:00.0")
    recorded.node(1, 14000 * MIB, simd_count=24, gfx_target_version=100305, location_id=0xE400)
    box = recorded.probe()
    assert [(card.pci, card.total_bytes, card.unified) for card in box.cards] == [("0000:e4:00.0", 4096 * MIB, True)]
    assert said(box).count("listed more than once") == 5


@pytest.mark.parametrize("total", [0, None])
def test_A9_a_carve_out_of_0_is_unknown_and_gtt_stays(recorded: Recorded, total: int | None) -> None:
    phoenix(recorded, vram_total=total, vram_used=0)
    kfd_phoenix(recorded)
    card = recorded.card()
    assert card.total_bytes is None and card.gtt_total_bytes == 31433977856 and card.unified


def test_A25_mi300a_has_no_carve_out_and_the_size_that_kfd_says(recorded: Recorded) -> None:
    """It shares gfx942 with the MI300X, which is a card: the PCI id tells them apart."""
    recorded.gpu("0000:01:00.0", 0x74A0, 0, vram_total=0, vram_used=0, gtt_total=0)
    recorded.gpu("0000:02:00.0", 0x74A1, 1, vram_total=196592 * MIB, vram_used=0, gtt_total=64000 * MIB)
    recorded.node(1, 131072 * MIB, simd_count=912, gfx_target_version=90402, location_id=0x100, device_id=0x74A0)
    recorded.node(2, 196592 * MIB, simd_count=1216, gfx_target_version=90402, location_id=0x200, device_id=0x74A1)
    apu, card = recorded.probe().cards
    assert (apu.unified, apu.total_bytes, apu.gtt_total_bytes) == (True, None, 131072 * MIB)
    assert (card.unified, card.total_bytes) == (False, 196592 * MIB)


def test_A15_kfd_against_ttm_shows_both_numbers(recorded: Recorded) -> None:
    recorded.gpu("0000:c5:00.0", 0x1586, vram_total=512 * MIB, vram_used=0, gtt_total=126976 * MIB, gtt_used=0)
    recorded.node(1, 64077 * MIB, simd_count=80, gfx_target_version=110501, location_id=0xC500)
    recorded.write("sys/module/ttm/parameters/pages_limit", 126976 * MIB // 4096)
    box = recorded.probe()
    assert box.cards[0].gtt_total_bytes == 126976 * MIB
    assert "KFD offers 64077 MiB, carve-out 512 MiB and GTT 126976 MiB say otherwise" in said(box)


def test_a_large_carve_out_is_all_that_compute_gets_since_6_10(recorded: Recorded) -> None:
    recorded.gpu("0000:c5:00.0", 0x1586, vram_total=96 * GIB, vram_used=0, gtt_total=16364285952, gtt_used=0)
    recorded.node(1, 96 * GIB, simd_count=80, gfx_target_version=110501, location_id=0xC500)
    assert "since kernel 6.10 compute gets the larger one, not both" in said(recorded.probe())


def test_B15_used_above_total_is_not_believed(recorded: Recorded) -> None:
    """The swap of LocalAI: total 692142080, used 17163091968."""
    recorded.gpu("0000:03:00.0", 0x73BF, vram_total=692142080, vram_used=17163091968, gtt_total=GIB)
    recorded.node(1, 17163091968, simd_count=160, gfx_target_version=100300, location_id=0x300)
    box = recorded.probe()
    assert (box.cards[0].used_bytes, box.cards[0].free_bytes) == (None, None)
    assert "says 16368 MiB used of 660 MiB" in said(box)
    assert "KFD says 16368 MiB, mem_info_vram_total 660 MiB" in said(box)


@pytest.mark.parametrize("listed", [True, False])
def test_partitions_of_one_gpu_are_one_card(recorded: Recorded, listed: bool) -> None:
    """An MI300X cut into compute partitions has a KFD node for each, all at one address."""
    if listed:
        recorded.gpu("0000:02:00.0", 0x74A1, vram_total=196592 * MIB, vram_used=0)
    for index in range(1, 9):
        recorded.node(index, 196592 * MIB, simd_count=152, gfx_target_version=90402, location_id=0x200)
    box = recorded.probe()
    assert [card.total_bytes for card in box.cards] == [196592 * MIB]
    assert said(box).count("a partition of it") == 7


# ----------------------------------------------------------------------------------------------------- unified or not


@pytest.mark.parametrize(
    "version", [90002, 90009, 90012, 100303, 100305, 100306, 100307, 110003, 110500, 110501, 110502, 110503]
)
def test_targets_of_apus(recorded: Recorded, version: int) -> None:
    recorded.gpu("0000:c4:00.0", 0x1, vram_total=512 * MIB, vram_used=0, gtt_total=8 * GIB)
    recorded.node(1, 8 * GIB, simd_count=8, gfx_target_version=version, location_id=0xC400)
    assert recorded.card().unified


def test_an_old_kernels_apu_node_has_cores_and_simds(recorded: Recorded) -> None:
    recorded.gpu("0000:00:01.0", 0x130F, vram_total=1 * GIB, vram_used=0, gtt_total=3 * GIB)
    recorded.node(0, 8 * GIB, "heap_type 0", cpu_cores_count=4, simd_count=32, location_id=8, device_id=0x130F)
    card = recorded.card()
    assert card.unified and card.pci == "0000:00:01.0" and card.arch is None


def test_an_unknown_target_is_taken_for_a_card_with_a_doubt(recorded: Recorded) -> None:
    recorded.gpu("0000:c4:00.0", 0x1, vram_total=512 * MIB, vram_used=0, gtt_total=8 * GIB)
    recorded.node(1, 512 * MIB, simd_count=8, gfx_target_version=130000, location_id=0xC400)
    box = recorded.probe()
    assert box.cards[0].arch == "gfx1300" and not box.cards[0].unified
    assert "whether gfx1300 shares the host's memory is not known here -> a card with memory of its own" in said(box)


def test_the_firmwares_carve_out_switch_proves_an_apu(recorded: Recorded) -> None:
    recorded.gpu("0000:c4:00.0", 0x1, vram_total=512 * MIB, vram_used=0, gtt_total=8 * GIB, **{"uma/carveout": 1})
    assert recorded.card().unified


def test_without_kfd_the_pci_id_tells(recorded: Recorded) -> None:
    phoenix(recorded)
    assert (recorded.card().unified, recorded.card().arch) == (True, "gfx1103")


# --------------------------------------------------------------------------------------------------- files that fail


def test_missing_mem_info_is_unknown_and_named(recorded: Recorded) -> None:
    recorded.gpu("0000:01:00.0", 0x6611, max_link_speed="5.0 GT/s PCIe", max_link_width=4)
    box = recorded.probe()
    card = box.cards[0]
    assert (card.total_bytes, card.free_bytes, card.gtt_total_bytes, card.link) == (None, None, None, Link(2, 4))
    assert "mem_info_vram_total: is not there: the driver does not say how much memory -> unknown" in said(box)


def test_missing_mem_info_of_a_card_is_taken_from_kfd(recorded: Recorded) -> None:
    recorded.gpu("0000:03:00.0", 0x744C)
    recorded.node(1, 25753026560, simd_count=384, gfx_target_version=110000, location_id=0x300)
    assert recorded.card().total_bytes == 25753026560


@pytest.mark.parametrize("text", ["\0" * 64, "4294967296 bytes", "-5", "1e9", "9" * 5000, "", "\u0664"])
def test_a_file_that_holds_no_size_is_unknown(recorded: Recorded, text: str) -> None:
    phoenix(recorded, vram_total=text)
    box = recorded.probe()
    assert box.cards[0].total_bytes is None
    assert "mem_info_vram_total" in said(box)


def test_nul_padding_is_no_part_of_a_number(recorded: Recorded) -> None:
    phoenix(recorded, vram_total="4294967296\n" + "\0" * 4000)
    assert recorded.card().total_bytes == 4294967296


def test_a_folder_in_a_files_place_is_a_doubt(recorded: Recorded) -> None:
    phoenix(recorded, vram_total=None)
    (recorded.root / "sys/devices/pci0000:00/0000:c4:00.0/mem_info_vram_total").mkdir()
    box = recorded.probe()
    assert box.cards[0].total_bytes is None
    assert "mem_info_vram_total: cannot be read: no regular file" in said(box)


def test_a_pipe_in_a_files_place_does_not_hold_the_probe_up(recorded: Recorded) -> None:
    phoenix(recorded, gtt_total=None)
    os.mkfifo(recorded.root / "sys/devices/pci0000:00/0000:c4:00.0/mem_info_gtt_total")
    assert recorded.card().gtt_total_bytes is None


def test_links_that_go_round_are_no_card(recorded: Recorded) -> None:
    phoenix(recorded)
    (recorded.root / "sys/class/drm/card1").symlink_to("card1")
    (recorded.root / "sys/bus/pci/devices/0000:05:00.0").symlink_to("0000:05:00.0")
    assert recorded.card().pci == "0000:c4:00.0"


def test_only_the_current_link_is_told_with_a_doubt(recorded: Recorded) -> None:
    recorded.gpu("0000:03:00.0", 0x744C, vram_total=GIB, vram_used=0, current_link_speed="16.0 GT/s PCIe",
                 current_link_width=8)  # fmt: skip
    box = recorded.probe()
    assert box.cards[0].link == Link(4, 8)
    assert "an idle card's current link is slow" in said(box)


def test_the_window_is_read_from_the_resources_where_nothing_else_tells(recorded: Recorded) -> None:
    window = "0x000000f800000000 0x000000fbffffffff 0x000000000014220c\n0x0 0x0 0x0"
    recorded.gpu("0000:03:00.0", 0x73BF, vram_total=17163091968, vram_used=0, resource=window)
    assert recorded.card().visible_bytes == 16 * GIB


@pytest.mark.parametrize(
    ("version", "arch"),
    [
        (90010, "gfx90a"), (90012, "gfx90c"), (100300, "gfx1030"), (110000, "gfx1100"), (110501, "gfx1151"),
        (120001, "gfx1201"), (80003, "gfx803"), (0, None), (None, None), (-1, None), (10**9, None),
    ],
)  # fmt: skip
def test_targets_are_written_with_hexadecimal_minor_and_step(version: int | None, arch: str | None) -> None:
    assert arch_of(version) == arch


def test_a_node_without_an_address_is_matched_by_its_render_node(recorded: Recorded) -> None:
    """Location 0 is the host bridge, no address of a GPU."""
    recorded.gpu("0000:03:00.0", 0x744C, drm=1, vram_total=25753026560, vram_used=0)
    recorded.node(1, 25753026560, simd_count=384, gfx_target_version=110000, location_id=0, drm_render_minor=129)
    assert recorded.card().arch == "gfx1100"


def test_a_node_that_cannot_be_read_is_a_doubt(recorded: Recorded) -> None:
    (recorded.root / "sys/class/kfd/kfd/topology/nodes/1/properties").mkdir(parents=True)
    tree = Tree(recorded.root)
    assert kfd_gpus(tree) == []
    assert tree.doubts[0].where == "/sys/class/kfd/kfd/topology/nodes/1/properties"


def test_a_uuid_that_two_chips_claim_names_neither(recorded: Recorded) -> None:
    for drm, pci in enumerate(("0000:03:00.0", "0000:06:00.0")):
        recorded.gpu(pci, 0x66A1, drm, vram_total=GIB, vram_used=0, unique_id="00000000000000ff")
    assert [card.id for card in recorded.probe().cards] == ["0000:03:00.0", "0000:06:00.0"]


# --------------------------------------------------------------------------------------------- limits on host memory


def halo(tree: Recorded, command_line: str, gtt_mib: int, pages_gib: float | None, module: str = "ttm") -> Box:
    tree.gpu("0000:c5:00.0", 0x1586, vram_total=512 * MIB, vram_used=0, gtt_total=gtt_mib * MIB, gtt_used=0)
    tree.node(1, gtt_mib * MIB, simd_count=80, gfx_target_version=110501, location_id=0xC500)
    tree.write("proc/cmdline", f"BOOT_IMAGE=/vmlinuz root=UUID=x ro quiet {command_line}")
    if pages_gib is not None:
        tree.write(f"sys/module/{module}/parameters/pages_limit", int(pages_gib * PAGES))
    return tree.probe()


def test_a_limit_that_is_in_force_is_no_doubt(recorded: Recorded) -> None:
    box = halo(recorded, f"ttm.pages_limit={96 * PAGES} ttm.page_pool_size={96 * PAGES}", 98304, 96)
    assert box.cards[0].gtt_total_bytes == 98304 * MIB
    assert "cmdline" not in said(box)


def test_both_limits_count(recorded: Recorded) -> None:
    """GTT size 134217728000, TTM size 65867993088: the second is what there is."""
    box = halo(recorded, "amdgpu.gttsize=128000", 128000, 65867993088 / GIB)
    assert box.cards[0].gtt_total_bytes == 65867993088 // 4096 * 4096
    assert "says 128000 MiB, ttm.pages_limit allows 62816 MiB: both count -> 62816 MiB" in said(box)
    assert "amdgpu.gttsize is deprecated: use ttm.pages_limit=32768000" in said(box)


def test_a_misspelt_limit_is_named_as_having_no_effect(recorded: Recorded) -> None:
    box = halo(recorded, "amdgpu.gtt_size=110000", 63973, 63973 / 1024)
    assert "amdgpu.gtt_size=110000 has no effect: there is no such parameter; meant is amdgpu.gttsize" in said(box)
    assert box.cards[0].gtt_total_bytes == 63973 * MIB


@pytest.mark.parametrize(
    ("module", "other"), [("ttm", "amdttm"), ("amdttm", "ttm")], ids=["the kernel's driver", "the driver built by DKMS"]
)
def test_the_other_drivers_prefix_has_no_effect(recorded: Recorded, module: str, other: str) -> None:
    box = halo(recorded, f"{other}.pages_limit={125 * PAGES}", 63973, 63973 / 1024, module)
    assert f"{other}.pages_limit={125 * PAGES} has no effect: the driver that runs reads {module}.pages_limit" in said(
        box
    )


@pytest.mark.parametrize(
    ("word", "why"),
    [
        ("gttsize=64000", "a driver's parameter is written module.name"),
        ("amdgpu_gttsize=64000", "a driver's parameter is written module.name"),
        ("amdgpu.gttsize=64G", "the value is no number"),
        ("ttm.page_limit=9", "meant is ttm.pages_limit"),
        ("ttm.pages-limits=9", "meant is ttm.pages_limit"),
    ],
)
def test_words_without_effect(recorded: Recorded, word: str, why: str) -> None:
    box = halo(recorded, word, 63973, None)
    assert "has no effect" in said(box) and why in said(box)


def test_what_the_driver_runs_with_counts_not_what_was_asked(recorded: Recorded) -> None:
    recorded.write("sys/module/amdgpu/parameters/gttsize", -1)
    box = halo(recorded, f"amdgpu.gttsize=128000 ttm.pages_limit={125 * PAGES}", 63973, 63973 / 1024)
    assert "amdgpu.gttsize=128000 is not in force: the driver runs with -1" in said(box)
    assert f"ttm.pages_limit={125 * PAGES} is not in force" in said(box)


def test_other_words_of_the_command_line_are_left_alone(recorded: Recorded) -> None:
    recorded.write(
        "proc/cmdline", "amdgpu.ppfeaturemask=0xffffffff amdgpu.sg_display=0 amd_iommu=off transparent_hugepage=always"
    )
    tree = Tree(recorded.root)
    assert gtt_limits(tree).pages_limit_bytes is None and tree.doubts == []


def test_gtt_that_nobody_says_is_the_memory_managers_limit(recorded: Recorded) -> None:
    phoenix(recorded, gtt_total=None)
    recorded.write("sys/module/ttm/parameters/pages_limit", 15 * PAGES)
    box = recorded.probe()
    assert box.cards[0].gtt_total_bytes == 15 * GIB
    assert "-> ttm.pages_limit, 15360 MiB" in said(box)
