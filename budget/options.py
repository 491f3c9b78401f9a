"""Which placements of a model are looked at, in the order in which they are wanted.

    cards alone        both layouts with a flip, where host memory can hold the image; else the faster one of them; and
                       beside each of these the largest card alone, for boxes whose other cards cost more than they give
    all cards          those that were left out as well
    with the host      a CPU rank takes the first layers; or routed experts lie on the CPU; or the CPU does everything

A later group is slower than an earlier one, so it is looked at only where the earlier one leaves less than a
comfortable pool. Cards that are much smaller or slower than the best are left out at first: every layer waits for the
slowest rank. A wish that names vectors, a ratio or devices is looked at as it stands, and never widened.

Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from budget import host_lines
from budget.ceilings import Ceilings, Device
from budget.job import Job
from budget.ledger import PIPELINE, TENSOR
from budget.placement import Option
from budget.speed import rates_of
from budget.terms import TRANSIT_BYTES
from budget.wish import Wish

FLIPPING = "cards, pipeline and tensor layout"
RESIDENT = "cards, both layouts resident"
SPLIT = "cards, tensor layout"
STACKED = "cards, pipeline layout"
ONE_CARD = "one card"
ONE_APU = "integrated graphics"
WITH_CPU = "cards and a CPU rank"
EXPERTS = "cards, experts on the CPU"
CPU_ONLY = "CPU"
ALL_CARDS = "all cards, pipeline layout"

LEFT_OUT = 8
"""A card with less than one part in so many of the best one's memory or bandwidth is left out."""


class WishError(ValueError):
    """A wish that contradicts the box or the model by itself. `field` is the setting, `fix` what to do."""

    def __init__(self, field: str, what: str, fix: str) -> None:
        super().__init__(what)
        self.field = field
        self.what = what
        self.fix = fix


def chosen(ceilings: Ceilings, wish: Wish) -> tuple[Device, ...]:
    """The devices that may become ranks: those that were named, else all that are usable. Cards by size, the CPU last.

    Raises WishError for a name that no device has, or a device that cannot be used.
    """
    if wish.devices:
        found = [_named(ceilings, word) for word in wish.devices]
        if len({device.index for device in found}) < len(found):
            raise WishError("devices", "one device is named twice", "name each device once")
        for device in found:
            if not device.usable or device.ceiling_bytes is None:
                why = device.why_not or "its memory is unknown"
                raise WishError("devices", f"{device.name} cannot be used: {why}", "name another device")
    else:
        found = [device for device in ceilings.devices if device.usable and device.ceiling_bytes is not None]
    return tuple(sorted(found, key=lambda device: (device.kind == "cpu", -(device.ceiling_bytes or 0), device.index)))


def _named(ceilings: Ceilings, word: str) -> Device:
    """`cuda:0` is the first NVIDIA card, `rocm:0` the first of AMD, `cpu` (or `cpu:0`) the host; else an id."""
    kind, _, number = word.partition(":")
    vendor = {"cuda": "nvidia", "rocm": "amd", "cpu": "cpu"}.get(kind.lower())
    if vendor is not None and (not number or number.isdigit()):
        of_kind = [device for device in ceilings.devices if device.vendor == vendor]
        index = 0 if vendor == "cpu" else int(number or 0)
        if index < len(of_kind):
            return of_kind[index]
    for device in ceilings.devices:
        if word.lower() == device.id.lower():
            return device
    known = ", ".join(device.id for device in ceilings.devices)
    raise WishError("devices", f"no device {word!r} in this box", f"use cpu, cuda:N, rocm:N, or one of: {known}")


def options(job: Job, ceilings: Ceilings, devices: Sequence[Device]) -> list[list[Option]]:
    """Groups of options. Within a group the larger pool wins, then speed; a later group is a way out."""
    wish = job.wish
    every = [device for device in devices if device.kind != "cpu"]
    cpu = next((device for device in devices if device.kind == "cpu"), None)
    cards = every if wish.devices else worth_it(every)[: max(1, len(job.layers))]
    if not cards:
        if wish.layout == TENSOR:
            raise WishError("layout", "the tensor layout needs several ranks, and there is one", "use --layout auto")
        _check_vectors(job, () if cpu is None else (cpu.index,))
        return [[Option(CPU_ONLY, (cpu.index,), host_only=True)]] if cpu is not None else []
    ranks = tuple(device.index for device in cards)
    if wish.devices and cpu is not None and wish.cpu_moe <= 0:
        if wish.layout == TENSOR:
            raise WishError("layout", "the CPU is a rank of the pipeline layout only", "leave cpu or --layout out")
        _check_vectors(job, (cpu.index, *ranks))
        return [[Option(WITH_CPU, (cpu.index, *ranks))]]
    _check_vectors(job, ranks)
    free = not (wish.devices or wish.pipeline_ratio or wish.weight_vector or wish.token_vector)
    groups = [] if wish.cpu_moe > 0 else _cards_alone(job, ceilings, cards, ranks)
    if free and len(cards) > 1 and wish.layout == "auto":
        groups = [[*group, _single(cards[0])] for group in groups]
    if groups and free and len(cards) < len(every) <= len(job.layers) and wish.layout != TENSOR:
        groups.append([Option(ALL_CARDS, tuple(device.index for device in every))])
    host = ceilings.devices[-1]
    away: list[Option] = []
    if host.ceiling_bytes is not None and wish.cpu_moe != 0 and wish.layout != TENSOR and _has_experts(job):
        away.append(Option(EXPERTS, ranks, expert_layers=min(max(wish.cpu_moe, 0), len(job.layers))))
    if cpu is not None and free and wish.layout != TENSOR and wish.cpu_moe <= 0:
        away += [Option(WITH_CPU, (cpu.index, *ranks)), Option(CPU_ONLY, (cpu.index,), host_only=True)]
    if wish.cpu_moe > 0 and not away:
        raise _no_experts(job, host)
    return [*groups, away] if away else groups


def _no_experts(job: Job, host: Device) -> WishError:
    if not _has_experts(job):
        return WishError("cpu_moe", f"{job.shape.name} has no routed experts", "leave --cpu-moe out")
    if host.ceiling_bytes is None:
        return WishError("cpu_moe", "nothing is known of the host's memory", "use --assume-ram-mib, or leave it out")
    return WishError("cpu_moe", "experts on the CPU go with the pipeline layout", "leave --layout or --cpu-moe out")


def _check_vectors(job: Job, ranks: tuple[int, ...]) -> None:
    """Raises WishError for a vector of the wrong length, or one that no layout of this wish reads."""
    wish = job.wish
    for name in ("pipeline_ratio", "weight_vector", "token_vector"):
        vector: tuple[int, ...] = getattr(wish, name)
        if not vector:
            continue
        if len(vector) != len(ranks):
            what = f"{len(vector)} numbers for {len(ranks)} ranks"
            raise WishError(name, what, "give one number for each device that is used, the largest device first")
        if min(vector) < 1:
            raise WishError(name, f"{','.join(map(str, vector))} holds a number below 1", "give numbers from 1 on")
        other = TENSOR if name == "pipeline_ratio" else PIPELINE
        if wish.layout == other:
            raise WishError(name, f"the {other} layout has no {name.replace('_', ' ')}", "leave one of them out")
    if len(ranks) > len(job.layers) and wish.layout != TENSOR:
        what = f"{len(ranks)} devices for the {len(job.layers)} layers of {job.shape.name}"
        raise WishError("devices", what, f"name at most {len(job.layers)}")


def _single(card: Device) -> Option:
    return Option(ONE_APU if card.kind == "uma" else ONE_CARD, (card.index,))


def _cards_alone(job: Job, ceilings: Ceilings, cards: Sequence[Device], ranks: tuple[int, ...]) -> list[list[Option]]:
    layout = job.wish.layout
    if len(ranks) == 1:
        if layout == TENSOR:
            raise WishError("layout", "the tensor layout needs several cards, and one is used", "use --layout auto")
        return [[_single(cards[0])]]
    split, stacked = Option(SPLIT, ranks, (TENSOR,)), Option(STACKED, ranks, (PIPELINE,))
    if layout != "auto":
        return [[split if layout == TENSOR else stacked]]
    groups = []
    if job.wish.flip != "off" and _host_holds_image(job, ceilings):
        groups.append(
            [Option(RESIDENT, ranks, (PIPELINE, TENSOR), resident=True), Option(FLIPPING, ranks, (PIPELINE, TENSOR))]
        )
    return [*groups, [split], [stacked]]


def _host_holds_image(job: Job, ceilings: Ceilings) -> bool:
    """Whether host memory can hold one copy of the weights beside what moves. An unknown host is not asked."""
    host = ceilings.devices[-1].ceiling_bytes
    image = sum(layer.bytes for layer in job.layers) + job.head_bytes + TRANSIT_BYTES
    return host is not None and host > image + host_lines.engine_bytes(job.shape) + job.embedding_bytes


def worth_it(cards: Sequence[Device]) -> list[Device]:
    """The cards that help: not those that all others would wait for."""
    if not cards:
        return []
    memory = max(card.ceiling_bytes or 0 for card in cards)
    read = max(rates_of(card).read_bytes_s for card in cards)
    return [
        card
        for card in cards
        if (card.ceiling_bytes or 0) * LEFT_OUT >= memory and rates_of(card).read_bytes_s * LEFT_OUT >= read
    ]


def _has_experts(job: Job) -> bool:
    return any(layer.expert_bytes for layer in job.layers)
