"""How models write what is no answer: their thoughts, and calls of tools. Data, named after the format.

A format is known by signs in the chat template, since that is what shows a model the format; a checkpoint of one
architecture may have been trained on any. Where there is no template, the family's usual formats stand
(`homeserve.models.dialects`). A template that has no calls at all is given `GENERIC` when tools are to be called.

    thought   opens … closes
    call      section opens · opens NAME between ARGUMENTS closes · … · section closes
              (`CallBody` says how name and arguments are written)

Sources: the templates of the families; each row is held to what such a template renders by the tests.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar


class CallBody(Enum):
    """What stands between the marks of a call."""

    JSON_OBJECT = "one object that holds name and arguments"
    JSON_LIST = "a list of such objects"
    NAME_THEN_JSON = "the name, `between`, an object of the arguments"
    NAME_THEN_TAGS = "the name, `between`, a tag for each argument (`TagForm`), text unquoted"
    NAME_THEN_BRACES = "the name, then {key:value,…} with bare keys, texts between `quote` marks, nested the same way"
    EXPRESSIONS = "a list as Python writes it: [name(key=value, …), …]"
    CHANNELS = "a message whose header names the function, `between`, an object of the arguments"


@dataclass(frozen=True)
class TagForm:
    """One argument: opens KEY key_closes … value_opens VALUE closes.

    What stands between `key_closes` and `value_opens` is skipped, but for `string="true"`, which says that the value is
    a text (`"false"`: that it is JSON). Without it a value is what the tool's schema says. `padded`: a newline behind
    `value_opens` and one before `closes` are no part of the value. `says_type`: tags have that attribute.
    """

    opens: str
    key_closes: str
    value_opens: str
    closes: str
    padded: bool = False
    says_type: bool = False


@dataclass(frozen=True)
class ThoughtForm:
    """`signs`: texts of which all stand in a template of the format."""

    name: str
    opens: str
    closes: str
    signs: tuple[str, ...]


@dataclass(frozen=True)
class CallForm:
    """`without`: texts that stand in no template of the format; they tell it from another with the same signs.

    Several calls follow each other, each within its own marks, but for lists. `closes` is empty where the end of the
    answer is the call's end. `section`: marks around all calls of an answer, or with `each` around every one; the space
    within is none of a call's. `id_mark`: between name and `between` stands this mark and an id, in some versions.
    `name_key` empty: the object has one key, the name, whose value is the arguments. `header_id`: what stands for the
    name is an id, `functions.NAME:NUMBER`, which the template wants back. `short_ids`: the template takes ids of nine
    letters and digits and no others. `singly`: the template takes one call in a message and no more.
    """

    name: str
    opens: str
    closes: str
    body: CallBody
    signs: tuple[str, ...]
    without: tuple[str, ...] = ()
    between: str = ""
    name_key: str = "name"
    arguments_key: str = "arguments"
    id_mark: str = ""
    section: tuple[str, str] = ("", "")
    each: bool = False
    tag: TagForm | None = None
    quote: str = ""
    header_id: bool = False
    short_ids: bool = False
    singly: bool = False

    @property
    def marks(self) -> tuple[str, ...]:
        """Every text by which the format is known in an answer."""
        of_tag = (self.tag.opens, self.tag.key_closes, self.tag.value_opens, self.tag.closes) if self.tag else ()
        made = (self.opens, self.closes, self.between, self.id_mark, self.quote, *self.section, *of_tag)
        return tuple(mark for mark in made if mark)


_Form = TypeVar("_Form", ThoughtForm, CallForm)

START, CHANNEL, MESSAGE, END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
CHANNEL_MARKS = (START, CHANNEL, MESSAGE, END, "<|call|>", "<|return|>", "<|constrain|>")
"""Of the Harmony format, in which an answer is messages: <|start|>ROLE<|channel|>CHANNEL to=WHOM<|message|>…<|end|>."""

_PARAMETER = TagForm("<parameter=", ">", "", "</parameter>", padded=True)
_NAMED = TagForm('<parameter name="', '"', ">", "</parameter>")
_DSML = TagForm('<｜DSML｜parameter name="', '"', ">", "</｜DSML｜parameter>", says_type=True)
_ARG = TagForm("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")

THOUGHTS = (
    ThoughtForm("channels", "<|channel|>analysis<|message|>", "<|end|>", ("<|channel|>", "<|message|>", "analysis")),
    ThoughtForm("channel-tags", "<|channel>thought\n", "<channel|>", ("<|channel>thought",)),
    ThoughtForm("bracket-think", "[THINK]", "[/THINK]", ("[THINK]", "[/THINK]")),
    ThoughtForm("seed-think", "<seed:think>", "</seed:think>", ("<seed:think>", "</seed:think>")),
    ThoughtForm("start-thinking", "<|START_THINKING|>", "<|END_THINKING|>", ("<|START_THINKING|>",)),
    ThoughtForm("inner", "<|inner_prefix|>", "<|inner_suffix|>", ("<|inner_prefix|>", "<|inner_suffix|>")),
    ThoughtForm("think-tags", "<think>", "</think>", ("<think>", "</think>")),
)
CALLS = (
    CallForm(
        "channels", "to=functions.", "<|call|>", CallBody.CHANNELS,
        ("<|channel|>", "<|message|>", "<|call|>"), between="<|message|>",
    ),
    CallForm(
        "call-braces", "<|tool_call>call:", "<tool_call|>", CallBody.NAME_THEN_BRACES, ("<|tool_call>call:",),
        quote='<|"|>',
    ),
    CallForm(
        "function-tags", "<function=", "</function>", CallBody.NAME_THEN_TAGS,
        ("<tool_call>", "<function=", "<parameter="), between=">", section=("<tool_call>", "</tool_call>"),
        each=True, tag=_PARAMETER,
    ),
    CallForm(
        "seed-tags", "<function=", "</function>", CallBody.NAME_THEN_TAGS, ("<seed:tool_call>",), between=">",
        section=("<seed:tool_call>", "</seed:tool_call>"), each=True, tag=_PARAMETER,
    ),
    CallForm(
        "invoke-tags", '<invoke name="', "</invoke>", CallBody.NAME_THEN_TAGS, ("<minimax:tool_call>", "<invoke"),
        between='">', section=("<minimax:tool_call>", "</minimax:tool_call>"), tag=_NAMED,
    ),
    CallForm(
        "dsml-functions", '<｜DSML｜invoke name="', "</｜DSML｜invoke>", CallBody.NAME_THEN_TAGS,
        ("｜DSML｜", "function_calls>"), between='">', tag=_DSML,
        section=("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"),
    ),
    CallForm(
        "dsml-tools", '<｜DSML｜invoke name="', "</｜DSML｜invoke>", CallBody.NAME_THEN_TAGS, ("｜DSML｜",),
        between='">', tag=_DSML, section=("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"),
    ),
    CallForm(
        "arg-tags", "<tool_call>", "</tool_call>", CallBody.NAME_THEN_TAGS, ("<tool_call>", "<arg_key>"), tag=_ARG
    ),
    CallForm(
        "fenced-json", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "\n```<｜tool▁call▁end｜>",
        CallBody.NAME_THEN_JSON, ("<｜tool▁call▁begin｜>", "```json"), between="\n```json\n", section=_DEEPSEEK,
    ),
    CallForm(
        "separated-json", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", CallBody.NAME_THEN_JSON,
        ("<｜tool▁call▁begin｜>",), between="<｜tool▁sep｜>", section=_DEEPSEEK,
    ),
    CallForm(
        "numbered-json", "<|tool_call_begin|>", "<|tool_call_end|>", CallBody.NAME_THEN_JSON, ("<|tool_call_begin|>",),
        between="<|tool_call_argument_begin|>", header_id=True,
        section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ),
    CallForm("tool-calls-list", "<tool_calls>", "</tool_calls>", CallBody.JSON_LIST, ("<tool_calls>",)),
    CallForm(
        "tagged-json", "<tool_call>", "</tool_call>", CallBody.JSON_OBJECT, ("<tool_call>", "</tool_call>"),
        without=("<arg_key>", "<function=", "<invoke"),
    ),
    CallForm(
        "action-list", "<|START_ACTION|>", "<|END_ACTION|>", CallBody.JSON_LIST, ("<|START_ACTION|>", "tool_name"),
        name_key="tool_name", arguments_key="parameters",
    ),
    CallForm("toolcall-list", "<TOOLCALL>", "</TOOLCALL>", CallBody.JSON_LIST, ("<TOOLCALL>",)),
    CallForm("marked-list", "<|tool_call|>", "", CallBody.JSON_LIST, ("<|tool_call|>",)),
    CallForm(
        "keyed-list", "<|tools_prefix|>", "<|tools_suffix|>", CallBody.JSON_LIST, ("<|tools_prefix|>",), name_key=""
    ),
    CallForm(
        "call-expressions", "<|tool_call_start|>", "<|tool_call_end|>", CallBody.EXPRESSIONS,
        ("List of tools: ", "<|im_start|>"), without=("<tool_call>",),
    ),
    CallForm(
        "function-json", "<function=", "</function>", CallBody.NAME_THEN_JSON, ("<function=", "</function>", "ipython"),
        without=("<parameter=",), between=">",
    ),
    CallForm(
        "bracket-args", "[TOOL_CALLS]", "", CallBody.NAME_THEN_JSON, ("[TOOL_CALLS]", "[ARGS]"), between="[ARGS]",
        id_mark="[CALL_ID]", short_ids=True,
    ),
    CallForm(
        "bracket-list", "[TOOL_CALLS]", "", CallBody.JSON_LIST, ("[TOOL_CALLS]",), without=("[ARGS]",), short_ids=True
    ),
    CallForm(
        "bare-json", "", "", CallBody.JSON_OBJECT, ("<|start_header_id|>", "ipython", "parameters"),
        arguments_key="parameters", singly=True,
    ),
)  # fmt: skip
"""In the order in which signs are looked for: the more special first."""

GENERIC = CallForm("generic", "<tool_call>", "</tool_call>", CallBody.JSON_OBJECT, ())
"""For models whose template has no calls; the messages tell them of it (`homeserve.server.tool_messages`)."""


@dataclass(frozen=True)
class Dialect:
    """The formats of one model; None where it has none."""

    thought: ThoughtForm | None
    call: CallForm | None

    def starts_in_thought(self, prompt: str) -> bool:
        """Whether the prompt has opened the thought already, so that the answer begins inside it."""
        return self.thought is not None and prompt.rstrip().endswith(self.thought.opens.rstrip())

    @property
    def marks(self) -> tuple[str, ...]:
        """Every text by which its formats are known in an answer."""
        of_thought = (self.thought.opens, self.thought.closes) if self.thought else ()
        return of_thought + (CHANNEL_MARKS if self.in_channels else ()) + (self.call.marks if self.call else ())

    @property
    def in_channels(self) -> bool:
        """Whether an answer is messages, as in the Harmony format."""
        return self.thought is not None and self.thought.name == "channels"


NO_DIALECT = Dialect(None, None)


def dialect_of(templates: Mapping[str, str], usual: tuple[str, str]) -> Dialect:
    """By the signs in the model's templates; without a template, `usual`: names of a thought and a call form or ''.

    A template that writes calls and never tells the model of its tools has no call form: both are to be the same.

    Raises KeyError for a name in `usual` that is not known.
    """
    if not templates:
        return Dialect(_named(THOUGHTS, usual[0]), _named(CALLS, usual[1]))
    texts = tuple(templates.values())
    thought = next((form for form in THOUGHTS if _shows(texts, form.signs)), None)
    call = next((form for form in CALLS if _shows(texts, (*form.signs, _TOOLS), form.without)), None)
    return Dialect(thought, call)


_TOOLS = "tools"
"""The variable by which a template gets them."""


def _shows(texts: Iterable[str], signs: tuple[str, ...], without: tuple[str, ...] = ()) -> bool:
    return any(all(sign in text for sign in signs) and not any(sign in text for sign in without) for text in texts)


def _named(forms: tuple[_Form, ...], name: str) -> _Form | None:
    return {form.name: form for form in forms}[name] if name else None
