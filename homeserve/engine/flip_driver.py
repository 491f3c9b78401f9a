"""Flips as the engine runs them: `Flipper` says what comes next, here it is done.

    a request, or the policy ──▶ ask ─▶ the engine's pump stops issuing and calls `advance` instead
    every answer, loss, deadline ──▶ Flipper ─▶ a Step ─▶ a plan, or the end of the flip

The prefix cache beyond what a flip carries is dropped from the ask on, a part in each turn of the loop: while plans in
flight are still computed, and without holding up whoever else the loop serves.

When the policy looks. Never inside a step (a result that comes, a plan that is issued): a timer of the loop looks
soon after a request has come, every `LOOK_S` while any is open, and once more when there has been nothing to do for
the idle time. With nothing to do and the layout at rest no timer runs. What a step pays for flips is one comparison:
whether one is on. `unarmed_work_count` counts every piece of flip work that was done inside a step which began without
one: looks, questions about what is live, plans and records of flips. It has to stay 0.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from homeserve.engine.calibration import Calibration
from homeserve.engine.census import lanes_problem
from homeserve.engine.flip import FlipAction as Do
from homeserve.engine.flip import Flipper, FlipState, Step
from homeserve.engine.flip_record import FlipRecord
from homeserve.engine.policy import Decision, Done, Policy
from homeserve.engine.rates import Rates
from homeserve.engine.request import EngineLimits, FlipLimits
from homeserve.engine.scheduler import Scheduler
from homeserve.engine.timeline import Timeline
from homeserve.wire.records import FlipOrder, PlanKind, Result

log = logging.getLogger(__name__)

LOOK_S = 0.1
SOON_S = 0.005
"""Behind the arrival of a request: a burst of them is looked at once."""

DEADLY = 3
"""Flips in a row that cost the fleet its life, after which the policy begins no more."""

AUTO, POLICY = "auto", "policy"
PLANS = {
    Do.PACK: PlanKind.FLIP_PREPARE,
    Do.VERIFY: PlanKind.FLIP_PREPARE,
    Do.COMMIT: PlanKind.FLIP_COMMIT,
    Do.UNDO: PlanKind.FLIP_ABANDON,
}


class Handle(Protocol):
    def cancel(self) -> object: ...


class FlipHost(Protocol):
    """What a flip needs of the engine."""

    @property
    def unarmed_step(self) -> bool:
        """A step is under way that began without a flip."""
        ...

    @property
    def serving(self) -> bool:
        """Ranks are up, and requests are computed."""
        ...

    @property
    def quiet(self) -> bool:
        """Every plan is answered."""
        ...

    @property
    def busy(self) -> bool:
        """Somebody's request is open."""
        ...

    def now(self) -> float: ...

    def later(self, seconds: float, what: Callable[[], None]) -> Handle: ...

    def issue_flip(self, kind: PlanKind, epoch: int, order: FlipOrder | None) -> int:
        """A plan of a flip, or without an order the census behind it; returns its number."""
        ...

    def flip_crossed(self) -> None:
        """What is open has come over a flip that is committed."""
        ...

    def flip_over(self) -> None:
        """Serving goes on."""
        ...

    def lose(self, why: str) -> None:
        """The ranks cannot be trusted any more."""
        ...

    def note(self, kind: str, *, text: str) -> None: ...

    def pump(self) -> None: ...


class FlipDriver:
    """The flips of one engine. `flips`: those of its limits."""

    def __init__(
        self, limits: EngineLimits, flips: FlipLimits, scheduler: Scheduler, timeline: Timeline, host: FlipHost
    ) -> None:
        self.limits = flips
        self.flipper = Flipper(flips)
        self.rates = Rates(
            {name: layout.decode_groups for name, layout in flips.layouts.items()},
            limits.chunk,
            flips.estimates,
            flips.cost_s,
        )
        self.awaited: int | None = None
        """Number of the plan whose answers the flip waits for."""
        self.unarmed_work_count = 0
        self._policy = Policy(flips.resting, flips.dwell_s, flips.idle_s, flips.window_s)
        self._calibration = Calibration(limits)
        self._scheduler, self._timeline, self._host = scheduler, timeline, host
        self._lanes: dict[int, tuple[int, int]] = {}
        self._collected = 0
        self._done = Done()
        self._deadly = 0
        self._park: Handle | None = None
        self._look: Handle | None = None
        self._shedding: Handle | None = None
        self._look_at = 0.0
        self._stopped = False

    # ------------------------------------------------------------------------------------------------- questions

    @property
    def on(self) -> bool:
        return self.flipper.state is not FlipState.IDLE

    @property
    def auto(self) -> bool:
        return self.limits.policy == AUTO

    @property
    def hold_reason(self) -> str | None:
        if not self.auto:
            return "the policy is manual"
        return self._policy.hold_reason or None

    def status(self) -> dict[str, Any]:
        return {
            "policy": self.limits.policy,
            "committed": self.flipper.committed,
            "abandoned": dict(self.flipper.abandoned),
            "hold_reason": self.hold_reason,
            "unarmed_work_count": self.unarmed_work_count,
        }

    def measured(self) -> dict[str, dict[str, float | int | None]]:
        self._collect()
        return self.rates.as_json()

    # ----------------------------------------------------------------------------------------------------- flips

    def ask(self, to: str, cause: str) -> FlipRecord:
        """Begin a flip. Raises FlipRefused."""
        self._count_work()
        host = self._host
        record = self.flipper.ask(to, cause, host.now(), self._scheduler.resident_bytes(), serving=host.serving)
        log.info("flip %d to %s begins", record.id, to, extra={"cause": cause, "epoch": record.epoch})
        if self.limits.park_deadline_s > 0:
            self._park = host.later(self.limits.park_deadline_s, self._expire)
        self._shed()
        host.pump()
        return record

    def advance(self) -> None:
        """A flip is on and something has changed: once all plans are answered, it goes on."""
        if self.flipper.state is not FlipState.DRAINING or not self._host.quiet or self._shed():
            return
        self._count_work()
        self._collect()  # of the layout that is left
        self._done = Done()
        self._do(self.flipper.on_drained(self._scheduler.live(), self._host.now()))

    def on_results(self, results: Sequence[Result]) -> None:
        """Answers to the plan that is awaited."""
        self._count_work()
        self.awaited = None
        now = self._host.now()
        if self.flipper.state is FlipState.CHECKING:
            self._do(self.flipper.on_census(lanes_problem(self._lanes, results), now))
        else:
            self._do(self.flipper.on_results(results, now))

    def on_lost(self, rank: int, why: str) -> None:
        """The life of the fleet is over; the next one begins in the resting layout."""
        self._collect()
        self.awaited = None
        self._cancel_park()
        record, changing = self.flipper.record, self.flipper.state in (FlipState.COMMITTING, FlipState.CHECKING)
        step = self.flipper.on_lost(rank, why, self._host.now())
        if record is not None:
            self._deadly += changing and step.action is not Do.FINISH
            self._close(record)

    def _do(self, step: Step) -> None:
        record = self.flipper.record or self.flipper.records()[-1]
        if step.action in PLANS:
            assert step.order is not None
            epoch = step.order.epoch if step.action is Do.COMMIT else self.flipper.epoch
            self._cancel_park()
            self.awaited = self._host.issue_flip(PLANS[step.action], epoch, step.order)
        elif step.action is Do.CHECK:
            self._scheduler.turn(record.to)
            self._lanes = self._scheduler.lanes()
            self.awaited = self._host.issue_flip(PlanKind.CENSUS, self.flipper.epoch, None)
        elif step.action in (Do.FINISH, Do.GIVE_UP):
            self._close(record)
            self._host.flip_over()
            self._arm(SOON_S)
        elif step.action is Do.LOSE:
            self._deadly += 1
            self._close(record)
            self._host.lose(f"flip {record.id}: {step.why}")

    def _close(self, record: FlipRecord) -> None:
        """A flip has ended."""
        self._cancel_park()
        took = (record.ms["total"] or 0.0) / 1e3
        extra = {"cause": record.cause, "took_s": round(took, 3)}
        if record.state == "committed":
            self._deadly = 0
            self._host.flip_crossed()
            self.rates.add_flip(record.to, took - (record.ms["drain"] or 0.0) / 1e3)  # draining, ranks compute
            log.info("flip %d to %s is committed", record.id, record.to, extra=extra)
        else:
            log.warning("flip %d to %s is abandoned: %s", record.id, record.to, record.reason, extra=extra)
            self._host.note("flip_abandoned", text=f"flip {record.id} to {record.to}: {record.reason}")

    def _shed(self) -> bool:
        """Drop a part of the cache that cannot be carried; True where more has to go, in a later turn."""
        if self._shedding is None and self._scheduler.shed():
            self._shedding = self._host.later(0.0, self._shed_on)
        return self._shedding is not None

    def _shed_on(self) -> None:
        self._shedding = None
        if self.flipper.state is FlipState.DRAINING and not self._shed():
            self._host.pump()

    def _expire(self) -> None:
        """The park deadline's timer. A clock that is behind the loop's asks again."""
        self._park = None
        step = self.flipper.tick(self._host.now())
        if step.action is Do.GIVE_UP:
            self._do(step)
        elif self.flipper.state is FlipState.DRAINING:
            self._park = self._host.later(LOOK_S, self._expire)

    def _cancel_park(self) -> None:
        if self._park is not None:
            self._park.cancel()
            self._park = None

    # ---------------------------------------------------------------------------------------------------- policy

    def begin(self) -> None:
        """Requests can come."""
        self._arm(self.limits.idle_s)

    def arrived(self) -> None:
        """A request has come. What only measures gives way to it."""
        self._calibration.cancel(self._scheduler)
        self._arm(SOON_S)

    def recovered(self) -> None:
        """The ranks are up again."""
        self._arm(SOON_S)

    def stop(self) -> None:
        """Nothing is begun any more; what is on goes on."""
        self._stopped = True
        self._scheduler.first = ""  # nobody would say any more that it is over
        if self._calibration.cancel(self._scheduler):
            self._host.pump()
        self._cancel_park()
        if self._look is not None:
            self._look.cancel()
            self._look = None

    def _arm(self, seconds: float) -> None:
        """Look in so many seconds, or earlier if that was to be."""
        if not self.auto or self._stopped:
            return
        seconds = max(SOON_S, seconds)  # what is left of a wait may be less than the clock can tell
        at = self._host.now() + seconds
        if self._look is not None:
            if self._look_at <= at:
                return
            self._look.cancel()
        self._look_at = at
        self._look = self._host.later(seconds, self._look_now)

    def _look_now(self) -> None:
        """The policy's turn."""
        self._look = None
        self._count_work()
        if self.on or not self._host.serving:
            return  # whoever ends that state arms the timer
        self._collect()
        if self._calibration.running:
            self._arm(LOOK_S)
            return
        now, demand = self._host.now(), self._scheduler.demand()
        speeds = self.rates.speeds(demand.decoding, now)
        done, self._done = self._done, Done()
        decision = self._policy.look(
            demand, self.flipper.layout, speeds, self.rates.cost_s, now, self.flipper.changed, self._hold(), done
        )
        self._scheduler.first = decision.first
        wait = self._calibrate(now) if not decision.owed else None
        if wait is not None:
            self._arm(wait)
            return
        self._follow(decision)

    def _follow(self, decision: Decision) -> None:
        if decision.to is not None:
            self.ask(decision.to, POLICY)
            return
        if self._policy.news(decision):
            log.info("the layout stays %s: %s", self.flipper.layout, decision.reason)
        waits = [seconds for seconds in (decision.again_s, LOOK_S if decision.owed else None) if seconds is not None]
        if waits:
            self._arm(min(waits))

    def _hold(self) -> str:
        """Why no flip can be begun, if so."""
        if self._deadly >= DEADLY:
            return f"the last {DEADLY} flips cost the ranks their lives"
        refusal = self.flipper.refuse(self._other, self._scheduler.resident_bytes())
        return refusal.message if refusal is not None else ""

    @property
    def _other(self) -> str:
        return next(name for name in self.limits.layouts if name != self.flipper.layout)

    def _calibrate(self, now: float) -> float | None:
        """Go on measuring, there being nothing else to do: when to look again. None where nothing is left to
        measure."""
        here, there = self.flipper.layout, self._other
        wanted = [
            layout
            for layout in (here, there)
            if not self.rates.measured(layout) and self._calibration.may_try(layout, away=layout == there)
        ]
        if not wanted or not self.limits.calibrate or self._host.busy or self._hold():
            return None
        left = self.limits.idle_s - self._policy.idle_for(now)
        if left > 0 and not self._calibration.begun:
            return left
        if wanted[0] == here:
            self._calibration.begin(here, self._scheduler)
            self._host.pump()
        else:
            self._calibration.going(there)
            self.ask(there, POLICY)
        return LOOK_S

    def _collect(self) -> None:
        """Take the times of plans that came back since the last time: all of them ran in the layout in force."""
        self._collected, plans = self._timeline.since(self._collected)
        self.rates.add(self.flipper.layout, plans)
        prompts = self._done.prompt_tokens + sum(plan.prompt_rows for plan in plans)
        self._done = Done(prompts, self._done.drawn_tokens + sum(plan.drawn for plan in plans))

    def _count_work(self) -> None:
        if self._host.unarmed_step:
            self.unarmed_work_count += 1
