"""When to flip: a pure function of what there is to do and how fast either layout does it.

Of the two layouts one computes prompts faster and one draws tokens faster; which is which is measured, not assumed.
Where they are two different ones:

    in the layout that draws faster      to the other when   pending > N = C / (1/X - 1/P)
    in the layout that prefills faster   back when           pending = 0, or somebody waited a window for it,
                                         and                 left > M = C/2 / (1/d - 1/D)

    pending   prompt tokens admitted and not computed: those of calls that wait, and the rest of prompts half done
    left      tokens that open answers may still be long, at most
    X, P      prompt tokens/s here and there        d, D   drawn tokens/s here and there
    C         seconds of a flip there and back, in which nothing is computed: decoding stalls for just as long

A prompt pays for the way there and back; who only goes on decoding, for one way. Where one layout is faster at both,
there is no phase to follow: it is gone to once, as soon as what is open pays for it, and it is the home then. Where the
gain is none, N and M are infinite: nothing flips for it.

What is open may never be enough, request after request: short answers in the slower layout for ever. So what has been
*lost* by staying is added up: for each token done, how much less the other layout would have taken, less what it would
have taken more. Once that is over C, the other layout is gone to as if one large request had asked for it. Whoever pays
a rent until it comes to the price never pays more than twice of what knowing all that comes would have cost.

Against flapping: no two flips within `dwell_s`, however the last one ended; the layout that a prompt pulled is kept
until no prompt is left (demand holds). Against starving: that hold ends when prompts and decoding sequences have stood
against each other for `window_s`, and the decoding layout is then kept for `dwell_s` at least. Neither layout refuses
the other kind of work: a prompt below N is computed where it arrives.

*What goes first* (`Decision.first`). A row of the kind that a layout is slow at takes the time of several of the other
kind: a token drawn at 16.8 a second, that of 400 rows of a prompt. So what a flip would pay for waits for it, where it
is near: decoding for the end of prompts or of their window, prompts beyond N for the end of the dwell. Without that
both speeds mix in every plan, and following the phases is slower than the tensor layout alone (docs/flip_policy.md).

*Whether work is owed* and *whether a flip is worth it* are two questions: `Decision.owed` and `Decision.to`.

Pure.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

PROMPTS, ANSWERS = "prompts", "answers"

HOME_MARGIN = 1.1
"""By how much a layout must be faster at both to be the home in place of the resting one: less is noise."""


@dataclass(frozen=True)
class LayoutSpeeds:
    """Tokens per second in one layout; None where unknown."""

    prefill_tok_s: float | None
    decode_tok_s: float | None


UNKNOWN = LayoutSpeeds(None, None)


@dataclass(frozen=True)
class PolicyInputs:
    """Everything that a decision depends on. Times in seconds of one clock."""

    now: float
    layout: str
    resting: str
    pending_tokens: int
    decoding: int
    decode_left_tokens: int
    speeds: Mapping[str, LayoutSpeeds]
    """Of both layouts."""
    cost_s: float
    changed: float | None = None
    """When the last flip ended, committed or not."""
    contended: float | None = None
    """Since when prompts and decoding sequences have stood against each other in this layout,"""
    idle: float | None = None
    """and since when there is nothing to do."""
    dwell_s: float = 15.0
    idle_s: float = 5.0
    window_s: float = 15.0
    hold: str = ""
    """Why no flip can begin, whatever would be gained: what is live does not fit, another flip is on."""
    lost_s: float = 0.0
    """Seconds that the other layout would have saved since the last flip."""


@dataclass(frozen=True)
class Decision:
    """`to`: the layout to flip to, None to stay. `reason` says why, with its numbers. `again_s`: when to ask again
    though nothing happens; None: not before something does."""

    to: str | None
    reason: str
    owed: bool = False
    again_s: float | None = None
    first: str = ""
    """`PROMPTS` or `ANSWERS`: the other kind waits until this one is done or the next decision says so; empty: both go
    on together."""

    @property
    def kind(self) -> str:
        """The reason without its numbers."""
        return re.sub(r"\d[\d.,]*|\binf\b", "#", self.reason)


def decide(inputs: PolicyInputs) -> Decision:
    """The layout for what there is to do."""
    owed = inputs.pending_tokens > 0 or inputs.decoding > 0
    decision = _idle(inputs) if not owed else _busy(inputs)
    if decision.to is not None and inputs.hold:
        decision = Decision(None, inputs.hold)
    elif decision.to is not None and (left := _dwell_left(inputs)) > 0:
        decision = Decision(None, f"the last flip is less than {inputs.dwell_s:g} s ago", again_s=left)
    return replace(decision, owed=owed, first=first(inputs))


def first(inputs: PolicyInputs) -> str:
    """What goes first where both kinds of work stand against each other and the one that waits has a flip before it."""
    here, (_, there) = inputs.speeds.get(inputs.layout, UNKNOWN), _other(inputs, inputs.layout)
    speeds = (here.prefill_tok_s, here.decode_tok_s, there.prefill_tok_s, there.decode_tok_s)
    if inputs.hold or not inputs.pending_tokens or not inputs.decoding or not all(speeds):
        return ""
    prompt_bound = break_even(inputs.cost_s, here.prefill_tok_s, there.prefill_tok_s)
    drawn_bound = break_even(inputs.cost_s / 2, here.decode_tok_s, there.decode_tok_s)
    if math.isinf(prompt_bound) and inputs.decode_left_tokens > drawn_bound and _window_left(inputs) > 0:
        return PROMPTS
    if math.isinf(drawn_bound) and inputs.pending_tokens > prompt_bound and _dwell_left(inputs) > 0:
        return ANSWERS
    return ""


def break_even(cost_s: float, here: float | None, there: float | None) -> float:
    """Tokens from which a flip of `cost_s` pays, at these speeds; infinite where it never does."""
    if not here or not there or here <= 0 or there <= here:
        return math.inf
    saved = 1 / here - 1 / there
    return cost_s / saved if saved > 0 else math.inf  # speeds that differ in their last digit have the same inverse


def home(inputs: PolicyInputs) -> str:
    """Where to be with nothing to do: the resting layout, unless the other is clearly faster at both."""
    here, (there, speeds) = inputs.speeds.get(inputs.resting, UNKNOWN), _other(inputs, inputs.resting)
    pairs = ((here.prefill_tok_s, speeds.prefill_tok_s), (here.decode_tok_s, speeds.decode_tok_s))
    better = all(mine and theirs and theirs > HOME_MARGIN * mine for mine, theirs in pairs)
    return there if better else inputs.resting


def _idle(inputs: PolicyInputs) -> Decision:
    to = home(inputs)
    if to == inputs.layout:
        return Decision(None, "nothing to do")
    left = inputs.idle_s - (inputs.now - inputs.idle) if inputs.idle is not None else inputs.idle_s
    if left > 0:
        return Decision(None, f"nothing to do for less than {inputs.idle_s:g} s", again_s=left)
    return Decision(to, f"nothing to do for {inputs.idle_s:g} s")


def _busy(inputs: PolicyInputs) -> Decision:
    here, (there, speeds) = inputs.speeds.get(inputs.layout, UNKNOWN), _other(inputs, inputs.layout)
    known = (here.prefill_tok_s, here.decode_tok_s, speeds.prefill_tok_s, speeds.decode_tok_s)
    if not all(known):
        return Decision(None, "the speeds of both layouts are not known yet")
    if inputs.lost_s > inputs.cost_s:
        return Decision(there, f"{there} would have saved {inputs.lost_s:.1f} s since the last flip")
    prompt_bound = break_even(inputs.cost_s, here.prefill_tok_s, speeds.prefill_tok_s)
    drawn_bound = break_even(inputs.cost_s / 2, here.decode_tok_s, speeds.decode_tok_s)
    if math.isinf(prompt_bound) and math.isinf(drawn_bound):
        return Decision(None, f"{inputs.layout} is the faster layout for prompts and for answers")
    if math.isinf(drawn_bound):
        return _for_prompts(inputs, there, prompt_bound)
    if math.isinf(prompt_bound):
        return _for_answers(inputs, there, drawn_bound)
    return _for_both(inputs, there, here, speeds)


def _for_prompts(inputs: PolicyInputs, there: str, bound: float) -> Decision:
    """Answers are drawn faster here: only prompts can pull to the other layout."""
    if inputs.pending_tokens > bound:
        return Decision(there, f"{inputs.pending_tokens} prompt tokens are more than {bound:.0f}")
    return Decision(None, f"{inputs.pending_tokens} prompt tokens are not more than {bound:.0f}")


def _for_answers(inputs: PolicyInputs, there: str, bound: float) -> Decision:
    """Prompts are computed faster here: they keep the layout while there are any, but no longer than a window."""
    if not inputs.decoding:
        return Decision(None, f"{inputs.pending_tokens} prompt tokens keep the {inputs.layout} layout")
    if inputs.pending_tokens:
        if (left := _window_left(inputs)) > 0:
            text = (
                f"{inputs.pending_tokens} prompt tokens keep the {inputs.layout} layout, {inputs.window_s:g} s at most"
            )
            return Decision(None, text, again_s=left)
    if inputs.decode_left_tokens > bound:
        return Decision(there, f"{inputs.decode_left_tokens} tokens to draw are more than {bound:.0f}")
    return Decision(None, f"{inputs.decode_left_tokens} tokens to draw are not more than {bound:.0f}")


def _for_both(inputs: PolicyInputs, there: str, here: LayoutSpeeds, speeds: LayoutSpeeds) -> Decision:
    """The other layout is faster at both: it pays as soon as the seconds saved are more than those of the flip."""
    saved = _saved_s(inputs.pending_tokens, here.prefill_tok_s, speeds.prefill_tok_s)
    saved += _saved_s(inputs.decode_left_tokens, here.decode_tok_s, speeds.decode_tok_s)
    if saved > inputs.cost_s:
        return Decision(there, f"{there} is faster at both and saves {saved:.1f} s")
    return Decision(None, f"{there} is faster at both, but saves {saved:.1f} s of {inputs.cost_s:.1f} s")


def _saved_s(tokens: int, here: float | None, there: float | None) -> float:
    return tokens * (1 / here - 1 / there) if here and there else 0.0


def _window_left(inputs: PolicyInputs) -> float:
    return inputs.window_s - (inputs.now - inputs.contended) if inputs.contended is not None else inputs.window_s


def _dwell_left(inputs: PolicyInputs) -> float:
    return inputs.dwell_s - (inputs.now - inputs.changed) if inputs.changed is not None else 0.0


def _other(inputs: PolicyInputs, layout: str) -> tuple[str, LayoutSpeeds]:
    """The layout that is not `layout`, and its speeds."""
    name = next((name for name in inputs.speeds if name != layout), layout)
    return name, inputs.speeds.get(name, UNKNOWN)


@dataclass(frozen=True)
class Demand:
    """What there is to do, as the scheduler counts it."""

    pending_tokens: int = 0
    decoding: int = 0
    decode_left_tokens: int = 0


@dataclass(frozen=True)
class Done:
    """Tokens computed and drawn since the last look."""

    prompt_tokens: int = 0
    drawn_tokens: int = 0


NOTHING_DONE = Done()


class Policy:
    """`decide` with a memory: since when there is nothing to do, since when two kinds of work stand against each other,
    what was lost by staying, and which kinds of reasons were told."""

    def __init__(self, resting: str, dwell_s: float, idle_s: float, window_s: float = 0.0) -> None:
        self.hold_reason = ""
        """Why the last look changed nothing."""
        self._resting, self._dwell_s, self._idle_s = resting, dwell_s, idle_s
        self._window_s = window_s or dwell_s
        self._idle: float | None = None
        self._contended: float | None = None
        self._lost_s, self._lost_in = 0.0, ""
        self._told: set[str] = set()

    def look(
        self,
        demand: Demand,
        layout: str,
        speeds: Mapping[str, LayoutSpeeds],
        cost_s: float,
        now: float,
        changed: float | None = None,
        hold: str = "",
        done: Done = NOTHING_DONE,
    ) -> Decision:
        """What to do now. `changed` and `hold` as in `PolicyInputs`; `done` in this layout."""
        self._lose(done, layout, speeds)
        self._idle = _since(self._idle, not demand.pending_tokens and not demand.decoding, now)
        self._contended = _since(self._contended, demand.pending_tokens > 0 and demand.decoding > 0, now)
        if self._contended is not None and changed is not None:  # a layout's window begins with the layout
            self._contended = max(self._contended, changed)
        decision = decide(
            PolicyInputs(
                now,
                layout,
                self._resting,
                demand.pending_tokens,
                demand.decoding,
                demand.decode_left_tokens,
                speeds,
                cost_s,
                changed,
                self._contended,
                self._idle,
                self._dwell_s,
                self._idle_s,
                self._window_s,
                hold,
                self._lost_s,
            )
        )
        self.hold_reason = "" if decision.to else decision.reason
        return decision

    def _lose(self, done: Done, layout: str, speeds: Mapping[str, LayoutSpeeds]) -> None:
        """Add up what the other layout would have saved: from nothing in each layout, and a gain is no credit."""
        if layout != self._lost_in:
            self._lost_s, self._lost_in = 0.0, layout
        here = speeds.get(layout, UNKNOWN)
        there = next((each for name, each in speeds.items() if name != layout), UNKNOWN)
        self._lost_s += _saved_s(done.prompt_tokens, here.prefill_tok_s, there.prefill_tok_s)
        self._lost_s += _saved_s(done.drawn_tokens, here.decode_tok_s, there.decode_tok_s)
        self._lost_s = max(0.0, self._lost_s)

    def idle_for(self, now: float) -> float:
        """Seconds for which the looks have found nothing to do."""
        return now - self._idle if self._idle is not None else 0.0

    def news(self, decision: Decision) -> bool:
        """Whether a reason of this kind was not told before; from now on it was."""
        known = decision.kind in self._told
        self._told.add(decision.kind)
        return not known


def _since(before: float | None, holds: bool, now: float) -> float | None:
    return (now if before is None else before) if holds else None
