"""Fleets of emulated cards: two ranks in either layout answer as one rank of the oracle does.

Rows travel by way of the host (backends.gpu.transport.host) over the paper wire, so two ranks that miss each other end
at once. KV pages lie on either rank as the token vector says.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simt_rig as rig
from emulated_device import EmulatedDevice

# The test folders are no package (pytest's importlib mode); fleets of ranks lie among the model tests.
sys.path.insert(0, str(Path(__file__).parents[1] / "model"))

from fleet_rig import Fleet, Piece

from backends.base import Limits, OpenOptions
from backends.gpu.backend import GpuBackend
from backends.quant import QuantType
from backends.reference.backend import ReferenceBackend
from homeserve import checkpoint
from homeserve.models import registry

TINY = Path(__file__).parents[1] / "data" / "tiny"
TOLERANCE = 5e-3
TOKENS = [(7 * at * at + 31 * at + 5) % 61 for at in range(64)]
TALK: tuple[tuple[list[Piece], list[int]], ...] = (
    ([(0, 0, TOKENS[:21])], [0, 20]),
    ([(0, 21, TOKENS[21:22])], [0]),
    ([(0, 22, TOKENS[22:23]), (1, 0, TOKENS[3:20])], [0, 17]),
    ([(1, 17, TOKENS[20:21]), (0, 23, TOKENS[23:24])], [1]),
    ([(1, 18, TOKENS[21:22]), (0, 24, TOKENS[24:25])], []),
    ([(1, 19, TOKENS[22:23]), (0, 25, TOKENS[25:26])], [0, 1]),
    ([(0, 26, TOKENS[26:27]), (1, 20, TOKENS[23:24])], [0, 1]),
    ([(0, 27, TOKENS[27:28]), (1, 21, TOKENS[24:25])], [0, 1]),
)
"""The last three are of one shape."""
LAYOUTS = {"pipeline": ((1, 1), ()), "tensor": ((1, 1), (1, 1))}

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(rig.compiler() is None, reason="no C++ compiler"),
]
Opener = Callable[..., Fleet]


@pytest.fixture
def fleet() -> Iterator[Opener]:
    opened: list[Fleet] = []

    def opener(name: str, **more: Any) -> Fleet:
        found = checkpoint.open(str(TINY / f"{name}.f32.gguf"), registry.folder_families)
        family = registry.family(found.arch)
        opened.append(Fleet(family, family.config_from(found.metadata), found.tensors, **more))
        return opened[-1]

    yield opener
    for each in opened:
        each.close()


def card(arch: str = "sm_86") -> GpuBackend:
    return GpuBackend(EmulatedDevice(arch))


@cache
def alone(name: str) -> tuple[np.ndarray, ...]:
    """What one rank of the oracle says."""
    found = checkpoint.open(str(TINY / f"{name}.f32.gguf"), registry.folder_families)
    family = registry.family(found.arch)
    one = Fleet(family, family.config_from(found.metadata), found.tensors)
    return tuple(one.run(pieces, wanted).copy() for pieces, wanted in TALK)


def answers(fleet: Fleet) -> list[np.ndarray]:
    return [fleet.run(pieces, wanted) for pieces, wanted in TALK]


def same(got: list[np.ndarray], wanted: tuple[np.ndarray, ...], tolerance: float = TOLERANCE) -> bool:
    return all(
        one.shape == other.shape and (not one.size or float(np.abs(one - other).max()) < tolerance)
        for one, other in zip(got, wanted, strict=True)
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt_oss", "qwen3_5_text", "qwen3_moe"])
def test_two_cards_answer_as_one_rank_of_the_oracle(fleet: Opener, name: str, layout: str) -> None:
    ratio, vector = LAYOUTS[layout]
    both = fleet(name, layout=layout, ratio=ratio, token_vector=vector, backend=card)
    assert same(answers(both), alone(name))


def test_a_card_of_either_vendor_and_a_rank_without_one(fleet: Opener) -> None:
    """What is on the wire is the same from every backend."""
    kinds = iter([card("sm_86"), ReferenceBackend(OpenOptions(extra={"dtype": "float32"})), card("gfx1103")])
    mixed = fleet("qwen3", layout="tensor", ratio=(2, 1, 1), token_vector=(1, 1, 2), backend=lambda: next(kinds))
    assert same(answers(mixed), alone("qwen3"))


def test_two_cards_draft_hold_and_accept(fleet: Opener) -> None:
    """A round of drafts on two ranks and on one of the oracle: the steps, the rows that are held, what is left."""
    ratio, vector = LAYOUTS["tensor"]
    made = [
        fleet("qwen3_5_text_mtp", layout="tensor", ratio=ratio, token_vector=vector, backend=card, drafts=True),
        fleet("qwen3_5_text_mtp", drafts=True),
    ]
    found = []
    for each in made:
        each.run([(0, 0, TOKENS[:9])])
        drafted = [each.draft([(0, 9 + step, TOKENS[9 + step], step - 1 if step == 0 else 0)]) for step in range(2)]
        verified = each.run([(0, 9, TOKENS[9:12])], hold=[0])
        each.accept([(0, 2)])
        found.append((*drafted, verified, each.run([(0, 11, TOKENS[11:13])])))
    assert same(list(found[0]), found[1])


def test_a_rank_without_a_unit_of_a_family(fleet: Opener) -> None:
    uneven = fleet("llama", layout="tensor", ratio=(1, 7), token_vector=(3, 1), backend=card)
    assert same(answers(uneven), alone("llama"))


def test_exchanges_split_what_is_recorded(fleet: Opener) -> None:
    both = fleet("llama", layout="tensor", ratio=(1, 1), token_vector=(1, 1), backend=card)
    device = both.devices[1].device  # type: ignore[attr-defined]
    for at in range(3):
        both.run([(0, at, TOKENS[at : at + 1])])
    exchanges = sum(hasattr(op, "label") for op in both.bounds[1].ops)
    assert device.replays == 2 * (exchanges + 1) - 2 * _empty(both)
    assert device.counts["merge_attention"] == 3 * sum(
        "attention" in getattr(op, "label", "") for op in both.bounds[1].ops
    )


def _empty(fleet: Fleet) -> int:
    """Segments of a plan without a launch: behind the last exchange, where this rank has nothing to do with it."""
    known = next(iter(fleet.programs[1]._shapes._known.values()))  # type: ignore[attr-defined]
    return sum(not segment.launches for segment in known.segments)


def test_an_exchange_without_a_collective_is_refused(fleet: Opener) -> None:
    both = fleet("llama", layout="tensor", ratio=(1, 1), token_vector=(1, 1), backend=card)
    bound = both.bounds[0]
    opened = card()
    with pytest.raises(ValueError, match="without a collective"):
        opened.bind(bound.ops, bound.weights, bound.kv_pool(32, QuantType.F32), Limits(4, 4, 1, 1), lambda *_: None)
    opened.close()
