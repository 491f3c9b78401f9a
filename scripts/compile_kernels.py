"""Compiles every kernel for the arches of the gate and writes docs/kernels.csv; called by scripts/compile_kernels.

    scripts/compile_kernels                        those of the table; rows of arches that --arch leaves out stay
    scripts/compile_kernels --arch sm_86,gfx1103   these alone; any arch that the compilers know
    scripts/compile_kernels --check                writes nothing; exit 1 for a spill, a missing instruction, a figure
                                                   that is worse than the table's
    scripts/compile_kernels -k linear_few          only symbols with this in their name
    scripts/compile_kernels --nvcc                 NVIDIA's half by nvcc and not NVRTC

NVRTC and nvdisasm come with the environment of the tests, clang from the distribution (docs/GPU.md). What is compiled
is kept by its content, so a second run compiles only what has changed.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from backends.gpu import gate, jit, toolchain
from backends.gpu.arch import SAMPLE, Arch, arch
from backends.gpu.cache import Cache, Compiler, default_folder
from backends.gpu.capability import COMPILED
from backends.gpu.errors import KernelError

TABLE = Path(__file__).resolve().parent.parent / "docs" / "kernels.csv"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", default=",".join(COMPILED), metavar="A,B")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--nvcc", action="store_true")
    parser.add_argument("-k", default="", metavar="WORD")
    options = parser.parse_args()
    try:
        return run([arch(name) for name in options.arch.split(",")], options)
    except KernelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def run(arches: list[Arch], options: argparse.Namespace) -> int:
    cache = Cache(default_folder(os.environ), lambda text: print(text, file=sys.stderr))
    named = {symbol.name: symbol for symbol in gate.symbols() if options.k in symbol.name}
    table = gate.read(TABLE) if TABLE.exists() else {}
    wrong: list[str] = []
    made: dict[gate.Key, gate.Row] = {}
    for each in arches:
        started = time.monotonic()
        rows = list(gate.compiled(named.values(), each, compiler_of(each, options.nvcc), cache))
        wrong += gate.complaints(rows, table if options.check else {row.key: row for row in rows}, named, each)
        made |= {row.key: row for row in rows}
        print(f"{each.name}: {len(rows)} symbols, {time.monotonic() - started:.0f} s", flush=True)
    for text in wrong:
        print(text)
    if not options.check:
        kept = gate.symbols()
        order = {name: i for i, name in enumerate((*SAMPLE["nvidia"], *SAMPLE["amd"]))}
        known = {symbol.name for symbol in kept}
        rows = [row for row in (table | made).values() if row.symbol in known]
        gate.write(TABLE, sorted(rows, key=lambda row: (order.get(row.arch, len(order)), row.arch)))
    return 1 if wrong else 0


def compiler_of(arch: Arch, by_nvcc: bool) -> Compiler:
    if arch.vendor == "amd":
        return toolchain.clang()
    return toolchain.nvcc() if by_nvcc else jit.find("nvidia")


if __name__ == "__main__":
    sys.exit(main())
