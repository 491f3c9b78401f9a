"""From the logits of a lane's rows to what is answered of them: a token, or those behind the drafts that came true.

A lane whose guide fails has no token: `Sample.failed` says why, and the engine ends that request alone. Rows of it may
be on their way already and need an input; what they draw is nobody's. STAND_IN is that input, on every rank.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from homeserve.wire.faults import ForcedDrafts
from homeserve.wire.records import Logprobs, Sample, Sampling
from homeserve.worker.course import GuideFailed
from homeserve.worker.drawn import NO_TOKEN
from homeserve.worker.lanes import Group, Lane, Lanes
from homeserve.worker.sampling import draw, logprobs

Logits = npt.NDArray[np.float32]
STAND_IN = 0


def answer_of(lanes: Lanes, group: Group, logits: Logits) -> Sample:
    """The answer of a group without drafts from its own logits `[logit_count, vocab]`; the lane has its rows already.
    Raises NotANumber."""
    rows, lane = group.rows, lanes[group.lane]
    position = rows.start + len(group.inputs)
    prompt: tuple[Logprobs, ...] = ()
    if rows.prompt_logprobs >= 0:
        before = [] if lane.last_logits is None else [lane.last_logits]
        inputs = group.inputs[1 - len(before) :]
        prompt = tuple(
            logprobs(row, int(token), rows.prompt_logprobs)
            for row, token in zip([*before, *logits[:-1]], inputs, strict=True)
        )
        lane.last_logits = None if rows.sample else logits[-1].copy()
    if not rows.sample:
        return Sample(group.lane, rows.request, position, NO_TOKEN, prompt_logprobs=prompt)
    sample = _drawn(lane, group, position, logits[-1], prompt=prompt)
    lane.last_token = next_input(sample)
    return sample


def next_input(sample: Sample) -> int:
    """The input of the row behind a sample; NO_TOKEN where none was to be drawn."""
    return STAND_IN if sample.failed else sample.token


def answers_of_drafts(lane: Lane, group: Group, logits: Logits, forced: ForcedDrafts) -> list[Sample]:
    """The answers of a group with drafts from its logits `[1 + drafts, vocab]`, one for each row that counts.

    Row j draws as if its input were the last one: with the past behind it, and the random number of its own position.
    The next row counts if its input is what was drawn. The lane stays as it was, but for its guide: that is told what
    was drawn, which is what comes again. Raises NotANumber for a row that
    counts; what is behind the last one is not looked at.
    """
    found: list[Sample] = []
    counted = 0
    try:
        for row, token in enumerate(group.inputs):
            if lane.past is not None:
                lane.past.add(np.array([token]), group.rows.start + row >= lane.prompt_len)
            counted += 1
            found.append(_drawn_behind(lane, group, row, logits[row], forced))
            if found[-1].failed or not _goes_on(group, row, found[-1].token, forced):
                break
    finally:
        if lane.past is not None:
            generated = np.arange(group.rows.start, group.rows.start + counted) >= lane.prompt_len
            lane.past.take_back(group.inputs[:counted], generated)
    return found


def _drawn_behind(lane: Lane, group: Group, row: int, logits: Logits, forced: ForcedDrafts) -> Sample:
    counts_as_drawn = forced.accept is not None and row < min(forced.accept, group.rows.drafts)
    instead = int(group.inputs[row + 1]) if counts_as_drawn else None
    return _drawn(lane, group, group.rows.start + row + 1, logits, instead=instead)


def _drawn(
    lane: Lane,
    group: Group,
    position: int,
    logits: Logits,
    *,
    prompt: tuple[Logprobs, ...] = (),
    instead: int | None = None,
) -> Sample:
    """What takes `position`: the token that is drawn, or `instead` of it. Raises NotANumber."""
    index, request = position - lane.prompt_len, group.rows.request
    try:
        allowed = logits if lane.guide is None else lane.guide.apply(index, logits)
    except GuideFailed as error:
        return Sample(group.lane, request, position, NO_TOKEN, prompt_logprobs=prompt, failed=str(error))
    token = draw(allowed, lane.sampling, lane.past, position, index)
    if instead is not None:
        token = instead
    if lane.guide is not None:
        lane.guide.told(index, [token])
        lane.guide.prepare()
    return Sample(group.lane, request, position, token, _told(logits, token, lane.sampling), prompt)


def _goes_on(group: Group, row: int, token: int, forced: ForcedDrafts) -> bool:
    """Whether the row behind `row` counts, too."""
    if row == group.rows.drafts or row == forced.accept:
        return False
    return token == int(group.inputs[row + 1])


def _told(logits: Logits, token: int, sampling: Sampling) -> Logprobs | None:
    return logprobs(logits, token, sampling.top_logprobs) if sampling.top_logprobs >= 0 else None
