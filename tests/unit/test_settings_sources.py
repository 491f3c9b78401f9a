"""Flags over environment over files: what is read, what is refused, and how it is said."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import pytest

from homeserve import settings
from homeserve.errors import SettingError
from homeserve.settings import Settings, flag, flip_mode, flip_said, load, options, read_api_keys, variable

LOCAL = {
    "model": "a.gguf", "model_id": "a", "context": 512, "host": "::1", "port": 1234, "ready_file": "r.json",
    "api_key_file": "keys", "body_limit_bytes": 4096, "header_limit_bytes": 2048, "stream_stall_s": 5.5,
    "drain_timeout_s": 2.5, "model_wait_s": 7.5, "drain_delay_s": 1.5, "rate_limit_requests": 60,
    "rate_limit_tokens": 9000, "metrics_compat": "vllm", "log_requests": "full", "log_dir": "logs",
    "backend": "reference", "threads": 3, "isa": "avx2", "kv_type": "f32", "kv_tokens": 999,
    "floor_mib": 7, "deterministic": True, "max_running": 2, "max_waiting": 1, "chunk": 32, "max_prefill_delay": 4,
    "prefix_cache": False, "plan_timeout_s": 9.0, "log_format": "json", "log_level": "debug", "capture_dir": "cap",
    "cache_dir": "cache", "devices": "cpu:3", "layout": "tensor", "pipeline_ratio": (2, 1, 1),
    "weight_vector": (30, 17, 17), "token_vector": (28, 26, 20), "memory": "discrete",
    "draft": "2", "pooling": "mean", "flip": "manual", "flip_dwell_s": 3.5, "park_deadline_s": 4.5,
    "image_spill": "images",
}  # fmt: skip
"""A value other than the default for every option that has a meaning in this version."""

WORKING = [name for name, option in options().items() if not option.inert]
INERT = [name for name, option in options().items() if option.inert]


OF_RANKS = ("layout", "pipeline_ratio", "weight_vector", "token_vector")
OF_RANKS += ("flip", "flip_dwell_s", "park_deadline_s", "image_spill")
"""Options that say something about three ranks only where there are three."""


def said(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def toml(value: object) -> str:
    if isinstance(value, tuple):
        return str(list(value))
    return str(value).lower() if isinstance(value, bool | int | float) else f'"{value}"'


def test_every_option_has_a_value_here() -> None:
    assert sorted(LOCAL) == sorted(WORKING)


@pytest.mark.parametrize("name", WORKING)
def test_every_option_by_flag_variable_and_file(name: str, tmp_path: Path) -> None:
    value = LOCAL[name]
    given = [flag(name)] if options()[name].kind == "flag" else [flag(name), said(value)]
    beside = ["--devices", "cpu:3"] if name in OF_RANKS else []
    by_flag = load([*given, *beside], {}, tmp_path)
    by_variable = load(beside, {variable(name): said(value), "HOME": "/h"}, tmp_path)
    (tmp_path / "homeserve.toml").write_text(f"{name.replace('_', '-')} = {toml(value)}\n")
    by_file = load(beside, {"HOME": "/h"}, tmp_path)
    for found, source in ((by_flag, flag(name)), (by_variable, variable(name)), (by_file, "homeserve.toml")):
        assert getattr(found, name) == value
        assert source in found.sources[name]
        default = Settings()
        others = [other for other in options() if other != name and not (beside and other == "devices")]
        assert all(getattr(found, other) == getattr(default, other) for other in others)


@pytest.mark.parametrize("name", INERT)
def test_an_option_without_its_feature_takes_only_what_changes_nothing(name: str, tmp_path: Path) -> None:
    option = options()[name]
    for value in option.inert:
        assert load([flag(name), value], {}, tmp_path)
    for argv, environ in (([flag(name), "7"], {}), ([], {variable(name): "7"})):
        with pytest.raises(SettingError, match="this version does not have") as caught:
            load(argv, environ, tmp_path)
        assert caught.value.field == name and caught.value.fix


def test_the_order_of_the_sources(tmp_path: Path) -> None:
    local, config = tmp_path / "cwd", tmp_path / "config"
    (config / "homeserve").mkdir(parents=True)
    local.mkdir()
    (config / "homeserve" / "homeserve.toml").write_text("port = 1\nchunk = 16\nthreads = 1\ncontext = 100\n")
    (local / "homeserve.toml").write_text("port = 2\nchunk = 17\nthreads = 2\n")
    environ = {"XDG_CONFIG_HOME": str(config), "HOMESERVE_PORT": "3", "HOMESERVE_CHUNK": "18"}
    found = load(["--port", "4"], environ, local)
    assert (found.port, found.chunk, found.threads, found.context) == (4, 18, 2, 100)
    assert found.sources["port"] == "--port" and found.sources["chunk"] == "HOMESERVE_CHUNK"


def test_the_model_is_positional_or_a_flag_but_not_two_things(tmp_path: Path) -> None:
    assert load(["x.gguf"], {}, tmp_path).model == "x.gguf"
    assert load(["x.gguf", "--model", "x.gguf"], {}, tmp_path).model == "x.gguf"
    with pytest.raises(SettingError, match="--model is 'y.gguf'"):
        load(["x.gguf", "--model", "y.gguf"], {}, tmp_path)


@pytest.mark.parametrize(
    ("argv", "field", "words"),
    [
        (["--port", "x"], "port", "expected a whole number, found 'x'"),
        (["--port", "65536"], "port", "outside 0 to 65535"),
        (["--port", "-1"], "port", "outside 0 to 65535"),
        (["--port"], "port", "expected one argument"),
        (["--port", ""], "port", "expected a whole number"),
        (["--chunk", "1.5"], "chunk", "expected a whole number"),
        (["--plan-timeout-s", "nan"], "plan_timeout_s", "outside"),
        (["--plan-timeout-s", "inf"], "plan_timeout_s", "outside"),
        (["--prefix-cache", "maybe"], "prefix_cache", "expected on or off"),
        (["--kv-type", "f61"], "kv_type", "did you mean f16?"),
        (["--backend", "vulkan"], "backend", "'vulkan' is not one of them"),
        (["--devices", "gpu"], "devices", "'gpu' is no device"),
        (["--devices", "cpu,cpu"], "devices", "'cpu,cpu' is not a list of cards"),
        (["--devices", "cpu:17"], "devices", "cpu:17 is more ranks than the CPU of one box may have: 16"),
        (["--devices", "cpu:99999999999999999999"], "devices", "is more ranks than"),
        (["--devices", "cpu:0"], "devices", "--devices: cpu:0: the number is how many ranks there are"),
        (["--port", "9" * 5000], "port", "99999999999999999999… (5000 digits) is outside 0 to 65535"),
        (["--kv-tokens", "-" + "9" * 20], "kv_tokens", "-99999999999999999999 is outside 0 to"),
        (["--devices", "cpu:2", "--weight-vector", "1," + "9" * 13], "weight_vector", "9999999999999 is outside 1 to"),
        (["--memory", "shared"], "memory", "'shared' is not one of them"),
        (["--layout", "rows"], "layout", "'rows' is not one of them"),
        (["--layout", "tensor"], "layout", "needs several ranks, and there is one"),
        (["--layout", "pipeline", "--devices", "cpu:1"], "layout", "--layout pipeline: needs several ranks"),
        (["--weight-vector", "2,1"], "weight_vector", "divides a model over several ranks, and there is one"),
        (["--devices", "cpu:2", "--layout", "tensor", "--deterministic"], "deterministic", "in the tensor layout last"),
        (
            ["--devices", "cpu:2", "--weight-vector", "2,1", "--deterministic"],
            "deterministic",
            "which ranks keep a request",
        ),
        (["--memory", "unified"], "memory", "--memory unified: is memory of several ranks, and there is one"),
        (
            ["--devices", "cpu:2", "--memory", "unified", "--backend", "reference"],
            "memory",
            "--memory unified: the reference backend keeps weights dense in memory of its own",
        ),
        (["--devices", "cpu:3", "--weight-vector", "2,1"], "weight_vector", "2 numbers for 3 ranks"),
        (["--devices", "cpu:3", "--token-vector", "2,0,1"], "token_vector", "0 is outside 1 to 1048576: rank 1 must"),
        (["--devices", "cpu:2", "--token-vector", "2,-1"], "token_vector", "-1 is outside 1 to 1048576: rank 1 must"),
        (["--devices", "cpu:2", "--pipeline-ratio", "2,x"], "pipeline_ratio", "'x' is not a whole number"),
        (
            ["--devices", "cpu:2", "--layout", "pipeline", "--weight-vector", "2,1"],
            "weight_vector",
            "--weight-vector 2,1: is of the tensor layout, and --layout is pipeline",
        ),
        (
            ["--devices", "cpu:2", "--layout", "tensor", "--pipeline-ratio", "2,1"],
            "pipeline_ratio",
            "is of the pipeline layout, and --layout is tensor",
        ),
        (
            ["--devices", "cpu:2", "--pipeline-ratio", "2,1", "--token-vector", "2,1", "--flip", "off"],
            "token_vector",
            "--pipeline-ratio is of the pipeline layout and --token-vector of the tensor layout; one serves",
        ),
        (["--flip", "sometimes"], "flip", "'sometimes' is not one of them"),
        (["--flip", "auto"], "flip", "--flip auto: changes how several ranks hold a model, and there is one"),
        (["--flip", "manual"], "flip", "--flip manual: changes how several ranks hold a model, and there is one"),
        (
            ["--devices", "cpu:2", "--flip", "auto", "--deterministic"],
            "flip",
            "--flip auto: in the tensor layout last digits depend on which ranks keep a request's pages",
        ),
        (["--flip-dwell-s", "3"], "flip_dwell_s", "is of the flip between layouts, and none is to be: there is one"),
        (["--devices", "cpu:2", "--flip", "off", "--park-deadline-s", "3"], "park_deadline_s", "to be: --flip off"),
        (["--devices", "cpu:2", "--park-deadline-s", "0"], "park_deadline_s", "outside 0.1 to 86400"),
        (["--devices", "cpu:2", "--flip-dwell-s", "-1"], "flip_dwell_s", "outside 0 to 86400"),
        (
            ["--devices", "cpu:2", "--layout", "tensor", "--image-spill", "x"],
            "image_spill",
            "none is to be: the layout is chosen by --layout",
        ),
        (
            ["--devices", "cpu:2", "--weight-vector", "2,1", "--image-spill", "x"],
            "image_spill",
            "none is to be: the layout is chosen by --weight-vector",
        ),
        (["--devices", "cpu:2", "--deterministic", "--image-spill", "x"], "image_spill", "to be: --deterministic"),
        (
            ["--devices", "cpu:2", "--memory", "unified", "--image-spill", "x"],
            "image_spill",
            "--image-spill: in unified memory no image of a layout is made",
        ),
        (["--model", " "], "model", "is empty"),
        (["--model", "a\0b"], "model", "zero byte"),
        (["--prot", "1"], "prot", "did you mean --port?"),
        (["a", "b"], "b", "no such argument"),
    ],
)
def test_a_flag_that_cannot_be_used_names_itself(argv: list[str], field: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(SettingError) as caught:
        load(argv, {}, tmp_path)
    assert caught.value.field == field
    assert words in caught.value.message
    assert set(caught.value.as_json()["error"]) == {"code", "message", "field", "fix"}


@pytest.mark.parametrize(
    ("text", "field", "words"),
    [
        ("port = 'x'", "port", "expected a whole number"),
        ("port = true", "port", "expected a whole number"),
        ("port = 1.0", "port", "expected a whole number"),
        ("model = 3", "model", "expected text"),
        ("prot = 3", "prot", "did you mean port?"),
        ("[server]\nport = 1", "server", "no such setting"),
        ("[[models]]\nid = 'a'", "models", "has no path"),
        ("layout = 'tensor'", "layout", "needs several ranks"),
        ("devices = 'cpu:3'\nweight-vector = [2, 0, 1]", "weight_vector", "rank 1 must have a part"),
        ("pipeline-ratio = 2", "pipeline_ratio", "several ranks, and there is one"),
        ("flip_dwell_s = 3", "flip_dwell_s", "is of the flip between layouts"),
        ("flip = false", "flip", "expected text"),
        ("draft = 9", "draft", "9 is outside 1 to 8"),
        ("draft = true", "draft", "'true' is not auto, off or a number of drafts"),
        ("cpu-moe = 3", "cpu_moe", "this version does not have"),
        ("drafts_test = 'wrong'", "drafts_test", "no such setting"),
        ("port = ", "homeserve.toml", "is not TOML"),
        ("fault = 'rank=0'", "fault", "no such setting"),
        ("sources = 'x'", "sources", "no such setting"),
    ],
)
def test_a_file_entry_that_cannot_be_used_is_named(text: str, field: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "homeserve.toml").write_text(text)
    with pytest.raises(SettingError) as caught:
        load([], {}, tmp_path)
    assert caught.value.field == field
    assert words in caught.value.message and str(tmp_path) in caught.value.message


@pytest.mark.parametrize(
    ("words", "mode"),
    [
        ("", "off"),
        ("--devices cpu:1", "off"),
        ("--devices cpu:2", "auto"),
        ("--devices cpu:2 --flip auto", "auto"),
        ("--devices cpu:2 --flip manual", "manual"),
        ("--devices cpu:2 --flip off", "off"),
        ("--devices cpu:2 --layout tensor", "off"),
        ("--devices cpu:2 --layout tensor --flip auto", "auto"),
        ("--devices cpu:2 --layout pipeline --flip manual --token-vector 2,1", "manual"),
        ("--devices cpu:2 --pipeline-ratio 2,1", "off"),
        ("--devices cpu:2 --weight-vector 2,1 --token-vector 2,1", "off"),
        ("--devices cpu:2 --weight-vector 2,1 --flip auto", "auto"),
        ("--devices cpu:2 --pipeline-ratio 2,1 --weight-vector 2,1", "auto"),
        ("--devices cpu:2 --pipeline-ratio 2,1 --weight-vector 2,1 --flip manual", "manual"),
        ("--devices cpu:2 --deterministic", "off"),
    ],
)
def test_what_a_flip_is_beside_the_other_settings(words: str, mode: str, tmp_path: Path) -> None:
    said = load(words.split(), {}, tmp_path)
    assert flip_mode(said) == mode
    both = "pipeline-ratio" in words and "weight-vector" in words
    assert flip_said(said) == ("--flip auto" in words or "--flip manual" in words or both)


def test_a_folder_may_be_off(tmp_path: Path) -> None:
    ranks = ["--devices", "cpu:2"]
    assert load([*ranks, "--image-spill", "off"], {}, tmp_path).image_spill is None
    assert load(["--image-spill", "none"], {}, tmp_path).image_spill is None, "nothing is asked for"
    (tmp_path / "homeserve.toml").write_text("image-spill = false\n")
    assert load([], {}, tmp_path).image_spill is None
    with pytest.raises(SettingError, match="--image-spill: is empty"):
        load([*ranks, "--image-spill", " "], {}, tmp_path)


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "homeserve.toml").write_bytes(b"\xff\xfe\x00port")
    with pytest.raises(SettingError, match="is not TOML"):
        load([], {}, tmp_path)


def test_unknown_variables_are_named_with_the_nearest(tmp_path: Path) -> None:
    found = load([], {"HOMESERVE_PROT": "1", "HOMESERVE_TEST_MODEL": "x", "OTHER": "y"}, tmp_path)
    assert found.warnings == ("HOMESERVE_PROT is set, but there is no such setting; did you mean HOMESERVE_PORT?",)


def test_an_empty_variable_is_none(tmp_path: Path) -> None:
    assert load([], {"HOMESERVE_PORT": " "}, tmp_path).port == 8000


def test_the_fault_needs_testing(tmp_path: Path) -> None:
    environ = {"HOMESERVE_FAULT": "rank=0,step=load,nth=1,action=kill"}
    with pytest.raises(SettingError, match="needs HOMESERVE_TESTING=1") as caught:
        load([], environ, tmp_path)
    assert caught.value.field == "fault"
    assert load([], environ | {"HOMESERVE_TESTING": "1"}, tmp_path).fault == environ["HOMESERVE_FAULT"]


def test_paths_know_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/somebody")
    assert load(["--capture-dir", "~/x"], {}, tmp_path).capture_dir == "/somebody/x"


def test_settings_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().port = 1  # type: ignore[misc]


def test_print_config_shows_everything(tmp_path: Path) -> None:
    shown = load(["--port", "1", "--print-config"], {}, tmp_path)
    assert shown.print_config
    data = shown.as_json()
    assert data["schema"] == 1
    assert list(data["settings"]) == list(options())
    assert data["settings"]["port"] == 1 and data["sources"] == {"port": "--port"}


def test_flags_of_every_option_are_in_the_help() -> None:
    parser = argparse.ArgumentParser()
    settings.add_flags(parser)
    text = parser.format_help()
    assert all(flag(name) in text for name in options())


def test_api_keys(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# mine\nalpha\n\n  beta \n")
    assert read_api_keys(str(path)) == {"alpha": "line-2", "beta": "line-4"}
    assert read_api_keys(None) == {}
    for bad in (b"", b"# none\n", b"\xff", b"x" * (1 << 17)):
        path.write_bytes(bad)
        with pytest.raises(SettingError) as caught:
            read_api_keys(str(path))
        assert caught.value.field == "api_key_file"
    with pytest.raises(SettingError, match="No such file"):
        read_api_keys(str(tmp_path / "none"))


def test_folders(tmp_path: Path) -> None:
    cache = settings.cache_dir
    assert cache(Settings(), {"HOME": "/h"}) == Path("/h/.cache/homeserve")
    assert cache(Settings(), {"HOME": "/h", "XDG_CACHE_HOME": "/x"}) == Path("/x/homeserve")
    assert cache(Settings(cache_dir="/c"), {"HOME": "/h"}) == Path("/c")
    assert cache(Settings(cache_dir="/c"), {"HOMESERVE_CACHE": "/e"}) == Path("/c")
    assert settings.default_cache_dir({"HOMESERVE_CACHE": "/e", "XDG_CACHE_HOME": "/x"}) == Path("/e")
    runtime = settings.runtime_dir
    assert runtime({"XDG_RUNTIME_DIR": str(tmp_path)}) == tmp_path / "homeserve"
    assert runtime({"XDG_RUNTIME_DIR": "/none", "HOME": "/h"}) == Path("/h/.cache/homeserve/run")
    assert runtime({"HOMESERVE_CACHE": "/c", "HOME": "/h"}) == Path("/c/run")
