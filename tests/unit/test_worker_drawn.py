"""Drawn tokens between ranks: taken in order, when they are needed, and never left lying beyond the plans in flight."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from backends.base import Stamp
from homeserve.worker.drawn import FIELDS, LABEL, Drawn, TokenReceiver, TokenSender, request_bits

IN_FLIGHT = 3


class Channels:
    """A collective's sends and receives, as lists."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, Stamp, npt.NDArray[np.float32]]] = []
        self.received: list[Stamp] = []

    def send(self, stamp: Stamp, target: int, rows: npt.NDArray[np.float32]) -> None:
        self.sent.append((target, stamp, rows.copy()))

    def receive(self, stamp: Stamp, source: int, out: npt.NDArray[np.float32]) -> None:
        self.received.append(stamp)
        drawn = [Drawn(lane, 100 + lane, stamp.seq) for lane in range(stamp.rows)]
        out[:] = np.array(drawn, np.int32).view(np.float32)


def test_one_message_for_each_target_and_none_without_a_token() -> None:
    channels = Channels()
    sender = TokenSender(channels, (0, 1))  # type: ignore[arg-type]
    sender.send(4, 7, [Drawn(2, 9, 49151), Drawn(0, 10, 3)])
    sender.send(4, 8, [])
    assert [(target, stamp) for target, stamp, _ in channels.sent] == [(r, Stamp(4, 7, 2, LABEL)) for r in (0, 1)]
    assert channels.sent[0][2].view(np.int32).tolist() == [[2, 9, 49151], [0, 10, 3]]
    assert channels.sent[0][2].shape == (2, FIELDS)


def receiver() -> tuple[TokenReceiver, Channels, list[Drawn]]:
    channels, taken = Channels(), list[Drawn]()
    return TokenReceiver(channels, 2, IN_FLIGHT, taken.append), channels, taken  # type: ignore[arg-type]


def test_messages_are_taken_up_to_the_last_one_of_a_lane_that_is_needed() -> None:
    tokens, channels, taken = receiver()
    tokens.expect(1, 5, [0])
    tokens.expect(1, 6, [0, 1])
    tokens.before(7, [])
    assert channels.received == []
    tokens.before(7, [0])
    assert [stamp.seq for stamp in channels.received] == [5, 6]
    assert [each.token for each in taken if each.lane == 0] == [5, 6]
    tokens.expect(1, 7, [1])
    tokens.before(8, [0])
    assert len(channels.received) == 2, "nothing of lane 0 is on its way"


@pytest.mark.parametrize("needed", [[], [9]])
def test_none_lies_longer_than_plans_may_be_in_flight(needed: list[int]) -> None:
    tokens, channels, _ = receiver()
    for seq in range(1, 10):
        tokens.before(seq, needed)
        tokens.expect(1, seq, [0])
        assert [stamp.seq for stamp in channels.received] == list(range(1, seq - IN_FLIGHT + 1))


def test_a_plan_that_draws_nothing_sends_nothing_and_is_not_waited_for() -> None:
    tokens, channels, _ = receiver()
    tokens.expect(1, 1, [])
    tokens.before(9, [0])
    assert channels.received == []


def test_numbers_of_requests_travel_as_31_bits() -> None:
    assert request_bits(5) == 5
    assert request_bits(2**31 + 5) == 5


def test_before_a_flip_all_that_is_owed_is_taken_in_order() -> None:
    tokens, channels, taken = receiver()
    for seq in (4, 5):
        tokens.expect(1, seq, [0, 2])
    tokens.drain()
    assert [stamp.seq for stamp in channels.received] == [4, 5] and len(taken) == 4
    tokens.drain()
    tokens.before(6, [0])
    assert len(channels.received) == 2, "nothing is owed any more"
