"""Flips of a real server: by request and while answers stream, refused, given up, cut short by a dead rank, drilled.

The model counts, so the right answer is known in every layout; of a long one the same request without a flip is.
"""

from __future__ import annotations

import asyncio
import json
import re
import signal
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

COUNTER = Path(__file__).parents[1] / "data" / "counter.gguf"
ROUTE = "/v1/homeserve/flip"
VECTORS = ("--pipeline-ratio", "2,1,1", "--weight-vector", "30,17,17", "--token-vector", "28,26,20")
SIZES = ("--context", "1024", "--kv-tokens", "8192", "--max-running", "8", "--threads", "1", "--kv-type", "f32")
"""Rows of f32: in the other layout sums have other last digits, and a row that is rounded to f16 makes them larger."""
OTHER = {"pipeline": "tensor", "tensor": "pipeline"}


def counted(start: int, tokens: int) -> str:
    """The first `tokens` bytes of the right answer: a token is a byte."""
    return "".join(f" {number}" for number in range(start + 1, start + 1 + tokens))[:tokens]


def complete(run: Any, prompt: str, tokens: int) -> dict[str, Any]:
    """A greedy answer that is no stream."""
    body = json.dumps({"prompt": prompt, "max_tokens": tokens, "temperature": 0}).encode()
    request = urllib.request.Request(f"{run.url}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return dict(json.load(answer))


def known(run: Any, start: int, tokens: int) -> str:
    """The answer without a flip, which begins right."""
    text = str(complete(run, f"count {start}:", tokens)["choices"][0]["text"])
    assert text[:150] == counted(start, 150) and len(text) == tokens
    return text


def ask(run: Any, method: str, path: str = "", body: Any = None) -> tuple[int, Any]:
    data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    request = urllib.request.Request(run.url + ROUTE + path, data, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def status_of(run: Any) -> dict[str, Any]:
    status: dict[str, Any] = run.get("/v1/homeserve/status")[1]
    return status


def over(run: Any, told: dict[str, Any], wait_until: Callable[..., Any]) -> dict[str, Any]:
    """The record of a flip that was accepted, once it has ended."""

    def ended() -> Any:
        record = run.get(told["url"])[1]
        return record if record["state"] in ("committed", "abandoned") else None

    return dict(wait_until("the end of a flip", ended))


def flip(run: Any, to: str, wait_until: Callable[..., Any]) -> dict[str, Any]:
    status, told = ask(run, "POST", body={"to": to})
    assert status == 202, told
    return over(run, told, wait_until)


class Streams:
    """Counts that stream from a server, through the official client."""

    def __init__(self, run: Any) -> None:
        self.run = run
        self.client = openai.AsyncOpenAI(base_url=f"{run.url}/v1", api_key="none", max_retries=0, timeout=120)
        self.model = run.get("/v1/models")[1]["data"][0]["id"]
        self.texts: dict[int, str] = {}
        self.told: dict[int, Any] = {}

    async def count(self, start: int, tokens: int, leave_after: int = 0, **more: Any) -> None:
        """Reads a count to its end; of one that is left, the text stays what had come."""
        asked: dict[str, Any] = {"prompt": f"count {start}:", "max_tokens": tokens, "temperature": 0} | more
        stream = await self.client.completions.create(model=self.model, stream=True, **asked)
        self.texts[start] = ""
        async for chunk in stream:
            self.texts[start] += "".join(choice.text for choice in chunk.choices)
            self.told[start] = (chunk.model_extra or {}).get("homeserve") or self.told.get(start)
            if leave_after and len(self.texts[start]) >= leave_after:
                await stream.close()
                return

    async def reached(self, start: int, length: int) -> None:
        while len(self.texts.get(start, "")) < length:
            await asyncio.sleep(0.002)

    async def flip(self, to: str) -> dict[str, Any]:
        """Ask for a flip and see it through, while streams go on."""
        status, told = await asyncio.to_thread(ask, self.run, "POST", "", {"to": to})
        assert status == 202, told
        while True:
            record: dict[str, Any] = (await asyncio.to_thread(self.run.get, told["url"]))[1]
            if record["state"] in ("committed", "abandoned"):
                return record
            await asyncio.sleep(0.002)


def check_idle(run: Any, wait_until: Callable[..., Any]) -> None:
    wait_until("an idle census", lambda: run.get("/v1/homeserve/census")[1]["idle"])
    census = run.get("/v1/homeserve/census")[1]
    assert census["ok"], census
    for pool in census["ranks"]:
        assert pool["free"] + pool["cached"] == pool["capacity"] and pool["leaks"] == [], pool


def stopped(run: Any) -> None:
    run.send(signal.SIGTERM)
    assert run.wait() == 0, run.err
    assert run.left_behind() == []


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory, new_box: Callable[[Path], Any]) -> Iterator[Any]:
    """Three uneven ranks with memory of their own that rest in the pipeline layout."""
    box = new_box(tmp_path_factory.mktemp("flips"))
    try:
        flags = ("--devices", "cpu:3", "--layout", "pipeline", "--flip", "manual", "--chunk", "32", *VECTORS, *SIZES)
        run = box.up(str(COUNTER), *flags)
        yield run
        stopped(run)
    finally:
        box.close()


# --------------------------------------------------------------------------------------------------------- by request


def test_a_flip_by_request_is_on_record_and_in_status_and_metrics(three: Any, wait_until: Callable[..., Any]) -> None:
    before = status_of(three)
    assert before["layout"] == "pipeline" and before["flip"]["policy"] == "manual"
    assert before["vectors"]["weight"] == [30, 17, 17] and before["vectors"]["token"] == [14, 13, 10]
    assert [rank["layers"] for rank in before["ranks"]] == before["pipeline"]["ranges"] == [[0, 3], [3, 5], [5, 6]]
    there = flip(three, "tensor", wait_until)
    assert (there["state"], there["reason"], there["from"], there["to"], there["cause"]) == (
        "committed", None, "pipeline", "tensor", "request",
    )  # fmt: skip
    assert all(there["ms"][part] is not None for part in ("drain", "prepare", "commit", "verify", "refill", "total"))
    assert [rank["answer"] for rank in there["ranks"]] == ["yes"] * 3
    assert all(rank["refill_bytes"] > 0 and rank["digest"] for rank in there["ranks"])
    status = status_of(three)
    assert (status["layout"], status["epoch"]) == ("tensor", there["epoch"]) and there["epoch"] > before["epoch"]
    assert [rank["layers"] for rank in status["ranks"]] == [None] * 3
    assert status["pipeline"] == before["pipeline"] and status["vectors"] == before["vectors"]
    assert status["flip"]["committed"] == before["flip"]["committed"] + 1
    back = flip(three, "pipeline", wait_until)
    assert back["state"] == "committed" and back["epoch"] > there["epoch"]
    _, listed = ask(three, "GET")
    assert [each["id"] for each in listed["last"]][-2:] == [there["id"], back["id"]]
    with urllib.request.urlopen(f"{three.url}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    for start in (
        'homeserve_flips_total{cause="request",reason="",result="committed",to="tensor"} ',
        'homeserve_flip_seconds_sum{part="total",rank="engine"} ',
        'homeserve_flip_seconds_count{part="refill",rank="2"} ',
        'homeserve_flip_bytes_total{kind="refill",rank="1"} ',
        f"homeserve_epoch {float(back['epoch'])}",
    ):
        assert any(line.startswith(start) for line in lines), start


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("POST", "", {"to": "rows"}, 400, "bad_target"),
        ("POST", "", {"to": "pipeline"}, 409, "already_there"),
        ("POST", "", {"to": 1}, 400, "invalid_field"),
        ("POST", "", b"{", 400, "invalid_field"),
        ("GET", "/999999", None, 404, "flip_not_found"),
        ("DELETE", "", None, 405, "method_not_allowed"),
    ],
)
def test_what_is_asked_wrongly_is_refused(
    three: Any, method: str, path: str, body: Any, status: int, code: str
) -> None:
    found, told = ask(three, method, path, body)
    assert (found, told["error"]["code"]) == (status, code) and told["error"]["message"]


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        ((), "single_rank"),
        (("--devices", "cpu:2", "--layout", "tensor"), "flip_off"),
    ],
)
def test_a_server_of_one_layout_says_why_it_stays(box: Any, tiny: str, flags: tuple[str, ...], code: str) -> None:
    run = box.up(tiny, "--kv-tokens", "512", "--threads", "1", *flags)
    found, told = ask(run, "POST", body={"to": "pipeline"})
    assert (found, told["error"]["code"]) == (409, code)
    flip = status_of(run)["flip"]
    assert flip["policy"] == "off" and flip["hold_reason"] == told["error"]["message"]
    assert ask(run, "GET")[1] == {"schema": 1, "policy": "off", "last": []}
    stopped(run)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--flip", "manual"), "--flip manual: changes how several ranks hold a model, and there is one"),
        (("--devices", "cpu:2", "--flip", "auto", "--deterministic"), "--flip auto: in the tensor layout last digits"),
        (("--devices", "cpu:5", "--flip", "manual"), "5 ranks"),
    ],
)
def test_a_flip_that_can_never_be_is_refused_before_anything_loads(
    box: Any, tiny: str, flags: tuple[str, ...], words: str
) -> None:
    run = box.run("up", tiny, "--port", "0", *flags)
    assert run.process.returncode == 2 and words in run.err
    assert "starting the worker" not in run.out and run.left_behind() == []


# ------------------------------------------------------------------------------------------------------ under answers


def test_answers_that_stream_across_flips_are_those_without(three: Any, wait_until: Callable[..., Any]) -> None:
    """Counts, a seeded draw and choices of one request; one client leaves, and one comes, meanwhile."""

    counts = {start: known(three, start, tokens) for start, tokens in ((17, 600), (230, 600), (4001, 600), (777, 500))}

    async def play() -> tuple[Streams, list[dict[str, Any]]]:
        streams = Streams(three)
        async with streams.client, asyncio.TaskGroup() as group:
            for start in (17, 230):
                group.create_task(streams.count(start, 600))
            group.create_task(streams.count(4001, 600, leave_after=150))
            await streams.reached(17, 40)
            records = [await streams.flip("tensor")]
            group.create_task(streams.count(777, 500))
            await streams.reached(17, len(streams.texts[17]) + 30)
            records.append(await streams.flip("pipeline"))
            await streams.reached(17, len(streams.texts[17]) + 30)
            records.append(await streams.flip("tensor"))
            records.append(await streams.flip("pipeline"))
        return streams, records

    streams, records = asyncio.run(play())
    assert [record["state"] for record in records] == ["committed"] * 4, records
    for start in (17, 230, 777):
        assert streams.texts[start] == counts[start], start
    assert streams.texts[4001] and counts[4001].startswith(streams.texts[4001])
    assert streams.told[17]["flips_crossed"] >= 3 and streams.told[777]["flips_crossed"] >= 2
    assert streams.told[17]["restarts"] == 0
    for record in records[:2]:
        assert record["live"]["requests"] >= 2 and record["live"]["rows"] > 0 and record["live"]["states"] >= 2
        assert sum(rank["sent_bytes"] for rank in record["ranks"]) > 0
        assert sum(rank["sent_bytes"] for rank in record["ranks"]) == sum(r["received_bytes"] for r in record["ranks"])
    status = status_of(three)
    assert status["layout"] == "pipeline" and [rank["restarts"] for rank in status["ranks"]] == [0] * 3
    check_idle(three, wait_until)


def test_choices_draws_penalties_and_logprobs_are_those_without_a_flip(
    three: Any, wait_until: Callable[..., Any]
) -> None:
    """Two choices of one request, drawn with a seed, held back by penalties and DRY; each has a state of its own."""
    asked: dict[str, Any] = {
        "prompt": "what is it that", "max_tokens": 300, "n": 2, "temperature": 1.2, "seed": 11, "logprobs": 2,
        "frequency_penalty": 0.02, "presence_penalty": 0.01,
        "extra_body": {"ignore_eos": True, "dry_multiplier": 0.1, "dry_allowed_length": 3, "xtc_probability": 0.1},
    }  # fmt: skip

    async def read(client: openai.AsyncOpenAI, model: str, seen: list[int]) -> tuple[list[str], list[list[float]]]:
        texts, values = ["", ""], [list[float](), list[float]()]
        async for chunk in await client.completions.create(model=model, stream=True, **asked):
            for choice in chunk.choices:
                texts[choice.index] += choice.text
                values[choice.index] += (choice.logprobs and choice.logprobs.token_logprobs) or []
                seen[0] += 1
        return texts, values

    async def play(*targets: str) -> tuple[list[str], list[list[float]]]:
        streams, seen = Streams(three), [0]
        async with streams.client:
            task = asyncio.create_task(read(streams.client, streams.model, seen))
            for to in targets:
                at = seen[0]
                while seen[0] < at + 20 and not task.done():
                    await asyncio.sleep(0.002)
                record = await streams.flip(to)
                assert record["state"] == "committed" and record["live"]["requests"] == 2, record
            return await task

    texts, values = asyncio.run(play())
    flipped, after = asyncio.run(play("tensor", "pipeline", "tensor", "pipeline"))
    assert flipped == texts and texts[0] != texts[1]
    for mine, known in zip(after, values, strict=True):
        assert mine == pytest.approx(known, abs=2e-3)
    check_idle(three, wait_until)


def test_a_flip_between_two_chunks_of_a_prompt_changes_nothing(three: Any, wait_until: Callable[..., Any]) -> None:
    """Prompts of some 25 chunks are sent until a flip has met one before its first token."""

    def prompt_of(start: int) -> str:
        return " ".join(f"series {n} step 4:" for n in range(start, start + 40)) + f"<|endoftext|>count {start}:"

    async def play(start: int) -> tuple[str, bool]:
        streams = Streams(three)
        async with streams.client, asyncio.TaskGroup() as group:
            group.create_task(streams.count(start, 60, prompt=prompt_of(start)))
            while (await asyncio.to_thread(status_of, three))["requests"]["running"] == 0:
                await asyncio.sleep(0)
            record = await streams.flip(OTHER[status_of(three)["layout"]])
            half_done = not streams.texts.get(start) and record["live"]["requests"] == 1
            assert record["state"] == "committed", record
        return streams.texts[start], half_done

    met = 0
    for start in range(100, 2000, 100):
        text, half_done = asyncio.run(play(start))
        assert text == complete(three, prompt_of(start), 60)["choices"][0]["text"]
        met += half_done
        if met == 2:
            break
    assert met == 2
    if status_of(three)["layout"] != "pipeline":
        flip(three, "pipeline", wait_until)
    check_idle(three, wait_until)


def test_a_prefix_that_is_cached_goes_along(three: Any, wait_until: Callable[..., Any]) -> None:
    """The first request leaves its prompt in the prefix tree; after a flip the same prompt is found there."""
    prompt = " ".join(f"count {n}:" + counted(n, 60) for n in range(100, 900, 100)) + "<|endoftext|>count 31:"

    first = complete(three, prompt, 60)
    record = flip(three, "tensor", wait_until)
    assert record["state"] == "committed" and record["live"]["rows"] > 400, "cached pages are carried"
    again = complete(three, prompt, 60)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 400
    assert again["choices"][0]["text"] == first["choices"][0]["text"]
    assert flip(three, "pipeline", wait_until)["state"] == "committed"
    check_idle(three, wait_until)


def test_the_peak_of_every_rank_stays_below_the_plan(three: Any, wait_until: Callable[..., Any]) -> None:
    for to in ("tensor", "pipeline"):
        assert flip(three, to, wait_until)["state"] == "committed"
    corridor = three.get("/v1/homeserve/corridor")[1]
    flips = corridor["flips"]
    assert flips["period_ms"] <= 5 and flips["taken"] > 0
    for rank in flips["ranks"]:
        print(f"rank {rank['rank']}: {rank['peak_mib']} MiB of {rank['ledger_mib']} ({rank['moment']})")
        for moment in rank["moments"]:
            assert moment["peak_mib"] <= moment["ledger_mib"], rank
    assert any(sample[2].startswith("flip ") for sample in corridor["devices"][0]["samples"])
    assert all(device["breaches"] == 0 for device in corridor["devices"])


@pytest.mark.parametrize(
    ("fault", "state", "restarts"),
    [
        ("rank=1,step=prepare.pack,nth=1,action=refuse", "abandoned", 0),
        ("rank=0,step=prepare.digest,nth=1,action=kill", "abandoned", 1),
        ("rank=1,step=commit.write_kv,nth=1,action=kill", "abandoned", 1),
    ],
    ids=("no", "killed in prepare", "killed in commit"),
)
def test_a_flip_that_goes_wrong_costs_a_pause_at_most(
    box: Any, wait_until: Callable[..., Any], fault: str, state: str, restarts: int
) -> None:
    flags = ("--devices", "cpu:2", "--layout", "pipeline", "--flip", "manual", *SIZES)
    run = box.up(str(COUNTER), *flags, HOMESERVE_TESTING="1", HOMESERVE_FAULT=fault)
    counts = {start: known(run, start, 400) for start in (17, 555)}

    async def play() -> tuple[Streams, dict[str, Any]]:
        streams = Streams(run)
        async with streams.client, asyncio.TaskGroup() as group:
            group.create_task(streams.count(17, 400))
            group.create_task(streams.count(555, 400))
            await streams.reached(17, 40)
            record = await streams.flip("tensor")
        return streams, record

    streams, record = asyncio.run(play())
    assert record["state"] == state and record["reason"]
    assert streams.texts == counts
    assert {told["restarts"] for told in streams.told.values()} == {restarts}
    wait_until("ready", lambda: run.get("/ready")[0] == 200)
    status = status_of(run)
    assert status["layout"] == "pipeline" and [rank["restarts"] for rank in status["ranks"]] == [restarts] * 2
    assert sum(status["flip"]["abandoned"].values()) == 1
    again = flip(run, "tensor", wait_until)
    assert again["state"] == "committed" and again["epoch"] > record["epoch"], "a later one works"
    check_idle(run, wait_until)
    stopped(run)


SLOW = {"HOMESERVE_TESTING": "1", "HOMESERVE_FAULT": "rank=1,step=commit.refill,nth=1,action=delay:2000"}
MANUAL = ("--devices", "cpu:2", "--layout", "pipeline", "--flip", "manual")


def test_who_leaves_and_who_comes_during_a_flip(box: Any, wait_until: Callable[..., Any]) -> None:
    """A flip that takes two seconds: the one who leaves is aborted behind it, the one who comes is answered then."""
    run = box.up(str(COUNTER), *MANUAL, *SIZES, **SLOW)
    counts = {start: known(run, start, 300) for start in (17, 555)}

    async def play() -> tuple[Streams, dict[str, Any]]:
        streams = Streams(run)
        async with streams.client, asyncio.TaskGroup() as group:
            group.create_task(streams.count(17, 300))
            leaving = group.create_task(streams.count(4001, 900))
            await streams.reached(4001, 30)
            flip = group.create_task(streams.flip("tensor"))
            await asyncio.to_thread(
                wait_until, "the commit", lambda: ask(run, "GET", "/1")[1].get("state") == "committing"
            )
            group.create_task(streams.count(555, 300))
            leaving.cancel()
            busy = (await asyncio.to_thread(ask, run, "POST", "", {"to": "pipeline"}))[1]
            assert busy["error"]["code"] == "flip_running"
            record = await flip
        return streams, record

    streams, record = asyncio.run(play())
    assert record["state"] == "committed" and record["ms"]["refill"] >= 2000
    assert streams.texts[17] == counts[17] and streams.texts[555] == counts[555]
    wait_until("the abort", lambda: status_of(run)["requests"]["aborted"] == 1)
    check_idle(run, wait_until)
    stopped(run)


def test_a_server_that_is_stopped_during_a_flip_leaves_nothing(box: Any, wait_until: Callable[..., Any]) -> None:
    run = box.up(str(COUNTER), *MANUAL, *SIZES, **SLOW)
    assert ask(run, "POST", body={"to": "tensor"})[0] == 202
    wait_until("the commit", lambda: ask(run, "GET", "/1")[1]["state"] == "committing")
    stopped(run)


def test_the_policy_measures_both_layouts_before_anybody_asks(box: Any, wait_until: Callable[..., Any]) -> None:
    """Nothing was said of layouts: the first idle moment measures both, with a flip of its own in between."""
    run = box.up(str(COUNTER), "--devices", "cpu:2", "--flip-dwell-s", "0.1", *SIZES)
    status = status_of(run)
    assert status["flip"]["policy"] == "auto" and "--flip" not in run.err

    def measured() -> bool:
        told = status_of(run)["layouts_measured"]
        return all(told[layout]["prefill_tok_s"] and told[layout]["decode_tok_s"] for layout in OTHER)

    wait_until("speeds of both layouts", measured)
    _, listed = ask(run, "GET")
    assert listed["policy"] == "auto" and {each["cause"] for each in listed["last"]} == {"policy"}
    assert status_of(run)["flip"]["committed"] >= 1 and status_of(run)["flip"]["unarmed_work_count"] == 0
    assert complete(run, "count 17:", 150)["choices"][0]["text"] == counted(17, 150)
    stopped(run)


# ------------------------------------------------------------------------------------------- memory, images, the drill


def test_in_unified_memory_a_flip_moves_no_byte(box: Any, wait_until: Callable[..., Any]) -> None:
    flags = ("--devices", "cpu:2", "--memory", "unified", "--flip", "manual", *SIZES)
    run = box.up(str(COUNTER), *flags)
    text = known(run, 17, 400)

    async def play() -> tuple[Streams, list[dict[str, Any]]]:
        streams = Streams(run)
        async with streams.client, asyncio.TaskGroup() as group:
            group.create_task(streams.count(17, 400))
            await streams.reached(17, 40)
            here = status_of(run)["layout"]
            records = [await streams.flip(OTHER[here]), await streams.flip(here)]
        return streams, records

    streams, records = asyncio.run(play())
    assert streams.texts[17] == text and [each["state"] for each in records] == ["committed"] * 2
    for record in records:
        assert record["live"]["requests"] == 1 and record["live"]["rows"] > 0
        for rank in record["ranks"]:
            assert rank["sent_bytes"] == rank["received_bytes"] == rank["local_bytes"] == rank["refill_bytes"] == 0
    stopped(run)


def test_images_lie_in_a_folder_that_goes_with_the_server(
    box: Any, wait_until: Callable[..., Any], tmp_path: Path
) -> None:
    spill = tmp_path / "spill"
    flags = ("--devices", "cpu:2", "--flip", "manual", "--image-spill", str(spill), *SIZES)
    run = box.up(str(COUNTER), *flags)
    (folder,) = spill.iterdir()
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) > 1 << 20
    here = status_of(run)["layout"]

    def there(to: str) -> bool:
        """A flip that comes before its image does is answered with a no."""
        record = flip(run, to, wait_until)
        assert record["state"] == "committed" or "promotion" in record["reason"], record
        return record["state"] == "committed"

    for to in (OTHER[here], here, OTHER[here]):
        wait_until(f"a flip to {to}", lambda to=to: there(to))
    stopped(run)
    assert list(spill.iterdir()) == []


def test_a_disk_that_is_full_is_an_event(box: Any, wait_until: Callable[..., Any], tmp_path: Path) -> None:
    """The image stays in memory, and serving and flips go on: nobody would know."""
    flags = ("--devices", "cpu:2", "--flip", "manual", "--image-spill", str(tmp_path / "spill"), *SIZES)
    fault = "rank=1,step=spill,nth=1,action=enospc"
    run = box.up(str(COUNTER), *flags, HOMESERVE_TESTING="1", HOMESERVE_FAULT=fault)
    here = status_of(run)["layout"]
    wait_until("a flip", lambda: flip(run, OTHER[here], wait_until)["state"] == "committed")
    (event,) = [event for event in status_of(run)["events"] if event["kind"] == "rank_note"]
    assert event["rank"] == 1
    assert re.match(
        rf"the image of the {here} layout, \d+ bytes, stays in memory: .* cannot be written: No space", event["text"]
    )
    assert event["text"] in run.err, "and a line of the log"
    stopped(run)


@pytest.mark.parametrize("flags", [(), ("--round-trip",)], ids=("two answers", "one answer"))
def test_the_drill_of_doctor_on_a_server_of_its_own(box: Any, flags: tuple[str, ...]) -> None:
    run = box.run("doctor", "--flip-drill", "--json", "--model", str(COUNTER), *flags)
    assert run.process.returncode == 0, run.err + run.out
    told = json.loads(run.out)
    assert told["ok"] and [leg["state"] for leg in told["drill"]["legs"]] == ["committed"] * 2
    assert told["drill"]["measure"] == "counting upward"
    assert run.left_behind() == []


def test_the_drill_finds_a_running_server_and_a_server_that_cannot_flip_is_told(
    three: Any, box: Any, tiny: str
) -> None:
    found = box.run("doctor", "--flip-drill", "--round-trip", "--url", three.url)
    assert found.process.returncode == 0 and "the answer survived" in found.out, found.out + found.err
    one = box.up(tiny, "--kv-tokens", "512")
    told = box.run("doctor", "--flip-drill", "--url", one.url)
    assert told.process.returncode == 2 and "one rank has one layout" in told.err
    stopped(one)
