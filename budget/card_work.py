"""What a rank on a card holds beside weights and rows: buffers, scratch, the arrays of a batch, what is kept of drafts,
and what of the host's memory passes rows and logits.

    Part       what a rank has of one kind of layer: all of it, or its heads and columns of the tensor layout
    Program    the parts that it runs one after the other, and the limits of its plans
      workspace, staging      bytes, as far as they are the same for every context, and what grows with it
      kept, exchange          bytes

The sums are those of a card's plan (backends/gpu/plan.py: buffers of one name and width are one, each padded to 16
floats and 256 bytes; scratch of one name is that of the op which needs most) and those of its ops (backends/gpu/steps):

    attention parts   tiles x rows x heads x (dims + 2) floats for each part of 256 positions; `PART_BYTES` at most
    experts           rows x used lines from gate to down, and their halves
    delta nets        what the convolution leaves of a row; for each chunk two matrices of 64 x 64 for each value head
    many rows         the widest input in halves                          few rows: the same, quantised
    merged attention  rows x ranks x heads x (dims + 1) floats

They are never less than what the plan takes. Above it they are by one part of attention (a context is seldom whole
parts), by the quantised rows of a model that is not packed, and by what a rank lacks of the kinds of layers.

Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from budget.facts import LayerWork
from budget.wish import PAGE

FLOAT_BYTES = INT_BYTES = 4
ALIGN = 256
PART_BYTES = 64 << 20
"""Of parts of attention (backends/gpu/steps/attention.py)."""
PART_TOKENS = 16 * PAGE
PART_PAGES_MOST = 256
FEW_ROWS = 4, 8
"""Rows of a lane that attention takes as one tile: without and with rows of drafts (backends/gpu/batch.py)."""
FEW_LINEAR_ROWS = 16
"""The most rows that go through quantised planes, on cards without matrix cores."""
FEW_EXPERT_ROWS = 8
HALVES_PAD, EXPERT_TILE = 128, 32
CHUNK, CHUNK_LEAST, CHUNKED_LANES = 64, 32, 16
"""Of delta nets (backends/gpu/ops/delta.py)."""
SLOT_LEAST, MAIL_BLOCK = 64 << 10, 2 << 20
"""Of mailboxes between cards."""
PAIRS = 256
"""State slots that one launch copies."""
STAGING_BYTES = 8 << 20
"""Of what passes between host and card at a load, and at a flip: so much on the card, and two halves of it pinned
(backends/gpu/staging.py)."""

Buffer = tuple[str, int]
"""Name and width: equal ones are one buffer."""


class Growth(NamedTuple):
    """`fixed` bytes, and `per_token` for each token of the longest request up to `until`."""

    fixed: int
    per_token: float = 0.0
    until: int = 0


@dataclass(frozen=True)
class Part:
    """Of a kind of layer: `layer` as a whole, and of it a rank's own heads and columns, the same where nothing is
    divided (`divided` False). `kv_heads` 0: every rank computes K and V of all heads."""

    layer: LayerWork
    heads: int
    kv_heads: int
    key_heads: int
    value_heads: int
    ffn: int
    expert_ffn: int
    shared_ffn: int
    divided: bool = False


@dataclass(frozen=True)
class Program:
    """What a rank runs in one layout. `logits`: columns of logits that it computes, `gathers` that it has all of, and
    `gives` that pass to the host; 0: none. `joined`: columns of a drafting block's joining projection, both halves;
    `drafts`: it makes steps of drafting. `held_rows` are those of the limits, `groups` the KV groups of the model."""

    parts: frozenset[Part]
    hidden: int
    rows: int
    logit_rows: int
    lanes: int
    held_rows: int
    context: int
    groups: int = 1
    ranks: int = 1
    logits: int = 0
    gathers: int = 0
    gives: int = 0
    joined: int = 0
    drafts: bool = False


def whole(work: LayerWork) -> Part:
    sizes = work.heads, work.kv_heads, work.key_heads, work.value_heads, work.ffn, work.expert_ffn, work.shared_ffn
    return Part(work, *sizes)


@lru_cache(maxsize=4096)
def share(work: LayerWork, mixer: float, ffn: float, shared: float, kv: float) -> Part:
    """Of the tensor layout, from a rank's shares of the heads, of the columns or experts, of a shared expert's columns
    and of the KV heads (0: all ranks have them all)."""
    return Part(
        work,
        heads=round(work.heads * mixer),
        kv_heads=round(work.kv_heads * kv),
        key_heads=round(work.key_heads * mixer),
        value_heads=round(work.value_heads * mixer),
        ffn=math.ceil(round(work.ffn * ffn, 3)),
        expert_ffn=work.expert_ffn if work.dealt else math.ceil(round(work.expert_ffn * ffn, 3)),
        shared_ffn=math.ceil(round(work.shared_ffn * shared, 3)),
        divided=True,
    )


@lru_cache(maxsize=4096)
def workspace(program: Program) -> tuple[Growth, ...]:
    """Of the one allocation that buffers, scratch and a batch's arrays lie in."""
    sizes = [rows * padded(width) * FLOAT_BYTES for (_, width), rows in _buffers(program).items()]
    sizes += _scratch(program).values()
    head, tables = _block(program)
    fixed = sum(map(aligned, sizes)) + head + ALIGN
    return (Growth(fixed), tables, *_attention(program))


@lru_cache(maxsize=4096)
def staging(program: Program) -> tuple[Growth, ...]:
    """Pinned memory of the host that batches and logits pass through, and rows for embeddings in place of logits."""
    head, tables = _block(program)
    rows = program.rows * padded(program.hidden) if program.gives else 0
    passing = max(FLOAT_BYTES, program.logit_rows * padded(program.gives) * FLOAT_BYTES, rows * FLOAT_BYTES)
    return Growth(head + passing), tables


def kept(parts: Iterable[tuple[Part, int]], columns: int, rows: int) -> int:
    """Of rows whose input is a draft: `parts` are the layers with how many there are of each, `columns` those that a
    drafting block keeps (backends/gpu/held.py)."""
    own = 0
    for part, count in parts:
        sizes = (_convolved(part), _channels(part)) if part.value_heads else ()
        own += count * sum(aligned(rows * floats * FLOAT_BYTES) for floats in sizes)
    return own + aligned(rows * padded(columns) * FLOAT_BYTES)


def exchange(programs: Iterable[Program]) -> int:
    """Pinned memory of the host through which a rank's rows go to the others: room for the largest exchange of any
    rank in any layout, twice, and side by side where several buffers go at once (backends/gpu/transport/host.py).
    `programs` are those of all ranks."""
    own = every = message = 0
    several = False
    for program in programs:
        if program.ranks > 1:
            divided = tuple(part for part in program.parts if part.divided)
            floats = _exchanged(program, divided)
            own, every, message = max(own, floats[0]), max(every, floats[1]), max(message, floats[2])
            several = several or not divided or any(part.kv_heads for part in divided)
    beside = max(own, message) + max(every, message) if several else 0
    return FLOAT_BYTES * (2 * max(own, every, message) + beside)


def mailboxes(programs: Iterable[Program], messages: int) -> int:
    """Memory of each card through which rows go to cards of the same vendor without the host, where cards reach each
    other: of every rank two slots for the most that any of them gives at once, and places for `messages`
    (backends/gpu/transport/mailboxes.py). A library between cards takes less."""
    own = message = rows = ranks = 0
    for program in programs:
        if program.ranks > 1:
            divided = tuple(part for part in program.parts if part.divided)
            floats = _exchanged(program, divided)
            own, message = max(own, floats[0]), max(message, floats[2])
            rows, ranks = max(rows, program.rows), program.ranks
    slot = max(SLOT_LEAST, own * FLOAT_BYTES)
    nbytes = 2 * ranks * aligned(slot) + messages * aligned(message * FLOAT_BYTES)
    return padded(nbytes, MAIL_BLOCK) + rows * FLOAT_BYTES if ranks else 0


@lru_cache(maxsize=4096)
def _exchanged(program: Program, divided: tuple[Part, ...]) -> tuple[int, int, int]:
    """The most floats that a rank gives to the others at once, that it gets of all, and of a message."""
    rows, hidden = program.rows, padded(program.hidden)
    own, every = [rows * hidden], [rows * hidden]
    for part in divided:
        layer, partial = part.layer, _partial(part.layer)
        kv = part.kv_heads * layer.head_dim
        all_kv = layer.kv_heads * layer.head_dim if kv else 0
        own += [rows * (padded(part.heads * layer.q_step) + 2 * padded(kv)), rows * padded(partial)]
        every += [rows * (padded(layer.heads * layer.q_step) + 2 * padded(all_kv))]
        every += [rows * padded(program.ranks * partial)]
        own += [program.logit_rows * padded(program.logits)]
        every += [program.logit_rows * padded(program.gives)]
    return (max(own), max(every), 0) if len(own) > 1 else (0, 0, 2 * rows * hidden)


# ------------------------------------------------------------------------------------------------------------- buffers


def _buffers(program: Program) -> dict[Buffer, int]:
    """Rows of each."""
    hidden, rows, logit_rows = program.hidden, program.rows, program.logit_rows
    found: dict[Buffer, int] = {(name, hidden): rows for name in ("x", "update", "normed")}
    for part in program.parts:
        found |= dict.fromkeys(_of_part(part, hidden), rows)
    if program.joined:
        found |= {(name, hidden): rows for name in ("embedded", "final", "hidden_in")} | {
            ("joined", program.joined): rows
        }
        if program.drafts:
            found |= {(name, hidden): program.lanes for name in ("draft_final", "draft_hidden")}
    if program.logits:
        found[("selected", hidden)] = logit_rows
        found.setdefault(("final", hidden), logit_rows)
        found |= {("own_logits", program.logits): logit_rows, ("logits", program.gathers): logit_rows}
    return found


def _of_part(part: Part, hidden: int) -> Iterator[Buffer]:
    layer = part.layer
    yield from ((name, hidden) for name in layer.beside)
    if layer.heads:
        yield from (("q", layer.heads * layer.q_step), ("mixed", part.heads * layer.head_dim))
        yield from ((name, layer.kv_heads * layer.head_dim) for name in ("k", "v"))
        if part.divided:
            yield from (("own_q", part.heads * layer.q_step), ("partial", _partial(layer)))
            yield from ((name, part.kv_heads * layer.head_dim) for name in ("own_k", "own_v"))
    if layer.value_heads:
        yield "delta_in", _channels(part)
        yield from ((name, part.value_heads * layer.value_dim) for name in ("delta_z", "delta_out"))
        yield from ((name, part.value_heads) for name in ("delta_beta", "delta_alpha"))
    yield from ((name, part.ffn) for name in ("gate", "up", "act"))
    if layer.experts:
        yield "router", layer.experts
    if layer.shared_ffn:
        yield "shared_out", hidden
        yield from ((f"shared_{name}", part.shared_ffn) for name in ("gate", "up", "act"))
        yield "shared_logit", int(layer.shared_gated)
    if layer.token_ffn:
        yield "embedded", hidden
        yield from ((f"token_{name}", layer.token_ffn) for name in ("mixed", "told", "gate", "act"))


def _partial(layer: LayerWork) -> int:
    """Columns of an attention of all heads over some of the rows: values and one number for each head."""
    return layer.heads * (layer.head_dim + 1)


def _channels(part: Part) -> int:
    return 2 * part.key_heads * part.layer.key_dim + part.value_heads * part.layer.value_dim


def _convolved(part: Part) -> int:
    layer = part.layer
    heads = 2 * part.key_heads * padded(layer.key_dim) + part.value_heads * padded(layer.value_dim)
    return heads + padded(3 * part.value_heads)


# ------------------------------------------------------------------------------------------------------------- scratch


def _scratch(program: Program) -> dict[str, int]:
    """By name, all but parts of attention."""
    most: dict[str, int] = {}
    for name, size in _wanted(program):
        most[name] = max(most.get(name, 0), size)
    return most


def _wanted(program: Program) -> Iterator[tuple[str, int]]:
    hidden, rows = program.hidden, program.rows
    yield from _linear(rows, max(hidden, program.joined))
    yield from _linear(program.logit_rows if program.logits else 0, hidden)
    for part in program.parts:
        layer = part.layer
        values = part.value_heads * layer.value_dim
        widths = part.heads * layer.head_dim, values, part.ffn, part.shared_ffn, layer.token_ffn
        yield from _linear(rows, max(widths))
        yield from _experts(part, hidden, rows)
        if part.value_heads:
            yield "convolved", rows * _convolved(part) * FLOAT_BYTES
            chunk = part.value_heads * (2 * CHUNK * CHUNK + 2 * CHUNK) * FLOAT_BYTES
            yield "prepared", _most_chunks(rows, program.lanes) * chunk
        if part.divided:
            yield "gathered", rows * program.ranks * _partial(layer) * FLOAT_BYTES
        yield f"turns of {layer.head_dim}", layer.head_dim * FLOAT_BYTES


def _linear(rows: int, width: int) -> Iterator[tuple[str, int]]:
    """A linear layer with so many rows of so many columns, in either form."""
    yield "halves", 2 * rows * padded(width, HALVES_PAD)
    yield "scales", rows * FLOAT_BYTES
    yield from _planes("quantised", min(rows, FEW_LINEAR_ROWS), width)


def _planes(name: str, rows: int, width: int) -> Iterator[tuple[str, int]]:
    for plane, eighths in (("hi", 8), ("lo", 8), ("scale", 1), ("sum", 2)):
        yield f"{name} {plane}", rows * width * eighths // 8


def _experts(part: Part, hidden: int, rows: int) -> Iterator[tuple[str, int]]:
    layer, inner = part.layer, part.expert_ffn
    if not layer.experts:
        return
    pairs, few = rows * layer.used, min(rows, FEW_EXPERT_ROWS)
    yield from ((f"experts {name}", pairs * FLOAT_BYTES) for name in ("ids", "weights", "scales", "order"))
    yield "experts gate", pairs * padded(inner) * FLOAT_BYTES
    yield "experts up", pairs * padded(max(inner, hidden)) * FLOAT_BYTES
    yield from _planes("experts", few, hidden)
    yield from _planes("experts", few * layer.used, inner)
    yield "experts halves", 2 * max(rows * padded(hidden, HALVES_PAD), pairs * padded(inner, HALVES_PAD))
    begun = min(layer.experts, pairs)
    yield "experts tiles", (pairs + begun * (EXPERT_TILE - 1)) // EXPERT_TILE * 16


def _most_chunks(rows: int, lanes: int) -> int:
    chunked = min(lanes, rows // CHUNK_LEAST, CHUNKED_LANES)
    return (rows + chunked * (2 * CHUNK - 2)) // CHUNK if chunked else 0


def _attention(program: Program) -> tuple[Growth, ...]:
    """Parts: what one of the smallest takes, so often as a context has of them or the limit has room for."""
    lanes = max(1, program.lanes)
    rows = min(max(-(-program.held_rows // lanes), FEW_ROWS[0]), FEW_ROWS[1])
    stats, values = [], []
    for layer in {part.layer for part in program.parts if part.layer.heads}:
        each = lanes * rows * layer.heads * FLOAT_BYTES
        most = _parts_most(layer, program.context, rows, each * (layer.head_dim + 2))
        stats.append((2 * each, most))
        values.append((layer.head_dim * each, most))
    return tuple(_of_parts(kinds, program.context) for kinds in (stats, values) if kinds)


def _parts_most(layer: LayerWork, context: int, rows: int, each: int) -> int:
    """Parts of `each` bytes that there is room for, each with `rows` rows of a lane (backends/gpu/ops/attention.py)."""

    def seen(pages: int) -> int:
        count = -(-pages_of(context) // pages)
        return min(count, -(-(layer.window + rows - 2) // (pages * PAGE)) + 1) if layer.window else count

    return min(seen(PART_TOKENS // PAGE), max(PART_BYTES // each, seen(PART_PAGES_MOST)))


def _of_parts(kinds: list[tuple[int, int]], context: int) -> Growth:
    """The largest of (bytes of a part, parts) at any context: they share the memory."""
    each = max(size for size, _ in kinds)
    most = -(-max(size * count for size, count in kinds) // each)
    until = max(0, min((most - 1) * PART_TOKENS, context))
    return Growth(each + ALIGN, each / PART_TOKENS if until else 0.0, until)


def _block(program: Program) -> tuple[int, Growth]:
    """A batch's arrays of whole numbers: those of rows and lanes, and the tables of pages (backends/gpu/batch.py)."""
    rows, lanes = max(program.rows, program.lanes), program.lanes
    sizes = [rows] * (4 + program.groups) + [max(rows, program.logit_rows), 2 * max(1, lanes), 2 * rows, 8 * lanes]
    sizes += [4 * _most_chunks(rows, lanes), 4 * lanes, 2 * PAIRS]
    head = sum(padded(max(1, size), 64) for size in sizes) * INT_BYTES
    each = lanes * INT_BYTES
    return head, Growth(program.groups * (each + ALIGN), program.groups * each / PAGE, program.context)


def pages_of(tokens: int) -> int:
    return -(-tokens // PAGE)


def padded(size: int, unit: int = 16) -> int:
    return -(-size // unit) * unit


def aligned(nbytes: int) -> int:
    return padded(nbytes, ALIGN)
