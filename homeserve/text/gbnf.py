"""llama.cpp's grammars (GBNF) as Lark, which llguidance takes. The conversion is llguidance's own; what it stumbles
over is written otherwise before:

- rules whose names fall together in Lark (`a-b` and `a_b`), or that are called `start`, get names of their own;
- characters that are written as `\\uXXXX`, or as `\\xXX` beyond ASCII, are written as themselves;
- a repetition of nothing but a repetition, `("a"+){2}`, gets an empty text beside the inner one, which the conversion
  would leave without its parentheses.

What the compiler says of the Lark is told with the rule and the line that it came from (`rule_at`).

One thing stays different: what llguidance takes for one word (a rule without recursion) is read as far as it goes. So
where such a word may end with blanks and blanks follow, the first take them all. What comes out fits the grammar.
"""

from __future__ import annotations

import re

from llguidance.gbnf_to_lark import gbnf_to_lark

_TOKEN = re.compile(
    r"""
    (?P<text>"(?:\\.|[^"\\])*")         # a literal
  | (?P<set>\[(?:\\.|[^\]\\])*\])       # a class of characters
  | (?P<comment>\#[^\r\n]*)
  | (?P<repeated>(?:[*+?]|\{[^}]*\})(?=\s*\)\s*[*+?{]))
  | (?P<count>\{[^}]*\})
  | (?P<name>[\w-]+)
    """,
    re.VERBOSE | re.DOTALL,
)
_DEFINES = re.compile(r"\s*::=")
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)


def lark_of_gbnf(grammar: str) -> str:
    """Raises ValueError."""
    names = _Names()
    try:
        return gbnf_to_lark(_TOKEN.sub(lambda found: _rewritten(found, names), grammar))
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    except Exception as error:  # noqa: BLE001  the converter raises bare Exception for what is wrong in the grammar
        raise ValueError(f"is no GBNF: {error}") from None


def rule_at(grammar: str, lark: str, line: int) -> tuple[str, int] | None:
    """The rule of `grammar` that stands on a line (1 the first) of the Lark made of it, and the line where it begins;
    None where there is none."""
    above = reversed(lark.splitlines()[:line])
    made = next((found[1] for text in above if (found := re.match(r"(\w+):", text))), None)
    if made is None:
        return None
    names = _Names()
    rules: dict[str, tuple[str, int]] = {"start": ("root", 1)}
    for found in _TOKEN.finditer(grammar):
        if found.lastgroup == "name":
            given = names(found[0])
            if _DEFINES.match(grammar, found.end()):
                key = "start" if given == "root" else _key(given)
                rules[key] = (found[0], grammar.count("\n", 0, found.start()) + 1)
    return rules.get(_key(made))


def _key(name: str) -> str:
    """The same for all names that fall together in Lark."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


class _Names:
    """Names of rules that stay different in Lark, where case and `-` or `_` make none."""

    def __init__(self) -> None:
        self._given: dict[str, str] = {}
        self._taken = {"start", "root"}

    def __call__(self, name: str) -> str:
        if name == "root":
            return name
        if name not in self._given:
            self._given[name] = self._free(name)
        return self._given[name]

    def _free(self, name: str) -> str:
        made, number = name, 2
        while (key := _key(made)) in self._taken:
            made, number = f"{name}-n{number}", number + 1
        self._taken.add(key)
        return made


def _rewritten(found: re.Match[str], names: _Names) -> str:
    whole = found[0]
    if found.lastgroup == "name":
        return names(whole)
    if found.lastgroup in ("text", "set"):
        return _ESCAPE.sub(_character, whole)
    if found.lastgroup == "repeated":
        return f'{whole} ""'
    return whole


def _character(found: re.Match[str]) -> str:
    digits = found[1] or found[2] or found[3]
    if digits is None:
        return found[0]
    point = int(digits, 16)
    if point < 0x80:
        return f"\\x{point:02x}"
    if 0xD800 <= point < 0xE000 or point > 0x10FFFF:
        raise ValueError(f"{found[0]} is no character")
    return chr(point)
