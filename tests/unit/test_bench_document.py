"""Rows of `homeserve bench` as a table, JSON, CSV and a picture; medians and their spread."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from dataclasses import asdict, replace
from typing import Any

import jsonschema
import pytest

from budget.page import Style
from homeserve.bench.document import Row, as_csv, document, from_csv, picture
from homeserve.bench.machine import Machine
from homeserve.bench.origin import Quiet
from homeserve.bench.reading import read_gb_s, size_for
from homeserve.bench.spread import spread
from homeserve.bench.subject import Subject
from homeserve.bench.table import Table

NUMBER, TEXT = {"type": ["number", "null"]}, {"type": ["string", "null"]}
ROW = {"engine": {"type": "string"}, "model": {"type": "string"}, "test": {"type": "string"}}
ROW |= {
    "unit": {"type": "string"},
    "runs": {"type": "integer"},
    "quant": TEXT,
    "layout": TEXT,
    "draft": TEXT,
    "why": TEXT,
}
ROW |= {"median": NUMBER, "p10": NUMBER, "p90": NUMBER}
DEVICE = {"cpu": TEXT, "isa": TEXT, "cores": NUMBER, "read_gb_s": NUMBER}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["schema", "commit", "date", "command", "device", "rows", "ratios"],
    "properties": {
        "schema": {"const": 1},
        "commit": TEXT,
        "date": {"type": "string"},
        "command": {"type": "string"},
        "device": {"type": "object", "required": list(DEVICE), "properties": DEVICE},
        "rows": {"items": {"type": "object", "required": list(ROW), "properties": ROW, "additionalProperties": False}},
        "ratios": {"const": []},
    },
}
"""What other programs rely on."""
FACTS = {"commit": None, "date": "2026-01-01", "command": "homeserve bench", "device": dict.fromkeys(DEVICE)}
ABOUT = Subject(
    "homeserve",
    "SmolLM2-135M-Instruct.Q4_1",
    quant="Q4_1",
    size_bytes=98_000_000,
    params=134_515_008,
    backend="cpu",
    threads=2,
    ranks=1,
)
DONE = Row("homeserve", ABOUT.model, "Q4_1", "tg128@2048", None, "off", "tok/s", 3, 1149.04, 1128.0, 1153.0)
MISSED = replace(
    DONE, test="pp9999", runs=0, median=None, p10=None, p90=None, why="a, prompt <longer> than the context"
)


def test_a_median_does_not_follow_the_worst_run() -> None:
    found = spread([10.0, 11.0, 12.0, 13.0, 1000.0])
    assert asdict(found) == {"runs": 5, "median": 12.0, "p10": 10.4, "p90": pytest.approx(605.2)}
    assert asdict(spread([2.0])) == {"runs": 1, "median": 2.0, "p10": 2.0, "p90": 2.0}


def test_json_is_of_the_form_that_programs_rely_on() -> None:
    told = json.loads(json.dumps(document([DONE, MISSED], FACTS), allow_nan=False))
    jsonschema.validate(told, SCHEMA)
    assert [row["median"] for row in told["rows"]] == [1149.04, None], "unknown is null"


def test_the_csv_gives_back_what_was_put_in() -> None:
    rows = [DONE, MISSED, replace(DONE, quant=None, layout="tensor", why='after 1 run: "no"\nmore')]
    assert from_csv(as_csv(rows)) == rows
    assert as_csv([]).startswith("engine,") and from_csv(as_csv([])) == []


def test_the_picture_is_xml_with_a_bar_for_each_figure() -> None:
    rss, fast = replace(DONE, test="rss", unit="MiB", median=200.0), replace(DONE, test="pp512", median=9e3)
    rows = [DONE, MISSED, rss, replace(DONE, layout="<x&y>"), fast]
    root = ElementTree.fromstring(picture("a model & its <engine>", rows))
    space = "{http://www.w3.org/2000/svg}"
    widths = [float(bar.attrib["width"]) for bar in root.iter(f"{space}rect")]
    assert widths == [300.0] * 4, "each kind has a scale of its own"
    words = [each.text for each in root.iter(f"{space}text")]
    assert words[:3] == ["a model & its <engine>", "answers, tok/s", "tg128@2048"] and "1149.0 ± 12.5" in words
    assert "prefers-color-scheme:dark" in picture("", rows)
    ElementTree.fromstring(picture("nothing", []))


def lines(
    width: int, about: Subject = ABOUT, rows: tuple[Row, ...] = (DONE, MISSED), colour: bool = False
) -> list[str]:
    table = Table(about, [row.label for row in rows], width, Style(colour))
    return [*table.head(), *(line for row in rows for line in table.row(row))]


def test_a_wide_table_has_the_models_columns_in_every_line() -> None:
    head, row, *_ = lines(80)
    assert head.split() == "model size params quant backend thr test median ± spread".split()
    assert row.split()[1:] == "93.5Mi 134.5M Q4_1 cpu 2 tg128@2048 1149.0 ± 12.5 tok/s".split()
    assert "SmolLM2-135M-Instruct.Q4_1" in lines(120)[1]


@pytest.mark.parametrize("width", [40, 60, 80, 100, 200])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    long = replace(DONE, test="step_gap64", layout="pipeline", median=123456.7, p10=1.0, p90=99999.0)
    for about in (ABOUT, replace(ABOUT, model="m" * 150, quant=None, params=None, size_bytes=5 << 30)):
        found = lines(width, about, (DONE, MISSED, long))
        assert all(len(line) <= width for line in found), found
        text = "\n".join(found)
        assert "123456.7 ± 49999.0 tok/s" in text and "tg128@2048" in text and "not measured" in text


def test_a_narrow_table_says_the_model_once() -> None:
    found = lines(40)
    assert found[0].startswith("SmolLM2-135M-Instruct.Q4_1") and "".join(found).count("SmolLM2") == 1
    assert "prompt <longer>" in " ".join(" ".join(found).split())


def test_a_plain_stream_has_no_colour_and_a_name_cannot_move_the_cursor() -> None:
    assert "\x1b" in lines(80, colour=True)[0] and "\x1b" not in "".join(lines(80))
    evil = replace(ABOUT, model="m\x1b[2J")
    assert "\x1b" not in "".join(lines(80, evil, (replace(MISSED, why="\x1b[2J"),)))


def test_a_machine_is_quiet_up_to_a_quarter_of_its_cores() -> None:
    assert Quiet(0.4, 1).quiet and Quiet(3.9, 16).quiet
    assert not Quiet(0.6, 2).quiet and not Quiet(4.1, 16).quiet
    assert Quiet(4.126, 16).as_json() == {"quiet": False, "load_average": 4.13, "cores": 16}


def test_reading_is_measured_with_real_memory_where_there_is_room() -> None:
    assert 0.01 < read_gb_s(2, 1 << 20) < 10_000
    assert [size_for(free << 20) for free in (100, 1000, 1 << 20)] == [None, 250 << 20, 512 << 20]


def test_the_machine_is_said_in_a_line() -> None:
    machine = Machine("a CPU", 2, Quiet(0.1, 2), 27.44)
    assert machine.words() == "a CPU, 2 cores, reads 27 GB/s"
    assert Machine("a CPU", 1, Quiet(0.1, 1), None).words() == "a CPU, 1 core"
