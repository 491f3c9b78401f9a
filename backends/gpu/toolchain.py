"""Compilers of a toolkit, for those who have one: nvcc, and for AMD's cards clang, ROCm's or the distribution's.

A user needs neither: `backends.gpu.jit` compiles in the process. They are for the compile gate, whose AMD half is
clang's, and for whoever asks for them. Both make the same of a program as the libraries do: the same options, and no
header of a toolkit.

Where nvcc is not on the PATH, wheels of PyPI are a complete one: `nvidia-cuda-nvcc nvidia-cuda-runtime nvidia-cuda-cccl
nvidia-nvvm nvidia-cuda-crt` put it into one folder. NVIDIA's disassembler comes as a wheel too.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from backends.gpu.arch import Arch, Vendor
from backends.gpu.errors import CompileFailed, CompilerMissing
from backends.gpu.jit import STRICT, Binary, packages
from backends.gpu.sources import Program

NVCC_WHEELS = "nvidia-cuda-nvcc nvidia-cuda-runtime nvidia-cuda-cccl nvidia-nvvm nvidia-cuda-crt"
CLANGS = ("clang-22", "clang-19")
"""Of the distribution, after ROCm's own: the first one that is there."""

COMPILE_S = 900.0
_USUAL = Path("/usr/local/cuda/bin")


@dataclass(frozen=True)
class Toolkit:
    """One compiler. `path` is run; `title` has its name and version."""

    vendor: Vendor
    path: str
    title: str

    def compile(self, program: Program, arch: Arch, extra: tuple[str, ...] = ()) -> Binary:
        """As `Jit.compile`. Raises CompileFailed with what the compiler printed."""
        with tempfile.TemporaryDirectory(prefix="homeserve-kernel-") as name:
            folder = Path(name)
            for file, text in ((program.name, program.text), *program.headers):
                (folder / file).write_text(text)
            made = folder / "code"
            log = self._run((*self._options(arch), *program.defines, *extra, "-o", "code", program.name), folder, arch)
            return Binary("cubin" if self.vendor == "nvidia" else "code object", made.read_bytes(), log)

    def _options(self, arch: Arch) -> tuple[str, ...]:
        if self.vendor == "nvidia":
            strict = (each for each in STRICT["nvidia"] if each != "--device-as-default-execution-space")
            return ("-cubin", f"-arch={arch.name}", "--expt-relaxed-constexpr", *strict)
        shape = ("-x", "hip", "--cuda-device-only", "--no-gpu-bundle-output", "-nogpulib", "-nogpuinc")
        return (*shape, f"--offload-arch={arch.name}", *STRICT["amd"])

    def _run(self, arguments: Sequence[str], folder: Path, arch: Arch) -> str:
        try:
            done = subprocess.run(
                [self.path, *arguments], cwd=folder, capture_output=True, text=True, errors="replace", timeout=COMPILE_S
            )
        except subprocess.TimeoutExpired:
            raise self._failed(arguments[-1], arch, f"no end within {COMPILE_S:.0f} s") from None
        if done.returncode:
            raise self._failed(arguments[-1], arch, done.stderr + done.stdout)
        return done.stderr + done.stdout

    def _failed(self, file: str, arch: Arch, log: str) -> CompileFailed:
        return CompileFailed(
            f"{self.title} could not compile {file} for {arch.name}",
            log=log,
            fix="report this with the text above; another version of the compiler may do",
        )


def nvcc() -> Toolkit:
    """From the PATH, else from wheels. Raises CompilerMissing."""
    for path in _found("nvcc"):
        version = _version(path, r"release ([\d.]+), V([\d.]+)", group=2)
        if version:
            return Toolkit("nvidia", path, f"nvcc {version}")
    raise CompilerMissing("nvcc was not found", fix=f"install it with: pip install {NVCC_WHEELS}")


def clang() -> Toolkit:
    """The first of ROCm's and the distribution's that knows AMD's cards. Raises CompilerMissing."""
    for name in ("/opt/rocm/llvm/bin/clang", *CLANGS):
        path = shutil.which(name)
        version = path and _version(path, r"clang version ([\d.]+)")
        if path and version:
            return Toolkit("amd", path, f"clang {version}")
    raise CompilerMissing(
        f"no clang was found; looked for {', '.join(CLANGS)}",
        fix="install it (Debian, Ubuntu: apt install clang-19 lld-19 llvm-19)",
    )


def tool(name: str) -> str:
    """A disassembler or reader: nvdisasm, or llvm-objdump and llvm-readelf of the version of `clang()`. Raises
    CompilerMissing."""
    if name.startswith("llvm-"):
        beside = Path(clang().path).resolve().parent / name
        if beside.is_file():
            return str(beside)
        raise CompilerMissing(
            f"{beside} was not found", fix="install LLVM's tools (Debian, Ubuntu: apt install llvm-19)"
        )
    found = next(_found(name), None)
    if found is None:
        raise CompilerMissing(f"{name} was not found", fix=f"install it with: pip install nvidia-cuda-{name}")
    return found


def _found(name: str) -> Iterator[str]:
    """On the PATH, in NVIDIA's usual folder, in wheels of this environment."""
    on_path = shutil.which(name)
    if on_path:
        yield on_path
    wheels = [Path(root) / part / "bin" / name for root in packages("nvidia") for part in ("cu13", "cuda_nvcc")]
    for path in (_USUAL / name, Path(sys.prefix) / "bin" / name, *wheels):
        if path.is_file():
            yield str(path)


def _version(path: str, pattern: str, group: int = 1) -> str:
    """Empty for a program that does not run or is another one."""
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, errors="replace", timeout=60.0)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    match = re.search(pattern, done.stdout)
    return match[group] if match and done.returncode == 0 else ""
