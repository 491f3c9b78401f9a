"""A `config.json` in GGUF's words: one table of families, one row for each key that is translated.

A family is added by a `FamilyRules`: its GGUF architecture, where its keys come from, and how its tensors are called.
Both spellings of rope settings are read: `rope_theta` with `rope_scaling`, and the newer `rope_parameters` that holds
all of it. What a config asks for and this table cannot express is refused with the field's name, never dropped.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from homeserve.errors import CheckpointError, UnknownArchitecture

COUNT_MAX = 1 << 31


@dataclass(frozen=True)
class Row:
    """`key` (after `<arch>.`) is the whole or real number at `name` in config.json."""

    key: str
    name: str
    required: bool = True
    real: bool = False


@dataclass(frozen=True)
class FamilyRules:
    """How one `model_type` is translated. `tensors` and `layer_tensors` map names without `.weight` / `.bias`.

    `must_equal` lists settings that may only have the values given (None stands for absent or null).
    """

    arch: str
    rows: tuple[Row, ...]
    tensors: Mapping[str, str]
    layer_tensors: Mapping[str, str]
    must_equal: Mapping[str, tuple[object, ...]]
    ignored: tuple[str, ...] = ("rotary_emb.inv_freq",)


_LLAMA = FamilyRules(
    arch="llama",
    rows=(
        Row("block_count", "num_hidden_layers"),
        Row("context_length", "max_position_embeddings"),
        Row("embedding_length", "hidden_size"),
        Row("feed_forward_length", "intermediate_size"),
        Row("attention.head_count", "num_attention_heads"),
        Row("attention.head_count_kv", "num_key_value_heads", required=False),
        Row("attention.key_length", "head_dim", required=False),
        Row("attention.value_length", "head_dim", required=False),
        Row("attention.layer_norm_rms_epsilon", "rms_norm_eps", real=True),
        Row("attention.sliding_window", "sliding_window", required=False),
        Row("vocab_size", "vocab_size"),
    ),
    tensors={"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"},
    layer_tensors={
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    },
    must_equal={"hidden_act": ("silu", "swish", None), "partial_rotary_factor": (1, 1.0, None)},
)

FAMILIES: Mapping[str, FamilyRules] = {"llama": _LLAMA, "mistral": _LLAMA}
"""By `model_type`."""

_LAYER = re.compile(r"model\.layers\.(\d{1,6})\.(.+)\.(weight|bias)")
_FIX = "use a GGUF of the model, or a checkpoint of a known family"


def rules_for(path: str, config: Mapping[str, object]) -> FamilyRules:
    """Raises UnknownArchitecture, CheckpointError."""
    kind = config.get("model_type")
    if not isinstance(kind, str):
        raise CheckpointError(path, "model_type", f"is {kind!r}, not the name of a model family", fix=_FIX)
    rules = FAMILIES.get(kind)
    if rules is None:
        raise UnknownArchitecture(kind, tuple(sorted(FAMILIES)))
    quantised = config.get("quantization_config")
    if quantised is not None:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
        what = f"weights quantised by {method!r} are not read"
        raise CheckpointError(path, "quantization_config", what, fix=_FIX)
    for name, values in rules.must_equal.items():
        if config.get(name) not in values:
            raise CheckpointError(path, name, f"is {config.get(name)!r}; supported: {values[0]!r}", fix=_FIX)
    return rules


def metadata_from(path: str, config: Mapping[str, object], rules: FamilyRules) -> dict[str, object]:
    """The GGUF keys of a config. Raises CheckpointError that names the field."""
    fields = _Fields(path, config)
    metadata: dict[str, object] = {"general.architecture": rules.arch, "homeserve.rope_interleaved": False}
    for row in rules.rows:
        value = fields.number(row.name, row.required, row.real)
        if value is not None:
            metadata[f"{rules.arch}.{row.key}"] = value
    metadata |= _rope(fields, rules.arch)
    if f"{rules.arch}.attention.key_length" in metadata:
        metadata[f"{rules.arch}.rope.dimension_count"] = metadata[f"{rules.arch}.attention.key_length"]
    return metadata


def canonical_name(name: str, rules: FamilyRules) -> str | None:
    """GGUF's name of a tensor; None for one that this family does not have, '' for one that needs no place."""
    if name.endswith(rules.ignored):
        return ""
    layer = _LAYER.fullmatch(name)
    if layer:
        role = rules.layer_tensors.get(layer[2])
        return f"blk.{int(layer[1])}.{role}.{layer[3]}" if role else None
    stem, _, suffix = name.rpartition(".")
    role = rules.tensors.get(stem)
    return f"{role}.{suffix}" if role and suffix in ("weight", "bias") else None


def _rope(fields: _Fields, arch: str) -> dict[str, object]:
    """Base and scaling of rope, from either spelling."""
    newer = fields.group("rope_parameters")
    older = fields.group("rope_scaling")
    merged = _Fields(fields.path, (older or {}) | (newer or {}), "rope_parameters." if newer else "rope_scaling.")
    base = merged.number("rope_theta", False, True) or fields.number("rope_theta", False, True) or 10000.0
    keys: dict[str, object] = {f"{arch}.rope.freq_base": base}
    kind = merged.values.get("rope_type", merged.values.get("type")) or "default"
    scaling = f"{arch}.rope.scaling"
    if kind == "default":
        return keys
    if kind == "linear":
        return keys | {f"{scaling}.type": "linear", f"{scaling}.factor": merged.number("factor", True, True)}
    original = merged.number("original_max_position_embeddings", False, False)
    if kind == "llama3":
        return keys | {
            "homeserve.rope_llama3_factor": merged.number("factor", True, True),
            "homeserve.rope_llama3_low_freq_factor": merged.number("low_freq_factor", True, True),
            "homeserve.rope_llama3_high_freq_factor": merged.number("high_freq_factor", True, True),
            "homeserve.rope_llama3_original_context": original or fields.number("max_position_embeddings", True, False),
        }
    if kind == "yarn":
        keys[f"{scaling}.original_context_length"] = original or fields.number("max_position_embeddings", True, False)
        return keys | {f"{scaling}.{key}": value for key, value in _yarn(merged).items()}
    raise merged.error("rope_type", f"is {kind!r}; supported: default, linear, llama3, yarn")


def _yarn(fields: _Fields) -> dict[str, object]:
    """GGUF's yarn keys. `attention_factor` is the whole magnitude here, in GGUF a factor on 0.1 ln(factor) + 1."""
    for name in ("mscale", "mscale_all_dim"):
        if fields.values.get(name) is not None:
            raise fields.error(name, "is not supported for this family")
    factor = fields.number("factor", True, True)
    assert factor is not None, "a required number"
    given: dict[str, object] = {"type": "yarn", "factor": factor}
    for name in ("beta_fast", "beta_slow"):
        if (beta := fields.number(name, False, True)) is not None:
            given[f"yarn_{name}"] = beta
    if (magnitude := fields.number("attention_factor", False, True)) is not None:
        given["attn_factor"] = magnitude / (0.1 * math.log(factor) + 1.0)
    return given


class _Fields:
    """Typed access to a JSON object; every complaint names the field."""

    def __init__(self, path: str, values: Mapping[str, object], prefix: str = "") -> None:
        self.path = path
        self.values = values
        self._prefix = prefix

    def error(self, name: str, what: str) -> CheckpointError:
        return CheckpointError(self.path, self._prefix + name, what, fix=_FIX)

    def number(self, name: str, required: bool, real: bool) -> int | float | None:
        """A positive number; None where it is absent or null and not required."""
        value = self.values.get(name)
        if value is None and not required:
            return None
        if value is None:
            raise self.error(name, "is missing")
        sound = isinstance(value, (int, float) if real else int) and not isinstance(value, bool)
        if not sound or not isinstance(value, (int, float)) or not 0 < value < math.inf or value >= COUNT_MAX:
            raise self.error(name, f"is {value!r}, not a positive {'number' if real else 'whole number'}")
        return float(value) if real else value

    def group(self, name: str) -> dict[str, object] | None:
        value = self.values.get(name)
        if value is None or isinstance(value, dict):
            return value or None
        raise self.error(name, f"is {value!r}, not a group of settings")
