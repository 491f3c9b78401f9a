"""Compiled device code on disk, so that a second start compiles nothing.

An entry's name is a digest of everything that decides its bytes: the program with all its headers, the arch, the
compiler with its version, the options. So nothing is ever invalid, only unused, and a new release simply has other
names. An entry's file says what its payload's digest is; one that was cut short or damaged is noticed, said once and
made anew.

Several processes use one folder: a file comes into being under a name of its own and is then moved to its place, in one
step. The ranks of a server start together and want the same code, so whoever compiles holds a lock of that entry, and
the others wait for the result instead of compiling it too. A lock is only about work done twice: where there can be
none, all compile.

The folder is not of the package: $XDG_CACHE_HOME/homeserve/kernels. If it cannot be written, that is said once, and the
code is compiled at each start.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from backends.gpu.arch import Arch
from backends.gpu.jit import STRICT, Binary, Kind
from backends.gpu.sources import Program

_MAGIC = b"homeserve kernel 1\n"
_KINDS: tuple[Kind, ...] = ("cubin", "ptx", "code object")


class Compiler(Protocol):
    """What makes code of a program: backends.gpu.jit.Jit, a compiler of backends.gpu.toolchain. Two with the same title
    make the same code."""

    @property
    def title(self) -> str: ...

    def compile(self, program: Program, arch: Arch, extra: tuple[str, ...] = ()) -> Binary: ...


def default_folder(environ: Mapping[str, str]) -> Path:
    base = environ.get("XDG_CACHE_HOME") or os.path.join(environ.get("HOME") or os.path.expanduser("~"), ".cache")
    return Path(base) / "homeserve" / "kernels"


class Cache:
    """`say` is told what a user should know, each thing once: a damaged entry, a folder that cannot be used."""

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self.folder = folder
        self._say = say
        self._said: set[str] = set()

    def get(self, program: Program, arch: Arch, compiler: Compiler, extra: tuple[str, ...] = ()) -> Binary:
        """The code, from the folder or from the compiler. Raises what the compiler raises."""
        key = key_of(program, arch, compiler, extra)
        found = self._read(key)
        if found:
            return found
        with self._locked(key):
            found = self._read(key)
            if not found:
                found = compiler.compile(program, arch, extra)
                self._write(key, found)
        return found

    def _read(self, key: str) -> Binary | None:
        path = self.folder / key
        try:
            raw = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            self._tell("folder", f"compiled kernels in {self.folder} cannot be read ({error.strerror})")
            return None
        binary = unpack(raw)
        if binary is None:
            self._tell(key, f"{path} is damaged, and is compiled anew")
        return binary

    def _write(self, key: str, binary: Binary) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self.folder, prefix=".making-")
        except OSError as error:
            self._unwritable(error)
            return
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(pack(binary))
            os.replace(name, self.folder / key)
        except OSError as error:
            with suppress(FileNotFoundError):
                os.unlink(name)
            self._unwritable(error)

    @contextmanager
    def _locked(self, key: str) -> Iterator[None]:
        """One of 256 locks, by the key. Freed by the kernel when a process ends, however it ends."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            file = open(self.folder / f".lock-{key[:2]}", "wb")
        except OSError as error:
            self._unwritable(error)
            yield
            return
        with file:
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _unwritable(self, error: OSError) -> None:
        what = f"compiled kernels cannot be kept in {self.folder} ({error.strerror}): each start compiles them again"
        self._tell("folder", what)

    def _tell(self, about: str, text: str) -> None:
        if about not in self._said:
            self._said.add(about)
            self._say(text)


def key_of(program: Program, arch: Arch, compiler: Compiler, extra: tuple[str, ...]) -> str:
    parts = (program.digest, arch.name, compiler.title, *STRICT[program.vendor], *extra)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def pack(binary: Binary) -> bytes:
    """Magic, the digest of what follows, then a line with the kind and the log's length, the log, the code."""
    log = binary.log.encode()
    payload = f"{_KINDS.index(binary.kind)} {len(log)}\n".encode() + log + binary.data
    return _MAGIC + hashlib.sha256(payload).digest() + payload


def unpack(raw: bytes) -> Binary | None:
    """None for what `pack` did not write, or not to the end."""
    digest, payload = raw[len(_MAGIC) : len(_MAGIC) + 32], raw[len(_MAGIC) + 32 :]
    if not raw.startswith(_MAGIC) or hashlib.sha256(payload).digest() != digest:
        return None
    line, _, rest = payload.partition(b"\n")
    kind, length = map(int, line.split())
    return Binary(_KINDS[kind], rest[length:], rest[:length].decode())
