"""A rank's part in a flip: rows arrive, a prepare leaves no trace, a commit is for what was prepared and compared."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest
from flip_rig import PAGES, SLOTS, Rig, hybrid
from hypothesis import given, settings
from hypothesis import strategies as st

from homeserve.layouts.share import PIPELINE, TENSOR
from homeserve.wire.faults import COMMIT_STEPS, PREPARE_STEPS
from homeserve.wire.records import FlipDigest, FlipLive, FlipOrder
from homeserve.worker.faults import FaultRefused
from homeserve.worker.flip import FlipBroken, FlipRefused
from homeserve.worker.transit import Transit

LIVE = ({0, 1, 2, 3, 7, 22}, {0, 5, 8})
HELD = {0, 3}


lives = st.tuples(*(st.sets(st.integers(0, most)) for most in (PAGES - 1, 8, SLOTS - 1)))


@settings(max_examples=8, deadline=None)
@given(st.lists(lives, min_size=1, max_size=3))
def test_every_row_arrives_however_often_the_layout_changes(flips: list[tuple[set[int], set[int], set[int]]]) -> None:
    with Rig() as rig:
        for first, second, slots in flips:
            rig.fill((first, second), slots)
            answers = rig.flip(rig.order((first, second), slots))
            assert rig.wrong((first, second), slots) == []
            layers = [sum(home.group == group for home in rig.geometry.kv) for group in range(2)]
            assert sum(answer.rows for answer in answers) == 16 * (len(first) * layers[0] + len(second) * layers[1])
            assert sum(answer.sent_bytes for answer in answers) == sum(answer.received_bytes for answer in answers)
        assert rig.rebound == [len(flips)] * 3


def test_e14_e22_all_reads_come_first_and_the_source_is_given_back_before_the_target_is_mapped() -> None:
    with Rig() as rig:
        rig.fill(LIVE, HELD)
        rig.flip(rig.order(LIVE, HELD))
        for layouts in rig.layouts:
            done = layouts.done
            first, last = done.index("release"), len(done) - done[::-1].index("write") - 1
            assert set(done[:first]) == {"pack"} and done[first + 1] == "map"
            assert "pack" not in done[first:last] and done[last + 1 : last + 3] == ["refill", "activate"]
            assert set(done[last + 3 :]) == {"pack"}, "read back at the end"


def test_e16_an_empty_live_set_is_an_ordinary_flip() -> None:
    with Rig() as rig:
        for to in (TENSOR, PIPELINE, TENSOR):
            answers = rig.flip(rig.order())
            assert rig.layout == to
            assert all(answer.sent_bytes == answer.rows == answer.states == 0 for answer in answers)
            assert all(answer.refill_bytes == 100 and answer.digest == 77 for answer in answers)
        assert rig.epoch == 6 and all("write" not in layouts.done for layouts in rig.layouts)


def test_b9_in_unified_memory_nothing_is_packed_and_rows_are_counted() -> None:
    with Rig(replace(hybrid(), unified=True)) as rig:
        for rank in rig.ranks:
            rank._transit = None
        answers = rig.flip(rig.order(LIVE, HELD))
        assert all(layouts.done == ["release", "map", "refill", "activate"] for layouts in rig.layouts)
        assert all(answer.sent_bytes == answer.received_bytes == answer.local_bytes == 0 for answer in answers)
        assert sum(answer.rows for answer in answers) == 16 * (6 * 3 + 3)


def test_parts_of_a_flip_are_timed() -> None:
    with Rig() as rig:
        order = rig.order(LIVE, HELD)
        packed = rig.pack(order)
        verify = rig.verify_order(order, packed)
        verified = [rank.prepare(verify, 0) for rank in rig.ranks]
        done = rig.commit(0, order)
        assert [part for part, _ in packed[0].us] == ["check", "pack"]
        assert [part for part, _ in verified[0].us] == ["exchange", "digest"]
        wanted = ["release", "map", "write_kv", "write_state", "refill", "verify", "rebind"]
        assert [part for part, _ in done.us] == wanted and all(us >= 0 for _, us in done.us)


# ---------------------------------------------------------------------------------------------------- what is refused


def refused(rig: Rig, rank: int, order: FlipOrder, says: str) -> None:
    """A no that leaves no trace: bytes of all pools are what they were, and the next flip goes through."""
    before = rig.bytes_now()
    with pytest.raises(FlipRefused, match=says):
        rig.ranks[rank].prepare(order, rig.epoch)
    assert rig.bytes_now() == before
    for each in rig.ranks:
        each.abandon(order)
        assert not each.blocked


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"to": "diagonal"}, "there is no layout 'diagonal'"),
        ({"to": PIPELINE}, "the layout is pipeline already"),
        ({"epoch": 5}, "epoch 5 is not behind 5"),
        ({"live": None}, "nothing says what is live"),
        ({"live": FlipLive((b"",))}, "1 maps of pages for 2 KV groups"),
        ({"live": FlipLive((b"\0\0\x80", b""))}, "page 23 of KV group 0 is live, there are 23"),
        ({"live": FlipLive((b"", b""), b"\x10")}, "state slot 4 is live, there are 4"),
        ({"stage": "nap"}, "there is no stage 'nap' of a prepare"),
        ({"stage": "verify"}, "flip 1 is not prepared here"),
    ],
)
def test_an_order_that_cannot_be_followed_is_refused(change: dict[str, object], says: str) -> None:
    with Rig(epoch=5) as rig:
        rig.fill(LIVE, HELD)
        refused(rig, 1, msgspec.structs.replace(rig.order(LIVE, HELD), **change), says)
        rig.flip(rig.order(LIVE, HELD))
        assert rig.wrong(LIVE, HELD) == []


def test_an_image_that_is_still_on_its_way_is_a_no() -> None:
    with Rig() as rig:
        rig.layouts[2].why_not = "promotion: 10 of 100 bytes"
        refused(rig, 2, rig.order(LIVE), "promotion: 10 of 100 bytes")


def test_more_than_the_transit_memory_is_a_no_with_both_numbers() -> None:
    with Rig(transit_bytes=64) as rig:
        refused(rig, 0, rig.order(LIVE, HELD), r"[0-9]+ bytes are to move, the transit memory has 64")


def test_no_room_in_the_transit_memory_is_a_no_before_anything_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with Rig() as rig:
        with monkeypatch.context() as patched:
            patched.setattr("os.posix_fallocate", full)
            refused(rig, 0, rig.order(LIVE, HELD), "no room for [0-9]+ bytes in the transit memory: No space left")
        assert rig.layouts[0].done == []


@pytest.mark.parametrize(("layout", "rank"), [(PIPELINE, 0), (TENSOR, 1)])
def test_e4_layouts_that_do_not_agree_on_bytes_are_a_no(layout: str, rank: int) -> None:
    with Rig() as rig:
        rig.layouts[rank].short[layout] = 3
        refused(rig, rank, rig.order(LIVE, HELD), f"bytes by the plan, [0-9]+ in the {layout} layout here")


def test_a_second_prepare_is_refused_and_the_first_one_stands() -> None:
    with Rig() as rig:
        rig.fill(LIVE, HELD)
        first = rig.order(LIVE, HELD)
        packed = rig.pack(first)
        with pytest.raises(FlipRefused, match="flip 1 is prepared, and was neither committed nor abandoned"):
            rig.ranks[0].prepare(rig.order(), 0)
        verify = rig.verify_order(first, packed)
        for each in rig.ranks:
            each.prepare(verify, 0)
        for rank in range(3):
            rig.commit(rank, first)
        assert rig.wrong(LIVE, HELD) == []


def test_rows_are_held_back_between_a_prepare_and_its_end() -> None:
    with Rig() as rig:
        order = rig.order(LIVE)
        rig.pack(order)
        assert [rank.blocked for rank in rig.ranks] == ["flip 1 is prepared"] * 3
        for rank in rig.ranks:
            rank.abandon(order)
        assert [rank.blocked for rank in rig.ranks] == [""] * 3


def test_h5_epochs_only_grow_over_abandoned_and_committed_flips() -> None:
    with Rig() as rig:
        given_up, done = rig.order(), rig.order()
        rig.pack(given_up)
        for rank in rig.ranks:
            rank.abandon(given_up)
        refused(rig, 0, msgspec.structs.replace(given_up, flip=8), "epoch 1 is not behind 1")
        rig.flip(done)
        late = msgspec.structs.replace(given_up, flip=9, to=PIPELINE)
        refused(rig, 0, late, "epoch 1 is not behind 2")
        refused(rig, 0, msgspec.structs.replace(late, epoch=2), "epoch 2 is not behind 2")
        with pytest.raises(FlipRefused, match="epoch 2 is not behind 2"):  # also where the plan's own epoch is stale
            rig.ranks[0].prepare(msgspec.structs.replace(late, epoch=2), 0)


def test_a_commit_is_for_the_flip_that_was_prepared_and_compared() -> None:
    with Rig() as rig:
        rig.fill(LIVE, HELD)
        order = rig.order(LIVE, HELD)
        before = rig.bytes_now()
        with pytest.raises(FlipRefused, match="flip 1 is not prepared here"):
            rig.commit(0, order)
        packed = rig.pack(order)
        with pytest.raises(FlipRefused, match="its payloads were not compared"):
            rig.commit(0, order)
        rig.ranks[0].prepare(rig.verify_order(order, packed), 0)
        for change in ({"flip": 2}, {"epoch": 9}, {"to": PIPELINE}):
            with pytest.raises(FlipRefused, match="is not the one that is prepared: 1 to tensor under 1"):
                rig.commit(0, msgspec.structs.replace(order, **change))
        with pytest.raises(FlipRefused, match="flip 7 is to be abandoned, and flip 1 is prepared"):
            rig.ranks[0].abandon(FlipOrder(7, 7, TENSOR))
        assert rig.bytes_now() == before and rig.layout == PIPELINE
        rig.ranks[0].abandon(order)
        with pytest.raises(FlipRefused, match="flip 1 is not prepared here"):
            rig.commit(0, order)
        rig.ranks[0].abandon(order)  # again, and where nothing is


# ------------------------------------------------------------------------------------------------ damage on the way


def test_d11_two_rows_that_changed_places_are_seen() -> None:
    with Rig() as rig:
        rig.fill(LIVE, HELD)
        order = rig.order(LIVE, HELD)
        packed = rig.pack(order)
        (digest,) = (each for each in packed[0].digests if each.target == 0)
        page = rig.geometry.kv[0].page_bytes
        with rig.transits[0].view(0, digest.nbytes) as view:
            view[:page], view[page : 2 * page] = bytes(view[page : 2 * page]), bytes(view[:page])
        with pytest.raises(FlipRefused, match=f"packed for rank 0 has the digest .* says {digest.digest:016x}"):
            rig.ranks[0].prepare(rig.verify_order(order, packed), 0)
        assert not rig.ranks[0].blocked and rig.ranks[1].blocked


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda each: None, "from rank 0 to rank 1 was not packed; [0-9]+ bytes are due"),
        (lambda each: replace_digest(each, nbytes=each.nbytes - 1), "is cut: [0-9]+ bytes were packed, [0-9]+ are due"),
        (lambda each: replace_digest(each, digest=each.digest ^ 1), "has the digest [0-9a-f]{16}, where rank 0 says"),
    ],
)
def test_d10_a_payload_that_is_missing_one_that_is_cut_and_a_damaged_one_are_told_apart(
    change: Callable[[FlipDigest], FlipDigest | None], says: str
) -> None:
    with Rig() as rig:
        rig.fill(LIVE, HELD)
        order = rig.order(LIVE, HELD)
        verify = rig.verify_order(order, rig.pack(order))
        changed = [change(each) if (each.source, each.target) == (0, 1) else each for each in verify.digests]
        refused(rig, 1, msgspec.structs.replace(verify, digests=tuple(each for each in changed if each)), says)


def replace_digest(each: FlipDigest, **changes: int) -> FlipDigest:
    return msgspec.structs.replace(each, **changes)


@pytest.mark.parametrize("rank", range(3))
@pytest.mark.parametrize("action", ["refuse", "enospc"])
@pytest.mark.parametrize("step", PREPARE_STEPS)
def test_e18_a_step_of_a_prepare_that_fails_leaves_both_pools_untouched(step: str, action: str, rank: int) -> None:
    with Rig(faults={rank: f"rank={rank},step={step},action={action}"}) as rig:
        rig.fill(LIVE, HELD)
        before = rig.bytes_now()
        order = rig.order(LIVE, HELD)
        with pytest.raises((FaultRefused, OSError)) as told:
            rig.flip(order)
        assert told.value.__notes__ == [f"step {step}"]
        assert rig.bytes_now() == before and rig.layout == PIPELINE
        assert not rig.ranks[rank].blocked
        for each in rig.ranks:
            each.abandon(order)
        rig.flip(rig.order(LIVE, HELD))
        assert rig.wrong(LIVE, HELD) == []


@pytest.mark.parametrize("step", ["prepare.pack", "prepare.exchange", "prepare.digest"])
def test_a_byte_that_turned_before_the_commit_is_a_no(step: str) -> None:
    with Rig(faults={0: f"rank=0,step={step},action=corrupt"}) as rig:
        rig.fill(LIVE, HELD)
        order = rig.order(LIVE, HELD)
        with pytest.raises(FlipRefused, match="has the digest"):
            rig.flip(order)
        for each in rig.ranks:
            each.abandon(order)
        rig.flip(rig.order(LIVE, HELD))
        assert rig.wrong(LIVE, HELD) == []


@pytest.mark.parametrize("step", ["commit.write_kv", "commit.write_state"])
def test_a_byte_that_turned_in_the_commit_is_found_when_it_is_read_back(step: str) -> None:
    with Rig(faults={0: f"rank=0,step={step},action=corrupt"}) as rig:
        rig.fill(LIVE, HELD)
        with pytest.raises(FlipBroken, match="read back from the tensor layout"):
            rig.flip(rig.order(LIVE, HELD))
        assert rig.ranks[0].blocked == "flip 1 was begun and did not end" and rig.rebound == [0, 0, 0]


def test_d13_weights_that_are_not_what_they_were_cost_the_rank_its_work() -> None:
    """That they are filled in once more before is the layouts' own business."""
    with Rig(faults={1: "rank=1,step=commit.refill,action=corrupt"}) as rig:
        answers = rig.flip(rig.order(LIVE, HELD))
        assert [(answer.refill_tries, answer.digest) for answer in answers] == [(1, 77), (2, 77), (1, 77)]
        assert not any(point.corrupts for point in rig.points)
        rig.layouts[1].wrong = "refill"
        with pytest.raises(MemoryError, match="refill failed"):
            rig.flip(rig.order(LIVE, HELD))
        assert rig.ranks[1].blocked == "flip 2 was begun and did not end" and rig.rebound == [2, 1, 1]
        assert rig.layouts[1].active == TENSOR, "what was not filled in is not made active"


@pytest.mark.parametrize("step", COMMIT_STEPS)
def test_a_commit_that_fails_ends_this_ranks_work(step: str) -> None:
    with Rig(faults={1: f"rank=1,step={step},action=refuse"}) as rig:
        order = rig.order(LIVE, HELD)
        with pytest.raises(FaultRefused, match=step) as told:
            rig.flip(order)
        assert told.value.__notes__ == [f"step {step}"]
        with pytest.raises(FlipRefused, match="flip 1 was begun and did not end"):
            rig.ranks[1].prepare(order, 0)
        with pytest.raises(FlipRefused, match="flip 1 was begun and did not end"):
            rig.commit(1, order)
        assert rig.rebound[1] == 0


def test_no_memory_for_the_target_is_told_with_the_arithmetic() -> None:
    with Rig() as rig:
        rig.layouts[0].wrong = "map"
        with pytest.raises(MemoryError, match="map failed"):
            rig.flip(rig.order(LIVE))
        assert rig.ranks[0].blocked


MAKES_NOTHING = [step for step in COMMIT_STEPS if "write" not in step and "refill" not in step]


@pytest.mark.parametrize("step", ["prepare.check", *MAKES_NOTHING])
def test_a_step_that_makes_nothing_has_its_answer_damaged(step: str) -> None:
    with Rig(faults={2: f"rank=2,step={step},action=corrupt"}) as rig:
        rig.flip(rig.order(LIVE, HELD))
        assert [point.corrupts for point in rig.points] == [False, False, True]


@pytest.mark.parametrize("step", [*PREPARE_STEPS[1:], "commit.write_kv", "commit.write_state"])
def test_where_nothing_is_live_the_answer_is_damaged_in_its_place(step: str) -> None:
    with Rig(faults={2: f"rank=2,step={step},action=corrupt"}) as rig:
        rig.flip(rig.order())
        assert [point.corrupts for point in rig.points] == [False, False, True]


def test_where_no_arena_is_filled_the_answer_is_damaged_in_its_place() -> None:
    with Rig(faults={2: "rank=2,step=commit.refill,action=corrupt"}) as rig:
        rig.layouts[2].filled = 0
        assert [answer.refill_tries for answer in rig.flip(rig.order(LIVE, HELD))] == [1, 1, 1]
        assert [point.corrupts for point in rig.points] == [False, False, True]


def test_without_transit_memory_nothing_can_move() -> None:
    with Rig(transit_bytes=0) as rig:
        refused(rig, 0, rig.order(LIVE), "the transit memory has 0")
        rig.flip(rig.order())


def test_the_transit_memory_is_sparse_until_a_rank_packs() -> None:
    with Rig() as rig:
        assert os.fstat(rig.fd).st_blocks == 0
        rig.fill(LIVE, HELD)
        rig.flip(rig.order(LIVE, HELD))
        assert 0 < os.fstat(rig.fd).st_blocks * 512 < rig.transit_bytes


def test_a_closed_transit_memory_is_given_back() -> None:
    fd = os.memfd_create("transit")
    os.ftruncate(fd, 4096)
    transit = Transit(fd, 4096)
    with transit.view(10, 4) as view:
        view[:] = b"home"
    transit.close()
    transit.close()
    assert os.pread(fd, 4, 10) == b"home"
    os.close(fd)
