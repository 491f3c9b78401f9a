"""Rate limits and keys over real sockets, with the clients that people use."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from http_world import World, serving

from homeserve.errors import SettingError, Unauthorized
from homeserve.server.keys import LOOK_S, KeyRing
from homeserve.settings import read_api_keys

MESSAGES: Any = [{"role": "user", "content": "q"}]


def openai_client(world: World, key: str = "none") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=world.url("/v1"), api_key=key, max_retries=0, timeout=60)


async def test_openais_client_is_told_when_to_come_again() -> None:
    async with serving(rate_limit_requests=2) as world, openai_client(world) as client:
        first = await client.chat.completions.with_raw_response.create(model="tiny", messages=MESSAGES)
        assert first.headers["x-ratelimit-limit-requests"] == "2"
        assert first.headers["x-ratelimit-remaining-requests"] == "1"
        assert "x-ratelimit-limit-tokens" not in first.headers
        await client.chat.completions.create(model="tiny", messages=MESSAGES)
        with pytest.raises(openai.RateLimitError) as caught:
            await client.chat.completions.create(model="tiny", messages=MESSAGES)
        headers = caught.value.response.headers
        assert caught.value.code == "rate_limited" and 29 <= int(headers["Retry-After"]) <= 30
        assert headers["x-ratelimit-remaining-requests"] == "0"
        for path in ("/health", "/ready", "/v1/models", "/v1/homeserve/status", "/version"):
            assert (await world.get(path))[0] == 200, path
        async with world.client.get(world.url("/metrics")) as response:
            text = await response.text()
        assert 'homeserve_rate_limited_total{limit="requests"} 1.0' in text


async def test_anthropics_client_is_told_in_its_own_shape() -> None:
    async with serving(rate_limit_requests=1) as world:
        async with anthropic.AsyncAnthropic(base_url=world.url(""), api_key="none", max_retries=0) as client:
            await client.messages.create(model="tiny", max_tokens=3, messages=MESSAGES)
            with pytest.raises(anthropic.RateLimitError) as caught:
                await client.messages.create(model="tiny", max_tokens=3, messages=MESSAGES)
    body: Any = caught.value.body
    assert body["error"]["type"] == "rate_limit_error" and "--rate-limit-requests" in body["error"]["message"]
    assert int(caught.value.response.headers["retry-after"]) >= 59


@pytest.mark.parametrize("stream", [False, True])
async def test_prompt_and_answer_are_charged_also_of_streams(stream: bool) -> None:
    async with serving(rate_limit_tokens=1000) as world:
        assert not stream or await world.chat_stream(max_tokens=4)
        assert stream or (await world.chat(max_tokens=4))[0] == 200
        async with world.client.post(world.url("/tokenize"), json={"prompt": "x"}) as response:
            left = int(response.headers["x-ratelimit-remaining-tokens"])
        assert 1000 - left == len("user: q\n") + 4


async def test_tokens_that_are_used_up_refuse_the_next_request() -> None:
    async with serving(rate_limit_tokens=10) as world:
        assert (await world.chat(max_tokens=8))[0] == 200
        status, body = await world.chat(max_tokens=1)
        assert status == 429 and "--rate-limit-tokens" in body["error"]["message"]


async def test_embeddings_are_charged() -> None:
    async with serving(rate_limit_tokens=100) as world:
        async with world.client.post(world.url("/v1/embeddings"), json={"input": "four"}) as response:
            await response.read()
            left = int(response.headers["x-ratelimit-remaining-tokens"])
        assert left in (96, 97)


async def test_each_key_has_limits_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("anna key-one\nkey-two\n")
    async with serving(rate_limit_requests=1, api_key_file=str(file)) as world:
        for key in ("key-one", "key-two"):
            async with openai_client(world, key) as client:
                await client.chat.completions.create(model="tiny", messages=MESSAGES)
                with pytest.raises(openai.RateLimitError):
                    await client.chat.completions.create(model="tiny", messages=MESSAGES)
        async with openai_client(world, "wrong") as client:
            with pytest.raises(openai.AuthenticationError):
                await client.chat.completions.create(model="tiny", messages=MESSAGES)


# ----------------------------------------------------------------------------------------------------------------- keys


def ring(path: Path) -> tuple[KeyRing, list[float]]:
    now = [0.0]
    return KeyRing(str(path), clock=lambda: now[0]), now


def opens(keys: KeyRing, key: str) -> bool:
    try:
        return keys.check("/v1/models", {"Authorization": f"Bearer {key}"}) is not None
    except Unauthorized:
        return False


def test_a_line_is_a_key_or_its_name_and_the_key(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# all of us\nanna alpha\n\n  beta \ncarl\tgamma\n")
    assert read_api_keys(str(file)) == {"alpha": "anna", "beta": "line-4", "gamma": "carl"}
    keys, _ = ring(file)
    found = keys.check("/v1/models", {"x-api-key": "alpha"})
    assert found is not None and found.name == "anna"
    assert not opens(keys, "anna")
    file.write_text("a b c\n")
    with pytest.raises(SettingError, match="line 1 has 3 words"):
        read_api_keys(str(file))


def test_keys_that_change_count_without_a_restart(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "keys"
    file.write_text("alpha\n")
    keys, now = ring(file)
    file.write_text("anna beta\n")
    assert opens(keys, "alpha") and not opens(keys, "beta"), "not looked at yet"
    now[0] = LOOK_S
    with caplog.at_level(logging.INFO):
        assert opens(keys, "beta") and not opens(keys, "alpha")
    assert "beta" not in caplog.text and "read again" in caplog.text


def test_a_file_that_cannot_be_used_leaves_the_keys(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "keys"
    file.write_text("alpha\n")
    keys, now = ring(file)
    for moment in (1, 2):
        if moment == 1:
            file.write_text("")
        else:
            file.unlink()
        now[0] = moment * LOOK_S
        assert opens(keys, "alpha") and not opens(keys, "")
    assert caplog.text.count("stay as they were") == 2
    file.write_text("beta\n")
    now[0] += LOOK_S
    assert opens(keys, "beta") and not opens(keys, "alpha")
