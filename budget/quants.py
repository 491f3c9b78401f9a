"""Mixes of number types in which GGUF files come: bits per weight of a whole model, and where rows can be cut."""

from __future__ import annotations

from collections.abc import Mapping

QUANTS: Mapping[str, float] = {
    "F32": 32.0,
    "BF16": 16.0005,
    "F16": 16.0005,
    "Q8_0": 8.5008,
    "Q6_K": 6.5633,
    "Q5_K_M": 5.7036,
    "Q5_K_S": 5.5704,
    "Q4_K_M": 4.8944,
    "Q4_K_S": 4.6672,
    "MXFP4": 4.63,
    "IQ4_XS": 4.4597,
    "Q3_K_L": 4.2979,
    "Q3_K_M": 3.9960,
    "Q3_K_S": 3.6429,
    "Q2_K": 3.1593,
    "IQ2_M": 2.9294,
    "IQ2_XS": 2.5882,
    "IQ2_XXS": 2.3824,
    "IQ1_M": 2.1460,
}
"""Mixes by falling size, and the bits per weight of a whole file in each.

Measured on Llama-3.1-8B with all its tensors (the table in the README of llama.cpp's quantize tool; MXFP4: the file of
gpt-oss-20b, whose other tensors are wider). Other models, and other makers of the same mix, lie within about 6 % of it:
a larger vocabulary weighs more.
"""

LADDER = ("Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "IQ4_XS", "Q3_K_M", "Q2_K", "IQ2_XS", "IQ2_XXS")
"""The steps down that are worth trying when a model does not fit: each is made for most models, and each is smaller by
a tenth or more."""

_SIMPLE_MIXES = {"Q4_0": 4.64, "Q4_1": 5.11, "Q5_0": 5.57, "Q5_1": 6.04, "IQ4_NL": 4.6818, "Q4_K": 4.8944}


def bits_per_weight(quant: str) -> float | None:
    """Of a whole file in the mix `quant`, spelt in capitals or not; None for one that is not known."""
    name = quant.upper()
    return QUANTS.get(name, _SIMPLE_MIXES.get(name))


def block_weights(quant: str) -> int:
    """How many weights in a row share scales: no shard can be cut inside such a block.

    256 in all K and IQ mixes, 32 in the older ones (and 1 in floating point). An unknown mix is taken as 256, which
    cuts least finely.
    """
    name = quant.upper()
    if name in ("F32", "F16", "BF16"):
        return 1
    if name in ("Q8_0", "Q5_0", "Q5_1", "Q4_0", "Q4_1", "IQ4_NL") or "MXFP4" in name:
        return 32
    return 256
