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
_CASED = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    "\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5"
    "\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba"
    "\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45"
    "\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe"
    "\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102"
    "\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3"
    "\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06"
    "\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df"
    "\U0001e900-\U0001e943"
)
"""Letters of scripts that have case, as of when the expression was written: newer ones are not letters to it."""
_DSLLM_MARKS = "!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002"
_DSLLM = (
    r"[\r\n]",
    rf"\s?[{_CASED}]+",
    rf"\s?[{_DSLLM_MARKS}]+",
    r"\s+$",
    "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
    r"\p{N}+",
)
_ASIAN = (
    "\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf"
    "\u0e00-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff"
)
_AFMOE = (r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))", f"[{_ASIAN}]+", _DSV3_TEXT)
"""Digits in groups of three counted from the right, then runs of scripts without spaces, then words and marks."""
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
        ("deepseek-llm", PreTokenizer(_DSLLM)),
        ("afmoe", PreTokenizer(_AFMOE)),
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
