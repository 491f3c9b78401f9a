"""The rows that embeddings are made of, on the CPU at each level and on an emulated card: those that the head reads, to
the bit, whoever else is in the batch; and a program that is never asked for them does what it did without.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import kernel_rig
import numpy as np
import pytest
import simt_rig
from gpu_program_rig import LANE_PAGES, LANES, ROWS, TINY, Piece, Sides, worst

from backends.base import PAGE_LEN, Backend, Limits, Program, StatePool
from backends.quant import QuantType
from homeserve.models.conform import before_hidden

TOKENS = [(7 * at * at + 31 * at + 5) % 61 for at in range(96)]
PLAIN = ("llama", "gpt_oss", "qwen3_moe")
RECURRENT = ("qwen3_5_text", "qwen3_next")
NEAR = 1e-2
"""Of states behind the norm, which lie within +-4: prompts are multiplied as halves on a card, which was seen 4.9e-3
away from the oracle."""
CPU_NEAR = 1e-4
"""Both sum in float32, in other orders."""
TALK: tuple[tuple[Piece, ...], ...] = (
    ((0, 0, TOKENS[:20]),),
    ((0, 20, TOKENS[20:21]), (1, 0, TOKENS[3:12]), (2, 0, TOKENS[:40])),
    ((0, 21, TOKENS[21:22]), (1, 9, TOKENS[12:14]), (2, 40, TOKENS[40:41])),
)
pytestmark = pytest.mark.timeout(900)


class Both:
    """A tiny model on the oracle and on one device."""

    def __init__(self, name: str, backend: Backend, sides: Sides) -> None:
        self.sides, self.program = sides, bound_to(sides, backend)

    def run(self, pieces: tuple[Piece, ...], wanted: tuple[int, ...] = ()) -> tuple[np.ndarray, np.ndarray]:
        batch = self.sides.batch(pieces, wanted)
        self.sides.oracle.run(batch)
        assert self.program.run(batch).shape[0] == len(wanted)
        return self.program.hidden(batch).copy(), self.sides.oracle.hidden(batch).copy()


def bound_to(sides: Sides, backend: Backend, *, marked: bool = True) -> Program:
    states, pages = sides.bound.state_layers, LANES * LANE_PAGES * PAGE_LEN
    return backend.bind(
        sides.bound.ops if marked else tuple(before_hidden(sides.bound.ops)),
        sides.weights,
        sides.bound.kv_pool(pages, QuantType.F32),
        Limits(ROWS, ROWS, LANES, LANE_PAGES, 8 if sides.drafts else 0),
        lambda *_: None,
        StatePool(states, LANES + 2 if states else 0),
    )


@pytest.fixture(scope="module")
def models() -> Iterator[dict[str, Sides]]:
    if simt_rig.compiler() is None:
        pytest.skip("no C++ compiler")
    made = {name: Sides(TINY / f"{name}.f32.gguf") for name in (*PLAIN, *RECURRENT)}
    yield made
    for sides in made.values():
        sides.close()


@pytest.mark.parametrize("name", [*PLAIN, *RECURRENT])
def test_rows_of_the_cpu_are_the_oracles(level: str, name: str, models: dict[str, Sides]) -> None:
    both = Both(name, kernel_rig.backend(level), models[name])
    for pieces in TALK:
        assert worst(both.run(pieces)) < CPU_NEAR
        assert worst(both.run(pieces, (0,))) < CPU_NEAR, "beside logits"
    both.program.close()


@pytest.mark.parametrize("name", [*PLAIN, *RECURRENT])
def test_rows_of_a_card_are_the_oracles(name: str, models: dict[str, Sides]) -> None:
    sides = models[name]
    for pieces in TALK:
        batch = sides.batch(pieces, ())
        for program in (sides.program, sides.oracle):
            assert program.run(batch).shape[0] == 0
        assert worst((sides.program.hidden(batch).copy(), sides.oracle.hidden(batch))) < NEAR


def test_a_row_has_the_same_bits_alone_and_in_company(level: str, models: dict[str, Sides]) -> None:
    """Chunked otherwise, with others before it, and beside rows whose logits are asked for."""
    both = Both("llama", kernel_rig.backend(level), models["llama"])
    for device in ("cpu", "card"):
        program = both.program if device == "cpu" else models["llama"].program
        if device == "card" and not models["llama"].card.facts.batch_invariant:
            continue

        def rows(*pieces: Piece, program: Program = program) -> np.ndarray:
            batch = models["llama"].batch(pieces, (0,))
            program.run(batch)
            return program.hidden(batch).copy()

        alone = rows((1, 0, TOKENS[:30]))
        company = rows((0, 0, TOKENS[40:43]), (1, 0, TOKENS[:30]), (2, 0, TOKENS[50:60]))
        np.testing.assert_array_equal(company[3:33], alone)
        chunks = [rows((1, 0, TOKENS[:7])), rows((1, 7, TOKENS[7:8])), rows((0, 3, [5]), (1, 8, TOKENS[8:30]))[1:]]
        np.testing.assert_array_equal(np.concatenate(chunks), alone)
    both.program.close()


def test_rows_are_those_that_the_head_reads(level: str, models: dict[str, Sides]) -> None:
    """Held against the head itself: its matrix times these rows are the logits."""
    both = Both("llama", kernel_rig.backend(level), models["llama"])
    batch = models["llama"].batch(TALK[1])
    logits = both.program.run(batch).copy()
    name = before_hidden(models["llama"].bound.ops)[-1].parts[0].weight.name  # type: ignore[union-attr]
    view = models["llama"].weights[name]
    head = view.data.view(np.float32).reshape(view.rows, view.cols)
    np.testing.assert_allclose(both.program.hidden(batch) @ head.T, logits, atol=1e-4)
    both.program.close()


def test_what_is_never_asked_for_costs_no_byte_and_no_bit(level: str, models: dict[str, Sides]) -> None:
    sides, backend = models["llama"], kernel_rig.backend(level)
    marked, plain = (bound_to(sides, backend, marked=marked) for marked in (True, False))
    assert marked.memory_lines() == plain.memory_lines()
    for pieces in TALK:
        batch = sides.batch(pieces)
        np.testing.assert_array_equal(marked.run(batch), plain.run(batch))
    marked.close()
    plain.close()


def test_a_plan_without_embeddings_launches_nothing_for_them(models: dict[str, Sides]) -> None:
    sides, plain = models["llama"], bound_to(models["llama"], models["llama"].card, marked=False)
    counted = []
    for program in (sides.program, plain):
        before = dict(sides.card.launch_counts())
        program.run(sides.batch(TALK[0]))
        after = sides.card.launch_counts()
        counted.append({symbol: count - before.get(symbol, 0) for symbol, count in after.items()})
    assert counted[0] == counted[1] and sum(counted[0].values())
    plain.close()


def test_rows_of_another_batch_and_of_no_run_are_refused(level: str, models: dict[str, Sides]) -> None:
    sides = models["llama"]
    own, plain = (bound_to(sides, kernel_rig.backend(level), marked=marked) for marked in (True, False))
    batch = sides.batch(TALK[0])
    for program in (own, sides.program):
        program.run(batch)
        for wrong in (sides.batch(TALK[2]), replace(batch, tokens=batch.tokens[:1])):
            with pytest.raises(ValueError, match="not that of the last run"):
                program.hidden(wrong)
        program.hidden(batch)
        with pytest.raises(ValueError, match="not that of the last run"):
            program.hidden(batch)  # the last update would be added twice
    plain.run(batch)
    with pytest.raises(ValueError, match="no rows behind the output norm"):
        plain.hidden(batch)
    own.close()
    plain.close()


@pytest.mark.parametrize("name", ["qwen3_5_text_mtp", "qwen3_next_mtp"])
def test_a_program_that_drafts_has_its_rows_beside_held_ones(level: str, name: str) -> None:
    """Rows of others are drafts in the same plan: those that count are told later, and change nothing here."""
    sides = Sides(TINY / f"{name}.f32.gguf", drafts=True)
    cpu = bound_to(sides, kernel_rig.backend(level))
    for pieces in TALK[:2]:
        batch = sides.batch(pieces, (0,))
        for program in (cpu, sides.program, sides.oracle):
            program.run(batch)
        wanted = sides.oracle.hidden(batch).copy()
        assert worst((cpu.hidden(batch).copy(), wanted)) < CPU_NEAR
        assert worst((sides.program.hidden(batch).copy(), wanted)) < NEAR
    hold = np.full(LANES, -1, np.int32)
    hold[0] = 0
    held = sides.batch(((0, 21, TOKENS[21:23]), (3, 0, TOKENS[:9])), (0, 1), hold=hold)
    for program in (cpu, sides.oracle, sides.program):
        program.run(held)
    wanted = sides.oracle.hidden(held).copy()
    assert worst((cpu.hidden(held).copy(), wanted)) < CPU_NEAR
    assert worst((sides.program.hidden(held).copy(), wanted)) < NEAR
    for program in (cpu, sides.oracle, sides.program):
        program.accept([(0, 1)])
    cpu.close()
    sides.close()
