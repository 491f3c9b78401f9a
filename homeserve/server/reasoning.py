"""Whether and how much a model thinks, from what a request says of it in several places."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from homeserve.errors import InvalidField
from homeserve.server.chat_call import Reasoning

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
BUDGETS = ("reasoning_budget", "thinking_budget", "thinking_token_budget")
"""Fields that bound the tokens of a thought; they mean the same."""
SWITCHES = ("enable_thinking", "thinking")
"""Variables by which templates are told whether the model is to think: each knows one of them."""
_EFFORTS = {"minimal": "low", "xhigh": "high", "max": "high"}
"""Templates know low, medium and high."""


def reasoning_of(fields: object, effort: str | None, template_arguments: Mapping[str, Any]) -> Reasoning:
    """From the effort, the budgets among `fields`, and what the template is told. A budget of no tokens is no thought.

    Raises InvalidField for two budgets that differ.
    """
    budgets = {name: getattr(fields, name) for name in BUDGETS}
    said = {name: budget for name, budget in budgets.items() if budget is not None}
    if len(set(said.values())) > 1:
        names = list(said)
        raise InvalidField(names[1], f"is {said[names[1]]}, but {names[0]}, the same thing, is {said[names[0]]}")
    budget = next(iter(said.values()), None)
    switches = (template_arguments.get(name) for name in SWITCHES)
    enabled = next((switch for switch in switches if isinstance(switch, bool)), None)
    if effort == "none" or (budget == 0 and enabled is None):
        enabled = False
    return Reasoning(enabled=enabled, effort=told_effort(None if effort == "none" else effort), budget=budget)


def told_effort(effort: str | None) -> str | None:
    """An effort in the words that templates know."""
    return None if effort is None else _EFFORTS.get(effort, effort)
