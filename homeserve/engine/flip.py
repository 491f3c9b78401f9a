"""A flip of the layout: what may happen when, and what is kept of it.

The engine alone decides about a flip, and every step of it is a plan that ranks answer. No rank waits for another one
inside such a plan, so nothing here can block: each state below waits for answers that come, or for a loss that the
fleet tells of.

              ask          drained         yes            yes             yes           yes
    IDLE ─────────▶ DRAINING ─────▶ PACKING ─────▶ VERIFYING ─────▶ COMMITTING ─────▶ CHECKING ─────▶ IDLE (committed)
                       │               │ no            │ no              │ no            │ no
                       │ expired       ▼               ▼                 ▼               ▼
                       ▼ misfit     ABANDONING ───────────▶ IDLE      the life is lost: restart in the resting layout
                     IDLE (abandoned)       yes    (abandoned)

Draining waits until every plan that was issued is answered, and no longer: requests stay where they are, a prompt half
computed too. What must be quiet is the machinery, never the workload. It has the only bound that is kept here (the
*park deadline*): at its end the flip is given up and serving goes on. Every later step is a plan with the fleet's own
bound.

Up to VERIFYING both layouts are whole, and one `no` ends the flip on all ranks: they drop what they packed, nothing has
changed for anybody. COMMITTING has no way back. What goes wrong from there on costs the life of the fleet, which begins
again in the resting layout with every request queued from its tokens.

What ranks say is compared, not believed: before the commit, that the bytes packed are what the pools have live, and
that each rank expects what the others packed for it; after it, rows and states, and every lane in a census.

The *epoch* numbers layouts. Each flip mints the next one when it is asked for, a life that begins again does so too,
and none is used twice, so whatever carries an epoch says which layout it was made for.

Pure: time comes as an argument.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from homeserve.engine.flip_record import FlipRecord as FlipRecord
from homeserve.engine.flip_record import FlipRefused as FlipRefused
from homeserve.engine.flip_record import LiveSet as LiveSet
from homeserve.engine.flip_record import RankPart
from homeserve.engine.flip_totals import FlipTotals
from homeserve.engine.request import FlipLimits
from homeserve.wire.records import PACK, VERIFY, FlipAnswer, FlipDigest, FlipLive, FlipOrder, Result

RECORDS_KEPT = 64
MIB = 2**20
LAYOUTS = ("pipeline", "tensor")


class FlipState(Enum):
    """What a flip waits for. The value is what the record says."""

    IDLE = "idle"
    DRAINING = "draining"
    PACKING = "packing"
    VERIFYING = "verifying"
    COMMITTING = "committing"
    CHECKING = "checking"
    ABANDONING = "abandoning"


class FlipEvent(Enum):
    ASK = "ask"
    DRAINED = "drained"
    MISFIT = "misfit"
    """Drained, and what is live is more than one flip may carry."""
    YES = "yes"
    """All ranks answered yes, and what they say agrees."""
    NO = "no"
    EXPIRED = "expired"
    LOST = "lost"


class FlipAction(Enum):
    """What the engine does next."""

    REFUSE = "refuse"
    DRAIN = "drain"
    PACK = "pack"
    VERIFY = "verify"
    COMMIT = "commit"
    CHECK = "check"
    UNDO = "undo"
    GIVE_UP = "give_up"
    FINISH = "finish"
    LOSE = "lose"
    NOTHING = "nothing"
    NEVER = "never"
    """This cannot come: whoever brings it is wrong."""


_S, _E, _A = FlipState, FlipEvent, FlipAction

TABLE: dict[tuple[FlipState, FlipEvent], tuple[FlipState, FlipAction]] = {
    (_S.IDLE, _E.ASK): (_S.DRAINING, _A.DRAIN),
    (_S.IDLE, _E.DRAINED): (_S.IDLE, _A.NEVER),
    (_S.IDLE, _E.MISFIT): (_S.IDLE, _A.NEVER),
    (_S.IDLE, _E.YES): (_S.IDLE, _A.NEVER),
    (_S.IDLE, _E.NO): (_S.IDLE, _A.NEVER),
    (_S.IDLE, _E.EXPIRED): (_S.IDLE, _A.NOTHING),
    (_S.IDLE, _E.LOST): (_S.IDLE, _A.NOTHING),
    (_S.DRAINING, _E.ASK): (_S.DRAINING, _A.REFUSE),
    (_S.DRAINING, _E.DRAINED): (_S.PACKING, _A.PACK),
    (_S.DRAINING, _E.MISFIT): (_S.IDLE, _A.GIVE_UP),
    (_S.DRAINING, _E.YES): (_S.DRAINING, _A.NEVER),
    (_S.DRAINING, _E.NO): (_S.DRAINING, _A.NEVER),
    (_S.DRAINING, _E.EXPIRED): (_S.IDLE, _A.GIVE_UP),
    (_S.DRAINING, _E.LOST): (_S.IDLE, _A.GIVE_UP),
    (_S.PACKING, _E.ASK): (_S.PACKING, _A.REFUSE),
    (_S.PACKING, _E.DRAINED): (_S.PACKING, _A.NEVER),
    (_S.PACKING, _E.MISFIT): (_S.PACKING, _A.NEVER),
    (_S.PACKING, _E.YES): (_S.VERIFYING, _A.VERIFY),
    (_S.PACKING, _E.NO): (_S.ABANDONING, _A.UNDO),
    (_S.PACKING, _E.EXPIRED): (_S.PACKING, _A.NOTHING),
    (_S.PACKING, _E.LOST): (_S.IDLE, _A.GIVE_UP),
    (_S.VERIFYING, _E.ASK): (_S.VERIFYING, _A.REFUSE),
    (_S.VERIFYING, _E.DRAINED): (_S.VERIFYING, _A.NEVER),
    (_S.VERIFYING, _E.MISFIT): (_S.VERIFYING, _A.NEVER),
    (_S.VERIFYING, _E.YES): (_S.COMMITTING, _A.COMMIT),
    (_S.VERIFYING, _E.NO): (_S.ABANDONING, _A.UNDO),
    (_S.VERIFYING, _E.EXPIRED): (_S.VERIFYING, _A.NOTHING),
    (_S.VERIFYING, _E.LOST): (_S.IDLE, _A.GIVE_UP),
    (_S.COMMITTING, _E.ASK): (_S.COMMITTING, _A.REFUSE),
    (_S.COMMITTING, _E.DRAINED): (_S.COMMITTING, _A.NEVER),
    (_S.COMMITTING, _E.MISFIT): (_S.COMMITTING, _A.NEVER),
    (_S.COMMITTING, _E.YES): (_S.CHECKING, _A.CHECK),
    (_S.COMMITTING, _E.NO): (_S.IDLE, _A.LOSE),
    (_S.COMMITTING, _E.EXPIRED): (_S.COMMITTING, _A.NOTHING),
    (_S.COMMITTING, _E.LOST): (_S.IDLE, _A.GIVE_UP),
    (_S.CHECKING, _E.ASK): (_S.CHECKING, _A.REFUSE),
    (_S.CHECKING, _E.DRAINED): (_S.CHECKING, _A.NEVER),
    (_S.CHECKING, _E.MISFIT): (_S.CHECKING, _A.NEVER),
    (_S.CHECKING, _E.YES): (_S.IDLE, _A.FINISH),
    (_S.CHECKING, _E.NO): (_S.IDLE, _A.LOSE),
    (_S.CHECKING, _E.EXPIRED): (_S.CHECKING, _A.NOTHING),
    (_S.CHECKING, _E.LOST): (_S.IDLE, _A.FINISH),
    (_S.ABANDONING, _E.ASK): (_S.ABANDONING, _A.REFUSE),
    (_S.ABANDONING, _E.DRAINED): (_S.ABANDONING, _A.NEVER),
    (_S.ABANDONING, _E.MISFIT): (_S.ABANDONING, _A.NEVER),
    (_S.ABANDONING, _E.YES): (_S.IDLE, _A.GIVE_UP),
    (_S.ABANDONING, _E.NO): (_S.IDLE, _A.LOSE),
    (_S.ABANDONING, _E.EXPIRED): (_S.ABANDONING, _A.NOTHING),
    (_S.ABANDONING, _E.LOST): (_S.IDLE, _A.GIVE_UP),
}
"""Every state and every event: what comes of it."""

TOLD = {_S.PACKING: "preparing", _S.VERIFYING: "preparing", _S.CHECKING: "committing", _S.ABANDONING: "preparing"}
"""Of states whose record says something else than their name."""


@dataclass(frozen=True)
class Step:
    """What the engine is to do: issue a plan with `order`, or nothing more. `why` where a life is to end."""

    action: FlipAction
    order: FlipOrder | None = None
    why: str = ""


class Flipper:
    """The flip that is on, those before it, and the layout and epoch in force."""

    def __init__(self, limits: FlipLimits) -> None:
        self.limits = limits
        self.state = FlipState.IDLE
        self.layout = limits.resting
        self.epoch = 0
        """In force."""
        self.record: FlipRecord | None = None
        """Of the flip that is on."""
        self.committed = 0
        self.abandoned: Counter[str] = Counter()
        self.totals = FlipTotals()
        self.on_phase: Callable[[str | None], None] | None = None
        """Told of each step while a flip is on, and None when it is over."""
        self.changed: float | None = None
        """When the last flip ended, however."""
        self._minted = 0
        self._records: deque[FlipRecord] = deque(maxlen=RECORDS_KEPT)
        self._ids = 0
        self._step_began = 0.0
        self._digests: tuple[FlipDigest, ...] = ()

    # ------------------------------------------------------------------------------------------------- questions

    @property
    def on(self) -> bool:
        return self.state is not FlipState.IDLE

    def get(self, flip: int) -> FlipRecord | None:
        return next((record for record in self._records if record.id == flip), None)

    def records(self) -> list[FlipRecord]:
        """Oldest first, at most RECORDS_KEPT."""
        return list(self._records)

    def refuse(self, to: str, needed_bytes: int) -> FlipRefused | None:
        """Why a flip to `to` cannot begin now, if so; `needed_bytes` is the least that it has to carry."""
        if to not in LAYOUTS or to not in self.limits.layouts:
            return FlipRefused("bad_target", f"there is no layout {to!r}: pipeline and tensor are")
        if self.on:
            return FlipRefused("flip_running", "another flip is on")
        if to == self.layout:
            return FlipRefused("already_there", f"the layout is {to} already")
        return self._misfit(needed_bytes)

    # ---------------------------------------------------------------------------------------------------- events

    def ask(self, to: str, cause: str, now: float, needed_bytes: int, *, serving: bool = True) -> FlipRecord:
        """Begin a flip; the engine issues no further plan from here on. Raises FlipRefused, also where the ranks are
        not up (`serving`)."""
        refusal = self.refuse(to, needed_bytes)
        if refusal is None and not serving:
            refusal = FlipRefused("not_ready", "the ranks are not up")
        if refusal is not None:
            raise refusal
        self._turn(FlipEvent.ASK)
        self._ids += 1
        self.record = FlipRecord(self._ids, self.mint(), self.layout, to, cause, now, self.state.value)
        self._records.append(self.record)
        self._step_began = now
        return self.record

    def mint(self) -> int:
        """A new epoch."""
        self._minted += 1
        return self._minted

    def on_drained(self, live: LiveSet, now: float) -> Step:
        """Every plan is answered, and `live` is what there is to carry."""
        record = self._record
        record.live = live
        record.ms["drain"] = self._lap(now)
        misfit = self._misfit(live.nbytes)
        if misfit is not None:
            return self._step(FlipEvent.MISFIT, now, "does_not_fit", misfit.message)
        return self._step(FlipEvent.DRAINED, now)

    def on_results(self, results: Sequence[Result], now: float) -> Step:
        """The answers of all ranks to the plan that this flip waits for."""
        self._note_answers(results)
        refused = next((result for result in results if not result.ok), None)
        if refused is not None:
            doing = self.state.value
            return self._step(FlipEvent.NO, now, "refused", f"rank {refused.rank}, {doing}: {refused.reason}")
        problem = self._disagreement()
        if problem:
            return self._step(FlipEvent.NO, now, "mismatch", problem)
        return self._step(FlipEvent.YES, now)

    def on_census(self, problem: str, now: float) -> Step:
        """The census behind the commit; `problem` is what is wrong with it, empty if nothing."""
        if problem:
            return self._step(FlipEvent.NO, now, "mismatch", problem)
        return self._step(FlipEvent.YES, now)

    def on_lost(self, rank: int, why: str, now: float) -> Step:
        """The life is over, a flip on or not: the next one begins in the resting layout, under an epoch of its own.
        `rank` -1: it was ended from here."""
        who, doing = f"rank {rank} was" if rank >= 0 else "the ranks were", self.state.value
        step = self._step(FlipEvent.LOST, now, "lost", f"{who} lost, {doing}: {why}")
        self.layout = self.limits.resting
        self.epoch = self.mint()
        return step

    def tick(self, now: float) -> Step:
        """Some time has passed: a drain that is over its deadline ends the flip."""
        deadline = self.limits.park_deadline_s
        if not self.on or deadline <= 0 or now - self._record.asked < deadline:
            return Step(FlipAction.NOTHING)
        return self._step(
            FlipEvent.EXPIRED, now, "park_deadline", f"plans in flight were not answered within {deadline:g} s"
        )

    # ---------------------------------------------------------------------------------------------------- inside

    @property
    def _record(self) -> FlipRecord:
        assert self.record is not None, "no flip is on"
        return self.record

    def _turn(self, event: FlipEvent) -> FlipAction:
        to, action = TABLE[self.state, event]
        assert action is not FlipAction.NEVER, f"a flip that is {self.state.value} cannot meet {event.value}"
        self.state = to
        if self.record is not None and self.on:
            self.record.state = TOLD.get(to, to.value)
        if self.on_phase is not None and action not in (FlipAction.NOTHING, FlipAction.REFUSE):
            self.on_phase(to.value if self.on else None)
        return action

    def _step(self, event: FlipEvent, now: float, kind: str = "", reason: str = "") -> Step:
        before = self.state
        action = self._turn(event)
        if action is FlipAction.NOTHING:
            return Step(action)
        record = self._record
        if reason and record.reason is None:
            record.reason, record.why = reason, kind
        self._note_times(before, now)
        if action is FlipAction.PACK:
            assert record.live is not None
            return Step(action, self._order(stage=PACK, live=record.live.live))
        if action is FlipAction.VERIFY:
            return Step(action, self._order(stage=VERIFY, digests=self._digests))
        if action in (FlipAction.COMMIT, FlipAction.UNDO):
            return Step(action, self._order())
        if action is FlipAction.CHECK:
            self.layout, self.epoch = record.to, record.epoch
            return Step(action)
        self._close("committed" if action is FlipAction.FINISH else "abandoned", now)
        return Step(action, why=reason)

    def _order(self, stage: str = "", live: FlipLive | None = None, digests: tuple[FlipDigest, ...] = ()) -> FlipOrder:
        record = self._record
        return FlipOrder(record.id, record.epoch, record.to, stage, live, digests)

    def _close(self, state: str, now: float) -> None:
        record = self._record
        record.state = state
        record.ms["total"] = 1e3 * (now - record.asked)
        if state == "committed":
            self.committed += 1
            if record.why == "lost":  # after all had changed over: not a reason, and told as an event of its own
                record.reason = record.why = None
        else:
            self.abandoned[record.why or "unknown"] += 1
        self.totals.add(record)
        self.changed = now
        self.record = None
        self._digests = ()

    def _misfit(self, needed_bytes: int) -> FlipRefused | None:
        room = self.limits.transit_bytes
        if self.limits.unified or needed_bytes <= room:
            return None
        needed, available = needed_bytes / MIB, room / MIB
        text = f"what is live, {needed:.1f} MiB, is more than the {available:.1f} MiB that a flip can carry"
        return FlipRefused("does_not_fit", text, round(needed, 3), round(available, 3), "transit memory")

    def _lap(self, now: float) -> float:
        """Milliseconds since the last lap."""
        ms = 1e3 * (now - self._step_began)
        self._step_began = now
        return ms

    def _note_times(self, before: FlipState, now: float) -> None:
        record = self._record
        part = {
            FlipState.DRAINING: "drain",
            FlipState.PACKING: "prepare",
            FlipState.VERIFYING: "prepare",
            FlipState.COMMITTING: "commit",
            FlipState.CHECKING: "verify",
        }.get(before)
        if part is not None:
            record.ms[part] = (record.ms[part] or 0.0) + self._lap(now)
        refills = [each.us["refill"] for each in record.ranks if "refill" in each.us]
        if refills:
            record.ms["refill"] = max(refills) / 1000

    # --------------------------------------------------------------------------------------------------- answers

    def _note_answers(self, results: Sequence[Result]) -> None:
        record = self._record
        if not record.ranks:
            record.ranks = [RankPart(result.rank) for result in results]
        for part, result in zip(record.ranks, results, strict=True):
            if self.state is not FlipState.ABANDONING:
                part.answer = "yes" if result.ok else "no"
                part.reason = result.reason or None
            if result.flip is not None:
                part.told = merged(part.told, result.flip)
                for name, us in result.flip.us:
                    part.us[name] = part.us.get(name, 0) + us
        if self.state is FlipState.PACKING:
            self._digests = tuple(digest for result in results if result.flip for digest in result.flip.digests)

    def _disagreement(self) -> str:
        """What does not fit together in the answers so far, empty where all does. Counts are those of all ranks."""
        record = self._record
        told = [part.told for part in record.ranks]
        known = [answer for answer in told if answer is not None]
        live = record.live
        if self.state not in (FlipState.PACKING, FlipState.COMMITTING) or live is None:
            return ""
        if len(known) != len(told):
            return f"rank {told.index(None)} does not say what it did"
        sent, received, local = (
            sum(getattr(answer, name) for answer in known) for name in ("sent_bytes", "received_bytes", "local_bytes")
        )
        expected = 0 if self.limits.unified else live.nbytes
        if sent + local != expected:
            return f"{sent} + {local} bytes are packed of {expected} that are live"
        if self.state is FlipState.PACKING:
            packed = sum(digest.nbytes for digest in self._digests)
            return "" if packed == expected else f"digests are of {packed} bytes, not of {expected}"
        if received != sent:
            return f"{received} bytes were received of {sent} sent"
        return self._miscounted(live, known)

    def _miscounted(self, live: LiveSet, known: list[FlipAnswer]) -> str:
        layers, state_layers = self.limits.group_layers, self.limits.state_layers
        if layers:
            page_len = live.rows // max(1, sum(live.pages))
            rows = sum(count * pages * page_len for count, pages in zip(layers, live.pages, strict=True))
            found = sum(answer.rows for answer in known)
            if found != rows:
                return f"ranks have {found} KV rows of {rows}"
        if state_layers and not self.limits.unified:
            carried = (live.states + live.checkpoints) * state_layers
            fewest = sum(answer.states for answer in known)
            if fewest < carried:
                return f"ranks have {fewest} states of {carried}"
        return ""


def merged(before: FlipAnswer | None, after: FlipAnswer) -> FlipAnswer:
    """What a rank has said of a flip so far: each count in the answer that has it."""
    if before is None:
        return after
    names = ("sent_bytes", "received_bytes", "local_bytes", "refill_bytes", "refill_tries", "rows", "states", "digest")
    return FlipAnswer(**{name: getattr(after, name) or getattr(before, name) for name in names})
