"""Which module knows an op's launches. Modules are looked up by the op's kind alone."""

from __future__ import annotations

from types import ModuleType

from backends.base import (
    Attention,
    DeltaNet,
    Experts,
    JoinHidden,
    Op,
    RopeStore,
)
from backends.gpu.library_gemm import Work
from backends.gpu.ops.buffers import Planes
from backends.gpu.steps import attention, dense, exchange, experts, recurrent
from backends.gpu.steps.base import BatchShape, Context, Places
from backends.ops import EXCHANGES


def _module(op: Op) -> ModuleType:
    match op:
        case RopeStore() | Attention():
            return attention
        case Experts():
            return experts
        case DeltaNet() | JoinHidden():
            return recurrent
        case _ if isinstance(op, EXCHANGES):
            return exchange
        case _:
            return dense


def scratch(op: Op, context: Context) -> dict[str, int]:
    """Bytes that an op needs beside its buffers, by name."""
    found: dict[str, int] = _module(op).scratch(op, context)
    return found


def launches(op: Op, places: Places, shape: BatchShape, planes: Planes | None) -> tuple[Work, ...]:
    """What has to run of an op; of an exchange, what has to run behind it."""
    found: tuple[Work, ...] = _module(op).launches(op, places, shape, planes)
    return found
