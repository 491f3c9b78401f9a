"""Routing and experts: which experts a row runs, and the weighted sum of what they give.

Rows that chose the same expert go through it together; `linear` makes no difference between that and one by one, and
each row's outputs are summed in the order of its own choice. So a row's result depends on that row alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from backends.base import ExpertMatrix, Routing
from backends.reference.compute import GATES, Array, linear, sigmoid

ROUTINGS = ("softmax", "sigmoid", "chosen")
SUM_MIN = 6.1035e-5
"""The smallest normal number of 16 bits: what a sum of chosen weights is at least divided by."""


@dataclass(frozen=True)
class DenseExperts:
    """One stack of expert matrices, from expert `held` on: weight [experts * pitch, cols], bias [experts * pitch]."""

    matrix: ExpertMatrix
    weight: Array
    bias: Array | None
    held: int = 0

    def apply(self, x: Array, expert: int) -> Array:
        """x [rows, cols] through the matrix of one expert; gives [rows, height]."""
        first = (expert - self.held) * self.matrix.pitch + self.matrix.first
        rows = slice(first, first + self.matrix.height)
        return linear(x, self.weight[rows], None if self.bias is None else self.bias[rows])


def route(
    logits: Array, routing: Routing, selection: Array | None, gains: Array | None = None
) -> tuple[npt.NDArray[np.intp], Array]:
    """The experts of each row, best first, and their weights: both [rows, used]. logits [rows, experts], `selection`
    and `gains` [experts]."""
    scores = _scores(logits, routing.func)
    ranked = scores if selection is None else scores + selection
    # A stable sort of the negated scores keeps the lower index first among equals.
    chosen = np.argsort(-ranked, axis=1, kind="stable")[:, : routing.used]
    weights = np.take_along_axis(scores, chosen, axis=1)
    if routing.func == "chosen":
        weights = _softmax(weights)
    if routing.normalise:
        weights = weights / np.maximum(weights.sum(axis=1, keepdims=True), weights.dtype.type(SUM_MIN))
    weights = weights * weights.dtype.type(routing.scale)
    return chosen, weights if gains is None else weights * gains[chosen]


def run_experts(
    x: Array,
    chosen: npt.NDArray[np.intp],
    weights: Array,
    gate: DenseExperts,
    up: DenseExperts,
    down: DenseExperts,
    kind: str,
    held: tuple[int, int] | None = None,
) -> Array:
    """sum of weight * down(act(gate x) * up x) over each row's experts. x [rows, cols]; gives [rows, down height].

    Of the experts held[0] .. held[1]-1 alone where given: others add nothing.
    """
    rows, used = chosen.shape
    parts = np.zeros((rows, used, down.matrix.height), dtype=x.dtype)
    here = np.unique(chosen)
    if held is not None:
        here = here[(here >= held[0]) & (here < held[1])]
    for expert in here:
        mine = np.nonzero(chosen == expert)
        given = x[mine[0]]
        inner = GATES[kind](gate.apply(given, int(expert)), up.apply(given, int(expert)))
        parts[mine] = down.apply(inner, int(expert))
    out = np.zeros((rows, down.matrix.height), dtype=x.dtype)
    for place in range(used):
        out += weights[:, place, None] * parts[:, place]
    return out


def _scores(logits: Array, func: str) -> Array:
    match func:
        case "softmax":
            return _softmax(logits)
        case "sigmoid":
            return sigmoid(logits)
        case _:
            assert func == "chosen", "refused at bind"
            return logits


def _softmax(x: Array) -> Array:
    powers = np.exp(x - x.max(axis=1, keepdims=True))
    result: Array = powers / powers.sum(axis=1, keepdims=True)
    return result
