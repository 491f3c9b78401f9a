"""One part of scripts/gpu_check, in a process of its own: a card that is lost takes no more with it than this part.

Exit 0 where the part went through (whatever its rows say), 4 where the card was lost, 1 for anything else, with the
reason as the last line on standard error.
"""

from __future__ import annotations

import json
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import gpu_bandwidth
import gpu_fleet
import gpu_launches
import gpu_numerics
import gpu_prefill
import gpu_tokens
from gpu_bench import FULL, QUICK, QUICK_TYPES, TINY, TYPES, Bench, OutOfTime
from gpu_rows import Teller

from backends.gpu.arch import Vendor
from backends.gpu.card import open_card
from backends.gpu.errors import DeviceLost, GpuError
from backends.quant import QuantType

LOST = 4
WITHOUT_A_CARD = ("fleet", "tokens")
"""Parts whose servers open the card."""


@dataclass(frozen=True)
class Job:
    """What a part is told. `done`: cases that an earlier process of it went through."""

    part: str
    vendor: Vendor
    uuid: str
    seconds: float
    size: str
    seed: int
    cases: str = ""
    types: str = ""
    torch: str = sys.executable
    model: str = ""
    done: int = 0

    def as_json(self) -> str:
        return json.dumps(asdict(self))


def main(job: Job) -> int:
    tell = Teller(job.part)
    try:
        if job.part in WITHOUT_A_CARD:
            _with_servers(job, tell)
        else:
            _with_a_card(job, tell)
    except DeviceLost as lost:
        print(f"the card was lost: {lost.message}", file=sys.stderr)
        return LOST
    except GpuError as error:
        print(" ".join(f"{error.message}; {error.fix}".split()), file=sys.stderr)
        return 1
    except RuntimeError as error:  # of a server that did not come up: its log's end
        print(" ".join(str(error).split())[-400:], file=sys.stderr)
        return 1
    return 0


def _with_servers(job: Job, tell: Teller) -> None:
    with tempfile.TemporaryDirectory(prefix="homeserve-gpu-check-") as folder:
        if job.part == "fleet":
            gpu_fleet.run(tell, job.uuid, Path(folder), tiny=job.size == "tiny")
        else:
            quick, tiny = job.size == "quick", job.size == "tiny"
            gpu_tokens.run(tell, job.uuid, Path(folder), job.model, quick=quick, tiny=tiny)
    tell.end()


def _with_a_card(job: Job, tell: Teller) -> None:
    tell.at("opening the card")
    until = time.monotonic() + job.seconds
    card = open_card(job.vendor, uuid=job.uuid, say=lambda text: print(text, file=sys.stderr))
    bench = Bench(card, {"full": FULL, "quick": QUICK, "tiny": TINY}[job.size], until)
    try:
        _measure(job, bench, tell)
    except OutOfTime:
        tell.row(
            "the rest",
            ok=False,
            note=f"not within {job.seconds:.0f} s; kernels that were compiled are kept, so a second run comes further",
        )
        tell.end()
    card.close()


def _measure(job: Job, bench: Bench, tell: Teller) -> None:
    types = _types(job)
    match job.part:
        case "numerics":
            gpu_numerics.run(bench, tell, seed=job.seed, pattern=job.cases, done=job.done)
            return
        case "bandwidth":
            gpu_bandwidth.run(bench, tell, types)
        case "prefill":
            gpu_prefill.run(bench, tell, types, job.torch)
        case "launches":
            gpu_launches.run(bench, tell)
    tell.end()


def _types(job: Job) -> Sequence[QuantType]:
    if job.types:
        return [QuantType[name] for name in job.types.split(",")]
    return QUICK_TYPES if job.size == "quick" else TYPES


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # servers are stopped on the way out
    sys.exit(main(Job(**json.loads(sys.argv[1]))))
