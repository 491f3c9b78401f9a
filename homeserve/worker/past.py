"""What a sequence has said so far, as far as its settings look back at it: counts for penalties, order for DRY.

It is made of a sequence's *input* tokens alone, cached ones included (`NewLane.history`), so a preemption, a restart or
a prefix hit gives it back exactly; and what a round of drafts adds can be taken back (`take_back`).

**DRY** takes from a token that would go on a repetition. With the window of the last tokens

    a b c c b c y a b c ?          the history ends with `a b c`, which was there before, with `c` behind it
        3     2                    entry k of `lengths`: how many tokens that end here are those at the end
          ↑     ↑                  so `c` would make a repetition of 3 longer, and `y` one of 2 (`b c`)

a token loses `multiplier * base ** (length - allowed_len)`, for the longest repetition of at least `allowed_len` tokens
that it would go on. A *breaker* is a token whose text has one of `Dry.breakers` in it: no repetition reaches over it,
and it is never punished itself. This is llama.cpp's rule (`llama_sampler_dry_apply`), but for breakers that span
tokens, which break nothing here.

**Cost.** Counted by the distance k from the end, the lengths of a history with one token more come from the old ones in
one pass: `new[k] = old[k] + 1` where the token at k is the new one, else 0; a breaker makes all of them 0. A draw costs
that pass, whatever the text. Only the first one of a lane, and one behind more drafts taken back than are kept, counts
from nothing: the places that end as the history does are compared token by token, until none of them is left. That is
quick in a text, and quadratic in one long repetition; so where it takes too much, the Z algorithm does it, which is
linear everywhere, and slow in Python.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from homeserve.wire.records import Dry, Sampling

Ids = npt.NDArray[np.int64]
Tokens = npt.NDArray[np.int32]
Flags = npt.NDArray[np.bool_]
TokensWith = Callable[[str], frozenset[int]]
"""The tokens whose text has a text in it."""

PENALTY_MAX = 1e37
"""What DRY takes at most: a logit stays a number."""
_FLOAT_MAX_LOG = 88.7228391
"""ln of the largest float32: `base` is raised to no higher a power than fits."""
_KEPT = 8
"""Lengths of so many earlier ends are kept for `take_back`."""
_ROOM = 1024
_COMPARISONS_MAX = 8
"""Comparisons, over the length of the window, that are made before the Z algorithm is taken instead."""


@dataclass(frozen=True)
class Past:
    """What a lane keeps; None for what its settings do not look at."""

    counts: TokenCounts | None = None
    order: TokenOrder | None = None

    def begin(self) -> None:
        """Let be found, beside what else goes on, what the first draw will need."""
        if self.order is not None:
            self.order.begin()

    def add(self, tokens: Tokens, generated: Flags | bool) -> None:
        """The sequence goes on with tokens, int32 `[n]`; `generated` tells which of them are output."""
        if self.counts is not None:
            self.counts.add(tokens, generated)
        if self.order is not None:
            self.order.add(tokens)

    def take_back(self, tokens: Tokens, generated: Flags | bool) -> None:
        """Undo the `add`s of these, the last ones."""
        if self.counts is not None:
            self.counts.take_back(tokens, generated)
        if self.order is not None:
            self.order.take_back(len(tokens))


def no_vocabulary(text: str) -> frozenset[int]:
    """For lanes that were given none. Raises RuntimeError."""
    raise RuntimeError(f"which tokens have {text!r} in them is not known here: there is no vocabulary")


def looks_back(sampling: Sampling) -> bool:
    """Whether a request's settings look at the tokens before."""
    return _counts(sampling) or sampling.dry is not None


def past_of(sampling: Sampling, vocab: int, tokens_with: TokensWith) -> Past | None:
    """An empty past for these settings; None where nothing looks back."""
    if not looks_back(sampling):
        return None
    counts = TokenCounts(vocab) if _counts(sampling) else None
    return Past(counts, TokenOrder(sampling.dry, tokens_with) if sampling.dry is not None else None)


def _counts(sampling: Sampling) -> bool:
    return sampling.repetition_penalty != 1.0 or sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0


class TokenCounts:
    """Which tokens a sequence has seen, and how often each was generated: what penalties need."""

    def __init__(self, vocab: int) -> None:
        self._count = np.zeros(vocab, np.int32)
        self._generated = np.zeros(vocab, np.int32)

    def add(self, tokens: Tokens, generated: Flags | bool) -> None:
        np.add.at(self._count, tokens, 1)
        np.add.at(self._generated, tokens, np.asarray(generated, np.int32))

    def take_back(self, tokens: Tokens, generated: Flags | bool) -> None:
        np.subtract.at(self._count, tokens, 1)
        np.subtract.at(self._generated, tokens, np.asarray(generated, np.int32))

    def seen(self) -> Ids:
        """Ids of all tokens so far."""
        return np.flatnonzero(self._count)

    def generated(self) -> tuple[Ids, npt.NDArray[np.int32]]:
        """Ids of generated tokens, and their counts."""
        ids = np.flatnonzero(self._generated)
        return ids, self._generated[ids]


class TokenOrder:
    """The tokens of a sequence in their order, and what DRY takes from those that would repeat."""

    def __init__(self, dry: Dry, tokens_with: TokensWith) -> None:
        self._dry = dry
        self._tokens_with = tokens_with
        self._breaking: frozenset[int] | None = None
        self._finding: Future[frozenset[int]] | None = None
        self._tokens = np.zeros(_ROOM, np.int32)
        self._len = 0
        self._lengths: deque[tuple[int, Tokens]] = deque(maxlen=_KEPT)
        """(tokens so far, lengths at that end), rising."""

    def begin(self) -> None:
        """Look for the breakers in a thread: the first lane that asks has a vocabulary made. The first draw waits."""
        if self._dry.breakers and self._finding is None and self._breaking is None:
            pool = ThreadPoolExecutor(1, "breakers")
            self._finding = pool.submit(self._found)
            pool.shutdown(wait=False)

    def add(self, tokens: Tokens) -> None:
        end = self._len + len(tokens)
        if end > len(self._tokens):
            self._tokens = np.concatenate((self._tokens[: self._len], np.zeros(end + _ROOM, np.int32)))
        self._tokens[self._len : end] = tokens
        self._len = end

    def take_back(self, count: int) -> None:
        self._len -= count
        while self._lengths and self._lengths[-1][0] > self._len:
            self._lengths.pop()

    def tokens(self) -> list[int]:
        found: list[int] = self._tokens[: self._len].tolist()
        return found

    def penalties(self) -> tuple[Ids, npt.NDArray[np.float64]]:
        """Ids of the tokens that would go on a repetition, ascending, and what each loses."""
        dry, window = self._dry, self._window(self._len)
        if window <= max(1, dry.allowed_len):
            return np.zeros(0, np.int64), np.zeros(0)
        # Distances 1 ... window - 1; no repetition begins before the window.
        lengths = np.minimum(self._now()[1:], np.arange(window - 1, 0, -1))
        before = np.flatnonzero(lengths >= dry.allowed_len)
        following = self._backwards(self._len)[before]
        if not len(before):
            return np.zeros(0, np.int64), np.zeros(0)
        # By token, one more than the longest repetition that it would go on; 0: none.
        longest = np.zeros(int(following.max()) + 1, np.int64)
        np.maximum.at(longest, following, lengths[before] + 1)
        ids = np.array([token for token in np.flatnonzero(longest) if token not in self._breakers()], np.int64)
        return ids, _losses(dry, longest[ids] - 1)

    def _window(self, end: int) -> int:
        return end if self._dry.last_n < 0 else min(end, self._dry.last_n)

    def _backwards(self, end: int) -> Tokens:
        """The tokens before `end`, the last one first."""
        return self._tokens[:end][::-1]

    def _breakers(self) -> frozenset[int]:
        if self._breaking is None:
            self._breaking = self._found() if self._finding is None else self._finding.result()
        return self._breaking

    def _found(self) -> frozenset[int]:
        return frozenset[int]().union(*map(self._tokens_with, self._dry.breakers))

    def _now(self) -> Tokens:
        """`[window]`: entry k, how many tokens that end k before the last one are those that the history ends with; 0
        for the last one itself."""
        if not self._lengths or self._len - self._lengths[-1][0] > _KEPT:
            self._lengths.append((self._len, self._from_nothing()))
        while (end := self._lengths[-1][0]) < self._len:
            self._lengths.append((end + 1, self._gone_on(end + 1, self._lengths[-1][1])))
        return self._lengths[-1][1]

    def _gone_on(self, end: int, lengths: Tokens) -> Tokens:
        """The lengths at `end` from those one token before."""
        window, back = self._window(end), self._backwards(end)
        found = np.zeros(window, np.int32)
        if int(back[0]) not in self._breakers():
            count = min(window, len(lengths))
            found[:count] = lengths[:count]
            found += 1
            found *= back[:window] == back[0]
            found[0] = 0
        return found

    def _from_nothing(self) -> Tokens:
        window = self._window(self._len)
        back, breaking = self._backwards(self._len)[:window], self._breakers()
        reach = next((k for k, token in enumerate(back.tolist()) if token in breaking), window)
        found = _compared(back, reach)
        return np.minimum(np.array(_prefix_lengths(back.tolist()), np.int32), reach) if found is None else found


def _compared(tokens: Tokens, reach: int) -> Tokens | None:
    """`_prefix_lengths`, but none above `reach`; None where that takes too many comparisons."""
    lengths = np.zeros(len(tokens), np.int32)
    places, left = np.arange(1, len(tokens)), _COMPARISONS_MAX * len(tokens)
    for length in range(reach):
        if not len(places):
            break
        left -= len(places)
        if left < 0:
            return None
        places = places[: np.searchsorted(places, len(tokens) - length)]
        places = places[tokens[places + length] == tokens[length]]
        lengths[places] = length + 1
    return lengths


def _losses(dry: Dry, lengths: Ids) -> npt.NDArray[np.float64]:
    powers = lengths - dry.allowed_len
    if dry.base > 1.000001:
        powers = np.minimum(powers, int(_FLOAT_MAX_LOG / math.log(dry.base)))
    return np.minimum(dry.multiplier * dry.base ** powers.astype(np.float64), PENALTY_MAX)


def _prefix_lengths(tokens: list[int]) -> list[int]:
    """For each place but the first, how many tokens from there on are those that the list begins with (the Z algorithm:
    a place within a stretch that was compared already is answered by its counterpart at the beginning)."""
    lengths = [0] * len(tokens)
    left = right = 0
    for place in range(1, len(tokens)):
        known = min(lengths[place - left], right - place) if place < right else 0
        if place + known >= right:
            while place + known < len(tokens) and tokens[known] == tokens[place + known]:
                known += 1
            left, right = place, place + known
        lengths[place] = known
    return lengths
