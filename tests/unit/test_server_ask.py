"""From checked fields to calls of the engine: seeds, limits of tokens, end tokens, prompts."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from homeserve.errors import ContextOverflow, InvalidField
from homeserve.server.ask import Ask, Terms, ask_for, derived_seed, make_ask
from homeserve.server.bounds import Bounds
from homeserve.server.fields import ChatRequest, CompletionRequest, Message
from homeserve.server.openai import chat_call
from homeserve.server.prompts import Prompt, chat_prompt, completion_prompts
from homeserve.wire.records import Dry

END = 256
BOUNDS = Bounds(vocab=258, context=4096, sequences=1000)


class ByteTokenizer:
    """Ids 0..255 are bytes, 256 ends, 257 begins."""

    vocab_size = 258
    end_ids = frozenset({END})
    special_ids = frozenset({END, 257})
    bos_id: int | None = 257
    eos_id = END

    def __init__(self, add_bos: bool = False) -> None:
        self.add_bos = add_bos

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        return ([257] if add_special and self.add_bos else []) + list(text.encode())

    def decode(self, ids: Any) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else b""

    def token_text(self, token: int) -> str:
        return {END: "<end>", 257: "<begin>"}.get(token) or chr(token)


class EchoTemplates:
    """Writes what it was given, so that tests see it."""

    def __init__(self, text: str | None = None) -> None:
        self.text = text
        self.seen: dict[str, Any] = {}

    async def render(self, messages: Any, tools: Any = None, add_generation_prompt: bool = True, **more: Any) -> str:
        self.seen = {"messages": messages, "tools": tools, "prompt": add_generation_prompt, **more}
        return "".join(m["content"] for m in messages) if self.text is None else self.text


def ask(
    prompts: list[Prompt] | None = None,
    context: int = 100,
    vocab: int = ByteTokenizer.vocab_size,
    sequences: int = 1000,
    **fields: Any,
) -> Ask:
    decoded = msgspec.json.decode(msgspec.json.encode({"prompt": "hi", **fields}), type=CompletionRequest)
    tokenizer: Any = ByteTokenizer()
    bounds = Bounds(vocab, context, sequences)
    return make_ask(decoded, prompts or [Prompt((1, 2, 3))], tokenizer, bounds=bounds, request_id="r")


def test_choices_use_seeds_that_follow_from_the_request() -> None:
    four = [call.sampling.seed for call in ask(seed=7, n=4).calls]
    assert four[0] == 7 == ask(seed=7).calls[0].sampling.seed
    assert len(set(four)) == 4
    assert four == [call.sampling.seed for call in ask(seed=7, n=4).calls]
    assert all(0 <= seed < 2**63 for seed in four)


def test_without_a_seed_each_request_draws_its_own() -> None:
    assert len({ask().calls[0].sampling.seed for _ in range(8)}) == 8


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, -(2**63)])
def test_any_seed_becomes_one_that_a_rank_can_use(seed: int) -> None:
    assert all(0 <= derived_seed(seed, k) < 2**63 for k in range(16))


def chat_ask(**fields: Any) -> Ask:
    decoded = msgspec.convert({"messages": [{"role": "user"}], **fields}, ChatRequest)
    tokenizer: Any = ByteTokenizer()
    call = chat_call(decoded)
    terms = Terms(call.max_tokens, call.logprobs)
    return ask_for(call.fields, terms, [Prompt((1, 2, 3))], tokenizer, bounds=Bounds(258, 100, 8), request_id="r")


def test_a_chat_answer_gets_the_rest_of_the_context_and_a_completion_16_tokens() -> None:
    assert chat_ask().calls[0].max_tokens == 97
    assert chat_ask(max_tokens=5, max_completion_tokens=3).calls[0].max_tokens == 3
    assert ask(context=100).calls[0].max_tokens == 16
    assert ask(context=10).calls[0].max_tokens == 7
    assert ask(context=100, min_tokens=20).calls[0].max_tokens == 20


def test_limits_of_tokens_are_clipped_to_the_context() -> None:
    assert ask(context=100, max_tokens=500).calls[0].max_tokens == 97
    assert ask(context=100, max_tokens=5).calls[0].max_tokens == 5
    assert ask(context=100, max_tokens=5, max_completion_tokens=3).calls[0].max_tokens == 3


def test_a_prompt_without_room_is_an_overflow_that_says_the_numbers() -> None:
    with pytest.raises(ContextOverflow, match="has 3 tokens, the limit is 3") as caught:
        ask(context=3)
    assert caught.value.code == "context_overflow" and "--context" in caught.value.message


def test_no_tokens_asks_the_engine_for_one_and_drops_it() -> None:
    made = ask(max_tokens=0, echo=True, logprobs=1)
    assert made.silent and made.calls[0].max_tokens == 1 and made.calls[0].prompt_logprobs == 1


def test_ignore_eos_forbids_the_end_for_the_whole_sequence() -> None:
    call = ask(ignore_eos=True, max_tokens=9).calls[0]
    assert call.end_tokens == frozenset()
    assert call.sampling.forbidden == (END,) and call.sampling.min_tokens == 9


def test_ignore_eos_keeps_the_ends_that_the_client_names() -> None:
    call = ask(ignore_eos=True, max_tokens=9, stop_token_ids=[10]).calls[0]
    assert call.end_tokens == {10} and call.sampling.forbidden == (END,)
    call = ask(ignore_eos=True, max_tokens=9, stop_token_ids=[END]).calls[0]
    assert call.end_tokens == {END} and call.sampling.forbidden == ()


def test_min_tokens_forbids_the_end_for_a_while() -> None:
    call = ask(min_tokens=4, stop_token_ids=[10]).calls[0]
    assert call.end_tokens == {END, 10}
    assert call.sampling.forbidden == (10, END) and call.sampling.min_tokens == 4
    assert ask().calls[0].sampling.forbidden == ()


def test_top_p_of_nothing_is_the_most_likely_token() -> None:
    sampling = ask(top_p=0).calls[0].sampling
    assert sampling.top_k == 1 and sampling.top_p == 1.0
    assert ask(top_k=-1).calls[0].sampling.top_k == 0


def test_bias_of_a_token_that_is_not_there_is_refused() -> None:
    assert ask(logit_bias={"5": -3, "1": 2}).calls[0].sampling.logit_bias == ((1, 2.0), (5, -3.0))
    with pytest.raises(InvalidField, match="logit_bias"):
        ask(logit_bias={"258": 1})


@pytest.mark.parametrize("field", ["logit_bias", "stop_token_ids"])
def test_ids_that_only_the_tokenizer_has_are_refused(field: str) -> None:
    """A rank refuses the whole plan that names one."""

    def told(token: int) -> Any:
        return {str(token): 1} if field == "logit_bias" else [token]

    assert ask(vocab=200, min_tokens=1, **{field: told(199)})
    for token in (200, 257, 2**31 - 1):
        with pytest.raises(InvalidField, match=f"{field}: {token} is no token id of this model .0 to 199"):
            ask(vocab=200, min_tokens=1, **{field: told(token)})


def test_ends_that_the_model_cannot_draw_are_not_forbidden_to_it() -> None:
    call = ask(vocab=200, ignore_eos=True, max_tokens=3).calls[0]
    assert call.sampling.forbidden == () and call.end_tokens == frozenset()


def test_prompts_times_choices_is_bounded() -> None:
    assert len(ask([Prompt((1,))] * 8, n=16).calls) == 128
    with pytest.raises(InvalidField, match="n: "):
        ask([Prompt((1,))] * 9, n=16)


def test_more_sequences_than_the_server_holds_are_not_to_be_tried_again() -> None:
    assert ask(n=6, sequences=6)
    with pytest.raises(InvalidField, match="n: .* more than 6 on this server .--max-running plus --max-waiting"):
        ask(n=7, sequences=6)
    with pytest.raises(InvalidField, match="prompt: has 7 entries; the limit is 6"):
        ask([Prompt((1,))] * 7, sequences=6)


def test_calls_have_names_of_their_own() -> None:
    assert [call.request_id for call in ask([Prompt((1,)), Prompt((2,))], n=2).calls] == ["r.0", "r.1", "r.2", "r.3"]


def test_empty_stop_strings_are_no_stop_strings() -> None:
    assert ask(stop="").stops == () and ask(stop=["", "a"]).stops == ("a",) and ask(stop="b").stops == ("b",)


# ------------------------------------------------------------------------------------------------------------ prompts


def prompts_of(prompt: Any, add_bos: bool = False, bounds: Bounds = BOUNDS) -> list[Prompt]:
    tokenizer: Any = ByteTokenizer(add_bos)
    return asyncio.run(completion_prompts(tokenizer, prompt, bounds))


def test_prompts_are_texts_or_ids_alone_or_in_lists() -> None:
    assert prompts_of("ab") == [Prompt((97, 98), "ab")]
    assert prompts_of(["a", "b"]) == [Prompt((97,), "a"), Prompt((98,), "b")]
    assert prompts_of([97, 98]) == [Prompt((97, 98))]
    assert prompts_of([[97], [98]]) == [Prompt((97,)), Prompt((98,))]
    assert prompts_of("x" * 3000, add_bos=True)[0].ids == (257, *b"x" * 3000)


@pytest.mark.parametrize(
    ("prompt", "path"),
    [([], "prompt"), ("", "prompt"), (["a", 1], "prompt"), ([1, 300], "prompt[1]"), ([[1], []], "prompt[1]")]
    + [([["a"] * 0], "prompt[0]"), (["a"] * 129, "prompt"), ([[-1]], "prompt[0][0]"), (["a", ""], "prompt[1]")],
)
def test_a_wrong_prompt_is_named(prompt: Any, path: str) -> None:
    with pytest.raises(InvalidField) as caught:
        prompts_of(prompt)
    assert caught.value.param == path


def test_a_prompt_longer_than_the_context_is_not_looked_at() -> None:
    small = Bounds(258, 100, 8)
    with pytest.raises(ContextOverflow, match="has 100 tokens, the limit is 99"):
        prompts_of([999] * 100, bounds=small)
    with pytest.raises(ContextOverflow, match=r"has 100 tokens") as caught:
        prompts_of([[1], [999] * 100], bounds=small)
    assert caught.value.param == "prompt[1]"

    class Unused(ByteTokenizer):
        def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
            raise AssertionError("too long to be cut")

    tokenizer: Any = Unused()
    with pytest.raises(ContextOverflow, match="at least 5000 tokens, the limit is 99"):
        asyncio.run(completion_prompts(tokenizer, "x" * 5000, small))
    templates: Any = EchoTemplates()
    with pytest.raises(ContextOverflow) as caught:
        message = Message(role="user", content="x" * 5000)
        asyncio.run(
            chat_prompt(
                templates,
                tokenizer,
                [message],
                bounds=small,
                tools=None,
                add_generation_prompt=True,
                template_arguments={},
            )
        )
    assert caught.value.param == "messages" and not templates.seen


def test_text_with_a_token_that_the_model_lacks_is_refused_by_its_name() -> None:
    narrow = Bounds(200, 100, 8)
    with pytest.raises(InvalidField, match="prompt: has the token 'Ã' .195., for which the model has no weights"):
        prompts_of("é", bounds=Bounds(195, 100, 8))
    with pytest.raises(InvalidField, match="prompt: has the token '<begin>' .257."):
        prompts_of("a", add_bos=True, bounds=narrow)
    with pytest.raises(InvalidField, match="messages: has the token '<begin>'"):
        conversation([{"role": "user", "content": "a"}], add_bos=True, bounds=narrow)
    with pytest.raises(InvalidField, match=r"prompt\[1\]: 200 is no token id of this model"):
        prompts_of([1, 200], bounds=narrow)


def conversation(messages: Any, add_bos: bool = False, text: str | None = None, **more: Any) -> tuple[Prompt, Any]:
    templates: Any = EchoTemplates(text)
    tokenizer: Any = ByteTokenizer(add_bos)
    decoded = msgspec.json.decode(msgspec.json.encode(messages), type=list[Message])
    arguments: dict[str, Any] = {
        "bounds": BOUNDS,
        "tools": None,
        "add_generation_prompt": True,
        "template_arguments": {},
    } | more
    return asyncio.run(chat_prompt(templates, tokenizer, decoded, **arguments)), templates.seen


def test_templates_get_plain_messages() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    prompt, seen = conversation(
        [
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "content": "1", "tool_call_id": "c"},
        ],
        tools=[{"type": "function"}],
        template_arguments={"enable_thinking": False},
    )
    assert prompt.text == "be briefa\nb1"
    assert [m["role"] for m in seen["messages"]] == ["system", "user", "assistant", "tool"]
    assert seen["messages"][2]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": 1}}
    assert seen["messages"][3]["tool_call_id"] == "c"
    assert seen["tools"] == [{"type": "function"}] and seen["enable_thinking"] is False


def test_many_messages_and_many_ids_are_prepared_off_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    original = asyncio.to_thread

    async def watched(function: Any, *args: Any, **more: Any) -> Any:
        called.append(function.__name__)
        return await original(function, *args, **more)

    monkeypatch.setattr(asyncio, "to_thread", watched)
    conversation([{"role": "user", "content": [{"type": "text", "text": "a"}] * 300}])
    assert prompts_of([7] * 2000)[0].ids == (7,) * 2000
    assert {"_template_messages", "_ids_prompt"} <= set(called)
    called.clear()
    prompts_of([7] * 10)
    assert not called


@pytest.mark.parametrize(
    ("message", "path"),
    [
        ({"role": "robot", "content": "x"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            "messages[0].content[0].type",
        ),
        ({"role": "user", "content": [{"type": "input_audio"}]}, "messages[0].content[0].type"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
    ],
)
def test_a_wrong_message_is_named(message: Any, path: str) -> None:
    with pytest.raises(InvalidField) as caught:
        conversation([message])
    assert caught.value.param == path


def test_images_are_said_to_be_unsupported() -> None:
    with pytest.raises(InvalidField, match="not supported"):
        conversation([{"role": "user", "content": [{"type": "image_url"}]}])


def test_the_beginning_token_comes_once() -> None:
    messages = [{"role": "user", "content": "a"}]
    assert conversation(messages)[0].ids == (97,)
    assert conversation(messages, add_bos=True)[0].ids == (257, 97)


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "self"])
def test_template_arguments_cannot_replace_what_is_set_otherwise(name: str) -> None:
    with pytest.raises(InvalidField, match=f"chat_template_kwargs.{name}"):
        conversation([{"role": "user", "content": "a"}], template_arguments={name: []})


def test_chat_and_completions_read_the_same_sampling_fields() -> None:
    shared: dict[str, Any] = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "typical_p": 0.8, "seed": 3}
    shared |= {"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.3}
    shared |= {"dry_multiplier": 0.8, "xtc_probability": 0.5, "xtc_threshold": 0.2, "top_n_sigma": 1.5}
    assert chat_ask(**shared).calls[0].sampling == ask(**shared).calls[0].sampling


def test_the_penalty_on_repetition_has_two_names() -> None:
    assert ask(repeat_penalty=1.3).calls[0].sampling.repetition_penalty == 1.3
    assert ask(repetition_penalty=1.3).calls[0].sampling.repetition_penalty == 1.3


def test_dry_is_what_was_said_and_otherwise_as_llama_cpp_has_it() -> None:
    assert ask(dry_multiplier=0.8).calls[0].sampling.dry == Dry(0.8, 1.75, 2, -1, ("\n", ":", '"', "*"))
    said = {"dry_base": 2, "dry_allowed_length": 4, "dry_penalty_last_n": 64, "dry_sequence_breakers": ["", "ab"]}
    assert ask(dry_multiplier=3, **said).calls[0].sampling.dry == Dry(3.0, 2.0, 4, 64, ("ab",))
    none = ask(dry_multiplier=1, dry_sequence_breakers=[], dry_allowed_length=0).calls[0].sampling.dry
    assert none == Dry(1.0, allowed_len=0)


@pytest.mark.parametrize("off", [{}, {"dry_multiplier": 0}, {"dry_multiplier": -2}])
def test_dry_without_a_multiplier_is_off(off: dict[str, Any]) -> None:
    assert ask(dry_base=1.5, dry_allowed_length=3, **off).calls[0].sampling.dry is None
    assert ask(dry_multiplier=1, dry_penalty_last_n=0).calls[0].sampling.dry is None


def test_samplers_below_0_are_off() -> None:
    off = ask(xtc_probability=-1, top_n_sigma=-1).calls[0].sampling
    assert (off.xtc_probability, off.xtc_threshold, off.top_n_sigma) == (0.0, 0.1, 0.0)
    on = ask(xtc_probability=0.5, xtc_threshold=0, top_n_sigma=2).calls[0].sampling
    assert (on.xtc_probability, on.xtc_threshold, on.top_n_sigma) == (0.5, 0.0, 2.0)
