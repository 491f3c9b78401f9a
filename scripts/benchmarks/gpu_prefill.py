"""Many rows: the products of a prompt, against torch's on the same card, and from how many rows on they are ahead.

torch multiplies halves (float16) of the same size, by the vendor's library. It is asked in a process of its own, of the
Python that `--torch` names: homeserve needs none. Where there is none for this card, the own kernel for halves stands
in, and a row says so.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

from gpu_bandwidth import acts_bytes, acts_of, spread
from gpu_bench import MIB, Bench
from gpu_rows import Teller

from backends.gpu import planes
from backends.gpu.device import Memory
from backends.gpu.launch import Launch
from backends.gpu.ops import linear, many, quants
from backends.gpu.ops.buffers import Planes, Rows
from backends.gpu.steps.dense import few_rows_most
from backends.quant import QuantType

PREFILL_GOAL = 0.70
TERA = 1e12
TORCH = Path(__file__).with_name("gpu_torch.py")
TORCH_S = 60.0
CROSSING_FAR = 64 * MIB
"""Matrices of the crossover lie over so much: it is a question of both forms alike."""


def run(bench: Bench, tell: Teller, types: Sequence[QuantType], torch: str) -> None:
    rows, outs, cols = bench.sizes.prefill
    tell.at("compiling")
    bench.prepare(many.LINEAR[quant, many.block_rows(rows)] for quant in (QuantType.F16, *types))
    tell.at("torch")
    best, why = torch_tflops(torch, bench, rows, outs, cols)
    goal = bench.sizes.goal(PREFILL_GOAL)
    if why:
        best, goal = many_tflops(bench, QuantType.F16, rows, outs, cols), None
        tell.row(
            f"torch matmul f16, {rows} rows, {cols} to {outs}",
            note=f"{why} (--torch names a Python): the own f16 stands in",
        )
    else:
        tell.row(f"torch matmul f16, {rows} rows, {cols} to {outs}", best, "TFLOP/s")
    for quant in types:
        what = f"linear_many {quant.name}, {rows} rows, {cols} to {outs}"
        tell.at(what)
        tell.row(what, many_tflops(bench, quant, rows, outs, cols), "TFLOP/s", of=best, goal=goal)
    tell.at("compiling few rows")
    bench.prepare(linear.LINEAR_FEW[quant, 1] for quant in types)
    for quant in types:
        tell.at(f"crossover {quant.name}")
        _crossing(bench, tell, quant)


def torch_tflops(python: str, bench: Bench, rows: int, outs: int, cols: int) -> tuple[float, str]:
    """What torch reaches, or why it says nothing."""
    facts = bench.card.facts
    asked = json.dumps({"rows": rows, "outs": outs, "cols": cols, "uuid": facts.uuid, "name": facts.name})
    try:
        done = subprocess.run([python, str(TORCH), asked], capture_output=True, text=True, timeout=TORCH_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return 0.0, f"{python} cannot be asked for torch ({error})"
    try:
        told = json.loads(done.stdout.strip().splitlines()[-1])
        return float(told.get("tflops", 0.0)), str(told.get("why", ""))
    except (ValueError, IndexError):
        words = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1][:200]
        return 0.0, f"torch of {python} failed: {words}"


def many_tflops(bench: Bench, quant: QuantType, rows: int, outs: int, cols: int) -> float:
    """The product alone, its rows made halves before; in the blocks that a program takes."""
    matrix, x = bench.memory(planes.matrix_bytes(quant, outs, cols)), _Halves(bench, rows, cols)
    out = bench.memory(4 * rows * outs)
    try:
        given = many.Matrix(quant, matrix.address, outs, cols)
        taken = bench.seconds_of(many.linear(given, x.halved, rows, out.address, outs))
        return 2.0 * rows * outs * cols / taken / TERA
    finally:
        for each in (matrix, x, out):
            each.close()


class _Halves:
    """Rows as the many-row form takes them, and the floats that they are made of."""

    def __init__(self, bench: Bench, rows: int, cols: int) -> None:
        self._held: tuple[Memory, ...] = (
            bench.memory(many.halved_bytes(rows, cols)),
            bench.memory(4 * rows),
            bench.memory(4 * rows * cols),
        )
        self.halved = many.Halved(self._held[0].address, self._held[1].address, cols)
        self.floats = self._held[2].address

    def close(self) -> None:
        for each in self._held:
            each.close()


# ------------------------------------------------------------------------------------------------------------ crossover


def _crossing(bench: Bench, tell: Teller, quant: QuantType) -> None:
    """The first number of rows from which on the many-row form stays ahead, what it makes of them counted in."""
    counts = bench.sizes.rows
    ahead = [_is_many_ahead(bench, quant, rows) for rows in counts]
    first = next((i for i in range(len(counts)) if all(ahead[i:])), len(counts))
    code = few_rows_most(quant, bench.card.facts.arch) + 1
    behind = counts[first - 1] if first else 0
    note = f"the code changes at {code}"
    if first == len(counts):
        tell.row(f"many rows are ahead, {quant.name}, beyond", float(counts[-1]), "rows", note=note)
    else:
        note += f"; at {behind} few rows were" if behind else ""
        tell.row(f"many rows are ahead, {quant.name}, from", float(counts[first]), "rows", note=note)


def _is_many_ahead(bench: Bench, quant: QuantType, rows: int) -> bool:
    outs, cols = bench.sizes.crossing
    size = planes.matrix_bytes(quant, outs, cols)
    far = min(CROSSING_FAR, bench.far_bytes)
    arena, x, out = bench.memory(max(far, size) + size), _Halves(bench, rows, cols), bench.memory(4 * rows * outs)
    planes_at = bench.memory(acts_bytes(rows, cols))
    places = spread(arena, size, far)
    try:
        acts = acts_of(quant, planes_at.address, rows, cols)
        few: list[Launch] = []
        many_rows = [*many.halve(x.halved, x.floats, rows, cols)]
        if isinstance(acts, Planes):
            few.append(quants.quantize_rows(Rows(x.floats, cols), acts, rows, cols))
        for at in places:
            few.append(linear.linear_few(quant, out.address, at, acts, rows=rows, outs=outs, cols=cols))
            many_rows += many.linear(many.Matrix(quant, at, outs, cols), x.halved, rows, out.address, outs)
        return bench.seconds_of(many_rows) < bench.seconds_of(few)
    finally:
        for each in (arena, x, out, planes_at):
            each.close()
