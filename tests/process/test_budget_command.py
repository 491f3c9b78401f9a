"""`homeserve budget` as people run it: a process for each box, its exit code, and JSON alone on stdout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

TESTS = Path(__file__).parents[1]
BOXES = TESTS / "data" / "boxes" / "boxes.json"
SHAPES = TESTS / "data" / "shapes"
SCHEMA = json.loads((TESTS.parent / "docs" / "budget.schema.json").read_text())
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
LAPTOP = {
    "id": "laptop-780m", "mem_total_mib": 30211, "mem_available_mib": 28568,
    "gpus": [
        {"vendor": "amd", "name": "AMD Radeon 780M", "arch": "gfx1103", "vram_total_mib": 1024,
         "vram_used_idle_mib": 0, "gtt_total_mib": 24576, "gtt_used_mib": 0, "uma": True}
    ],
}  # fmt: skip
TEN = (
    ("5090-plus-2x3080-20g", "dense27b"),
    ("2x5090-wrx80", "dense27b"),
    ("2x3090-kvm", "moe35b"),
    ("tg-rtx3060-norebar", "dense8b"),
    ("wsl2-2x3090-15g", "dense27b"),
    ("890m-16g-carveout", "moe35b"),
    ("halo-512m-gtt128", "moe35b"),
    ("docker-8g-in-78g", "dense8b"),
    ("xeon-cpu-only", "dense8b"),
    ("k8s-pod-150g", "dense27b"),
)


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """As on a machine where nothing was set and nothing was fetched."""
    kept = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "SYSTEMROOT")
    return {name: os.environ[name] for name in kept if name in os.environ} | {"HOME": str(tmp_path)}


def run(environ: dict[str, str], cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "homeserve", "budget", *words]
    return subprocess.run(command, env=environ, cwd=cwd, capture_output=True, text=True, timeout=60)


def read(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert "Traceback" not in done.stderr, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(("box", "shape"), TEN)
def test_ten_boxes_as_commands(box: str, shape: str, environ: dict[str, str], tmp_path: Path) -> None:
    words = ("--box", f"{BOXES}#{box}", "--shape", str(SHAPES / f"{shape}.json"))
    done = run(environ, tmp_path, *words, "--json")
    found = read(done)
    VALIDATOR.validate(found)
    assert found["devices"][-1]["id"] == "cpu"
    assert done.returncode == (2 if found["refusal"] else 0)
    # For a person: the same verdict, in the first word, and the same exit code.
    page = run(environ, tmp_path, *words)
    assert page.returncode == done.returncode and page.stderr == ""
    verdict = "FITS" if found["plan"] else "DOES NOT FIT" if found["refusal"] else "UNKNOWN"
    assert page.stdout.startswith((f"{verdict}: ", f"{verdict}, but ")) and "\x1b" not in page.stdout


def test_the_780m_laptop_has_its_ceiling(environ: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "laptop.json").write_text(json.dumps(LAPTOP))
    done = run(environ, tmp_path, "--box", "laptop.json", "--shape", str(SHAPES / "moe35b.json"), "--json")
    found = read(done)
    VALIDATOR.validate(found)
    apu, cpu = found["devices"]
    assert apu["kind"] == "uma" and apu["ceiling_mib"] == 25600.0 and cpu["ceiling_mib"] == 28312.0
    assert done.returncode == 0 and found["plan"]["peak_mib"][0] <= 25600.0


def test_this_box_alone(environ: dict[str, str], tmp_path: Path) -> None:
    done = run(environ, tmp_path, "--json")
    found = read(done)
    VALIDATOR.validate(found)
    assert done.returncode == 0 and done.stderr == "" and found["models"] == []
    assert found["host"]["limit_mib"] > 0 and found["devices"][-1]["usable"]


def test_the_default_model_is_planned_before_it_is_fetched(environ: dict[str, str], tmp_path: Path) -> None:
    done = run(environ, tmp_path, "smollm2", "--json")
    assert done.returncode == 0 and read(done)["plan"]["command"] == "homeserve up smollm2"
    assert [path.name for path in tmp_path.iterdir()] == []


@pytest.mark.parametrize(
    ("words", "code", "field"),
    [
        (("nothing.gguf",), "model_not_found", "model"),
        (("--shape", "absurd.json"), "setting", "shape"),
        (("--shape", "qwen3-8b", "--box", "no-profile.json"), "setting", "box"),
        (("--shape", "qwen3-8b", "--context", "99999999"), "setting", "context"),
        (("--shape", "qwen3-8b", "--context", "100000"), "setting", "context"),
        (("--shape", "qwen3-8b", "--kv-type", "f4"), "setting", "kv_type"),
        (("--shape", "qwen3-8b", "--weight-vector", "1,0"), "setting", "weight_vector"),
    ],
)
def test_bad_input_is_json_on_stdout_and_code_2(
    words: tuple[str, ...], code: str, field: str, environ: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "absurd.json").write_text(json.dumps({"arch": "llama", "layers": "many", "hidden": 64}))
    (tmp_path / "no-profile.json").write_text('"a text"')
    done = run(environ, tmp_path, *words, "--json")
    error = read(done)["error"]
    assert done.returncode == 2 and done.stderr == ""
    assert (error["code"], error["field"]) == (code, field) and error["message"] and error["fix"]


def test_a_profile_with_absurd_fields_is_a_plan_with_doubts(environ: dict[str, str], tmp_path: Path) -> None:
    card = {"vendor": "nvidia", "name": "X", "vram_total_mib": "lots", "vram_free_mib": -5, "uma": 3}
    full = {"vendor": "nvidia", "name": "Y", "vram_total_mib": 24576, "vram_free_mib": 99999, "uma": False}
    box = {"id": "odd", "mem_total_mib": 65536, "mem_available_mib": 1e9, "gpus": [card, full]}
    (tmp_path / "odd.json").write_text(json.dumps(box))
    done = run(environ, tmp_path, "--box", "odd.json", "--shape", "qwen3-8b", "--json")
    found = read(done)
    VALIDATOR.validate(found)
    assert done.returncode == 0 and len(found["doubts"]) >= 4
    odd, over, cpu = found["devices"]
    assert odd["total_mib"] is None and not odd["usable"]
    assert over["free_mib"] <= over["total_mib"] and cpu["ceiling_mib"] <= 65536


def test_colour_is_asked_of_the_terminal_only(environ: dict[str, str], tmp_path: Path) -> None:
    """In a terminal there is colour, unless NO_COLOR is set."""
    script = "import pty, sys; sys.exit(pty.spawn(sys.argv[1:]) and 1)"
    command = [sys.executable, "-c", script, sys.executable, "-m", "homeserve", "budget", "--shape", "qwen3-8b"]
    environ |= {"TERM": "xterm"}
    for more, coloured in (({}, True), ({"NO_COLOR": "1"}, False)):
        done = subprocess.run(
            command, env=environ | more, cwd=tmp_path, capture_output=True, stdin=subprocess.DEVNULL, timeout=60
        )
        assert (b"\x1b[1;32mFITS" in done.stdout) is coloured, done.stdout[:200]


def test_a_plan_from_a_shape_imports_nothing_heavy(environ: dict[str, str], tmp_path: Path) -> None:
    script = (
        "import sys\nfrom homeserve.cli import main\n"
        "code = main(['budget', '--shape', 'qwen3-8b', '--json'])\n"
        "heavy = {'numpy', 'aiohttp', 'tokenizers', 'rich', 'asyncio', 'msgspec', 'jinja2', 'huggingface_hub'}\n"
        "sys.exit(f'imported: {heavy & set(sys.modules)}' if heavy & set(sys.modules) else code)"
    )
    done = subprocess.run([sys.executable, "-c", script], env=environ, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


QUESTIONS = (
    ("budget", "--shape", "qwen3-8b"), ("budget", "--shape", "qwen3-8b", "--json"), ("budget", "--colour", "--json"),
    ("probe",), ("probe", "--json"), ("up", "--print-config"),
)  # fmt: skip


@pytest.mark.parametrize("words", QUESTIONS)
def test_an_answer_that_nobody_gets_is_one_line_and_code_1(
    words: tuple[str, ...], environ: dict[str, str], tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "homeserve", *words]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command, env=environ, cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60
        )
    said = "homeserve: error: standard output cannot be written: No space left on device\n"
    assert (done.returncode, done.stderr) == (1, said)


@pytest.mark.parametrize("words", [*QUESTIONS[:2], QUESTIONS[4]])
def test_a_stdout_that_is_closed_is_one_line_and_code_1(
    words: tuple[str, ...], environ: dict[str, str], tmp_path: Path
) -> None:
    command = ["sh", "-c", '"$@" >&-', "sh", sys.executable, "-m", "homeserve", *words]
    done = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    said = "homeserve: error: standard output is closed: nothing could be said\n"
    assert (done.returncode, done.stderr) == (1, said)


def test_a_reader_that_left_is_told_nothing(environ: dict[str, str], tmp_path: Path) -> None:
    large = ("budget", "--shape", "qwen3.6-27b", "--box", f"{BOXES}#2x5090-wrx80")  # more than a buffer
    for words in (*QUESTIONS[:2], QUESTIONS[4], large):
        inner, outer = os.pipe()
        os.close(inner)
        command = [sys.executable, "-m", "homeserve", *words]
        done = subprocess.run(
            command, env=environ, cwd=tmp_path, stdout=outer, stderr=subprocess.PIPE, text=True, timeout=60
        )
        os.close(outer)
        assert (done.returncode, done.stderr) == (1, "")


def test_what_the_answer_is_printed_into_is_no_picture(environ: dict[str, str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "homeserve", "budget", "--shape", "qwen3-8b", "--svg", "out"]
    with open(tmp_path / "out", "w") as out:
        done = subprocess.run(
            command, env=environ, cwd=tmp_path, stdout=out, stderr=subprocess.PIPE, text=True, timeout=60
        )
    assert done.returncode == 2 and "own output goes there" in done.stderr
