"""How models write what is no answer: their thoughts, and calls of tools. Data, named after the format.

A format is known by signs in the chat template, since that is what shows a model the format; a checkpoint of one
architecture may have been trained on any. Where there is no template, the family's usual formats stand
(`homeserve.models.dialects`).

    thought   opens … closes
    call      opens NAME between ARGUMENTS closes        (`CallBody` says how name and arguments are written)

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
    NAME_THEN_TAGS = "the name, `between`, a tag for each argument: <parameter=KEY> value </parameter>, text unquoted"
    NAME_THEN_BRACES = 'the name, then {key:value,…} with bare keys, texts between <|"|> marks, nested the same way'


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

    Several calls follow each other, each within its own marks, but for `JSON_LIST`. `closes` is empty where the end of
    the answer is the call's end. `id_mark`: between name and `between` stands this mark and an id, in some versions.
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


_Form = TypeVar("_Form", ThoughtForm, CallForm)

THOUGHTS = (
    ThoughtForm("channels", "<|channel|>analysis<|message|>", "<|end|>", ("<|channel|>", "<|message|>", "analysis")),
    ThoughtForm("channel-tags", "<|channel>thought\n", "<channel|>", ("<|channel>thought",)),
    ThoughtForm("bracket-think", "[THINK]", "[/THINK]", ("[THINK]", "[/THINK]")),
    ThoughtForm("think-tags", "<think>", "</think>", ("<think>", "</think>")),
)
CALLS = (
    CallForm(
        "channels", "to=functions.", "<|call|>", CallBody.NAME_THEN_JSON,
        ("<|channel|>", "<|message|>", "<|call|>"), between="<|message|>",
    ),
    CallForm(
        "call-braces", "<|tool_call>call:", "<tool_call|>", CallBody.NAME_THEN_BRACES, ("<|tool_call>call:",)
    ),
    CallForm(
        "function-tags", "<tool_call>\n<function=", "</function>\n</tool_call>", CallBody.NAME_THEN_TAGS,
        ("<tool_call>", "<function=", "<parameter="), between=">",
    ),
    CallForm(
        "tagged-json", "<tool_call>", "</tool_call>", CallBody.JSON_OBJECT, ("<tool_call>", "</tool_call>"),
        without=("<arg_key>", "<function=", "<invoke"),
    ),
    CallForm(
        "bracket-args", "[TOOL_CALLS]", "", CallBody.NAME_THEN_JSON, ("[TOOL_CALLS]", "[ARGS]"), between="[ARGS]",
        id_mark="[CALL_ID]",
    ),
    CallForm("bracket-list", "[TOOL_CALLS]", "", CallBody.JSON_LIST, ("[TOOL_CALLS]",), without=("[ARGS]",)),
    CallForm(
        "bare-json", "", "", CallBody.JSON_OBJECT, ("<|start_header_id|>", "ipython", "parameters"),
        arguments_key="parameters",
    ),
)  # fmt: skip
"""In the order in which signs are looked for: the more special first."""


@dataclass(frozen=True)
class Dialect:
    """The formats of one model; None where it has none."""

    thought: ThoughtForm | None
    call: CallForm | None

    def starts_in_thought(self, prompt: str) -> bool:
        """Whether the prompt has opened the thought already, so that the answer begins inside it."""
        return self.thought is not None and prompt.rstrip().endswith(self.thought.opens.rstrip())


NO_DIALECT = Dialect(None, None)


def dialect_of(templates: Mapping[str, str], usual: tuple[str, str]) -> Dialect:
    """By the signs in the model's templates; without a template, `usual`: names of a thought and a call form or ''.

    Raises KeyError for a name in `usual` that is not known.
    """
    if not templates:
        return Dialect(_named(THOUGHTS, usual[0]), _named(CALLS, usual[1]))
    texts = tuple(templates.values())
    thought = next((form for form in THOUGHTS if _shows(texts, form.signs)), None)
    return Dialect(thought, next((form for form in CALLS if _shows(texts, form.signs, form.without)), None))


def _shows(texts: Iterable[str], signs: tuple[str, ...], without: tuple[str, ...] = ()) -> bool:
    return any(all(sign in text for sign in signs) and not any(sign in text for sign in without) for text in texts)


def _named(forms: tuple[_Form, ...], name: str) -> _Form | None:
    return {form.name: form for form in forms}[name] if name else None
