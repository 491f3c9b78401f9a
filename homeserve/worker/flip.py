"""A rank's part in a flip: what it checks, packs, compares, and then cannot take back.

    FLIP_PREPARE pack      check: is the order one that can be followed, do both layouts agree on sizes, is there room
                           pack: what each rank will have of this one's pools, into the transit memory, with digests
    FLIP_PREPARE verify    exchange: is all there that others were to pack for this rank, and as long as it must be
                           digest: are the bytes in the transit memory those that their rank packed
    FLIP_COMMIT            release, map, write_kv, write_state
                           refill: fill the arena, each block read from there again behind its copy; once more from its
                           source where the digest is not that of the load
                           verify: rows and states are read once more from where they lie
                           rebind
    FLIP_ABANDON           what was packed is forgotten

**Up to the commit both pools are untouched**, whatever goes wrong: a prepare reads the pools and writes to the transit
memory, and a rank that cannot go on says no with the reason. Digests travel through the engine and payloads through the
transit memory, so a payload that changed on its way, was cut short, or is of another flip does not pass.

**All reads come before all writes**, also of what a rank gives to itself, because they are in different plans. The
memory of the source is given back before that of the target is mapped: there is never room for both.

**A commit is not undone.** When a part of it fails the rank is between two layouts; it says so, runs nothing any more,
and the fleet begins again. All is read once more from where it lies now: the weights while the arena is filled, and the
rows at the end, into the place in the transit memory from where they came. Both must have the digest of what was to
come.

An *epoch* numbers layouts: an order is followed only if its epoch is larger than any that this rank has seen, and a
commit only for the very flip that was prepared and compared. Rows are not computed between a prepare and its end:
they would be in no payload.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from backends.base import PAGE_LEN, Layouts, PoolRuns
from homeserve.layouts.moves import FlipGeometry, Moves, Payload, live_of, moves
from homeserve.layouts.share import PIPELINE, TENSOR
from homeserve.layouts.transition import Toward
from homeserve.wire.records import PACK, VERIFY, FlipAnswer, FlipDigest, FlipOrder
from homeserve.worker.faults import FaultPoint
from homeserve.worker.transit import Transit

TOWARD = {PIPELINE: Toward.PIPELINE, TENSOR: Toward.TENSOR}
Pair = tuple[int, int]


class FlipRefused(Exception):
    """No, with the reason: both pools are as they were."""


class FlipBroken(Exception):
    """This rank is between two layouts."""


@dataclass
class _Prepared:
    """A flip that was packed here. `digests` are those of payloads to this rank, once they were compared."""

    order: FlipOrder
    plan: Moves
    digests: dict[Pair, int] | None = None


@dataclass
class _Watch:
    """Microseconds by part of one plan, a `phase` of the flip. An error in a part carries its name as a note."""

    phase: str
    us: dict[str, int] = field(default_factory=dict)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        began = time.monotonic_ns()
        try:
            yield
        except BaseException as error:
            error.add_note(f"step {self.phase}.{name}")
            raise
        self.us[name] = self.us.get(name, 0) + (time.monotonic_ns() - began) // 1000

    @property
    def told(self) -> tuple[tuple[str, int], ...]:
        return tuple(self.us.items())


class RankFlip:
    """The flips of one rank, `rank`, over `layouts`. `transit` None: nothing moves (unified memory)."""

    def __init__(
        self, rank: int, geometry: FlipGeometry, layouts: Layouts, transit: Transit | None, faults: FaultPoint
    ) -> None:
        self._rank = rank
        self._geometry = geometry
        self._layouts = layouts
        self._transit = transit
        self._faults = faults
        self._prepared: _Prepared | None = None
        self._epoch = 0
        self._broken = ""

    @property
    def blocked(self) -> str:
        """Why no rows can be computed now; empty: they can."""
        if self._broken:
            return self._broken
        return f"flip {self._prepared.order.flip} is prepared" if self._prepared is not None else ""

    def prepare(self, order: FlipOrder, epoch: int) -> FlipAnswer:
        """Pack or compare, as the order says; `epoch` is the one in force. Raises FlipRefused, and whatever a step runs
        into: the answer is no then, and nothing is prepared any more."""
        self._require(not self._broken, self._broken)
        if order.stage == PACK:
            self._require(self._prepared is None, f"{self.blocked}, and was neither committed nor abandoned")
            return self._pack(order, max(epoch, self._epoch))
        self._require(order.stage == VERIFY, f"there is no stage {order.stage!r} of a prepare")
        prepared = self._prepared_of(order)
        try:
            return self._compare(prepared, order)
        except BaseException:
            self._prepared = None
            raise

    def commit(self, order: FlipOrder, rebind: Callable[[], None]) -> FlipAnswer:
        """Change over; `rebind` has the rest of the worker follow, last. Raises FlipRefused for a flip that was not
        prepared and compared. Whatever else it raises, this rank cannot go on."""
        self._require(not self._broken, self._broken)
        prepared = self._prepared_of(order)
        if prepared.digests is None:
            raise FlipRefused(f"flip {order.flip} is to be committed, and its payloads were not compared")
        self._broken = f"flip {order.flip} was begun and did not end"
        answer = self._change_over(prepared.plan, order.to, prepared.digests, rebind)
        self._epoch, self._prepared, self._broken = order.epoch, None, ""
        return answer

    def abandon(self, order: FlipOrder) -> None:
        """Forget what was packed; also where nothing is. Raises FlipRefused where another flip is prepared."""
        if self._prepared is not None and self._prepared.order.flip != order.flip:
            raise FlipRefused(f"flip {order.flip} is to be abandoned, and {self.blocked}")
        self._prepared = None

    def close(self) -> None:
        if self._transit is not None:
            self._transit.close()

    # ------------------------------------------------------------------------------------------------------ prepare

    def _pack(self, order: FlipOrder, epoch: int) -> FlipAnswer:
        watch = _Watch("prepare")
        with watch.part("check"):
            plan = self._checked(order, epoch)
            self._epoch = order.epoch
        with watch.part("pack"):
            digests = self._packed(plan)
        self._prepared = _Prepared(order, plan)
        return FlipAnswer(
            sent_bytes=plan.sent(self._rank), local_bytes=plan.local(self._rank), digests=digests, us=watch.told
        )

    def _checked(self, order: FlipOrder, epoch: int) -> Moves:
        """The plan of an order that can be followed."""
        self._faults.damaging("prepare.check")
        active = self._layouts.active
        self._require(order.to in TOWARD, f"there is no layout {order.to!r}")
        self._require(order.to != active, f"the layout is {active} already")
        self._require(order.epoch > epoch, f"epoch {order.epoch} is not behind {epoch}")
        if order.live is None:
            raise FlipRefused("nothing says what is live")
        why = self._layouts.not_ready(order.to)
        self._require(not why, why)
        try:
            live = live_of(self._geometry, order.live.pages, order.live.states)
        except ValueError as error:
            raise FlipRefused(str(error)) from error
        plan = moves(self._geometry, live, TOWARD[order.to])
        there = self._transit.nbytes if self._transit is not None else 0
        self._require(plan.nbytes <= there, f"{plan.nbytes} bytes are to move, the transit memory has {there}")
        for payload in plan.of_source(self._rank):
            self._check_length(payload, active)
        for payload in plan.of_target(self._rank):
            self._check_length(payload, order.to)
        for payload in plan.of_source(self._rank):
            self._reserve(payload)
        return plan

    def _reserve(self, payload: Payload) -> None:
        """Room for what this rank is about to pack."""
        if not payload.nbytes:
            return
        try:
            self._memory.reserve(payload.offset, payload.nbytes)
        except OSError as error:
            raise FlipRefused(
                f"{_name(payload)}: no room for {payload.nbytes} bytes in the transit memory: {error.strerror}"
            ) from error

    def _check_length(self, payload: Payload, layout: str) -> None:
        """That this rank's pools in `layout` make of the payload's rows as many bytes as everybody counts."""
        if not payload.nbytes:
            return
        found = self._layouts.run_bytes(layout, self._runs(payload, layout))
        self._require(
            found == payload.nbytes,
            f"{_name(payload)}: {payload.nbytes} bytes by the plan, {found} in the {layout} layout here",
        )

    def _packed(self, plan: Moves) -> tuple[FlipDigest, ...]:
        own = [payload for payload in plan.of_source(self._rank) if payload.nbytes]
        spoilt = self._faults.at("prepare.pack")
        digests: list[FlipDigest] = []
        for payload in own:
            with self._memory.view(payload.offset, payload.nbytes) as view:
                digest = self._layouts.pack(self._runs(payload, self._layouts.active), view)
                if spoilt and not digests:
                    _spoil(view)
            digests.append(FlipDigest(payload.source, payload.target, payload.nbytes, digest))
        self._faults.corrupts |= spoilt and not own
        return tuple(digests)

    def _compare(self, prepared: _Prepared, order: FlipOrder) -> FlipAnswer:
        watch, plan = _Watch("prepare"), prepared.plan
        told = {(each.source, each.target): each for each in order.digests}
        with watch.part("exchange"):
            spoilt = self._faults.at("prepare.exchange")
            due = [payload for payload in plan.of_target(self._rank) if payload.nbytes]
            for payload in due:
                self._check_came(payload, told)
                self._memory.reach(payload.offset, payload.nbytes)
                if spoilt:
                    with self._memory.view(payload.offset, payload.nbytes) as view:
                        _spoil(view)
            self._faults.corrupts |= spoilt and not due
        with watch.part("digest"):
            spoilt = self._faults.at("prepare.digest")
            digests = {}
            for payload in due:
                with self._memory.view(payload.offset, payload.nbytes) as view:
                    digests[_pair(payload)] = self._layouts.digest(view) ^ int(spoilt)
            self._faults.corrupts |= spoilt and not due
            for pair, digest in digests.items():
                wanted = told[pair].digest
                self._require(
                    digest == wanted,
                    f"what rank {pair[0]} packed for rank {pair[1]} has the digest {digest:016x},"
                    f" where rank {pair[0]} says {wanted:016x}",
                )
        prepared.digests = digests
        return FlipAnswer(received_bytes=plan.received(self._rank), us=watch.told)

    def _check_came(self, payload: Payload, told: Mapping[Pair, FlipDigest]) -> None:
        """A payload that is missing or of another length is no damaged one, and is told apart from it."""
        packed = told.get(_pair(payload))
        if packed is None:
            raise FlipRefused(f"{_name(payload)} was not packed; {payload.nbytes} bytes are due")
        self._require(
            packed.nbytes == payload.nbytes,
            f"{_name(payload)} is cut: {packed.nbytes} bytes were packed, {payload.nbytes} are due",
        )

    # ------------------------------------------------------------------------------------------------------- commit

    def _change_over(self, plan: Moves, to: str, digests: Mapping[Pair, int], rebind: Callable[[], None]) -> FlipAnswer:
        watch, layouts, faults = _Watch("commit"), self._layouts, self._faults
        due = [payload for payload in plan.of_target(self._rank) if payload.nbytes]
        with watch.part("release"):
            faults.damaging("commit.release")
            layouts.release()
        with watch.part("map"):
            faults.damaging("commit.map")
            layouts.map(to, writes=bool(due))
        with watch.part("write_kv"):
            self._write(due, to, "commit.write_kv")
        with watch.part("write_state"):
            self._write(due, to, "commit.write_state")
        with watch.part("refill"):
            spoilt = faults.at("commit.refill")
            refilled = layouts.refill(to, spoilt=spoilt)
            faults.corrupts |= spoilt and not refilled.nbytes
        with watch.part("verify"):
            faults.damaging("commit.verify")
            layouts.activate(to)
            self._read_back(due, to, digests)
        with watch.part("rebind"):
            faults.damaging("commit.rebind")
            rebind()
        mine = plan.of_target(self._rank)
        return FlipAnswer(
            sent_bytes=plan.sent(self._rank),
            received_bytes=plan.received(self._rank),
            local_bytes=plan.local(self._rank),
            refill_bytes=refilled.nbytes,
            refill_tries=refilled.tries,
            rows=PAGE_LEN * sum(payload.rows for payload in mine),
            states=sum(payload.state_count for payload in mine),
            digest=refilled.digest,
            us=watch.told,
        )

    def _write(self, due: list[Payload], to: str, step: str) -> None:
        """The KV part of each payload, or what is behind it."""
        spoilt, wrote = self._faults.at(step), False
        for payload in due:
            whole = self._runs(payload, to)
            kv = step == "commit.write_kv"
            runs = PoolRuns(kv=whole.kv) if kv else PoolRuns(states=whole.states, parts=whole.parts)
            first, end = (0, payload.kv_bytes) if kv else (payload.kv_bytes, payload.nbytes)
            if first == end:
                continue
            with self._memory.view(payload.offset + first, end - first) as view:
                if spoilt and not wrote:
                    _spoil(view)
                self._layouts.write(to, runs, view)
                wrote = True
        self._faults.corrupts |= spoilt and not wrote

    def _read_back(self, due: list[Payload], to: str, digests: Mapping[Pair, int]) -> None:
        """What lies in the pools now is what was sent."""
        for payload in due:
            with self._memory.view(payload.offset, payload.nbytes) as view:
                found = self._layouts.pack(self._runs(payload, to), view)
            wanted = digests[_pair(payload)]
            if found != wanted:
                raise FlipBroken(
                    f"{_name(payload)}: read back from the {to} layout it has the digest {found:016x},"
                    f" {wanted:016x} was sent"
                )

    # ------------------------------------------------------------------------------------------------------- inside

    @property
    def _memory(self) -> Transit:
        assert self._transit is not None, "checked: nothing moves without"
        return self._transit

    def _prepared_of(self, order: FlipOrder) -> _Prepared:
        """What is prepared, if it is this order's."""
        prepared = self._prepared
        if prepared is None:
            raise FlipRefused(f"flip {order.flip} is not prepared here")
        known = prepared.order
        self._require(
            (known.flip, known.epoch, known.to) == (order.flip, order.epoch, order.to),
            f"flip {order.flip} to {order.to} under epoch {order.epoch} is not the one that is prepared:"
            f" {known.flip} to {known.to} under {known.epoch}",
        )
        return prepared

    def _runs(self, payload: Payload, layout: str) -> PoolRuns:
        return runs_of(self._geometry, payload, layout, self._rank)

    @staticmethod
    def _require(holds: bool, why: str) -> None:
        if not holds:
            raise FlipRefused(why)


def runs_of(geometry: FlipGeometry, payload: Payload, layout: str, rank: int) -> PoolRuns:
    """The payload's rows in the pools of `rank` in `layout`: its layers as that rank numbers them."""
    kv_index = {layer: at for at, layer in enumerate(geometry.kv_layers(layout, rank))}
    state_index = {layer: at for at, layer in enumerate(geometry.state_layers(layout, rank))}
    whole = layout == PIPELINE
    kv = tuple(
        (tuple(kv_index[layer] for layer in rows.layers), rows.own if whole else rows.dealt) for rows in payload.kv
    )
    parts = tuple(
        (
            state_index[rows.layer],
            tuple((run.first, run.end) for run in (rows.channels if whole else rows.dealt_channels)),
            tuple((run.first, run.end) for run in (rows.heads if whole else rows.dealt_heads)),
        )
        for rows in payload.states
    )
    return PoolRuns(kv, payload.slots, parts)


def _pair(payload: Payload) -> Pair:
    return payload.source, payload.target


def _name(payload: Payload) -> str:
    return f"the payload from rank {payload.source} to rank {payload.target}"


def _spoil(view: memoryview) -> None:
    """For a fault of tests: one bit in the middle turns."""
    view[len(view) // 2] ^= 1
