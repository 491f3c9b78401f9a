"""DRY, written out plainly."""

from __future__ import annotations

from collections.abc import Sequence

from homeserve.wire.records import Dry
from homeserve.worker.past import PENALTY_MAX, TokensWith, no_vocabulary


def plain_dry(tokens: Sequence[int], dry: Dry, tokens_with: TokensWith = no_vocabulary) -> dict[int, float]:
    """The rule, one place after the other: how far back from here do the tokens equal the last ones?"""
    breaking = {token for text in dry.breakers for token in tokens_with(text)}
    window = list(tokens) if dry.last_n < 0 else list(tokens)[len(tokens) - min(dry.last_n, len(tokens)) :]
    if len(window) <= dry.allowed_len:
        return {}
    longest: dict[int, int] = {}
    for place, following in enumerate(window[1:]):
        length = 0
        while length <= place and window[place - length] == window[-1 - length]:
            if window[-1 - length] in breaking:
                break
            length += 1
        if length >= dry.allowed_len and following not in breaking:
            longest[following] = max(longest.get(following, 0), length)
    losses = {token: dry.multiplier * dry.base ** (length - dry.allowed_len) for token, length in longest.items()}
    return {token: min(loss, PENALTY_MAX) for token, loss in losses.items()}
