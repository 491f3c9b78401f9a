"""State of the engine as plain data, for status and metrics."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from backends.base import PAGE_LEN
from homeserve.engine.flip_driver import FlipDriver
from homeserve.engine.request import EngineLimits, FinishReason
from homeserve.engine.scheduler import Scheduler
from homeserve.engine.timeline import PlanTimes, Timeline

EVENT_COUNT = 64
SAMPLE_COUNT = 512


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


class Counts:
    """What has happened so far, counted as it happens."""

    def __init__(self) -> None:
        self.ended = dict.fromkeys(FinishReason, 0)
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.plans_issued = 0
        self.plans_acked = 0
        self.restarts = 0
        self.events: deque[dict[str, Any]] = deque(maxlen=EVENT_COUNT)
        self.step_ms: deque[float] = deque(maxlen=SAMPLE_COUNT)
        self.lag_ms: deque[float] = deque(maxlen=SAMPLE_COUNT)

    def note(self, kind: str, rank: int | None, seq: int | None, text: str, folder: str | None) -> None:
        self.events.append({"at": time.time(), "kind": kind, "rank": rank, "seq": seq, "text": text, "folder": folder})

    def snapshot(
        self, state: str, limits: EngineLimits, scheduler: Scheduler, timeline: Timeline, flips: FlipDriver | None
    ) -> EngineSnapshot:
        pages, *windows = scheduler.census()
        slots = limits.kv_tokens // pages.capacity if pages.capacity else 0
        return EngineSnapshot(
            state=state,
            epoch=flips.flipper.epoch if flips is not None else 0,
            running=scheduler.running_count,
            waiting=scheduler.waiting_count,
            finished=self.ended[FinishReason.STOP] + self.ended[FinishReason.LENGTH],
            aborted=self.ended[FinishReason.ABORT],
            failed=self.ended[FinishReason.ERROR] + self.ended[FinishReason.UNDRAWN],
            capacity_tokens=pages.capacity * slots,
            used_tokens=(pages.live + pages.protected) * slots,
            cached_tokens=pages.cached * slots,
            kv_windows=tuple(
                {
                    "window": each.window,
                    "capacity_tokens": each.capacity * PAGE_LEN,
                    "used_tokens": (each.live + each.protected) * PAGE_LEN,
                    "cached_tokens": each.cached * PAGE_LEN,
                }
                for each in windows
            ),
            prefix_lookups=scheduler.prefix.lookups,
            prefix_hits=scheduler.prefix.hits,
            prefix_hit_tokens=scheduler.prefix.hit_tokens,
            prompt_tokens=self.prompt_tokens,
            generated_tokens=self.generated_tokens,
            preemptions=scheduler.preemptions,
            decode_skips_max=scheduler.longest_skip,
            plans_issued=self.plans_issued,
            plans_acked=self.plans_acked,
            step_overhead_ms=percentiles(self.step_ms),
            loop_lag_ms=percentiles(self.lag_ms),
            restarts=self.restarts,
            events=tuple(self.events),
            plans=timeline.recent(),
            layout=flips.flipper.layout if flips is not None else limits.layout,
            flip=flips.status() if flips is not None else {},
            layouts_measured=flips.measured() if flips is not None else {},
        )


def percentiles(samples: deque[float]) -> dict[str, float | None]:
    """p50 and p99 of the samples, null without any."""
    if not samples:
        return {"p50": None, "p99": None}
    ordered = sorted(samples)
    last = len(ordered) - 1
    return {"p50": round(ordered[last // 2], 4), "p99": round(ordered[int(0.99 * last)], 4)}
