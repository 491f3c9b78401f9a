"""Kernels of one card: compiled or read from the cache, loaded, found by symbol.

What is compiled at once is a *unit*: an entry file, or what of it is for one type. A unit that is wanted for one symbol
brings its other symbols with it. Compiling takes seconds, so several units are compiled at once, by threads: the
compilers are libraries that leave Python's lock. Loading is the driver's, one after the other, in the thread that the
card belongs to.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from backends.gpu import jit, sources
from backends.gpu.arch import Arch, Vendor
from backends.gpu.cache import Cache, Compiler
from backends.gpu.driver import Driver
from backends.gpu.errors import CompilerMissing
from backends.gpu.jit import Binary
from backends.gpu.launch import Symbol

Unit = tuple[str, str]
"""(file, quant)"""
MOST_COMPILERS = 16


class KernelStore:
    """`compiler`: None finds NVRTC or hiprtc when the first unit is wanted."""

    def __init__(self, driver: Driver, arch: Arch, cache: Cache, compiler: Compiler | None) -> None:
        self._driver = driver
        self._arch = arch
        self._cache = cache
        self._compiler = compiler
        self._modules: dict[Unit, int] = {}
        self._functions: dict[str, int] = {}
        self._shared: dict[str, int] = {}

    def prepare(self, symbols: Iterable[Symbol]) -> None:
        """Raises KernelError for what cannot be compiled, DriverError for what cannot be loaded."""
        wanted = {symbol.name: symbol for symbol in symbols if symbol.name not in self._functions}
        units = {_unit(symbol): symbol for symbol in wanted.values()}
        missing = {unit: symbol for unit, symbol in units.items() if unit not in self._modules}
        if missing:
            for unit, binary in self._compiled(missing).items():
                self._modules[unit] = self._driver.load(binary.data)
        for name, symbol in wanted.items():
            self._functions[name] = self._driver.function(self._modules[_unit(symbol)], name)

    def function(self, symbol: Symbol, shared: int) -> int:
        """The driver's handle, for launches with so much block memory."""
        found = self._functions.get(symbol.name)
        if found is None:
            self.prepare((symbol,))
            found = self._functions[symbol.name]
        if shared > self._shared.get(symbol.name, 0):
            self._driver.allow_shared(found, shared)
            self._shared[symbol.name] = shared
        return found

    def close(self) -> None:
        for module in self._modules.values():
            self._driver.unload(module)
        self._modules.clear()
        self._functions.clear()

    def _compiled(self, missing: dict[Unit, Symbol]) -> dict[Unit, Binary]:
        compiler = self._compiler = self._compiler or find_compiler(self._arch.vendor, self._driver.version // 1000)

        def one(symbol: Symbol) -> Binary:
            return self._cache.get(sources.program(symbol, self._arch.vendor), self._arch, compiler)

        threads = min(len(missing), MOST_COMPILERS, len(os.sched_getaffinity(0)))
        with ThreadPoolExecutor(threads, thread_name_prefix="compile") as pool:
            return dict(zip(missing, pool.map(one, missing.values()), strict=True))


def find_compiler(vendor: Vendor, major: int) -> jit.Jit:
    """The library that makes code for a driver. `major`: of CUDA's driver, which loads code of NVRTC's of its own major
    version and of earlier ones. Raises CompilerMissing of the best one."""
    if vendor == "amd":
        return jit.find("amd")
    usable = [each for each in jit.NVRTC_MAJORS if each <= major]
    best: CompilerMissing | None = None
    for each in usable:
        try:
            return jit.find("nvidia", each)
        except CompilerMissing as missing:
            best = best or missing
    assert best is not None, "a driver older than any NVRTC is refused when it is opened"
    raise best


def _unit(symbol: Symbol) -> Unit:
    return symbol.file, symbol.quant
