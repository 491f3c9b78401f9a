"""Is the policy of flips worth having? A load through a box of known speeds, in either layout and with the policy.

The box is a clock and a queue. One layout is in force, in which a plan of p prompt rows and d decode rows takes

    p / prefill rate + d / decode rate      seconds

so prompts and answers share the time, and those that decode share the decode rate. Plans are put together as the
scheduler does it: a decode row of every answer, and beside them a chunk of prompts, at least half of it of the oldest
one; or one kind alone, where the policy has it go first. A flip takes half of the cost of a round trip, in which
nothing is computed. The policy is the one that ships (`homeserve.engine.policy`), asked as the engine asks it: after a
plan, when the last look is `LOOK_S` ago.

The figures are those measured on one 5090 and two 3080s with a 27B (three ranks): 7245.5 prompt tokens a second in the
pipeline layout and 1681 in the tensor layout, 16.8 and 78.3 tokens drawn, 3.2 s for two flips. The trace is the one on
which an earlier policy spent three minutes in the wrong layout: a prompt every 5 s, of 8k and 32k tokens in turn, 39 of
them, with answers of 512 tokens.

Deterministic; no real time passes.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from budget.speed import break_even
from homeserve.engine.policy import ANSWERS, PROMPTS, Decision, Demand, Done, LayoutSpeeds, Policy

PIPELINE, TENSOR = "pipeline", "tensor"
LOOK_S = 0.1
"""As `homeserve.engine.flip_driver` has it."""


@dataclass(frozen=True)
class Machine:
    """Speeds by layout, the cost of a round trip, and the settings of the server on it."""

    speeds: Mapping[str, LayoutSpeeds]
    cost_s: float
    chunk: int = 2048
    running: int = 16
    dwell_s: float = 15.0
    idle_s: float = 5.0
    resting: str = PIPELINE


CARDS = Machine({PIPELINE: LayoutSpeeds(7245.5, 16.8), TENSOR: LayoutSpeeds(1681.0, 78.3)}, 3.2)


@dataclass(frozen=True)
class Call:
    at_s: float
    prompt: int
    answer: int


REQUESTS = 39


def mixed_load(requests: int = REQUESTS) -> tuple[Call, ...]:
    return tuple(Call(5.0 * number, 8192 if number % 2 == 0 else 32768, 512) for number in range(requests))


def prompts_alone(requests: int = REQUESTS) -> tuple[Call, ...]:
    """Answers of one token: nothing decodes."""
    return tuple(replace(call, answer=1) for call in mixed_load(requests))


def answers_alone(requests: int = REQUESTS) -> tuple[Call, ...]:
    """Prompts of one page."""
    return tuple(replace(call, prompt=16) for call in mixed_load(requests))


@dataclass
class Job:
    """A call on its way."""

    call: Call
    computed: int = 0
    drawn: int = 0
    first_s: float = 0.0
    end_s: float = 0.0


@dataclass(frozen=True)
class Told:
    """Of one load in one mode. `per_token_s`: of each answer's tokens behind the first one, a mean over answers (0
    where there are none)."""

    mode: str
    makespan_s: float
    ttft_s: float
    per_token_s: float
    whole_s: float
    flips: int
    away_s: float
    """Seconds outside of the resting layout."""


Chooser = Callable[[Demand, str, float, float | None, Done], Decision]
"""(what there is to do, layout, now, end of the last flip, what was done) -> the layout to flip to, and what goes
first."""


def by_policy(machine: Machine) -> Chooser:
    policy = Policy(machine.resting, machine.dwell_s, machine.idle_s)

    def choose(demand: Demand, layout: str, now: float, changed: float | None, done: Done) -> Decision:
        return policy.look(demand, layout, machine.speeds, machine.cost_s, now, changed, done=done)

    return choose


def never(demand: Demand, layout: str, now: float, changed: float | None, done: Done) -> Decision:
    return Decision(None, "one layout")


def always(demand: Demand, layout: str, now: float, changed: float | None, done: Done) -> Decision:
    """To the faster layout for whatever the present one is slow at, however little of it there is, and at once."""
    if layout == TENSOR:
        return Decision(PIPELINE if demand.pending_tokens else None, "prompts", first=ANSWERS)
    return Decision(TENSOR if demand.decoding else None, "answers", first=PROMPTS)


class Simulation:
    """One run. `layout` is where it begins."""

    def __init__(self, machine: Machine, load: Sequence[Call], layout: str, choose: Chooser) -> None:
        self.machine, self.layout, self._choose = machine, layout, choose
        self.changed: float | None = None
        self.now, self.flips, self.away_s = 0.0, 0, 0.0
        self._coming = deque(load)
        self._waiting: deque[Job] = deque()
        self._running: list[Job] = []
        self._done: list[Job] = []
        self._look_at, self._first = 0.0, ""
        self._prompts, self._drawn = 0, 0

    def run(self, mode: str) -> Told:
        while self._coming or self._waiting or self._running:
            self._arrive()
            self._look()
            self._arrive()
            if not self._waiting and not self._running:
                self._pass(max(self._coming[0].at_s, self.now) - self.now)
                continue
            self._plan()
        done = self._done
        behind = [(job.end_s - job.first_s) / (job.call.answer - 1) for job in done if job.call.answer > 1]
        return Told(
            mode,
            self.now,
            mean(job.first_s - job.call.at_s for job in done),
            mean(behind),
            mean(job.end_s - job.call.at_s for job in done),
            self.flips,
            self.away_s,
        )

    def _pass(self, seconds: float) -> None:
        self.now += seconds
        self.away_s += seconds * (self.layout != self.machine.resting)

    def _arrive(self) -> None:
        while self._coming and self._coming[0].at_s <= self.now:
            self._waiting.append(Job(self._coming.popleft()))

    def _demand(self) -> Demand:
        pending, decoding, left = sum(job.call.prompt for job in self._waiting), 0, 0
        for job in self._running:
            if job.drawn:
                decoding += 1
                left += job.call.answer - job.drawn
            else:
                pending += job.call.prompt - job.computed
        return Demand(pending, decoding, left)

    def _look(self) -> None:
        """Ask whether to flip, and do it."""
        if self.now < self._look_at:
            return
        done = Done(self._prompts, self._drawn)
        decision = self._choose(self._demand(), self.layout, self.now, self.changed, done)
        self._prompts, self._drawn, self._first = 0, 0, decision.first
        if decision.to is not None:
            self._pass(self.machine.cost_s / 2)
            self.layout, self.changed, self.flips, self._first = decision.to, self.now, self.flips + 1, ""
        self._look_at = self.now + LOOK_S

    def _plan(self) -> None:
        speeds = self.machine.speeds[self.layout]
        decoding = [job for job in self._running if job.drawn]
        chunks = [] if self._first == ANSWERS and decoding else self._chunks()
        if self._first == PROMPTS and chunks:
            decoding = []
        rows = sum(size for _, size in chunks)
        assert speeds.prefill_tok_s and speeds.decode_tok_s
        self._pass(rows / speeds.prefill_tok_s + len(decoding) / speeds.decode_tok_s)
        self._prompts += rows
        self._drawn += len(decoding)
        for job, size in chunks:
            job.computed += size
            if job.computed == job.call.prompt:
                job.first_s = self.now
                self._draw(job)
        for job in decoding:
            self._draw(job)

    def _chunks(self) -> list[tuple[Job, int]]:
        """Prompt rows of the next plan."""
        while self._waiting and len(self._running) < self.machine.running:
            self._running.append(self._waiting.popleft())
        prompts = [job for job in self._running if not job.drawn]
        left = self.machine.chunk
        share = left - left // 2 if len(prompts) > 1 else left
        found = []
        for job in prompts:
            size = min(left, share, job.call.prompt - job.computed)
            if size > 0:
                found.append((job, size))
            left -= size
            share = left
        return found

    def _draw(self, job: Job) -> None:
        job.drawn += 1
        if job.drawn >= job.call.answer:
            job.end_s = self.now
            self._running.remove(job)
            self._done.append(job)


def mean(numbers: Iterable[float]) -> float:
    known = list(numbers)
    return sum(known) / len(known) if known else 0.0


def run(machine: Machine, load: Sequence[Call], mode: str) -> Told:
    """`mode`: pipeline or tensor (that layout alone), auto, or always (flips without a policy)."""
    if mode == "auto":
        return Simulation(machine, load, machine.resting, by_policy(machine)).run(mode)
    if mode == "always":
        return Simulation(machine, load, machine.resting, always).run(mode)
    return Simulation(machine, load, mode, never).run(mode)


# ------------------------------------------------------------------------------------------------------------ the table

LOADS: Mapping[str, Callable[..., tuple[Call, ...]]] = {
    "mixed": mixed_load,
    "prompts alone": prompts_alone,
    "answers alone": answers_alone,
}
MODES = (PIPELINE, TENSOR, "auto", "always")
_HEADS = ("load", "mode", "makespan_s", "mean_ttft_s", "mean_ms_per_token", "mean_whole_s", "flips")


def rows_of(machine: Machine, requests: int = REQUESTS) -> list[tuple[str, ...]]:
    """Every load in every mode."""
    found = []
    for name, load in LOADS.items():
        for mode in MODES:
            told = run(machine, load(requests), mode)
            numbers = (told.makespan_s, told.ttft_s, 1e3 * told.per_token_s, told.whole_s)
            found.append((name, mode, *(f"{number:.1f}" if number else "-" for number in numbers), str(told.flips)))
    return found


def threshold(machine: Machine) -> int:
    """Prompt tokens from which the round trip pays."""
    tensor, pipeline = machine.speeds[TENSOR].prefill_tok_s, machine.speeds[PIPELINE].prefill_tok_s
    assert tensor and pipeline
    return break_even(machine.cost_s, tensor, pipeline)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="scripts/flip_simulation", description="the policy of flips, on paper")
    parser.add_argument("--csv", metavar="FILE", help="write the table here too")
    for name, value in (("chunk", CARDS.chunk), ("running", CARDS.running), ("requests", REQUESTS)):
        parser.add_argument(f"--{name}", type=int, default=value, metavar="N", help=f"(default: {value})")
    for name, seconds in (("cost", CARDS.cost_s), ("dwell", CARDS.dwell_s)):
        parser.add_argument(f"--{name}-s", type=float, default=seconds, metavar="S", help=f"(default: {seconds:g})")
    parser.add_argument("--resting", choices=(PIPELINE, TENSOR), default=CARDS.resting)
    for layout in (PIPELINE, TENSOR):
        own = CARDS.speeds[layout]
        parser.add_argument(
            f"--{layout}",
            metavar="PREFILL,DECODE",
            default=f"{own.prefill_tok_s},{own.decode_tok_s}",
            help=f"tokens a second in the {layout} layout (default: %(default)s)",
        )
    told = parser.parse_args(arguments)
    speeds = {layout: _speeds(parser, layout, getattr(told, layout)) for layout in (PIPELINE, TENSOR)}
    machine = Machine(speeds, told.cost_s, told.chunk, told.running, told.dwell_s, resting=told.resting)
    rows = [_HEADS, *rows_of(machine, told.requests)]
    widths = [max(len(row[at]) for row in rows) for at in range(len(_HEADS))]
    for row in rows:
        cells = enumerate(zip(row, widths, strict=True))
        print("  ".join(cell.ljust(width) if at < 2 else cell.rjust(width) for at, (cell, width) in cells))
    if told.csv:
        with open(told.csv, "w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows(rows)
    return 0


def _speeds(parser: argparse.ArgumentParser, layout: str, text: str) -> LayoutSpeeds:
    try:
        prefill, decode = (float(word) for word in text.split(","))
        if prefill <= 0 or decode <= 0:
            raise ValueError
    except ValueError:
        parser.error(f"--{layout}: {text!r} is not two positive numbers with a comma between")
    return LayoutSpeeds(prefill, decode)


if __name__ == "__main__":
    sys.exit(main())
