"""How much of answers may lie here until they are sent, over all requests: embeddings are told once all are there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from homeserve.errors import QueueFull

HELD_BYTES_MAX = 128 << 20
"""The largest request of the widest model has half of it."""


@dataclass
class Held:
    """`nbytes` are spoken for by `requests`."""

    most: int = HELD_BYTES_MAX
    nbytes: int = 0
    requests: int = 0

    @contextmanager
    def holding(self, nbytes: int) -> Iterator[None]:
        """A request that will hold so much; one alone may always. Raises QueueFull."""
        if self.requests and self.nbytes + nbytes > self.most:
            raise QueueFull(self.requests, why=f"requests hold {self.nbytes >> 20} MiB of embeddings already")
        self.nbytes, self.requests = self.nbytes + nbytes, self.requests + 1
        try:
            yield
        finally:
            self.nbytes, self.requests = self.nbytes - nbytes, self.requests - 1
