"""Exchanges between ranks on every ISA level, the ranks as threads of this process: bits, strides, pieces, refusals."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import kernel_rig as rig
import numpy as np
import pytest

from backends.acts import ActShape, ExchangeError, NoCredit, PeerLate, Stamp, StampMismatch, make_memory
from backends.base import Collective
from backends.host.collective import HostCollective

PATIENCE_S = 60.0
SOON_S = 0.05
Group = Callable[..., list[HostCollective]]


def at(rows: int, label: str = "x", seq: int = 1) -> Stamp:
    return Stamp(0, seq, rows, label)


@pytest.fixture
def group(level: str) -> Iterator[Group]:
    """`group(ranks)`: the collectives of all ranks, over one memory of small pieces."""
    with ExitStack() as held:

        def make(ranks: int, timeout_s: float = PATIENCE_S, **changes: Any) -> list[HostCollective]:
            settings: dict[str, Any] = {
                "piece_floats": 48,
                "message_floats": 32,
                "depth": 2,
                "routes": ((0, ranks - 1),),
            }
            shape = ActShape(ranks, **(settings | changes))
            fd = make_memory(shape)
            held.callback(os.close, fd)
            library = rig.backend(level).library
            made = [HostCollective(library, fd, shape, rank, timeout_s=timeout_s, spin_us=5) for rank in range(ranks)]
            for each in made:
                held.callback(each.close)
            return made

        yield make


def together(acts: list[HostCollective], step: Callable[[Collective], Any]) -> list[Any]:
    """What `step` gives on each rank, all at once."""
    with ThreadPoolExecutor(len(acts)) as pool:
        return list(pool.map(step, acts))


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_sums_have_the_bits_of_the_order_of_the_ranks_and_leave_the_gaps(group: Group, ranks: int) -> None:
    rows, width, padded = 7, 21, 32
    numbers = np.random.default_rng(ranks)
    parts = (
        numbers.standard_normal((ranks, rows, padded)) * 10.0 ** numbers.uniform(-6, 6, (ranks, rows, padded))
    ).astype(np.float32)
    wanted = parts[0].copy()
    for part in parts[1:]:
        wanted += part

    def step(acts: Collective) -> Any:
        buffer = parts[acts.rank].copy()
        acts.sum(at(rows), buffer[:, :width])
        return buffer

    for rank, buffer in enumerate(together(group(ranks), step)):
        assert np.array_equal(buffer[:, :width], wanted[:, :width])
        assert np.array_equal(buffer[:, width:], parts[rank, :, width:])


@pytest.mark.parametrize("widths", [(30, 17, 17), (28, 26, 20), (0, 3, 1), (0, 0, 0), (200, 0, 1)])
def test_gathers_of_unequal_parts_in_pieces(group: Group, widths: tuple[int, ...]) -> None:
    rows = 5
    parts = [np.random.default_rng(rank).standard_normal((rows, width)) for rank, width in enumerate(widths)]

    def step(acts: Collective) -> Any:
        out = np.full((rows, sum(widths) + 3), -1, np.float32)
        acts.gather(at(rows), parts[acts.rank].astype(np.float32), out[:, : sum(widths)], widths)
        return out

    wanted = np.concatenate([*parts, np.full((rows, 3), -1)], axis=1).astype(np.float32)
    for out in together(group(3), step):
        assert np.array_equal(out, wanted)


def test_many_sums_in_a_row_never_mix(group: Group) -> None:
    """Ranks run as far ahead of one another as two halves of a mailbox let them."""

    def step(acts: Collective) -> list[float]:
        seen = []
        for seq in range(300):
            buffer = np.full((1, 100), seq * (acts.rank + 1), np.float32)
            acts.sum(at(1, "x", seq), buffer)
            assert np.all(buffer == buffer[0, 0])
            seen.append(float(buffer[0, 0]))
        return seen

    for seen in together(group(3), step):
        assert seen == [6.0 * seq for seq in range(300)]


def test_a_rank_alone_exchanges_and_counts_nothing(group: Group) -> None:
    (alone,) = group(1, routes=())
    buffer, out = np.ones((2, 3), np.float32), np.zeros((2, 3), np.float32)
    alone.sum(at(2), buffer)
    alone.gather(at(2), buffer, out, [3])
    assert np.all(buffer == 1) and np.all(out == 1)
    assert alone.counts() == {}


def test_a_full_channel_refuses_and_gets_its_credit_back(group: Group) -> None:
    first, last = group(2)
    rows = np.ones((1, 4), np.float32)
    for seq in (1, 2):
        first.send(at(1, "rows", seq), 1, rows * seq)
    assert first.credit(1) == 0
    with pytest.raises(NoCredit, match=r"the channel to rank 1 is full: message 'rows' of plan 3 .* message 3 in it"):
        first.send(at(1, "rows", 3), 1, rows)
    last.receive(at(1, "rows", 1), 0, rows)
    assert np.all(rows == 1) and first.credit(1) == 1
    first.send(at(1, "rows", 3), 1, rows * 3)
    for seq in (2, 3):
        last.receive(at(1, "rows", seq), 0, rows)
        assert np.all(rows == seq)
    assert (first.counts()["rows"].calls, first.counts()["rows"].moved_bytes) == (3, 48)


@pytest.mark.parametrize(
    "other",
    [Stamp(1, 1, 1, "x"), Stamp(0, 2, 1, "x"), Stamp(0, 1, 2, "x"), Stamp(0, 1, 1, "y")],
    ids=["epoch", "plan", "rows", "label"],
)
def test_every_part_of_a_stamp_is_compared_before_a_byte_is_used(group: Group, other: Stamp) -> None:
    first, last = group(2)
    first.send(other, 1, np.ones((other.rows, 4), np.float32))
    out = np.zeros((1, 4), np.float32)
    with pytest.raises(StampMismatch) as caught:
        last.receive(at(1), 0, out)
    assert caught.value.wanted == "message 'x' of plan 1 in epoch 0, 1 x 4"
    assert caught.value.found == (
        f"message '{other.label}' of plan {other.seq} in epoch {other.epoch}, {other.rows} x 4"
    )
    assert np.all(out == 0)
    with pytest.raises(StampMismatch):
        last.sum(at(1), out)


def test_other_widths_and_kinds_are_refused_too(group: Group) -> None:
    def step(acts: Collective) -> str:
        out = np.zeros((1, 8), np.float32)
        with pytest.raises(StampMismatch) as caught:
            if acts.rank == 0:
                acts.sum(at(1), out)
            else:
                acts.gather(at(1), out[:, :4], np.zeros((1, 12), np.float32), [8, 4])
        return str(caught.value)

    words = together(group(2), step)
    assert words[0] == (
        "rank 1 exchanges gather 'x' of plan 1 in epoch 0, 1 x 4 where this rank is at"
        " sum 'x' of plan 1 in epoch 0, 1 x 8"
    )


def test_a_peer_that_does_not_come_is_named_and_the_wire_is_over(group: Group) -> None:
    first, _ = group(2, timeout_s=SOON_S)
    with pytest.raises(PeerLate, match=r"rank 1 did not come to sum 'ffn 3' of plan 9 in epoch 0, 2 x 3 within 0.05 s"):
        first.sum(at(2, "ffn 3", 9), np.zeros((2, 3), np.float32))
    with pytest.raises(PeerLate, match="ffn 3") as caught:
        first.send(at(1), 1, np.zeros((1, 1), np.float32))
    assert isinstance(caught.value, ExchangeError) and caught.value.peer == 1
    assert first.counts()["ffn 3"].slept_ns > 0
    every = first.counts().values()
    waited_ns = sum(each.spun_ns + each.slept_ns for each in every)
    assert first.totals() == (sum(e.calls for e in every), sum(e.moved_bytes for e in every), waited_ns)


def test_what_is_wrong_is_refused_before_anything_is_posted(group: Group) -> None:
    first, last = group(2)
    good = np.zeros((2, 3), np.float32)
    wrong: list[tuple[str, Callable[[], None]]] = [
        ("stamp of 1 rows", lambda: first.sum(at(1), good)),
        ("float64", lambda: first.sum(at(2), good.astype(np.float64))),  # type: ignore[arg-type]
        ("each in one piece", lambda: first.sum(at(3), good.T)),
        ("each in one piece", lambda: first.send(at(2), 1, np.broadcast_to(good[:1], (2, 3)))),
        ("read-only", lambda: first.sum(at(2), np.frombuffer(bytes(24), np.float32).reshape(2, 3))),
        ("does not go with the widths", lambda: first.gather(at(2), good, good, [2, 1])),
        ("does not go with the widths", lambda: first.gather(at(2), good, good, [3])),
        ("does not go with the widths", lambda: first.gather(at(2), good, good, [4, -1])),
        ("a message holds 32", lambda: first.send(at(11), 1, np.zeros((11, 3), np.float32))),
        ("no channel from rank 1 to rank 0", lambda: last.send(at(2), 0, good)),
        ("no channel from rank 1 to rank 0", lambda: last.credit(0)),
        ("no channel from rank 1 to rank 0", lambda: first.receive(at(2), 1, good)),
        ("1 to 31 ASCII", lambda: first.sum(at(2, "x" * 32), good)),
        ("1 to 31 ASCII", lambda: first.sum(at(2, "ä"), good)),
    ]
    for words, call in wrong:
        with pytest.raises(ValueError, match=words):
            call()
    for buffer in together([first, last], lambda acts: _summed(acts)):
        assert np.all(buffer == 1)


def _summed(acts: Collective) -> Any:
    buffer = np.full((2, 3), acts.rank, np.float32)
    acts.sum(at(2, "after"), buffer)
    return buffer


def test_memory_of_another_shape_or_life_is_refused(level: str) -> None:
    library = rig.backend(level).library
    shape = ActShape(2, 16, 16, 1, ((0, 1),))
    fd = make_memory(shape)
    try:
        for other in (ActShape(2, 16, 16, 1, ((1, 0),)), ActShape(2, 16, 16, 1)):
            with pytest.raises(ValueError, match="announced"):
                HostCollective(library, fd, other, 0, timeout_s=SOON_S)
        with pytest.raises(ValueError, match="rank 2 of 2"):
            HostCollective(library, fd, shape, 2, timeout_s=SOON_S)
        once = HostCollective(library, fd, shape, 0, timeout_s=SOON_S)
        once.send(at(1), 1, np.zeros((1, 1), np.float32))
        once.close()
        once.close()
        with pytest.raises(ValueError, match="closed"):
            once.sum(at(1), np.zeros((1, 1), np.float32))
        with pytest.raises(ValueError, match="has used this memory before"):
            HostCollective(library, fd, shape, 0, timeout_s=SOON_S)
        HostCollective(library, fd, shape, 1, timeout_s=SOON_S).close()
    finally:
        os.close(fd)
