"""The op list, walked in NumPy: one method per op, in the order of `backends.base`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from backends.base import (
    AddGated,
    Attention,
    Batch,
    Buffer,
    DeltaNet,
    EmbedRows,
    Experts,
    GatedActivation,
    KvPool,
    Limits,
    Linear,
    MemoryRegion,
    Norm,
    Op,
    RopeStore,
    SelectRows,
    Softcap,
)
from backends.reference.compute import Array, attend, linear, rms_norm, rotate, silu_gate
from backends.reference.pools import Pools, slots_of

Buffers = dict[str, Array]


class ReferenceProgram:
    """A bound op list with dense weights. `weights` are `[rows, cols]` of `dtype`, by name."""

    def __init__(
        self,
        ops: Sequence[Op],
        weights: Mapping[str, Array],
        kv: KvPool,
        limits: Limits,
        dtype: np.dtype[np.floating],
    ) -> None:
        self.ops = tuple(ops)
        self.weights = weights
        self.limits = limits
        self.dtype = dtype
        self.pools = Pools(kv, dtype)

    def run(self, batch: Batch) -> npt.NDArray[np.float32]:
        last = self.ops[-1]
        assert isinstance(last, Linear), "an op list ends with the head, or with a stage's last projection"
        return self.run_from(batch, {})[last.parts[-1].out.name].astype(np.float32, copy=False)

    def run_from(self, batch: Batch, given: Mapping[str, Array]) -> Buffers:
        """Execute every op, starting from the buffers `given` (a previous rank's residual). Gives all buffers."""
        self._check(batch)
        buffers: Buffers = {name: np.array(values, dtype=self.dtype) for name, values in given.items()}
        for op in self.ops:
            self._run_op(op, batch, buffers)
        return buffers

    def copy_states(self, pairs: Sequence[tuple[int, int]]) -> None:
        assert not pairs, "no recurrent layers, so there are no states to copy"

    def memory_lines(self) -> Mapping[str, int]:
        rows = self.limits.rows * self.dtype.itemsize
        widths = {buffer.name: buffer.width for op in self.ops for buffer in _outputs(op)}
        return {
            "weights": sum(array.nbytes for array in self.weights.values()),
            "kv": self.pools.nbytes(),
            "workspace": rows * sum(widths.values()),
        }

    def memory_regions(self) -> tuple[MemoryRegion, ...]:
        """None: arrays share the mappings of the interpreter's heap, and buffers come and go with each run."""
        return ()

    def close(self) -> None:
        """Let go of weights and pools. The program cannot run after."""
        self.weights = {}
        self.pools = Pools(KvPool((), 0, self.pools.type), self.dtype)

    def _check(self, batch: Batch) -> None:
        rows = len(batch.tokens)
        assert rows <= self.limits.rows and len(batch.logit_rows) <= self.limits.logit_rows, "over the limits of bind"
        assert rows == len(batch.positions) == len(batch.slots) == len(batch.lanes)

    def _run_op(self, op: Op, batch: Batch, buffers: Buffers) -> None:
        match op:
            case EmbedRows():
                buffers[op.out.name] = self.weights[op.table.name][batch.tokens] * self.dtype.type(op.scale)
            case Norm():
                if op.add is not None:
                    buffers[op.src.name] = buffers[op.src.name] + buffers[op.add.name]
                weight = self.weights[op.weight.name][0]
                buffers[op.out.name] = rms_norm(buffers[op.src.name], weight, op.eps)
            case Linear():
                for part in op.parts:
                    bias = self.weights[part.bias.name][0] if part.bias is not None else None
                    buffers[part.out.name] = linear(buffers[op.src.name], self.weights[part.weight.name], bias)
            case RopeStore():
                self._rope_store(op, batch, buffers)
            case Attention():
                buffers[op.out.name] = self._attention(op, batch, buffers[op.q.name])
            case GatedActivation():
                buffers[op.out.name] = silu_gate(buffers[op.gate.name], buffers[op.up.name])
            case SelectRows():
                chosen = buffers[op.src.name][batch.logit_rows]
                if op.add is not None:
                    chosen = chosen + buffers[op.add.name][batch.logit_rows]
                buffers[op.out.name] = chosen

    def _rope_store(self, op: RopeStore, batch: Batch, buffers: Buffers) -> None:
        rows = len(batch.tokens)
        assert op.k is not None and op.v is not None, "refused at bind"
        q = buffers[op.q.name].reshape(rows, op.heads, op.head_dim)
        k = buffers[op.k.name].reshape(rows, op.kv_heads, op.head_dim)
        v = buffers[op.v.name].reshape(rows, op.kv_heads, op.head_dim)
        if op.rope is not None:
            turn = (batch.positions, op.rope.frequencies, op.rope.magnitude)
            q = rotate(q, *turn, interleaved=op.rope.interleaved)
            k = rotate(k, *turn, interleaved=op.rope.interleaved)
        buffers[op.q.name] = q.reshape(rows, -1)
        buffers[op.k.name] = k.reshape(rows, -1)
        self.pools.store(op.layer, batch.slots, k, v)

    def _attention(self, op: Attention, batch: Batch, q: Array) -> Array:
        out = np.empty_like(q)
        for row, position in enumerate(batch.positions):
            end = int(position) + 1
            first = max(0, end - op.window) if op.window else 0
            k, v = self.pools.rows(op.layer, slots_of(batch.tables[batch.lanes[row]], first, end))
            out[row] = attend(q[row].reshape(op.heads, op.head_dim), k, v, op.scale).reshape(-1)
        return out


def _outputs(op: Op) -> tuple[Buffer, ...]:
    match op:
        case Linear(parts=parts):
            return tuple(part.out for part in parts)
        case RopeStore() | AddGated() | Softcap():
            return ()
        case Experts(out=out) | DeltaNet(out=out):
            return (out,)
        case EmbedRows(out=out) | Norm(out=out) | Attention(out=out) | GatedActivation(out=out) | SelectRows(out=out):
            return (out,)
