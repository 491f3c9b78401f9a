"""Chat templates for models that bring none, chosen by the special tokens in their vocabulary.

They cover plain conversation (system, user, assistant), which is all that can be known of such a model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

_CHATML = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)
_LLAMA3 = (
    "{{- bos_token -}}"
    "{%- for message in messages -%}"
    "{{ '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif -%}"
)
_GEMMA = (
    "{{- bos_token -}}"
    "{%- set ns = namespace(system='') -%}"
    "{%- for message in messages -%}"
    "{%- if message.role == 'system' -%}"
    "{%- set ns.system = message.content | trim + '\\n\\n' -%}"
    "{%- else -%}"
    "{%- set role = 'model' if message.role == 'assistant' else message.role -%}"
    "{{ '<start_of_turn>' + role + '\\n' + ns.system + message.content | trim + '<end_of_turn>\\n' }}"
    "{%- set ns.system = '' -%}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}"
)
_MISTRAL = (
    "{{- bos_token -}}"
    "{%- set ns = namespace(system='') -%}"
    "{%- for message in messages -%}"
    "{%- if message.role == 'system' -%}"
    "{%- set ns.system = message.content + '\\n\\n' -%}"
    "{%- elif message.role == 'user' -%}"
    "{{ '[INST] ' + ns.system + message.content + ' [/INST]' }}"
    "{%- set ns.system = '' -%}"
    "{%- else -%}"
    "{{ ' ' + message.content | trim + eos_token }}"
    "{%- endif -%}"
    "{%- endfor -%}"
)
_BY_TOKEN = (
    ("<|im_start|>", _CHATML),
    ("<|start_header_id|>", _LLAMA3),
    ("<start_of_turn>", _GEMMA),
    ("[INST]", _MISTRAL),
)


class HasTokens(Protocol):
    """The part of a Tokenizer that is used here."""

    @property
    def special_ids(self) -> frozenset[int]: ...
    @property
    def bos_id(self) -> int | None: ...
    @property
    def eos_id(self) -> int | None: ...
    def token_text(self, token: int) -> str: ...


def templates_for(stored: Mapping[str, str], tokenizer: HasTokens) -> dict[str, str]:
    """The checkpoint's own templates, else a fallback as 'default', else none."""
    if stored:
        templates = dict(stored)
        templates.setdefault("default", next(iter(stored.values())))
        return templates
    texts = {tokenizer.token_text(token) for token in tokenizer.special_ids}
    return next(({"default": template} for token, template in _BY_TOKEN if token in texts), {})


def special_tokens(tokenizer: HasTokens) -> dict[str, str]:
    """`bos_token` and `eos_token` as templates expect them: the text, empty where the model has none."""
    named = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id}
    return {name: "" if token is None else tokenizer.token_text(token) for name, token in named.items()}
