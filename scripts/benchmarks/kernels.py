"""Speed of the CPU kernels by themselves: what `scripts/bench_kernels` runs.

Every case is a program of the backend with one op, repeated over weights or KV pages of its own until they are far
more than a cache holds (`FAR`), so that one row of a batch meets them in memory as a decode does. A line is an op, a
type, a shape and a number of rows: microseconds of one op (median of as many calls as fit into `--seconds`), and what
that is in GB/s of weights or KV rows (few rows) or GOP/s (many: two for each product), with the percent of what the
machine reads or multiplies at most, measured just before (limits.py). Weights are random bytes with finite scales:
right for speed only.
"""

from __future__ import annotations

import argparse
import csv
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import limits
import numpy as np
import numpy.typing as npt
from subjects import folder

from backends.base import (
    NO_STATES,
    Attention,
    Batch,
    Buffer,
    DeltaNet,
    EmbedRows,
    ExpertMatrix,
    Experts,
    GatedActivation,
    KvLayer,
    KvPool,
    Limits,
    Linear,
    LinearPart,
    Norm,
    Op,
    OpenOptions,
    RopeStore,
    Routing,
    StateLayer,
    StatePool,
    TensorView,
    Weight,
)
from backends.cpu import levels
from backends.cpu.backend import CpuBackend
from backends.cpu.capability import MATRIX_TYPES
from backends.quant import QuantType

FAR = 160 * 1024 * 1024
PAGE = 16
NO_KV = KvPool((), 0, QuantType.F16)
LINEAR_SHAPES = ((8960, 1536), (1536, 8960), (1536, 576))
ATTENTION_SHAPES = ((9, 3, 64, 30), (12, 2, 128, 28), (4, 1, 256, 18))
"""Heads, kv heads, head width, layers."""
KV_BYTES = {QuantType.F16: 2.0, QuantType.Q8_0: 34 / 32, QuantType.F32: 4.0}
DEPTH, CHUNK = 2048, 256
GIGA = 1e9
CACHED = ("norm", "gate")
"""Ops that work in a cache, which no limit here is about."""

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
    """A line of the CSV. `percent` is of reading for GB/s, of the int16 peak for GOP/s; none for floats."""

    device: str
    isa: str
    threads: int
    commit: str
    date: str
    op: str
    type: str
    shape: str
    rows: int
    calls: int
    us: float
    unit: str
    median: float
    best: float
    percent: float | None


@dataclass
class Case:
    """A program: its ops, of which `count` are what is measured, the rest feeds them; and what one op works through:
    `amount` bytes (GB/s), products and sums of integers (GOP/s) or of floats (GFLOP/s)."""

    op: str
    type: str
    shape: str
    rows: int
    unit: str
    amount: float
    ops: list[Op] = field(default_factory=list)
    views: dict[str, TensorView] = field(default_factory=dict)
    count: int = 1
    kv: KvPool = NO_KV
    states: StatePool = NO_STATES
    first: int = 0
    """Position of the first row."""
    operations: float = 0.0
    """Of integers, where an op of few rows may be bound by them as well: the limit that is nearer is told."""

    def feed(self, name: str, width: int) -> Buffer:
        """A buffer whose rows are one random row."""
        values = np.random.default_rng(len(self.views)).standard_normal((1, width), dtype=np.float32)
        weight = self.floats(f"{name}.table", values)
        self.ops.append(EmbedRows(weight, buffer := Buffer(name, width)))
        return buffer

    def floats(self, name: str, values: npt.NDArray[np.float32]) -> Weight:
        rows, cols = values.shape
        data = np.ascontiguousarray(values, np.float32).view(np.uint8).reshape(-1)
        self.views[name] = TensorView(name, QuantType.F32, rows, cols, data)
        return Weight(name, rows, cols)

    def matrix(self, name: str, kind: QuantType, rows: int, cols: int) -> Weight:
        self.views[name] = TensorView(name, kind, rows, cols, random_bytes(kind, rows, cols, len(self.views)))
        return Weight(name, rows, cols)


def random_bytes(kind: QuantType, rows: int, cols: int, seed: int) -> npt.NDArray[np.uint8]:
    random = np.random.default_rng(seed)
    if kind.block_len == 1:
        values = random.standard_normal((rows, cols), dtype=np.float32)
        halves = values.astype(np.float16).view(np.uint8) if kind is QuantType.F16 else values.view(np.uint16)[:, 1::2]
        data = values.view(np.uint8) if kind is QuantType.F32 else np.ascontiguousarray(halves).view(np.uint8)
        return data.reshape(-1)
    blocks = np.frombuffer(random.bytes(rows * kind.row_bytes(cols)), np.uint8).reshape(-1, kind.block_bytes).copy()
    for at in SCALES.get(kind, (0, 2)):
        blocks[:, at : at + 2] = np.array([0.01], np.float16).view(np.uint8)
    if kind is QuantType.MXFP4:
        blocks[:, 0] = 120
    return blocks.reshape(-1)


# ------------------------------------------------------------------------------------------------------------- cases


def linear_cases(types: Sequence[QuantType]) -> Iterator[Case]:
    for kind in types:
        for height, width in (each for each in LINEAR_SHAPES if each[1] % kind.block_len == 0):
            size = height * kind.row_bytes(width)
            for rows in (1, 8, CHUNK):
                few = rows < 16
                count = max(1, FAR // size) if few else 2
                amount = size if few else 2 * height * width * rows
                case = Case("linear", kind.name, f"{width} to {height}", rows, "GB/s" if few else "GOP/s", amount)
                case.operations = 2.0 * height * width * rows if few else 0.0
                source, out = case.feed("x", width), Buffer("y", height)
                for index in range(count):
                    part = LinearPart(case.matrix(f"w{index}", kind, height, width), out)
                    case.ops.append(Linear(source, (part,)))
                case.count = count
                yield case


def attention_cases(types: Sequence[QuantType]) -> Iterator[Case]:
    for kind in (each for each in KV_BYTES if each in types):
        for heads, kv_heads, dim, layers in ATTENTION_SHAPES:
            for rows, first in ((1, DEPTH), (CHUNK, 0), (CHUNK, DEPTH - CHUNK)):
                seen = sum(first + row + 1 for row in range(rows))
                few = rows == 1
                amount = seen * 2 * kv_heads * dim * KV_BYTES[kind] if few else 4.0 * seen * heads * dim
                shape = f"{heads} on {kv_heads} of {dim}, behind {first}"
                case = Case("attention", kind.name, shape, rows, "GB/s" if few else "GFLOP/s", amount)
                q, k, v = (case.feed(name, n * dim) for name, n in (("q", heads), ("k", kv_heads), ("v", kv_heads)))
                used = layers if few else 4
                for layer in range(used):
                    case.ops.append(RopeStore(q, k, v, layer, heads, kv_heads, dim, None))
                for layer in range(used):
                    out = Buffer("out", heads * dim)
                    case.ops.append(Attention(q, out, layer, heads, kv_heads, dim, dim**-0.5))
                case.count, case.first = used, first
                case.kv = KvPool((KvLayer(kv_heads, dim),) * used, DEPTH + CHUNK, kind)
                yield case


def expert_cases(types: Sequence[QuantType]) -> Iterator[Case]:
    width, inner, experts, used = 2048, 512, 32, 8
    for kind in (each for each in (QuantType.Q4_K, QuantType.MXFP4) if each in types):
        for rows in (1, 8, CHUNK):
            few = rows == 1
            each = 3 * inner * kind.row_bytes(width)
            amount = used * each if few else 2.0 * 3 * inner * width * used * rows
            case = Case("experts", kind.name, f"{used} of {experts}, {width} by {inner}", rows, "GOP/s", amount)
            case.unit = "GB/s" if few else "GOP/s"
            source, logits, out = case.feed("x", width), case.feed("logits", experts), Buffer("y", width)
            case.count = max(1, FAR // (each * experts)) if few else 1
            for index in range(case.count):
                gate, up = (case.matrix(f"{part}{index}", kind, experts * inner, width) for part in ("gate", "up"))
                down = case.matrix(f"down{index}", kind, experts * width, inner)
                matrices = (ExpertMatrix(gate, inner, inner), ExpertMatrix(up, inner, inner))
                routing = Routing(experts, used)
                case.ops.append(Experts(source, logits, out, routing, *matrices, ExpertMatrix(down, width, width)))
            yield case


def delta_cases(types: Sequence[QuantType]) -> Iterator[Case]:
    keys, values, dim, layers = 16, 32, 128, 18
    channels, random = (2 * keys + values) * dim, np.random.default_rng(2)
    for rows in (1, CHUNK) if QuantType.F32 in types else ():
        few = rows == 1
        # A row reads and writes each matrix; of products and sums there are three passes of two.
        amount = 2.0 * values * dim * dim * 4 if few else 6.0 * values * dim * dim * rows
        case = Case(
            "delta net", "F32", f"{keys} and {values} heads of {dim}", rows, "GB/s" if few else "GFLOP/s", amount
        )
        mixed, z = case.feed("mixed", channels), case.feed("z", values * dim)
        beta, alpha = case.feed("beta", values), case.feed("alpha", values)
        case.count = layers if few else 2
        for layer in range(case.count):
            weights = {
                "conv": case.floats(f"conv{layer}", random.standard_normal((channels, 4), dtype=np.float32)),
                "dt_bias": case.floats(f"dt{layer}", np.zeros((1, values), np.float32)),
                "a": case.floats(f"a{layer}", -np.ones((1, values), np.float32)),
                "norm": case.floats(f"norm{layer}", np.ones((1, dim), np.float32)),
            }
            out = Buffer("out", values * dim)
            heads = {"key_heads": keys, "value_heads": values, "key_dim": dim, "value_dim": dim, "kernel": 4}
            case.ops.append(DeltaNet(mixed, z, beta, alpha, out, layer, **weights, **heads, eps=1e-6, tiled=True))
        case.states = StatePool((StateLayer(channels, 4, values, dim, dim),) * case.count, 1)
        yield case


def small_cases(types: Sequence[QuantType]) -> Iterator[Case]:
    """Ops that only pass over activations: what counts is their time, so bytes are of what they read and write."""
    count = 64
    for rows in (1, CHUNK) if QuantType.F32 in types else ():
        case = Case("norm", "F32", "1536", rows, "GB/s", 4.0 * 2 * 1536 * rows, count=count)
        source, weight = case.feed("x", 1536), case.floats("w", np.ones((1, 1536), np.float32))
        case.ops += [Norm(source, weight, 1e-6, Buffer("y", 1536))] * count
        yield case
        case = Case("gate", "F32", "8960", rows, "GB/s", 4.0 * 3 * 8960 * rows, count=count)
        gate, up = case.feed("gate", 8960), case.feed("up", 8960)
        case.ops += [GatedActivation(gate, up, Buffer("y", 8960))] * count
        yield case


CASES = {
    "linear": linear_cases,
    "attention": attention_cases,
    "experts": expert_cases,
    "delta": delta_cases,
    "small": small_cases,
}


# ------------------------------------------------------------------------------------------------------- measurement


def batch_of(case: Case) -> Batch:
    """The rows of one sequence, its pages in order."""
    zeros: npt.NDArray[np.int32] = np.zeros(case.rows, np.int32)
    positions = np.arange(case.first, case.first + case.rows, dtype=np.int32)
    pages = np.arange((DEPTH + CHUNK) // PAGE, dtype=np.int32)
    states = zeros[:1] if case.states.layers else zeros[:0]
    return Batch(zeros, positions, positions[None], zeros, pages[None, None], zeros[:0], states)


def seconds_of(backend: CpuBackend, case: Case, seconds: float) -> list[float]:
    """Seconds of one measured op, in each call: the program's time without that of a program that only feeds."""
    last = len(case.ops) - case.count
    feeding = case.ops[:last]
    whole = _times(backend, case, case.ops, seconds)
    fed = min(_times(backend, case, feeding, seconds / 4))
    return [max(taken - fed, 1e-9) / case.count for taken in whole]


def _times(backend: CpuBackend, case: Case, ops: Sequence[Op], seconds: float) -> list[float]:
    limit = Limits(rows=case.rows, logit_rows=1, lanes=1, lane_pages=(DEPTH + CHUNK) // PAGE)
    states = case.states if any(isinstance(op, DeltaNet) for op in ops) else NO_STATES
    program = backend.bind(ops, case.views, case.kv, limit, lambda *_: None, states)
    batch = batch_of(case)
    if not states.layers:
        batch.states = batch.states[:0]
    program.run(batch)
    times: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 3:
        start = time.perf_counter()
        program.run(batch)
        times.append(time.perf_counter() - start)
    program.close()
    return times


def row_of(backend: CpuBackend, case: Case, seconds: float, commit: str, most: limits.Limits) -> Row:
    times = seconds_of(backend, case, seconds)
    facts = backend.facts
    options = [(case.unit, case.amount)] + ([("GOP/s", case.operations)] if case.operations else [])
    told = [_told(unit, amount, times, most if case.op not in CACHED else None) for unit, amount in options]
    unit, median, best, percent = max(told, key=lambda each: each[3] or 0.0)
    return Row(
        *(facts.name, facts.isa, facts.threads, commit, time.strftime("%Y-%m-%d")),
        *(case.op, case.type, case.shape, case.rows, len(times), round(statistics.median(times) * 1e6, 2)),
        *(unit, round(median, 2), round(best, 2), percent),
    )


def _told(
    unit: str, amount: float, times: Sequence[float], most: limits.Limits | None
) -> tuple[str, float, float, float | None]:
    """Unit, median, best, and percent of the limit that the unit has."""
    median, best = amount / statistics.median(times) / GIGA, amount / min(times) / GIGA
    limit = {"GB/s": most.read_gb_s, "GOP/s": most.int16_gop_s}.get(unit) if most else None
    return unit, median, best, round(100 * median / limit, 1) if limit else None


def plot(rows: Sequence[Row]) -> str:
    """An SVG: a bar for each line that has a limit, 100 percent at the dashed line."""
    shown = [row for row in rows if row.percent is not None]
    height = 50 + 18 * len(shown)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 {height}" font-family="system-ui, sans-serif" '
        'font-size="12">',
        "<style>text{fill:#24292f}.b{fill:#2f7ed8}line{stroke:#6e7781}"
        "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.b{fill:#58a6ff}line{stroke:#8b949e}}</style>",
        '<text x="10" y="20" font-weight="600">Kernels: percent of reading (GB/s) or of the int16 peak (GOP/s)</text>',
    ]
    for index, row in enumerate(shown):
        y, width = 34 + 18 * index, 2.8 * min(row.percent or 0.0, 140.0)
        words = f"{row.op} {row.type} {row.shape}, {row.rows} rows"
        parts += [
            f'<text x="310" y="{y + 11}" text-anchor="end">{words}</text>',
            f'<rect class="b" x="320" y="{y}" width="{width:.1f}" height="13" rx="2"/>',
            f'<text x="{324 + width:.1f}" y="{y + 11}">{row.percent:.0f}</text>',
        ]
    parts.append(f'<line x1="600" x2="600" y1="28" y2="{height - 12}" stroke-dasharray="3 3"/>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def commit_of(root: Path) -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="scripts/bench_kernels", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--csv", type=Path, help="also write the rows to this file")
    parser.add_argument("--plot", type=Path, help="also draw the percents into this SVG")
    parser.add_argument("--isa", default="", help=f"one level of {', '.join(levels.LEVELS)}; the best if absent")
    parser.add_argument("--ops", default=",".join(CASES), help="of %(default)s")
    parser.add_argument("--types", default="", help="only these types of weights or KV rows, by comma")
    parser.add_argument("--threads", type=int, default=0, help="0: one for each core that this process may use")
    parser.add_argument("--seconds", type=float, default=0.3, help="for each row of the table")
    options = parser.parse_args(argv)
    names = options.types.upper().split(",") if options.types else []
    if unknown := [*set(options.ops.split(",")) - CASES.keys(), *set(names) - QuantType.__members__.keys()]:
        parser.error(f"unknown: {', '.join(unknown)}")
    wanted = [QuantType[name] for name in names]
    backend = CpuBackend(OpenOptions(threads=options.threads, isa=options.isa))
    commit, found = commit_of(Path(__file__).resolve().parents[2]), []
    most = limits.measure(backend.facts.threads, folder())
    print(f"{backend.facts.name}, {backend.facts.threads} threads, {platform.platform()}, commit {commit}")
    print(f"reads {most.read_gb_s:.1f} GB/s, int16 {most.int16_gop_s:.0f}, int8 {most.int8_gop_s:.0f} GOP/s")
    for name in options.ops.split(","):
        types = wanted or [*MATRIX_TYPES, *(kind for kind in KV_BYTES if kind not in MATRIX_TYPES)]
        for case in CASES[name]([kind for kind in types if name != "linear" or kind in MATRIX_TYPES]):
            row = row_of(backend, case, options.seconds, commit, most)
            found.append(row)
            percent = "" if row.percent is None else f"{row.percent:5.0f} %"
            what = f"{row.op:10}{row.type:7}{row.shape:28}{row.rows:4} rows"
            print(f"{what} {row.us:11.1f} us {row.median:8.2f} {row.unit:8}best {row.best:8.2f} {percent}", flush=True)
    backend.close()
    if options.csv is not None:
        with options.csv.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, [each.name for each in fields(Row)], lineterminator="\n")
            writer.writeheader()
            writer.writerows(asdict(row) for row in found)
    if options.plot is not None:
        options.plot.write_text(plot(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
