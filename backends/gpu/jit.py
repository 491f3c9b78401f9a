"""Compiling on the user's machine, in this process, without a toolkit: NVRTC for NVIDIA's cards, hiprtc for AMD's.

The two libraries have one shape. A program is made from a text and headers by name, compiled with options, asked for
its log and its code, and destroyed; every function returns a status. Only names differ: the prefix, and what code is
called (`GetCUBIN`, `GetCode`). So there is one class, and a `_Names` for each vendor.

Code is made for the exact arch (a cubin, a code object): no second compiler runs when it is loaded. An arch that is
newer than NVRTC knows gets PTX of the newest one that it knows; the card's driver then compiles that. Which major
version of NVRTC: the driver's, since a driver loads what toolkits of its own major version and of earlier ones made.

hiprtc has never run here: what is proven of it is this code against a library of the same functions that a test builds.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from backends.gpu.arch import Arch, Vendor
from backends.gpu.errors import CompileFailed, CompilerMissing, UnknownArch
from backends.gpu.sources import Program

Kind = Literal["cubin", "ptx", "code object"]

NVRTC_MAJORS = (13, 12)
"""Tried in this order where the driver's is not known."""

STRICT: dict[Vendor, tuple[str, ...]] = {
    "nvidia": ("-std=c++17", "--fmad=false", "--device-as-default-execution-space"),
    "amd": ("-std=c++17", "-O3", "-ffp-contract=off"),
}
"""No products and sums joined by the compiler: variants of a kernel have to give the same bits."""


@dataclass(frozen=True)
class Binary:
    """What a driver loads. `log`: the compiler's warnings."""

    kind: Kind
    data: bytes
    log: str = ""


@dataclass(frozen=True)
class _Names:
    prefix: str
    code: str
    kind: Kind
    title: str


_NAMES: dict[Vendor, _Names] = {
    "nvidia": _Names("nvrtc", "CUBIN", "cubin", "NVRTC"),
    "amd": _Names("hiprtc", "Code", "code object", "hiprtc"),
}


class Jit:
    """One loaded library. `compile` may be called by several threads at once."""

    def __init__(self, vendor: Vendor, path: str) -> None:
        """Raises CompilerMissing for a library that cannot be loaded or lacks a function."""
        self.vendor = vendor
        self.path = path
        self._names = _NAMES[vendor]
        try:
            self._library = ctypes.CDLL(path)
            self._error_text = ctypes.CFUNCTYPE(ctypes.c_char_p, ctypes.c_int)(
                (f"{self._names.prefix}GetErrorString", self._library)
            )
            self.version = self._version()
        except (OSError, AttributeError) as error:
            raise CompilerMissing(
                f"{self._names.title} at {path} cannot be used: {error}", fix=install(vendor, None)
            ) from error

    @property
    def title(self) -> str:
        """Name and version; part of a cache's key."""
        return f"{self._names.title} {self.version}"

    @functools.cached_property
    def arches(self) -> tuple[int, ...]:
        """Numbers of NVIDIA's arches that it makes code for, in rising order; hiprtc cannot say."""
        if self.vendor != "nvidia":
            return ()
        count = ctypes.c_int()
        self._call("GetNumSupportedArchs", ctypes.byref(count))
        numbers = (ctypes.c_int * count.value)()
        self._call("GetSupportedArchs", numbers)
        return tuple(sorted(numbers))

    def compile(self, program: Program, arch: Arch, extra: tuple[str, ...] = ()) -> Binary:
        """Raises CompileFailed with the log, UnknownArch for one that is older than the library knows."""
        target, kind = self._target(arch)
        options = (f"--gpu-architecture={target}", *STRICT[self.vendor], *program.defines, *extra)
        names, texts = zip(*program.headers, strict=True) if program.headers else ((), ())
        handle = ctypes.c_void_p()
        count = len(program.headers)
        self._call(
            "CreateProgram",
            ctypes.byref(handle),
            program.text.encode(),
            program.name.encode(),
            ctypes.c_int(count),
            _strings(texts),
            _strings(names),
        )
        try:
            status = self._function("CompileProgram")(handle, ctypes.c_int(len(options)), _strings(options))
            log = self._bytes(handle, "ProgramLog").rstrip(b"\0").decode(errors="replace")
            if status:
                raise self._failed(program, arch, log or self._text_of(status))
            return Binary(kind, self._bytes(handle, "PTX" if kind == "ptx" else self._names.code), log)
        finally:
            self._function("DestroyProgram")(ctypes.byref(handle))

    def _target(self, arch: Arch) -> tuple[str, Kind]:
        if not self.arches or arch.number in self.arches:
            return arch.name, self._names.kind
        if arch.number > self.arches[-1]:
            return f"compute_{self.arches[-1]}", "ptx"
        raise UnknownArch(
            f"{self.title} makes no code for {arch.name}; it knows {', '.join(f'sm_{n}' for n in self.arches)}",
            fix=f"install one that does: {install(self.vendor, NVRTC_MAJORS[-1])}",
        )

    def _failed(self, program: Program, arch: Arch, log: str) -> CompileFailed:
        what = f"{program.name}{f' for {program.quant}' if program.quant else ''}"
        return CompileFailed(
            f"{self.title} could not compile {what} for {arch.name}",
            log=log,
            fix="report this with the text above; another version of the compiler may do"
            f" ({install(self.vendor, None)}), and without this card homeserve runs as before",
        )

    def _version(self) -> str:
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("Version", ctypes.byref(major), ctypes.byref(minor))
        return f"{major.value}.{minor.value}"

    def _bytes(self, handle: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"Get{what}Size", handle, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(max(1, size.value))
        self._call(f"Get{what}", handle, buffer)
        return buffer.raw[: size.value]

    def _call(self, name: str, *arguments: object) -> None:
        status = self._function(name)(*arguments)
        if status:
            raise CompileFailed(
                f"{self._names.prefix}{name} failed: {self._text_of(status)}",
                fix=f"{self.path} may be damaged; {install(self.vendor, None)}",
            )

    def _text_of(self, status: int) -> str:
        text: bytes | None = self._error_text(status)
        return (text or b"status %d" % status).decode(errors="replace")

    def _function(self, name: str) -> Callable[..., int]:
        function: Callable[..., int] = getattr(self._library, self._names.prefix + name)
        return function


def find(vendor: Vendor, major: int | None = None) -> Jit:
    """The library of a vendor, from the system or from a wheel. `major`: of NVRTC, the driver's; hiprtc's does not
    matter, as the library comes with the driver's runtime. Raises CompilerMissing with what to install."""
    tried = []
    broken: CompilerMissing | None = None
    for path in _candidates(vendor, major):
        tried.append(path)
        if os.path.isabs(path) and not os.path.exists(path):
            continue
        try:
            return Jit(vendor, path)
        except CompilerMissing as error:
            broken = broken or (error if os.path.isabs(path) else None)
    if broken:
        raise broken
    version = f" {major}" if vendor == "nvidia" and major else ""
    raise CompilerMissing(
        f"{_NAMES[vendor].title}{version} was not found; looked for {', '.join(tried)}", fix=install(vendor, major)
    )


def install(vendor: Vendor, major: int | None) -> str:
    """What to do about a missing library."""
    if vendor == "amd":
        return (
            "install ROCm's HIP runtime, which hiprtc belongs to (Debian, Ubuntu: apt install libamdhip64-5"
            " libhiprtc-builtins5 · Fedora: dnf install rocm-hip · AMD's packages: hip-runtime-amd), or set ROCM_PATH"
        )
    wheel = "nvidia-cuda-nvrtc-cu12" if major == 12 else "nvidia-cuda-nvrtc"
    return f"install it with: {sys.executable} -m pip install {wheel}"


def _candidates(vendor: Vendor, major: int | None) -> Iterator[str]:
    """Names for the system's loader first, then files."""
    if vendor == "amd":
        yield from ("libhiprtc.so", "libhiprtc.so.7", "libhiprtc.so.6", "libhiprtc.so.5")
        roots = [os.environ.get("ROCM_PATH", "/opt/rocm"), *packages("_rocm_sdk_core")]
        for root in roots:
            yield from libraries(Path(root) / "lib", "libhiprtc.so")
        return
    for each in (major,) if major else NVRTC_MAJORS:
        yield f"libnvrtc.so.{each}"
        for folder in (f"cu{each}/lib", "cuda_nvrtc/lib"):
            for root in packages("nvidia"):
                yield str(Path(root) / folder / f"libnvrtc.so.{each}")
        for toolkit in sorted(Path("/usr/local").glob(f"cuda-{each}*"), reverse=True):
            yield str(toolkit / "lib64" / f"libnvrtc.so.{each}")


def libraries(folder: Path, name: str) -> Iterator[str]:
    """Files of a library, with a number behind the name or without; not files that stand beside it, such as
    libhiprtc.so.7.1-debug."""
    plain = re.compile(re.escape(name) + r"(\.\d+)*")
    yield from sorted(str(path) for path in folder.glob(name + "*") if plain.fullmatch(path.name))


def packages(name: str) -> tuple[str, ...]:
    """Folders of an installed Python package, without importing it."""
    spec = importlib.util.find_spec(name)
    return tuple(spec.submodule_search_locations or ()) if spec else ()


def _strings(texts: tuple[str, ...]) -> ctypes.Array[ctypes.c_char_p]:
    return (ctypes.c_char_p * len(texts))(*(text.encode() for text in texts))
