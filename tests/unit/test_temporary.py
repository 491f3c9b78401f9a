"""A command's own server: ended with it, whatever ends the command, and said to be one for the reason there is."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
from contextlib import ExitStack
from typing import Any

import pytest

from homeserve.commands import bench, chat, temporary
from homeserve.errors import SettingError


class Child:
    """A server that does not end before it is killed."""

    def __init__(self, ends_the_wait: BaseException) -> None:
        self.done: list[str] = []
        self._ends_the_wait = ends_the_wait

    def poll(self) -> int | None:
        return -9 if "kill" in self.done else None

    def send_signal(self, number: int) -> None:
        self.done.append(signal.Signals(number).name)

    def kill(self) -> None:
        self.done.append("kill")

    def wait(self, limit_s: float | None = None) -> int:
        if limit_s is not None:
            raise self._ends_the_wait
        return -9


@pytest.mark.parametrize("error", [subprocess.TimeoutExpired("up", 45.0), KeyboardInterrupt(), SystemExit(130)])
def test_a_server_is_killed_where_the_wait_for_it_is_cut_short(error: BaseException) -> None:
    server = temporary.TemporaryServer(None)
    child: Any = Child(error)
    server._process = child
    if isinstance(error, subprocess.TimeoutExpired):
        server.stop()
    else:
        with pytest.raises(type(error)):
            server.stop()
    server.stop()
    assert child.done == ["SIGTERM", "kill"] and not os.path.exists(server._folder.name)


@pytest.fixture
def hangups() -> Any:
    before = signal.getsignal(signal.SIGHUP)
    caught: list[int] = []
    signal.signal(signal.SIGHUP, lambda number, _: caught.append(number))
    yield caught
    signal.signal(signal.SIGHUP, before)


def test_a_closed_window_waits_until_the_server_is_known(hangups: list[int]) -> None:
    with temporary._signals_held():
        os.kill(os.getpid(), signal.SIGHUP)
        assert hangups == []
    assert hangups == [signal.SIGHUP]


def test_a_closed_window_ends_a_bench_and_under_nohup_it_does_not(hangups: list[int]) -> None:
    with pytest.raises(KeyboardInterrupt), bench._interruptible():
        os.kill(os.getpid(), signal.SIGHUP)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with bench._interruptible():
        os.kill(os.getpid(), signal.SIGHUP)
    assert hangups == []


def asked(**given: str) -> argparse.Namespace:
    names = ("url", "model", "prompt", "system", "temperature", "max_tokens", "api_key_file")
    return argparse.Namespace(**dict.fromkeys(names) | {"plain": True, "quiet": True} | given)


def test_a_mistake_of_a_chat_is_told_before_a_server_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*_: object) -> str:
        raise AssertionError("a server is started")

    monkeypatch.setattr(chat, "_found_url", started)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with pytest.raises(SettingError, match="--temperature"):
        chat.run(asked(temperature="abc"), {})


@pytest.mark.parametrize(
    ("ready", "model", "said"),
    [([], None, "no server runs; "), ([], "m", "no server runs; "), (["http://a"], "m", "so http://a is not asked; ")],
)
def test_why_a_temporary_server_starts_is_said(
    ready: list[str], model: str | None, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(chat, "running_urls", lambda environ: ready)
    monkeypatch.setattr(temporary.TemporaryServer, "start", lambda server: "http://own")
    with ExitStack() as stack:
        assert chat._found_url(stack, {}, model) == "http://own"
        assert f"{said}starting a temporary one" in capsys.readouterr().err


def test_a_server_that_runs_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "running_urls", lambda environ: ["http://a", "http://b"])
    with ExitStack() as stack:
        assert chat._found_url(stack, {}, None) == "http://a"
