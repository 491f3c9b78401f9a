"""From settings and a plan to the records by which ranks are started and loaded."""

from __future__ import annotations

from pathlib import Path

from budget.plan import Plan
from budget.wish import PAGE
from homeserve.engine.request import EngineLimits
from homeserve.engine.scheduler import plan_bytes_limit, result_bytes_limit
from homeserve.fleet import FleetSpec
from homeserve.layouts.ranks import UNIFIED, RankPlan
from homeserve.settings import Settings
from homeserve.sizing import logit_row_limit, row_limit, state_slots
from homeserve.wire.records import LoadSpec

COMPILE_SILENCE_S = 900.0
"""How long a rank on a card may tell nothing new of its load: a first start compiles kernels, on a slow machine one for
minutes."""


def fleet_spec(settings: Settings, limits: EngineLimits, ranks: RankPlan) -> FleetSpec:
    """What the ranks' processes are."""
    return FleetSpec(
        ranks=ranks.ranks,
        backend=ranks.devices[0].backend,
        device_index=0,
        devices=ranks.devices,
        threads=ranks.threads,
        isa=settings.isa or "",
        plans_in_flight=ranks.plans_in_flight,
        plan_timeout_s=settings.plan_timeout_s,
        slot_bytes=plan_bytes_limit(limits),
        report_slot_bytes=result_bytes_limit(limits),
        fault=settings.fault,
        capture_dir=settings.capture_dir,
        log_level=settings.log_level.upper(),
        cores=ranks.cores,
        acts=ranks.acts,
        unified=ranks.memory_domain == UNIFIED,
        weights_copy=ranks.flip and ranks.memory_domain != UNIFIED and settings.image_spill is None,
        transit_bytes=ranks.transit_bytes,
        spin_us=ranks.spin_us,
        load_silence_s=COMPILE_SILENCE_S if ranks.on_cards else FleetSpec.load_silence_s,
    )


def load_spec(
    settings: Settings, path: str, plan: Plan, limits: EngineLimits, ranks: RankPlan, images: str, cache: Path
) -> LoadSpec:
    """What the ranks load: the checkpoint at `path`. `images` is the folder of weights ready made, or empty."""
    return LoadSpec(
        path=path,
        kv_slots=plan.kv_tokens,
        kv_type=settings.kv_type,
        rows=row_limit(settings, plan),
        logit_rows=logit_row_limit(plan),
        lanes=limits.running,
        lane_pages=-(-plan.context // PAGE),
        deterministic=settings.deterministic,
        state_slots=state_slots(plan),
        window_slots=limits.window_slots,
        layout=ranks.layout,
        ranges=ranks.ranges if ranks.ranks > 1 else (),
        weight_vector=ranks.weight_vector,
        token_vector=ranks.token_vector,
        flip=ranks.flip,
        transit_bytes=ranks.transit_bytes,
        image_dir=images,
        drafts=plan.drafts,
        cache_dir=str(cache),
        drafts_test=settings.drafts_test,
    )
