"""The device code as texts: a symbol's entry file and the headers that it reaches.

The trees lie in the checkout side by side, and in an installed package in two places: `backends/gpu/kernels` as data of
the package, `cuda_kernels` and `hip_kernels` below the environment's `share/homeserve`. A `Program` is what a compiler
gets: everything by name, nothing by path, so that NVRTC and hiprtc compile it from memory, other compilers from a
folder of temporary files, and a cache knows it by its content.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import re
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from backends.gpu.arch import TREES, Vendor
from backends.gpu.errors import SourcesMissing
from backends.gpu.launch import Symbol

KERNELS = Path(__file__).resolve().parent / "kernels"

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)


@dataclass(frozen=True)
class Program:
    """One compilation. `name`: the entry file; `headers`: (name, text) of every header that can be reached from it;
    `quant`: what the file is restricted to, empty for all of it."""

    vendor: Vendor
    name: str
    text: str
    headers: tuple[tuple[str, str], ...]
    quant: str = ""

    @property
    def defines(self) -> tuple[str, ...]:
        return (f"-DQUANT={self.quant}",) if self.quant else ()

    @property
    def digest(self) -> str:
        """SHA-256 of all of it, in hexadecimal."""
        total = hashlib.sha256()
        for part in (self.vendor, self.name, self.text, self.quant, *(part for pair in self.headers for part in pair)):
            total.update(len(part.encode()).to_bytes(8, "little"))
            total.update(part.encode())
        return total.hexdigest()


def program(symbol: Symbol, vendor: Vendor) -> Program:
    """What has to be compiled for a symbol. Raises SourcesMissing."""
    return file_program(symbol.file, vendor, symbol.quant)


def file_program(file: str, vendor: Vendor, quant: str = "") -> Program:
    """The same for an entry file by its name without ending."""
    folder = tree(vendor)
    name = file + TREES[vendor][1]
    path = folder / name
    if not path.is_file():
        raise SourcesMissing(f"there is no {name} in {folder}", fix=_REINSTALL)
    text = path.read_text()
    return Program(vendor, name, text, _headers(text, (KERNELS, folder)), quant)


def files(vendor: Vendor) -> tuple[str, ...]:
    """Names of the entry files, without ending."""
    return tuple(sorted(path.stem for path in tree(vendor).glob("*" + TREES[vendor][1])))


@functools.cache
def tree(vendor: Vendor) -> Path:
    """The folder with a vendor's entries. Raises SourcesMissing where it is in none of the places."""
    name = TREES[vendor][0]
    beside = KERNELS.parents[2]
    shared = (beside, Path(sysconfig.get_path("data")))
    places = [beside / name, *_installed(name), *(root / "share/homeserve" / name for root in shared)]
    for place in places:
        if (place / "vendor.h").is_file():
            return place
    where = ", ".join(map(str, dict.fromkeys(places)))
    raise SourcesMissing(f"the device code {name} is in none of {where}", fix=_REINSTALL)


_REINSTALL = "install homeserve again: its device code belongs to the package"


def _installed(name: str) -> list[Path]:
    """By the list of what the package installed, wherever that was."""
    try:
        listed = importlib.metadata.files("homeserve") or []
    except importlib.metadata.PackageNotFoundError:
        return []
    ending = ("share", "homeserve", name, "vendor.h")
    return [Path(str(file.locate())).resolve().parent for file in listed if file.parts[-4:] == ending]


def _headers(text: str, folders: tuple[Path, ...]) -> tuple[tuple[str, str], ...]:
    """Every header that is included from somewhere, in the order of their names. One that lies in no folder is left
    out: what only the emulation includes. If it is wanted after all, the compiler says so."""
    found: dict[str, str] = {}
    waiting = _INCLUDE.findall(text)
    while waiting:
        name = waiting.pop()
        path = next((folder / name for folder in folders if (folder / name).is_file()), None)
        if name in found or path is None:
            continue
        found[name] = path.read_text()
        waiting += _INCLUDE.findall(found[name])
    return tuple(sorted(found.items()))
