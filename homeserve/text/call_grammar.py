"""Grammars of calls: what an answer may be where calls have to be made, or have to fit when they are made.

The text of a call is laid out as the templates of its format write it, since that is what a model has learned; where
they differ by a line end, either way is allowed. Arguments fit the tool's JSON schema. Formats that write texts without
JSON's quotes (tags, braces, expressions) keep types, what is required, enumerations and lengths, and no patterns.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from homeserve.text.argument_types import TEXT, types_of
from homeserve.text.dialects import CHANNEL, END, MESSAGE, START, CallBody, CallForm, TagForm
from homeserve.text.lark_rules import ANY_TEXT, LarkRules, texts
from homeserve.text.loose_grammar import LooseGrammar, optional_list

_LEAD = r"/\n{1,2}/"
_LINE = r'"\n"'
_NO_OBJECT = r"/[^ \n\t{](.|\n)*/"
_KEY_TEXT = r"/[A-Za-z_][A-Za-z0-9_.\-]*/"


def calls_grammar(
    form: CallForm, tools: Sequence[tuple[str, Any]], *, parallel: bool, text: bool, special: Mapping[str, int]
) -> str:
    """Lark of calls of `tools` (name, JSON schema of the arguments) and nothing else, or with `text` of any text with
    such calls in it. `parallel`: several calls. `special`: the model's control tokens, text -> id.

    What a schema that the compiler does not take makes of the grammar, the compiler says.
    """
    rules = LarkRules(special)
    if form.body is CallBody.CHANNELS:
        return rules.text(_in_channels(rules, tools, text=text))
    calls = _Calls(rules, form, tools)
    several = parallel and bool(form.opens)
    if not text:
        lead = f"({rules.rule('lead', _LEAD)})? " if form.opens else ""
        return rules.text(lead + calls.all(several=several))
    anything = rules.rule("anything", ANY_TEXT)
    if not form.opens:
        return rules.text(f'{calls.all(several=False)} | {rules.rule("no_call", _NO_OBJECT)} | ""')
    if several:
        return rules.text(f"({calls.behind_text()})* {anything}")
    return rules.text(f"{calls.behind_text()} | {anything}")


class _Calls:
    def __init__(self, rules: LarkRules, form: CallForm, tools: Sequence[tuple[str, Any]]) -> None:
        self._rules = rules
        self._form = form
        self._bodies = {
            CallBody.JSON_OBJECT: self._object,
            CallBody.JSON_LIST: self._object,
            CallBody.NAME_THEN_JSON: self._named_json,
            CallBody.NAME_THEN_TAGS: self._tagged,
            CallBody.NAME_THEN_BRACES: self._braced,
            CallBody.EXPRESSIONS: self._expression,
        }
        rules.rule("nl", _LINE)
        self._call = rules.one_of(
            "call", [self._bodies[form.body](name, schema, f"tool_{i}") for i, (name, schema) in enumerate(tools)]
        )

    def all(self, *, several: bool) -> str:
        """Calls with every mark around them."""
        return self._rules.written(self._opening) + " " + self._rest(several=several)

    def behind_text(self) -> str:
        """Any text up to the mark that opens calls, and the calls."""
        return f"{self._rules.through(self._opening)} {self._rest(several=self._around_all)}"

    @property
    def _is_list(self) -> bool:
        return self._form.body in (CallBody.JSON_LIST, CallBody.EXPRESSIONS)

    @property
    def _around_all(self) -> bool:
        """Whether the opening mark stands around all calls."""
        return self._is_list or bool(self._form.section[0] and not self._form.each)

    @property
    def _opening(self) -> str:
        return self._form.section[0] or self._form.opens

    def _rest(self, *, several: bool) -> str:
        """What stands behind the opening mark."""
        form = self._form
        written = self._rules.written
        opens, closes = written(form.opens) if form.opens else "", written(form.closes) if form.closes else ""
        if self._is_list:
            more = f'("," (" " | {_LINE})? {self._call})*' if several else ""
            return f'"[" {self._call} {more} "]" {closes}'
        one = f"{opens} {self._call} {closes}"
        if not form.section[0]:
            return f"{self._call} {closes}" + (f" (nl? {one})*" if several else "")
        closing = written(form.section[1])
        if form.each:
            again = f" (nl? {written(form.section[0])} nl? {one} nl? {closing})*" if several else ""
            return f"nl? {one} nl? {closing}{again}"
        return f"nl? {one}" + (f" (nl? {one})*" if several else "") + f" nl? {closing}"

    # ------------------------------------------------------------------------------ one call between its marks, by body

    def _object(self, name: str, schema: Any, rule: str) -> str:
        form = self._form
        arguments = self._json(schema, rule)
        if not form.name_key:
            return self._rules.rule(
                rule, f'{_quoted("{" + json.dumps(name, ensure_ascii=False) + ": ")} {arguments} "}}"'
            )
        head = f'{{"{form.name_key}": {json.dumps(name, ensure_ascii=False)}, "{form.arguments_key}": '
        space = "nl?" if form.body is CallBody.JSON_OBJECT and form.opens else ""
        return self._rules.rule(rule, f'{space} {_quoted(head)} {arguments} "}}" {space}'.strip())

    def _named_json(self, name: str, schema: Any, rule: str) -> str:
        form = self._form
        head = _quoted(name)
        if form.header_id:
            head = f"{_quoted(f'functions.{name}:')} /[0-9]{{1,3}}/"
        if form.id_mark and self._rules.begins_with_token(form.id_mark):
            head += f" ({self._rules.written(form.id_mark)} /[a-zA-Z0-9]{{9}}/)?"
        return self._rules.rule(rule, f"{head} {self._rules.written(form.between)} {self._json(schema, rule)}")

    def _json(self, schema: Any, rule: str) -> str:
        return self._rules.rule(f"{rule}_arguments", self._rules.schema(schema))

    def _braced(self, name: str, schema: Any, rule: str) -> str:
        arguments = LooseGrammar(self._rules, schema, self._form.quote, rule).object(schema)
        return self._rules.rule(rule, f"{_quoted(name)} {arguments}")

    def _expression(self, name: str, schema: Any, rule: str) -> str:
        """Texts between Python's quotes, everything else as JSON."""
        char = r"""([^'\\\n]|\\['"\\nt])"""
        items = []
        for key, of_key, required in _properties(schema):
            types = types_of(schema, key)
            if types == TEXT and not _values(of_key):
                value = f"/'{texts(of_key, char)}'/"
            else:
                value = self._of_root(schema, of_key, f"{rule}_value")
            items.append((f"{_quoted(key + '=')} {value}", required))
        return self._rules.rule(
            rule, f'{_quoted(name + "(")} {optional_list(self._rules, rule, items, _quoted(", "))} ")"'
        )

    def _tagged(self, name: str, schema: Any, rule: str) -> str:
        tag = self._form.tag
        assert tag is not None, "a form of tags has one"
        items = [
            (self._tag(tag, _quoted(key), *self._tag_value(tag, schema, key, of_key, rule)), required)
            for key, of_key, required in _properties(schema)
        ]
        tags = " ".join(item if required else f"({item})?" for item, required in items)
        if not items and not _is_closed(schema):
            tags = f"({self._tag(tag, _KEY_TEXT, self._rules.through(tag.closes))})*"
        head = f"{_quoted(name)} {self._rules.written(self._form.between)}" if self._form.between else _quoted(name)
        return self._rules.rule(rule, f"{head} nl? {tags}")

    def _tag(self, tag: TagForm, key: str, value: str, text: bool = True) -> str:
        written = self._rules.written
        said_type = _quoted(f' string="{"true" if text else "false"}"') if tag.says_type else ""
        between = f"nl? {written(tag.value_opens)}" if tag.value_opens else ""
        if tag.key_closes == '"':  # an attribute: the bracket closes the tag
            between = f"{said_type} {written(tag.value_opens)}"
        return f"{written(tag.opens)} {key} {written(tag.key_closes)} {between} {value} nl?"

    def _tag_value(self, tag: TagForm, root: Any, key: str, schema: Any, rule: str) -> tuple[str, bool]:
        """With the mark that closes it, and whether it is a text: that is written bare, everything else as JSON."""
        values, types = _values(schema), types_of(root, key)
        line = "nl?" if tag.padded else ""
        closes = self._rules.written(tag.closes)
        if values and types == TEXT:
            bare = self._rules.one_of(f"{rule}_enum", (_quoted(value) for value in values))
            return f"{line} {bare} {line} {closes}", True
        if types == TEXT or (("string" in types or not types) and not tag.says_type):
            pattern = f"/{texts(schema)}/" if types == TEXT else ANY_TEXT
            return f"{line} {self._rules.through(tag.closes, pattern)}", True
        return f"{line} {self._of_root(root, schema, f'{rule}_value')} {line} {closes}", False

    def _of_root(self, root: Any, schema: Any, rule: str) -> str:
        """A value of its own, with the definitions that the whole schema has."""
        shared = {key: root[key] for key in ("$defs", "definitions", "x-guidance") if key in root}
        return self._rules.rule(
            rule, self._rules.schema({**shared, **schema} if isinstance(schema, Mapping) else schema)
        )


def _in_channels(rules: LarkRules, tools: Sequence[tuple[str, Any]], *, text: bool) -> str:
    """A call ends the answer. With text: messages of any channel before it, or a last one in the final channel."""
    start, channel, message, end = map(rules.written, (START, CHANNEL, MESSAGE, END))
    calls = []
    for i, (name, schema) in enumerate(tools):
        arguments = rules.rule(f"tool_{i}_arguments", rules.schema(schema))
        head = f"{channel} {_quoted(f'commentary to=functions.{name}')} constrain? {message}"
        calls.append(rules.rule(f"tool_{i}", f"{head} {arguments}"))
    rules.rule("constrain", f'" " {rules.written("<|constrain|>")} "json" | " json"')
    call = rules.one_of("call", calls)
    begun = f'({start} "assistant")?'
    if not text:
        return f"{begun} {call}"
    before = f'{channel} ("analysis" | "commentary") {message} {rules.through(END)} {start} "assistant"'
    last = f'{channel} "final" {message} {rules.rule("anything", ANY_TEXT)}'
    return f"{begun} ({before})* ({call} | {last})"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _properties(schema: Any) -> list[tuple[str, Any, bool]]:
    """(key, schema, required) in the schema's order."""
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    if not isinstance(properties, Mapping):
        return []
    required = schema.get("required")
    needed = set(required) if isinstance(required, list) else set()
    return [(key, of_key, key in needed) for key, of_key in properties.items() if of_key is not False]


def _is_closed(schema: Any) -> bool:
    return isinstance(schema, Mapping) and schema.get("additionalProperties") is False


def _values(schema: Any) -> list[str]:
    """The texts that a schema lists; empty where it lists none."""
    if not isinstance(schema, Mapping):
        return []
    listed = [schema["const"]] if "const" in schema else schema.get("enum")
    return [value for value in listed if isinstance(value, str)] if isinstance(listed, list) else []
