"""What is said of backends, to people and to programs, is what their capability tables say."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import sys
from pathlib import Path

import pytest

from backends import support
from backends.base import Capability
from backends.cpu.capability import TABLE as CPU
from backends.gpu import capability as gpu
from homeserve.cli import main

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts" / "benchmarks"))

import support_page as pages  # noqa: E402

NAMED = gpu.COMPILED
KV = ("F32", "F16", "BF16", "Q8_0", "F8")


def test_the_file_and_the_page_are_what_the_tables_say() -> None:
    found = pages.tables()
    assert support.FILE.read_text() == support.dumped(found), "scripts/support writes it"
    assert [(each.backend, set(each.entries)) for each in support.read()] == [
        (e.backend, set(e.entries)) for e in found
    ]
    assert pages.PAGE.read_text() == pages.page(found), "scripts/support writes it"


@pytest.mark.parametrize("arch", NAMED)
def test_every_op_of_the_types_that_people_run_reads_yes(arch: str) -> None:
    table = {(entry.op, entry.type): entry for entry in gpu.table(arch)}
    wanted = [(op, kind) for op in pages.WEIGHTED for kind in pages.MAIN_TYPES]
    wanted += [(op, kind) for op in ("RopeStore", "Attention") for kind in KV]
    wanted += [(entry.op, entry.type) for entry in CPU if entry.ok]
    missing = [key for key in wanted if table[key].ok is not True]
    print(f"{arch}: {len(set(wanted))} entries read yes")
    assert not missing


def test_the_cpu_and_cards_answer_the_same_questions() -> None:
    asked = {(entry.op, entry.type) for entry in CPU if entry.ok}
    assert asked <= {(entry.op, entry.type) for entry in gpu.table("sm_86")}


def test_every_symbol_was_compiled_for_every_arch_that_reads_yes() -> None:
    """The gate's figures are there, with nothing spilled."""
    with (ROOT / "docs" / "kernels.csv").open() as file:
        rows = {(row["symbol"], row["arch"]): row for row in csv.DictReader(file)}
    for arch in gpu.COMPILED:
        failed = gpu.FAILED.get(arch, {})
        missing = [each.name for each in gpu.symbols() if each.name not in failed and (each.name, arch) not in rows]
        assert not missing, (arch, missing[:10])
    assert {arch for _, arch in rows} == set(gpu.COMPILED)
    spilled = [key for key, row in rows.items() if int(row["spills"])]
    assert not spilled


def test_an_arch_that_nobody_compiled_for_reads_unknown_and_not_yes() -> None:
    table = gpu.table("sm_87")
    assert {entry.ok for entry in table if entry.type in pages.MAIN_TYPES} == {None}
    assert all(entry.why for entry in table if entry.ok is not True)


def test_a_symbol_that_does_not_compile_takes_its_entries_with_it() -> None:
    table = {(entry.op, entry.type): entry for entry in gpu.table("sm_86", {"linear_few_q4_k_r1": "spills 8 bytes"})}
    assert table["Linear", "Q4_K"].ok is False and "linear_few_q4_k_r1: spills 8 bytes" in table["Linear", "Q4_K"].why
    assert table["Linear", "Q5_K"].ok and table["EmbedRows", "Q4_K"].ok


def test_entries_that_read_alike_stand_together_and_come_apart_again(tmp_path: Path) -> None:
    entries = (
        Capability("Linear", "F32", True),
        Capability("Linear", "I8", False, "no"),
        Capability("Linear", "F16", None, "?"),
    )
    table = support.Table("cuda", ("sm_1", "sm_2"), entries)
    file = tmp_path / "support.json"
    file.write_text(support.dumped([table]))
    assert support.read(file) == (table,)
    file.write_text(json.dumps({"schema": 9}))
    with pytest.raises(ValueError, match="has schema 9"):
        support.read(file)


def test_doctor_tells_every_entry() -> None:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main(["doctor", "--support", "--json"]) == 0
    told = json.loads(out.getvalue())
    assert told["schema"] == 1 and {check["name"] for check in told["checks"]} == {"reference", "cpu", "cuda", "rocm"}
    of = {(each["backend"], each["arch"], each["op"], each["type"]): each["ok"] for each in told["support"]}
    for arch in NAMED:
        backend = "cuda" if arch.startswith("sm_") else "rocm"
        assert {(op, kind): ok for (b, a, op, kind), ok in of.items() if (b, a) == (backend, arch)} == {
            (entry.op, entry.type): entry.ok for entry in gpu.table(arch)
        }


def test_doctor_tells_people_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--support"]) == 0
    out = capsys.readouterr().out
    assert "not run on a card" in out and "  yes      Linear" in out
