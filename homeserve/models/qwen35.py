"""`qwen35`: Qwen 3.5 and later, dense: three layers with a delta net, then one with gated attention.

Rope turns the first part of a head; its sections matter for images only. GGUF files have the value heads of the delta
nets in tiled order. A NEXTN block may lie behind the trunk.
"""

from __future__ import annotations

from homeserve.models.delta_family import delta_family

FAMILY = delta_family("qwen35", tiled=True, routed=False)
