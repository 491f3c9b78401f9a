"""Facts of an arch from its name; the device code as texts."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from backends.gpu import sources
from backends.gpu.arch import SAMPLE, TREES, arch, of_capability
from backends.gpu.errors import SourcesMissing, UnknownArch

ROOT = Path(__file__).resolve().parents[2]
BLOCKS = re.compile(r"(KERNEL\([^,]+, [^,]+), [^)]+\)")
"""How many blocks of an entry fit a multiprocessor: a vendor's own matter."""


@pytest.mark.parametrize(
    ("name", "vendor", "warps", "dot4", "matrix", "kib"),
    [
        ("sm_75", "nvidia", (32,), "dp4a", "mma8", 64),
        ("sm_80", "nvidia", (32,), "dp4a", "mma16", 163),
        ("sm_86", "nvidia", (32,), "dp4a", "mma16", 99),
        ("sm_90a", "nvidia", (32,), "dp4a", "mma16", 227),
        ("sm_120f", "nvidia", (32,), "dp4a", "mma16", 99),
        ("gfx900", "amd", (64,), "none", "none", 64),
        ("gfx906", "amd", (64,), "sdot4", "none", 64),
        ("gfx908", "amd", (64,), "sdot4", "mfma", 64),
        ("gfx90a", "amd", (64,), "sdot4", "mfma", 64),
        ("gfx90c", "amd", (64,), "none", "none", 64),
        ("gfx942", "amd", (64,), "sdot4", "mfma", 64),
        ("gfx950", "amd", (64,), "sdot4", "mfma", 160),
        ("gfx1010", "amd", (32, 64), "none", "none", 64),
        ("gfx1012", "amd", (32, 64), "sdot4", "none", 64),
        ("gfx1030", "amd", (32, 64), "sdot4", "none", 64),
        ("gfx1103", "amd", (32, 64), "sudot4", "wmma11", 64),
        ("gfx1151", "amd", (32, 64), "sudot4", "wmma11", 64),
        ("gfx1201", "amd", (32, 64), "sudot4", "wmma12", 64),
    ],
)
def test_facts_of_known_cards(name: str, vendor: str, warps: tuple[int, ...], dot4: str, matrix: str, kib: int) -> None:
    found = arch(name)
    assert (found.vendor, found.warps, found.dot4, found.matrix) == (vendor, warps, dot4, matrix)
    assert found.block_bytes == kib * 1024


def test_cards_that_nobody_has_heard_of_follow_the_rule() -> None:
    later, rdna = arch("sm_150"), arch("gfx1170")
    assert (later.number, later.dot4, later.matrix) == (150, "dp4a", "mma16")
    assert (rdna.warps, rdna.dot4, rdna.matrix) == ((32, 64), "sudot4", "wmma11")
    assert arch("gfx1250").matrix == "none", "its matrix cores have other shapes"


def test_a_name_as_a_driver_says_it_keeps_what_is_switched_on() -> None:
    found = arch("gfx90a:sramecc+:xnack-")
    assert (found.name, found.base) == ("gfx90a:sramecc+:xnack-", "gfx90a")
    assert found.matrix == arch("gfx90a").matrix


def test_groups_of_arches() -> None:
    assert arch("gfx11-generic").matrix == "wmma11"
    assert arch("gfx9-4-generic").matrix == "mfma"
    assert arch("gfx10-3-generic").dot4 == "sdot4"


def test_a_compute_capability_is_an_arch() -> None:
    assert of_capability(8, 6).name == "sm_86"
    assert of_capability(12, 0) == arch("sm_120")


@pytest.mark.parametrize("name", ["", "sm_", "sm_8", "sm_86x", "gfx11", "gfx1103:xnack", "cuda", "SM_86", "sm_86\n"])
def test_what_is_no_arch_is_one_clear_error(name: str) -> None:
    with pytest.raises(UnknownArch) as caught:
        arch(name)
    assert repr(name) in caught.value.message
    assert "sm_86" in caught.value.fix and "rocminfo" in caught.value.fix


@pytest.mark.parametrize(("name", "oldest"), [("sm_70", "sm_75"), ("gfx803", "gfx900")])
def test_a_card_that_is_too_old_is_told_from_one_that_is_unknown(name: str, oldest: str) -> None:
    with pytest.raises(UnknownArch, match=f"{name} is older than {oldest}") as caught:
        arch(name)
    assert "CPU" in caught.value.fix


def test_the_sample_of_the_gate_has_every_kind() -> None:
    facts = [arch(name) for names in SAMPLE.values() for name in names]
    assert {each.matrix for each in facts} == {"mma8", "mma16", "wmma11", "wmma12", "mfma", "none"}
    assert {each.dot4 for each in facts} == {"dp4a", "sdot4", "sudot4"}


@pytest.mark.parametrize("vendor", ["nvidia", "amd"])
def test_the_package_has_the_device_code_of_this_checkout(vendor: sources.Vendor) -> None:
    """Of the installed package when the tiers run: whatever lies in the trees has to be shipped."""
    name, ending = TREES[vendor]
    for shipped, own in ((sources.tree(vendor), ROOT / name), (sources.KERNELS, ROOT / "backends/gpu/kernels")):
        files = {path.name: path.read_text() for kind in ("*.h", "*" + ending) for path in own.glob(kind)}
        assert files and {path: (shipped / path).read_text() for path in files} == files


def test_both_vendors_have_the_same_entries() -> None:
    assert sources.files("nvidia") == sources.files("amd")
    for name in sources.files("nvidia"):
        cuda, hip = sources.file_program(name, "nvidia"), sources.file_program(name, "amd")
        same = [BLOCKS.sub(r"\1", each.text) for each in (cuda, hip)]
        assert same[0] == same[1], f"{name}.cu and {name}.hip differ: entries have no logic of a vendor"


def test_a_program_has_every_header_that_it_reaches() -> None:
    program = sources.file_program("norm", "nvidia")
    names = dict(program.headers)
    assert {"device.h", "vendor.h", "tiles.h", "functions.h", "norm.h"} <= set(names)
    assert "__shfl_xor_sync" in names["vendor.h"]
    assert "emulated.h" not in names
    assert "ds_bpermute" in dict(sources.file_program("norm", "amd").headers)["vendor.h"]


def test_a_programs_digest_is_of_all_that_it_is_made_of() -> None:
    program = sources.file_program("norm", "nvidia")
    name, text = program.headers[0]
    others = (
        replace(program, vendor="amd"),
        replace(program, name="other.cu"),
        replace(program, text=program.text + " "),
        replace(program, quant="q4_k"),
        replace(program, headers=((name, text + " "), *program.headers[1:])),
        replace(program, headers=((name + text[:1], text[1:]), *program.headers[1:])),
    )
    assert len({each.digest for each in (program, *others)}) == 7
    assert replace(program).digest == program.digest


def test_an_entry_file_that_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(SourcesMissing, match=r"no nothing\.cu in .*cuda_kernels") as caught:
        sources.file_program("nothing", "nvidia")
    assert "install homeserve again" in caught.value.fix
    monkeypatch.setattr(sources, "KERNELS", tmp_path / "a/b/c/kernels")
    monkeypatch.setattr(sources, "_installed", lambda name: [])
    monkeypatch.setattr(sources.sysconfig, "get_path", lambda name: str(tmp_path / "data"))
    with pytest.raises(SourcesMissing, match="the device code hip_kernels is in none of"):
        sources.tree.__wrapped__("amd")
