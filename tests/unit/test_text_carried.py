"""A tokenizer.json that a GGUF carries as a text: it serves where the file's own keys do not say all, only there."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from homeserve.checkpoint.view import TokenizerSource
from homeserve.errors import InvalidModelFile
from homeserve.text.tokenizer import Tokenizer

DATA = Path(__file__).parent.parent / "data"
TEXTS: list[str] = json.loads((DATA / "tokenizers" / "torture.json").read_text())
JSON_PATH = DATA / "tiny" / "mistral" / "tokenizer.json"
JSON = JSON_PATH.read_text()
CARRIED = "tokenizer.huggingface.json"


@dataclass
class Source:
    """The part of a checkpoint that tokenizers are made from."""

    metadata: dict[str, object]
    json_path: str | None = None
    path: str = "model.gguf"
    tokenizer: TokenizerSource = field(init=False)

    def __post_init__(self) -> None:
        self.tokenizer = TokenizerSource(self.metadata, self.json_path, "0")


def tokenizer(metadata: dict[str, object]) -> Tokenizer:
    return Tokenizer.from_checkpoint(Source(metadata))


def carrying(**changes: object) -> dict[str, object]:
    """The keys of a GGUF of the folder's model, with the folder's tokenizer.json as a text. `__` in the names of
    changes stands for a dot; None removes a key."""
    model = json.loads(JSON)["model"]
    tokens = [""] * 512
    for text, index in model["vocab"].items():
        tokens[index] = text
    merges = tuple(merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"])
    ggml = {"model": "gpt2", "pre": "qwen2", "tokens": tuple(tokens), "merges": merges, "bos_token_id": 0}
    ggml |= {"token_type": tuple(3 if index < 4 else 1 for index in range(512)), "eos_token_id": 2}
    keys: dict[str, object] = {f"tokenizer.ggml.{name}": value for name, value in ggml.items()} | {CARRIED: JSON}
    keys |= {name.replace("__", "."): value for name, value in changes.items()}
    return {name: value for name, value in keys.items() if value is not None}


@pytest.mark.parametrize(
    ("lacking", "why"),
    [
        ({"tokenizer__ggml__pre": "of-next-year"}, "pre-tokenizer 'of-next-year' is not known"),
        ({"tokenizer__ggml__pre": None}, "no pre-tokenizer is named"),
        ({"tokenizer__ggml__model": "rwkv"}, "tokenizer model 'rwkv' cannot be built"),
        ({"tokenizer__ggml__model": None, "tokenizer__ggml__tokens": None}, "no tokenizer model is named"),
    ],
)
def test_a_carried_tokenizer_json_serves_where_the_keys_do_not(
    lacking: dict[str, object], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    whole, folder = carrying(), Source({}, str(JSON_PATH))
    with caplog.at_level(logging.WARNING, "homeserve.text"):
        made = tokenizer(carrying(**lacking))
    assert why in caplog.text
    theirs = Tokenizer.from_checkpoint(folder)
    for text in TEXTS:
        assert made.encode(text, add_special=False) == theirs.encode(text, add_special=False)
        assert made.decode(made.encode(text, add_special=False)) == text
    known = tokenizer(whole)
    assert (made.bos_id, made.eos_id, made.end_ids) == (known.bos_id, known.eos_id, known.end_ids)


def test_keys_that_say_all_are_not_replaced(caplog: pytest.LogCaptureFixture) -> None:
    """A known pre-tokenizer stands against a carried one that cuts otherwise, and one that is damaged."""
    other = json.loads(JSON)
    other["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": False}
    keys = carrying()
    plain = tokenizer({name: value for name, value in keys.items() if name != CARRIED})
    with caplog.at_level(logging.WARNING, "homeserve.text"):
        for carried in (json.dumps(other), "{"):
            made = tokenizer(keys | {CARRIED: carried})
            assert [made.encode(text) for text in TEXTS] == [plain.encode(text) for text in TEXTS]
    assert not caplog.text


def _without_a_token(text: str) -> str:
    raw = json.loads(text)
    vocabulary = raw["model"]["vocab"]
    a, b = list(vocabulary)[300:302]
    vocabulary[a], vocabulary[b] = vocabulary[b], vocabulary[a]
    return json.dumps(raw)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({CARRIED: 7}, "huggingface.json'?: is not a text"),
        ({CARRIED: "{"}, "huggingface.json.*no tokenizer.json"),
        ({CARRIED: "[" * 100_000}, "huggingface.json.*no tokenizer.json"),
        ({CARRIED: "\ud800"}, "huggingface.json.*no tokenizer.json"),
        ({CARRIED: '{"model": {"type": "BPE"}}'}, "huggingface.json.*cannot be made"),
        ({CARRIED: _without_a_token(JSON)}, r"in tokenizer\.ggml\.tokens it is"),
        ({"tokenizer__ggml__tokens": ("a", "b")}, r"tokenizer\.ggml\.tokens has 2"),
        ({"tokenizer__ggml__tokens": 3}, r"tokenizer\.ggml\.tokens"),
        ({"tokenizer__ggml__eos_token_id": 1 << 20}, "eos_token_id"),
        ({"tokenizer__ggml__add_bos_token": "yes"}, "add_bos_token"),
        ({"tokenizer__ggml__pre": 5}, "tokenizer.ggml.pre"),
    ],
)
def test_a_damaged_carried_tokenizer_is_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidModelFile, match=words):
        tokenizer(carrying(**({"tokenizer__ggml__pre": None} | changes)))
