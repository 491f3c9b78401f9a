"""The terms of a placement's ledger, before the size of the KV pool is known: what each device holds, and when.

A rank's weights lie in one arena, as large as the larger layout needs: the other layout's bytes come from an image in
host memory. Where both layouts fit at once nothing needs to be refilled, and there is no image. Exactly one layout's KV
pool holds physical pages (`Wish.exclusive`): at boot and in a flip that is at most the larger of the two. On the CPU
the states are held likewise, and both layouts' buffers always.

The pool is one line. Its layers that keep every token grow with the pool's tokens for ever; those with a window stop
when the windows of all requests are kept, each window at a number of its own.

Several ranks on the CPU have their lines in one ledger, each with the rank's number. In unified memory they hold
weights, pool and states together, once, and only their buffers apart.

Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from budget import host_lines
from budget.card_lines import (
    COMMUNICATOR_BYTES,
    GRAPH_BYTES,
    KEPT_UNTIL,
    RUNTIME_BYTES,
    any_shares,
    between,
    context_bytes,
    on_card,
    packed,
    pinned,
)
from budget.ceilings import Ceilings, Device
from budget.facts import MIB
from budget.job import Job, Share
from budget.ledger import ALWAYS, BOOT, FLIP, PIPELINE, TENSOR, Term
from budget.placement import Option, like_cpu, whole_share
from budget.ranks import act_bytes, act_sizes, largest, plans_in_flight

FLOAT_BYTES = 4
CARD_WORKER_BYTES = 320 * MIB
"""Host memory of a worker whose device is a card: Python, and what a driver's runtime keeps in its process."""
STAGING_BYTES = 64 * MIB
"""Of other servers than ours: a buffer through which weights reach a card, on both sides of the bus."""
FLIP_BUFFER_BYTES = 64 * MIB
TRANSIT_BYTES = 1024 * MIB
"""Host memory for what moves at a flip: the live set is bounded to it, older cached pages are dropped first."""
_COPY_OF_LAYER = 8 << 10
"""Bytes of a layer between its tensors in the copy."""
SERVING = (PIPELINE, TENSOR, FLIP)
"""Transit memory is kept from the first flip on: to have it anew costs eight times the copy that goes through it."""
TRANSIT_ALIGN = 64
"""What two ranks exchange begins with a cache line of the transit memory."""
DRAFT_BYTES_PER_REQUEST = 4 * MIB
"""On a card, inputs of the recurrent layers that are kept until it is known how many drafts count."""


def terms(
    job: Job, option: Option, ceilings: Ceilings, pipeline: Sequence[Share], tensor: Sequence[Share]
) -> list[Term]:
    """Every line of the ledger, as bytes and bytes a token. `tensor` is empty where that layout does not serve, and
    `pipeline` where only the tensor layout does."""
    found: list[Term] = []
    shared = option.shares_device
    for rank, index in enumerate(option.ranks):
        device = ceilings.devices[index]
        before = pipeline[rank] if pipeline else None
        after = tensor[rank] if tensor else None
        if device.kind != "cpu":
            before, after = packed(job, option, before), packed(job, option, after)
        own = list(_standing(job, option, device, rank, before, after))
        if option.host_only:
            own += _held_rows(job, option, index, before if len(option.ranks) == 1 else after)
        if not (shared and job.wish.unified):
            own = [*_weights(option, index, before, after), *_pools(job, option, index, before, after), *own]
            if shared and before is not None and after is not None:
                own += _sources(job, index, before, after)
        found += [replace(term, name=host_lines.of_rank(term.name, rank)) for term in own] if shared else own
    if shared and job.wish.unified:
        whole, index = whole_share(job, option), option.ranks[0]
        found = [*_weights(option, index, whole, None), *_pools(job, option, index, whole, None), *found]
    if not option.host_only and job.wish.like_cpu:
        shares = [_of_card(option, ceilings, rank, pipeline, tensor) for rank in range(len(option.ranks))]
        found += pinned(job, option, ceilings.devices[-1].index, shares)
        found += between(job, option, ceilings.devices, shares)
    return [*found, *_host(job, option, ceilings)]


def _of_card(
    option: Option, ceilings: Ceilings, rank: int, pipeline: Sequence[Share], tensor: Sequence[Share]
) -> tuple[Share | None, Share | None]:
    """A rank's shares of either layout; None for one on the CPU."""
    if ceilings.devices[option.ranks[rank]].kind == "cpu":
        return None, None
    return (pipeline[rank] if pipeline else None), (tensor[rank] if tensor else None)


def standing(job: Job, option: Option, device: Device) -> Callable[[int | None], float]:
    """What a rank holds at its worst moment whatever the cut, all but weights, rows and states: with a pool of so many
    tokens, or (None) with as many as there may be."""
    rank = option.ranks.index(device.index)
    if device.kind != "cpu" and job.wish.like_cpu:
        key = len(option.ranks), option.layouts, device.index, rank
        if key not in job.standing:
            job.standing[key] = list(_standing(job, option, device, rank, *any_shares(job, option)))
        found = job.standing[key]
    else:
        found = list(_standing(job, option, device, rank, None))

    def held(tokens: int | None) -> float:
        sizes = [(term.most if tokens is None else term.exact(tokens), term.held) for term in found]
        return max(sum(size for size, when in sizes if moment in when) for moment in ALWAYS)

    return held


def standing_bytes(job: Job, option: Option, device: Device) -> float:
    """The most of it."""
    return standing(job, option, device)(None)


def _standing(
    job: Job, option: Option, device: Device, rank: int, before: Share | None, after: Share | None = None
) -> Iterable[Term]:
    if device.kind != "cpu" and job.wish.like_cpu:
        yield from on_card(job, option, device, rank, before, after)
    else:
        if option.shares_device and option.flips:  # two programs, each with buffers of its own
            yield _activations(job, option, device, rank, None)
        yield _activations(job, option, device, rank, after if option.shares_device else None)
        if device.kind != "cpu":
            yield from _card(job, option, device)
    if job.wish.vision and job.shape.vision_bytes and rank == 0:
        yield Term(device.index, "vision", job.shape.vision_bytes, ALWAYS, "computed", "the tower")


def _held_rows(job: Job, option: Option, device: int, share: Share | None) -> Iterable[Term]:
    """Of the layout that drafts, on the CPU: one rank, or the tensor layout."""
    if job.drafting and share is not None and share.held:
        floats = share.held * job.decode_rows + max(1, job.wish.threads) * job.shape.held_thread_elements
        size = math.ceil(floats) * FLOAT_BYTES
        note = f"{job.decode_rows} rows, {KEPT_UNTIL}"
        yield Term(device, host_lines.DRAFTS, size, ALWAYS, "computed", note)


def _weights(option: Option, device: int, before: Share | None, after: Share | None) -> Iterable[Term]:
    if before is None or after is None:
        share = before or after
        assert share is not None
        yield Term(device, host_lines.WEIGHTS, share.weights, ALWAYS, "computed", "packed, as in the checkpoint")
        if share.kv_copies:
            yield Term(device, host_lines.COPIES, share.kv_copies, ALWAYS, "computed", "too few KV heads to split")
        return
    whole = after.weights + after.kv_copies
    if option.resident:
        yield Term(device, "weights, pipeline", before.weights, ALWAYS, "computed", "kept beside the other layout's")
        yield Term(device, "weights, tensor", after.weights, ALWAYS, "computed", "kept beside the other layout's")
    else:
        most = max(before.weights, whole)
        note = f"the larger of pipeline {before.weights / MIB:.0f} and tensor {whole / MIB:.0f} MiB"
        name = host_lines.WEIGHTS if option.shares_device else "weights arena"
        yield Term(device, name, most - min(after.kv_copies, most), ALWAYS, "computed", note)
    if after.kv_copies:
        yield Term(device, host_lines.COPIES, after.kv_copies, ALWAYS, "computed", "too few KV heads to split")


def _sources(job: Job, device: int, before: Share, after: Share) -> Iterable[Term]:
    """What a rank on the CPU keeps for itself to fill its arena from."""
    if job.wish.image_spill:
        most = max(before.weights, after.weights + after.kv_copies)
        yield Term(device, host_lines.IMAGE, most, ALWAYS, "computed", "of the next layout; the other one is on disk")
    elif aside := _columns_aside(job, after.part):
        note = "columns that lie apart in the copy"
        yield Term(device, host_lines.SIDE, aside, ALWAYS, "reserve", note)


def _columns_aside(job: Job, part: float) -> float:
    """The most that a rank's part of the output projections of recurrent layers takes (of the projections to q, k, v
    and the gate, and from v back, that is one in three at most), and of a drafting block's joining projection, whose
    columns come from two places."""
    recurrent = sum(layer.mixer_bytes for layer in job.layers if layer.state_elements) / 3
    return (recurrent + job.drafting_bytes - job.drafting_table_bytes) * part


def _pools(job: Job, option: Option, device: int, before: Share | None, after: Share | None) -> Iterable[Term]:
    if option.shares_device and before is not None and after is not None:
        yield from _exclusive(job, option, device, before, after)
        return
    if before is None or after is None:
        share = before or after
        assert share is not None
        yield from _rows(job, device, host_lines.KV, share, ALWAYS)
        state = share.state
    else:
        larger = (BOOT, FLIP)
        first = (before.kv_row, _most(before)) >= (after.kv_row, _most(after))
        moments = {PIPELINE: {PIPELINE, *(larger if first else ())}, TENSOR: {TENSOR, *(() if first else larger)}}
        for share, layout in ((before, PIPELINE), (after, TENSOR)):
            held = tuple(m for m in ALWAYS if m in moments[layout]) if job.wish.exclusive else ALWAYS
            yield from _rows(job, device, f"{host_lines.KV}, {layout}", share, held)
        if job.wish.exclusive:
            yield from _rows_more(device, *((before, after) if first else (after, before)), larger)
        state = max(before.state, after.state)
    yield from _states(job, option, device, state, ALWAYS)


def _exclusive(job: Job, option: Option, device: int, before: Share, after: Share) -> Iterable[Term]:
    """Pools of a rank on the CPU, where only the layout in force has any: the one at rest from the start on, and on the
    way from one to the other at most the larger."""
    first = (before.kv_row, _most(before)) >= (after.kv_row, _most(after))
    for share, layout, larger in ((before, PIPELINE, first), (after, TENSOR, not first)):
        rest = (BOOT,) if layout == option.layouts[0] else ()
        yield from _rows(job, device, host_lines.KV, share, (*rest, layout, *((FLIP,) if larger else ())))
        most = share.state >= max(before.state, after.state) and (larger or before.state != after.state)
        yield from _states(job, option, device, share.state, (*rest, layout, *((FLIP,) if most else ())))
    yield from _rows_more(device, *((before, after) if first else (after, before)), (FLIP,))


def _states(job: Job, option: Option, device: int, state: float, held: tuple[str, ...]) -> Iterable[Term]:
    """Of running requests: `state` bytes."""
    if not state:
        return
    note = f"{job.running} requests, {job.wish.state_bits}-bit"
    if like_cpu(job, option) and job.checkpoints:
        # The checkpoints lie in the same pool: a copy between slots is a copy within one memory.
        state += job.checkpoints * state / job.running
        note = f"{job.running} requests and {job.checkpoints} checkpoints, {job.wish.state_bits}-bit"
    yield Term(device, host_lines.STATE, state, held, "computed", note)


def _rows(job: Job, device: int, name: str, share: Share, held: tuple[str, ...]) -> Iterable[Term]:
    """One line: rows of the layers that keep every token, and of those with a window, which end."""
    if not share.has_rows:
        return
    note = f"rows of {job.wish.kv_type}"
    for rows in share.windows:
        note += f"; {rows.layers} layers keep at most {rows.slots} tokens (window {rows.window})"
    yield Term(device, name, share.kv_fixed, held, "computed", note, share.kv_row)
    for rows in share.windows:
        yield Term(device, name, 0.0, held, "computed", note, rows.row, rows.slots)


def _rows_more(device: int, backed: Share, other: Share, held: tuple[str, ...]) -> Iterable[Term]:
    """What the pool of the other layout may hold beyond that of `backed`, whose layers that keep every token have no
    fewer rows. While either may be there the larger of both counts: this is no less than the difference for any tokens.

    For rows of a window of a bytes up to u tokens here, and of b up to w there:
    b min(n, w) - a min(n, u) <= max(0, b - a) min(n, w) + min(a, b) max(0, w - u).
    """
    name, note = f"{host_lines.KV}, windows of the other layout", "while either layout may be backed"
    own = {rows.window: rows for rows in backed.windows}
    fixed, ending = other.kv_fixed - backed.kv_fixed, []
    for rows in other.windows:
        there = own.get(rows.window)
        row, slots = (0.0, rows.slots) if there is None else (there.row, there.slots)
        fixed += min(row, rows.row) * max(0, rows.slots - slots)
        if rows.row > row:
            ending.append(Term(device, name, 0.0, held, "computed", note, rows.row - row, rows.slots))
    if fixed > 0:
        yield Term(device, name, fixed, held, "computed", note)
    yield from ending


def _most(share: Share) -> float:
    return share.kv_fixed + share.windows_most


def _activations(job: Job, option: Option, device: Device, rank: int, shard: Share | None) -> Term:
    """`shard`: what a rank of the tensor layout on the CPU has of the model."""
    threads, last = max(1, job.wish.threads) if device.kind == "cpu" else 1, rank == len(option.ranks) - 1
    head = last or (TENSOR in option.layouts and shard is None and not option.shares_device)
    drafts = shard is not None or not (option.shares_device and last)
    size, more = job.workspace(threads, job.logit_rows, head=head, block=head or shard is not None, drafts=drafts)
    if shard is not None:
        size += _of_shard(job, shard)
        head = True
    note = f"{job.rows} rows: a chunk of {job.wish.chunk} beside {job.running} requests"
    if head:
        note += f"; {job.logit_rows} rows of logits"
    note += "; grows with the context"
    return Term(device.index, host_lines.WORKSPACE, size, ALWAYS, "computed", note, more, job.context)


def _of_shard(job: Job, shard: Share) -> int:
    """How much more than one rank's the buffers of a rank of the tensor layout take: its own q, k and v beside those of
    all ranks, an attention of all heads over its own rows, its own logits; and less of what is divided."""
    shape = job.shape
    attended = shape.attended_elements or shape.mixer_width
    more = shard.part * shape.mixer_width + attended - (1 - shard.part) * shape.divided_elements
    return math.ceil(more * job.rows + (2 * shape.hidden + shard.vocabulary) * job.logit_rows) * FLOAT_BYTES


def _card(job: Job, option: Option, device: Device) -> Iterable[Term]:
    """Beside buffers, of a server that is not like ours: for figures of others."""
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
        size = DRAFT_BYTES_PER_REQUEST * job.running / len(option.ranks)
        yield Term(index, host_lines.DRAFTS, size, ALWAYS, "reserve", KEPT_UNTIL)


def _host(job: Job, option: Option, ceilings: Ceilings) -> Iterable[Term]:
    """What host memory holds beside a CPU rank's own lines."""
    cpu = ceilings.devices[-1].index
    cards = [index for index in option.ranks if ceilings.devices[index].kind != "cpu"]
    ranks, threads = len(option.ranks), max(1, job.wish.threads)
    engine = host_lines.engine_bytes(job.shape)
    yield Term(cpu, host_lines.ENGINE_PROCESS, engine, ALWAYS, "measured", "Python, HTTP, tokenizer")
    workers = host_lines.worker_bytes("cpu", threads) * (ranks - len(cards)) + CARD_WORKER_BYTES * len(cards)
    note = "Python and NumPy" if not cards else f"{ranks} of them, with the host's part of a context"
    if option.shares_device:
        note = f"{ranks} of them, Python and NumPy"
    yield Term(cpu, host_lines.WORKER_PROCESSES, workers, ALWAYS, "reserve" if cards else "measured", note)
    templates = host_lines.template_bytes()
    yield Term(cpu, host_lines.TEMPLATE_PROCESS, templates, ALWAYS, "measured", "renders chat templates")
    yield from _guided(job, cpu)
    groups = 1 + len(job.shape.windows)
    alike = like_cpu(job, option)
    flying = max(plans_in_flight(ranks, layout) for layout in option.layouts) if alike else 2
    limits = ranks, job.running, job.wish.chunk, job.context, flying
    log = host_lines.plan_log_bytes(
        *limits, groups=groups, flip=option.flips, drafts=job.drafts, hidden=job.shape.hidden
    )
    yield Term(cpu, host_lines.PLAN_LOG, log, ALWAYS, "computed", "shared memory between the processes")
    if alike and ranks > 1:
        sizes = [act_sizes(job.shape, ranks, layout, job.rows, job.running, job.drafts) for layout in option.layouts]
        acts = act_bytes(ranks, largest(sizes))
        yield Term(cpu, host_lines.ACTS, acts, ALWAYS, "computed", "shared memory for what ranks exchange")
    if option.expert_layers:
        size = sum(layer.expert_bytes for layer in job.layers[: option.expert_layers])
        yield Term(cpu, "experts", size, ALWAYS, "computed", f"routed experts of {option.expert_layers} layers")
        buffers, more = job.workspace(threads, 0, head=False)
        note = f"{job.rows} rows for the experts"
        yield Term(cpu, host_lines.WORKSPACE, buffers, ALWAYS, "computed", note, more, job.context)
    if cards:
        if not alike:
            yield Term(cpu, "embedding", job.embedding_bytes, ALWAYS, "computed", "rows are looked up on the host")
            yield Term(cpu, "load staging", STAGING_BYTES * len(cards), (BOOT,), "reserve", "pinned")
    if option.shares_device and option.flips and not job.wish.unified:
        yield from _of_flip(job, option, cpu)
    elif option.flips and not option.shares_device:
        if not option.resident and not (alike and job.wish.image_spill):
            yield from _copy(job, cpu, alike=alike)
        moving = TRANSIT_BYTES + job.state_bytes * job.running
        yield Term(cpu, host_lines.TRANSIT, moving, ALWAYS, "reserve", "pinned: live rows and states on their way")
    if job.checkpoints and not alike:
        kept, note = job.checkpoints * job.state_bytes, f"{job.checkpoints}, of the prefix cache"
        yield Term(cpu, "state checkpoints", kept, ALWAYS, "computed", note)


def _guided(job: Job, cpu: int) -> Iterable[Term]:
    """What comes with the first answer that has to fit a grammar, or whose repetitions break at a text."""
    vocabulary, process = host_lines.vocabulary_bytes(job.shape), host_lines.grammar_bytes()
    yield Term(cpu, host_lines.VOCABULARY, vocabulary, ALWAYS, "measured", "from the first guided answer on")
    yield Term(cpu, host_lines.GRAMMAR_PROCESS, process, ALWAYS, "measured", "from the first grammar on")


def _copy(job: Job, cpu: int, *, alike: bool) -> Iterable[Term]:
    """The model once more, from which cards are filled, each tensor at a multiple of 256 bytes; and what each rank has
    made for itself, in either layout."""
    layers = (*job.layers, *job.drafting)
    size = sum(layer.bytes for layer in layers) + job.head_bytes + job.drafting_bytes
    if not alike:
        yield Term(cpu, "weight image", size, ALWAYS, "computed", "pinned: either layout is filled from it")
        return
    size += (0 if job.shape.tied else job.embedding_bytes) + job.shape.other_bytes + _COPY_OF_LAYER * len(layers)
    yield Term(cpu, host_lines.WEIGHTS_COPY, size, ALWAYS, "computed", "pinned: either layout is filled from it")
    if made := sum(layer.made_bytes for layer in layers):
        yield Term(cpu, host_lines.SIDE, 2 * made, ALWAYS, "computed", "parts that no copy has as they are used")


def _of_flip(job: Job, option: Option, cpu: int) -> Iterable[Term]:
    """What ranks on the CPU hold together for a flip: the weights once more, and what moves while it does."""
    if not job.wish.image_spill:
        copy = whole_share(job, option).weights
        yield Term(cpu, host_lines.WEIGHTS_COPY, copy, ALWAYS, "computed", "arenas are filled from it")
    part = option.transit
    row, windows = job.rows_of((*job.layers, *job.drafting), on_cpu=True)
    fixed = transit_states(job, part) + TRANSIT_ALIGN * len(option.ranks) ** 2
    note = f"{part:.0%} of the pool" + (", and states of all requests" if job.state_bytes else "")
    yield Term(cpu, host_lines.TRANSIT, fixed, SERVING, "computed", note, row * part)
    for rows in windows:
        yield Term(cpu, host_lines.TRANSIT, 0.0, SERVING, "computed", note, rows.row * part, rows.slots)


def transit_states(job: Job, part: float) -> float:
    """Bytes of the states that a flip of CPU ranks may carry: those of all running requests, and a part of those that
    the prefix cache keeps."""
    return (job.running + math.ceil(part * job.checkpoints)) * job.state_bytes
