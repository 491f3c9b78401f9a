"""What compiled code needs and contains, entry by entry: registers, spills, block memory, instructions that must be in.

NVIDIA: ptxas says resources while it compiles (`VERBOSE`), nvdisasm the instructions. AMD: both lie in the code object,
as notes and as code, and llvm's tools read them. Instructions are counted as they stand in the code: one in a loop is
one.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass

from backends.gpu.arch import Arch, Vendor
from backends.gpu.errors import CompileFailed
from backends.gpu.jit import Binary
from backends.gpu.launch import Instruction, Symbol
from backends.gpu.toolchain import tool

VERBOSE: dict[Vendor, tuple[str, ...]] = {"nvidia": ("--ptxas-options=-v",), "amd": ()}
"""What a compiler has to be told for its figures to be there."""

_COUNTED: dict[Vendor, dict[Instruction, re.Pattern[str]]] = {
    "nvidia": {
        "dot4": re.compile(r"\bIDP\.4A\b"),
        "matrix": re.compile(r"\b[HIQ]G?MMA\b"),
        "load128": re.compile(r"\bLDG?\.\S*128\b"),
    },
    "amd": {
        "dot4": re.compile(r"\bv_dot4c?_i32_i"),
        "matrix": re.compile(r"\bv_(wmma|mfma)_"),
        "load128": re.compile(r"\b(global|flat|buffer)_load_(dwordx4|b128)\b"),
    },
}
_ENTRY_LOG = re.compile(
    r"Compiling entry function '(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
    r".*?Used (\d+) registers([^\n]*)",
    re.DOTALL,
)
_BLOCK_LOG = re.compile(r"(\d+) bytes smem")
_NVIDIA_ENTRY = re.compile(r"^\.text\.(\w+):")
_AMD_ENTRY = re.compile(r"^<(\w+)>:")
_AMD_NOTE = re.compile(r"^    \.(\w+): +'?([\w.]+)'?$", re.MULTILINE)


@dataclass(frozen=True)
class Figures:
    """Of one entry for one arch. `registers` of a thread; `spills`: what of them and of its arrays lies in memory, in
    bytes (AMD: and registers); `block_bytes`: block memory that the entry declares."""

    registers: int
    spills: int
    block_bytes: int
    dot4: int
    matrix: int
    load128: int

    def lacks(self, symbol: Symbol, arch: Arch) -> tuple[Instruction, ...]:
        """Instructions that the symbol must have and this code has not, though the arch has them."""
        there = {"dot4": arch.dot4 != "none", "matrix": arch.matrix != "none", "load128": True}
        return tuple(need for need in symbol.needs if there[need] and getattr(self, need) == 0)


def figures(binary: Binary, vendor: Vendor) -> dict[str, Figures]:
    """By the entry's name. Raises CompilerMissing where the tool that reads code is not there."""
    resources = _of_log(binary.log) if vendor == "nvidia" else {}
    with tempfile.NamedTemporaryFile(suffix=".o") as file:
        file.write(binary.data)
        file.flush()
        if vendor == "amd":
            resources = _of_notes(_output(tool("llvm-readelf"), "--notes", file.name))
            lines = _output(tool("llvm-objdump"), "-d", "--no-show-raw-insn", "--no-leading-addr", file.name)
        else:
            lines = _output(tool("nvdisasm"), "-c", file.name)
    counts = dict(_counts(lines, vendor))
    return {name: Figures(*resources[name], *counts[name]) for name in resources}


def _of_log(log: str) -> dict[str, tuple[int, int, int]]:
    found = {}
    for name, stack, stores, loads, registers, rest in _ENTRY_LOG.findall(log):
        block = _BLOCK_LOG.search(rest)
        spills = max(int(stack), int(stores), int(loads))
        found[name] = (int(registers), spills, int(block[1]) if block else 0)
    return found


def _of_notes(text: str) -> dict[str, tuple[int, int, int]]:
    found = {}
    for part in text.split("\n  - .a")[1:]:
        notes = dict(_AMD_NOTE.findall("    .a" + part))
        spills = sum(int(notes[key]) for key in ("vgpr_spill_count", "sgpr_spill_count", "private_segment_fixed_size"))
        registers = int(notes["vgpr_count"]) + int(notes.get("agpr_count", 0))
        found[notes["name"]] = (registers, spills, int(notes["group_segment_fixed_size"]))
    return found


def _counts(text: str, vendor: Vendor) -> Iterator[tuple[str, tuple[int, int, int]]]:
    entry = _NVIDIA_ENTRY if vendor == "nvidia" else _AMD_ENTRY
    patterns = tuple(_COUNTED[vendor].values())
    name, counted = "", [0, 0, 0]
    for line in text.splitlines():
        if match := entry.match(line):
            if name:
                yield name, (counted[0], counted[1], counted[2])
            name, counted = match[1], [0, 0, 0]
        for i, pattern in enumerate(patterns):
            counted[i] += bool(pattern.search(line))
    if name:
        yield name, (counted[0], counted[1], counted[2])


def _output(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=300.0)
    if done.returncode:
        raise CompileFailed(
            f"{command[0]} could not read compiled code", log=done.stderr, fix="is it of the compiler's version?"
        )
    return done.stdout
