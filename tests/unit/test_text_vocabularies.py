"""Real vocabularies, cut down: token ids equal to those of `transformers` on the torture list; text comes back whole.

tests/data/tokenizers/README.md tells how the vocabularies were cut down and by which program the ids were recorded.
"""

from __future__ import annotations

import base64
import json
import lzma
import os
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import normalizers

from homeserve.checkpoint.view import TokenizerSource
from homeserve.errors import InvalidModelFile
from homeserve.text.charsmap import charsmap_flaw
from homeserve.text.tokenizer import Tokenizer

DATA = Path(__file__).parent.parent / "data" / "tokenizers"
TEXTS: list[str] = json.loads((DATA / "torture.json").read_text()) + json.loads(
    (DATA / "torture_more.json").read_text()
)
REAL: dict[str, dict[str, Any]] = {path.stem: json.loads(path.read_text()) for path in (DATA / "real").glob("*.json")}

SLOW = os.environ.get("HOMESERVE_TEST_TIER") == "slow"
LITERAL = {"xlm-roberta"}
"""Recorded by a program that takes control tokens in a text for plain characters."""


@dataclass
class Source:
    """The part of a checkpoint that tokenizers are made from."""

    metadata: dict[str, object]
    path: str = "model.gguf"
    tokenizer: TokenizerSource = field(init=False)

    def __post_init__(self) -> None:
        self.tokenizer = TokenizerSource(self.metadata, None, "0")


def keys_of(name: str, **changes: object) -> dict[str, object]:
    keys = dict(REAL[name]["keys"]) | changes
    keys["token_type"] = keys.pop("types")
    packed = keys.get("precompiled_charsmap")
    if isinstance(packed, str):
        keys["precompiled_charsmap"] = list(lzma.decompress(base64.b85decode(packed)))
    named = {f"tokenizer.ggml.{key}": value for key, value in keys.items() if value is not None}
    return {key: tuple(value) if isinstance(value, list) else value for key, value in named.items()}


MADE: dict[str, Tokenizer] = {}


def made(name: str) -> Tokenizer:
    if name not in MADE:
        MADE[name] = Tokenizer.from_checkpoint(Source(keys_of(name)))
    return MADE[name]


def may_differ(name: str, text: str) -> bool:
    """Texts on which recorder and the family's own tokenizer are known to part, so that nobody can be equal to both."""
    if name == "llama-spm":
        # SentencePiece, and with it the family, puts its space before a space too, and after a mark; the recorder does
        # not. The same vocabulary under the name phi-3 was recorded by a path that does: it is compared on every text.
        return text.startswith((" ", "▁", "<s>"))
    # The library replaces characters by whole clusters, SentencePiece by the longest prefix.
    return name == "xlm-roberta" and text.startswith("e\u0301 a\u0308")


# ------------------------------------------------------------------------------------------------- equal to the oracle


@pytest.mark.parametrize("name", sorted(REAL))
def test_token_ids_are_those_of_the_recorder(name: str) -> None:
    tokenizer, compared, parted = made(name), 0, 0
    for text, wanted in zip(TEXTS, REAL[name]["ids"], strict=True):
        if wanted is None:
            continue
        got = tokenizer.encode(text, add_special=False, parse_special=name not in LITERAL)
        if may_differ(name, text):
            parted += got != wanted
            continue
        assert got == wanted, ascii(text)
        compared += 1
    assert compared >= len(TEXTS) - 20
    assert bool(parted) == (name in ("llama-spm", "xlm-roberta")), "no deviation any more: take it off the list"


def test_every_kind_of_vocabulary_was_compared() -> None:
    kinds = {str(entry["keys"]["model"]) for entry in REAL.values()}
    assert kinds == {"gpt2", "llama", "gemma4", "t5", "bert"}
    assert {"transformers", "sentencepiece"} == {str(entry["source"]).split()[0] for entry in REAL.values()}


def test_gemma3_makes_its_tokens_of_spaces_by_merges() -> None:
    tokenizer = made("gemma-3")
    names = [tokenizer.token_name(token) for token in tokenizer.encode("  both", add_special=False)]
    assert names == ["  ", "both"], "by score it would be '▁', '▁b', 'oth': these tokens have no true one"
    assert tokenizer.encode("\u2581\u2581a", add_special=False) == tokenizer.encode("  a", add_special=False)


# ---------------------------------------------------------------------------------------------- t5 and bert, in detail


def test_a_word_piece_model_lowers_strips_and_encloses() -> None:
    tokenizer = made("bert-bge")
    ids = tokenizer.encode("Hello World")
    assert [tokenizer.token_name(token) for token in (ids[0], ids[-1])] == ["[CLS]", "[SEP]"]
    assert tokenizer.decode(ids, skip_special=True) == "hello world"
    kept = Tokenizer.from_checkpoint(Source(keys_of("bert-bge", **{"normalizer.lowercase": False})))
    assert kept.encode("Hello", add_special=False) != ids[1:-2], "capitals are other characters there"
    bare = Tokenizer.from_checkpoint(Source(keys_of("bert-bge", add_bos_token=False, add_sep_token=False)))
    assert bare.encode("Hello World") == ids[1:-1]


def test_a_unigram_model_replaces_merges_and_ends() -> None:
    tokenizer = made("xlm-roberta")
    assert tokenizer.encode("ﬁ  x ") == tokenizer.encode("fi x"), "by its table, and spaces merge"
    ids = tokenizer.encode("a")
    assert tokenizer.token_name(ids[-1]) == "</s>" and tokenizer.add_eos


def test_control_tokens_in_a_unigram_text_are_obeyed_only_where_asked_for() -> None:
    tokenizer = made("xlm-roberta")
    end = tokenizer.eos_id
    assert end in tokenizer.encode("a</s>", add_special=False)
    assert end not in tokenizer.encode("a</s>", add_special=False, parse_special=False)


def test_a_unigram_model_needs_its_unknown_token() -> None:
    with pytest.raises(InvalidModelFile, match="unknown_token_id"):
        Tokenizer.from_checkpoint(Source(keys_of("xlm-roberta", unknown_token_id=0xFFFFFFFF)))


def test_a_word_piece_model_needs_its_unknown_token() -> None:
    for changes in ({"unknown_token_id": 0xFFFFFFFF, "tokens": ["a", "b"], "types": [1, 1]}, {"unknown_token_id": 99}):
        with pytest.raises(InvalidModelFile, match=r"unknown_token_id.*no token of its own"):
            more = {"cls_token_id": None, "seperator_token_id": None} if "tokens" in changes else {}
            Tokenizer.from_checkpoint(Source(keys_of("bert-bge", **changes, **more)))


# ------------------------------------------------------------------------------------------------- the character table


def charsmap() -> bytes:
    return lzma.decompress(base64.b85decode(REAL["xlm-roberta"]["keys"]["precompiled_charsmap"]))


def test_the_real_table_is_sound() -> None:
    assert charsmap_flaw(charsmap()) is None


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "shorter"),
        (b"\xff\xff\xff\xff" + bytes(2048), "promises"),
        (struct.pack("<I", 6) + bytes(2048), "promises"),
        (struct.pack("<I", 1024) + bytes(1024) + b"\xff\0", "no UTF-8"),
        (struct.pack("<I", 1024) + struct.pack("<I", 0x7FFFFC00) + bytes(1020) + b"a\0", "leads out"),
    ],
)
def test_damaged_tables_are_told(raw: bytes, words: str) -> None:
    flaw = charsmap_flaw(raw)
    assert flaw is not None and words in flaw


def leaf_table(place: int, replacements: bytes) -> bytes:
    """A double array with one entry: the byte 'a' is replaced by what lies at `place`."""
    units = [0] * 512
    units[0] = 256 << 10  # the root's children lie around unit 256
    leaf = 256 ^ ord("a")
    units[leaf] = (leaf ^ 1) << 10 | 1 << 8 | ord("a")  # its value lies in unit 1
    units[1] = 1 << 31 | place
    return struct.pack("<I", 2048) + struct.pack("<512I", *units) + replacements


def test_a_table_that_leads_in_a_circle_is_refused_soon() -> None:
    units = [0] * 512
    units[0] = 256 << 10
    units[256 ^ ord("a")] = (256 ^ ord("a")) << 10 | ord("a")
    for index in range(512):
        units[index] = units[index] or (index ^ 256) << 10 | index & 0xFF
    flaw = charsmap_flaw(struct.pack("<I", 2048) + struct.pack("<512I", *units))
    assert flaw is None or "256 bytes" in flaw


def test_places_of_replacements_are_checked() -> None:
    assert charsmap_flaw(leaf_table(0, b"x\0")) is None
    assert "past its end" in str(charsmap_flaw(leaf_table(2, b"x\0")))
    assert "past its end" in str(charsmap_flaw(leaf_table(0, b"x")))
    assert "inside a character" in str(charsmap_flaw(leaf_table(1, "é".encode() + b"\0")))
    with pytest.raises(InvalidModelFile, match="precompiled_charsmap"):
        raw = list(leaf_table(2, b"x\0"))
        Tokenizer.from_checkpoint(Source(keys_of("xlm-roberta", precompiled_charsmap=raw)))


UNITS = st.integers(0, 2**32 - 1) | st.builds(
    lambda offset, leaf, label: offset << 10 | leaf << 8 | label,
    st.integers(0, 1 << 10),
    st.integers(0, 1),
    st.integers(0, 255),
)


@settings(max_examples=5000 if SLOW else 20)
@given(st.dictionaries(st.integers(0, 511) | st.sampled_from((0, 1, 256 ^ ord("a"))), UNITS, max_size=8))
def test_a_table_that_passes_can_be_walked(changes: dict[int, int]) -> None:
    raw = bytearray(leaf_table(0, b"x\0\xc3\xa9\0"))
    for index, unit in changes.items():
        struct.pack_into("<I", raw, 4 + 4 * index, unit)
    if charsmap_flaw(bytes(raw)) is None:
        assert isinstance(normalizers.Precompiled(bytes(raw)).normalize_str("a ab \0 é b"), str)


# ------------------------------------------------------------------------------------------------------ there and back

LOSSY = {"t5": "its table replaces characters", "bert": "it lowers, strips and splits"}
ROUND = sorted(name for name, entry in REAL.items() if entry["keys"]["model"] not in LOSSY)
ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40) | st.lists(
    st.sampled_from(TEXTS), max_size=3
).map("".join)


def user_defined(name: str) -> list[str]:
    """Tokens that are found in any text, but for runs of spaces."""
    keys = REAL[name]["keys"]
    return [token for token, kind in zip(keys["tokens"], keys["types"], strict=True) if kind == 4 and token.strip("▁ ")]


@pytest.mark.parametrize("name", ROUND)
@settings(max_examples=2000 if SLOW else 25)
@given(text=ANY_TEXT)
def test_any_text_comes_back(name: str, text: str) -> None:
    tokenizer = made(name)
    if "▁" in text and REAL[name]["keys"]["model"] != "gpt2":
        text = text.replace("▁", "_")  # the sign for a space stands for one
    prefixed = REAL[name]["keys"]["model"] == "llama" and name != "gemma-3"
    if prefixed:  # a prefix space is put after a user-defined token, too
        assume(not any(token in text for token in user_defined(name)))
    for parse in (False,) if prefixed else (True, False):  # a prefix space is put after a control token too
        assert tokenizer.decode(tokenizer.encode(text, add_special=False, parse_special=parse)) == text


@pytest.mark.parametrize("name", sorted(REAL))
@settings(max_examples=2000 if SLOW else 25)
@given(text=ANY_TEXT)
def test_no_token_list_decodes_to_broken_text(name: str, text: str) -> None:
    tokenizer = made(name)
    ids = tokenizer.encode(text, parse_special=False)
    whole = b"".join(tokenizer.token_bytes(token) for token in ids).decode("utf-8")
    assert "\ufffd" not in whole or "\ufffd" in text
    assert all(0 <= token < tokenizer.vocab_size for token in ids)
