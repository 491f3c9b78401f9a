"""Flips of the policy under a mixed load on three ranks, and every answer beside the one without a flip.

`load.py` says what the load is, what pulls the policy and which answers count as equal; `wide.py`, why the models
here have a head of many rows that no token uses.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from box import Box
from load import Soak, play, wanted
from wide import widened

DATA = Path(__file__).parents[1] / "data"
MODELS = {"hybrid": DATA / "counter.gguf", "dense": DATA / "tiny" / "llama.f32.gguf"}
SLOW = os.environ.get("HOMESERVE_TEST_TIER") == "slow"
SOAK = bool(os.environ.get("HOMESERVE_TEST_SOAK_MINUTES"))
SEED = int(os.environ.get("HOMESERVE_TEST_SEED") or "0", 16)
FLIPS, EACH = (10_000, 100) if SOAK else (1000, 100) if SLOW else (60, 3)
ASKS = 120 if SLOW else 40
LIMIT_S = 12 * 3600.0 if SOAK else 3600.0 if SLOW else 400.0
"""For hangs and for policies that do not flip: nothing is measured with it."""
WIDE = 65_536


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Box]:
    made = Box(tmp_path)
    yield made
    made.close()


def played(box: Box, tmp_path: Path, family: str, wish: dict[str, int], asks: int) -> Soak:
    source = MODELS[family]
    model = tmp_path / source.name
    widened(source, model, WIDE)
    print(f"HOMESERVE_TEST_SEED={SEED:x}")
    return play(box, model, wish, asks=asks, seed=SEED, limit_s=LIMIT_S, tell=print)


@pytest.mark.timeout(LIMIT_S + 300)
@pytest.mark.parametrize("family", ["hybrid", "dense"] if SLOW else ["hybrid"])
def test_every_answer_under_flips_of_the_policy_is_the_one_without(box: Box, tmp_path: Path, family: str) -> None:
    plan = played(box, tmp_path, family, wanted(FLIPS, EACH, family == "hybrid"), ASKS)
    found = plan.flips.counts()
    assert found["policy"] >= FLIPS
    assert min(found["decoding"], found["half_done"], found["empty"]) >= EACH
    assert family == "dense" or found["checkpoints"] >= EACH
    assert plan.hits > 0 and plan.left > 0, "no prefix hit, or no client that left"
    assert {"long", "drawn", "penalised", "left", "ends"} <= plan.compared.answers.keys() | {"ends"}
