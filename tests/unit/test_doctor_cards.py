"""What `doctor` says of a card: every thing that is missing, each with its fix."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from budget.facts import GIB, Box, Card, CpuFacts, MemoryFacts
from homeserve.commands.doctor_cards import Finding, findings, vendors_of
from homeserve.readiness import Readiness, SeenCard

HOST = MemoryFacts(64 * GIB, 64 * GIB, "MemTotal", 48 * GIB, 0)
CPU = CpuFacts("CPU", 16, 8, "physical cores", frozenset())
NVIDIA = Card(
    "nvidia", "GPU-1", "RTX 3090", "sm_86", pci="0000:01:00.0", total_bytes=24 * GIB, reserved_bytes=0,
    free_bytes=23 * GIB,
)  # fmt: skip
AMD = Card(
    "amd", "GPU-2", "RX 7900 XTX", "gfx1100", pci="0000:03:00.0", total_bytes=24 * GIB, used_bytes=0, free_bytes=GIB
)
SEEN = SeenCard("GPU-1", "0000:01:00.0", "RTX 3090", "sm_86", True)
WELL = Readiness("CUDA 13.0", "NVRTC 13.5", (SEEN,))
HIP = Readiness("HIP 7.1", "hiprtc 9.0", (SeenCard("GPU-2", "0000:03:00.0", "RX 7900 XTX", "gfx1100", True),))


def box(*cards: Card, environment: str = "bare") -> Box:
    return Box("here", HOST, CPU, cards, environment=environment)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Nodes of both vendors."""
    for name in ("dev/nvidiactl", "dev/nvidia-uvm", "dev/kfd", "dev/dri/renderD128"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "sys/bus/pci/devices/0000:03:00.0/drm/renderD128").mkdir(parents=True)
    return tmp_path


def found(
    where: Box, root: Path, ready: dict[str, Readiness] | None = None, environ: dict[str, str] | None = None
) -> list[Finding]:
    told = {"nvidia": WELL, "amd": HIP} if ready is None else ready
    return list(findings(where, environ or {}, told, root))


def test_a_card_that_lacks_nothing_has_one_line(root: Path) -> None:
    first, second = found(box(NVIDIA, AMD, Card("intel", "x", "Arc")), root)
    assert first.card == "cuda:0" and not first.fix
    assert first.what.startswith("RTX 3090 (GPU-1), sm_86: CUDA 13.0, NVRTC 13.5; kernels are known to compile for it")
    assert second.card == "rocm:0" and not second.fix and "HIP 7.1, hiprtc 9.0" in second.what
    assert vendors_of(box(NVIDIA, AMD, Card("intel", "x", "Arc"))) == ["amd", "nvidia"]


def test_an_arch_that_is_compiled_for_here_is_no_lack(root: Path) -> None:
    (line,) = found(box(replace(NVIDIA, arch="sm_90")), root)
    assert not line.fix and "the first start compiles them here" in line.what


@pytest.mark.parametrize(
    ("node", "vendor", "fix"),
    [
        ("dev/nvidiactl", "nvidia", "sudo modprobe nvidia"),
        ("dev/nvidia-uvm", "nvidia", "sudo nvidia-modprobe -u"),
        ("dev/kfd", "amd", "sudo modprobe amdgpu"),
        ("dev/dri/renderD128", "amd", "load the kernel driver"),
    ],
)
def test_a_device_node_that_is_not_there(root: Path, node: str, vendor: str, fix: str) -> None:
    (root / node).unlink()
    (line,) = found(box(NVIDIA if vendor == "nvidia" else AMD), root)
    assert f"/{node} is not there" in line.what and fix in line.fix
    (line,) = found(box(NVIDIA if vendor == "nvidia" else AMD, environment="container"), root)
    assert line.fix.startswith("run the container with")


def test_a_node_for_others_names_the_groups(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As root everything may be opened, so it is the answer of the system that is replaced."""
    monkeypatch.setattr("os.access", lambda path, mode: "kfd" not in str(path))
    (line,) = found(box(AMD), root)
    assert "/dev/kfd may not be opened by this user" in line.what and "usermod -aG render,video" in line.fix


def test_every_missing_thing_is_told_and_not_the_first(root: Path) -> None:
    (root / "dev/nvidia-uvm").unlink()
    lacks = Readiness(
        missing=(
            ("CUDA 11.4 is older than 12.0", "update NVIDIA's driver"),
            ("NVRTC 11 was not found", "pip install x"),
        )
    )
    lines = found(box(NVIDIA), root, {"nvidia": lacks}, {"CUDA_VISIBLE_DEVICES": "-1"})
    assert [line.fix.split(":")[0].split(",")[0] for line in lines] == [
        "load it", "unset CUDA_VISIBLE_DEVICES", "update NVIDIA's driver", "pip install x"
    ]  # fmt: skip
    assert {line.card for line in lines} == {"cuda:0"} and all(
        line.what.startswith("RTX 3090 (GPU-1): ") for line in lines
    )


@pytest.mark.parametrize(
    ("card", "ready", "text"),
    [
        (NVIDIA, Readiness("CUDA 13.0", "NVRTC 13.5"), "its driver does not show it"),
        (NVIDIA, replace(WELL, cards=(replace(SEEN, virtual_memory=False),)), "no virtual memory"),
        (replace(NVIDIA, arch="sm_61"), WELL, "sm_61 is older than sm_75 (Turing)"),
        (replace(NVIDIA, total_bytes=None, free_bytes=None), WELL, "cannot be planned for: its memory is unknown"),
    ],
)
def test_what_is_wrong_with_the_card_itself(root: Path, card: Card, ready: Readiness, text: str) -> None:
    (line,) = found(box(card), root, {"nvidia": ready})
    assert text in line.what and line.fix


def test_wsl_has_one_node_for_all(root: Path) -> None:
    lines = found(box(NVIDIA, environment="wsl2"), root)
    assert "/dev/dxg is not there" in lines[0].what and "wsl --update" in lines[0].fix


def test_two_cards_of_one_uuid(root: Path) -> None:
    twins = replace(NVIDIA, twin="GPU-1"), replace(NVIDIA, id="nvidia-1", twin="GPU-1", pci="0000:02:00.0")
    lines = found(box(*twins), root)
    assert [line.card for line in lines if "is another card's too" in line.what] == ["cuda:0", "cuda:1"]
