"""The lines of a rank on a card, and of the host's memory that such ranks pin.

    on the card   workspace (of each layout), drafts, context, graphs; what passes between host and card: `load staging`
                  at a load, `flip buffer` for good where the layout changes; communicators
    on the host   staging, exchange, and the other side of what passes

Weights, rows and states are `budget.terms`'.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from budget import card_work, host_lines
from budget.card_work import STAGING_BYTES, Growth, Program
from budget.ceilings import Device
from budget.facts import MIB
from budget.job import Job, Share
from budget.ledger import ALWAYS, BOOT, PIPELINE, TENSOR, Term
from budget.placement import Option, Shard, tensor_shares, whole_share
from budget.ranks import plans_in_flight

RUNTIME_BYTES = 1500 * MIB
"""What driver, compositor and runtime take of a unified device's memory beside the model: a reserve."""
COMMUNICATOR_BYTES = 112 * MIB
"""Of one card, for the groups of both layouts: 112 to 198 MiB were measured for such sets on three cards."""
GRAPH_BYTES = 64 * MIB
PLANES_PART, PLANES_OF_LAYER = 0.001, 8 << 10
"""Weights begin with whole lines of 256 bytes, planes with 128, and one rank of a tensor layout has what cannot be cut:
so much of the weights more, and bytes for each layer."""
WINDOW_PADDING = 64
"""Bytes of a layer in a slot of states, at most."""
POOL_GRANULE = 2 << 20
"""Of memory that is given back and had again."""
KEPT_UNTIL = "kept until it is known how many drafts count"


def context_bytes(device: Device) -> int:
    """A CUDA or HIP context: it grows with the number of compute units. 107, 256 and 555 MiB were measured on cards of
    16, 24 and 96 GB; this line lies near them."""
    return 128 * MIB + (device.total_bytes or 0) // 220


def programs(job: Job, option: Option, rank: int, before: Share | None, after: Share | None) -> tuple[Program, ...]:
    """What a rank runs in each layout that serves: shares of the pipeline and of the tensor layout."""
    shape, ranks, last = job.shape, len(option.ranks), rank == len(option.ranks) - 1
    held, groups = job.decode_rows if job.drafts else 0, 1 + len(shape.windows)
    limits = shape.hidden, job.rows, job.logit_rows, job.running, held, job.context, groups, ranks
    found = []
    if before is not None:
        head, joined = (shape.vocab, before.joined) if last else (0, 0)
        found.append(Program(before.parts, *limits, head, 0, head, joined, ranks == 1 and joined > 0))
    if after is not None:
        every = shape.vocab if last else 0
        found.append(
            Program(after.parts, *limits, after.vocabulary, every, shape.vocab, after.joined, after.joined > 0)
        )
    return tuple(found)


def any_shares(job: Job, option: Option) -> tuple[Share | None, Share | None]:
    """What a rank computes whatever the cut: every kind of layer, an even part of the tensor layout."""
    ranks = len(option.ranks)
    whole = whole_share(job, option) if PIPELINE in option.layouts else None
    even = tensor_shares(job, Shard((1,) * ranks, (1,) * ranks), on_cpu=True)[0] if TENSOR in option.layouts else None
    return whole, even


def on_card(
    job: Job, option: Option, device: Device, rank: int, before: Share | None, after: Share | None
) -> Iterator[Term]:
    index, flips = device.index, option.flips
    note = (
        f"{job.rows} rows: a chunk of {job.wish.chunk} beside {job.running} requests; {job.logit_rows} rows of logits"
    )
    for program in programs(job, option, rank, before, after):
        yield from _grown(index, host_lines.WORKSPACE, card_work.workspace(program), note)
    drafting = after if after is not None else before if len(option.ranks) == 1 else None
    if drafting is not None and drafting.kept:
        yield Term(index, host_lines.DRAFTS, drafting.kept, ALWAYS, "computed", f"{job.decode_rows} rows, {KEPT_UNTIL}")
    if device.kind == "uma":
        yield Term(index, "runtime", RUNTIME_BYTES, ALWAYS, "reserve", "driver, compositor, context, recorded steps")
    else:
        yield Term(index, "context", context_bytes(device), ALWAYS, "reserve", "grows with the card's compute units")
        yield Term(index, "graphs", GRAPH_BYTES, ALWAYS, "reserve", "recorded decode steps")
    if len(option.ranks) > 1:
        yield Term(index, "communicators", COMMUNICATOR_BYTES, ALWAYS, "reserve", "buffers between ranks")
    yield _passing(index, STAGING_BYTES, flips=flips)


def pinned(job: Job, option: Option, cpu: int, shares: Sequence[tuple[Share | None, Share | None]]) -> Iterator[Term]:
    """On the host, of ranks with these shares of either layout; none of either: it is no card."""
    every = [programs(job, option, rank, *own) for rank, own in enumerate(shares)]
    exchanged = card_work.exchange(program for own in every for program in own)
    for own, (before, after) in zip(every, shares, strict=True):
        if not own:
            continue
        for program in own:
            yield from _grown(cpu, host_lines.STAGING, card_work.staging(program), "pinned: batches, and logits")
        if exchanged:
            yield Term(cpu, host_lines.EXCHANGE, exchanged, ALWAYS, "computed", "pinned: rows to other ranks")
        yield _passing(cpu, 2 * STAGING_BYTES, flips=option.flips)
        before, after = packed(job, option, before), packed(job, option, after)
        if job.wish.image_spill and before is not None and after is not None:
            arena = max(before.weights, after.weights + after.kv_copies)
            yield Term(cpu, host_lines.IMAGE, arena, ALWAYS, "computed", "of the next layout; the other one is on disk")


def between(
    job: Job, option: Option, devices: Sequence[Device], shares: Sequence[tuple[Share | None, Share | None]]
) -> Iterator[Term]:
    """Memory of cards of one vendor through which rows go from card to card. Where they do not reach each other rows
    go through the host, and nothing of it is taken."""
    ranks = [devices[index] for index in option.ranks]
    if (
        len(ranks) == 1
        or len({device.vendor for device in ranks}) > 1
        or any(each.kind != "discrete" for each in ranks)
    ):
        return
    every = [program for rank, own in enumerate(shares) for program in programs(job, option, rank, *own)]
    depth = max(plans_in_flight(len(ranks), layout) for layout in option.layouts) + 1
    for rank, device in enumerate(ranks):
        routes = 2 if 0 < rank < len(ranks) - 1 else 1  # from the rank before, and from the last one
        size = card_work.mailboxes(every, routes * (depth + 1))
        yield Term(device.index, host_lines.MAILBOXES, size, ALWAYS, "reserve", "where cards reach each other")


def packed(job: Job, option: Option, share: Share | None) -> Share | None:
    """What a card holds of it: weights in planes that begin with whole lines, the padding of states' windows, and where
    layouts take turns whole granules of memory behind their pools."""
    if share is None or option.host_only or not job.wish.like_cpu:
        return share
    layers, granule = len(job.layers) + len(job.drafting), POOL_GRANULE if option.flips else 0
    slots = job.running + job.checkpoints
    padding = WINDOW_PADDING * job.recurrent_layers
    return replace(
        share,
        weights=share.weights * (1 + PLANES_PART) + PLANES_OF_LAYER * layers,
        kv_fixed=share.kv_fixed + granule if share.has_rows else 0,
        state=share.state + (padding * job.running + granule * job.running / slots if share.state else 0),
    )


def _passing(device: int, size: int, *, flips: bool) -> Term:
    """Through which weights come at a load, and what moves at each flip."""
    if flips:
        return Term(device, "flip buffer", size, ALWAYS, "computed", "weights and rows pass through it")
    return Term(device, "load staging", size, (BOOT,), "computed", "weights pass through it")


def _grown(device: int, name: str, sizes: Iterable[Growth], note: str) -> Iterator[Term]:
    for each in sizes:
        yield Term(device, name, each.fixed, ALWAYS, "computed", note, each.per_token, each.until)
