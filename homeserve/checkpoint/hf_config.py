"""A `config.json` in GGUF's words, by the rules of its family (`hf_rules`; the families give them).

Both spellings of rope settings are read: `rope_theta` with `rope_scaling` and their neighbours, and the newer
`rope_parameters` that holds all of it, for all layers or by their type. So are configs of models that also see or hear,
whose `text_config` says what the text part is. What a config asks for and the rules cannot express is refused with the
field's name, never dropped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from homeserve.checkpoint.hf_rules import FamilyRules, Kind, Row
from homeserve.errors import InvalidModelFile, UnknownArchitecture

COUNT_MAX = 1 << 31
LAYERS_MAX = 1 << 16
HEAD_DIM_MAX = 1 << 16
"""A list of numbers is made for a head and for the layers: neither may be as long as a hostile config says."""
_FIX = "use a GGUF of the model, or a checkpoint of a known family"


def text_config(path: str, config: Mapping[str, object]) -> Mapping[str, object]:
    """The settings of the text part: what `text_config` holds, and around it what it leaves out. Raises
    InvalidModelFile."""
    inner = config.get("text_config")
    if inner is None:
        return config
    if not isinstance(inner, dict):
        raise InvalidModelFile(path, "text_config", f"is {inner!r}, not a group of settings", fix=_FIX)
    return {**config, **inner} if "model_type" in inner else {**config, **inner, "model_type": config.get("model_type")}


def rules_for(path: str, config: Mapping[str, object], families: Mapping[str, FamilyRules]) -> FamilyRules:
    """The rules of a `text_config`, from `families` by model type. Raises UnknownArchitecture, InvalidModelFile."""
    kind = config.get("model_type")
    if not isinstance(kind, str):
        raise InvalidModelFile(path, "model_type", f"is {kind!r}, not the name of a model family", fix=_FIX)
    rules = families.get(kind)
    if rules is None:
        raise UnknownArchitecture(kind, tuple(sorted(families)))
    quantised = config.get("quantization_config")
    if quantised is not None:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
        if method not in rules.quant_methods:
            what = f"weights quantised by {method!r} are not read"
            raise InvalidModelFile(path, "quantization_config", what, fix=_FIX)
    for name, values in rules.must_equal.items():
        if config.get(name) not in values:
            raise InvalidModelFile(path, name, f"is {config.get(name)!r}; supported: {values[0]!r}", fix=_FIX)
    return rules


def metadata_from(path: str, config: Mapping[str, object], rules: FamilyRules, drafts: int = 0) -> dict[str, object]:
    """The GGUF keys of a `text_config`, with `drafts` drafting blocks behind the trunk. Raises InvalidModelFile that
    names the field."""
    fields = _Fields(path, config)
    metadata: dict[str, object] = {"general.architecture": rules.arch, "homeserve.rope_interleaved": False}
    keys: dict[str, object] = {}
    for row in rules.rows:
        value = _value(fields, row)
        if value is not None:
            keys[row.key] = value
    head_dim = keys.get("attention.key_length")
    if isinstance(head_dim, int):
        keys["rope.dimension_count"] = _rope_dims(fields, rules, head_dim)
    if rules.delta:
        keys["ssm.inner_size"] = _whole(keys, "ssm.time_step_rank") * fields.count("linear_value_head_dim", 128)
    keys |= _rope(fields, rules, metadata)
    keys |= _layer_types(fields, rules, _whole(keys, "block_count"), drafts)
    if rules.wide_heads:
        keys |= _wide_heads(fields, rules, keys)
    if drafts:
        keys["block_count"] = _whole(keys, "block_count") + drafts
        keys["nextn_predict_layers"] = drafts
    return metadata | dict(rules.fixed) | {f"{rules.arch}.{key}": value for key, value in keys.items()}


def trunk_layers(path: str, config: Mapping[str, object], rules: FamilyRules) -> int:
    """Layers before any drafting block. Raises InvalidModelFile."""
    row = next(row for row in reversed(rules.rows) if row.key == "block_count")
    value = _value(_Fields(path, config), row)
    assert isinstance(value, int), "every family has a block_count"
    if value > LAYERS_MAX:
        raise InvalidModelFile(path, row.name, f"is {value}; {LAYERS_MAX} layers are the limit", fix=_FIX)
    return value


def _whole(keys: Mapping[str, object], key: str) -> int:
    value = keys[key]
    assert isinstance(value, int), "a row of whole numbers with a default, or required"
    return value


def _value(fields: _Fields, row: Row) -> object:
    """What a row gives, None for nothing."""
    if row.when and not fields.flag(row.when, False):
        return None
    name = next((name for name in (row.name, *row.other_names) if fields.values.get(name) is not None), row.name)
    match row.kind:
        case Kind.FLAG:
            return fields.flag(name, row.default is True)
        case Kind.SOME if fields.values.get(name) in (0, None):
            return row.default if name not in fields.values else None
        case Kind.CAP if name in fields.values and fields.values[name] is None:
            return 0.0
    required = row.required and row.default is None
    value = fields.number(name, required, row.kind not in (Kind.WHOLE, Kind.SOME))
    value = row.default if value is None else value
    if row.kind is Kind.ROOT and value is not None:
        return 1.0 / math.sqrt(value)
    return value


def _layer_types(fields: _Fields, rules: FamilyRules, layers: int, drafts: int) -> dict[str, object]:
    """Which layers are of the family's special type; drafting blocks never are."""
    types = rules.layer_types
    if types is None:
        return {}
    listed = fields.values.get("layer_types")
    if listed is None:
        given = next((name for name in types.period_names if fields.values.get(name) is not None), None)
        period = fields.count(given, 0) if given else types.period
        if types.key != types.period_key and not drafts:
            return {types.period_key: period}
        return {types.key: [(i + 1) % period != 0 for i in range(layers)] + [False] * drafts}
    known = (types.true, "full_attention")
    if not isinstance(listed, list) or len(listed) != layers:
        raise fields.error("layer_types", f"is no list of {layers} types, one for each layer")
    strange = next((each for each in listed if each not in known), None)
    if strange is not None:
        raise fields.error("layer_types", f"holds {strange!r}; supported: {', '.join(known)}")
    return {types.key: [each == types.true for each in listed] + [False] * drafts}


def _wide_heads(fields: _Fields, rules: FamilyRules, keys: Mapping[str, object]) -> dict[str, object]:
    """Widths of heads, kv heads and feed-forward where these differ between layers."""
    pattern, width = keys["attention.sliding_window_pattern"], _whole(keys, "attention.key_length")
    assert isinstance(pattern, list), "made by _layer_types"
    wide = _wide_head_dim(fields, rules)
    few = fields.number("num_global_key_value_heads", False, False) if fields.flag("attention_k_eq_v", False) else None
    own = {layer: each.number("num_key_value_heads", False, False) for layer, each in _per_layer(fields).items()}
    usual = _whole(keys, "attention.head_count_kv")
    kv_heads = [usual if windowed else own.get(i) or few or usual for i, windowed in enumerate(pattern)]
    shared = keys.get("attention.shared_kv_layers")
    found: dict[str, object] = {
        "attention.key_length": wide,
        "attention.value_length": wide,
        "attention.key_length_swa": width,
        "attention.value_length_swa": width,
        "rope.dimension_count": wide,
        "rope.dimension_count_swa": width,
        "attention.head_count_kv": kv_heads,
    }
    if fields.flag("use_double_wide_mlp", False) and isinstance(shared, int):
        ffn = _whole(keys, "feed_forward_length")
        found["feed_forward_length"] = [ffn * (1 + (i >= len(pattern) - shared)) for i in range(len(pattern))]
    return found


def _per_layer(fields: _Fields) -> dict[int, _Fields]:
    """What `per_layer_config` says of single layers. Raises where it says what is not known here."""
    found = {}
    for layer, values in (fields.group("per_layer_config") or {}).items():
        each = _Fields(fields.path, values if isinstance(values, dict) else {}, f"per_layer_config.{layer}.")
        strange = sorted(each.values.keys() - {"head_dim", "num_key_value_heads"})
        if not layer.isdecimal() or len(layer) > 6 or not isinstance(values, dict) or strange:
            raise fields.error(
                f"per_layer_config.{layer[:20]}", f"is {values!r}; supported: head_dim, num_key_value_heads"
            )
        found[int(layer)] = each
    return found


def _wide_head_dim(fields: _Fields, rules: FamilyRules) -> int:
    widths = {each.count("head_dim", rules.wide_heads) for each in _per_layer(fields).values()}
    if len(widths) > 1:
        raise fields.error("per_layer_config", f"has heads of {len(widths)} widths, one is supported")
    width = widths.pop() if widths else fields.count("global_head_dim", rules.wide_heads)
    if width > HEAD_DIM_MAX:
        raise fields.error("global_head_dim", f"is {width}; {HEAD_DIM_MAX} is the limit")
    return width


# -------------------------------------------------------------------------------------------------------------- rope


def rope_factors(path: str, config: Mapping[str, object], rules: FamilyRules) -> list[float] | None:
    """What the frequencies of a wide head's pairs are divided by: so much, for those that stand still, that nothing is
    left. None where the family has no such heads. Raises InvalidModelFile."""
    if not rules.wide_heads:
        return None
    fields = _Fields(path, config)
    by_type = _Fields(path, fields.group("rope_parameters") or {}, "rope_parameters.")
    full = _Fields(path, by_type.group("full_attention") or {}, "rope_parameters.full_attention.")
    share = full.number("partial_rotary_factor", False, True) or rules.rope_dims
    pairs = _wide_head_dim(fields, rules) // 2
    if not 0 < share <= 1:
        raise full.error("partial_rotary_factor", f"is {share}: no part of a head")
    turned = int(pairs * share)
    return [1.0] * turned + [1e30] * (pairs - turned)


def _rope_dims(fields: _Fields, rules: FamilyRules, head_dim: int) -> int:
    """How many dims of a head turn."""
    if rules.wide_heads:
        return head_dim
    group = fields.group("rope_parameters") or {}
    share = _Fields(fields.path, group, "rope_parameters.").number("partial_rotary_factor", False, True)
    share = share or fields.number("partial_rotary_factor", False, True) or rules.rope_dims
    dims = head_dim * share
    if dims != int(dims) or dims > head_dim:
        raise fields.error("partial_rotary_factor", f"is {share}: no whole part of a head of {head_dim}")
    return int(dims)


def _rope(fields: _Fields, rules: FamilyRules, metadata: dict[str, object]) -> dict[str, object]:
    """Base and scaling of rope, from either spelling. Keys that GGUF lacks go straight into `metadata`."""
    newer = fields.group("rope_parameters")
    older = fields.group("rope_scaling")
    by_type = _Fields(fields.path, newer or {}, "rope_parameters.")
    local = by_type.group("sliding_attention") if newer and "full_attention" in newer else None
    if newer and "full_attention" in newer:
        newer = by_type.group("full_attention")
    merged = _Fields(fields.path, (older or {}) | (newer or {}), "rope_parameters." if newer else "rope_scaling.")
    base = merged.number("rope_theta", False, True) or fields.number("rope_theta", False, True) or rules.rope_base
    keys: dict[str, object] = {"rope.freq_base": base}
    if rules.rope_swa_base:
        keys["rope.freq_base_swa"] = _local_base(fields, local, rules.rope_swa_base)
    elif local is not None and local != newer:
        raise fields.error("rope_parameters", "differs between layers with and without a window")
    kind = merged.values.get("rope_type", merged.values.get("type")) or "default"
    match kind:
        case "default":
            return keys
        case "proportional" if rules.wide_heads:
            return keys
        case "linear":
            factor = merged.number("factor", True, True)
            return keys | {"rope.scaling.type": "linear", "rope.scaling.factor": factor}
        case "llama3":
            metadata |= _llama3(fields, merged)
            return keys
        case "yarn":
            if merged.flag("truncate", True) is False:
                metadata["homeserve.rope_yarn_truncate"] = False
            return keys | {f"rope.scaling.{key}": value for key, value in _yarn(fields, merged).items()}
    raise merged.error("rope_type", f"is {kind!r}; supported: default, linear, llama3, yarn")


def _local_base(fields: _Fields, local: Mapping[str, object] | None, default: float) -> float:
    """Base of the layers with a window; they are never scaled."""
    group = _Fields(fields.path, local or {}, "rope_parameters.sliding_attention.")
    if group.values.get("rope_type", "default") != "default":
        raise group.error("rope_type", f"is {group.values['rope_type']!r}; supported: default")
    return group.number("rope_theta", False, True) or fields.number("rope_local_base_freq", False, True) or default


def _llama3(fields: _Fields, merged: _Fields) -> dict[str, object]:
    original = merged.number("original_max_position_embeddings", False, False)
    return {
        "homeserve.rope_llama3_factor": merged.number("factor", True, True),
        "homeserve.rope_llama3_low_freq_factor": merged.number("low_freq_factor", True, True),
        "homeserve.rope_llama3_high_freq_factor": merged.number("high_freq_factor", True, True),
        "homeserve.rope_llama3_original_context": original or fields.number("max_position_embeddings", True, False),
    }


def _yarn(fields: _Fields, merged: _Fields) -> dict[str, object]:
    """GGUF's yarn keys. `attention_factor` is the whole magnitude here, in GGUF a factor on 0.1 ln(factor) + 1."""
    for name in ("mscale", "mscale_all_dim"):
        if merged.values.get(name) is not None:
            raise merged.error(name, "is not supported for this family")
    factor = merged.number("factor", True, True)
    assert factor is not None, "a required number"
    original = merged.number("original_max_position_embeddings", False, False)
    given: dict[str, object] = {
        "type": "yarn",
        "factor": factor,
        "original_context_length": original or fields.number("max_position_embeddings", True, False),
    }
    for name in ("beta_fast", "beta_slow"):
        if (beta := merged.number(name, False, True)) is not None:
            given[f"yarn_{name}"] = beta
    if (magnitude := merged.number("attention_factor", False, True)) is not None:
        given["attn_factor"] = magnitude / (0.1 * math.log(factor) + 1.0)
    return given


@dataclass(frozen=True)
class _Fields:
    """Typed access to a JSON object; every complaint names the field."""

    path: str
    values: Mapping[str, object]
    prefix: str = ""

    def error(self, name: str, what: str) -> InvalidModelFile:
        return InvalidModelFile(self.path, self.prefix + name, what, fix=_FIX)

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

    def count(self, name: str, default: int) -> int:
        value = self.number(name, False, False)
        return default if value is None else int(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(name, f"is {value!r}, not true or false")
        return value

    def group(self, name: str) -> dict[str, object] | None:
        value = self.values.get(name)
        if value is None or isinstance(value, dict):
            return value or None
        raise self.error(name, f"is {value!r}, not a group of settings")
