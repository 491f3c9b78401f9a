"""What one request asks of the engine: its fields, checked against the model, as `GenerateCall`s and reading rules.

Seeds. The same seed gives the same answer; a request without one draws its own. Choice 0 uses the seed itself, so that
`n: 4` begins with what `n: 1` would have said; choice k > 0 uses `derived_seed(seed, k)`.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from homeserve.engine.request import GenerateCall
from homeserve.errors import ContextOverflow, InvalidField
from homeserve.server.bounds import Bounds
from homeserve.server.fields import Common, CompletionRequest
from homeserve.server.prompts import Prompt
from homeserve.text.answer import AnswerReader, PlainReader
from homeserve.wire.records import Dry, Guide, Sampling

if TYPE_CHECKING:
    from homeserve.text.tokenizer import Tokenizer

COMPLETION_TOKENS = 16
"""Tokens of a completion that names no limit, as OpenAI's API has it. A chat answer gets the rest of the context."""
SEQUENCES_LIMIT = 128
"""Most sequences (prompts times choices) of one request."""
DRY_BASE, DRY_ALLOWED_LEN, DRY_BREAKERS = 1.75, 2, ("\n", ":", '"', "*")
XTC_THRESHOLD = 0.1
_SEED_MASK = 2**63 - 1
_WORD = 2**64 - 1


@dataclass(frozen=True)
class Ask:
    """`calls` holds prompt p's choice k at index `p * n + k`, which is also the index of the choice in the answer.

    `logprobs` -1: none; else how many alternatives each token comes with. `silent` answers with no generated text (a
    completion of 0 tokens: the engine draws one, which is dropped).
    """

    prompts: tuple[Prompt, ...]
    n: int
    calls: tuple[GenerateCall, ...]
    stops: tuple[str, ...]
    logprobs: int = -1
    echo: bool = False
    silent: bool = False
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    token_ids: bool = False
    make_reader: Callable[[], AnswerReader] = PlainReader
    """Reads one choice's text into parts."""
    thought_told: bool = True
    """Whether the client hears thoughts."""
    guided_by: str = ""
    """The field that says what the answer has to be."""

    def prompt_of(self, index: int) -> Prompt:
        return self.prompts[index // self.n]


def derived_seed(seed: int, choice: int) -> int:
    """The seed of choice `choice`: the seed itself for 0, else a mix of both (the finaliser of SplitMix64)."""
    if choice == 0:
        return seed & _SEED_MASK
    z = (seed + choice * 0x9E3779B97F4A7C15) & _WORD
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _WORD
    return (z ^ (z >> 31)) & _SEED_MASK


@dataclass(frozen=True)
class Terms:
    """What a route asks for beside the fields that all have. `max_tokens` None: the rest of the context; 0: no text."""

    max_tokens: int | None = None
    logprobs: int = -1
    echo: bool = False
    guide: Guide | None = None
    make_reader: Callable[[], AnswerReader] = PlainReader
    thought_told: bool = True
    guided_by: str = ""
    where: str = "messages"
    """The field that the prompt came from."""


def make_ask(
    fields: CompletionRequest,
    prompts: list[Prompt],
    tokenizer: Tokenizer,
    *,
    bounds: Bounds,
    request_id: str,
    guide: Guide | None = None,
    guided_by: str = "",
) -> Ask:
    """For completions, whose fields say it all. Raises InvalidField, ContextOverflow."""
    terms = Terms(
        max_tokens=_wanted_tokens(fields),
        logprobs=-1 if fields.logprobs is None else fields.logprobs,
        echo=bool(fields.echo),
        guide=guide,
        guided_by=guided_by,
        where="prompt",
    )
    return ask_for(fields, terms, prompts, tokenizer, bounds=bounds, request_id=request_id)


def ask_for(
    fields: Common, terms: Terms, prompts: list[Prompt], tokenizer: Tokenizer, *, bounds: Bounds, request_id: str
) -> Ask:
    """Raises InvalidField, ContextOverflow."""
    _check_sequences(len(prompts), fields.n or 1, bounds)
    check_fields(fields, bounds)
    stream = fields.stream_options if fields.stream else None
    return Ask(
        prompts=tuple(prompts),
        n=fields.n or 1,
        calls=tuple(_calls(fields, terms, prompts, tokenizer, bounds, request_id)),
        stops=_stops(fields),
        logprobs=terms.logprobs,
        echo=terms.echo,
        silent=terms.max_tokens == 0,
        stream=bool(fields.stream),
        include_usage=bool(stream and stream.include_usage),
        continuous_usage=bool(stream and stream.continuous_usage_stats),
        token_ids=bool(fields.return_token_ids),
        make_reader=terms.make_reader,
        thought_told=terms.thought_told,
        guided_by=terms.guided_by,
    )


def _calls(
    fields: Common, terms: Terms, prompts: list[Prompt], tokenizer: Tokenizer, bounds: Bounds, request_id: str
) -> Iterator[GenerateCall]:
    """Each prompt's choices, one prompt after the other. Raises ContextOverflow."""
    seed = secrets.randbits(63) if fields.seed is None else fields.seed
    number = itertools.count()
    for prompt in prompts:
        room = bounds.context - len(prompt.ids)
        if room < 1:
            raise ContextOverflow(len(prompt.ids), bounds.context, terms.where)
        max_tokens = room if terms.max_tokens is None else min(max(1, terms.max_tokens), room)
        for k in range(fields.n or 1):
            sampling, end_tokens = _sampling(
                fields, tokenizer.end_ids, bounds.vocab, derived_seed(seed, k), terms, max_tokens
            )
            yield GenerateCall(
                request_id=f"{request_id}.{next(number)}",
                prompt=prompt.ids,
                sampling=sampling,
                max_tokens=max_tokens,
                end_tokens=end_tokens,
                prompt_logprobs=terms.logprobs if terms.echo else -1,
            )


def _check_sequences(prompts: int, n: int, bounds: Bounds) -> None:
    """Raises InvalidField for more sequences than the server can ever hold: a 429 would be tried again for ever."""
    limit = min(SEQUENCES_LIMIT, bounds.sequences)
    if n * prompts <= limit:
        return
    why = "at a time" if limit == SEQUENCES_LIMIT else "on this server (--max-running plus --max-waiting)"
    if prompts > limit:
        raise InvalidField("prompt", f"has {prompts} entries; the limit is {limit} {why}")
    raise InvalidField("n", f"{prompts} prompts times {n} choices is more than {limit} {why}")


def check_fields(fields: Common, bounds: Bounds) -> None:
    """Raises InvalidField for token ids that the model does not have: a rank refuses a whole plan that names one."""
    _check_tokens("logit_bias", fields.logit_bias or (), bounds.vocab)
    _check_tokens("stop_token_ids", fields.stop_token_ids or (), bounds.vocab)


def _check_tokens(field: str, tokens: Iterable[int], vocab: int) -> None:
    for token in tokens:
        if not 0 <= token < vocab:
            raise InvalidField(field, f"{token} is no token id of this model (0 to {vocab - 1})")


def tighter(one: int | None, other: int | None) -> int | None:
    """Of the two names for one limit of tokens."""
    return min((limit for limit in (one, other) if limit is not None), default=None)


def _wanted_tokens(fields: CompletionRequest) -> int:
    said = tighter(fields.max_completion_tokens, fields.max_tokens)
    return max(COMPLETION_TOKENS, fields.min_tokens or 0) if said is None else said


def _stops(fields: Common) -> tuple[str, ...]:
    stop = [fields.stop] if isinstance(fields.stop, str) else fields.stop or []
    return tuple(text for text in stop if text)


def _sampling(
    fields: Common, model_ends: frozenset[int], vocab: int, seed: int, terms: Terms, max_tokens: int
) -> tuple[Sampling, frozenset[int]]:
    """How to draw, and the tokens that end the sequence. Ids in `fields` were checked.

    Under `ignore_eos` none of the model's own end tokens can be drawn (`forbidden` for as long as the sequence lasts),
    so that exactly `max_tokens` come out, unless one of the client's `stop_token_ids` ends it before, or a grammar is
    complete and lets nothing else be drawn. End tokens beyond the model's vocabulary cannot be drawn anyway. A `top_p`
    of 0 keeps the most likely token alone, which is what `top_k` 1 says.
    """
    client_ends = frozenset(fields.stop_token_ids or ())
    end_tokens = frozenset(token for token in model_ends if token < vocab) | client_ends
    if fields.ignore_eos:
        forbidden, min_tokens = end_tokens - client_ends, max_tokens
        end_tokens = end_tokens if terms.guide is not None else client_ends
    else:
        forbidden, min_tokens = end_tokens, min(fields.min_tokens or 0, max_tokens)
    top_p = 1.0 if fields.top_p is None else fields.top_p
    sampling = Sampling(
        temperature=1.0 if fields.temperature is None else fields.temperature,
        top_k=1 if top_p == 0 else max(0, fields.top_k or 0),
        top_p=top_p or 1.0,
        min_p=fields.min_p or 0.0,
        typical_p=1.0 if fields.typical_p is None else fields.typical_p,
        repetition_penalty=_repetition_penalty(fields),
        presence_penalty=fields.presence_penalty or 0.0,
        frequency_penalty=fields.frequency_penalty or 0.0,
        seed=seed,
        logit_bias=tuple(sorted((fields.logit_bias or {}).items())),
        top_logprobs=terms.logprobs,
        forbidden=tuple(sorted(forbidden)) if min_tokens else (),
        min_tokens=min_tokens,
        top_n_sigma=max(0.0, fields.top_n_sigma or 0.0),
        xtc_probability=max(0.0, fields.xtc_probability or 0.0),
        xtc_threshold=XTC_THRESHOLD if fields.xtc_threshold is None else fields.xtc_threshold,
        dry=_dry(fields),
        guide=terms.guide,
    )
    return sampling, end_tokens


def _dry(fields: Common) -> Dry | None:
    """None where it is off. What is not said is as llama.cpp has it; its breakers of no text are none there, either."""
    multiplier = fields.dry_multiplier or 0.0
    if multiplier <= 0 or fields.dry_penalty_last_n == 0:
        return None
    breakers = DRY_BREAKERS if fields.dry_sequence_breakers is None else tuple(fields.dry_sequence_breakers)
    return Dry(
        multiplier,
        base=DRY_BASE if fields.dry_base is None else fields.dry_base,
        allowed_len=DRY_ALLOWED_LEN if fields.dry_allowed_length is None else fields.dry_allowed_length,
        last_n=-1 if fields.dry_penalty_last_n is None else fields.dry_penalty_last_n,
        breakers=tuple(text for text in breakers if text),
    )


def _repetition_penalty(fields: Common) -> float:
    """Under either of its names; that they agree was checked."""
    said = fields.repeat_penalty if fields.repetition_penalty is None else fields.repetition_penalty
    return 1.0 if said is None else said
