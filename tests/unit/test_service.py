"""The unit of `homeserve service`, what the manager says of it, and what a server tells who started it."""

from __future__ import annotations

import io
import json
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from homeserve import cli
from homeserve.commands import service
from homeserve.commands import service_unit as unit
from homeserve.commands.announce import Announcer
from homeserve.commands.notify import Notifier
from homeserve.commands.service_manager import Manager, ManagerError, State, state_of
from homeserve.errors import ModelNotFound, SettingError
from homeserve.server.context import LoadProgress
from homeserve.settings import Settings, load

MODEL = str(Path(__file__).parents[1] / "data" / "counter.gguf")


def made(**more: Any) -> unit.Service:
    facts: dict[str, Any] = {
        "program": ["/usr/bin/python3", "-P", "-m", "homeserve", "up"],
        "arguments": ["--port", "8000"],
        "folder": "/home/me",
        "environ": {},
        "model": "m",
        "stop_s": 75.0,
    }
    return unit.Service(**facts | more)


def line(text: str, name: str) -> str:
    (found,) = [each for each in text.splitlines() if each.startswith(name + "=")]
    return found.partition("=")[2]


# ----------------------------------------------------------------------------------------------------------------- unit


def test_words_of_the_command_line_are_quoted_as_systemd_reads_them() -> None:
    words = ["--model", "/a b/c", "50%", "$HOME", 'q"q', "back\\slash", ";", "it's", "tab\there", "", "ü", "\u2028"]
    command = line(unit.render(made(arguments=words)), "ExecStart")
    assert command == (
        ':/usr/bin/python3 -P -m homeserve up --model "/a b/c" "50%%" "$HOME" "q\\"q" "back\\\\slash" ";" "it\'s"'
        ' "tab\\x09here" "" "ü" "\\u2028"'
    )


def test_the_program_may_have_any_name_too() -> None:
    command = line(unit.render(made(program=["/my env/100%/$x/python"], arguments=[])), "ExecStart")
    assert command == ':"/my env/100%%/$x/python"'


def test_folder_variables_and_model_know_no_specifiers() -> None:
    text = unit.render(made(folder="/a %h b", environ={"HF_HOME": '/c %u "d"'}, model="100%\nExecStart=evil\\"))
    assert line(text, "WorkingDirectory") == "/a %%h b"
    assert line(text, "Environment") == '"HF_HOME=/c %%u \\"d\\""'
    assert line(text, "Description") == "homeserve: 100%%?ExecStart=evil"


@pytest.mark.parametrize("folder", ["/a\nb", "/a ", "/a\\", "/a\udce4"])
def test_a_folder_that_no_unit_can_name_is_refused(folder: str) -> None:
    with pytest.raises(SettingError):
        unit.render(made(folder=folder))


def test_a_name_that_is_no_utf8_is_refused() -> None:
    with pytest.raises(SettingError, match="is not UTF-8"):
        unit.render(made(arguments=["/m\udce4.gguf"]))


def test_a_failure_is_tried_again_but_not_what_cannot_work() -> None:
    text = unit.render(made(stop_s=75.0))
    assert line(text, "Restart") == "on-failure"
    assert line(text, "RestartPreventExitStatus") == "2"
    assert line(text, "KillSignal") == "SIGTERM"
    assert float(line(text, "TimeoutStopSec")) > 75.0
    assert line(text, "OOMPolicy") == "continue", "the server restarts its workers itself"
    assert line(text, "Type") == "notify"


def test_what_a_server_uses_is_not_taken_away() -> None:
    text = unit.render(made())
    for name in ("PrivateDevices", "DevicePolicy", "MemoryDenyWriteExecute", "PrivateTmp", "PrivateIPC", "ProtectHome"):
        assert f"{name}=" not in text, name
    assert line(text, "LimitMEMLOCK") == "infinity"


def test_comments_do_not_change_what_a_unit_means() -> None:
    text = unit.render(made())
    other = (
        "\n".join(f"  {each}" for each in text.splitlines() if not each.startswith("# Written")) + "\n\n; a comment\n"
    )
    assert unit.meaning(other) == unit.meaning(text)
    changed = unit.render(made(arguments=["--port", "9000"]))
    assert [each[:2] for each in unit.differences(text, changed)] == ["- ", "+ "]


@pytest.mark.parametrize("what", ["foreign", "link", "folder", "bytes"])
def test_what_is_not_ours_is_never_ours(tmp_path: Path, what: str) -> None:
    path = tmp_path / unit.NAME
    if what == "foreign":
        path.write_text("[Service]\nExecStart=/bin/true\n")
    elif what == "link":
        path.symlink_to("/dev/null")  # a unit that was masked
    elif what == "folder":
        path.mkdir()
    else:
        path.write_bytes(b"\xff\xfe" + unit.MARKER.encode())
    with pytest.raises(SettingError):
        text = unit.read_unit(path)
        assert text is not None
        unit.check_ours(path, text)


def test_no_unit_is_no_error(tmp_path: Path) -> None:
    assert unit.read_unit(tmp_path / "nowhere" / unit.NAME) is None


def test_the_unit_lies_where_the_users_manager_looks() -> None:
    assert unit.unit_path({"XDG_CONFIG_HOME": "/c"}) == Path("/c/systemd/user/homeserve.service")
    assert unit.unit_path({"HOME": "/h"}) == Path("/h/.config/systemd/user/homeserve.service")


# -------------------------------------------------------------------------------------------------------------- install


def arguments(argv: list[str], environ: dict[str, str], cwd: Path) -> list[str]:
    return service.arguments_of(load(argv, environ | {"HOME": str(cwd)}, cwd), str(cwd))


def test_flags_and_variables_go_in_and_the_file_stays(tmp_path: Path) -> None:
    (tmp_path / "homeserve.toml").write_text("context = 512\nmax_waiting = 7\n")
    argv = [
        "--deterministic",
        "--prefix-cache",
        "off",
        "--pipeline-ratio",
        "2,1",
        "--devices",
        "cpu:2",
        "--context",
        "99",
    ]
    words = arguments(argv, {"HOMESERVE_STREAM_STALL_S": "1.5", "HOMESERVE_IMAGE_SPILL": "off"}, tmp_path)
    said = " ".join(words)
    for each in ("--deterministic", "--prefix-cache off", "--pipeline-ratio 2,1", "--devices cpu:2", "--context 99"):
        assert each in said
    assert "--stream-stall-s 1.5" in said and "--image-spill off" in said and "waiting" not in said
    again = load(words, {"HOME": str(tmp_path)}, tmp_path)
    first = load(argv, {"HOME": str(tmp_path), "HOMESERVE_STREAM_STALL_S": "1.5"}, tmp_path)
    assert again.as_json()["settings"] == first.as_json()["settings"], "what is written reads as what was said"


def test_paths_are_absolute_and_names_stay(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").touch()
    (tmp_path / "keys").write_text("k\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        words = arguments(["./m.gguf", "--api-key-file", "keys"], {}, tmp_path)
        assert words == ["--model", str(tmp_path / "m.gguf"), "--api-key-file", str(tmp_path / "keys")]
        assert arguments(["hf:a/b:Q8_0"], {}, tmp_path) == ["--model", "hf:a/b:Q8_0"]


def test_the_models_of_the_file_are_a_services_too(tmp_path: Path) -> None:
    """Each of them is looked for, and MODEL may be the name of one."""
    (tmp_path / "m.gguf").touch()
    entries = '[[models]]\nid = "one"\npath = "{0}/m.gguf"\n[[models]]\nid = "two"\npath = "{0}/{1}"\n'
    for argv, described in ((["two"], "two"), ([], "the models of homeserve.toml")):
        (tmp_path / "homeserve.toml").write_text(entries.format(tmp_path, "m.gguf"))
        settings = load(argv, {"HOME": str(tmp_path)}, tmp_path)
        assert service.service_of(settings, {"HOME": str(tmp_path)}, str(tmp_path)).model == described
        (tmp_path / "homeserve.toml").write_text(entries.format(tmp_path, "none.gguf"))
        with pytest.raises(ModelNotFound, match="none.gguf"):
            settings = load(argv, {"HOME": str(tmp_path)}, tmp_path)
            service.service_of(settings, {"HOME": str(tmp_path)}, str(tmp_path))


def test_a_ready_file_is_not_for_a_service(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="ready-file: is not for a service"):
        arguments(["--ready-file", "r"], {}, tmp_path)


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        (["--context", "many"], "context"),
        (["no-such-model"], "no model"),
        (["--api-key-file", "/nowhere"], "api-key-file"),
        (["--weight-vector", "1,2"], "weight"),
    ],
)
def test_settings_are_checked_before_anything_is_written(
    argv: list[str], word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    assert cli.main(["service", "install", *argv]) == 2
    assert word in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_prints_the_unit_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("HF_HOME", "/models")
    monkeypatch.setenv("PATH", "/nowhere")  # it needs no systemd
    assert cli.main(["service", "install", MODEL, "--port", "0", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert unit.is_ours(out) and f"up --model {MODEL} --port 0" in out
    assert 'Environment="HF_HOME=/models"' in out and "hf_secret" not in out
    assert list(tmp_path.iterdir()) == []


def test_without_systemd_it_says_what_to_do_instead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cli.main(["service", "install", MODEL]) == 2
    err = capsys.readouterr().err
    assert "no systemd here" in err and "homeserve up" in err
    assert list(tmp_path.iterdir()) == []


def test_a_manager_that_does_not_answer_is_told_with_its_words(tmp_path: Path) -> None:
    fake = tmp_path / "systemctl"
    fake.write_text("#!/bin/sh\necho 'Failed to connect to bus: No medium found' >&2\nexit 1\n")
    fake.chmod(0o755)
    with pytest.raises(SettingError, match="No medium found"):
        Manager({"PATH": f"{tmp_path}:/usr/bin:/bin"}).check()


def test_a_start_that_failed_is_told_with_what_the_server_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = tmp_path / "journalctl"
    fake.write_text("#!/bin/sh\nprintf 'homeserve: error: the port \\033[2J is taken\\n'\n")
    fake.chmod(0o755)
    state = state_of({"ActiveState": "failed", "ExecMainCode": "1", "ExecMainStatus": "2"})
    with pytest.raises(ManagerError, match="exit code 2"):
        service._tell_start(state, {}, Manager({"PATH": f"{tmp_path}:/usr/bin:/bin"}))
    assert "the port \\x1b[2J is taken" in capsys.readouterr().err
    assert Manager({"PATH": "/nowhere"}).last_lines(3) == []


# --------------------------------------------------------------------------------------------------------------- status


def test_what_systemctl_shows_becomes_a_state() -> None:
    shown = {
        "LoadState": "loaded",
        "UnitFileState": "enabled",
        "ActiveState": "activating",
        "SubState": "auto-restart",
        "Result": "signal",
        "MainPID": "0",
        "ExecMainCode": "2",
        "ExecMainStatus": "9",
        "NRestarts": "4",
        "ActiveEnterTimestamp": "",
        "StatusText": "",
    }
    state = state_of(shown)
    assert state.enabled and state.pid is None and state.restarts == 4 and state.since is None
    assert state.last_exit == {"how": "killed", "status": 9, "result": "signal"}
    assert state.is_settled, "its first try failed: whoever waits for it is told"
    assert not state_of({**shown, "SubState": "start"}).is_settled
    assert state_of({"ActiveEnterTimestamp": "@1796087747"}).since == 1796087747.0
    assert state_of({}).last_exit is None


def steps(*active: str) -> list[State]:
    return [state_of({"ActiveState": each, "StatusText": f"says {each}"}) for each in active]


def test_an_install_waits_until_it_is_ready_and_tells_how_far_it_is() -> None:
    states, told = iter(steps("inactive", "activating", "activating", "active")), []
    state = service.wait_settled(lambda: next(states), tell=told.append, pause=lambda _: None)
    assert state.active == "active"
    assert told == ["says inactive", "says activating"]


def test_an_install_does_not_wait_for_what_was_stopped() -> None:
    (stopped,) = steps("inactive")
    pauses: list[float] = []
    assert service.wait_settled(lambda: stopped, tell=lambda _: None, pause=pauses.append) is stopped
    assert len(pauses) == service.IDLE_POLLS - 1


def test_a_failed_service_is_told_with_how_it_ended() -> None:
    state = state_of({"ActiveState": "failed", "ExecMainCode": "1", "ExecMainStatus": "2", "Result": "exit-code"})
    facts = service.facts_of(Path("/u"), unit.MARKER, state, {"HOME": "/nowhere"})
    said = "\n".join(service.lines_of(json.loads(json.dumps(facts)), now=0.0))
    assert "it is not enabled" in said and "exit code 2 (a setting, the model or the memory cannot work)" in said
    assert "journalctl" in said


# --------------------------------------------------------------------------------------------------------------- notify


@pytest.fixture
def heard(tmp_path: Path) -> Any:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
        server.bind(str(tmp_path / "notify"))
        server.setblocking(False)
        yield server


def test_ready_is_told_once_and_statuses_before_it(heard: socket.socket) -> None:
    notifier = Notifier(heard.getsockname())
    notifier.status("loading 3 %")
    notifier.status("loading 3 %")
    notifier.ready("http://x serves a\nREADY=0")
    notifier.status("loading another model")
    notifier.stopping()
    told = []
    while True:
        try:
            told.append(heard.recv(4096).decode())
        except BlockingIOError:
            break
    assert told == [
        "STATUS=loading 3 %",
        "READY=1\nSTATUS=http://x serves a READY=0",
        "STOPPING=1\nSTATUS=draining",
    ]


def test_who_started_the_server_hears_how_far_it_is_and_then_that_it_is_ready(heard: socket.socket) -> None:
    announcer = Announcer(Settings(), io.StringIO(), Notifier(heard.getsockname()))
    announcer.on_progress(LoadProgress("reading the model", 10, 40))
    announcer.on_progress(LoadProgress("starting the worker"))
    assert [heard.recv(4096) for _ in range(2)] == [b"STATUS=reading the model 25 %", b"STATUS=starting the worker"]
    model: Any = SimpleNamespace(id="m")
    announcer.on_ready("http://127.0.0.1:1", model, 1.0)
    assert heard.recv(4096) == b"READY=1\nSTATUS=http://127.0.0.1:1 serves m"


def test_a_manager_that_is_gone_is_said_once_and_stops_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    notifier = Notifier("/nowhere/notify")
    notifier.ready("x")
    notifier.stopping()
    assert capsys.readouterr().err.count("NOTIFY_SOCKET cannot be told") == 1


def test_without_a_manager_nothing_is_sent() -> None:
    Notifier(None).ready("x")
    Notifier("").stopping()


def test_an_abstract_address_is_found() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
        server.bind("\0homeserve-test-notify")
        server.settimeout(5)
        Notifier("@homeserve-test-notify").stopping()
        assert server.recv(100).startswith(b"STOPPING=1")
