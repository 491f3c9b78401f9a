"""Several ranks on the CPU of one box: how many plans they have in flight, and how large what they exchange is.

    layout      plans in flight    groups of decoding requests
    one rank    2                  1       one computes while the next one lies ready
    pipeline    ranks + 1          ranks   consecutive chunks of a prompt, or one group each, fill all ranks
    tensor      2                  1       every rank computes every plan

What ranks exchange inside a plan goes through shared memory of a fixed size (`ActSizes`, one segment for all ranks):

    piece      what each rank lays out for the others at once: two of them, used in turn. Sums and gathers that are
               longer go in pieces; one row of an attention in parts does not, so a piece holds the widest
    message    residual and owed update of every row of the largest plan, from a rank to the next one
    tokens     what the last rank drew, to each of the others: three numbers and a spare one for each row of a request
               that may draw, one and as many as it may draft
    depth      messages that a route holds: one for each plan in flight, and one that is being read

The server makes that memory from these numbers and the plan counts it by them.

Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from budget.facts import ModelShape
from budget.ledger import TENSOR

CPU_RANKS_MOST = 16

PIECE_FLOATS_LEAST = 65536
TOKEN_FLOATS = 4
_LINE_BYTES = 64
_LINE_FLOATS = _LINE_BYTES // 4
_UNKNOWN_HEADS = 1024
"""Numbers beside the values of an attention in parts, where nobody says how many query heads there are."""


@dataclass(frozen=True)
class ActSizes:
    """The memory through which ranks exchange, in floats (`backends.acts.fleet_shape`): what a sum or gather moves at
    once, a message of activations, a message of drawn tokens; `depth` messages of a route."""

    piece_floats: int
    message_floats: int
    token_floats: int
    depth: int


def plans_in_flight(ranks: int, layout: str) -> int:
    """Plans that are issued before the first of them is answered."""
    return 2 if ranks == 1 or layout == TENSOR else ranks + 1


def decode_groups(ranks: int, layout: str) -> int:
    """Groups in turn of which requests decode, so that every rank of a pipeline has one."""
    return 1 if layout == TENSOR else ranks


def act_sizes(shape: ModelShape, ranks: int, layout: str, rows: int, running: int, drafts: int = 0) -> ActSizes:
    """For plans of at most `rows` rows, of `running` requests that each draft at most `drafts` tokens."""
    widest = shape.attended_elements or shape.mixer_width + _UNKNOWN_HEADS
    return ActSizes(
        piece_floats=max(PIECE_FLOATS_LEAST, widest, shape.hidden),
        message_floats=rows * 2 * shape.hidden,
        token_floats=TOKEN_FLOATS * running * (1 + drafts),
        depth=plans_in_flight(ranks, layout) + 1,
    )


def largest(sizes: Sequence[ActSizes]) -> ActSizes:
    """Memory for what ranks exchange that serves each of several layouts."""
    return ActSizes(*(max(getattr(each, name.name) for each in sizes) for name in fields(ActSizes)))


def act_bytes(ranks: int, sizes: ActSizes) -> int:
    """Of the shared memory, whose places are whole cache lines: a header; for each rank a line and two pieces; for each
    route two lines and its messages. Every piece and message has a line with its stamp. Routes go from each rank to the
    next one, and from the last one to each of the others."""
    if ranks == 1:
        return 0
    mailbox = _LINE_BYTES + 2 * _stamped(sizes.piece_floats)
    stream, tokens = (_stamped(floats) for floats in (sizes.message_floats, sizes.token_floats))
    routes = (ranks - 1) * (4 * _LINE_BYTES + sizes.depth * (stream + tokens))
    return _LINE_BYTES + ranks * mailbox + routes


def _stamped(floats: int) -> int:
    return _LINE_BYTES * (1 + -(-floats // _LINE_FLOATS))
