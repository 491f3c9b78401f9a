"""What a request may ask of the model that is served, as numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Bounds:
    """`vocab`: token ids below it are the model's. `context`: the most tokens of prompt and answer together.
    `sequences`: the most sequences that can be open at once, running and waiting."""

    vocab: int
    context: int
    sequences: int
