"""Made-up small models of every family: metadata, tensors by declared shapes, plans as text, and a way to run them.

`python tests/unit/families_rig.py` writes the golden plans of tests/data/golden anew: look at what changed before you
commit it.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from backends.base import (
    Batch,
    Buffer,
    Limits,
    Op,
    OpenOptions,
    ReceiveRows,
    Rope,
    SendRows,
    StatePool,
    TensorView,
    Weight,
)
from backends.quant import QuantType
from backends.reference.backend import ReferenceBackend
from homeserve.layouts.share import Share
from homeserve.models import registry
from homeserve.models.bind import Bound, bind
from homeserve.models.config import TOKEN_INPUT, ModelConfig, settle
from homeserve.models.family import Family
from homeserve.models.stages import Attention, Dense, Experts, GatedDeltaNet, Stage, TokenInput, UpdateKind

GOLDEN = Path(__file__).parent.parent / "data" / "golden"
HIDDEN, VOCAB, ROWS = 32, 40, 7
Tensors = dict[str, TensorView]

_CORE: dict[str, Any] = {
    "context_length": 128,
    "embedding_length": HIDDEN,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "vocab_size": VOCAB,
}
_HEADS = {"attention.key_length": 16, "attention.value_length": 16}
_DENSE = {"feed_forward_length": 48}
_EXPERTS = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 24}
_SHARED = _EXPERTS | {"expert_shared_feed_forward_length": 40}
_DELTA = {
    "ssm.conv_kernel": 4,
    "ssm.state_size": 8,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 4,
    "ssm.inner_size": 32,
    "full_attention_interval": 2,
    "rope.dimension_count": 8,
}
_WINDOW = {"attention.sliding_window": 3, "attention.sliding_window_pattern": 2}
_YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 8.0, "rope.scaling.original_context_length": 4096}
_GEMMA4 = {
    "attention.key_length_swa": 8,
    "attention.shared_kv_layers": 0,
    "final_logit_softcapping": 30.0,
    "rope.freq_base": 1e6,
}
METADATA: dict[str, dict[str, Any]] = {
    "gemma2": _HEADS | _DENSE | _WINDOW,
    "gemma3": _HEADS | _DENSE | _WINDOW | {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
    "gemma4": _HEADS | _DENSE | _WINDOW | _GEMMA4 | {"embedding_length_per_layer_input": 8},
    "gemma4-experts": _HEADS | _DENSE | _WINDOW | _GEMMA4 | _EXPERTS,
    "gpt-oss": _HEADS | _EXPERTS | _WINDOW | _YARN,
    "llama": _DENSE,
    "llama-experts": {"feed_forward_length": 24, "expert_count": 4, "expert_used_count": 2},
    "qwen2": _DENSE,
    "qwen2moe": _SHARED,
    "qwen3": _HEADS | _DENSE,
    "qwen3moe": _HEADS | _EXPERTS,
    "qwen35": _HEADS | _DENSE | _DELTA,
    "qwen35moe": _HEADS | _SHARED | _DELTA,
    "qwen3next": _HEADS | _SHARED | _DELTA,
}
"""What each family's files say beside the core, without the prefix: by architecture, or by a form of one."""
FORMS = {"gemma4-experts": "gemma4", "llama-experts": "llama"}
"""Forms of an architecture that differ in their stages -> the architecture."""
NAMES = (*registry.known(), *FORMS)


def family_of(name: str) -> Family:
    return registry.family(FORMS.get(name, name))


@dataclass(frozen=True)
class Stack:
    """A shape of a layer stack, and what else a checkpoint may do to it."""

    layers: int
    tied: bool = False
    fused: bool = False
    nextn: int = 0


STACKS = {
    "one": Stack(1),
    "pair, tied": Stack(2, tied=True),
    "four": Stack(4),
    "four, fused": Stack(4, fused=True, tied=True),
    "three, nextn": Stack(3, nextn=1),
}


def stacks_of(arch: str) -> list[str]:
    drafts = family_of(arch).nextn_facts is not None
    return [name for name, stack in STACKS.items() if drafts or not stack.nextn]


def metadata(arch: str, stack: Stack, **changes: Any) -> dict[str, Any]:
    """`__` in the names of changes stands for a dot."""
    keys = _CORE | METADATA[arch] | {"block_count": stack.layers + stack.nextn}
    if stack.nextn:
        keys["nextn_predict_layers"] = stack.nextn
    keys |= {name.replace("__", "."): value for name, value in changes.items()}
    blocks = keys["block_count"]
    known = FORMS.get(arch, arch)
    if known == "gemma4" and "attention__head_count_kv" not in changes:
        keys["attention.head_count_kv"] = [(2, 1)[layer % 2] for layer in range(blocks)]
    return {f"{known}.{name}": value for name, value in keys.items()}


@functools.cache
def made(arch: str, stack: Stack, rank_of: tuple[int, ...] = ()) -> tuple[Family, ModelConfig, Tensors]:
    """A family, a config and all tensors (not to be changed). `rank_of[layer]` seeds a layer's weights."""
    family = family_of(arch)
    config = family.config_from(metadata(arch, stack))
    return family, config, tensors_of(family, config, stack, rank_of)


# ----------------------------------------------------------------------------------------------------------- tensors


def tensors_of(family: Family, config: ModelConfig, stack: Stack, rank_of: tuple[int, ...]) -> Tensors:
    return {name: tensor(name, shape, rank_of) for name, shape in shapes_of(family, config, stack).items()}


def shapes_of(family: Family, config: ModelConfig, stack: Stack) -> dict[str, tuple[int, int]]:
    """Rows and columns of each tensor of a checkpoint."""
    shapes: dict[str, tuple[int, int]] = {
        "token_embd.weight": (config.vocab, config.hidden),
        "output_norm.weight": (1, config.hidden),
    }
    if not stack.tied:
        shapes["output.weight"] = (config.vocab, config.hidden)
    if config.token_input:
        columns = config.token_input * config.layers
        sizes = ((config.vocab, columns), (columns, config.hidden), (1, config.token_input))
        shapes |= dict(zip(TOKEN_INPUT, sizes, strict=True))
    if family.name == "gemma4":
        shapes["rope_freqs.weight"] = (1, config.rope.dims // 2)
        scales = ("layer_output_scale.weight", *(("ffn_down_exps.scale",) if config.experts else ()))
        optional = frozenset(f"blk.{layer}.{scale}" for layer in range(config.layers) for scale in scales)
        config = replace(config, optional=optional)
    for layer in range(config.layers + config.nextn):
        names = family.tensor_names(config, layer)
        declared = family.stage_facts(config, layer)
        roles = dict(shape for stage in declared for shape in _roles(stage, config, stack))
        if layer >= config.layers:
            roles |= {
                "nextn.eh_proj": (config.hidden, 2 * config.hidden),
                "nextn.enorm": (1, config.hidden),
                "nextn.hnorm": (1, config.hidden),
            }
        if "ssm_in" in roles or (family.name == "qwen3next" and "ssm_beta" in roles):
            roles["ssm_ba"] = (roles.pop("ssm_beta")[0] + roles.pop("ssm_alpha")[0], config.hidden)
        shapes |= {names[role]: shape for role, shape in roles.items()}
    return shapes


def tensor(name: str, shape: tuple[int, int], rank_of: tuple[int, ...]) -> TensorView:
    """Weights seeded by name and rank, and scaled so that a sum taken twice shows: no two ranks hold the same."""
    layer = int(name.split(".")[1]) if name.startswith("blk.") else len(rank_of)
    rank = rank_of[layer] if layer < len(rank_of) else 0
    values = np.random.default_rng(crc32(name.encode()) + rank).standard_normal(shape)
    if name.endswith("ssm_a"):
        values = -np.exp(0.3 * values)
    elif name == "rope_freqs.weight":
        values = np.where(np.arange(shape[1]) < shape[1] // 4, 1.0, 1e30)[None]
    elif "norm" in name or "scale" in name:
        values = 1 + 0.1 * values
    else:
        values = 0.3 * values
    packed = values.astype(np.float32)
    return TensorView(name, QuantType.F32, *shape, np.frombuffer(packed.tobytes(), np.uint8))


def _roles(stage: Stage, config: ModelConfig, stack: Stack) -> Iterator[tuple[str, tuple[int, int]]]:
    """Role and shape of each tensor that a declared stage needs: from the declarations, not the builder."""
    mixer = isinstance(stage, Attention | GatedDeltaNet)
    which = "attn" if mixer else "ffn"
    if stage.update.kind is UpdateKind.JOIN:
        which = "ffn_experts"
        yield "ffn_joined_norm", (1, config.hidden)
    if stage.update.scales_residual:
        yield "layer_output_scale", (1, 1)
    if isinstance(stage, TokenInput):
        yield from (("inp_gate", (stage.width, config.hidden)), ("proj", (config.hidden, stage.width)))
        yield "token_post_norm", (1, config.hidden)
        return
    yield f"{which}_norm", (1, config.hidden)
    if stage.update.post_norm_eps:
        yield f"{which}_post_norm", (1, config.hidden)
    match stage:
        case Attention():
            yield from _attention_roles(stage, config.hidden, stack)
        case GatedDeltaNet():
            values = stage.value_heads * stage.value_dim
            yield "attn_qkv", (stage.channels, config.hidden)
            yield "attn_gate", (values, config.hidden)
            yield "ssm_beta", (stage.value_heads, config.hidden)
            yield "ssm_alpha", (stage.value_heads, config.hidden)
            yield "ssm_conv1d", (stage.channels, stage.kernel)
            yield "ssm_dt", (1, stage.value_heads)
            yield "ssm_a", (1, stage.value_heads)
            yield "ssm_norm", (1, stage.value_dim)
            yield "ssm_out", (config.hidden, values)
        case Dense():
            yield from (("ffn_gate", (stage.width, config.hidden)), ("ffn_up", (stage.width, config.hidden)))
            yield "ffn_down", (config.hidden, stage.width)
        case Experts():
            yield from _expert_roles(stage, config.hidden, stack)


def _attention_roles(stage: Attention, hidden: int, stack: Stack) -> Iterator[tuple[str, tuple[int, int]]]:
    q, kv = stage.heads * stage.q_step, stage.kv_heads * stage.head_dim
    projections = [("attn_q", q, stage.q_bias), ("attn_k", kv, stage.k_bias), ("attn_v", kv, stage.v_bias)]
    if stage.kv_source is not None:
        projections = projections[:1]
    if stack.fused:
        yield "attn_qkv", (q + 2 * kv, hidden)
    for role, width, biased in projections:
        if not stack.fused and not (role == "attn_v" and stage.v_from_k):
            yield role, (width, hidden)
        if biased:
            yield f"{role}.bias", (1, width)
    yield "attn_output", (hidden, stage.heads * stage.head_dim)
    if stage.output_bias:
        yield "attn_output.bias", (1, hidden)
    if stage.q_norm:
        yield "attn_q_norm", (1, stage.head_dim)
    if stage.k_norm and stage.kv_source is None:
        yield "attn_k_norm", (1, stage.head_dim)
    if stage.sinks:
        yield "attn_sinks", (1, stage.heads)


def _expert_roles(stage: Experts, hidden: int, stack: Stack) -> Iterator[tuple[str, tuple[int, int]]]:
    yield "ffn_gate_inp", (stage.count, hidden)
    if stage.router_eps:
        yield "ffn_gate_inp.scale", (1, hidden)
    if stage.gains:
        yield "ffn_down_exps.scale", (1, stage.count)
    if stage.router_bias:
        yield "ffn_gate_inp.bias", (1, stage.count)
    matrices = [("ffn_gate_exps", stage.width, hidden), ("ffn_up_exps", stage.width, hidden)]
    if stack.fused:
        matrices = [("ffn_gate_up_exps", 2 * stage.width, hidden)]
    for role, height, cols in (*matrices, ("ffn_down_exps", hidden, stage.width)):
        yield role, (stage.count * height, cols)
        if stage.down_bias:
            yield f"{role}.bias", (stage.count, height)
    if stage.shared is not None:
        for role in ("ffn_gate_shexp", "ffn_up_shexp"):
            yield role, (stage.shared.width, hidden)
        yield "ffn_down_shexp", (hidden, stage.shared.width)
        if stage.shared.gated:
            yield "ffn_gate_inp_shexp", (1, hidden)


def factors(tensors: Mapping[str, TensorView]) -> tuple[float, ...]:
    """Of the checkpoint's rope tensor."""
    return tuple(np.frombuffer(tensors["rope_freqs.weight"].data.tobytes(), np.float32).tolist())


# ------------------------------------------------------------------------------------------------------------- plans


def cuts(layers: int, ranks: int) -> list[list[range]]:
    """Every way to give `layers` to `ranks` in a pipeline."""
    inner = combinations(range(1, layers), ranks - 1)
    return [[range(a, b) for a, b in zip((0, *at), (*at, layers), strict=True)] for at in inner]


def share_of(at: range, layers: int) -> Share | None:
    """Of a rank in the pipeline layout that has the layers `at`, with one before it and one after it where there are
    more layers."""
    rank = int(at.start > 0)
    ranks = rank + 1 + int(at.stop < layers)
    return Share("pipeline", rank, ranks, at) if ranks > 1 else None


def bind_part(family: Family, config: ModelConfig, tensors: Mapping[str, TensorView], at: range | None = None) -> Bound:
    """`bind` of the layers `at`, or of all."""
    return bind(family, config, tensors, share_of(at, config.layers) if at is not None else None)


def within(ops: Sequence[Op]) -> tuple[Op, ...]:
    """The ops between the exchanges at the ends of a rank: a test hands buffers over itself."""
    return tuple(op for op in ops if not isinstance(op, SendRows | ReceiveRows))


def ranges(layers: int) -> list[range]:
    return [range(first, stop) for first in range(layers) for stop in range(first + 1, layers + 1)]


def shown(value: object) -> str:
    """A value with every leaf in it, fields that have their default left out."""
    match value:
        case Buffer(name=name, width=width):
            return f"{name}:{width}"
        case Weight(name=name, rows=rows, cols=cols):
            return f"{name}[{rows},{cols}]"
        case Rope():
            turns = " ".join(f"{theta:.6g}" for theta in value.frequencies)
            return f"rope({'pairs' if value.interleaved else 'halves'} {turns} x{value.magnitude:.8g})"
        case float():
            return f"{value:.8g}"
        case tuple():
            return "(" + ", ".join(map(shown, value)) + ")"
    if is_dataclass(value) and not isinstance(value, type):
        given = [(field.name, getattr(value, field.name), field.default) for field in fields(value)]
        return f"{type(value).__name__}({', '.join(f'{n}={shown(v)}' for n, v, default in given if v != default)})"
    return str(value)


def plan(bound: Bound) -> list[str]:
    """One line for each op, and one for what is around them."""
    ends = {"kv": bound.kv_layers, "states": bound.state_layers, "takes": bound.takes, "gives": bound.gives}
    around = " ".join(f"{name}={shown(value)}" for name, value in ends.items())
    return [*map(shown, bound.ops), around]


def golden_of(arch: str) -> dict[str, Any]:
    """The plans of every range of layers of every stack, with equal lines kept once."""
    stacks: dict[str, Any] = {}
    for name in stacks_of(arch):
        family, config, tensors = made(arch, STACKS[name])
        plans = {f"{at.start}:{at.stop}": plan(bind_part(family, config, tensors, at)) for at in ranges(config.layers)}
        lines = list(dict.fromkeys(line for each in plans.values() for line in each))
        index = {line: at for at, line in enumerate(lines)}
        stacks[name] = {
            "lines": lines,
            "plans": {at: " ".join(str(index[line]) for line in each) for at, each in plans.items()},
        }
    return stacks


@functools.cache
def read_golden(arch: str) -> dict[str, dict[str, list[str]]]:
    """stack -> range -> lines"""
    stored = json.loads((GOLDEN / f"{arch}.json").read_text())
    return {
        name: {at: [stack["lines"][int(index)] for index in indices.split()] for at, indices in stack["plans"].items()}
        for name, stack in stored.items()
    }


def first_difference(said: Sequence[str], found: Sequence[str]) -> str:
    """Empty where two plans are equal, else the first line that differs, both ways."""
    for index, (old, new) in enumerate(zip(said, found, strict=False)):
        if old != new:
            return f"op {index}\n  golden {old}\n  found  {new}"
    return "" if len(said) == len(found) else f"golden has {len(said)} lines, found {len(found)}"


# ----------------------------------------------------------------------------------------------------------- running


def batch(rows: int = ROWS, groups: int = 1) -> Batch:
    """One sequence from position 0."""
    positions = np.arange(rows, dtype=np.int32)
    return Batch(
        tokens=((positions * 7 + 3) % VOCAB).astype(np.int32),
        positions=positions,
        slots=np.tile(positions, (groups, 1)),
        lanes=np.zeros(rows, np.int32),
        tables=np.zeros((groups, 1, 1), np.int32),
        logit_rows=positions.copy(),
        states=np.zeros(1, np.int32),
    )


def run(
    bound: Bound, *, ops: Sequence[Op] | None = None, given: Mapping[str, np.ndarray] | None = None
) -> dict[str, Any]:
    """All buffers after a batch on the oracle."""
    pools = bound.kv_pool(16, QuantType.F32), StatePool(bound.state_layers, 1 if bound.state_layers else 0)
    limits = Limits(rows=16, logit_rows=16, lanes=1, lane_pages=1)
    backend = ReferenceBackend(OpenOptions())
    program = backend.bind(within(ops or bound.ops), bound.weights, pools[0], limits, lambda *_: None, pools[1])
    return program.run_from(batch(groups=1 + len(bound.windows)), given or {})


def run_pipeline(bounds: Sequence[Bound], doubled: int = -1) -> np.ndarray:
    """Logits of ranks in a row; the update that rank `doubled` hands on is added once more before the handoff."""
    given: dict[str, np.ndarray] = {}
    for rank, bound in enumerate(bounds):
        buffers = run(bound, given=given)
        given = {buffer.name: buffers[buffer.name] for buffer in bound.gives}
        if rank == doubled:
            given["x"] = given["x"] + given["update"]
    return np.asarray(buffers["logits"])


def settled(family: Family, config: ModelConfig, tensors: Tensors) -> ModelConfig:
    return settle(config, tensors.keys())


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for arch in NAMES:
        text = json.dumps(golden_of(arch), indent=0, ensure_ascii=False)
        (GOLDEN / f"{arch}.json").write_text(text + "\n")
        sys.stdout.write(f"{arch}: {len(text)} bytes\n")
