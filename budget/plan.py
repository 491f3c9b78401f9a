"""From ceilings, a model's shape and a wish to a plan that fits, or to the reason why none does.

The plan is a proof: its ledger is a list of lines, their sums at each moment are below every ceiling, and whoever
doubts it can add them up. How it is found:

    options      placements in the order in which they are wanted (options.py)
    trials       each with several cuts between "by speed" and "by memory"; every trial is a ledger (terms.py)
    room         the largest KV pool whose ledger fits (solve.py)
    choice       the first group that gives a comfortable pool; in a group the largest pool, then the fastest
    flip         CPU ranks get both layouts where that leaves the pool as it is, or where it was asked for (flip.py)
    drafting     the drafting block is left out again where nothing could draft, or where only without it anything fits

A placement that is only a way out (part of the model on the CPU, fewer requests at once) gets a comfortable pool and no
more unless it is asked for: so more memory never means a smaller context. What was asked for is never made smaller: a
wish that does not fit is refused with the sum of the option that came nearest.

Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from budget import flip, host_lines
from budget.aperture import check_groups
from budget.ceilings import Ceilings, Device
from budget.cuts import rates
from budget.facts import GIB, KV_BLOCKS, MIB, Doubt, ModelShape
from budget.job import Job, settle
from budget.ledger import MOMENTS, PIPELINE, TENSOR, Line, held_bytes, lines_at, peak_bytes
from budget.options import ALL_CARDS, CPU_FLIPPING, CPU_ONLY, EXPERTS, WITH_CPU, WishError, chosen, image_needs, options
from budget.outcome import NO_FLIP, Advice, Binds, FlipTerms, Plan, Priced, Refusal, Unknown
from budget.placement import Option
from budget.solve import TOKENS_MAX, fits
from budget.speed import break_even, flip_seconds
from budget.trial import Trial, best_trial, comfort, job_seconds, speeds_by_speed
from budget.wish import NO_DRAFTS_IN_A_PIPELINE, PAGE, Wish

__all__ = ["Advice", "Binds", "Plan", "Priced", "Refusal", "Unknown", "WishError", "plan"]

_NAMED_LAYERS = 8
"""Of a list of layers in a message."""
_EARNED = 0.75
"""One layout comes before two with a flip only where it is clearly faster: the speeds are estimates, and a server that
holds both layouts measures which of them pays."""


def plan(ceilings: Ceilings, shape: ModelShape, wish: Wish) -> Plan | Refusal | Unknown:
    """The best plan for `wish`, the refusal of the option that came nearest, or that nothing is known.

    Raises WishError where the wish contradicts the box or the model by itself (a vector of the wrong length, a device
    that is not there, a context longer than the model's).
    """
    made = _plan(ceilings, shape, wish)
    if not (wish.draft and shape.nextn):
        return made
    without = replace(wish, draft=False)
    if isinstance(made, Plan) and _stays_in_a_pipeline(made):
        other = _plan(ceilings, shape, without)
        return replace(other, no_drafts=NO_DRAFTS_IN_A_PIPELINE) if isinstance(other, Plan) else made
    if isinstance(made, Refusal) and not wish.drafts:
        other = _plan(ceilings, shape, without)
        return replace(other, no_drafts=_too_little(made)) if isinstance(other, Plan) else made
    return made


def _stays_in_a_pipeline(made: Plan) -> bool:
    """Several ranks on the CPU that only ever have the layout in which nothing is drafted."""
    return made.layouts == (PIPELINE,) and len(made.ranks) > 1 and len(set(made.ranks)) == 1


def _too_little(refusal: Refusal) -> str:
    short = refusal.needed_bytes - refusal.available_bytes
    where = refusal.ceilings.devices[refusal.device].name
    return f"the drafting block does not fit beside the rest: {_mib(short)} MiB are missing on {where}"


def _plan(ceilings: Ceilings, shape: ModelShape, wish: Wish) -> Plan | Refusal | Unknown:
    _check(shape, wish)
    devices = chosen(ceilings, wish)
    if not devices:
        return _nothing_usable(ceilings, shape, wish)
    aperture = _aperture_refusal(ceilings, shape, wish)
    if aperture is not None:
        return aperture
    tried: list[Trial] = []
    best: Trial | None = None
    for running in (wish.running,) if wish.running else (0, 1):
        job = settle(shape, wish, running)
        for group in _fastest_first(job, ceilings, options(job, ceilings, devices)):
            capped = bool(tried)
            for option in group:
                trial = best_trial(job, option, ceilings, capped=capped)
                tried.append(trial)
                if trial.tokens >= job.least_tokens and (best is None or trial.key > best.key):
                    best = trial
            if best is not None and best.tokens >= comfort(job):
                return _flipping(best, tried, _passed_over(best, devices, tried))
    if best is not None:
        return _flipping(best, tried)
    return _refused(tried)


def _fastest_first(job: Job, ceilings: Ceilings, groups: Sequence[Sequence[Option]]) -> list[Sequence[Option]]:
    """A flip must earn its keep: where one layout is the faster one for prompts and for answers, it comes first.

    Likewise CPU ranks leave the layout that they rest in only for one that is clearly faster.

    The order must not depend on how much memory there is (see `plan`), so it is told by the cuts by speed alone.
    """
    alone = [group for group in groups if not _ways_out(group)]
    if len(alone) < 2:
        return list(groups)
    seconds = {id(group): _job_seconds(job, group[0], ceilings) for group in alone}
    best = min(alone, key=lambda group: seconds[id(group)])
    first = alone[0][0]
    earned = _EARNED if first.flips or first.host_only else 1.0
    if seconds[id(best)] < seconds[id(alone[0])] * earned:
        alone.sort(key=lambda group: seconds[id(group)])
    return [*alone, *(group for group in groups if _ways_out(group))]


def _passed_over(taken: Trial, devices: Sequence[Device], tried: Sequence[Trial]) -> tuple[Priced, ...]:
    """Placements on the cards alone that were not tried, because an earlier one gives enough: told with their
    speeds."""
    job, ceilings, names = taken.job, taken.ceilings, {trial.option.name for trial in tried}
    found = []
    for group in options(job, ceilings, devices):
        for option in group if not _ways_out(group) else ():
            if option.name in names:
                continue
            speeds = speeds_by_speed(job, option, ceilings)
            prefill, decode = speeds.get(PIPELINE) or speeds[TENSOR], speeds.get(TENSOR) or speeds[PIPELINE]
            slower = job_seconds(speeds) > job_seconds(taken.speeds)
            near = "with both layouts the server measures which pays" if taken.option.flips else "by estimate"
            why = "slower on these devices" if slower else f"about as fast: {near}"
            found.append(Priced(option.name, None, prefill.prefill_tok_s, decode.decode_tok_s, why))
    return tuple(found)


def _ways_out(group: Sequence[Option]) -> bool:
    return any(option.name in (ALL_CARDS, EXPERTS, WITH_CPU, CPU_ONLY) for option in group)


def _job_seconds(job: Job, option: Option, ceilings: Ceilings) -> float:
    """Time of the request by which placements are compared, with weights divided by speed."""
    return job_seconds(speeds_by_speed(job, option, ceilings))


# ----------------------------------------------------------------------------------------------------------- outcomes


def _flipping(trial: Trial, tried: Sequence[Trial], passed_over: Sequence[Priced] = ()) -> Plan | Refusal:
    """The plan with both layouts, where CPU ranks are to have them and can; cards have found theirs already."""
    asked = trial.job.wish.flip == "on"
    if not flip.is_asked(trial):
        return _made(
            trial, tried, passed_over, flip.terms_of(trial) if trial.option.flips else _one_layout(trial, tried)
        )
    cannot = flip.against(trial)
    if cannot and asked:
        raise WishError("flip", cannot, "leave --flip out, or use fewer ranks")
    if cannot:
        return _made(trial, tried, passed_over, replace(NO_FLIP, why_not=cannot))
    both = flip.with_flip(trial, trial.tokens)
    if both.tokens:
        return _made(both, [*tried, both], passed_over, flip.terms_of(both))
    less = flip.with_flip(trial)
    if asked and less.tokens >= trial.job.least_tokens:
        return _made(less, [less], passed_over, flip.terms_of(less))
    if asked:
        return _refused([less])
    return _made(trial, [*tried, less], passed_over, flip.not_fitting(both, trial.tokens))


def _one_layout(taken: Trial, tried: Sequence[Trial]) -> FlipTerms:
    """Why cards have one layout, where a flip was looked at; what it lacks is the sum of the nearest one."""
    flips, wish, host = [trial for trial in tried if trial.option.flips], taken.job.wish, taken.ceilings.devices[-1]
    if not flips:
        needed, available = image_needs(taken.job), host.ceiling_bytes or 0
        cards = len(taken.option.ranks) > 1 and not taken.option.host_only and wish.cpu_moe <= 0
        if not cards or wish.layout != "auto" or wish.flip == "off":
            return NO_FLIP
        if needed < available:
            return replace(NO_FLIP, why_not=flip.faster_alone(taken))
        why = f"host memory lacks {_mib(needed - available)} of {_mib(needed)} MiB for a copy of the weights"
        return replace(NO_FLIP, why_not=why, needed_bytes=needed, available_bytes=available, short_device=host.index)
    nearest = min(flips, key=lambda trial: _shortage(trial).bytes)
    short = _shortage(nearest)
    if short.bytes <= 0:
        return replace(NO_FLIP, why_not=flip.no_better(nearest, taken))
    return FlipTerms(
        fits=False,
        why_not=f"with both layouts {_lack(nearest)}",
        needed_bytes=short.needed,
        available_bytes=short.available,
        short_device=short.device,
    )


def _made(trial: Trial, tried: Sequence[Trial], passed_over: Sequence[Priced], terms: FlipTerms) -> Plan:
    job, option, ceilings = trial.job, trial.option, trial.ceilings
    lines = trial.lines
    if not fits(lines, ceilings):
        raise AssertionError(f"a plan that does not fit: {option.name}, {trial.tokens} tokens")
    flip_s, even = _flip(trial)
    return Plan(
        shape=job.shape,
        wish=job.wish,
        ceilings=ceilings,
        option=option.name,
        ranks=option.ranks,
        layouts=option.layouts,
        ranges=trial.cut.ranges if trial.cut is not None else (),
        weight_vector=trial.shard.weights if trial.shard is not None else (),
        token_vector=trial.shard.tokens if trial.shard is not None else (),
        expert_layers=option.expert_layers,
        context=trial.context,
        kv_tokens=trial.tokens,
        running=job.running,
        lines=lines,
        binds=_binds(trial, lines),
        rank_tokens=_rank_tokens(trial),
        speeds=trial.speeds,
        flip_s=flip_s,
        break_even_tokens=even,
        checkpoints=job.checkpoints,
        flip=terms,
        most_tokens=trial.most,
        choice=_choice(trial, tried),
        priced=(*_priced(trial, tried), *passed_over),
        doubts=(*ceilings.doubts, *_doubts(trial)),
    )


def _rank_tokens(trial: Trial) -> tuple[int, ...]:
    """What each rank alone would allow; a rank without KV rows bounds nothing and is given the plan's own number."""
    if trial.option.shares_device:
        return tuple(_beside_others(trial, rank) for rank in range(len(trial.option.ranks)))
    alone = [trial.room.devices[device] for device in trial.option.ranks]
    return tuple(trial.tokens if tokens >= TOKENS_MAX else max(0, tokens // PAGE * PAGE) for tokens in alone)


def _beside_others(trial: Trial, rank: int) -> int:
    """Of ranks with one memory: what it leaves this one for its rows when the others have theirs for the largest pool
    that fits."""
    device, most = trial.ceilings.devices[trial.option.ranks[rank]], trial.most
    pool = host_lines.KV if trial.job.wish.unified else host_lines.of_rank(host_lines.KV, rank)
    rows = [term for term in trial.terms if term.name == pool and not term.until]
    own = max(sum(term.per_token for term in rows if moment in term.held) for moment in MOMENTS)
    if not own or device.ceiling_bytes is None or trial.room.tokens >= TOKENS_MAX:
        return trial.tokens
    left = device.ceiling_bytes - peak_bytes(lines_at(trial.terms, most), device.index)
    return (most + max(0, int(left / own))) // PAGE * PAGE


def _binds(trial: Trial, lines: Sequence[Line]) -> Binds:
    """The device where the room ends, and its line that the pool competes with."""
    device, moment = trial.room.device, trial.room.moment
    own = [line for line in lines if line.device == device and moment in line.held]
    pool = next((line for line in own if line.name.startswith(host_lines.KV)), None)
    if trial.room.tokens >= TOKENS_MAX or not own:
        return Binds(trial.option.ranks[0], host_lines.WEIGHTS, "nothing: the model keeps no more tokens in memory")
    largest = max((line for line in own if line is not pool), key=lambda line: line.bytes, default=own[0])
    name = trial.ceilings.devices[device].name
    most = trial.most
    if trial.tokens < most:
        return Binds(
            device, pool.name if pool is not None else largest.name, f"nothing yet: {name} would hold {most} tokens"
        )
    why = f"{name} is full at {most} tokens ({moment})"
    if trial.option.shares_device and not trial.job.wish.unified:
        tokens = _rank_tokens(trial)
        rank = tokens.index(min(tokens))
        pool = next((line for line in own if line.name == host_lines.of_rank(host_lines.KV, rank)), pool)
        why += f", and rank {rank} needs most for each of them"
    return Binds(device, pool.name if pool is not None else largest.name, why)


def _choice(taken: Trial, tried: Sequence[Trial]) -> str:
    """Which layout CPU ranks have and why, where nobody asked for one."""
    option, wish = taken.option, taken.job.wish
    vectors = wish.pipeline_ratio or wish.weight_vector or wish.token_vector
    if not option.shares_device or wish.layout != "auto" or vectors:
        return ""
    own = option.layouts[0]
    other = TENSOR if own == PIPELINE else PIPELINE
    groups = options(taken.job, taken.ceilings, chosen(taken.ceilings, wish))
    rest = next((each for group in groups for each in group if other in each.layouts), None)
    if rest is None:
        return f"{own} layout: this model cannot be divided among so many ranks in the {other} layout"
    if any(trial.option.name == rest.name and trial.tokens < taken.tokens for trial in tried):
        return f"{own} layout: the {other} layout leaves less room for tokens"
    ratio = job_seconds(speeds_by_speed(taken.job, rest, taken.ceilings)) / job_seconds(taken.speeds)
    if own == TENSOR:
        return f"tensor layout: by estimate {ratio:.1f} times as fast for a whole request as the pipeline layout"
    return (
        f"pipeline layout: by estimate the tensor layout is {1 / ratio:.1f} times as fast, which is not clearly faster"
    )


def _flip(trial: Trial) -> tuple[float | None, int | None]:
    """Seconds of one flip, and the prompt tokens from which a round trip pays; None where they do not exist."""
    if not trial.option.flips:
        return None, None
    ranks = trial.option.ranks
    at_once = len(ranks) if trial.option.shares_device else 1
    moved = [0.0] * len(ranks)
    if not trial.option.resident:
        for place, index in enumerate(ranks):
            arena = host_lines.of_rank(host_lines.WEIGHTS, place) if at_once > 1 else "weights arena"
            moved[place] = sum(term.fixed for term in trial.terms if term.device == index and term.name == arena)
    seconds = flip_seconds(moved, [rates(trial.job, trial.ceilings.devices[index], at_once) for index in ranks])
    before, after = trial.speeds[PIPELINE].prefill_tok_s, trial.speeds[TENSOR].prefill_tok_s
    even = break_even(2 * seconds, after, before) if before > after > 0 else None
    return seconds, even


def _priced(taken: Trial, tried: Sequence[Trial], *, none_taken: bool = False) -> tuple[Priced, ...]:
    found: dict[str, Priced] = {}
    for trial in tried:
        speeds = trial.speeds
        prefill, decode = speeds.get(PIPELINE) or speeds[TENSOR], speeds.get(TENSOR) or speeds[PIPELINE]
        name = trial.option.name + (
            "" if trial.job.running != 1 or trial.job.wish.running else ", one request at a time"
        )
        if trial is taken and not none_taken:
            why = ""
        elif not trial.tokens:
            why = _lack(trial)
        else:
            why = "smaller pool" if trial.tokens < taken.tokens else "slower"
            if taken.option.flips and taken.option.name == CPU_FLIPPING and trial.option.host_only:
                why = "one layout: with both the server measures which pays"
        found[name] = Priced(name, trial.tokens or None, prefill.prefill_tok_s, decode.decode_tok_s, why)
    return tuple(found.values())


@dataclass(frozen=True)
class Shortage:
    """Where an option lacks the most with the smallest pool that is worth a plan. `shared`: it is the memory that the
    device shares with the host, not its own."""

    bytes: int
    device: int
    needed: int
    available: int
    shared: bool = False


def _shortage(trial: Trial) -> Shortage:
    lines = trial.least_lines
    found = []
    for device in trial.ceilings.devices:
        if device.ceiling_bytes is not None:
            needed = max(held_bytes(lines, device.index, moment) for moment in MOMENTS)
            found.append(Shortage(needed - device.ceiling_bytes, device.index, needed, device.ceiling_bytes))
    for pool, size in enumerate(trial.ceilings.pools):
        members = [device for device in trial.ceilings.devices if device.pool == pool]
        if size is None or len(members) < 2:
            continue
        for moment in MOMENTS:
            held = {d.index: max(0, held_bytes(lines, d.index, moment) - d.private_bytes) for d in members}
            largest, needed = max(held, key=lambda index: held[index]), sum(held.values())
            found.append(Shortage(needed - size, largest, needed, size, shared=True))
    return max(found, key=lambda shortage: shortage.bytes)


def _lack(trial: Trial) -> str:
    short = _shortage(trial)
    return f"{_mib(short.bytes)} MiB lack on {trial.ceilings.devices[short.device].name}"


def _refused(tried: Sequence[Trial]) -> Refusal:
    trial = min(tried, key=lambda trial: _shortage(trial).bytes)
    short, job = _shortage(trial), trial.job
    device = trial.ceilings.devices[short.device]
    where = f"of the memory that {device.name} shares with the host" if short.shared else f"on {device.name}"
    reason = (
        f"{job.shape.name} ({job.shape.quant}) with {job.least_tokens} tokens of context does not fit: it would hold"
        f" {_mib(short.needed)} MiB {where}, {short.available // MIB} MiB may be used,"
        f" {_mib(short.bytes)} MiB are missing"
    )
    if trial.option.shares_device:
        reason += _rank_words(trial, device)
    return Refusal(
        shape=job.shape,
        wish=job.wish,
        ceilings=trial.ceilings,
        option=trial.option.name,
        reason=reason + (_dense_words(trial, device) if job.wish.dense else ""),
        device=short.device,
        needed_bytes=short.needed,
        available_bytes=short.available,
        lines=trial.least_lines,
        priced=_priced(trial, tried, none_taken=True),
        doubts=(*trial.ceilings.doubts, *_doubts(trial)),
    )


def _rank_words(trial: Trial, device: Device) -> str:
    """Ranks take of one memory in turn, after what the server itself needs: how much each needs, and which one is the
    first that finds too little."""
    held = {line.name: line.bytes for line in trial.least_lines if line.device == device.index}
    ranks = range(len(trial.option.ranks))
    needs = [sum(size for name, size in held.items() if name.endswith(host_lines.of_rank("", rank))) for rank in ranks]
    left = (device.ceiling_bytes or 0) - (sum(held.values()) - sum(needs))
    rank = 0
    while needs[rank] <= left and rank < len(needs) - 1:
        left -= needs[rank]
        rank += 1
    each = ", ".join(f"rank {other} needs {_mib(need)} MiB" for other, need in enumerate(needs))
    return f". For rank {rank} {max(0, left) // MIB} MiB are left: {each}"


def _dense_words(trial: Trial, device: Device) -> str:
    """What packed weights become where no kernel reads them."""
    packed, dense = trial.job.shape.layers, trial.job.layers
    before, after = sum(layer.bytes for layer in packed) / len(packed), sum(layer.bytes for layer in dense) / len(dense)
    kind = {2: "bf16", 4: "float32"}[trial.job.wish.dense]
    words = (
        f". This backend has no kernel for packed weights and would hold them as {kind}: {before / MIB:.1f} ->"
        f" {after / MIB:.1f} MiB a layer, {after / before:.2f}x"
    )
    weights = sum(line.bytes for line in trial.least_lines if line.name in (host_lines.WEIGHTS, "vision"))
    if device.total_bytes:
        total = device.total_bytes
        words += f"; {weights / GIB:.1f} GiB against {total / GIB:.1f} GiB of memory = {weights / total:.2f}x"
    return words


def _aperture_refusal(ceilings: Ceilings, shape: ModelShape, wish: Wish) -> Refusal | None:
    """The peer aperture is a budget of its own: every group that maps peers' memory takes from it."""
    if not wish.peer_groups:
        return None
    for device in ceilings.devices:
        if device.bar1 is None:
            continue
        usable = device.bar1.free_bytes if device.bar1.free_bytes is not None else device.bar1.total_bytes
        if usable is None:
            continue
        refused = check_groups(wish.peer_groups, usable)
        if refused is not None:
            needed = sum(wish.peer_groups)
            return Refusal(shape, wish, ceilings, "peer aperture", refused, device.index, needed, usable, ())
    return None


def _doubts(trial: Trial) -> list[Doubt]:
    """What this plan takes for granted."""
    found = []
    host = trial.ceilings.devices[-1]
    held = max(held_bytes(trial.lines, host.index, moment) for moment in MOMENTS)
    if host.ceiling_bytes is None and held:
        what = "host memory is unknown"
        found.append(Doubt("host", what, f"{-(-held // MIB)} MiB of host lines are planned and not checked"))
    for index in dict.fromkeys(trial.option.ranks):
        device = trial.ceilings.devices[index]
        found_rates = rates(trial.job, device)
        if not found_rates.sure:
            taken = f"{found_rates.read_bytes_s / 1e9:.0f} GB/s"
            found.append(Doubt(f"speed of {device.name}", found_rates.source, taken))
    wish, ranks = trial.job.wish, len(trial.option.ranks)
    if trial.option.shares_device and 0 < wish.cores < ranks * wish.threads:
        what = f"{ranks} ranks of {_several(wish.threads, 'thread')} on {_several(wish.cores, 'core')}"
        found.append(Doubt("CPU ranks", what, "they share cores: right, and slower than ranks with cores of their own"))
    return found


def _check(shape: ModelShape, wish: Wish) -> None:
    if wish.context > shape.context:
        raise WishError(
            "context",
            f"--context {wish.context} is more than the {shape.context} tokens that {shape.name} was trained for",
            f"use --context {shape.context} or less",
        )
    if wish.kv_tokens and wish.context > wish.kv_tokens:
        raise WishError(
            "kv_tokens",
            f"--context {wish.context} does not fit the {wish.kv_tokens} tokens of --kv-tokens",
            "raise --kv-tokens or lower --context",
        )
    _check_rows(shape, wish.kv_type)
    total, layers = sum(wish.pipeline_ratio), len(shape.layers)
    if total > layers:
        blocks = f"; {layers + len(shape.nextn)} counts the drafting block, which is not cut" if shape.nextn else ""
        raise WishError(
            "pipeline_ratio",
            f"{'+'.join(map(str, wish.pipeline_ratio))} = {total}, and the backbone has {layers} layers{blocks}",
            f"give numbers that sum to {layers}, or smaller ones as shares",
        )


def _check_rows(shape: ModelShape, kv_type: str) -> None:
    """A type with blocks cannot hold heads that are no whole number of them: no backend has such rows."""
    ragged = shape.ragged(kv_type)
    if not ragged:
        return
    every = (*shape.layers, *shape.nextn)
    dims = sorted({kv.head_dim for kv in (every[index].kv for index in ragged) if kv is not None})
    attending = sum(layer.kv is not None for layer in every)
    named = ", ".join(map(str, ragged[:_NAMED_LAYERS]))
    more = f" and {len(ragged) - _NAMED_LAYERS} more" if len(ragged) > _NAMED_LAYERS else ""
    where = "every attention layer" if len(ragged) == attending else f"layer{'s' * (len(ragged) > 1)} {named}{more}"
    raise WishError(
        "kv_type",
        f"--kv-type {kv_type} keeps a head in blocks of {KV_BLOCKS[kv_type]} dims, and {shape.name} has heads of"
        f" {' and '.join(map(str, dims))} in {where}",
        "use --kv-type f8 or f16",
    )


def _nothing_usable(ceilings: Ceilings, shape: ModelShape, wish: Wish) -> Refusal | Unknown:
    """Devices whose memory is known and that cannot be used are a refusal; devices without a number are unknown."""
    known = [device for device in ceilings.devices if device.total_bytes is not None and not device.usable]
    if not known:
        names = ", ".join(device.name for device in ceilings.devices)
        return Unknown(ceilings, f"the memory of none of these devices is known: {names}", ceilings.doubts)
    why = "; ".join(f"{device.name}: {device.why_not}" for device in ceilings.devices)
    reason = f"{shape.name} ({shape.quant}) has no device to run on: {why}"
    device = max(known, key=lambda device: device.total_bytes or 0)
    return Refusal(shape, wish, ceilings, "no device", reason, device.index, shape.weights_bytes, 0, ())


def _several(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _mib(count: int) -> int:
    """Bytes as MiB, rounded up: what is needed never looks smaller than it is."""
    return -(-count // MIB)
