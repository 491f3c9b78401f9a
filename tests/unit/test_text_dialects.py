"""Formats of thoughts and tool calls, known by signs in templates (test_text_reading.py reads what they render).

tests/data/templates/turns.json holds one assistant turn per family, rendered by `transformers` from a conversation with
a thought and a call, and which of the signs stand in the template. The templates themselves are not kept here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from homeserve.models import registry
from homeserve.models.dialects import USUAL
from homeserve.text.dialects import CALLS, THOUGHTS, Dialect, dialect_of

TURNS: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parent.parent / "data" / "templates" / "turns.json").read_text()
)["families"]
NONE = ("", "")
WANTED = {
    "qwen2": ("", "tagged-json"),
    "qwen3": ("think-tags", "tagged-json"),
    "qwen35": ("think-tags", "function-tags"),
    "qwen3-coder": ("", "function-tags"),
    "gemma2": NONE,
    "gemma4": ("channel-tags", "call-braces"),
    "gpt-oss": ("channels", "channels"),
    "llama3": ("", "bare-json"),
    "llama3.2": ("", "bare-json"),
    "mistral-nemo": ("", "bracket-list"),
    "mistral-small": ("", "bracket-args"),
    "ministral3": ("bracket-think", "bracket-args"),
}


def dialect(name: str) -> Dialect:
    """As for a checkpoint whose template holds the recorded signs."""
    return dialect_of({"default": " ".join([*TURNS[name]["signs"], "tools"])}, NONE)


@pytest.mark.parametrize("name", sorted(WANTED))
def test_the_formats_are_known_by_signs_in_the_template(name: str) -> None:
    found = dialect(name)
    assert (found.thought.name if found.thought else "", found.call.name if found.call else "") == WANTED[name]
    assert set(TURNS) == set(WANTED)


@pytest.mark.parametrize("name", ["qwen3", "qwen35", "gemma4", "gpt-oss"])
def test_the_recorded_thought_is_read_by_its_row(name: str) -> None:
    form, turn = dialect(name).thought, TURNS[name]["turn"]
    assert form is not None
    start = turn.index(form.opens) + len(form.opens)
    assert turn[start : turn.index(form.closes, start)].strip() == "hm"


def test_a_prompt_may_have_opened_the_thought() -> None:
    assert dialect("qwen35").starts_in_thought(TURNS["qwen35"]["turn"])
    assert not dialect("qwen3").starts_in_thought(TURNS["qwen3"]["turn"])
    assert not dialect("gemma2").starts_in_thought("<think>")


def test_without_a_template_the_familys_usual_formats_stand() -> None:
    found = dialect_of({}, ("think-tags", "tagged-json"))
    assert found.thought is not None and found.call is not None
    assert (found.thought.name, found.call.name) == ("think-tags", "tagged-json")
    assert dialect_of({}, NONE) == Dialect(None, None)
    with pytest.raises(KeyError):
        dialect_of({}, ("nobody", ""))


def test_signs_of_any_template_count_and_others_do_not() -> None:
    found = dialect_of({"default": "x", "tool_use": "tools <tool_call></tool_call>"}, ("think-tags", "tagged-json"))
    assert found.thought is None and found.call is not None and found.call.name == "tagged-json"
    tags = dialect_of({"default": "tools <tool_call></tool_call><arg_key>"}, NONE).call
    assert tags is not None and tags.name == "arg-tags"
    assert dialect_of({"default": "tools <tool_call></tool_call><invoke"}, NONE).call is None


def test_a_template_that_never_tells_of_tools_has_no_call_form() -> None:
    assert dialect_of({"default": "<tool_call></tool_call>"}, NONE).call is None


def test_every_family_has_a_row_of_known_formats() -> None:
    assert set(USUAL) >= set(registry.known())
    thoughts, calls = {form.name for form in THOUGHTS} | {""}, {form.name for form in CALLS} | {""}
    assert all(thought in thoughts and call in calls for thought, call in USUAL.values())
    assert len(thoughts) == len(THOUGHTS) + 1 and len(calls) == len(CALLS) + 1, "no name twice"
