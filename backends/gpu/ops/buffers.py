"""What launches say of activations: where a buffer lies, and where its quantised form goes. Addresses are numbers, 0
where there is none; all activations are float32.
"""

from __future__ import annotations

from dataclasses import dataclass

from backends.gpu.launch import Symbol, params

PLANES = "hi, lo, scale, sum"
"""Parameters of a kernel that can quantise what it computes."""


def symbol(name: str, file: str, op: str, text: str, threads: int, *, load128: bool = True) -> Symbol:
    """A symbol that depends on no type."""
    return Symbol(name, file, op, params(text), threads, needs=("load128",) if load128 else ())


@dataclass(frozen=True)
class Rows:
    """A buffer: its address, and floats from one row to the next. Rows that begin at multiples of 16 bytes are fast."""

    at: int
    stride: int


NONE = Rows(0, 0)


@dataclass(frozen=True)
class Planes:
    """Where a quantised result goes (kernels/quantised.h), all four or none; its width is a multiple of 32."""

    hi: int = 0
    lo: int = 0
    scale: int = 0
    sum: int = 0

    @property
    def addresses(self) -> tuple[int, int, int, int]:
        return self.hi, self.lo, self.scale, self.sum

    def check(self, width: int) -> None:
        if self.hi and width % 32:
            raise ValueError(f"rows of {width} columns are not quantised in blocks of 32")
