"""Cases of backends.gpu.ops.mixers: norms, activations, routing, recurrent layers, against the reference in double precision.

Buffers are wider than their rows, by nothing, by some floats that keep rows aligned or by some that do not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import gpu_delta
import numpy as np
import numpy.typing as npt

from backends.base import Batch, Routing
from backends.gpu.ops import delta as recurrent
from backends.gpu.ops import mixers as ops
from backends.gpu.ops.buffers import NONE, Planes, Rows
from backends.gpu.ops.delta import DeltaShape
from backends.reference.compute import GATES, rms_norm, sigmoid, soft_cap
from backends.reference.experts import route
from gpu_cases import Array, Case, Maker, address, aligned, nothing

F64 = npt.NDArray[np.float64]
WIDER = (0, 4, 3)


@dataclass(frozen=True)
class Filled:
    """A buffer in memory: all of it, its rows, and what a launch is told."""

    memory: Array
    rows: Array

    @property
    def at(self) -> Rows:
        return Rows(address(self.memory), self.memory.shape[1])

    @property
    def double(self) -> F64:
        """What it holds now, as a copy."""
        return self.rows.astype(np.float64)


def filled(rng: np.random.Generator, rows: int, width: int, by: float = 1.0) -> Filled:
    memory = nothing((rows, width + int(rng.choice(WIDER))))
    memory[:, :width] = by * rng.standard_normal((rows, width))
    return Filled(memory, memory[:, :width])


def empty(rng: np.random.Generator, rows: int, width: int) -> Filled:
    memory = nothing((rows, width + int(rng.choice(WIDER))))
    return Filled(memory, memory[:, :width])


def untouched(*buffers: Filled) -> None:
    """What lies behind the rows is as it was."""
    for each in buffers:
        assert np.isnan(each.memory[:, each.rows.shape[1] :]).all()


def close(got: Array, want: F64, relative: float = 2e-6, absolute: float = 1e-6) -> None:
    np.testing.assert_allclose(got, want, rtol=relative, atol=absolute)


def planes(rows: int, width: int) -> tuple[tuple[Array, ...], Planes]:
    arrays = (nothing((rows, width), np.int8), nothing((rows, width), np.int8), nothing((rows, width // 32)))
    arrays = (*arrays, nothing((rows, width // 16)))
    return arrays, Planes(*map(address, arrays))


def check_planes(arrays: Sequence[Array], x: F64) -> None:
    """They hold x to half a step of each block, and the sums of what they hold."""
    hi, lo, scale, sums = (each.astype(np.float64) for each in arrays)
    blocks = x.reshape(len(x), -1, 32)
    np.testing.assert_allclose(scale, np.abs(blocks).max(axis=2) / 32512, rtol=1e-5)
    integers = (256 * hi + lo).reshape(blocks.shape)
    np.testing.assert_allclose(integers * scale[..., None], blocks, rtol=3e-6, atol=0.51 * float(scale.max()))
    held = (integers * scale[..., None]).reshape(len(x), -1, 16).sum(axis=2)
    np.testing.assert_allclose(sums, held, rtol=1e-5, atol=1e-6)


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


# ---------------------------------------------------------------------------------------------------- recurrent layers


def shape_of(rng: np.random.Generator, keys: int, *, small: bool = False) -> DeltaShape:
    """A random shape of the form that takes heads of up to `keys`."""
    low = {64: 4, 128: 65, 256: 129}[keys]
    key_dim, value_dim = int(rng.integers(low, low + 40)), int(rng.integers(3, 70))
    if small:
        key_dim, value_dim = int(rng.integers(4, 20)), int(rng.integers(3, 40))
    share = int(rng.integers(1, 3))
    key_heads = int(rng.integers(1, 3))
    return DeltaShape(
        key_heads, share * key_heads, key_dim, value_dim, int(rng.integers(1, 5)), 1e-6, bool(rng.integers(2))
    )


def _delta(
    rng: np.random.Generator,
    warp: int,
    keys: int,
    *,
    chunks: bool = False,
    quantised: bool = False,
    small: bool = False,
) -> Case:
    """A sequence that begins, with others that go on."""
    shape = shape_of(rng, keys, small=small)
    if quantised:
        shape = DeltaShape(1, 2, shape.key_dim, 32 * int(rng.integers(1, 3)), shape.kernel, 1e-6)
    net = gpu_delta.Net(rng, shape)
    longest = int(rng.integers(65, 90)) if chunks else int(rng.integers(1, 6))
    batch = gpu_delta.batch_of((1, 0, longest), (0, int(rng.integers(3, 9)), int(rng.integers(1, 4))))
    _fill_states(net, rng)
    run = net.run(batch, chunk_least=20 if chunks else 0, quantised=quantised, wider=int(rng.choice(WIDER)))

    def check() -> None:
        gpu_delta.close(run.out, run.want, 2e-5)
        net.check_states(2e-5)
        if quantised:
            check_planes(run.planes, run.out.astype(np.float64))

    return Case(run.launches, run.arrays, check)


def _fill_states(net: gpu_delta.Net, rng: np.random.Generator) -> None:
    """States as they are behind three rows and more, the same for the net and its reference."""
    net.set_states(
        rng.standard_normal(net.reference.conv[0].shape).astype(np.float32),
        rng.standard_normal(net.reference.matrix[0].shape).astype(np.float32),
    )


def _delta_accept(rng: np.random.Generator, warp: int) -> Case:
    """Three held lanes, of which some rows count, all and none; one begins."""
    net = gpu_delta.Net(rng, shape_of(rng, 64, small=True))
    _fill_states(net, rng)
    counts = [int(each) for each in rng.integers(1, 6, 3)]
    first = (int(rng.integers(3, 9)), 0, 7)
    batch = gpu_delta.batch_of(*((lane, first[lane], counts[lane]) for lane in range(3)), hold=(5, 0, 10))
    run = net.run(batch)
    kept = [(1, counts[1]), (0, int(rng.integers(1, counts[0] + 1))), (2, 0)]
    launch, accepts = net.accept(batch, kept)
    net.held.accept(kept)

    def check() -> None:
        gpu_delta.close(run.out, run.want, 2e-5)
        net.check_states(2e-5)

    return Case((*run.launches, launch), (*run.arrays, accepts), check)


class Joined:
    """A JoinHidden of columns `first` .. `end` - 1: its buffers, its slots, what is kept of held rows."""

    def __init__(self, rng: np.random.Generator, batch: Batch) -> None:
        self.rng, self.batch, rows = rng, batch, len(batch.lanes)
        width, first = int(rng.integers(1, 400)), int(rng.integers(0, 9))
        self.shape = recurrent.JoinShape(rows, first, first + width)
        self.left, self.right = (filled(rng, rows, first + width + int(rng.integers(0, 5))) for _ in range(2))
        self.out = empty(rng, rows, 2 * width)
        self.states = filled(rng, gpu_delta.SLOTS, width)
        self.kept = empty(rng, gpu_delta.HELD, width)
        self.memory = gpu_delta.BatchMemory(batch, 0)
        self.at = recurrent.StatesAt(self.states.at.at, self.states.at.stride)
        self.columns = slice(first, first + width)
        self.arrays = tuple(each.memory for each in (self.left, self.right, self.out, self.states, self.kept))
        self.arrays = (*self.arrays, *self.memory.arrays)

    def want(self, before: Callable[[int], Array | int]) -> F64:
        rows = [np.broadcast_to(before(row), (self.shape.width,)) for row in range(self.shape.rows)]
        return np.concatenate([self.left.double[:, self.columns], np.stack(rows)], axis=1)


def _join(rng: np.random.Generator, warp: int, *, accept: bool = False) -> Case:
    counts = [int(each) for each in rng.integers(1, 5, 3)]
    batch = gpu_delta.batch_of(
        *((0, 5, counts[0]), (1, 0, counts[1]), (2, 3, counts[2])), hold=(-1, 6, 1) if accept else ()
    )
    join = Joined(rng, batch)
    states, right = join.states.double, join.right.double[:, join.columns]
    launches = recurrent.join_hidden(
        join.shape, join.left.at, join.right.at, join.out.at, join.at, join.memory.at, join.kept.at
    )
    firsts = {0: states[batch.states[0]], counts[0]: 0, counts[0] + counts[1]: states[batch.states[2]]}
    want = join.want(lambda row: firsts[row] if row in firsts else right[row - 1])
    after, ends = states.copy(), np.cumsum(counts)
    counted = {0: counts[0], 1: counts[1], 2: counts[2]}
    arrays = join.arrays
    if accept:
        counted = {0: counts[0], 1: int(rng.integers(1, counts[1] + 1)), 2: 0}
        held = [(int(batch.states[lane]), int(batch.hold[lane]), counted[lane], 0) for lane in (1, 2)]
        accepts = aligned(recurrent.accepts_of(held))
        launches += recurrent.join_accept(join.shape, join.kept.at, join.at, address(accepts), 2)
        arrays = (*arrays, accepts)
    for lane, rows in counted.items():
        if rows:
            after[batch.states[lane]] = right[ends[lane] - counts[lane] + rows - 1]

    def check() -> None:
        np.testing.assert_array_equal(join.out.rows, want)
        np.testing.assert_array_equal(join.states.rows, after)
        untouched(join.out, join.states, join.kept)

    return Case(launches, arrays, check)


def _join_chained(rng: np.random.Generator, warp: int) -> Case:
    batch = gpu_delta.batch_of((0, 4, 1), (2, 0, 1), (1, 6, 1), chain=(-1, -1, 0))
    join = Joined(rng, batch)
    states, right = join.states.double, join.right.double[:, join.columns]
    chain = aligned(batch.chain)
    launches = recurrent.join_chained(
        *(join.shape, join.left.at, join.right.at, join.out.at, join.at, join.memory.at, address(chain))
    )
    befores: list[Array | int] = [states[batch.states[0]], 0, right[0]]
    want = join.want(lambda row: befores[row])

    def check() -> None:
        np.testing.assert_array_equal(join.out.rows, want)
        np.testing.assert_array_equal(join.states.rows, states)

    return Case(launches, (*join.arrays, chain), check)


def _copy_states(rng: np.random.Generator, warp: int) -> Case:
    """Pairs that need those before them: two slots change places through a third one."""
    states = aligned(rng.integers(0, 1 << 32, (5, 16 * int(rng.integers(1, 90))), np.uint32))
    pairs = aligned(np.array([(3, 1), (0, 3), (1, 0), (2, 2), (0, 4)], np.int32))
    want = states.copy()
    for source, target in pairs.tolist():
        want[target] = want[source]
    launch = recurrent.copy_states(address(states), states[0].nbytes, address(pairs), len(pairs))

    def check() -> None:
        np.testing.assert_array_equal(states, want)

    return Case((launch,), (states, pairs), check)


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
    "delta_conv": partial(_delta, keys=64, small=True),
    **{f"delta_recurrent_{keys}": partial(_delta, keys=keys) for keys in recurrent.KEY_DIMS},
    "delta_prepare": partial(_delta, keys=64, small=True, chunks=True),
    **{f"delta_chunks_{keys}": partial(_delta, keys=keys, chunks=True) for keys in recurrent.KEY_DIMS},
    "delta_finish": partial(_delta, keys=64, quantised=True, small=True),
    "delta_accept": _delta_accept,
    "join_hidden": _join,
    "join_chained": _join_chained,
    "join_accept": partial(_join, accept=True),
    "copy_states": _copy_states,
}
