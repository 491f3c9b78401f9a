"""Kernels by name, and launches of them as data.

A `Symbol` is one entry of the kernel trees: `<op>_<type>`, the file it stands in, its parameters in order and what the
compiled code must contain. A `Launch` is one call: which symbol, how many blocks, how much block memory, which
arguments. Functions in `backends.gpu.ops` make launches from shapes and addresses; whoever runs them (a driver's
stream, a recorded graph, the emulation in tests) needs to know nothing of the op.
"""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["pointer", "i32", "u32", "i64", "u64", "float"]
Instruction = Literal["dot4", "matrix", "load128"]

SLOT = 8
"""Bytes of an argument in memory; a shorter one lies at the beginning."""
_PACK = {"pointer": "Q", "i32": "i4x", "u32": "I4x", "i64": "q", "u64": "Q", "float": "f4x"}
MODULES = ("quants", "linear", "many", "attention", "mixers", "moves", "sampling")
"""Modules of `backends.gpu.ops`, each with a tuple SYMBOLS."""


@dataclass(frozen=True)
class Param:
    """One parameter of an entry, as the device code declares it."""

    name: str
    kind: Kind = "pointer"

    @functools.cached_property
    def packing(self) -> struct.Struct:
        """How it lies in its slot."""
        return struct.Struct(f"<{_PACK[self.kind]}")


@dataclass(frozen=True)
class Symbol:
    """One kernel. `file`: the entry file's name without its ending; `op` and `types` as capability tables name them
    (an op that does not depend on a type has none); `threads` of a block; `quant`: what -DQUANT restricts its file to,
    empty where the file has no types."""

    name: str
    file: str
    op: str
    params: tuple[Param, ...]
    threads: int
    types: tuple[str, ...] = ()
    quant: str = ""
    needs: tuple[Instruction, ...] = ()

    @functools.cached_property
    def packing(self) -> struct.Struct:
        """How its arguments lie in memory, a slot for each: they are written in one go, hundreds of launches a step."""
        return struct.Struct("<" + "".join(_PACK[param.kind] for param in self.params))


@dataclass(frozen=True)
class Launch:
    """`grid` blocks (x, y, z) of the symbol's threads; `shared`: bytes of block memory beside what the kernel declares;
    one argument for each parameter: an address, an int or a float. Blocks may run in any order."""

    symbol: Symbol
    grid: tuple[int, int, int]
    args: tuple[int | float, ...]
    shared: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        if len(self.args) != len(self.symbol.params):
            raise ValueError(f"{self.symbol.name} takes {len(self.symbol.params)} arguments, not {len(self.args)}")
        if min(self.grid) < 1:
            raise ValueError(f"{self.symbol.name} in a grid of {self.grid}")


def params(text: str) -> tuple[Param, ...]:
    """From `out, src, i32 rows, float eps`: names alone are pointers."""
    found = []
    for part in text.split(","):
        kind, _, name = part.strip().rpartition(" ")
        found.append(Param(name, kind or "pointer"))  # type: ignore[arg-type]
    return tuple(found)
