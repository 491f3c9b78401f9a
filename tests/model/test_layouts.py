"""Ranks bound to both layouts: what a flip leaves is what a fleet that never flipped has, in either direction."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleet_rig import Fleet
from flipping_ranks import Flipping, copy_home
from one_page import PAGE, make_one
from ranks import Group, on_paper, over_memory
from wide_models import wide

from backends.base import Backend, OpenOptions, RefillFailed, WeightHome
from backends.cpu.pieces import Pieces
from backends.reference.backend import ReferenceBackend
from backends.registry import open_backend

PROMPT = [(7 * at * at + 31 * at + 5) % 512 for at in range(60)]
OTHER_PROMPT = [(11 * at * at + 3 * at + 9) % 512 for at in range(60)]


def cpu_rank() -> Backend:
    return open_backend("cpu", OpenOptions(threads=1))


@pytest.fixture
def acts() -> Iterator[Callable[[int], Group]]:
    with ExitStack() as stack:
        device = stack.enter_context(closing(cpu_rank()))
        yield lambda ranks: stack.enter_context(over_memory(device.library, ranks))


def steps(ranks: Any, between: Callable[[int], None]) -> list[np.ndarray]:
    """Two sequences: prefilled, then four rows of each, one after another."""
    out = [ranks.run([(0, 0, PROMPT[:37]), (2, 0, OTHER_PROMPT[:21])])]
    for step in range(4):
        between(step)
        out.append(ranks.run([(0, 37 + step, PROMPT[37 + step :][:1]), (2, 21 + step, OTHER_PROMPT[21 + step :][:1])]))
    return out


def images_home(folder: str) -> Callable[..., WeightHome]:
    return lambda rank, ranks, whole, fd: WeightHome("images", rank, ranks, folder=folder)


FORMS = ("llama", "llama blocks", "qwen35", "qwen3next", "gpt-oss", "gemma4")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("ratio", [(1, 1), (2, 1, 1)])
@pytest.mark.parametrize("first", ["pipeline", "tensor"])
@pytest.mark.parametrize("kind", ["copy", "images"])
def test_flips_there_and_back_change_no_logit(
    acts: Callable[[int], Group], tmp_path: Path, form: str, ratio: tuple[int, ...], first: str, kind: str
) -> None:
    model = wide(form)
    alone = Fleet(model.family, model.config, model.tensors, backend=cpu_rank)
    wanted = steps(alone, lambda step: None)
    alone.close()
    home = copy_home if kind == "copy" else images_home(str(tmp_path))
    ranks = Flipping(form, ratio, acts(len(ratio)), cpu_rank, home, first)
    moved = []
    found = steps(ranks, lambda step: moved.append(ranks.flip({0: 37 + step, 2: 21 + step})))
    ranks.close()
    assert len(moved) == 4 and all(moved)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, atol=5e-3 if "blocks" in form else 2e-4)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("form", ["llama", "qwen35"])
def test_the_oracle_flips_too(form: str) -> None:
    model = wide(form)
    wanted = steps(Fleet(model.family, model.config, model.tensors), lambda step: None)
    ranks = Flipping(form, (2, 1, 1), on_paper(3), lambda: ReferenceBackend(OpenOptions()), copy_home)
    found = steps(ranks, lambda step: ranks.flip({0: 37 + step, 2: 21 + step}))
    ranks.close()
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-4)


def test_a_refill_from_a_damaged_copy_is_tried_again_and_then_given_up(acts: Callable[[int], Group]) -> None:
    ranks = Flipping("llama", (1, 1), acts(2), cpu_rank, copy_home)
    layouts = ranks.layouts[0]
    copy = next(region for region in layouts.memory_regions() if region.line == "weights copy")
    memory = (ctypes.c_uint8 * copy.bytes).from_address(copy.address)
    good = layouts.refill("tensor")
    assert good.tries == 1 and good.digest == layouts.arena_digest("tensor")
    damaged = bytes(memory)
    for at in range(0, copy.bytes, 64):
        memory[at] ^= 4
    pieces, calls = layouts._source.pieces, []

    def healed(name: str) -> Pieces:
        calls.append(name)
        if len(calls) == 2:
            ctypes.memmove(copy.address, damaged, copy.bytes)
        return pieces(name)

    with pytest.raises(RefillFailed, match="filled in 2 times"):
        layouts.refill("tensor")
    layouts._source.pieces = healed
    assert layouts.refill("tensor").tries == 2
    arena = next(region for region in layouts.memory_regions() if region.line == "weights")
    ctypes.memset(arena.address, 7, arena.bytes)
    assert layouts.arena_digest("tensor") != good.digest
    assert layouts.refill("tensor").digest == good.digest == layouts.arena_digest("tensor")
    ranks.close()


@pytest.mark.parametrize("kind", ["copy", "images", "reference"])
def test_d13_a_bit_that_turned_on_its_way_into_the_arena_is_found_there(
    acts: Callable[[int], Group], kind: str
) -> None:
    backend = (lambda: ReferenceBackend(OpenOptions())) if kind == "reference" else cpu_rank
    ranks = Flipping("llama", (1, 1), acts(2), backend, images_home("") if kind == "images" else copy_home)
    for layouts in ranks.layouts:
        good = layouts.refill("tensor")
        assert good.tries == 1 and layouts.refill("tensor", spoilt=True) == replace(good, tries=2)
        assert layouts.arena_digest("tensor") == good.digest
    ranks.close()


def test_an_arena_that_does_not_keep_what_is_filled_in_is_given_up(acts: Callable[[int], Group]) -> None:
    """The source is right and each store is: what counts is what is read there."""
    ranks = Flipping("llama", (1, 1), acts(2), cpu_rank, copy_home)
    layouts = ranks.layouts[0]
    assert layouts.refill("tensor").tries == 1
    arena = next(region for region in layouts.memory_regions() if region.line == "weights")
    make_one(arena.address, arena.address + PAGE)
    with pytest.raises(RefillFailed, match="where they lie; at load it was"):
        layouts.refill("tensor")
    ranks.close()
