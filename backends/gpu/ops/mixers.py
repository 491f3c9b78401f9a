"""Launches of what lies between the matrices: norms, activations, routing; and the symbols of all mixers.

    norm_rows                       Norm, with the sum into the residual; its result as floats, quantised, or both
    gated_activation_<kind>         GatedActivation, the same
    add_gated scale softcap zero select_rows
    route_<most experts>            which experts a row runs, and their weights
    experts_combine                 the weighted sum of what they gave

Recurrent layers are in `backends.gpu.ops.delta`. Shapes, units and formulas: backends/ops.py; how the work is divided:
the headers in backends/gpu/kernels.
"""

from __future__ import annotations

from backends.base import Routing
from backends.gpu.launch import Launch
from backends.gpu.ops import delta
from backends.gpu.ops.buffers import NONE, PLANES, Planes, Rows, symbol

ROW_COLUMNS = 1024
"""Columns that a block of the plain row kernels takes."""
ROUTE_MOST = (128, 512)
"""Experts that the routing symbols take at most."""
ROUTE_ROWS = 4
USED_MOST = 32
ROUTE_FUNCS = ("softmax", "sigmoid", "chosen")
GATE_KINDS = ("silu", "gelu", "swiglu_oai")
# ------------------------------------------------------------------------------------------------------------- symbols


NORM = symbol(
    *("norm_rows", "norm", "Norm"),
    f"src, i32 src_stride, add, i32 add_stride, weight, out, i32 out_stride, {PLANES}, i32 width, float eps",
    256,
)
GATED_ACTIVATION = {
    kind: symbol(
        *(f"gated_activation_{kind}", "rows", "GatedActivation"),
        f"gate, i32 gate_stride, up, i32 up_stride, out, i32 out_stride, {PLANES}, i32 width",
        256,
    )
    for kind in GATE_KINDS
}
ADD_GATED = symbol(
    "add_gated", "rows", "AddGated", "src, i32 src_stride, into, i32 into_stride, gate, i32 gate_stride, i32 width", 256
)
SCALE = symbol("scale", "rows", "Scale", "src, i32 stride, weight, i32 width", 256)
SOFTCAP = symbol("softcap", "rows", "Softcap", "src, i32 stride, float cap, i32 width", 256)
ZERO = symbol("zero", "rows", "Zero", "out, i32 stride, i32 width", 256, load128=False)
SELECT_ROWS = symbol(
    *("select_rows", "rows", "SelectRows"),
    "src, i32 src_stride, add, i32 add_stride, rows, out, i32 out_stride, i32 width",
    256,
)
ROUTE = {
    most: symbol(
        *(f"route_{most}", "route", "Experts"),
        "logits, i32 stride, selection, gains, ids, weights, i32 rows, i32 experts, i32 used, i32 func, i32 normalise,"
        " float scale",
        128,
        load128=False,
    )
    for most in ROUTE_MOST
}
EXPERTS_COMBINE = symbol(
    *("experts_combine", "experts_combine", "Experts"),
    "parts, i32 parts_stride, places, ids, weights, out, i32 out_stride, i32 used, i32 first, i32 end, i32 width",
    256,
)
SYMBOLS = (
    *(NORM, *GATED_ACTIVATION.values(), ADD_GATED, SCALE, SOFTCAP, ZERO, SELECT_ROWS),
    *(*ROUTE.values(), EXPERTS_COMBINE, *delta.SYMBOLS),
)


# ---------------------------------------------------------------------------------------------------------------- rows


def _grid(rows: int, width: int) -> tuple[int, int, int]:
    return -(-width // ROW_COLUMNS), rows, 1


def norm(
    rows: int, width: int, src: Rows, weight: int, eps: float, out: Rows, add: Rows = NONE, planes: Planes | None = None
) -> Launch:
    """src += add (unless NONE); the norm to `out` (unless NONE) and to `planes`."""
    to = planes or Planes()
    to.check(width)
    args = (src.at, src.stride, add.at, add.stride, weight, out.at, out.stride, *to.addresses, width, eps)
    return Launch(NORM, (rows, 1, 1), args)


def gated_activation(
    rows: int, width: int, kind: str, gate: Rows, up: Rows, out: Rows, planes: Planes | None = None
) -> Launch:
    to = planes or Planes()
    to.check(width)
    args = (gate.at, gate.stride, up.at, up.stride, out.at, out.stride, *to.addresses, width)
    return Launch(GATED_ACTIVATION[kind], _grid(rows, width), args)


def add_gated(rows: int, width: int, src: Rows, into: Rows, gate: Rows = NONE) -> Launch:
    args = (src.at, src.stride, into.at, into.stride, gate.at, gate.stride, width)
    return Launch(ADD_GATED, _grid(rows, width), args)


def scale(rows: int, width: int, src: Rows, weight: int) -> Launch:
    return Launch(SCALE, _grid(rows, width), (src.at, src.stride, weight, width))


def softcap(rows: int, width: int, src: Rows, cap: float) -> Launch:
    return Launch(SOFTCAP, _grid(rows, width), (src.at, src.stride, cap, width))


def zero(rows: int, width: int, out: Rows) -> Launch:
    return Launch(ZERO, _grid(rows, width), (out.at, out.stride, width))


def select_rows(rows: int, width: int, src: Rows, indices: int, out: Rows, add: Rows = NONE) -> Launch:
    """`rows` of them, as int32 at `indices`."""
    args = (src.at, src.stride, add.at, add.stride, indices, out.at, out.stride, width)
    return Launch(SELECT_ROWS, _grid(rows, width), args)


# ------------------------------------------------------------------------------------------------------------- experts


def route(
    rows: int, routing: Routing, logits: Rows, ids: int, weights: int, selection: int = 0, gains: int = 0
) -> Launch:
    """ids int32 and weights float32, both [rows, used]. Raises ValueError for more experts, or chosen ones, than any
    symbol takes."""
    if not 0 < routing.used <= min(routing.experts, USED_MOST) or routing.experts > ROUTE_MOST[-1]:
        raise ValueError(
            f"{routing.used} of {routing.experts} experts: at most {USED_MOST} of {ROUTE_MOST[-1]} can be chosen"
        )
    chosen = ROUTE[next(most for most in ROUTE_MOST if routing.experts <= most)]
    func = ROUTE_FUNCS.index(routing.func)
    args = (logits.at, logits.stride, selection, gains, ids, weights, rows, routing.experts, routing.used)
    return Launch(chosen, (-(-rows // ROUTE_ROWS), 1, 1), (*args, func, int(routing.normalise), routing.scale))


def experts_combine(
    rows: int,
    width: int,
    routing: Routing,
    parts: Rows,
    ids: int,
    weights: int,
    out: Rows,
    held: tuple[int, int] | None = None,
    places: int = 0,
) -> Launch:
    """Choice p of row r is row places[r * used + p] of `parts`, without `places` row r * used + p."""
    first, end = held or (0, routing.experts)
    args = (parts.at, parts.stride, places, ids, weights, out.at, out.stride, routing.used, first, end, width)
    return Launch(EXPERTS_COMBINE, _grid(rows, width), args)
