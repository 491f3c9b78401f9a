"""Marks of a model's formats in the text of its answers.

Many marks are control tokens. What a control token spells is no text: stop strings do not see it, and a client never
hears of it; but who reads the formats has to. So each control token that is (part of) a mark stands in the text as one
character that no text has (a Unicode noncharacter), and the marks are written with the same characters. `<|end|>` that
a model spells with ordinary tokens, say because it was asked about it, is text and stays text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

STAND_INS = "".join(chr(code) for code in range(0xFDD0, 0xFDF0))
_STAND_INS = re.compile(f"[{STAND_INS}]+")


@dataclass(frozen=True)
class Marks:
    """`shown`: control tokens and the character that stands for each; `spelled`: what they spell, and the same."""

    shown: Mapping[int, str] = field(default_factory=dict)
    spelled: Mapping[str, str] = field(default_factory=dict)

    def written(self, mark: str) -> str:
        """A mark as it stands in the text. Longer names first: one may be part of another."""
        for text in sorted(self.spelled, key=len, reverse=True):
            mark = mark.replace(text, self.spelled[text])
        return mark


def marks_of(marks: Iterable[str], control: Iterable[tuple[int, str]]) -> Marks:
    """`control`: the model's control tokens as (id, text). One of a single character is never part of a mark."""
    wanted = tuple(marks)
    parts = [(token, text) for token, text in control if len(text) > 1 and any(text in mark for mark in wanted)]
    assert len({text for _, text in parts}) <= len(STAND_INS), "no format has so many control tokens"
    spelled = dict(zip(dict.fromkeys(text for _, text in parts), STAND_INS, strict=False))
    return Marks({token: spelled[text] for token, text in parts}, spelled)


def visible(text: str) -> str:
    """Without what stands for control tokens."""
    return _STAND_INS.sub("", text)
