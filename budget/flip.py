"""What a flip of a plan's layout takes of memory, phase by phase, and whether CPU ranks get one.

    phase                the rank's own lines                     of all ranks, on the host
    at rest, LAYOUT      arena, pools of that layout              the copy (or images); transit memory, once it was used
    prepare, LAYOUT      the same: nothing has been touched       the copy, and transit memory: what is packed
    commit, LAYOUT       arena, pools of the layout flipped to    the copy, and transit memory: what is unpacked

LAYOUT is the one that is in force, in "commit" the one that will be. The pools of the old layout are given back before
those of the new one are made, so no phase has both.

**What a flip costs at rest.** Ranks of cards are filled from host memory, which has room for it or not (`options`). CPU
ranks take everything from the one memory that the KV pool is in: a second copy of the weights, buffers of a second
program, and transit memory. So they get a flip where that costs no tokens: the pool is what it would be without one, or
there is none. (Then more memory never means a smaller pool.) Whoever asks for a flip gets it with what is left.

**How much one flip may carry.** All residents at full length may fill the whole pool. Transit for all of it is taken
where there is room, else for a half or a quarter of it: what is live is seldom more, and where it is, the flip waits
and says so, which costs speed and nothing else. States of all running requests are always among it: they are small, and
one that cannot be carried would keep all others.

Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from budget import host_lines
from budget.facts import MIB
from budget.ledger import FLIP, MOMENTS, PIPELINE, TENSOR, Line, held_bytes, lines_at
from budget.options import CPU_FLIPPING, RESIDENT, against_layout, chosen, options
from budget.outcome import NO_FLIP, FlipTerms
from budget.placement import like_cpu
from budget.solve import TOKENS_MAX, room
from budget.terms import TRANSIT_ALIGN, transit_states
from budget.trial import JOB_ANSWER, JOB_PROMPT, Trial, best_trial, job_seconds, rounded, speeds_by_speed
from budget.wish import PAGE

REST, PREPARE, COMMIT = "at rest", "prepare", "commit"
PHASES = tuple(f"{step}, {layout}" for layout in (PIPELINE, TENSOR) for step in (REST, PREPARE, COMMIT))

TRANSIT_PARTS = (1.0, 0.5, 0.25)
"""Of the pool that one flip may carry: the largest that leaves the pool as it is."""


def is_asked(trial: Trial) -> bool:
    """Whether CPU ranks of this wish may have both layouts."""
    wish = trial.job.wish
    chosen = wish.layout != "auto" or wish.pipeline_ratio or wish.weight_vector or wish.token_vector
    return trial.option.shares_device and (wish.flip == "on" or (wish.flip == "auto" and not chosen))


def against(trial: Trial) -> str:
    """Why the model cannot have both layouts on so many CPU ranks, whatever memory there is; "" where it can."""
    ranks = len(trial.option.ranks)
    return next(filter(None, (against_layout(trial.job, layout, ranks) for layout in (PIPELINE, TENSOR))), "")


def with_flip(trial: Trial, tokens: int = 0) -> Trial:
    """The same ranks with both layouts, and rest in that of `trial`; with a pool of `tokens`, or the largest one (0).
    Its `tokens` are 0 where it does not fit."""
    own = trial.option.layouts[0]
    layouts = (own, PIPELINE if own == TENSOR else TENSOR)
    parts = (1.0,) if trial.job.wish.unified else TRANSIT_PARTS
    found = (
        best_trial(
            trial.job,
            replace(trial.option, name=CPU_FLIPPING, layouts=layouts, transit=part),
            trial.ceilings,
            capped=trial.capped,
            tokens=tokens,
        )
        for part in parts
    )
    return max(found, key=lambda each: each.key)


def not_fitting(trial: Trial, tokens: int) -> FlipTerms:
    """Why `trial`, which has both layouts, does not fit with a pool of `tokens`, with the sum."""
    device = trial.ceilings.devices[trial.option.ranks[0]]
    lines = lines_at(trial.terms, rounded(tokens, trial.granule))
    needed = max(held_bytes(lines, device.index, moment) for moment in MOMENTS)
    available = device.ceiling_bytes or 0
    words = {
        host_lines.WEIGHTS_COPY: "a second copy of the weights",
        host_lines.IMAGE: "an image of the other layout for each rank",
        host_lines.TRANSIT: "what moves",
    }
    parts = []
    for name, word in words.items():
        size = sum(line.bytes for line in lines if line.name == name or line.name.startswith(f"{name}, "))
        parts += [f"{_mib(size)} for {word}"] if size else []
    why = (
        f"a flip would take {' and '.join(parts) or 'buffers of a second program'} (MiB) beside a pool of {tokens}"
        f" tokens: {_mib(needed)} MiB on {device.name}, {available // MIB} MiB may be used,"
        f" {_mib(needed - available)} MiB are missing"
    )
    return replace(NO_FLIP, why_not=why, needed_bytes=needed, available_bytes=available, short_device=device.index)


def faster_alone(taken: Trial) -> str:
    """Why both layouts of cards were not even tried: the one of `taken` is faster alone, with the times of either. ""
    where there are no two."""
    job, ceilings = taken.job, taken.ceilings
    groups = options(job, ceilings, chosen(ceilings, job.wish))
    both = [speeds_by_speed(job, option, ceilings) for group in groups for option in group if option.flips]
    return _no_faster(taken, min(map(job_seconds, both))) if both else ""


def no_better(flips: Trial, taken: Trial) -> str:
    """Why `flips`, which has both layouts and fits, is not what cards have: the pool, or the time of a request."""
    own = taken.option.layouts[0]
    if flips.tokens < taken.tokens:
        return (
            f"both layouts would leave a pool of {flips.tokens} tokens, and the {own} layout alone has {taken.tokens}"
        )
    return _no_faster(taken, job_seconds(flips.speeds))


def _no_faster(taken: Trial, both_s: float) -> str:
    return (
        f"by estimate a request of {JOB_PROMPT} tokens that draws {JOB_ANSWER} takes {job_seconds(taken.speeds):.2g} s"
        f" in the {taken.option.layouts[0]} layout alone and {both_s:.2g} s with a flip in between; --flip manual has"
        " both layouts all the same"
    )


def terms_of(trial: Trial) -> FlipTerms:
    """Of a trial that fits."""
    option, job, wish = trial.option, trial.job, trial.job.wish
    if not option.flips:
        return NO_FLIP
    lines = trial.lines
    unified = option.shares_device and wish.unified
    pages = _page_bytes(trial)
    transit = 0 if unified else _transit(trial, pages)
    peaks = {phase: tuple(_own(trial, lines, rank, phase) for rank in range(len(option.ranks))) for phase in PHASES}
    return FlipTerms(
        fits=True,
        resting=option.layouts[0],
        home=_home(trial, unified),
        ranges=trial.cut.ranges if trial.cut is not None else (),
        weight_vector=trial.shard.weights if trial.shard is not None else (),
        token_vector=trial.shard.tokens if trial.shard is not None else (),
        transit_bytes=transit,
        cache_bytes=transit,
        page_bytes=pages,
        state_bytes=round(job.state_bytes),
        copy_bytes=sum(line.bytes for line in lines if line.name in (host_lines.WEIGHTS_COPY, "weight image")),
        image_bytes=_of_ranks(trial, lines, host_lines.IMAGE),
        peaks=peaks,
        shared_peaks=_shared(trial, lines, peaks),
        addressable=addressable(trial),
        transit_file_bytes=transit + TRANSIT_ALIGN * len(option.ranks) ** 2 if transit else 0,
    )


def addressable(trial: Trial) -> Mapping[str, int]:
    """The tokens for which each layout alone would have rows, in whole granules: the pool is no larger than the least,
    and what the other has beyond that is not made."""
    found = {}
    for layout in trial.option.layouts:
        alone = [replace(term, held=(layout,)) for term in trial.terms if layout in term.held]
        tokens = room(alone, trial.ceilings).tokens
        found[layout] = trial.tokens if tokens >= TOKENS_MAX else max(0, tokens // trial.granule * trial.granule)
    return found


def capped_words(terms: FlipTerms, most: int) -> str:
    """What is to be said where one layout could address more than both, and which setting raises the other; "" where
    they are alike. `most` is the largest pool that both can have."""
    if not terms.fits or len(set(terms.addressable.values())) < 2:
        return ""
    less, more = sorted(terms.addressable, key=lambda layout: terms.addressable[layout])
    knob = "--token-vector" if less == TENSOR else "--pipeline-ratio"
    return (
        f"the {more} layout could address {terms.addressable[more]} tokens and the {less} layout"
        f" {terms.addressable[less]}: both are held to {most}, and {knob} shifts what the {less} layout can have"
    )


# ------------------------------------------------------------------------------------------------------------- details


def _home(trial: Trial, unified: bool) -> str:
    if unified:
        return "unified"
    if trial.option.name == RESIDENT:
        return "resident"
    return "images" if trial.job.wish.image_spill and like_cpu(trial.job, trial.option) else "copy"


def _page_bytes(trial: Trial) -> tuple[int, ...]:
    job = trial.job
    row, windows = job.rows_of((*job.layers, *job.drafting), on_cpu=like_cpu(job, trial.option))
    by_window = {rows.window: rows.row for rows in windows}
    rows = (row, *(by_window.get(window, 0.0) for window in job.shape.windows))
    return tuple(round(PAGE * each) for each in rows)


def _transit(trial: Trial, pages: Sequence[int]) -> int:
    """What of the transit memory rows and states may fill; on the CPU a part of the pool."""
    line = sum(line.bytes for line in trial.lines if line.name == host_lines.TRANSIT)
    if not trial.option.shares_device:
        return line
    job, part = trial.job, trial.option.transit
    slots = [trial.tokens, *(min(trial.tokens, job.window_slots(window)) for window in job.shape.windows)]
    rows = sum(count // PAGE * size for count, size in zip(slots, pages, strict=True))
    return min(line, int(part * rows + transit_states(job, part)))


def _own(trial: Trial, lines: Sequence[Line], rank: int, phase: str) -> int:
    """What a rank itself holds in a phase: the lines that bear its number, or those of its device."""
    layout = phase.partition(", ")[2]
    index = trial.option.ranks[rank]
    if trial.option.shares_device:
        lines = [line for line in lines if line.name.endswith(host_lines.of_rank("", rank))]
    flipping = () if phase.startswith(REST) else _only_flip(lines)
    return sum(line.bytes for line in lines if line.device == index and (layout in line.held or line in flipping))


def _only_flip(lines: Sequence[Line]) -> list[Line]:
    """Lines that are there for a flip alone: buffers and transit, not pools."""
    return [line for line in lines if line.held == (FLIP,) and not line.name.startswith(host_lines.KV)]


def _shared(trial: Trial, lines: Sequence[Line], peaks: Mapping[str, Sequence[int]]) -> dict[str, int]:
    host = trial.ceilings.devices[-1].index
    own = host in trial.option.ranks
    found = {}
    for phase in PHASES:
        layout = phase.partition(", ")[2]
        flipping = () if phase.startswith(REST) else _only_flip(lines)
        held = sum(line.bytes for line in lines if line.device == host and (layout in line.held or line in flipping))
        found[phase] = held - (sum(peaks[phase]) if own else 0)
    return found


def _of_ranks(trial: Trial, lines: Sequence[Line], name: str) -> tuple[int, ...]:
    """The line of each rank; () where none has it."""
    sizes = {line.name: line.bytes for line in lines}
    found = tuple(sizes.get(host_lines.of_rank(name, rank), 0) for rank in range(len(trial.option.ranks)))
    return found if any(found) else ()


def _mib(count: int) -> int:
    return -(-count // MIB)
