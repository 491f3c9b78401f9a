"""What a guide costs a step of a rank: JSON by a schema against free text, and masks made beside the plans against
masks made when they are needed.

    python scripts/benchmarks/guides.py MODEL [--lanes 1,8]                  a model, computed on this machine's CPU
    python scripts/benchmarks/guides.py VOCABULARY --step-ms 8 --vocab 151936    logits that are there after 8 ms

The second form needs a file's vocabulary alone: the compute is a wait, as for a card, and the logits are noise. Each
row of the table is the wall time of a plan of one decode row for each lane, in one process and without an engine; runs
alternate, and the ratio is to free text of the same repeat. `loop` is the CPU time of the plan loop's own thread, which
a busy machine does not change much.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np

from backends.base import PAGE_LEN, Batch, DeviceFacts, Limits
from homeserve.checkpoint import gguf
from homeserve.checkpoint.view import TokenizerSource
from homeserve.wire.records import Boot, Guide, LaneRows, LoadSpec, NewLane, Plan, PlanKind, Sampling, pack_ints
from homeserve.worker.guide import Guides
from homeserve.worker.lanes import Lanes
from homeserve.worker.load import Loaded
from homeserve.worker.runner import Runner
from homeserve.worker.side import InPlace, Side
from homeserve.worker.vocabulary import Source, Vocabulary

LANES, LANE_PAGES = 8, 40
PROMPT = list(range(300, 332))
RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "kind": {"enum": ["first", "second", "another one"]},
        "tags": {
            "type": "array",
            "items": {"type": "string", "pattern": "^[a-z_]{3,12}$"},
            "minItems": 1,
            "maxItems": 3,
        },
    },
    "required": ["name", "age", "kind", "tags"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": RECORD, "minItems": 400}
GUIDE = Guide(
    json.dumps({"grammars": [{"json_schema": SCHEMA | {"x-guidance": {"whitespace_flexible": False}}}]}), pack_ints([0])
)
WAYS: dict[str, tuple[Guide | None, int]] = {"free": (None, 0), "guided": (GUIDE, 2), "guided, not beside": (GUIDE, 0)}


class Waits:
    """A program whose logits are noise, there after `step_ms`."""

    def __init__(self, vocab: int, step_ms: float) -> None:
        self.step_s = step_ms / 1e3
        self.noise = (2.0 * np.random.default_rng(1).standard_normal((64, vocab))).astype(np.float32)
        self.turn = 0

    def run(self, batch: Batch) -> Any:
        time.sleep(self.step_s)
        self.turn = (self.turn + 7) % (64 - LANES)
        return self.noise[self.turn :][: len(batch.logit_rows)]

    def copy_states(self, pairs: Any) -> None:
        pass

    def close(self) -> None:
        pass


@dataclass
class Bench:
    runner: Runner
    lanes: Lanes
    vocabulary: Vocabulary
    seq: int = 0

    def plan(self, new: list[NewLane], rows: list[LaneRows], drop: tuple[int, ...] = ()) -> Any:
        self.seq += 1
        return self.runner.run(Plan(self.seq, 0, PlanKind.MIXED, 1, drop, tuple(new), tuple(rows))).samples

    def steps(self, lanes: int, count: int, guide: Guide | None, threads: int, seed: int) -> list[tuple[float, float]]:
        """Milliseconds of each decode plan, and of the thread that runs it."""
        with closing(Guides(self.vocabulary, threads)) as guides:
            self.lanes.guides = guides
            if guide is not None:
                guides.grammars.begin(guide.grammar).result()
            new, rows = [], []
            for lane in range(lanes):
                sampling = Sampling(temperature=0.8, seed=seed + lane, guide=guide)
                pages = list(range(lane * LANE_PAGES, (lane + 1) * LANE_PAGES))
                new.append(NewLane(lane, self.seq * 100 + lane, len(PROMPT), sampling))
                rows.append(LaneRows(lane, new[-1].request, 0, pack_ints(PROMPT), pack_ints(pages), sample=True))
            self.plan(new, rows)
            times = []
            for step in range(count):
                at = len(PROMPT) + step
                decode = [LaneRows(each.lane, each.request, at, b"", sample=True) for each in new]
                began, busy = time.perf_counter(), time.thread_time()
                samples = self.plan([], decode)
                times.append((1e3 * (time.perf_counter() - began), 1e3 * (time.thread_time() - busy)))
                assert not any(sample.failed for sample in samples), samples
            self.plan([], [], tuple(range(lanes)))
            return times[2:]


def of_model(path: Path, threads: int) -> Bench:
    runner = Runner(Boot(0, 1, 3, 1 << 16, 3, 1 << 16, "cpu", 0, threads, ()), lambda *_: None)
    pages = LANES * LANE_PAGES
    rows = LANES * len(PROMPT)
    spec = LoadSpec(str(path), pages * PAGE_LEN, "f16", rows, LANES, LANES, LANE_PAGES)
    runner.run(Plan(0, 0, PlanKind.LOAD, 1, load=spec))
    loaded = runner._loaded
    assert loaded is not None and loaded.guides is not None
    return Bench(runner, loaded.lanes, loaded.guides.grammars._vocabulary)


def of_vocabulary(path: Path, vocab: int, step_ms: float) -> Bench:
    program: Any = Waits(vocab, step_ms)
    side = Side("pipeline", 0, 1, (0, 1), None, (0,), draws=True)
    limits = Limits(LANES * len(PROMPT), LANES, LANES, LANE_PAGES)
    lanes = Lanes(limits, vocab, (LANES * LANE_PAGES,))
    runner = Runner(Boot(0, 1, 3, 4096, 4, 4096, "waits", 0, 1, ()), lambda *_: None)
    facts: Any = DeviceFacts("waits", "", "", 1, True)
    runner._loaded = Loaded(
        program, None, InPlace({"pipeline": program}, "pipeline"), {"pipeline": side}, lanes, 0, facts, None
    )
    metadata = gguf.read(str(path)).metadata
    keys = {key: value for key, value in metadata.items() if key.startswith("tokenizer.")}
    return Bench(runner, lanes, Vocabulary(Source(str(path), TokenizerSource(keys, None, "")), vocab))


def row(runs: list[list[tuple[float, float]]], free: list[list[tuple[float, float]]]) -> list[float]:
    walls = sorted(wall for run in runs for wall, _ in run)
    pairs = [[statistics.median(wall for wall, _ in run) for run in pair] for pair in zip(runs, free, strict=True)]
    ratio = statistics.median(own / base for own, base in pairs)
    loop = statistics.median(busy for run in runs for _, busy in run)
    return [statistics.median(walls), walls[len(walls) // 10], walls[len(walls) * 9 // 10], ratio, loop]


def timed(what: str, make: Callable[[], object]) -> None:
    began = time.perf_counter()
    make()
    print(f"{what}: {time.perf_counter() - began:.2f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--lanes", default="1,8")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1, help="of the CPU backend")
    parser.add_argument("--step-ms", type=float, default=0.0)
    parser.add_argument("--vocab", type=int, default=0)
    given = parser.parse_args()
    waits = given.step_ms > 0
    bench = of_vocabulary(given.file, given.vocab, given.step_ms) if waits else of_model(given.file, given.threads)
    timed("spellings and trie", lambda: bench.vocabulary.trie)
    with closing(Guides(bench.vocabulary, 0)) as guides:
        timed("grammar", lambda: guides.grammars.begin(GUIDE.grammar).result())
    print("| lanes | way | ms a step (median) | p10 | p90 | to free (median of repeats) | loop ms (median) |")
    print("|---|---|---|---|---|---|---|")
    for lanes in map(int, given.lanes.split(",")):
        told: dict[str, list[list[tuple[float, float]]]] = {way: [] for way in WAYS}
        for repeat in range(given.repeat):
            for way, (guide, threads) in WAYS.items():
                told[way].append(bench.steps(lanes, given.steps, guide, threads, 100 * repeat))
        for way, runs in told.items():
            print(f"| {lanes} | {way} | {' | '.join(f'{number:.3f}' for number in row(runs, told['free']))} |")
    bench.runner.close()


if __name__ == "__main__":
    main()
