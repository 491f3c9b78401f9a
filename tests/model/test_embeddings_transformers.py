"""Embeddings against `transformers`: its states behind the last norm, pooled in float64 and brought to length 1, on
tiny models of every family and on the default model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import tiny_models  # noqa: E402 (after the check that its libraries are there)
from pooled_play import POOLINGS, play_on  # noqa: E402
from test_smollm2_transformers import PROMPTS, build  # noqa: E402
from tiny_models import MODELS  # noqa: E402

from homeserve.text.tokenizer import Tokenizer  # noqa: E402

pytestmark = pytest.mark.timeout(400)

EXACT = 2e-6
"""Of the numbers of a vector of length 1, with float32 weights and KV rows."""
STEEP = 1e-5
"""`transformers` runs delta nets in chunks of 32-bit sums, and gemma4 does not scale scores."""
ROUNDED = 0.9999
"""Cosine on the CPU with the default model's 4-bit weights: activations are rounded in their products."""


def pooled(states: np.ndarray, pooling: str) -> np.ndarray:
    """What an embedding is, said once more."""
    exact = states.astype(np.float64)
    vector = {"mean": exact.mean(axis=0), "last": exact[-1], "cls": exact[0]}[pooling]
    return np.asarray(vector / np.linalg.norm(vector))


def tolerance(name: str) -> float:
    return STEEP if name.startswith(("qwen3_5", "qwen3_next", "gemma4")) else EXACT


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, list[int], np.ndarray]]:
    """`made(name)`: folder, ids, states."""
    folder = tmp_path_factory.mktemp("models")
    known: dict[str, tuple[Path, list[int], np.ndarray]] = {}

    def get(name: str) -> tuple[Path, list[int], np.ndarray]:
        if name not in known:
            model = tiny_models.make(name, folder / name)
            kind = getattr(transformers, MODELS[name].model)
            loaded = kind.from_pretrained(model.folder, dtype=torch.float32, attn_implementation="eager").eval()
            with torch.no_grad():
                told = loaded(torch.tensor([model.ids]), output_hidden_states=True)
            known[name] = model.folder, list(model.ids), told.hidden_states[-1][0].numpy()
        return known[name]

    return get


async def _embedded(path: str | Path, backend: str, prompts: list[list[int]], rows: int = 13) -> list[list[Any]]:
    """Of each prompt all poolings, in chunks."""
    async with play_on(Path(path), backend) as play:
        numbers = iter(range(1, 1000))
        return [[await play.embed(next(numbers), 0, ids, each, rows) for each in POOLINGS] for ids in prompts]


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("name", MODELS)
def test_embeddings_are_those_of_transformers(
    made: Callable[[str], Any], measured: Callable[[str], None], name: str, backend: str
) -> None:
    folder, ids, states = made(name)
    (found,) = asyncio.run(_embedded(folder, backend, [ids]))
    worst = max(
        float(np.abs(vector - pooled(states, each)).max()) for each, vector in zip(POOLINGS, found, strict=True)
    )
    measured(f"{name}, embeddings on {backend}: within {worst:.1e} of transformers")
    assert worst < tolerance(name)


@pytest.fixture(scope="module")
def smollm2_states(smollm2_reference: Any) -> tuple[list[list[int]], list[np.ndarray]]:
    tokenizer = Tokenizer.from_checkpoint(smollm2_reference.checkpoint)
    prompts = [list(tokenizer.encode(text)) for text in PROMPTS]
    model = build(smollm2_reference)
    with torch.no_grad():
        told = [model(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0].numpy() for ids in prompts]
    return prompts, told


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_embeddings_of_the_default_model_are_those_of_transformers(
    smollm2: str, smollm2_states: Any, measured: Callable[[str], None], backend: str
) -> None:
    prompts, states = smollm2_states
    found = asyncio.run(_embedded(smollm2, backend, prompts))
    wanted = [[pooled(each, pooling) for pooling in POOLINGS] for each in states]
    worst = max(
        float(np.abs(v - w).max()) for vs, ws in zip(found, wanted, strict=True) for v, w in zip(vs, ws, strict=True)
    )
    least = min(float(v @ w) for vs, ws in zip(found, wanted, strict=True) for v, w in zip(vs, ws, strict=True))
    measured(f"SmolLM2, embeddings on {backend}: within {worst:.1e} of transformers, cosine at least {least:.6f}")
    assert least > ROUNDED if backend == "cpu" else worst < EXACT
