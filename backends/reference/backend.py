"""`reference`: the oracle. NumPy, one thread, dense weights; what the other backends are compared with.

Correct first: weights are dequantised once at bind, everything is float32 (`OpenOptions.extra["dtype"] = "float64"` for
double precision), and the arithmetic in `compute` makes a row's result independent of the batch. It runs on one core
whatever `OpenOptions.threads` says, and reports one: no matrix product is used that a threaded BLAS would split.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from importlib.util import find_spec

import numpy as np

from backends.base import (
    NO_STATES,
    Binding,
    Capability,
    Collective,
    DeviceFacts,
    KvPool,
    Limits,
    LoadProgress,
    Op,
    OpenOptions,
    PoolParts,
    Pools,
    Shared,
    SharedPools,
    StatePool,
    TensorView,
    WeightHome,
)
from backends.needs import SHARES, check_exchanges, refuse_missing
from backends.quant import QuantType
from backends.reference.compute import GATES, Array
from backends.reference.delta import state_bytes
from backends.reference.dequant import INTEGERS, NOT_WEIGHTS, PLAIN, dequantise
from backends.reference.experts import ROUTINGS
from backends.reference.layouts import ReferenceLayouts
from backends.reference.pools import POOL_TYPES, pool_bytes
from backends.reference.program import ReferenceProgram
from budget.host import read_memory

DTYPES: dict[str, np.dtype[np.floating]] = {"float32": np.dtype(np.float32), "float64": np.dtype(np.float64)}


class ReferenceBackend:
    """A `Backend`. Raises ValueError where `extra["dtype"]` names no known dtype."""

    def __init__(self, options: OpenOptions) -> None:
        named = options.extra.get("dtype", "float32")
        if named not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, is {named!r}")
        self.dtype: np.dtype[np.floating] = DTYPES[named]
        self._table = capability_table(has_gguf=find_spec("gguf") is not None)
        self.facts = DeviceFacts(
            backend="reference",
            name=platform.processor() or platform.machine(),
            isa=f"numpy-{np.__version__}",
            threads=1,
            batch_invariant=True,
        )

    def capabilities(self) -> tuple[Capability, ...]:
        return self._table

    def pools(self, kv: KvPool, states: StatePool, progress: LoadProgress, shared: SharedPools | None = None) -> Pools:
        """Raises ValueError."""
        raise ValueError("reference keeps rows and states in arrays of its programs: nobody else can hold them")

    def bind(
        self,
        ops: Sequence[Op],
        weights: Mapping[str, TensorView],
        kv: KvPool,
        limits: Limits,
        progress: LoadProgress,
        states: StatePool = NO_STATES,
        collective: Collective | None = None,
        shared: Shared | None = None,
        parts: PoolParts | None = None,
    ) -> ReferenceProgram:
        """Raises Unsupported, MemoryError, and ValueError for exchanges that do not go with `collective`, or for memory
        that ranks share."""
        if shared is not None or parts is not None:
            raise ValueError("reference keeps its weights dense in memory of its own: ranks cannot share them")
        refuse_missing(self.facts.backend, self._table, ops, weights, kv)
        check_exchanges(ops, collective)
        self._refuse_too_large(weights, kv, states)
        total = sum(view.nbytes for view in weights.values())
        dense: dict[str, Array] = {}
        done = 0
        for name, view in weights.items():
            dense[name] = dequantise(view, self.dtype)
            done += view.nbytes
            progress("weights", done, total)
        return ReferenceProgram(ops, dense, kv, limits, self.dtype, states, collective)

    def bind_layouts(
        self,
        bindings: Sequence[Binding],
        limits: Limits,
        progress: LoadProgress,
        collective: Collective,
        home: WeightHome,
    ) -> ReferenceLayouts:
        """Each layout is made again from its views, whatever `home` says: nothing is packed here."""

        def make(each: Binding) -> ReferenceProgram:
            return self.bind(each.ops, each.weights, each.kv, limits, progress, each.states, collective)

        return ReferenceLayouts(bindings, make)

    def close(self) -> None:
        """Nothing is held but what programs hold."""

    def _refuse_too_large(self, weights: Mapping[str, TensorView], kv: KvPool, states: StatePool) -> None:
        dense = sum(view.rows * view.cols for view in weights.values()) * self.dtype.itemsize
        pools = pool_bytes(kv, self.dtype) + state_bytes(states, self.dtype)
        there = read_memory().available_bytes
        if there is not None and dense + pools > there:
            raise MemoryError(
                f"reference keeps weights dense: {dense} bytes of {self.dtype.name} weights + {pools} of KV pools"
                f" and states = {dense + pools}, available {there}"
            )


def capability_table(*, has_gguf: bool) -> tuple[Capability, ...]:
    """Every entry. Without the package `gguf`, no dependency of a plain install, only plain floats are read."""
    entries = []
    for op in ("EmbedRows", "Linear", "Norm", "Bias", "Scale", "HeadNorm", "Experts"):
        for kind in QuantType:
            why = _why_not(kind, has_gguf)
            entries.append(Capability(op, kind.name, not why, why))
    for op in ("RopeStore", "Attention"):
        entries += [Capability(op, kind.name, True) for kind in POOL_TYPES]
    for op in ("GatedActivation", "Experts"):
        entries += [Capability(op, kind, True) for kind in GATES]
    entries += [Capability("Experts", need, True) for need in (*(f"routing {func}" for func in ROUTINGS), "gains")]
    entries += [Capability("Attention", feature, True) for feature in ("softcap", "sinks", "gated")]
    entries += [Capability("RopeStore", "shared rows", True), Capability("HeadNorm", "none", True)]
    entries += [Capability(op, "F32", True) for op in ("AddGated", "Softcap", "SelectRows", "DeltaNet", "JoinHidden")]
    entries += [Capability(*need, True) for need in SHARES]
    return tuple(entries)


def _why_not(kind: QuantType, has_gguf: bool) -> str:
    if kind in NOT_WEIGHTS:
        return "an integer type holds no weights" if kind in INTEGERS else "a type of KV pools, not of weights"
    return "" if has_gguf or kind in PLAIN else "needs the package gguf (pip install gguf)"
