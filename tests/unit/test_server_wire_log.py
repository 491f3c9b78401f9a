"""What the log says of requests that are broken on the wire: a line, for the fault is the client's."""

from __future__ import annotations

import logging

import pytest
from aiohttp import web
from aiohttp.http_exceptions import BadHttpMessage

from homeserve.server.application import _wire_log


@pytest.mark.parametrize("fault", [BadHttpMessage("no head"), web.RequestPayloadError("cannot decode gzip")])
def test_a_request_that_is_broken_on_the_wire_is_one_line(caplog: pytest.LogCaptureFixture, fault: Exception) -> None:
    """The body's faults come to the library's own reading, too: of what a refused request left unread."""
    log = _wire_log()
    log.parent = logging.getLogger()
    try:
        raise fault
    except Exception:
        log.exception("Unhandled exception")
    (record,) = caplog.records
    assert record.levelname == "WARNING" and record.exc_info is None
    assert record.getMessage() == f"Unhandled exception: {type(fault).__name__}"


def test_a_fault_of_ours_keeps_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    log = _wire_log()
    log.parent = logging.getLogger()
    try:
        raise KeyError("ours")
    except KeyError:
        log.exception("Unhandled exception")
    (record,) = caplog.records
    assert record.levelname == "ERROR" and record.exc_info is not None
