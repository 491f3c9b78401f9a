"""Which placements of a model are looked at, in the order in which they are wanted.

    cards alone        both layouts with a flip, where host memory can hold the image; else the faster one of them; and
                       beside each of these the largest card alone, for boxes whose other cards cost more than they give
    all cards          those that were left out as well
    with the host      a CPU rank takes the first layers; or routed experts lie on the CPU; or the CPU does everything
    CPU ranks          several ranks on the CPU alone, where they are asked for, in either layout; whether in both
                       is looked at last (`budget.flip`)

A later group is slower than an earlier one, so it is looked at only where the earlier one leaves less than a
comfortable pool. Cards that are much smaller or slower than the best are left out at first: every layer waits for the
slowest rank. A wish that names vectors, a ratio or devices is looked at as it stands, and never widened.

Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from budget import host_lines
from budget.ceilings import Ceilings, Device
from budget.job import Job
from budget.ledger import PIPELINE, TENSOR
from budget.placement import Option
from budget.ranks import CPU_RANKS_MOST
from budget.speed import rates_of
from budget.terms import TRANSIT_BYTES
from budget.vectors import layers_of_ratio, legal_ends
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
CPU_STACKED = "CPU ranks, pipeline layout"
CPU_SPLIT = "CPU ranks, tensor layout"
CPU_FLIPPING = "CPU ranks, pipeline and tensor layout"

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
    """The devices that may become ranks: those that were named, else all that are usable (`among` those that may be).
    Cards by size, the CPU last; as they were named where that is the order of ranks.

    Raises WishError for a name that no device has, or a device that cannot be used.
    """
    if wish.devices:
        found = [_named(ceilings, word) for word in wish.devices]
        if len({device.index for device in found}) < len(found) and not wish.twice:
            raise WishError("devices", "one device is named twice", "name each device once")
        for device in found:
            if not device.usable or device.ceiling_bytes is None:
                why = device.why_not or "its memory is unknown"
                raise WishError("devices", f"{device.name} cannot be used: {why}", "name another device")
        if wish.in_order:
            return tuple(found)
    else:
        free = [device for device in ceilings.devices if device.usable and device.ceiling_bytes is not None]
        found = [device for device in free if not wish.among or device.id in wish.among]
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
    if wish.cpu_ranks > 1:
        return _cpu_ranks(job, every, cpu)
    cards = every if wish.devices else worth_it(every)[: max(1, len(job.layers))]
    if wish.flip == "on":
        return _both_layouts(job, cards, cpu)
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


def _cpu_ranks(job: Job, cards: Sequence[Device], cpu: Device | None) -> list[list[Option]]:
    """Several ranks on the CPU, in the layouts that this wish and this model leave; the pipeline layout is the one that
    they rest in.

    Raises WishError for cards beside them, for vectors of another length, and where no layout is left.
    """
    wish, count = job.wish, job.wish.cpu_ranks
    if count > CPU_RANKS_MOST:
        raise WishError("devices", f"cpu:{count} is more ranks than {CPU_RANKS_MOST}", f"use cpu:{CPU_RANKS_MOST}")
    if cards or cpu is None:
        what = f"{count} ranks on the CPU beside cards: there is one at most"
        raise WishError("devices", what, "name cpu once beside cards, or cpu:N alone")
    ranks = (cpu.index,) * count
    _check_vectors(job, ranks)
    if wish.pipeline_ratio and (wish.weight_vector or wish.token_vector) and wish.flip != "on":
        what = "a pipeline ratio and vectors of the tensor layout, and one layout serves"
        raise WishError("pipeline_ratio", what, "leave one of them out, or ask for both layouts (--flip)")
    stacked = wish.layout != TENSOR and (wish.flip == "on" or not (wish.weight_vector or wish.token_vector))
    split = wish.layout != PIPELINE and (wish.flip == "on" or not wish.pipeline_ratio)
    against = {
        PIPELINE: against_layout(job, PIPELINE, count) if stacked else "",
        TENSOR: against_layout(job, TENSOR, count) if split else "",
    }
    groups = []
    if stacked and not against[PIPELINE]:
        groups.append([Option(CPU_STACKED, ranks, (PIPELINE,), host_only=True)])
    if split and not against[TENSOR]:
        groups.append([Option(CPU_SPLIT, ranks, (TENSOR,), host_only=True)])
    if not groups:
        raise WishError("devices", "; and ".join(filter(None, against.values())), _fewer_ranks(job))
    return groups


def against_layout(job: Job, layout: str, ranks: int) -> str:
    """Why so many ranks on the CPU cannot have a layout, whatever memory there is; "" where they can."""
    return _against_stack(job, ranks) if layout == PIPELINE else _against_split(job, ranks)


def _against_stack(job: Job, ranks: int) -> str:
    """Why so many ranks cannot have layers each; "" where they can."""
    layers = len(job.layers)
    places = len(legal_ends(layers, job.shape.kv_sources))
    if ranks <= places + 1:
        return ""
    shared = f", and layers that read the K and V of others can be parted in {places} places only"
    few = shared if ranks <= layers else ""
    return f"the pipeline layout has {ranks} ranks and {job.shape.name} {layers} layers{few}"


def _against_split(job: Job, ranks: int) -> str:
    """Why so many ranks cannot share an attention; "" where they can."""
    heads = job.shape.query_heads
    if not 0 < heads < ranks:
        return ""
    return (
        f"the tensor layout has {ranks} ranks and {job.shape.name} an attention of {heads} query heads:"
        f" {ranks - heads} would never attend"
    )


def _fewer_ranks(job: Job) -> str:
    """The most ranks that a layout of this wish can have."""
    most = {
        PIPELINE: len(legal_ends(len(job.layers), job.shape.kv_sources)) + 1,
        TENSOR: job.shape.query_heads or CPU_RANKS_MOST,
    }
    asked = [job.wish.layout] if job.wish.layout in most else list(most)
    return f"use --devices cpu:{min(CPU_RANKS_MOST, max(most[layout] for layout in asked))} or fewer"


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
            what = f"{len(vector)} numbers for {len(ranks)} rank{'s' * (len(ranks) != 1)}"
            order = "in the order in which they are named" if wish.in_order else "the largest device first"
            fix = f"give one number for each device that is used, {order}"
            raise WishError(name, what, fix if wish.cpu_ranks == 1 else f"give {len(ranks)} numbers")
        if min(vector) < 1:
            raise WishError(name, f"{','.join(map(str, vector))} holds a number below 1", "give numbers from 1 on")
        other = TENSOR if name == "pipeline_ratio" else PIPELINE
        if wish.layout == other and wish.flip != "on":
            raise WishError(name, f"the {other} layout has no {name.replace('_', ' ')}", "leave one of them out")
    if (against := _against_ratio(job)) is not None:
        raise WishError("pipeline_ratio", *against)
    if wish.cpu_ranks == 1 and len(ranks) > len(job.layers) and wish.layout != TENSOR:
        what = f"{len(ranks)} devices for the {len(job.layers)} layers of {job.shape.name}"
        raise WishError("devices", what, f"name at most {len(job.layers)}")


def _against_ratio(job: Job) -> tuple[str, str] | None:
    """What is wrong with the ratio, and what to do: it parts layers that must stay together."""
    ratio, count, sources = job.wish.pipeline_ratio, len(job.layers), dict(job.shape.kv_sources)
    if not ratio or not sources:
        return None
    legal = legal_ends(count, sources.items())
    for rank, end in enumerate(accumulate(layers_of_ratio(ratio, count)[:-1])):
        if end not in legal and end < count:
            reader = min(layer for layer, source in sources.items() if source < end <= layer)
            what = (
                f"rank {rank} would end before layer {end}, and layer {reader} reads the K and V of layer"
                f" {sources[reader]}: both must be on one rank"
            )
            return what, f"a rank may end before layer: {', '.join(map(str, legal)) or 'nowhere'}"
    return None


def _single(card: Device) -> Option:
    return Option(ONE_APU if card.kind == "uma" else ONE_CARD, (card.index,))


def _cards_alone(job: Job, ceilings: Ceilings, cards: Sequence[Device], ranks: tuple[int, ...]) -> list[list[Option]]:
    layout, flip = job.wish.layout, job.wish.flip
    if len(ranks) == 1:
        if layout == TENSOR:
            raise WishError("layout", "the tensor layout needs several cards, and one is used", "use --layout auto")
        return [[_single(cards[0])]]
    split, stacked = Option(SPLIT, ranks, (TENSOR,)), Option(STACKED, ranks, (PIPELINE,))
    if layout != "auto":
        return [[split if layout == TENSOR else stacked]]
    groups = [_flipping(job, ranks, PIPELINE)] if flip != "off" and _host_holds_image(job, ceilings) else []
    return [*groups, [split], [stacked]]


def _flipping(job: Job, ranks: tuple[int, ...], resting: str) -> list[Option]:
    both = (TENSOR, PIPELINE) if resting == TENSOR else (PIPELINE, TENSOR)
    resident = [Option(RESIDENT, ranks, both, resident=True)] if job.wish.resident else []
    return [*resident, Option(FLIPPING, ranks, both)]


def _both_layouts(job: Job, cards: Sequence[Device], cpu: Device | None) -> list[list[Option]]:
    """Cards with a flip, and nothing else: it was asked for. Raises WishError where there is none to be had."""
    wish, ranks = job.wish, tuple(card.index for card in cards)
    if len(ranks) < 2:
        raise WishError("flip", "one rank has one layout: there is nothing to flip to", "leave --flip out")
    if wish.cpu_moe > 0 or (wish.devices and cpu is not None):
        raise WishError("flip", "the CPU has part of the pipeline layout only", "leave --flip or the CPU out")
    _check_vectors(job, ranks)
    return [_flipping(job, ranks, wish.layout)]


def _host_holds_image(job: Job, ceilings: Ceilings) -> bool:
    """Whether host memory can hold one copy of the weights beside what moves. An unknown host is not asked."""
    host = ceilings.devices[-1].ceiling_bytes
    return host is not None and host > image_needs(job)


def image_needs(job: Job) -> int:
    """Host memory of a server whose cards are filled from one copy of the weights."""
    image = sum(layer.bytes for layer in job.layers) + job.head_bytes + TRANSIT_BYTES
    return image + host_lines.engine_bytes(job.shape) + job.embedding_bytes


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
