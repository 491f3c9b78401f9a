"""Helpers import the `homeserve` of their parent; PYTHONPATH is touched only where they would not."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path

import pytest

import homeserve
from homeserve.wire import children

ROOT = Path(homeserve.__file__).parents[1]


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Only the path decides, and what was found out before is forgotten."""
    monkeypatch.setattr(sys, "meta_path", [PathFinder])
    children.import_root.cache_clear()
    yield
    children.import_root.cache_clear()


def path(monkeypatch: pytest.MonkeyPatch, *entries: str) -> None:
    monkeypatch.setattr(sys, "path", [*entries] if not sys.flags.safe_path else [*entries][1:])


def test_an_installed_package_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    path(monkeypatch, "/current", "/usr/lib", str(ROOT))
    assert children.environment({"A": "b"}) == {"A": "b"}


def test_a_package_of_the_current_folder_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    path(monkeypatch, str(ROOT), "/usr/lib")
    assert children.environment({"A": "b"}) == {"A": "b", "PYTHONPATH": str(ROOT)}
    assert children.environment({"PYTHONPATH": "/x"}) == {"PYTHONPATH": f"{ROOT}:/x"}


def test_another_installed_package_does_not_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "homeserve").mkdir()
    (tmp_path / "homeserve" / "__init__.py").touch()
    path(monkeypatch, str(ROOT), str(tmp_path))
    assert children.environment({}) == {"PYTHONPATH": str(ROOT)}
