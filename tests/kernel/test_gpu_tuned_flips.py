"""Cards that have measured, bound to both layouts: each layout has the forms that its own weights were measured with,
ranks have different ones, and what a flip leaves is what one rank of the oracle has.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import simt_rig as rig
from gpu_tuned import ClockedDevice, HostGemm, price
from ranks import on_paper

# The test folders are no package (pytest's importlib mode); fleets of ranks lie among the model tests.
sys.path.insert(0, str(Path(__file__).parents[1] / "model"))

from fleet_rig import Fleet
from flipping_ranks import Flipping, copy_home
from wide_models import wide

from backends.gpu import trial
from backends.gpu.backend import GpuBackend
from backends.gpu.entries import Entries
from backends.gpu.tuning import Tuning

PROMPT = [(7 * at * at + 31 * at + 5) % 512 for at in range(60)]
TOLERANCE = 0.025
"""As of test_gpu_flips.py."""

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(rig.compiler() is None, reason="no C++ compiler"),
]


def steps(ranks: Fleet | Flipping) -> list[np.ndarray]:
    """Prompts of many rows and single rows, with a flip between each two."""
    out, at = [], 0
    for rows in (34, 1, 12, 1):
        out.append(ranks.run([(0, at, PROMPT[at : at + rows])]))
        at += rows
        if isinstance(ranks, Flipping):
            assert ranks.flip({0: at})
    return out


def test_layouts_of_ranks_that_chose_otherwise_answer_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "TRIES", 1)
    monkeypatch.setattr(trial, "MATRICES_MOST", 1)
    devices: list[ClockedDevice] = []
    told: list[str] = []

    def card() -> GpuBackend:
        rank = len(devices) % 2  # of each of two fleets, of which one is used
        devices.append(ClockedDevice(price=price(few_most=16 if rank else 2, library=0.1)))
        entries = Entries(tmp_path / str(rank), told.append)
        return GpuBackend(devices[-1], tuning=Tuning(devices[-1], entries, told.append, HostGemm if rank else None))

    model = wide("llama blocks")
    wanted = steps(Fleet(model.family, model.config, model.tensors))
    ranks = Flipping("llama blocks", (1, 1), on_paper(2), card, copy_home)
    first, second = (device for device in devices if device.measured)
    before = first.measured, second.measured, second.made
    found = steps(ranks)
    assert not told
    assert (first.measured, second.measured) == before[:2], "nothing is measured at a flip"
    assert first.made == 0 and second.made > before[2], "the library of one rank multiplies"
    ranks.close()
    for one, other in zip(found, wanted, strict=True):
        assert np.abs(one - other).max() < TOLERANCE * np.abs(other).max()
