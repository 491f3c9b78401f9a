"""Every kernel of both trees, emulated: what is compiled is what `backends.gpu` launches, and computes what it should.

The cases are those of gpu_cases, one table for each module of symbols. A tier that is not the slow one takes a sample,
by HOMESERVE_TEST_SEED: of every symbol one case, at both widths of a warp, and a tenth of the symbols under each
sanitizer. The slow tier takes every case in every tree and every symbol under both sanitizers at both widths.
"""

from __future__ import annotations

import importlib
import os
import random
import zlib
from collections.abc import Iterator

import gpu_cases
import numpy as np
import pytest
import simt_rig as rig

from backends.gpu.launch import MODULES, Symbol

SLOW = os.environ.get("HOMESERVE_TEST_TIER") == "slow"
SEED = int(os.environ.get("HOMESERVE_TEST_SEED") or "1", 16)
WIDTHS = rig.WHOLE
TREES: tuple[tuple[rig.Vendor, int], ...] = (*WIDTHS, ("hip", 32)) if SLOW else WIDTHS
SANITIZERS: tuple[rig.Sanitizer, ...] = ("address", "thread")
BUILD_S = 900

SYMBOLS: dict[str, Symbol] = {
    symbol.name: symbol
    for module in MODULES
    for symbol in importlib.import_module(f"backends.gpu.ops.{module}").SYMBOLS
}
CASES: dict[str, gpu_cases.Maker] = {
    name: maker for module in MODULES for name, maker in importlib.import_module(f"gpu_cases.{module}").CASES.items()
}
FILES = sorted({symbol.file for symbol in SYMBOLS.values()})

pytestmark = [
    pytest.mark.timeout(BUILD_S),
    pytest.mark.skipif(rig.compiler() is None, reason="no C++ compiler"),
]


def symbol_of(name: str) -> str:
    return name.partition(":")[0]


def sampled(seed: int) -> list[str]:
    """One case of each symbol."""
    choice = random.Random(seed)
    variants: dict[str, list[str]] = {}
    for name in CASES:
        variants.setdefault(symbol_of(name), []).append(name)
    return [choice.choice(each) for each in variants.values()]


def emulated() -> Iterator[tuple[rig.Vendor, int, str]]:
    for number, (vendor, warp) in enumerate(TREES):
        for name in CASES if SLOW else sampled(SEED + number):
            yield vendor, warp, name


def under_sanitizers() -> Iterator[tuple[rig.Sanitizer, rig.Vendor, int, list[str]]]:
    """Cases that a process runs together: those of one file and one type, which are compiled together."""
    choice = random.Random(SEED)
    of_build: dict[tuple[str, str], list[str]] = {}
    for name in sampled(SEED):
        symbol = SYMBOLS[symbol_of(name)]
        of_build.setdefault((symbol.file, symbol.quant), []).append(name)
    for sanitizer in SANITIZERS:
        if SLOW:
            yield from ((sanitizer, *width, each) for width in WIDTHS for each in of_build.values())
            continue
        left = -(-len(SYMBOLS) // 10)
        for each in choice.sample(list(of_build.values()), len(of_build)):
            if left > 0:
                yield sanitizer, *choice.choice(WIDTHS), each
            left -= len(each)


def names(*parts: object) -> str:
    return "-".join(map(str, parts))


EMULATED = list(emulated())
SANITIZED = list(under_sanitizers())


def wanted() -> Iterator[tuple[object, ...]]:
    """What `rig.prepare` is to build for the tests below."""
    yield from ((None, file, *tree) for tree in TREES for file in FILES)
    if SLOW:
        yield from ((each, file, *width) for each in SANITIZERS for width in WIDTHS for file in FILES)
    else:
        for sanitizer, vendor, warp, together in SANITIZED:
            symbol = SYMBOLS[symbol_of(together[0])]
            yield sanitizer, symbol.file, vendor, warp, *([f"QUANT={symbol.quant}"] if symbol.quant else [])


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    rig.prepare(dict.fromkeys(wanted()))


def make(name: str, warp: int) -> gpu_cases.Case:
    case = CASES[name](np.random.default_rng([SEED, zlib.crc32(name.encode())]), warp)
    assert symbol_of(name) in {each.symbol.name for each in case.launches}
    return case


@pytest.mark.parametrize(("vendor", "warp"), WIDTHS, ids=[names(*each) for each in WIDTHS])
def test_every_entry_is_a_symbol_with_the_same_parameters(vendor: rig.Vendor, warp: int) -> None:
    folder, ending = rig.TREES[vendor]
    assert sorted(each.stem for each in folder.glob("*" + ending)) == FILES
    for file in FILES:
        entries = rig.load(file, vendor, warp).entries
        assert sorted(entries) == sorted(each.name for each in SYMBOLS.values() if each.file == file)
        for name, entry in entries.items():
            symbol = SYMBOLS[name]
            assert (entry.params, entry.threads) == (
                tuple((each.kind, each.name) for each in symbol.params),
                symbol.threads,
            ), name


def test_every_symbol_has_a_case() -> None:
    assert sorted({symbol_of(name) for name in CASES}) == sorted(SYMBOLS)


@pytest.mark.parametrize(("vendor", "warp", "name"), EMULATED, ids=[names(*each) for each in EMULATED])
def test_a_kernel_computes_what_its_op_says(vendor: rig.Vendor, warp: int, name: str) -> None:
    backwards = bool(zlib.crc32(f"{SEED}{vendor}{name}".encode()) & 1)
    gpu_cases.run(make(name, warp), vendor, warp, backwards=backwards)


@pytest.mark.parametrize(
    ("sanitizer", "vendor", "warp", "together"),
    SANITIZED,
    ids=[names(*each[:3], each[3][0]) for each in SANITIZED],
)
def test_kernels_are_clean_under_a_sanitizer(
    sanitizer: rig.Sanitizer, vendor: rig.Vendor, warp: int, together: list[str]
) -> None:
    gpu_cases.run_sanitized([make(each, warp) for each in together], vendor, warp, sanitizer, whole=SLOW)
