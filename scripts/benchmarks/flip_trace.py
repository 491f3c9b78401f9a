"""The load of the simulation (`flip_simulation.mixed_load`) on a real server: in either layout, and with the policy.

A card's load is too long for a CPU, so it is made shorter: prompts and answers by a factor each, the time between calls
by another, so that the server is as busy as the cards were. Calls are sent when their time comes, whatever came of
those before. One server at a time; each mode `--repeat` times, in turn.

    makespan       from the first call sent to the last token
    TTFT           of each call from when it was due to its first token, a mean over calls
    ms per token   behind the first one, a mean over calls
    whole          from when it was due to its last token, a mean over calls
"""

from __future__ import annotations

import argparse
import csv
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flip_simulation import REQUESTS, Call, mixed_load
from origin import commit
from servers import Server, homeserve

from budget.host import read_cpu
from homeserve.bench.client import Timing, complete
from homeserve.bench.prompts import Prompts, ids_below

MODES = {
    "pipeline": ("--layout", "pipeline", "--flip", "off"),
    "tensor": ("--layout", "tensor", "--flip", "off"),
    "auto": ("--layout", "pipeline", "--flip", "auto"),
}
COLUMNS = (
    "commit",
    "device",
    "model",
    "ranks",
    "mode",
    "run",
    "makespan_s",
    "ttft_s",
    "per_token_ms",
    "whole_s",
    "flips",
)


@dataclass(frozen=True)
class Measured:
    """One run of the load. Seconds, and milliseconds for each token."""

    makespan_s: float
    ttft_s: float
    per_token_ms: float
    whole_s: float
    flips: int


def scaled(calls: Sequence[Call], prompt: float, answer: float, pause: float) -> tuple[Call, ...]:
    """The same calls with prompts and answers divided by `prompt` and `answer`, and times multiplied by `pause`."""
    return tuple(
        Call(call.at_s * pause, max(1, round(call.prompt / prompt)), max(2, round(call.answer / answer)))
        for call in calls
    )


def summed(dues: Sequence[float], timings: Sequence[Timing], flips: int) -> Measured:
    """Of calls that were due at `dues`, on the clock of their timings."""
    return Measured(
        max(timing.last for timing in timings) - min(dues),
        statistics.mean(timing.first - due for due, timing in zip(dues, timings, strict=True)),
        statistics.mean((timing.last - timing.first) / (timing.tokens - timing.first_tokens) for timing in timings)
        * 1e3,
        statistics.mean(timing.last - due for due, timing in zip(dues, timings, strict=True)),
        flips,
    )


def play(server: Server, calls: Sequence[Call], prompts: Prompts) -> Measured:
    """Send each call at its time. Raises what a call raises."""
    began = time.monotonic() + 0.5
    dues = [began + call.at_s for call in calls]
    bodies = [prompts.draw(call.prompt) for call in calls]
    timings: dict[int, Timing] = {}
    errors: list[BaseException] = []

    def one(at: int) -> None:
        try:
            time.sleep(max(0.0, dues[at] - time.monotonic()))
            timings[at] = complete(server, bodies[at], calls[at].answer)
        except (OSError, RuntimeError) as error:
            errors.append(error)

    threads = [threading.Thread(target=one, args=(at,)) for at in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    flips = int(server.get("/v1/homeserve/status")["flip"]["committed"])
    return summed(dues, [timings[at] for at in range(len(calls))], flips)


def started(model: str, mode: str, given: argparse.Namespace, context: int, folder: Path) -> Server:
    server = homeserve(model, given.threads, context, folder)
    server.realtime = given.realtime
    server.command += ["--devices", f"cpu:{given.ranks}", *MODES[mode]]
    if mode == "auto":
        server.command += ["--flip-dwell-s", str(given.dwell_s)]
    server.start()
    return server


def table(rows: Sequence[tuple[str, Measured]]) -> str:
    """Medians over the runs of each mode, with the least and the most."""
    lines = [
        "| mode | makespan s | mean TTFT s | mean ms per token | mean whole request s | flips |",
        "|---|---|---|---|---|---|",
    ]
    for mode in MODES:
        runs = [measured for name, measured in rows if name == mode]
        if not runs:
            continue
        cells = [
            _cell([getattr(run, name) for run in runs], digits)
            for name, digits in (("makespan_s", 1), ("ttft_s", 1), ("per_token_ms", 0), ("whole_s", 1), ("flips", 0))
        ]
        lines.append(f"| {mode} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(values: Sequence[float], digits: int) -> str:
    middle = f"{statistics.median(values):.{digits}f}"
    return middle if len(values) == 1 else f"{middle} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/flip_trace", description="The mixed load on a real server, in each mode."
    )
    parser.add_argument("model", help="a GGUF file")
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="of each rank")
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--prompt-by", type=float, default=32, help="prompts of 8k and 32k tokens, divided by this")
    parser.add_argument("--answer-by", type=float, default=8, help="answers of 512 tokens, divided by this")
    parser.add_argument("--pause-by", type=float, default=0.4, help="5 s between calls, multiplied by this")
    parser.add_argument("--dwell-s", type=float, default=5.0)
    parser.add_argument("--modes", default=",".join(MODES), help="only these, by comma")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--vocab", type=int, default=32000, help="prompts are drawn from token ids below this")
    parser.add_argument("--no-realtime", dest="realtime", action="store_false")
    parser.add_argument("--csv", type=Path, help="append each run here")
    given = parser.parse_args(argv)
    calls = scaled(mixed_load(given.requests), given.prompt_by, given.answer_by, given.pause_by)
    context = -(-max(call.prompt + call.answer for call in calls) // 256) * 256
    rows: list[tuple[str, Measured]] = []
    for run in range(given.repeat):
        for mode in given.modes.split(","):
            with tempfile.TemporaryDirectory(prefix="homeserve-trace-") as folder:
                server = started(given.model, mode, given, context, Path(folder))
                try:
                    measured = play(server, calls, Prompts(random.Random(run), ids_below(given.vocab)))
                finally:
                    server.stop()
            rows.append((mode, measured))
            print(f"{mode:10s} {run} {measured}", flush=True)
            if given.csv:
                _append(
                    given.csv, (commit(), read_cpu().name, Path(given.model).stem, given.ranks, mode, run), measured
                )
    print(f"\n{table(rows)}")
    return 0


def _append(path: Path, first: Sequence[object], measured: Measured) -> None:
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.writer(file)
        if new:
            writer.writerow(COLUMNS)
        rest = [
            round(value, 4) for value in (measured.makespan_s, measured.ttft_s, measured.per_token_ms, measured.whole_s)
        ]
        writer.writerow((*first, *rest, measured.flips))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
