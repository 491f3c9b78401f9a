"""The tables of backends/gpu/kernels/grids.h, made from the `gguf` package.

    python tests/kernel/grid_tables.py > backends/gpu/kernels/grids.h

The types of about one to three bits number short vectors of a table. A vector is packed here into 16 bits: eight values
of two bits (which of 8, 25, 43; or -1, 0, 1), or four of four (which of 4, 12 ... 62; or an odd number itself).
"""

from __future__ import annotations

import gguf.quants
import numpy as np

HEADER = """\
// Vectors that the types of one to three bits number, in 16 bits each: eight values of two bits, the first one lowest,
// or four of four. quants_grids.h says what they mean. Data of llama.cpp (ggml-common.h, MIT licence) as the Python
// package gguf has it; written by tests/kernel/grid_tables.py, do not edit.
#pragma once
"""
TABLES = ("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S")
"""IQ1_M shares IQ1_S's."""


def codes(name: str) -> list[int]:
    """A table's vectors, packed."""
    kind = getattr(gguf.quants, name)
    kind.init_grid()
    vectors = kind.grid.reshape(kind.grid_shape).astype(int)
    if name == "IQ3_S":
        numbers, bits = vectors, 4
    else:
        numbers, bits = np.searchsorted(kind.grid_map, vectors), 16 // kind.grid_shape[1]
    return [int(sum(int(value) << bits * i for i, value in enumerate(vector))) for vector in numbers]


def text() -> str:
    parts = [HEADER]
    for name in TABLES:
        found = [f"0x{code:04x}" for code in codes(name)]
        lines = [", ".join(found[at : at + 16]) for at in range(0, len(found), 16)]
        body = ",\n    ".join(lines)
        parts.append(f"TABLE(u16, {name}_GRID, {len(found)}) = {{\n    {body}}};\n")
    return "\n".join(parts)


if __name__ == "__main__":
    print(text(), end="")
