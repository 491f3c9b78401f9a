"""Numbers that the budget and the scheduler read from declarations: no tensor is opened for them."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from backends.base import TensorView
from backends.quant import QuantType
from homeserve.errors import SettingError
from homeserve.models.config import ModelConfig
from homeserve.models.registry import family
from homeserve.models.stages import Attention, Dense, Stage

KV_TYPES: Mapping[str, QuantType] = {"f16": QuantType.F16, "bf16": QuantType.BF16, "f32": QuantType.F32}
"""The setting's words for the number types that a KV pool may hold."""


def kv_quant_type(kv_type: str) -> QuantType:
    """Raises SettingError where `kv_type` is none of KV_TYPES."""
    try:
        return KV_TYPES[kv_type.lower()]
    except KeyError:
        raise SettingError(f"kv_type: must be one of {', '.join(KV_TYPES)}, is {kv_type!r}", field="kv_type") from None


def kv_values_per_token(config: ModelConfig, layers: range | None = None) -> int:
    """Numbers (K and V together) that one token's rows take in the pools of `layers` (all by default)."""
    facts = family(config.arch).stage_facts
    return sum(
        2 * stage.kv_heads * stage.head_dim
        for layer in (range(config.layers) if layers is None else layers)
        for stage in facts(config, layer)
        if isinstance(stage, Attention)
    )


def kv_bytes_per_token(config: ModelConfig, kv_type: str, layers: range | None = None) -> int:
    """Bytes of one token's K and V rows over `layers`."""
    return kv_values_per_token(config, layers) * kv_quant_type(kv_type).block_bytes


def lane_state_bytes(config: ModelConfig, layers: range | None = None) -> int:
    """Bytes of recurrent state that a running request holds over `layers`, beside its KV rows."""
    facts = family(config.arch).stage_facts
    chosen = range(config.layers) if layers is None else layers
    return sum(_state_bytes(stage) for layer in chosen for stage in facts(config, layer))


def weight_bytes(tensors: Mapping[str, TensorView], names: Collection[str] | None = None) -> int:
    """Packed bytes of the tensors (of all, or of `names`), each counted once: a tied head costs nothing."""
    return sum(tensors[name].data.nbytes for name in (tensors.keys() if names is None else set(names)))


def _state_bytes(stage: Stage) -> int:
    match stage:
        case Attention() | Dense():
            return 0
