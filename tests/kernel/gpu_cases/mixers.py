"""Cases of backends.gpu.ops.mixers: norms, activations, routing, against the reference in double precision.

Buffers are wider than their rows, by nothing, by some floats that keep rows aligned or by some that do not.
"""

from __future__ import annotations

from functools import partial

import gpu_recurrent
import numpy as np
import numpy.typing as npt
from gpu_buffers import F64, check_planes, close, empty, filled, planes, untouched

from backends.base import Routing
from backends.gpu.ops import mixers as ops
from backends.gpu.ops.buffers import NONE, Planes
from backends.reference.compute import GATES, rms_norm, sigmoid, soft_cap
from backends.reference.experts import route
from gpu_cases import Case, Maker, address, aligned, nothing


def _few(rng: np.random.Generator, most: int) -> tuple[int, int]:
    return int(rng.integers(1, 5)), int(rng.integers(1, most))


# ---------------------------------------------------------------------------------------------------------------- rows


def _norm(
    rng: np.random.Generator, warp: int, *, add: bool = False, quantised: bool = False, wide: bool = False
) -> Case:
    rows, width = _few(rng, 700)
    if quantised:
        width = 32 * int(rng.integers(1, 40))
    if wide:
        rows, width = 1, 32 * int(rng.integers(257, 300))  # beyond what the registers hold
    src, more, out = filled(rng, rows, width), filled(rng, rows, width), empty(rng, rows, width)
    weight = aligned(rng.standard_normal((1, width)).astype(np.float32))
    arrays, to = planes(rows, width) if quantised else ((), Planes())
    total = src.double + (more.double if add else 0)
    launch = ops.norm(rows, width, src.at, address(weight), 1e-5, out.at, more.at if add else NONE, to)

    def check() -> None:
        want = rms_norm(total, weight.astype(np.float64), 1e-5)
        close(src.rows, total)
        close(out.rows, want)
        untouched(src, out)
        if quantised:
            check_planes(arrays, out.double)

    return Case((launch,), (src.memory, more.memory, out.memory, weight, *arrays), check)


def _gated(rng: np.random.Generator, warp: int, kind: str, *, quantised: bool = False) -> Case:
    rows, width = _few(rng, 1300)
    if quantised:
        width = 32 * int(rng.integers(1, 48))
    gate, up, out = filled(rng, rows, width, 6.0), filled(rng, rows, width, 6.0), empty(rng, rows, width)
    gate.rows[0, 0], gate.rows[-1, -1] = -200.0, 200.0
    arrays, to = planes(rows, width) if quantised else ((), Planes())
    launch = ops.gated_activation(rows, width, kind, gate.at, up.at, NONE if quantised else out.at, to)

    def check() -> None:
        want = np.asarray(GATES[kind](gate.double, up.double), np.float64)
        if quantised:
            check_planes(arrays, want)
            return
        close(out.rows, want, 4e-6, 1e-5)
        untouched(out)

    return Case((launch,), (gate.memory, up.memory, out.memory, *arrays), check)


def _add_gated(rng: np.random.Generator, warp: int, *, gated: bool) -> Case:
    rows, width = _few(rng, 1300)
    src, into, gate = filled(rng, rows, width), filled(rng, rows, width), filled(rng, rows, 1, 3.0)
    want = into.double + (sigmoid(gate.double) if gated else 1) * src.double
    launch = ops.add_gated(rows, width, src.at, into.at, gate.at if gated else NONE)

    def check() -> None:
        close(into.rows, want)
        untouched(into)

    return Case((launch,), (src.memory, into.memory, gate.memory), check)


def _in_place(rng: np.random.Generator, warp: int, op: str) -> Case:
    rows, width = _few(rng, 1300)
    src, weight = filled(rng, rows, width, 20.0), aligned(rng.standard_normal((1, 1)).astype(np.float32))
    before = src.double
    match op:
        case "scale":
            launch, want = ops.scale(rows, width, src.at, address(weight)), before * float(weight[0, 0])
        case "softcap":
            launch, want = ops.softcap(rows, width, src.at, 30.0), np.asarray(soft_cap(before, 30.0), np.float64)
        case _:
            launch, want = ops.zero(rows, width, src.at), np.zeros_like(before)

    def check() -> None:
        close(src.rows, want)
        untouched(src)

    return Case((launch,), (src.memory, weight), check)


def _select(rng: np.random.Generator, warp: int, *, add: bool) -> Case:
    rows, width = _few(rng, 1300)
    src, more = filled(rng, rows, width), filled(rng, rows, width)
    chosen = aligned(np.sort(rng.permutation(rows)[: int(rng.integers(1, rows + 1))]).astype(np.int32))
    out = empty(rng, len(chosen), width)
    launch = ops.select_rows(len(chosen), width, src.at, address(chosen), out.at, more.at if add else NONE)

    def check() -> None:
        close(out.rows, (src.double + (more.double if add else 0))[chosen])
        untouched(out)

    return Case((launch,), (src.memory, more.memory, chosen, out.memory), check)


# ------------------------------------------------------------------------------------------------------------- experts


def _route(
    rng: np.random.Generator, warp: int, most: int, func: str, *, bias: bool = False, equal: bool = False
) -> Case:
    """With `equal`, many logits are the same number, and zeros of both signs among them."""
    rows, experts = int(rng.integers(1, 11)), int(rng.integers(most // 4 + 1, most + 1))
    used = int(rng.integers(1, 17))
    routing = Routing(experts, used, func, normalise=bool(rng.integers(2)), scale=float(rng.choice((1.0, 2.5))))
    logits = filled(rng, rows, experts, 3.0)
    if equal:
        logits.rows[:] = np.round(logits.rows / 4) * rng.choice((1, -1), logits.rows.shape)
    selection, gains = (aligned(rng.standard_normal((1, experts)).astype(np.float32)) for _ in range(2))
    ids, weights = nothing((rows, used), np.int32), nothing((rows, used))
    at = (address(selection), address(gains)) if bias else ()
    launch = ops.route(rows, routing, logits.at, address(ids), address(weights), *at)

    def check() -> None:
        extra = (selection[0].astype(np.float64), gains[0].astype(np.float64)) if bias else (None, None)
        want, values = route(logits.double, routing, *extra)
        # What single precision cannot tell apart may change places; exact equals may not.
        clear = np.ones(rows, bool) if equal else _clear(logits.double, routing, extra[0])
        np.testing.assert_array_equal(ids[clear], want[clear])
        close(weights[clear], np.asarray(values, np.float64)[clear], 4e-6, 1e-9)
        assert (
            np.sort(ids, axis=1)[:, 1:] > np.sort(ids, axis=1)[:, :-1]
        ).all() and 0 <= ids.min() <= ids.max() < experts

    return Case((launch,), (logits.memory, selection, gains, ids, weights), check)


def _clear(logits: F64, routing: Routing, selection: F64 | None) -> npt.NDArray[np.bool_]:
    """Rows whose choices lie further apart than single precision sees."""
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    scores = {"softmax": powers / powers.sum(axis=1, keepdims=True), "sigmoid": sigmoid(logits), "chosen": logits}
    ranked = np.sort(scores[routing.func] + (0 if selection is None else selection), axis=1)[:, ::-1]
    ranked = ranked[:, : routing.used + 1]
    return np.asarray((ranked[:, :-1] - ranked[:, 1:] > 1e-6 * np.abs(ranked[:, :-1])).all(axis=1))


def _combine(rng: np.random.Generator, warp: int, *, held: bool) -> Case:
    """With `held`, a rank's experts alone, whose outputs lie somewhere else: the others' are NaN."""
    rows, width = _few(rng, 1300)
    routing = Routing(int(rng.integers(12, 20)), int(rng.integers(1, 9)))
    ids = aligned(np.stack([rng.permutation(routing.experts)[: routing.used] for _ in range(rows)]).astype(np.int32))
    weights = aligned(rng.random((rows, routing.used)).astype(np.float32))
    parts, out = filled(rng, rows * routing.used, width), empty(rng, rows, width)
    first, end = (int(rng.integers(0, 6)), int(rng.integers(6, 12))) if held else (0, routing.experts)
    here = (ids >= first) & (ids < end)
    places = np.arange(rows * routing.used, dtype=np.int32).reshape(rows, routing.used)
    if held:
        places = rng.permutation(places.reshape(-1)).reshape(places.shape)
        parts.rows[places[~here]] = np.nan
    places = aligned(places)
    summed = np.where(here[..., None], parts.double[places], 0)
    launch = ops.experts_combine(
        *(rows, width, routing, parts.at, address(ids), address(weights), out.at),
        *(((first, end), address(places)) if held else ()),
    )

    def check() -> None:
        close(out.rows, np.einsum("ru,ruc->rc", weights.astype(np.float64), summed), 4e-6, 4e-6)
        untouched(out)

    return Case((launch,), (ids, weights, parts.memory, out.memory, places), check)


CASES: dict[str, Maker] = {
    "norm_rows": partial(_norm, add=True, quantised=True),
    "norm_rows:alone": _norm,
    "norm_rows:wide": partial(_norm, add=True, quantised=True, wide=True),
    **{f"gated_activation_{kind}": partial(_gated, kind=kind) for kind in ops.GATE_KINDS},
    **{f"gated_activation_{kind}:planes": partial(_gated, kind=kind, quantised=True) for kind in ops.GATE_KINDS},
    "add_gated": partial(_add_gated, gated=True),
    "add_gated:plain": partial(_add_gated, gated=False),
    **{op: partial(_in_place, op=op) for op in ("scale", "softcap", "zero")},
    "select_rows": partial(_select, add=True),
    "select_rows:plain": partial(_select, add=False),
    "route_128": partial(_route, most=128, func="softmax"),
    "route_512": partial(_route, most=512, func="sigmoid", bias=True),
    **{
        f"route_{most}:{func}": partial(_route, most=most, func=func)
        for most in ops.ROUTE_MOST
        for func in ops.ROUTE_FUNCS
    },
    "route_128:equal": partial(_route, most=128, func="chosen", equal=True),
    "route_512:bias": partial(_route, most=512, func="softmax", bias=True),
    "experts_combine": partial(_combine, held=True),
    "experts_combine:all": partial(_combine, held=False),
    **gpu_recurrent.CASES,
}
