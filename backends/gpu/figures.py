"""What compiled code needs and contains, entry by entry: registers, spills, block memory, instructions that must be in.

Resources: ptxas says them while it compiles (`VERBOSE`); AMD's lie in the code object as notes. Instructions are
counted as they stand in the code, so one in a loop is one. AMD's are in the listing of llvm-objdump. NVIDIA's
disassembler takes as long as NVRTC for a small kernel and is one more thing to have, and all that is asked is which
of three kinds an instruction is, so that is read from the code itself. From sm_75 on an instruction has 16 bytes, two
words of 64 bits: the lowest nine bits say what it does (the three above them, where its operands are), and of loads
bits 73 to 75 how wide they are. A test holds the counts against nvdisasm.
"""

from __future__ import annotations

import re
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from backends.gpu.arch import Arch, Vendor
from backends.gpu.errors import CompileFailed
from backends.gpu.jit import Binary
from backends.gpu.launch import Instruction, Symbol
from backends.gpu.toolchain import tool

VERBOSE: dict[Vendor, tuple[str, ...]] = {"nvidia": ("--ptxas-options=-v",), "amd": ()}
"""What a compiler has to be told for its figures to be there."""

_IDP_4A, _HMMA, _LOADS, _SIZE_128 = 0x026, 0x03C, (0x180, 0x181), 6
"""Four products of bytes; matrix product of halves; loads by any address and from global memory."""

_AMD_COUNTED = (
    re.compile(r"\bv_dot4c?_i32_i"),
    re.compile(r"\bv_(wmma|mfma)_"),
    re.compile(r"\b(global|flat|buffer)_load_(dwordx4|b128)\b"),
)
_ENTRY_LOG = re.compile(
    r"Compiling entry function '(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
    r".*?Used (\d+) registers([^\n]*)",
    re.DOTALL,
)
_BLOCK_LOG = re.compile(r"(\d+) bytes smem")
_AMD_ENTRY = re.compile(r"^<(\w+)>:")
_AMD_NOTE = re.compile(r"^    \.(\w+): +'?([\w.]+)'?$", re.MULTILINE)

Counts = tuple[int, int, int]


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
    if vendor == "nvidia":
        resources, counts = _of_log(binary.log), {name: _sass(code) for name, code in _entries(binary.data)}
        return {name: Figures(*resources[name], *counts[name]) for name in resources}
    with tempfile.NamedTemporaryFile(suffix=".o") as file:
        file.write(binary.data)
        file.flush()
        resources = _of_notes(_output(tool("llvm-readelf"), "--notes", file.name))
        listing = _output(tool("llvm-objdump"), "-d", "--no-show-raw-insn", "--no-leading-addr", file.name)
    counts = dict(_listed(listing))
    return {name: Figures(*resources[name], *counts[name]) for name in resources}


def _of_log(log: str) -> dict[str, Counts]:
    found = {}
    for name, stack, stores, loads, registers, rest in _ENTRY_LOG.findall(log):
        block = _BLOCK_LOG.search(rest)
        spills = max(int(stack), int(stores), int(loads))
        found[name] = (int(registers), spills, int(block[1]) if block else 0)
    return found


def _entries(elf: bytes) -> Iterator[tuple[str, bytes]]:
    """Name and code of every entry of a cubin: an ELF file of 64 bits, whose sections `.text.NAME` they are."""
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    size, count, names = struct.unpack_from("<3H", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", elf, table + i * size) for i in range(count)]
    for name, _, _, _, at, length in headers:
        begin = headers[names][4] + name
        text = elf[begin : elf.index(b"\0", begin)].decode()
        if text.startswith(".text."):
            yield text.removeprefix(".text."), elf[at : at + length]


def _sass(code: bytes) -> Counts:
    words = np.frombuffer(code, "<u8").reshape(-1, 2)
    kind, wide = words[:, 0] & 0x1FF, (words[:, 1] >> np.uint64(9)) & 7 == _SIZE_128
    return int(np.sum(kind == _IDP_4A)), int(np.sum(kind == _HMMA)), int(np.sum(np.isin(kind, _LOADS) & wide))


def _of_notes(text: str) -> dict[str, Counts]:
    found = {}
    for part in text.split("\n  - .a")[1:]:
        notes = dict(_AMD_NOTE.findall("    .a" + part))
        spills = sum(int(notes[key]) for key in ("vgpr_spill_count", "sgpr_spill_count", "private_segment_fixed_size"))
        registers = int(notes["vgpr_count"])  # all of them, where a card has two kinds
        found[notes["name"]] = (registers, spills, int(notes["group_segment_fixed_size"]))
    return found


def _listed(text: str) -> Iterator[tuple[str, Counts]]:
    name, counted = "", [0, 0, 0]
    for line in text.splitlines():
        if match := _AMD_ENTRY.match(line):
            if name:
                yield name, (counted[0], counted[1], counted[2])
            name, counted = match[1], [0, 0, 0]
        for i, pattern in enumerate(_AMD_COUNTED):
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
