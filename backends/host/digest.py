"""The digest of `backends.digest` by native code (`native/move.cpp`): the same number, at the speed of memory."""

from __future__ import annotations

from backends.host.memory import address_of
from backends.host.team import Team


def digest(data: memoryview, team: Team) -> int:
    """Of contiguous bytes. Raises BufferError for one that is not."""
    return digest_at(address_of(data), data.nbytes, team)


def digest_at(address: int, nbytes: int, team: Team) -> int:
    """Of the `nbytes` bytes at `address`, which the caller keeps alive."""
    return int(team.library.hs_digest(team.handle, address, nbytes))
