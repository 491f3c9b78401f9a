"""Shape files: a model as measurements, so that one which is not here can be planned for.

A shape is one JSON object. Fields that are absent are not used; a field that is not known, has the wrong type, or
contradicts another one is a `ShapeError` that names it: a plan made from a misread model would be a wrong proof.

    arch, name, quant, layers, nextn_layers, hidden, ffn, heads, kv_heads, head_dim, vocab, context, weights_bytes,
    window, full_attention_every, experts, experts_used, expert_ffn,
    linear {key_heads, value_heads, key_dim, value_dim, conv}
    and, where a family needs them: attention_layers, window_kv_heads, window_head_dim, shared_kv_layers, head_gate,
    shared_ffn, leading_dense, mla {kv_rank, rope_dim, q_rank, value_dim}, tied, vision_bytes (beside weights_bytes),
    embedding_bytes, head_bytes (of weights_bytes, where they are known)

Without `weights_bytes` the size follows from the number of weights and `quant`. `budget/shapes` holds shapes of models
that people ask for; `load_shape` takes their names, also with another mix behind a colon ("qwen3-8b:Q8_0").
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from budget.facts import ModelShape
from budget.geometry import Geometry, Latent, Linear, requantised, shape_of_geometry, weights_of
from budget.quants import LADDER, QUANTS, bits_per_weight

__all__ = ["LADDER", "QUANTS", "ShapeError", "built_in", "load_shape", "requantised", "shape_from_json"]

CONTEXT_ASSUMED = 131072
"""Context of a shape that does not say its own."""
FILE_BYTES_MAX = 1 << 20
LAYERS_MAX = 4096
WIDTH_MAX = 1 << 20
COUNT_MAX = 1 << 16
"""Of heads and experts."""
VOCAB_MAX = 1 << 24
CONTEXT_MAX = 1 << 31
BYTES_MAX = 1 << 50
BITS_MIN, BITS_MAX = 0.5, 40.0
"""Per weight; sizes outside of this are in another unit, or of another model."""

_SHAPES = Path(__file__).parent / "shapes"

_LIMITS: Mapping[str, int] = {
    "layers": LAYERS_MAX,
    "nextn_layers": 16,
    "hidden": WIDTH_MAX,
    "ffn": WIDTH_MAX,
    "heads": COUNT_MAX,
    "kv_heads": COUNT_MAX,
    "head_dim": WIDTH_MAX,
    "vocab": VOCAB_MAX,
    "context": CONTEXT_MAX,
    "weights_bytes": BYTES_MAX,
    "window": CONTEXT_MAX,
    "window_kv_heads": COUNT_MAX,
    "window_head_dim": WIDTH_MAX,
    "full_attention_every": LAYERS_MAX,
    "shared_kv_layers": LAYERS_MAX,
    "experts": COUNT_MAX,
    "experts_used": COUNT_MAX,
    "expert_ffn": WIDTH_MAX,
    "shared_ffn": WIDTH_MAX,
    "leading_dense": LAYERS_MAX,
    "vision_bytes": BYTES_MAX,
    "embedding_bytes": BYTES_MAX,
    "head_bytes": BYTES_MAX,
}
"""Whole numbers of the file, and their bounds."""
_LINEAR = {"key_heads": COUNT_MAX, "value_heads": COUNT_MAX, "key_dim": WIDTH_MAX, "value_dim": WIDTH_MAX, "conv": 64}
_MLA = {"kv_rank": WIDTH_MAX, "rope_dim": WIDTH_MAX, "q_rank": WIDTH_MAX, "value_dim": WIDTH_MAX}
_OTHERS = ("arch", "name", "quant", "attention_layers", "head_gate", "tied", "linear", "mla", "notes", "schema")


class ShapeError(Exception):
    """A shape that cannot be used: `field` of the shape `where`, what is wrong with it, and what to do."""

    def __init__(self, where: str, field: str, what: str, fix: str) -> None:
        super().__init__(f"{where}: {field}: {what}; {fix}" if field else f"{where}: {what}; {fix}")
        self.where = where
        self.field = field
        self.what = what
        self.fix = fix


def load_shape(name_or_path: str) -> ModelShape:
    """The shape in a file, or the built-in one of that name (":MIX" behind it: in another mix). Raises ShapeError."""
    path = Path(name_or_path)
    name, _, quant = name_or_path.partition(":")
    if not path.is_file() and name.lower() in built_in():
        shape = shape_from_json(_read(_SHAPES / f"{name.lower()}.json"), name.lower())
        return _in_mix(shape, quant) if quant else shape
    if not path.exists():
        known = f"built-in ones are {', '.join(built_in())}"
        raise ShapeError(name_or_path, "", "there is no such shape file, and no built-in shape of that name", known)
    return shape_from_json(_read(path), path.stem if path.suffix == ".json" else name_or_path)


def built_in() -> tuple[str, ...]:
    """Names of the shapes that come with this package."""
    return tuple(sorted(path.stem for path in _SHAPES.glob("*.json")))


def shape_from_json(obj: object, where: str) -> ModelShape:
    """A shape as it stands in a file. `where` names it in errors, and the model where it has no name. Raises
    ShapeError."""
    fields = _Fields(obj, where)
    geometry = _geometry(fields)
    weights = weights_of(geometry)
    if not geometry.weights_bytes:
        bits = bits_per_weight(geometry.quant)
        if bits is None:
            fix = f"give weights_bytes, or one of {', '.join(QUANTS)} as quant"
            raise fields.error("weights_bytes", f"is missing, and does not follow from quant {geometry.quant!r}", fix)
        geometry = replace(geometry, weights_bytes=round(weights * bits / 8))
    bits = geometry.weights_bytes * 8 / weights
    if not BITS_MIN <= bits <= BITS_MAX:
        what = f"{geometry.weights_bytes} bytes for {weights} weights are {bits:.3g} bits each"
        raise fields.error("weights_bytes", what, "give the file's size in bytes, and the measurements of its model")
    for name, known in (("embedding_bytes", geometry.embedding_bytes), ("head_bytes", geometry.head_bytes)):
        if known > geometry.weights_bytes // 2:
            raise fields.error(name, f"{known} is more than half of weights_bytes", "give the size of that table alone")
    return shape_of_geometry(geometry)


# ------------------------------------------------------------------------------------------------------- the fields


class _Fields:
    """Typed, bounded reading of one object."""

    def __init__(self, obj: object, where: str, prefix: str = "", known: Mapping[str, int] = _LIMITS) -> None:
        self.where = where
        self.prefix = prefix
        if not isinstance(obj, dict):
            raise self.error("", f"must be an object, is {_shown(obj)}", "see docs/BUDGET.md for its fields")
        self.values: dict[str, object] = {str(key): value for key, value in obj.items() if value is not None}
        self.limits = known
        unknown = sorted(set(self.values) - set(known) - set(() if prefix else _OTHERS))
        if unknown:
            fields = ", ".join([*known, *(() if prefix else _OTHERS)])
            raise self.error(unknown[0], "is not a field of a shape", f"fields are {fields}")

    def error(self, name: str, what: str, fix: str) -> ShapeError:
        return ShapeError(self.where, f"{self.prefix}{name}", what, fix)

    def has(self, name: str) -> bool:
        return name in self.values

    def integer(self, name: str, default: int | None = None, low: int = 0) -> int:
        """A whole number from `low` to the field's limit; without a default it is required."""
        value = self.values.get(name, default)
        high = self.limits[name]
        if value is None:
            raise self.error(name, "is missing", f"give a whole number from {max(low, 1)} to {high}")
        low = low if name in self.values else 0
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.error(name, f"is {_shown(value)}", f"give a whole number from {low} to {high}")
        return value

    def text(self, name: str, default: str) -> str:
        value = self.values.get(name, default)
        if not isinstance(value, str) or len(value) > 200:
            raise self.error(name, f"is {_shown(value)}", "give a text of at most 200 letters")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self.values.get(name, default)
        if not isinstance(value, bool):
            raise self.error(name, f"is {_shown(value)}", "give true or false")
        return value


def _geometry(fields: _Fields) -> Geometry:
    layers = fields.integer("layers", low=1)
    hidden = fields.integer("hidden", low=1)
    heads = fields.integer("heads", low=1)
    geometry = Geometry(
        name=fields.text("name", fields.where),
        arch=fields.text("arch", ""),
        quant=fields.text("quant", ""),
        weights_bytes=fields.integer("weights_bytes", 0, low=1),
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=_kv_heads(fields, heads),
        head_dim=_head_dim(fields, hidden, heads),
        vocab=fields.integer("vocab", low=1),
        context=fields.integer("context", CONTEXT_ASSUMED, low=1),
        ffn=fields.integer("ffn", 0),
        nextn_layers=fields.integer("nextn_layers", 0),
        window=fields.integer("window", 0),
        window_kv_heads=fields.integer("window_kv_heads", 0),
        window_head_dim=fields.integer("window_head_dim", 0),
        full_attention_every=fields.integer("full_attention_every", 0),
        attention_layers=_attention_layers(fields, layers),
        shared_kv_layers=fields.integer("shared_kv_layers", 0),
        # Attention beside delta nets has an output gate as wide as q in every family so far.
        head_gate=fields.flag("head_gate", fields.has("linear")),
        experts=fields.integer("experts", 0),
        experts_used=fields.integer("experts_used", 0),
        expert_ffn=fields.integer("expert_ffn", 0),
        shared_ffn=fields.integer("shared_ffn", 0),
        leading_dense=fields.integer("leading_dense", 0),
        linear=_linear(fields),
        latent=_latent(fields),
        tied=fields.flag("tied", False),
        vision_bytes=fields.integer("vision_bytes", 0),
        embedding_bytes=fields.integer("embedding_bytes", 0),
        head_bytes=fields.integer("head_bytes", 0),
    )
    _check_experts(fields, geometry)
    _check_layers(fields, geometry)
    return geometry


def _kv_heads(fields: _Fields, heads: int) -> int:
    kv_heads = fields.integer("kv_heads", heads, low=1)
    if heads % kv_heads:
        raise fields.error("kv_heads", f"{heads} heads cannot share {kv_heads} evenly", "give a divisor of heads")
    return kv_heads


def _head_dim(fields: _Fields, hidden: int, heads: int) -> int:
    if not fields.has("head_dim") and hidden % heads:
        raise fields.error("head_dim", f"is missing, and {hidden} does not divide by {heads} heads", "give head_dim")
    return fields.integer("head_dim", hidden // heads, low=1)


def _attention_layers(fields: _Fields, layers: int) -> tuple[int, ...] | None:
    if not fields.has("attention_layers"):
        return None
    value = fields.values["attention_layers"]
    fix = f"give a list of different layer numbers from 0 to {layers - 1}"
    if not isinstance(value, list) or len(value) > layers:
        raise fields.error("attention_layers", f"is {_shown(value)}", fix)
    for entry in value:
        if isinstance(entry, bool) or not isinstance(entry, int) or not 0 <= entry < layers:
            raise fields.error("attention_layers", f"has the entry {_shown(entry)}", fix)
    if len(set(value)) != len(value):
        raise fields.error("attention_layers", "names a layer twice", fix)
    return tuple(value)


def _linear(fields: _Fields) -> Linear | None:
    if not fields.has("linear"):
        return None
    inner = _Fields(fields.values["linear"], fields.where, "linear.", _LINEAR)
    numbers = {name: inner.integer(name, low=1) for name in _LINEAR}
    if numbers["value_heads"] % numbers["key_heads"]:
        raise inner.error("value_heads", "must be a multiple of key_heads", "give whole value heads to each key head")
    return Linear(**numbers)


def _latent(fields: _Fields) -> Latent | None:
    if not fields.has("mla"):
        return None
    inner = _Fields(fields.values["mla"], fields.where, "mla.", _MLA)
    rope_dim, head_dim = inner.integer("rope_dim"), fields.integer("head_dim", 0)
    if head_dim and rope_dim > head_dim:
        what = f"{rope_dim} is more than head_dim, {head_dim}"
        raise inner.error("rope_dim", what, "give head_dim with its rotary part")
    return Latent(
        kv_rank=inner.integer("kv_rank", low=1),
        rope_dim=rope_dim,
        q_rank=inner.integer("q_rank", 0),
        value_dim=inner.integer("value_dim", 128, low=1),
    )


def _check_experts(fields: _Fields, geometry: Geometry) -> None:
    if not geometry.experts:
        for name in ("experts_used", "expert_ffn", "shared_ffn", "leading_dense"):
            if fields.values.get(name):
                raise fields.error(name, "is given without experts", "give experts, or leave it out")
        if not geometry.ffn:
            raise fields.error("ffn", "is missing", "give the width of the feed-forward, or experts and expert_ffn")
        return
    if not 1 <= geometry.experts_used <= geometry.experts:
        what = f"{geometry.experts_used} of {geometry.experts} experts"
        raise fields.error("experts_used", what, "give how many experts one token runs, from 1 to all")
    if not geometry.expert_ffn:
        raise fields.error("expert_ffn", "is missing", "give the width of one expert")
    if geometry.leading_dense > geometry.layers:
        raise fields.error("leading_dense", f"is more than the {geometry.layers} layers", "give how many are dense")
    if geometry.leading_dense and not geometry.ffn:
        raise fields.error("ffn", "is missing", "give the width of the leading dense layers")


def _check_layers(fields: _Fields, geometry: Geometry) -> None:
    every = geometry.full_attention_every
    chosen = every or geometry.attention_layers is not None
    if every and geometry.attention_layers is not None:
        raise fields.error("attention_layers", "is given beside full_attention_every", "give one of them")
    if every > geometry.layers:
        raise fields.error("full_attention_every", f"{every} is more than the {geometry.layers} layers", "give less")
    if chosen and geometry.linear is None and not geometry.window:
        name = "full_attention_every" if every else "attention_layers"
        raise fields.error(name, "is given, but not what the other layers are", "give linear or window")
    if geometry.linear is not None and not chosen:
        what = "is missing: nothing says which layers attend"
        raise fields.error("full_attention_every", what, "give it, or attention_layers ([] for none)")
    if geometry.shared_kv_layers >= geometry.layers:
        raise fields.error("shared_kv_layers", f"must be less than the {geometry.layers} layers", "give less")


# --------------------------------------------------------------------------------------------------------- files


def _in_mix(shape: ModelShape, quant: str) -> ModelShape:
    try:
        return requantised(shape, quant)
    except ValueError as error:
        raise ShapeError(shape.name, "quant", str(error), f"mixes are {', '.join(QUANTS)}") from error


def _read(path: Path) -> object:
    try:
        with open(path, "rb") as file:
            raw = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ShapeError(str(path), "", f"cannot be read ({error.strerror})", "give a readable file") from error
    if len(raw) > FILE_BYTES_MAX:
        raise ShapeError(str(path), "", f"is larger than {FILE_BYTES_MAX} bytes", "give a shape file, one JSON object")
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ShapeError(str(path), "", f"is no JSON ({error})", "give a shape file, one JSON object") from error


def _shown(value: object) -> str:
    """A value of an untrusted file, short enough for an error."""
    if isinstance(value, float) and not math.isfinite(value):
        return "not a finite number"
    shown = repr(value)
    return shown if len(shown) <= 40 else shown[:37] + "..."
