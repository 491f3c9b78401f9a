"""The probe as a command and with other processes: no device node is opened, amdsmi is a second opinion at most."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from budget.facts import GIB, MIB, Card, Doubt
from budget.probe_amdsmi import second_opinion

DEVICE_NODE = re.compile(r"/dev/(nvidia|dri|kfd|accel|dxg)")
PATIENCE_S = 60.0


def traced(folder: Path, *command: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """A command's result and every call of it or a child that names a device node of a GPU."""
    strace = shutil.which("strace")
    if strace is None:
        pytest.skip("strace is not installed")
    log = folder / "strace.txt"
    done = subprocess.run(
        [
            strace,
            "-f",
            "-qq",
            "-e",
            "trace=open,openat,openat2",
            "-o",
            str(log),
            sys.executable,
            "-m",
            "homeserve",
            *command,
        ],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        env=dict(os.environ, HOMESERVE_CACHE=str(folder / "cache")),
    )
    calls = log.read_text(errors="replace").splitlines()
    assert len(calls) > 100, "strace saw the interpreter start"
    return done, [call for call in calls if DEVICE_NODE.search(call)]


def recorded(root: Path) -> Path:
    """A box with a card of each vendor, and with the device nodes that must be left alone."""
    files = {
        "proc/meminfo": "MemTotal: 32000000 kB\nMemFree: 1 kB\nMemAvailable: 30000000 kB\n",
        "proc/cpuinfo": "processor : 0\nflags : fpu\n",
        "sys/class/kfd/kfd/topology/nodes/1/properties": "simd_count 24\nlocation_id 50176\n",
    }
    for pci, vendor in (("0000:01:00.0", "0x10de"), ("0000:c4:00.0", "0x1002"), ("0000:00:02.0", "0x8086")):
        folder = f"sys/bus/pci/devices/{pci}"
        files |= {f"{folder}/vendor": vendor, f"{folder}/device": "0x15bf", f"{folder}/class": "0x030000"}
    for node in ("nvidia0", "nvidiactl", "kfd", "dri/renderD128", "dri/card0"):
        files[f"dev/{node}"] = "a device"
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize("command", ["probe", "budget", "doctor"])
def test_probe_opens_no_device_node(tmp_path: Path, command: str) -> None:
    done, opened = traced(tmp_path, command, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["schema"] == 1
    assert opened == []


def test_probe_of_a_box_with_cards_opens_no_device_node_below_its_root(tmp_path: Path) -> None:
    done, opened = traced(tmp_path, "probe", "--json", "--root", str(recorded(tmp_path / "root")))
    assert done.returncode == 0, done.stderr
    assert [card["vendor"] for card in json.loads(done.stdout)["gpus"]] == ["nvidia", "amd", "intel"]
    assert opened == []


# -------------------------------------------------------------------------------------------------------------- amdsmi


CARDS = (Card("amd", "GPU-1", "AMD X", pci="0000:03:00.0", total_bytes=16 * GIB, gtt_total_bytes=8 * GIB),)
WORKING = """
class AmdSmiMemoryType:
    VRAM, VIS_VRAM, GTT = 0, 1, 2
def amdsmi_init(): print("a library that talks")
def amdsmi_get_processor_handles(): return ["handle"]
def amdsmi_get_gpu_device_bdf(handle): return "0000:03:00.0"
def amdsmi_get_gpu_memory_total(handle, kind): return {vram} if kind == 0 else {gtt}
"""


def opinion(folder: Path, monkeypatch: pytest.MonkeyPatch, source: str, deadline_s: float = PATIENCE_S) -> list[Doubt]:
    (folder / "amdsmi.py").write_text(source)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    return second_opinion(CARDS, deadline_s)


def test_amdsmi_that_agrees_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert opinion(tmp_path, monkeypatch, WORKING.format(vram=16 * GIB, gtt=8 * GIB - MIB)) == []


def test_A15_amdsmi_that_differs_is_shown_beside_the_kernels_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    doubts = opinion(tmp_path, monkeypatch, WORKING.format(vram=8 * GIB, gtt=64077 * MIB))
    assert [doubt.what for doubt in doubts] == [
        "says 8192 MiB of VRAM for AMD X at 0000:03:00.0, the kernel 16384 MiB",
        "says 64077 MiB of GTT for AMD X at 0000:03:00.0, the kernel 8192 MiB",
    ]


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("raise OSError('libamd_smi.so: no such file')", "is installed and does not work: OSError: libamd_smi.so"),
        ("import sys; sys.exit(3)", "is installed and does not work: exit 3"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "is installed and does not work: exit -11"),
        (WORKING.format(vram="'much'", gtt="None"), "gave no answer that can be read"),
    ],
)
def test_amdsmi_that_fails_is_a_doubt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, what: str) -> None:
    (doubt,) = opinion(tmp_path, monkeypatch, source)
    assert doubt.what.startswith(what) and doubt.taken == "sysfs and KFD alone"


def test_amdsmi_that_hangs_is_ended_at_the_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (doubt,) = opinion(tmp_path, monkeypatch, "import threading; threading.Event().wait()", deadline_s=0.2)
    assert doubt.what == "did not answer within 0.2 s"


def test_amdsmi_is_not_asked_where_no_amd_card_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "amdsmi.py").write_text("raise SystemExit('asked')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert second_opinion((Card("nvidia", "GPU-1", "X"),), 0.0) == []
