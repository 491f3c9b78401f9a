"""Log lines: one event a line, facts shown, secrets masked."""

from __future__ import annotations

import io
import json
import logging
import sys

import pytest

from homeserve.log import MASK, JsonLines, TextLines


def record(event: str, *args: object, exc: bool = False, **facts: object) -> logging.LogRecord:
    made = logging.LogRecord(
        "homeserve.fleet", logging.WARNING, "f.py", 1, event, args, sys.exc_info() if exc else None
    )
    made.__dict__.update(facts)
    return made


def test_text_lines() -> None:
    line = TextLines().format(record("worker %d lost", 0, seq=17, why='it said "no"'))
    assert line[8] == "." and line.endswith('WARNING fleet: worker 0 lost  seq=17 why="it said \\"no\\""')
    assert " rank 2 fleet: " in TextLines(rank=2).format(record("x"))


def test_json_lines() -> None:
    line = json.loads(JsonLines(rank=1).format(record("worker %d lost", 0, seq=17, level="not this")))
    assert (line["level"], line["from"], line["event"], line["rank"], line["seq"]) == (
        "warning", "fleet", "worker 0 lost", 1, 17,
    )  # fmt: skip
    assert line["at"].endswith("Z")


@pytest.mark.parametrize("form", [TextLines, JsonLines])
def test_an_event_is_one_line(form: type[logging.Formatter]) -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError:
        line = form().format(record("a\nb\rc", exc=True, fact="d\ne"))
    assert len(line.splitlines()) == 1
    assert "ValueError" in line


@pytest.mark.parametrize("form", [TextLines, JsonLines])
def test_no_control_character_is_written(form: type[logging.Formatter]) -> None:
    controls = "".join(map(chr, [*range(0x20), *range(0x7F, 0xA0)]))
    line = form().format(record(controls, path=f"/{controls}é"))
    assert not set(line) & set(controls) and "é" in line
    if form is JsonLines:
        assert json.loads(line)["event"] == controls
    else:
        assert "\\x1b" in line and "\\x9b" in line and "\\n" in line


@pytest.mark.parametrize("form", [TextLines, JsonLines])
def test_no_secret_is_written(form: type[logging.Formatter]) -> None:
    facts = {"api_key": "alpha", "authorization": "beta", "hf_token": "gamma", "url": "x?k=sk-abcdefghijkl"}
    line = form().format(record("got Bearer delta and hf_abcdefghijkl", **facts))
    for secret in ("alpha", "beta", "gamma", "delta", "abcdefghijkl"):
        assert secret not in line
    assert MASK in line


def test_token_counts_are_no_secret() -> None:
    assert "prompt_tokens=5" in TextLines().format(record("x", prompt_tokens=5))


def test_what_json_cannot_say_is_said_as_text() -> None:
    assert json.loads(JsonLines().format(record("x", thing=io.StringIO)))["thing"].startswith("<class")
