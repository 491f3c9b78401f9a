"""State of the engine as plain data, for status and metrics."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from homeserve.engine.timeline import PlanTimes


@dataclass(frozen=True)
class EngineSnapshot:
    """State of the engine as plain data, for status and metrics. Times in milliseconds."""

    state: str
    epoch: int
    running: int
    waiting: int
    finished: int
    aborted: int
    failed: int
    capacity_tokens: int
    used_tokens: int
    cached_tokens: int
    kv_windows: tuple[dict[str, int], ...]
    """The same of the layers with a window: what they keep of it."""
    prefix_lookups: int
    prefix_hits: int
    prefix_hit_tokens: int
    prompt_tokens: int
    generated_tokens: int
    preemptions: int
    decode_skips_max: int
    plans_issued: int
    plans_acked: int
    step_overhead_ms: dict[str, float | None]
    loop_lag_ms: dict[str, float | None]
    restarts: int
    events: tuple[dict[str, Any], ...]
    plans: tuple[PlanTimes, ...]
    layout: str = ""
    """In force."""
    flip: dict[str, Any] = field(default_factory=dict)
    """policy, committed, abandoned by reason, hold_reason, unarmed_work_count."""
    layouts_measured: dict[str, dict[str, float | int | None]] = field(default_factory=dict)
    """By layout: prefill_tok_s, decode_tok_s, n."""


def percentiles(samples: deque[float]) -> dict[str, float | None]:
    """p50 and p99 of the samples, null without any."""
    if not samples:
        return {"p50": None, "p99": None}
    ordered = sorted(samples)
    last = len(ordered) - 1
    return {"p50": round(ordered[last // 2], 4), "p99": round(ordered[int(0.99 * last)], 4)}
