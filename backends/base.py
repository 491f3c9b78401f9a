"""THE SEAM between the engine's world and a device.

A worker turns a model's stage declarations into a list of *ops* (`homeserve.models.bind`), hands it to a backend once
(`Backend.bind`), and gets a `Program` that it runs once per plan with a `Batch`. An op is data: it names the buffers it
reads and writes and the weights it uses, never a tensor. So one list serves every backend: `reference` walks it op by
op in NumPy, `cpu` records it into one native call, a GPU backend will capture it as a graph.

    stage declarations ──bind──▶ [op, op, …] ──Backend.bind(weights, pools)──▶ Program ──run(Batch)──▶ logits

A model that drafts has a second list behind the first, from the mark `DraftStep` on: one step of drafting
(`Program.draft`). Rows whose input is a draft may turn out wrong. Their K and V are written over by the next ones, but
a recurrent state cannot be taken back; so the states of such a lane are *held* (`Batch.hold`) until it is known how
many of its rows count (`Program.accept`).

    draft ─▶ draft ─▶ draft ─▶ run(hold) ─▶ logits of each row ─▶ accept(lane, rows that count)

Embeddings are made of the rows themselves. Behind the mark `HiddenStep` stands the output norm of all rows of a run,
which `run` leaves out, because logits need that of few: a program that is never asked (`Program.hidden`) does nothing
for it and holds no buffer more.

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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from backends.ops import EXCHANGES as EXCHANGES
from backends.ops import AddGated as AddGated
from backends.ops import Attention as Attention
from backends.ops import Buffer as Buffer
from backends.ops import DeltaNet as DeltaNet
from backends.ops import DraftStep as DraftStep
from backends.ops import EmbedRows as EmbedRows
from backends.ops import ExpertMatrix as ExpertMatrix
from backends.ops import Experts as Experts
from backends.ops import GatedActivation as GatedActivation
from backends.ops import GatherPart as GatherPart
from backends.ops import GatherRows as GatherRows
from backends.ops import HiddenStep as HiddenStep
from backends.ops import JoinHidden as JoinHidden
from backends.ops import Linear as Linear
from backends.ops import LinearPart as LinearPart
from backends.ops import MergeAttention as MergeAttention
from backends.ops import Norm as Norm
from backends.ops import Op as Op
from backends.ops import PartOf as PartOf
from backends.ops import ReceiveRows as ReceiveRows
from backends.ops import Rope as Rope
from backends.ops import RopeStore as RopeStore
from backends.ops import Routing as Routing
from backends.ops import Scale as Scale
from backends.ops import SelectRows as SelectRows
from backends.ops import SendRows as SendRows
from backends.ops import Softcap as Softcap
from backends.ops import SumRows as SumRows
from backends.ops import TensorView as TensorView
from backends.ops import Weight as Weight
from backends.ops import Zero as Zero
from backends.quant import QuantType

PAGE_LEN = 16
"""Slots in one KV page; the unit of allocation, and of every backend's K and V blocks."""


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
    """Shape of one recurrent layer's state: `kernel - 1` rows of `channels`, and `heads` matrices key_dim x value_dim
    (without heads both are 0: rows alone, `JoinHidden`)."""

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
class StatePart:
    """What a program has of a recurrent layer's state where states are held at the width of the whole model: layer
    `layer` of the pool, its key heads from `first_key` on (of a layer without heads: its channels). The value heads
    that go with them, and the channels of both, lie in the pool as they do in the model."""

    layer: int
    first_key: int = 0


@dataclass(frozen=True)
class Limits:
    """The most that one `Batch` may hold: rows, rows with logits, lanes, pages of one lane, rows of lanes whose states
    are held (0: none ever are; of a program without a step of drafting none are)."""

    rows: int
    logit_rows: int
    lanes: int
    lane_pages: int
    held_rows: int = 0


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
    hold       int32 [lanes]          where the rows of a lane whose states are held are kept, among `Limits.held_rows`
               (a place for each of its rows, one behind the other); -1: its states are not held. Empty: none are
    chain      int32 [rows]           of a draft step alone: the row of the step before whose hidden state the row goes
               on from; -1: the one that its lane's state slot has
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
    hold: npt.NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    chain: npt.NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))


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
    """The weights that the ranks of one box hold together (unified memory).

    `ops` and `weights` are those of one rank that would run the whole model: all ranks make the same arena of them,
    each fills a part of it, and every rank's own weights are views into it. `fleet` has the ops and weights of each
    rank, and of each layout that is to be bound, so that what none of them can view is left out. `weights_fd` is shared
    memory, empty at first, that lives as long as the fleet does. `rank` of `ranks`. `packed`: an earlier bind with the
    same whole and the same `fleet` has filled it, and the ranks do not meet.
    """

    rank: int
    ranks: int
    ops: Sequence[Op]
    weights: Mapping[str, TensorView]
    weights_fd: int
    fleet: Sequence[tuple[Sequence[Op], Mapping[str, TensorView]]] = ()
    packed: bool = False


@dataclass(frozen=True)
class SharedPools:
    """Memory for KV rows and states that the ranks of one box hold together: two files without a name, empty at first,
    that live as long as the fleet does. Rank `rank` of `ranks` makes its part of them resident."""

    rank: int
    ranks: int
    kv_fd: int
    state_fd: int


class Pools(Protocol):
    """KV rows and states in memory, zeroed when they were made, apart from the programs that use them: programs of
    several layouts may be bound to the same ones, and neither a bind nor a close touches what lies in them."""

    kv: KvPool
    states: StatePool

    def memory_lines(self) -> Mapping[str, int]:
        """Bytes held, by ledger line: kv, state. Of memory that ranks share each tells what it has filled."""
        ...

    def memory_regions(self) -> tuple[MemoryRegion, ...]: ...

    def close(self) -> None:
        """Programs that use them must be closed before."""
        ...


@dataclass(frozen=True)
class PoolParts:
    """What of `pools` a program uses: for each layer of its own KV pool the pool's layer, for each of its recurrent
    layers the part of a state. Rows of the program's KV pool are those of `pools`."""

    pools: Pools
    kv_layers: tuple[int, ...]
    states: tuple[StatePart, ...] = ()


class LoadProgress(Protocol):
    def __call__(self, stage: str, done_bytes: int, total_bytes: int) -> None: ...


class Program(Protocol):
    """A bound op list with its weights and pools on the device."""

    def run(self, batch: Batch) -> npt.NDArray[np.float32]:
        """Execute every op up to the first mark. Returns logits float32 `[len(logit_rows), vocab]`, valid until the
        next call; `[0, vocab]` where this rank does not get them. The states of lanes that `batch.hold` names are those
        of before, whatever happens here. Raises what its collective raises."""
        ...

    def hidden(self, batch: Batch) -> npt.NDArray[np.float32]:
        """Of the last `run`, whose batch it was, every row behind the output norm: float32 `[rows, hidden]`, valid
        until the next call; the logits of that run are not valid any more. No exchange. Raises ValueError on a rank
        that does not have them, and where the last call that computed rows was not that run."""
        ...

    def draft(self, batch: Batch) -> npt.NDArray[np.float32]:
        """Execute the ops behind the mark: one row of each lane, one step of drafting. Returns as `run` does; all its
        rows have logits. It writes K and V of the drafting layer, which the next `run` of these positions writes
        again."""
        ...

    def accept(self, kept: Sequence[tuple[int, int]]) -> None:
        """Of the last `run`: (lane, rows) of each lane whose states were held. They become what the first `rows` rows
        of the lane leave, bit for bit as if these alone had been run. Raises ValueError, before anything is written,
        for a lane that was not held or has not so many rows; 0 rows leave it as it was."""
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


# ------------------------------------------------------------------------------------------- more than one layout


@dataclass(frozen=True)
class Binding:
    """One layout of a model on this rank: its ops, weights and pools. `fleet` has ops and weights of each rank in this
    layout, and `whole` those of one rank that would run the whole model: from them all ranks see what of the weights
    can be read from one copy of the model that they hold together."""

    name: str
    ops: Sequence[Op]
    weights: Mapping[str, TensorView]
    kv: KvPool
    states: StatePool = NO_STATES
    fleet: Sequence[tuple[Sequence[Op], Mapping[str, TensorView]]] = ()


@dataclass(frozen=True)
class WeightHome:
    """Where a layout's weights come from at a flip.

    copy      one packed copy of the whole model in `weights_fd`, which all ranks fill together and read from
    images    what the arena holds in each layout, kept by this rank: the next one in memory, the other in `folder`
              (empty: both in memory)

    In unified memory nothing is filled: there each layout is a bind over `Shared` and `PoolParts`, and this is not
    needed. `at` is told of the steps `spill` and `promote` of an image while it is half on its way; true spoils what
    the step makes, and an OSError is the step's own (faults for tests). `tell` hears what is not as it was asked for
    and stops nobody: an image that cannot be written, or does not come back. Both may be called from another thread.
    """

    kind: str
    rank: int
    ranks: int
    ops: Sequence[Op] = ()
    weights: Mapping[str, TensorView] = field(default_factory=dict)
    weights_fd: int = -1
    folder: str = ""
    at: Callable[[str], bool] = lambda step: False
    tell: Callable[[str], None] = lambda what: None


@dataclass(frozen=True)
class PoolRuns:
    """Rows of this rank's pools in one layout, in the order in which a payload holds them: KV first (layers as given,
    in each the pages as given, K then V of a page of all heads), then states (slots as given; in each the layers as
    given; the channels of its window, then its heads).

    kv       (layers of the pool, int32 pages [n] of it) for each KV group that has any; places, not the engine's pages
    states   int32 state slots [n]
    parts    (layer of the pool, runs of channels, runs of heads) for each recurrent layer; a run is (first, end)
    """

    kv: tuple[tuple[tuple[int, ...], npt.NDArray[np.int32]], ...] = ()
    states: npt.NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    parts: tuple[tuple[int, tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]], ...] = ()


@dataclass(frozen=True)
class Refilled:
    """A filled arena: bytes copied (of the last try), tries, digest."""

    nbytes: int
    tries: int
    digest: int


class RefillFailed(Exception):
    """The arena is not what it was at load, twice: this rank cannot go on."""


class Layouts(Protocol):
    """The programs of one model in several layouts, one of them active: only that one's pools hold memory, and the
    arena holds its weights. Addresses never change. Between `release` and `activate` no program may run."""

    active: str

    @property
    def program(self) -> Program:
        """Of the active layout."""
        ...

    def not_ready(self, name: str) -> str:
        """Why the weights of layout `name` cannot be filled in now (its image is still on its way); empty: they can. To
        ask is to want them: an image that did not come is tried again, not too often."""
        ...

    def run_bytes(self, name: str, runs: PoolRuns) -> int:
        """Length of the payload that `runs` of layout `name` make. The same rows make the same length in every
        layout."""
        ...

    def pack(self, runs: PoolRuns, out: memoryview) -> int:
        """Copy rows of the active layout's pools into `out`; returns the payload's digest. The pools stay as they
        are."""
        ...

    def digest(self, payload: memoryview) -> int:
        """Position-sensitive, 64 bits: the same for the same bytes on every rank and backend."""
        ...

    def release(self) -> None:
        """Give back the memory of the active layout's pools; their addresses stay. Nothing to do in unified memory."""
        ...

    def map(self, name: str, *, writes: bool = True) -> None:
        """Have the system hold the pools of layout `name`, zeroed. Where nothing `writes` to them before `activate`, it
        may be had after that, beside the work. Raises MemoryError with the arithmetic."""
        ...

    def write(self, name: str, runs: PoolRuns, payload: memoryview) -> None:
        """Copy a payload to rows of the pools of layout `name`."""
        ...

    def refill(self, name: str, *, spoilt: bool = False) -> Refilled:
        """Fill the arena with the weights of layout `name`, and compare the digest of what lies in it then with that of
        the load; once more where they differ. Raises RefillFailed. `spoilt`, for a fault of tests: one bit comes to be
        another one the first time."""
        ...

    def activate(self, name: str) -> None:
        """From here on `program` is that of `name`."""
        ...

    def memory_lines(self) -> Mapping[str, int]:
        """Bytes held now, by ledger line, those of the copy, images and the other layout's buffers among them."""
        ...

    def memory_regions(self) -> tuple[MemoryRegion, ...]: ...

    def close(self) -> None: ...


class Backend(Protocol):
    """A device opened by one worker."""

    facts: DeviceFacts

    def capabilities(self) -> tuple[Capability, ...]: ...

    def pools(self, kv: KvPool, states: StatePool, progress: LoadProgress, shared: SharedPools | None = None) -> Pools:
        """Pools of these shapes, all of them resident when this returns. Raises MemoryError with the arithmetic,
        ValueError where the backend cannot share them."""
        ...

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
    ) -> Program:
        """Upload or repack the weights, make pools and buffers. What `memory_lines` says is held when this returns: no
        later `run` fails for memory. `collective` is needed for ops that exchange rows, and stays the caller's; with
        `shared` the ranks meet in it until each has filled its part. With `parts` the program uses pools of the caller
        instead of its own.
        Raises `Unsupported`, or MemoryError with the arithmetic."""
        ...

    def bind_layouts(
        self,
        bindings: Sequence[Binding],
        limits: Limits,
        progress: LoadProgress,
        collective: Collective,
        home: WeightHome,
    ) -> Layouts:
        """The same for several layouts of one model, of which the first is active. Raises as `bind` does."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class CountsLaunches(Protocol):
    """An optional entry of a Backend: one that launches kernels by symbol tells how often each was."""

    def launch_counts(self) -> Mapping[str, int]:
        """Launches since the device was opened, by symbol, those of recorded steps among them."""
        ...


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

    def totals(self) -> tuple[int, int, int]:
        """Calls, moved bytes and nanoseconds waited of all labels together, which are asked for after each plan: far
        cheaper than `counts`."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class OpenOptions:
    """How a worker opens its device. `cores` pins threads (empty: those the process may use). `tell` hears what is not
    as it should be and stops nobody, each thing once: a copy between cards that lies."""

    device_index: int = 0
    threads: int = 0
    cores: tuple[int, ...] = ()
    isa: str = ""
    extra: Mapping[str, str] = field(default_factory=dict)
    tell: Callable[[str], None] | None = None
