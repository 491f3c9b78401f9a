"""Pre-tokenizers by `tokenizer.ggml.pre`: how text is cut before byte-level BPE merges run inside each piece.

A GGUF names its pre-tokenizer only by an id; the expressions belong to the program. They are in the Oniguruma dialect
of the `tokenizers` library and are applied one after the other, every match and every rest being a piece of its own.
An id that is not here is refused: a wrong cut gives wrong tokens, and a model fed with those is silently worse.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""The one that the library has built in (`ByteLevel(use_regex=True)`), which is faster than the expression."""

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SPACE = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_WORDS}|\p{{N}}{{1,3}}|{_MARKS}|{_SPACE}"
_QWEN2 = rf"{_WORDS}|\p{{N}}|{_MARKS}|{_SPACE}"
_QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACE}"
)
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_TEKKEN = rf"{_LEAD}{_UPPER}*{_LOWER}+|{_LEAD}{_UPPER}+{_LOWER}*|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACE}"
_GPT4O = (
    rf"{_LEAD}{_UPPER}*{_LOWER}+{_SUFFIX}|{_LEAD}{_UPPER}+{_LOWER}*{_SUFFIX}|\p{{N}}{{1,3}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACE}"
)
_KIMI_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_KIMI_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_KIMI = (
    rf"[\p{{Han}}]+|{_LEAD}{_KIMI_UPPER}*{_KIMI_LOWER}+{_SUFFIX}|{_LEAD}{_KIMI_UPPER}+{_KIMI_LOWER}*{_SUFFIX}"
    rf"|\p{{N}}{{1,3}}|{_MARKS}|{_SPACE}"
)
_DSV3_TEXT = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACE}"
)
_DSV3 = (r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+", _DSV3_TEXT)
_DSCODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", r"\p{N}")
_SEED = rf"{_WORDS}|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACE}"
_BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
_EXAONE_MOE = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")
_FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]")
_LINES = r"[^\n]+|[\n]+"


@dataclass(frozen=True)
class PreTokenizer:
    """`expressions` run in sequence.

    `ignore_merges`: a piece that is a token of the vocabulary is taken whole. `add_bos`: the default where a file does
    not say. `byte_alphabet` False: pieces stay text with spaces as ▁ (the Gemma 4 way), not bytes in GPT-2's alphabet.
    """

    expressions: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    byte_alphabet: bool = True


def _table() -> dict[str, PreTokenizer]:
    llama3 = PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True)
    rows: tuple[tuple[str, PreTokenizer], ...] = (
        ("llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano", llama3),
        ("glm4 glm5", replace(llama3, add_bos=False)),
        ("chatglm-bpe dbrx smaug-bpe", PreTokenizer((_LLAMA3,))),
        (
            "qwen2 deepseek-r1-qwen megrez kormo f2llmv2 stablelm2 hunyuan solar-open grok-2",
            PreTokenizer((_QWEN2,)),
        ),
        ("qwen35", PreTokenizer((_QWEN35,))),
        ("gpt-4o llama4 kanana2 talkie minimax-m2", PreTokenizer((_GPT4O,))),
        ("tekken", PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True)),
        ("deepseek-v3 hunyuan-dense joyai-llm hy_v4", PreTokenizer(_DSV3)),
        ("deepseek-coder", PreTokenizer(_DSCODER)),
        ("kimi-k2", PreTokenizer((_KIMI,))),
        (
            "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2",
            PreTokenizer((r"\p{N}", GPT2)),
        ),
        (
            "gpt-2 phi-2 olmo mpt jais exaone4 trillion granite-docling mellum modern-bert gigachat a.x-4.0",
            PreTokenizer((GPT2,)),
        ),
        ("falcon", PreTokenizer(_FALCON)),
        ("seed-coder", PreTokenizer((_SEED,))),
        ("bailingmoe bailingmoe2 llada-moe", PreTokenizer((_BAILING,))),
        ("laguna", PreTokenizer((_LINES, _QWEN2))),
        ("exaone-moe", PreTokenizer((_EXAONE_MOE,))),
        ("tiny_aya cohere2moe", PreTokenizer((r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O))),
        ("superbpe", PreTokenizer((r"\p{N}+", r"(?=(\d{3})+(?!\d))"))),
        ("gemma4 granite-embed-multi-311m sarvam-moe", PreTokenizer((_LINES,), byte_alphabet=False)),
        ("default", PreTokenizer(_DEFAULT)),
    )
    return {name: entry for names, entry in rows for name in names.split()}


PRE_TOKENIZERS: dict[str, PreTokenizer] = _table()
