"""How large plans and results can become: what their rings are made for. Pure."""

from __future__ import annotations

from backends.base import PAGE_LEN
from homeserve.engine.pages import pages_for
from homeserve.engine.request import EngineLimits
from homeserve.wire.records import Guide, Sampling

PROMPT_LOGPROB_ROWS = 32
"""Rows of a chunk whose every row needs logits: bounds the logits buffer."""

PLAN_EMBEDDINGS = 32
"""Prompts whose embeddings one plan may bring: bounds its result."""

MOST_RANKS = 16

GRAMMAR_BYTES_MAX = 64 * 1024
"""The largest grammar of a request (`Guide.grammar`)."""


def new_lane_bytes(sampling: Sampling) -> int:
    """Upper bound of the encoded size of a `NewLane` without its history."""
    breakers = sampling.dry.breakers if sampling.dry is not None else ()
    texts = sum(5 + len(text.encode()) for text in breakers)
    return 320 + 16 * len(sampling.logit_bias) + 6 * len(sampling.forbidden) + texts + _guide_bytes(sampling.guide)


def _guide_bytes(guide: Guide | None) -> int:
    if guide is None:
        return 0
    return 64 + len(guide.grammar.encode()) + sum(map(len, (guide.ends, guide.thought_opens, guide.thought_closes)))


def new_lanes_bytes_limit(limits: EngineLimits) -> int:
    """Bytes of `NewLane` records in one plan, beyond which the next newcomer waits for the next plan."""
    return 4 * limits.context + 64 * 1024


def plan_bytes_limit(limits: EngineLimits) -> int:
    """Upper bound of an encoded plan: newcomers (one may come above the bound), row records, tokens, page
    tables. Drafts add nothing: a round stays within the context."""
    largest_newcomer = 4 * limits.context + 64 * 1024 + GRAMMAR_BYTES_MAX
    row_records = 64 * limits.running
    pages = 4 * limits.running * (1 + pages_for(limits.context)) * len(limits.groups)
    ordinary = new_lanes_bytes_limit(limits) + largest_newcomer + row_records + 4 * limits.chunk + pages + 4096
    return max(ordinary, flip_bytes_limit(limits))


def flip_bytes_limit(limits: EngineLimits) -> int:
    """Upper bound of an encoded plan of a flip: a bit for each page and state slot, or a digest for each pair of
    ranks."""
    maps = sum(slots // PAGE_LEN // 8 + 16 for slots, _ in limits.groups)
    states = (limits.running + limits.checkpoints) // 8 + 16
    return max(maps + states, 48 * MOST_RANKS**2) + 1024 if limits.flip is not None else 0


def result_bytes_limit(limits: EngineLimits, top_logprobs: int = 20) -> int:
    """Upper bound of an encoded result: a sample a lane, or as many as a round may draw, log-probabilities with
    `top_logprobs` alternatives each, and some lanes' embeddings. (A census has no samples: its exchanges and launches
    have that room.)"""
    one = 32 + 16 * (top_logprobs + 1)
    flip = 48 * MOST_RANKS if limits.flip is not None else 0
    samples = limits.running * (1 + limits.most_drafts)
    embeddings = min(limits.running, PLAN_EMBEDDINGS) * 4 * limits.hidden
    return (samples + PROMPT_LOGPROB_ROWS) * one + 64 * samples + flip + embeddings + 16384
