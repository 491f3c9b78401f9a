"""The stages of a load over several ranks, told as one load. Pure.

Ranks load at the same time and each is at a stage of its own, so what they tell comes mixed. A person sees one stage
after the other: the first that some rank is not done with, with the bytes of all ranks; it is over when the last rank
is done with it.

    rank 0   weights ▓▓▓▓▓▓▓▓▓ kv ▓▓
    rank 1   weights ▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓ kv ▓▓▓
             weights of 2 ranks       kv of 2 ranks
"""

from __future__ import annotations

from collections.abc import Iterator

Told = tuple[str, int, int]
"""stage, done bytes, total bytes (0: not known)"""


class LoadStages:
    """Of one load of `ranks` ranks. A rank is done with a stage when it has all its bytes, or is at a later one."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._order: list[str] = []
        self._bytes: dict[str, dict[int, tuple[int, int]]] = {}
        self._at = [-1] * ranks
        """The furthest stage of each rank."""
        self._shown = 0
        """The stage that is told now."""

    def progress(self, rank: int, stage: str, done_bytes: int, total_bytes: int) -> Iterator[Told]:
        """Rank `rank` tells of its stage; yields what is to be told."""
        if stage not in self._bytes:
            self._order.append(stage)
            self._bytes[stage] = {}
        self._bytes[stage][rank] = (done_bytes, total_bytes)
        self._at[rank] = max(self._at[rank], self._order.index(stage))
        yield from self._tell()

    def end(self) -> Iterator[Told]:
        """All ranks have loaded."""
        self._at = [len(self._order)] * self._ranks
        yield from self._tell()

    def _tell(self) -> Iterator[Told]:
        while self._shown < len(self._order):
            stage = self._order[self._shown]
            of_ranks = self._bytes[stage]
            done, total = (sum(each[i] for each in of_ranks.values()) for i in (0, 1))
            over = all(self._is_done(rank, of_ranks) for rank in range(self._ranks))
            known = over or len(of_ranks) == self._ranks
            name = stage if self._ranks == 1 else f"{stage} of {self._ranks} ranks"
            yield name, total if over else done, total if known else 0
            if not over:
                return
            self._shown += 1

    def _is_done(self, rank: int, of_ranks: dict[int, tuple[int, int]]) -> bool:
        done, total = of_ranks.get(rank, (0, 0))
        return self._at[rank] > self._shown or done >= total > 0
