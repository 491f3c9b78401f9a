"""THE SEAM between the engine's world and a device.

A worker turns a model's stage declarations into a list of *ops* (`homeserve.models.bind`), hands it to a backend once
(`Backend.bind`), and gets a `Program` that it runs once per plan with a `Batch`. An op is data: it names the buffers it
reads and writes and the weights it uses, never a tensor. So one list serves every backend: `reference` walks it op by
op in NumPy, `cpu` records it into one native call, a GPU backend will capture it as a graph.

    stage declarations ──bind──▶ [op, op, …] ──Backend.bind(weights, pools)──▶ Program ──run(Batch)──▶ logits

Rules
- Activations are float32 `[rows, width]`; `rows` is the plan's row count, `width` is fixed by the `Buffer`.
- An op's result for a row depends on that row, its weights and its sequence's KV rows alone: never on the other rows of
  the batch, on how many there are, or on the thread count. A backend that keeps this rule sets `batch_invariant`; one
  that cannot says so, and `--deterministic` is refused there.
- The KV rows of *all* rows of a batch are written (`RopeStore`) before any attention of the same layer reads: one
  sequence may be given pages that another one fills in the same batch (a prefix hit). Attention reads positions 0..p of
  its own sequence from the pool alone: a row is never counted twice, however the prompt was cut into chunks.
- What a backend can do is a table (`Capability`): op x quant type -> yes, or no with the reason. Unknown never reads as
  yes; a model that needs a missing entry is refused at bind with *every* missing entry named.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from backends.quant import QuantType

PAGE_LEN = 16
"""Slots in one KV page; the unit of allocation, and of every backend's K and V blocks."""


# ---------------------------------------------------------------------------------------------------------- values


@dataclass(frozen=True)
class Buffer:
    """A named float32 activation buffer `[rows, width]`. Equal names are the same memory."""

    name: str
    width: int


@dataclass(frozen=True)
class Weight:
    """A tensor by its canonical name. Matrices are `[rows, cols]` = `[out, in]`, vectors `[1, cols]`."""

    name: str
    rows: int
    cols: int


@dataclass(frozen=True)
class TensorView:
    """A tensor's packed bytes as they lie in the checkpoint (usually a view into the mapped file).

    `data` is uint8, contiguous, `rows * type.row_bytes(cols)` long.
    """

    name: str
    type: QuantType
    rows: int
    cols: int
    data: npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding: pair i of a head turns by `position * frequencies[i]`, times `magnitude`.

    `interleaved` pairs dims (2i, 2i+1) (GGUF "NORM"); otherwise (i, i + n_rot/2) ("NEOX"). The first
    `n_rot = 2 * len(frequencies)` dims turn; the rest of the head passes through. All scaling (llama-3, yarn, linear)
    is already in `frequencies`.
    """

    interleaved: bool
    frequencies: tuple[float, ...]
    magnitude: float = 1.0


# ------------------------------------------------------------------------------------------------------------- ops


@dataclass(frozen=True)
class EmbedRows:
    """out[r] = scale * table[tokens[r]]"""

    table: Weight
    out: Buffer
    scale: float = 1.0


@dataclass(frozen=True)
class Norm:
    """src += add (if given); out = src / sqrt(mean(src^2) + eps) * weight   (RMS norm over the row)"""

    src: Buffer
    weight: Weight
    eps: float
    out: Buffer
    add: Buffer | None = None


@dataclass(frozen=True)
class LinearPart:
    """One matrix of a `Linear`: out = src @ weight^T + bias"""

    weight: Weight
    out: Buffer
    bias: Weight | None = None


@dataclass(frozen=True)
class Linear:
    """Matrices with one input, quantised once. `src.width == weight.cols`, `out.width == weight.rows`."""

    src: Buffer
    parts: tuple[LinearPart, ...]


@dataclass(frozen=True)
class RopeStore:
    """Rotate q `[heads*head_dim]` and k `[kv_heads*head_dim]` in place, then store k and v at the row's slot."""

    q: Buffer
    k: Buffer
    v: Buffer
    layer: int
    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope | None


@dataclass(frozen=True)
class Attention:
    """out = softmax(scale * q . K[0..p]) V[0..p], per head; kv head of query head h is h // (heads // kv_heads).

    `window` > 0 hides key position j from query position p where p - j >= window.
    """

    q: Buffer
    out: Buffer
    layer: int
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int = 0


@dataclass(frozen=True)
class GatedActivation:
    """out = silu(gate) * up"""

    gate: Buffer
    up: Buffer
    out: Buffer
    kind: str = "silu"


@dataclass(frozen=True)
class SelectRows:
    """out[i] = src[logit_rows[i]] + add[logit_rows[i]]: from here on only rows whose logits are asked for remain."""

    src: Buffer
    out: Buffer
    add: Buffer | None = None


Op = EmbedRows | Norm | Linear | RopeStore | Attention | GatedActivation | SelectRows
"""The buffer written by the last op of a list holds the logits, `[len(logit_rows), vocab]`."""


# ------------------------------------------------------------------------------------------------- pools and batches


@dataclass(frozen=True)
class KvLayer:
    """Shape of one attention layer's rows in the pool."""

    kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class KvPool:
    """The KV pool of a rank: `slots` rows (a multiple of PAGE_LEN) for each layer, one K and one V of `type`.

    Slot s lies in page s // PAGE_LEN. `type` is F16, BF16 or F32.
    """

    layers: tuple[KvLayer, ...]
    slots: int
    type: QuantType


@dataclass(frozen=True)
class Limits:
    """The most that one `Batch` may hold: rows, rows with logits, lanes, pages of one lane."""

    rows: int
    logit_rows: int
    lanes: int
    lane_pages: int


@dataclass
class Batch:
    """What one plan computes. Rows of one sequence are consecutive and in order of position.

    tokens     int32 [rows]
    positions  int32 [rows]           position of the row in its sequence
    slots      int32 [rows]           where its K and V go
    lanes      int32 [rows]           which row of `tables` describes its sequence
    tables     int32 [lanes, lane_pages]   page of each 16 positions of the lane's sequence (kept by the worker)
    logit_rows int32 [n]              indices of rows whose logits are wanted, ascending
    """

    tokens: npt.NDArray[np.int32]
    positions: npt.NDArray[np.int32]
    slots: npt.NDArray[np.int32]
    lanes: npt.NDArray[np.int32]
    tables: npt.NDArray[np.int32]
    logit_rows: npt.NDArray[np.int32]


# ---------------------------------------------------------------------------------------------------- capability


@dataclass(frozen=True)
class Capability:
    """One entry of a backend's table. `ok` None means unknown, which never reads as yes."""

    op: str
    type: str
    ok: bool | None
    why: str = ""


class Unsupported(Exception):
    """A bind needs what the backend lacks. `missing` names every entry, not the first."""

    def __init__(self, backend: str, missing: Sequence[Capability]) -> None:
        self.backend = backend
        self.missing = tuple(missing)
        lines = "; ".join(f"{m.op} on {m.type}: {m.why or 'unknown'}" for m in self.missing)
        super().__init__(f"backend {backend} cannot run this model: {lines}")


# ----------------------------------------------------------------------------------------------------- protocols


@dataclass(frozen=True)
class DeviceFacts:
    """What a backend says of the device that it opened."""

    backend: str
    name: str
    isa: str
    threads: int
    batch_invariant: bool


@dataclass(frozen=True)
class MemoryRegion:
    """`bytes` of this process's address space from `address`, all of them of one ledger line."""

    line: str
    address: int
    bytes: int


class LoadProgress(Protocol):
    def __call__(self, stage: str, done_bytes: int, total_bytes: int) -> None: ...


class Program(Protocol):
    """A bound op list with its weights and pools on the device."""

    def run(self, batch: Batch) -> npt.NDArray[np.float32]:
        """Execute every op. Returns logits float32 `[len(logit_rows), vocab]`, valid until the next call."""
        ...

    def memory_lines(self) -> Mapping[str, int]:
        """Bytes held, by ledger line: weights, kv, workspace."""
        ...

    def memory_regions(self) -> tuple[MemoryRegion, ...]:
        """Where in this process the lines lie, so that what is resident of them can be read from outside; a region
        shares no mapping with anything else. Lines that are not in host memory, or not in mappings of their own, are
        left out: they cannot be measured."""
        ...

    def close(self) -> None: ...


class Backend(Protocol):
    """A device opened by one worker."""

    facts: DeviceFacts

    def capabilities(self) -> tuple[Capability, ...]: ...

    def bind(
        self,
        ops: Sequence[Op],
        weights: Mapping[str, TensorView],
        kv: KvPool,
        limits: Limits,
        progress: LoadProgress,
    ) -> Program:
        """Upload or repack the weights, make pools and buffers. What `memory_lines` says is held when this returns: no
        later `run` fails for memory. Raises `Unsupported`, or MemoryError with the arithmetic."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class OpenOptions:
    """How a worker opens its device. `cores` pins threads (empty: those the process may use)."""

    device_index: int = 0
    threads: int = 0
    cores: tuple[int, ...] = ()
    isa: str = ""
    extra: Mapping[str, str] = field(default_factory=dict)
