"""Hyper-parameters of a model, read from GGUF metadata keys and checked before anything is built on them.

A safetensors folder's `config.json` reaches this module under the same keys, so there is one reader. Every error names
the key. What metadata cannot say, the list of tensors does: whether the head is tied, which projections have a bias,
whether a rope factor tensor is there. `settle` asks it once, in one place, and the declaration, the builder and the
budget read the settled config; none of them looks at the tensors again to decide what a layer is.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence, Sized
from dataclasses import dataclass, replace

from homeserve.errors import CheckpointError, UnsupportedModel
from homeserve.models.stages import LinearScaling, Llama3Scaling, RopeFacts, Scaling, YarnScaling

LAYERS_MAX = 1024
"""More layers than any known model by far; a bound on what a hostile header can ask for."""
WIDTH_MAX = 1 << 20
"""Bound on hidden, feed-forward and per-head widths and on head counts."""
VOCAB_MAX = 1 << 22
CONTEXT_MAX = 1 << 31

TOKEN_EMBD = "token_embd.weight"
OUTPUT_NORM = "output_norm.weight"
OUTPUT = "output.weight"
OUTPUT_BIAS = "output.bias"
ROPE_FREQS = "rope_freqs.weight"

SOURCE = "model metadata"
"""Stands where an error names a file: these values may come from any part of a split file or from config.json."""


@dataclass(frozen=True)
class ModelConfig:
    """What a family's declarations are made from.

    Per-layer numbers are tuples of `layers` entries; `heads`, `kv_heads` and `ffn` give the largest of them. `window`
    is 0 for full attention. `optional` holds the optional tensors that the checkpoint has (see `settle`); before that
    it is empty and `tied_head` is True.
    """

    arch: str
    layers: int
    hidden: int
    vocab: int
    context: int
    layer_heads: tuple[int, ...]
    layer_kv_heads: tuple[int, ...]
    layer_ffn: tuple[int, ...]
    head_dim: int
    norm_eps: float
    rope: RopeFacts
    attention_scale: float
    window: int = 0
    tied_head: bool = True
    optional: frozenset[str] = frozenset()

    @property
    def heads(self) -> int:
        return max(self.layer_heads)

    @property
    def kv_heads(self) -> int:
        return max(self.layer_kv_heads)

    @property
    def ffn(self) -> int:
        return max(self.layer_ffn)


def settle(config: ModelConfig, tensor_names: Collection[str]) -> ModelConfig:
    """The same config with everything decided that only the checkpoint's tensors can decide."""
    optional = frozenset(name for name in tensor_names if name.endswith(".bias") or name in (OUTPUT, ROPE_FREQS))
    rope = replace(config.rope, factor_tensor=ROPE_FREQS if ROPE_FREQS in optional else "")
    return replace(config, optional=optional, tied_head=OUTPUT not in optional, rope=rope)


# ------------------------------------------------------------------------------------------------- reading metadata


class Keys:
    """Typed, bounded reading of one architecture's metadata. Every method raises CheckpointError with the key."""

    def __init__(self, metadata: Mapping[str, object], arch: str) -> None:
        self.metadata = metadata
        self.arch = arch

    def key(self, name: str) -> str:
        """`name` under the architecture's prefix; names of other sections stay as they are."""
        return name if name.startswith(("homeserve.", "tokenizer.", "general.")) else f"{self.arch}.{name}"

    def has(self, name: str) -> bool:
        return self.metadata.get(self.key(name)) is not None

    def integer(self, name: str, default: int | None = None, *, low: int = 1, high: int = WIDTH_MAX) -> int:
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(name, f"must be a whole number, is {_shown(value)}")
        if not low <= value <= high:
            raise self.error(name, f"must be from {low} to {high}, is {value}")
        return value

    def number(self, name: str, default: float | None = None, *, low: float = 0.0, high: float = 1e12) -> float:
        """A finite number with low < value <= high (`default` is returned unchecked)."""
        if default is not None and not self.has(name):
            return default
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(name, f"must be a number, is {_shown(value)}")
        if not (math.isfinite(value) and low < value <= high):
            raise self.error(name, f"must be over {low} and at most {high}, is {value}")
        return float(value)

    def text(self, name: str, default: str) -> str:
        value = self._value(name, default)
        if not isinstance(value, str):
            raise self.error(name, f"must be text, is {_shown(value)}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self.error(name, f"must be true or false, is {_shown(value)}")
        return value

    def per_layer(self, name: str, layers: int, default: tuple[int, ...] | None = None) -> tuple[int, ...]:
        """A number for every layer: the file has one for all, or an array of `layers`."""
        if default is not None and not self.has(name):
            return default
        value = self._value(name, None)
        if not isinstance(value, Sequence) or isinstance(value, str | bytes):
            return (self.integer(name),) * layers
        if len(value) != layers:
            raise self.error(name, f"has {len(value)} entries for {layers} layers")
        for entry in value:
            if isinstance(entry, bool) or not isinstance(entry, int) or not 1 <= entry <= WIDTH_MAX:
                raise self.error(name, f"entries must be from 1 to {WIDTH_MAX}, one is {_shown(entry)}")
        return tuple(value)

    def count(self, name: str) -> int | None:
        """Length of an array, or None where there is none."""
        value = self.metadata.get(self.key(name))
        return len(value) if isinstance(value, Sized) and not isinstance(value, str) else None

    def error(self, name: str, what: str) -> CheckpointError:
        return CheckpointError(SOURCE, self.key(name), what)

    def _value(self, name: str, default: object) -> object:
        value = self.metadata.get(self.key(name))
        if value is not None:
            return value
        if default is None:
            raise self.error(name, "is missing")
        return default


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
    dims = keys.integer("rope.dimension_count", head_dim, high=head_dim)
    if dims % 2:
        raise keys.error("rope.dimension_count", f"must be even, is {dims}")
    return RopeFacts(
        dims=dims,
        base=keys.number("rope.freq_base", 10000.0, low=1.0),
        interleaved=keys.flag("homeserve.rope_interleaved", interleaved),
        scaling=_read_scaling(keys),
    )


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
        attn_factor=keys.number("rope.scaling.attn_factor", 1.0),
        log_multiplier=keys.number("rope.scaling.yarn_log_multiplier", 0.0, low=-1e-9),
    )


def _shown(value: object) -> str:
    """A value of an untrusted file, short enough for an error."""
    shown = repr(value)
    return shown if len(shown) <= 40 else shown[:37] + "..."
