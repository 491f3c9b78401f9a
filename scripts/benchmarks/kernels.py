"""Speed of the linear kernels: what `scripts/bench_kernels` runs.

One row (decode) reads more weights than any cache holds and is counted in GB/s of packed weights; many rows (prefill)
are counted in GOP/s, two operations for each weight and row. A row of the table is the median of as many calls as fit
into `--seconds`, with the fastest call beside it. Weights are random bytes with finite scales: right for speed only.
"""

from __future__ import annotations

import argparse
import csv
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
import numpy.typing as npt

from backends.base import Batch, Buffer, EmbedRows, KvPool, Limits, Linear, LinearPart, OpenOptions, TensorView, Weight
from backends.cpu import levels
from backends.cpu.backend import CpuBackend
from backends.cpu.capability import MATRIX_TYPES
from backends.quant import QuantType

COLS = 2048
DECODE_BYTES = 256 * 1024 * 1024
PREFILL_ROWS = 2048
BATCH = 256

SCALES = {
    **dict.fromkeys((QuantType.Q4_0, QuantType.Q5_0, QuantType.Q8_0, QuantType.IQ4_NL, QuantType.IQ4_XS), (0,)),
    QuantType.Q2_K: (80, 82),
    QuantType.Q3_K: (108,),
    QuantType.Q6_K: (208,),
    QuantType.MXFP4: (),
}
"""Where a block's half-precision scales lie; (0, 2) for the types that also have a minimum."""


@dataclass(frozen=True)
class Row:
    device: str
    isa: str
    threads: int
    commit: str
    date: str
    type: str
    test: str
    unit: str
    calls: int
    median: float
    best: float


def weights(kind: QuantType, rows: int) -> TensorView:
    random = np.random.default_rng(0)
    if kind.block_len == 1:
        values = random.standard_normal((rows, COLS), dtype=np.float32)
        halves = values.astype(np.float16).view(np.uint8) if kind is QuantType.F16 else values.view(np.uint16)[:, 1::2]
        data = values.view(np.uint8) if kind is QuantType.F32 else np.ascontiguousarray(halves).view(np.uint8)
    else:
        blocks = random.integers(0, 256, (rows * COLS // kind.block_len, kind.block_bytes), dtype=np.uint8)
        for at in SCALES.get(kind, (0, 2)):
            blocks[:, at : at + 2] = np.array([0.01], np.float16).view(np.uint8)
        if kind is QuantType.MXFP4:
            blocks[:, 0] = 120
        data = blocks
    return TensorView("w", kind, rows, COLS, data.reshape(-1))


def measure(backend: CpuBackend, kind: QuantType, rows: int, batch_rows: int, seconds: float) -> list[float]:
    """Seconds of each call."""
    source, out = Buffer("x", COLS), Buffer("y", rows)
    values = np.random.default_rng(1).standard_normal((1, COLS), dtype=np.float32)
    table = TensorView("table", QuantType.F32, 1, COLS, values.view(np.uint8).reshape(-1))
    ops = (EmbedRows(Weight("table", 1, COLS), source), Linear(source, (LinearPart(Weight("w", rows, COLS), out),)))
    limits = Limits(rows=batch_rows, logit_rows=1, lanes=1, lane_pages=1)
    program = backend.bind(
        ops, {"table": table, "w": weights(kind, rows)}, KvPool((), 0, QuantType.F16), limits, lambda *_: None
    )
    zeros: npt.NDArray[np.int32] = np.zeros(batch_rows, np.int32)
    batch = Batch(zeros, zeros, zeros, zeros, zeros[:1, None], zeros[:0])
    program.run(batch)
    times = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 3:
        start = time.perf_counter()
        program.run(batch)
        times.append(time.perf_counter() - start)
    program.close()
    return times


def rows_of(backend: CpuBackend, seconds: float, commit: str) -> Iterator[Row]:
    facts, date = backend.facts, time.strftime("%Y-%m-%d")
    for kind in MATRIX_TYPES:
        decode_rows = DECODE_BYTES // kind.row_bytes(COLS) // 16 * 16
        weight_gb = decode_rows * kind.row_bytes(COLS) / 1e9
        gigaops = 2 * PREFILL_ROWS * COLS * BATCH / 1e9
        for test, rows, batch_rows, unit, amount in (
            ("matvec", decode_rows, 1, "GB/s", weight_gb),
            (f"gemm {BATCH}", PREFILL_ROWS, BATCH, "GOP/s", gigaops),
        ):
            times = measure(backend, kind, rows, batch_rows, seconds)
            median, best = amount / statistics.median(times), amount / min(times)
            yield Row(
                *(facts.name, facts.isa, facts.threads, commit, date, kind.name, test, unit, len(times)),
                *(round(median, 2), round(best, 2)),
            )


def commit_of(root: Path) -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="scripts/bench_kernels", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--csv", type=Path, help="also write the rows to this file")
    parser.add_argument(
        "--isa", default="", help=f"one level of {', '.join(levels.LEVELS)}; all that the CPU has if absent"
    )
    parser.add_argument("--threads", type=int, default=0, help="0: one for each core that this process may use")
    parser.add_argument("--seconds", type=float, default=0.5, help="for each row of the table")
    options = parser.parse_args(argv)
    commit, found = commit_of(Path(__file__).resolve().parents[2]), []
    for isa in (options.isa,) if options.isa else levels.host_levels():
        backend = CpuBackend(OpenOptions(threads=options.threads, isa=isa))
        if not found:
            print(f"{backend.facts.name}, {backend.facts.threads} threads, {platform.platform()}, commit {commit}")
        for row in rows_of(backend, options.seconds, commit):
            found.append(row)
            print(
                f"{row.isa:10} {row.type:5} {row.test:9} {row.median:9.2f} {row.unit:5} best {row.best:9.2f}",
                flush=True,
            )
        backend.close()
    if options.csv is not None:
        with options.csv.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, [field.name for field in fields(Row)])
            writer.writeheader()
            writer.writerows(asdict(row) for row in found)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
