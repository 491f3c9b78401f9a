"""What a program needs that cards lack, all of it at once, before a byte of it is loaded.

capability table     op x type                                                 (backends.gpu.capability)
shapes               heads, delta nets and routings that no kernel is built for
vectors              weights that have to be floats
unknown              an arch that the gate did not go through: its kernels are compiled now, and what does not
                     compile is missing, with the compiler's word for it
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from backends.base import (
    Attention,
    Capability,
    DeltaNet,
    Experts,
    KvPool,
    Op,
    RopeStore,
    TensorView,
    Unsupported,
    Weight,
)
from backends.experts import vectors_of
from backends.gpu import capability
from backends.gpu.device import Device
from backends.gpu.errors import CompileFailed
from backends.gpu.launch import Symbol
from backends.gpu.ops import attention, delta, many, mixers
from backends.gpu.planes import FLOATS
from backends.needs import needed

AT_ONCE = 24
"""Symbols that a device is given to compile before progress is told: enough for all cores of a machine at home."""
REASON_MOST = 300
"""Characters of what a compiler said that an entry repeats."""


def refuse(backend: str, arch: str, ops: Sequence[Op], weights: Mapping[str, TensorView], kv: KvPool) -> None:
    """Raises Unsupported with every need that is answered with no, or is not known of at all, and every shape that no
    kernel takes. Needs that are unknown for this arch alone are left for `compile_unknown`."""
    known = {(entry.op, entry.type): entry for entry in capability.table(arch)}
    found = [known.get(need, Capability(*need, ok=None)) for need in needed(ops, weights, kv)]
    missing = [entry for entry in found if entry.ok is False or (entry.ok is None and entry.why != capability.UNKNOWN)]
    missing += dict.fromkeys(entry for op in ops for entry in (*_shapes(op, kv), *_vectors(op, weights)))
    if missing:
        raise Unsupported(backend, missing)


def compile_unknown(
    backend: str,
    device: Device,
    ops: Sequence[Op],
    weights: Mapping[str, TensorView],
    kv: KvPool,
    symbols: Sequence[Symbol],
    done: Callable[[int], None] = lambda count: None,
) -> None:
    """Compile and load what a program launches; `done` hears how many symbols are. Raises Unsupported with every need
    whose symbols do not compile, where the arch's table does not know better; CompileFailed where it says that they do;
    and other KernelErrors."""
    known = {(entry.op, entry.type): entry for entry in capability.table(device.facts.arch.base)}
    unknown = [need for need in needed(ops, weights, kv) if known[need].ok is None]
    if not unknown:
        _prepare(device, symbols, done)
        return
    failed = _failed(device, symbols, done)
    missing = [entry for entry in (_answered(need, symbols, failed) for need in unknown) if not entry.ok]
    if missing:
        raise Unsupported(backend, missing)
    if failed:
        raise next(iter(failed.values()))


def _prepare(device: Device, symbols: Sequence[Symbol], done: Callable[[int], None]) -> None:
    for first in range(0, len(symbols), AT_ONCE):
        device.prepare(symbols[first : first + AT_ONCE])
        done(min(first + AT_ONCE, len(symbols)))


def _failed(device: Device, symbols: Sequence[Symbol], done: Callable[[int], None]) -> dict[str, CompileFailed]:
    """Several at once where all compile; else one by one, to know which ones do not."""
    try:
        _prepare(device, symbols, done)
        return {}
    except CompileFailed:
        failed = {}
        for symbol in symbols:
            try:
                device.prepare((symbol,))
            except CompileFailed as error:
                failed[symbol.name] = error
        return failed


def _answered(need: tuple[str, str], symbols: Iterable[Symbol], failed: Mapping[str, CompileFailed]) -> Capability:
    """By the symbols of a program that the need rests on."""
    rests = {symbol.name for found in capability.rests_on(*need).values() for symbol in found}
    wrong = [symbol.name for symbol in symbols if symbol.name in rests and symbol.name in failed]
    why = "; ".join(f"{name}: {failed[name].log[:REASON_MOST] or failed[name].message}" for name in wrong)
    return Capability(*need, not wrong, why)


# -------------------------------------------------------------------------------------------------------------- shapes


def _shapes(op: Op, kv: KvPool) -> Iterator[Capability]:
    match op:
        case Attention() | RopeStore():
            yield from _heads(op, kv)
        case DeltaNet():
            most = delta.KEY_DIMS[-1]
            if max(op.key_dim, op.value_dim) > most:
                heads = f"heads of {op.key_dim} x {op.value_dim}"
                yield Capability("DeltaNet", heads, False, f"at most {most}")
        case Experts(routing=routing):
            used, experts = mixers.USED_MOST, min(mixers.ROUTE_MOST[-1], many.MAX_EXPERTS)
            if routing.used > used or routing.experts > experts:
                chosen = f"{routing.used} of {routing.experts} experts"
                yield Capability("Experts", chosen, False, f"at most {used} of {experts} can be chosen")


def _heads(op: Attention | RopeStore, kv: KvPool) -> Iterator[Capability]:
    name, dims = type(op).__name__, op.head_dim
    there = attention.heads_of(kv.type.name.lower())
    if dims not in there:
        sizes = ", ".join(map(str, there))
        yield Capability(name, f"head_dim {dims}", False, f"kernels over {kv.type.name} are built for {sizes}")
    if op.kv_heads and op.heads % op.kv_heads:
        yield Capability(name, f"{op.heads} heads", False, f"no multiple of {op.kv_heads} KV heads")


def _vectors(op: Op, weights: Mapping[str, TensorView]) -> Iterator[Capability]:
    vectors: tuple[Weight, ...] = ()
    match op:
        case DeltaNet():
            vectors = (op.conv, op.dt_bias, op.a, op.norm)
        case Experts():
            vectors = vectors_of(op)
    for vector in vectors:
        if weights[vector.name].type not in FLOATS:
            kind = weights[vector.name].type.name
            yield Capability(type(op).__name__, f"{kind} vectors", False, f"{vector.name} must be floats")
