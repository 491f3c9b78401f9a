"""What to change: for a plan, which setting gives how much more; for a refusal, the nearest wish that fits.

Nothing here estimates. Every advice is the difference between two plans, made by the same planner from the same box,
and every nearest wish has been planned before it is told: whoever asks again with those settings gets what was
promised.

The nearest wish keeps as much as it can, in this order: what was asked for with smaller KV rows or fewer requests at
once; other devices and layouts than those that were insisted on; a shorter context; the host memory that a profile does
not tell; a smaller quantisation of the same model; and at the end the small default model, which fits almost anywhere.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from budget.ceilings import ceilings
from budget.facts import GIB, KV_BITS, MIB, Box, Doubt, MemoryFacts, ModelShape
from budget.geometry import requantised
from budget.ledger import FLIP, PIPELINE, TENSOR
from budget.plan import Advice, Plan, Refusal, Unknown, WishError, plan
from budget.quants import LADDER, bits_per_weight
from budget.question import settings_of
from budget.wish import DEFAULT_CARD_FLOOR, DEFAULT_HOST_FLOOR, Wish

Outcome = Plan | Refusal | Unknown
Settings = dict[str, str | int]

ADVICE_AT_MOST = 6
_LEAST_GAIN = 256
_ASSUMED_GIB = (4, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128, 192, 256, 512)
_LOWER_FLOORS_MIB = (128, 32, 0)

_COSTS = {
    "kv_type": "smaller KV rows, read a little less exactly",
    "max_running": "fewer requests are computed together",
    "chunk": "smaller prompt chunks: slower prefill",
    "floor_mib": "less memory stays free for others",
    "kv_tokens": "a larger pool than this host gives unasked",
    "draft": "no drafting: slower decode",
    "flip": "one layout for prefill and decode",
}


@dataclass(frozen=True)
class Subject:
    """What is asked about: a model on a box.

    `fallback` is the default model's shape, for when nothing else fits; `held` what homeserve itself holds now, by
    device id. `cpu_kv_types` are the KV types that the CPU backend has (None: all): nothing else is advised for a plan
    on the CPU.
    `file_fixed`: the model is a file that is about to be loaded, so another quantisation is no answer.
    """

    box: Box
    shape: ModelShape
    fallback: ModelShape | None = None
    held: Mapping[str, int] | None = None
    cpu_kv_types: frozenset[str] | None = None
    file_fixed: bool = False

    def has(self, made: Plan, settings: Mapping[str, str | int]) -> bool:
        """Whether the backends of `made` have what `settings` ask for."""
        on_cpu = any(made.ceilings.devices[rank].kind == "cpu" for rank in made.ranks)
        kv_type = str(settings.get("kv_type", ""))
        return not (kv_type and on_cpu and self.cpu_kv_types is not None and kv_type not in self.cpu_kv_types)


def answer(subject: Subject, wish: Wish, *, advise: bool = True) -> Outcome:
    """The plan with advice, or the refusal with the nearest wish that fits. Raises WishError as `plan` does."""
    outcome = _planned(subject, wish)
    if not advise or isinstance(outcome, Unknown):
        return outcome
    if isinstance(outcome, Plan):
        return replace(outcome, advice=tuple(_advice(subject, outcome)))
    found = _nearest(subject, wish)
    if found is None:
        return outcome
    settings, text = found
    return replace(outcome, nearest=settings, nearest_text=text)


def changed(subject: Subject, wish: Wish, settings: Mapping[str, str | int]) -> tuple[Subject, Wish]:
    """The same question with these settings changed, as `homeserve budget` would read them."""
    for name, value in settings.items():
        if name == "quant":
            subject = replace(subject, shape=requantised(subject.shape, str(value)))
        elif name == "assume_ram_mib":
            subject = replace(subject, box=with_memory(subject.box, int(value) * MIB))
        elif name == "shape":
            assert subject.fallback is not None
            subject = replace(subject, shape=subject.fallback)
        else:
            wish = _with_setting(wish, name, value)
    return subject, wish


def with_memory(box: Box, total_bytes: int) -> Box:
    """The box with so much host memory, where its profile does not say how much it has."""
    if box.memory is not None:
        return box
    what = f"{total_bytes // MIB} MiB, because that was asked"
    memory = MemoryFacts(total_bytes, total_bytes, "MemTotal", None)
    return replace(box, memory=memory, doubts=(*box.doubts, Doubt("host memory", "the profile does not say it", what)))


def _with_setting(wish: Wish, name: str, value: str | int) -> Wish:
    change: dict[str, Any]
    match name:
        case "max_running":
            change = {"running": int(value)}
        case "floor_mib":
            change = {"floor_bytes": int(value) * MIB}
        case "draft":
            change = {"draft": value != "off", "drafts": 0 if value in ("off", "auto") else int(value)}
        case "vision":
            change = {name: value not in ("off", "no", "false")}
        case "devices" | "weight_vector" | "token_vector" | "pipeline_ratio":
            if value not in ("auto", "cpu"):
                raise ValueError(f"{name} is only ever set back to auto, or to the CPU alone")
            change = {name: () if value == "auto" else ("cpu",)} | ({"cpu_ranks": 1} if name == "devices" else {})
        case "flip":
            change = {name: "on" if value == "manual" else value}
        case "cpu_moe":
            change = {name: {"auto": -1, "off": 0}.get(str(value), value)}
        case "memory":
            change = {"unified": value == "unified"}
        case "context" | "kv_tokens" | "chunk":
            change = {name: int(value)}
        case _:
            change = {name: str(value)}
    return replace(wish, **change)


def _planned(subject: Subject, wish: Wish) -> Outcome:
    held = subject.held or {}
    return plan(ceilings(subject.box, wish.floor_bytes, held, named_cards(subject.box, wish)), subject.shape, wish)


def _tried(subject: Subject, wish: Wish) -> Outcome | None:
    """None: the change contradicts what else was asked for (numbers of the other layout, where one layout is left)."""
    try:
        return _planned(subject, wish)
    except WishError:
        return None


def named_cards(box: Box, wish: Wish) -> frozenset[str]:
    """Ids of the cards that `--devices` names, by id or as the N-th of their kind."""
    found = set(wish.devices)
    for word, vendor in (("cuda", "nvidia"), ("rocm", "amd")):
        of_kind = [card.id for card in box.cards if card.vendor == vendor]
        found |= {card for n, card in enumerate(of_kind) if {f"{word}:{n}", *([word] if n == 0 else [])} & found}
    return frozenset(found)


# ------------------------------------------------------------------------------------------------------------- advice


def _advice(subject: Subject, made: Plan) -> Iterable[Advice]:
    """The changes that give the most, each planned."""
    found = []
    beside: Settings = {"draft": "off"} if made.no_drafts else {}
    for settings in _changes(subject, made):
        other = _tried(*changed(subject, made.wish, settings))
        if not isinstance(other, Plan) or not subject.has(other, settings):
            continue
        full = bool(made.wish.context) or made.context >= made.shape.context
        gain = other.kv_tokens - made.kv_tokens if full else other.context - made.context
        if gain >= max(_LEAST_GAIN, (made.kv_tokens if full else made.context) // 100):
            costs = "; ".join(_cost(name, value) for name, value in settings.items())
            found.append(Advice(settings | beside, gain, costs, "pool" if full else "context"))
    # Of two that give the same, the first one asks for less.
    best = {advice.gain_tokens: advice for advice in reversed(found)}
    return sorted(best.values(), key=lambda advice: -advice.gain_tokens)[:ADVICE_AT_MOST]


def _cost(name: str, value: str | int) -> str:
    """What a change costs, in a few words."""
    if name != "quant":
        return _COSTS[name]
    bits = bits_per_weight(str(value)) or 0.0
    lose = "a little" if bits > 4.4 else "noticeably" if bits > 3.0 else "much"
    return f"another file of the model, answers lose {lose}"


def _changes(subject: Subject, made: Plan) -> Iterable[Settings]:
    wish = made.wish
    usable = min(made.most_tokens, made.running * made.shape.context)
    if not wish.kv_tokens and not wish.context and usable > made.kv_tokens:
        yield {"kv_tokens": usable}
    for kv_type in smaller_rows(made.shape, wish.kv_type):
        yield {"kv_type": kv_type}
    for running in (made.running // 2, made.running // 4, 1):
        if 0 < running < made.running:
            yield {"max_running": running}
    if wish.chunk > 64:
        yield {"chunk": 64}
    floor = DEFAULT_CARD_FLOOR if wish.floor_bytes is None else wish.floor_bytes
    discrete = [index for index in made.ranks if made.ceilings.devices[index].kind == "discrete"]
    if discrete and floor > 512 * MIB:
        yield {"floor_mib": floor // MIB // 2}
    if made.shape.nextn and wish.draft:
        yield {"draft": "off"}
    if any(FLIP in line.held for line in made.lines) and len(made.layouts) > 1:
        yield {"flip": "off"}
    for quant in [] if subject.file_fixed else smaller_quants(made.shape)[:1]:
        yield {"quant": quant}


def smaller_rows(shape: ModelShape, kv_type: str) -> list[str]:
    """The types with smaller rows than `kv_type` that the model's heads can have, the most exact first."""
    return [name for name in ("q8_0", "f8") if KV_BITS[name] < KV_BITS[kv_type] and not shape.ragged(name)]


def smaller_quants(shape: ModelShape) -> list[str]:
    """The steps of the ladder under which the model would be clearly smaller, the largest first."""
    now = bits_per_weight(shape.quant)
    return [name for name in LADDER if now is None or (bits_per_weight(name) or now) < 0.95 * now]


# ------------------------------------------------------------------------------------------------------ nearest wish


def _nearest(subject: Subject, wish: Wish) -> tuple[Settings, str] | None:
    """The first of the ladder that gives a plan, as a complete set of settings, and what it gives up."""
    for settings, text in _ladder(subject, wish):
        other, asked = changed(subject, wish, settings)
        outcome = _tried(other, asked)
        if isinstance(outcome, Plan) and subject.has(outcome, settings):
            told = {**settings_of(asked), **{name: settings[name] for name in _BESIDE if name in settings}}
            told["context"] = outcome.context
            told["max_running"] = outcome.running
            speed = outcome.speeds.get(TENSOR) or outcome.speeds[PIPELINE]
            size = f"{outcome.context} tokens of context, {outcome.running} at once"
            return told, f"{text}: {size}, about {speed.decode_tok_s:.3g} tokens/s for one user ({outcome.option})"
    return None


def _most_tokens(subject: Subject, wish: Wish) -> int:
    """The largest pool with all else as it was asked; 0 where not even a small one fits."""
    made = _planned(subject, replace(wish, context=0, kv_tokens=0))
    return made.most_tokens if isinstance(made, Plan) else 0


_BESIDE = ("quant", "assume_ram_mib", "shape")
"""Settings of a nearest wish that are no part of a `Wish`."""


def _ladder(subject: Subject, wish: Wish) -> Iterable[tuple[Settings, str]]:
    free: Settings = {}
    vectors = wish.pipeline_ratio or wish.weight_vector or wish.token_vector
    if wish.devices or wish.layout != "auto" or wish.flip != "auto" or wish.cpu_moe >= 0 or vectors:
        # A server that is about to start computes on the CPU.
        free = {
            "devices": "cpu" if subject.file_fixed else "auto",
            "layout": "auto",
            "flip": "auto",
            "cpu_moe": "auto",
            "weight_vector": "auto",
        }
        free |= {"token_vector": "auto", "pipeline_ratio": "auto"}
    if vectors and wish.cpu_ranks > 1:  # as many ranks as were asked for: is it the numbers given that do not fit?
        yield {"weight_vector": "auto", "token_vector": "auto", "pipeline_ratio": "auto"}, "with vectors of the plan"
    if wish.flip == "on":
        yield {"flip": "auto"}, "with one layout"
    types = smaller_rows(subject.shape, wish.kv_type) if KV_BITS[wish.kv_type] > KV_BITS["q8_0"] else []
    small: Settings = {"kv_type": types[0]} if types else {}
    rows = f"KV rows of {types[0]}" if types else ""
    least: Settings = {**small, "max_running": 1, "chunk": 64, "draft": "off", "vision": "off"}
    if small:
        yield small, f"with {rows}"
    yield {"max_running": 1}, "with one request at a time"
    if small:
        yield {**small, "max_running": 1}, f"with {rows} and one request at a time"
    if free:
        yield free, "on other devices or layouts"
        if small:
            yield {**free, **small}, f"on other devices or layouts, with {rows}"
    shorter: Settings = {"context": 0, "kv_tokens": 0}
    if wish.context or wish.kv_tokens:
        most = _most_tokens(subject, wish)
        yield {"context": min(wish.context, most), "kv_tokens": min(wish.kv_tokens, most)}, "with the most that fits"
        yield shorter, "with a shorter context"
        if small:
            yield {**shorter, **small}, f"with a shorter context and {rows}"
    yield {**free, **shorter, **least}, "with everything at its smallest"
    if subject.file_fixed:
        yield from _lower_floors(subject, wish, {**free, **shorter, **least})
        return
    if subject.box.memory is None:
        for gib in _ASSUMED_GIB:
            mib = gib * GIB // MIB
            yield {**free, **shorter, "assume_ram_mib": mib}, f"if this box has {gib} GiB of host memory"
    for quant in smaller_quants(subject.shape):
        yield {**free, **shorter, "quant": quant}, f"as {quant}"
    for quant in smaller_quants(subject.shape)[-1:]:
        yield {**free, **shorter, **least, "quant": quant}, f"as {quant}, with everything at its smallest"
    if subject.fallback is not None:
        name: Settings = {"shape": subject.fallback.name}
        yield {**free, **shorter, **name}, f"with a smaller model, {subject.fallback.name}"
        yield {**free, **shorter, **least, **name}, f"with a smaller model, {subject.fallback.name}, at its smallest"
        yield from _lower_floors(subject, wish, {**free, **shorter, **least, **name})


def _lower_floors(subject: Subject, wish: Wish, smallest: Settings) -> Iterable[tuple[Settings, str]]:
    """The last way out: less stays free for others."""
    floor = DEFAULT_HOST_FLOOR if wish.floor_bytes is None else wish.floor_bytes
    for mib in _LOWER_FLOORS_MIB:
        if mib * MIB < floor:
            yield {**smallest, "floor_mib": mib}, f"with everything at its smallest and {mib} MiB kept free"
