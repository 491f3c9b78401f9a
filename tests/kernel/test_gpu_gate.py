"""The compile gate: every kernel for sm_86 and gfx1103, a part of them for one other arch of each vendor in turn.

The slow tier goes through all arches. Code and figures are kept by their content, so a run compiles what has changed.
"""

from __future__ import annotations

import csv
import os
import random
import re
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from backends.gpu import gate, jit, sources, toolchain
from backends.gpu.arch import SAMPLE, Arch, Vendor, arch
from backends.gpu.cache import Cache, Compiler, default_folder
from backends.gpu.capability import COMPILED
from backends.gpu.errors import CompilerMissing
from backends.gpu.figures import VERBOSE, Figures, figures
from backends.gpu.launch import MODULES, Symbol, params
from backends.gpu.sources import Program

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "docs" / "kernels.csv"
ENTRIES = Path(__file__).parent / "gate"
SEED = int(os.environ.get("HOMESERVE_TEST_SEED") or "0", 16)
ALL = os.environ.get("HOMESERVE_TEST_TIER") == "slow"
PART = 8
"""Of an arch that comes in turn, one in so many programs is compiled."""

ALWAYS = [names[0] for names in SAMPLE.values()]
TABLED = sorted(set(COMPILED) - set(ALWAYS))
"""The other arches that the table has: one of them in each run. Those that it lacks are of the slow tier alone."""
IN_TURN = [name for names in SAMPLE.values() for name in names[1:]] if ALL else [random.Random(SEED).choice(TABLED)]
SYMBOLS = {symbol.name: symbol for symbol in gate.symbols()}
slow_compile = pytest.mark.timeout(900)


def compiler(vendor: Vendor) -> Compiler:
    try:
        return jit.find("nvidia", 13) if vendor == "nvidia" else toolchain.clang()
    except CompilerMissing as missing:
        pytest.skip(f"compiler missing: {missing.message}")


def cache() -> Cache:
    return Cache(default_folder(os.environ), pytest.fail)


def entry(name: str, vendor: Vendor) -> Program:
    """A file of this folder's `gate` with the headers that any entry has."""
    headers = sources.file_program("linear_many", vendor).headers
    ending = ".cu" if vendor == "nvidia" else ".hip"
    return Program(vendor, name + ending, (ENTRIES / f"{name}.cu").read_text(), headers)


def compiled(name: str, target: Arch) -> dict[str, Figures]:
    program = entry(name, target.vendor)
    made = cache().get(program, target, compiler(target.vendor), VERBOSE[target.vendor])
    return figures(made, target.vendor)


# ------------------------------------------------------------------------------------------------- every symbol


def of_module(name: str) -> list[Symbol]:
    module = __import__(f"backends.gpu.ops.{name}", fromlist=["SYMBOLS"])
    return list(module.SYMBOLS)


def drawn(symbols: list[Symbol], name: str) -> list[Symbol]:
    """One in PART of the programs, at least one; another part for each arch and seed."""
    programs = sorted({(symbol.file, symbol.quant) for symbol in symbols})
    chosen = set(random.Random(f"{SEED} {name}").sample(programs, -(-len(programs) // PART)))
    return [symbol for symbol in symbols if (symbol.file, symbol.quant) in chosen]


@slow_compile
@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("name", ALWAYS + IN_TURN)
def test_every_symbol_compiles_without_spills_and_as_well_as_the_table_says(name: str, module: str) -> None:
    target, symbols = arch(name), of_module(module)
    if name in IN_TURN and not ALL:
        symbols = drawn(symbols, name)
    rows = list(gate.compiled(symbols, target, compiler(target.vendor), cache(), threads=1))
    assert [row.symbol for row in rows] and {row.symbol for row in rows} == {symbol.name for symbol in symbols}
    table = gate.read(TABLE) if TABLE.exists() else {}
    assert gate.complaints(rows, table, SYMBOLS, target) == []


def test_the_table_has_each_symbol_for_each_of_its_arches_and_nothing_else() -> None:
    with TABLE.open(newline="") as file:
        keys = [(line["symbol"], line["arch"]) for line in csv.DictReader(file)]
    arches = {name for _, name in keys}
    assert arches == set(COMPILED)
    assert len(keys) == len(set(keys))
    wanted = {(symbol, name) for symbol in SYMBOLS for name in arches}
    assert set(keys) - wanted == set() and wanted - set(keys) == set()


def test_no_row_of_the_table_spills_or_lacks_what_its_symbol_needs() -> None:
    table = gate.read(TABLE)
    wrong = [row.key for row in table.values() if row.figures.spills]
    wrong += [row.key for row in table.values() if row.figures.lacks(SYMBOLS[row.symbol], arch(row.arch))]
    assert wrong == []


# ---------------------------------------------------------------------------------------------- what is red


def only(name: str, needs: tuple[str, ...] = ()) -> dict[str, Symbol]:
    return {name: Symbol(name, "spills", "", params("in, out, i32 steps"), 1024, needs=needs)}  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ALWAYS)
def test_an_entry_that_spills_is_red(name: str) -> None:
    target = arch(name)
    row = gate.Row("spills", name, compiled("spills", target)["spills"], "one")
    assert row.figures.spills > 0
    told = gate.complaints([row], {row.key: row}, only("spills"), target)
    assert len(told) == 1 and told[0].startswith(f"spills for {name} spills ({row.figures.spills})")


def test_a_missing_instruction_is_red_where_the_arch_has_it() -> None:
    plain = Figures(32, 0, 0, 0, 0, 4)
    for name, lacking in (
        ("sm_86", ["dot4", "matrix"]),
        ("gfx1030", ["dot4"]),
        ("gfx908", ["dot4", "matrix"]),
        ("gfx1010", []),
    ):
        row = gate.Row("few", name, plain, "one")
        told = gate.complaints([row], {row.key: row}, only("few", ("dot4", "matrix", "load128")), arch(name))
        assert told == [f"few for {name} has no {need} instruction" for need in lacking]


def test_figures_worse_than_the_tables_are_red_and_better_ones_are_not() -> None:
    known = gate.Row("few", "sm_86", Figures(64, 0, 1024, 8, 0, 4), "one")
    table, target = {known.key: known}, arch("sm_86")

    def told(row: gate.Row) -> list[str]:
        return gate.complaints([row], table, only("few"), target)

    def changed(**figures: int) -> gate.Row:
        return replace(known, figures=replace(known.figures, **figures))

    assert told(changed(registers=65)) == ["few for sm_86: 65 registers, 64 in the table"]
    assert told(changed(block_bytes=2048)) == ["few for sm_86: 2048 bytes of block memory, 1024 in the table"]
    assert told(changed(load128=0)) == ["few for sm_86: no load128 instruction any more"]
    assert told(changed(registers=60, block_bytes=0, dot4=4)) == []
    assert told(replace(changed(registers=65), compiler="another")) == []
    assert gate.complaints([known], {("other", "sm_86"): known}, only("few"), target) == [
        "few for sm_86 has no row in the table"
    ]
    assert gate.complaints([known], {("few", "sm_89"): known}, only("few"), target) == []


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    rows = [
        gate.Row("b", "sm_86", Figures(1, 0, 2, 3, 4, 5), "NVRTC 13.5"),
        gate.Row("a", "gfx906", Figures(6, 0, 0, 0, 0, 1), "c"),
    ]
    gate.write(tmp_path / "table.csv", rows)
    assert list(gate.read(tmp_path / "table.csv").values()) == [rows[1], rows[0]]


# ----------------------------------------------------------------------------------- names, facts, instructions


@pytest.mark.parametrize("name", [name for names in SAMPLE.values() for name in names])
def test_every_name_of_device_code_compiles_for_every_arch(name: str) -> None:
    """And the facts of the arch are the compiler's: bytes are multiplied four at a time, tiles on matrix cores."""
    target = arch(name)
    found = compiled("names", target)
    assert set(found) == {"every_name", "every_tile"}
    assert all(each.spills == 0 for each in found.values())
    assert (found["every_name"].dot4 > 0) == (target.dot4 != "none")
    assert (found["every_tile"].matrix > 0) == (target.matrix != "none")
    assert found["every_name"].load128 >= 2


def clang_path() -> str:
    compiler("amd")
    return toolchain.clang().path


def clang_arches() -> list[str]:
    command = [clang_path(), "--target=amdgcn-amd-amdhsa", "-nogpulib", "--print-supported-cpus"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return sorted(set(re.findall(r"^\s+(gfx(?:9|1[0-9])\S+)$", done.stdout + done.stderr, re.MULTILINE)))


PROBE = """
#define HAS(name, builtin) name __has_builtin(__builtin_amdgcn_##builtin)
HAS(sdot4, sdot4)
HAS(sudot4, sudot4)
HAS(wmma11, wmma_f32_16x16x16_f16_w32)
HAS(wmma12, wmma_f32_16x16x16_f16_w32_gfx12)
HAS(mfma, mfma_f32_16x16x16f16)
"""


def test_facts_of_every_arch_that_clang_knows() -> None:
    names = clang_arches()
    assert len(names) > 30
    for name in names:
        command = [clang_path(), "-E", "-P", "-x", "hip", "--cuda-device-only", "-nogpulib", "-nogpuinc"]
        command += [f"--offload-arch={name}", "-"]
        done = subprocess.run(command, input=PROBE, capture_output=True, text=True, timeout=60, check=True)
        has = {word for word, there in re.findall(r"^(\w+) (\d)$", done.stdout, re.MULTILINE) if there == "1"}
        facts = arch(name)
        dot4 = "sdot4" if "sdot4" in has else "sudot4" if "sudot4" in has else "none"
        matrix = next((kind for kind in ("mfma", "wmma12", "wmma11") if kind in has), "none")
        assert (name, facts.dot4, facts.matrix) == (name, dot4, matrix)


def test_facts_of_every_arch_that_nvrtc_knows() -> None:
    nvrtc = compiler("nvidia")
    assert isinstance(nvrtc, jit.Jit)
    assert [arch(f"sm_{number}").number for number in nvrtc.arches] == list(nvrtc.arches)


def listed(code: bytes, folder: Path) -> Iterator[tuple[str, tuple[int, int, int]]]:
    """By NVIDIA's disassembler."""
    (folder / "code.cubin").write_bytes(code)
    command = [toolchain.tool("nvdisasm"), "-c", str(folder / "code.cubin")]
    text = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    for part in re.split(r"^\.text\.(?=\w+:)", text, flags=re.MULTILINE)[1:]:
        counts = [len(re.findall(kind, part)) for kind in (r"\bIDP\.4A", r"\bHMMA\.", r"\bLDG?\.E\S*\.128\b")]
        yield part.partition(":")[0], (counts[0], counts[1], counts[2])


@pytest.mark.parametrize("name", SAMPLE["nvidia"])
def test_instructions_are_counted_as_nvidias_disassembler_does(name: str, tmp_path: Path) -> None:
    target = arch(name)
    for program in (entry("names", "nvidia"), sources.file_program("moves", "nvidia")):
        made = cache().get(program, target, compiler("nvidia"), VERBOSE["nvidia"])
        found = figures(made, "nvidia")
        assert dict(listed(made.data, tmp_path)) == {key: (f.dot4, f.matrix, f.load128) for key, f in found.items()}
