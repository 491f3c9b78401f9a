"""What a served model really holds: predicted against measured line by line, the corridor, and a box of 2 GiB."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import httpx
import pytest

GIB = 1 << 30
CONTEXTS = ("1024", "4096", "8192")
LINES = {"weights", "kv", "workspace", "engine process", "worker processes", "template process", "plan log"}
LATER = {"vocabulary", "grammar process"}
"""Of these nothing is held before the first guided answer."""
CACHE = "model file (page cache)"
EMPTY_NAMES = ("other", "misc", "overhead")


def close(predicted: float, measured: float, share: float, mib: float) -> bool:
    return abs(predicted - measured) <= max(share * measured, mib)


def settled(run: Any, wait_until: Callable[..., Any]) -> dict[str, Any]:
    """The budget once the template helper is up as well."""

    def whole() -> dict[str, Any] | None:
        status, body = run.get("/v1/homeserve/budget")
        assert status == 200, body
        held = {row["line"]: row["measured_mib"] for row in body["measured"]}
        return body if (held["template process"] or 0) > 5 else None

    found: dict[str, Any] = wait_until("the helper that renders templates", whole)
    return found


@pytest.mark.parametrize("context", CONTEXTS)
def test_each_line_and_the_total_are_as_predicted(
    start_server: Any, wait_until: Callable[..., Any], context: str
) -> None:
    """Each line alone within 5 % or 16 MiB, all together within 3 % or 64 MiB."""
    with start_server("--context", context, "--kv-tokens", str(2 * int(context))) as run:
        body = settled(run, wait_until)
        rows = {row["line"]: row for row in body["measured"]}
        assert set(rows) == {*LINES, *LATER, CACHE}, rows
        assert all(rows[name]["measured_mib"] == 0 and rows[name]["how"] for name in LATER), rows
        assert not any(word in name for name in rows for word in EMPTY_NAMES)
        for name in LINES:
            row = rows[name]
            assert row["how"] and close(row["predicted_mib"], row["measured_mib"], 0.05, 16), row
        assert rows["kv"]["measured_mib"] >= int(context) * 2 * 22.5 / 1024, "committed before the first request"
        assert rows[CACHE]["predicted_mib"] is None and rows[CACHE]["how"]
        total = body["measured_total"]
        assert close(total["predicted_mib"], total["smaps_mib"], 0.03, 64), total
        ledger = {line["line"] for line in body["plan"]["ledger"]}
        assert LINES | LATER <= ledger
        assert total["later_mib"] == pytest.approx(sum(rows[name]["predicted_mib"] for name in LATER), abs=0.02)
        assert "predicted against measured" in wait_until("the table", lambda: "measured" in run.out and run.out)


def test_the_first_guided_answer_takes_what_was_planned_for_it(
    start_server: Any, wait_until: Callable[..., Any]
) -> None:
    """Each of its lines is there, and no larger than the plan has it; the sum is still the sum."""
    with start_server("--context", "1024") as run:
        before = {row["line"]: row for row in settled(run, wait_until)["measured"]}
        asked = {
            "messages": [{"role": "user", "content": "Who are you?"}],
            "max_tokens": 16,
            "response_format": {"type": "json_object"},
            "dry_multiplier": 0.8,
        }
        assert httpx.post(f"{run.url}/v1/chat/completions", json=asked, timeout=60).status_code == 200

        def guided() -> dict[str, Any] | None:
            body: dict[str, Any] = run.get("/v1/homeserve/budget")[1]
            held = {row["line"]: row["measured_mib"] for row in body["measured"]}
            return body if held["vocabulary"] and held["grammar process"] else None

        body = wait_until("a measurement of what came with it", guided)
        rows = {row["line"]: row for row in body["measured"]}
        for name in LATER:
            assert 5 < rows[name]["measured_mib"] <= rows[name]["predicted_mib"], rows[name]
        workers = rows["worker processes"]
        assert workers["measured_mib"] <= before["worker processes"]["measured_mib"] + 4, workers
        total = body["measured_total"]
        assert total["later_mib"] == 0 and total["smaps_mib"] <= total["predicted_mib"], total
        # A vocabulary is planned for the moment at which it is read, and holds less afterwards.
        spare = sum(rows[name]["predicted_mib"] - rows[name]["measured_mib"] for name in LATER)
        assert close(total["predicted_mib"] - spare, total["smaps_mib"], 0.03, 64), total


def test_the_control_group_agrees_and_a_box_of_2_gib_is_planned_for(
    limited_group: Callable[[int], Any], box: Any, smollm2: str, wait_until: Callable[..., Any]
) -> None:
    group = limited_group(2 * GIB)
    run = box.start("up", smollm2, "--context", "4096", inside=group.inside)
    run.wait_ready()
    body = settled(run, wait_until)
    assert body["host"]["limit_mib"] == 2048 and body["host"]["limit_source"].startswith(str(group.folder))
    total = body["measured_total"]
    assert str(group.folder) in total["cgroup_how"]
    assert close(total["predicted_mib"], total["cgroup_mib"], 0.03, 64), total
    assert close(total["smaps_mib"], total["cgroup_mib"], 0.03, 64), total
    assert close(total["predicted_mib"], total["smaps_mib"], 0.03, 64), total
    corridor = run.get("/v1/homeserve/corridor")[1]
    (device,) = corridor["devices"]
    # What the sampler saw is what the group says: 2 GiB less what is held at the peak.
    assert 1024 < device["min_free_mib"] < 2048 - total["smaps_mib"] + 64
    run.send(signal.SIGTERM)
    assert run.wait() == 0, run.err


def test_the_corridor_is_sampled_from_before_the_load(box: Any, tiny: str, wait_until: Callable[..., Any]) -> None:
    run = box.up(tiny, "--floor-mib", "1")

    def a_second_long() -> dict[str, Any] | None:
        found: dict[str, Any] = run.get("/v1/homeserve/corridor")[1]
        return found if found["taken"] > 10 and found["devices"][0]["samples"][-1][2] == "ready" else None

    body = wait_until("a second of samples", a_second_long)
    assert (body["schema"], body["floor_mib"], body["period_ms"]) == (1, 1, 100)
    (device,) = body["devices"]
    first, *_, last = device["samples"]
    assert first[0] < 1 and first[2] == "starting" and last[2] == "ready"
    assert device["min_free_mib"] == min(sample[1] for sample in device["samples"])
    assert device["breaches"] == 0 and run.get("/v1/homeserve/status")[1]["events"] == []


def test_a_breach_of_the_floor_is_an_event_and_a_line_of_the_log(
    limited_group: Callable[[int], Any], box: Any, tiny: str, wait_until: Callable[..., Any]
) -> None:
    """Somebody else takes memory in the group of a server that runs."""
    group = limited_group(GIB)
    run = box.start("up", tiny, "--floor-mib", "400", inside=group.inside)
    run.wait_ready()
    assert run.get("/v1/homeserve/corridor")[1]["devices"][0]["breaches"] == 0
    hog = box.hog(group.inside, 640)
    wait_until("the breach", lambda: run.get("/v1/homeserve/corridor")[1]["devices"][0]["breaches"] == 1)
    (event,) = wait_until("the event", lambda: run.get("/v1/homeserve/status")[1]["events"])
    assert event["kind"] == "corridor_breach" and "below the floor of 400 MiB" in event["text"]
    assert "below the floor of 400 MiB" in run.err
    why = run.get("/v1/homeserve/budget")[1]["measured_total"]
    assert why["cgroup_mib"] is None and "other processes" in why["cgroup_how"]
    hog.kill()
    hog.wait()
