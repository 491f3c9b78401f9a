"""Numerics of every kernel on a card: the cases of tests/kernel/gpu_cases, each with what must come out.

A case is launches over arrays in the host's memory. Here the arrays lie in the card's, one behind the other with
`GUARD` bytes between them that must come back as they were; addresses in the launches, and in the case's tables, are
turned into those; the arrays are brought back into the same NumPy memory, and the case's own check looks at them.

Cases are drawn so that a run that is cut short has seen every entry file before it sees one twice. The seed is the
commit's; `--seed` repeats a run.
"""

from __future__ import annotations

import importlib
import random
import sys
import time
import zlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from gpu_bench import TOGETHER, Bench
from gpu_rows import Row, Teller

from backends.gpu.device import Memory
from backends.gpu.errors import DeviceLost, GpuError
from backends.gpu.launch import MODULES, Launch, Symbol

CASES_FOLDER = Path(__file__).resolve().parents[2] / "tests" / "kernel"
ALIGN = GUARD = 256
GUARD_BYTE = 0xA5
WRONG = (AssertionError, ArithmeticError, LookupError, ValueError)
"""What a check raises of results that are wrong: the last ones where it reads indices that a kernel wrote."""
NAMED = 8
"""Failures that have a row each."""


@dataclass
class Tally:
    """Cases of a part, however many processes they took."""

    total: int = 0
    used: dict[str, float] = field(default_factory=dict)
    wrong: dict[str, str] = field(default_factory=dict)

    def rows(self) -> Iterator[Row]:
        run = len(self.used) + len(self.wrong)
        note = "" if run >= self.total else f"a sample: {self.total - run} were left for lack of time"
        right = float(len(self.used))
        yield Row("numerics", "cases that come out right", right, "cases", float(run), 1.0, not self.wrong, note)
        if self.used:
            worst = max(self.used, key=self.used.__getitem__)
            yield Row("numerics", f"worst: {worst}", self.used[worst], "of tol.")
        for name, why in list(self.wrong.items())[:NAMED]:
            yield Row("numerics", f"wrong: {name}", ok=False, note=why)
        if len(self.wrong) > NAMED:
            yield Row("numerics", f"wrong: {len(self.wrong) - NAMED} more", ok=False, note=", ".join(self.wrong)[:2000])
        if not run:
            yield Row("numerics", "cases", ok=False, note="none was run")


def makers() -> dict[str, Any]:
    """Name -> what makes a case, of all modules."""
    sys.path.insert(0, str(CASES_FOLDER))
    found: dict[str, Any] = {}
    for module in MODULES:
        found |= importlib.import_module(f"gpu_cases.{module}").CASES
    return found


def symbols() -> dict[str, Symbol]:
    return {
        symbol.name: symbol
        for module in MODULES
        for symbol in importlib.import_module(f"backends.gpu.ops.{module}").SYMBOLS
    }


def in_order(names: Sequence[str], files: dict[str, str], seed: int) -> list[str]:
    """Shuffled, and one of each entry file in turn."""
    choice = random.Random(seed)
    by_file: dict[str, list[str]] = {}
    for name in choice.sample(list(names), len(names)):
        by_file.setdefault(files[name.partition(":")[0]], []).append(name)
    found: list[str] = []
    while by_file:
        for file in list(by_file):
            found.append(by_file[file].pop())
            if not by_file[file]:
                del by_file[file]
    return found


def run(bench: Bench, tell: Teller, *, seed: int, pattern: str, done: int) -> None:
    """The cases that `pattern` matches, from number `done` on."""
    made, known = makers(), symbols()
    files = {name: symbol.file for name, symbol in known.items()}
    chosen = in_order([name for name in made if fnmatchcase(name, pattern or "*")], files, seed)
    left = chosen[done:]
    tell.cases(len(chosen))
    cards = OnCard(bench)
    while left and time.monotonic() < bench.until:
        now, left = left[:TOGETHER], left[TOGETHER:]
        tell.at(f"compiling for {now[0]}")
        _prepare(bench, [known[name.partition(":")[0]] for name in now])
        for name in now:
            if time.monotonic() > bench.until:
                break
            tell.at(name)
            rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
            tell.case(name, *cards.run(made[name](rng, bench.card.facts.warp)))
    cards.close()
    tell.end()


def _prepare(bench: Bench, wanted: Sequence[Symbol]) -> None:
    """Several at once. What does not compile or load is told by the case that it is for."""
    try:
        bench.card.prepare(wanted)
    except DeviceLost:
        raise
    except GpuError as error:
        print(f"{error.message}: its cases say so one by one", file=sys.stderr)


class OnCard:
    """Runs cases in one piece of the card's memory, which grows."""

    def __init__(self, bench: Bench) -> None:
        self._card = bench.card
        self._memory: Memory | None = None
        self._bench = bench

    def run(self, case: Any) -> tuple[float, str]:
        """The largest share of its tolerance that a comparison took, and what is wrong. Raises DeviceLost."""
        places = Places(case)
        try:
            self._launch(case, places)
        except DeviceLost:
            raise
        except GpuError as error:  # it does not compile, load, or launch
            return 0.0, _first_lines(str(error))
        if not places.guarded:
            return 0.0, "written beside an array"
        try:
            with Used() as used:
                case.check()
        except WRONG as error:
            return 0.0, _first_lines(f"{type(error).__name__}: {error}")
        return used.most, ""

    def _launch(self, case: Any, places: Places) -> None:
        card = self._card
        memory, staging = self._room(places.nbytes), card.pinned(places.nbytes, "gpu_check")
        try:
            places.put(staging.bytes, memory.address)
            card.upload(memory.address, staging.address, places.nbytes)
            card.launch([places.turned(launch, memory.address) for launch in case.launches])
            card.wait()  # what was uploaded may change only behind it
            card.download(staging.address, memory.address, places.nbytes)
            card.wait()
            places.take(staging.bytes)
        finally:
            staging.close()

    def _room(self, nbytes: int) -> Memory:
        if self._memory is None or self._memory.nbytes < nbytes:
            self.close()
            self._memory = self._card.allocate(max(nbytes, 1 << 20), "gpu_check")
        return self._memory

    def close(self) -> None:
        if self._memory is not None:
            self._memory.close()
            self._memory = None


class Places:
    """Where the arrays of a case lie in one piece of memory."""

    def __init__(self, case: Any) -> None:
        arrays = {array.ctypes.data: array for array in (*case.arrays, *case.tables)}
        self._tables = {array.ctypes.data for array in case.tables}
        self._begins = sorted(arrays)
        self._arrays = [arrays[begin] for begin in self._begins]
        self._at: list[int] = []
        at = GUARD
        for array in self._arrays:
            self._at.append(at)
            at += -(-array.nbytes // ALIGN) * ALIGN + GUARD
        self.nbytes = at
        self.guarded = True

    def turned(self, launch: Launch, base: int) -> Launch:
        """The launch with addresses in the card's memory."""
        pairs = zip(launch.symbol.params, launch.args, strict=True)
        args = tuple(self._address(int(arg), base) if param.kind == "pointer" else arg for param, arg in pairs)
        return replace(launch, args=args)

    def _address(self, host: int, base: int) -> int:
        """Raises ValueError for an address in none of the case's arrays; 0 stays 0."""
        if not host:
            return 0
        index = bisect_right(self._begins, host) - 1
        offset = host - self._begins[index] if index >= 0 else 0
        if index < 0 or offset > self._arrays[index].nbytes:
            raise ValueError(f"{host:#x} is in no array of the case")
        return base + self._at[index] + offset

    def put(self, staging: np.ndarray, base: int) -> None:
        staging[: self.nbytes] = GUARD_BYTE
        for array, at, begin in zip(self._arrays, self._at, self._begins, strict=True):
            words = _bytes(array)
            if begin in self._tables:
                turned = [self._address(int(word), base) for word in words.view(np.uint64)]
                words = np.array(turned, np.uint64).view(np.uint8)
            staging[at : at + array.nbytes] = words

    def take(self, staging: np.ndarray) -> None:
        """What the launches left, into the same arrays; tables stay the host's."""
        beside = np.ones(self.nbytes, bool)
        for array, at, begin in zip(self._arrays, self._at, self._begins, strict=True):
            beside[at : at + array.nbytes] = False
            if begin not in self._tables:
                _bytes(array)[:] = staging[at : at + array.nbytes]
        self.guarded = bool((staging[: self.nbytes][beside] == GUARD_BYTE).all())


def _bytes(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1).view(np.uint8)


class Used:
    """While it is entered, notes how much of their tolerance the comparisons of a check take: 1 is all of it."""

    def __init__(self) -> None:
        self.most = 0.0

    def __enter__(self) -> Used:
        plain = np.testing.assert_allclose
        gpu_weights = sys.modules["gpu_weights"]
        close = gpu_weights.close

        def noted(actual: Any, desired: Any, rtol: float = 1e-7, atol: float = 0.0, **more: Any) -> None:
            self._note(actual, desired, rtol * np.abs(np.asarray(desired, np.float64)) + atol)
            plain(actual, desired, rtol=rtol, atol=atol, **more)

        def noted_close(got: Any, acts: Any, meaning: Any, bias: Any = 0.0, relative: float = 4e-6) -> None:
            wide = meaning.astype(np.float64)
            self._note(got, acts @ wide.T + bias, relative * (np.abs(acts) @ np.abs(wide).T + np.abs(bias)) + 1e-30)
            close(got, acts, meaning, bias, relative)

        self._patches = (
            mock.patch.object(np.testing, "assert_allclose", noted),
            mock.patch.object(gpu_weights, "close", noted_close),
        )
        for each in self._patches:
            each.start()
        return self

    def __exit__(self, *_: object) -> None:
        for each in self._patches:
            each.stop()

    def _note(self, actual: Any, desired: Any, room: Any) -> None:
        with np.errstate(all="ignore"):
            share = np.abs(np.asarray(actual, np.float64) - np.asarray(desired, np.float64)) / room
        known = share[np.isfinite(share)] if np.ndim(share) else np.array([share])
        self.most = max(self.most, float(known.max(initial=0.0)))


def _first_lines(text: str) -> str:
    return " ".join(text.split())[:300]
