"""The default model over CPU ranks: the greedy texts of one rank, in both layouts and on uneven vectors.

In the pipeline layout every logit is the same bits. In the tensor layout sums are taken in another order, and a row
that is rounded to 8 bits in front of a packed matrix turns such noise into steps; the texts are held to be equal up to
the first place where one rank's best token leads the second by less than the error that was measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from fleet_rig import Fleet
from ranks import over_memory

from backends.base import OpenOptions
from backends.registry import open_backend
from homeserve import checkpoint
from homeserve.models import registry
from homeserve.text.tokenizer import Tokenizer

pytestmark = pytest.mark.timeout(300)

STEPS = 24
PROMPTS = ("The capital of France is", "def fibonacci(n):\n", "1, 2, 3, 4, 5, 6, 7,")
VECTORS = ((2, 1, 1), (30, 17, 17), (28, 26, 20), (1, 1))
ERROR_MAX = 0.05
"""Logits lie within +-30; 0.006 was measured."""
Report = Callable[[str], None]


@dataclass
class Played:
    tokens: list[list[int]]
    logits: np.ndarray
    """[steps, prompts, vocab]"""


@dataclass
class Known:
    tokenizer: Tokenizer
    prompts: list[list[int]]
    fleet: Callable[..., Fleet]
    one: Played


@pytest.fixture(scope="module")
def known(smollm2: str) -> Iterator[Known]:
    opened = checkpoint.open(smollm2, registry.folder_families)
    family = registry.family(opened.arch)
    config = family.config_from(opened.metadata)
    tokenizer = Tokenizer.from_checkpoint(opened)
    prompts = [list(tokenizer.encode(text)) for text in PROMPTS]

    def fleet(*args: Any, **more: Any) -> Fleet:
        return Fleet(family, config, opened.tensors, *args, backend=cpu_rank, **more)

    one = fleet()
    yield Known(tokenizer, prompts, fleet, greedy(one, prompts))
    one.close()
    opened.close()


def cpu_rank() -> Any:
    return open_backend("cpu", OpenOptions(threads=1))


def greedy(ranks: Fleet, prompts: list[list[int]], forced: list[list[int]] | None = None) -> Played:
    """All prompts together, always with the likeliest token, or with the tokens of another run."""
    rows = np.stack([ranks.run([(lane, 0, prompt)], [len(prompt) - 1])[0] for lane, prompt in enumerate(prompts)])
    tokens: list[list[int]] = [[] for _ in prompts]
    logits = []
    for step in range(STEPS):
        logits.append(rows)
        for at, each in enumerate(tokens):
            each.append(int(rows[at].argmax()) if forced is None else forced[at][step])
        rows = ranks.run([(at, len(prompts[at]) + step, each[-1:]) for at, each in enumerate(tokens)])
    return Played(tokens, np.stack(logits))


@pytest.mark.parametrize("vector", VECTORS, ids=str)
@pytest.mark.parametrize("layout", ["pipeline", "tensor"])
def test_ranks_write_the_text_of_one(known: Known, layout: str, vector: tuple[int, ...], measured: Report) -> None:
    device = cpu_rank()
    with over_memory(device.library, len(vector)) as group:
        ranks = known.fleet(layout, vector, token_vector=vector, group=group)
        forced = greedy(ranks, known.prompts, known.one.tokens)
        free = greedy(ranks, known.prompts)
        ranks.close()
    device.close()
    assert "Paris" in known.tokenizer.decode(free.tokens[0][:8])
    error = float(np.abs(forced.logits - known.one.logits).max())
    if layout == "pipeline":
        assert error == 0 and free.tokens == known.one.tokens
        return
    assert error < ERROR_MAX
    best = np.sort(known.one.logits, axis=2)[..., -2:]
    sure = best[..., 1] - best[..., 0] > 2 * error
    assert np.array_equal(forced.logits.argmax(axis=2)[sure], known.one.logits.argmax(axis=2)[sure])
    same = sum(each == other for each, other in zip(free.tokens, known.one.tokens, strict=True))
    measured(f"SmolLM2, tensor {vector}: logits within {error:.3f}, {same} of {len(PROMPTS)} texts the same")
    for at, (got, right) in enumerate(zip(free.tokens, known.one.tokens, strict=True)):
        certain = STEPS if sure[:, at].all() else int(np.argmin(sure[:, at]))
        assert got[:certain] == right[:certain]
    assert same >= 2
