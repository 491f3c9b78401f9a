"""Tiny checkpoints with known logits: every way to run them gives these, and every way gives the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

NAMES = ("llama", "llama3rope", "mistral")
BACKENDS = ("reference", "cpu")
TOLERANCE = 1e-4
"""Logits lie within +-1.3 and independent float32 implementations were seen 1e-6 apart."""

pytestmark = pytest.mark.parametrize("backend", BACKENDS)
Opener = Callable[..., Any]


def path_of(tiny: Path, name: str, form: str) -> Path:
    return tiny / (f"{name}.f32.gguf" if form == "gguf" else name)


def known(tiny: Path, name: str) -> tuple[list[int], np.ndarray]:
    with np.load(tiny / name / "ref.npz") as stored:
        return stored["ids"][0].tolist(), stored["logits"][0]


@pytest.mark.parametrize("form", ["gguf", "safetensors"])
@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_transformers(
    tiny: Path, open_model: Opener, measured: Callable[[str], None], name: str, form: str, backend: str
) -> None:
    ids, expected = known(tiny, name)
    got = open_model(path_of(tiny, name, form), backend).logits(ids)
    error = float(np.abs(got - expected).max())
    measured(f"{name} ({form}) on {backend}: logits within {error:.1e} of transformers")
    assert error < TOLERANCE
    assert np.array_equal(got.argmax(axis=1), expected.argmax(axis=1))


@pytest.mark.parametrize("name", NAMES)
def test_chunks_do_not_change_a_bit(tiny: Path, open_model: Opener, name: str, backend: str) -> None:
    """In one go, in chunks that cross pages, token by token."""
    ids, _ = known(tiny, name)
    ids = ids + ids[::-1]
    model = open_model(path_of(tiny, name, "gguf"), backend)
    assert model.backend.facts.batch_invariant
    whole = model.logits(ids, lane=0)
    for lane, chunk in ((1, 1), (2, 5), (3, 17), (4, 32)):
        assert np.array_equal(model.logits(ids, chunk=chunk, lane=lane), whole), f"chunks of {chunk}"


def test_neighbours_in_the_batch_do_not_change_a_bit(tiny: Path, open_model: Opener, backend: str) -> None:
    ids, _ = known(tiny, "llama3rope")
    model = open_model(path_of(tiny, "llama3rope", "gguf"), backend)
    alone = model.logits(ids, lane=0)
    model.run([(1, 0, ids[:10]), (2, 0, ids[5:20])])
    first = model.run([(3, 0, ids[:11]), (2, 15, ids[3:7]), (1, 10, ids[10:11])])[:11]
    rest = model.run([(1, 11, ids[2:3]), (3, 11, ids[11:])])[1:]
    assert np.array_equal(np.concatenate([first, rest]), alone)


def test_a_page_may_be_read_in_the_batch_that_fills_it(tiny: Path, open_model: Opener, backend: str) -> None:
    """A prefix hit on rows of the same batch: all rows of a layer are stored before any attention of it reads."""
    ids, _ = known(tiny, "llama")
    model = open_model(path_of(tiny, "llama", "gguf"), backend)
    whole = model.logits(ids, lane=2)
    model.tables[:, 1, 0] = model.tables[:, 0, 0]
    reader_first = model.run([(1, 16, ids[16:]), (0, 0, ids[:16])])
    assert np.array_equal(reader_first[: len(ids) - 16], whole[16:])


def test_only_the_wanted_rows_come_back(tiny: Path, open_model: Opener, backend: str) -> None:
    ids, _ = known(tiny, "llama")
    model = open_model(path_of(tiny, "llama", "gguf"), backend)
    whole = model.logits(ids)
    assert np.array_equal(model.run([(0, 0, ids)], [3, 23]), whole[[3, 23]])
    assert model.run([(0, 0, ids)], []).shape == (0, whole.shape[1])


@pytest.mark.parametrize(("kv_type", "tolerance"), [("f16", 1e-3), ("bf16", 1e-2), ("f8", 1e-1)])
def test_a_smaller_kv_type_costs_its_rounding(
    tiny: Path,
    open_model: Opener,
    measured: Callable[[str], None],
    kv_type: str,
    tolerance: float,
    backend: str,
) -> None:
    ids, expected = known(tiny, "llama3rope")
    got = open_model(path_of(tiny, "llama3rope", "gguf"), backend, kv_type=kv_type).logits(ids)
    error = float(np.abs(got - expected).max())
    measured(f"llama3rope with {kv_type} KV on {backend}: logits within {error:.1e} of transformers")
    assert 1e-6 < error < tolerance


def test_llama3_rope_scaling_matters(tiny: Path, open_model: Opener, backend: str) -> None:
    """Without the scaling these logits would be wrong: the fixture can tell."""
    ids, expected = known(tiny, "llama3rope")
    model = open_model(path_of(tiny, "llama3rope", "gguf"), backend)
    ropes = {op.rope for op in model.bound.ops if hasattr(op, "rope")}
    plain = [500000.0 ** (-2 * i / 16) for i in range(8)]
    assert len(ropes) == 1
    (rope,) = ropes
    ratios = np.array(plain) / np.array(rope.frequencies)
    assert ratios[0] == pytest.approx(1.0) and ratios[-1] == pytest.approx(8.0)
    unscaled = open_model(path_of(tiny, "llama", "gguf"), backend).logits(ids)
    assert np.abs(unscaled - expected).max() > 100 * TOLERANCE
