"""What homeserve may hold on each device of a box at the peak."""

from __future__ import annotations

from dataclasses import dataclass

from budget.facts import Card, Doubt


@dataclass(frozen=True)
class Aperture:
    """BAR1 of a card: bytes of it, and whether peers can map it. `p2p` is yes, no or unknown, `why` says from what."""

    total_bytes: int | None
    free_bytes: int | None
    p2p: str
    why: str


@dataclass(frozen=True)
class Device:
    """A device with its ceiling: what may be held there at the peak, the floor already taken off. None is unknown.

    `pool` is the number of the DRAM that it draws from. Discrete cards have one of their own; the CPU and every unified
    device share one. Of a unified device `private_bytes` (the carve-out) lie outside the shared pool.
    """

    index: int
    id: str
    vendor: str
    name: str
    arch: str | None
    kind: str
    """discrete | uma | cpu"""
    usable: bool
    why_not: str | None
    total_bytes: int | None
    reserved_bytes: int | None
    free_bytes: int | None
    gtt_bytes: int | None
    ceiling_bytes: int | None
    floor_bytes: int
    bar1: Aperture | None = None
    card: Card | None = None
    pool: int = 0
    private_bytes: int = 0


@dataclass(frozen=True)
class Ceilings:
    """Every device of a box, the CPU last; `pools[n]` is what devices of pool n may hold together (None: unknown)."""

    devices: tuple[Device, ...]
    pools: tuple[int | None, ...]
    doubts: tuple[Doubt, ...]
