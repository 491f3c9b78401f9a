"""What one row of a plan takes on the host: activation buffers and scratch, from declarations alone.

The sums are those of the CPU backend's recorder, to the float: buffers of one name and width are one buffer whichever
layers use it, each padded to 16 floats; scratch is that of the stage that needs most.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from backends.base import TensorView
from budget.facts import LayerWork
from homeserve.layouts import partition
from homeserve.models.stages import Attention, Dense, Experts, GatedDeltaNet, RopeFacts, Stage, TokenInput, UpdateKind

_LANES = 16
_BLOCK_COLUMNS = 32
_BLOCK_FLOATS = 20
"""Columns of a block of quantised activations, and its size in floats."""

Layer = tuple[Iterable[Stage], Mapping[str, TensorView]]


def row_elements(hidden: int, layers: Iterable[Layer], joined: int = 0) -> int:
    """Floats for one row, whether or not its logits are wanted. `layers` are stages with their tensors by role;
    `joined` is the width that a drafting block's joining projection reads."""
    buffers = {("x", hidden), ("update", hidden), ("normed", hidden)}
    quantised, convolved, experts = max(hidden, joined), 0, 0
    ropes: set[RopeFacts] = set()
    for stages, present in layers:
        for stage in stages:
            made = dict(_buffers(stage, hidden))
            buffers |= set(made.items())
            quantised = max(quantised, *(made.get(name, 0) for name in _MULTIPLIED))
            match stage:
                case Attention(rope=RopeFacts() as rope):
                    ropes.add(rope)
                case GatedDeltaNet():
                    convolved = max(convolved, _convolved(stage))
                case Experts():
                    experts = max(experts, _experts(stage, hidden, present))
                case _:
                    pass
    total = sum(_padded(width) for _, width in buffers) + _blocks(quantised) + sum(rope.dims for rope in ropes)
    return total + convolved + experts


def draft_elements(hidden: int, trunk: Iterable[Layer], blocks: Iterable[Layer]) -> int:
    """Floats that drafting adds for one row: the state behind the last norm and the drafting block's norm of it, the
    embedding, its own columns of both side by side, and what the block's layer needs beyond the trunk's; 0 without a
    block."""
    trunk, blocks = [(tuple(stages), part) for stages, part in trunk], [(tuple(s), part) for s, part in blocks]
    if not blocks:
        return 0
    with_blocks = row_elements(hidden, [*trunk, *blocks], joined=2 * hidden)
    return with_blocks - row_elements(hidden, trunk) + 3 * _padded(hidden) + _padded(2 * hidden)


def held_elements(of: GatedDeltaNet | int) -> int:
    """Floats that are kept of one row whose state is held: of a delta net what its convolution makes of the row, and
    the row that goes into it; of a drafting block, given by its width, the hidden state."""
    return _padded(of) if isinstance(of, int) else _convolved(of) + _padded(of.channels)


def held_thread_elements(stages: Iterable[Stage]) -> int:
    """Floats of a thread's copies of two blocks of a held matrix."""
    return 2 * _LANES * max((stage.key_dim for stage in stages if isinstance(stage, GatedDeltaNet)), default=0)


def divided_elements(layers: Iterable[Layer]) -> int:
    """Of `row_elements`, the floats of buffers of which a rank of the tensor layout has its share."""
    made = {buffer for stages, _ in layers for stage in stages for buffer in _buffers(stage, 0)}
    return sum(_padded(width) for name, width in made if name in _DIVIDED)


def partial_elements(stages: Iterable[Stage]) -> int:
    """Floats of one partial result of a split attention, of the stage with the largest: the query heads of a KV head,
    each with its sums and its mixed values."""
    attentions = [stage for stage in stages if isinstance(stage, Attention)]
    return max((each.heads // each.kv_heads * (16 + _padded(each.head_dim)) for each in attentions), default=0)


def work_of(stages: Iterable[Stage], blocks: Mapping[str, int]) -> LayerWork:
    """What a layer of these stages computes. `blocks`: the block lengths of its matrices, by role."""
    work = LayerWork()
    for stage in stages:
        match stage:
            case Attention():
                kv_heads = stage.kv_heads if stage.kv_source is None else 0
                work = replace(work, heads=stage.heads, kv_heads=kv_heads, head_dim=stage.head_dim)
                work = replace(work, q_step=stage.q_step, window=stage.window)
            case GatedDeltaNet():
                work = replace(work, key_heads=stage.key_heads, value_heads=stage.value_heads)
                work = replace(work, key_dim=stage.key_dim, value_dim=stage.value_dim)
            case Dense():
                waits = ("held",) if stage.update.kind is UpdateKind.HOLD else ()
                work = replace(work, ffn=stage.width, beside=(*work.beside, *waits))
            case Experts():
                work = _with_experts(work, stage, blocks)
            case TokenInput():
                work = replace(work, token_ffn=stage.width)
    return work


def _with_experts(work: LayerWork, stage: Experts, blocks: Mapping[str, int]) -> LayerWork:
    own = ("router_in",) if stage.router_eps else ()
    work = replace(work, experts=stage.count, used=stage.used, expert_ffn=stage.width, beside=(*work.beside, *own))
    cut = partition.experts(stage.count, stage.width, blocks.get("ffn_down_exps", 1), (1,))
    work, shared = replace(work, dealt=cut.family == "experts"), stage.shared
    if shared is None:
        return work
    units = partition.ffn_columns(shared.width, blocks.get("ffn_down_shexp", 1), (1,)).units
    return replace(work, shared_ffn=shared.width, shared_units=units, shared_gated=shared.gated)


_MULTIPLIED = frozenset({"mixed", "delta_out", "act", "shared_act", "token_act"})
"""Buffers that a projection reads."""
_DIVIDED = frozenset(
    {
        *("mixed", "gate", "up", "act", "shared_gate", "shared_up", "shared_act"),
        *("delta_in", "delta_z", "delta_out", "delta_beta", "delta_alpha"),
    }
)
"""Of q, k and v a rank has all and its own."""


def _buffers(stage: Stage, hidden: int) -> Iterable[tuple[str, int]]:
    match stage:
        case Attention():
            yield "q", stage.heads * stage.q_step
            yield "mixed", stage.heads * stage.head_dim
            if stage.kv_source is None:
                yield from ((name, stage.kv_heads * stage.head_dim) for name in ("k", "v"))
        case GatedDeltaNet():
            values = stage.value_heads * stage.value_dim
            yield "delta_in", stage.channels
            yield from ((name, values) for name in ("delta_z", "delta_out"))
            yield from ((name, stage.value_heads) for name in ("delta_beta", "delta_alpha"))
        case Dense():
            yield from ((name, stage.width) for name in ("gate", "up", "act"))
            if stage.update.kind is UpdateKind.HOLD:
                yield "held", hidden
        case Experts():
            yield "router", stage.count
            if stage.router_eps:
                yield "router_in", hidden
            if stage.shared is not None:
                yield "shared_out", hidden
                yield from ((name, stage.shared.width) for name in ("shared_gate", "shared_up", "shared_act"))
                if stage.shared.gated:
                    yield "shared_logit", 1
        case TokenInput():
            yield "embedded", hidden
            yield from ((f"token_{name}", stage.width) for name in ("mixed", "told", "gate", "act"))


def _convolved(stage: GatedDeltaNet) -> int:
    """q, k and v of each head after the convolution, and two gates for each value head."""
    keys, values = 2 * stage.key_heads * _padded(stage.key_dim), stage.value_heads * _padded(stage.value_dim)
    return keys + values + _padded(2 * stage.value_heads)


def _experts(stage: Experts, hidden: int, present: Mapping[str, TensorView]) -> int:
    """Scores, the choice, and what the chosen experts make of the row."""
    inner, down = _padded(stage.width), present.get("ffn_down_exps")
    packed = _blocks(stage.width) if down is not None and down.type.block_len > 1 else 0
    return stage.count + stage.used * (4 + inner + max(inner, _padded(hidden)) + packed)


def _blocks(columns: int) -> int:
    return columns // _BLOCK_COLUMNS * _BLOCK_FLOATS


def _padded(width: int) -> int:
    return -(-width // _LANES) * _LANES
