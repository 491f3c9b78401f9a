"""Fields of a request that `/set` and the command's flags fill in. Pure."""

from __future__ import annotations

import difflib

from homeserve.errors import SettingError
from homeserve.settings import Option

FIELDS: dict[str, Option] = {
    "temperature": Option("float", "0 is always the likeliest token", "", low=0, high=2),
    "top_p": Option("float", "the likeliest tokens that have so much together", "", low=0, high=1),
    "top_k": Option("int", "so many of the likeliest tokens", "", low=0, high=1 << 20),
    "min_p": Option("float", "tokens with this share of the likeliest one's chance", "", low=0, high=1),
    "max_tokens": Option("int", "longest answer", "", low=1, high=1 << 24),
    "seed": Option("int", "the same seed gives the same answer", "", low=0, high=(1 << 63) - 1),
    "repetition_penalty": Option("float", "over 1: what was said is less likely", "", low=0.01, high=10),
    "reasoning_effort": Option(
        "text", "how long to think", "", choices=("none", "minimal", "low", "medium", "high", "xhigh")
    ),
}


def field_named(name: str) -> str:
    """The field that is meant. Raises SettingError."""
    wanted = name.replace("-", "_").lower()
    if wanted in FIELDS:
        return wanted
    near = difflib.get_close_matches(wanted, FIELDS, 1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise SettingError(f"there is no {name!r} to set{hint}", field="set", fix=f"there is {', '.join(FIELDS)}")


def value_of(name: str, text: str) -> object:
    """Raises SettingError."""
    return FIELDS[name].convert(text, name, name)
