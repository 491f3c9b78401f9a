"""Measuring on a card of a fake driver: its events are the clock, what was chosen lies in the cache, a second start
measures nothing. How long an emulation takes decides which borders come out; that they are ones that can be is held.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from fake_cards import ECC, FakeCards, fake_cards

from backends.gpu import trial, tuning
from backends.gpu.arch import Vendor
from backends.gpu.backend import GpuBackend
from backends.gpu.card import Card
from backends.gpu.device import Timed
from backends.gpu.entries import PREFIX
from backends.gpu.errors import DeviceLost
from backends.gpu.tuning import open_tuning

VENDORS: tuple[Vendor, ...] = get_args(Vendor)
TOKENS = [(7 * at * at + 31 * at + 5) % 61 for at in range(20)]


@pytest.fixture(params=VENDORS)
def vendor(request: pytest.FixtureRequest) -> Vendor:
    found: Vendor = request.param
    return found


@pytest.fixture
def cards(tmp_path: Path) -> FakeCards:
    return fake_cards(tmp_path)


@pytest.fixture
def card(cards: FakeCards, vendor: Vendor) -> Iterator[Card]:
    opened = cards.open(vendor)
    yield opened
    opened.close()


def test_seconds_are_those_between_two_events(card: Card) -> None:
    assert isinstance(card, Timed)
    memory = card.allocate(1 << 24, "weights")
    nothing, much = (
        min(card.seconds(lambda times=times: [card.fill(memory.address, 1, 1 << 24) for _ in range(times)])  # type: ignore[misc]
            for _ in range(3))
        for times in (0, 64)
    )  # fmt: skip
    assert 0 <= nothing < much < 60
    memory.close()


def test_a_card_that_is_lost_while_it_is_measured_says_so(cards: FakeCards, card: Card, vendor: Vendor) -> None:
    memory = card.allocate(64, "weights")
    cards.fail(vendor, "cuEventSynchronize" if vendor == "nvidia" else "hipEventSynchronize", ECC)
    with pytest.raises(DeviceLost):
        card.seconds(lambda: card.fill(memory.address, 1, 64))
    with pytest.raises(DeviceLost):
        card.wait()
    cards.end_process(vendor)


@pytest.mark.timeout(300)
def test_a_second_start_finds_what_the_first_has_measured(
    cards: FakeCards, vendor: Vendor, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gpu_program_rig import TINY, Sides, worst  # it needs the path that fake_cards puts in

    monkeypatch.setattr(trial, "TRIES", 1)
    monkeypatch.setattr(tuning, "BOUND_S", 1e6)  # an emulation takes what it takes
    monkeypatch.setattr(trial, "MATRICES_MOST", 1)
    environ: Mapping[str, str] = {"XDG_CACHE_HOME": cards.environment["XDG_CACHE_HOME"], "HOMESERVE_TUNE": "on"}
    folder, answers, ages = Path(environ["XDG_CACHE_HOME"]) / "homeserve" / "kernels", [], []
    sides = Sides(TINY / "llama.f32.gguf", rows=20)
    for _ in range(2):
        card, told = cards.open(vendor), []  # type: ignore[var-annotated]
        backend = GpuBackend(card, tuning=open_tuning(card, environ, told.append))
        program = sides.bind(backend)
        answers.append(program.run(sides.batch([(0, 0, TOKENS)])).copy())
        ages.append({path.name: path.stat().st_mtime_ns for path in folder.glob(PREFIX + "*")})
        program.close()
        backend.close()
        assert not told
    assert ages[0] and ages[0] == ages[1], "nothing was written anew"
    assert np.array_equal(*answers)
    assert worst((answers[0], sides.oracle.run(sides.batch([(0, 0, TOKENS)])))) < 4e-3
    sides.close()
