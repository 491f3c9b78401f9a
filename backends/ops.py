"""Ops: what a model is made of when a backend sees it. Values alone.

An op names the buffers that it reads and writes and the weights that it uses; shapes, units and formulas stand with
each. `backends.base` has the rules that a list of them keeps, and whoever wants the seam imports them from there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from backends.quant import QuantType

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

    Without `heads` there is no q, a buffer of width 0. Head h of q begins at `h * q_step` (0: head_dim apart; more
    where something else, a gate, lies behind each head's query). `q_norm` and `k_norm` are RMS norms over each head
    before the rotation, weights `[1, head_dim]`, with `norm_eps`; `v_norm` is one without weights. `k` and `v` None:
    only q is treated, the layer reads what another one stored.
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
class JoinHidden:
    """out = [left[first : end] | before[first : end]], the two runs of columns side by side; `end - first` may be 0.

    `before` of a row is what `right` was for the row before it in its sequence: the batch's row before, or for a lane's
    first row what its slot of state layer `layer` has; zeros where its position is 0. The `right` of a lane's last row
    stays in the slot, columns first .. end alone.

    `chained`, in a draft step: `before` is row `Batch.chain[r]` of `right` as the step before left it, or where that is
    -1 what the lane's slot has. Nothing stays.
    """

    left: Buffer
    right: Buffer
    out: Buffer
    layer: int
    first: int
    end: int
    chained: bool = False


@dataclass(frozen=True)
class DraftStep:
    """A mark, no work: the ops behind it are one step of drafting (`Program.draft`), those before it `Program.run`."""


@dataclass(frozen=True)
class HiddenStep:
    """A mark, no work, the last one of a list: from what `Program.run` left of all its rows, the ops behind it make
    `rows`, the states behind the output norm (`Program.hidden`). None behind it: `Program.run` has made them."""

    rows: Buffer


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
    | JoinHidden
    | DraftStep
    | HiddenStep
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
"""The buffer written by the last op of a list (before its first mark, and again behind `DraftStep`) holds the logits,
`[len(logit_rows), vocab]`; a list that ends with `SendRows`, or gathers logits for another rank, gives none."""
