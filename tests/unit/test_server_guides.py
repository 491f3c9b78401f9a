"""From a call to a guide: what wins, where a thought stands, which calls the grammar knows of."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from homeserve.engine.request import GenerateCall
from homeserve.errors import InvalidField
from homeserve.server.ask import Terms, ask_for
from homeserve.server.bounds import Bounds
from homeserve.server.chat_ask import told_template
from homeserve.server.chat_call import ChatCall, ChoiceOfTool, Constraint, ConstraintKind, Reasoning, Tool, Tools, Where
from homeserve.server.fields import ChatRequest, Common, CompletionRequest
from homeserve.server.guides import completion_guide, guide_of, guiding_field
from homeserve.server.openai import chat_call
from homeserve.server.parts import Served
from homeserve.server.prompts import Prompt
from homeserve.text.dialects import CALLS, NO_DIALECT, THOUGHTS, Dialect
from homeserve.text.grammar_wire import Check, Function
from homeserve.wire.records import Guide, unpack_ints

BOUNDS = Bounds(vocab=20, context=100, sequences=8)
THINKS = Dialect({form.name: form for form in THOUGHTS}["think-tags"], CALLS[0])
CHANNELS = Dialect({form.name: form for form in THOUGHTS}["channels"], CALLS[0])
REGEX = Constraint(ConstraintKind.REGEX, "a+", "regex")
WORDS = {"<think>": 7, "</think>": 8, "<|channel|>analysis<|message|>": 5, "<|end|>": 6}


class WordTokenizer:
    """Ends are 2, 3 and one that the model has no row for; 4 is another control token."""

    end_ids = frozenset({2, 3, 25})
    special_ids = frozenset({2, 3, 4, 25})

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        assert not add_special and parse_special
        return [WORDS[text]]


class Grammars:
    """Remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[Check, str, str]] = []
        self.of_parameters = ""

    async def check(self, asked: Check, where: str, of_calls: str = "tools", of_parameters: str = "") -> str:
        self.asked.append((asked, where, of_calls))
        self.of_parameters = of_parameters
        return "checked"


def served(dialect: Dialect = NO_DIALECT) -> tuple[Served, Grammars]:
    grammars = Grammars()
    made: Any = SimpleNamespace(tokenizer=WordTokenizer(), dialect=dialect, grammars=grammars, bounds=BOUNDS)
    return made, grammars


async def guide(call: ChatCall, dialect: Dialect = NO_DIALECT, prompt: str = "Hi") -> tuple[Guide | None, Grammars]:
    world, grammars = served(dialect)
    return await guide_of(world, call, Prompt((1,), prompt)), grammars


def call(**more: Any) -> ChatCall:
    return ChatCall(fields=more.pop("fields", Common()), messages=[], **more)


async def test_who_asks_for_nothing_has_no_guide() -> None:
    for dialect in (NO_DIALECT, THINKS):
        made, grammars = await guide(call(), dialect)
        assert made is None and not grammars.asked


async def test_a_constraint_is_checked_and_ends_with_the_models_own_tokens() -> None:
    made, grammars = await guide(call(constraint=replace(REGEX, strict=True)))
    assert made is not None and made.grammar == "checked" and list(unpack_ints(made.ends)) == [2, 3]
    assert (made.thought_opens, made.thought_closes, made.in_thought, made.thought_budget) == (b"", b"", False, -1)
    assert grammars.asked == [(Check("regex", "a+", True), "regex", "tools")]
    _, grammars = await guide(call(constraint=Constraint(ConstraintKind.JSON_OBJECT)))
    assert grammars.asked[0][0] == Check("json_object", {"type": "object"})
    where = Where(tools="functions")
    _, grammars = await guide(call(constraint=REGEX, where=where))
    assert grammars.asked[0][1:] == ("regex", "functions")


async def test_a_constraint_among_the_fields_of_all_routes_counts_and_two_do_not() -> None:
    _, grammars = await guide(call(fields=Common(guided_regex="b")))
    assert grammars.asked == [(Check("regex", "b"), "guided_regex", "tools")]
    with pytest.raises(InvalidField, match="text.format"):
        await guide(call(fields=Common(guided_regex="b"), constraint=replace(REGEX, where="text.format")))


async def test_completions_have_constraints_and_no_thoughts() -> None:
    world, grammars = served(THINKS)
    assert await completion_guide(world, CompletionRequest(prompt="x")) is None and not grammars.asked
    made = await completion_guide(world, CompletionRequest(prompt="x", guided_choice=["a"], stop_token_ids=[4, 9]))
    assert made is not None and made.grammar == "checked" and made.thought_opens == b""
    assert list(unpack_ints(made.ends)) == [2, 3, 4], "a token of the client's that is text cuts off, and is no end"
    assert grammars.asked[0][:2] == (Check("choice", ["a"]), "guided_choice")


# ------------------------------------------------------------------------------------------------------------ thoughts


async def test_the_grammar_begins_behind_the_thought() -> None:
    made, _ = await guide(call(constraint=REGEX), THINKS)
    assert made is not None and list(unpack_ints(made.thought_opens)) == [7]
    assert list(unpack_ints(made.thought_closes)) == [8] and not made.in_thought
    made, _ = await guide(call(constraint=REGEX), THINKS, "assistant\n<think>\n")
    assert made is not None and made.in_thought
    made, _ = await guide(call(constraint=REGEX, reasoning=Reasoning(enabled=False)), THINKS, "<think>\n\n</think>\n\n")
    assert made is not None and made.thought_opens == b"" and not made.in_thought
    made, _ = await guide(call(constraint=REGEX, reasoning=Reasoning(enabled=False)), THINKS, "<think>\n")
    assert made is not None and made.in_thought, "a template that thinks whatever it is told"


async def test_a_budget_alone_bounds_the_thought() -> None:
    made, grammars = await guide(call(reasoning=Reasoning(budget=9)), THINKS)
    assert made is not None and (made.grammar, made.thought_budget) == ("", 9) and not grammars.asked
    for reasoning in (Reasoning(budget=-1), Reasoning(enabled=True), Reasoning(effort="low")):
        assert (await guide(call(reasoning=reasoning), THINKS))[0] is None
    assert (await guide(call(reasoning=Reasoning(budget=9))))[0] is None, "a model without thoughts thinks no longer"
    made, _ = await guide(call(reasoning=Reasoning(budget=0), constraint=REGEX), THINKS)
    assert made is not None and made.thought_budget == 0


async def test_an_answer_in_channels_is_checked_as_one() -> None:
    _, grammars = await guide(call(constraint=REGEX), CHANNELS)
    assert grammars.asked[0][0].in_channels
    _, grammars = await guide(call(constraint=REGEX), THINKS)
    assert not grammars.asked[0][0].in_channels


def chat(**more: Any) -> ChatRequest:
    return msgspec.convert({"messages": [{"role": "user", "content": "Hi"}], **more}, ChatRequest)


REASONING: list[tuple[dict[str, Any], Reasoning]] = [
    ({}, Reasoning()),
    ({"reasoning_budget": 5}, Reasoning(budget=5)),
    ({"thinking_budget": 5}, Reasoning(budget=5)),
    ({"thinking_token_budget": 5, "reasoning_budget": 5}, Reasoning(budget=5)),
    ({"reasoning_budget": -1}, Reasoning(budget=-1)),
    ({"reasoning_budget": 0}, Reasoning(enabled=False, budget=0)),
    ({"reasoning_effort": "none"}, Reasoning(enabled=False)),
    ({"reasoning_effort": "low"}, Reasoning(effort="low")),
    ({"reasoning_effort": "minimal"}, Reasoning(effort="low")),
    ({"reasoning_effort": "xhigh"}, Reasoning(effort="high")),
    ({"chat_template_kwargs": {"enable_thinking": False}}, Reasoning(enabled=False)),
    ({"chat_template_kwargs": {"thinking": True}, "reasoning_budget": 0}, Reasoning(enabled=True, budget=0)),
    ({"chat_template_kwargs": {"enable_thinking": "no"}}, Reasoning()),
]


@pytest.mark.parametrize("fields, meant", REASONING, ids=str)
def test_the_fields_of_reasoning(fields: dict[str, Any], meant: Reasoning) -> None:
    assert chat_call(chat(**fields)).reasoning == meant


def test_templates_are_told_to_think_by_either_of_their_words() -> None:
    """Some know `enable_thinking`, others `thinking`."""
    assert told_template(Reasoning()) == {}
    assert told_template(Reasoning(enabled=False)) == {"enable_thinking": False, "thinking": False}
    told = {"reasoning_effort": "low", "enable_thinking": True, "thinking": True}
    assert told_template(Reasoning(enabled=True, effort="low")) == told


def test_budgets_that_differ_are_refused() -> None:
    with pytest.raises(InvalidField, match="thinking_budget: is 6, but reasoning_budget"):
        chat_call(chat(reasoning_budget=5, thinking_budget=6))


# --------------------------------------------------------------------------------------------------------------- tools

LOOSE, STRICT = Tool("f", "d", {"type": "object"}), Tool("g", strict=True)
FUNCTIONS = [Function("f", {"type": "object"}), Function("g", None, True)]


async def test_calls_that_must_be_made_are_all_there_is() -> None:
    for constraint in (None, REGEX):
        tools = Tools((LOOSE, STRICT), ChoiceOfTool.REQUIRED)
        _, grammars = await guide(call(tools=tools, constraint=constraint), THINKS)
        [(asked, where, _)] = grammars.asked
        assert asked.kind == "" and where == "tools" and asked.calls is not None
        assert (asked.calls.functions, asked.calls.free, asked.calls.parallel) == (FUNCTIONS, False, True)
        assert asked.calls.form == CALLS[0].name
    _, grammars = await guide(call(tools=Tools((LOOSE, STRICT), ChoiceOfTool.ONE, "g")))
    assert (one := grammars.asked[0][0].calls) is not None
    assert (one.functions, one.free, one.parallel, one.form) == (FUNCTIONS[1:], False, False, "")


async def test_what_fails_is_blamed_on_what_made_the_grammar() -> None:
    both = call(tools=Tools((LOOSE,)), constraint=REGEX)
    assert guiding_field(both) == "regex"
    for tools in (Tools((LOOSE,), ChoiceOfTool.REQUIRED), Tools((LOOSE,), ChoiceOfTool.ONE, "f")):
        assert guiding_field(call(tools=tools, constraint=REGEX)) == "tools", "the constraint does not count"
    assert guiding_field(call(tools=Tools((LOOSE,), ChoiceOfTool.NONE), constraint=REGEX)) == "regex"
    assert guiding_field(call(tools=Tools((), ChoiceOfTool.REQUIRED), constraint=REGEX)) == "regex"


async def test_a_tools_schema_is_called_as_the_route_calls_it() -> None:
    for where, called in ((Where(), "function.parameters"), (Where(parameters="input_schema"), "input_schema")):
        _, grammars = await guide(call(tools=Tools((STRICT,)), where=where))
        assert grammars.of_parameters == called


async def test_calls_that_may_be_made() -> None:
    assert (await guide(call(tools=Tools((LOOSE,)))))[0] is None, "the model writes as it likes"
    assert (await guide(call(tools=Tools((STRICT,), ChoiceOfTool.NONE))))[0] is None
    _, grammars = await guide(call(tools=Tools((LOOSE, STRICT), parallel=False)))
    assert (strict := grammars.asked[0][0]).calls is not None and not strict.kind
    assert (strict.calls.free, strict.calls.parallel) == (True, False)
    _, grammars = await guide(call(tools=Tools((LOOSE,)), constraint=REGEX))
    either = grammars.asked[0][0]
    assert either.kind == "regex" and either.calls is not None and not either.calls.free


# ------------------------------------------------------------------------------------------------------------ who wins


def asked_for(guide: Guide | None, **fields: Any) -> GenerateCall:
    asked = ask_for(
        Common(**fields), Terms(max_tokens=10, guide=guide), [Prompt((1,))], WordTokenizer(),  # type: ignore[arg-type]
        bounds=BOUNDS, request_id="r",
    )  # fmt: skip
    return asked.calls[0]


def test_ends_that_are_ignored_still_end_what_a_grammar_completes() -> None:
    free, guided = asked_for(None, ignore_eos=True), asked_for(Guide("g"), ignore_eos=True)
    assert free.end_tokens == frozenset() and guided.end_tokens == {2, 3}
    for each in (free, guided):
        assert (each.sampling.forbidden, each.sampling.min_tokens) == ((2, 3), 10), "kept away for as long as may be"
    with_stop = asked_for(Guide("g"), ignore_eos=True, stop_token_ids=[9])
    assert with_stop.end_tokens == {2, 3, 9} and with_stop.sampling.forbidden == (2, 3)


def test_every_choice_has_the_guide() -> None:
    made = ask_for(
        Common(n=3), Terms(guide=Guide("g")), [Prompt((1,))], WordTokenizer(), bounds=BOUNDS, request_id="r"  # type: ignore[arg-type]
    )  # fmt: skip
    assert [each.sampling.guide for each in made.calls] == [Guide("g")] * 3
