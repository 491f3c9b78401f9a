"""The default model's tokenizer and template against what independent programs make of the same file."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from homeserve import checkpoint
from homeserve.text.detokenizer import Detokenizer
from homeserve.text.tokenizer import Tokenizer

DATA = Path(__file__).parent.parent / "data" / "tokenizers"
TORTURE: list[str] = json.loads((DATA / "torture.json").read_text())


@pytest.fixture(scope="module")
def tokenizer(smollm2: str) -> Tokenizer:
    return Tokenizer.from_checkpoint(checkpoint.open(smollm2))


def test_ids_are_those_of_llama_cpp(tokenizer: Tokenizer) -> None:
    recorded = json.loads((DATA / "smollm2.json").read_text())
    for text, parsed, plain in zip(TORTURE, recorded["parsed"], recorded["plain"], strict=True):
        assert tokenizer.encode(text) == parsed, ascii(text)
        assert tokenizer.encode(text, parse_special=False) == plain, ascii(text)
        assert tokenizer.decode(parsed) == tokenizer.decode(plain) == text


def test_facts_of_the_vocabulary(tokenizer: Tokenizer) -> None:
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id, tokenizer.add_bos) == (49152, 1, 2, False)
    assert tokenizer.end_ids == {0, 2}


def test_a_stream_of_single_tokens_is_the_text(tokenizer: Tokenizer) -> None:
    for text in TORTURE:
        detokenizer = Detokenizer(tokenizer, skip_special=False)
        parts = [detokenizer.push([token]) for token in tokenizer.encode(text)]
        assert "".join(parts) + detokenizer.finish() == text
        assert "\ufffd" in text or not any("\ufffd" in part for part in parts)


def test_the_tokenizer_needs_no_template_engine_and_no_hub(smollm2: str) -> None:
    code = (
        "import sys; from homeserve import checkpoint; from homeserve.text.tokenizer import Tokenizer;"
        f"Tokenizer.from_checkpoint(checkpoint.open({smollm2!r}));"
        "print([name for name in ('jinja2', 'huggingface_hub', 'torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
