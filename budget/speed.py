"""Roofline of a plan: what the box's own numbers allow, per layout, and how sure that is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from budget.ceilings import Device


@dataclass(frozen=True)
class DeviceRates:
    """What a device can do at best. `sure` False: at least one number is a guess by class, not a fact of this device."""

    read_bytes_s: float
    int8_ops_s: float
    link_bytes_s: float
    sure: bool
    source: str


@dataclass(frozen=True)
class Work:
    """What one rank does for a token in one layout.

    read_bytes       weights read per decode step (one stream)
    kv_bytes         KV bytes read per decode step at the depth that is asked about
    ops              multiply-adds x 2 of one prompt token
    """

    read_bytes: float
    kv_bytes: float
    ops: float


@dataclass(frozen=True)
class LayoutSpeed:
    """Tokens per second. `low` and `high` factors bound what is believed: decode_tok_s * low .. decode_tok_s * high."""

    prefill_tok_s: float
    decode_tok_s: float
    low: float
    high: float
    note: str


def rates_of(device: Device) -> DeviceRates: ...  # type: ignore[empty-body]


def pipeline_speed(work: Sequence[Work], rates: Sequence[DeviceRates], hidden: int, layers: int) -> LayoutSpeed: ...  # type: ignore[empty-body]


def tensor_speed(work: Sequence[Work], rates: Sequence[DeviceRates], hidden: int, layers: int) -> LayoutSpeed: ...  # type: ignore[empty-body]


def flip_seconds(moved_bytes: Sequence[float], rates: Sequence[DeviceRates]) -> float: ...  # type: ignore[empty-body]


def break_even(cost_s: float, tensor_tok_s: float, pipeline_tok_s: float) -> int: ...  # type: ignore[empty-body]
