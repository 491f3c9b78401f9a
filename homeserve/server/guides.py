"""What an answer has to look like, as a `Guide` for the rank that draws it.

Who wins. The grammar: nothing is ever drawn that it forbids, whatever else the request says.

    logit_bias        moves what the grammar allows, and nothing else
    min_tokens,       keep the answer from ending for as long as the grammar lets it go on; where it is complete and
    ignore_eos        nothing else may follow, it ends
    stop,             cut the answer off as always, complete or not: who asks for them gets them (a control token among
    stop_token_ids    `stop_token_ids` ends the answer where the grammar is complete, like the model's own)
    max_tokens        cuts the answer off; it says `length` then, and is the beginning of something that fits
    n                 each choice fits

Thoughts. A constraint is about the answer, so a model that thinks does so before, as its template has it by default,
and as with OpenAI's models: the grammar begins behind the thought. `reasoning_effort: "none"` or `enable_thinking:
false` leaves the thought out, `reasoning_budget` bounds it.

Tools. Where a call must be made, the answer is calls in the model's own format and nothing else. Where one may be made
and a constraint is there, it is one or the other. Where one may be made and a tool is `strict`, calls fit their
schemas, and other text is free. Else the model writes as it likes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from homeserve.errors import InvalidField
from homeserve.server.chat_call import ChatCall, ChoiceOfTool, Constraint, ConstraintKind, Reasoning, Tools
from homeserve.server.constraints import constraint_of
from homeserve.server.fields import Common
from homeserve.server.parts import Served
from homeserve.server.prompts import Prompt
from homeserve.text.dialects import NO_DIALECT, Dialect
from homeserve.text.grammar_wire import Calls, Check, Function
from homeserve.wire.records import Guide, pack_ints

if TYPE_CHECKING:
    from homeserve.text.dialects import CallForm
    from homeserve.text.tokenizer import Tokenizer

_ANY_OBJECT = {"type": "object"}


async def guide_of(served: Served, call: ChatCall, prompt: Prompt) -> Guide | None:
    """None where the model may write what it likes. Raises InvalidField, SchemaUnsatisfiable."""
    constraint = _one_constraint(call)
    dialect = served.dialect
    calls = _calls(call.tools, dialect.call, constrained=constraint is not None)
    grammar = ""
    if constraint is not None or calls is not None:
        check = _check(constraint, calls, in_channels=dialect.in_channels)
        where = constraint.where if constraint is not None else call.where.tools
        grammar = await served.grammars.check(check, where, call.where.tools, call.where.parameters)
    ends = guide_ends(served.tokenizer, call.fields, served.bounds.vocab)
    in_thought = dialect.starts_in_thought(prompt.text or "")
    return make_guide(grammar, ends, dialect, call.reasoning, in_thought, served.tokenizer)


def guiding_field(call: ChatCall) -> str:
    """The field to blame where an answer's own grammar fails. Raises InvalidField."""
    constraint = _one_constraint(call)
    return constraint.where if constraint is not None else call.where.tools


async def completion_guide(served: Served, fields: Common) -> Guide | None:
    """For a text that is gone on with: no thoughts, no tools. Raises InvalidField, SchemaUnsatisfiable."""
    constraint = constraint_of(fields)
    if constraint is None:
        return None
    grammar = await served.grammars.check(_check(constraint, None, in_channels=False), constraint.where)
    ends = guide_ends(served.tokenizer, fields, served.bounds.vocab)
    return make_guide(grammar, ends, NO_DIALECT, Reasoning(), False, served.tokenizer)


def make_guide(
    grammar: str, ends: Sequence[int], dialect: Dialect, reasoning: Reasoning, in_thought: bool, tokenizer: Tokenizer
) -> Guide | None:
    """`in_thought`: the prompt has opened one. None where there is neither a grammar nor a bound on the thought."""
    thought = dialect.thought
    budget = -1 if reasoning.budget is None else reasoning.budget
    if thought is None or (not in_thought and reasoning.enabled is False):
        return Guide(grammar, pack_ints(list(ends))) if grammar else None
    if not grammar and budget < 0:
        return None
    return Guide(
        grammar,
        ends=pack_ints(list(ends)),
        thought_opens=pack_ints(tokenizer.encode(thought.opens, add_special=False, parse_special=True)),
        thought_closes=pack_ints(tokenizer.encode(thought.closes, add_special=False, parse_special=True)),
        in_thought=in_thought,
        thought_budget=budget,
    )


def guide_ends(tokenizer: Tokenizer, fields: Common, vocab: int) -> list[int]:
    """Tokens that end an answer where its grammar is complete: the model's, and the client's as far as they are no
    text (those cut it off)."""
    ends = tokenizer.end_ids | (frozenset(fields.stop_token_ids or ()) & tokenizer.special_ids)
    return sorted(token for token in ends if token < vocab)


# -------------------------------------------------------------------------------------------------------------- checks


def _one_constraint(call: ChatCall) -> Constraint | None:
    """That of the route's own fields, or of the fields that all routes have; None where a call has to be made, which
    leaves it aside. Raises InvalidField for both."""
    said = constraint_of(call.fields)
    if said is not None and call.constraint is not None:
        what = f"says what the answer has to be, and {call.constraint.where} does so too: give one"
        raise InvalidField(said.where, what)
    must_call = call.tools.callable and call.tools.choice is not ChoiceOfTool.AUTO
    return None if must_call else call.constraint or said


def _check(constraint: Constraint | None, calls: Calls | None, *, in_channels: bool) -> Check:
    if constraint is None:
        return Check(calls=calls, in_channels=in_channels)
    value = _ANY_OBJECT if constraint.kind is ConstraintKind.JSON_OBJECT else constraint.value
    return Check(constraint.kind.value, value, constraint.strict, calls, in_channels)


def _calls(tools: Tools, form: CallForm | None, *, constrained: bool) -> Calls | None:
    """What the grammar has to know of calls; None where it has nothing to do with them."""
    if not tools.callable:
        return None
    needs: dict[ChoiceOfTool, Callable[[], bool]] = {
        ChoiceOfTool.REQUIRED: lambda: True,
        ChoiceOfTool.ONE: lambda: True,
        ChoiceOfTool.AUTO: lambda: constrained or any(tool.strict for tool in tools.offered),
    }
    if not needs[tools.choice]():
        return None
    one = tools.choice is ChoiceOfTool.ONE
    offered = [tool for tool in tools.offered if not one or tool.name == tools.name]
    return Calls(
        form=form.name if form is not None else "",
        functions=[
            Function(tool.name, dict(tool.parameters) if tool.parameters is not None else None, tool.strict)
            for tool in offered
        ],
        parallel=tools.parallel and not one,
        free=tools.choice is ChoiceOfTool.AUTO and not constrained,
    )
