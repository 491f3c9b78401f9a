"""What one request is measured by: functions from a running server to a number.

Throughputs are tokens per second (more is better); times and memory are better when small.
"""

from __future__ import annotations

from homeserve.bench.client import HeldBack, Target, Timing, Unmeasured, complete, complete_at_once, total_tok_s
from homeserve.bench.prompts import Prompts

SHORT_PROMPT = 8
"""Tokens before an answer that is behind nothing."""
SHARED_PROMPT = 32
"""Tokens before each of several answers at once."""
DRAWS = 8
"""Prompts that are tried where a server holds text back."""


class NotComputed(Unmeasured):
    """A prompt of which the server had a part in its cache: reading it was no prefill."""


def prefill(target: Target, prompts: Prompts, length: int) -> Timing:
    """A prompt of `length` tokens and the first token behind it. Raises NotComputed."""
    timing = complete(target, prompts.draw(length), 1)
    check_computed(timing)
    return timing


def prefill_tok_s(timing: Timing) -> float:
    return timing.prompt_tokens / timing.ttft_s


def decode(target: Target, prompts: Prompts) -> float:
    """Tokens per second of one answer behind a short prompt."""
    return decoded(target, prompts, SHORT_PROMPT)[1]


def decoded(target: Target, prompts: Prompts, length: int) -> tuple[Timing, float]:
    """An answer behind `length` tokens and its tokens per second. A prompt whose answer is held back is drawn again."""
    for _ in range(DRAWS):
        timing = complete(target, prompts.draw(length), prompts.answer, counted=True)
        try:
            return timing, timing.decode_tok_s
        except HeldBack:
            continue
    raise HeldBack(f"{target.engine} held back the answers to {DRAWS} prompts of {length} tokens")


def at_once(target: Target, prompts: Prompts, streams: int) -> float:
    """Tokens per second of `streams` answers together, their short prompts' time included."""
    drawn = [prompts.draw(SHARED_PROMPT) for _ in range(streams)]
    return total_tok_s(complete_at_once(target, drawn, prompts.answer))


def check_computed(timing: Timing) -> None:
    """Raises NotComputed where the server took a part of the prompt from its cache."""
    if timing.cached_tokens:
        raise NotComputed(f"the server had {timing.cached_tokens} of {timing.prompt_tokens} prompt tokens in its cache")
