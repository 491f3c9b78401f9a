"""The built libraries as files: what they export, what instructions they hold, which one is chosen."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import kernel_simde as simde
import pytest

from backends.base import OpenOptions
from backends.cpu import abi, levels
from backends.cpu.backend import CpuBackend
from backends.host import abi as host_abi
from backends.host import library as host_library

BUILT = tuple(level for level in levels.LEVELS if levels.library_path(level).exists())
SECONDS = 60
HOST_NAMES = set(host_abi.FUNCTIONS)
NAMES = {*abi.FUNCTIONS, *HOST_NAMES}
HOST_HEADERS = (simde.HOST / "hs_host.h", simde.HOST / "hs_collective.h")
HEADERS = (simde.NATIVE / "hs_cpu.h", *HOST_HEADERS)


def output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=SECONDS).stdout


def exports(library: Path) -> set[str]:
    return {line.split()[-1] for line in output("nm", "-D", "--defined-only", str(library)).splitlines()}


def text_of(headers: tuple[Path, ...]) -> str:
    return "".join(header.read_text(encoding="ascii") for header in headers)


def functions_of(headers: tuple[Path, ...]) -> set[str]:
    without_comments = re.sub(r"/\*.*?\*/", "", text_of(headers), flags=re.S)
    return set(re.findall(r"\b(hs_\w+)\(", without_comments))


@pytest.mark.parametrize("built", BUILT)
def test_a_library_exports_the_abi_and_nothing_else(built: str) -> None:
    assert exports(levels.library_path(built)) == NAMES


def test_the_library_of_host_memory_has_its_part_of_the_abi_alone() -> None:
    assert exports(host_library.PATH) == HOST_NAMES


def test_header_and_table_name_the_same_functions() -> None:
    assert functions_of(HEADERS) == NAMES
    assert functions_of(HOST_HEADERS) == HOST_NAMES
    header = text_of(HEADERS)
    assert int(re.search(r"#define HS_HOST_VERSION (\d+)", header)[1]) == host_abi.HOST_VERSION
    assert int(re.search(r"#define HS_ABI_VERSION (\d+)", header)[1]) == abi.ABI_VERSION
    for name, value in re.findall(r"HS_(STEP_\w+) = (\d+)", header):
        assert getattr(abi, name) == int(value)


def test_header_and_table_have_the_same_fields_in_the_same_order() -> None:
    header = re.sub(r"/\*.*?\*/", "", text_of(HEADERS), flags=re.S)
    for struct in (*abi.STRUCTS, *host_abi.STRUCTS):
        words = re.findall("[A-Z][a-z]*", struct.__name__.removesuffix("Record"))
        name = "_".join(["hs", *(word.lower() for word in words)])
        body = re.search(rf"typedef struct {name} \{{(.*?)\}}", header, flags=re.S)[1]
        fields = [re.search(r"(\w+)(?:\[\d+\])?\s*$", line)[1] for line in body.split(";") if line.strip()]
        assert fields == [field[0] for field in struct._fields_], name


@pytest.mark.parametrize(
    ("built", "wanted", "unwanted"),
    [
        ("avx512vnni", r"vpdpwssd .*%zmm", None),
        ("avx512", r"vpmaddwd .*%zmm", r"vpdp"),
        ("avx2", r"vpmaddwd .*%ymm", r"%zmm|vpdp"),
        ("baseline", r"pmaddwd .*%xmm", r"%ymm|%zmm"),
    ],
)
def test_a_level_holds_its_instructions_and_none_of_a_higher_one(built: str, wanted: str, unwanted: str | None) -> None:
    """Every level that belongs to this machine's architecture is built, whether or not its CPU can run it."""
    if "avx2" not in BUILT:
        pytest.skip("not an x86-64 build")
    assert shutil.which("objdump"), "objdump comes with the compiler (binutils)"
    code = output("objdump", "-d", "--no-show-raw-insn", str(levels.library_path(built)))
    assert re.search(wanted, code)
    assert unwanted is None or not re.search(unwanted, code)


def test_the_library_of_host_memory_needs_no_more_than_its_architecture() -> None:
    if "avx2" not in BUILT:
        pytest.skip("not an x86-64 build")
    assert not re.search(r"%ymm|%zmm", output("objdump", "-d", "--no-show-raw-insn", str(host_library.PATH)))


def test_the_best_level_is_chosen_and_one_that_the_cpu_lacks_is_refused() -> None:
    available = levels.host_levels()
    assert available and available[0] == "baseline"
    opened = CpuBackend(OpenOptions(threads=1))
    assert opened.facts.isa == available[-1]
    assert opened.facts.batch_invariant
    opened.close()
    assert levels.choose("", ("baseline", "avx2")) == levels.choose("auto", ("baseline", "avx2")) == "avx2"
    with pytest.raises(levels.LevelError, match="cannot run ISA level 'avx512'; it can run: baseline, avx2"):
        levels.choose("avx512", ("baseline", "avx2"))
    with pytest.raises(levels.LevelError, match="'neon' is not known"):
        levels.choose("neon", available)


def test_a_missing_or_foreign_library_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(abi.NativeLibraryError, match="is not built: install the package again"):
        abi.load(tmp_path / "none.so")
    (tmp_path / "text.so").write_text("no library")
    with pytest.raises(abi.NativeLibraryError, match="cannot be loaded"):
        abi.load(tmp_path / "text.so")
    with pytest.raises(host_library.NativeLibraryError, match="the native host library .* is not built: install the"):
        host_library.load(tmp_path / "none.so")


@pytest.mark.parametrize("wrong", ["version", "sizes"])
def test_a_library_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    if wrong == "version":
        monkeypatch.setattr(host_abi, "HOST_VERSION", host_abi.HOST_VERSION + 1)
    else:
        monkeypatch.setattr(host_abi, "STRUCTS", host_abi.STRUCTS[::-1])
    with pytest.raises(host_library.OtherVersion, match="is of another version than this package: install"):
        host_library.load()
    with pytest.raises(host_library.OtherVersion):
        levels.load("baseline")
    monkeypatch.undo()
    with pytest.raises(abi.NativeLibraryError, match="lacks hs_abi_version"):
        abi.load(host_library.PATH)


def test_a_thread_count_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="-1 threads"):
        CpuBackend(OpenOptions(threads=-1))
