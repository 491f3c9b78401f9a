"""What the running server really holds, line by line: the other column of the budget.

A number here is read, and with one exception never the difference of two others. A line of a program is a mapping of
its own in the worker (`backends.base.MemoryRegion`), found in /proc/PID/smaps by its address; what is resident of it is
the line. A process is the sum of the mappings that no line owns, told by what they are:

    heap         the C library's first heap                    anonymous    its other arenas, Python's objects, threads
    stacks       of the first thread                           libraries    the interpreter, libraries, files: by share
    rings        shared memory: counted once, as the plan log  model file   page cache: reported, not counted
    acts         shared memory between ranks: counted once, all of it, because all of it is reserved

Pages of libraries that several processes map are counted by share (Pss), so our processes together count each once.
Mapped pages of the model's file are cache that the kernel takes back before anybody lacks memory; they are a line
beside the ledger. Memory of the plan log is held from its creation on, touched or not: its blocks are counted.

The exception is the vocabulary that a rank reads at its first guided answer. It lies in heaps, where nothing has an
address: it is what that process holds beyond what it held when it was last read without one, compiled grammars and all.
(It is read at the end of each start. Of a rank that was started again since, and had a guided answer before anybody
asked, it is not known, and within the process.)

The control group's own count is a second witness, where nobody else is in the group. It knows more than smaps (page
tables, sockets) and counts the files that we were the first to read, so the two need not agree to the MiB.

Memory of a card is no mapping of anybody: of it each rank counted what it had when it was loaded, and that is told, as
is what it pins of the host's memory (which is part of its process, too). The witness is the card's driver: what it had
free when the plan was made, less what is free now. Others may have taken or given back some of that meanwhile.

A line that cannot be read says so: its bytes and its `how` are None. Elsewhere than on Linux that is every line.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from budget.facts import MIB
from budget.host import own_group
from budget.host_lines import (
    ACTS,
    ENGINE_PROCESS,
    GRAMMAR_PROCESS,
    MODEL_FILE,
    PLAN_LOG,
    TEMPLATE_PROCESS,
    VOCABULARY,
    WORKER_PROCESSES,
)
from budget.ledger import PIPELINE, Line

VOCABULARY_LIBRARY = "/tokenizers/"
"""In the path of the library that a rank maps when it reads its vocabulary, and not before."""
SMAPS_BYTES_MAX = 64 << 20
"""A process of ours has some hundred mappings of less than a KiB of text each."""
ACTS_FILE = "/memfd:homeserve-acts"
"""As smaps names the memory that `backends.acts` makes."""
FRESH_S = 1.0
"""A measurement this old is given again: reading all page tables takes the kernel a while."""


@dataclass(frozen=True)
class Region:
    """`bytes` of a process's address space from `address`: ledger line `line`."""

    line: str
    address: int
    bytes: int


@dataclass(frozen=True)
class Worker:
    """A rank's process. `device` is where its regions count; without regions its lines cannot be told apart, but for a
    rank `on_card`, whose lines lie there: `told` are (device, line, bytes) as it counted them itself."""

    pid: int
    device: int
    regions: tuple[Region, ...]
    on_card: bool = False
    told: tuple[tuple[int, str, int], ...] = ()


@dataclass(frozen=True)
class Members:
    """What belongs to this server. `host` is the number of the CPU among the budget's devices."""

    host: int
    engine: int
    workers: tuple[Worker, ...]
    template: int | None = None
    segments: tuple[Path, ...] = ()
    """Files of the shared memory that the plan log and the report rings lie in."""
    model_files: Collection[str] = field(default_factory=frozenset)
    """Real paths."""
    template_due: bool = False
    """There will be a template process, and it has not started yet."""
    grammar: int | None = None
    """The process that checks grammars: there is none before the first."""


@dataclass(frozen=True)
class Measured:
    """What is held of one line. None: it cannot be measured here."""

    device: int
    line: str
    bytes: int | None
    how: str | None


@dataclass(frozen=True)
class Measurement:
    """All lines, and two witnesses of their sum: `smaps_bytes` over all processes, `group_bytes` of the control group.
    `group_why` says where the second was read, or why it was not."""

    lines: tuple[Measured, ...]
    smaps_bytes: int | None
    group_bytes: int | None
    group_why: str
    bare: Mapping[int, int] = field(default_factory=dict)
    """Of each worker what its process held when it was last read without a vocabulary."""


@dataclass(frozen=True)
class Area:
    """One mapping of a process. `share` counts a page that n processes map as a page / n."""

    start: int
    end: int
    name: str
    resident: int
    share: int


def measure(members: Members, root: str | Path = "/", bare: Mapping[int, int] | None = None) -> Measurement:
    """Read it all now. Takes some 20 ms, more with many small pages: call it in a thread. `bare` is that of the last
    measurement."""
    if sys.platform != "linux" and str(root) == "/":
        return _nothing(members)
    pids = (members.engine, *(worker.pid for worker in members.workers))
    pids += tuple(pid for pid in (members.template, members.grammar) if pid is not None)
    areas = {pid: _areas(pid, root) for pid in pids}
    bare = _bare(members, areas, bare or {})
    lines = [*_told_lines(members), *_region_lines(members, areas), *_process_lines(members, areas, bare)]
    log_bytes = _allocated(members.segments)
    lines.append(_line(members.host, PLAN_LOG, log_bytes, "blocks of the shared memory's files"))
    acts_bytes = _acts(areas.values())
    if len(members.workers) > 1:
        lines.append(_line(members.host, ACTS, acts_bytes, "smaps: its mapping"))
    lines.append(_model_line(members, areas))
    group_bytes, group_why = _group(members, root)
    shared = None if log_bytes is None else log_bytes + (acts_bytes or 0)
    return Measurement(tuple(lines), _total(members, areas, shared), group_bytes, group_why, bare)


def compare(lines: Sequence[Line], measured: Measurement, moment: str = PIPELINE) -> list[dict[str, Any]]:
    """Predicted against measured: a row for each line that is held at `moment`, and what is measured beside them."""
    predicted: dict[tuple[int, str], int] = {}
    for line in lines:
        if moment in line.held:
            key = line.device, line.name
            predicted[key] = predicted.get(key, 0) + line.bytes
    found = {(each.device, each.line): each for each in measured.lines}
    rows = []
    for device, name in (*predicted, *(key for key in found if key not in predicted)):
        known = found.get((device, name))
        rows.append(
            {
                "device": device,
                "line": name,
                "predicted_mib": _mib(predicted.get((device, name))),
                "measured_mib": None if known is None else _mib(known.bytes),
                "how": None if known is None else known.how,
            }
        )
    return rows


def card_totals(
    lines: Sequence[Line], cards: Mapping[int, tuple[int, int] | None], moment: str
) -> list[dict[str, Any]]:
    """Of each card the sum of its lines at `moment`, and how much less its driver has free than before the load."""
    rows = []
    for device, free in cards.items():
        predicted = sum(line.bytes for line in lines if line.device == device and moment in line.held)
        taken = None if free is None else free[0] - free[1]
        how = None if free is None else "driver: free before the load, less free now"
        rows.append({"device": device, "predicted_mib": _mib(predicted), "driver_mib": _mib(taken), "how": how})
    return rows


class MeasuredBudget:
    """The body of `/v1/homeserve/budget`: the plan's document as it was made before the load, and what is held now, of
    the lines of the `layout` that is in force. What comes with a first guided answer is in the sum once it is there,
    and `later_mib` before."""

    def __init__(
        self,
        document: Mapping[str, Any],
        lines: Sequence[Line],
        members: Callable[[], Members],
        clock: Callable[[], float] = time.monotonic,
        layout: Callable[[], str] = lambda: PIPELINE,
        cards: Callable[[], Mapping[int, tuple[int, int] | None]] = dict,
    ) -> None:
        """`cards`: of each card the free bytes before the load, and now; None: its driver does not tell."""
        self._document = dict(document)
        self._layout = layout
        self._lines = tuple(lines)
        self._members = members
        self._cards = cards
        self._clock = clock
        self._turn = asyncio.Lock()
        self._body: dict[str, Any] = {}
        self._read_at: float | None = None
        self._bare: Mapping[int, int] = {}

    async def as_json(self) -> dict[str, Any]:
        """Measured at most `FRESH_S` ago."""
        async with self._turn:
            if self._read_at is None or self._clock() - self._read_at >= FRESH_S:
                members, moment = self._members(), self._layout()
                found = await asyncio.to_thread(measure, members, "/", self._bare)
                self._bare = found.bare
                here = [each for each in self._lines if each.device == members.host and moment in each.held]
                later = [each for each in here if each.name in _LATER and _absent(found, each.name)]
                self._body = self._document | {
                    "measured": compare(self._lines, found, moment),
                    "measured_total": {
                        "predicted_mib": _mib(sum(each.bytes for each in here if each not in later)),
                        "later_mib": _mib(sum(each.bytes for each in later)),
                        "smaps_mib": _mib(found.smaps_bytes),
                        "cgroup_mib": _mib(found.group_bytes),
                        "cgroup_how": found.group_why,
                    },
                    "measured_cards": card_totals(self._lines, await asyncio.to_thread(self._cards), moment),
                }
                self._read_at = self._clock()
            return self._body


_LATER = (VOCABULARY, GRAMMAR_PROCESS)
"""Lines of which nothing is held before a request needs them."""


def _absent(measured: Measurement, name: str) -> bool:
    return any(each.line == name and each.bytes == 0 for each in measured.lines)


def parse_smaps(lines: Iterable[str]) -> tuple[Area, ...]:
    """The mappings of one process. What is not understood is left out: a kernel may add fields."""
    found: list[Area] = []
    head: tuple[int, int, str] | None = None
    sizes: dict[str, int] = {}

    def close() -> None:
        if head is not None:
            found.append(Area(*head, sizes.get("Rss", 0), sizes.get("Pss", 0)))

    for line in lines:
        if line[:1] in "0123456789abcdef" and line[:1]:  # names of fields begin with a capital
            close()
            sizes.clear()
            head = _head(line)
        elif line.startswith(("Rss:", "Pss:")):
            name, _, value = line.partition(":")
            sizes[name] = _kilobytes(value)
    close()
    return tuple(found)


# --------------------------------------------------------------------------------------------------------------- lines


def _region_lines(members: Members, areas: Mapping[int, tuple[Area, ...] | None]) -> list[Measured]:
    """Of each device and line: what is resident in its regions, over all workers of the device."""
    sums: dict[tuple[int, str], int | None] = {}
    for worker in members.workers:
        known = areas[worker.pid]
        for region in worker.regions:
            key = worker.device, region.line
            resident = None if known is None else _resident(known, region)
            before = sums.get(key, 0)
            sums[key] = None if resident is None or before is None else before + resident
    return [_line(device, name, size, "smaps, by address") for (device, name), size in sums.items()]


def _told_lines(members: Members) -> list[Measured]:
    """Of each card and line: what its ranks counted."""
    sums: dict[tuple[int, str], int] = {}
    for worker in members.workers:
        for device, name, size in worker.told:
            sums[device, name] = sums.get((device, name), 0) + size
    return [_line(device, name, size, "as the rank counted it at its load") for (device, name), size in sums.items()]


def _process_lines(
    members: Members, areas: Mapping[int, tuple[Area, ...] | None], bare: Mapping[int, int]
) -> list[Measured]:
    engine = _process(ENGINE_PROCESS, members, [(members.engine, ())], areas)
    workers = [(worker.pid, worker.regions) for worker in members.workers if _told(worker)]
    whole = len(workers) == len(members.workers)
    worker = _process(WORKER_PROCESSES, members, workers if whole else [], areas)
    template = _helper(TEMPLATE_PROCESS, members.template, "there is none", members, areas)
    if members.template is None and members.template_due:
        template = Measured(members.host, TEMPLATE_PROCESS, None, None)
    grammar = _helper(GRAMMAR_PROCESS, members.grammar, "there is none before the first grammar", members, areas)
    return [engine, *_without_vocabulary(worker, members, areas, bare), template, grammar]


def _helper(
    name: str, pid: int | None, why_none: str, members: Members, areas: Mapping[int, tuple[Area, ...] | None]
) -> Measured:
    if pid is None:
        return Measured(members.host, name, 0, why_none)
    return _process(name, members, [(pid, ())], areas)


def _told(worker: Worker) -> bool:
    """What its process holds can be told from what its program does."""
    return bool(worker.regions) or worker.on_card


def _without_vocabulary(
    whole: Measured, members: Members, areas: Mapping[int, tuple[Area, ...] | None], bare: Mapping[int, int]
) -> tuple[Measured, Measured]:
    """The workers' processes, and of these the vocabulary."""
    reading = [worker for worker in members.workers if _has_vocabulary(areas[worker.pid])]
    if whole.bytes is not None and not reading:
        return whole, Measured(members.host, VOCABULARY, 0, "not read before the first guided answer")
    if whole.bytes is None or any(worker.pid not in bare for worker in reading):
        return whole, Measured(members.host, VOCABULARY, None, None)
    kinds = (_kinds(areas[worker.pid] or (), worker.regions, members) for worker in reading)
    grown = sum(max(0, sum(held.values()) - bare[worker.pid]) for worker, held in zip(reading, kinds, strict=True))
    how = "smaps: what its process has grown by since it was loaded"
    rest = Measured(members.host, WORKER_PROCESSES, whole.bytes - grown, f"{whole.how}, without the vocabulary")
    return rest, Measured(members.host, VOCABULARY, grown, how)


def _bare(members: Members, areas: Mapping[int, tuple[Area, ...] | None], before: Mapping[int, int]) -> dict[int, int]:
    """`Measurement.bare` as it is now."""
    found = {}
    for worker in members.workers:
        known = areas[worker.pid]
        if known is not None and _told(worker) and not _has_vocabulary(known):
            found[worker.pid] = sum(_kinds(known, worker.regions, members).values())
        elif worker.pid in before:
            found[worker.pid] = before[worker.pid]
    return found


def _has_vocabulary(areas: Iterable[Area] | None) -> bool:
    return any(VOCABULARY_LIBRARY in area.name for area in areas or ())


def _process(
    name: str,
    members: Members,
    parts: Sequence[tuple[int, tuple[Region, ...]]],
    areas: Mapping[int, tuple[Area, ...] | None],
) -> Measured:
    """The sum over what no other line owns, by kind."""
    kinds: dict[str, int] = {}
    for pid, regions in parts:
        known = areas[pid]
        if known is None:
            return Measured(members.host, name, None, None)
        for kind, size in _kinds(known, regions, members).items():
            kinds[kind] = kinds.get(kind, 0) + size
    if not parts:
        return Measured(members.host, name, None, None)
    words = ", ".join(f"{kind} {size / MIB:.1f}" for kind, size in sorted(kinds.items(), key=lambda pair: -pair[1]))
    return Measured(members.host, name, sum(kinds.values()), f"smaps: {words} MiB")


def _kinds(areas: Iterable[Area], regions: Sequence[Region], members: Members) -> dict[str, int]:
    """What one process holds beside the lines that its `regions` are, by kind."""
    kinds: dict[str, int] = {}
    for area in areas:
        kind = _kind(area, members)
        if kind not in _SHARED and not any(_inside(area, region) for region in regions):
            kinds[kind] = kinds.get(kind, 0) + area.share
    return kinds


def _model_line(members: Members, areas: Mapping[int, tuple[Area, ...] | None]) -> Measured:
    """The page cache that our mappings of the model's files reach now."""
    known = [area for of_process in areas.values() for area in of_process or ()]
    if any(of_process is None for of_process in areas.values()):
        return Measured(members.host, MODEL_FILE, None, None)
    size = sum(area.share for area in known if _kind(area, members) == MODEL_FILE)
    return Measured(members.host, MODEL_FILE, size, "smaps, by file; the kernel takes it back when it needs to")


def _acts(areas: Iterable[tuple[Area, ...] | None]) -> int | None:
    """Of the memory that ranks exchange through; None where nobody maps any."""
    return max(
        (area.end - area.start for known in areas for area in known or () if area.name.startswith(ACTS_FILE)),
        default=None,
    )


def _total(members: Members, areas: Mapping[int, tuple[Area, ...] | None], shared_bytes: int | None) -> int | None:
    """Everything that is mapped anywhere, but for page cache of the model."""
    if shared_bytes is None or any(of_process is None for of_process in areas.values()):
        return None
    held = (area for of_process in areas.values() for area in of_process or ())
    return shared_bytes + sum(area.share for area in held if _kind(area, members) not in _SHARED)


def _group(members: Members, root: str | Path) -> tuple[int | None, str]:
    group = own_group(root)
    if group is None:
        return None, "there is no control group that counts memory"
    ours = {members.engine, members.template, members.grammar, *(worker.pid for worker in members.workers)}
    strangers = len(group.pids - ours)
    if strangers:
        return None, f"{group.folder} counts {strangers} other processes as well"
    return group.held_bytes, f"{group.folder}, without inactive_file"


def _nothing(members: Members) -> Measurement:
    names = (ENGINE_PROCESS, WORKER_PROCESSES, VOCABULARY, TEMPLATE_PROCESS, GRAMMAR_PROCESS, PLAN_LOG)
    lines = tuple(Measured(members.host, name, None, None) for name in names)
    return Measurement(lines, None, None, "only Linux tells what a process holds of what")


def _line(device: int, name: str, size: int | None, how: str) -> Measured:
    return Measured(device, name, size, None if size is None else how)


# --------------------------------------------------------------------------------------------------------------- smaps


def _areas(pid: int, root: str | Path) -> tuple[Area, ...] | None:
    """None where the process is gone, or the kernel does not tell."""
    try:
        with open(Path(root) / f"proc/{pid}/smaps", encoding="utf-8", errors="replace") as file:
            text = file.read(SMAPS_BYTES_MAX)
    except OSError:
        return None
    return parse_smaps(text.splitlines()) or None


def _head(line: str) -> tuple[int, int, str] | None:
    """Start, end and name of a mapping's first line: `start-end perms offset device inode   name`."""
    words = line.split(None, 5)
    start, _, end = words[0].partition("-")
    try:
        return int(start, 16), int(end, 16), words[5].strip() if len(words) > 5 else ""
    except ValueError:
        return None


def _kilobytes(value: str) -> int:
    words = value.split()
    return int(words[0]) * 1024 if words and words[0].isdecimal() else 0


def _resident(areas: Iterable[Area], region: Region) -> int | None:
    """What is resident of a region, of memory that ranks share each its share; None where no mapping lies in it."""
    inside = [area.share for area in areas if _inside(area, region)]
    return sum(inside) if inside else None


def _inside(area: Area, region: Region) -> bool:
    """The mapping begins in the region. (It may end behind it: mappings are whole pages.)"""
    return region.address <= area.start < region.address + region.bytes


_SHARED = (PLAN_LOG, MODEL_FILE, ACTS)
"""Kinds of mappings that are counted once for all processes, or not at all."""


def _kind(area: Area, members: Members) -> str:
    name = area.name.removesuffix(" (deleted)")
    if name in members.model_files:
        return MODEL_FILE
    if any(name == str(path) for path in members.segments):
        return PLAN_LOG
    if name == ACTS_FILE:
        return ACTS
    if name == "[heap]":
        return "heap"
    if name.startswith("[stack"):
        return "stacks"
    if not name or name.startswith("[anon"):
        return "anonymous"
    return "libraries"


def _allocated(files: Iterable[Path]) -> int | None:
    """Bytes that the files take where they lie (in memory, for shared memory); None if one cannot be looked at."""
    try:
        return sum(os.stat(path).st_blocks * 512 for path in files)
    except OSError:
        return None


def _mib(count: int | None) -> float | None:
    return None if count is None else round(count / MIB, 2)
