"""Which settings are the peer's best, for each result by itself, and the servers that run with them.

Each candidate is started and asked a shorter form of what will be measured. A setting replaces the first candidate
for a result only where it is better by more than runs differ (`NOISE`), so that few servers need to run side by side.
All that was found is kept in the CSV, as tests `search:RESULT`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping

from measures import MEASURES, RESULTS
from servers import Server

from homeserve.bench.prompts import Prompts

CANDIDATES = (("-fa", "on"), ("-fa", "off"), ("-fa", "on", "--no-repack"), ("-fa", "on", "-ub", "256"))
"""Settings that are tried. Behind a long context only the first two differ."""
DEEP = 2
ANSWER = 24
NOISE = 1.03

Settings = tuple[str, ...]
Found = dict[Settings, dict[str, float]]


def search(start: Callable[[Settings], Server], prompts: Prompts, deep: bool) -> Found:
    """Values of each candidate. `start` makes a server, not yet started."""
    found: Found = {}
    short = prompts.shorter(ANSWER)
    for index, settings in enumerate(CANDIDATES):
        server = start(settings)
        try:
            found[settings] = {}
            for measure in MEASURES:
                at_depth = "tg@2048" in measure.gives
                if measure.size > 1 or (at_depth and (not deep or index >= DEEP)):
                    continue
                found[settings].update(measure.run(server, short))
        finally:
            server.stop()
        told = ", ".join(f"{test} {value:.1f}" for test, value in found[settings].items())
        print(f"llama-server {' '.join(settings)}: {told}", file=sys.stderr, flush=True)
    return found


def best(found: Mapping[Settings, Mapping[str, float]], result: str) -> Settings:
    """The settings to measure `result` with: those of the result that it is chosen by."""
    first = CANDIDATES[0]
    by = RESULTS[result].chosen_by
    tried = {settings: values[by] for settings, values in found.items() if by in values}
    if first not in tried:
        return first
    better = {settings: RESULTS[by].ratio(value, tried[first]) for settings, value in tried.items()}
    winner = max(better, key=better.__getitem__)
    return winner if better[winner] > NOISE else first
