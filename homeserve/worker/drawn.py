"""Drawn tokens on their way from the rank that samples to the ranks that embed.

The last rank draws; a rank that looks up embedding rows has to know what was drawn before it computes the next row of
that sequence. The engine is not asked: right after a plan the last rank sends one message with all that the plan drew
to each embedding rank, which takes it when it needs it.

    last rank    plan 7: draws for lanes 0, 3 ──▶ message (plan 7, 2 rows of lane, request, token)
    rank 0       plan 8: lane 3 goes on with what plan 7 drew: takes the message of plan 7, then computes

Messages are taken in the order of plans, so all that are older come along. A rank never lets more of them lie than
plans may be in flight: what came `in_flight` plans before the present one has been sent, because the engine issued the
present one only after every rank had answered that. So neither end of the channel ever waits for room.

A plan that drafts (`homeserve.worker.drafting`) needs tokens in its own middle and owes none behind it. Its messages
have labels of their own and are taken inside the plan, after all older ones: one for each step of drafting, and one
with all that was drawn. How many rows of a draft will count nobody knows beforehand; so that message has a row for each
that might, and NO_TOKEN in those that do not. All else in the stamps of two steps may be equal, in those of the
exchanges inside a step too; so the label of the message between them has the step's number, and ranks that are not at
the same step are told apart before a token is used.

    rank 2       draft ─▶ message  draft ─▶ message  rows, draws ─▶ message
    rank 0       draft ──▶ takes   draft ──▶ takes   rows ────────▶ takes

Numbers travel as the bits of float32, which is what a channel carries.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from backends.acts import ExchangeError
from backends.base import Collective, Stamp

LABEL = "tokens"
OUTCOME = "outcome"
FIELDS = 3
NO_TOKEN = -1
_MASK = 0x7FFFFFFF


class Drawn(NamedTuple):
    lane: int
    request: int
    """Its low 31 bits (`request_bits`)."""
    token: int


def request_bits(request: int) -> int:
    return request & _MASK


def draft_label(step: int) -> str:
    """Of the message behind a step of drafting, counted from 0."""
    return f"draft {step}"


class TokenSender:
    """The end of the rank that samples. `targets` are the other ranks that embed."""

    def __init__(self, collective: Collective, targets: Sequence[int]) -> None:
        self._collective = collective
        self._targets = tuple(targets)

    def send(self, epoch: int, seq: int, drawn: Sequence[Drawn], label: str = LABEL) -> None:
        """All that plan `seq` drew; nothing is sent where it drew nothing. Raises NoCredit (a bug of the caller)."""
        if not drawn:
            return
        rows = np.array(drawn, np.int32).view(np.float32)
        for target in self._targets:
            self._collective.send(Stamp(epoch, seq, len(drawn), label), target, rows)


class TokenReceiver:
    """The end of a rank that embeds and does not sample. `take` is told of each token."""

    def __init__(self, collective: Collective, source: int, in_flight: int, take: Callable[[Drawn], None]) -> None:
        self._collective = collective
        self._source = source
        self._in_flight = in_flight
        self._take = take
        self._owed: deque[tuple[int, int, frozenset[int], int]] = deque()
        """(epoch, plan, lanes, count) of each message that was not taken, oldest first."""

    def expect(self, epoch: int, seq: int, lanes: Iterable[int]) -> None:
        """Plan `seq` draws a token for each of `lanes`; if there are any, a message will come."""
        named = tuple(lanes)
        if named:
            self._owed.append((epoch, seq, frozenset(named), len(named)))

    def before(self, seq: int, needed: Iterable[int]) -> None:
        """To be called before plan `seq` is computed, with the lanes whose next input is not known: takes the messages
        up to the last one that names one of them, and those that must not lie longer. Raises ExchangeError."""
        lanes = frozenset(needed)
        last = max((i for i, (_, _, named, _) in enumerate(self._owed) if named & lanes), default=-1)
        for _ in range(last + 1):
            self._receive()
        while self._owed and self._owed[0][1] <= seq - self._in_flight:
            self._receive()

    def drain(self) -> None:
        """Take all that is owed. To be called when every plan is answered: then nothing is waited for, because it was
        all sent. Raises ExchangeError."""
        while self._owed:
            self._receive()

    def receive(self, epoch: int, seq: int, of: Sequence[tuple[int, int]], label: str) -> list[int]:
        """The tokens of a message that plan `seq` sends in its middle, one for each of (lane, request). Nothing older
        may be owed. Raises ExchangeError."""
        assert not self._owed, "messages are taken in their order"
        told = self._message(Stamp(epoch, seq, len(of), label))
        found, wanted = [(each.lane, each.request) for each in told], [(lane, request_bits(own)) for lane, own in of]
        if found != wanted:
            raise self.wrong(label, f"has lanes and requests {found} for {wanted}")
        return [each.token for each in told]

    def wrong(self, label: str, what: str) -> ExchangeError:
        """The error of a message that cannot be meant."""
        return ExchangeError(f"message {label!r} of rank {self._source} {what}", label, self._source)

    def _receive(self) -> None:
        epoch, seq, _, count = self._owed.popleft()
        for drawn in self._message(Stamp(epoch, seq, count, LABEL)):
            self._take(drawn)

    def _message(self, stamp: Stamp) -> list[Drawn]:
        rows: npt.NDArray[np.float32] = np.empty((stamp.rows, FIELDS), np.float32)
        self._collective.receive(stamp, self._source, rows)
        return [Drawn(*row) for row in rows.view(np.int32).tolist()]
