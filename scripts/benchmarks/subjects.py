"""What is measured on: the models of the table, where their files come from, and the goals that are set for each.

A goal is a ratio in the table's sense: above 1 homeserve is better, so "at most half of their time" reads 2.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from backends.base import TensorView
from homeserve import settings
from homeserve.checkpoint.names import default_model_path

SMOL, GEMMA, LARGE, FAMILY, DRAFTS = "smollm2", "gemma", "1.5b", "family", "drafts"
MOST = {"sum8k": 15.0, "flip": 20.0, "step": 0.3, "step64": 3.0}
"""Goals that are no ratio: the most that the result itself may be, in its unit."""
LEAST = {"flip_refill": 70.0, "flip_move": 60.0}
"""... and the least that it may be in percent of the machine's copying."""
FAST_TYPES = ("Q8_0", "Q4_0", "Q4_1")
"""Types for which three times the peer's prefill is asked; for the others one and a half times."""
DRAFTING_MODEL = "qwen35-nextn.Q4_K_M"
DRAFTING_GOALS = {"draft_2": 1.6, "draft_3": 1.6, "draft_new": 0.95}
"""Set for that model alone: one stream with drafting, over one without."""
DEMANDS: Mapping[str, Mapping[str, float]] = {
    "tg@0": {SMOL: 3.0, GEMMA: 1.7, LARGE: 1.7, FAMILY: 1.5},
    "tg@2048": {SMOL: 5.0, GEMMA: 1.7, LARGE: 1.7, FAMILY: 1.5},
    "conc8": {SMOL: 3.0, GEMMA: 3.0, LARGE: 3.0, FAMILY: 1.5},
    "ttft512": {SMOL: 2.0, GEMMA: 2.0, LARGE: 2.0},
    "start_token": {SMOL: 1.0, GEMMA: 1.0, LARGE: 1.0},
    "rss": {SMOL: 1.25, GEMMA: 1.25, LARGE: 1.25},
}


@dataclass(frozen=True)
class Subject:
    """A model of the table. `size`: 0 with --quick too, 1 with --full, 2 by name or for a test that is of it."""

    name: str
    kind: str
    quant: str
    size: int

    def file(self) -> Path:
        """Its file, made or fetched where it is not there yet. Raises RuntimeError."""
        if self.kind == SMOL:
            return Path(default_model_path())
        target = folder() / f"{self.name}.gguf"
        if not target.exists():
            maker = Path(__file__).resolve().parents[1] / "make_model"
            if subprocess.run([str(maker), self.name], check=False).returncode:
                raise RuntimeError(f"{target.name} could not be made: {maker} {self.name}")
        return target


def folder() -> Path:
    """Of models to measure with: in the cache folder that a server without flags uses."""
    return Path(settings.default_cache_dir(settings.environment())) / "bench"


SUBJECTS = (
    Subject("SmolLM2-135M-Instruct.Q4_1", SMOL, "Q4_1", 0),
    Subject("gemma-3-270m.Q4_K_M", GEMMA, "Q4_K_M", 0),
    Subject("llama-1.5b.Q4_K_M", LARGE, "Q4_K_M", 0),
    *(Subject(f"llama-1.5b.{quant}", LARGE, quant, 1) for quant in ("Q8_0", "Q6_K", "Q4_0", "Q2_K", "MXFP4")),
    Subject("qwen35.Q4_K_M", FAMILY, "Q4_K_M", 1),
    Subject("qwen35-nextn.Q4_K_M", DRAFTS, "Q4_K_M", 2),
    Subject("qwen35-nextn-small.Q4_K_M", DRAFTS, "Q4_K_M", 2),
    Subject("qwen35moe.Q4_K_M", FAMILY, "Q4_K_M", 1),
    Subject("gpt-oss.MXFP4", FAMILY, "MXFP4", 1),
)


def goal(model: str, result: str) -> float | None:
    """The ratio that is asked for, or None."""
    if result == "tp2_vs_1x2":
        return 0.9
    if result in DRAFTING_GOALS and model.startswith(DRAFTING_MODEL):
        return DRAFTING_GOALS[result]
    subject = next((each for each in SUBJECTS if each.name == model), None)
    if subject is None:
        return None
    if result in ("pp512", "pp2048"):
        return 3.0 if subject.quant in FAST_TYPES and subject.kind != FAMILY else 1.5
    return DEMANDS.get(result, {}).get(subject.kind)


@dataclass(frozen=True)
class Work:
    """What one token costs at least: bytes of weights read when one is decoded alone; operations (two for each weight)
    in the layers' matrices, in which a prompt's tokens are all computed."""

    bytes_per_token: int
    ops_per_token: int


def work(tensors: Mapping[str, TensorView], metadata: Mapping[str, object]) -> Work:
    """From the file's tensors. The embeddings are read only where they are the head too; of experts, those used; of
    blocks that only draft, nothing."""
    arch = str(metadata["general.architecture"])
    count, used = metadata.get(f"{arch}.expert_count", 1), metadata.get(f"{arch}.expert_used_count", 1)
    assert isinstance(count, int) and isinstance(used, int)
    weights, ops = 0.0, 0.0
    blocks, drafting = (metadata.get(f"{arch}.{key}", 0) for key in ("block_count", "nextn_predict_layers"))
    assert isinstance(blocks, int) and isinstance(drafting, int)
    beside = tuple(f"blk.{layer}." for layer in range(blocks - drafting, blocks))
    for name, tensor in tensors.items():
        if name.startswith(beside):
            continue
        share = used / count if "_exps." in name else 1.0
        if name != "token_embd.weight" or "output.weight" not in tensors:
            weights += share * tensor.nbytes
        if name.startswith("blk.") and tensor.rows > 1 and not name.endswith(".bias"):
            ops += share * 2 * tensor.rows * tensor.cols
    return Work(round(weights), round(ops))
