"""From what a client asked for to a grammar that llguidance compiles, and whether it does: the work of the grammar
helper (`homeserve.text.grammar_worker`), as functions.

    kind and value ──source──▶ one grammar ─┐
    tools ──calls_grammar──▶ another one ───┴─▶ a grammar list ──compiled──▶ Checked

A grammar is compiled against a vocabulary of single bytes and the model's control tokens, and asked what may come
first, and behind that. So nearly every error of its own is found here, and not where the answer begins; what depends on
the model's longer tokens is only how fast it is.

llguidance tells what is wrong with a schema, and not where. The place is found by compiling the schemas inside it, down
to the innermost one that fails alike.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from homeserve.text.gbnf import lark_of_gbnf, rule_at
from homeserve.text.grammar_wire import (
    CHOICE,
    GBNF,
    GRAMMAR_BYTES_LIMIT,
    JSON_OBJECT,
    JSON_SCHEMA,
    LARK,
    PARSER_LIMITS,
    REGEX,
    Calls,
    Check,
    Checked,
)
from homeserve.text.json_schemas import Schema, can_end, children, prepared

PLACE_S = 1.0
"""How long the place of an error is looked for: each look compiles a schema. Then it is told as far as it is known."""
ERROR_CHARS_MAX = 400
_TOO_WIDE = "Current row has"
_NOTHING_FITS = "nothing can ever fit it"
_BYTES = 256
_END = b"<the end of the answer>"
_CHANNEL_MARKS = ("<|start|>", "<|channel|>", "<|message|>")

Entry = dict[str, Any]
"""One of llguidance's grammar list: `json_schema` or `lark_grammar`, and perhaps a `name`."""


class Refused(Exception):
    """Why there is no grammar."""

    def __init__(
        self,
        what: str,
        *,
        unsatisfiable: bool = False,
        of_calls: bool = False,
        function: str = "",
        line: int | None = None,
    ) -> None:
        """`line`: where the compiler found it in its own text."""
        self.unsatisfiable = unsatisfiable
        self.of_calls = of_calls
        self.function = function
        self.line = line
        super().__init__(what)


def byte_tokenizer(vocab: int, special: Mapping[int, str]) -> LLTokenizer:
    """A vocabulary of `vocab` ids with the control tokens where the model has them, the 256 bytes at the first other
    ids, and nothing at the rest."""
    vocab = max(vocab, _BYTES + len(special) + 1)
    texts = [b""] * vocab
    for token, text in special.items():
        if token < vocab:
            texts[token] = text.encode()
    free = [token for token in range(vocab) if not texts[token]]
    for value, token in enumerate(free[:_BYTES]):
        texts[token] = bytes([value])
    end = free[_BYTES]
    texts[end] = _END
    special_ids = [*(token for token in special if token < vocab), end]
    return LLTokenizer(_Bytes(texts, special_ids, end, free[:_BYTES]), eos_token=end, slices=[])


class _Bytes(TokenizerWrapper):
    """What `LLTokenizer` asks of a tokenizer. `of_byte`: the ids of the 256 bytes."""

    def __init__(self, texts: Sequence[bytes], special: Sequence[int], end: int, of_byte: Sequence[int]) -> None:
        self.tokens = texts
        self.special_token_ids = special
        self.eos_token_id = end
        self.bos_token_id = None
        self.is_tokenizer_wrapper = True
        self._of_byte = of_byte

    def __call__(self, text: bytes | str) -> list[int]:
        return [self._of_byte[value] for value in (text.encode() if isinstance(text, str) else text)]


class Compiler:
    """Checks grammars against one vocabulary."""

    def __init__(self, vocab: int, special: Mapping[int, str], clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._tokenizer = byte_tokenizer(vocab, special)
        self._special = {text: token for token, text in special.items()}
        self._limits = LLParserLimits(**PARSER_LIMITS, verbose_errors=False)

    def check(self, asked: Check) -> Checked:
        try:
            return self._checked(asked)
        except Refused as error:
            return Checked(
                error=str(error)[:ERROR_CHARS_MAX],
                unsatisfiable=error.unsatisfiable,
                of_calls=error.of_calls,
                function=error.function,
            )
        except RecursionError:
            return Checked(error="is nested too deeply")
        except MemoryError:
            return Checked(error="needs more memory than a grammar may")

    def _checked(self, asked: Check) -> Checked:
        answer = self._answer(asked) if asked.kind else None
        calls = self._calls(asked.calls) if asked.calls is not None else None
        ignored: list[str] = []
        if answer is not None:
            ignored += self._compiled_answer(asked, answer)
        if calls is not None:
            try:
                ignored += self._compiled([calls])
            except Refused as error:
                raise Refused(f"{error}", of_calls=True) from None
        entries = self._together(answer, calls, in_channels=asked.in_channels)
        grammar = _text(entries)
        if len(grammar.encode()) > GRAMMAR_BYTES_LIMIT:
            raise Refused(f"is larger than {GRAMMAR_BYTES_LIMIT >> 10} KiB as a grammar", of_calls=answer is None)
        return Checked(grammar=grammar, ignored=list(dict.fromkeys(ignored)))

    def _compiled_answer(self, asked: Check, answer: Entry) -> list[str]:
        try:
            return self._compiled([answer])
        except Refused as error:
            if asked.kind == GBNF and not error.unsatisfiable:
                raise Refused(_of_translation(error, asked.value, answer["lark_grammar"])) from None
            raise

    def _together(self, answer: Entry | None, calls: Entry | None, *, in_channels: bool) -> list[Entry]:
        """One grammar list of both. Text in channels has the head of its message before it, with the end of the thought
        before that one."""
        if answer is None or (calls is None and not in_channels):
            return [each for each in (answer, calls) if each is not None]
        text = "head @answer" if in_channels else "@answer"
        start = f"start: {text}" if calls is None else f"start: {text} | @calls"
        if in_channels:
            begins, channel, message = (self._mark(text) for text in _CHANNEL_MARKS)
            start += f'\nhead: ({begins} "assistant")? {channel} "final" {message}'
        entries = [{"lark_grammar": start}, {**answer, "name": "answer"}]
        entries += [] if calls is None else [{**calls, "name": "calls"}]
        self._compiled(entries)
        return entries

    def _mark(self, text: str) -> str:
        """A mark as Lark writes it: a control token by its id, others by their text."""
        token = self._special.get(text)
        return json.dumps(text) if token is None else f"<[{token}]>"

    def _answer(self, asked: Check) -> Entry:
        if asked.kind in (JSON_SCHEMA, JSON_OBJECT):
            self._check_schema(asked.value, asked.strict)
        return _ENTRIES[asked.kind](asked)

    def _check_schema(self, schema: Schema, strict: bool) -> None:
        """Raises Refused, with the place in the schema."""
        try:
            self._compiled([_schema_entry(schema, strict)])
        except Refused as error:
            place, innermost = self._place(schema, strict, error)
            what = f"{place}: {innermost}" if place else str(error)
            raise Refused(what, unsatisfiable=error.unsatisfiable) from None
        if not can_end(schema):
            raise Refused("every value of it would have to hold another one of it", unsatisfiable=True)

    def _place(self, schema: Schema, strict: bool, error: Refused) -> tuple[str, Refused]:
        """The path of the innermost schema that fails like the whole one, and its error; '': the whole."""
        definitions: dict[str, Any] = {}
        if isinstance(schema, dict):
            definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        path, end = "", self._clock() + PLACE_S
        inner: Iterator[tuple[str, Any]] = children(schema)
        while self._clock() < end and (step := next(inner, None)) is not None:
            other = self._error(step[1], definitions, strict)
            if other is None or (str(other) != str(error) and not (error.unsatisfiable and other.unsatisfiable)):
                continue
            path, error, inner = f"{path}.{step[0]}".lstrip("."), other, children(step[1])
        return path, error

    def _error(self, schema: Any, definitions: Mapping[str, Any], strict: bool) -> Refused | None:
        """What is wrong with a schema from inside one with these definitions."""
        if schema is False:
            return Refused("no value fits a schema that is false", unsatisfiable=True)
        if not isinstance(schema, dict):
            return None
        try:
            self._compiled([_schema_entry({**definitions, **schema}, strict)])
        except Refused as error:
            return error
        return None

    def _calls(self, calls: Calls) -> Entry:
        from homeserve.text.call_grammar import calls_grammar
        from homeserve.text.dialects import CALLS, GENERIC

        form = {each.name: each for each in CALLS}.get(calls.form, GENERIC)
        tools = []
        for function in calls.functions:
            schema: Schema = {"type": "object"} if function.parameters is None else function.parameters
            try:
                self._check_schema(schema, function.strict)
            except Refused as error:
                raise Refused(
                    str(error), unsatisfiable=error.unsatisfiable, of_calls=True, function=function.name
                ) from None
            tools.append((function.name, prepared(schema, strict=function.strict)))
        lark = calls_grammar(form, tools, parallel=calls.parallel, text=calls.free, special=self._special)
        return {"lark_grammar": lark}

    def _compiled(self, entries: Sequence[Entry]) -> list[str]:
        """What is ignored of it. Raises Refused."""
        text = _text(entries)
        failed, told = LLMatcher.validate_grammar_with_warnings(text, self._tokenizer, limits=self._limits)
        if failed:
            raise _refused(told[0])
        matcher = LLMatcher(self._tokenizer, text, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise _refused(matcher.get_error())
        self._take_first(matcher)
        return [name for warning in told for name in _ignored(warning)]

    def _take_first(self, matcher: LLMatcher) -> None:
        """Ask what may come first, and take one of it. Raises Refused for a grammar of thousands of alternatives, which
        would fail on a rank at its first token. What else is wrong behind it depends on how a model cuts texts."""
        bits = int.from_bytes(matcher.compute_bitmask(), "little")
        if matcher.is_error():
            raise _refused(matcher.get_error())
        allowed = bits & ~(1 << self._tokenizer.eos_token)
        if allowed and not matcher.consume_token((allowed & -allowed).bit_length() - 1):
            error = matcher.get_error()
            if _TOO_WIDE in error:
                raise _refused(error)


def _text(entries: Sequence[Entry]) -> str:
    return json.dumps({"grammars": list(entries)}, ensure_ascii=False, separators=(",", ":"))


# ------------------------------------------------------------------------------------------------------------- sources


def _schema_entry(schema: Schema, strict: bool) -> Entry:
    return {"json_schema": prepared(schema, strict=strict)}


def _regex_entry(asked: Check) -> Entry:
    """The whole answer matches, with or without `^` and `$` at the pattern's ends."""
    made: Entry = json.loads(LLMatcher.grammar_from_regex(asked.value))["grammars"][0]
    return {"lark_grammar": made["lark_grammar"]}


def _choice_entry(asked: Check) -> Entry:
    return {"lark_grammar": "start: " + "\n  | ".join(json.dumps(text) for text in asked.value)}


def _gbnf_entry(asked: Check) -> Entry:
    try:
        return {"lark_grammar": lark_of_gbnf(asked.value)}
    except ValueError as error:
        raise Refused(str(error)) from None


_ENTRIES: dict[str, Callable[[Check], Entry]] = {
    JSON_OBJECT: lambda asked: _schema_entry(asked.value, False),
    JSON_SCHEMA: lambda asked: _schema_entry(asked.value, asked.strict),
    REGEX: _regex_entry,
    CHOICE: _choice_entry,
    LARK: lambda asked: {"lark_grammar": asked.value},
    GBNF: _gbnf_entry,
}


# -------------------------------------------------------------------------------------------------------------- errors

_UNIMPLEMENTED = re.compile(r"Unimplemented keys: (\[.*\])")
_PLACE = re.compile(r"(?:at )?(\d+)\(\d+\): ")
_FORMAT = re.compile(r"Unknown format: (.*)")


def _refused(error: str) -> Refused:
    """llguidance's words as ours. The drawing of the place in its own text, and its own state, are left out."""
    said = re.split(r"\n\s+\d+ \||\n<(?:state|non-verbose)", error)[0].strip()
    line = int(found[1]) if (found := _PLACE.match(said)) else None
    said = re.sub(r"^at \d+\(\d+\): ", "", said)
    if said.startswith("NoExtension"):
        return Refused(_NOTHING_FITS, unsatisfiable=True)
    if said.startswith("Unsatisfiable schema: "):
        return Refused(said.removeprefix("Unsatisfiable schema: "), unsatisfiable=True)
    if "lookarounds not supported" in said:
        return Refused(r"^, $ and \b cannot stand within a pattern: the whole answer has to match it")
    if said.startswith("panic"):
        return Refused("is more than the grammar compiler can take")
    names = _ignored(said)
    if names:
        return Refused(f"{', '.join(names)} cannot be enforced (without strict it would be ignored)")
    return Refused(said, line=line)


def _of_translation(error: Refused, grammar: str, lark: str) -> str:
    """What the compiler says of Lark, for who wrote GBNF."""
    found = rule_at(grammar, lark, error.line) if error.line is not None else None
    if found is None:
        return f"{_without_place(error)} (of its translation to Lark)"
    return f"rule {found[0]!r}, line {found[1]}: {_without_place(error)} (of its translation to Lark)"


def _without_place(error: Refused) -> str:
    return _PLACE.sub("", str(error))


def _ignored(warning: str) -> list[str]:
    """Names of keywords in a warning or an error of llguidance that says it does not know them."""
    if found := _UNIMPLEMENTED.search(warning):
        return list(json.loads(found[1]))
    if found := _FORMAT.search(warning):
        return [f"format {found[1].strip()}"]
    if warning.startswith("oneOf"):
        return ["oneOf"]
    if warning.startswith("min/maxProperties"):
        return ["minProperties and maxProperties"]
    return []
