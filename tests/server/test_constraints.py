"""Constrained answers of a real server: the official client, every kind of constraint, on both routes, streamed too."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import jsonschema
import openai
import psutil
import pydantic
import pytest

ADA: list[Any] = [{"role": "user", "content": "Ada is 36 years old and likes music. Who is she?"}]
GBNF = 'root ::= "I say: " word (", " word){1,3} end\nword ::= [a-z]+\nend ::= "." | "!"'
LARK = 'start: "I say: " WORD (", " WORD)~1..3 ("." | "!")\nWORD: /[a-z]{1,12}/'
SAID = re.compile(r"I say: [a-z]+(, [a-z]+){1,3}[.!]")
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["person", "place"]},
        "likes": {"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "kind", "likes"],
    "additionalProperties": False,
}


class Home(pydantic.BaseModel):
    city: str = pydantic.Field(max_length=20)
    rooms: list[Literal["kitchen", "hall"]] = pydantic.Field(max_length=2)


class Person(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=20, description="The name.")
    age: int = pydantic.Field(ge=0, le=150)
    kind: Literal["person", "place"]
    home: Home | None


@pytest.fixture
def client(server: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=100) as made:
        yield made


def chat(client: openai.OpenAI, **more: Any) -> Any:
    asked: dict[str, Any] = {"model": "", "messages": ADA, "max_tokens": 120, "temperature": 1.5, "seed": 7, **more}
    own = {name: asked.pop(name) for name in list(asked) if name in OWN}
    return client.chat.completions.create(**asked, extra_body=own)


OWN = (
    "regex", "grammar", "json_schema", "guided_choice", "guided_json", "structured_outputs", "ignore_eos", "min_tokens",
    "stop_token_ids",
)  # fmt: skip


def test_the_client_parses_into_a_model_of_pydantic(client: openai.OpenAI) -> None:
    made = client.chat.completions.parse(
        model="", messages=ADA, response_format=Person, temperature=0, max_tokens=200, seed=1
    )
    person = made.choices[0].message.parsed
    assert isinstance(person, Person) and made.choices[0].finish_reason == "stop"


def test_a_stream_of_the_client_parses_as_well(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model="", messages=ADA, response_format=Person, temperature=0, max_tokens=200, seed=1
    ) as stream:
        pieces = [event.delta for event in stream if event.type == "content.delta"]
        made = stream.get_final_completion()
    person = made.choices[0].message.parsed
    assert isinstance(person, Person) and len(pieces) > 5
    assert Person.model_validate_json("".join(pieces)) == person


@pytest.mark.parametrize("strict", [True, False])
def test_a_schema_holds_at_any_temperature(client: openai.OpenAI, strict: bool) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": strict}}
    made = chat(client, response_format=wanted, n=4)
    assert [choice.finish_reason for choice in made.choices] == ["stop"] * 4
    texts = [choice.message.content for choice in made.choices]
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)
        assert text == json.dumps(json.loads(text), ensure_ascii=False), "one blank behind commas and colons"
    assert len(set(texts)) > 1


def test_a_json_object_is_one(client: openai.OpenAI) -> None:
    made = chat(client, response_format={"type": "json_object"}, temperature=0)
    assert made.choices[0].finish_reason == "stop" and isinstance(json.loads(made.choices[0].message.content), dict)


KINDS: list[tuple[dict[str, Any], Any]] = [
    ({"regex": r"[A-Z][a-z]{2,8} is \d+ years old\."}, re.compile(r"[A-Z][a-z]{2,8} is \d+ years old\.")),
    ({"grammar": GBNF}, SAID),
    ({"grammar": LARK}, SAID),
    ({"guided_choice": ["yes", "no", "I don't know"]}, re.compile("yes|no|I don't know")),
    ({"structured_outputs": {"regex": "(a|b){5}"}}, re.compile("(a|b){5}")),
    ({"json_schema": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2}}, re.compile(
        r"\[(true|false), (true|false)\]")),
]  # fmt: skip


@pytest.mark.parametrize("asked, form", KINDS, ids=lambda case: str(case)[:50])
def test_every_kind_holds_in_chats_streams_and_completions(client: openai.OpenAI, asked: Any, form: Any) -> None:
    body = chat(client, **asked)
    chunks = list(chat(client, **asked, stream=True))
    completion = client.completions.create(
        model="", prompt="Ada said: ", max_tokens=120, temperature=1.5, seed=3, extra_body=asked
    )
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert streamed == body.choices[0].message.content
    for choice, text in ((body.choices[0], streamed), (completion.choices[0], completion.choices[0].text)):
        if choice.finish_reason == "stop":
            assert form.fullmatch(text), text
        else:
            assert choice.finish_reason == "length"


def test_the_grammar_wins(client: openai.OpenAI, server: Any) -> None:
    told = client.post(f"{server.url}/tokenize", body={"prompt": "!", "add_special": False}, cast_to=object)
    [bang] = told["tokens"]
    pushed = chat(client, regex="[a-z]{3} [a-z]{3}", logit_bias={str(bang): 100})
    assert re.fullmatch("[a-z]{3} [a-z]{3}", pushed.choices[0].message.content)
    for more in ({"ignore_eos": True}, {"min_tokens": 50}, {"ignore_eos": True, "stop_token_ids": [1]}):
        ended = chat(client, regex="a{5,10}", **more)
        assert (ended.choices[0].message.content, ended.choices[0].finish_reason) == ("a" * 10, "stop"), more
    cut = chat(client, regex="(ab){20}", stop="abab", temperature=0)
    assert (cut.choices[0].message.content, cut.choices[0].finish_reason) == ("", "stop"), "who asks to cut gets it"
    short = chat(client, regex="(ab){200}", max_tokens=5)
    assert short.choices[0].finish_reason == "length" and ("ab" * 200).startswith(short.choices[0].message.content)
    assert chat(client, guided_choice=[""]).choices[0].message.content == ""


REFUSED: list[tuple[dict[str, Any], str, str, str]] = [
    ({"json_schema": {"$ref": "#"}}, "json_schema", "schema_unsatisfiable", "nothing can ever fit"),
    ({"json_schema": {"items": {"type": "nil"}}}, "json_schema", "invalid_field", "items: Invalid type: nil"),
    ({"regex": "(a"}, "regex", "invalid_field", "unclosed group"),
    ({"grammar": "root ::= a"}, "grammar", "invalid_field", "'a' not found"),
    ({"regex": "a", "grammar": LARK}, "regex", "invalid_field", "give one"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": {"not": {}}}}},
     "response_format.json_schema.schema", "invalid_field", "not cannot be enforced"),
]  # fmt: skip


@pytest.mark.parametrize("asked, field, code, words", REFUSED, ids=lambda case: str(case)[:40])
def test_what_cannot_be_is_said(client: openai.OpenAI, asked: Any, field: str, code: str, words: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, **asked)
    assert (caught.value.param, caught.value.code) == (field, code) and words in caught.value.message


def test_a_grammar_beyond_its_bounds_is_the_clients_error(client: openai.OpenAI) -> None:
    """One whose check sees nothing wrong at its beginning, and which is too much for a rank further on."""
    many = "start: /[a-z]{3}/ " + " ".join('("a"|"b")?' for _ in range(2000))
    with pytest.raises(openai.BadRequestError) as body:
        chat(client, grammar=many, max_tokens=3)
    assert (body.value.param, body.value.code) == (
        "grammar",
        "invalid_field",
    ) and "no token could be drawn" in body.value.message
    with pytest.raises(openai.APIError, match="no token could be drawn: .* items"):
        list(chat(client, grammar=many, max_tokens=3, stream=True))
    with pytest.raises(openai.BadRequestError, match="no token could be drawn: .* items"):
        client.completions.create(model="", prompt="x", extra_body={"grammar": many})


def test_hostile_grammars_and_dead_helpers_do_not_touch_other_streams(client: openai.OpenAI, server: Any) -> None:
    assert chat(client, guided_choice=["x"]).choices[0].message.content == "x"
    plain = {"max_tokens": 100, "temperature": 0, "min_tokens": 100, "stream": True}

    def read() -> str:
        return "".join(chunk.choices[0].delta.content or "" for chunk in chat(client, **plain) if chunk.choices)

    alone = read()
    hostile: list[dict[str, Any]] = [
        {"regex": "(.*a){30}.{30}" * 40},
        {"grammar": "start: " + " ".join('("a"|"b")?' for _ in range(5000))},
        {"regex": "((((a{1,999}){1,999}){1,999}){1,999}){1,999}"},
        {"grammar": "root ::= " + "(" * 20_000},
    ]
    with ThreadPoolExecutor(1) as pool:
        beside = pool.submit(read)
        for asked in hostile:
            try:
                chat(client, **asked, max_tokens=3)
            except openai.APIStatusError as error:
                assert error.status_code == 400
        killed = helpers(server.pid)
        for child in killed:
            child.kill()
        assert psutil.wait_procs(killed, timeout=20)[1] == []
        assert beside.result(100) == alone
    assert re.fullmatch("z+", chat(client, regex="z{1,5}").choices[0].message.content), "a new helper checks"


def helpers(pid: int) -> list[psutil.Process]:
    children = psutil.Process(pid).children(recursive=True)
    return [child for child in children if any("grammar_worker" in word for word in child.cmdline())]


def test_the_helpers_memory_is_told(client: openai.OpenAI, server: Any, wait_until: Callable[..., Any]) -> None:
    """No later than with the next measurement: one of the last second is given again."""
    chat(client, guided_choice=["memory"])
    assert len(helpers(server.pid)) == 1

    def row() -> dict[str, Any] | None:
        rows = {row["line"]: row for row in server.get("/v1/homeserve/budget")[1]["measured"]}
        found: dict[str, Any] = rows["grammar process"]
        return found if found["measured_mib"] else None

    found = wait_until("a measurement with the helper", row)
    assert 5 < found["measured_mib"] <= found["predicted_mib"], found
