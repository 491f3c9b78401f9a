"""From a `Vocabulary` to a `tokenizers.Tokenizer`.

Three kinds of vocabulary come in GGUF files:
- `gpt2`: byte-level BPE; merges are in the file; text is cut by the pre-tokenizer's expressions.
- `llama`: SentencePiece BPE. The file has scores, no merges, so the merges are rebuilt: every split of a token into two
  tokens is a merge that makes it, and better-scored tokens merge first. Large vocabularies take seconds, which is why
  the result is kept in the cache folder (`homeserve.text.token_cache`).
- `gemma4`: merges in the file, over text with ▁ for space, lines as pieces, byte tokens as fallback.

BOS and EOS are not added here: `homeserve.text.tokenizer` does that, for a template may have written them already.
"""

from __future__ import annotations

from collections.abc import Callable

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Library

from homeserve.errors import InvalidModelFile
from homeserve.text.pretokenizers import GPT2
from homeserve.text.vocabulary import TokenType, Vocabulary

SPACE = "▁"
SPM_TOKEN_CHARS_MAX = 512
"""Merges are rebuilt by trying every split of a token: the work grows with the square of its length."""
_SPECIAL = (TokenType.CONTROL, TokenType.UNKNOWN)


def assemble(vocabulary: Vocabulary) -> Library:
    """Raises InvalidModelFile where the library refuses the vocabulary (a merge of tokens that are not there, …)."""
    build: Callable[[Vocabulary], Library] = _byte_level if vocabulary.byte_alphabet else _text_level
    try:
        library = build(vocabulary)
        _add_tokens(library, vocabulary)
    except InvalidModelFile:
        raise
    except Exception as error:  # the library raises bare `Exception`, so nothing narrower can be named
        what = f"cannot be made into a tokenizer: {error}"
        raise InvalidModelFile(vocabulary.path, "tokenizer", what, fix="the file is damaged: fetch it again") from error
    return library


def _byte_level(vocabulary: Vocabulary) -> Library:
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in vocabulary.merges)]
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
        if " " in token and vocabulary.types[index] == TokenType.NORMAL:
            ids.pop(token, None)
            ids.setdefault(token.replace(" ", SPACE), index)


def _stored_merges(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """ "left right", parted at the first space after the first character: pieces may begin with a space."""
    merges = []
    for merge in vocabulary.merges:
        at = merge.find(" ", 1)
        merges.append((merge[:at], merge[at + 1 :]) if at > 0 else (merge, ""))
    return merges


def _rebuilt_merges(vocabulary: Vocabulary, ids: dict[str, int]) -> list[tuple[str, str]]:
    ranked: list[tuple[float, int, list[tuple[int, int, str, str]]]] = []
    for token, index in ids.items():
        if len(token) < 2 or vocabulary.types[index] != TokenType.NORMAL:
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
            ranked.append((-vocabulary.scores[index], index, pairs))
    ranked.sort(key=lambda entry: entry[:2])
    return [(left, right) for _, _, pairs in ranked for _, _, left, right in pairs]


def _add_tokens(library: Library, vocabulary: Vocabulary) -> None:
    """Tokens that are matched literally in text: control and unknown ones where asked for, user-defined ones always."""
    special, always = [], []
    for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True):
        if token and kind in _SPECIAL:
            special.append(AddedToken(token, special=True, normalized=False))
        elif token and kind == TokenType.USER_DEFINED:
            always.append(AddedToken(token, special=False, normalized=False))
    library.add_special_tokens(special)
    library.add_tokens(always)
