"""The compile gate: every symbol is compiled for an arch, and its figures are held against docs/kernels.csv.

A machine without a card can know that a kernel compiles for one, that nothing of it spills, that it has the
instructions that make it fast, and that it needs no more registers than when it was last looked at. So that is checked,
for each vendor's first arch of `arch.SAMPLE` at each change and for the others in turn. NVIDIA's half goes through
NVRTC, as on a user's machine, AMD's through clang. What is compiled is what a user's machine compiles: one program for
each entry file and type.
"""

from __future__ import annotations

import csv
import importlib
import json
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import astuple, dataclass
from pathlib import Path

from backends.gpu import sources
from backends.gpu.arch import Arch
from backends.gpu.cache import Cache, Compiler, key_of
from backends.gpu.figures import VERBOSE, Figures, figures
from backends.gpu.launch import MODULES, Symbol

COLUMNS = ("symbol", "arch", "registers", "spills", "block_bytes", "dot4", "matrix", "load128", "compiler")
Key = tuple[str, str]

_READING = 1
"""Grows when figures are read otherwise than before, so that kept ones are none of it."""


@dataclass(frozen=True)
class Row:
    """One line of the table: an entry for an arch, and who compiled it."""

    symbol: str
    arch: str
    figures: Figures
    compiler: str

    @property
    def key(self) -> Key:
        return self.symbol, self.arch


def symbols() -> tuple[Symbol, ...]:
    """Of all modules, in their order."""
    modules = (importlib.import_module(f"backends.gpu.ops.{name}") for name in MODULES)
    return tuple(symbol for module in modules for symbol in module.SYMBOLS)


def compiled(
    chosen: Iterable[Symbol], arch: Arch, compiler: Compiler, cache: Cache, threads: int | None = None
) -> Iterator[Row]:
    """A row for each symbol. Raises what the compiler raises; KeyError for a symbol whose program lacks it."""
    programs: dict[tuple[str, str], list[Symbol]] = {}
    for symbol in chosen:
        programs.setdefault((symbol.file, symbol.quant), []).append(symbol)

    def rows(name: tuple[str, str]) -> list[Row]:
        found = _figures(sources.file_program(name[0], arch.vendor, name[1]), arch, compiler, cache)
        return [Row(each.name, arch.name, found[each.name], compiler.title) for each in programs[name]]

    with ThreadPoolExecutor(threads or len(os.sched_getaffinity(0))) as pool:
        for part in pool.map(rows, programs):
            yield from part


def _figures(program: sources.Program, arch: Arch, compiler: Compiler, cache: Cache) -> dict[str, Figures]:
    """Kept beside the code that they are of, as reading them takes as long as compiling a small kernel. What cannot be
    read of them is made anew, and what cannot be written is left."""
    extra = VERBOSE[arch.vendor]
    path = cache.folder / f"{key_of(program, arch, compiler, extra)}.figures-{_READING}"
    try:
        return {name: Figures(*counts) for name, counts in json.loads(path.read_text()).items()}
    except (OSError, ValueError, TypeError, AttributeError):
        found = figures(cache.get(program, arch, compiler, extra), arch.vendor)
    with suppress(OSError):
        making = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
        making.write_text(json.dumps({name: astuple(each) for name, each in found.items()}))
        making.replace(path)
    return found


def complaints(found: Iterable[Row], table: Mapping[Key, Row], named: Mapping[str, Symbol], arch: Arch) -> list[str]:
    """What is wrong with rows: spills, an instruction that is not there, and where the table is also of this arch, a
    row that it lacks, or figures that are worse than those of the same compiler. Empty if nothing is."""
    wrong = []
    tabled = arch.name in {name for _, name in table}
    for row in found:
        where = f"{row.symbol} for {row.arch}"
        if row.figures.spills:
            wrong.append(f"{where} spills ({row.figures.spills}); with {row.figures.registers} registers")
        for need in row.figures.lacks(named[row.symbol], arch):
            wrong.append(f"{where} has no {need} instruction")
        known = table.get(row.key)
        if known is None and tabled:
            wrong.append(f"{where} has no row in the table")
        elif known and known.compiler == row.compiler:
            wrong += [f"{where}: {text}" for text in _worse(row.figures, known.figures)]
    return wrong


def _worse(new: Figures, old: Figures) -> Iterator[str]:
    if new.registers > old.registers:
        yield f"{new.registers} registers, {old.registers} in the table"
    if new.block_bytes > old.block_bytes:
        yield f"{new.block_bytes} bytes of block memory, {old.block_bytes} in the table"
    for name in ("dot4", "matrix", "load128"):
        if getattr(old, name) and not getattr(new, name):
            yield f"no {name} instruction any more"


def read(path: Path) -> dict[Key, Row]:
    with path.open(newline="") as file:
        rows = [_row(line) for line in csv.DictReader(file)]
    return {row.key: row for row in rows}


def write(path: Path, rows: Sequence[Row]) -> None:
    """By symbol, arches in the order that they come in."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for row in sorted(rows, key=lambda row: row.symbol):
            f = row.figures
            counts = (f.registers, f.spills, f.block_bytes, f.dot4, f.matrix, f.load128)
            writer.writerow((row.symbol, row.arch, *counts, row.compiler))


def _row(line: Mapping[str, str]) -> Row:
    counts = (int(line[name]) for name in COLUMNS[2:8])
    return Row(line["symbol"], line["arch"], Figures(*counts), line["compiler"])
