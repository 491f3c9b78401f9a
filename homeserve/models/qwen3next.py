"""`qwen3next`: Qwen 3 Next: delta nets and gated attention, with experts and a gated shared expert in every layer.

As `qwen35moe`, but the value heads of the delta nets lie grouped by key head, and beta and alpha come from one tensor,
`ssm_ba` (in files of the first converters q, k, v and z as well, `ssm_in`).
"""

from __future__ import annotations

from homeserve.models.delta_family import delta_family

FAMILY = delta_family("qwen3next", tiled=False, routed=True)
