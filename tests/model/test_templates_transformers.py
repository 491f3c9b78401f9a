"""Chat templates: our dialect of Jinja renders what `transformers` renders, feature by feature, on recorded talks.

The templates are written for this test, each around a construct that templates of the families are built of. What the
families' own templates render was compared once, on 71 of them: docs/verification/templates.txt.
"""

from __future__ import annotations

from typing import Any

import pytest

from homeserve.text.fallback_templates import _BY_TOKEN
from homeserve.text.template_dialect import environment

transformers = pytest.importorskip("transformers")
from transformers.utils.chat_template_utils import render_jinja_template  # noqa: E402

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": 'of a <place> & "é"',
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    },
}
CALL = {"type": "function", "id": "c1", "function": {"name": "weather", "arguments": {"place": "Köln", "days": 2}}}
PLAIN = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi <b> & 'you' 日本\n"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello!"},
    {"role": "user", "content": " Bye "},
]
TOOLS = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "name": "weather", "content": '{"t": 3}'},
]

TEMPLATES = {
    "tagged json": (
        "{%- if tools %}\n    {{- '<tools>' }}\n    {%- for tool in tools %}\n{{ '\\n' }}{{ tool | tojson }}\n"
        "    {%- endfor %}\n    {{- '</tools>' }}\n{%- endif %}\n"
        "{%- set ns = namespace(last=-1) %}\n{%- for m in messages[::-1] %}"
        "{%- set i = (messages|length - 1) - loop.index0 %}"
        "{%- if ns.last < 0 and m.role == 'user' %}{%- set ns.last = i %}{%- endif %}{%- endfor %}\n"
        "{%- for m in messages %}\n"
        "    {%- set text = m.content %}\n"
        "    {%- if m.role == 'assistant' and '</think>' in text %}"
        "{% set text = text.split('</think>')[-1].lstrip('\\n') %}{% endif %}\n"
        "    {{- '<|im_start|>' + m.role + '\\n' + text }}\n"
        "    {%- for call in m.tool_calls or [] %}\n"
        '        {{- \'<tool_call>\\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
        "{{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}\n    {%- endfor %}\n"
        "    {{- '<|im_end|>\\n' }}\n{%- endfor %}\n"
        "{%- if add_generation_prompt %}\n    {{- '<|im_start|>assistant\\n' }}\n"
        "    {%- if enable_thinking is defined and enable_thinking is false %}"
        "{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}\n"
        "{%- endif %}"
    ),
    "function tags": (
        "{%- macro shown(value) %}{{ value if value is string else value | tojson }}{% endmacro %}"
        "{% for m in messages %}{% for call in m.tool_calls or [] %}<function={{ call.function.name }}>\n"
        "{% for key, value in call.function.arguments | items %}<parameter={{ key }}>\n"
        "{{ shown(value) }}\n</parameter>\n"
        "{% endfor %}</function>{% else %}{{ m.role }}: {{ m.content | trim }}{% endfor %}\n{% endfor %}"
    ),
    "channels": (
        "{{ '<|start|>system<|message|>Reasoning: ' ~ (reasoning_effort | default('medium')) }}\n"
        "{% for m in messages %}{% if m.reasoning_content is defined %}<|channel|>analysis<|message|>"
        "{{ m.reasoning_content }}<|end|>{% endif %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    ),
    "braces": (
        "{% macro text(value) %}{{ '<|\"|>' ~ value ~ '<|\"|>' if value is string else value }}{% endmacro %}"
        "{{ bos_token }}{% for m in messages %}{% for c in m.tool_calls or [] %}call:{{ c.function.name }}"
        "{ {% for k, v in c.function.arguments | dictsort %}{{ k }}:{{ text(v) }}{% if not loop.last %},{% endif %}"
        "{% endfor %}}{% endfor %}{% endfor %}"
    ),
    "lists and loops": (
        "{{ messages | map(attribute='role') | join(',') }}|"
        "{{ (messages | selectattr('role', 'equalto', 'user') | list)[-1].content | upper }}|"
        "{% for m in messages %}{% if m.role == 'tool' %}{% continue %}{% endif %}{% if loop.index > 2 %}{% break %}"
        "{% endif %}{{ loop.index }}{{ loop.previtem.role if loop.previtem }}{% endfor %}|"
        "{{ tools | tojson(indent=4) }}"
    ),
    "alternating": (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{{ m.content }}{{ eos_token }}{% endfor %}"
    ),
} | {f"fallback {token}": text for token, text in _BY_TOKEN}  # fmt: skip
TALKS: dict[str, dict[str, Any]] = {
    "plain": {"messages": PLAIN},
    "user": {"messages": PLAIN[1:2]},
    "no prompt": {"messages": PLAIN[1:3], "add_generation_prompt": False},
    "tools": {"messages": TOOLS, "tools": [TOOL]},
    "no thinking": {"messages": PLAIN[1:2], "enable_thinking": False, "reasoning_effort": "high"},
}


@pytest.mark.parametrize("talk", TALKS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_talk_is_rendered_as_in_transformers(name: str, talk: str) -> None:
    given = {"tools": None, "documents": None, "add_generation_prompt": True} | TALKS[talk]
    marks = {"bos_token": "<s>", "eos_token": "</s>"}
    rest = {key: value for key, value in given.items() if key not in ("messages", "tools", "documents")}
    try:
        wanted: str | None = render_jinja_template(
            [given["messages"]], tools=given["tools"], chat_template=TEMPLATES[name], **rest, **marks
        )[0][0]
    except Exception as error:  # noqa: BLE001  what it refuses is refused here, whatever its error is
        wanted, refusal = None, str(error)
    if wanted is None:
        with pytest.raises(Exception, match=refusal.splitlines()[0][:20]):
            environment().from_string(TEMPLATES[name]).render(**given, **marks)
        assert name == "alternating" or name.startswith("fallback") and talk == "tools"
    else:
        assert environment().from_string(TEMPLATES[name]).render(**given, **marks) == wanted
