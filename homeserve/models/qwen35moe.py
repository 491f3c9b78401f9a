"""`qwen35moe`: as `qwen35`, with experts and a gated shared expert in every layer."""

from __future__ import annotations

from homeserve.models.delta_family import delta_family

FAMILY = delta_family("qwen35moe", tiled=True, routed=True)
