"""Formats of thoughts and tool calls: each row read back from what the family's template renders, as recorded.

tests/data/templates/turns.json holds one assistant turn per family, rendered by `transformers` from a conversation with
a thought and a call, and which of the signs stand in the template. The templates themselves are not kept here.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from homeserve.models import registry
from homeserve.models.dialects import USUAL
from homeserve.text.dialects import CALLS, THOUGHTS, CallBody, CallForm, Dialect, dialect_of

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
WITH_CALLS = sorted(name for name, (_, call) in WANTED.items() if call)


def dialect(name: str) -> Dialect:
    """As for a checkpoint whose template holds the recorded signs."""
    return dialect_of({"default": " ".join(TURNS[name]["signs"])}, NONE)


@pytest.mark.parametrize("name", sorted(WANTED))
def test_the_formats_are_known_by_signs_in_the_template(name: str) -> None:
    found = dialect(name)
    assert (found.thought.name if found.thought else "", found.call.name if found.call else "") == WANTED[name]
    assert set(TURNS) == set(WANTED)


@pytest.mark.parametrize("name", WITH_CALLS)
def test_the_recorded_call_is_read_by_its_row(name: str) -> None:
    form = dialect(name).call
    assert form is not None
    turn = TURNS[name]["turn"]
    answer = turn[turn.index("assistant") :] if form.name == "bare-json" else turn
    assert call_of(form, answer) == ("weather", {"place": "Köln <1>", "days": 2})


def call_of(form: CallForm, turn: str) -> tuple[str, dict[str, Any]]:
    """The one call of a turn, read by nothing but the row."""
    start = turn.index(form.opens) + len(form.opens) if form.opens else turn.index("{")
    body = turn[start : turn.index(form.closes, start)] if form.closes else turn[start:]
    match form.body:
        case CallBody.JSON_OBJECT | CallBody.JSON_LIST:
            value, _ = json.JSONDecoder().raw_decode(body.strip())
            (found,) = value if form.body is CallBody.JSON_LIST else [value]
            return found[form.name_key], found[form.arguments_key]
        case CallBody.NAME_THEN_JSON:
            head, _, rest = body.partition(form.between)
            name = head.partition(form.id_mark)[0] if form.id_mark else re.split(r"[\s<]", head)[0]
            return name, json.JSONDecoder().raw_decode(rest)[0]
        case CallBody.NAME_THEN_TAGS:
            name, _, rest = body.partition(form.between)
            pairs = re.findall(r"<parameter=([^>]+)>\n(.*?)\n</parameter>", rest, re.DOTALL)
            return name, {key: int(value) if value.isdigit() else value for key, value in pairs}
        case CallBody.NAME_THEN_BRACES:
            name, _, rest = body.partition("{")
            pairs = re.findall(r'(\w+):(?:<\|"\|>(.*?)<\|"\|>|([^,}]+))', rest)
            return name, {key: text if text else int(bare) for key, text, bare in pairs}


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
    found = dialect_of({"default": "x", "tool_use": "<tool_call></tool_call>"}, ("think-tags", "tagged-json"))
    assert found.thought is None and found.call is not None and found.call.name == "tagged-json"
    assert dialect_of({"default": "<tool_call></tool_call><arg_key>"}, NONE).call is None


def test_every_family_has_a_row_of_known_formats() -> None:
    assert set(USUAL) >= set(registry.known())
    thoughts, calls = {form.name for form in THOUGHTS} | {""}, {form.name for form in CALLS} | {""}
    assert all(thought in thoughts and call in calls for thought, call in USUAL.values())
    assert len(thoughts) == len(THOUGHTS) + 1 and len(calls) == len(CALLS) + 1, "no name twice"
