"""Sizes that the native code and its recorder agree on."""

from __future__ import annotations

FLOAT_BYTES = 4
LANES = 16
"""Floats that a row of a buffer is padded to; rows of a weight in one group."""


def padded(width: int) -> int:
    """Floats from one row of a buffer to the next."""
    return -(-width // LANES) * LANES
