"""What ops and a KV pool have to agree on, whatever device they are for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from backends.base import PAGE_LEN, Attention, KvPool, Op, RopeStore


def q_step(op: RopeStore | Attention) -> int:
    """Floats from one head of q to the next."""
    return op.q_step or op.head_dim


def partial_groups(ops: Sequence[Op], kv: KvPool) -> tuple[bool, ...]:
    """Of each KV group, whether pages of a batch may be -1 in it: no attention reads them all."""
    partial: dict[int, bool] = {}
    for op in ops:
        if isinstance(op, Attention):
            group = kv.layers[op.layer].group
            partial[group] = partial.get(group, True) and op.partial
    return tuple(partial.get(group, True) for group in range(len(kv.group_slots)))


def check(ops: Sequence[Op], kv: KvPool) -> None:
    """Raise ValueError where the pool, or a buffer, does not fit the ops that use it."""
    for slots in kv.group_slots:
        if slots % PAGE_LEN:
            raise ValueError(f"{slots} slots are no whole number of pages of {PAGE_LEN}")
    for op in ops:
        if not isinstance(op, RopeStore | Attention):
            continue
        if not 0 <= op.layer < len(kv.layers):
            raise ValueError(f"{type(op).__name__} uses layer {op.layer} of {len(kv.layers)}")
        shape = kv.layers[op.layer]
        if (shape.kv_heads, shape.head_dim) != (op.kv_heads, op.head_dim):
            raise ValueError(
                f"layer {op.layer} of the pool holds {shape.kv_heads} heads of {shape.head_dim}, "
                f"{type(op).__name__} wants {op.kv_heads} of {op.head_dim}"
            )
        if not 0 <= shape.group < len(kv.group_slots):
            raise ValueError(f"layer {op.layer} lies in KV group {shape.group} of {len(kv.group_slots)}")
        window = kv.group_windows[shape.group]
        if isinstance(op, Attention) and window and not 0 < op.window <= window:
            seen = f"the last {op.window}" if op.window else "all"
            raise ValueError(f"attention of layer {op.layer} sees {seen} tokens, its KV group keeps {window}")
        for what, found, wanted in _widths(op):
            if found != wanted:
                raise ValueError(f"{type(op).__name__} of layer {op.layer}: {what} is {found} wide, not {wanted}")


def _widths(op: RopeStore | Attention) -> Iterator[tuple[str, int, int]]:
    """(what, its width, the width it must have) for everything that the kernels walk by head."""
    step, dims = q_step(op), op.head_dim
    yield "q", op.q.width, op.heads * step
    least = 2 * dims if isinstance(op, Attention) and op.gated else dims
    yield "a head of q", step, max(step, least)
    if isinstance(op, Attention):
        yield "out", op.out.width, op.heads * (dims + op.partial)
        vectors = [("sinks", op.sinks, op.heads)]
    else:
        yield from ((name, b.width, op.kv_heads * dims) for name, b in (("k", op.k), ("v", op.v)) if b is not None)
        vectors = [("q_norm", op.q_norm, dims), ("k_norm", op.k_norm, dims)]
        if (op.k is None) != (op.v is None):
            raise ValueError(f"RopeStore of layer {op.layer} has one of k and v")
    yield from ((name, weight.rows * weight.cols, wanted) for name, weight, wanted in vectors if weight is not None)
