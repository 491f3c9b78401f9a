"""The number types of checkpoint tensors: one table, shared by readers, backends and tests.

Ids and block sizes are those of the GGUF format. A tensor is a sequence of *blocks* of `block_len` elements, each
`block_bytes` long; the rows of a matrix are whole numbers of blocks and lie one after the other without padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True)
class BlockFormat:
    """How many elements a block holds, how many bytes it takes, and its GGUF type id."""

    gguf_id: int
    block_len: int
    block_bytes: int


class QuantType(Enum):
    """A tensor's storage type. The value is its `BlockFormat`; the name is the GGUF name."""

    F32 = BlockFormat(0, 1, 4)
    F16 = BlockFormat(1, 1, 2)
    Q4_0 = BlockFormat(2, 32, 18)
    Q4_1 = BlockFormat(3, 32, 20)
    Q5_0 = BlockFormat(6, 32, 22)
    Q5_1 = BlockFormat(7, 32, 24)
    Q8_0 = BlockFormat(8, 32, 34)
    Q2_K = BlockFormat(10, 256, 84)
    Q3_K = BlockFormat(11, 256, 110)
    Q4_K = BlockFormat(12, 256, 144)
    Q5_K = BlockFormat(13, 256, 176)
    Q6_K = BlockFormat(14, 256, 210)
    IQ2_XXS = BlockFormat(16, 256, 66)
    IQ2_XS = BlockFormat(17, 256, 74)
    IQ3_XXS = BlockFormat(18, 256, 98)
    IQ1_S = BlockFormat(19, 256, 50)
    IQ4_NL = BlockFormat(20, 32, 18)
    IQ3_S = BlockFormat(21, 256, 110)
    IQ2_S = BlockFormat(22, 256, 82)
    IQ4_XS = BlockFormat(23, 256, 136)
    I8 = BlockFormat(24, 1, 1)
    I16 = BlockFormat(25, 1, 2)
    I32 = BlockFormat(26, 1, 4)
    I64 = BlockFormat(27, 1, 8)
    F64 = BlockFormat(28, 1, 8)
    IQ1_M = BlockFormat(29, 256, 56)
    BF16 = BlockFormat(30, 1, 2)
    TQ1_0 = BlockFormat(34, 256, 54)
    TQ2_0 = BlockFormat(35, 256, 66)
    MXFP4 = BlockFormat(39, 32, 17)
    NVFP4 = BlockFormat(40, 64, 36)
    F8 = BlockFormat(1000, 1, 1)
    """A float of 8 bits: 4 of exponent (bias 7), 3 of mantissa, largest 448, no infinities. In KV pools only."""

    @property
    def gguf_id(self) -> int:
        return self.value.gguf_id

    @property
    def block_len(self) -> int:
        """Elements in one block."""
        return self.value.block_len

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.value.block_bytes

    def row_bytes(self, cols: int) -> int:
        """Bytes of one row of `cols` elements. Raises ValueError where `cols` is not a whole number of blocks."""
        blocks, rest = divmod(cols, self.block_len)
        if rest:
            raise ValueError(f"a row of {cols} elements is no whole number of {self.name} blocks of {self.block_len}")
        return blocks * self.block_bytes


OWN_IDS = 1000
"""Ids from here on are ours: no GGUF file holds these types."""
BY_GGUF_ID: dict[int, QuantType] = {quant.gguf_id: quant for quant in QuantType if quant.gguf_id < OWN_IDS}
