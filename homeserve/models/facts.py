"""The number types that a KV pool of the engine may hold."""

from __future__ import annotations

from collections.abc import Mapping

from backends.quant import QuantType
from homeserve.errors import SettingError

KV_TYPES: Mapping[str, QuantType] = {
    "f16": QuantType.F16,
    "bf16": QuantType.BF16,
    "f32": QuantType.F32,
    "q8_0": QuantType.Q8_0,
    "f8": QuantType.F8,
}
"""The setting's words for the number types that a KV pool may hold."""


def kv_quant_type(kv_type: str) -> QuantType:
    """Raises SettingError where `kv_type` is none of KV_TYPES."""
    try:
        return KV_TYPES[kv_type.lower()]
    except KeyError:
        raise SettingError(f"kv_type: must be one of {', '.join(KV_TYPES)}, is {kv_type!r}", field="kv_type") from None
