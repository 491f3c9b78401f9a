"""Where a model's bytes lie under one option: the terms of its ledger, before the size of the KV pool is known.

    Job                  a shape and a wish with every "choose for me" settled, and its per-layer sums
    Option               which devices are ranks, which layouts serve, whose experts stay on the CPU
    Cut, Shard           how the pipeline layout cuts the layers, how the tensor layout divides weights and KV rows
    terms(...)           the lines that follow

Pipeline layout: rank k holds its layers at full width, the last rank also the final norm, the head and the drafting
block; KV rows of its attention layers for *all* tokens; full-width states of its recurrent layers. Embedding rows come
from the host's copy. Tensor layout: every rank holds a share of every layer by the weight vector, and the KV rows of
its tokens, of all layers, by the token vector; states by heads, like the weights.

A rank's weights lie in one arena, as large as the larger layout needs: the other layout's bytes come from an image in
host memory. Where both layouts fit at once nothing needs to be refilled, and there is no image. Exactly one layout's KV
pool holds physical pages (`Wish.exclusive`): at boot and in a flip that is at most the larger of the two.

Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

from budget import host_lines
from budget.ceilings import Ceilings, Device
from budget.facts import KV_BITS, MIB, LayerShape, ModelShape
from budget.ledger import ALWAYS, BOOT, FLIP, PIPELINE, TENSOR, Term
from budget.vectors import apportion
from budget.wish import DEFAULT_RUNNING, PAGE, Wish

RUNTIME_BYTES = 1500 * MIB
"""What driver, compositor and runtime take of a unified device's memory beside the model: a reserve. Weights need no
staging there: they are written where they are read."""
COMMUNICATOR_BYTES = 112 * MIB
"""Of one card, for the groups of both layouts: 112 to 198 MiB were measured for such sets on three cards."""
GRAPH_BYTES = 64 * MIB
CARD_WORKER_BYTES = 320 * MIB
"""Host memory of a worker whose device is a card: Python, and what a driver's runtime keeps in its process."""
STAGING_BYTES = 64 * MIB
"""Bounded buffer through which weights reach a card, on both sides of the bus."""
FLIP_BUFFER_BYTES = 64 * MIB
TRANSIT_BYTES = 1024 * MIB
"""Host memory for what moves at a flip: the live set is bounded to it, older cached pages are dropped first."""
VERIFY_BYTES_PER_REQUEST = 4 * MIB
"""Inputs of the recurrent layers that a verify keeps until acceptance is known."""

LOGPROB_ROWS = 32
_STATES_AT_MOST = 512 * MIB
"""Unasked, a model with large recurrent states runs so many requests that their states take about this (but four)."""


def context_bytes(device: Device) -> int:
    """A CUDA or HIP context: it grows with the number of compute units. 107, 256 and 555 MiB were measured on cards of
    16, 24 and 96 GB; this line lies near them."""
    return 128 * MIB + (device.total_bytes or 0) // 220


# ----------------------------------------------------------------------------------------------------------- the job


@dataclass(frozen=True)
class Job:
    """A model and a wish, with what was left open settled. Bytes a token and a request, by layer."""

    shape: ModelShape
    wish: Wish
    running: int
    memo: dict[tuple[object, ...], tuple[Share, ...]] = field(default_factory=dict, compare=False, repr=False)
    """Shares that were computed: many options look at the same cut."""
    workspaces: dict[tuple[int, int, bool], tuple[int, float]] = field(default_factory=dict, compare=False, repr=False)
    """Buffers that were computed, by threads, rows of logits and whether there is a head."""

    @cached_property
    def layers(self) -> tuple[LayerShape, ...]:
        return (
            tuple(_dense(layer, self.wish.dense) for layer in self.shape.layers)
            if self.wish.dense
            else self.shape.layers
        )

    @cached_property
    def drafting(self) -> tuple[LayerShape, ...]:
        """The drafting block's layers, where it is wanted."""
        if not self.wish.draft:
            return ()
        return (
            tuple(_dense(layer, self.wish.dense) for layer in self.shape.nextn) if self.wish.dense else self.shape.nextn
        )

    @cached_property
    def alike(self) -> tuple[tuple[LayerShape, bool, int], ...]:
        """Each different layer, whether it drafts, and how many there are of it."""
        counts = Counter((layer, False) for layer in self.layers) + Counter((layer, True) for layer in self.drafting)
        return tuple((layer, drafting, times) for (layer, drafting), times in counts.items())

    @cached_property
    def weights_per_byte(self) -> float:
        """Weights in a packed byte: an operation is counted for a weight, not for its bits."""
        params = sum(layer.params for layer in self.layers)
        packed = sum(layer.bytes for layer in self.layers)
        return params / packed if params and packed else 1.75

    @property
    def drafting_bytes(self) -> int:
        return self.shape.nextn_bytes if self.drafting else 0

    @property
    def context(self) -> int:
        """The longest request that shall be possible."""
        return self.wish.context or self.shape.context

    @property
    def least_tokens(self) -> int:
        """The smallest pool that is worth a plan: what was asked for, else a short conversation."""
        return self.wish.kv_tokens or self.wish.context or min(self.shape.context, LEAST_TOKENS)

    @property
    def rows(self) -> int:
        """Rows of the largest plan: a chunk of prompts beside one row of each running request."""
        return self.wish.chunk + self.running

    @property
    def logit_rows(self) -> int:
        """Rows of a plan with logits: one of each request, and those whose log-probabilities `echo` asks for."""
        return self.wish.logit_rows or self.running + LOGPROB_ROWS

    @property
    def checkpoints(self) -> int:
        """States of recurrent layers that the prefix cache keeps beside those of running requests: two for each."""
        return 2 * self.running if self.state_bytes and self.wish.prefix_cache else 0

    def workspace(self, threads: int, logit_rows: int, *, head: bool) -> tuple[int, float]:
        """Bytes of the buffers of a rank's largest plan, and of each token of its longest request beside them."""
        key = threads, logit_rows, head
        if key not in self.workspaces:
            short, long = (
                host_lines.workspace_bytes(self.shape, self.rows, logit_rows, threads, context, head=head)
                for context in (_STEP, 2 * _STEP)
            )
            self.workspaces[key] = short, (long - short) / _STEP
        return self.workspaces[key]

    @property
    def embedding_bytes(self) -> int:
        return self._table(self.shape.embedding_bytes)

    @property
    def head_bytes(self) -> int:
        """Of the head as a rank that computes it holds it: a tied head is a copy of the embedding there."""
        return self._table(self.shape.embedding_bytes if self.shape.tied else self.shape.head_bytes)

    def kv_row(self, layer: LayerShape) -> float:
        """Bytes of one token in a layer that keeps every token."""
        if layer.kv is None or layer.kv.window:
            return 0.0
        return layer.kv.elements * KV_BITS[self.wish.kv_type] / 8

    def kv_windows(self, layer: LayerShape) -> float:
        """Bytes of a window layer's pool: every running request holds its window and the chunk that is computed."""
        if layer.kv is None or not layer.kv.window:
            return 0.0
        slots = pages(min(layer.kv.window + self.wish.chunk, self.context)) * self.running
        return slots * layer.kv.elements * KV_BITS[self.wish.kv_type] / 8

    def state(self, layer: LayerShape) -> float:
        """Bytes of one request's recurrent state; the convolution window is held in 16 bits."""
        return layer.state_elements * self.wish.state_bits / 8 + layer.conv_elements * 2

    @cached_property
    def state_bytes(self) -> float:
        """Of one request, over all layers."""
        return sum(self.state(layer) for layer in self.layers)

    def _table(self, packed: int) -> int:
        return self.shape.vocab * self.shape.hidden * self.wish.dense if self.wish.dense and packed else packed


_STEP = 256
"""Tokens of context by which the buffers of a split attention grow."""
LEAST_TOKENS = 512
"""A pool below this serves no conversation."""


def settle(shape: ModelShape, wish: Wish, running: int = 0) -> Job:
    """`running` wins over the wish's; without either it is what the model's states allow."""
    state = shape.state_bytes_per_request(wish.state_bits)
    most = DEFAULT_RUNNING if not state else max(4, min(DEFAULT_RUNNING, round(_STATES_AT_MOST / state)))
    return Job(shape, wish, running or wish.running or most)


def pages(tokens: int) -> int:
    """`tokens` rounded up to whole pages."""
    return -(-tokens // PAGE) * PAGE


def _dense(layer: LayerShape, each: int) -> LayerShape:
    """The layer as a backend without packed kernels holds it: `each` bytes a weight."""
    factor = layer.params * each / layer.bytes if layer.bytes else 1.0
    return replace(
        layer,
        mixer_bytes=round(layer.mixer_bytes * factor),
        ffn_bytes=round(layer.ffn_bytes * factor),
        expert_bytes=round(layer.expert_bytes * factor),
        kv_bytes=round(layer.kv_bytes * factor),
    )


# -------------------------------------------------------------------------------------------------------- the options


@dataclass(frozen=True)
class Option:
    """One way to place a model. `ranks` are device indices; in the pipeline layout the first rank has the first layers.
    `resident`: the weights of both layouts are kept on the devices."""

    name: str
    ranks: tuple[int, ...]
    layouts: tuple[str, ...] = (PIPELINE,)
    expert_layers: int = 0
    resident: bool = False
    host_only: bool = False
    """No rank is a card: the embedding table lies with the other weights."""

    @property
    def flips(self) -> bool:
        return len(self.layouts) > 1


@dataclass(frozen=True)
class Cut:
    """Layers [first, end) of each rank in the pipeline layout."""

    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Shard:
    """The two vectors of the tensor layout."""

    weights: tuple[int, ...]
    tokens: tuple[int, ...] = ()


@dataclass(frozen=True)
class Share:
    """What one rank holds of the model in one layout. `kv_row` is bytes of a token."""

    weights: float
    kv_copies: float = 0.0
    kv_row: float = 0.0
    kv_fixed: float = 0.0
    state: float = 0.0
    read: float = 0.0
    """Weights read for one decoded token."""


def ranges_of(counts: Sequence[int]) -> tuple[tuple[int, int], ...]:
    ends, first = [], 0
    for count in counts:
        ends.append((first, first + count))
        first += count
    return tuple(ends)


def pipeline_shares(job: Job, option: Option, cut: Cut) -> tuple[Share, ...]:
    """Of each rank in the pipeline layout."""
    key = (PIPELINE, cut.ranges, option.expert_layers, option.host_only)
    if key not in job.memo:
        last = len(cut.ranges) - 1
        job.memo[key] = tuple(
            _stack(job, option, range(*part), first=rank == 0, last=rank == last)
            for rank, part in enumerate(cut.ranges)
        )
    return job.memo[key]


def _stack(job: Job, option: Option, part: range, *, first: bool, last: bool) -> Share:
    """What a rank holds of the layers `part`, at full width."""
    weights = read = kv_row = kv_fixed = state = 0.0
    for index in part:
        layer = job.layers[index]
        away = layer.expert_bytes if index < option.expert_layers else 0
        weights += layer.bytes - away
        read += layer.read_bytes - away * layer.used_experts
        state += job.state(layer)
    kept = [job.layers[index] for index in part]
    if last:
        weights += job.head_bytes + job.shape.other_bytes + job.drafting_bytes
        weights += sum(layer.bytes for layer in job.drafting)
        read += job.head_bytes
        kept += job.drafting
    if option.host_only and first and not job.shape.tied:
        weights += job.embedding_bytes
    kv_row = sum(job.kv_row(layer) for layer in kept)
    kv_fixed = sum(job.kv_windows(layer) for layer in kept) + PAGE * kv_row
    return Share(weights, kv_row=kv_row, kv_fixed=kv_fixed, state=state * job.running, read=read)


def layer_bytes(job: Job, option: Option, index: int) -> tuple[float, float]:
    """What one layer adds to its rank in the pipeline layout: bytes, and bytes a token of the pool."""
    layer = job.layers[index]
    weights = layer.bytes - (layer.expert_bytes if index < option.expert_layers else 0)
    row = job.kv_row(layer)
    return weights + job.state(layer) * job.running + job.kv_windows(layer) + PAGE * row, row


def last_rank_bytes(job: Job) -> tuple[float, float]:
    """As `layer_bytes`, of what the last rank holds beside its layers: norm, head, drafting block."""
    weights = job.head_bytes + job.shape.other_bytes + job.drafting_bytes + sum(layer.bytes for layer in job.drafting)
    row = sum(job.kv_row(layer) for layer in job.drafting)
    return weights + sum(job.kv_windows(layer) for layer in job.drafting) + PAGE * row, row


def tensor_shares(job: Job, shard: Shard) -> tuple[Share, ...]:
    """Of each rank in the tensor layout. (Experts on the CPU go with the pipeline layout alone.)"""
    key = (TENSOR, shard.weights, shard.tokens)
    if key not in job.memo:
        job.memo[key] = _shards(job, shard)
    return job.memo[key]


def _shards(job: Job, shard: Shard) -> tuple[Share, ...]:
    count = len(shard.weights)
    weights, copies, reads, states = [0.0] * count, [0.0] * count, [0.0] * count, [0.0] * count
    for layer, drafting, times in job.alike:
        mixer, ffn = _fractions(layer.mixer_units, shard.weights), _fractions(layer.ffn_units, shard.weights)
        copied = layer.kv_bytes if layer.kv is not None and layer.kv.heads < count else 0
        for rank in range(count):
            own = layer.mixer_bytes * mixer[rank] + (layer.ffn_bytes + layer.expert_bytes) * ffn[rank]
            weights[rank] += times * own
            copies[rank] += times * copied * (1 - mixer[rank])
            states[rank] += times * job.state(layer) * mixer[rank] * job.running
            if not drafting:
                unread = layer.expert_bytes * (1 - layer.used_experts) * ffn[rank]
                reads[rank] += times * (own + copied * (1 - mixer[rank]) - unread)
    head = _fractions(max(1, job.shape.vocab // 64), shard.weights)
    rows = _fractions(0, shard.tokens) if shard.tokens else (1 / count,) * count
    everything = (*job.layers, *job.drafting)
    kv_row = sum(job.kv_row(layer) for layer in everything)
    kv_windows = sum(job.kv_windows(layer) for layer in everything)
    return tuple(
        Share(
            weights=weights[rank] + (job.head_bytes + job.drafting_bytes) * head[rank] + job.shape.other_bytes,
            kv_copies=copies[rank],
            kv_row=kv_row * rows[rank],
            kv_fixed=kv_windows * rows[rank] + PAGE * kv_row,
            state=states[rank],
            read=reads[rank] + job.head_bytes * head[rank],
        )
        for rank in range(count)
    )


@lru_cache(maxsize=4096)
def _fractions(units: int, vector: tuple[int, ...]) -> tuple[float, ...]:
    """The share of each rank of a family that can be cut into `units` whole parts (0: as finely as you like)."""
    if not units:
        return tuple(entry / sum(vector) for entry in vector)
    return tuple(part / units for part in apportion(units, vector))


# ---------------------------------------------------------------------------------------------------------- the terms


def terms(
    job: Job, option: Option, ceilings: Ceilings, pipeline: Sequence[Share], tensor: Sequence[Share]
) -> list[Term]:
    """Every line of the ledger, as bytes and bytes a token. `tensor` is empty where that layout does not serve, and
    `pipeline` where only the tensor layout does."""
    found: list[Term] = []
    for rank, index in enumerate(option.ranks):
        device = ceilings.devices[index]
        before = pipeline[rank] if pipeline else None
        after = tensor[rank] if tensor else None
        found += _weights(option, index, before, after)
        found += _pools(job, option, index, before, after)
        found += _standing(job, option, device)
    return [*found, *_host(job, option, ceilings)]


def standing_bytes(job: Job, option: Option, device: Device) -> float:
    """What a rank holds at its worst moment whatever the cut: all but weights, rows and states."""
    found = list(_standing(job, option, device))
    return max(sum(term.most for term in found if moment in term.held) for moment in ALWAYS)


def _standing(job: Job, option: Option, device: Device) -> Iterable[Term]:
    yield _activations(job, option, device)
    if device.kind != "cpu":
        yield from _card(job, option, device)
    if job.wish.vision and job.shape.vision_bytes and device.index == option.ranks[0]:
        yield Term(device.index, "vision", job.shape.vision_bytes, ALWAYS, "computed", "the tower")


def _weights(option: Option, device: int, before: Share | None, after: Share | None) -> Iterable[Term]:
    if before is None or after is None:
        share = before or after
        assert share is not None
        yield Term(device, host_lines.WEIGHTS, share.weights, ALWAYS, "computed", "packed, as in the checkpoint")
        if share.kv_copies:
            yield Term(device, "k and v copies", share.kv_copies, ALWAYS, "computed", "too few KV heads to split")
        return
    whole = after.weights + after.kv_copies
    if option.resident:
        yield Term(device, "weights, pipeline", before.weights, ALWAYS, "computed", "kept beside the other layout's")
        yield Term(device, "weights, tensor", after.weights, ALWAYS, "computed", "kept beside the other layout's")
    else:
        most = max(before.weights, whole)
        note = f"the larger of pipeline {before.weights / MIB:.0f} and tensor {whole / MIB:.0f} MiB"
        yield Term(device, "weights arena", most - min(after.kv_copies, most), ALWAYS, "computed", note)
    if after.kv_copies:
        yield Term(device, "k and v copies", after.kv_copies, ALWAYS, "computed", "too few KV heads to split")


def _pools(job: Job, option: Option, device: int, before: Share | None, after: Share | None) -> Iterable[Term]:
    tokens = f"rows of {job.wish.kv_type}"
    if before is None or after is None:
        share = before or after
        assert share is not None
        if share.kv_row or share.kv_fixed:
            yield Term(device, host_lines.KV, share.kv_fixed, ALWAYS, "computed", tokens, share.kv_row)
        state = share.state
    else:
        larger = (BOOT, FLIP)
        first = (before.kv_row, before.kv_fixed) >= (after.kv_row, after.kv_fixed)
        moments = {PIPELINE: {PIPELINE, *(larger if first else ())}, TENSOR: {TENSOR, *(() if first else larger)}}
        for share, layout in ((before, PIPELINE), (after, TENSOR)):
            held = tuple(m for m in ALWAYS if m in moments[layout]) if job.wish.exclusive else ALWAYS
            if share.kv_row or share.kv_fixed:
                name = f"{host_lines.KV}, {layout}"
                yield Term(device, name, share.kv_fixed, held, "computed", tokens, share.kv_row)
        # Windows may be more in the layout that has fewer rows: while either may be backed, the larger of both counts.
        more = (after.kv_fixed - before.kv_fixed) * (1 if first else -1)
        if more > 0 and job.wish.exclusive:
            yield Term(device, "kv, windows of the other layout", more, larger, "computed", tokens)
        state = max(before.state, after.state)
    if state:
        note = f"{job.running} requests, {job.wish.state_bits}-bit"
        if option.host_only and job.checkpoints:
            # The checkpoints lie in the same pool: a copy between slots is a copy within the host's memory.
            state += job.checkpoints * job.state_bytes
            note = f"{job.running} requests and {job.checkpoints} checkpoints, {job.wish.state_bits}-bit"
        yield Term(device, host_lines.STATE, state, ALWAYS, "computed", note)


def _activations(job: Job, option: Option, device: Device) -> Term:
    threads = max(1, job.wish.threads) if device.kind == "cpu" else 1
    head = TENSOR in option.layouts or device.index == option.ranks[-1]
    size, more = job.workspace(threads, job.logit_rows, head=head)
    note = f"{job.rows} rows: a chunk of {job.wish.chunk} beside {job.running} requests"
    if head:
        note += f"; {job.logit_rows} rows of logits"
    note += "; grows with the context"
    return Term(device.index, host_lines.WORKSPACE, size, ALWAYS, "computed", note, more, job.context)


def _card(job: Job, option: Option, device: Device) -> Iterable[Term]:
    index = device.index
    if device.kind == "uma":
        yield Term(index, "runtime", RUNTIME_BYTES, ALWAYS, "reserve", "driver, compositor, context, recorded steps")
    else:
        yield Term(index, "context", context_bytes(device), ALWAYS, "reserve", "grows with the card's compute units")
        yield Term(index, "graphs", GRAPH_BYTES, ALWAYS, "reserve", "recorded decode steps")
        yield Term(index, "load staging", STAGING_BYTES, (BOOT,), "reserve", "weights pass through it")
    if len(option.ranks) > 1:
        yield Term(index, "communicators", COMMUNICATOR_BYTES, ALWAYS, "reserve", "buffers between ranks")
    if option.flips:
        yield Term(index, "flip buffer", FLIP_BUFFER_BYTES, (FLIP,), "reserve", "rows pass through it")
    if job.drafting and job.state_bytes:
        size = VERIFY_BYTES_PER_REQUEST * job.running / len(option.ranks)
        yield Term(index, "verify inputs", size, ALWAYS, "reserve", "kept until drafts are accepted")


def _host(job: Job, option: Option, ceilings: Ceilings) -> Iterable[Term]:
    """What host memory holds beside a CPU rank's own lines."""
    cpu = ceilings.devices[-1].index
    cards = [index for index in option.ranks if ceilings.devices[index].kind != "cpu"]
    ranks, threads = len(option.ranks), max(1, job.wish.threads)
    engine = host_lines.engine_bytes(job.shape)
    yield Term(cpu, host_lines.ENGINE_PROCESS, engine, ALWAYS, "measured", "Python, HTTP, tokenizer")
    workers = host_lines.worker_bytes("cpu", threads) * (ranks - len(cards)) + CARD_WORKER_BYTES * len(cards)
    note = "Python and NumPy" if not cards else f"{ranks} of them, with the host's part of a context"
    yield Term(cpu, host_lines.WORKER_PROCESSES, workers, ALWAYS, "reserve" if cards else "measured", note)
    templates = host_lines.template_bytes()
    yield Term(cpu, host_lines.TEMPLATE_PROCESS, templates, ALWAYS, "measured", "renders chat templates")
    log = host_lines.plan_log_bytes(ranks, job.running, job.wish.chunk, job.context)
    yield Term(cpu, host_lines.PLAN_LOG, log, ALWAYS, "computed", "shared memory between the processes")
    if option.expert_layers:
        size = sum(layer.expert_bytes for layer in job.layers[: option.expert_layers])
        yield Term(cpu, "experts", size, ALWAYS, "computed", f"routed experts of {option.expert_layers} layers")
        buffers, more = job.workspace(threads, 0, head=False)
        note = f"{job.rows} rows for the experts"
        yield Term(cpu, host_lines.WORKSPACE, buffers, ALWAYS, "computed", note, more, job.context)
    if cards:
        yield Term(cpu, "embedding", job.embedding_bytes, ALWAYS, "computed", "rows are looked up on the host")
        yield Term(cpu, "load staging", STAGING_BYTES * len(cards), (BOOT,), "reserve", "pinned")
    if option.flips:
        if not option.resident:
            size = sum(layer.bytes for layer in (*job.layers, *job.drafting)) + job.head_bytes + job.drafting_bytes
            yield Term(cpu, "weight image", size, ALWAYS, "computed", "pinned: either layout is filled from it")
        moving = TRANSIT_BYTES + job.state_bytes * job.running
        yield Term(cpu, "flip transit", moving, ALWAYS, "reserve", "pinned: live rows and states on their way")
    if job.checkpoints and not option.host_only:
        kept, note = job.checkpoints * job.state_bytes, f"{job.checkpoints}, of the prefix cache"
        yield Term(cpu, "state checkpoints", kept, ALWAYS, "computed", note)
