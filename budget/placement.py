"""Which ranks hold what of a model under one option: the shares of the pipeline and of the tensor layout.

    Option               which devices are ranks, which layouts serve, whose experts stay on the CPU
    Cut, Shard           how the pipeline layout cuts the layers, how the tensor layout divides weights and KV rows
    pipeline_shares, tensor_shares   what each rank holds then; `budget.terms` makes lines of a ledger of it

Pipeline layout: rank k holds its layers at full width, the last rank also the final norm, the head and the drafting
block (and on the CPU the embedding, which that block reads); KV rows of its attention layers for *all* tokens;
full-width states of its recurrent layers. Embedding rows come from the host's copy. Tensor layout: every rank holds a
share of every layer by the weight vector, and the KV rows of its tokens, of all layers, by the token vector; states by
heads, like the weights, that of the drafting block by columns of its joining projection.

Beside the rows of the pool a rank has a page of padding, to which rows point that count for nothing. On the CPU only
ranks of the tensor layout compute such rows; ranks of one memory have one pool for both layouts, with one page.

Pure.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from budget import card_work
from budget.card_work import Part
from budget.facts import LayerShape
from budget.job import Job, Share, WindowRows
from budget.ledger import PIPELINE, TENSOR
from budget.vectors import VOCABULARY_UNIT, apportion
from budget.wish import PAGE


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
    """No rank is a card: the embedding table lies with the other weights. The ranks, one or several, share the CPU."""
    transit: float = 1.0
    """With a flip between layouts of CPU ranks: the part of the pool that one flip may carry."""

    @property
    def shares_device(self) -> bool:
        """Whether several ranks hold their lines on one device: each line then names its rank."""
        return self.host_only and len(self.ranks) > 1

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


def like_cpu(job: Job, option: Option) -> bool:
    """Whether ranks hold tables, rows and states as the CPU's backend does: they are on the CPU, or cards that do so
    too."""
    return option.host_only or job.wish.like_cpu


def ranges_of(counts: Sequence[int]) -> tuple[tuple[int, int], ...]:
    ends, first = [], 0
    for count in counts:
        ends.append((first, first + count))
        first += count
    return tuple(ends)


def pipeline_shares(job: Job, option: Option, cut: Cut) -> tuple[Share, ...]:
    """Of each rank in the pipeline layout."""
    key = (PIPELINE, cut.ranges, option.expert_layers, option.host_only, len(option.ranks))
    if key not in job.memo:
        last = len(cut.ranges) - 1
        job.memo[key] = tuple(
            _stack(job, option, range(*part), first=rank == 0, last=rank == last)
            for rank, part in enumerate(cut.ranges)
        )
    return job.memo[key]


def _stack(job: Job, option: Option, part: range, *, first: bool, last: bool) -> Share:
    """What a rank holds of the layers `part`, at full width."""
    weights = read = state = held = 0.0
    for index in part:
        layer = job.layers[index]
        away = layer.expert_bytes if index < option.expert_layers else 0
        weights += layer.bytes - away
        read += layer.read_bytes - away * layer.used_experts
        state += job.state(layer)
        held += layer.held_elements
    kept = [job.layers[index] for index in part]
    if last:
        weights += job.head_bytes + job.shape.other_bytes + job.drafting_bytes
        fills = len(option.ranks) > 1 and like_cpu(job, option)
        weights += sum(_filled(layer) if fills else layer.bytes for layer in job.drafting)
        read += job.head_bytes
        kept += job.drafting
        state += sum(job.state(layer) for layer in job.drafting)
        held += sum(layer.held_elements for layer in job.drafting)
    looks_up = first or any(job.layers[index].table_bytes for index in part) or (last and job.drafting_looks_up)
    if like_cpu(job, option) and looks_up and not (last and job.shape.tied):
        weights += job.embedding_bytes
    kv_row, windows = job.rows_of(kept, on_cpu=like_cpu(job, option))
    padding = 0 if like_cpu(job, option) else PAGE * (kv_row + sum(rows.row for rows in windows))
    states = state * job.running
    parts, of_layer = job.kinds
    kinds = [of_layer[index] for index in (*part, *(range(len(job.layers), len(of_layer)) if last else ()))]
    columns = job.shape.hidden if last and job.drafting else 0
    counts = [(parts[kind], count) for kind, count in Counter(kinds).items()] if columns else []
    return Share(
        weights,
        kv_row=kv_row,
        kv_fixed=padding,
        windows=windows,
        state=states,
        read=read,
        held=held,
        parts=frozenset(parts[kind] for kind in set(kinds)),
        joined=2 * columns,
        kept=card_work.kept(counts, columns, job.decode_rows) if columns else 0,
    )


def _filled(layer: LayerShape) -> int:
    """Of a drafting block's layer, what its K and V are made with: of several ranks the last one of a pipeline drafts
    nothing, and has no more of it."""
    return layer.kv_bytes + layer.mixer_copies


def whole_share(job: Job, option: Option) -> Share:
    """What ranks of one memory hold together, the same in either layout: the model once, and a page of padding."""
    every = _stack(job, replace(option, ranks=option.ranks[:1]), range(len(job.layers)), first=True, last=True)
    return replace(every, kv_fixed=PAGE * (every.kv_row + sum(rows.row for rows in every.windows)))


def layer_share(job: Job, option: Option, index: int) -> Share:
    """What one layer adds to its rank in the pipeline layout."""
    return _stack(job, option, range(index, index + 1), first=False, last=False)


def last_share(job: Job, option: Option) -> Share:
    """What the last rank of the pipeline layout holds beside its layers: norm, head, drafting block."""
    return _stack(job, option, range(0), first=False, last=True)


def tensor_shares(job: Job, shard: Shard, *, on_cpu: bool = False) -> tuple[Share, ...]:
    """Of each rank in the tensor layout. (Experts on the CPU go with the pipeline layout alone.) `on_cpu`: all ranks
    are on the CPU, or hold a model like it: the embedding table is divided with the other weights."""
    key = (TENSOR, shard.weights, shard.tokens, on_cpu)
    if key not in job.memo:
        job.memo[key] = _shards(job, shard, on_cpu)
    return job.memo[key]


def _shards(job: Job, shard: Shard, on_cpu: bool) -> tuple[Share, ...]:
    count = len(shard.weights)
    weights, copies, reads, states, parts, tables, held = ([0.0] * count for _ in range(7))
    joined = _fractions(job.shape.nextn_units, shard.weights)
    works: list[Counter[Part]] = [Counter() for _ in range(count)]
    for layer, drafting, times in job.alike:
        mixer, ffn = _fractions(layer.mixer_units, shard.weights), _fractions(layer.ffn_units, shard.weights)
        heads = layer.kv.heads if layer.kv is not None else 0
        copied = layer.kv_bytes if 0 < heads < count else 0
        by_heads = _fractions(heads, shard.weights) if heads >= count else mixer
        kv = by_heads if heads >= count else (0.0,) * count
        shared = _fractions(layer.work.shared_units, shard.weights)
        cut = layer.mixer_bytes - layer.mixer_copies - layer.kv_bytes
        cut_ffn = layer.ffn_bytes - layer.ffn_copies - layer.shared_bytes + layer.expert_bytes
        whole = layer.mixer_copies + layer.ffn_copies
        for rank in range(count):
            own = cut * mixer[rank] + layer.kv_bytes * by_heads[rank] + cut_ffn * ffn[rank] + whole
            own += layer.shared_bytes * shared[rank]
            tables[rank] += times * (layer.table_bytes - layer.table_copies)
            weights[rank] += times * (own + layer.table_copies)
            copies[rank] += times * copied * (1 - mixer[rank])
            of_states = joined[rank] if drafting else mixer[rank]
            states[rank] += times * job.state(layer) * of_states * job.running
            held[rank] += times * layer.held_elements * of_states
            parts[rank] = max(parts[rank], mixer[rank], ffn[rank])
            works[rank][card_work.share(layer.work, mixer[rank], ffn[rank], shared[rank], kv[rank])] += times
            if not drafting:
                unread = layer.expert_bytes * (1 - layer.used_experts) * ffn[rank]
                reads[rank] += times * (own + copied * (1 - mixer[rank]) - unread)
    head = _fractions(-(-job.shape.vocab // VOCABULARY_UNIT), shard.weights)
    rows = _fractions(0, shard.tokens) if shard.tokens else (1 / count,) * count
    whole_tables = job.head_bytes + job.drafting_table_bytes
    whole_tables += job.embedding_bytes if on_cpu and not job.shape.tied else 0
    joining = job.drafting_bytes - job.drafting_table_bytes
    kv_row, windows = job.rows_of((*job.layers, *job.drafting), on_cpu=on_cpu)
    padding = PAGE * (kv_row + sum(rows.row for rows in windows))
    granule = PAGE * (sum(shard.tokens) or count)
    columns = [round(job.shape.hidden * part) if job.drafting else 0 for part in joined]
    return tuple(
        Share(
            weights=weights[rank]
            + (tables[rank] + whole_tables) * head[rank]
            + joining * joined[rank]
            + job.shape.other_bytes,
            kv_copies=copies[rank],
            kv_row=kv_row * rows[rank],
            kv_fixed=padding,
            windows=tuple(_own_rows(each, rows[rank], granule) for each in windows),
            state=states[rank],
            read=reads[rank] + job.head_bytes * head[rank],
            held=held[rank],
            part=parts[rank],
            vocabulary=math.ceil(job.shape.vocab * head[rank]),
            parts=frozenset(works[rank]),
            joined=2 * columns[rank],
            kept=card_work.kept(works[rank].items(), columns[rank], job.decode_rows) if job.drafting else 0,
        )
        for rank in range(count)
    )


def _own_rows(rows: WindowRows, share: float, granule: int) -> WindowRows:
    """A rank's share of the rows of a window: whole rounds of the token vector."""
    return replace(rows, row=rows.row * share, slots=-(-rows.slots // granule) * granule)


@lru_cache(maxsize=4096)
def _fractions(units: int, vector: tuple[int, ...]) -> tuple[float, ...]:
    """The share of each rank of a family that can be cut into `units` whole parts (0: as finely as you like)."""
    if not units:
        return tuple(entry / sum(vector) for entry in vector)
    return tuple(part / units for part in apportion(units, vector))
