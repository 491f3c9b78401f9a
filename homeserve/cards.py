"""Which cards serve: from `--devices` and `--backend`, a model and a box to cards in order of rank, or to the CPU.

    named (--devices cuda:0,rocm:0)   each must be there, be seen by its driver and have what the model needs; anything
                                      else is an error, before a worker starts
    a backend (--backend cuda)        the cards of that vendor of which all that is true, the planner chooses among them
    auto                              the same of both vendors, and of arches alone whose kernels are known to compile;
                                      where none is left, or the plan does not fit, the CPU: a line says why

What a model needs is told by its op lists (`backends.needs`), what cards have by the tables of all backends
(`backends.support`). An arch that nobody compiled for reads *unknown*: it is compiled for on this machine, which
whoever names it is told, and which auto does not count on.

Cards are counted as `homeserve probe` lists them, by address, and are told to their drivers by UUID, never by index.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from backends import support
from backends.base import PAGE_LEN, Capability
from backends.needs import SHARES, Need, needed
from backends.quant import QuantType
from budget.ceilings import Device, ceilings
from budget.facts import Box, Card
from budget.visible import hidden
from homeserve.errors import DeviceError, SettingError, UnsupportedModel
from homeserve.layouts.ranks import RankDevice
from homeserve.model_facts import ModelFacts
from homeserve.readiness import Readiness
from homeserve.settings import CARD_BACKENDS, Settings, check_together, flag

BACKENDS = {"nvidia": "cuda", "amd": "rocm"}
"""Vendor -> the backend that computes on its cards."""
VENDORS = {backend: vendor for vendor, backend in BACKENDS.items()}
_NVIDIA_IDS = ("gpu-", "mig-")
_DOUBTS = 3
"""Of NVML, that a message repeats."""


@dataclass(frozen=True)
class Choice:
    """`settings` with `devices` as it came out (`cpu`, or cards by id). `among`: the planner may leave some of them
    out, and their order is its own. `left_out`: a line for each card that is not used though nobody said so; `told`:
    lines of those that are. `may_be_cpu`: where the plan for these cards does not fit, the CPU is taken instead."""

    settings: Settings
    cards: tuple[Card, ...] = ()
    among: bool = False
    left_out: tuple[str, ...] = ()
    told: tuple[str, ...] = ()
    may_be_cpu: bool = False


@dataclass(frozen=True)
class Fitness:
    """What speaks for and against a card. `why_not`: it cannot be used; `fix`: what to do. `unknown`: needs of which
    nobody knows before they are compiled here."""

    card: Card
    why_not: str = ""
    fix: str = ""
    unsupported: bool = False
    unknown: bool = False


def choose(settings: Settings, facts: ModelFacts, box: Box, environ: Mapping[str, str]) -> Choice:
    """Raises SettingError for a card that is not there or not of the backend, DeviceError for one that cannot be used,
    UnsupportedModel, with every missing thing, for one that lacks what the model needs."""
    if settings.devices.partition(":")[0] == "cpu" or settings.backend in ("cpu", "reference"):
        return Choice(settings)
    if settings.cards:
        return _named(settings, facts, box, environ)
    vendors = [VENDORS[settings.backend]] if settings.backend in CARD_BACKENDS else list(BACKENDS)
    cards = [card for card in box.cards if card.vendor in vendors]
    if settings.backend in CARD_BACKENDS:
        return _of_backend(settings, facts, box, environ, cards)
    return _auto(settings, facts, box, environ, cards)


def rank_devices(settings: Settings, box: Box, devices: Sequence[Device]) -> tuple[RankDevice, ...]:
    """What each rank of a plan opens: `devices` are those of its ranks, in order."""
    found = []
    for device in devices:
        card = device.card
        if card is None:
            found.append(RankDevice("cpu" if settings.backend == "auto" else settings.backend))
        else:
            found.append(RankDevice(BACKENDS[card.vendor], _place(card, box), card.id, card.name))
    return tuple(found)


def told_of(card: Card, box: Box) -> str:
    """`cuda:0, NVIDIA GeForce RTX 3090 (GPU-…)`: for messages."""
    return f"{word_of(card, box)}, {card.name} ({card.id})"


def word_of(card: Card, box: Box) -> str:
    return f"{BACKENDS.get(card.vendor, card.vendor)}:{_place(card, box)}"


def fitness(card: Card, box: Box, environ: Mapping[str, str], needs: Sequence[Need], *, named: bool = False) -> Fitness:
    """Whether `card` can run what `needs` says. `named`: it was asked for, so that an integrated one beside a card
    counts."""
    said = told_of(card, box)
    veiled = hidden(box.cards, environ).get(card.id)
    if veiled is not None:
        value = veiled.value or "(nothing)"
        what = f"{said} is hidden: {veiled.variable} is set to {value}, which does not name it"
        return Fitness(card, what, f"unset {veiled.variable}, add this card to it, or name another device")
    if is_twin(card, box, environ):
        what = f"{said}: its UUID {card.twin} is another card's too, so that the driver cannot be told which is meant"
        return Fitness(card, what, "hide one of the two with CUDA_VISIBLE_DEVICES, or name another device")
    device = next(
        each for each in ceilings(box, None, named=frozenset({card.id} if named else ())).devices if each.card == card
    )
    if not device.usable:
        fix = "see homeserve doctor; name another device, or use --devices cpu"
        unknown = card.vendor == "nvidia" and card.total_bytes is None and card.id == card.pci
        why = f"; {_nvml(box)}" if unknown else ""  # the bus alone told of it
        return Fitness(card, f"{said} cannot be used: {device.why_not}{why}", fix)
    if card.arch is None:
        return Fitness(card, f"{said} cannot be used: its arch is not known", "see homeserve doctor")
    if oldest := too_old(card.arch):
        fix = "name another device, or use --devices cpu"
        return Fitness(card, f"{said} cannot be used: {card.arch} is older than {oldest}", fix)
    return _answered(card, said, needs)


def is_twin(card: Card, box: Box, environ: Mapping[str, str]) -> bool:
    """Whether a driver that is told this card's id sees another one of the same UUID. (AMD's are told by address.)"""
    if not card.twin or card.vendor != "nvidia":
        return False
    veiled = hidden(box.cards, environ)
    return sum(other.twin == card.twin and other.id not in veiled for other in box.cards) > 1


def too_old(arch: str) -> str:
    """The oldest arch of its kind that kernels are written for, where `arch` is older; else "". (`backends.gpu.arch`
    has the rule, and a test that both say the same.)"""
    if number := re.fullmatch(r"sm_(\d{2,3})[af]?", arch):
        return "sm_75 (Turing)" if int(number[1]) < 75 else ""
    number = re.fullmatch(r"gfx(\d{1,2})[0-9a-f]{2}(:.*)?", arch)
    return "gfx900 (Vega)" if number is not None and int(number[1]) < 9 else ""


def needs_of(facts: ModelFacts, settings: Settings, *, several: bool) -> tuple[Need, ...]:
    """What the model's op list needs of a backend; with `several` ranks also what a rank of a part of it does."""
    from homeserve.models.bind import bind
    from homeserve.models.registry import family

    declared, opened = family(facts.checkpoint.arch), facts.checkpoint
    drafts = settings.draft != "off" and not facts.why_no_drafts and bool(facts.shape.nextn)
    bound = bind(declared, facts.config, opened.tensors, drafts=drafts)
    pool = bound.kv_pool(PAGE_LEN, QuantType[settings.kv_type.upper()])
    needs = needed(bound.ops, bound.weights, pool)
    if not several:
        return needs
    of_merge = [need for need in SHARES if need[0] == "MergeAttention" and need[1] != "F32"]
    beside = [need for need in SHARES if need not in of_merge or ("Attention", need[1]) in needs]
    return tuple(dict.fromkeys([*needs, *beside]))


def without(choice: Choice, box: Box, ready: Mapping[str, Readiness]) -> Choice:
    """The same choice without cards that their drivers cannot be used for, or do not show; the CPU where none is left.
    `ready`: what the drivers said, by vendor; of a vendor that is not there nothing is known."""
    kept, left_out = [], list(choice.left_out)
    for card in choice.cards:
        said = ready.get(card.vendor)
        if said is not None and said.missing:
            what, fix = said.missing[0]
            left_out.append(f"{told_of(card, box)} is left out: {what}; {fix}")
        elif said is not None and said.sees(card.id, card.pci) is None:
            left_out.append(f"{told_of(card, box)} is left out: its driver does not show it; see homeserve doctor")
        else:
            kept.append(card)
    if kept:
        named = replace(choice.settings, devices=",".join(card.id for card in kept))
        return replace(choice, settings=named, cards=tuple(kept), left_out=tuple(left_out))
    on_cpu = replace(choice.settings, devices="cpu")
    return replace(choice, settings=on_cpu, cards=(), among=False, left_out=tuple(left_out), may_be_cpu=False)


# -------------------------------------------------------------------------------------------------------------- inside


def _named(settings: Settings, facts: ModelFacts, box: Box, environ: Mapping[str, str]) -> Choice:
    said = settings.sources.get("devices", flag("devices"))
    cards = tuple(_find(word, box, said) for word in settings.cards)
    twice = next((card for n, card in enumerate(cards) if card in cards[:n]), None)
    if twice is not None and not settings.testing:
        what = f"{said}: {told_of(twice, box)} is named twice: a card is one rank"
        raise SettingError(what, field="devices", fix="name each card once")
    needs = needs_of(facts, settings, several=len(cards) > 1)
    told = []
    for card in cards:
        if settings.backend in CARD_BACKENDS and card.vendor != VENDORS[settings.backend]:
            what = f"{said}: {told_of(card, box)} is no card of --backend {settings.backend}"
            raise SettingError(what, field="devices", fix="leave --backend out, or name a card of it")
        found = fitness(card, box, environ, needs, named=True)
        if found.why_not:
            raise _refused(found)
        told += [_compiles(card, box)] if found.unknown else []
    named = replace(settings, devices=",".join(card.id for card in cards))
    return Choice(named, cards, told=tuple(dict.fromkeys(told)))


def _of_backend(
    settings: Settings, facts: ModelFacts, box: Box, environ: Mapping[str, str], cards: Sequence[Card]
) -> Choice:
    if not cards:
        maker = {"cuda": "NVIDIA", "rocm": "AMD"}[settings.backend]
        said = settings.sources.get("backend", flag("backend"))
        what = f"{said} {settings.backend}: there is no card of {maker} here"
        what += f"; {_nvml(box)}" if settings.backend == "cuda" else ""
        raise SettingError(
            what, field="backend", fix="see homeserve probe and homeserve doctor, or leave --backend out"
        )
    needs = needs_of(facts, settings, several=len(cards) > 1)
    found = [fitness(card, box, environ, needs) for card in cards]
    usable = [each for each in found if not each.why_not]
    if not usable:
        raise _refused(found[0], "; ".join(each.why_not for each in found))
    told = tuple(_compiles(each.card, box) for each in usable if each.unknown)
    return _among(settings, usable, [each.why_not for each in found if each.why_not], told)


def _auto(settings: Settings, facts: ModelFacts, box: Box, environ: Mapping[str, str], cards: Sequence[Card]) -> Choice:
    """Never an error: the CPU is there."""
    on_cpu = replace(settings, devices="cpu")
    if not cards:
        return Choice(on_cpu)
    for name in ("deterministic", "isa", "threads"):
        if getattr(settings, name):
            who = settings.sources.get(name, flag(name))
            return Choice(on_cpu, left_out=(f"{_all(cards, box)} left out: {who} is for the CPU",))
    if any(getattr(settings, name) for name in ("pipeline_ratio", "weight_vector", "token_vector")):
        return Choice(on_cpu, left_out=(f"{_all(cards, box)} left out: numbers for ranks go with named devices",))
    try:
        needs = needs_of(facts, settings, several=len(cards) > 1)
    except UnsupportedModel:
        return Choice(on_cpu)  # whoever binds it says so
    found = [fitness(card, box, environ, needs) for card in cards]
    usable = [each for each in found if not each.why_not and not each.unknown]
    left_out = [each.why_not for each in found if each.why_not]
    left_out += [
        f"{told_of(each.card, box)} is not taken by itself: kernels for {each.card.arch} were not compiled ahead;"
        f" --devices {word_of(each.card, box)} has them compiled here"
        for each in found
        if each.unknown and not each.why_not
    ]
    if not usable:
        return Choice(on_cpu, left_out=tuple(left_out))
    return replace(_among(settings, usable, left_out, ()), may_be_cpu=True)


def _among(settings: Settings, usable: Sequence[Fitness], left_out: Sequence[str], told: tuple[str, ...]) -> Choice:
    cards = tuple(each.card for each in usable)
    named = check_together(replace(settings, devices=",".join(card.id for card in cards)))
    return Choice(named, cards, among=True, left_out=tuple(left_out), told=told)


def _find(word: str, box: Box, said: str) -> Card:
    """`cuda:0`, an id, a UUID that two cards share by its beginning, or an address."""
    kind, _, number = word.partition(":")
    if kind in VENDORS:
        of_kind = [card for card in box.cards if card.vendor == VENDORS[kind]]
        if int(number) < len(of_kind):
            return of_kind[int(number)]
        what = f"{said}: there is no {word} here: {_counted(len(of_kind))} of that kind"
        nvidia = VENDORS[kind] == "nvidia"
    else:
        for card in box.cards:
            if word.lower() in (card.id.lower(), (card.pci or "").lower()):
                return card
        what = f"{said}: there is no card {word} here"
        nvidia = word.lower().startswith(_NVIDIA_IDS)
    known = "; ".join(told_of(card, box) for card in box.cards if card.vendor in BACKENDS)
    fix = f"there is: {known}" if known else "see homeserve probe"
    if nvidia and (_doubts_of_nvml(box) or not any(card.vendor == "nvidia" for card in box.cards)):
        what, fix = f"{what}; {_nvml(box)}", f"see homeserve doctor; {fix}" if known else "see homeserve doctor"
    raise SettingError(what, field="devices", fix=fix)


def _nvml(box: Box) -> str:
    """What NVML, which tells of NVIDIA's cards, said in place of one."""
    return _doubts_of_nvml(box) or "NVML (libnvidia-ml.so.1, of NVIDIA's driver) is not there, or names none"


def _doubts_of_nvml(box: Box) -> str:
    """What of NVML's word is in doubt, but for single values of cards that it named."""
    said = [doubt for doubt in box.doubts if doubt.where.startswith(("NVML", "pynvml"))]
    ours = [doubt for doubt in said if not any(card.id in doubt.where for card in box.cards)]
    return "; ".join(f"{doubt.where} {doubt.what}" for doubt in ours[:_DOUBTS])


def _answered(card: Card, said: str, needs: Sequence[Need]) -> Fitness:
    table = _table(BACKENDS[card.vendor], (card.arch or "").partition(":")[0])
    answers = [table.get(need, Capability(*need, ok=None)) for need in needs]
    lacking = [entry for entry in answers if entry.ok is False]
    if lacking:
        words = "; ".join(f"{entry.op} on {entry.type}: {entry.why}" for entry in lacking)
        what = f"{said} ({card.arch}) cannot run this model: {words}"
        return Fitness(card, what, "use --devices cpu, or another quantisation", unsupported=True)
    return Fitness(card, unknown=any(entry.ok is None for entry in answers))


def _table(backend: str, arch: str) -> dict[Need, Capability]:
    """What is known of an arch. Of one that no table names: what no card has, and else nothing."""
    tables = [table for table in support.read() if table.backend == backend]
    for table in tables:
        if arch in table.arches:
            return {(entry.op, entry.type): entry for entry in table.entries}
    never: dict[Need, Capability] = {}
    for key, entry in (((each.op, each.type), each) for table in tables for each in table.entries):
        if entry.ok is False and all(_reads_no(table, key) for table in tables):
            never[key] = entry
    return never


def _reads_no(table: support.Table, key: Need) -> bool:
    return any((entry.op, entry.type) == key and entry.ok is False for entry in table.entries)


def _refused(found: Fitness, text: str = "") -> Exception:
    kind = UnsupportedModel if found.unsupported else DeviceError
    return kind(text or found.why_not, field="devices", fix=found.fix)


def _compiles(card: Card, box: Box) -> str:
    return f"kernels for {card.arch} ({told_of(card, box)}) were not compiled ahead: the first start compiles them here"


def _place(card: Card, box: Box) -> int:
    """Its number among the cards of its vendor, as the probe lists them."""
    return [other for other in box.cards if other.vendor == card.vendor].index(card)


def _all(cards: Iterable[Card], box: Box) -> str:
    names = [told_of(card, box) for card in cards]
    return f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'}"


def _counted(count: int) -> str:
    return f"there is {count or 'none'}" if count < 2 else f"there are {count}"
