"""From a `Vocabulary` to a `tokenizers.Tokenizer`.

Five kinds of vocabulary come in GGUF files:
- `gpt2`: byte-level BPE; merges are in the file; text is cut by the pre-tokenizer's expressions.
- `llama`: SentencePiece BPE. The file has scores, no merges, so the merges are rebuilt: every split of a token into two
  tokens is a merge that makes it, and better-scored tokens merge first. Large vocabularies take seconds, which is why
  the result is kept in the cache folder (`homeserve.text.token_cache`).
- `gemma4`: merges in the file, over text with ▁ for space, lines as pieces, byte tokens as fallback.
- `t5`: SentencePiece Unigram: the split with the best sum of scores, over text whose characters a table replaces.
- `bert`: WordPiece: the longest token that fits, word by word. The file spells a token that begins a word with ▁ and
  one that goes on without mark; the library wants them the other way round (`##` for what goes on).

BOS and EOS are not added here: `homeserve.text.tokenizer` does that, for a template may have written them already.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Library

from homeserve.errors import InvalidModelFile
from homeserve.text.pretokenizers import GPT2
from homeserve.text.vocabulary import TokenType, Vocabulary

SPACE = "▁"
_CONTINUES = "##"
SPM_TOKEN_CHARS_MAX = 512
"""Merges are rebuilt by trying every split of a token: the work grows with the square of its length."""
_SPECIAL = (TokenType.CONTROL, TokenType.UNKNOWN)


def assemble(vocabulary: Vocabulary) -> Library:
    """Raises InvalidModelFile where the library refuses the vocabulary (a merge of tokens that are not there, …)."""
    builders: dict[str, Callable[[Vocabulary], Library]] = {"t5": _unigram, "bert": _word_piece}
    build = builders.get(vocabulary.model, _byte_level if vocabulary.byte_alphabet else _text_level)
    try:
        library = build(vocabulary)
        _add_tokens(library, vocabulary)
    except InvalidModelFile:
        raise
    except Exception as error:  # the library raises bare `Exception`, so nothing narrower can be named
        raise _refused(vocabulary, error) from error
    return library


def assemble_literal(vocabulary: Vocabulary) -> Library | None:
    """A library that takes control tokens in a text for the characters they are written with.

    None where `assemble`'s own parts do, once the list of control tokens is taken off. A Unigram model does not: it
    would find them among its pieces.
    """
    if vocabulary.model != "t5":
        return None
    hidden = (*_SPECIAL, TokenType.BYTE)
    tokens = tuple(
        f"\0{index}" if kind in hidden else token
        for index, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
    )
    types = tuple(TokenType.UNUSED if kind in _SPECIAL else kind for kind in vocabulary.types)
    return assemble(replace(vocabulary, tokens=tokens, types=types))


def _refused(vocabulary: Vocabulary, error: Exception) -> InvalidModelFile:
    what = f"cannot be made into a tokenizer: {error}"
    return InvalidModelFile(vocabulary.path, "tokenizer", what, fix="the file is damaged: fetch it again")


def _byte_level(vocabulary: Vocabulary) -> Library:
    known = _known_texts(vocabulary)
    parted = (merge.partition(" ") for merge in vocabulary.merges)
    merges = [(known(left, left), known(right, right)) for left, _, right in parted]
    model = models.BPE(_ids(vocabulary), merges, ignore_merges=vocabulary.pre.ignore_merges)
    library = Library(model)
    expressions = vocabulary.pre.expressions
    builtin = expressions[-1] == GPT2
    steps: list[pre_tokenizers.PreTokenizer] = [
        pre_tokenizers.Split(Regex(expression), "isolated")
        for expression in (expressions[:-1] if builtin else expressions)
    ]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=builtin))
    library.pre_tokenizer = pre_tokenizers.Sequence(steps)
    library.decoder = decoders.ByteLevel()
    return library


def _text_level(vocabulary: Vocabulary) -> Library:
    ids = _ids(vocabulary)
    merges = _rebuilt_merges(vocabulary, ids) if vocabulary.model == "llama" else _stored_merges(vocabulary)
    unknown = None if vocabulary.unk_id is None else vocabulary.tokens[vocabulary.unk_id]
    unknown = unknown if unknown in ids else None
    model = models.BPE(ids, merges, byte_fallback=True, fuse_unk=True, unk_token=unknown)
    library = Library(model)
    steps: list[normalizers.Normalizer] = [normalizers.Replace(" ", SPACE)]
    if vocabulary.add_space_prefix:
        steps.insert(0, normalizers.Prepend(SPACE))
    library.normalizer = normalizers.Sequence(steps)
    if vocabulary.pre.expressions:
        library.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(expression), "isolated") for expression in vocabulary.pre.expressions]
        )
    library.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    return library


def _unigram(vocabulary: Vocabulary) -> Library:
    if vocabulary.unk_id is None:
        raise InvalidModelFile(
            vocabulary.path, "key 'tokenizer.ggml.unknown_token_id'", "a Unigram vocabulary needs it"
        )
    pieces = [(token, float(score)) for token, score in zip(vocabulary.tokens, vocabulary.scores, strict=True)]
    library = Library(models.Unigram(pieces, vocabulary.unk_id, byte_fallback=False))
    forms = vocabulary.forms
    steps: list[normalizers.Normalizer] = [normalizers.Precompiled(forms.charsmap)] if forms.charsmap else []
    if forms.merge_spaces:
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    library.normalizer = normalizers.Sequence(steps)
    scheme = "always" if vocabulary.add_space_prefix else "never"
    library.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme=scheme)
    library.decoder = decoders.Metaspace(SPACE, prepend_scheme=scheme)
    return library


def _word_piece(vocabulary: Vocabulary) -> Library:
    ids: dict[str, int] = {}
    for index, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True)):
        if kind == TokenType.NORMAL:
            ids[token[1:] if token.startswith(SPACE) else _CONTINUES + token] = index
        elif token:
            ids[token] = index
    unknown = "[UNK]" if vocabulary.unk_id is None else vocabulary.tokens[vocabulary.unk_id]
    if unknown not in ids:
        what = f"names {unknown[:80]!r}, which is no token of its own"
        raise InvalidModelFile(vocabulary.path, "key 'tokenizer.ggml.unknown_token_id'", what)
    library = Library(models.WordPiece(ids, unk_token=unknown))
    forms = vocabulary.forms
    library.normalizer = normalizers.BertNormalizer(
        clean_text=True, handle_chinese_chars=True, strip_accents=forms.strip_accents, lowercase=forms.lowercase
    )
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.decoder = decoders.WordPiece(_CONTINUES)
    return library


def _ids(vocabulary: Vocabulary) -> dict[str, int]:
    """Token to id. Where a text appears twice the last id is what encoding gives; empty texts cannot be encoded."""
    ids = {token: index for index, token in enumerate(vocabulary.tokens)}
    ids.pop("", None)
    if vocabulary.model == "llama":
        _respell_spaces(vocabulary, ids)
    return ids


def _respell_spaces(vocabulary: Vocabulary, ids: dict[str, int]) -> None:
    """Gemma 3 files spell their runs of spaces with real ones; text arrives with ▁."""
    for index, token in enumerate(vocabulary.tokens):
        if " " in token and (vocabulary.types[index] == TokenType.NORMAL or _is_run_of_spaces(vocabulary, index)):
            ids.pop(token, None)
            ids.setdefault(token.replace(" ", SPACE), index)


def _is_run_of_spaces(vocabulary: Vocabulary, index: int) -> bool:
    """A user-defined token of spaces alone: merges make it, as in Gemma 3's own tokenizer; it is no mark in a text."""
    user = vocabulary.types[index] == TokenType.USER_DEFINED
    return user and vocabulary.model == "llama" and not vocabulary.tokens[index].strip(" ")


def _stored_merges(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """ "left right", parted at the first space after the first character: pieces may begin with a space."""
    known = _known_texts(vocabulary)
    merges = []
    for merge in vocabulary.merges:
        at = merge.find(" ", 1)
        left, right = (merge[:at], merge[at + 1 :]) if at > 0 else (merge, "")
        merges.append((known(left, left), known(right, right)))
    return merges


def _known_texts(vocabulary: Vocabulary) -> Callable[[str, str], str]:
    """A text, and once more: as the vocabulary's own object, if it is one of its tokens. A merge names two of them, and
    half a million texts of their own would be 40 MiB at the moment when the most is held."""
    return dict(zip(vocabulary.tokens, vocabulary.tokens, strict=True)).get


def _rebuilt_merges(vocabulary: Vocabulary, ids: dict[str, int]) -> list[tuple[str, str]]:
    """Better-scored tokens merge first. Gemma 3, told by its tokens of spaces, ranks by id: they have no true score."""
    by_id = any(_is_run_of_spaces(vocabulary, index) for index in ids.values())
    ranked: list[tuple[float, int, list[tuple[int, int, str, str]]]] = []
    for token, index in ids.items():
        if len(token) < 2:
            continue
        if vocabulary.types[index] != TokenType.NORMAL and not _is_run_of_spaces(vocabulary, index):
            continue
        if len(token) > SPM_TOKEN_CHARS_MAX:
            what = f"token {index} is {len(token)} characters long ({SPM_TOKEN_CHARS_MAX} are the limit)"
            raise InvalidModelFile(vocabulary.path, "key 'tokenizer.ggml.tokens'", what)
        pairs = []
        for at in range(1, len(token)):
            left, right = token[:at], token[at:]
            if (left_id := ids.get(left)) is not None and (right_id := ids.get(right)) is not None:
                pairs.append((left_id, right_id, left, right))
        if pairs:
            pairs.sort()
            ranked.append((0.0 if by_id else -vocabulary.scores[index], index, pairs))
    ranked.sort(key=lambda entry: entry[:2])
    return [(left, right) for _, _, pairs in ranked for _, _, left, right in pairs]


def _add_tokens(library: Library, vocabulary: Vocabulary) -> None:
    """Tokens that are matched literally in text: control and unknown ones where asked for, user-defined ones always."""
    special, always = [], []
    for index, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True)):
        if token and kind in _SPECIAL:
            special.append(AddedToken(token, special=True, normalized=False))
        elif token and kind == TokenType.USER_DEFINED and not _is_run_of_spaces(vocabulary, index):
            always.append(AddedToken(token, special=False, normalized=False))
    library.add_special_tokens(special)
    library.add_tokens(always)
