"""What a helper process says of drivers: those of the fakes, none at all, one that hangs, one that dies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_cards import fake_cards

from homeserve import readiness


def test_what_both_drivers_show(tmp_path: Path) -> None:
    cards = fake_cards(tmp_path, cuda=2, rocm=1, facts={"cuda1": {"vmm": 0}})
    told = readiness.read(["nvidia", "amd"], os.environ | cards.environment)
    nvidia, amd = told["nvidia"], told["amd"]
    assert nvidia.driver == "CUDA 13.0" and nvidia.compiler is not None and nvidia.missing == ()
    assert [(card.arch, card.virtual_memory) for card in nvidia.cards] == [("sm_86", True), ("sm_86", False)]
    assert amd.driver is not None and amd.cards[0].arch == "gfx1103"
    second = nvidia.cards[1]
    assert nvidia.sees(second.uuid.upper(), None) is second and nvidia.sees("x", second.pci.upper()) is second
    assert nvidia.sees("x", None) is None


def test_every_missing_thing_has_a_fix(tmp_path: Path) -> None:
    cards = fake_cards(tmp_path, cuda=1, cuda_driver=11_040, rocm=-1)
    told = readiness.read(["nvidia"], os.environ | cards.environment)
    whats = [what for what, _ in told["nvidia"].missing]
    assert any("11.4 is older than 12.0" in what for what in whats) and all(fix for _, fix in told["nvidia"].missing)
    none = readiness.read(["amd"], os.environ | {"ROCM_PATH": str(tmp_path)})["amd"]
    assert none.driver is None and none.compiler is None and len(none.missing) == 2, none


def test_a_hidden_card_is_the_drivers_word(tmp_path: Path) -> None:
    cards = fake_cards(tmp_path, cuda=1, rocm=-1)
    told = readiness.read(["nvidia"], os.environ | cards.environment | {"CUDA_VISIBLE_DEVICES": ""})
    assert told["nvidia"].cards == () and "CUDA_VISIBLE_DEVICES" in told["nvidia"].missing[0][0]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("import time; time.sleep(60)", "did not answer within 1 s"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "ended with signal 11"),
        ("print('{}')", "ended with status 0"),
        ("raise SystemExit('no such thing')", "ended with status 1 and said: no such thing"),
    ],
)
def test_a_helper_that_does_not_answer_is_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, words: str
) -> None:
    stand_in = tmp_path / "python"
    stand_in.write_text(f"#!{sys.executable}\n{body}\n")
    stand_in.chmod(0o755)
    monkeypatch.setattr(readiness.sys, "executable", str(stand_in))
    told = readiness.read(["nvidia", "amd"], os.environ, deadline_s=1.0 if "sleep" in body else 60.0)
    assert set(told) == {"nvidia", "amd"} and all(
        words in each.missing[0][0] and each.missing[0][1] for each in told.values()
    )


def test_the_helper_says_how_it_is_used() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "backends.gpu.readiness", "intel"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2 and done.stderr.startswith("usage:") and not done.stdout
    done = subprocess.run(
        [sys.executable, "-m", "backends.gpu.readiness", "amd"], capture_output=True, text=True, timeout=60, check=True
    )
    assert set(json.loads(done.stdout)) == {"amd"}


def test_nobody_asked_is_nobody_started() -> None:
    assert readiness.read([], {}) == {}
