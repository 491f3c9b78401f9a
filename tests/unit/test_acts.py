"""The shared memory of acts: where things lie, and shapes that are refused."""

from __future__ import annotations

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.acts import LINE_BYTES, RANKS_MOST, ActShape, make_memory

COUNTS = st.integers(1, 100)


@settings(max_examples=30)
@given(ranks=st.integers(1, 8), piece=COUNTS, message=COUNTS, depth=st.integers(1, 5), mask=st.integers(0, 2**56))
def test_mailboxes_and_channels_lie_in_lines_of_their_own(
    ranks: int, piece: int, message: int, depth: int, mask: int
) -> None:
    pairs = [(source, target) for source in range(ranks) for target in range(ranks) if source != target]
    routes = tuple(pair for number, pair in enumerate(pairs) if mask >> number & 1)
    shape = ActShape(ranks, piece, message, depth, routes)
    mailbox_bytes = (shape.channels_at - shape.mailboxes_at) // ranks
    assert mailbox_bytes >= LINE_BYTES + 2 * (LINE_BYTES + 4 * piece)
    starts = [0, *(shape.mailboxes_at + rank * mailbox_bytes for rank in range(ranks))]
    starts += [shape.channel_at(*route) for route in routes]
    ends = [*starts[1:], shape.total_bytes]
    assert all(start % LINE_BYTES == 0 for start in starts)
    assert all(end > start for start, end in zip(starts, ends, strict=True))
    channel_bytes = 2 * LINE_BYTES + depth * (LINE_BYTES + 4 * message)
    assert all(ends[1 + ranks + k] - shape.channel_at(*route) >= channel_bytes for k, route in enumerate(routes))


@pytest.mark.parametrize(
    ("ranks", "numbers", "routes", "words"),
    [
        (0, (1, 1, 1), (), "there may be 1 to 64"),
        (RANKS_MOST + 1, (1, 1, 1), (), "there may be 1 to 64"),
        (2, (0, 1, 1), (), "in pieces of 0"),
        (2, (1, 0, 1), (), "1 x 0 floats"),
        (2, (1, 1, 0), (), "0 x 1 floats"),
        (2, (1, 1, 1), ((0, 0),), "from one rank to another"),
        (2, (1, 1, 1), ((0, 2),), "from one rank to another"),
        (2, (1, 1, 1), ((0, 1), (0, 1)), "each once"),
    ],
)
def test_a_shape_that_makes_no_sense_is_refused(
    ranks: int, numbers: tuple[int, int, int], routes: tuple[tuple[int, int], ...], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        ActShape(ranks, *numbers, routes)


def test_a_channel_that_is_not_there_has_no_place() -> None:
    with pytest.raises(KeyError):
        ActShape(2, 1, 1, 1, ((0, 1),)).channel_at(1, 0)


def test_memory_is_of_the_announced_size_bears_the_shape_and_has_no_name() -> None:
    shape = ActShape(3, 100, 50, 2, ((0, 1), (1, 2)))
    fd = make_memory(shape)
    try:
        facts = os.fstat(fd)
        assert (facts.st_size, facts.st_nlink) == (shape.total_bytes, 0)
        assert os.pread(fd, len(shape.header()), 0) == shape.header()
        assert os.pread(fd, shape.total_bytes, LINE_BYTES) == bytes(shape.total_bytes - LINE_BYTES)
        assert not os.get_inheritable(fd)
    finally:
        os.close(fd)
