"""A runner between two layouts: every plan is for the layout in force, and no row is computed while a flip is on."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from flip_rig import Rig

from backends.base import Batch, Counts, DeviceFacts, Limits, Stamp
from homeserve.layouts.share import PIPELINE, TENSOR
from homeserve.wire.records import (
    Boot,
    FlipDigest,
    FlipOrder,
    LaneRows,
    NewLane,
    Plan,
    PlanKind,
    Result,
    Sampling,
    pack_ints,
)
from homeserve.worker.drawn import Drawn
from homeserve.worker.faults import FaultPoint
from homeserve.worker.lanes import Lanes
from homeserve.worker.load import Loaded
from homeserve.worker.loop import FLIP_REFUSED, answer
from homeserve.worker.places import own_pages
from homeserve.worker.runner import Runner
from homeserve.worker.side import InPlace, Side

RANK, PAGES = 0, 23
VOCAB = 50
BOOT = Boot(RANK, 3, 4, 4096, 4, 4096, "fake", 0, 1, ())


class Exchange:
    """A collective of which only messages are used."""

    def __init__(self) -> None:
        self.received: list[Stamp] = []

    def receive(self, stamp: Stamp, source: int, out: npt.NDArray[np.float32]) -> None:
        self.received.append(stamp)
        out[:] = np.array([Drawn(lane, 10 + lane, 9) for lane in range(stamp.rows)], np.int32).view(np.float32)

    def counts(self) -> dict[str, Counts]:
        return {}

    def close(self) -> None:
        pass


class Told:
    """A program that keeps its batches. Logits are elsewhere."""

    def __init__(self) -> None:
        self.batches: list[tuple[int, list[int], list[int]]] = []

    def run(self, batch: Batch) -> npt.NDArray[np.float32]:
        self.batches.append((batch.epoch, batch.tokens.tolist(), batch.slots[0].tolist()))
        return np.zeros((0, VOCAB), np.float32)

    def copy_states(self, pairs: list[tuple[int, int]]) -> None:
        pass

    def close(self) -> None:
        pass


class Worker:
    """Rank 0 of three: it embeds in both layouts and never draws."""

    def __init__(self, rig: Rig) -> None:
        self.rig, self.exchange, self.program = rig, Exchange(), Told()
        layouts = rig.layouts[RANK]
        program: Any = self.program
        layouts.computes = program
        slots = [PAGES * 16, 9 * 16]
        sides = {
            PIPELINE: Side(PIPELINE, RANK, 3, (0, 2), None, (0,), False),
            TENSOR: Side(TENSOR, RANK, 3, None, own_pages(slots, (2, 1, 1), RANK), (0, 1, 2), False),
        }
        lanes = Lanes(Limits(32, 8, 3, 4), VOCAB, (PAGES, 9), (0, 8), 0, None, draws=False, embeds=True)
        self.runner = Runner(BOOT, lambda *_: None)
        facts: Any = DeviceFacts("fake", "", "", 1, True)
        exchange: Any = self.exchange
        self.runner._loaded = Loaded(program, exchange, layouts, sides, lanes, PAGES * 16, facts, rig.ranks[RANK])
        self.runner._exchange_tokens(self.runner._loaded, sides[PIPELINE])
        self.seq = 1

    def plan(self, kind: PlanKind, epoch: int, **what: Any) -> Result:
        self.seq += 1
        return answer(RANK, Plan(self.seq, epoch, kind, 7, **what), self.runner, FaultPoint(None))

    def prompt(self, epoch: int = 0) -> Result:
        rows = LaneRows(0, 10, 0, pack_ints([1, 2, 3]), pack_ints([4, 4]), sample=True)
        return self.plan(PlanKind.PREFILL, epoch, new=(NewLane(0, 10, 3, Sampling()),), rows=(rows,))

    def decode(self, epoch: int, tokens: list[int], start: int = 3) -> Result:
        return self.plan(PlanKind.DECODE, epoch, rows=(LaneRows(0, 10, start, pack_ints(tokens), sample=True),))

    def flip(self, order: FlipOrder) -> list[Result]:
        """This rank's plans of a flip whose other ranks are played by the rig."""
        packed = self.plan(PlanKind.FLIP_PREPARE, self.rig.epoch, flip=order)
        assert packed.ok and packed.flip is not None, packed.reason
        others = [rank.prepare(order, self.rig.epoch) for rank in self.rig.ranks[1:]]
        digests: tuple[FlipDigest, ...] = tuple(each for told in (packed.flip, *others) for each in told.digests)
        verify = FlipOrder(order.flip, order.epoch, order.to, "verify", None, digests)
        compared = self.plan(PlanKind.FLIP_PREPARE, self.rig.epoch, flip=verify)
        done = self.plan(PlanKind.FLIP_COMMIT, order.epoch, flip=FlipOrder(order.flip, order.epoch, order.to))
        return [packed, compared, done]


LIVE = ((4, 7), (4,))


def test_a_flip_turns_tables_and_the_exchange_of_tokens_and_its_epoch_is_in_force() -> None:
    with Rig() as rig:
        worker = Worker(rig)
        assert worker.prompt().ok
        answers = worker.flip(rig.order(LIVE))
        assert all(each.ok for each in answers) and answers[-1].flip is not None and answers[-1].flip.digest == 77
        assert [(stamp.epoch, stamp.seq) for stamp in worker.exchange.received] == [(0, 2)], (
            "drained when it was packed"
        )
        assert worker.decode(1, [9]).ok
        assert worker.decode(1, [], 4).ok
        assert [(stamp.epoch, stamp.seq) for stamp in worker.exchange.received] == [(0, 2), (1, 6)]
        assert worker.program.batches == [
            (0, [1, 2, 3], [4 * 16, 4 * 16 + 1, 4 * 16 + 2]),
            (1, [9], [2 * 16 + 3]),  # page 4 is the third one of rank 0 in rounds of 2, 1, 1
            (1, [9], [2 * 16 + 4]),
        ]


def test_a_plan_of_another_epoch_is_refused() -> None:
    with Rig() as rig:
        worker = Worker(rig)
        worker.prompt()
        worker.flip(rig.order(LIVE))
        late = worker.decode(0, [9])
        assert not late.ok and "for a layout of epoch 0, and this is 1" in late.reason
        assert worker.decode(1, [9]).ok
        wrong = worker.plan(PlanKind.FLIP_COMMIT, 1, flip=FlipOrder(7, 9, PIPELINE))
        assert not wrong.ok and "for a layout of epoch 1, and this is 9" in wrong.reason


def test_the_first_plan_of_a_life_says_which_epoch_it_is() -> None:
    with Rig() as rig:
        worker = Worker(rig)
        assert worker.plan(PlanKind.CENSUS, 41).ok
        assert not worker.prompt(40).ok and worker.prompt(41).ok


def test_no_row_is_computed_between_a_prepare_and_its_end() -> None:
    with Rig() as rig:
        worker = Worker(rig)
        worker.prompt()
        order = rig.order(LIVE)
        assert worker.plan(PlanKind.FLIP_PREPARE, 0, flip=order).ok
        held = worker.decode(0, [9])
        assert not held.ok and "rows cannot be computed: flip 1 is prepared" in held.reason
        assert worker.plan(PlanKind.CENSUS, 0).ok
        assert worker.plan(PlanKind.FLIP_ABANDON, 0, flip=order).ok
        assert worker.decode(0, []).ok, "the token came with the prepare"


def test_a_no_says_why_in_its_own_words_and_leaves_the_rank_at_work() -> None:
    with Rig() as rig:
        worker = Worker(rig)
        worker.prompt()
        rig.layouts[RANK].why_not = "promotion: 1 of 9 bytes"
        no = worker.plan(PlanKind.FLIP_PREPARE, 0, flip=rig.order(LIVE))
        assert (no.ok, no.code, no.reason) == (False, FLIP_REFUSED, "promotion: 1 of 9 bytes; step prepare.check")
        assert worker.decode(0, []).ok


def test_a_plan_of_a_flip_without_an_order_or_for_one_layout_is_refused() -> None:
    with Rig() as rig:
        worker = Worker(rig)
        assert worker.plan(PlanKind.FLIP_PREPARE, 0).code == FLIP_REFUSED
        loaded = worker.runner._loaded
        assert loaded is not None
        object.__setattr__(loaded, "flip", None)
        assert "for ranks that have two layouts" in worker.plan(PlanKind.FLIP_PREPARE, 0, flip=rig.order()).reason


def test_rows_that_a_commit_left_half_done_are_never_computed() -> None:
    with Rig(faults={RANK: f"rank={RANK},step=commit.refill,action=refuse"}) as rig:
        worker = Worker(rig)
        worker.prompt()
        packed, compared, done = worker.flip(rig.order(LIVE))
        assert packed.ok and compared.ok and not done.ok and "commit.refill" in done.reason
        later = worker.decode(0, [9])
        assert not later.ok and "flip 1 was begun and did not end" in later.reason


# ------------------------------------------------------------------------------------------------- one memory, in place


def test_layouts_in_place_take_turns_and_move_nothing() -> None:
    programs: Any = {PIPELINE: Told(), TENSOR: Told()}
    layouts = InPlace(programs, PIPELINE)
    assert layouts.program is programs[PIPELINE] and layouts.not_ready(TENSOR) == ""
    assert "no diagonal layout" in layouts.not_ready("diagonal")
    layouts.release()
    layouts.map(TENSOR)
    filled = layouts.refill(TENSOR, spoilt=True)
    layouts.activate(TENSOR)
    assert (filled.nbytes, filled.tries) == (0, 0) and layouts.program is programs[TENSOR]
    with pytest.raises(AssertionError, match="do not move"):
        layouts.pack(None, memoryview(b""))  # type: ignore[arg-type]


def test_who_is_told_of_drawn_tokens_is_the_layouts() -> None:
    exchange: Any = Exchange()

    def ends(name: str, rank: int, embedding: tuple[int, ...]) -> tuple[object, object]:
        side = Side(name, rank, 3, None, None, embedding, rank == 2)
        return side.sender(exchange), side.receiver(exchange, 4, lambda _: None)

    assert [tuple(map(bool, ends(PIPELINE, rank, (0,)))) for rank in range(3)] == [
        (False, True),
        (False, False),
        (True, False),
    ]
    assert [tuple(map(bool, ends(TENSOR, rank, (0, 1, 2)))) for rank in range(3)] == [
        (False, True),
        (False, True),
        (True, False),
    ]
    assert Side(TENSOR, 0, 1, None, None, (0,), True).sender(None) is None
