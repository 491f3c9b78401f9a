"""The log that a server keeps: bounded, its user's alone, read back as text."""

from __future__ import annotations

import argparse
import json
import logging
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from homeserve import log_files
from homeserve.commands import logs
from homeserve.errors import SettingError
from homeserve.instances import Instance
from homeserve.log_files import Follower, LogFile, Name, as_text, files, last_lines, prune, turned

LINE = (
    '{"at": "2025-01-31T12:30:01.250Z", "level": "warning", "from": "fleet", "event": "worker lost", "rank": 1, "n": 2}'
)


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    logger = logging.getLogger()
    before = list(logger.handlers)
    yield logger
    for handler in set(logger.handlers) - set(before):
        logger.removeHandler(handler)


def say(handler: LogFile, text: str) -> None:
    handler.handle(logging.LogRecord("homeserve.app", logging.INFO, "f.py", 1, text, (), None))


def test_lines_are_kept_for_the_user_alone(tmp_path: Path) -> None:
    folder = tmp_path / "state" / "homeserve"
    handler = LogFile(folder, 8000)
    say(handler, "one")
    say(handler, "two\nlines")
    handler.close()
    handler.close()
    assert [json.loads(line)["event"] for line in last_lines(handler.path, 9)] == ["one", "two\nlines"]
    assert stat.S_IMODE(os.stat(handler.path).st_mode) == 0o600 and stat.S_IMODE(os.stat(folder).st_mode) == 0o700
    name = Name.of(handler.path)
    assert name is not None and (name.pid, name.port) == (os.getpid(), 8000)


def test_a_log_is_bounded_and_its_older_part_is_read_too(tmp_path: Path) -> None:
    handler = LogFile(tmp_path, 1, limit_bytes=2000)
    for number in range(100):
        say(handler, f"line {number}")
    handler.close()
    sizes = [os.path.getsize(path) for path in (handler.path, turned(handler.path))]
    assert max(sizes) <= 2000 and len(os.listdir(tmp_path)) == 2
    events = [json.loads(line)["event"] for line in last_lines(handler.path, 25)]
    assert events == [f"line {number}" for number in range(75, 100)][-len(events) :] and len(events) > sizes[0] // 100
    assert last_lines(handler.path, 0) == []


def test_a_disk_that_is_full_costs_the_log_alone(
    tmp_path: Path, root: logging.Logger, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    handler = LogFile(tmp_path, 1)
    root.addHandler(handler)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        logging.getLogger("homeserve.app").warning("first")
    logging.getLogger("homeserve.app").warning("second")
    assert handler not in root.handlers
    assert "given up" in caplog.text and [r.getMessage() for r in caplog.records].count("second") == 1


def test_of_servers_that_have_ended_the_last_ones_stay(tmp_path: Path) -> None:
    for number in range(6):
        (tmp_path / Name(f"20250131-12000{number}", 100 + number, 8000).file).touch()
    turned(tmp_path / Name("20250131-120001", 101, 8000).file).touch()
    (tmp_path / "notes.log").touch()
    (tmp_path / "a-b-c-d.log").touch()
    prune(tmp_path / "own.log", lambda pid: pid == 100, kept=2)
    assert [Name.of(path).pid for path in files(tmp_path)] == [105, 104, 100]  # type: ignore[union-attr]
    assert sorted(os.listdir(tmp_path))[-2:] == ["a-b-c-d.log", "notes.log"] and len(os.listdir(tmp_path)) == 5
    assert files(tmp_path / "none") == []


def test_who_had_our_pid_before_us_has_ended(tmp_path: Path) -> None:
    old = [tmp_path / Name(f"20250131-12000{number}", os.getpid(), 8000).file for number in range(3)]
    for path in old:
        path.touch()
    prune(old[1], lambda pid: True, kept=1)
    assert files(tmp_path) == [old[2], old[1]]


def test_a_log_that_cannot_be_removed_stays_and_the_others_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, ours = (tmp_path / Name(f"20250131-12000{number}", number, 8000).file for number in (2, 1))
    theirs.touch()
    ours.touch()
    unlink = Path.unlink

    def sticky(path: Path, missing_ok: bool = False) -> None:
        if path == theirs:
            raise PermissionError(1, "Operation not permitted")
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", sticky)
    prune(tmp_path / "own.log", lambda pid: False, kept=0)
    assert files(tmp_path) == [theirs]


def test_a_bad_log_call_does_not_reach_its_caller(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    handler = LogFile(tmp_path, 1)
    handler.handle(logging.LogRecord("homeserve.app", logging.INFO, "f.py", 1, "%d left", ("many",), None))
    say(handler, "next")
    handler.close()
    assert [json.loads(line)["event"] for line in last_lines(handler.path, 9)] == ["next"]
    assert "%d left" in capsys.readouterr().err


@pytest.mark.parametrize("limit_bytes", [4000, 150])
def test_what_came_since_is_shown_once(tmp_path: Path, limit_bytes: int) -> None:
    handler = LogFile(tmp_path, 1, limit_bytes=limit_bytes)
    say(handler, "before")
    follower = Follower(handler.path)
    say(handler, "since")
    shown = [*follower.before(9), *follower]
    assert [json.loads(line)["event"] for line in shown] == ["before", "since"]
    assert turned(handler.path).exists() == (limit_bytes == 150)
    follower.close()
    handler.close()


def test_who_follows_sees_lines_across_a_turn(tmp_path: Path) -> None:
    handler = LogFile(tmp_path, 1, limit_bytes=400)
    say(handler, "before")
    follower = Follower(handler.path)
    seen: list[str] = []
    for number in range(12):
        say(handler, f"line {number}")
        seen += [json.loads(line)["event"] for line in follower]
    assert turned(handler.path).exists() and seen == [f"line {number}" for number in range(12)]
    follower.close()
    handler.close()


def test_lines_become_text(monkeypatch: pytest.MonkeyPatch) -> None:
    text = as_text(LINE)
    assert text.startswith("2025-01-3") and text.endswith(".250 WARNING rank 1 fleet: worker lost  n=2")
    for other in ("Segmentation fault", "[1]", "{}", '{"at": 3}'):
        assert as_text(other) == other
    odd = json.loads(LINE) | {"at": "then", "trace": "here", "why": "a b"}
    assert as_text(json.dumps(odd)) == 'then WARNING rank 1 fleet: worker lost  n=2 why="a b"  here'


# ----------------------------------------------------------------------------------------------------- homeserve logs


def instance(port: int, log: str = "") -> Instance:
    return Instance(port, port, f"http://127.0.0.1:{port}", "m", "ready", 0.0, 0.0, 30.0, log)


def test_the_log_that_is_meant_is_found(tmp_path: Path) -> None:
    old, new = (tmp_path / Name(f"20250131-12000{n}", n, 8000 + n).file for n in (1, 2))
    old.touch()
    new.touch()
    running = [instance(9000, "/logs/a"), instance(9001, "/logs/b")]
    assert logs.find(running, tmp_path, 9001) == (Path("/logs/b"), running[1])
    assert logs.find(running[:1], None, None) == (Path("/logs/a"), running[0])
    assert logs.find([], tmp_path, None) == (new, None)
    assert logs.find(running, tmp_path, 8001) == (old, None)
    for found, folder, port, said in (
        (running, tmp_path, None, "2 servers run"),
        ([instance(9000)], tmp_path, None, "keeps no log"),
        ([], None, None, "no server runs"),
        ([], tmp_path / "none", None, "no server runs or has left a log"),
        ([], tmp_path, 7, "no server on port 7"),
    ):
        with pytest.raises(SettingError, match=said):
            logs.find(found, folder, port)


def test_who_follows_is_shown_all_before_the_server_is_gone(tmp_path: Path) -> None:
    handler = LogFile(tmp_path, 1)
    follower = Follower(handler.path)
    shown: list[str] = []
    lives = iter([True, True, False])

    def alive() -> bool:
        say(handler, "more")
        return next(lives)

    logs.follow(follower, alive, shown.append, pause=lambda _: None)
    follower.close()
    handler.close()
    assert len(shown) == 3


def test_what_a_terminal_would_obey_is_not_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    state = tmp_path / "state" / "homeserve"
    state.mkdir(parents=True)
    path = state / Name("20250131-120000", 1, 8000).file
    path.write_text(json.dumps(json.loads(LINE) | {"event": "\x1b[2Jgone"}) + "\n")
    monkeypatch.chdir(tmp_path)
    environ = {"HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path / "state")}
    asked: Any = {"port": None, "follow": False, "lines": None, "json": False, "log_dir": None}
    assert logs.run(argparse.Namespace(**asked), environ) == 0
    out, err = capsys.readouterr()
    assert "gone" in out and "\x1b" not in out and "the last one" in err
    assert logs.run(argparse.Namespace(**(asked | {"json": True})), environ) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["event"] == "\x1b[2Jgone" and err == ""
    path.unlink()
    with pytest.raises(SettingError, match="no server runs"):
        logs.run(argparse.Namespace(**asked), environ)
    assert log_files.FILE_BYTES == 4 << 20
