"""From settings, a model and a box to sizes: what a plan may hold, how large the pool is, or why it does not fit."""

from __future__ import annotations

from budget.facts import HostFacts, MemoryFacts
from budget.plan import MIB, HostPlan, Refusal, Wish, mib, plan_host
from homeserve.engine.request import EngineLimits
from homeserve.engine.scheduler import PROMPT_LOGPROB_ROWS
from homeserve.errors import BudgetError, SettingError, WorkerOutOfMemory
from homeserve.model_facts import ModelFacts
from homeserve.settings import Settings, flag

PLANS_IN_FLIGHT = 2
"""One computes while the next one lies ready: a rank never waits for the engine to read a result."""

_SMALLER = "use a smaller model or quantisation, or free some memory"


def plan_of(settings: Settings, facts: ModelFacts, host: HostFacts) -> HostPlan:
    """Raises SettingError for a context that the model was not made for, BudgetError where memory lacks."""
    if settings.context > facts.info.context:
        raise SettingError(
            f"--context {settings.context} is more than the {facts.info.context} tokens that {facts.info.id} was"
            " trained for",
            field="context",
            fix=f"use --context {facts.info.context} or less",
        )
    if settings.kv_tokens and settings.context > settings.kv_tokens:
        raise SettingError(
            f"--context {settings.context} does not fit the {settings.kv_tokens} tokens of --kv-tokens",
            field="kv_tokens",
            fix="raise --kv-tokens or lower --context",
        )
    plan = plan_host(host.memory, facts.shape, wish_of(settings))
    if isinstance(plan, Refusal):
        raise _too_large(settings, plan, host.memory)
    return plan


def row_limit(settings: Settings) -> int:
    """Rows of the largest plan: a chunk of prompts beside one row of each running request."""
    return settings.chunk + settings.max_running


def logit_row_limit(settings: Settings) -> int:
    """Rows of one plan whose logits are asked for: one of each lane, and those of `echo` with logprobs."""
    return settings.max_running + PROMPT_LOGPROB_ROWS


def wish_of(settings: Settings) -> Wish:
    return Wish(
        context=settings.context,
        kv_tokens=settings.kv_tokens,
        running=settings.max_running,
        rows=row_limit(settings),
        logit_rows=logit_row_limit(settings),
        floor_bytes=settings.floor_mib * MIB,
    )


def engine_limits(settings: Settings, plan: HostPlan) -> EngineLimits:
    return EngineLimits(
        context=plan.context,
        kv_tokens=plan.kv_tokens,
        running=settings.max_running,
        waiting=settings.max_waiting,
        chunk=settings.chunk,
        prefill_delay=settings.max_prefill_delay,
        plans_in_flight=PLANS_IN_FLIGHT,
        prefix_cache=settings.prefix_cache,
    )


def killed_for_memory(
    settings: Settings, facts: ModelFacts, plan: HostPlan, memory: MemoryFacts, error: WorkerOutOfMemory
) -> BudgetError:
    """What to say when the plan fitted and the kernel killed the worker all the same. `memory` is as it is since then.

    Either something else has taken memory meanwhile (then the plan does not fit any more, and what fits is said), or
    the plan was too small by something that it does not know: then half the pool is a good next try.
    """
    held = " + ".join(f"{line.name} {mib(line.bytes)}" for line in plan.lines)
    message = (
        f"{error.message} while it loaded {facts.info.id}: planned were {held} = {mib(plan.total_bytes)} MiB, and"
        f" {memory.available_bytes // MIB} MiB are free now under {memory.limit_source}"
    )
    again = plan_host(memory, facts.shape, wish_of(settings))
    if isinstance(again, Refusal):
        refusal = _too_large(settings, again, memory)
        return BudgetError(message, field=refusal.field, fix=refusal.fix)
    half = plan.kv_tokens // 2 // Wish.page * Wish.page
    pool = half * facts.shape.kv_bytes_per_token
    if half == 0 or pool < plan.total_bytes // 16:  # the pool is not what fills the memory
        return BudgetError(message, field="model", fix=_SMALLER)
    name = "context" if settings.context > half else "kv_tokens"
    return BudgetError(message, field=name, fix=f"try {flag(name)} {half}, or free some memory")


def _too_large(settings: Settings, refusal: Refusal, memory: MemoryFacts) -> BudgetError:
    source = memory.limit_source
    message = (
        f"the model does not fit this machine: {refusal.arithmetic} (memory left under {source}, less --floor-mib)"
    )
    if refusal.nearest_tokens == 0:
        return BudgetError(message, field="model", fix=_SMALLER)
    name = "context" if settings.context and not settings.kv_tokens else "kv_tokens"
    return BudgetError(message, field=name, fix=f"the most that fits is {flag(name)} {refusal.nearest_tokens}")
