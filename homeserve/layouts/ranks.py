"""What each rank of a server is: one record from which fleet, load and status take their part.

    settings ─┐
    budget ───┼─▶ RankPlan ─▶ FleetSpec   processes, their cores, the memory for what they exchange
    cores ────┘            ├▶ LoadSpec    layout, ranges, vectors: each rank takes its own part
                           ├▶ EngineLimits  plans in flight, groups that decode in turn
                           └▶ status

With a flip the plan is of both layouts: ranges and both vectors are given, `layout` is where the ranks begin and rest,
and what is sized once (the plan log, the memory for what ranks exchange) is sized for the larger one.

Threads of CPU ranks wait for each other several times in a layer. So each rank is pinned to cores of its own where all
threads of all ranks have one, and only then a wait spins before it sleeps: where ranks share a core, whoever spins
takes the time of the one that it waits for.

Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from budget.ledger import PIPELINE, TENSOR
from budget.ranks import ActSizes, decode_groups, plans_in_flight
from homeserve.layouts.cut import cut_of_ranges
from homeserve.layouts.owner import OwnerRule
from homeserve.layouts.partition import checked_vector

SPIN_US = 100
"""How long a wait for another rank spins where every thread has a core of its own."""
DISCRETE, UNIFIED = "discrete", "unified"


@dataclass(frozen=True)
class RankDevice:
    """What a rank opens: a backend by name, and of a card its number among its kind in this box, its UUID or PCI
    address (by which its driver is told), and its name."""

    backend: str
    index: int = 0
    id: str = ""
    name: str = ""

    @property
    def is_card(self) -> bool:
        return bool(self.id)

    @property
    def told(self) -> str:
        """For messages: `cuda:0, NVIDIA GeForce RTX 3090 (GPU-…)`."""
        return f"{self.backend}:{self.index}, {self.name} ({self.id})" if self.is_card else self.backend


@dataclass(frozen=True)
class RankPlan:
    """All ranks of one server.

    layout          where the ranks begin, and where they rest if they flip
    ranges          layers [first, end) of each rank in the pipeline layout; () where that is never in force
    weight_vector, token_vector   of the tensor layout; () where that is never in force
    flip            whether the layout may change
    threads         of each rank; 0 leaves it to the backend
    cores           for each rank the hardware threads that it is pinned to; (): none is pinned
    plans_in_flight the most in any layout
    decode_groups   groups of requests that decode in turn, so that every rank of a pipeline has one; of `layout`
    acts            sizes of the memory for what ranks exchange; None with one rank
    memory_domain   discrete: every rank has its own arena and pools
    transit_bytes   of the memory through which ranks hand each other what moves at a flip
    devices         what each rank opens
    """

    ranks: int
    layout: str
    ranges: tuple[tuple[int, int], ...]
    weight_vector: tuple[int, ...]
    token_vector: tuple[int, ...]
    threads: int
    cores: tuple[tuple[int, ...], ...]
    plans_in_flight: int
    decode_groups: int
    acts: ActSizes | None
    spin_us: int
    memory_domain: str = DISCRETE
    flip: bool = False
    transit_bytes: int = 0
    devices: tuple[RankDevice, ...] = ()

    @property
    def on_cards(self) -> bool:
        return any(device.is_card for device in self.devices)

    @property
    def layouts(self) -> tuple[str, ...]:
        """Those that may be in force, the one at rest first."""
        return (self.layout, *(each for each in (PIPELINE, TENSOR) if self.flip and each != self.layout))

    @property
    def shares_cores(self) -> bool:
        """Whether there are more threads of ranks than cores. (Ranks on cards compute nothing there.)"""
        return self.ranks > 1 and not self.cores and not self.on_cards


def pinned_cores(ranks: int, threads: int, usable: int, cores: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """`threads` of `cores` (hardware threads, one of each physical core) for each rank, none twice; () where there are
    not enough, or `usable`, what the control groups leave of them, is less."""
    if ranks == 1 or ranks * threads > min(usable, len(cores)):
        return ()
    return tuple(tuple(cores[rank * threads : (rank + 1) * threads]) for rank in range(ranks))


def rank_plan(
    *,
    layout: str,
    ranks: int,
    layers: int,
    ranges: Sequence[tuple[int, int]],
    kv_sources: Mapping[int, int],
    weight_vector: Sequence[int],
    token_vector: Sequence[int],
    threads: int,
    usable: int,
    cores: Sequence[int],
    acts: ActSizes | None,
    memory_domain: str = DISCRETE,
    flip: bool = False,
    transit_bytes: int = 0,
    devices: Sequence[RankDevice] = (),
) -> RankPlan:
    """The plan of the parts, checked once more. `threads` 0: of several ranks an even part of the `usable` cores, at
    least one. With `flip` the parts of both layouts. `devices`: one for each rank (none: all on the CPU).

    Raises SettingError for ranges that do not cover the layers or part a layer from its source of K and V, and for
    vectors that do not have a positive entry for each rank.
    """
    each = (threads or max(1, usable // ranks)) if ranks > 1 else threads
    if devices:
        _check_length(devices, ranks, "devices")
    pinned = pinned_cores(ranks, each, usable, cores)
    at_rest = PIPELINE if ranks == 1 else layout
    serving = {PIPELINE, TENSOR} if flip and ranks > 1 else {at_rest}
    if PIPELINE in serving:
        cut_of_ranges(ranges, layers, kv_sources)
        _check_length(ranges, ranks, "ranges")
    if TENSOR in serving:
        for vector, field in ((weight_vector, "weight_vector"), (token_vector, "token_vector")):
            _check_length(checked_vector(vector, field), ranks, field)
    return RankPlan(
        ranks=ranks,
        layout=at_rest,
        ranges=tuple(ranges) if PIPELINE in serving else (),
        weight_vector=tuple(weight_vector) if TENSOR in serving else (),
        token_vector=OwnerRule.of(token_vector).vector if TENSOR in serving else (),
        threads=each,
        cores=pinned,
        plans_in_flight=max(plans_in_flight(ranks, name) for name in serving),
        decode_groups=decode_groups(ranks, at_rest),
        acts=acts if ranks > 1 else None,
        spin_us=SPIN_US if pinned else 0,
        memory_domain=memory_domain,
        flip=len(serving) > 1,
        devices=tuple(devices) or (RankDevice("cpu"),) * ranks,
        transit_bytes=transit_bytes if len(serving) > 1 and memory_domain != UNIFIED else 0,
    )


def _check_length(entries: Sequence[object], ranks: int, field: str) -> None:
    if len(entries) != ranks:
        raise ValueError(f"{field} of {len(entries)} entries for {ranks} ranks")
