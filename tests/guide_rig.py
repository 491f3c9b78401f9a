"""Vocabularies for guides, and what may be asked with them, without a checkpoint.

`WORDS` is a vocabulary for the toy model in `draft_rig`: 24 ids, one of which spells two letters and three no text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from homeserve.wire.records import Guide, pack_ints
from homeserve.worker.vocabulary import Read, Source, Spelled, Vocabulary, trie_of

WORDS = [*(bytes([at]) for at in b'0123456789{}":,abc[]'), b"ab", b"<think>", b"</think>", b"<end>"]
AB, THINK, CLOSE, END = 20, 21, 22, 23
SPECIAL = frozenset({THINK, CLOSE, END})


class KnownVocabulary(Vocabulary):
    """A vocabulary that is told. `encode` cuts a text into single bytes where it is not told either."""

    def __init__(self, spellings: Sequence[bytes] = tuple(WORDS), special: frozenset[int] = SPECIAL) -> None:
        nothing: Any = None
        super().__init__(Source("", nothing), len(spellings))
        self.spellings = tuple(spellings)
        of_byte = {spelled: token for token, spelled in reversed(list(enumerate(spellings)))}

        def encode(text: str) -> list[int]:
            return [of_byte[bytes([at])] for at in text.encode()]

        self._read = Read(Spelled(spellings), special, encode)
        self._trie = trie_of(self._read.spelled, special, encode)

    def ids(self, text: str) -> list[int]:
        """The tokens of a text: the longest that fit, specials included."""
        left, found = text.encode(), []
        while left:
            token = max(
                (at for at, spelled in enumerate(self.spellings) if spelled and left.startswith(spelled)),
                key=lambda at: len(self.spellings[at]),
            )
            found.append(token)
            left = left[len(self.spellings[token]) :]
        return found

    def text(self, tokens: Sequence[int]) -> str:
        return b"".join(self.spellings[token] for token in tokens).decode("utf-8", "replace")


def json_guide(schema: dict[str, Any], ends: Sequence[int] = (END,), **more: Any) -> Guide:
    """For JSON without white space."""
    options = {"x-guidance": {"whitespace_flexible": False}}
    grammar = json.dumps({"grammars": [{"json_schema": schema | options}]})
    return guide(grammar, ends, **more)


def guide(
    grammar: str = "",
    ends: Sequence[int] = (END,),
    *,
    opens: Sequence[int] = (),
    closes: Sequence[int] = (),
    in_thought: bool = False,
    budget: int = -1,
) -> Guide:
    return Guide(grammar, pack_ints(list(ends)), pack_ints(list(opens)), pack_ints(list(closes)), in_thought, budget)
