"""The corpses of what is carried: rows, states and lanes, and how requests go on behind a flip.

Collected by `test_corpses`.
"""

from __future__ import annotations

import tracemalloc
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from corpse_rig import (
    HELD,
    LIVE,
    PIPELINE,
    TENSOR,
    PaperFleet,
    committed,
    ends_right,
    long_answers,
    long_prompt,
    right,
    unread,
)
from engine_flip_rig import FlipTrace, numbers, ones, run
from flip_rig import Rig
from test_engine_flip_engine import asked, make

from backends.base import Limits
from homeserve.wire.records import LaneRows, NewLane, Plan, PlanKind, Sampling, pack_ints, unpack_ints
from homeserve.worker.flip import FlipRefused
from homeserve.worker.lanes import LaneRefused, Lanes
from homeserve.worker.places import own_pages


def test_J1() -> None:
    """There what is live was read from the batch slot at hand, which was empty just then: the rows of the request in
    another slot never moved, and nothing said so. Here live is every lane that is taken, whichever plan named it last:
    with decoding divided among plans, states and rows of all come across."""

    async def body() -> None:
        engine, fleet = make(running=6, kv_tokens=4096)
        calls = [asked(engine, prompt, 60) for prompt in long_answers(6, 60)]
        for to in (TENSOR, PIPELINE, TENSOR):
            while len({len(plan.draft.rows) for plan in fleet.plans} & {2, 6}) != 1 or not fleet.plans:
                fleet.answer()
            lanes = {sequence.lane for sequence in engine._scheduler.open_sequences()}
            committed(fleet, to)
            live = engine.flip_records()[-1].live
            assert live is not None and live.requests == live.states == 6
            assert lanes <= set(numbers(live.live.states))
            fleet.answer()
        await ends_right(fleet, *calls)

    run(body)


def test_J2() -> None:
    """There rows were counted from a request's length, which was one more than what was allocated to it: one row too
    many was read. Here what is carried and who owns it come from one list: the pages of a flip are those that are not
    free, also those that no request's length reaches, on any history."""
    pages_seen = 0

    async def body() -> None:
        nonlocal pages_seen
        engine, fleet = make(recurrent=False, checkpoints=0)
        done = asked(engine, long_prompt(40), 3)
        await ends_right(fleet, done)
        calls = [asked(engine, (n + 8,) * (15 + n), 30) for n in range(3)]
        for to in (TENSOR, PIPELINE) * 4:
            for _ in range(3):
                fleet.answer()
            record = engine.flip_ask(to)
            while record.live is None:
                fleet.answer()
            pool = engine._scheduler._pool
            (bits,) = record.live.live.pages
            free = set(pool._groups[0].free)
            assert set(numbers(bits)) == set(range(pool.capacity)) - free
            (census,) = pool.census()
            assert record.live.rows == 16 * ones(bits) == 16 * (census.live + census.protected + census.cached)
            held = sum(len(s.tables[0]) for s in engine._scheduler.open_sequences())
            assert ones(bits) > held, "the cache is live as well"
            pages_seen += ones(bits)
            while not record.over:
                fleet.answer()
            assert record.state == "committed", record.reason
        await ends_right(fleet, *calls)

    run(body)
    assert pages_seen > 0


def test_J3() -> None:
    """There a request was on board when the flip began and gone behind it, with a page and a lock that nobody gave
    back. Here an answer that is known beforehand is right past a flip and past the way back: in the engine's books, on
    every rank's lanes, and in its tokens."""

    def script(fleet: PaperFleet) -> None:
        prompt = tuple(range(1, 36))
        stream = fleet.submit(prompt, 40)
        for to in (TENSOR, PIPELINE):
            seen = len(unread(stream))
            fleet.hear_until(lambda seen=seen: len(unread(stream)) > seen + 3)  # type: ignore[misc]
            fleet.flip(to)
            assert fleet.layout == to and not stream.finished
            for runner in fleet.runners:
                assert runner._loaded is not None
                ((_, request, _),) = runner._loaded.lanes.occupied()
                assert request in fleet.engine._streams
        assert fleet.finish(stream) == [right(prompt, 40)] and stream.timings.flips_crossed == 2
        (pages,) = fleet.engine._scheduler.census()
        assert (pages.live, pages.protected) == (0, 0)

    PaperFleet(5).run(script)


def lanes_of_two() -> Lanes:
    """Lane 0 decodes, lane 1 has half of its prompt."""
    lanes = Lanes(Limits(32, 8, 3, 4), 50, (16,), draws=False)
    new = (NewLane(0, 10, 3, Sampling()), NewLane(1, 11, 40, Sampling()))
    rows = (
        LaneRows(0, 10, 0, pack_ints([1, 2, 3]), pack_ints([5]), sample=True),
        LaneRows(1, 11, 0, pack_ints(list(range(20))), pack_ints([2, 9]), sample=False),
    )
    plan = Plan(1, 0, PlanKind.PREFILL, 7, (), new, rows)
    lanes.check(plan)
    lanes.apply(plan)
    for group in lanes.batch(rows)[1]:
        lanes.advance(group)
    return lanes


def test_K() -> None:
    """There the arrays of the loop were made anew at a flip and the residents in them were gone; carried over, they
    were there twice, because doing it again merged them again. Here a turn changes where pages lie and nothing else:
    residents stay the same objects on both sides, and a turn that is repeated changes nothing more."""
    lanes = lanes_of_two()
    held, before = list(lanes.lanes), lanes.occupied()
    places = own_pages([16 * 16], (2, 1, 1), 1)
    for there in (places, places, None, None, places):
        lanes.turn(there, embeds=True)
        assert all(now is then for now, then in zip(lanes.lanes, held, strict=True))
        assert lanes.occupied() == before == ((0, 10, 1), (1, 11, 2))
    assert [lane.length for lane in lanes.lanes if lane is not None] == [3, 20]

    async def body() -> None:
        engine, fleet = make()
        calls = [asked(engine, prompt, 30) for prompt in long_answers(3, 30)]
        fleet.answer()
        committed(fleet, TENSOR)
        engine.flip_ask(PIPELINE)
        while engine._flips is not None and engine._flips.flipper.state.value != "packing":
            fleet.answer()
        scheduler = engine._scheduler
        running, table = dict(scheduler._running), scheduler.lanes()
        for layout in (PIPELINE, PIPELINE, TENSOR):
            scheduler.turn(layout)
            assert dict(scheduler._running) == running and scheduler.lanes() == table
        fleet.answer_all()
        await ends_right(fleet, *calls)

    run(body)


def test_N1() -> None:
    """There a checksum widened its whole payload, 128 MiB more on a card that was full. Here a digest reads in place:
    32 MiB cost it next to nothing, and two pages that change places change it."""
    from backends.base import OpenOptions
    from backends.cpu.layouts import CpuLayouts
    from backends.registry import open_backend

    payload = np.random.default_rng(1).integers(0, 256, 32 << 20, np.uint8)
    with closing(open_backend("cpu", OpenOptions(threads=1))) as device:
        some: Any = type("Some", (), {"_library": device.library, "_team": device.team})()  # type: ignore[attr-defined]
        before = CpuLayouts.digest(some, memoryview(payload))
        tracemalloc.start()
        resident = peak_kib(reset=True)
        again = CpuLayouts.digest(some, memoryview(payload))
        grown, traced = peak_kib() - resident, tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert again == before
        assert traced < 1 << 20 and grown < 4 << 10, (traced, grown)
        payload[:4096], payload[4096:8192] = payload[4096:8192].copy(), payload[:4096].copy()
        assert CpuLayouts.digest(some, memoryview(payload)) != before


def peak_kib(*, reset: bool = False) -> int:
    """The most that was resident since the last reset."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def test_pp_outputs() -> None:
    """There the outputs of the last passes lay in a buffer that the flip threw away: one token lost at each crossing.
    Here a flip begins when every result is applied: of what was drawn before it nothing is missing when it packs, over
    many crossings in a row."""

    async def body() -> None:
        engine, fleet = make()
        (prompt,) = long_answers(1, 60)
        call = asked(engine, prompt, 60)
        for n in range(10):
            fleet.answer()
            record = engine.flip_ask((TENSOR, PIPELINE)[n % 2])
            while record.state == "draining":
                fleet.answer()
            (sequence,) = engine._scheduler.open_sequences()
            (lane,) = fleet.rank.lanes.values()
            assert sequence.pending == 0 and len(sequence.tokens) == len(lane.history) + 1
            assert call.stream.usage.completion_tokens == sequence.generated
            while not record.over:
                fleet.answer()
            assert record.state == "committed", record.reason
        await ends_right(fleet, call)

    run(body)


def test_spec_merge() -> None:
    """There a batch that had come across and a fresh one were merged, and only one of them had what its layout's
    scheduling kept of each request. Here such state begins anew at a turn: in the first plan behind it every carried
    request that decodes brings its token, a fresh one its prompt, and a rank refuses to go on from what it drew or was
    told before."""

    async def body() -> None:
        engine, fleet = make(running=6, kv_tokens=4096)
        calls = [asked(engine, prompt, 40) for prompt in long_answers(3, 40)]
        for _ in range(8):
            fleet.answer()
        record = engine.flip_ask(TENSOR)
        calls.append(asked(engine, (4, 4, 4), 10))
        while not record.over:
            fleet.answer()
        first, second = fleet.plans[0].draft.rows, fleet.plans[1].draft.rows
        known = {sequence.key: sequence.tokens for sequence in engine._scheduler.open_sequences()}
        assert len(first) == 4
        for rows in first:
            tokens = list(unpack_ints(rows.tokens))
            assert tokens == list(known[rows.request])[rows.start : rows.start + len(tokens)] and tokens
        assert len(second) == 4 and not any(rows.tokens for rows in second)
        assert all(s.skipped == s.passed_over == 0 for s in engine._scheduler.open_sequences())
        await ends_right(fleet, *calls)

    run(body)
    lanes = lanes_of_two()
    lanes.turn(None, embeds=True)
    with pytest.raises(LaneRefused, match="no token was drawn"):
        lanes.check(Plan(2, 1, PlanKind.DECODE, 7, (), (), (LaneRows(0, 10, 3, b"", b"", sample=True),)))
    lanes.check(Plan(2, 1, PlanKind.DECODE, 7, (), (), (LaneRows(0, 10, 3, pack_ints([4]), b"", sample=True),)))


def test_radix_diverge() -> None:
    """There each rank had a prefix tree of its own, and they differed: what one took for live another did not send.
    Here the live set is the engine's and travels with the order. So pages that no lane of any rank names, the cached
    prefix of a request that is long over, come across, and the next one that begins alike reads them right."""

    def script(fleet: PaperFleet) -> None:
        prompt = tuple(n % 40 + 5 for n in range(50))
        assert fleet.finish(fleet.submit(prompt, 5)) == [right(prompt, 5)]
        other = fleet.submit((7, 7, 7), 40)
        for to in (TENSOR, PIPELINE):
            fleet.hear()
            record = fleet.flip(to)
            assert record.live is not None and record.live.rows > 16 * 3, "more than the lane has"
            again = fleet.submit((*prompt, fleet.epoch), 5)
            assert fleet.finish(again) == [right((*prompt, fleet.epoch), 5)]
            assert again.usage.cached_tokens == 48
        assert fleet.finish(other) == [right((7, 7, 7), 40)]

    PaperFleet(6).run(script)

    async def histories() -> None:
        for seed in range(3):
            await FlipTrace(seed, trouble=False, losses=False, prefix_cache=True).run(120)

    run(histories)


def test_short_read() -> None:
    """There a receive that came back short was read as a checksum that does not match, and the search went the wrong
    way. Here a payload of another length is named as that, with both lengths, on the rank that was to have it; a
    damaged one is told by its digest."""
    with Rig() as rig:
        rig.fill(LIVE, HELD)
        order = rig.order(LIVE, HELD)
        verify = rig.verify_order(order, rig.pack(order))
        whole = next(each for each in verify.digests if (each.source, each.target) == (0, 1))
        with rig.transits[0].view(offset_of(rig), whole.nbytes) as view:
            short = rig.layouts[0].digest(view[:-5])
        cut = msgspec.structs.replace(whole, nbytes=whole.nbytes - 5, digest=short)
        digests = tuple(cut if each is whole else each for each in verify.digests)
        said = f"rank 0 to rank 1 is cut: {whole.nbytes - 5} bytes were packed, {whole.nbytes} are due"
        with pytest.raises(FlipRefused, match=said):
            rig.ranks[1].prepare(msgspec.structs.replace(verify, digests=digests), 0)
        turned = msgspec.structs.replace(whole, digest=whole.digest ^ 1)
        digests = tuple(turned if each is whole else each for each in verify.digests)
        for rank in rig.ranks:
            rank.abandon(order)
        again = rig.order(LIVE, HELD)
        rig.pack(again)
        damaged = msgspec.structs.replace(verify, flip=again.flip, epoch=again.epoch, digests=digests)
        with pytest.raises(FlipRefused, match="rank 0 packed for rank 1 has the digest"):
            rig.ranks[1].prepare(damaged, 0)


def offset_of(rig: Rig) -> int:
    prepared = rig.ranks[0]._prepared
    assert prepared is not None
    return next(each.offset for each in prepared.plan.payloads if (each.source, each.target) == (0, 1))
