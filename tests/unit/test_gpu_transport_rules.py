"""What of transports is arithmetic: sizes, places in mailboxes, patterns of a trial, windows, rules and their order."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends import ops
from backends.acts import NoCredit, PeerLate, Stamp, StampMismatch
from backends.base import Collective
from backends.gpu.device import StreamDevice
from backends.gpu.errors import DriverError, DriverMissing
from backends.gpu.ops.buffers import NONE, Rows
from backends.gpu.transport import base, nccl_library, probe
from backends.gpu.transport.aperture import OTHERS_BYTES, Apertures, is_narrow, window_bytes
from backends.gpu.transport.base import Act, Part, Room, check_gather, check_message, check_sum, room_of
from backends.gpu.transport.boot import Bounds, Told, against
from backends.gpu.transport.mailboxes import HALVES, MailboxShape
from backends.gpu.transport.meeting import Meeting
from backends.gpu.transport.nccl_trial import Words, open_nccl
from backends.gpu.transport.probe import Said
from backends.gpu.transport.verify import TRIAL_BYTES, Span, pattern, spans

MIB = 1 << 20
CARD = Said("nvidia", "GPU-0", "RTX 3090", "sm_86", 24576 * MIB, 32768 * MIB, True, True, "auto")
PEER = replace(CARD, uuid="GPU-1")


# --------------------------------------------------------------------------------------------------------------- sizes


def test_the_room_of_a_program_is_that_of_its_largest_exchanges() -> None:
    wide, narrow = ops.Buffer("wide", 100), ops.Buffer("narrow", 3)
    gather = ops.GatherRows((ops.GatherPart(wide, ops.Buffer("all", 130), (100, 30)),), "logits", 1)
    two = ops.GatherRows(
        (ops.GatherPart(wide, wide, (17, 1)), ops.GatherPart(narrow, ops.Buffer("other", 20), (0, 20))), "heads"
    )
    listed: list[tuple[ops.Op, int]] = [
        (ops.SumRows(wide, "sum"), 8),
        (gather, 4),
        (two, 2),
        (ops.SendRows((wide, narrow), 1, "rows"), 8),
    ]
    assert room_of(listed, 2) == Room(8, 8 * 112, 8 * 112, 8 * (112 + 16), several=True)
    assert room_of([(gather, 4)], 2) == Room(4, 4 * 112, 4 * 144)
    assert room_of([(two, 2)], 2) == Room(2, 2 * 48, 2 * (32 + 32), several=True)
    merge = ops.MergeAttention(wide, narrow, 4, 24, 0, 2, "attention")
    assert room_of([(merge, 3), (ops.Zero(wide), 99)], 3) == Room(3, 3 * 112, 3 * 304)


def test_every_exchange_of_the_seam_has_room() -> None:
    wide = ops.Buffer("wide", 100)
    made: list[ops.Op] = [
        ops.SumRows(wide, "sum"),
        ops.GatherRows((ops.GatherPart(wide, wide, (50, 50)),), "gather"),
        ops.MergeAttention(wide, wide, 4, 24, 0, 2, "attention"),
        ops.SendRows((wide,), 1, "send"),
        ops.ReceiveRows((wide,), 0, "receive"),
    ]
    assert {type(op) for op in made} == set(ops.EXCHANGES)
    assert all(room_of([(op, 1)], 2) != Room() for op in made)


ROOM = Room(4, 64, 128, 64)
STAMP = Stamp(1, 2, 4, "place")


@pytest.mark.parametrize(
    ("rows", "width", "stamp", "words"),
    [
        (Rows(4096, 16), 17, STAMP, "rows of 17 floats at 0x1000, 16 apart"),
        (NONE, 16, STAMP, "rows of 16 floats at 0x0"),
        (Rows(4096, 32), 16, STAMP, "32 apart and not 16"),
        (Rows(4096, 16), 16, STAMP._replace(rows=5), "a sum of 5 x 16 floats, and the transport was bound for 4 rows"),
        (Rows(4096, 32), 32, STAMP, "a sum of 4 x 32 floats, and the transport was bound for 4 rows and 64 floats"),
        (Rows(4096, 16), -1, STAMP, "4 rows of -1"),
    ],
)
def test_rows_that_cannot_be_meant_are_refused(rows: Rows, width: int, stamp: Stamp, words: str) -> None:
    with pytest.raises(ValueError, match="place: ") as caught:
        check_sum(stamp, rows, width, ROOM)
    assert words in str(caught.value)


def test_no_rows_and_no_width_need_no_memory() -> None:
    check_sum(STAMP._replace(rows=0), NONE, 16, ROOM)
    check_sum(STAMP, NONE, 0, ROOM)
    check_gather(STAMP, [Part(NONE, Rows(4096, 5), (0, 5))], None, 0, 2, ROOM)
    check_gather(STAMP, [Part(Rows(4096, 16), NONE, (5, 5))], 1, 0, 2, ROOM)


def test_gathers_and_messages_that_cannot_be_meant_are_refused() -> None:
    part, act = Part(Rows(4096, 16), Rows(8192, 10), (5, 5)), Act(Rows(4096, 16), 16)
    for parts, target, words in (
        ([], None, "a gather of nothing"),
        ([part, part], None, "2 buffers, and no exchange was to have more than one"),
        ([part], 2, "to rank 2 of 2"),
        ([replace(part, widths=(5,))], None, "widths [5] of 2 ranks"),
        ([replace(part, out=Rows(8192, 9))], None, "rows of 10 floats at 0x2000, 9 apart"),
        ([replace(part, out=Rows(8192, 40))], None, "a gather of 4 x 40 floats"),
    ):
        with pytest.raises(ValueError, match="place: ") as caught:
            check_gather(STAMP, parts, target, 0, 2, ROOM)
        assert words in str(caught.value)
    for buffers, words in (
        ([], "without a buffer"),
        ([act, act], "2 buffers"),
        ([Act(Rows(4096, 32), 32)], "a message"),
    ):
        with pytest.raises(ValueError, match="place: ") as caught:
            check_message(STAMP, buffers, ROOM)
        assert words in str(caught.value)


# ----------------------------------------------------------------------------------------------------------- mailboxes


@given(
    st.integers(1, 5000),
    st.integers(0, 3000),
    st.lists(st.integers(0, 4), min_size=1, max_size=5),
)
def test_places_in_a_mailbox_are_aligned_and_never_overlap(slot: int, message: int, depths: list[int]) -> None:
    shape = MailboxShape(slot, message, tuple(depths))
    places = [(shape.slot_at(half, rank), slot) for half in range(HALVES) for rank in range(len(depths))]
    for source, depth in enumerate(depths):
        if depth:
            found = [shape.message_at(source, count) for count in range(depth + 1)]
            assert found == [shape.message_at(source, count + 7 * (depth + 1)) for count in range(depth + 1)]
            places += [(at, message) for at in found]
    assert all(at % 256 == 0 for at, _ in places)
    ordered = sorted(places)
    ends = [at + size for at, size in ordered]
    assert all(end <= at for end, (at, _) in zip(ends, ordered[1:], strict=False))
    assert max(ends) <= shape.total_bytes
    assert shape.total_bytes % (2 * MIB) == 0, "a handle shows nothing but mailboxes"


def test_a_trial_covers_a_slot_or_both_of_its_ends() -> None:
    assert spans(5000) == (Span(0, 5000),)
    first, last = spans(3 * TRIAL_BYTES)
    assert (first.at, last.at + last.nbytes) == (0, 3 * TRIAL_BYTES)


def test_a_pattern_says_where_it_stands_and_whose_it_is() -> None:
    one = pattern(0, 1, 2, 40000)
    assert len(one) == 40000
    assert len(pattern(0, 1, 2, 7)) == 7
    for other in (pattern(1, 1, 2, 40000), pattern(0, 2, 1, 40000), pattern(0, 1, 3, 40000), np.roll(one, 4)):
        assert (one != other).mean() > 0.9
    assert (one.view(np.uint32) == 0).sum() < 2, "it does not look like memory that nobody wrote to"


# ------------------------------------------------------------------------------------------------------------- windows


def test_a_window_is_read_from_the_bus(tmp_path: Path) -> None:
    folder = tmp_path / "0000:0a:00.0"
    folder.mkdir()
    lines = ["0x00000000f6000000 0x00000000f6ffffff 0x0000000000040200"]
    lines += ["0x0000007800000000 0x0000007fffffffff 0x000000000014220c", "0x0 0x0 0x0"]
    (folder / "resource").write_text("\n".join(lines))
    assert window_bytes("0000:0A:00.0", "nvidia", tmp_path) == 32 << 30
    assert window_bytes("0000:0a:00.0", "amd", tmp_path) == 16 << 20
    assert window_bytes("0000:0b:00.0", "nvidia", tmp_path) is None
    (folder / "resource").write_text("nonsense\n" * 3)
    assert window_bytes("0000:0a:00.0", "nvidia", tmp_path) is None
    (folder / "resource").write_text("0x0 0x0 0x0\n" * 3)
    assert window_bytes("0000:0a:00.0", "nvidia", tmp_path) is None


def test_only_a_known_window_is_narrow() -> None:
    assert is_narrow(256 * MIB, 24576 * MIB)
    assert not is_narrow(32768 * MIB, 24576 * MIB)
    assert not is_narrow(None, 24576 * MIB)


def test_what_is_mapped_is_added_up_and_refused_with_the_arithmetic() -> None:
    ledger = Apertures(216 * MIB + OTHERS_BYTES, 24576 * MIB)
    for group in (96, 48, 32, 24):
        ledger.add(group * MIB)
    assert ledger.mapped_bytes == 200 * MIB
    refused = ledger.refusal(96 * MIB)
    assert "96 + 48 + 32 + 24 + 96 = 296 MiB of peer window against 216 MiB usable: 80 MiB too much" in refused
    with pytest.raises(ValueError, match="80 MiB too much"):
        ledger.add(96 * MIB)
    assert ledger.mapped_bytes == 200 * MIB, "nothing was mapped"
    ledger.remove(96 * MIB)
    ledger.add(96 * MIB)
    assert Apertures(None, 1024 * MIB).refusal(1024 * MIB) != ""


# --------------------------------------------------------------------------------------------------------------- rules


@pytest.mark.parametrize(
    ("fleet", "ranks", "why"),
    [
        ((), 1, "a rank alone exchanges nothing"),
        ((), 2, "it is not known what the other ranks run on"),
        (("cuda",), 2, "it is not known what the other ranks run on"),
        (("cuda", "rocm"), 2, "ranks on cuda, rocm have only the host in common"),
        (("cuda", "cuda", "cpu"), 3, "ranks on cuda, cuda, cpu have only the host in common"),
        (("cpu", "cpu"), 2, "ranks on cpu, cpu have only the host in common"),
        (("cuda", "cuda"), 2, ""),
        (("rocm", "rocm", "rocm"), 3, ""),
    ],
)
def test_what_needs_no_asking(fleet: tuple[str, ...], ranks: int, why: str) -> None:
    assert probe.without_asking(fleet, ranks) == why


def test_the_fleet_is_named_as_text() -> None:
    assert probe.fleet_of("cuda,rocm,cpu") == ("cuda", "rocm", "cpu")
    assert probe.fleet_of("") == ()


def test_one_card_for_two_ranks_is_seen() -> None:
    assert probe.one_card([CARD, PEER]) == ""
    assert probe.one_card([CARD, PEER, CARD]) == "ranks 0 and 2 share one card, RTX 3090 (GPU-0)"


@pytest.mark.parametrize(
    ("peer", "why"),
    [
        (PEER, ""),
        (replace(PEER, window=None), ""),
        (replace(PEER, ipc=False), "rank 1's driver has no memory handles for other processes"),
        (
            replace(PEER, arch="sm_120", name="RTX 5090"),
            "RTX 5090 is of another generation than RTX 3090 (sm_120 and sm_86)",
        ),
        (
            replace(PEER, window=256 * MIB),
            "the window of RTX 3090 on rank 1 (256 MiB) is smaller than its memory (24576 MiB)",
        ),
    ],
)
def test_why_copies_between_cards_are_not_tried(peer: Said, why: str) -> None:
    found = probe.not_peer([CARD, peer])
    assert found.startswith(why) if why else not found


def test_the_library_needs_the_stream() -> None:
    assert probe.not_nccl([CARD, PEER]) == ""
    assert "stream" in probe.not_nccl([CARD, replace(PEER, stream=False)])


def test_a_choice_that_does_not_exist_is_refused() -> None:
    assert [probe.asked_for({}), probe.asked_for({probe.VARIABLE: ""})] == ["auto", "auto"]
    assert probe.asked_for({probe.VARIABLE: "peer"}) == "peer"
    with pytest.raises(probe.TransportRefused, match="HOMESERVE_TRANSPORT=wires") as caught:
        probe.asked_for({probe.VARIABLE: "wires"})
    assert "auto, host, peer, nccl" in caught.value.fix


def test_the_first_reason_against_something_names_its_rank() -> None:
    assert against(["", "", "no room", "no time"]) == "rank 2: no room"
    assert against(["", ""]) == ""


# ----------------------------------------------------------------------------------------------------------- variables


def test_variables_of_the_library_are_set_where_the_user_has_not(caplog: pytest.LogCaptureFixture) -> None:
    environ = {"NCCL_CUMEM_ENABLE": "1"}
    with caplog.at_level(logging.INFO):
        assert nccl_library.set_defaults(environ) == {"NCCL_NVLS_ENABLE": "0", "NCCL_CUMEM_ENABLE": "1"}
    assert environ == {"NCCL_NVLS_ENABLE": "0", "NCCL_CUMEM_ENABLE": "1"}
    assert "NCCL_NVLS_ENABLE=0, NCCL_CUMEM_ENABLE=1" in caplog.text


def test_a_library_that_is_too_old_does_not_hide_a_newer_one(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"old.so": DriverError("too old", fix="a newer one"), "gone.so": DriverMissing("not there", fix="install")}

    def library(vendor: str, path: str) -> str:
        if path in found:
            raise found[path]
        return path

    monkeypatch.setattr(nccl_library, "Library", library)
    monkeypatch.setattr(nccl_library, "_candidates", lambda vendor: ("gone.so", "old.so", "new.so"))
    assert str(nccl_library.find("nvidia")) == "new.so"
    monkeypatch.setattr(nccl_library, "_candidates", lambda vendor: ("gone.so", "old.so"))
    with pytest.raises(DriverError, match="too old"):
        nccl_library.find("nvidia")
    monkeypatch.setattr(nccl_library, "_candidates", lambda vendor: ("gone.so",))
    with pytest.raises(DriverMissing, match="looked for gone.so"):
        nccl_library.find("nvidia")


def test_the_card_is_that_of_the_thread_when_a_communicator_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library takes whichever card the calling thread has."""
    done: list[str] = []

    class Alone(Told):
        def tell(self, what: str, **record: object) -> list[dict[str, object]]:
            return [record]

    def communicator(*arguments: object) -> None:
        done.append("communicator")
        raise nccl_library.NcclError("no communicator", fix="")

    device = SimpleNamespace(facts=SimpleNamespace(vendor="nvidia"), wait=lambda: done.append("its own card"))
    library = SimpleNamespace(unique_id=lambda: b"id", communicator=communicator)
    monkeypatch.setattr(nccl_library, "find", lambda vendor: library)
    acts = cast(Collective, SimpleNamespace(rank=0, ranks=1))
    found = open_nccl(cast(StreamDevice, device), acts, Alone(acts), ROOM, {}, Words(""), Bounds())
    assert found == "rank 0: no communicator" and done == ["its own card", "communicator"]


def test_versions_are_told_as_people_write_them() -> None:
    assert nccl_library.told(22304) == "2.23.4"
    assert base.padded(17) == 32


# ------------------------------------------------------------------------------------------------------------ meetings


class Wire:
    """A collective of two ranks whose peer says what it is told to: widths of a gather or of a message."""

    rank, ranks = 0, 2

    def __init__(self, peer: int, room: int = 1, late: bool = False) -> None:
        self.peer, self.room, self.late = np.int32(peer).view(np.float32), room, late
        self.asked = 0

    def gather(self, stamp: Stamp, part: np.ndarray, out: np.ndarray, widths: list[int]) -> None:
        self._ask(stamp)
        out[:, 0], out[:, 1] = part[:, 0], self.peer

    def send(self, stamp: Stamp, target: int, rows: np.ndarray) -> None:
        self._ask(stamp)
        if not self.room:
            raise NoCredit("full", stamp.label, target)

    def receive(self, stamp: Stamp, source: int, out: np.ndarray) -> None:
        self._ask(stamp)
        out[:] = self.peer

    def credit(self, target: int) -> int:
        return self.room

    def _ask(self, stamp: Stamp) -> None:
        self.asked += 1
        if self.late:
            raise PeerLate("late", stamp.label, 1)


def meeting(wire: Wire) -> Meeting:
    acts: Collective = wire  # type: ignore[assignment]
    return Meeting(acts, 8)


def test_ranks_at_one_width_meet() -> None:
    met = meeting(Wire(peer=20))
    met.all(STAMP, [16, 20])
    met.receive(STAMP, 1, 20)
    met.all(STAMP._replace(rows=0), [16, 21])


@pytest.mark.parametrize("how", ["all", "receive"])
def test_a_peer_at_another_width_is_told_and_ends_all_exchanges(how: str) -> None:
    wire = Wire(peer=21)
    met = meeting(wire)
    with pytest.raises(StampMismatch) as caught:
        met.all(STAMP, [16, 20]) if how == "all" else met.receive(STAMP, 1, 20)
    assert "4 x 21" in str(caught.value) and "4 x 20" in str(caught.value)
    asked = wire.asked
    for again in (met.check, lambda: met.all(STAMP, [16, 21]), lambda: met.send(STAMP, 1, 3)):
        with pytest.raises(StampMismatch, match="4 x 21"):
            again()
    assert wire.asked == asked, "nothing more is exchanged"


def test_a_late_peer_ends_all_exchanges_and_a_full_channel_does_not() -> None:
    met = meeting(Wire(peer=20, room=0))
    for call in (lambda: met.check_credit(STAMP, 1), lambda: met.send(STAMP, 1, 20)):
        with pytest.raises(NoCredit):
            call()
    met.check()
    met = meeting(Wire(peer=20, late=True))
    for _ in range(2):
        with pytest.raises(PeerLate):
            met.all(STAMP, [16, 20])


def test_a_record_that_is_too_long_is_refused_before_it_is_told() -> None:
    wire = Wire(peer=0)
    acts: Collective = wire  # type: ignore[assignment]
    with pytest.raises(ValueError, match="a record of"):
        Told(acts).tell("sizes", text="x" * 5000)
    assert wire.asked == 0
