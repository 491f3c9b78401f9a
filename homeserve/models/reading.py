"""What the families' metadata has in common: each function reads one group of keys into facts, or refuses by name."""

from __future__ import annotations

import math

from homeserve.errors import UnsupportedModel
from homeserve.models.config import DeltaFacts, ExpertFacts, ModelConfig
from homeserve.models.keys import CONTEXT_MAX, LAYERS_MAX, VOCAB_MAX, Keys
from homeserve.models.stages import (
    LinearScaling,
    Llama3Scaling,
    RopeFacts,
    RoutingFunc,
    Scaling,
    YarnScaling,
)

GATING = {1: RoutingFunc.SOFTMAX, 2: RoutingFunc.SIGMOID, 3: RoutingFunc.CHOSEN}
"""`expert_gating_func`."""


def read_core(
    keys: Keys, *, interleaved: bool, experts: ExpertFacts | None = None, drafts: bool = False
) -> ModelConfig:
    """The keys that every architecture has. `interleaved`: how its GGUF files pair dims for rope. With `drafts` the
    family declares the NEXTN blocks that `block_count` includes; without, a file that has some is refused."""
    blocks = keys.integer("block_count", high=LAYERS_MAX)
    nextn = keys.integer("nextn_predict_layers", 0, low=0, high=blocks - 1)
    hidden = keys.integer("embedding_length")
    _refuse_what_is_missing(keys, experts, nextn if not drafts else 0)
    heads = keys.per_layer("attention.head_count", blocks)
    kv_heads = keys.per_layer("attention.head_count_kv", blocks, heads)
    for query, kv in zip(heads, kv_heads, strict=True):
        if query % kv:
            raise keys.error("attention.head_count_kv", f"{query} query heads cannot share {kv} kv heads evenly")
    head_dim = _head_dim(keys, hidden, heads[0])
    routed = (experts.columns,) * blocks if experts and not experts.beside else None
    return ModelConfig(
        arch=keys.arch,
        layers=blocks - nextn,
        hidden=hidden,
        vocab=read_vocab(keys),
        context=keys.integer("context_length", high=CONTEXT_MAX),
        layer_heads=heads,
        layer_kv_heads=kv_heads,
        layer_ffn=routed or keys.per_layer("feed_forward_length", blocks),
        head_dim=head_dim,
        norm_eps=keys.number("attention.layer_norm_rms_epsilon", high=1.0),
        rope=read_rope(keys, head_dim, interleaved=interleaved),
        attention_scale=keys.number("attention.scale", 0.0, low=-1e-9) or 1.0 / math.sqrt(head_dim),
        experts=experts,
        nextn=nextn,
    )


def _head_dim(keys: Keys, hidden: int, heads: int) -> int:
    if not keys.has("attention.key_length") and hidden % heads:
        raise keys.error("attention.key_length", f"is missing, and {hidden} does not divide into {heads} heads")
    head_dim = keys.integer("attention.key_length", max(1, hidden // heads))
    value_dim = keys.integer("attention.value_length", head_dim)
    if value_dim != head_dim:
        field = keys.key("attention.value_length")
        raise UnsupportedModel(
            f"{field} is {value_dim} and key_length {head_dim}: they must be equal for {keys.arch}", field=field
        )
    return head_dim


def _refuse_what_is_missing(keys: Keys, experts: ExpertFacts | None, nextn: int) -> None:
    count = keys.integer("expert_count", 0, low=0)
    if count and experts is None:
        field = keys.key("expert_count")
        raise UnsupportedModel(
            f"{field} is {count}: mixture-of-experts files of architecture {keys.arch} cannot be run",
            field=field,
            fix="use a dense model",
        )
    if not keys.flag("attention.causal", True):
        field = keys.key("attention.causal")
        raise UnsupportedModel(f"{field} is false: models that see later tokens cannot generate", field=field)
    if nextn:
        field = keys.key("nextn_predict_layers")
        raise UnsupportedModel(f"{field} is {nextn}: drafting blocks of {keys.arch} are not known", field=field)


def read_pattern(keys: Keys, blocks: int, period: int) -> tuple[bool, ...]:
    """Which layers have the window: the file's array of booleans, or a number n (its own or `period`): every n-th layer
    sees everything. 0 and 1: no layer has a window."""
    found = keys.flags("attention.sliding_window_pattern", blocks)
    if found is not None:
        return found
    every = keys.integer("attention.sliding_window_pattern", period, low=0)
    return tuple(bool(every) and layer % every < every - 1 for layer in range(blocks))


def read_recurrent(keys: Keys, layers: int, nextn: int) -> tuple[bool, ...]:
    """Which layers are recurrent: the file's array, or all but every n-th; drafting blocks never are."""
    found = keys.flags("attention.recurrent_layers", layers + nextn)
    if found is None:
        every = keys.integer("full_attention_interval", 4)
        found = tuple((layer + 1) % every != 0 for layer in range(layers + nextn))
    return (*found[:layers], *(False,) * nextn)


def read_delta(keys: Keys, *, tiled: bool) -> DeltaFacts:
    """The delta nets' numbers. `tiled`: the order of value heads in this architecture's GGUF files;
    `homeserve.delta_tiled` overrides it for checkpoints in another order."""
    key_heads = keys.integer("ssm.group_count")
    value_heads = keys.integer("ssm.time_step_rank")
    inner = keys.integer("ssm.inner_size")
    if value_heads % key_heads:
        raise keys.error("ssm.time_step_rank", f"{value_heads} value heads cannot share {key_heads} key heads evenly")
    if inner % value_heads:
        raise keys.error("ssm.inner_size", f"{inner} does not divide into {value_heads} value heads")
    return DeltaFacts(
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=keys.integer("ssm.state_size"),
        value_dim=inner // value_heads,
        kernel=keys.integer("ssm.conv_kernel", low=2, high=64),
        tiled=keys.flag("homeserve.delta_tiled", tiled),
    )


def read_experts(
    keys: Keys,
    *,
    func: RoutingFunc = RoutingFunc.SOFTMAX,
    normalise: bool = True,
    shared: bool = False,
    beside: bool = False,
) -> ExpertFacts:
    """Experts of an architecture whose files need not say how they are routed. `shared`: it has a shared expert;
    `beside`: they lie beside a dense feed-forward, whose width is no expert's."""
    count = keys.integer("expert_count")
    if keys.integer("expert_group_count", 0, low=0) > 1:
        field = keys.key("expert_group_count")
        raise UnsupportedModel(f"{field}: experts in groups cannot be routed for {keys.arch}", field=field)
    named = keys.integer("expert_gating_func", 0, low=0)
    if named and named not in GATING:
        field = keys.key("expert_gating_func")
        raise UnsupportedModel(f"{field} is {named}; known: {', '.join(map(str, GATING))}", field=field)
    own = beside or keys.has("expert_feed_forward_length")
    width = keys.same("expert_feed_forward_length", None if own else _ffn(keys))
    return ExpertFacts(
        count=count,
        used=keys.same("expert_used_count", high=count),
        width=width,
        shared_width=keys.same("expert_shared_feed_forward_length", _ffn(keys)) if shared else 0,
        func=GATING.get(named, func),
        normalise=keys.flag("expert_weights_norm", normalise),
        scale=keys.number("expert_weights_scale", 0.0, low=-1e-9) or 1.0,
        beside=beside,
    )


def has_experts(keys: Keys) -> bool:
    """Of an architecture whose files may have experts or not."""
    return keys.integer("expert_count", 0, low=0) > 0


def _ffn(keys: Keys) -> int | None:
    """What stands for an expert's width where a file does not give one."""
    return keys.same("feed_forward_length") if keys.has("feed_forward_length") else None


def read_vocab(keys: Keys) -> int:
    """Rows of the embedding table: the key where a file has it, else the length of its token list."""
    if not keys.has("vocab_size"):
        count = keys.count("tokenizer.ggml.tokens")
        if count is None:
            raise keys.error("vocab_size", "is missing, and there is no tokenizer.ggml.tokens to count")
        if not 1 <= count <= VOCAB_MAX:
            raise keys.error("tokenizer.ggml.tokens", f"must have from 1 to {VOCAB_MAX} entries, has {count}")
        return count
    return keys.integer("vocab_size", high=VOCAB_MAX)


def read_rope(keys: Keys, head_dim: int, *, interleaved: bool) -> RopeFacts:
    """Rope of a family whose GGUF files pair dims as `interleaved` says; `homeserve.rope_interleaved` overrides it for
    checkpoints whose q and k rows lie in another order."""
    dims = _rope_dims(keys, "rope.dimension_count", head_dim)
    return RopeFacts(
        dims=dims,
        base=keys.number("rope.freq_base", 10000.0, low=1.0),
        interleaved=keys.flag("homeserve.rope_interleaved", interleaved),
        scaling=_read_scaling(keys),
    )


def read_rope_swa(keys: Keys, head_dim: int, rope: RopeFacts, default_base: float) -> RopeFacts:
    """Rope of the windowed layers of a family where they have a base of their own: no scaling ever."""
    return RopeFacts(
        dims=_rope_dims(keys, "rope.dimension_count_swa", min(head_dim, rope.dims)),
        base=keys.number("rope.freq_base_swa", default_base, low=1.0),
        interleaved=rope.interleaved,
    )


def _rope_dims(keys: Keys, name: str, head_dim: int) -> int:
    dims = keys.integer(name, head_dim, high=head_dim)
    if dims % 2:
        raise keys.error(name, f"must be even, is {dims}")
    return dims


def _read_scaling(keys: Keys) -> Scaling | None:
    if keys.has("homeserve.rope_llama3_factor"):
        return _read_llama3(keys)
    kind = keys.text("rope.scaling.type", "linear" if keys.has("rope.scale_linear") else "none")
    if kind == "none":
        return None
    if kind == "linear":
        name = "rope.scaling.factor" if keys.has("rope.scaling.factor") else "rope.scale_linear"
        factor = keys.number(name, 1.0)
        return None if factor == 1.0 else LinearScaling(factor)
    if kind == "yarn":
        return _read_yarn(keys)
    raise UnsupportedModel(
        f"{keys.key('rope.scaling.type')} is {kind!r}; known for {keys.arch}: none, linear, yarn",
        field=keys.key("rope.scaling.type"),
    )


def _read_llama3(keys: Keys) -> Llama3Scaling:
    scaling = Llama3Scaling(
        factor=keys.number("homeserve.rope_llama3_factor"),
        low_freq=keys.number("homeserve.rope_llama3_low_freq_factor"),
        high_freq=keys.number("homeserve.rope_llama3_high_freq_factor"),
        original_context=keys.integer("homeserve.rope_llama3_original_context", high=CONTEXT_MAX),
    )
    if scaling.high_freq <= scaling.low_freq:
        raise keys.error("homeserve.rope_llama3_high_freq_factor", "must be over the low one")
    return scaling


def _read_yarn(keys: Keys) -> YarnScaling:
    return YarnScaling(
        factor=keys.number("rope.scaling.factor"),
        original_context=keys.integer(
            "rope.scaling.original_context_length",
            keys.integer("context_length", high=CONTEXT_MAX),
            high=CONTEXT_MAX,
        ),
        beta_fast=keys.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=keys.number("rope.scaling.yarn_beta_slow", 1.0),
        ext_factor=keys.number("rope.scaling.yarn_ext_factor", 1.0, low=-1e-9, high=1.0),
        attn_factor=keys.number("rope.scaling.attn_factor", keys.number("rope.scaling.yarn_attn_factor", 1.0)),
        log_multiplier=keys.number("rope.scaling.yarn_log_multiplier", 0.0, low=-1e-9),
        truncate=keys.flag("homeserve.rope_yarn_truncate", True),
    )
