"""The shapes of the synthetic models: metadata and tensors of each, and which type each tensor has.

Widths, head counts and periods are those of models that people run; layers and experts are cut so that a file stays in
the hundreds of MB and one measurement in the minutes:

llama-1.5b   28 layers of 1536/8960, 12 heads on 2, head 128 (the 1.5B of Qwen 2.5); tied embeddings
qwen35       24 layers of 1024/3584, delta nets of 16 heads of 128, every fourth layer attention: 8 heads on 2, 256
qwen35-nextn 32 layers of 2048/6144, likewise, and a drafting block behind them: more than 1 GB, to time drafting with
qwen35-nextn-small   4 layers of 256/512 with a drafting block, for tests of the measuring itself
qwen35moe    4 layers of 2048, 8 used of 32 experts of 512, a shared one, delta nets of 16 key, 32 value heads
gpt-oss      2 layers of 2880, 12 experts of 2880 of which 4 are used, 64 heads on 8, head 64, window 128, sinks

The types of a mix are those that the usual converters choose: `Q4_K_M` gives half of the layers Q6_K for `attn_v` and
`ffn_down`, `Q2_K` has Q3_K for `attn_output` and `ffn_down`, and the head is Q6_K where blocks have 4 bits or fewer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from backends.quant import QuantType

VOCAB = 49152
"""Tokens of the default model's tokenizer, which the synthetic models share."""

Value = int | float | list[int]


@dataclass(frozen=True)
class Tensor:
    """A tensor of `rows` x `cols`, `experts` times. `spread`: the standard deviation of its values around `mean`."""

    name: str
    rows: int
    cols: int
    experts: int = 0
    spread: float = 0.0
    mean: float = 0.0
    vector: bool = False
    """Kept as F32, and one-dimensional where it has one row."""


@dataclass(frozen=True)
class Shape:
    """One architecture: its metadata (keys without the architecture's prefix) and its tensors in the file's order."""

    arch: str
    metadata: Mapping[str, Value]
    tensors: tuple[Tensor, ...]


def _norm(name: str, width: int) -> Tensor:
    return Tensor(f"{name}.weight", 1, width, mean=1.0, spread=0.05, vector=True)


def _bias(name: str, width: int, experts: int = 0) -> Tensor:
    return Tensor(f"{name}.bias", experts or 1, width, spread=0.02, vector=True)


def _linear(name: str, rows: int, cols: int, experts: int = 0) -> Tensor:
    """Values so small that what goes through keeps its size."""
    return Tensor(f"{name}.weight", rows, cols, experts, spread=cols**-0.5)


def _outside(width: int, tied: bool) -> Iterator[Tensor]:
    yield Tensor("token_embd.weight", VOCAB, width, spread=0.5)
    yield _norm("output_norm", width)
    if not tied:
        yield _linear("output", VOCAB, width)


def _attention(block: str, width: int, heads: int, kv: int, dim: int, gated: bool = False) -> Iterator[Tensor]:
    yield _norm(f"{block}.attn_norm", width)
    yield _linear(f"{block}.attn_q", heads * dim * (2 if gated else 1), width)
    yield _linear(f"{block}.attn_k", kv * dim, width)
    yield _linear(f"{block}.attn_v", kv * dim, width)
    yield _linear(f"{block}.attn_output", width, heads * dim)


def _feed_forward(block: str, width: int, inner: int, suffix: str = "", experts: int = 0) -> Iterator[Tensor]:
    for part in ("gate", "up"):
        yield _linear(f"{block}.ffn_{part}{suffix}", inner, width, experts)
    yield _linear(f"{block}.ffn_down{suffix}", width, inner, experts)


def _delta_net(block: str, width: int, key_heads: int, value_heads: int, dim: int) -> Iterator[Tensor]:
    channels = (2 * key_heads + value_heads) * dim
    yield _norm(f"{block}.attn_norm", width)
    yield _linear(f"{block}.attn_qkv", channels, width)
    yield _linear(f"{block}.attn_gate", value_heads * dim, width)
    yield _linear(f"{block}.ssm_alpha", value_heads, width)
    yield _linear(f"{block}.ssm_beta", value_heads, width)
    yield Tensor(f"{block}.ssm_conv1d.weight", channels, 4, spread=0.3, vector=True)
    yield Tensor(f"{block}.ssm_a", 1, value_heads, mean=-1.0, spread=0.1, vector=True)
    yield Tensor(f"{block}.ssm_dt.bias", 1, value_heads, spread=0.5, vector=True)
    yield _norm(f"{block}.ssm_norm", dim)
    yield _linear(f"{block}.ssm_out", width, value_heads * dim)


def llama() -> Shape:
    width, inner, layers = 1536, 8960, 28
    tensors = [*_outside(width, tied=True)]
    for layer in range(layers):
        block = f"blk.{layer}"
        tensors += _attention(block, width, 12, 2, 128)
        tensors.append(_norm(f"{block}.ffn_norm", width))
        tensors += _feed_forward(block, width, inner)
    metadata: dict[str, Value] = {
        **_core(layers, width, 12, 2, 128, rope=128, base=1e6),
        "feed_forward_length": inner,
    }
    return Shape("llama", metadata, tuple(tensors))


def qwen35(width: int = 1024, inner: int = 3584, layers: int = 24, drafts: bool = False) -> Shape:
    """`drafts`: with a block behind the layers that foresees tokens; `block_count` has it too."""
    metadata: dict[str, Value] = {
        **_core(layers + drafts, width, 8, 2, 256, rope=64, base=1e7),
        **_hybrid(16, 16, 128),
        "feed_forward_length": inner,
    }
    tensors = [*_outside(width, tied=True)]
    for layer in range(layers):
        block = f"blk.{layer}"
        tensors += _mixer(block, layer, width, 8, 16)
        tensors.append(_norm(f"{block}.post_attention_norm", width))
        tensors += _feed_forward(block, width, inner)
    if drafts:
        metadata["nextn_predict_layers"] = 1
        tensors += _drafting(f"blk.{layers}", width, inner, 8)
    return Shape("qwen35", metadata, tuple(tensors))


def _drafting(block: str, width: int, inner: int, heads: int) -> Iterator[Tensor]:
    """A token's embedding and the hidden state before it, side by side, into a layer of attention."""
    yield _linear(f"{block}.nextn.eh_proj", width, 2 * width)
    for part in ("enorm", "hnorm", "shared_head_norm"):
        yield _norm(f"{block}.nextn.{part}", width)
    yield from _gated_attention(block, width, heads)
    yield _norm(f"{block}.post_attention_norm", width)
    yield from _feed_forward(block, width, inner)


def qwen35moe() -> Shape:
    width, inner, layers, experts = 2048, 512, 4, 32
    metadata: dict[str, Value] = {
        **_core(layers, width, 16, 2, 256, rope=64, base=1e7),
        **_hybrid(16, 32, 128),
        "expert_count": experts,
        "expert_used_count": 8,
        "expert_feed_forward_length": inner,
        "expert_shared_feed_forward_length": inner,
    }
    tensors = [*_outside(width, tied=True)]
    for layer in range(layers):
        block = f"blk.{layer}"
        tensors += _mixer(block, layer, width, 16, 32)
        tensors.append(_norm(f"{block}.post_attention_norm", width))
        tensors.append(Tensor(f"{block}.ffn_gate_inp.weight", experts, width, spread=width**-0.5, vector=True))
        tensors += _feed_forward(block, width, inner, "_exps", experts)
        tensors += _feed_forward(block, width, inner, "_shexp")
        tensors.append(Tensor(f"{block}.ffn_gate_inp_shexp.weight", 1, width, spread=width**-0.5, vector=True))
    return Shape("qwen35moe", metadata, tuple(tensors))


def gpt_oss() -> Shape:
    width, layers, experts, heads, kv, dim = 2880, 2, 12, 64, 8, 64
    metadata: dict[str, Value] = {
        **_core(layers, width, heads, kv, dim, rope=64, base=150000.0),
        "attention.sliding_window": 128,
        "expert_count": experts,
        "expert_used_count": 4,
        "expert_feed_forward_length": width,
        "feed_forward_length": width,
    }
    tensors = [*_outside(width, tied=False)]
    for layer in range(layers):
        block = f"blk.{layer}"
        tensors += _attention(block, width, heads, kv, dim)
        for part, rows in (("q", heads * dim), ("k", kv * dim), ("v", kv * dim), ("output", width)):
            tensors.append(_bias(f"{block}.attn_{part}", rows))
        tensors.append(Tensor(f"{block}.attn_sinks.weight", 1, heads, spread=0.5, vector=True))
        tensors.append(_norm(f"{block}.post_attention_norm", width))
        tensors.append(Tensor(f"{block}.ffn_gate_inp.weight", experts, width, spread=width**-0.5, vector=True))
        tensors.append(_bias(f"{block}.ffn_gate_inp", experts))
        tensors += _feed_forward(block, width, width, "_exps", experts)
        tensors += [_bias(f"{block}.ffn_{part}_exps", width, experts) for part in ("gate", "up", "down")]
    return Shape("gpt-oss", metadata, tuple(tensors))


def _core(layers: int, width: int, heads: int, kv: int, dim: int, rope: int, base: float) -> dict[str, Value]:
    return {
        "block_count": layers,
        "context_length": 32768,
        "embedding_length": width,
        "vocab_size": VOCAB,
        "attention.head_count": heads,
        "attention.head_count_kv": kv,
        "attention.key_length": dim,
        "attention.value_length": dim,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.dimension_count": rope,
        "rope.freq_base": base,
    }


def _hybrid(key_heads: int, value_heads: int, dim: int) -> dict[str, Value]:
    return {
        "ssm.conv_kernel": 4,
        "ssm.state_size": dim,
        "ssm.group_count": key_heads,
        "ssm.time_step_rank": value_heads,
        "ssm.inner_size": value_heads * dim,
        "full_attention_interval": 4,
        "rope.dimension_sections": [11, 11, 10, 0],
    }


def _mixer(block: str, layer: int, width: int, heads: int, value_heads: int) -> Iterator[Tensor]:
    if layer % 4 != 3:
        yield from _delta_net(block, width, 16, value_heads, 128)
        return
    yield from _gated_attention(block, width, heads)


def _gated_attention(block: str, width: int, heads: int) -> Iterator[Tensor]:
    yield from _attention(block, width, heads, 2, 256, gated=True)
    yield _norm(f"{block}.attn_q_norm", 256)
    yield _norm(f"{block}.attn_k_norm", 256)


# ------------------------------------------------------------------------------------------------------------- types

Mix = Callable[[Tensor, int, int], QuantType]
"""Tensor, its layer (-1: outside) and the number of layers -> type."""


def _outer(tensor: Tensor) -> bool:
    return tensor.name in ("token_embd.weight", "output.weight")


def _more_bits(layer: int, layers: int) -> bool:
    """The layers at both ends, and every third between."""
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2


def _all(kind: QuantType, outer: QuantType) -> Mix:
    return lambda tensor, layer, layers: outer if _outer(tensor) else kind


def _q4_k_m(tensor: Tensor, layer: int, layers: int) -> QuantType:
    wide = _outer(tensor) or (("attn_v" in tensor.name or "ffn_down" in tensor.name) and _more_bits(layer, layers))
    return QuantType.Q6_K if wide else QuantType.Q4_K


def _q2_k(tensor: Tensor, layer: int, layers: int) -> QuantType:
    if _outer(tensor):
        return QuantType.Q6_K
    if "attn_v" in tensor.name:
        return QuantType.Q4_K
    return QuantType.Q3_K if "attn_output" in tensor.name or "ffn_down" in tensor.name else QuantType.Q2_K


def _mxfp4_experts(tensor: Tensor, layer: int, layers: int) -> QuantType:
    return QuantType.MXFP4 if tensor.experts else QuantType.Q8_0


MIXES: dict[str, tuple[Mix, int]] = {
    "Q4_K_M": (_q4_k_m, 15),
    "Q8_0": (_all(QuantType.Q8_0, QuantType.Q8_0), 7),
    "Q6_K": (_all(QuantType.Q6_K, QuantType.Q6_K), 18),
    "Q4_0": (_all(QuantType.Q4_0, QuantType.Q6_K), 2),
    "Q2_K": (_q2_k, 10),
    "MXFP4": (_all(QuantType.MXFP4, QuantType.Q8_0), 38),
    "MXFP4_MOE": (_mxfp4_experts, 38),
}
"""Name -> which type each tensor has, and the number that GGUF gives the mix (`general.file_type`)."""

MODELS: dict[str, tuple[Callable[[], Shape], str]] = {
    **{f"llama-1.5b.{mix}": (llama, mix) for mix in ("Q4_K_M", "Q8_0", "Q6_K", "Q4_0", "Q2_K", "MXFP4")},
    "qwen35.Q4_K_M": (qwen35, "Q4_K_M"),
    "qwen35-nextn.Q4_K_M": (partial(qwen35, 2048, 6144, 32, drafts=True), "Q4_K_M"),
    "qwen35-nextn-small.Q4_K_M": (partial(qwen35, 256, 512, 4, drafts=True), "Q4_K_M"),
    "qwen35moe.Q4_K_M": (qwen35moe, "Q4_K_M"),
    "gpt-oss.MXFP4": (gpt_oss, "MXFP4_MOE"),
}
