"""NVRTC compiles the shipped sources in this process; hiprtc's half goes through a library that is built here."""

from __future__ import annotations

import os
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from backends.gpu import gate, jit, sources
from backends.gpu.arch import arch
from backends.gpu.cache import Cache
from backends.gpu.errors import CompileFailed, CompilerMissing, UnknownArch
from backends.gpu.sources import Program

FAKE = Path(__file__).with_name("hiprtc_fake.cpp")
EM_CUDA = 190
PATIENCE_S = 60.0


@pytest.fixture(scope="session")
def nvrtc() -> jit.Jit:
    try:
        return jit.find("nvidia", 13)
    except CompilerMissing as missing:
        pytest.skip(f"compiler missing: {missing.message}")


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    def library(*flags: str) -> Path:
        built = tmp_path_factory.mktemp("hiprtc") / "libhiprtc.so"
        compiler = shutil.which("g++") or shutil.which("c++") or "c++"
        command = [compiler, "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", *flags, "-o", str(built), str(FAKE)]
        subprocess.run(command, check=True, timeout=PATIENCE_S)
        return built

    return library


@pytest.fixture(scope="session")
def library(build: Callable[..., Path]) -> Path:
    return build()


@pytest.fixture
def noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """What the fake was given since the last look."""
    path = tmp_path / "noted"
    monkeypatch.setenv("HIPRTC_FAKE", str(path))

    def lines() -> list[str]:
        found = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return found

    return lines


def machine(elf: bytes) -> int:
    assert elf[:4] == b"\x7fELF"
    return int(struct.unpack_from("<H", elf, 18)[0])


# ------------------------------------------------------------------------------------------------------- NVRTC


def test_nvrtc_makes_a_cubin_from_memory(nvrtc: jit.Jit) -> None:
    made = nvrtc.compile(sources.file_program("attention_merge", "nvidia"), arch("sm_86"))
    assert (made.kind, machine(made.data)) == ("cubin", EM_CUDA)
    assert b"attention_merge" in made.data
    assert "warning" not in made.log


def test_a_type_alone_is_compiled_of_a_file_with_all_types(nvrtc: jit.Jit) -> None:
    symbol = next(each for each in gate.symbols() if each.file == "linear_few" and each.quant == "q8_0")
    made = nvrtc.compile(sources.program(symbol, "nvidia"), arch("sm_86"))
    names = set(re.findall(rb"\.text\.(\w+)", made.data))
    assert symbol.name.encode() in names
    assert all(b"q8_0" in name for name in names)


def test_an_arch_that_is_newer_than_nvrtc_knows_gets_ptx_of_the_newest(nvrtc: jit.Jit) -> None:
    newest = nvrtc.arches[-1]
    made = nvrtc.compile(sources.file_program("attention_merge", "nvidia"), arch("sm_199"))
    assert made.kind == "ptx"
    assert f".target sm_{newest}".encode() in made.data
    assert b".entry attention_merge" in made.data


def test_an_arch_that_nvrtc_makes_no_code_for_any_more(nvrtc: jit.Jit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(nvrtc.__dict__, "arches", (86, 90))
    with pytest.raises(UnknownArch, match="no code for sm_75; it knows sm_86, sm_90") as caught:
        nvrtc.compile(sources.file_program("attention_merge", "nvidia"), arch("sm_75"))
    assert "pip install nvidia-cuda-nvrtc-cu12" in caught.value.fix


def test_a_source_that_does_not_compile_is_told_with_the_compilers_words(nvrtc: jit.Jit) -> None:
    program = Program("nvidia", "norm.cu", '#include "a.h"\n\nint x = lanes();\n', (("a.h", ""),), "q4_k")
    with pytest.raises(CompileFailed) as caught:
        nvrtc.compile(program, arch("sm_86"))
    said = str(caught.value)
    assert f"{nvrtc.title} could not compile norm.cu for q4_k for sm_86" in said
    assert 'norm.cu(3): error: identifier "lanes" is undefined' in caught.value.log
    assert "report this" in said and "another version of the compiler" in said


def test_a_header_that_is_missing_is_told(nvrtc: jit.Jit) -> None:
    program = sources.file_program("norm", "nvidia")
    without = replace(program, headers=tuple(pair for pair in program.headers if pair[0] != "functions.h"))
    with pytest.raises(CompileFailed, match=r"functions\.h"):
        nvrtc.compile(without, arch("sm_86"))


def test_an_nvrtc_of_a_driver_that_nobody_has() -> None:
    with pytest.raises(CompilerMissing, match=r"NVRTC 99 was not found; looked for libnvrtc\.so\.99") as caught:
        jit.find("nvidia", 99)
    assert "pip install nvidia-cuda-nvrtc" in caught.value.fix
    assert "nvidia-cuda-nvrtc-cu12" in jit.install("nvidia", 12)


def test_a_file_that_is_no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "libnvrtc.so.13"
    broken.write_bytes(b"\x7fELF and no more")
    monkeypatch.setattr(jit, "_candidates", lambda vendor, major: iter([str(broken)]))
    with pytest.raises(CompilerMissing, match=f"NVRTC at {broken} cannot be used") as caught:
        jit.find("nvidia", 13)
    assert "pip install nvidia-cuda-nvrtc" in caught.value.fix


# ------------------------------------------------------------------------------------------------------ hiprtc


def test_hiprtc_gets_the_same_as_nvrtc_under_its_own_names(library: Path, noted: Callable[[], list[str]]) -> None:
    hiprtc = jit.Jit("amd", str(library))
    program = sources.file_program("linear_few", "amd", "q4_k")
    made = hiprtc.compile(program, arch("gfx90a:sramecc+:xnack-"))
    options = "--gpu-architecture=gfx90a:sramecc+:xnack- -std=c++17 -O3 -ffp-contract=off -DQUANT=q4_k"
    assert hiprtc.title == "hiprtc 7.1"
    assert made == jit.Binary("code object", b"\x7fELF\0linear_few.hip " + options.encode(), "")
    assert noted() == [
        f"create linear_few.hip {len(program.text)}",
        *(f"header {name} {len(text.encode())}" for name, text in program.headers),
        f"compile {options}",
        "destroy",
    ]


def test_a_failure_of_hiprtc_has_its_log_and_frees_the_program(
    library: Path, noted: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HIPRTC_FAKE_SAYS", "error")
    with pytest.raises(CompileFailed, match="hiprtc 7.1 could not compile norm.hip for gfx1103") as caught:
        jit.Jit("amd", str(library)).compile(sources.file_program("norm", "amd"), arch("gfx1103"))
    assert caught.value.log == "norm.hip:3:5: error: use of undeclared identifier 'lane'"
    assert noted()[-1] == "destroy"


def test_a_status_of_hiprtc_is_told_by_its_name(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIPRTC_FAKE_SAYS", "refuse")
    with pytest.raises(CompileFailed, match="hiprtcCreateProgram failed: HIPRTC_ERROR_INVALID_INPUT"):
        jit.Jit("amd", str(library)).compile(sources.file_program("norm", "amd"), arch("gfx1103"))


def test_warnings_of_hiprtc_are_kept(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIPRTC_FAKE_SAYS", "warn")
    made = jit.Jit("amd", str(library)).compile(sources.file_program("norm", "amd"), arch("gfx1103"))
    assert made.log == "a warning"


def test_hiprtc_is_found_below_rocm_path(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lib").mkdir()
    shutil.copy(library, tmp_path / "lib/libhiprtc.so.7")
    (tmp_path / "lib/libhiprtc.so.7-debug").write_text("no library")
    monkeypatch.setenv("ROCM_PATH", str(tmp_path))
    assert jit.find("amd").path == str(tmp_path / "lib/libhiprtc.so.7")


def test_no_hiprtc_is_told_with_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "_candidates", lambda vendor, major: iter([str(tmp_path / "libhiprtc.so")]))
    with pytest.raises(CompilerMissing, match="hiprtc was not found; looked for") as caught:
        jit.find("amd")
    assert "ROCm" in caught.value.fix and "dnf install rocm-hip" in caught.value.fix and "ROCM_PATH" in caught.value.fix


def test_a_library_that_lacks_a_function(build: Callable[..., Path]) -> None:
    with pytest.raises(CompilerMissing, match="cannot be used: .*hiprtcVersion"):
        jit.Jit("amd", str(build("-DWITHOUT_VERSION")))


# ------------------------------------------------------------------------------------------------------- cache

RANK = """
import sys
from pathlib import Path
from backends.gpu import jit, sources
from backends.gpu.arch import arch
from backends.gpu.cache import Cache
cache = Cache(Path(sys.argv[2]), print)
for file in ("norm", "route"):
    print(len(cache.get(sources.file_program(file, "amd"), arch("gfx1103"), jit.Jit("amd", sys.argv[1])).data))
"""


def test_ranks_that_start_together_compile_everything_once(
    library: Path, noted: Callable[[], list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HIPRTC_FAKE_SAYS", "slow")
    command = [sys.executable, "-c", RANK, str(library), str(tmp_path / "kernels")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    ranks = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    told = [rank.communicate(timeout=PATIENCE_S)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0, 0]
    assert len(set(told)) == 1 and len(told[0].split()) == 2
    assert sum(line.startswith("compile") for line in noted()) == 2


def test_another_version_of_the_library_has_entries_of_its_own(
    library: Path, build: Callable[..., Path], noted: Callable[[], list[str]], tmp_path: Path
) -> None:
    program, cache = sources.file_program("norm", "amd"), Cache(tmp_path / "kernels", pytest.fail)
    for path in (library, build("-DMAJOR=8"), library):
        cache.get(program, arch("gfx1103"), jit.Jit("amd", str(path)))
    assert sum(line.startswith("compile") for line in noted()) == 2


def test_a_cut_entry_of_nvrtcs_is_compiled_anew(nvrtc: jit.Jit, tmp_path: Path) -> None:
    said: list[str] = []
    program = sources.file_program("attention_merge", "nvidia")
    made = Cache(tmp_path, said.append).get(program, arch("sm_86"), nvrtc)
    (entry,) = (path for path in tmp_path.iterdir() if not path.name.startswith("."))
    entry.write_bytes(entry.read_bytes()[:-100])
    assert Cache(tmp_path, said.append).get(program, arch("sm_86"), nvrtc) == made
    assert said == [f"{entry} is damaged, and is compiled anew"]
