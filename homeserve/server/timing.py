"""What an answer tells about its own making: `usage`, and the `homeserve` block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from homeserve.engine.request import Timings
from homeserve.engine.speculation import DraftCounts
from homeserve.server.shape import Counts


def usage_block(counts: Counts) -> dict[str, Any]:
    """OpenAI's `usage`. `prompt_tokens` counts each prompt once, however many choices it has."""
    return {
        "prompt_tokens": counts.prompt,
        "completion_tokens": counts.completion,
        "total_tokens": counts.prompt + counts.completion,
        "prompt_tokens_details": {"cached_tokens": counts.cached},
        "completion_tokens_details": {"reasoning_tokens": counts.thought},
    }


def timing_block(
    request_id: str,
    timings: Sequence[Timings],
    *,
    counts: Counts,
    drafts: Sequence[DraftCounts] | None = None,
) -> dict[str, Any]:
    """Times in ms over all sequences of a request; null for what did not happen. `queue_ms` is the first sequence's
    wait for a place, `ttft_ms` runs to the first token of any, `decode_ms` from there to the last token of all.
    `drafts` of each sequence are summed up; None where the server drafts nothing."""
    submitted = min(t.submitted for t in timings)
    scheduled = _earliest([t.scheduled for t in timings])
    first = _earliest([t.first_token for t in timings])
    ends = [t.finished for t in timings if t.finished is not None]
    decode_s = max(ends) - first if first is not None and len(ends) == len(timings) else None
    prefill_s = first - scheduled if first is not None and scheduled is not None else None
    decoded = counts.completion - len(timings)
    return {
        "request_id": request_id,
        "queue_ms": _ms(scheduled - submitted if scheduled is not None else None),
        "ttft_ms": _ms(first - submitted if first is not None else None),
        "prefill_ms": _ms(prefill_s),
        "decode_ms": _ms(decode_s),
        "prefill_tok_s": _rate(counts.prompt - counts.cached, prefill_s),
        "decode_tok_s": _rate(decoded, decode_s),
        "cached_tokens": counts.cached,
        "flips_crossed": max(t.flips_crossed for t in timings),
        "restarts": max(t.restarts for t in timings),
        "draft": None if drafts is None else _summed(drafts).as_json(),
    }


def _summed(drafts: Sequence[DraftCounts]) -> DraftCounts:
    total = DraftCounts()
    for counts in drafts:
        total.add(counts)
    return total


def _earliest(moments: list[float | None]) -> float | None:
    known = [moment for moment in moments if moment is not None]
    return min(known) if known else None


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1e3 * max(0.0, seconds), 3)


def _rate(count: int, seconds: float | None) -> float | None:
    return round(count / seconds, 2) if seconds and count > 0 else None
