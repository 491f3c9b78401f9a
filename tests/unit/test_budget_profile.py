"""Boxes as JSON: read back as written, absurd values as doubts, and errors only for what is no profile."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from budget.belief import believe
from budget.ceilings import ceilings
from budget.facts import MIB, Box, Card, CpuFacts, Doubt, Link, MemoryFacts
from budget.profile import (
    CARDS_MAX,
    FILE_LIMIT_BYTES,
    PEER_CODES,
    ProfileError,
    box_from_json,
    box_to_json,
    load_box,
)

PATH = Path(__file__).parents[1] / "data/boxes/boxes.json"
BOXES: list[dict[str, Any]] = json.loads(PATH.read_text())

GPU: dict[str, Any] = {"vendor": "nvidia", "name": "RTX 3090", "arch": "sm_86", "vram_total_mib": 24576, "uma": False}
PROFILE: dict[str, Any] = {"id": "test", "os": "Linux", "mem_total_mib": 32000, "gpus": [GPU]}


def with_gpu(**fields: Any) -> dict[str, Any]:
    return {**PROFILE, "gpus": [{**GPU, **fields}]}


# -------------------------------------------------------------------------------------------------------- what is read


def test_a_collected_profile() -> None:
    profile = next(entry for entry in BOXES if entry["id"] == "amdgpu-top-9060xt-plus-igpu")
    box = box_from_json(profile, "boxes.json")
    big, small = box.cards
    assert (big.id, small.id) == ("amd-0", "amd-1")
    assert (big.total_bytes, big.unified, big.link) == (16304 * MIB, False, Link(5, 16))
    assert (small.total_bytes, small.unified, small.used_bytes) == (512 * MIB, True, int(465.02 * MIB))
    assert (box.memory, box.cpu, box.environment, box.doubts) == (None, None, None, ())


def test_everything_that_a_probe_writes() -> None:
    profile = {
        "schema": 1,
        "id": "here",
        "os": "Debian 13",
        "kernel": "6.12.48",
        "environment": "bare",
        "mem_total_mib": 1000.5,
        "mem_limit_mib": 600,
        "mem_limit_source": "/sys/fs/cgroup/memory.max",
        "mem_available_mib": 500.25,
        "swap_mib": 0,
        "cpu": {"name": "A", "logical": 8, "usable": 4, "source": "affinity", "isa_flags": ["fma"], "numa_nodes": 2},
        "gpus": [
            {
                **GPU,
                "id": "GPU-1",
                "pci": "0000:01:00.0",
                "vram_free_mib": 1,
                "gtt_used_mib": 2,
                "gtt_total_mib": 3,
                "bar1_total_mib": 5,
                "bar1_free_mib": 4,
                "bandwidth_gb_s": 936.2,
                "numa_node": 0,
                "display": True,
                "peers": {"GPU-2": "CNS"},
            }
        ],
        "p2p": "CNS",
        "notes": "n",
        "doubts": [{"where": "a", "what": "b", "taken": "c"}],
    }
    box = box_from_json(profile, "x")
    source = "/sys/fs/cgroup/memory.max"
    assert box.memory == MemoryFacts(int(1000.5 * MIB), 600 * MIB, source, int(500.25 * MIB), 0)
    assert box.cpu == CpuFacts("A", 8, 4, "affinity", frozenset({"fma"}), 2)
    card = box.cards[0]
    assert (card.id, card.pci, card.free_bytes, card.gtt_used_bytes) == ("GPU-1", "0000:01:00.0", MIB, 2 * MIB)
    assert (card.bar1_free_bytes, card.numa_node, card.display) == (4 * MIB, 0, True)
    assert (card.bandwidth_bytes_s, dict(card.peers)) == (936.2e9, {"GPU-2": "CNS"})
    assert box.doubts == (Doubt("a", "b", "c"),)


@pytest.mark.parametrize(
    ("os", "kernel", "environment"),
    [
        ("WSL2", None, "wsl2"),
        ("Ubuntu 24.04.4 on WSL2", "6.6.87.2-microsoft-standard-WSL2", "wsl2"),
        ("Windows 11", None, "windows"),
        ("QEMU/KVM guest", None, "vm"),
        ("LXC + lxcfs (old)", None, "container"),
        ("Kubernetes pod", None, "container"),
        ("Debian 13", "6.12.48", None),
        (None, None, None),
    ],
)
def test_what_it_runs_in_is_told_by_its_names(os: str | None, kernel: str | None, environment: str | None) -> None:
    assert box_from_json({**PROFILE, "os": os, "kernel": kernel}, "x").environment == environment


def test_the_least_bound_of_the_host_counts() -> None:
    for fields, limit, source in (
        ({}, 32000, "MemTotal"),
        ({"cgroup_limit_mib": 8192}, 8192, "control group"),
        ({"cgroup_limit_mib": 64000}, 32000, "MemTotal"),
        ({"mem_limit_mib": 4096, "mem_limit_source": "memory.high"}, 4096, "memory.high"),
        ({"mem_limit_mib": 32000}, 32000, "MemTotal"),
        ({"mem_total_mib": None, "cgroup_limit_mib": 47104}, 47104, "control group"),
        ({"mem_total_mib": None, "mem_available_mib": 5000}, 5000, "MemAvailable"),
    ):
        memory = box_from_json({**PROFILE, **fields}, "x").memory
        assert memory is not None and (memory.limit_bytes, memory.limit_source) == (limit * MIB, source)


def test_cards_without_names_get_names_that_nobody_has() -> None:
    gpus = [GPU, {**GPU, "id": "nvidia-0"}, {**GPU, "vendor": "amd"}, GPU]
    box = box_from_json({**PROFILE, "gpus": gpus}, "x")
    assert [card.id for card in box.cards] == ["nvidia-1", "nvidia-0", "amd-0", "nvidia-2"]


# ------------------------------------------------------------------------------------------------------ absurd values


@pytest.mark.parametrize("field", ["vram_total_mib", "vram_reserved_mib", "vram_free_mib", "bar1_total_mib"])
@pytest.mark.parametrize("value", [-1, "24 GB", "[N/A]", True, float("nan"), float("inf"), 1e300, 10**40, [], {}])
def test_an_absurd_size_is_a_named_doubt_and_unknown(field: str, value: object) -> None:
    box = box_from_json(with_gpu(**{field: value}), "file.json")
    names = {"vram_free_mib": "free_bytes", "bar1_total_mib": "bar1_total_bytes"}
    assert getattr(box.cards[0], names.get(field, field.removeprefix("vram_").replace("mib", "bytes"))) is None
    assert [doubt.where for doubt in box.doubts] == [f"file.json: gpus[0].{field}"]
    assert box.doubts[0].taken == "not known"


@pytest.mark.parametrize("field", ["mem_total_mib", "cgroup_limit_mib", "mem_limit_mib"])
@pytest.mark.parametrize("value", [0, -5, "much", False, float("nan")])
def test_an_absurd_amount_of_memory_is_unknown(field: str, value: object) -> None:
    box = box_from_json({**PROFILE, "mem_total_mib": None, field: value}, "x")
    assert box.memory is None and [doubt.where for doubt in box.doubts] == [f"x: {field}"]


def test_more_free_than_there_is_is_cut_down_with_a_doubt() -> None:
    box = box_from_json(with_gpu(vram_free_mib=55372, vram_total_mib=32106), "x")
    assert box.cards[0].free_bytes == 32106 * MIB
    assert "55372 MiB are said to be free, more than the 32106 MiB that there are" in box.doubts[0].what


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("uma", "no"),
        ("display", 1),
        ("vendor", "3dfx"),
        ("vendor", None),
        ("name", 3090),
        ("arch", ["sm_86"]),
        ("pcie", 4),
        ("pcie", {"gen": "four"}),
        ("pcie", {"width": 0}),
        ("pcie", {"gen": 2.5}),
        ("numa_node", -1),
        ("bandwidth_gb_s", -936),
        ("peers", ["GPU-1"]),
        ("peers", {"GPU-1": "maybe"}),
        ("peers", {"GPU-1": None}),
    ],
)
def test_a_wrong_type_is_a_named_doubt(field: str, value: object) -> None:
    box = box_from_json(with_gpu(**{field: value}), "x")
    assert len(box.cards) == 1
    assert any(doubt.where.startswith(f"x: gpus[0].{field}") for doubt in box.doubts)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("id", 5),
        ("os", {}),
        ("environment", "moon"),
        ("cpu", "fast"),
        ("cpu", {}),
        ("cpu", {"logical": 0}),
        ("cpu", {"logical": 4, "usable": 9}),
        ("cpu", {"logical": 4, "isa_flags": "avx2"}),
        ("doubts", "many"),
        ("doubts", [{"where": "a"}]),
        ("gpus", {"0": GPU}),
        ("gpus", ["RTX 3090"]),
        ("gpus", [GPU] * (CARDS_MAX + 1)),
    ],
)
def test_a_wrong_type_at_the_top_is_a_named_doubt(field: str, value: object) -> None:
    box = box_from_json({**PROFILE, field: value}, "x")
    assert any(doubt.where.startswith(f"x: {field}") for doubt in box.doubts)
    assert len(box.cards) <= CARDS_MAX


def test_control_characters_of_a_profile_reach_no_terminal() -> None:
    box = box_from_json({**with_gpu(name="RTX\x1b[2J 3090\n"), "id": "a\x07b", "notes": "\x1b]0;x\x07"}, "x")
    assert (box.id, box.cards[0].name, box.notes) == ("ab", "RTX[2J 3090", "]0;x")
    doubt = box_from_json(with_gpu(vram_total_mib="\x1b[31mred"), "x").doubts[0]
    assert doubt.what.isprintable()


def test_texts_are_bounded() -> None:
    box = box_from_json({**with_gpu(vram_total_mib="9" * 100_000), "notes": "n" * 100_000}, "x")
    assert len(box.notes) == 2000 and len(box.doubts[0].what) < 200


# ------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("value", [None, 5, "box", [], True, 1.5])
def test_what_is_no_object_is_an_error(value: object) -> None:
    with pytest.raises(ProfileError) as error:
        box_from_json(value, "file.json")
    assert error.value.where == "file.json" and "where an object belongs" in error.value.what and error.value.fix


def test_neither_cards_nor_memory_is_an_error() -> None:
    for value in ({}, {"id": "x"}, {"gpus": None}, {"gpus": {}, "mem_total_mib": "none"}):
        with pytest.raises(ProfileError) as error:
            box_from_json(value, "file.json")
        assert error.value.field == "gpus"
    assert box_from_json({"gpus": []}, "x").cards == ()
    assert box_from_json({"mem_total_mib": 1000}, "x").cards == ()


def test_a_file_with_one_box(tmp_path: Path) -> None:
    path = tmp_path / "box.json"
    path.write_text(json.dumps(PROFILE))
    assert load_box(str(path)).id == load_box(f"{path}#test").id == "test"
    path.write_text(json.dumps([PROFILE]))
    assert load_box(str(path)).id == "test"


def test_a_box_of_a_list(tmp_path: Path) -> None:
    box = load_box(f"{PATH}#780m-8g-carveout")
    assert (box.id, box.cards[0].gtt_total_bytes) == ("780m-8g-carveout", 11867 * MIB)
    with pytest.raises(ProfileError) as error:
        load_box(f"{PATH}#nobody")
    assert error.value.field == "id" and "'nobody'" in error.value.what and "tg-rtx3060-norebar" in error.value.fix
    with pytest.raises(ProfileError) as error:
        load_box(str(PATH))
    assert "a list of 97 boxes" in error.value.what and f"--box {PATH}#ID" in error.value.fix


def test_a_name_that_two_boxes_have(tmp_path: Path) -> None:
    path = tmp_path / "box.json"
    path.write_text(json.dumps([PROFILE, PROFILE]))
    with pytest.raises(ProfileError) as error:
        load_box(f"{path}#test")
    assert "2 of its boxes are called 'test'" in error.value.what


def test_a_file_whose_name_has_a_hash(tmp_path: Path) -> None:
    path = tmp_path / "my#box.json"
    path.write_text(json.dumps(PROFILE))
    assert load_box(str(path)).id == "test"
    assert load_box(f"{path}#test").id == "test"
    with pytest.raises(ProfileError) as error:
        load_box(f"{path}#other")
    assert "called 'test', not 'other'" in error.value.what


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff\xfe\x00{", "not JSON"),
        (b"[" * 100_000, "not JSON|nested too deep"),
        (b'{"gpus": [], "mem_total_mib": ' + b"9" * 10_000 + b"}", "not JSON"),
        (b" " * (FILE_LIMIT_BYTES + 1), "larger than 16 MiB"),
    ],
    ids=["empty", "open", "no text", "deep", "long number", "large"],
)
def test_a_file_that_holds_no_profile(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "box.json"
    path.write_bytes(content)
    with pytest.raises(ProfileError, match=words) as error:
        load_box(str(path))
    assert (error.value.where, error.value.field) == (str(path), "file")


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    for spec in (str(tmp_path / "absent.json"), str(tmp_path), f"{tmp_path}/absent.json#id", "", "#", "a\0b"):
        with pytest.raises(ProfileError, match="cannot be read") as error:
            load_box(spec)
        assert error.value.fix


# ------------------------------------------------------------------------------------------------------------ lossless

texts = st.text(st.characters(max_codepoint=0x2FF, categories=["L", "N", "P", "S"]), min_size=1)
sizes = st.none() | st.integers(1, 1 << 45)
links = st.builds(Link, st.none() | st.integers(1, 7), st.none() | st.integers(1, 32))
hosts = st.builds(
    MemoryFacts,
    st.integers(1 << 40, 1 << 45),
    st.integers(1, 1 << 40),
    texts,
    st.none() | st.integers(0, 1 << 41),
    st.none() | st.integers(0, 1 << 41),
)
CARDS = [
    Card(
        vendor,
        f"{vendor}/{number}",
        f"card {number}",
        arch,
        unified=unified,
        total_bytes=24_576 * MIB + 5 * number,
        free_bytes=number * 1_000_003,
        link=link,
        display=display,
        bandwidth_bytes_s=bandwidth,
        peers=peers,
    )
    for number, (vendor, arch, unified, link, display, bandwidth, peers) in enumerate(
        [
            ("nvidia", "sm_86", False, Link(4, 16), True, 936_200_000_000.0, {"nvidia/1": "OK"}),
            ("nvidia", None, False, Link(None, 8), None, 1.0, {}),
            ("amd", "gfx1103", True, None, False, None, {code: code for code in PEER_CODES}),
            ("intel", None, True, Link(None, None), None, 123_456_789.0, {}),
        ]
    )
]


@given(
    memory=st.none() | hosts,
    cpu=st.none()
    | st.builds(CpuFacts, texts, st.integers(8, 64), st.integers(1, 8), texts, st.frozensets(texts), st.integers(1, 8)),
    number=st.integers(0, 4),
    reserved=sizes,
    used=sizes,
    gtt=sizes,
    bar1=sizes,
    words=st.lists(texts, min_size=5, max_size=5),
)
@settings(max_examples=20)
def test_a_box_is_read_back_as_it_was_written(
    memory: MemoryFacts | None,
    cpu: CpuFacts | None,
    number: int,
    reserved: int | None,
    used: int | None,
    gtt: int | None,
    bar1: int | None,
    words: list[str],
) -> None:
    extra: dict[str, Any] = {
        "reserved_bytes": reserved,
        "used_bytes": used,
        "gtt_total_bytes": gtt,
        "gtt_used_bytes": used,
        "visible_bytes": gtt,
        "bar1_total_bytes": bar1,
        "bar1_free_bytes": used,
    }
    box = believe(
        Box(
            id=words[0],
            memory=memory,
            cpu=cpu,
            cards=tuple(replace(card, **extra) for card in CARDS[:number]),
            os=words[1],
            kernel=None,
            environment="bare",
            p2p=words[2],
            notes=words[3],
            doubts=(Doubt(*words[1:4]),),
        )
    )
    assert box_from_json(json.loads(json.dumps(box_to_json(box))), "x") == box


@pytest.mark.parametrize("profile", BOXES, ids=[profile["id"] for profile in BOXES])
def test_every_collected_box_is_read_back(profile: dict[str, Any]) -> None:
    box = box_from_json(profile, "boxes.json")
    written = box_to_json(box)
    assert box_from_json(json.loads(json.dumps(written)), "x") == box
    for field in ("id", "os", "kernel", "mem_total_mib", "cgroup_limit_mib", "p2p", "notes"):
        assert written[field] == pytest.approx(profile[field]) if profile[field] is not None else not written[field]
    for gpu, again in zip(profile["gpus"], written["gpus"], strict=True):
        for field, value in gpu.items():
            assert again[field] == (pytest.approx(value, abs=1e-6) if isinstance(value, float) else value)


# ----------------------------------------------------------------------------------------------------------- any JSON

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
anything = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
FIELDS = sorted(box_to_json(Box("x", None, None)))
GPU_FIELDS = sorted(box_to_json(Box("x", None, None, (CARDS[0],)))["gpus"][0])


@given(
    top=st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=5), anything, max_size=4),
    gpus=st.lists(st.dictionaries(st.sampled_from(GPU_FIELDS), anything, max_size=4) | anything, max_size=3),
    cpu=st.dictionaries(
        st.sampled_from(["name", "logical", "usable", "isa_flags", "numa_nodes"]), anything, max_size=3
    ),
)
@settings(max_examples=20)
def test_any_json_is_a_box_with_doubts_or_an_error(top: dict[str, Any], gpus: list[Any], cpu: dict[str, Any]) -> None:
    for value in (top, {**top, "gpus": gpus, "cpu": cpu}, gpus):
        try:
            box = box_from_json(value, "x")
        except ProfileError as error:
            assert error.what and error.fix
            continue
        found = ceilings(box, None)
        assert found.devices[-1].id == "cpu"
        assert box_from_json(json.loads(json.dumps(box_to_json(box))), "y") == box


def test_a_name_that_is_said_twice_is_a_doubt(tmp_path: Path) -> None:
    path = tmp_path / "box.json"
    path.write_text(
        '{"mem_total_mib": 1024, "mem_total_mib": 2048, "gpus": [{"vendor": "NVidiaX", "uma": 0, "uma": false}]}'
    )
    box = load_box(str(path))
    assert box.memory is not None and box.memory.limit_bytes == 2048 * MIB
    told = {doubt.where.rpartition(": ")[2]: doubt for doubt in box.doubts}
    assert told["mem_total_mib"].what == told["gpus[0].uma"].what == "it is said more than once"
    assert told["mem_total_mib"].taken == "the last of them"
    assert told["gpus[0].vendor"].what.startswith("NVidiaX is none of")
