"""A grammar in llguidance's Lark, rule by rule. Marks that are control tokens are named by their ids: no text has a
control token in it, so a model can write one only where the grammar names it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

ANY_TEXT = r"/(.|\n)*/"


def texts(schema: Any, char: str = r"(.|\n)") -> str:
    """A pattern of any text of the length that a schema asks for."""
    least, most = (schema.get(key) if isinstance(schema, Mapping) else None for key in ("minLength", "maxLength"))
    if not isinstance(least, int) and not isinstance(most, int):
        return f"{char}*"
    return f"{char}{{{least if isinstance(least, int) else 0},{most if isinstance(most, int) else ''}}}"


class LarkRules:
    """`special`: ids of control tokens by their texts."""

    def __init__(self, special: Mapping[str, int]) -> None:
        self._special = dict(special)
        names = sorted((name for name in special if len(name) > 1), key=len, reverse=True)
        self._names = re.compile("|".join(map(re.escape, names))) if names else None
        self._rules: dict[str, str] = {}

    def rule(self, name: str, body: str, options: str = "") -> str:
        """Its name, unique among the rules: the same body again is the same rule."""
        wanted, number = name, 0
        while wanted in self._rules and self._rules[wanted] != f"{options}: {body}":
            number += 1
            wanted = f"{name}_{number}"
        self._rules[wanted] = f"{options}: {body}"
        return wanted

    def text(self, start: str) -> str:
        """The whole grammar; `start` is the body of its start rule."""
        return "\n".join([f"start: {start}", *(f"{name}{rest}" for name, rest in self._rules.items())])

    def written(self, text: str) -> str:
        """A fixed text, control tokens in it by their ids."""
        parts, done = [], 0
        for found in self._names.finditer(text) if self._names else ():
            parts += [json.dumps(text[done : found.start()], ensure_ascii=False), f"<[{self._special[found[0]]}]>"]
            done = found.end()
        parts.append(json.dumps(text[done:], ensure_ascii=False))
        return " ".join(part for part in parts if part != '""') or '""'

    def begins_with_token(self, mark: str) -> bool:
        found = self._names.match(mark) if self._names else None
        return found is not None

    def through(self, mark: str, pattern: str = ANY_TEXT) -> str:
        """Text that fits `pattern`, written /so/, up to the first `mark`, and the mark."""
        token = self._names.search(mark) if self._names else None
        if token is None:
            return self.rule("until", f"{pattern} {self.written(mark)}", "[lazy]")
        # No text has the token, so the text ends before it, with what of the mark is spelled there.
        spelled = re.escape(mark[: token.start()]).replace("/", r"\/")
        return f"{self.rule('text', f'{pattern[:-1]}{spelled}/')} {self.written(mark[token.start() :])}"

    def schema(self, schema: Any) -> str:
        return f"%json {json.dumps(schema, ensure_ascii=False)}"

    def one_of(self, name: str, bodies: Iterable[str]) -> str:
        return self.rule(name, " | ".join(dict.fromkeys(bodies)))
