"""What a rank knows of its vocabulary: spellings, and the trie that grammars are followed with."""

from __future__ import annotations

import gc
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from guide_rig import AB, SPECIAL, THINK, WORDS, KnownVocabulary, guide
from llguidance import LLMatcher, LLTokenizer

from homeserve import checkpoint as checkpoints
from homeserve.checkpoint.view import TokenizerSource
from homeserve.errors import InvalidModelFile
from homeserve.models.registry import folder_families
from homeserve.text.tokenizer import Tokenizer
from homeserve.worker.course import Course, GuideFailed
from homeserve.worker.guide import Guides
from homeserve.worker.vocabulary import Source, Spelled, Vocabulary, trie_of

COUNTER = Path(__file__).parents[1] / "data" / "counter.gguf"


def allowed(trie: LLTokenizer, grammar: str) -> list[int]:
    bits = np.frombuffer(LLMatcher(trie, grammar, log_level=0).compute_bitmask(), np.uint8)
    found: list[int] = np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist()
    return found


def test_a_checkpoints_vocabulary_is_read_once_and_padded() -> None:
    opened = checkpoints.open(str(COUNTER), folder_families)
    source = Source(opened.path, opened.tokenizer)
    tokenizer = Tokenizer.from_checkpoint(opened)
    opened.close()
    size = tokenizer.vocab_size + 7
    vocabulary = Vocabulary(source, size)
    spellings = tuple(vocabulary.spelled)
    assert spellings == tuple(tokenizer.token_bytes(token) for token in range(size))
    assert spellings[-7:] == (b"",) * 7 and vocabulary.trie is vocabulary.trie
    assert vocabulary.trie.vocab_size == size + 1 and vocabulary.trie.eos_token == vocabulary.end == size
    assert vocabulary.containing("1") == {token for token in range(size) if b"1" in spellings[token]}
    everything = allowed(vocabulary.trie, "start: /(.|\\n)+/")
    assert not set(everything) & ({*range(tokenizer.vocab_size, size + 1)} | set(tokenizer.special_ids))


def test_what_a_vocabulary_was_read_from_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint's keys, and the tokenizer with all of its tokens."""
    opened = checkpoints.open(str(COUNTER), folder_families)
    source = Source(opened.path, opened.tokenizer)
    opened.close()
    vocabulary = Vocabulary(source, 512)
    kept: list[weakref.ref[Any]] = [weakref.ref(source)]
    from_checkpoint = Tokenizer.from_checkpoint

    def noted(source: Any, **more: Any) -> Tokenizer:
        tokenizer = from_checkpoint(source, **more)
        kept.append(weakref.ref(tokenizer))
        return tokenizer

    monkeypatch.setattr(Tokenizer, "from_checkpoint", noted)
    del source, opened
    assert vocabulary.trie.vocab_size == 513 and vocabulary.containing("1")
    gc.collect()
    assert len(kept) == 2 and not [each for each in kept if each() is not None]


def test_several_threads_build_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[str] = []
    from_checkpoint = Tokenizer.from_checkpoint

    def counted(source: Any, **more: Any) -> Tokenizer:
        built.append(source.path)
        return from_checkpoint(source, **more)

    monkeypatch.setattr(Tokenizer, "from_checkpoint", counted)
    opened = checkpoints.open(str(COUNTER), folder_families)
    vocabulary = Vocabulary(Source(opened.path, opened.tokenizer), 512)
    opened.close()
    found: list[LLTokenizer] = []
    threads = [threading.Thread(target=lambda: found.append(vocabulary.trie)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1 and len({id(each) for each in found}) == 1


def test_forced_text_is_cut_as_the_model_cuts_it() -> None:
    words = KnownVocabulary()
    a, b = words.ids("a")[0], words.ids("b")[0]
    canonical = trie_of(Spelled(WORDS), SPECIAL, lambda text: [AB] if text == "ab" else [a, b])
    assert allowed(canonical, 'start: "ab" ("0" | "1")') == [AB]
    by_letters = trie_of(Spelled(WORDS), SPECIAL, lambda text: [a, b])
    assert allowed(by_letters, 'start: "ab" ("0" | "1")') == [a]


@pytest.mark.parametrize("says", [[3, 4], [], [THINK]])
def test_where_the_tokenizer_spells_something_else_the_longest_tokens_are_taken(says: list[int]) -> None:
    """As with a space before each text."""
    assert allowed(trie_of(Spelled(WORDS), SPECIAL, lambda text: says), 'start: "ab" ("0" | "1")') == [AB]


def test_control_tokens_are_named_by_their_id_alone() -> None:
    trie = KnownVocabulary().trie
    assert allowed(trie, f"start: <[{THINK}]>") == [THINK]
    assert THINK not in allowed(trie, 'start: "<think>"')


def test_a_checkpoint_without_a_tokenizer_fails_the_guide_and_nothing_else() -> None:
    vocabulary = Vocabulary(Source("model.gguf", TokenizerSource({}, None, "")), 24)
    with pytest.raises(InvalidModelFile):
        _ = vocabulary.spelled
    guides = Guides(vocabulary, 0)
    with pytest.raises(GuideFailed, match="tokenizer"):
        Course(guide("start: /a+/"), 24, guides.grammars.copier("start: /a+/"))
