"""The official client against a real server of the default model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest

FRANCE: list[Any] = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
STORY: list[Any] = [{"role": "user", "content": "Tell me a story about a lighthouse keeper and a storm."}]


@pytest.fixture
def client(server: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=100) as made:
        yield made


@pytest.fixture
def model(client: openai.OpenAI) -> str:
    (model,) = client.models.list().data
    assert client.models.retrieve(model.id).id == model.id
    return model.id


@pytest.fixture(autouse=True)
def idle_afterwards(server: Any, wait_until: Callable[..., Any]) -> Iterator[None]:
    """After each test nothing runs, and every page is free or cached."""
    yield
    wait_until("an idle server", lambda: requests_of(server)["running"] == requests_of(server)["waiting"] == 0)
    wait_until("an idle census", lambda: server.get("/v1/homeserve/census")[1]["idle"])
    census = server.get("/v1/homeserve/census")[1]
    assert census["ok"]
    for pool in census["ranks"]:
        assert pool["free"] + pool["cached"] == pool["capacity"] and pool["leaks"] == []


def requests_of(server: Any) -> Any:
    return server.get("/v1/homeserve/status")[1]["requests"]


def text_of(stream: Any, index: int = 0) -> str:
    """Text of one choice of a chat stream."""
    deltas = [choice.delta.content or "" for chunk in stream for choice in chunk.choices if choice.index == index]
    return "".join(deltas)


def test_chat_knows_the_capital_of_france(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(model=model, messages=FRANCE, temperature=0)
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_stream_says_what_a_body_says(client: openai.OpenAI, model: str) -> None:
    asked: dict[str, Any] = {"model": model, "messages": STORY, "temperature": 0, "max_tokens": 40}
    body = client.chat.completions.create(**asked)
    stream = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    assert text_of(chunks) == body.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert len(chunks) > 20
    usage, block = chunks[-1].usage, chunks[-1].model_extra
    assert not chunks[-1].choices and usage is not None and block is not None
    assert usage.completion_tokens == 40
    assert block["homeserve"]["restarts"] == 0 and block["homeserve"]["ttft_ms"] > 0


def test_a_repeated_prompt_is_found_in_the_cache(client: openai.OpenAI, model: str) -> None:
    asked: dict[str, Any] = {"model": model, "messages": STORY, "temperature": 0, "max_tokens": 4}
    first, second = (client.chat.completions.create(**asked) for _ in range(2))
    assert second.usage is not None and second.usage.prompt_tokens_details is not None
    assert second.usage.prompt_tokens_details.cached_tokens
    assert first.choices[0].message.content == second.choices[0].message.content


def test_completions_take_text_batches_and_ids(client: openai.OpenAI, model: str, server: Any) -> None:
    asked: dict[str, Any] = {"model": model, "temperature": 0, "max_tokens": 12}
    one = client.completions.create(prompt="Once upon a time", **asked)
    two = client.completions.create(prompt=["Once upon a time", "The sun is"], **asked)
    assert two.choices[0].text == one.choices[0].text
    assert [choice.index for choice in two.choices] == [0, 1]
    tokens = post(server, "/tokenize", {"prompt": "Once upon a time"})["tokens"]
    ids = client.completions.create(prompt=tokens, **asked)
    assert ids.choices[0].text == one.choices[0].text
    pieces = [chunk.choices[0].text for chunk in client.completions.create(prompt=tokens, stream=True, **asked)]
    assert "".join(pieces) == one.choices[0].text
    assert post(server, "/detokenize", {"tokens": tokens})["prompt"] == "Once upon a time"


def post(server: Any, path: str, body: dict[str, Any]) -> Any:
    import httpx

    answer = httpx.post(server.url + path, json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_logprobs_of_greedy_tokens_are_the_largest(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(
        model=model, messages=FRANCE, temperature=0, max_tokens=8, logprobs=True, top_logprobs=5
    )
    choice = answer.choices[0]
    assert choice.logprobs is not None and choice.logprobs.content
    for entry in choice.logprobs.content:
        assert len(entry.top_logprobs) == 5
        assert entry.logprob <= 0
        assert abs(entry.logprob - max(top.logprob for top in entry.top_logprobs)) < 1e-4
    spelled = b"".join(bytes(entry.bytes or []) for entry in choice.logprobs.content)
    assert spelled.decode() == choice.message.content


def test_echo_scores_the_prompt(client: openai.OpenAI, model: str) -> None:
    prompt = "The capital of France is Paris"
    answer = client.completions.create(model=model, prompt=prompt, max_tokens=1, temperature=0, echo=True, logprobs=1)
    choice = answer.choices[0]
    lists: Any = choice.logprobs
    assert choice.text.startswith(prompt) and lists is not None
    assert lists.tokens and lists.token_logprobs and lists.text_offset
    assert "".join(lists.tokens) == choice.text
    assert lists.token_logprobs[0] is None
    assert all(value is not None and value <= 0 for value in lists.token_logprobs[1:])
    assert all(choice.text[at:].startswith(token) for at, token in zip(lists.text_offset, lists.tokens, strict=True))
    paris = lists.tokens.index(" Paris")
    assert (lists.token_logprobs[paris] or -99) > -3


def test_the_same_seed_gives_the_same_text(client: openai.OpenAI, model: str) -> None:
    def say(seed: int | None) -> str:
        answer = client.chat.completions.create(model=model, messages=STORY, temperature=1, seed=seed, max_tokens=24)
        return answer.choices[0].message.content or ""

    assert say(7) == say(7)
    assert len({say(7), say(8), say(9)}) > 1
    assert say(None) != say(None)


def test_the_first_of_n_choices_is_what_one_would_have_been(client: openai.OpenAI, model: str) -> None:
    asked: dict[str, Any] = {"model": model, "messages": STORY, "temperature": 1, "seed": 3, "max_tokens": 16}
    one = client.chat.completions.create(**asked)
    many = client.chat.completions.create(**asked, n=4)
    texts = [choice.message.content for choice in many.choices]
    assert texts[0] == one.choices[0].message.content
    assert len(set(texts)) > 1
    streamed = list(client.chat.completions.create(**asked, n=4, stream=True))
    assert [text_of(streamed, i) for i in range(4)] == texts


def test_a_stop_string_cuts_the_text_before_it(client: openai.OpenAI, model: str) -> None:
    asked: dict[str, Any] = {"model": model, "messages": FRANCE, "temperature": 0}
    whole = client.chat.completions.create(**asked).choices[0].message.content or ""
    at = whole.index("France")
    for stop in ("France", ["zzz", "France"]):
        answer = client.chat.completions.create(**asked, stop=stop)
        assert answer.choices[0].message.content == whole[:at]
        assert answer.choices[0].finish_reason == "stop"
    streamed = client.chat.completions.create(**asked, stop="France", stream=True)
    assert text_of(streamed) == whole[:at]


def test_closing_a_stream_frees_its_place(
    client: openai.OpenAI, model: str, server: Any, wait_until: Callable[..., Any]
) -> None:
    before = requests_of(server)
    stream = client.chat.completions.create(
        model=model, messages=STORY, stream=True, max_tokens=900, extra_body={"ignore_eos": True}
    )
    for _ in range(4):
        next(stream)
    assert requests_of(server)["running"] == 1
    stream.close()
    wait_until("the place to be free", lambda: requests_of(server)["running"] == 0)
    after = requests_of(server)
    assert after["aborted"] == before["aborted"] + 1 and after["finished"] == before["finished"]


def test_ignore_eos_and_min_tokens_give_exact_counts(client: openai.OpenAI, model: str) -> None:
    exact = client.chat.completions.create(
        model=model, messages=FRANCE, temperature=0, max_tokens=30, extra_body={"ignore_eos": True}
    )
    assert exact.usage is not None and exact.usage.completion_tokens == 30
    least = client.chat.completions.create(
        model=model, messages=FRANCE, temperature=0, max_tokens=40, extra_body={"min_tokens": 20}
    )
    assert least.usage is not None and least.usage.completion_tokens >= 20


def test_bias_changes_what_is_said(client: openai.OpenAI, model: str, server: Any) -> None:
    paris = post(server, "/tokenize", {"prompt": " Paris", "add_special": False})["tokens"]
    assert len(paris) == 1
    answer = client.chat.completions.create(
        model=model, messages=FRANCE, temperature=0, max_tokens=12, logit_bias={str(paris[0]): -100}
    )
    assert " Paris" not in (answer.choices[0].message.content or "")


def test_errors_are_the_clients_own(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model=model, messages=FRANCE, temperature=-1)
    assert wrong.value.code == "invalid_field" and wrong.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(model=model, messages=[{"role": "user", "content": "word " * 2000}])
    assert long.value.code == "context_overflow" and "1024" in long.value.message
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="gpt-9", messages=FRANCE)
    assert unknown.value.code == "model_not_found" and model in unknown.value.message
    with pytest.raises(openai.BadRequestError) as image:
        client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}],
        )
    assert "not supported" in image.value.message and image.value.param == "messages[0].content[0].type"
    with pytest.raises(openai.BadRequestError) as structured:
        client.chat.completions.create(model=model, messages=FRANCE, response_format={"type": "xml"})  # type: ignore[call-overload]
    assert structured.value.param == "response_format.type"
