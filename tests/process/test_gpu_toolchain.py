"""Compilers of a toolkit: which one is taken, what it is given, what is said where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from backends.gpu import sources, toolchain
from backends.gpu.arch import arch
from backends.gpu.errors import CompileFailed, CompilerMissing

COMPILER = """#!/bin/sh
case "$1" in --version) echo "{version}"; exit 0;; esac
echo "$@" > {noted}
ls >> {noted}
[ -z "{log}" ] || {{ echo "{log}" >&2; exit 1; }}
printf made > code
"""


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH with a folder for made-up compilers before the system's, and none of the machine's own."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/bin")
    monkeypatch.setattr(toolchain, "packages", lambda name: ())
    monkeypatch.setattr(toolchain, "CLANGS", ("clang-made-up",))
    monkeypatch.setattr(toolchain, "_USUAL", tmp_path / "usual")
    return tmp_path


def put(folder: Path, name: str, version: str, log: str = "") -> Path:
    path = folder / "bin" / name
    path.write_text(COMPILER.format(version=version, noted=folder / "noted", log=log))
    path.chmod(0o755)
    return path


def test_nvcc_is_given_the_program_as_files_and_the_same_options(alone: Path) -> None:
    path = put(alone, "nvcc", "Cuda compilation tools, release 13.0, V13.0.88")
    nvcc = toolchain.nvcc()
    assert (nvcc.path, nvcc.title) == (str(path), "nvcc 13.0.88")
    program = sources.file_program("linear_few", "nvidia", "q4_k")
    assert nvcc.compile(program, arch("sm_90a")).data == b"made"
    options, *files = (alone / "noted").read_text().splitlines()
    assert options == (
        "-cubin -arch=sm_90a --expt-relaxed-constexpr -std=c++17 --fmad=false -DQUANT=q4_k -o code linear_few.cu"
    )
    assert set(files) == {"linear_few.cu", *(name for name, _ in program.headers)}


def test_clang_needs_nothing_of_rocm(alone: Path) -> None:
    put(alone, "clang-made-up", "Some clang version 19.1.7 (3)")
    made = toolchain.clang().compile(sources.file_program("norm", "amd"), arch("gfx90a:xnack+"))
    assert (made.kind, made.data, toolchain.clang().title) == ("code object", b"made", "clang 19.1.7")
    options = (alone / "noted").read_text().splitlines()[0].split()
    assert {"-nogpulib", "-nogpuinc", "--offload-arch=gfx90a:xnack+", "-ffp-contract=off"} <= set(options)


def test_what_a_compiler_says_is_told(alone: Path) -> None:
    put(alone, "nvcc", "release 13.0, V13.0.88", log="norm.h(3): error: no")
    with pytest.raises(CompileFailed, match="nvcc 13.0.88 could not compile norm.cu for sm_86") as caught:
        toolchain.nvcc().compile(sources.file_program("norm", "nvidia"), arch("sm_86"))
    assert caught.value.log == "norm.h(3): error: no" and "report this" in caught.value.fix


def test_no_compiler_is_told_with_what_to_install(alone: Path) -> None:
    put(alone, "nvcc", "another program of this name")
    with pytest.raises(CompilerMissing, match="nvcc was not found") as caught:
        toolchain.nvcc()
    assert toolchain.NVCC_WHEELS in caught.value.fix
    with pytest.raises(CompilerMissing, match="no clang was found; looked for clang-made-up") as caught:
        toolchain.clang()
    assert "apt install clang-19 lld-19 llvm-19" in caught.value.fix
    with pytest.raises(CompilerMissing, match="nvdisasm was not found") as caught:
        toolchain.tool("nvdisasm")
    assert "pip install nvidia-cuda-nvdisasm" in caught.value.fix
    put(alone, "clang-made-up", "clang version 19.1.7")
    with pytest.raises(CompilerMissing, match="llvm-objdump was not found") as caught:
        toolchain.tool("llvm-objdump")
    assert "llvm-19" in caught.value.fix


def test_nvcc_of_the_wheels_is_found(alone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = put(alone, "nvcc", "release 13.5, V13.5.37")
    wheel = alone / "nvidia" / "cu13" / "bin" / "nvcc"
    wheel.parent.mkdir(parents=True)
    path.rename(wheel)
    monkeypatch.setattr(toolchain, "packages", lambda name: (str(alone / name),))
    assert toolchain.nvcc() == toolchain.Toolkit("nvidia", str(wheel), "nvcc 13.5.37")
