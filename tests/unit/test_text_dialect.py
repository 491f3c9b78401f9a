"""The dialect of chat templates, in process: what templates expect is there; fallbacks; the choice among templates."""

from __future__ import annotations

from typing import Any

import pytest
from jinja2 import Environment
from jinja2.exceptions import SecurityError, TemplateSyntaxError

from homeserve.text.fallback_templates import special_tokens, templates_for
from homeserve.text.template_dialect import TemplateRefusal, environment

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi <b>"},
    {"role": "assistant", "content": "Hello!"},
    {"role": "user", "content": "Bye"},
]


def render(template: str, **variables: Any) -> str:
    return environment().from_string(template).render(**variables)


def test_the_default_models_template_is_as_plain_jinja_renders_it() -> None:
    plain = Environment(trim_blocks=True, lstrip_blocks=True).from_string(SMOLLM2)
    for talk in (TALK, TALK[1:], TALK[1:2]):
        for prompt in (True, False):
            wanted = plain.render(messages=talk, add_generation_prompt=prompt)
            assert render(SMOLLM2, messages=talk, add_generation_prompt=prompt) == wanted
    text = render(SMOLLM2, messages=TALK[1:2], add_generation_prompt=True)
    assert text.startswith("<|im_start|>system\nYou are") and text.endswith("Hi <b><|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("template", "wanted"),
    [
        ("{{ {'b': '<é>', 'a': 1} | tojson }}", '{"b": "<é>", "a": 1}'),
        ("{{ [1, 'x'] | tojson(indent=1) }}", '[\n 1,\n "x"\n]'),
        ("{{ {'b': 1, 'a': 2} | tojson(sort_keys=true, separators=(',', ':')) }}", '{"a":2,"b":1}'),
        ("{{ 'é' | tojson(ensure_ascii=true) }}", '"\\u00e9"'),
        ("{% for i in [1, 2, 3] %}{% if i == 2 %}{% continue %}{% endif %}{{ i }}{% endfor %}", "13"),
        ("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "1"),
        ("{% generation %}\n  x{% endgeneration %}\n y", "  x y"),
        ("{%- generation -%} {% set a = 1 %}{{ a }} {%- endgeneration -%}", "1"),
        ("  {% if true %}\nx\n  {% endif %}\ny", "x\ny"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{% set ns = namespace(n=0) %}{% for i in range(3) %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}", "3"),
        ("{{ none_given }}|{{ none_given is defined }}", "|False"),
        ("{{ 'a,b'.split(',')[-1] }}{{ '  x '.strip() }}{{ {'a': 1}.items() | list }}", "bx[('a', 1)]"),
        ("{{ '&<>' }}", "&<>"),
        ("{{ messages | selectattr('role', 'equalto', 'x') | list | length }}", "0"),
    ],
)
def test_what_templates_use(template: str, wanted: str) -> None:
    assert render(template, messages=[]) == wanted


@pytest.mark.parametrize(
    ("template", "error"),
    [
        ("{{ ''.__class__.x }}", SecurityError),
        ("{{ messages.append(1) }}", SecurityError),
        ("{{ cycler.__init__.__globals__.os }}", SecurityError),
        ("{{ lipsum.__globals__['os'].popen('id') }}", Exception),
        ("{{ self.__init__.__globals__ }}{{ x.y.z }}", Exception),
        ("{{ range(1000000) }}", OverflowError),
        ("{{ raise_exception('no') }}", TemplateRefusal),
        ("{% generation %}", TemplateSyntaxError),
    ],
)
def test_what_the_sandbox_forbids(template: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        render(template, messages=[])


class Vocabulary:
    bos_id, eos_id = 0, 1

    def __init__(self, *tokens: str) -> None:
        self._tokens = ("<s>", "</s>", *tokens)
        self.special_ids = frozenset(range(len(self._tokens)))

    def token_text(self, token: int) -> str:
        return self._tokens[token]


FALLBACKS = {
    "<|im_start|>": "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi <b><|im_end|>\n"
    "<|im_start|>assistant\nHello!<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n",
    "<|start_header_id|>": "<s><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|><|start_header_id|>user"
    "<|end_header_id|>\n\nHi <b><|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nHello!<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nBye<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    "<start_of_turn>": "<s><start_of_turn>user\nBe brief.\n\nHi <b><end_of_turn>\n<start_of_turn>model\n"
    "Hello!<end_of_turn>\n<start_of_turn>user\nBye<end_of_turn>\n<start_of_turn>model\n",
    "[INST]": "<s>[INST] Be brief.\n\nHi <b> [/INST] Hello!</s>[INST] Bye [/INST]",
}


@pytest.mark.parametrize("token", FALLBACKS)
def test_fallbacks_by_special_tokens(token: str) -> None:
    vocabulary = Vocabulary(token)
    template = templates_for({}, vocabulary)["default"]
    variables = special_tokens(vocabulary)
    assert render(template, messages=TALK, add_generation_prompt=True, **variables) == FALLBACKS[token]


def test_no_fallback_where_nothing_is_known() -> None:
    assert templates_for({}, Vocabulary()) == {}


def test_stored_templates_win_and_have_a_default() -> None:
    assert templates_for({"default": "d", "rag": "r"}, Vocabulary("[INST]")) == {"default": "d", "rag": "r"}
    assert templates_for({"tool_use": "t"}, Vocabulary()) == {"tool_use": "t", "default": "t"}
