"""What is held, read from recorded mappings: each line alone, nothing counted twice, unknown where nothing tells."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from budget.facts import MIB
from budget.ledger import ALWAYS, BOOT, Line
from homeserve.measure import Measured, MeasuredBudget, Members, Region, Worker, compare, measure, parse_smaps
from homeserve.text.templates import TemplateHost

ENGINE, WORKER, TEMPLATE = 100, 101, 102
MODEL = "/models/tiny.gguf"
LIBRARY = "/usr/lib/libpython3.11.so.1.0"
WEIGHTS, POOL, BUFFERS = 0x7F0000000000, 0x7F1000000000, 0x7F2000000000
REGIONS = (Region("weights", WEIGHTS, 5 * MIB - 100), Region("kv", POOL, 8 * MIB), Region("workspace", BUFFERS, MIB))


def mapping(start: int, size: int, name: str = "", rss: int | None = None, pss: int | None = None) -> str:
    """One mapping as the kernel tells it; sizes in bytes, by default all of it resident and nobody else's."""
    rss = size if rss is None else rss
    pss = rss if pss is None else pss
    head = f"{start:x}-{start + size:x} rw-p 00000000 00:00 0"
    return (
        (f"{head:<73}{name}\n" if name else head + " \n")
        + f"Size:           {size >> 10:8} kB\nKernelPageSize:        4 kB\nRss:            {rss >> 10:8} kB\n"
        + (
            f"Pss:            {pss >> 10:8} kB\nPss_Dirty:      {pss >> 10:8} kB\nAnonymous:      {pss >> 10:8} kB\n"
            "THPeligible:           1\nProtectionKey:         0\nVmFlags: rd wr mr mw me ac hg \n"
        )
    )


def guarded(start: int, size: int) -> str:
    """A line's mapping between its guards."""
    return mapping(start - 4096, 4096, rss=0) + mapping(start, size) + mapping(start + size, 4096, rss=0)


def process(root: Path, pid: int, *mappings: str) -> None:
    folder = root / "proc" / str(pid)
    folder.mkdir(parents=True)
    (folder / "smaps").write_text("".join(mappings))


@pytest.fixture
def ring(tmp_path: Path) -> Path:
    path = tmp_path / "homeserve-100-1-00000000-plans"
    path.write_bytes(bytes(MIB))
    return path


@pytest.fixture
def members(tmp_path: Path, ring: Path) -> Members:
    """An engine, a worker and a helper that share a library of 12 MiB."""
    shared = mapping(0x7FF000000000, 12 * MIB, LIBRARY, pss=4 * MIB)
    rings = mapping(0x7FF800000000, MIB, str(ring), rss=64 << 10, pss=32 << 10)
    process(
        tmp_path, ENGINE, mapping(0x550000000000, 4 * MIB, "[heap]"), mapping(0x7E0000000000, 40 * MIB), shared, rings,
        mapping(0x7DF000000000, 6 * MIB, MODEL, rss=2 * MIB), mapping(0x7FFF00000000, 132 << 10, "[stack]", rss=8192),
    )  # fmt: skip
    process(
        tmp_path, WORKER, mapping(0x560000000000, 6 * MIB, "[heap]"), shared, rings, guarded(WEIGHTS, 6 * MIB),
        guarded(POOL, 8 * MIB), guarded(BUFFERS, 2 * MIB), mapping(0x7E0000000000, 10 * MIB, "[anon: malloc]"),
    )  # fmt: skip
    process(tmp_path, TEMPLATE, mapping(0x570000000000, 3 * MIB, "[heap]"), shared)
    return Members(1, ENGINE, (Worker(WORKER, 0, REGIONS),), TEMPLATE, (ring,), frozenset({MODEL}))


def by_line(lines: tuple[Measured, ...]) -> dict[tuple[int, str], float | None]:
    return {(each.device, each.line): None if each.bytes is None else each.bytes / MIB for each in lines}


def test_every_line_is_read_and_their_sum_is_everything(tmp_path: Path, members: Members, ring: Path) -> None:
    found = measure(members, tmp_path)
    blocks = ring.stat().st_blocks * 512 / MIB
    assert by_line(found.lines) == {
        (0, "weights"): 6.0,
        (0, "kv"): 8.0,
        (0, "workspace"): 2.0,
        (1, "engine process"): 4 + 40 + 4 + 8 / 1024,
        (1, "worker processes"): 6 + 4 + 10,
        (1, "vocabulary"): 0.0,
        (1, "template process"): 3 + 4,
        (1, "grammar process"): 0.0,
        (1, "plan log"): blocks,
        (1, "model file (page cache)"): 2.0,
    }
    counted = sum(each.bytes or 0 for each in found.lines if each.line != "model file (page cache)")
    assert found.smaps_bytes == counted, "whichever way it is summed up"
    how = {each.line: each.how for each in found.lines}
    assert how["weights"] == "smaps, by address"
    assert how["worker processes"] == "smaps: anonymous 10.0, heap 6.0, libraries 4.0 MiB"


def test_what_ranks_exchange_through_is_counted_once_and_whole(tmp_path: Path, members: Members, ring: Path) -> None:
    """Each rank's own lines, and the memory between them, of which hardly a page was touched."""
    acts = mapping(0x7E8000000000, 24 * MIB, "/memfd:homeserve-acts (deleted)", rss=2 * MIB, pss=MIB)
    folders = [tmp_path / "proc" / str(pid) / "smaps" for pid in (WORKER, 103)]
    folders[1].parent.mkdir()
    text = folders[0].read_text() + acts
    for path in folders:
        path.write_text(text)
    one, other = (
        Worker(pid, 0, tuple(replace(each, line=f"{each.line}, rank {rank}") for each in REGIONS))
        for rank, pid in enumerate((WORKER, 103))
    )
    alone, both = measure(members, tmp_path), measure(replace(members, workers=(one, other)), tmp_path)
    found = by_line(both.lines)
    assert found[1, "acts"] == 24.0 and (1, "acts") not in by_line(alone.lines)
    assert (found[0, "weights, rank 0"], found[0, "weights, rank 1"]) == (6.0, 6.0)
    assert found[1, "worker processes"] == 2 * (6 + 4 + 10)
    told = [each.bytes or 0 for each in both.lines if "page cache" not in each.line]
    assert sum(told) == both.smaps_bytes


def test_a_process_that_is_gone_leaves_its_lines_unknown_and_no_other(tmp_path: Path, members: Members) -> None:
    (tmp_path / "proc" / str(WORKER) / "smaps").unlink()
    found = measure(members, tmp_path)
    lines = by_line(found.lines)
    unknown = {name for (_, name), size in lines.items() if size is None}
    assert unknown == {"weights", "kv", "workspace", "worker processes", "vocabulary", "model file (page cache)"}
    assert all(each.how is None for each in found.lines if each.bytes is None)
    assert found.smaps_bytes is None


def test_a_program_that_tells_no_regions_cannot_be_told_from_its_process(tmp_path: Path, members: Members) -> None:
    bare = Members(1, ENGINE, (Worker(WORKER, 0, ()),), TEMPLATE, members.segments, members.model_files)
    lines = by_line(measure(bare, tmp_path).lines)
    assert lines[1, "worker processes"] is None and (0, "weights") not in lines
    assert lines[1, "engine process"] is not None


def test_a_region_that_lies_nowhere_is_unknown(tmp_path: Path, members: Members) -> None:
    elsewhere = Worker(WORKER, 0, (Region("kv", 0x1000, MIB), REGIONS[0]))
    lines = by_line(measure(Members(1, ENGINE, (elsewhere,)), tmp_path).lines)
    assert lines[0, "kv"] is None and lines[0, "weights"] == 6.0


def test_without_a_helper_nothing_is_held_by_it(tmp_path: Path, members: Members) -> None:
    alone = Members(1, ENGINE, members.workers, None, members.segments, members.model_files)
    found = {each.line: each for each in measure(alone, tmp_path).lines}
    assert (found["template process"].bytes, found["template process"].how) == (0, "there is none")


def test_a_helper_that_checks_grammars_is_told_where_there_is_one(tmp_path: Path, members: Members) -> None:
    process(tmp_path, 104, mapping(0x580000000000, 5 * MIB, "[heap]"))
    before, found = measure(members, tmp_path), measure(replace(members, grammar=104), tmp_path)
    assert by_line(found.lines)[1, "grammar process"] == 5.0
    assert by_line(before.lines)[1, "grammar process"] == 0.0
    assert (found.smaps_bytes or 0) - (before.smaps_bytes or 0) == 5 * MIB


def read_vocabulary(root: Path, grown: int) -> None:
    """The worker maps the library that vocabularies are read with, and has `grown` bytes more in its heap."""
    smaps = root / "proc" / str(WORKER) / "smaps"
    library = mapping(0x7FE000000000, 2 * MIB, "/usr/lib/python3/tokenizers/tokenizers.abi3.so", pss=MIB)
    smaps.write_text(smaps.read_text() + library + mapping(0x7E2000000000, grown))


def test_a_vocabulary_is_what_its_process_has_grown_by(tmp_path: Path, members: Members) -> None:
    before = measure(members, tmp_path)
    assert by_line(before.lines)[1, "vocabulary"] == 0.0 and dict(before.bare) == {WORKER: 20 * MIB}
    read_vocabulary(tmp_path, 30 * MIB)
    found = measure(members, tmp_path, before.bare)
    assert by_line(found.lines)[1, "vocabulary"] == 31.0 and by_line(found.lines)[1, "worker processes"] == 20.0
    assert dict(found.bare) == dict(before.bare), "it stays what it was"
    told = sum(each.bytes or 0 for each in found.lines if "page cache" not in each.line)
    assert told == found.smaps_bytes


def test_a_vocabulary_of_a_process_that_was_not_read_before_is_within_it(tmp_path: Path, members: Members) -> None:
    read_vocabulary(tmp_path, 30 * MIB)
    found = {each.line: each for each in measure(members, tmp_path, {WORKER + 50: MIB}).lines}
    assert (found["vocabulary"].bytes, found["vocabulary"].how) == (None, None)
    assert found["worker processes"].bytes == 51 * MIB


async def test_what_comes_later_is_in_the_sum_once_it_is_there(
    tmp_path: Path, members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("homeserve.measure.measure", lambda given, _root, bare: measure(given, tmp_path, bare))
    now = [0.0]
    lines = [line("worker processes", 27), line("vocabulary", 40), line("grammar process", 9)]
    budget = MeasuredBudget({}, lines, lambda: members, clock=lambda: now[0])
    total = (await budget.as_json())["measured_total"]
    assert (total["predicted_mib"], total["later_mib"]) == (27.0, 49.0)
    now[0] = 2.0
    read_vocabulary(tmp_path, 30 * MIB)
    body = await budget.as_json()
    assert (body["measured_total"]["predicted_mib"], body["measured_total"]["later_mib"]) == (67.0, 9.0)
    (row,) = (row for row in body["measured"] if row["line"] == "vocabulary")
    assert (row["predicted_mib"], row["measured_mib"]) == (40.0, 31.0)


def test_a_helper_that_has_not_started_yet_is_not_measured(tmp_path: Path, members: Members) -> None:
    found = {each.line: each for each in measure(replace(members, template=None, template_due=True), tmp_path).lines}
    assert (found["template process"].bytes, found["template process"].how) == (None, None)
    host = TemplateHost()
    assert not host.due  # no template, no helper
    host.configure({"default": "x"}, {})
    assert host.due and host.pid is None


def test_the_control_group_is_a_witness_where_nobody_else_is_in_it(tmp_path: Path, members: Members) -> None:
    group = tmp_path / "sys/fs/cgroup/memory/ours"
    group.mkdir(parents=True)
    self = tmp_path / "proc/self"
    self.mkdir()
    (self / "cgroup").write_text("4:memory:/ours\n")
    (self / "mountinfo").write_text("30 20 0:29 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n")
    (group / "memory.usage_in_bytes").write_text(f"{90 * MIB}\n")
    (group / "memory.stat").write_text(f"total_inactive_file {20 * MIB}\ninactive_file {MIB}\n")
    (group / "cgroup.procs").write_text(f"{ENGINE}\n{WORKER}\n")
    (group / "below").mkdir()
    (group / "below" / "cgroup.procs").write_text(f"{TEMPLATE}\n")
    found = measure(members, tmp_path)
    assert (found.group_bytes, found.group_why) == (70 * MIB, f"{group}, without inactive_file")
    (group / "cgroup.procs").write_text(f"{ENGINE}\n{WORKER}\n777\n778\n")
    found = measure(members, tmp_path)
    assert (found.group_bytes, found.group_why) == (None, f"{group} counts 2 other processes as well")


def test_no_control_group_is_said(tmp_path: Path, members: Members) -> None:
    found = measure(members, tmp_path)
    assert (found.group_bytes, found.group_why) == (None, "there is no control group that counts memory")


def test_another_system_than_linux_measures_nothing(members: Members, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    found = measure(members)
    assert found.lines and all(each.bytes is None and each.how is None for each in found.lines)
    assert found.smaps_bytes is None and found.group_bytes is None


def line(name: str, size: float, device: int = 1, held: tuple[str, ...] = ALWAYS) -> Line:
    return Line(device, name, int(size * MIB), held, "computed")


def test_predicted_against_measured_has_a_row_for_each_line(tmp_path: Path, members: Members) -> None:
    lines = [line("weights", 5.9, 0), line("kv", 8, 0), line("engine process", 50), line("state", 1, 0)]
    rows = compare([*lines, line("kv", 1, 0), line("load staging", 64, held=(BOOT,))], measure(members, tmp_path))
    found = {(row["device"], row["line"]): row for row in rows}
    assert found[0, "weights"]["predicted_mib"] == 5.9 and found[0, "weights"]["measured_mib"] == 6.0
    assert found[0, "kv"]["predicted_mib"] == 9.0, "two lines of one name are one row"
    state = found[0, "state"]
    assert (state["predicted_mib"], state["measured_mib"], state["how"]) == (1.0, None, None)
    assert (1, "load staging") not in found, "it is not held any more"
    cache = found[1, "model file (page cache)"]
    assert (cache["predicted_mib"], cache["measured_mib"]) == (None, 2.0)
    assert not {"other", "misc", "overhead"} & {row["line"] for row in rows}


async def test_the_body_is_the_document_and_what_was_read_at_most_a_second_ago(
    tmp_path: Path, members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, readings = [0.0], []

    def read(given: Members, _root: str, bare: Mapping[int, int]) -> Any:
        readings.append(now[0])
        return measure(given, tmp_path, bare)

    monkeypatch.setattr("homeserve.measure.measure", read)
    lines = [line("engine process", 50), line("load staging", 64, held=(BOOT,))]
    budget = MeasuredBudget({"schema": 1, "plan": {}}, lines, lambda: members, clock=lambda: now[0])
    body = await budget.as_json()
    assert (body["schema"], body["plan"], body["measured"][0]["line"]) == (1, {}, "engine process")
    total = body["measured_total"]
    assert total["predicted_mib"] == 50.0 and total["smaps_mib"] > 90 and total["cgroup_mib"] is None
    for now[0] in (0.5, 0.9, 1.1):
        await budget.as_json()
    assert readings == [0.0, 1.1]


async def test_of_a_card_its_driver_is_the_witness(
    tmp_path: Path, members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Free memory before the load, less what is free now; a driver that does not tell is no zero."""
    monkeypatch.setattr("homeserve.measure.measure", lambda given, _root, bare: measure(given, tmp_path, bare))
    lines = [line("weights", 60, 0), line("kv", 8, 0, ("tensor",)), line("load staging", 64, 0, (BOOT,))]
    cards = {0: (900 * MIB, 830 * MIB), 1: None, 2: (10 * MIB, 11 * MIB)}
    body = await MeasuredBudget({}, lines, lambda: members, clock=lambda: 0.0, cards=lambda: cards).as_json()
    how = "driver: free before the load, less free now"
    assert body["measured_cards"] == [
        {"device": 0, "predicted_mib": 60.0, "driver_mib": 70.0, "how": how},
        {"device": 1, "predicted_mib": 0.0, "driver_mib": None, "how": None},
        {"device": 2, "predicted_mib": 0.0, "driver_mib": -1.0, "how": how},
    ]


async def test_lines_of_the_layout_in_force_are_compared(
    tmp_path: Path, members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("homeserve.measure.measure", lambda given, _root, bare: measure(given, tmp_path, bare))
    lines = [line("kv", 60, held=("pipeline",)), line("kv", 64, held=("tensor", "flip"))]
    now, layout = [0.0], ["pipeline"]
    budget = MeasuredBudget({}, lines, lambda: members, clock=lambda: now[0], layout=lambda: layout[0])
    for now[0], layout[0], predicted in ((0.0, "pipeline", 60.0), (2.0, "tensor", 64.0)):
        body = await budget.as_json()
        (row,) = (row for row in body["measured"] if row["line"] == "kv" and row["predicted_mib"])
        assert row["predicted_mib"] == body["measured_total"]["predicted_mib"] == predicted


@settings(max_examples=50)
@given(st.lists(st.text(max_size=60), max_size=30))
def test_no_text_makes_the_reader_do_anything_but_read(lines: list[str]) -> None:
    for area in parse_smaps(lines):
        assert area.resident >= 0 and area.share >= 0


def test_fields_and_names_that_nobody_knows_are_passed_over() -> None:
    text = "0000-1000 rw-p 0 0:0 0\nRss: 4 kB\nRssish: 9 kB\nRss: x kB\nnonsense\n" + mapping(
        0x2000, 8192, "/a b (deleted)"
    )
    first, second = parse_smaps(text.splitlines())
    assert (first.start, first.end, first.resident, first.name) == (0, 0x1000, 0, "")
    assert (second.name, second.resident, second.share) == ("/a b (deleted)", 8192, 8192)
