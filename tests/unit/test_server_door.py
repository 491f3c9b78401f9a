"""A server without keys: whom it lets in. And how many."""

from __future__ import annotations

import logging
import resource

import pytest

from homeserve.errors import Forbidden
from homeserve.server.door import Door
from homeserve.server.gate import RESERVE, connections_limit, raise_file_limit

DOOR = Door("box.example")


def check(method: str = "POST", **headers: str) -> None:
    DOOR.check(method, {name.replace("_", "-").title(): value for name, value in headers.items()})


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1:8080", "192.168.1.7", "[::1]:8080", "[fe80::1]", "localhost", "LOCALHOST:80", "box.example:8080", ""],
)
def test_addresses_and_our_own_names_are_let_in(host: str) -> None:
    check(host=host)


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example:8080", "localhost.evil.example", "[evil]", "evil:x", ":8080", "["]
)
def test_names_that_were_made_to_lead_here_are_not(host: str) -> None:
    with pytest.raises(Forbidden, match="--host .*--api-key-file") as caught:
        check(host=host)
    assert caught.value.status == 403 and caught.value.code == "forbidden_host"


def test_our_own_page_is_let_in_and_pages_of_others_are_not() -> None:
    check(host="localhost:8080", origin="http://localhost:8080", content_type="application/json; charset=utf-8")
    check("GET", host="localhost:8080", origin="http://localhost:8080")
    for origin in ("http://evil.example", "http://localhost:3000", "http://localhost", "null", "", "http://[", "x"):
        for method in ("GET", "POST", "OPTIONS"):
            with pytest.raises(Forbidden, match="--api-key-file") as caught:
                check(method, host="localhost:8080", origin=origin, content_type="application/json")
            assert caught.value.code == "forbidden_origin"
    with pytest.raises(Forbidden, match="application/json"):
        check(host="localhost:8080", origin="http://localhost:8080", content_type="text/plain")
    with pytest.raises(Forbidden, match="another site"):
        check(host="localhost:8080", sec_fetch_site="cross-site", content_type="text/plain")


def test_programs_may_send_any_kind_of_body() -> None:
    for kind in ("application/json", "application/x-www-form-urlencoded", ""):
        check(host="127.0.0.1:8080", content_type=kind)


def test_a_link_from_another_page_may_open_ours() -> None:
    check("GET", host="localhost:8080", sec_fetch_site="cross-site")


# ----------------------------------------------------------------------------------------------------- file descriptors


def test_the_soft_limit_of_files_is_raised_to_the_hard_one(monkeypatch: pytest.MonkeyPatch) -> None:
    set_to = []
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: set_to.append(limits))
    for limits, wanted in (((256, 4096), 4096), ((256, resource.RLIM_INFINITY), 65536), ((1024, 1 << 20), 65536)):
        monkeypatch.setattr(resource, "getrlimit", lambda kind, limits=limits: limits)
        assert raise_file_limit() == wanted and set_to.pop() == (wanted, limits[1])
    for limits, kept in (((4096, 4096), 4096), ((1 << 20, 1 << 20), 1 << 20)):
        monkeypatch.setattr(resource, "getrlimit", lambda kind, limits=limits: limits)
        assert raise_file_limit() == kept and not set_to


def test_a_system_that_does_not_let_the_limit_rise_is_lived_with(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(kind: int, limits: tuple[int, int]) -> None:
        raise ValueError("not allowed")

    monkeypatch.setattr(resource, "getrlimit", lambda kind: (256, 4096))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    assert raise_file_limit() == 256
    assert "not allowed" in caplog.text


def test_connections_leave_descriptors_for_the_rest(caplog: pytest.LogCaptureFixture) -> None:
    assert connections_limit(500, 4096) == 500 and not caplog.records
    with caplog.at_level(logging.WARNING):
        assert connections_limit(500, 256) == 256 - RESERVE
    assert "ulimit -n" in caplog.text
    assert connections_limit(500, 64) == 16
