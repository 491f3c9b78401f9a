"""scripts/gpu_check over fake cards: rows and CSV of its parts, and what it makes of a card that is wrong or lost.

The script is the one that runs on a real card; its sizes are small (`--tiny`), so that emulated kernels come to an end,
and then no goal is judged.
"""

from __future__ import annotations

import csv
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from fake_box import environment_of
from fake_cards import LAUNCH_FAILED, NOT_SUPPORTED, FakeCards, fake_cards

SCRIPT = Path(__file__).parents[2] / "scripts" / "benchmarks" / "gpu_check.py"
COLUMNS = "part,what,value,unit,of,fraction,goal,ok,device,driver,commit,note"
UUID = "GPU-5ee1c0de-0000-4000-8000-000000000000"
GONE_S = 20.0
NORMS = 3
"""Cases of norm_rows."""

pytestmark = pytest.mark.timeout(300)


@dataclass
class Checked:
    """What a run said. `rows`: of the CSV."""

    code: int
    out: str
    err: str
    rows: list[dict[str, str]]

    def of(self, part: str) -> list[dict[str, str]]:
        return [row for row in self.rows if row["part"] == part]

    def row(self, what: str) -> dict[str, str]:
        (found,) = [row for row in self.rows if row["what"].startswith(what)]
        return found

    @property
    def wrong(self) -> list[str]:
        return [row["what"] for row in self.rows if row["ok"] != "yes"]


def check(cards: FakeCards, folder: Path, *words: str) -> Checked:
    """A run of the script in a box with these cards."""
    table = folder / "rows.csv"
    # A script finds the modules beside it, as from a shell; the tiers keep a started program's folder off its path.
    given = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    given = {name: value for name, value in given.items() if not name.endswith("VISIBLE_DEVICES")}
    command = [sys.executable, str(SCRIPT), "--tiny", "--seed", "1", "--csv", str(table), *words]
    done = subprocess.run(
        command, cwd=folder, env=given | environment_of(cards), capture_output=True, text=True, timeout=280, check=False
    )
    lines = table.read_text().splitlines() if table.exists() else []
    assert not lines or lines[0] == COLUMNS
    return Checked(done.returncode, done.stdout, done.stderr, list(csv.DictReader(lines)))


def test_a_card_is_measured_part_by_part(tmp_path: Path) -> None:
    """Rows of every part that opens the card itself, with what they are of; nothing is red, and exit 0."""
    parts = "numerics,bandwidth,prefill,launches"
    words = ("--parts", parts, "--types", "Q8_0,F16", "--cases", "[gnz]*", "--device", UUID)
    found = check(fake_cards(tmp_path), tmp_path, *words)
    assert found.code == 0 and found.wrong == [], found.out + found.err
    assert list(dict.fromkeys(row["part"] for row in found.rows)) == parts.split(",")
    assert {row["device"] for row in found.rows} == {f"cuda:0, NVIDIA GeForce RTX 3090 ({UUID})"}
    assert {row["driver"] for row in found.rows} == {"CUDA 13.0"} and all(row["commit"] for row in found.rows)
    cases = found.row("cases that come out right")
    assert float(cases["value"]) == float(cases["of"]) >= 12 and cases["fraction"] == cases["goal"] == "1.0"
    assert 0 < float(found.row("worst: ")["value"]) <= 1, "of its tolerance"
    copy = float(found.row("device copy")["value"])
    for what in ("linear_few Q8_0", "linear_few F16", "decode attention f16", "decode attention q8_0"):
        row = found.row(what)
        assert float(row["of"]) == copy and float(row["fraction"]) == pytest.approx(float(row["value"]) / copy)
    assert "torch" in found.row("torch matmul")["note"] or float(found.row("torch matmul")["value"]) > 0
    assert (
        float(found.row("linear_many Q8_0")["of"]) > 0
        and "code changes at 9" in found.row("many rows are ahead, F16")["note"]
    )
    replay = found.row("graph replay")
    assert float(replay["of"]) == float(found.row("plain launches")["value"])
    assert found.row("memory is the card's again")["fraction"] == "1.0"
    assert all(line in found.out for line in ("numerics ", "bandwidth ", "rows, all ok")), "the same as a table"


def test_two_workers_on_one_card_flip_and_a_model_counts(tmp_path: Path) -> None:
    found = check(fake_cards(tmp_path, mib=4096, rocm=-1), tmp_path, "--parts", "fleet,tokens")
    assert found.code == 0 and found.wrong == [], found.out + found.err
    workers = found.row("workers")
    assert workers["value"] == "2.0" and workers["note"] == "cuda, cuda; 2 processes"
    for to in ("tensor", "pipeline"):
        row = found.row(f"flip to {to} under an answer")
        assert row["note"].startswith("committed") and float(row["value"]) > 0
    assert "counting upward" in found.row("the answer survives")["note"]
    counter = found.row("counter.gguf")
    assert counter["fraction"] == "1.0" and counter["value"] == "8.0"


def test_a_wrong_kernel_is_named_and_its_row_is_red(tmp_path: Path) -> None:
    """A compiler that makes other code of one kernel than its source says: nothing fails but the numbers."""
    cards = fake_cards(tmp_path)
    spoil(
        cards,
        "store4(row_at(out, block_y(), stride) + c, {{0.0f,",
        "store4(row_at(out, block_y(), stride) + c, {{1.0f,",
    )
    found = check(cards, tmp_path, "--parts", "numerics,launches", "--cases", "[nz]*")
    assert found.code == 1, found.out + found.err
    wrong = found.row("wrong: zero")
    assert wrong["ok"] == "no" and "AssertionError" in wrong["note"]
    cases = found.row("cases that come out right")
    assert (cases["value"], cases["of"], cases["ok"]) == (f"{NORMS}.0", f"{NORMS + 1}.0", "no")
    assert found.wrong[2:] == ["a replay writes what its launches do"], "it is that kernel; all other rows stand"
    assert "rows are not ok: numerics: cases that come out right" in found.out


def test_a_card_that_is_lost_costs_the_case_alone(tmp_path: Path) -> None:
    """Every process loses it at its second launch: each of them still has one case, and the next part is whole."""
    cards = fake_cards(tmp_path)
    cards.lose("nvidia", 0, LAUNCH_FAILED, launch=2)
    found = check(cards, tmp_path, "--parts", "numerics,bandwidth", "--cases", "norm_rows*", "--types", "Q8_0")
    assert found.code == 1, found.out + found.err
    cases = found.row("cases that come out right")
    assert (cases["value"], cases["of"]) == ("2.0", f"{NORMS}.0")
    assert "the card was lost" in found.row("wrong: norm_rows")["note"]
    assert found.row("device copy")["ok"] == "yes", "a part behind it has a card again"
    assert "the card was lost" in found.row("linear_few Q8_0 512 to 16, 1 row")["note"]


def test_what_a_card_lacks_is_a_row_and_the_rest_runs(tmp_path: Path) -> None:
    """A driver that refuses to record, and one whose virtual memory fails; each with the driver's word for it."""
    cards = fake_cards(tmp_path)
    cards.fail("nvidia", "cuStreamBeginCapture_v2", NOT_SUPPORTED, count=0)
    cards.fail("nvidia", "cuMemAddressReserve", NOT_SUPPORTED, count=0)
    found = check(cards, tmp_path, "--parts", "launches,numerics", "--cases", "zero")
    assert found.code == 1, found.out + found.err
    assert found.wrong == ["graph replay, 8 launches", "virtual memory"]
    assert "records no launches" in found.row("graph replay")["note"]
    assert "NOT_SUPPORTED" in found.row("virtual memory")["note"]
    assert found.row("a replay writes")["ok"] == found.row("cases that come out right")["ok"] == "yes"


@pytest.mark.parametrize(
    ("cuda", "words", "texts"),
    [
        (-1, (), ("no card of NVIDIA or AMD was found", "homeserve doctor", "INSTALL_GPU.md")),
        (1, ("--device", "cuda:1"), ("there is no card cuda:1 here", "cuda:0, NVIDIA GeForce RTX 3090")),
        (11_040, (), ("11.4 is older than 12.0", "update NVIDIA's driver")),
    ],
)
def test_without_a_card_there_is_one_error_with_the_next_step(
    tmp_path: Path, cuda: int, words: tuple[str, ...], texts: tuple[str, ...]
) -> None:
    """`cuda`: how many cards, or the version of the driver of one."""
    if cuda > 1:
        cards = fake_cards(tmp_path, rocm=-1, cuda_driver=cuda)
    else:
        cards = fake_cards(tmp_path, cuda=cuda, rocm=-1)
    found = check(cards, tmp_path, *words)
    assert found.code == 2 and not found.rows and not found.out, found.out + found.err
    (error,) = [line for line in found.err.splitlines() if line.startswith("gpu_check: ")]
    assert "\n  next: " in found.err and "Traceback" not in found.err, error
    assert all(text in found.err for text in texts), found.err


def spoil(cards: FakeCards, right: str, wrong: str) -> None:
    """From now on the compilers of these cards take one piece of source for another. The last line of their settings
    decides where code is kept: no other test finds what is spoilt."""
    path = cards.folder / "compiler"
    python, script, store, _ = path.read_text().splitlines()
    spoiling = cards.folder / "spoil.py"
    spoiling.write_text(
        "import runpy, sys\n"
        "from pathlib import Path\n"
        f"right, wrong = {right!r}, {wrong!r}\n"
        "for each in Path(sys.argv[1]).parent.iterdir():\n"
        "    if each.is_file() and right in each.read_text():\n"
        "        each.write_text(each.read_text().replace(right, wrong))\n"
        f"runpy.run_path({script!r}, run_name='__main__')\n"
    )
    path.write_text(f"{python}\n{spoiling}\n{store}\nspoilt\n")


PART = """
import json, subprocess, sys
job = json.loads(sys.argv[1])
print(json.dumps({"row": {"part": job["part"], "what": "found before", "value": 1.0}}), flush=True)
print(json.dumps({"at": "a kernel without an end"}), flush=True)
child = subprocess.Popen([sys.executable, "-c", "import sys, time; time.sleep(90)"])
print(child.pid, file=open("child", "w"))
child.wait()
"""
"""A part that hangs, and has started something."""


def test_a_part_that_hangs_is_ended_with_all_it_started_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import gpu_check
    from gpu_part import Job

    (tmp_path / "gpu_part.py").write_text(PART)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gpu_check, "HERE", tmp_path)
    monkeypatch.setattr(gpu_check, "GRACE_S", 0.0)
    found = gpu_check.run(Job("prefill", "nvidia", UUID, 2.0, "tiny", 1))
    before, hung = found.rows
    assert before.ok and before.what == "found before"
    assert (hung.ok, hung.what, hung.note) == (False, "a kernel without an end", "not within 2 s")
    end = time.monotonic() + GONE_S
    while lives(int((tmp_path / "child").read_text())):
        assert time.monotonic() < end, "what it started lives on"
        time.sleep(0.01)


def lives(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
