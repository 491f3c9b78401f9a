"""`homeserve budget` without processes: words to wishes, what is refused and how, models on disk, exit codes."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from budget.facts import MIB, Box, CpuFacts
from budget.plan import Plan
from budget.quants import QUANTS
from budget.wish import Wish
from homeserve import cli
from homeserve.checkpoint import names
from homeserve.commands import budget, on_disk, wishes
from homeserve.errors import ModelNotFound, SettingError
from homeserve.settings import load

DATA = Path(__file__).parents[1] / "data"
TINY = DATA / "tiny" / "llama.f32.gguf"
BOX = {
    "id": "small", "mem_total_mib": 16384, "mem_available_mib": 15000, "gpus": [],
}  # fmt: skip
CARD_BOX = BOX | {
    "id": "card",
    "gpus": [
        {
            "vendor": "nvidia",
            "name": "RTX 3090",
            "vram_total_mib": 24576,
            "vram_reserved_mib": 450,
            "vram_free_mib": 24000,
        }
    ],
}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """No settings, caches or models of whoever runs the tests; `main` takes over signals, which are given back."""
    for name in [name for name in os.environ if name.startswith(("HOMESERVE_", "XDG_", "HF_", "HUGGINGFACE_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "box.json").write_text(json.dumps(BOX))
    (tmp_path / "cards.json").write_text(json.dumps(CARD_BOX))
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield tmp_path
    for number, handler in before.items():
        signal.signal(number, handler)


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    budget.add_arguments(parser)
    return parser.parse_args(words)


def wish(*words: str, environ: dict[str, str] | None = None, on: Box | None = None) -> Wish:
    args = arguments(*words)
    settings = wishes.settings_like_up(args, environ or {}, Path.cwd())
    return wishes.wish_of(args, settings, on or Box("b", None, None))


wished = partial(Wish, resident=False, like_cpu=True)
"""As `up` asks for cards."""


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    """Exit code and JSON of `homeserve budget WORDS --json`, which alone stands on stdout."""
    code = cli.main(["budget", *words, "--json"])
    out, err = capsys.readouterr()
    assert err == ""
    read: dict[str, Any] = json.loads(out)
    return code, read


# ------------------------------------------------------------------------------------------------------ words to wishes


def test_nothing_said_is_nothing_wished() -> None:
    assert wish() == wished()


def test_every_word_becomes_its_wish() -> None:
    words = (
        "--context 4096 --kv-tokens 8192 --kv-type Q8_0 --max-running 3 --chunk 64 --floor-mib 512 --devices cuda:0,cpu"
        " --layout tensor --flip off --weight-vector 30,17,17 --token-vector 3,1,1 --pipeline-ratio 8,4,4 --cpu-moe 12"
        " --draft off --vision"
    )
    assert wish(*words.split()) == wished(
        context=4096, kv_tokens=8192, kv_type="q8_0", running=3, chunk=64, floor_bytes=512 * MIB,
        devices=("cuda:0", "cpu"), layout="tensor", flip="off", weight_vector=(30, 17, 17), token_vector=(3, 1, 1),
        pipeline_ratio=(8, 4, 4), cpu_moe=12, draft=False, vision=True,
    )  # fmt: skip


def test_ranks_on_the_cpu_and_their_threads() -> None:
    found = wish(*"--devices cpu:3 --layout tensor --weight-vector 2,1,1".split())
    assert found == wished(devices=("cpu",), cpu_ranks=3, layout="tensor", weight_vector=(2, 1, 1))
    assert (
        wish("--devices", "cpu:1") == wish("--devices", "cpu:0") == wish("--devices", "CPU") == wished(devices=("cpu",))
    )
    box = Box("b", None, CpuFacts("x", 16, 8, "physical cores", frozenset()))
    shared = wish("--devices", "cpu:3", on=box)
    assert (shared.threads, shared.cores) == (2, 8)
    assert wish("--devices", "cpu:16", on=box).threads == 1
    assert wish("--devices", "cpu:3", "--threads", "5", on=box).threads == 5


def test_settings_of_up_count_where_the_command_line_says_nothing() -> None:
    environ = {"HOMESERVE_DEVICES": "cpu:2", "HOMESERVE_TOKEN_VECTOR": "3,1", "HOMESERVE_LAYOUT": "tensor"}
    found = wish(environ=environ)
    assert (found.cpu_ranks, found.token_vector, found.layout) == (2, (3, 1), "tensor")
    assert wish("--devices", "auto", "--token-vector", "auto", "--layout", "auto", environ=environ) == wished()


@pytest.mark.parametrize(
    ("words", "layers"),
    [((), -1), (("--cpu-moe", "auto"), -1), (("--cpu-moe", "off"), 0), (("--cpu-moe", "7"), 7)],
)
def test_layers_of_experts(words: tuple[str, ...], layers: int) -> None:
    assert wish(*words).cpu_moe == layers
    assert wish("--cpu-moe").cpu_moe == wishes.ALL_LAYERS


def test_each_setting_may_be_said_with_a_value_so_that_nearest_can_be_run() -> None:
    words = "--vision off --draft auto --cpu-moe auto --devices auto --weight-vector auto --layout auto --flip auto"
    assert wish(*words.split()) == wished()


def test_settings_of_up_count_here_too(tmp_path: Path) -> None:
    (tmp_path / "homeserve.toml").write_text('kv_type = "bf16"\nchunk = 128\nmax_running = 4\n')
    found = wish(environ={"HOMESERVE_CONTEXT": "1024", "HOMESERVE_FLOOR_MIB": "300"})
    assert (found.kv_type, found.chunk, found.running, found.context) == ("bf16", 128, 4, 1024)
    assert found.floor_bytes == 300 * MIB
    assert wish("--chunk", "32", "--kv-type", "f32").chunk == 32


def test_threads_are_those_that_a_worker_would_have() -> None:
    args = arguments()
    settings = wishes.settings_like_up(args, {}, Path.cwd())
    box = Box("b", None, CpuFacts("x", 16, 8, "physical cores", frozenset()))
    assert wishes.wish_of(args, settings, box).threads == 8


@pytest.mark.parametrize(
    ("words", "field", "part"),
    [
        ("--context x", "context", "expected a whole number"),
        ("--context -1", "context", "outside 0 to"),
        ("--max-running 0", "max_running", "outside 1 to"),
        ("--chunk 1.5", "chunk", "expected a whole number"),
        ("--floor-mib -5", "floor_mib", "outside 0 to"),
        ("--kv-type q9", "kv_type", "'q9' is not one of them"),
        ("--layout rows", "layout", "'rows' is not one of them"),
        ("--flip never", "flip", "'never' is not one of them"),
        ("--draft 9", "draft", "9 is outside 1 to 8"),
        ("--draft many", "draft", "'many' is not auto, off or a number of drafts"),
        ("--vision maybe", "vision", "expected on or off"),
        ("--weight-vector 3,0,1", "weight_vector", "0 is outside 1 to"),
        ("--weight-vector 3,,1", "weight_vector", "'' is not a whole number"),
        ("--token-vector 3,-1", "token_vector", "-1 is outside 1 to"),
        ("--pipeline-ratio 1e3,2", "pipeline_ratio", "'1e3' is not a whole number"),
        ("--cpu-moe some", "cpu_moe", "'some' is not a number of layers"),
        ("--cpu-moe 999999", "cpu_moe", "outside 0 to"),
        ("--devices cpu,,cuda:0", "devices", "empty word"),
        ("--devices cpu:17", "devices", "cpu:17 is more ranks than the CPU of one box may have: 16"),
        ("--devices cuda:0,cpu:2", "devices", "cpu:2 beside other devices"),
    ],
)
def test_a_word_that_cannot_be_used_is_refused_by_name(words: str, field: str, part: str) -> None:
    with pytest.raises(SettingError) as caught:
        wish(*words.split())
    assert caught.value.field == field and caught.value.fix
    assert part in caught.value.message and f"--{field.replace('_', '-')}" in caught.value.message


@pytest.mark.parametrize(
    "words",
    [
        "--devices cuda:0 --memory unified",
        "--devices cuda:0,rocm:0 --memory unified",
        "--devices cuda:0 --threads 4",
        "--devices cuda:0,cuda:0",
        "--devices cpu --memory unified",
        "--memory unified",
    ],
)
def test_what_up_refuses_of_devices_is_refused_in_its_words(words: str) -> None:
    """A plan for it would end in a command line that `up` refuses."""
    with pytest.raises(SettingError) as there:
        load(words.split(), {}, Path.cwd())
    with pytest.raises(SettingError) as here:
        wish(*words.split())
    assert (here.value.message, here.value.field, here.value.fix) == (
        there.value.message,
        there.value.field,
        there.value.fix,
    )


def test_a_variable_is_refused_for_cards_by_its_name_unless_a_flag_stands_over_it() -> None:
    environ = {"HOMESERVE_MEMORY": "unified", "HOMESERVE_DEVICES": "cpu:2"}
    with pytest.raises(SettingError, match="^HOMESERVE_MEMORY unified: is memory of several ranks on the CPU"):
        wish("--devices", "cuda:0", environ=environ)
    assert not wish("--devices", "cuda:0", "--memory", "discrete", environ=environ).unified
    assert wish(environ=environ).unified


def test_threads_of_the_rank_on_the_cpu_beside_cards_are_its_own() -> None:
    assert wish("--devices", "cpu,cuda:0", "--threads", "4").threads == 4
    with pytest.raises(SettingError, match="and the ranks are cards"):
        wish("--devices", "cpu,cuda:0", "--memory", "unified")


def test_vectors_and_device_lists_are_bounded() -> None:
    with pytest.raises(SettingError, match="at most|65 numbers"):
        wish("--weight-vector", ",".join(["1"] * 65))
    with pytest.raises(SettingError, match="65 devices"):
        wishes.devices_of(",".join(["cpu"] * 65))
    with pytest.raises(SettingError, match=r"\(5000 digits\) is outside 1 to 1048576"):
        wish("--weight-vector", "9" * 5000)


def test_help_names_every_mix_and_the_floors(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["budget", "--help"])
    text = "".join(capsys.readouterr().out.split())
    assert ",".join(QUANTS) in text
    assert "(default:1024onacard,256ofthehost)" in text


def test_what_up_of_this_version_refuses() -> None:
    refused = wishes.refused_by_up
    assert refused({"layout": "auto", "flip": "off", "kv_type": "bf16", "chunk": 64, "devices": "cpu"}) == ()
    assert refused({"context": 4096, "quant": "Q2_K", "shape": "x", "assume_ram_mib": 9, "vision": "off"}) == ()
    assert refused({"layout": "tensor", "devices": "cpu:3", "weight_vector": "2,1,1"}) == ()
    assert refused({"devices": "cuda:0,cpu", "cpu_moe": 12, "draft": "off", "vision": "on"}) == (
        "--devices cuda:0,cpu", "--cpu-moe 12", "--vision on"
    )  # fmt: skip
    assert refused({"devices": "cuda:0,rocm:0"}) == ()
    assert refused({"kv_type": "f4"}) == ("--kv-type f4",)


def test_a_plan_that_this_version_cannot_run_says_so_first(capsys: pytest.CaptureFixture[str]) -> None:
    def page(*words: str) -> str:
        assert cli.main(["budget", "--shape", "qwen3-8b", *words]) == 0
        return " ".join(capsys.readouterr().out.split())

    text = page("--box", "cards.json", "--devices", "cuda:0,cpu")
    assert text.startswith("FITS, but this version computes on cards or on the CPU: it has no fleet of both;")
    assert "To run it (MODEL is the file, which is not here; not in this version, see the first line)" in text
    assert page("--box", "box.json", "--vision").startswith("FITS, but this version has no --vision on. Qwen3 8B")
    text = page("--box", "box.json", "--quant", "q2_k")
    assert text.startswith("FITS: Qwen3 8B in Q2_K with")
    assert "To run it (MODEL is a Q2_K file of qwen3-8b, which is not here)" in text


def test_of_a_box_that_is_not_here_nothing_was_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def sources() -> set[str]:
        _, read = shown(capsys, "--shape", "qwen3-8b", *words)
        return {line["source"] for line in read["plan"]["ledger"]}

    words: tuple[str, ...] = ("--box", "box.json")
    assert "measured" not in sources() and "reserve" in sources()
    words = ("--assume-ram-mib", "32768")
    monkeypatch.setattr("budget.probe.read_box", lambda: Box("b", None, None))
    assert "measured" in sources()


def test_mixes_by_name_in_any_spelling() -> None:
    assert wishes.quant_of("q4_k_m") == "Q4_K_M" and wishes.quant_of(None) is None and wishes.quant_of("off") is None
    with pytest.raises(SettingError, match="not a known mix; did you mean Q4_K_"):
        wishes.quant_of("Q4_K_N")
    assert wishes.assumed_bytes("8192") == 8192 * MIB
    with pytest.raises(SettingError, match="assume-ram-mib"):
        wishes.assumed_bytes("-3")


# ------------------------------------------------------------------------------------------------------- the whole call


@pytest.mark.parametrize(
    ("words", "field", "part"),
    [
        ("m.gguf --box box.json", "model", "there is no model 'm.gguf' here"),
        ("llama3.1:8b --box box.json", "model", "not on this machine, and budget fetches nothing"),
        ("--shape nothing.json", "shape", "there is no such shape file"),
        ("--shape bad.json --box box.json", "shape", "hidden"),
        ("--shape text.json --box box.json", "shape", "no JSON"),
        ("--shape qwen3-8b --box nothing.json", "box", "nothing.json"),
        ("--shape qwen3-8b --box list.json", "box", "where an object belongs"),
        ("--shape qwen3-8b --box empty.json", "box", "neither a list of cards"),
        ("m.gguf --shape qwen3-8b", "shape", "both given"),
        ("--svg x.svg --box box.json", "svg", "a plan needs a model"),
        ("--shape qwen3-8b --box box.json --svg no/such/x.svg", "svg", "No such file"),
        ("--shape qwen3-8b --box box.json --svg fifo", "svg", "it is a FIFO, not a regular file"),
        ("--shape qwen3-8b --box box.json --svg .", "svg", "it is a folder, not a regular file"),
        ("--shape qwen3-8b --box box.json --svg=", "svg", "no name of a file"),
        ("m.gguf --box box.json --svg box.json", "svg", "no picture, and it is not replaced"),
        ("--shape qwen3-8b --box fifo", "box", "not a regular file"),
        ("--shape fifo --box box.json", "shape", "not a regular file"),
        (f"--shape {'x' * 5000} --box box.json", "shape", ""),
        (f"--shape qwen3-8b --box {'x' * 5000}", "box", ""),
        (f"--shape qwen3-8b --box box.json --svg {'x' * 5000}", "svg", ""),
        ("--shape qwen3-8b --box box.json --context 999999", "context", "40960 tokens"),
        ("--shape qwen3-8b --box box.json --context 4096 --kv-tokens 1024", "kv_tokens", "does not fit"),
        ("--shape qwen3-8b --box box.json --devices cuda:0", "devices", "no device 'cuda:0'"),
        ("--shape qwen3-8b --box box.json --devices cpu,cpu", "devices", "twice"),
        (
            "--shape qwen3-8b --box cards.json --devices cuda:0,cpu --pipeline-ratio 1,2,3",
            "pipeline_ratio",
            "3 numbers",
        ),
        ("--shape qwen3-8b --box box.json --quant Q9", "quant", "not a known mix"),
        ("--shape qwen3-8b --box box.json --colour", "colour", "no such flag"),
    ],
)
def test_bad_input_is_one_error_that_names_its_field(
    words: str, field: str, part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "bad.json").write_text(json.dumps({"arch": "llama", "layers": 4, "hidden": -3}))
    (tmp_path / "text.json").write_text("{")
    (tmp_path / "list.json").write_text("[3]")
    (tmp_path / "empty.json").write_text("{}")
    code, read = shown(capsys, *words.split())
    assert code == 2
    error = read["error"]
    assert error["field"] == field and part in error["message"], error
    assert error["fix"], error
    # The same for a person: one line, and what to do.
    assert cli.main(["budget", *words.split()]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("homeserve: error: ") and len(err.splitlines()) == 2


def test_a_pipeline_ratio_over_the_drafting_block_too_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """The ratio is over backbone layers: one that counts the drafting block would place it twice."""
    from budget.shape import load_shape

    shape = load_shape("qwen3.6-27b")
    assert shape.nextn
    words = ["--shape", "qwen3.6-27b", "--box", "cards.json", "--devices", "cuda:0,cpu", "--pipeline-ratio"]
    count = len(shape.layers)
    code, read = shown(capsys, *words, f"10,{count + len(shape.nextn) - 10}")
    assert code == 2 and read["error"]["field"] == "pipeline_ratio"
    assert f"sum to {count}" in read["error"]["fix"]


def test_a_plan_is_0_and_a_refusal_2_and_the_unknown_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, read = shown(capsys, "--shape", "qwen3-8b", "--box", "box.json")
    assert code == 0 and read["plan"] and read["refusal"] is None
    code, read = shown(capsys, "--shape", "llama3.3-70b", "--box", "box.json")
    assert code == 2 and read["plan"] is None and read["refusal"]["nearest"]
    (tmp_path / "nothing.json").write_text(json.dumps({"id": "n", "gpus": []}))
    code, read = shown(capsys, "--shape", "qwen3-8b", "--box", "nothing.json")
    assert code == 0 and read["plan"] is None and read["refusal"] is None and read["unknown"]["why"]
    assert cli.main(["budget", "--shape", "llama3.3-70b", "--box", "box.json"]) == 2
    out, err = capsys.readouterr()
    assert out.startswith("DOES NOT FIT") and err == ""


def test_assumed_memory_makes_a_plan_of_the_unknown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "nothing.json").write_text(json.dumps({"id": "n", "gpus": []}))
    words = ("--shape", "qwen3-8b", "--box", "nothing.json", "--assume-ram-mib", "32768")
    code, read = shown(capsys, *words)
    assert code == 0 and read["plan"]["kv_tokens"] > 0 and read["host"]["total_mib"] == 32768
    assert any("asked" in doubt["taken"] for doubt in read["doubts"])


def test_nearest_settings_are_a_plan_when_they_are_run(capsys: pytest.CaptureFixture[str]) -> None:
    code, read = shown(capsys, "--shape", "llama3.3-70b", "--box", "box.json")
    nearest = read["refusal"]["nearest"]
    words = [word for name, value in nearest.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    shape = () if "shape" in nearest else ("--shape", "llama3.3-70b")
    code, read = shown(capsys, *shape, "--box", "box.json", *words)
    assert code == 0 and read["plan"] is not None


def test_what_if_the_model_were_smaller(capsys: pytest.CaptureFixture[str]) -> None:
    def weights(*more: str) -> float:
        _, read = shown(capsys, "--shape", "qwen3-8b", "--box", "box.json", *more)
        return float(sum(line["mib"] for line in read["plan"]["ledger"] if line["line"] == "weights"))

    assert weights("--quant", "q2_k") < 0.8 * weights()


def test_a_fleet_that_is_not_to_be_had_is_the_first_doubt(capsys: pytest.CaptureFixture[str]) -> None:
    both = ("--shape", "qwen3-8b", "--box", "cards.json", "--devices", "cuda:0,cpu")
    _, read = shown(capsys, *both)
    assert read["doubts"][0]["where"] == "backend"
    assert "it has no fleet of both" in read["doubts"][0]["what"]
    assert read["plan"]["command"].startswith("homeserve up MODEL")
    cli.main(["budget", *both])
    text = capsys.readouterr().out
    assert "What is in doubt\n  - backend: this version computes on cards or on the CPU" in text
    _, read = shown(capsys, "--shape", "qwen3-8b", "--box", "cards.json")
    assert all(doubt["where"] != "backend" for doubt in read["doubts"])
    _, read = shown(capsys, "--shape", "qwen3-8b", "--box", "box.json", "--kv-type", "q8_0")
    assert all(doubt["where"] != "backend" for doubt in read["doubts"])
    _, read = shown(capsys, "--shape", "qwen3-8b", "--box", "box.json")
    assert all(doubt["where"] != "backend" for doubt in read["doubts"])


def test_a_picture_is_drawn_beside_the_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _ = shown(capsys, "--shape", "qwen3-8b", "--box", "cards.json", "--svg", "x.svg")
    assert code == 0 and (tmp_path / "x.svg").read_text().startswith("<svg xmlns=")


@pytest.mark.parametrize("name", ["fifo", "/dev/zero"])
def test_a_library_of_the_driver_is_a_regular_file(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "fifo")
    assert cli.main(["probe", "--nvml", name, "--json"]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["field"] == "nvml" and "not a regular file" in error["message"] and error["fix"]


def test_only_a_picture_is_replaced_by_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("", "<svg/>", '<?xml version="1.0"?>', "<!-- drawn -->"):
        (tmp_path / "x.svg").write_text(text)
        assert shown(capsys, "--shape", "qwen3-8b", "--box", "cards.json", "--svg", "x.svg")[0] == 0
        assert (tmp_path / "x.svg").read_text().startswith("<svg xmlns=")
    shutil.copy(TINY, "m.gguf")
    code, read = shown(capsys, "m.gguf", "--box", "box.json", "--svg", "m.gguf")
    assert code == 2 and read["error"]["field"] == "svg"
    assert (tmp_path / "m.gguf").read_bytes() == TINY.read_bytes()


def test_names_of_others_do_not_write_to_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evil = "\x1b]0;x\x07\x1b[2J\u202e"
    shape = json.loads((Path(budget.__file__).parents[2] / "budget" / "shapes" / "qwen3-8b.json").read_text())
    (tmp_path / "s.json").write_text(json.dumps(shape | {"name": f"Q{evil}"}))
    shutil.copy(TINY, f"m{evil}.gguf")
    for words in (("--shape", "s.json"), (f"m{evil}.gguf",), (), (f"n{evil}.gguf",), ("--shape", f"s{evil}")):
        for more in ((), ("--quant", "Q2_K")) if words else ((),):
            cli.main(["budget", "--box", "box.json", *words, *more])
            out, err = capsys.readouterr()
            text = (out + err).replace("\n", "")
            assert text.isprintable(), ascii(text)
    cli.main(["budget", "--box", "box.json", "--shape", "s.json"])
    assert "Q\\x1b]0;x\\x07\\x1b[2J\\u202e" in capsys.readouterr().out


@pytest.mark.parametrize("word", ["--js", "--json=1", "--jsn"])
def test_whoever_asks_for_json_gets_errors_as_json(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["budget", word]) == 2
    out, err = capsys.readouterr()
    assert err == "" and json.loads(out)["error"]["message"]


def test_up_with_the_command_of_a_plan_is_understood(capsys: pytest.CaptureFixture[str]) -> None:
    """What the report says to paste has no flag that `up` does not know."""
    shutil.copy(TINY, "m.gguf")
    _, read = shown(
        capsys, "m.gguf", "--box", "box.json", "--context", "128", "--max-running", "2", "--kv-type", "bf16"
    )
    command = read["plan"]["command"].split()
    assert command[:3] == ["homeserve", "up", "m.gguf"]
    assert cli.main([*command[1:], "--print-config"]) == 0
    settings = json.loads(capsys.readouterr().out)["settings"]
    assert (settings["context"], settings["max_running"], settings["kv_type"]) == (128, 2, "bf16")


# ------------------------------------------------------------------------------------------------------ models on disk


def test_a_model_is_found_as_up_finds_it_and_nothing_is_fetched(tmp_path: Path) -> None:
    cache, environ = tmp_path / "cache", {"HOME": str(tmp_path)}
    shutil.copy(TINY, tmp_path / "m.gguf")
    assert on_disk.find("m.gguf", cache, environ) == "m.gguf"
    assert names.ALIASES["smollm2"] is None
    assert on_disk.find("smollm2", cache, environ) is None  # the default model: planned from its shape
    default = on_disk.default_path(cache)
    default.parent.mkdir(parents=True)
    shutil.copy(TINY, default)
    assert on_disk.find("SmolLM2", cache, environ) == str(default)
    with pytest.raises(ModelNotFound, match="budget fetches nothing") as caught:
        on_disk.find("hf:someone/some-GGUF:Q8_0", cache, environ)
    assert "homeserve pull hf:someone/some-GGUF:Q8_0" in str(caught.value.fix)
    with pytest.raises(ModelNotFound) as caught:
        on_disk.find("qwen3:8b", cache, environ)
    assert "--shape qwen3-8b" in str(caught.value.fix)


def hub_model(root: Path, repo: str, name: str, *, branch: bool = True) -> Path:
    folder = root / "hub" / f"models--{repo.replace('/', '--')}"
    snapshot = folder / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    shutil.copy(TINY, snapshot / name)
    if branch:
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text("abc")
    return snapshot / name


@pytest.mark.parametrize("branch", [True, False])
def test_the_hubs_cache_is_looked_into_without_the_hub(tmp_path: Path, branch: bool) -> None:
    path = hub_model(tmp_path, "someone/some-GGUF", "some.Q8_0.gguf", branch=branch)
    environ = {"HF_HOME": str(tmp_path)}
    assert on_disk.find("hf:someone/some-GGUF:Q8_0", tmp_path, environ) == str(path)
    assert on_disk.find("hf:someone/some-GGUF", tmp_path, environ) == str(path)
    with pytest.raises(ModelNotFound):
        on_disk.find("hf:someone/some-GGUF:Q4_K_M", tmp_path, environ)


def test_models_on_disk_are_listed_once_and_bounded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    environ = {"HF_HUB_CACHE": str(tmp_path / "hub")}
    hub_model(tmp_path, "a/b", "hub.gguf")
    folder = tmp_path / "here"
    folder.mkdir()
    for name in ("one.gguf", "mmproj-x.gguf", "two-00001-of-00002.gguf", "two-00002-of-00002.gguf", "readme.txt"):
        (folder / name).write_bytes(b"GGUF")
    (folder / "again.gguf").symlink_to(folder / "one.gguf")
    (folder / "folder.gguf").mkdir()
    found, more = on_disk.listed(tmp_path / "none", environ, folder)
    assert [path.name for path in found] == ["again.gguf", "two-00001-of-00002.gguf", "hub.gguf"] and more == 0
    for at in range(40):
        (folder / f"m{at}.gguf").write_bytes(b"GGUF")
    found, more = on_disk.listed(tmp_path / "none", environ, folder)
    assert len(found) == on_disk.FILES_MAX and more == 43 - on_disk.FILES_MAX


def test_a_folder_that_cannot_be_read_holds_nothing(tmp_path: Path) -> None:
    assert on_disk.listed(tmp_path / "no", {"HF_HOME": str(tmp_path / "such")}, tmp_path / "folder") == ([], 0)


def test_the_box_alone_tells_which_models_fit(capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(TINY, "tiny.gguf")
    Path("broken.gguf").write_text("no model")
    code, read = shown(capsys, "--box", "box.json")
    assert code == 0 and read["plan"] is None and read["refusal"] is None
    rows = {row["path"]: row for row in read["models"]}
    assert rows["tiny.gguf"]["fits"] is True and rows["tiny.gguf"]["kv_tokens"] > 0
    assert rows["broken.gguf"]["fits"] is None and "not GGUF" in rows["broken.gguf"]["why"]
    assert read["devices"][-1]["id"] == "cpu"
    assert cli.main(["budget", "--box", "box.json"]) == 0
    text = capsys.readouterr().out
    assert "small: CPU only" in text and "homeserve budget tiny.gguf --box box.json" in text


def test_the_host_beside_a_card_is_no_fleet_of_both(capsys: pytest.CaptureFixture[str]) -> None:
    """It holds the engine process and more beside every card, and computes nothing of a plan for that card."""
    Path("card.json").write_text(json.dumps(CARD_BOX))
    for more, code in (((), 0), (("--shape", "llama3.3-70b:Q8_0", "--devices", "cuda:0"), 2)):
        assert cli.main(["budget", "--box", "card.json", *more]) == code
        text = capsys.readouterr().out
        assert "RTX 3090" in text and "no fleet of both" not in text


def test_a_terminal_without_the_letters_gets_others(capsys: pytest.CaptureFixture[str]) -> None:
    Path("odd.json").write_text(json.dumps(BOX | {"id": "h\u00f6me \u2603"}))
    assert cli.main(["budget", "--box", "odd.json"]) == 0
    assert "h\u00f6me \u2603" in capsys.readouterr().out


def test_doubts_of_devices_that_nobody_uses_are_left_out(told: Any) -> None:
    assert budget.not_here_yet(told.ceilings, (2,), "f16") == []
    (small,) = budget.not_here_yet(told.ceilings, (2,), "q4_0")
    assert small.what == "this version has no KV rows of q4_0"
    (doubt,) = budget.not_here_yet(told.ceilings, (0, 1, 2), "f16")
    assert doubt.what == "this version computes on cards or on the CPU: it has no fleet of both"
    assert budget.not_here_yet(told.ceilings, (0, 1), "f16") == []
    assert isinstance(told.plan, Plan)
