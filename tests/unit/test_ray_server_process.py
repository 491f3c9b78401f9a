"""The relay of a server's stderr, when nobody takes the lines any more."""

from __future__ import annotations

import io
import sys
from types import SimpleNamespace

import pytest

from homeserve.integrations.server_process import ServerProcess


class Full(io.StringIO):
    """A stderr whose disk is full."""

    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")


def test_its_end_is_told_when_its_lines_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    server = ServerProcess([], 0, ended.append)
    server._ready = True
    monkeypatch.setattr(sys, "stderr", Full())
    process = SimpleNamespace(stderr=io.StringIO("one\ntwo\n"), wait=lambda: 3)
    server._watch(process)  # type: ignore[arg-type]
    assert ended == [3] and list(server._told) == ["one\n", "two\n"]
