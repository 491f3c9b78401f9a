"""How long to wait before a fleet that died is started again. Pure.

The first death is answered at once: a stream should see a pause and not a wait. Deaths in a row wait 0.25 s and then
twice as long each time, so that a machine which cannot keep a worker alive is not kept busy trying: up to 10 s where
lives end without having done anything, up to 0.5 s where each did some work first. A life of a minute ends the row.
"""

from __future__ import annotations

from dataclasses import dataclass

FIRST_DELAY_S = 0.25
DELAY_MAX_S = 10.0
FRUITFUL_DELAY_MAX_S = 0.5
LIFE_RESETS_S = 60.0


@dataclass(frozen=True)
class Backoff:
    """`deaths_in_a_row` counts those without a minute's life in between; `fruitless_deaths` those of lives that
    answered no plan after their load."""

    deaths_in_a_row: int = 0
    fruitless_deaths: int = 0

    def after_death(self, lived_s: float, *, served: bool) -> Backoff:
        """The state after a life that was ready for `lived_s` seconds (0: it never was) and answered a plan or not."""
        before = Backoff() if lived_s >= LIFE_RESETS_S else self
        return Backoff(before.deaths_in_a_row + 1, 0 if served else before.fruitless_deaths + 1)

    @property
    def delay_s(self) -> float:
        """Seconds to wait before the next start."""
        if self.deaths_in_a_row <= 1:
            return 0.0
        if self.fruitless_deaths == 0:
            return min(FRUITFUL_DELAY_MAX_S, FIRST_DELAY_S * (self.deaths_in_a_row - 1))
        doublings = min(max(self.fruitless_deaths, 2) - 2, 16)
        return float(min(DELAY_MAX_S, FIRST_DELAY_S * 2**doublings))
