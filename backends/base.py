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

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

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


class PartOf(NamedTuple):
    """Which elements of a checkpoint's tensor a view shows: runs (first, end) of its rows times runs of its columns,
    packed in that order."""

    tensor: str
    rows: tuple[tuple[int, int], ...]
    cols: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class TensorView:
    """A tensor's packed bytes as they lie in the checkpoint (usually a view into the mapped file).

    `part` says where in the checkpoint they lie, for ranks that hold weights together; None: not as they are here.
    `data` is uint8, contiguous, `rows * type.row_bytes(cols)` long. A checkpoint that stores the tensor in another form
    may make it on access: whoever reads it keeps what they got, and who only wants its length asks `nbytes`.
    """

    name: str
    type: QuantType
    rows: int
    cols: int
    data: npt.NDArray[np.uint8]
    part: PartOf | None = None

    @property
    def nbytes(self) -> int:
        return self.rows * self.type.row_bytes(self.cols)

    def pieces(self) -> Iterator[npt.NDArray[np.uint8]]:
        """The bytes in order, in pieces of equal length: one, or the matrices of a stack that is never put together."""
        yield self.data


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
    """out[r] = scale * table[tokens[r] - first]

    `first` None: the whole table is here. Otherwise it holds a rank's rows of the vocabulary from `first` on, and
    tokens whose row another rank has give zeros: the sum over ranks is the embedding.
    """

    table: Weight
    out: Buffer
    scale: float = 1.0
    first: int | None = None


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
    """Normalise (where asked) and rotate q `[heads]` and k `[kv_heads]` in place, then store k and v at the row's slot.

    Head h of q begins at `h * q_step` (0: head_dim apart; more where something else, a gate, lies behind each head's
    query). `q_norm` and `k_norm` are RMS norms over each head before the rotation, weights `[1, head_dim]`, with
    `norm_eps`; `v_norm` is one without weights. `k` and `v` None: only q is treated, the layer reads what another one
    stored.
    """

    q: Buffer
    k: Buffer | None
    v: Buffer | None
    layer: int
    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope | None
    q_step: int = 0
    q_norm: Weight | None = None
    k_norm: Weight | None = None
    norm_eps: float = 0.0
    v_norm: bool = False


@dataclass(frozen=True)
class Attention:
    """out = softmax(scale * q . K[0..p]) V[0..p], per head; kv head of query head h is h // (heads // kv_heads).

    `window` > 0 hides key position j from query position p where p - j >= window. `softcap` > 0: scores become
    softcap * tanh(score / softcap), after the scale. `sinks` `[1, heads]`: one more logit for each head that joins the
    softmax's denominator only. `gated`: the head_dim values behind each head's query (at `h * q_step + head_dim`) are a
    gate, and out is multiplied by their sigmoid.

    `partial`: the rank has some of the rows only. Pages of the lane's table that are -1 lie on other ranks and are
    passed over. `out` is `[heads * head_dim + heads]`: for each head the softmax over the rows that are here times
    their V, then for each head the natural logarithm of its denominator, log sum exp(score); without any row 0 and
    -inf. Sinks and gates wait for `MergeAttention`.
    """

    q: Buffer
    out: Buffer
    layer: int
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: Weight | None = None
    q_step: int = 0
    gated: bool = False
    partial: bool = False


@dataclass(frozen=True)
class GatedActivation:
    """out = act(gate) * up, act by `kind`:

    silu         x * sigmoid(x)
    gelu         0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))
    swiglu_oai   gate' = min(gate, 7), up' = clamp(up, -7, 7): gate' * sigmoid(1.702 gate') * (up' + 1)
    """

    gate: Buffer
    up: Buffer
    out: Buffer
    kind: str = "silu"


@dataclass(frozen=True)
class ExpertMatrix:
    """The matrices of all experts in one tensor: that of expert e are rows [e * pitch + first, ... + height)."""

    weight: Weight
    height: int
    pitch: int
    first: int = 0
    bias: Weight | None = None
    """`[1, experts * pitch]`, cut like the rows."""


@dataclass(frozen=True)
class Routing:
    """Which experts a row runs, from its logits `[experts]`, and with what weights.

    func        softmax: probabilities over all; sigmoid: of each by itself; chosen: softmax over the chosen logits
    selection   `[1, experts]`, added to the probabilities for choosing only
    normalise   the chosen weights are divided by max(their sum, 6.1035e-5)
    scale       then multiplied by this
    gains       `[1, experts]`, then by that of the expert itself
    The `used` largest are chosen, equal ones by the lower index.
    """

    experts: int
    used: int
    func: str = "softmax"
    normalise: bool = True
    scale: float = 1.0
    selection: Weight | None = None
    gains: Weight | None = None


@dataclass(frozen=True)
class Experts:
    """out = sum over the chosen experts of weight_e * down_e(act(gate_e src) * up_e src), with biases where given.

    `held` (first, end): the matrices are those of experts first .. end-1 alone; a chosen one that another rank has adds
    nothing here. None: all experts are here.
    """

    src: Buffer
    logits: Buffer
    out: Buffer
    routing: Routing
    gate: ExpertMatrix
    up: ExpertMatrix
    down: ExpertMatrix
    kind: str = "silu"
    held: tuple[int, int] | None = None


@dataclass(frozen=True)
class AddGated:
    """into += sigmoid(gate) * src, `gate` one value a row; without a gate into += src."""

    src: Buffer
    into: Buffer
    gate: Buffer | None = None


@dataclass(frozen=True)
class DeltaNet:
    """Gated delta rule over a causal convolution, with a gated norm: one recurrent mixer between its projections.

    mixed `[2 * key_heads * key_dim + value_heads * value_dim]` (q | k | v), z `[value_heads * value_dim]`, beta and
    alpha `[value_heads]` (logits), conv `[channels, kernel]`, dt_bias and a `[1, value_heads]` (a = -exp(A_log)), norm
    `[1, value_dim]`, out `[value_heads * value_dim]`.

    For each row in order of position, from the state of its sequence (zeros where its position is 0):
      c = silu(sum_j conv[ch, j] * mixed_{t-kernel+1+j}[ch]);  q, k, v = parts of c
      q, k /= sqrt(sum of squares + eps) per head;  q /= sqrt(key_dim)
      g = softplus(alpha + dt_bias) * a;  b = sigmoid(beta)
      M = exp(g) M;  M += k (b (v - M^T k))^T;  o = M^T q          for each value head
      out = rms(o, norm, eps) * silu(z)
    Value head h goes with key head h % key_heads where `tiled`, else with h // (value_heads // key_heads).
    The state after a lane's last row stays in its slot: the last kernel - 1 rows of `mixed`, and M.
    """

    mixed: Buffer
    z: Buffer
    beta: Buffer
    alpha: Buffer
    out: Buffer
    layer: int
    conv: Weight
    dt_bias: Weight
    a: Weight
    norm: Weight
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    eps: float
    tiled: bool = False


@dataclass(frozen=True)
class Softcap:
    """src = cap * tanh(src / cap), in place"""

    src: Buffer
    cap: float


@dataclass(frozen=True)
class Scale:
    """src = weight * src, in place; `weight` is one number, `[1, 1]`"""

    src: Buffer
    weight: Weight


@dataclass(frozen=True)
class SelectRows:
    """out[i] = src[logit_rows[i]] + add[logit_rows[i]]: from here on only rows whose logits are asked for remain."""

    src: Buffer
    out: Buffer
    add: Buffer | None = None


# -------------------------------------------------------------------------------------------- exchanges between ranks
#
# All ranks of a fleet run these in the same order with the same labels (`Stamp.label`). Their rows are those of the
# other ops at the same place of the list; with none there is no exchange.


@dataclass(frozen=True)
class Zero:
    """out = 0: the partial sum of a rank that has no unit of a family."""

    out: Buffer


@dataclass(frozen=True)
class SumRows:
    """buffer = the sum over all ranks of their `buffer`, the same bits on each."""

    buffer: Buffer
    label: str


@dataclass(frozen=True)
class GatherPart:
    """out = `src` of all ranks side by side in their order; rank r's is `widths[r]` wide (0: it has none, and its `src`
    is a buffer of width 0)."""

    src: Buffer
    out: Buffer
    widths: tuple[int, ...]


@dataclass(frozen=True)
class GatherRows:
    """Several gathers as one exchange. `target`: only that rank gets `out`; None: all do."""

    parts: tuple[GatherPart, ...]
    label: str
    target: int | None = None


@dataclass(frozen=True)
class MergeAttention:
    """The partial attentions of all ranks become the attention of this rank's own heads.

    `src` is what a partial `Attention` of `heads` heads gave, out `[own * head_dim]` is of heads first .. first+own-1:

        L = log(sum over ranks exp(lse_r) + exp(sink));  out = sum over ranks exp(lse_r - L) * out_r

    A rank without a row of the request has lse -inf and counts for nothing; without any row anywhere out is 0. `sinks`
    `[1, own]`. `gate`: out is then multiplied by the sigmoid of this rank's own queries' gates, which lie in the buffer
    at `h * 2 * head_dim + head_dim` for own head h. `own` may be 0.
    """

    src: Buffer
    out: Buffer
    heads: int
    head_dim: int
    first: int
    own: int
    label: str
    sinks: Weight | None = None
    gate: Buffer | None = None


@dataclass(frozen=True)
class SendRows:
    """Send rows of all `buffers`, side by side as one message, to the rank that runs the next layers. Never waits."""

    buffers: tuple[Buffer, ...]
    target: int
    label: str


@dataclass(frozen=True)
class ReceiveRows:
    """The counterpart of `SendRows`: fills `buffers` with what rank `source` sent."""

    buffers: tuple[Buffer, ...]
    source: int
    label: str


EXCHANGES = (SumRows, GatherRows, MergeAttention, SendRows, ReceiveRows)

Op = (
    EmbedRows
    | Norm
    | Linear
    | RopeStore
    | Attention
    | GatedActivation
    | Experts
    | AddGated
    | DeltaNet
    | Softcap
    | Scale
    | SelectRows
    | Zero
    | SumRows
    | GatherRows
    | MergeAttention
    | SendRows
    | ReceiveRows
)
"""The buffer written by the last op of a list holds the logits, `[len(logit_rows), vocab]`; a list that ends with
`SendRows`, or gathers logits for another rank, gives none."""


# ------------------------------------------------------------------------------------------------- pools and batches


@dataclass(frozen=True)
class KvLayer:
    """Shape of one attention layer's rows in the pool, and the group whose slots they lie in."""

    kv_heads: int
    head_dim: int
    group: int = 0


@dataclass(frozen=True)
class KvWindow:
    """A group of layers that see the last `window` tokens only: `slots` rows for each (a multiple of PAGE_LEN)."""

    window: int
    slots: int


@dataclass(frozen=True)
class KvPool:
    """The KV pool of a rank, one K and one V of `type` for each layer, in groups that keep the same tokens.

    Group 0 keeps every token and has `slots` rows for each of its layers; group g > 0 is `windows[g - 1]`. A group has
    slots of its own numbering; slot s lies in page s // PAGE_LEN. The groups are the model's: a rank may hold no layer
    of some. `type` is F32, F16, BF16, Q8_0 or F8.
    """

    layers: tuple[KvLayer, ...]
    slots: int
    type: QuantType
    windows: tuple[KvWindow, ...] = ()

    @property
    def group_slots(self) -> tuple[int, ...]:
        """Slots of each group."""
        return (self.slots, *(window.slots for window in self.windows))

    @property
    def group_windows(self) -> tuple[int, ...]:
        """Tokens that each group keeps; 0: every one."""
        return (0, *(window.window for window in self.windows))


@dataclass(frozen=True)
class StateLayer:
    """Shape of one recurrent layer's state: `kernel - 1` rows of `channels`, and `heads` matrices key_dim x
    value_dim."""

    channels: int
    kernel: int
    heads: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True)
class StatePool:
    """The recurrent states of a rank, float32: `slots` of them for each layer. Which slot is whose, and which ones hold
    checkpoints of the prefix cache, only the engine knows."""

    layers: tuple[StateLayer, ...] = ()
    slots: int = 0


NO_STATES = StatePool()


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
    slots      int32 [groups, rows]   where its K and V go in each KV group (a row that another rank keeps: into the
               padding behind the pool)
    lanes      int32 [rows]           which row of `tables` describes its sequence
    tables     int32 [groups, lanes, lane_pages]   page of each 16 positions of the lane's sequence (kept by the
               worker); in a group with a window those before the window of the lane's first row mean nothing, and are
               not read; for partial attention -1 is a page of another rank
    logit_rows int32 [n]              indices of rows whose logits are wanted, ascending
    states     int32 [lanes]          state slot of each lane (models with recurrent layers only)
    epoch, seq   of the plan: what its exchanges are stamped with
    """

    tokens: npt.NDArray[np.int32]
    positions: npt.NDArray[np.int32]
    slots: npt.NDArray[np.int32]
    lanes: npt.NDArray[np.int32]
    tables: npt.NDArray[np.int32]
    logit_rows: npt.NDArray[np.int32]
    states: npt.NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    epoch: int = 0
    seq: int = 0


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


@dataclass(frozen=True)
class Shared:
    """What the ranks of one box hold together (unified memory).

    `ops` and `weights` are those of one rank that would run the whole model: all ranks make the same arena of them,
    each fills a part of it, and every rank's own weights are views into it. `kv` tells whether the KV pool is one for
    all ranks, too: then it is the same on each of them. `weights_fd` and `kv_fd` are shared memory, empty at first, that
    lives as long as the fleet does. `rank` of `ranks`.
    """

    rank: int
    ranks: int
    ops: Sequence[Op]
    weights: Mapping[str, TensorView]
    weights_fd: int
    kv_fd: int
    kv: bool


class LoadProgress(Protocol):
    def __call__(self, stage: str, done_bytes: int, total_bytes: int) -> None: ...


class Program(Protocol):
    """A bound op list with its weights and pools on the device."""

    def run(self, batch: Batch) -> npt.NDArray[np.float32]:
        """Execute every op. Returns logits float32 `[len(logit_rows), vocab]`, valid until the next call; `[0, vocab]`
        where this rank does not get them. Raises what its collective raises."""
        ...

    def copy_states(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy state slots (source, target) of all layers, in this order. Nothing to do without recurrent layers."""
        ...

    def memory_lines(self) -> Mapping[str, int]:
        """Bytes held, by ledger line: weights, kv, state, workspace."""
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
        states: StatePool = NO_STATES,
        collective: Collective | None = None,
        shared: Shared | None = None,
    ) -> Program:
        """Upload or repack the weights, make pools and buffers. What `memory_lines` says is held when this returns: no
        later `run` fails for memory. `collective` is needed for ops that exchange rows, and stays the caller's; with
        `shared` the ranks meet in it once, when each has filled its part.
        Raises `Unsupported`, or MemoryError with the arithmetic."""
        ...

    def close(self) -> None: ...


class Stamp(NamedTuple):
    """Which exchange of which plan. `rows` may be 0; `label` is ASCII, 1 to 31 characters, and names the place in the
    model (`attention 3`), the same on every rank."""

    epoch: int
    seq: int
    rows: int
    label: str


@dataclass(frozen=True)
class Counts:
    """What the exchanges of one label have cost this rank. `moved_bytes` were written by it (received, for a receive);
    waiting is split into spinning and sleeping, in ns."""

    calls: int
    moved_bytes: int
    spun_ns: int
    slept_ns: int


class Collective(Protocol):
    """How a rank exchanges acts with the others of its fleet while it runs a plan (backends/acts.py).

    Every call names its place by a `Stamp`; all ranks make the exchanges of a plan in the same order. Sizes are checked
    before anything is written or waited for: a ValueError has left the peers alone and may be answered like any fault
    of a plan. Waiting is bounded. `PeerLate` and `StampMismatch` leave the wire unusable: an exchange that was entered
    is owed, so all that follows raises the same error again. Arrays are float32 with unit stride along a row.
    """

    rank: int
    ranks: int

    def sum(self, stamp: Stamp, buffer: npt.NDArray[np.float32]) -> None:
        """buffer `[rows, width]` = the sum of all ranks' buffers, element by element in the order of the ranks: the
        same bits on every rank, whoever came first. Raises ValueError, PeerLate, StampMismatch."""
        ...

    def gather(
        self, stamp: Stamp, part: npt.NDArray[np.float32], out: npt.NDArray[np.float32], widths: Sequence[int]
    ) -> None:
        """out `[rows, sum(widths)]` = the parts `[rows, widths[r]]` of all ranks side by side, in their order; a width
        may be 0. `widths` is the same on every rank. Raises ValueError, PeerLate, StampMismatch."""
        ...

    def send(self, stamp: Stamp, target: int, rows: npt.NDArray[np.float32]) -> None:
        """Send `[rows, width]` to rank `target`. Never waits. Raises ValueError, also where there is no channel, and
        NoCredit."""
        ...

    def receive(self, stamp: Stamp, source: int, out: npt.NDArray[np.float32]) -> None:
        """out `[rows, width]` = the next message from rank `source`, which must bear this stamp and shape. Raises
        ValueError, PeerLate, StampMismatch."""
        ...

    def credit(self, target: int) -> int:
        """Messages that may be sent to rank `target` now. Raises ValueError where there is no channel."""
        ...

    def counts(self) -> Mapping[str, Counts]:
        """What was exchanged, by label. A rank alone exchanges nothing, and counts nothing."""
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
