"""One option with one cut, tried: its ledger, the room that this leaves, the pool that it would get, and its speeds.

Of each option several cuts are tried, between "by speed" and "by memory" (cuts.py); the best trial stands for it.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from budget.ceilings import Ceilings
from budget.cuts import cut_with_cpu, cuts, rates, shards, token_vector, with_experts
from budget.job import Job, Share
from budget.ledger import PIPELINE, TENSOR, Line, Term, lines_at
from budget.options import EXPERTS
from budget.placement import Cut, Option, Shard, like_cpu, pipeline_shares, tensor_shares
from budget.solve import TOKENS_MAX, Room, room
from budget.speed import LayoutSpeed, Work, experts_away, pipeline_speed, tensor_speed
from budget.terms import terms
from budget.wish import PAGE, pages

COMFORT_TOKENS = 8192
"""A pool that a conversation fits into: less is a reason to look for a slower placement that gives more."""

_HOST_SHARE = 4
"""On the host, an unasked pool beyond a comfortable one takes at most one part in so many of the room: this is
someone's home box."""

_DEPTH = 2048
"""Tokens of context at which decode speed is told."""
JOB_PROMPT, JOB_ANSWER = 2048, 256
"""The request by which placements are compared."""


@dataclass(frozen=True)
class Trial:
    """One option with one cut and its vectors: the ledger's terms, the room, and the pool that it would get."""

    job: Job
    option: Option
    ceilings: Ceilings
    cut: Cut | None
    shard: Shard | None
    terms: tuple[Term, ...]
    room: Room
    tokens: int
    speeds: Mapping[str, LayoutSpeed]
    capped: bool

    @property
    def context(self) -> int:
        """The longest request. A way out promises a comfortable one, not what its pool is rounded up to."""
        wish, most = self.job.wish, min(self.job.context, self.tokens)
        return min(most, COMFORT_TOKENS) if self.capped and not (wish.context or wish.kv_tokens) else most

    @property
    def granule(self) -> int:
        """Tokens by which a pool grows: whole pages on every rank."""
        return PAGE * (sum(self.shard.tokens) if self.shard is not None else 1)

    @property
    def most(self) -> int:
        """The largest pool that fits, in whole pages on every rank."""
        unbounded = self.room.tokens >= TOKENS_MAX
        return self.tokens if unbounded else self.room.tokens // self.granule * self.granule

    @property
    def lines(self) -> tuple[Line, ...]:
        """The ledger with the pool that it would get."""
        return lines_at(self.terms, self.tokens)

    @property
    def least_lines(self) -> tuple[Line, ...]:
        """The ledger with the smallest pool that is worth a plan."""
        return lines_at(self.terms, rounded(self.job.least_tokens, self.granule))

    @property
    def key(self) -> tuple[float, ...]:
        """What is preferred: tokens, then no refill at a flip, then the more that one may carry, then speed; for what
        does not fit, the least lack."""
        tokens, short = self.tokens, self.room.short_bytes
        return (tokens, -short, self.option.resident, self.option.transit, -job_seconds(self.speeds))


def best_trial(job: Job, option: Option, ceilings: Ceilings, *, capped: bool, tokens: int = 0) -> Trial:
    """The best of the option's cuts. `capped`: it is a way out, a comfortable pool is enough. With `tokens` its pool is
    of so many, in whole granules, or does not fit."""
    trials = (
        _trial(job, variant, ceilings, cut, shard, capped=capped, exactly=tokens)
        for variant, cut, shard in _variants(job, option, ceilings)
    )
    return max(trials, key=lambda trial: trial.key)


def _variants(job: Job, option: Option, ceilings: Ceilings) -> Iterable[tuple[Option, Cut | None, Shard | None]]:
    """Every combination of cut and shard that is worth a look."""
    if len(option.ranks) == 1 and option.host_only:
        yield option, Cut(((0, len(job.layers)),)), None
        return
    if not option.host_only and ceilings.devices[option.ranks[0]].kind == "cpu":
        yield option, cut_with_cpu(job, option, ceilings, comfort(job)), None
        return
    if option.name == EXPERTS:
        yield *with_experts(job, option, ceilings, comfort(job)), None
        return
    of_layers: Sequence[Cut | None] = cuts(job, option, ceilings) if PIPELINE in option.layouts else (None,)
    of_shares: Sequence[Shard | None] = shards(job, option, ceilings) if TENSOR in option.layouts else (None,)
    for cut in of_layers:
        for shard in of_shares:
            yield option, cut, shard


def _trial(
    job: Job,
    option: Option,
    ceilings: Ceilings,
    cut: Cut | None,
    shard: Shard | None,
    *,
    capped: bool,
    exactly: int = 0,
) -> Trial:
    pipeline = pipeline_shares(job, option, cut) if cut is not None else ()
    if shard is not None and not shard.tokens:
        shard = replace(shard, tokens=token_vector(job, option, ceilings, pipeline, shard))
    tensor = tensor_shares(job, shard, on_cpu=like_cpu(job, option)) if shard is not None else ()
    found = tuple(terms(job, option, ceilings, pipeline, tensor))
    space = room(found, ceilings)
    granule = PAGE * (sum(shard.tokens) if shard is not None else 1)
    if exactly:
        tokens = rounded(exactly, granule) if rounded(exactly, granule) <= space.tokens else 0
    else:
        tokens = _pool_tokens(job, option, ceilings, space.tokens, granule, capped=capped)
    speeds = _speeds(job, option, ceilings, pipeline, tensor)
    return Trial(job, option, ceilings, cut, shard, found, space, tokens, speeds, capped)


def _pool_tokens(job: Job, option: Option, ceilings: Ceilings, most: int, granule: int, *, capped: bool) -> int:
    """The pool: what was asked for; unasked what the requests can use, less on the host and on a way out. 0: does not
    fit."""
    wish = job.wish
    most = most // granule * granule if most > 0 else 0
    context = pages(job.context)
    use = -(-job.running * context // granule) * granule
    if wish.kv_tokens:
        asked = -(-wish.kv_tokens // granule) * granule
        return asked if asked <= most else 0
    if capped:
        use = min(use, rounded(max(wish.context, min(context, COMFORT_TOKENS)), granule))
    elif option.host_only:
        share = min(most // _HOST_SHARE, max(context, COMFORT_TOKENS))
        use = min(use, max(rounded(wish.context or min(context, COMFORT_TOKENS), granule), share // granule * granule))
    elif any(ceilings.devices[index].kind == "uma" for index in option.ranks):
        use = min(use, rounded(max(context, COMFORT_TOKENS), granule))
    tokens = min(most, use)
    return tokens if tokens >= job.least_tokens else 0


def rounded(tokens: int, granule: int) -> int:
    """`tokens` rounded up to whole granules."""
    return -(-tokens // granule) * granule


def comfort(job: Job) -> int:
    return job.wish.kv_tokens or job.wish.context or min(job.shape.context, COMFORT_TOKENS)


# ------------------------------------------------------------------------------------------------------------- speeds


def speeds_by_speed(job: Job, option: Option, ceilings: Ceilings) -> dict[str, LayoutSpeed]:
    cut = cuts(job, option, ceilings)[0] if PIPELINE in option.layouts else None
    shard = shards(job, option, ceilings)[0] if TENSOR in option.layouts else None
    pipeline = pipeline_shares(job, option, cut) if cut is not None else ()
    tensor = tensor_shares(job, shard, on_cpu=like_cpu(job, option)) if shard is not None else ()
    return _speeds(job, option, ceilings, pipeline, tensor)


def job_seconds(speeds: Mapping[str, LayoutSpeed]) -> float:
    """Time of the request by which placements are compared."""
    prefill, decode = speeds.get(PIPELINE) or speeds[TENSOR], speeds.get(TENSOR) or speeds[PIPELINE]
    return JOB_PROMPT / prefill.prefill_tok_s + JOB_ANSWER / decode.decode_tok_s


def _speeds(
    job: Job, option: Option, ceilings: Ceilings, pipeline: Sequence[Share], tensor: Sequence[Share]
) -> dict[str, LayoutSpeed]:
    there, hidden = [rates(job, ceilings.devices[index]) for index in option.ranks], job.shape.hidden
    at_once = len(option.ranks) if option.shares_device else 1
    busy = [rates(job, ceilings.devices[index], at_once) for index in option.ranks]
    found = {}
    if pipeline:
        work = [_work(job, share) for share in pipeline]
        found[PIPELINE] = pipeline_speed(work, there, hidden, len(job.layers))
        if option.shares_device:  # all of them at once compute a prompt; the token of one request is at one of them
            prompts = pipeline_speed(work, busy, hidden, len(job.layers))
            found[PIPELINE] = replace(found[PIPELINE], prefill_tok_s=prompts.prefill_tok_s)
        if option.expert_layers:
            layers = job.layers[: option.expert_layers]
            away = Share(0, read=sum(layer.expert_bytes * layer.used_experts for layer in layers))
            host = rates(job, ceilings.devices[-1])
            found[PIPELINE] = experts_away(found[PIPELINE], _work(job, away), host, there, hidden, len(layers))
    if tensor:
        found[TENSOR] = tensor_speed([_work(job, share) for share in tensor], busy, hidden, len(job.layers))
    return found


def _work(job: Job, share: Share) -> Work:
    return Work(
        share.read, share.kv_read(_DEPTH) + share.state / max(1, job.running), 2 * share.read * job.weights_per_byte
    )
