"""How long to wait before a fleet that died is started again. Pure.

The first death is answered at once: a stream should see a pause and not a wait. Deaths in a row wait 0.25 s and then
twice as long each time, up to 10 s, so that a machine which cannot keep a worker alive is not kept busy trying. A life
of a minute ends the row.
"""

from __future__ import annotations

from dataclasses import dataclass

FIRST_DELAY_S = 0.25
DELAY_MAX_S = 10.0
LIFE_RESETS_S = 60.0


@dataclass(frozen=True)
class Backoff:
    """`deaths_in_a_row` counts those without a minute's life in between."""

    deaths_in_a_row: int = 0

    def after_death(self, lived_s: float) -> Backoff:
        """The state after a life that served for `lived_s` seconds (0: it never got to serve)."""
        return Backoff(1 if lived_s >= LIFE_RESETS_S else self.deaths_in_a_row + 1)

    @property
    def delay_s(self) -> float:
        """Seconds to wait before the next start."""
        if self.deaths_in_a_row <= 1:
            return 0.0
        return float(min(DELAY_MAX_S, FIRST_DELAY_S * 2 ** min(self.deaths_in_a_row - 2, 16)))
