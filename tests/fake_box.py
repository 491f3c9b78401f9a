"""A box whose cards are fakes: what `homeserve up` finds when it looks, beside drivers that its workers open.

    cards = fake_cards(tmp_path, cuda=1, rocm=1)
    box.up(model, "--devices", "cuda:0,rocm:0", **environment_of(cards))

`fake_cards` gives drivers and compilers. This adds what the probe reads of the same cards: an NVML
(process/nvml_stub.c) in the folder of the drivers, where the system's loader finds it, and a tree of amdgpu's sysfs and
KFD's topology, which HOMESERVE_TESTING_CARDS puts in place of the real one.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from fake_cards import FakeCards

MIB = 1 << 20
NVML = Path(__file__).parent / "process" / "nvml_stub.c"


def environment_of(cards: FakeCards) -> dict[str, str]:
    """What a process needs in its environment to live in a box with these cards."""
    library = cards.folder / "libnvidia-ml.so.1"
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    assert compiler, "a C compiler builds the package, so there is one"
    flags = ["-shared", "-fPIC", "-Wl,-soname,libnvidia-ml.so.1"]
    subprocess.run([compiler, *flags, "-o", str(library), str(NVML)], check=True, timeout=60)
    script = cards.folder / "nvml.txt"
    script.write_text("\n".join(_nvml(card) for card in _told(cards, "cuda")) + "\n")
    tree = cards.folder / "tree"
    for number, card in enumerate(_told(cards, "rocm")):
        _amdgpu(tree, number, card)
    return {
        **cards.environment,
        "NVML_STUB": str(script),
        "HOMESERVE_TESTING": "1",
        "HOMESERVE_TESTING_CARDS": str(tree),
    }


def _told(cards: FakeCards, prefix: str) -> list[dict[str, str]]:
    """The cards of a vendor, as their driver plays them."""
    path = cards.folder / f"{prefix}.cards"
    lines = path.read_text().splitlines() if path.exists() else []
    return [dict(word.split("=", 1) for word in line.split()[1:]) for line in lines if line.split()[:1] == ["card"]]


def _nvml(card: dict[str, str]) -> str:
    """A line of the stub: memory in bytes, none of it reserved or in use."""
    size, arch = int(card["mib"]) * MIB, card["arch"].removeprefix("sm_")
    facts = {
        "name": card["name"],
        "uuid": card["uuid"],
        "pci": f"0000{card['pci']}",
        "major": arch[:-1],
        "minor": arch[-1],
        "total": size,
        "reserved": 0,
        "used": 0,
        "mig": 0,
    }
    return " ".join(["card", *(f"{key}={value}" for key, value in facts.items())])


def _amdgpu(tree: Path, number: int, card: dict[str, str]) -> None:
    """A 780M: its carve-out is what the driver hands out, and some of the host's memory may be pinned beside."""
    pci, size = card["pci"].lower(), int(card["mib"]) * MIB
    device = tree / "sys/class/drm" / f"card{number}" / "device"
    target = card["arch"].removeprefix("gfx")
    version = int(target[:-2]) * 10000 + int(target[-2], 16) * 100 + int(target[-1], 16)
    bus, slot = int(pci[5:7], 16), int(pci[8:10], 16)
    node = tree / "sys/class/kfd/kfd/topology/nodes" / str(number + 1)
    unique = int(card["uuid"].removeprefix("GPU-"), 16)
    files = {
        device / "vendor": "0x1002",
        device / "device": "0x15bf",
        device / "uevent": f"DRIVER=amdgpu\nPCI_SLOT_NAME={pci}",
        device / "product_name": card["name"].replace("_", " "),
        device / "unique_id": f"{unique:016x}",
        device / "mem_info_vram_total": size,
        device / "mem_info_vram_used": 0,
        device / "mem_info_vis_vram_total": size,
        device / "class": "0x030000",
        device / "mem_info_gtt_total": 4096 * MIB,
        device / "mem_info_gtt_used": 0,
        node / "name": target,
        node / "gpu_id": 40000 + number,
        node / "properties": "\n".join(
            f"{key} {value}"
            for key, value in {
                "cpu_cores_count": 0,
                "simd_count": 24,
                "vendor_id": 0x1002,
                "device_id": 0x15BF,
                "location_id": bus << 8 | slot << 3,
                "domain": 0,
                "gfx_target_version": version,
                "unique_id": unique,
                "drm_render_minor": 128 + number,
            }.items()
        ),
        node / "mem_banks/0/properties": f"heap_type 1\nsize_in_bytes {4096 * MIB}",
    }
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
