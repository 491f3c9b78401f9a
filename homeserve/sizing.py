"""From settings, a model and a box to sizes: what a plan may hold, how large the pool is, or why it does not fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from budget.advice import Subject, answer
from budget.facts import KV_BITS, MIB, Box
from budget.ledger import MOMENTS, PIPELINE, TENSOR, Line, held_bytes, peak_bytes
from budget.plan import Plan, Refusal, Unknown, WishError
from budget.question import flags
from budget.ranks import act_sizes, decode_groups, largest, plans_in_flight
from budget.wish import PAGE, Wish
from homeserve.cards import rank_devices
from homeserve.engine.request import EngineLimits, FlipLimits, LayoutLimits, NoFlip
from homeserve.engine.scheduler import PROMPT_LOGPROB_ROWS
from homeserve.errors import BudgetError, SettingError, WorkerOutOfMemory
from homeserve.layouts.ranks import DISCRETE, UNIFIED, RankPlan, rank_plan
from homeserve.model_facts import ModelFacts
from homeserve.settings import Settings, flag, flip_mode, flip_said, options, why_no_drafting, why_no_flip

_SMALLER = "use a smaller model or quantisation, or free some memory"
_WORTH_SAYING = ("kv_tokens", "context", "max_running", "chunk")
"""Settings that a refusal may tell to change, where they differ from what was asked."""
_OF_RANKS = ("layout", "pipeline_ratio", "weight_vector", "token_vector")
"""Settings that only several ranks have."""


def plan_of(settings: Settings, facts: ModelFacts, box: Box, *, among: bool = False) -> Plan:
    """`among`: of the cards in `--devices` the planner chooses which to use. Raises SettingError for a context that the
    model was not made for and for drafts that it cannot make, BudgetError where memory lacks."""
    if facts.why_no_drafts and settings.draft not in ("auto", "off"):
        what = f"{settings.sources.get('draft', '--draft')} {settings.draft}: {facts.why_no_drafts}"
        raise SettingError(what, field="draft", fix="leave --draft out, or use a model with a whole drafting block")
    wish = wish_of(settings, box, among=among)
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
    if flip_said(settings) and not outcome.flip.fits:
        why = f"{settings.sources.get('flip', '--flip')} {settings.flip}: {outcome.flip.why_not or 'one layout serves'}"
        raise BudgetError(why, field="flip", fix=f"leave --flip out, or {_SMALLER}")
    return outcome


def wish_of(settings: Settings, box: Box, *, among: bool = False) -> Wish:
    """What is asked of the planner. The reference backend holds weights and KV rows as float32, whatever their type
    rounds them to. Without a word about floors each kind of device has its own."""
    exact, usable = settings.backend == "reference", box.cpu.usable if box.cpu is not None else 1
    cards = settings.cards
    floor = None if cards and "floor_mib" not in settings.sources else settings.floor_mib * MIB
    return Wish(
        context=settings.context,
        kv_tokens=settings.kv_tokens,
        kv_type="f32" if exact else settings.kv_type,
        running=settings.max_running,
        chunk=settings.chunk,
        devices=() if among else cards or ("cpu",),
        in_order=bool(cards) and not among,
        twice=settings.testing,
        among=cards if among else (),
        cpu_ranks=1 if cards else settings.ranks,
        unified=settings.ranks > 1 and settings.memory == UNIFIED,
        layout=PIPELINE if settings.deterministic and settings.ranks > 1 else settings.layout,
        flip="off" if flip_mode(settings) == "off" else "on" if flip_said(settings) else "auto",
        image_spill=settings.image_spill is not None,
        weight_vector=settings.weight_vector,
        token_vector=settings.token_vector,
        pipeline_ratio=settings.pipeline_ratio,
        cpu_moe=0 if cards else -1,
        floor_bytes=floor,
        threads=settings.threads or max(1, usable // settings.ranks),
        cores=usable,
        draft=settings.draft != "off",
        drafts=_drafts_said(settings),
        resident=False,
        like_cpu=bool(cards),
        dense=4 if exact else 0,
        prefix_cache=settings.prefix_cache,
    )


def _drafts_said(settings: Settings) -> int:
    """The number of `--draft N`; 0 for auto and off."""
    return int(settings.draft) if settings.draft.isdigit() else 0


def why_nothing_is_drafted(settings: Settings, facts: ModelFacts, plan: Plan) -> str:
    """In the words of whoever is in the way first: the settings, the model, the box; "" where drafts are made."""
    if plan.drafts:
        return ""
    return why_no_drafting(settings) or facts.why_no_drafts or plan.no_drafts


def row_limit(settings: Settings, plan: Plan) -> int:
    """Rows of the largest plan: a chunk of prompts beside one row of each running request and one of each draft."""
    return settings.chunk + plan.running * (1 + plan.drafts)


def logit_row_limit(plan: Plan) -> int:
    """Rows of one plan whose logits are asked for: those of each lane, and those of `echo` with logprobs."""
    return plan.running * (1 + plan.drafts) + PROMPT_LOGPROB_ROWS


def ranks_of_plan(settings: Settings, plan: Plan, box: Box, cores: Sequence[int]) -> RankPlan:
    """What each rank is. `cores` are the hardware threads, one of each physical core, that this process may run on."""
    layout, ranks, flip = plan.layouts[0], len(plan.ranks), plan.flip
    serving = (PIPELINE, TENSOR) if flip.fits else (layout,)
    rows = row_limit(settings, plan)
    return rank_plan(
        layout=flip.resting if flip.fits else layout,
        ranks=ranks,
        layers=len(plan.shape.layers),
        ranges=flip.ranges if flip.fits else plan.ranges,
        kv_sources=dict(plan.shape.kv_sources),
        weight_vector=flip.weight_vector if flip.fits else plan.weight_vector,
        token_vector=flip.token_vector if flip.fits else plan.token_vector,
        threads=settings.threads,
        usable=box.cpu.usable if box.cpu is not None else len(cores),
        cores=cores,
        acts=largest([act_sizes(plan.shape, ranks, name, rows, plan.running, plan.drafts) for name in serving]),
        memory_domain=UNIFIED if settings.memory == UNIFIED and ranks > 1 else DISCRETE,
        flip=flip.fits,
        transit_bytes=flip.transit_file_bytes,
        devices=rank_devices(settings, box, [plan.ceilings.devices[index] for index in plan.ranks]),
    )


def engine_limits(settings: Settings, plan: Plan, ranks: RankPlan) -> EngineLimits:
    """The bounds of the engine; where the layout may change, those of the layout at rest."""
    at_rest = layout_limits(ranks, ranks.layout, plan.drafts)
    return EngineLimits(
        context=plan.context,
        kv_tokens=plan.kv_tokens,
        running=plan.running,
        waiting=settings.max_waiting,
        chunk=settings.chunk,
        prefill_delay=settings.max_prefill_delay,
        plans_in_flight=at_rest.plans_in_flight,
        decode_groups=at_rest.decode_groups,
        token_vector=at_rest.token_vector,
        prefix_cache=settings.prefix_cache,
        recurrent=is_recurrent(plan),
        checkpoints=plan.checkpoints,
        windows=tuple(plan.window_slots.items()),
        layout=ranks.layout,
        drafts=at_rest.drafts,
        hidden=plan.shape.hidden,
        drafts_adapt=settings.draft == "auto",
        flip=flip_limits(settings, plan, ranks) if ranks.flip else None,
        no_flip=no_flip(settings, plan),
    )


def layout_limits(ranks: RankPlan, layout: str, drafts: int = 0) -> LayoutLimits:
    """`drafts`: the most of a round, where anything is drafted."""
    return LayoutLimits(
        name=layout,
        decode_groups=decode_groups(ranks.ranks, layout),
        plans_in_flight=plans_in_flight(ranks.ranks, layout),
        token_vector=ranks.token_vector if layout == TENSOR else (),
        drafts=drafts if ranks.ranks == 1 or layout == TENSOR else 0,
    )


def flip_limits(settings: Settings, plan: Plan, ranks: RankPlan) -> FlipLimits:
    """What the engine must know to change the layout of such ranks."""
    flip, layers = plan.flip, plan.held_layers
    limits = FlipLimits(
        layouts={name: layout_limits(ranks, name, plan.drafts) for name in ranks.layouts},
        resting=ranks.layout,
        page_bytes=flip.page_bytes,
        state_bytes=flip.state_bytes,
        transit_bytes=flip.transit_bytes,
        cache_bytes=flip.cache_bytes,
        policy=flip_mode(settings),
        dwell_s=settings.flip_dwell_s,
        park_deadline_s=settings.park_deadline_s,
        unified=ranks.memory_domain == UNIFIED,
        group_layers=tuple(
            sum(layer.kv is not None and layer.kv.window == window for layer in layers)
            for window in (0, *plan.window_slots)
        ),
        state_layers=sum(bool(layer.state_elements or layer.conv_elements) for layer in layers),
        estimates={name: (speed.prefill_tok_s, speed.decode_tok_s) for name, speed in plan.speeds.items()},
    )
    return limits if plan.flip_s is None else replace(limits, cost_s=2 * plan.flip_s)


def no_flip(settings: Settings, plan: Plan) -> NoFlip:
    """Why the layout stays, where it does."""
    if len(plan.ranks) == 1:
        return NoFlip("single_rank", "one rank has one layout: there is nothing to flip to")
    if flip_mode(settings) == "off":
        return NoFlip("flip_off", f"no flip is to be: {why_no_flip(settings)}")
    flip = plan.flip
    if not flip.needed_bytes:
        return NoFlip("does_not_fit", flip.why_not or "one layout serves")
    device = next((each.id for each in plan.ceilings.devices if each.index == flip.short_device), None)
    needed, available = (round(size / MIB, 3) for size in (flip.needed_bytes, flip.available_bytes))
    return NoFlip("does_not_fit", flip.why_not, needed, available, device)


def state_slots(plan: Plan) -> int:
    """Slots of recurrent states on a rank: one for each lane, and the checkpoints; 0 without recurrent layers."""
    return plan.running + plan.checkpoints if is_recurrent(plan) else 0


def is_recurrent(plan: Plan) -> bool:
    """Whether anything of a request is kept that its tokens' rows are not: a recurrent state, or the hidden state from
    which the next draft goes on."""
    return any(layer.state_elements or layer.conv_elements for layer in plan.held_layers)


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
        for layer in plan.held_layers
        if (kv := layer.kv) is not None
    )


def _missing_for(refusal: Refusal) -> list[Line]:
    """The lines that the refusal's sum is made of, at the moment when it is largest: those of the device that lacks it,
    and of the ones that it shares its memory with where theirs are in the sum."""
    devices = refusal.ceilings.devices
    alone = peak_bytes(refusal.lines, refusal.device) == refusal.needed_bytes
    pool = devices[refusal.device].pool
    counted = {refusal.device} if alone else {device.index for device in devices if device.pool == pool}
    moment = max(MOMENTS, key=lambda at: sum(held_bytes(refusal.lines, index, at) for index in counted))
    return [line for line in refusal.lines if line.device in counted and moment in line.held]


def _too_large(settings: Settings, refusal: Refusal) -> BudgetError:
    parts = " + ".join(f"{line.name} {_mib(line.bytes)}" for line in _missing_for(refusal))
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
    if refusal.nearest.get("draft") == "off" != settings.draft:
        told["draft"] = "off"
    if (settings.ranks > 1 or settings.cards) and refusal.nearest["devices"] == "cpu":
        told["devices"] = "cpu"
    given = [name for name in _OF_RANKS if getattr(settings, name) not in ("auto", ())]
    away = [name for name in given if refusal.nearest[name] == "auto"]
    if flip_mode(settings) != "off" and flip_said(settings) and refusal.nearest["flip"] != "manual":
        away.append("flip")
    if away and "devices" not in told:
        field = away[-1]
    else:
        field = "kv_tokens" if settings.kv_tokens else "context" if settings.context else "model"
    without = f", without {' and '.join(map(flag, away))}" if away else ""
    same = "the same" if away else "what was asked"
    return BudgetError(message, field=field, fix=f"the nearest that fits is {' '.join(flags(told)) or same}{without}")


def _mib(count: int) -> str:
    """Bytes as MiB for people, rounded up so that a sum never looks smaller than it is."""
    return f"{-(-count // MIB):d}"
