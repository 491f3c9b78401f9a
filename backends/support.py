"""What each backend can do, as data: the capability tables of all backends in one file.

The process that decides opens no backend, and yet has to say what a card could run (`doctor --support`). So the
tables, which are code where the backends are (`backends.reference`, `backends.cpu`, `backends.gpu.capability`), are
written into support.json beside this module; a test holds the file, docs/SUPPORT.md and the code equal.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backends.base import Capability

FILE = Path(__file__).with_name("support.json")
SCHEMA = 1


@dataclass(frozen=True)
class Table:
    """One table, of backend `backend` on each of `arches` (a CPU backend: one, `any`)."""

    backend: str
    arches: tuple[str, ...]
    entries: tuple[Capability, ...]

    def count(self, ok: bool | None) -> int:
        """Entries that read so."""
        return sum(entry.ok is ok for entry in self.entries)


def read(path: Path = FILE) -> tuple[Table, ...]:
    """Raises OSError, and ValueError for a file of another schema."""
    data = json.loads(path.read_text())
    if data.get("schema") != SCHEMA:
        raise ValueError(f"{path} has schema {data.get('schema')}, not {SCHEMA}")
    return tuple(
        Table(
            each["backend"],
            tuple(each["arches"]),
            tuple(
                Capability(run["op"], kind, run["ok"], run["why"]) for run in each["entries"] for kind in run["types"]
            ),
        )
        for each in data["tables"]
    )


def dumped(tables: Iterable[Table]) -> str:
    """The file's text: entries of one op that read alike stand together."""
    told = [
        {"backend": table.backend, "arches": list(table.arches), "entries": list(runs(table.entries))}
        for table in tables
    ]
    return json.dumps({"schema": SCHEMA, "tables": told}, indent=1) + "\n"


def runs(entries: Sequence[Capability]) -> Iterable[Mapping[str, Any]]:
    """Entries of one op with the same answer and reason, as {op, types, ok, why}, in order of the first of each."""
    found: dict[tuple[str, bool | None, str], list[str]] = {}
    for entry in entries:
        found.setdefault((entry.op, entry.ok, entry.why), []).append(entry.type)
    for (op, ok, why), types in found.items():
        yield {"op": op, "types": types, "ok": ok, "why": why}


def merged(of_arches: Mapping[str, Sequence[Capability]], backend: str) -> tuple[Table, ...]:
    """Tables of `backend` by arch; arches that read alike share one."""
    found: dict[tuple[Capability, ...], list[str]] = {}
    for arch, entries in of_arches.items():
        found.setdefault(tuple(entries), []).append(arch)
    return tuple(Table(backend, tuple(arches), entries) for entries, arches in found.items())
