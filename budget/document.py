"""The JSON of `homeserve budget --json` and of `/v1/homeserve/budget`: names as docs/budget.schema.json has them.

Unknown is null, never 0. Sizes are MiB with two decimals, so a sum of lines agrees with its total to within half a
hundredth for each line. Nothing is renamed between versions; names are added.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from budget.ceilings import Aperture, Ceilings, Device
from budget.facts import MIB, Doubt, MemoryFacts
from budget.ledger import MOMENTS, Line, held_bytes, peak_bytes
from budget.plan import Advice, Plan, Priced, Refusal, Unknown
from budget.question import Question, run_settings
from budget.speed import LayoutSpeed

SCHEMA = 1

Outcome = Plan | Refusal | Unknown | None


def document(
    ceilings: Ceilings,
    host: MemoryFacts | None,
    outcome: Outcome,
    doubts: Iterable[Doubt],
    question: Question | None = None,
    models: Sequence[Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """`question` is how the plan was asked for (the commands name its model); `models` what is on disk and whether it
    fits, where no model was asked for."""
    asked = question or Question(outcome.shape.name if isinstance(outcome, Plan | Refusal) else None)
    found: dict[str, Any] = {
        "schema": SCHEMA,
        "host": _host(host),
        "devices": [_device(device) for device in ceilings.devices],
        "doubts": [_doubt(doubt) for doubt in doubts],
        "plan": _plan(outcome, asked) if isinstance(outcome, Plan) else None,
        "refusal": _refusal(outcome, asked) if isinstance(outcome, Refusal) else None,
        "unknown": {"why": outcome.why} if isinstance(outcome, Unknown) else None,
    }
    if models is not None:
        found["models"] = [dict(model) for model in models]
    return found


def mib(count: float | None) -> float | None:
    return None if count is None else round(count / MIB, 2)


def free_min_bytes(ceilings: Ceilings, lines: Sequence[Line], device: Device) -> int | None:
    """What stays free on `device` at the worst moment, the floor included; None where its ceiling is unknown.

    Devices that share DRAM leave each other less: of a unified device the carve-out is its own, the rest is what all of
    its pool leave together.
    """
    if device.ceiling_bytes is None:
        return None
    own = device.ceiling_bytes + device.floor_bytes - peak_bytes(lines, device.index)
    pool = ceilings.pools[device.pool] if device.pool < len(ceilings.pools) else None
    members = [other for other in ceilings.devices if other.pool == device.pool]
    if pool is None or len(members) < 2:
        return own
    left = []
    for moment in MOMENTS:
        shared = sum(max(0, held_bytes(lines, each.index, moment) - each.private_bytes) for each in members)
        private = max(0, device.private_bytes - held_bytes(lines, device.index, moment))
        left.append(pool - shared + private)
    return min(own, min(left) + max(each.floor_bytes for each in members))


# ------------------------------------------------------------------------------------------------------------- the box


def _host(memory: MemoryFacts | None) -> dict[str, Any]:
    if memory is None:
        return dict.fromkeys(("total_mib", "limit_mib", "limit_source", "available_mib", "swap_mib"))
    return {
        "total_mib": mib(memory.total_bytes),
        "limit_mib": mib(memory.limit_bytes),
        "limit_source": memory.limit_source,
        "available_mib": mib(memory.available_bytes),
        "swap_mib": mib(memory.swap_bytes),
    }


def _device(device: Device) -> dict[str, Any]:
    return {
        "index": device.index,
        "id": device.id,
        "vendor": device.vendor,
        "name": device.name,
        "arch": device.arch,
        "kind": device.kind,
        "usable": device.usable,
        "why_not": device.why_not,
        "total_mib": mib(device.total_bytes),
        "reserved_mib": mib(device.reserved_bytes),
        "free_mib": mib(device.free_bytes),
        "gtt_mib": mib(device.gtt_bytes),
        "ceiling_mib": mib(device.ceiling_bytes),
        "floor_mib": mib(device.floor_bytes),
        "bar1": None if device.bar1 is None else _aperture(device.bar1),
    }


def _aperture(bar1: Aperture) -> dict[str, Any]:
    return {
        "total_mib": mib(bar1.total_bytes),
        "free_mib": mib(bar1.free_bytes),
        "p2p": bar1.p2p,
        "why": bar1.why,
    }


def _doubt(doubt: Doubt) -> dict[str, str]:
    return {"where": doubt.where, "what": doubt.what, "taken": doubt.taken}


# ------------------------------------------------------------------------------------------------------------ the plan


def _plan(plan: Plan, asked: Question) -> dict[str, Any]:
    devices = plan.ceilings.devices
    return {
        "model": plan.shape.name,
        "option": plan.option,
        "choice": plan.choice,
        "layouts": _layouts(plan),
        "ranks": list(plan.ranks),
        "rank_tokens": list(plan.rank_tokens),
        "weight_vector": list(plan.weight_vector),
        "token_vector": list(plan.token_vector),
        "expert_layers": plan.expert_layers,
        "context_tokens": plan.context,
        "kv_tokens": plan.kv_tokens,
        "most_kv_tokens": plan.most_tokens or plan.kv_tokens,
        "kv_type": plan.wish.kv_type,
        "kv_windows": _windows(plan),
        "max_running_requests": plan.running,
        "binds": {"device": plan.binds.device, "line": plan.binds.line, "why": plan.binds.why},
        "ledger": [_line(line) for line in plan.lines],
        "peak_mib": [mib(peak_bytes(plan.lines, device.index)) for device in devices],
        "free_min_mib": [mib(free_min_bytes(plan.ceilings, plan.lines, device)) for device in devices],
        "speed": {layout: _speed(speed) for layout, speed in plan.speeds.items()},
        "flip": _flip(plan),
        "drafting": {"drafts": plan.drafts, "why_not": plan.no_drafts or None},
        "priced": [_priced(option) for option in plan.priced],
        "advice": [_advice(advice) for advice in plan.advice],
        "command": asked.up_line(run_settings(plan)),
    }


def _layouts(plan: Plan) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for layout in plan.layouts:
        found[layout] = {"ranks": list(plan.ranks)}
        if layout == "pipeline":
            found[layout]["ranges"] = [list(each) for each in plan.ranges]
    return found


def _flip(plan: Plan) -> dict[str, Any] | None:
    """Null where no flip was looked at; without one `why_not` says why, and the rest is null or empty."""
    terms = plan.flip
    if plan.flip_s is None and not terms.why_not:
        return None
    return {
        "seconds": None if plan.flip_s is None else _finite(plan.flip_s, 3),
        "break_even_tokens": plan.break_even_tokens,
        "fits": terms.fits,
        "why_not": terms.why_not or None,
        "needed_mib": mib(terms.needed_bytes or None),
        "available_mib": mib(terms.available_bytes or None),
        "resting": terms.resting or None,
        "weights_from": terms.home or None,
        "addressable_tokens": dict(terms.addressable),
        "transit_mib": mib(terms.transit_bytes) if terms.fits else None,
        "cache_mib": mib(terms.cache_bytes) if terms.fits else None,
        "copy_mib": mib(terms.copy_bytes) if terms.fits else None,
        "image_mib": [mib(size) for size in terms.image_bytes],
        "peaks": [
            {"phase": phase, "rank_mib": [mib(size) for size in sizes], "shared_mib": mib(terms.shared_peaks[phase])}
            for phase, sizes in terms.peaks.items()
        ],
    }


def _windows(plan: Plan) -> list[dict[str, int]]:
    """The pools of layers with a window."""
    counts = Counter(layer.kv.window for layer in plan.held_layers if layer.kv is not None)
    return [
        {"window_tokens": window, "layers": counts[window], "slots": slots}
        for window, slots in plan.window_slots.items()
        if counts[window]
    ]


def _line(line: Line) -> dict[str, Any]:
    return {
        "device": line.device,
        "line": line.name,
        "mib": mib(line.bytes),
        "held": list(line.held_words),
        "source": line.source,
        "note": line.note,
    }


def _speed(speed: LayoutSpeed) -> dict[str, Any]:
    return {
        "prefill_tok_s": _finite(speed.prefill_tok_s, 2),
        "decode_tok_s": _finite(speed.decode_tok_s, 2),
        "low": _finite(speed.low, 3),
        "high": _finite(speed.high, 3),
        "note": speed.note,
    }


def _priced(option: Priced) -> dict[str, Any]:
    return {
        "option": option.option,
        "kv_tokens": option.kv_tokens,
        "prefill_tok_s": _finite(option.prefill_tok_s, 2),
        "decode_tok_s": _finite(option.decode_tok_s, 2),
        "why_not": option.why_not,
    }


def _advice(advice: Advice) -> dict[str, Any]:
    return {"flags": dict(advice.flags), "gain_tokens": advice.gain_tokens, "of": advice.of, "text": advice.text}


def _refusal(refusal: Refusal, asked: Question) -> dict[str, Any]:
    nearest = refusal.nearest
    return {
        "model": refusal.shape.name,
        "option": refusal.option,
        "reason": refusal.reason,
        "needed_mib": mib(refusal.needed_bytes),
        "available_mib": mib(refusal.available_bytes),
        "device": refusal.device,
        "ledger": [_line(line) for line in refusal.lines],
        "nearest": None if nearest is None else dict(nearest),
        "nearest_text": refusal.nearest_text,
        "nearest_command": None if nearest is None else asked.budget_line(nearest),
        "priced": [_priced(option) for option in refusal.priced],
    }


def _finite(number: float | None, digits: int) -> float | None:
    """Rounded; null for what is not a number that JSON has."""
    return None if number is None or not math.isfinite(number) else round(number, digits)
