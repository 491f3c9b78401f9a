"""The files of docs/deploy name what exists: flags, variables, files, places. No container engine is asked."""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from homeserve.instances import CANCEL_LIMIT_S, TEARDOWN_LIMIT_S
from homeserve.settings import Settings, load, options, variable

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "docs" / "deploy"
KEYS = set(
    "build cap_drop command deploy devices environment group_add hostname image init network_mode ports profiles"
    " read_only restart secrets security_opt shm_size stop_grace_period tmpfs ulimits volumes".split()
)
"""Of a service, as the Compose specification spells them."""
MADE_BY_THE_USER = {"homeserve.key", "models"}
VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    read: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    return read


@pytest.fixture(scope="module")
def dockerfile() -> str:
    return re.sub(r"\\\n\s*", "", (DEPLOY / "Dockerfile").read_text())


def servers(compose: dict[str, Any]) -> dict[str, Any]:
    return {name: compose["services"][name] for name in ("cpu", "cuda", "rocm")}


def test_services_have_profiles_and_known_keys(compose: dict[str, Any]) -> None:
    assert {key for key in compose if not key.startswith("x-")} == {"name", "services", "secrets", "volumes"}
    for name, service in compose["services"].items():
        assert service.keys() <= KEYS, name
        assert len(service["profiles"]) == 1, f"{name}: nothing starts unasked"
    assert {service["profiles"][0] for service in compose["services"].values()} == {"cpu", "cuda", "rocm", "metrics"}


def test_commands_and_variables_are_settings(compose: dict[str, Any]) -> None:
    known = {variable(name) for name in options()}
    for name, service in servers(compose).items():
        command, *arguments = service["command"]
        assert command == "up"
        environ = {key: VARIABLE.sub(r"\2", value) for key, value in service["environment"].items()}
        assert {key for key in environ if key.startswith("HOMESERVE_")} <= known, name
        settings = load(arguments, environ | {"XDG_CONFIG_HOME": os.devnull}, os.devnull)
        assert settings.host == "0.0.0.0" and settings.api_key_file == "/run/secrets/homeserve_key"


def test_a_server_is_given_time_to_end(compose: dict[str, Any]) -> None:
    for service in servers(compose).values():
        drain_s = float(service["environment"]["HOMESERVE_DRAIN_TIMEOUT_S"])
        assert float(service["stop_grace_period"].removesuffix("s")) > drain_s + CANCEL_LIMIT_S + TEARDOWN_LIMIT_S


def test_only_this_machine_is_let_in_and_only_with_a_key(compose: dict[str, Any]) -> None:
    for name, service in servers(compose).items():
        assert all(port.startswith("127.0.0.1:") and port.endswith(f":{Settings().port}") for port in service["ports"])
        assert service["secrets"] == ["homeserve_key"], name
        assert service["cap_drop"] == ["ALL"] and service["read_only"] is True
    assert "127.0.0.1:9090" in " ".join(compose["services"]["prometheus"]["command"])
    assert compose["services"]["grafana"]["environment"]["GF_SERVER_HTTP_ADDR"] == "127.0.0.1"


def test_cards_are_handed_in(compose: dict[str, Any]) -> None:
    (cards,) = compose["services"]["cuda"]["deploy"]["resources"]["reservations"]["devices"]
    assert cards["driver"] == "nvidia" and cards["capabilities"] == ["gpu"]
    assert compose["services"]["rocm"]["devices"] == ["/dev/kfd", "/dev/dri"]
    for name, service in servers(compose).items():
        assert service["ulimits"]["memlock"] == -1 and VARIABLE.sub(r"\2", service["shm_size"]) == "1gb", name


def test_every_file_that_is_mounted_is_there(compose: dict[str, Any]) -> None:
    named = {str(secret["file"]) for secret in compose["secrets"].values()}
    for service in compose["services"].values():
        for volume in service["volumes"]:
            source = VARIABLE.sub(r"\2", volume).split(":")[0]
            if source.startswith("."):
                named.add(source)
            else:
                assert source in compose["volumes"]
    missing = {each for each in named if not (DEPLOY / each).exists()}
    assert {Path(each).name for each in missing} <= MADE_BY_THE_USER
    assert (DEPLOY / "prometheus.yml").exists() and (DEPLOY / "grafana.json").exists()


def test_prometheus_and_grafana_meet(compose: dict[str, Any]) -> None:
    mounts = {volume.split(":")[1] for volume in compose["services"]["prometheus"]["volumes"]}
    (job,) = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"]
    assert job["authorization"]["credentials_file"] in mounts
    assert job["static_configs"][0]["targets"] == [f"127.0.0.1:{Settings().port}"]
    (source,) = yaml.safe_load((DEPLOY / "grafana" / "datasource.yaml").read_text())["datasources"]
    assert source["type"] == "prometheus" and source["url"] == "http://127.0.0.1:9090" and source["isDefault"]
    (provider,) = yaml.safe_load((DEPLOY / "grafana" / "dashboards.yaml").read_text())["providers"]
    mounts = {volume.split(":")[1] for volume in compose["services"]["grafana"]["volumes"]}
    assert f"{provider['options']['path']}/homeserve.json" in mounts
    assert json.loads((DEPLOY / "grafana.json").read_text())["panels"]


def test_the_image_is_made_of_what_the_checkout_has(dockerfile: str) -> None:
    copied = [word for line in re.findall(r"^COPY (.+) \S+$", dockerfile, re.MULTILINE) for word in line.split()]
    assert {"pyproject.toml", "homeserve", "backends", "budget", "cuda_kernels", "hip_kernels"} <= set(copied)
    assert all((ROOT / name).exists() for name in copied)
    assert dockerfile.index("\nUSER homeserve") < dockerfile.index("\nENTRYPOINT")
    assert dockerfile.count("\nFROM ") == 2, "the compiler stays in the first stage"


def test_the_image_runs_a_command_that_is_known(dockerfile: str, compose: dict[str, Any]) -> None:
    (entry,) = re.findall(r"^ENTRYPOINT (.+)$", dockerfile, re.MULTILINE)
    (command,) = re.findall(r"^CMD (.+)$", dockerfile, re.MULTILINE)
    (health,) = re.findall(r"^HEALTHCHECK .*CMD (.+)$", dockerfile, re.MULTILINE)
    assert json.loads(entry) == ["homeserve"]
    first, *arguments = json.loads(command)
    assert first == "up" and load(arguments, {"XDG_CONFIG_HOME": os.devnull}, os.devnull).host == "0.0.0.0"
    code = json.loads(health)[2]
    compile(code, "HEALTHCHECK", "exec")
    assert f"http://127.0.0.1:{Settings().port}/ready" in code
    arguments_of_builds = {name for server in servers(compose).values() for name in server["build"].get("args", {})}
    assert arguments_of_builds <= set(re.findall(r"^ARG (\w+)", dockerfile, re.MULTILINE))


def commands(document: str) -> list[list[str]]:
    """Of every block of shell: the words of lines that run homeserve."""
    found = []
    for block in re.findall(r"^```sh\n(.*?)^```", (ROOT / document).read_text(), re.DOTALL | re.MULTILINE):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] == ["homeserve"]:
                found.append(words)
    return found


def test_commands_of_the_page_are_known() -> None:
    from homeserve import cli

    told = commands("docs/DEPLOYMENT.md")
    assert len(told) >= 6
    for words in told:
        assert words[1] in cli.COMMANDS, words
        flags = [word for word in words if word.startswith("--")]
        own = {"--dry-run", "--force", "--linger", "--json", "--all", "--port"}
        assert all(flag in own or flag[2:].replace("-", "_") in options() for flag in flags), words
