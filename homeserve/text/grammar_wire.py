"""What the grammar host and its helper process say to each other, as `homeserve.text.helper_wire` has it: a `Setup`,
then one `Checked` for each `Check`; and the bounds that hold for a grammar everywhere."""

from __future__ import annotations

from typing import Any, Final, TypedDict

import msgspec

from homeserve.text.helper_wire import Bounds

GRAMMAR_BYTES_LIMIT: Final = 64 << 10
"""UTF-8 bytes of a grammar as a client sends it, and as it travels to a rank."""


class ParserLimits(TypedDict):
    """As llguidance's `LLParserLimits` calls them. A state of the lexer takes 1 to 2 kB."""

    initial_lexer_fuel: int
    step_lexer_fuel: int
    step_max_items: int
    max_items_in_row: int
    max_lexer_states: int
    max_grammar_size: int


PARSER_LIMITS: Final = ParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_items_in_row=2_000,
    max_lexer_states=50_000,
    max_grammar_size=200_000,
)
"""In the helper as on a rank. 50,000 items take about 2.5 ms, 200,000 units of lexer work about 15 ms."""

JSON_OBJECT, JSON_SCHEMA, REGEX, CHOICE, LARK, GBNF = "json_object", "json_schema", "regex", "choice", "lark", "gbnf"


class Setup(Bounds, kw_only=True):
    """`vocab`: token ids below it exist. `special`: the ids of control tokens, with their texts."""

    vocab: int
    special: dict[int, str]


class Function(msgspec.Struct, omit_defaults=True):
    """A tool as a grammar sees it; `parameters` is its JSON schema."""

    name: str
    parameters: dict[str, Any] | bool | None = None
    strict: bool = False


class Calls(msgspec.Struct, omit_defaults=True):
    """What calls an answer may have, in the call form of that name (`homeserve.text.dialects`); empty: the generic one.
    `free`: text that is no call may stand around them, or be all."""

    form: str
    functions: list[Function]
    parallel: bool = True
    free: bool = False


class Check(msgspec.Struct, omit_defaults=True):
    """`kind` and `value`: what the text of an answer has to be, one of the kinds above, empty for anything. `strict`: a
    keyword of the schema that cannot be enforced is an error. With `calls`, the answer may be calls instead.
    `in_channels`: the text stands in a message of the final channel (Harmony's format)."""

    kind: str = ""
    value: Any = None
    strict: bool = False
    calls: Calls | None = None
    in_channels: bool = False


class Checked(msgspec.Struct, omit_defaults=True):
    """`grammar` as llguidance's compiler takes it, or `error`: why there is none. `unsatisfiable`: because nothing
    could ever fit. `of_calls`: the error is about the tools, and about the schema of `function` if it is named.
    `ignored`: keywords that are not enforced. `broke`: what went wrong in the check itself, for the log."""

    grammar: str = ""
    error: str = ""
    unsatisfiable: bool = False
    of_calls: bool = False
    function: str = ""
    broke: str = ""
    ignored: list[str] = []
