"""The cache of compiled device code: by content, damaged entries noticed, no folder needed."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from backends.gpu.arch import Arch, arch
from backends.gpu.cache import Cache, default_folder, key_of, pack, unpack
from backends.gpu.errors import CompileFailed
from backends.gpu.jit import Binary
from backends.gpu.sources import Program

PROGRAM = Program("nvidia", "norm.cu", "text", (("device.h", "words"),), "q4_k")
SM_86 = arch("sm_86")


class Counting:
    """A compiler that makes code of the program's text, and counts."""

    def __init__(self, title: str = "NVRTC 13.0") -> None:
        self.title = title
        self.made = 0

    def compile(self, program: Program, arch: Arch, extra: tuple[str, ...] = ()) -> Binary:
        self.made += 1
        return Binary("cubin", f"{program.text} for {arch.name}".encode(), "a warning, naïve")


def entries(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if not path.name.startswith("."))


def test_the_second_time_nothing_is_compiled(tmp_path: Path) -> None:
    compiler, said = Counting(), list[str]()
    first = Cache(tmp_path / "deep/kernels", said.append).get(PROGRAM, SM_86, compiler)
    second = Cache(tmp_path / "deep/kernels", said.append).get(PROGRAM, SM_86, compiler)
    assert first == second == Binary("cubin", b"text for sm_86", "a warning, naïve")
    assert (compiler.made, said) == (1, [])
    assert len(entries(tmp_path / "deep/kernels")) == 1


def test_whatever_decides_the_code_decides_the_entry(tmp_path: Path) -> None:
    keys = {
        key_of(PROGRAM, SM_86, Counting(), ()),
        key_of(replace(PROGRAM, headers=(("device.h", "other"),)), SM_86, Counting(), ()),
        key_of(replace(PROGRAM, quant=""), SM_86, Counting(), ()),
        key_of(PROGRAM, arch("sm_89"), Counting(), ()),
        key_of(PROGRAM, arch("gfx90a:xnack+"), Counting(), ()),
        key_of(PROGRAM, arch("gfx90a"), Counting(), ()),
        key_of(PROGRAM, SM_86, Counting("NVRTC 13.1"), ()),
        key_of(PROGRAM, SM_86, Counting(), ("-lineinfo",)),
    }
    assert len(keys) == 8
    assert all(len(key) == 64 for key in keys)


@pytest.mark.parametrize("damage", ["cut", "empty", "code", "log", "digest", "foreign"])
def test_a_damaged_entry_is_said_once_and_compiled_anew(tmp_path: Path, damage: str) -> None:
    compiler, said = Counting(), list[str]()
    cache = Cache(tmp_path, said.append)
    good = cache.get(PROGRAM, SM_86, compiler)
    (entry,) = entries(tmp_path)
    whole = entry.read_bytes()
    place = {"code": len(whole) - 1, "log": len(whole) - len(good.data) - 2, "digest": 20}
    if damage in place:
        at = place[damage]
        entry.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    else:
        entry.write_bytes({"cut": whole[:-3], "empty": b"", "foreign": b"\x7fELF" + bytes(100)}[damage])
    assert cache.get(PROGRAM, SM_86, compiler) == good
    assert compiler.made == 2
    assert said == [f"{entry} is damaged, and is compiled anew"]
    assert entry.read_bytes() == whole
    assert cache.get(PROGRAM, SM_86, compiler) == good
    assert (compiler.made, len(said)) == (2, 1)


def test_a_folder_that_cannot_be_written_is_said_once_and_all_works(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    compiler, said = Counting(), list[str]()
    cache = Cache(tmp_path / "file", said.append)
    for _ in range(2):
        assert cache.get(PROGRAM, SM_86, compiler).data == b"text for sm_86"
    assert cache.get(PROGRAM, arch("sm_89"), compiler).data == b"text for sm_89"
    assert compiler.made == 3
    assert len(said) == 1 and f"{tmp_path / 'file'}" in said[0]


def test_a_write_that_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    said = list[str]()
    assert Cache(tmp_path, said.append).get(PROGRAM, SM_86, Counting()).kind == "cubin"
    assert entries(tmp_path) == [] and not list(tmp_path.glob(".making-*"))
    assert said == [
        f"compiled kernels cannot be kept in {tmp_path} (No space left on device): each start compiles them again"
    ]


def test_what_does_not_compile_is_not_kept(tmp_path: Path) -> None:
    class Failing(Counting):
        def compile(self, program: Program, arch: Arch, extra: tuple[str, ...] = ()) -> Binary:
            raise CompileFailed("norm.cu", log="line 1: no", fix="report it")

    cache = Cache(tmp_path, lambda text: None)
    for _ in range(2):
        with pytest.raises(CompileFailed, match="line 1: no"):
            cache.get(PROGRAM, SM_86, Failing())
    assert entries(tmp_path) == []


def test_two_that_want_the_same_compile_it_once(tmp_path: Path) -> None:
    compiler = Counting()
    begun, go_on = threading.Event(), threading.Event()

    class Slow(Counting):
        def compile(self, program: Program, arch: Arch, extra: tuple[str, ...] = ()) -> Binary:
            begun.set()
            assert go_on.wait(30)
            return compiler.compile(program, arch, extra)

    found: list[Binary] = []

    def want(who: Counting) -> None:
        found.append(Cache(tmp_path, lambda text: None).get(PROGRAM, SM_86, who))

    first = threading.Thread(target=want, args=(Slow(),))
    first.start()
    assert begun.wait(30)
    second = threading.Thread(target=want, args=(compiler,))
    second.start()
    go_on.set()
    first.join(30)
    second.join(30)
    assert compiler.made == 1 and len(found) == 2 and found[0] == found[1]


def test_every_kind_survives_the_file() -> None:
    for binary in (Binary("cubin", b"\n\0x"), Binary("ptx", b"", "log"), Binary("code object", b"1 2\n", "é\n")):
        assert unpack(pack(binary)) == binary


def test_the_folder_is_outside_of_the_package() -> None:
    assert default_folder({"XDG_CACHE_HOME": "/x", "HOME": "/h"}) == Path("/x/homeserve/kernels")
    assert default_folder({"HOME": "/h"}) == Path("/h/.cache/homeserve/kernels")
