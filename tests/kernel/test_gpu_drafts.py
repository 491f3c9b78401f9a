"""Drafting on an emulated card: steps of drafting, rows that are held, rows that come to count. Answers are those of
the oracle, and states those of plain decoding on the same card.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simt_rig as rig
from draft_rig import DRAFTS, LANES, LIMITS, PAGES, Desk
from emulated_device import EmulatedDevice
from gpu_program_rig import HELD_ROWS, TINY, Sides

from backends.base import PAGE_LEN, Batch, OpenOptions, Program, StatePool
from backends.gpu.backend import GpuBackend
from backends.quant import QuantType
from backends.reference.backend import ReferenceBackend
from homeserve import checkpoint
from homeserve.models.bind import bind
from homeserve.models.registry import family

COUNTER = Path(__file__).parents[1] / "data" / "counter.gguf"
PROMPT = [(7 * at * at + 31 * at + 5) % 250 for at in range(13)]
TOLERANCE = 4e-3

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(rig.compiler() is None, reason="no C++ compiler"),
]


@pytest.fixture
def both() -> Iterator[Sides]:
    made = Sides(TINY / "qwen3_5_text_mtp.f32.gguf", drafts=True)
    yield made
    made.close()


def desk_on(backend: Any, path: Path) -> tuple[Desk, Program]:
    """A rank's worker around a program of the model with its drafting block."""
    opened = checkpoint.open(str(path))
    declared = family(opened.arch)
    bound = bind(declared, declared.config_from(opened.metadata), opened.tensors, drafts=True)
    states = StatePool(bound.state_layers, LANES + 2 if bound.state_layers else 0)
    kv = bound.kv_pool(PAGES * PAGE_LEN, QuantType.F32)
    program = backend.bind(bound.ops, bound.weights, kv, LIMITS, lambda *_: None, states)
    return Desk(program, drafts=DRAFTS, vocab=bound.config.vocab), program


@pytest.mark.parametrize("arch", ["sm_86", "gfx1103"])
def test_the_counter_answers_as_on_the_oracle_and_its_drafts_count(arch: str) -> None:
    device = EmulatedDevice(arch)
    backend = GpuBackend(device)
    desk, program = desk_on(backend, COUNTER)
    oracle, _ = desk_on(ReferenceBackend(OpenOptions()), COUNTER)
    prompt = list(b"count 730:")
    got = desk.answer(desk.begin(1, prompt), 9, drafts=(DRAFTS,))
    wanted = oracle.answer(oracle.begin(1, prompt), 9, drafts=(DRAFTS,))
    assert [sample.token for sample in got] == [sample.token for sample in wanted]
    assert desk.rounds == oracle.rounds and any(rows > 1 for _, rows in desk.rounds)
    assert device.counts["join_chained"] and device.counts["join_accept"]
    program.close()
    backend.close()


def steps(side: Sides, program: Program, tokens: list[int], at: int, held: int, counts: int) -> None:
    """Rows of lane 0 that are held, of which some come to count."""
    hold = np.full(4, -1, np.int32)
    hold[0] = 1
    program.run(side.batch([(0, at, tokens[at : at + held])], hold=hold))
    program.accept([(0, counts)])


@pytest.mark.parametrize("counts", [0, 1, 3])
def test_rows_that_count_leave_what_they_alone_would_have(both: Sides, counts: int) -> None:
    tokens = PROMPT + PROMPT
    both.run([(0, 0, tokens[:9])])
    for program in (both.program, both.oracle):
        steps(both, program, tokens, 9, 3, counts)
    got, wanted = both.run([(0, 9 + counts, tokens[9 + counts : 11 + counts])])
    assert np.abs(got - wanted).max() < TOLERANCE


def test_rows_come_to_count_by_one_call_of_the_driver(both: Sides) -> None:
    """For all layers, from the second time on."""
    both.run([(0, 0, PROMPT[:4])])
    replays = []
    for at in range(4, 7):
        hold = np.array([2, -1, -1, -1], np.int32)
        both.program.run(both.batch([(0, at, PROMPT[at : at + 2])], hold=hold))
        before = both.device.replays
        both.program.accept([(0, 1)])
        replays.append(both.device.replays - before)
    assert replays == [0, 1, 1]


def test_a_step_of_drafting_goes_on_from_the_one_before(both: Sides) -> None:
    both.run([(0, 0, PROMPT[:9]), (2, 0, PROMPT[:5])])
    first = both.batch([(0, 9, PROMPT[9:10]), (2, 5, PROMPT[5:6])], chain=np.array([-1, -1], np.int32))
    second = both.batch([(2, 6, PROMPT[6:7]), (0, 10, PROMPT[10:11])], chain=np.array([1, 0], np.int32))
    for batch in (first, second):
        got, wanted = both.program.draft(batch).copy(), both.oracle.draft(batch).copy()
        assert got.shape == wanted.shape and np.abs(got - wanted).max() < TOLERANCE


def test_held_states_stay_as_they_were_until_rows_count(both: Sides) -> None:
    tokens = PROMPT + PROMPT
    both.run([(0, 0, tokens[:9])])
    before = both.run([(0, 9, tokens[9:10])])[1]
    both.run([(1, 0, tokens[:9])])
    hold = np.full(4, -1, np.int32)
    hold[1] = 0
    both.program.run(both.batch([(1, 9, tokens[9:14])], hold=hold))
    both.program.run(both.batch([(2, 0, tokens[:2])]))
    got = both.program.run(both.batch([(1, 9, tokens[9:10])]))
    assert np.abs(got - before).max() < TOLERANCE


def test_what_cannot_be_accepted_is_refused_before_anything_is_written(both: Sides) -> None:
    both.run([(0, 0, PROMPT[:4])])
    hold = np.full(4, -1, np.int32)
    hold[0] = 2
    held = both.batch([(0, 4, PROMPT[4:7]), (1, 0, PROMPT[:2])], hold=hold)
    both.program.run(held)
    launched = dict(both.device.counts)
    for kept, said in (
        ([(1, 1)], "lane 1 are not held"),
        ([(0, 4)], "has 3 rows"),
        ([(0, 1), (0, 1)], "lane 0 are not held"),
        ([(0, -1)], "has 3 rows"),
    ):
        with pytest.raises(ValueError, match=said):
            both.program.accept(kept)
    assert dict(both.device.counts) == launched
    waits = both.device.waits
    both.program.accept([(0, 3)])
    assert both.device.waits == waits, "whatever comes next is behind it on the stream"
    with pytest.raises(ValueError, match="not held"):
        both.program.accept([(0, 1)])


@pytest.mark.parametrize(
    ("hold", "said"),
    [
        ([HELD_ROWS - 2, -1, -1, -1], "3 rows of lane 0 are held from 6 on, of 8"),
        ([-2, -1, -1, -1], "held from -2 on"),
        ([0, 2, -1, -1], "where others are"),
    ],
)
def test_places_of_held_rows_that_cannot_be(both: Sides, hold: list[int], said: str) -> None:
    batch = both.batch([(0, 0, PROMPT[:3]), (1, 0, PROMPT[:2])], hold=np.array(hold, np.int32))
    with pytest.raises(ValueError, match=said):
        both.program.run(batch)


def chained(both: Sides, chain: list[int], rows: int = 1) -> Batch:
    return both.batch([(0, 4, PROMPT[4 : 4 + rows])], chain=np.array(chain, np.int32))


def test_chains_that_cannot_be(both: Sides) -> None:
    both.run([(0, 0, PROMPT[:4])])
    for batch, said in (
        (chained(both, [0]), "chain 0 .* outside -1 to -1"),
        (chained(both, [-1, -1]), "a chain of 2 rows"),
        (chained(both, [-2]), "chain -2"),
    ):
        with pytest.raises(ValueError, match=said):
            both.program.draft(batch)
    both.program.draft(chained(both, [-1]))
    both.program.draft(chained(both, [0]))
    both.run([(1, 0, PROMPT[:1])])
    with pytest.raises(ValueError, match="chain 0"):
        both.program.draft(chained(both, [0]))


def test_kept_rows_have_a_line_of_their_own(both: Sides) -> None:
    lines = dict(both.program.memory_lines())
    assert lines["drafts"] > 0 and lines["state"] > 0
