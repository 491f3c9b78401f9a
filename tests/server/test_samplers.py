"""What draws, asked for by name on a real server: a seed's answer is the request's alone; each does what it says."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import httpx

ASKED: dict[str, dict[str, Any]] = {
    "dry": {"dry_multiplier": 0.8, "dry_allowed_length": 1, "temperature": 0.7},
    "dry, all of it": {
        "dry_multiplier": 2.0,
        "dry_base": 1.3,
        "dry_allowed_length": 2,
        "dry_penalty_last_n": 40,
        "dry_sequence_breakers": [",", "."],
        "temperature": 0.0,
    },
    "xtc": {"xtc_probability": 0.5, "xtc_threshold": 0.1},
    "typical_p": {"typical_p": 0.7},
    "top_n_sigma": {"top_n_sigma": 1.5, "temperature": 1.5},
    "penalties": {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    "all": {
        "dry_multiplier": 0.5,
        "xtc_probability": 0.3,
        "xtc_threshold": 0.05,
        "typical_p": 0.95,
        "top_n_sigma": 3.0,
        "repeat_penalty": 1.05,
        "min_p": 0.02,
        "logit_bias": {"28": -2},
    },
}
OTHERS = 16
LIST = "red, green, blue, red, green, blue, red, green, blue, red, green, blue, red, green,"


def request(i: int, **fields: Any) -> dict[str, Any]:
    """A prompt that repeats itself, more than two pages long."""
    words = ["river", "mountain", "lantern", "harbour", "winter", "violin"]
    subject = f"the {words[i % 6]} and the {words[(i + 1 + i // 6) % 6]}"
    prompt = f"A song of {subject}. Oh {subject}, oh {subject}, we sing of {subject}, la la la, la la la, {subject}."
    return {
        "prompt": prompt,
        "max_tokens": 24,
        "seed": 500 + i,
        "temperature": 0.9,
        "ignore_eos": True,
        "return_token_ids": True,
        **fields,
    }


async def say(client: httpx.AsyncClient, body: dict[str, Any]) -> tuple[list[int], int]:
    """The tokens, and how many of the prompt's came from the cache."""
    answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    told = answer.json()
    return told["choices"][0]["token_ids"], told["usage"]["prompt_tokens_details"]["cached_tokens"]


async def test_a_seeds_answer_is_the_same_alone_and_among_sixteen_others(server: Any) -> None:
    """Alone the prompt is computed; among others most of it comes from the cache, and its tokens as a history."""
    asked = [request(i, **fields) for i, fields in enumerate(ASKED.values())]
    async with httpx.AsyncClient(base_url=server.url, timeout=110) as client:
        alone = [(await say(client, body))[0] for body in asked]
        for first in range(0, len(asked), 4):
            own = asked[first : first + 4]
            others = [request(i, max_tokens=40) for i in range(100, 100 + OTHERS)]
            found = await asyncio.gather(*(say(client, body) for body in (*own, *others)))
            assert [tokens for tokens, _ in found[: len(own)]] == alone[first : first + 4]
            assert all(cached >= 32 for _, cached in found[: len(own)])
        plain = [(await say(client, request(i, temperature=body["temperature"])))[0] for i, body in enumerate(asked)]
    same = [name for name, one, other in zip(ASKED, alone, plain, strict=True) if one == other]
    assert not same, "these changed nothing"


def complete(server: Any, **body: Any) -> dict[str, Any]:
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


def test_dry_ends_a_loop_unless_every_token_breaks(server: Any) -> None:
    asked: dict[str, Any] = {"prompt": LIST, "temperature": 0, "max_tokens": 12}
    loop = complete(server, **asked)["text"]
    assert loop.startswith(" blue, red, green, blue")
    ended = complete(server, **asked, dry_multiplier=4.0, dry_sequence_breakers=[])["text"]
    assert not ended.startswith(" blue")
    assert complete(server, **asked, dry_multiplier=4.0)["text"] == ended, "no breaker of those that are usual"
    for breakers in ([","], [" ", ","]):
        broken = complete(server, **asked, dry_multiplier=4.0, dry_sequence_breakers=breakers)["text"]
        assert broken == loop, "a comma is behind every word: no repetition is longer than one"


def test_xtc_leaves_out_the_top_choices(server: Any) -> None:
    asked: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 40, "seed": 4, "logprobs": 3}
    lists = complete(server, **asked, xtc_probability=1.0, xtc_threshold=0.1)["logprobs"]
    others = 0
    for token, top in zip(lists["tokens"], lists["top_logprobs"], strict=True):
        likely = [name for name, value in top.items() if math.exp(value) > 0.101]
        likely.sort(key=lambda name: -top[name])
        if len(likely) > 1:
            others += 1
            assert token not in likely[:-1]
    assert others > 5
    off = complete(server, **asked, xtc_probability=1.0, xtc_threshold=0.51)
    assert off == complete(server, **asked), "no two tokens are that likely"


def test_a_prompts_own_logprobs_are_those_with_which_it_would_be_said(server: Any) -> None:
    """What is generated is scored the same when it comes as a prompt: token, alternatives, values."""
    said = complete(server, prompt="The capital of France", max_tokens=8, temperature=0, logprobs=4)
    whole = "The capital of France" + said["text"]
    echoed = complete(server, prompt=whole, max_tokens=0, echo=True, logprobs=4)
    assert echoed["text"] == whole
    count = len(said["logprobs"]["tokens"])
    assert echoed["logprobs"]["tokens"][-count:] == said["logprobs"]["tokens"]
    for name in ("token_logprobs", "top_logprobs"):
        for one, other in zip(said["logprobs"][name], echoed["logprobs"][name][-count:], strict=True):
            if name == "token_logprobs":
                assert abs(one - other) < 1e-3
            else:
                assert one.keys() == other.keys() and all(abs(one[key] - other[key]) < 1e-3 for key in one)
