"""Which tokens end an answer.

The ids that a file names are not enough: many files name one, and the model uses another (`<|im_end|>` beside
`<|endoftext|>`). So known end tokens are found by their text as well, but only among control and user-defined tokens:
some vocabularies hold a *normal* token that reads `</s>`, and a model that writes HTML would end in the middle of it.
"""

from __future__ import annotations

from collections.abc import Iterable

END_TEXTS = frozenset(
    (
        "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
        "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>",
        "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~[",
    )
)  # fmt: skip


def end_ids(named: Iterable[int], marked: Iterable[tuple[int, str]]) -> frozenset[int]:
    """`named` are ids from metadata, `marked` the control and user-defined tokens as (id, text)."""
    by_text = {text: index for index, text in marked if text in END_TEXTS}
    ids = set(named) | set(by_text.values())
    harmony = {"<|return|>", "<|call|>"} <= by_text.keys() or {"<|calls|>", "<|flush|>"} <= by_text.keys()
    if harmony and "<|end|>" in by_text:
        # The Harmony format: <|end|> closes one message of several, the answer goes on.
        ids.discard(by_text["<|end|>"])
    if "<|tool_response>" in by_text and "</s>" in by_text:
        # Gemma 4 has </s> for other uses; its turns end with <turn|>.
        ids.discard(by_text["</s>"])
    return frozenset(ids)
