"""The plan of one CPU rank on one host: what is held, whether it fits, and how many KV tokens the rest gives.

    weights + KV pool + workspace + processes  <=  available - floor

Pure arithmetic on facts. A wish that does not fit is answered by a `Refusal` that shows this sum and the nearest wish
that fits; nothing that was asked for is made smaller in silence.
"""

from __future__ import annotations

from dataclasses import dataclass

from budget.facts import MemoryFacts, ModelShape

MIB = 1 << 20

PROCESS_BYTES = 192 * MIB
"""Reserve for the two Python processes, their libraries and request buffers."""

_KV_SHARE = 4
"""The pool that nobody asked for takes at most one part in so many of what is left: this is someone's home box."""

_SMALLEST_POOL = 2048
"""Tokens that a pool nobody sized holds before that share counts: less serves no conversation."""


@dataclass(frozen=True)
class Wish:
    """What was asked for; 0 is "choose for me". `page` is the slots of a KV page, `rows` the most rows of one plan."""

    context: int
    kv_tokens: int
    running: int
    rows: int
    logit_rows: int
    floor_bytes: int
    page: int = 16


@dataclass(frozen=True)
class Line:
    name: str
    bytes: int
    source: str


@dataclass(frozen=True)
class HostPlan:
    """A plan that fits. `context` is the request limit, `kv_tokens` a multiple of the page."""

    context: int
    kv_tokens: int
    lines: tuple[Line, ...]
    ceiling_bytes: int

    @property
    def total_bytes(self) -> int:
        return sum(line.bytes for line in self.lines)


@dataclass(frozen=True)
class Refusal:
    """Why nothing fits. `nearest_tokens` is the largest pool that would (0: not even one page)."""

    needed_bytes: int
    ceiling_bytes: int
    arithmetic: str
    nearest_tokens: int


def plan_host(memory: MemoryFacts, shape: ModelShape, wish: Wish) -> HostPlan | Refusal:
    """The plan for `wish`, or why it cannot be.

    Without a wish for `kv_tokens` the pool is what `running` requests of the full context need, but no more than a
    quarter of what is left after the weights; never less than one context that was asked for.
    """
    ceiling = max(0, memory.available_bytes - wish.floor_bytes)
    fixed = (
        Line("weights", shape.weights_bytes, "computed"),
        Line("workspace", _workspace_bytes(shape, wish), "computed"),
        Line("processes", PROCESS_BYTES, "reserve"),
    )
    room = ceiling - sum(line.bytes for line in fixed)
    most = _down(max(0, room) // shape.kv_bytes_per_token, wish.page)
    tokens = _pool_tokens(shape, wish, most)
    if tokens > most or tokens < wish.page:
        return _refusal(fixed, shape, max(tokens, wish.page), ceiling, most)
    pool = Line("kv", tokens * shape.kv_bytes_per_token, "computed")
    context = min(wish.context or shape.context, tokens)
    return HostPlan(context, tokens, (fixed[0], pool, *fixed[1:]), ceiling)


def _pool_tokens(shape: ModelShape, wish: Wish, most: int) -> int:
    if wish.kv_tokens:
        return max(wish.page, _down(wish.kv_tokens, wish.page))
    full = _up(wish.context or shape.context, wish.page)
    least = full if wish.context else min(full, most, _up(_SMALLEST_POOL, wish.page))
    return max(least, min(wish.running * full, _down(most // _KV_SHARE, wish.page)))


def _workspace_bytes(shape: ModelShape, wish: Wish) -> int:
    """Activations of the largest plan: residual, normed input, mixer in and out (at most 6 hidden widths), gate, up and
    product of the FFN, quantised copies of the widest input, and the logits; all float32."""
    row = 4 * (6 * shape.hidden + 3 * shape.ffn) + 2 * max(shape.hidden, shape.ffn)
    return wish.rows * row + wish.logit_rows * shape.vocab * 4


def _refusal(fixed: tuple[Line, ...], shape: ModelShape, tokens: int, ceiling: int, most: int) -> Refusal:
    lines = (*fixed, Line("kv", tokens * shape.kv_bytes_per_token, "computed"))
    needed = sum(line.bytes for line in lines)
    parts = " + ".join(f"{line.name} {mib(line.bytes)}" for line in lines)
    return Refusal(needed, ceiling, f"{parts} = {mib(needed)} MiB, and {mib(ceiling)} MiB may be used", most)


def mib(count: int) -> str:
    """Bytes as MiB for people, rounded up so that a sum never looks smaller than it is."""
    return f"{-(-count // MIB):d}"


def _down(tokens: int, page: int) -> int:
    return tokens // page * page


def _up(tokens: int, page: int) -> int:
    return -(-tokens // page) * page
