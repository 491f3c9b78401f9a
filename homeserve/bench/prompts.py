"""Random prompts of token ids."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Prompts:
    """Drawn from `ids`: no two measures share one, so no cache of a server helps. `answer`: tokens of a decode."""

    source: random.Random
    ids: Sequence[int]
    answer: int = 128

    def draw(self, length: int) -> list[int]:
        return self.source.choices(self.ids, k=length)

    def shorter(self, answer: int) -> Prompts:
        return replace(self, answer=answer)


def ids_below(vocab: int) -> range:
    """Of a vocabulary of which only the size is known. The lowest ids are control tokens in most."""
    return range(min(300, vocab // 2), vocab)
