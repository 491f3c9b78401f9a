"""What ranks tell each other while they choose a transport: one small record of each to all, in the host's collective.

Whatever decides about all ranks is taken from what all of them were told, so that they decide the same. The exchanges
of a boot have stamps of their own (epoch 0, plans counted from 0), and every rank makes them in the same order; a rank
that fails tells that in its next record and goes on to the end, because an exchange that was begun is owed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from backends.base import Collective, Stamp

RECORD_BYTES = 4096
WORDS_MOST = 600
"""Characters of a reason that is told: several fit into a record."""

Record = dict[str, Any]


@dataclass(frozen=True)
class Bounds:
    """Seconds until something counts as never done: a copy that is tried, a communicator, and work of a collectives
    library. Exchanges of the host have to wait longer than each."""

    copy_s: float = 10.0
    communicator_s: float = 20.0
    work_s: float = 30.0


class Told:
    """The exchanges of one boot."""

    def __init__(self, collective: Collective) -> None:
        self.rank, self.ranks = collective.rank, collective.ranks
        self._collective = collective
        self._step = 0

    def tell(self, what: str, **record: Any) -> list[Record]:
        """The records of all ranks by rank, this one's among them. `what` names the exchange. Raises PeerLate,
        StampMismatch; ValueError for a record that is too long."""
        text = json.dumps(record).encode()
        if len(text) > RECORD_BYTES:
            raise ValueError(f"transport {what}: a record of {len(text)} bytes, {RECORD_BYTES} are the most")
        floats = RECORD_BYTES // 4
        own = np.frombuffer(text.ljust(RECORD_BYTES), np.float32).reshape(1, floats)
        every = np.empty((1, self.ranks * floats), np.float32)
        stamp = Stamp(0, self._step, 1, f"transport {what}")
        self._step += 1
        self._collective.gather(stamp, own, every, [floats] * self.ranks)
        return [json.loads(every[0, rank * floats : (rank + 1) * floats].tobytes()) for rank in range(self.ranks)]

    def agree(self, what: str, why_not: str = "") -> str:
        """Whether it went well on every rank. Returns the first reason against it, with its rank; empty: there is
        none."""
        return against([str(each["why_not"]) for each in self.tell(what, why_not=why_not[:WORDS_MOST])])


def against(reasons: Sequence[str]) -> str:
    """The first rank's reason that has one."""
    return next((f"rank {rank}: {why}" for rank, why in enumerate(reasons) if why), "")
