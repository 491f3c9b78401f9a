"""Rings in plain memory: random interleavings of a writer and its readers, and every kind of damage."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from homeserve.errors import RecordTooLarge, WireError
from homeserve.wire.codec import encode
from homeserve.wire.records import Hello, LaneRows, Plan, PlanKind, Progress, Result
from homeserve.wire.ring import (
    HEADER_BYTES,
    PROGRESS_SLOTS,
    STAMP_BYTES,
    PlanLogReader,
    PlanLogWriter,
    ReportReader,
    ReportWriter,
    Slots,
    ring_bytes,
)

SLOT_BYTES = 256


def plan(seq: int, tokens: bytes = b"") -> Plan:
    return Plan(seq, 0, PlanKind.DECODE, 1, rows=(LaneRows(seq % 7, seq, seq, tokens),))


@dataclass
class Fleet:
    """A plan log with its readers and report rings, without processes. `bells` counts announced, untaken records."""

    slots: int
    ranks: int
    log: PlanLogWriter = field(init=False)
    readers: list[PlanLogReader] = field(init=False)
    bells: list[int] = field(init=False)
    unanswered: list[list[int]] = field(init=False)
    taken: list[list[int]] = field(init=False)
    report_writers: list[ReportWriter] = field(init=False)
    report_readers: list[ReportReader] = field(init=False)
    report_bells: list[int] = field(init=False)
    memory: bytearray = field(init=False)

    def __post_init__(self) -> None:
        self.memory = bytearray(ring_bytes(self.slots, SLOT_BYTES))
        self.log = PlanLogWriter(Slots(memoryview(self.memory), self.slots, SLOT_BYTES, create=True), self.ranks)
        self.readers = [
            PlanLogReader(Slots(memoryview(self.memory), self.slots, SLOT_BYTES, create=False))
            for _ in range(self.ranks)
        ]
        self.bells = [0] * self.ranks
        self.unanswered = [[] for _ in range(self.ranks)]
        self.taken = [[] for _ in range(self.ranks)]
        self.report_writers, self.report_readers = [], []
        for _ in range(self.ranks):
            count = self.slots + PROGRESS_SLOTS
            view = memoryview(bytearray(ring_bytes(count, SLOT_BYTES)))
            self.report_writers.append(ReportWriter(Slots(view, count, SLOT_BYTES, create=True), self.slots))
            self.report_readers.append(ReportReader(Slots(view, count, SLOT_BYTES, create=False)))
        self.report_bells = [0] * self.ranks

    def issue(self) -> None:
        self.log.write(plan(self.log.issued + 1))
        self.bells = [n + 1 for n in self.bells]

    def take(self, rank: int) -> None:
        if self.bells[rank]:
            self.bells[rank] -= 1
            seq = self.readers[rank].take().seq
            self.taken[rank].append(seq)
            self.unanswered[rank].append(seq)

    def answer(self, rank: int) -> None:
        if self.unanswered[rank]:
            self.report_writers[rank].write(Result(rank, self.unanswered[rank].pop(0), 0))
            self.report_bells[rank] += 1

    def progress(self, rank: int) -> None:
        if self.report_writers[rank].progress_nowait(Progress(rank, "load", 1, 2)):
            self.report_bells[rank] += 1

    def hear(self, rank: int) -> None:
        if self.report_bells[rank]:
            self.report_bells[rank] -= 1
            report = self.report_readers[rank].take()
            if isinstance(report, Result):
                self.log.acknowledge(rank, report.seq)


_steps = st.lists(st.tuples(st.sampled_from("iitahp"), st.integers(0, 2)), max_size=120)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 4), st.integers(1, 3), _steps)
def test_every_reader_takes_every_plan_in_order(slots: int, ranks: int, steps: list[tuple[str, int]]) -> None:
    """Whatever the interleaving: no record is lost, doubled, torn or out of order, results always fit, and credit is
    never more than the slots that every rank has answered for."""
    fleet = Fleet(slots, ranks)
    for step, number in steps:
        rank = number % ranks
        if step == "i":
            if fleet.log.credit() > 0:
                fleet.issue()
        else:
            {"t": fleet.take, "a": fleet.answer, "h": fleet.hear, "p": fleet.progress}[step](rank)
        answered = min(fleet.log.acked(rank) for rank in range(ranks))
        assert fleet.log.credit() == slots - (fleet.log.issued - answered)
        assert 0 <= fleet.log.credit() <= slots
    for _ in range(slots):
        for rank in range(ranks):
            fleet.take(rank)
    assert fleet.taken == [list(range(1, fleet.log.issued + 1))] * ranks


@pytest.mark.parametrize("slots", [1, 2, 3, 4])
def test_as_many_plans_as_slots_are_in_flight_at_once(slots: int) -> None:
    """Fill the ring to the last slot before anybody reads, twice around: every record is still there."""
    fleet = Fleet(slots, 2)
    for _ in range(2):
        while fleet.log.credit() > 0:
            fleet.issue()
        assert fleet.bells == [slots, slots]
        for rank in range(2):
            for act in (fleet.take, fleet.answer, fleet.hear):
                for _ in range(slots):
                    act(rank)
    assert fleet.taken == [list(range(1, 2 * slots + 1))] * 2


def test_a_write_without_credit_is_a_bug() -> None:
    fleet = Fleet(2, 3)
    fleet.issue()
    fleet.issue()
    for rank in (0, 2):  # rank 1 has not answered, so nobody's answer frees a slot
        for act in (fleet.take, fleet.answer, fleet.hear):
            act(rank)
    assert fleet.log.credit() == 0
    with pytest.raises(AssertionError, match="plan 3 was issued without credit"):
        fleet.issue()
    assert fleet.readers[1].take().seq == 1
    assert fleet.readers[1].take().seq == 2


def test_a_plan_out_of_turn_is_a_bug() -> None:
    fleet = Fleet(4, 1)
    with pytest.raises(AssertionError, match="plan 2 was issued after 0"):
        fleet.log.write(plan(2))


def test_a_record_larger_than_a_slot_names_both_sizes_and_writes_nothing() -> None:
    fleet = Fleet(2, 1)
    fleet.issue()
    before = bytes(fleet.memory)
    big = plan(2, b"x" * 400)
    with pytest.raises(RecordTooLarge) as caught:
        fleet.log.write(big)
    assert caught.value.record_bytes == len(encode(big))
    assert caught.value.slot_bytes == SLOT_BYTES - STAMP_BYTES
    assert str(len(encode(big))) in caught.value.message
    assert bytes(fleet.memory) == before
    fleet.issue()
    assert fleet.log.issued == 2


def test_answers_out_of_order_are_refused() -> None:
    fleet = Fleet(3, 1)
    fleet.issue()
    fleet.issue()
    for seq in (2, 0):
        with pytest.raises(WireError, match=f"rank 0 answered plan {seq} where 1 was due"):
            fleet.log.acknowledge(0, seq)
    fleet.log.acknowledge(0, 1)
    fleet.log.acknowledge(0, 2)
    with pytest.raises(WireError, match="of 2 issued"):
        fleet.log.acknowledge(0, 3)


@settings(deadline=None, max_examples=50)
@given(st.data())
def test_a_damaged_byte_of_a_record_is_seen(data: st.DataObject) -> None:
    """Whatever byte of stamp or frame changes, the reader refuses the record and stays where it is."""
    fleet = Fleet(2, 1)
    fleet.issue()
    offset = HEADER_BYTES + 1 * SLOT_BYTES
    length = STAMP_BYTES + len(encode(plan(1)))
    index = offset + data.draw(st.integers(0, length - 1))
    old = fleet.memory[index]
    fleet.memory[index] ^= data.draw(st.integers(1, 255))
    with pytest.raises(WireError, match="record 1" if index < offset + STAMP_BYTES else "."):
        fleet.readers[0].take()
    fleet.memory[index] = old
    assert fleet.readers[0].take().seq == 1


def test_two_records_in_each_others_places_are_seen() -> None:
    fleet = Fleet(4, 1)
    fleet.issue()
    fleet.issue()
    one, two = HEADER_BYTES + SLOT_BYTES, HEADER_BYTES + 2 * SLOT_BYTES
    swapped = bytes(fleet.memory[two:][:SLOT_BYTES]), bytes(fleet.memory[one:][:SLOT_BYTES])
    fleet.memory[one : one + SLOT_BYTES], fleet.memory[two : two + SLOT_BYTES] = swapped
    with pytest.raises(WireError, match="slot 1 holds record 2 where record 1 is due"):
        fleet.readers[0].take()
    # With right stamps and wrong frames, the plan's own number tells.
    fleet.memory[one : one + STAMP_BYTES] = (1).to_bytes(8, "little")
    with pytest.raises(WireError, match="slot 1 holds plan 2 under the stamp of 1"):
        fleet.readers[0].take()


def test_a_record_not_written_yet_and_one_written_over_are_seen() -> None:
    fleet = Fleet(2, 1)
    with pytest.raises(WireError, match="slot 1 is being written where record 1 is due"):
        fleet.readers[0].take()
    fleet.issue()
    fleet.issue()
    fleet.log.acknowledge(0, 1)
    fleet.issue()
    with pytest.raises(WireError, match="slot 1 holds record 3 where record 1 is due"):
        fleet.readers[0].take()


def test_a_ring_of_another_shape_is_refused() -> None:
    memory = memoryview(bytearray(ring_bytes(4, SLOT_BYTES)))
    Slots(memory, 4, SLOT_BYTES, create=True)
    with pytest.raises(WireError, match="ring header says"):
        Slots(memory, 4 * 2, SLOT_BYTES // 2, create=False)
    with pytest.raises(WireError, match="does not fit a segment"):
        Slots(memory, 3, SLOT_BYTES, create=False)
    with pytest.raises(AssertionError):
        Slots(memory, 0, SLOT_BYTES, create=True)


def test_progress_never_takes_a_slot_from_a_result() -> None:
    fleet = Fleet(3, 1)
    writer, reader = fleet.report_writers[0], fleet.report_readers[0]
    writer.write(Hello(0, 1))
    for _ in range(10):
        writer.progress_nowait(Progress(0, "load", 1, 2))
    assert writer.written == PROGRESS_SLOTS
    for seq in (1, 2, 3):
        writer.write(Result(0, seq, 0))
    with pytest.raises(AssertionError, match="Result was reported without credit"):
        writer.write(Result(0, 4, 0))
    kinds = [type(reader.take()).__name__ for _ in range(writer.written)]
    assert kinds == ["Hello", *["Progress"] * (PROGRESS_SLOTS - 1), *["Result"] * 3]
    assert writer.credit() == 3 + PROGRESS_SLOTS


def test_recent_plans_are_read_back_with_what_is_wrong_with_them() -> None:
    fleet = Fleet(2, 1)
    for seq in (1, 2, 3):
        fleet.issue()
        fleet.log.acknowledge(0, seq)
    assert [p.seq for p in fleet.log.recent() if isinstance(p, Plan)] == [2, 3]
    fleet.memory[HEADER_BYTES] ^= 1  # the stamp of record 2, in slot 0
    recent = fleet.log.recent()
    assert isinstance(recent[0], str) and "record 2 is due" in recent[0]
    assert isinstance(recent[1], Plan)
