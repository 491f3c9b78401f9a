"""How one setting is said and checked: the same conversion for a flag, a variable and a line of a file."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from budget.ranks import CPU_RANKS_MOST
from homeserve.errors import SettingError

VECTOR_MAX = 64
NUMBER_MAX = 1 << 20
"""Numbers of a vector, and the largest of them."""
DRAFTS_MOST = 8
"""Drafts of a round."""
LONG_DIGITS = 12
"""A number with more is too large for every setting."""

_YES = {"on", "yes", "true", "1"}
_NO = {"off", "no", "false", "0"}
_NOTHING = {"off", "none", "false"}


@dataclass(frozen=True)
class Option:
    """How one field of `Settings` is said and checked.

    `kind`: text | path | folder (a path, or off) | int | float | switch (on|off) | flag (present or not; on|off outside
    argv) | vector (whole numbers with commas between, one for each rank; () is auto) | devices | drafts (auto, off, or
    how many, as text).
    `inert` lists the only values that an option without its feature takes (the whole option is then for later).
    """

    kind: str
    help: str
    group: str
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()
    inert: tuple[str, ...] = ()
    metavar: str = ""
    env: str = ""
    zero: str = ""
    """What 0 means, where it means "choose for me"."""

    def convert(self, value: object, said: str, name: str) -> Any:
        """The typed value of what a person wrote. Raises SettingError that names `said` (the flag, variable or key)."""
        if self.inert:
            return self._inert(value, said, name)
        if self.kind == "vector":
            return _vector(value, said, name)
        if self.kind == "devices":
            return _devices(value, said, name)
        if self.kind == "drafts":
            return _drafts(value, said, name)
        if self.kind in ("text", "path"):
            return self._text(value, said, name)
        if self.kind == "folder":
            return None if str(value).strip().lower() in _NOTHING else self._text(value, said, name)
        if self.kind in ("switch", "flag"):
            return self._switch(value, said, name)
        return self._number(value, said, name)

    def _inert(self, value: object, said: str, name: str) -> str:
        text = str(value).strip().lower()
        if text not in self.inert:
            raise SettingError(
                f"{said}: this version does not have {self.help}; {value!r} cannot be used",
                field=name,
                fix=f"leave it out, or use {' or '.join(self.inert)}",
            )
        return text

    def _text(self, value: object, said: str, name: str) -> str:
        if not isinstance(value, str):
            raise SettingError(f"{said}: expected text, found {value!r}", field=name, fix=f"write {name} as text")
        text = value.strip()
        if not text:
            raise SettingError(f"{said}: is empty", field=name, fix="give it a value or leave it out")
        if "\0" in text:
            raise SettingError(f"{said}: holds a zero byte", field=name, fix="remove it")
        if self.choices and text not in self.choices:
            what = f"{said}: {text!r} is not one of them{near(text, self.choices)}"
            raise SettingError(what, field=name, fix=f"use {' or '.join(self.choices)}")
        return os.path.expanduser(text) if self.kind in ("path", "folder") else text

    def _switch(self, value: object, said: str, name: str) -> bool:
        if isinstance(value, bool):
            return value
        text = str(value).strip().lower()
        if text in _YES:
            return True
        if text in _NO:
            return False
        raise SettingError(f"{said}: expected on or off, found {value!r}", field=name, fix="use on or off")

    def _number(self, value: object, said: str, name: str) -> int | float:
        kind = "a whole number" if self.kind == "int" else "a number"
        bad = SettingError(f"{said}: expected {kind}, found {value!r}", field=name, fix=f"use {self.range_text()}")
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise bad
        if self.kind == "int" and isinstance(value, float):
            raise bad
        number: int | float
        outside = SettingError(
            f"{said}: {_short(value)} is outside {self.range_text()}", field=name, fix=f"use {self.range_text()}"
        )
        if self.kind == "int" and isinstance(value, str) and is_long_number(value.strip()):
            raise outside
        try:
            number = int(value) if self.kind == "int" else float(value)
        except (ValueError, OverflowError):
            raise bad from None
        low, high = self.low, self.high
        if number != number or (low is not None and number < low) or (high is not None and number > high):
            raise outside
        return number

    def range_text(self) -> str:
        text = f"{_plain(self.low)} to {_plain(self.high)}"
        return f"{text} (0 = {self.zero})" if self.zero else text


def _vector(value: object, said: str, name: str) -> tuple[int, ...]:
    """Of `2,1,1`, in a file also of a list; () for auto."""
    text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    if text.strip().lower() == "auto":
        return ()
    fix = "write whole numbers from 1 on with commas between, such as 30,17,17"
    parts = text.split(",")
    if len(parts) > VECTOR_MAX:
        raise SettingError(f"{said}: {len(parts)} numbers", field=name, fix=f"give at most {VECTOR_MAX}")
    numbers = []
    for rank, part in enumerate(parts):
        word = part.strip()
        if is_long_number(word):
            raise SettingError(f"{said}: {_short(word)} is outside 1 to {NUMBER_MAX}", field=name, fix=fix)
        if not word.isascii() or not word.removeprefix("-").isdigit():
            raise SettingError(f"{said}: {word[:40]!r} is not a whole number", field=name, fix=fix)
        number = int(word)
        if not 1 <= number <= NUMBER_MAX:
            what = f"{said}: {number} is outside 1 to {NUMBER_MAX}"
            raise SettingError(f"{what}: rank {rank} must have a part" if number < 1 else what, field=name, fix=fix)
        numbers.append(number)
    return tuple(numbers)


def _devices(value: object, said: str, name: str) -> str:
    """`auto`; `cpu`, or `cpu:N` for N ranks on the CPU, from 1 on; or cards with commas between, each as `cuda:N` or
    `rocm:N`, by its UUID or its PCI address."""
    text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    words = [word.strip() for word in text.split(",")]
    if not all(words):
        raise SettingError(f"{said}: {text[:40]!r} has an empty word", field=name, fix=_DEVICES_FIX)
    if len(words) > VECTOR_MAX:
        raise SettingError(f"{said}: {len(words)} devices", field=name, fix=f"name at most {VECTOR_MAX}")
    kinds = {_is_card(word) for word in words}
    if kinds == {True}:
        return ",".join(map(_card, words))
    if len(words) == 1:
        return _on_cpu(words[0].lower(), said, name)
    if True not in kinds:
        fix = "use cpu:N for N ranks on the CPU, or name cards"
        raise SettingError(f"{said}: {text[:40]!r} is not a list of cards", field=name, fix=fix)
    mixed = next(word for word in words if not _is_card(word))
    if mixed.lower().partition(":")[0] == "cpu":
        what = f"{said}: cards and the CPU in one fleet are not in this version ({text[:60]})"
        raise SettingError(what, field=name, fix="name the cards alone, or cpu:N alone")
    raise SettingError(f"{said}: {mixed[:60]!r} is no card", field=name, fix=_DEVICES_FIX)


_DEVICES_FIX = (
    f"use auto, cpu:N for N ranks on the CPU (1 to {CPU_RANKS_MOST}), or cards as homeserve probe lists them: cuda:0,"
    " rocm:0, a UUID or a PCI address, with commas between"
)
_NUMBERED = re.compile(r"(cuda|rocm)(?::(\d{1,3}))?", re.I)
_UUID = re.compile(r"(GPU|MIG)-[0-9A-Za-z/-]{4,80}", re.I)
_PCI = re.compile(r"(?:([0-9A-Fa-f]{4,8}):)?([0-9A-Fa-f]{2}):([0-9A-Fa-f]{2})(?:\.([0-7]))?")
"""What names a card, as the probe spells it."""


def _is_card(word: str) -> bool:
    return any(form.fullmatch(word) for form in (_NUMBERED, _UUID, _PCI))


def _card(word: str) -> str:
    """`cuda:0`, a PCI address with all its parts, or a UUID as it was written."""
    if numbered := _NUMBERED.fullmatch(word):
        return f"{numbered[1].lower()}:{int(numbered[2] or 0)}"
    if place := _PCI.fullmatch(word):
        return f"{int(place[1] or '0', 16):04x}:{place[2]}:{place[3]}.{place[4] or 0}".lower()
    return word


def _on_cpu(text: str, said: str, name: str) -> str:
    fix = f"use cpu, or cpu:N for N ranks, 1 to {CPU_RANKS_MOST}"
    if text in ("auto", "cpu"):
        return text
    count = text.removeprefix("cpu:")
    if count == text or not (count.isascii() and count.isdigit()):
        raise SettingError(f"{said}: {text[:60]!r} is no device", field=name, fix=_DEVICES_FIX)
    if len(count) > 6 or int(count) > CPU_RANKS_MOST:
        what = f"{said}: {text[:40]} is more ranks than the CPU of one box may have: {CPU_RANKS_MOST}"
        raise SettingError(what, field=name, fix=fix)
    if int(count) == 0:
        raise SettingError(f"{said}: {text[:40]}: the number is how many ranks there are", field=name, fix=fix)
    return f"cpu:{int(count)}" if int(count) > 1 else "cpu"


def _drafts(value: object, said: str, name: str) -> str:
    """`auto`, `off`, or how many: 1 to DRAFTS_MOST."""
    text, fix = str(value).strip().lower(), f"use auto, off, or 1 to {DRAFTS_MOST}"
    if text in ("auto", *_NOTHING):
        return "auto" if text == "auto" else "off"
    digits = text.removeprefix("-")
    if isinstance(value, bool) or not (digits.isascii() and digits.isdigit()):
        raise SettingError(f"{said}: {text[:40]!r} is not auto, off or a number of drafts", field=name, fix=fix)
    if is_long_number(text) or not 1 <= int(text) <= DRAFTS_MOST:
        what = f"{said}: {_short(text)} is outside 1 to {DRAFTS_MOST}, the drafts for which a round has room"
        raise SettingError(what, field=name, fix=fix)
    return str(int(text))


def is_long_number(word: str) -> bool:
    """Whole, and longer than any setting takes: told as too large, and not converted."""
    digits = word.removeprefix("-")
    return len(digits.lstrip("0")) > LONG_DIGITS and digits.isascii() and digits.isdigit()


def _short(value: object) -> str:
    text = str(value).strip()
    return text if len(text) <= 40 else f"{text[:20]}… ({len(text)} digits)"


def _plain(bound: float | None) -> str:
    return "any" if bound is None else f"{bound:g}" if abs(bound) < 1e6 else str(int(bound))


def near(word: str, known: Sequence[str]) -> str:
    """`; did you mean X?` where X is close, else nothing."""
    import difflib

    found = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {found[0]}?" if found else ""
