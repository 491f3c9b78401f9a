"""`--deterministic`: a sequence has the same bits whatever is computed with it and by however many threads.

Batches of 1, 3, 8 and 17 sequences on 1, 2 and 3 threads (one more than this project's smallest machine has cores), by
`Program.run`; every logit that a token is chosen by is compared, bit by bit, with those of the sequence alone on one
thread. tests/server asks the same of whole servers.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

BATCHES = (1, 3, 8, 17)
THREADS = (1, 2, 3)
MOST = max(BATCHES)
STEPS = 4
Opener = Callable[..., Any]


def prompts(vocab: int) -> list[list[int]]:
    """As many as the largest batch, of different lengths; from the first one, over a page, to one of two tokens."""
    random = np.random.default_rng(5)
    return [random.integers(3, vocab, 2 + (37 - 2 * i) % 39).tolist() for i in range(MOST)]


def compare(open_model: Opener, path: str | Path, kv_type: str) -> None:
    alone: list[Any] = []
    for threads in THREADS:
        model = open_model(path, "cpu", threads=threads, lanes=MOST, kv_type=kv_type)
        assert (model.backend.facts.threads, model.backend.facts.batch_invariant) == (threads, True)
        every = prompts(model.config.vocab)
        alone = alone or [model.greedy([prompt], STEPS)[0] for prompt in every]
        for batch in BATCHES:
            first = MOST - batch  # the lanes that a sequence lies in differ from batch to batch
            for found, own in zip(model.greedy(every[first:], STEPS), alone[first:], strict=True):
                assert found.tokens == own.tokens, f"{batch} sequences, {threads} threads"
                assert np.array_equal(found.logits.view(np.uint32), own.logits.view(np.uint32)), f"{batch}, {threads}"


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt_oss", "qwen3_5_text", "qwen3_5_moe_text"])
def test_tiny_models(open_model: Opener, tiny: Path, name: str) -> None:
    compare(open_model, tiny / f"{name}.f32.gguf", "f32")


@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
def test_the_default_model(open_model: Opener, smollm2: str, kv_type: str) -> None:
    compare(open_model, smollm2, kv_type)
