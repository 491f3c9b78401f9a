"""The meetings of a transport whose rows do not go through the host: stamps and widths alone, in the host's collective.

    sum, gather   a gather of one number for each row: the width that the rank is at
    message       a message of one number for each row, behind the rows themselves

The collective compares epoch, plan, rows and label before it gives anything, and bounds the wait; the numbers are for
what it cannot see here, the widths. So ranks that are not at the same exchange know that from both their stamps before
a row is used, and all later exchanges are refused with the first error, as the collective does it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from backends.acts import ExchangeError, NoCredit, StampMismatch
from backends.base import Collective, Stamp


class Meeting:
    """For exchanges of at most `rows` rows."""

    def __init__(self, collective: Collective, rows: int) -> None:
        self.rank, self.ranks = collective.rank, collective.ranks
        self._collective = collective
        self._own: npt.NDArray[np.float32] = np.zeros((rows, 1), np.float32)
        self._every: npt.NDArray[np.float32] = np.zeros((rows, collective.ranks), np.float32)
        self._failed: ExchangeError | None = None

    def check(self) -> None:
        """Raises the error that a former exchange failed with."""
        if self._failed is not None:
            raise self._failed.with_traceback(None)

    def all(self, stamp: Stamp, widths: Sequence[int]) -> None:
        """Until every rank is here; rank r is to be at a width of `widths[r]`. Raises ValueError, PeerLate,
        StampMismatch."""
        own, every = self._own[: stamp.rows], self._every[: stamp.rows]
        own.view(np.int32)[:] = widths[self.rank]
        self._kept(lambda: self._collective.gather(stamp, own, every, [1] * self.ranks))
        found = every.view(np.int32)
        if (found != np.array(widths, np.int32)).any():
            for rank, wanted in enumerate(widths):
                self._compare(stamp, rank, found[:, rank], wanted)

    def check_credit(self, stamp: Stamp, target: int) -> None:
        """Raises NoCredit where a message could not be sent now, ValueError where there is no channel."""
        self.check()
        if self._collective.credit(target) < 1:
            raise NoCredit(
                f"the channel to rank {target} is full: {stamp.label!r} of plan {stamp.seq} does not go into it",
                stamp.label,
                target,
            )

    def send(self, stamp: Stamp, target: int, width: int) -> None:
        """Say that a message of this width is there. Raises ValueError, NoCredit."""
        own = self._own[: stamp.rows]
        own.view(np.int32)[:] = width
        self._kept(lambda: self._collective.send(stamp, target, own))

    def receive(self, stamp: Stamp, source: int, width: int) -> None:
        """Until the next message of rank `source` is there, which is to be of this stamp and width. Raises ValueError,
        PeerLate, StampMismatch."""
        own = self._own[: stamp.rows]
        self._kept(lambda: self._collective.receive(stamp, source, own))
        self._compare(stamp, source, own.view(np.int32)[:, 0], width)

    def fail(self, error: ExchangeError) -> ExchangeError:
        """From now on every exchange raises it."""
        self._failed = error
        return error

    # ---------------------------------------------------------------------------------------------------------- inside

    def _kept(self, exchange: Callable[[], None]) -> None:
        self.check()
        try:
            exchange()
        except NoCredit:
            raise
        except ExchangeError as error:
            raise self.fail(error) from None

    def _compare(self, stamp: Stamp, rank: int, found: npt.NDArray[np.int32], wanted: int) -> None:
        if (found != wanted).any():
            place = f"{stamp.label!r} of plan {stamp.seq} in epoch {stamp.epoch}, {stamp.rows} x"
            other = int(found[found != wanted][0])
            raise self.fail(StampMismatch(stamp.label, rank, f"{place} {wanted}", f"{place} {other}"))
