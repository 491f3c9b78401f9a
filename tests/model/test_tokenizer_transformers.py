"""Tokenizers of GGUF files and folders against `transformers` on the same model's folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from homeserve import checkpoint
from homeserve.models.registry import folder_families
from homeserve.text.tokenizer import Tokenizer

DATA = Path(__file__).parent.parent / "data"
TORTURE: list[str] = json.loads((DATA / "tokenizers" / "torture.json").read_text())

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("file", ["mistral", "mistral.f32.gguf"])
def test_ids_and_text_are_those_of_transformers(file: str) -> None:
    oracle = transformers.AutoTokenizer.from_pretrained(str(DATA / "tiny" / "mistral"))
    made = Tokenizer.from_checkpoint(checkpoint.open(str(DATA / "tiny" / file), folder_families))
    for text in TORTURE:
        ids = made.encode(text)
        assert ids == oracle.encode(text, add_special_tokens=True), ascii(text)
        assert made.decode(ids) == oracle.decode(ids, clean_up_tokenization_spaces=False) == text
    assert (made.bos_id, made.eos_id, made.vocab_size) == (oracle.bos_token_id, oracle.eos_token_id, len(oracle))


def test_templates_render_as_in_transformers() -> None:
    from homeserve.text.template_dialect import environment

    oracle = transformers.AutoTokenizer.from_pretrained(str(DATA / "tiny" / "mistral"))
    template = checkpoint.open(str(DATA / "tiny" / "mistral.f32.gguf")).chat_templates["default"]
    messages = [{"role": "user", "content": "Größe <b>&amp; 日本"}, {"role": "assistant", "content": "x\n"}]
    for prompt in (True, False):
        wanted = oracle.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
        rendered = environment().from_string(template).render(messages=messages, add_generation_prompt=prompt)
        assert rendered == wanted
