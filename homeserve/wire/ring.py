"""The plan log and the report ring: fixed slots in shared memory, one writer each, no locks and no waiting.

    plan log: the engine writes, every rank reads the same bytes in the same order

              0          64                64 + slot_bytes
              ┌──────────┬─────────────────┬─────────────────┬───┬─────────────────┐
              │ header   │ slot 0          │ slot 1          │ … │ slot n-1        │
              └──────────┴─────────────────┴─────────────────┴───┴─────────────────┘
    header    u64 magic │ u64 slots │ u64 slot_bytes │ u64 published │ u64 consumed │ zeros
    slot      u64 stamp │ frame (homeserve.wire.codec) │ whatever an older record left

    report ring: the same bytes; rank r writes, the engine reads. `consumed` is the reader's, all else the writer's.

Record number k (the plan's `seq`; reports are counted as well) lies in slot k mod n and nowhere else. To write: stamp
0, copy the frame, stamp k, publish k, ring the doorbell. To read k: the stamp must be k before and after the frame is
copied out, the checksum must fit, and a plan's own `seq` must be k. So a torn record, a slot written too early, and two
records in each other's places are all seen by the reader, and none is ever believed.

**When a slot may be written again.** Record k lands where k-n lay, so every reader must be done with k-n. Each rank
answers every plan, also one that does not name it, and the engine counts answers:

    credit = n - (issued - min over ranks of answered)

A write takes one credit and never waits for one: without it the engine does not issue, and a write that comes anyway is
a bug and raises. n is exactly the most plans that may be in flight. In a report ring the same argument runs the other
way: a rank owes at most one result per plan in flight, and the engine frees that plan's credit only after it has read
the result; n results always fit, and a few slots more are there for load progress, which is dropped, not delayed, when
they are full.

**Why a number in memory is never waited for.** `published` serves those who look at a stuck fleet from outside. Readers
learn of a record by its byte in the doorbell (homeserve.wire.doorbell). `consumed` is read by the one who writes, to
decide whether progress fits; if it reads an older value it drops one progress record. Words are written whole (native
u64 stores of an aligned address), never byte by byte.
"""

from __future__ import annotations

from homeserve.errors import RecordTooLarge, WireError
from homeserve.wire.codec import HEADER_BYTES as FRAME_HEADER_BYTES
from homeserve.wire.codec import decode, encode, frame_bytes
from homeserve.wire.records import Plan, Progress, Report

HEADER_BYTES = 64
STAMP_BYTES = 8
PROGRESS_SLOTS = 4
"""Slots of a report ring beyond one per plan in flight: for Hello and load progress."""

_MAGIC = int.from_bytes(b"HSring01", "little")
_WORD_PUBLISHED, _WORD_CONSUMED = 3, 4


def ring_bytes(slots: int, slot_bytes: int) -> int:
    """Shared memory that a ring of this shape takes. `slot_bytes` is a multiple of 8."""
    return HEADER_BYTES + slots * slot_bytes


def slot_bytes_for(record_bytes: int) -> int:
    """Size of a slot for records whose msgpack form takes at most `record_bytes`."""
    return -(-(record_bytes + STAMP_BYTES + FRAME_HEADER_BYTES) // 64) * 64


class Slots:
    """Numbered records in fixed slots: the bytes of either ring, without any notion of who may write when."""

    def __init__(self, view: memoryview, slots: int, slot_bytes: int, *, create: bool) -> None:
        if slots < 1 or slot_bytes % 8 or slot_bytes <= STAMP_BYTES + FRAME_HEADER_BYTES:
            raise AssertionError(f"a ring of {slots} slots of {slot_bytes} bytes makes no sense")
        if len(view) != ring_bytes(slots, slot_bytes):
            raise WireError(f"ring of {slots} x {slot_bytes} bytes does not fit a segment of {len(view)} bytes")
        self.count = slots
        self.slot_bytes = slot_bytes
        self._bytes = view[:]
        self._words = view.cast("Q")
        shape = (_MAGIC, slots, slot_bytes)
        if create:
            for word, value in enumerate(shape):
                self._words[word] = value
        elif tuple(self._words[:_WORD_PUBLISHED]) != shape:
            raise WireError(f"ring header says {tuple(self._words[:_WORD_PUBLISHED])}, expected {shape}")

    @property
    def room_bytes(self) -> int:
        """Largest frame that fits a slot."""
        return self.slot_bytes - STAMP_BYTES

    @property
    def published(self) -> int:
        return self._words[_WORD_PUBLISHED]

    @property
    def consumed(self) -> int:
        return self._words[_WORD_CONSUMED]

    @consumed.setter
    def consumed(self, number: int) -> None:
        self._words[_WORD_CONSUMED] = number

    def put(self, number: int, frame: bytes) -> None:
        """Write record `number` over whatever lies in its slot."""
        offset = self._offset(number)
        stamp = offset // 8
        self._words[stamp] = 0
        self._bytes[offset + STAMP_BYTES : offset + STAMP_BYTES + len(frame)] = frame
        self._words[stamp] = number
        self._words[_WORD_PUBLISHED] = number

    def get(self, number: int) -> bytes:
        """The frame of record `number`, copied out. Raises WireError if the slot does not hold exactly that record."""
        offset = self._offset(number)
        self._check_stamp(number, offset)
        slot = self._bytes[offset + STAMP_BYTES : offset + self.slot_bytes]
        try:
            frame = bytes(slot[: frame_bytes(slot)])
        except WireError as error:
            raise WireError(f"slot {number % self.count}, record {number}: {error.message}") from error
        finally:
            slot.release()
        self._check_stamp(number, offset)
        return frame

    def release(self) -> None:
        """Let go of the memory, so that the segment can be unmapped. The ring is unusable afterwards."""
        self._words.release()
        self._bytes.release()

    def _offset(self, number: int) -> int:
        return HEADER_BYTES + (number % self.count) * self.slot_bytes

    def _check_stamp(self, number: int, offset: int) -> None:
        found = self._words[offset // 8]
        if found != number:
            state = "is being written" if found == 0 else f"holds record {found}"
            raise WireError(f"slot {number % self.count} {state} where record {number} is due")


class PlanLogWriter:
    """The engine's end of the plan log. `write` and `acknowledge` never block."""

    def __init__(self, slots: Slots, ranks: int) -> None:
        self._slots = slots
        self._acked = [0] * ranks
        self.issued = 0

    def credit(self) -> int:
        """Plans that may be written now."""
        return self._slots.count - (self.issued - min(self._acked))

    def acked(self, rank: int) -> int:
        return self._acked[rank]

    def write(self, plan: Plan) -> None:
        """Append the plan, whose `seq` is the next one. Raises RecordTooLarge, before anything is written, if it does
        not fit; AssertionError without credit."""
        if self.credit() < 1:
            raise AssertionError(f"plan {plan.seq} was issued without credit: a rank has not read its slot yet")
        if plan.seq != self.issued + 1:
            raise AssertionError(f"plan {plan.seq} was issued after {self.issued}")
        frame = encode(plan)
        _check_room(f"plan {plan.seq}", frame, self._slots)
        self._slots.put(plan.seq, frame)
        self.issued = plan.seq

    def acknowledge(self, rank: int, seq: int) -> None:
        """Rank `rank` answered plan `seq`. Raises WireError unless that is the next one that it owes."""
        due = self._acked[rank] + 1
        if seq != due or seq > self.issued:
            raise WireError(f"rank {rank} answered plan {seq} where {due} was due, of {self.issued} issued")
        self._acked[rank] = seq

    def recent(self) -> list[Plan | str]:
        """The last plans as they lie in shared memory, oldest first; for one that cannot be read, why."""
        found: list[Plan | str] = []
        for seq in range(max(1, self.issued - self._slots.count + 1), self.issued + 1):
            try:
                found.append(_plan(self._slots, seq))
            except WireError as error:
                found.append(error.message)
        return found


class PlanLogReader:
    """A rank's end of the plan log, with its own place in it."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self.taken = 0

    def take(self) -> Plan:
        """The next plan. To be called once per record that the doorbell announced. Raises WireError on a record that is
        torn, out of order or damaged; the place does not move then."""
        plan = _plan(self._slots, self.taken + 1)
        self.taken += 1
        return plan


class ReportWriter:
    """A rank's end of its report ring. `reserve` slots are kept for results."""

    def __init__(self, slots: Slots, reserve: int) -> None:
        self._slots = slots
        self._reserve = reserve
        self.written = 0

    def credit(self) -> int:
        return self._slots.count - (self.written - self._slots.consumed)

    def write(self, report: Report) -> None:
        """Append a report. Raises RecordTooLarge if it does not fit; AssertionError without credit."""
        if self.credit() < 1:
            raise AssertionError(f"{type(report).__name__} was reported without credit: the ring is full")
        frame = encode(report)
        _check_room(type(report).__name__, frame, self._slots)
        self.write_frame(frame)

    def write_frame(self, frame: bytes) -> None:
        """Append bytes that are taken for a frame; for `write`, and for tests that damage one."""
        self._slots.put(self.written + 1, frame)
        self.written += 1

    def progress_nowait(self, progress: Progress) -> bool:
        """Append load progress if it takes no slot from a result; False if it was dropped."""
        if self.credit() <= self._reserve:
            return False
        self.write(progress)
        return True


class ReportReader:
    """The engine's end of one rank's report ring."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self.taken = 0

    @property
    def published(self) -> int:
        return self._slots.published

    def take(self) -> Report:
        """The next report. To be called once per record that the doorbell announced. Raises WireError on damage."""
        report: Report = decode(self._slots.get(self.taken + 1), Report)
        self.taken += 1
        self._slots.consumed = self.taken
        return report


def _plan(slots: Slots, seq: int) -> Plan:
    plan: Plan = decode(slots.get(seq), Plan)
    if plan.seq != seq:
        raise WireError(f"slot {seq % slots.count} holds plan {plan.seq} under the stamp of {seq}")
    return plan


def _check_room(what: str, frame: bytes, slots: Slots) -> None:
    if len(frame) > slots.room_bytes:
        raise RecordTooLarge(what, len(frame), slots.room_bytes)
