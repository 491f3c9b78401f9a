"""The JSON of `homeserve budget`: names to the letter, sums that hold, null for unknown, and its schema."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest

from budget.boxes import ModelRow, model_json
from budget.document import document, free_min_bytes
from budget.facts import MIB
from budget.ledger import ALWAYS, MOMENTS, Line
from budget.plan import Plan
from budget.question import Question, flags, run_settings, settings_of
from budget.speed import LayoutSpeed
from budget.wish import Wish

SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "budget.schema.json").read_text())
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)


def valid(found: dict[str, Any]) -> dict[str, Any]:
    """`found` as a reader of the JSON has it, after the schema has let it pass and has named everything in it."""
    read: dict[str, Any] = json.loads(json.dumps(found, allow_nan=False))
    VALIDATOR.validate(read)
    unnamed = list(_unnamed(read, SCHEMA, "$"))
    assert unnamed == []
    return read


def _unnamed(value: Any, schema: dict[str, Any], where: str) -> Any:
    """Places of `value` that the schema has no property for: open to readers, but not to be forgotten here."""
    if "$ref" in schema:
        schema = SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]]
    if "oneOf" in schema:
        schema = {} if value is None else schema["oneOf"][1]
        yield from _unnamed(value, schema, where)
    elif isinstance(value, dict):
        more = schema.get("additionalProperties")
        for key, inner in value.items():
            if key in schema.get("properties", {}):
                yield from _unnamed(inner, schema["properties"][key], f"{where}.{key}")
            elif not more:
                yield f"{where}.{key}"
    elif isinstance(value, list):
        for at, inner in enumerate(value):
            yield from _unnamed(inner, schema.get("items", {}), f"{where}[{at}]")


def test_the_schema_is_one() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


def test_names_are_those_that_were_promised(told: SimpleNamespace) -> None:
    read = valid(document(told.ceilings, told.host, told.plan, told.doubts))
    assert list(read)[:6] == ["schema", "host", "devices", "doubts", "plan", "refusal"]
    assert read["schema"] == 1 and read["refusal"] is None and read["unknown"] is None
    assert set(read["host"]) == {"total_mib", "limit_mib", "limit_source", "available_mib", "swap_mib"}
    device = "index id vendor name arch kind usable why_not total_mib reserved_mib free_mib gtt_mib ceiling_mib"
    assert set(read["devices"][0]) == {*device.split(), "floor_mib", "bar1"}
    assert set(read["devices"][0]["bar1"]) == {"total_mib", "free_mib", "p2p", "why"}
    plan = "model layouts weight_vector token_vector context_tokens max_running_requests binds ledger peak_mib"
    more = "free_min_mib speed kv_tokens kv_type option ranks rank_tokens priced advice flip command"
    assert {*plan.split(), *more.split()} <= set(read["plan"])
    assert {"device", "line"} <= set(read["plan"]["binds"])
    assert {"device", "line", "mib", "held", "source"} <= set(read["plan"]["ledger"][0])


def test_a_refusal_says_what_lacks_and_the_nearest_settings_flat(told: SimpleNamespace) -> None:
    read = valid(document(told.ceilings, told.host, told.refusal, ()))
    assert read["plan"] is None
    refusal = read["refusal"]
    assert (refusal["needed_mib"], refusal["available_mib"], refusal["device"]) == (9500.0, 8896.0, 1)
    assert refusal["nearest"] == {"context": 16384, "kv_type": "q8_0", "max_running": 16}
    assert refusal["nearest_command"].startswith("homeserve budget dense-27b --context 16384")
    none = valid(document(told.ceilings, told.host, replace(told.refusal, nearest=None), ()))
    assert none["refusal"]["nearest"] is None and none["refusal"]["nearest_command"] is None


def test_unknown_is_null_and_never_0(told: SimpleNamespace) -> None:
    read = valid(document(told.unknown.ceilings, None, told.unknown, ()))
    assert read["plan"] is None and read["refusal"] is None and read["unknown"]["why"]
    assert set(read["host"].values()) == {None}
    cpu = read["devices"][-1]
    assert cpu["total_mib"] is None and cpu["ceiling_mib"] is None and cpu["bar1"] is None
    assert document(told.ceilings, told.host, None, ())["devices"][0]["bar1"]["free_mib"] is None


def test_the_peak_is_the_largest_sum_of_the_ledger(told: SimpleNamespace) -> None:
    read = valid(document(told.ceilings, told.host, told.plan, ()))["plan"]
    for device in range(3):
        lines = [line for line in read["ledger"] if line["device"] == device]
        sums = [
            sum(line["mib"] for line in lines if moment in line["held"] or line["held"] == ["always"])
            for moment in MOMENTS
        ]
        assert read["peak_mib"][device] == pytest.approx(max(sums), abs=0.005 * (len(lines) + 1))
    assert read["peak_mib"] == [23055.75, 8800.0, 300.0]
    assert read["free_min_mib"] == [31056.0 + 1024 - 23055.75, 8896.0 + 1024 - 8800, 60000.0 - 300]


def test_devices_of_one_memory_leave_each_other_less(told: SimpleNamespace) -> None:
    lines = (Line(0, "kv", 20000 * MIB, ALWAYS, "computed"), Line(1, "engine process", 400 * MIB, ALWAYS, "reserve"))
    apu, cpu = told.laptop.devices
    # 18976 MiB of the card beyond its carve-out and 400 of the host, of 28312 that both may hold; 256 stay besides.
    assert free_min_bytes(told.laptop, lines, apu) == min(5600, 28312 - 19376 + 256) * MIB
    assert free_min_bytes(told.laptop, lines, cpu) == (28312 - 19376 + 256) * MIB


def test_no_number_that_json_lacks(told: SimpleNamespace) -> None:
    speed = LayoutSpeed(float("inf"), float("nan"), 0.5, 1.2, "")
    plan = replace(told.plan, speeds={"pipeline": speed}, flip_s=float("inf"), break_even_tokens=None)
    read = valid(document(told.ceilings, told.host, plan, ()))["plan"]
    assert read["speed"]["pipeline"]["prefill_tok_s"] is None and read["speed"]["pipeline"]["decode_tok_s"] is None
    assert read["flip"]["seconds"] is None and read["flip"]["break_even_tokens"] is None


def test_layouts_carry_ranks_and_ranges(told: SimpleNamespace) -> None:
    read = valid(document(told.ceilings, told.host, told.plan, ()))["plan"]
    assert read["layouts"] == {
        "pipeline": {"ranks": [0, 1], "ranges": [[0, 40], [40, 64]]},
        "tensor": {"ranks": [0, 1]},
    }
    one = replace(told.plan, layouts=("pipeline",), flip_s=None)
    read = valid(document(told.ceilings, told.host, one, ()))["plan"]
    assert list(read["layouts"]) == ["pipeline"] and read["flip"] is None


def test_models_on_disk_fit_or_lack_or_cannot_be_said(told: SimpleNamespace) -> None:
    rows = [
        ModelRow("a.gguf", told.plan, ""),
        ModelRow("b.gguf", told.refusal, ""),
        ModelRow("c.gguf", told.unknown, ""),
        ModelRow("d.gguf", None, "is not GGUF"),
    ]
    read = valid(document(told.ceilings, told.host, None, (), models=[model_json(row) for row in rows]))["models"]
    assert [row["fits"] for row in read] == [True, False, None, None]
    assert read[0]["kv_tokens"] == 65536 and read[0]["lacking_mib"] is None
    assert read[1]["lacking_mib"] == 604.0 and read[1]["kv_tokens"] is None
    assert read[3] == {
        "path": "d.gguf", "name": None, "weights_mib": None, "fits": None, "context_tokens": None, "kv_tokens": None,
        "lacking_mib": None, "why": "is not GGUF",
    }  # fmt: skip


# ----------------------------------------------------------------------------------------------------- command lines


def test_a_command_says_what_was_chosen_and_nothing_else(told: SimpleNamespace) -> None:
    asked = Question("my models/m.gguf")
    assert asked.up_line(settings_of(Wish())) == "homeserve up 'my models/m.gguf'"
    wish = Wish(
        context=4096,
        kv_type="q8_0",
        running=2,
        chunk=64,
        devices=("cuda:0", "cpu"),
        layout="tensor",
        flip="off",
        weight_vector=(3, 1),
        cpu_moe=0,
        draft=False,
        vision=True,
        floor_bytes=512 * MIB,
    )
    words = asked.up_line(settings_of(wish)).split(" ", 4)[-1]
    assert words == (
        "--context 4096 --kv-type q8_0 --max-running 2 --chunk 64 --devices cuda:0,cpu --layout tensor --flip off"
        " --weight-vector 3,1 --cpu-moe off --draft off --floor-mib 512"
    )
    assert "--vision on" in flags(settings_of(wish))


def test_requests_at_once_that_up_would_not_take_by_itself_are_said(told: SimpleNamespace) -> None:
    def running(plan: Plan) -> int | str:
        return run_settings(plan)["max_running"]

    assert running(replace(told.plan, wish=Wish(), running=16)) == 0
    assert running(replace(told.plan, wish=Wish(), running=4)) == 4
    assert running(replace(told.plan, wish=Wish(running=16), running=16)) == 16


def test_a_second_look_asks_the_same_question() -> None:
    asked = Question("m.gguf", None, ("--box", "b.json#it", "--quant", "Q8_0"))
    assert asked.budget_line({"kv_type": "q8_0"}) == (
        "homeserve budget m.gguf --box 'b.json#it' --quant Q8_0 --kv-type q8_0"
    )
    # What the settings say anew is said once; another shape takes the model's place.
    assert asked.budget_line({"quant": "Q2_K"}) == "homeserve budget m.gguf --box 'b.json#it' --quant Q2_K"
    assert asked.budget_line({"shape": "s"}) == "homeserve budget --box 'b.json#it' --quant Q8_0 --shape s"
    assert Question(None, "s.json").up_line({"quant": "Q2_K", "context": 16}) == "homeserve up MODEL --context 16"
    # The file of another mix is not the one that was named.
    assert asked.up_line({}) == "homeserve up MODEL"
