"""`homeserve bench` before it measures: its arguments, what its temporary server is started with, what it repeats."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import pytest

from homeserve.bench.client import Refused, Target, WrongAnswer, _Heard, read_json, total_tok_s
from homeserve.bench.names import USUAL, parse
from homeserve.bench.subject import read, token_ids
from homeserve.commands import bench
from homeserve.errors import SettingError
from homeserve.instances import Record
from homeserve.settings import check_together, resolve


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.chdir(tmp_path)
    return {"HOME": str(tmp_path)}


def args(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    bench.add_arguments(parser)
    return parser.parse_args(argv)


def own(*argv: str, tests: str = USUAL, **environ: str) -> list[str]:
    settings = check_together(resolve(args(*argv), environ, os.getcwd()))
    return bench._own_flags(settings, parse(tests))


def test_the_temporary_server_is_started_with_what_was_given() -> None:
    words = bench._flags(args("m.gguf", "--devices", "cpu:2", "--threads", "1", "--deterministic", "--draft", "off"))
    assert words[:2] == ["--drain-timeout-s", "0"] and "m.gguf" not in words
    assert " ".join(words[2:]) == "--threads 1 --deterministic --devices cpu:2 --draft off"
    assert bench._flags(args("--no-deterministic", "--drain-timeout-s", "9"))[2:] == [
        "--drain-timeout-s", "9", "--no-deterministic",
    ]  # fmt: skip


def test_what_a_test_needs_is_added_where_nobody_said_otherwise() -> None:
    assert own() == ["--max-running", "64"] and own(tests="pp512,conc8") == []
    assert own(tests="conc32,conc8") == ["--max-running", "32"]
    assert own("--max-running", "4") == [] and own(HOMESERVE_MAX_RUNNING="4") == []
    several = ("--devices", "cpu:2")
    assert own(*several, tests="pp512") == ["--flip", "manual"], "the server would change its layout by itself"
    assert own(*several, "--flip", "auto", tests="pp512") == own(*several, "--layout", "tensor", tests="pp512") == []


@pytest.mark.parametrize(
    ("url", "found"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        (" http://[::1]:8000/v1/ ", "http://[::1]:8000"),
        ("https://box.home/v1", "https://box.home"),
    ],
)
def test_an_address_may_be_that_of_the_api(url: str, found: str) -> None:
    assert bench._address(url) == found


@pytest.mark.parametrize(
    "url", ["", "127.0.0.1:8000", "ftp://x", "http://", "http://x:99999", "http://x/path", "http://["]
)
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(SettingError, match="is not the address of a server") as caught:
        bench._address(url)
    assert caught.value.field == "url"


@pytest.mark.parametrize(
    ("argv", "field", "words"),
    [
        (("m.gguf", "--url", "http://127.0.0.1:9"), "url", "MODEL is for a temporary server"),
        (("--url", "http://127.0.0.1:9", "--threads", "2"), "threads", "--threads is for a temporary server"),
        (("--port", "9"), "port", "the temporary server has its own"),
        (("--print-config",), "print_config", "the temporary server has its own"),
        (("--repeat", "0"), "repeat", "outside 1 to 1000"),
        (("--tests", "pp"), "tests", "is no test"),
        (("--svg", "no/such.svg"), "svg", "No such file"),
        (("--json", ""), "json", "is no name of a file"),
        (("--csv", "model.gguf"), "csv", "is no CSV, and it is not replaced"),
        (("--devices", "cpu:x"), "devices", "cpu:x"),
    ],
)
def test_mistakes_are_told_before_a_server_starts(
    argv: tuple[str, ...], field: str, words: str, home: dict[str, str]
) -> None:
    Path("model.gguf").write_bytes(b"GGUF")
    with pytest.raises(SettingError) as caught:
        bench.run(args(*argv), home)
    assert caught.value.field == field and words in caught.value.message


def test_the_processes_of_a_server_are_known_where_ps_lists_it(home: dict[str, str], tmp_path: Path) -> None:
    Record(tmp_path / ".cache/homeserve/run", 8123, "http://127.0.0.1:8123", "m", 30.0).write("ready")
    here = bench._running(args("--url", "http://localhost:8123", "--model-id", "m"), home)
    assert (here.pid, here.here, here.target.model) == (os.getpid(), True, "m")
    for other in ("http://127.0.0.1:8124", "http://192.0.2.1:8123"):
        assert bench._running(args("--url", other), home).pid is None


def test_the_command_of_a_result_repeats_it_without_folders_of_this_machine() -> None:
    given = ("/models/m.gguf", "--tests", "pp64", "--threads", "2", "--cache-dir", "/c", "--api-key-file", "/k")
    assert bench._command(args(*given)) == "homeserve bench m.gguf --tests pp64 --repeat 3 --threads 2"


# -------------------------------------------------------------------------------------------------- what a server says


def heard(*events: Any) -> _Heard:
    made = _Heard()
    for at, event in enumerate(events):
        made.line(b"data: " + json.dumps(event).encode(), float(at))
    made.line(b": ping", 50.0)
    made.line(b"data: [DONE]", 60.0)
    return made


def test_an_answer_has_exactly_as_many_tokens_as_were_asked_for() -> None:
    usage = {"completion_tokens": 2, "prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}
    made = heard({"choices": [{"token_ids": [1]}]}, {"choices": [{"token_ids": [2]}]}, {"choices": [], "usage": usage})
    timing = made.timing(-1.0, 2, counted=True)
    assert (timing.ttft_s, timing.last, timing.prompt_tokens, timing.cached_tokens) == (1.0, 1.0, 9, 4)
    assert timing.arrived == ((0.0, 1), (1.0, 2)) and total_tok_s([timing, timing]) == 2.0
    with pytest.raises(WrongAnswer, match="asked for 3 tokens and got 2"):
        made.timing(-1.0, 3, counted=False)
    with pytest.raises(WrongAnswer, match="got an unknown number"):
        heard({"choices": [{}]}).timing(0.0, 1, counted=False)


def test_an_error_in_the_middle_of_an_answer_and_what_is_no_json_are_told() -> None:
    with pytest.raises(WrongAnswer, match="broke off: worker lost"):
        heard({"error": {"message": "worker lost"}})
    with pytest.raises(WrongAnswer, match="no JSON: b'<html>"):
        read_json(b"<html>")


class Says(Target):
    """Answers from a table; what is not in it is a 404."""

    def __init__(self, model: str | None = None, **answers: Any) -> None:
        super().__init__(engine="unknown", url="http://127.0.0.1:1", model=model)
        self.answers, self.posted = answers, []  # type: list[Any]

    def _ask(self, method: str, path: str, body: Any) -> Any:
        self.posted += [body] if body else []
        found = next((value for name, value in self.answers.items() if f"/{name}" in path), None)
        if found is None:
            raise Refused(404, "", "File Not Found")
        if isinstance(found, Exception):
            raise found
        return found


def test_another_server_is_known_by_its_models() -> None:
    meta = {"n_params": 134, "size": 95, "n_ctx": 4096}
    server = Says(models={"data": [{"id": "/models/smol", "owned_by": "llamacpp", "meta": meta}]})
    about = read(server, here=False)
    assert (about.engine, about.model, about.params, about.size_bytes) == ("llama-server", "smol", 134, 95)
    assert not about.ours and about.ranks is None and not about.flips and server.model == "/models/smol"
    assert about.as_json()["threads"] is None, "unknown is null"


def test_a_page_in_place_of_a_status_is_no_status() -> None:
    models = {"data": [{"id": "m"}]}
    assert read(Says(models=models, status=WrongAnswer("no JSON")), here=False).engine == "unknown"
    with pytest.raises(Refused):
        read(Says(models=models, status=Refused(401, "unauthorized", "key")), here=False)


def test_of_several_models_one_that_is_in_is_taken_or_the_one_that_is_named() -> None:
    entries = [{"id": "a", "homeserve": {"state": "unloaded"}}, {"id": "b", "homeserve": {"state": "loaded"}}]
    assert read(Says(models={"data": entries}), here=False).model == "b"
    named = Says(model="a", models={"data": entries}, completions={})
    assert read(named, here=False).model == "a"
    assert named.posted == [{"model": "a", "prompt": "a", "max_tokens": 1}], "it comes in with a request"
    with pytest.raises(RuntimeError, match="no model 'c'; there is: a, b"):
        read(Says(model="c", models={"data": entries}), here=False)


def test_prompts_are_of_ids_that_the_server_itself_makes_of_text() -> None:
    import random

    source = random.Random(1)
    assert list(token_ids(Says(tokenize={"tokens": [*range(40, 20, -1), 40]}), source)) == list(range(21, 41))
    for answers, words in (({}, "has no /tokenize"), ({"tokenize": {"tokens": [1, 1]}}, "1 different tokens: too few")):
        with pytest.raises(RuntimeError, match=words):
            token_ids(Says(**answers), source)
