"""`[[models]]` of homeserve.toml: what an entry may say, what counts more, and what is wrong with others."""

from __future__ import annotations

from pathlib import Path

import pytest

from homeserve.errors import SettingError
from homeserve.settings import Settings, chosen, load, requests_most, settings_of

TWO = """
context = 512
kv_type = "bf16"
[[models]]
id = "small"
path = "small.gguf"
ttl_s = 600
context = 1024
[[models]]
id = "large/one"
path = "hf:owner/large"
devices = "cpu:2"
draft = 2
"""


def read(tmp_path: Path, toml: str, *argv: str, **environ: str) -> Settings:
    (tmp_path / "homeserve.toml").write_text(toml)
    return load(argv, environ, tmp_path)


def of(settings: Settings, name: str) -> Settings:
    return settings_of(settings, next(entry for entry in settings.models if entry.id == name))


def test_an_entry_has_settings_of_its_own_and_those_of_the_server(tmp_path: Path) -> None:
    settings = read(tmp_path, TWO)
    assert [(entry.id, entry.path, entry.ttl_s) for entry in chosen(settings)] == [
        ("small", "small.gguf", 600.0),
        ("large/one", "hf:owner/large", 0.0),
    ]
    small, large = of(settings, "small"), of(settings, "large/one")
    assert (small.model, small.model_id, small.context, small.kv_type) == ("small.gguf", "small", 1024, "bf16")
    assert (large.context, large.ranks, large.draft, small.ranks) == (512, 2, "2", 1)
    assert small.sources["context"].endswith("homeserve.toml: models[0]: context")
    assert not small.models and not small.warnings


def test_what_is_said_for_this_run_counts_most(tmp_path: Path) -> None:
    settings = read(tmp_path, TWO, "--context", "256", HOMESERVE_KV_TYPE="f16", HOMESERVE_DRAFT="off")
    assert of(settings, "small").context == 256
    assert of(settings, "large/one").kv_type == "f16" and of(settings, "large/one").draft == "off"


def test_model_names_the_one_that_is_loaded_first(tmp_path: Path) -> None:
    for said in ("large/one", "hf:owner/large"):
        settings = read(tmp_path, TWO, said)
        assert [entry.id for entry in chosen(settings)] == ["large/one", "small"] and not settings.warnings


def test_another_model_is_served_alone_and_that_is_said(tmp_path: Path) -> None:
    settings = read(tmp_path, TWO, "other.gguf")
    assert chosen(settings) == ()
    (warning,) = settings.warnings
    assert "other.gguf is none of [[models]] and is served alone" in warning


def test_connections_are_allowed_for_all(tmp_path: Path) -> None:
    assert requests_most(Settings(max_running=2, max_waiting=3)) == 5
    toml = '[[models]]\nid = "a"\npath = "a"\nmax_running = 1\n[[models]]\nid = "b"\npath = "b"\nmax_waiting = 7\n'
    assert requests_most(read(tmp_path, f"max_running = 4\nmax_waiting = 5\n{toml}")) == 1 + 5 + 4 + 7


def test_print_config_shows_them_and_one_model_is_shown_as_ever(tmp_path: Path) -> None:
    shown = read(tmp_path, TWO).as_json()["models"]
    assert shown[0] == {"id": "small", "path": "small.gguf", "ttl_s": 600.0, "context": 1024}
    assert "models" not in Settings().as_json()


@pytest.mark.parametrize(
    ("toml", "why"),
    [
        ("models = 3", "is no list of tables"),
        ('models = ["a"]', "is no list of tables"),
        ('[[models]]\npath = "a"', "models[0]: has no id"),
        ('[[models]]\nid = "a"', "models[0]: has no path"),
        ('[[models]]\nid = ""\npath = "a"', "models[0]: id: is empty"),
        ('[[models]]\nid = "a\\u0007"\npath = "a"', "control characters"),
        ('[[models]]\nid = "a"\npath = "a"\nttl_s = -1', "models[0]: ttl_s"),
        ('[[models]]\nid = "a"\npath = "a"\nport = 80', "port: is a setting of the whole server"),
        ('[[models]]\nid = "a"\npath = "a"\nfloor_mib = 80', "floor_mib: is a setting of the whole server"),
        ('[[models]]\nid = "a"\npath = "a"\nmodel = "b"', "model: is a setting of the whole server"),
        ('[[models]]\nid = "a"\npath = "a"\nkv_tokenz = 1', "no such setting of a model"),
        ('[[models]]\nid = "a"\npath = "a"\ncontext = "many"', "models[0]: context: expected a whole number"),
        ('[[models]]\nid = "a"\npath = "a"\n[[models]]\nid = "a"\npath = "b"', "two are called 'a'"),
        ('[[models]]\nid = "a"\npath = "a"\nlayout = "tensor"', "model 'a': "),
        ("\n".join(f'[[models]]\nid = "{n}"\npath = "a"' for n in range(65)), "65 entries"),
    ],
)
def test_what_is_wrong_is_named_before_anything_is_loaded(tmp_path: Path, toml: str, why: str) -> None:
    with pytest.raises(SettingError) as caught:
        read(tmp_path, toml)
    assert why in caught.value.message and "homeserve.toml" in caught.value.message + str(caught.value.fix)
