"""A recorder: a section's ops and a batch's shape become segments of launches, with an exchange, or a product that a
library makes (backends.gpu.library_gemm), between each two.

    ops + BatchShape ──▶ (launches) exchange (launches) product (launches) exchange … (launches)

What is decided here, once for each shape:
- *Scope.* Behind `SelectRows` an op has the rows whose logits are wanted; with none it has no launch, and an exchange
  is passed over, as it is on every rank of the plan.
- *Quantisation.* Where a Linear reads its input quantised (few rows, packed matrices), the op before it quantises what
  it computes while it has it in registers, if it can (`Norm`, `GatedActivation`, `DeltaNet`).

Launches depend on the shape alone, so those of one shape can be recorded and replayed (backends.gpu.program).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace

from backends.base import (
    Attention,
    Buffer,
    DeltaNet,
    GatedActivation,
    Limits,
    Linear,
    Norm,
    Op,
    Rope,
    RopeStore,
    Weight,
)
from backends.gpu import held
from backends.gpu.batch import MANY_TILE_ROWS, few_rows_most, few_tiles_most
from backends.gpu.launch import Launch, Symbol
from backends.gpu.library_gemm import Product, Work
from backends.gpu.ops import delta
from backends.gpu.ops.buffers import Planes
from backends.gpu.plan import Placed, Plan, sketched
from backends.gpu.steps import dense, kinds, recurrent
from backends.gpu.steps.base import BatchShape, Places, quantised
from backends.gpu.steps.exchange import Exchange
from backends.ops import EXCHANGES

QUANTISE_COLS = 32
"""Columns of a block; only rows of whole blocks are quantised."""


@dataclass(frozen=True)
class Segment:
    """Launches, and what comes behind them: the exchange of so many `rows`, or a product; at the end of a section
    neither does."""

    launches: tuple[Launch, ...]
    exchange: Exchange | None = None
    rows: int = 0
    product: Product | None = None


def segments(plan: Plan, places: Placed, section: int, shape: BatchShape) -> tuple[Segment, ...]:
    """What a batch of this shape runs of a section."""
    return joined(pieces(plan, places, section, shape))


def joined(parts: Iterable[Segment]) -> tuple[Segment, ...]:
    """Pieces as segments: each ends with an exchange or a product, the last one without."""
    found: list[Segment] = []
    launches: list[Launch] = []
    for part in parts:
        launches += part.launches
        if part.exchange is not None or part.product is not None:
            found.append(replace(part, launches=tuple(launches)))
            launches = []
    return (*found, Segment(tuple(launches)))


def pieces(plan: Plan, places: Placed, section: int, shape: BatchShape) -> Iterator[Segment]:
    """The same op by op, so that a card may begin with the first while the last are still made."""
    ready: Planes | None = None
    for at in plan.sections[section]:
        op = plan.ops[at]
        own = replace(shape, rows=shape.logit_rows) if plan.scopes[at] else shape
        if isinstance(op, EXCHANGES):
            ready = None
            if not own.empty:
                yield Segment((), op, own.rows)
                yield from cut(kinds.launches(op, places, own, None))
            continue
        planes = quantised(places) if _quantises_for(op, _behind(plan, section, at), places, own.rows) else None
        # The planes of the op before are read by this one, those of this one by the next.
        yield from cut(kinds.launches(op, places, own, ready if planes is None else planes))
        ready = planes


def cut(work: Iterable[Work]) -> Iterator[Segment]:
    """What an op has to do, with a product at the end of each piece but the last."""
    launches: list[Launch] = []
    for each in work:
        if isinstance(each, Product):
            yield Segment(tuple(launches), product=each)
            launches = []
        else:
            launches.append(each)
    yield Segment(tuple(launches))


def _behind(plan: Plan, section: int, at: int) -> Op | None:
    """The op behind op number `at` in its section, where it has the same rows."""
    following = at + 1
    return plan.ops[following] if following in plan.sections[section] else None


def _quantises_for(op: Op, behind: Op | None, places: Places, rows: int) -> bool:
    """Whether an op is to quantise its result for the one behind it."""
    if behind is None or not rows or not isinstance(op, Norm | GatedActivation | DeltaNet):
        return False
    return op.out.width > 0 and op.out.width % QUANTISE_COLS == 0 and dense.wants_planes(behind, places, rows, op.out)


# ------------------------------------------------------------------------------------------------------------- symbols


def symbols(plan: Plan) -> tuple[Symbol, ...]:
    """Everything that batches within the limits may launch, of all sections and in all forms; what moves states as
    well."""
    places, *others = (sketched(plan, forms) for forms in plan.forms)
    found: list[Work] = list(recurrent.copies(places, places.batch("pairs"), 1))
    if plan.held_rows:
        found += held.accepts(plan.ops, places, 1)
    for section, ops in enumerate(plan.sections):
        shapes = list(_samples(plan, section))
        for op, scope in _distinct(plan, ops):
            for shape, at in itertools.product(shapes, (places, *others) if isinstance(op, Linear) else (places,)):
                own = replace(shape, rows=shape.logit_rows) if scope else shape
                found += kinds.launches(op, at, own, None)
    return tuple({each.symbol.name: each.symbol for each in found if isinstance(each, Launch)}.values())


def _distinct(plan: Plan, section: range) -> list[tuple[Op, int]]:
    """Ops and their scopes; of those that differ in nothing but names, as layers do, the first one."""
    first: dict[object, tuple[Op, int]] = {}
    for at in section:
        op, scope = plan.ops[at], plan.scopes[at]
        first.setdefault((scope, _kind_of(op, plan)), (op, scope))
    return list(first.values())


def _kind_of(value: object, plan: Plan) -> object:
    """An op without names: buffers as their widths, weights as their types and shapes, layers as those of the pool."""
    match value:
        case Buffer():
            return value.width
        case Weight():
            return plan.weights[value.name].type, value.rows, value.cols
        case tuple():
            return tuple(_kind_of(each, plan) for each in value)
        case Rope():
            return value
    if not is_dataclass(value):
        return value
    told = [_kind_of(getattr(value, each.name), plan) for each in fields(value) if each.name not in ("layer", "label")]
    group = plan.kv.layers[value.layer].group if isinstance(value, Attention | RopeStore) else 0
    return type(value), group, *told


def _samples(plan: Plan, section: int) -> Iterator[BatchShape]:
    """Shapes of every form that an op has, whatever its rows: sizes between which no op changes its form are powers of
    two and what comes behind them."""
    rules = plan.rules(section)
    for rows in _sizes(rules.rows):
        for logit_rows in {min(rows, rules.logit_rows), min(1, rules.logit_rows)}:
            yield from _shapes(plan.limits, rows, logit_rows)
    for logit_rows in _sizes(rules.logit_rows):
        yield BatchShape(min(logit_rows, rules.rows), logit_rows, 1, few=(1, 1), single=1)


def _sizes(most: int) -> list[int]:
    powers = [1 << bit for bit in range(most.bit_length())]
    return sorted({size for power in powers for size in (power, power + 1) if size <= most} | {most} - {0})


def _shapes(limits: Limits, rows: int, logit_rows: int) -> Iterator[BatchShape]:
    longest = few_rows_most(limits)
    few_rows = {1, min(rows, longest)}
    for each in few_rows:
        tiles = min(-(-rows // each), few_tiles_most(limits))
        yield BatchShape(rows, logit_rows, limits.lanes, few=(tiles, each), single=each)
    many = (-(-rows // MANY_TILE_ROWS), MANY_TILE_ROWS)
    yield BatchShape(rows, logit_rows, limits.lanes, many=many, single=rows)
    if rows >= delta.CHUNK_LEAST:
        yield BatchShape(rows, logit_rows, limits.lanes, many=many, chunks=1)
        yield BatchShape(rows, logit_rows, limits.lanes, (1, 1), many, chunks=1, single=1)
