"""A worker's log lines become the engine's, bounded."""

from __future__ import annotations

import asyncio
import json
import logging

import pytest

from homeserve.fleet.relay import LINE_BYTES_MAX, LINES_PER_SECOND, Relay


def relay(data: bytes) -> Relay:
    async def main() -> Relay:
        stream = asyncio.StreamReader()
        stream.feed_data(data)
        stream.feed_eof()
        relay = Relay(2)
        await relay.run(stream)
        return relay

    return asyncio.run(main())


def test_lines_keep_level_event_and_facts(caplog: pytest.LogCaptureFixture) -> None:
    own = {"at": "x", "level": "error", "from": "worker.loop", "event": "plan 7 failed", "seq": 7, "trace": "Traceback"}
    lines = [json.dumps(own), "free text", '{"level": "loud"}', "[1]", "{" * 5000, ""]
    with caplog.at_level(logging.DEBUG, "homeserve.worker"):
        words = relay("\n".join(lines).encode()).last_words()
    first, *rest = caplog.records
    assert (first.levelno, first.getMessage(), first.rank) == (logging.ERROR, "plan 7 failed\nTraceback", 2)  # type: ignore[attr-defined]
    assert first.worker_seq == 7  # type: ignore[attr-defined]
    assert [(r.levelno, r.getMessage()) for r in rest] == [(logging.WARNING, text) for text in lines[1:-1]]
    assert words == "{" * 500


def test_the_last_words_of_a_crash_are_its_cause_and_no_part_of_its_stacks() -> None:
    stacks = "".join(f'  File "x.py", line {number} in f\n' for number in range(200))
    said = f"loading\nFatal Python error: Segmentation fault\n\n{stacks}Extension modules: numpy (total: 1)\n"
    assert relay(said.encode()).last_words() == "Fatal Python error: Segmentation fault"


def test_a_flood_is_cut_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "homeserve.worker"):
        found = relay(b"y\n" * 5000)
    assert LINES_PER_SECOND <= len(caplog.records) <= 3 * LINES_PER_SECOND
    assert found.dropped + len(caplog.records) - 1 == 5000
    assert caplog.records[-1].getMessage() == "log lines left out"


def test_an_endless_line_is_cut_into_bounded_ones(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "homeserve.worker"):
        relay(b"\xff" * (10 * LINE_BYTES_MAX))
    assert all(len(r.getMessage()) <= LINE_BYTES_MAX for r in caplog.records)
    assert 4 <= len(caplog.records) <= 11
