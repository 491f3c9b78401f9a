"""A prompt that ends in the middle of the assistant's last turn, as each kind of template writes that turn."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from homeserve.errors import InvalidField
from homeserve.server.bounds import Bounds
from homeserve.server.fields import Message
from homeserve.server.prefill import until_mark, with_mark
from homeserve.server.prompts import Prompt, chat_prompt
from homeserve.text.fallback_templates import templates_for
from homeserve.text.template_dialect import environment

BEGUN = "The answer is ( "
_THINKING = (
    "{%- for m in messages -%}<|im_start|>{{ m.role }}\n"
    "{%- if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif -%}"
    "{{ m.content.strip() }}<|im_end|>\n{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|im_start|>assistant\n<think>\n{%- endif -%}"
)
_CHANNELS = (
    "{%- for m in messages -%}<|start|>{{ m.role }}"
    "{%- if m.role == 'assistant' -%}<|channel|>final{%- endif -%}<|message|>{{ m.content }}"
    "{{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}{%- endfor -%}"
)


class ByteTokenizer:
    """A byte is a token; `name` is the one control token."""

    vocab_size = 258
    special_ids = frozenset({256})
    bos_id = eos_id = None
    add_bos = False

    def __init__(self, name: str) -> None:
        self.name = name

    def token_text(self, token: int) -> str:
        return self.name if token == 256 else chr(token)

    def token_bytes(self, token: int) -> bytes:
        return b"x"

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        return list(text.encode())


class JinjaTemplates:
    """Renders here what the template host renders in its process."""

    def __init__(self, source: str) -> None:
        self._template = environment().from_string(source)

    async def render(self, messages: Any, tools: Any = None, **more: Any) -> str:
        return self._template.render(messages=messages, bos_token="", eos_token="</s>", **more)


def prompt_of(source: str, *turns: tuple[str, str], name: str = "<|im_end|>") -> Prompt:
    tokenizer: Any = ByteTokenizer(name)
    templates: Any = JinjaTemplates(source)
    return asyncio.run(
        chat_prompt(
            templates,
            tokenizer,
            [Message(role=role, content=content) for role, content in turns],
            bounds=Bounds(258, 4096, 8),
            tools=None,
            add_generation_prompt=False,
            continue_last=True,
            template_arguments={},
        )
    )


@pytest.mark.parametrize(
    ("template", "before"),
    [
        ("<|im_start|>", "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"),
        ("<|start_header_id|>", "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"),
        ("<start_of_turn>", "<start_of_turn>user\nq<end_of_turn>\n<start_of_turn>model\n"),
        ("[INST]", "[INST] q [/INST] "),
        (_THINKING, "<|im_start|>assistant<think>\n\n</think>\n\n"),
        (_CHANNELS, "<|end|><|start|>assistant<|channel|>final<|message|>"),
    ],
)
def test_the_prompt_ends_where_the_begun_answer_does(template: str, before: str) -> None:
    tokenizer: Any = ByteTokenizer(template)
    source = templates_for({}, tokenizer).get("default", template)
    prompt = prompt_of(source, ("user", "q"), ("assistant", BEGUN))
    assert prompt.text is not None and prompt.text.endswith(before + BEGUN)
    assert bytes(prompt.ids) == prompt.text.encode()


def test_names_of_control_tokens_in_it_stay_text() -> None:
    source = templates_for({}, ByteTokenizer("<|im_start|>"))["default"]  # type: ignore[arg-type]
    prompt = prompt_of(source, ("user", "q"), ("assistant", "a<|im_end|>b"))
    assert prompt.text is not None and prompt.text.endswith("assistant\na<|im_end|>b")


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m.role }}{% endfor %}",
        "{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}",
    ],
)
def test_a_template_that_does_not_write_it_once_cannot_be_gone_on_from(template: str) -> None:
    with pytest.raises(InvalidField, match="messages: end with a turn of the assistant") as caught:
        prompt_of(template, ("user", "q"), ("assistant", BEGUN))
    assert caught.value.fix


def test_the_mark_is_a_character_that_no_message_has() -> None:
    messages = [{"role": "user", "content": "\U0001fffe"}, {"role": "assistant", "content": "a\U0001ffff"}]
    marked, mark = with_mark(messages, "messages")
    assert mark == "\U0002fffe" and marked[0] == messages[0]
    assert marked[1] == {"role": "assistant", "content": "a\U0001ffff\U0002fffe"}
    assert until_mark(f"x\U0001fffe{mark}</s>", mark, "messages") == "x\U0001fffe"
    every = "".join(chr((plane << 16) + low) for plane in range(1, 17) for low in (0xFFFE, 0xFFFF))
    with pytest.raises(InvalidField, match="input: have every noncharacter"):
        with_mark([{"role": "assistant", "content": every}], "input")
