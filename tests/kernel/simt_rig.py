"""Runs kernels without a card: entry files compiled by g++ against tests/simt, launches with NumPy arrays as memory.

    kernels = rig.load("linear", "cuda", 32)     # cuda_kernels/linear.cu; hip_kernels/linear.hip: "hip", 32 or 64
    out = np.full((3, 40), np.nan, np.float32)
    kernels.run(linear.few(rig.address(out), rig.address(x), ...))     # a Launch of backends.gpu.ops
    np.testing.assert_allclose(out, ...)

An argument of a launch is the address of an array that lives as long as the call. What is undefined on a card raises
Fault, with the kernel, the block, the places and the lanes (tests/simt/emulated.h lists what is found). A library is
compiled once and cached by its content, outside of the tree.

`sanitized` runs launches in a process of their own under AddressSanitizer or ThreadSanitizer, where each array is an
allocation of exactly its size, and brings the arrays back.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import os
import platform
import re
import shutil
import struct
import subprocess
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from backends.gpu.launch import Launch

ROOT = Path(__file__).resolve().parents[2]
SIMT = ROOT / "tests" / "simt"
KERNELS = ROOT / "backends" / "gpu" / "kernels"
TREES = {"cuda": (ROOT / "cuda_kernels", ".cu"), "hip": (ROOT / "hip_kernels", ".hip")}
Vendor = Literal["cuda", "hip"]
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "homeserve-tests" / "simt"
X86 = platform.machine() in ("x86_64", "AMD64", "amd64")
FLAGS = (
    *("-std=c++17", "-O1", "-g1", "-fPIC", "-pthread", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno"),
    *("-Wall", "-Wextra", "-Wno-unused-parameter", "-Wno-unused-function", "-Wno-psabi", "-DEMULATED"),
    *(("-mavx2", "-mfma", "-mf16c") if X86 else ()),
)
LIBRARY = (
    *("-std=c++17", "-O1", "-g1", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden", "-U_FORTIFY_SOURCE"),
    *("-Wall", "-Wextra", "-Werror"),
)
INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)
WHOLE: tuple[tuple[Vendor, int], ...] = (("cuda", 32), ("hip", 64))
"""Of every entry file, what every tier compiles for all its types: both widths of a warp."""
COMPILE_S = 600
RUN_S = 300
KEEP_S = 14 * 86400

Array = NDArray[Any]
Sanitizer = Literal["address", "thread"]
SANITIZE: dict[Sanitizer, tuple[str, ...]] = {
    "address": (
        *("-Og", "-fsanitize=address,alignment", "-fno-sanitize-recover=alignment", "-fno-omit-frame-pointer"),
        *("--param", "asan-instrumentation-with-call-threshold=0"),  # compiles twice as fast
    ),
    "thread": ("-Og", "-fsanitize=thread", "-fno-omit-frame-pointer"),
}
_PACK = {"pointer": "<Q", "i32": "<i", "u32": "<I", "i64": "<q", "u64": "<Q", "float": "<f"}


class Fault(Exception):
    """A launch did what is undefined on a card."""


class Report(Fault):
    """A sanitizer reported. The text is its report."""


class _Entry(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("params", ctypes.c_char_p),
        ("kinds", ctypes.POINTER(ctypes.c_char_p)),
        ("threads", ctypes.c_int),
        ("blocks", ctypes.c_int),
    )


@dataclass(frozen=True)
class Entry:
    """An entry as compiled. `params`: kind and name of each parameter; at most `threads` threads in a block."""

    name: str
    params: tuple[tuple[str, str], ...]
    threads: int
    blocks: int
    handle: int


def address(array: Array) -> int:
    """Where an array begins; see `aligned`. Raises ValueError for an array that is not in one piece."""
    if not array.flags.c_contiguous:
        raise ValueError(f"an array of {array.shape} with strides {array.strides} is not in one piece")
    return int(array.ctypes.data)


def aligned(array: Array, boundary: int = 256) -> Array:
    """A copy that begins at a multiple of `boundary` bytes, as allocations on a card do."""
    room = np.empty(array.nbytes + boundary, np.uint8)
    skip = -room.ctypes.data % boundary
    copy = room[skip : skip + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


class Kernels:
    """One compiled entry file."""

    def __init__(self, path: Path) -> None:
        self.library = ctypes.CDLL(str(path))
        self.library.simt_get.restype = ctypes.POINTER(_Entry)
        self.library.simt_error.restype = ctypes.c_char_p
        self.library.simt_block_memory.restype = ctypes.c_size_t
        self.library.simt_launch.argtypes = [
            *(ctypes.c_void_p, ctypes.c_int * 3, ctypes.c_int, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int)
        ]
        self.warp = int(self.library.simt_warp())
        self.entries = {each.name: each for each in map(self._entry, range(self.library.simt_count()))}

    def _entry(self, index: int) -> Entry:
        found = self.library.simt_get(index)
        entry = found.contents
        names = [each.replace("*", " ").split()[-1] for each in entry.params.decode().split(",") if each.strip()]
        params = tuple((entry.kinds[i].decode(), each) for i, each in enumerate(names))
        where = ctypes.cast(found, ctypes.c_void_p).value or 0
        return Entry(entry.name.decode(), params, entry.threads, entry.blocks, where)

    def run(self, *launches: Launch, backwards: bool = False) -> int:
        """Runs launches one after the other; with `backwards`, blocks and threads in descending order. Returns the most
        block memory that a block of them had, in bytes. Raises Fault, and KeyError for a symbol that is not here."""
        most = 0
        for launch in launches:
            entry = self.entries[launch.symbol.name]
            held = [ctypes.create_string_buffer(each, 8) for each in _arguments(launch, entry)]
            args = (ctypes.c_void_p * max(len(held), 1))(*(ctypes.addressof(each) for each in held))
            grid = (ctypes.c_int * 3)(*launch.grid)
            threads, shared = launch.symbol.threads, launch.shared
            if self.library.simt_launch(entry.handle, grid, threads, shared, args, int(backwards)):
                raise Fault(self.library.simt_error().decode())
            most = max(most, int(self.library.simt_block_memory()))
        return most


def _arguments(launch: Launch, entry: Entry) -> list[bytes]:
    kinds = [kind for kind, _ in entry.params]
    if len(kinds) != len(launch.args):
        raise ValueError(f"{entry.name} as compiled takes {len(kinds)} arguments, not {len(launch.args)}")
    return [struct.pack(_PACK[kind], value) for kind, value in zip(kinds, launch.args, strict=True)]


def compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "g++"))


def source(file: str, vendor: Vendor) -> Path:
    folder, ending = TREES[vendor]
    return folder / (file + ending)


def prepare(wanted: Iterable[tuple[Any, ...]]) -> None:
    """Builds several at once, as many as there are CPUs. Each is the arguments of `build`, the sanitizer first."""

    def one(arguments: tuple[Any, ...]) -> None:
        build(*arguments[1:], sanitizer=arguments[0])

    CACHE.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(one, wanted))
    for old in CACHE.iterdir():  # what another commit compiled and none has used for long
        with contextlib.suppress(FileNotFoundError):  # another process ends its compiling
            if time.time() - old.stat().st_mtime > KEEP_S and old.is_file():
                old.unlink()


def load(file: str | Path, vendor: Vendor, warp: int, *defines: str) -> Kernels:
    """The kernels of an entry file, `linear` or a path. `defines`: such as "QUANT=q4_k", "TILES_WMMA12". In a tier that
    needs the whole file anyway (WHOLE), what only restricts it to a type is dropped.
    Raises RuntimeError with the compiler's text where it does not compile."""
    if isinstance(file, str) and os.environ.get("HOMESERVE_TEST_TIER") and (vendor, warp) in WHOLE:
        defines = tuple(each for each in defines if not each.startswith("QUANT="))
    return _loaded(file, vendor, warp, *defines)


@functools.cache
def _loaded(file: str | Path, vendor: Vendor, warp: int, *defines: str) -> Kernels:
    return Kernels(build(file, vendor, warp, *defines))


def build(file: str | Path, vendor: Vendor, warp: int, *defines: str, sanitizer: Sanitizer | None = None) -> Path:
    """The shared library of an entry file, or with a sanitizer the runner of its kernels. Several may build at once."""
    entry = file if isinstance(file, Path) else source(file, vendor)
    folders = (entry.parent, KERNELS, SIMT, TREES[vendor][0])
    flags = (
        *FLAGS,
        *(f"-I{each}" for each in folders),
        *(f"-D{each}" for each in (f"WARP_LANES={warp}", *defines)),
    )
    runtime = (f"-DSIMT_{'ASAN' if sanitizer == 'address' else 'TSAN'}",) if sanitizer else ()
    sanitize = SANITIZE[sanitizer] if sanitizer else ()
    parts = [
        _object(entry, folders, (*flags, *sanitize)),
        _object(SIMT / "simt.cpp", (SIMT,), (*FLAGS, *runtime, f"-DWARP_LANES={warp}", "-O2")),
        *([_object(SIMT / "runner.cpp", (SIMT,), FLAGS)] if sanitizer else ()),
    ]
    target = CACHE / f"{entry.stem}-{_digest(*(each.name.encode() for each in parts))}{'' if sanitizer else '.so'}"
    if not _used(target):
        kind = () if sanitizer else ("-shared",)
        _compile(target, *kind, *sanitize, "-pthread", *map(str, parts))
    return target


def build_alone(entry: Path, warp: int, *defines: str) -> Path:
    """The library of an entry file with all that it includes beside it: none of the trees is looked into."""
    folders = (entry.parent, SIMT)
    flags = (*FLAGS, *(f"-I{each}" for each in folders), *(f"-D{each}" for each in (f"WARP_LANES={warp}", *defines)))
    parts = (
        _object(entry, folders, flags),
        _object(SIMT / "simt.cpp", (SIMT,), (*FLAGS, f"-DWARP_LANES={warp}", "-O2")),
    )
    target = CACHE / f"{entry.stem}-{_digest(*(each.name.encode() for each in parts))}.so"
    if not _used(target):
        _compile(target, "-shared", "-pthread", *map(str, parts))
    return target


def library(source: Path, *flags: str) -> Path:
    """A shared library of one C++ file, which is no kernel: a fake of a driver."""
    told = " ".join((*LIBRARY, *flags)).encode()
    read = (each.read_bytes() for each in _reads(source, (source.parent,)))
    target = CACHE / f"{source.stem}-{_digest(told, *read)}.so"
    if not _used(target):
        _compile(target, *LIBRARY, *flags, str(source))
    return target


def _object(entry: Path, folders: Sequence[Path], flags: Sequence[str]) -> Path:
    told = " ".join((compiler() or "", *flags)).replace(str(ROOT), "").replace(str(entry.parent), "")
    read = (each.read_bytes() for each in _reads(entry, folders))
    target = CACHE / f"{entry.stem}-{_digest(told.encode(), *read)}.o"
    if not _used(target):
        _compile(target, *flags, "-c", "-x", "c++", str(entry))
    return target


def _used(target: Path) -> bool:
    """Whether it is there; then it is young again."""
    try:
        os.utime(target)
    except FileNotFoundError:
        return False
    return True


def _reads(entry: Path, folders: Sequence[Path]) -> list[Path]:
    """The file and all that it may include from these folders, whatever the conditions."""
    found, left = {entry}, [entry]
    while left:
        for name in INCLUDE.findall(left.pop().read_text()):
            here = [folder / name for folder in folders if (folder / name).is_file()]
            left += [each for each in here if each not in found]
            found.update(here)
    return sorted(found)


def _digest(*parts: bytes) -> str:
    total = hashlib.sha256()
    for part in parts:
        total.update(hashlib.sha256(part).digest())
    return total.hexdigest()[:16]


def _compile(target: Path, *arguments: str) -> None:
    """The file appears when it is whole; of several processes that want it, one makes it."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with target.with_name(target.name + ".lock").open("w") as turn, tempfile.TemporaryDirectory(dir=CACHE) as folder:
        fcntl.flock(turn, fcntl.LOCK_EX)
        if target.exists():
            return
        made = Path(folder) / target.name
        command = [compiler() or "g++", *arguments, "-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_S, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
        made.replace(target)


def sanitized(
    runner: Path,
    launches: Sequence[Launch],
    arrays: Iterable[Array],
    *,
    tables: Iterable[Array] = (),
    backwards: bool = False,
) -> None:
    """Runs launches under the sanitizer that `runner` (of `build`) has, and brings every array back.

    `arrays`: all memory that the launches touch, each one an allocation of its own there; `tables`: more of it, whose
    words are addresses. Raises Report with the sanitizer's text, Fault, and ValueError for an address in no array.
    """
    memory = [(each, False) for each in arrays] + [(each, True) for each in tables]
    case = [struct.pack("<Q", len(memory))]
    for array, table in memory:
        case += [struct.pack("<3Q", address(array), array.nbytes, table), array.tobytes()]
    case.append(struct.pack("<Q", len(launches)))
    for launch in launches:
        name, kinds = launch.symbol.name.encode(), [each.kind for each in launch.symbol.params]
        case += [struct.pack("<Q", len(name)), name]
        case.append(struct.pack("<6Q", *launch.grid, launch.symbol.threads, launch.shared, len(kinds)))
        case += [struct.pack(_PACK[kind], each).ljust(8, b"\0") for kind, each in zip(kinds, launch.args, strict=True)]
    case.append(struct.pack("<Q", backwards))
    with tempfile.TemporaryDirectory() as folder:
        written, result = Path(folder) / "case", Path(folder) / "result"
        written.write_bytes(b"".join(case))
        done = _run(runner, written, result)
        if done.returncode == 2:
            raise ValueError(done.stderr.strip())
        if done.returncode == 3:
            raise Fault(done.stderr.strip())
        if done.returncode:
            raise Report(f"exit {done.returncode}\n{done.stderr}")
        back = result.read_bytes()
    at = 0
    for array, table in memory:
        if not table:
            array.reshape(-1).view(np.uint8)[:] = np.frombuffer(back, np.uint8, array.nbytes, at)
        at += array.nbytes


def _run(runner: Path, *words: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0:exitcode=66",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "TSAN_OPTIONS": "halt_on_error=1:exitcode=66:report_signal_unsafe=0",
    }
    # ThreadSanitizer knows where programs lie in memory, and wants them there.
    plain = ["setarch", "-R"] if shutil.which("setarch") else []
    command = [*plain, str(runner), *map(str, words)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=RUN_S, check=False)
