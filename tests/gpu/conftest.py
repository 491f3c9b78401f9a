"""Tests that need a card. Without one none is collected, and the report's head says so: `scripts/test` runs the tiers
that every machine can."""

from __future__ import annotations

from functools import cache

import pytest

from budget.probe import read_box
from homeserve.cards import BACKENDS


@cache
def cards() -> tuple[str, ...]:
    """Names of this box's cards that homeserve has a backend for."""
    return tuple(card.name for card in read_box().cards if card.vendor in BACKENDS)


collect_ignore_glob = [] if cards() else ["test_*.py"]


def pytest_report_header(config: pytest.Config) -> str:
    return f"cards: {', '.join(cards()) or 'none here, so that nothing of tests/gpu is collected'}"
