"""What cards can do, arch by arch: the only source for dispatch, for `doctor --support` and for docs/SUPPORT.md.

The keys are those of `backends.needs`. Each need rests on entry files of the kernel trees (`NEEDS`); it is answered for
an arch by what is known of their symbols there:

    yes       every symbol was compiled for this arch by the compile gate, with nothing spilled and with the
              instructions that it asks for (docs/kernels.csv has the figures of each)
    no        there is no kernel for the type, or a symbol does not compile for this arch; the reason says which
    unknown   the gate has not gone through this arch. Its code is compiled where a card of it is, and only what came
              out of that is known; until then unknown is no yes

*Compiled is not run.* The arithmetic of each symbol is proven by the emulation (tests/kernel), on no card.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from importlib import import_module

from backends.base import Capability
from backends.gpu.arch import arch
from backends.gpu.launch import MODULES, Symbol
from backends.needs import SHARES
from backends.quant import QuantType

FLOATS = ("F32", "F16", "BF16")
KV_TYPES = (*FLOATS, "Q8_0", "F8")
GATES = ("silu", "gelu", "swiglu_oai")
ROUTES = ("softmax", "sigmoid", "chosen")
VECTORS = ("Norm", "Bias", "Scale", "HeadNorm")
"""Weights that are vectors: made float32 when they are loaded, so any float type will do."""

_LINEAR = ("quantize_rows", "linear_few", "halve_rows", "linear_many")
_EXPERTS = ("route", "group_rows", "quantize_rows", "experts_few", "halve_rows", "experts_many", "experts_combine")
_ATTENTION = ("attention_few", "attention_many", "attention_merge")
_ROWS = ("rows",)

FILES: dict[str, tuple[str, ...]] = {
    "EmbedRows": ("pack", "embed_rows"),
    "Linear": ("pack", *_LINEAR, "dequantize"),
    "Experts": ("pack", *_EXPERTS),
    "Norm": ("norm",),
    "Bias": ("linear_few", "linear_many"),
    "Scale": _ROWS,
    "HeadNorm": ("rope_store",),
    "RopeStore": ("rope_store",),
    "Attention": _ATTENTION,
    "GatedActivation": _ROWS,
    "AddGated": _ROWS,
    "Softcap": _ROWS,
    "SelectRows": _ROWS,
    "DeltaNet": ("delta", "states"),
    "JoinHidden": ("join_hidden",),
    "Zero": _ROWS,
    "SumRows": ("sum_rows",),
    "GatherRows": ("moves",),
    "SendRows": ("moves",),
    "ReceiveRows": ("moves",),
    "MergeAttention": ("merge_attention",),
}
"""Op -> the entry files that it is made of. Those that have types have a symbol for each weight or KV type."""

BY_TYPE = frozenset(
    ("pack", "dequantize", "embed_rows", "linear_few", "linear_many", "experts_few", "experts_many", "rope_store")
) | {"attention_few", "attention_many"}
"""Files whose symbols are of a type each."""


COMPILED = ("sm_86", "sm_89", "sm_120", "gfx1030", "gfx1100", "gfx1103", "gfx1201")
"""Arches for which docs/kernels.csv has every symbol: a test holds the two equal."""

UNKNOWN = "the gate did not go through this arch: what compiles is known on the machine that has the card"

FAILED: Mapping[str, Mapping[str, str]] = {}
"""Arch -> symbol -> why it cannot be used there, of the arches that the gate goes through."""


@cache
def symbols() -> tuple[Symbol, ...]:
    """Every symbol of the kernel trees."""
    found: list[Symbol] = []
    for module in MODULES:
        found += import_module(f"backends.gpu.ops.{module}").SYMBOLS
    return tuple(found)


def table(name: str, failed: Mapping[str, str] | None = None) -> tuple[Capability, ...]:
    """For arch `name`. `failed`: symbols that do not compile there, with the reason (None: as the gate found it).
    Raises UnknownArch for what is no arch's name."""
    facts = arch(name)
    broken = FAILED.get(facts.base, {}) if failed is None else failed
    compiled = facts.base in COMPILED
    return tuple(_answer(op, kind, compiled, broken) for op, kind in _keys())


def count(capabilities: Iterable[Capability]) -> tuple[int, int, int]:
    """How many read yes, no, unknown."""
    oks = [entry.ok for entry in capabilities]
    return oks.count(True), oks.count(False), oks.count(None)


def _answer(op: str, kind: str, compiled: bool, failed: Mapping[str, str]) -> Capability:
    rests = rests_on(op, kind)
    missing = [file for file, found in rests.items() if not found]
    if missing:
        return Capability(op, kind, False, f"no kernel for this type: {', '.join(missing)}")
    broken = [
        f"{symbol.name}: {failed[symbol.name]}" for found in rests.values() for symbol in found if symbol.name in failed
    ]
    if broken:
        return Capability(op, kind, False, "; ".join(broken))
    return Capability(op, kind, True) if compiled else Capability(op, kind, None, UNKNOWN)


def rests_on(op: str, kind: str) -> dict[str, list[Symbol]]:
    """File -> symbols that (op, kind) needs of it."""
    own = kind in QuantType.__members__ and op not in VECTORS and not (kind == "F32" and op in _PLAIN)
    found: dict[str, list[Symbol]] = {}
    for file in FILES[op]:
        there = [symbol for symbol in symbols() if symbol.file == file]
        if op == "GatedActivation":
            there = [symbol for symbol in there if symbol.name == f"gated_activation_{kind}"]
        elif own and file in BY_TYPE:
            there = [symbol for symbol in there if kind in symbol.types]
        found[file] = there
    return found


_PLAIN = frozenset(
    ("AddGated", "Softcap", "SelectRows", "DeltaNet", "JoinHidden", "Zero", "SumRows", "GatherRows", "SendRows")
) | {"ReceiveRows", "MergeAttention"}
"""Ops on rows of activations: F32, whatever the weights are."""


def _keys() -> tuple[tuple[str, str], ...]:
    every = [kind.name for kind in QuantType]
    keys = [(op, kind) for op in ("EmbedRows", "Linear", "Experts") for kind in every]
    keys += [(op, kind) for op in VECTORS for kind in FLOATS]
    keys += [("HeadNorm", "none"), ("RopeStore", "shared rows")]
    keys += [(op, kind) for op in ("RopeStore", "Attention") for kind in KV_TYPES]
    keys += [("Attention", feature) for feature in ("softcap", "sinks", "gated")]
    keys += [(op, gate) for op in ("GatedActivation", "Experts") for gate in GATES]
    keys += [("Experts", f"routing {route}") for route in ROUTES] + [("Experts", "gains")]
    keys += [(op, "F32") for op in ("AddGated", "Softcap", "SelectRows", "DeltaNet", "JoinHidden")]
    return tuple(dict.fromkeys([*keys, *SHARES]))
