"""From settings, a model and a box to sizes: what a plan may hold, how large the pool is, or why it does not fit."""

from __future__ import annotations

from collections.abc import Sequence

from budget.advice import Subject, answer
from budget.facts import KV_BITS, MIB, Box
from budget.ledger import PIPELINE
from budget.plan import Plan, Refusal, Unknown, WishError
from budget.question import flags
from budget.ranks import act_sizes
from budget.wish import PAGE, Wish
from homeserve.engine.request import EngineLimits
from homeserve.engine.scheduler import PROMPT_LOGPROB_ROWS
from homeserve.errors import BudgetError, SettingError, WorkerOutOfMemory
from homeserve.layouts.ranks import DISCRETE, UNIFIED, RankPlan, rank_plan
from homeserve.model_facts import ModelFacts
from homeserve.settings import Settings, flag, options

_SMALLER = "use a smaller model or quantisation, or free some memory"
_WORTH_SAYING = ("kv_tokens", "context", "max_running", "chunk")
"""Settings that a refusal may tell to change, where they differ from what was asked."""
_OF_RANKS = ("layout", "pipeline_ratio", "weight_vector", "token_vector")
"""Settings that only several ranks have."""


def plan_of(settings: Settings, facts: ModelFacts, box: Box) -> Plan:
    """Raises SettingError for a context that the model was not made for, BudgetError where memory lacks."""
    wish = wish_of(settings, box)
    subject = Subject(box, facts.shape, cpu_kv_types=frozenset(options()["kv_type"].choices), file_fixed=True)
    try:
        outcome = answer(subject, wish)
    except WishError as error:
        said = flag(error.field)
        what = error.what if error.what.startswith(said) else f"{said}: {error.what}"
        raise SettingError(what, field=error.field, fix=error.fix) from None
    if isinstance(outcome, Unknown):
        raise BudgetError(outcome.why, field="devices", fix="see homeserve probe")
    if isinstance(outcome, Refusal):
        raise _too_large(settings, outcome)
    return outcome


def wish_of(settings: Settings, box: Box) -> Wish:
    """This version computes on the CPU alone, whatever else the box has. The reference backend holds weights and KV
    rows as float32, whatever their type rounds them to."""
    exact, usable = settings.backend == "reference", box.cpu.usable if box.cpu is not None else 1
    return Wish(
        context=settings.context,
        kv_tokens=settings.kv_tokens,
        kv_type="f32" if exact else settings.kv_type,
        running=settings.max_running,
        chunk=settings.chunk,
        logit_rows=settings.max_running + PROMPT_LOGPROB_ROWS,
        devices=("cpu",),
        cpu_ranks=settings.ranks,
        unified=settings.ranks > 1 and settings.memory == UNIFIED,
        layout=PIPELINE if settings.deterministic and settings.ranks > 1 else settings.layout,
        weight_vector=settings.weight_vector,
        token_vector=settings.token_vector,
        pipeline_ratio=settings.pipeline_ratio,
        floor_bytes=settings.floor_mib * MIB,
        threads=settings.threads or max(1, usable // settings.ranks),
        cores=usable,
        draft=False,
        dense=4 if exact else 0,
        prefix_cache=settings.prefix_cache,
    )


def row_limit(settings: Settings, plan: Plan) -> int:
    """Rows of the largest plan: a chunk of prompts beside one row of each running request."""
    return settings.chunk + plan.running


def logit_row_limit(plan: Plan) -> int:
    """Rows of one plan whose logits are asked for: one of each lane, and those of `echo` with logprobs."""
    return plan.running + PROMPT_LOGPROB_ROWS


def ranks_of_plan(settings: Settings, plan: Plan, box: Box, cores: Sequence[int]) -> RankPlan:
    """What each rank is. `cores` are the hardware threads, one of each physical core, that this process may run on."""
    layout, ranks = plan.layouts[0], len(plan.ranks)
    return rank_plan(
        layout=layout,
        ranks=ranks,
        layers=len(plan.shape.layers),
        ranges=plan.ranges,
        kv_sources=dict(plan.shape.kv_sources),
        weight_vector=plan.weight_vector,
        token_vector=plan.token_vector,
        threads=settings.threads,
        usable=box.cpu.usable if box.cpu is not None else len(cores),
        cores=cores,
        acts=act_sizes(plan.shape, ranks, layout, row_limit(settings, plan), plan.running),
        memory_domain=UNIFIED if settings.memory == UNIFIED and ranks > 1 else DISCRETE,
    )


def engine_limits(settings: Settings, plan: Plan, ranks: RankPlan) -> EngineLimits:
    return EngineLimits(
        context=plan.context,
        kv_tokens=plan.kv_tokens,
        running=plan.running,
        waiting=settings.max_waiting,
        chunk=settings.chunk,
        prefill_delay=settings.max_prefill_delay,
        plans_in_flight=ranks.plans_in_flight,
        decode_groups=ranks.decode_groups,
        token_vector=ranks.token_vector,
        prefix_cache=settings.prefix_cache,
        recurrent=is_recurrent(plan),
        checkpoints=plan.checkpoints,
        windows=tuple(plan.window_slots.items()),
    )


def state_slots(plan: Plan) -> int:
    """Slots of recurrent states on a rank: one for each lane, and the checkpoints; 0 without recurrent layers."""
    return plan.running + plan.checkpoints if is_recurrent(plan) else 0


def is_recurrent(plan: Plan) -> bool:
    return any(layer.state_elements or layer.conv_elements for layer in plan.shape.layers)


def killed_for_memory(
    settings: Settings, facts: ModelFacts, plan: Plan, box: Box, error: WorkerOutOfMemory
) -> BudgetError:
    """What to say when the plan fitted and the kernel killed the worker all the same. `box` is as it is since then.

    Either something else has taken memory meanwhile (then the plan does not fit any more, and what fits is said), or
    the plan was too small by something that it does not know: then half the pool is a good next try.
    """
    memory = box.memory
    assert memory is not None
    held = " + ".join(f"{line.name} {_mib(line.bytes)}" for line in plan.lines)
    total = sum(line.bytes for line in plan.lines)
    message = (
        f"{error.message} while it loaded {facts.info.id}: planned were {held} = {_mib(total)} MiB, and"
        f" {(memory.available_bytes or 0) // MIB} MiB are free now under {memory.limit_source}"
    )
    try:
        plan_of(settings, facts, box)
    except BudgetError as refusal:
        return BudgetError(message, field=refusal.field, fix=refusal.fix)
    half = plan.kv_tokens // 2 // PAGE * PAGE
    if half == 0 or _kv_bytes(plan, plan.kv_tokens) - _kv_bytes(plan, half) < total // 16:
        # the pool is not what fills the memory
        return BudgetError(message, field="model", fix=_SMALLER)
    name = "context" if settings.context > half else "kv_tokens"
    return BudgetError(message, field=name, fix=f"try {flag(name)} {half}, or free some memory")


def _kv_bytes(plan: Plan, tokens: int) -> float:
    """Bytes of KV rows with a pool of so many tokens: no window has more slots than that."""
    slots = plan.window_slots
    bits = KV_BITS[plan.wish.kv_type]
    return sum(
        kv.elements * bits / 8 * (min(tokens, slots[kv.window]) if kv.window else tokens)
        for layer in plan.shape.layers
        if (kv := layer.kv) is not None
    )


def _too_large(settings: Settings, refusal: Refusal) -> BudgetError:
    parts = " + ".join(f"{line.name} {_mib(line.bytes)}" for line in refusal.lines)
    message = f"{refusal.reason}: {parts}"
    if refusal.nearest is None:
        return BudgetError(message, field="model", fix=_SMALLER)
    asked = {"kv_tokens": settings.kv_tokens, "context": settings.context, "max_running": settings.max_running}
    asked["chunk"] = settings.chunk
    told = {name: refusal.nearest[name] for name in _WORTH_SAYING if refusal.nearest[name] not in (asked[name], 0)}
    if refusal.nearest["kv_type"] != settings.kv_type:
        told["kv_type"] = refusal.nearest["kv_type"]
    if refusal.nearest.get("floor_mib", settings.floor_mib) != settings.floor_mib:
        told["floor_mib"] = refusal.nearest["floor_mib"]
    fewer = settings.ranks > 1 and refusal.nearest["devices"] == "cpu"
    if fewer:
        told["devices"] = "cpu"
    away = [flag(name) for name in _OF_RANKS if fewer and getattr(settings, name) not in ("auto", ())]
    without = f", without {' and '.join(away)}" if away else ""
    field = "kv_tokens" if settings.kv_tokens else "context" if settings.context else "model"
    return BudgetError(message, field=field, fix=f"the nearest that fits is {' '.join(flags(told))}{without}")


def _mib(count: int) -> str:
    """Bytes as MiB for people, rounded up so that a sum never looks smaller than it is."""
    return f"{-(-count // MIB):d}"
