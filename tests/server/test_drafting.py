"""Servers that draft, asked through the official client: whatever is drafted, the answer is that of a server that
drafts nothing, and bodies, status and metrics say what drafting brought."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from box import Box, Run, wait_until
from without_tensor import without_tensor

pytestmark = pytest.mark.timeout(240)

COUNTER = Path(__file__).parents[1] / "data" / "counter.gguf"
SIZES = ("--context", "1024", "--kv-tokens", "8192", "--max-running", "8", "--chunk", "64", "--threads", "1")
COUNTS = [f"count {start}:" for start in (7, 1000, 4242, 73)]
NONSENSE = "the quick brown fox jumps over the lazy dog and"
WRONG = {"HOMESERVE_TESTING": "1", "HOMESERVE_DRAFTS": "wrong"}
SAMPLED = [{"temperature": 1.5, "top_p": 0.95, "seed": seed} for seed in (1, 2)]
Answer = dict[str, Any]


class Asked:
    """A server and a client of it."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.client = openai.OpenAI(base_url=f"{run.url}/v1", api_key="none", max_retries=0, timeout=120)
        self.model = self.client.models.list().data[0].id

    def complete(self, prompt: str, tokens: int = 60, **fields: Any) -> Answer:
        fields = {"temperature": 0} | fields
        return self.client.completions.create(model=self.model, prompt=prompt, max_tokens=tokens, **fields).model_dump()

    def together(self, prompts: list[str], **fields: Any) -> list[Answer]:
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda prompt: self.complete(prompt, **fields), prompts))

    def status(self) -> Answer:
        code, body = self.run.get("/v1/homeserve/status")
        assert code == 200, body
        return dict(body)

    def stop(self) -> None:
        """It must drain and leave nothing. (Servers of one folder share that of their records.)"""
        self.drain()
        assert self.run.left_behind() == []

    def drain(self) -> None:
        census = self.run.get("/v1/homeserve/census")[1]
        assert census["ok"], census
        self.run.send(signal.SIGTERM)
        assert self.run.wait() == 0, self.run.err


def texts(answers: list[Answer]) -> list[str]:
    return [answer["choices"][0]["text"] for answer in answers]


def draft_of(answers: list[Answer]) -> dict[str, int]:
    """Sums over answers."""
    return {
        name: sum(answer["homeserve"]["draft"][name] for answer in answers)
        for name in ("rounds", "drafted", "accepted", "carried")
    }


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Asked]]:
    """`servers(*flags, **environ)`: one server for each way to ask for it, all of the model that counts."""
    box, known = Box(tmp_path_factory.mktemp("drafting")), dict[Any, Asked]()

    def get(*flags: str, **environ: str) -> Asked:
        key = flags, tuple(environ.items())
        if key not in known:
            known[key] = Asked(box.up(str(COUNTER), *SIZES, *flags, **environ))
        return known[key]

    try:
        yield get
        for asked in known.values():
            asked.drain()
        assert [left for asked in known.values() for left in asked.run.left_behind()] == []
    finally:
        box.close()


@pytest.fixture(scope="module")
def plain(servers: Callable[..., Asked]) -> Asked:
    return servers("--draft", "off")


WAYS = [("1",), ("2",), ("3",), ("4",), ("auto",)]


@pytest.mark.parametrize("way", WAYS, ids=" ".join)
def test_greedy_answers_are_those_without_drafts(servers: Any, plain: Asked, way: tuple[str, ...]) -> None:
    """One alone, and several together with a text that cannot be guessed."""
    asked = servers("--draft", *way)
    before = asked.status()["draft"]
    alone = asked.complete(COUNTS[1])
    assert alone["choices"][0]["text"] == plain.complete(COUNTS[1])["choices"][0]["text"]
    assert alone["choices"][0]["text"].startswith(" 1001 1002 1003 1004 1005")
    prompts = [*COUNTS, NONSENSE]
    answers = asked.together(prompts)
    assert texts(answers) == texts(plain.together(prompts))
    counts = draft_of([alone, *answers])
    print(way, counts)
    assert counts["rounds"] > 0 and counts["accepted"] > 0 and counts["carried"] == 0
    after = asked.status()["draft"]
    assert after["enabled"] and after["why_not"] is None
    assert after["most"] == (3 if way == ("auto",) else int(way[0])) and after["adapts"] == (way == ("auto",))
    assert after["uncarried"]["rounds"] - (before["uncarried"]["rounds"] or 0) == counts["rounds"]
    assert after["carried"]["rounds"] == 0


def test_a_count_is_guessed_nearly_always(servers: Any) -> None:
    told = servers("--draft", "3").complete(COUNTS[1], tokens=100)["homeserve"]["draft"]
    assert told["accept_len"] == pytest.approx(1 + told["accepted"] / told["rounds"], abs=1e-4)
    assert told["accept_len"] > 2.5 and len(told["by_position"]) == 3 and min(told["by_position"]) > 0.8


def test_forced_wrong_drafts_cost_no_word(servers: Any, plain: Asked) -> None:
    asked = servers("--draft", "3", **WRONG)
    answers = asked.together([*COUNTS, NONSENSE])
    assert texts(answers) == texts(plain.together([*COUNTS, NONSENSE]))
    counts = draft_of(answers)
    assert counts["rounds"] > 100 and counts["drafted"] >= 2 * counts["rounds"] and counts["accepted"] == 0
    assert all(answer["homeserve"]["draft"]["accept_len"] == 1.0 for answer in answers)
    sampled = [asked.complete(COUNTS[0], **fields) for fields in SAMPLED]
    assert texts(sampled) == texts([plain.complete(COUNTS[0], **fields) for fields in SAMPLED])
    assert asked.status()["draft"]["accept_rate"] == 0


@pytest.mark.parametrize("way", ["1", "3", "auto"])
def test_a_seeded_answer_is_the_same_with_drafts(servers: Any, plain: Asked, way: str) -> None:
    """Drawn with the random number of each position, whoever guessed."""
    prompts, asked, accepted = [COUNTS[0], NONSENSE], servers("--draft", way), 0
    for fields in SAMPLED:
        answers = asked.together(prompts, **fields)
        assert texts(answers) == texts(plain.together(prompts, **fields))
        accepted += draft_of(answers)["accepted"]
    assert accepted > 0
    assert len({answer for fields in SAMPLED for answer in texts([plain.complete(NONSENSE, **fields)])}) == 2


def test_choices_penalties_and_biases_are_the_same_with_drafts(servers: Any, plain: Asked) -> None:
    asked = servers("--draft", "3")
    fields = {
        "n": 3, "temperature": 0.9, "seed": 5, "frequency_penalty": 0.4, "presence_penalty": 0.3,
        "logit_bias": {"49": -1.0, "57": 2.0},
        "extra_body": {"dry_multiplier": 0.6, "dry_allowed_length": 1, "xtc_probability": 0.2},
    }  # fmt: skip
    drafted, told = (each.complete(COUNTS[2], **fields) for each in (asked, plain))
    assert [choice["text"] for choice in drafted["choices"]] == [choice["text"] for choice in told["choices"]]
    assert drafted["usage"] == told["usage"]
    assert drafted["homeserve"]["draft"]["rounds"] > 3 and told["homeserve"]["draft"] is None


def test_log_probabilities_are_the_same_with_drafts(servers: Any, plain: Asked) -> None:
    drafted, told = (each.complete(COUNTS[1], logprobs=3) for each in (servers("--draft", "3"), plain))
    assert drafted["choices"][0]["logprobs"] == told["choices"][0]["logprobs"]
    assert len(drafted["choices"][0]["logprobs"]["tokens"]) == 60 == drafted["usage"]["completion_tokens"]
    assert drafted["homeserve"]["draft"]["accepted"] > 10


@pytest.mark.parametrize("stop", [" 1004", "05 10", "9", "10"])
def test_a_stop_string_ends_an_answer_where_it_does_without_drafts(servers: Any, plain: Asked, stop: str) -> None:
    drafted, told = (each.complete(COUNTS[1], stop=[stop]) for each in (servers("--draft", "4"), plain))
    assert drafted["choices"] == told["choices"] and drafted["choices"][0]["finish_reason"] == "stop"
    assert drafted["usage"] == told["usage"]


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 6])
def test_an_answer_has_as_many_tokens_as_were_asked_for(servers: Any, plain: Asked, tokens: int) -> None:
    drafted, told = (each.complete(COUNTS[1], tokens=tokens) for each in (servers("--draft", "4"), plain))
    assert drafted["choices"] == told["choices"] and drafted["choices"][0]["finish_reason"] == "length"
    assert drafted["usage"]["completion_tokens"] == tokens


def test_an_end_token_that_was_drafted_ends_the_answer(servers: Any, plain: Asked) -> None:
    drafted, told = (each.complete("copy hello:") for each in (servers("--draft", "4"), plain))
    assert drafted["choices"] == told["choices"]
    assert (drafted["choices"][0]["text"], drafted["choices"][0]["finish_reason"]) == (" hello", "stop")
    assert drafted["usage"] == told["usage"]


def test_a_stream_is_the_body_in_pieces_and_its_last_chunk_counts_the_rounds(servers: Any) -> None:
    asked = servers("--draft", "3")
    body = asked.complete(COUNTS[3])
    stream = asked.client.completions.create(
        model=asked.model, prompt=COUNTS[3], max_tokens=60, temperature=0, stream=True
    )
    chunks = [chunk.model_dump() for chunk in stream]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == body["choices"][0]["text"]
    draft = chunks[-1]["homeserve"]["draft"]
    assert draft["accepted"] > 10 and draft["rounds"] == body["homeserve"]["draft"]["rounds"]


def test_a_prompt_that_is_cached_drafts_at_once(servers: Any, plain: Asked) -> None:
    """The drafting block's rows lie with the trunk's, and the state behind them has what its next row goes on from."""
    asked = servers("--draft", "3")
    prompt = COUNTS[1] + plain.complete(COUNTS[1], tokens=200)["choices"][0]["text"]
    first, again = asked.complete(prompt), asked.complete(prompt)
    assert texts([first]) == texts([again]) == texts([plain.complete(prompt)])
    assert first["homeserve"]["cached_tokens"] == 0 < 64 < again["homeserve"]["cached_tokens"]
    for answer in (first, again):
        assert answer["homeserve"]["draft"]["accept_len"] > 3, answer["homeserve"]["draft"]


def test_the_census_counts_the_drafting_block(servers: Any) -> None:
    census = servers("--draft", "3").run.get("/v1/homeserve/census")[1]
    pools = {pool["pool"]: pool for pool in census["ranks"]}
    assert census["ok"] and set(pools) == {"kv", "draft", "state"}
    assert {**pools["draft"], "pool": "kv"} == pools["kv"], "its rows lie at the same slots"


def test_metrics_count_rounds(servers: Any) -> None:
    import urllib.request

    asked = servers("--draft", "3")
    asked.complete(COUNTS[0])
    with urllib.request.urlopen(f"{asked.run.url}/metrics", timeout=30) as answer:
        lines = dict(
            line.rsplit(" ", 1) for line in answer.read().decode().splitlines() if line.startswith("homeserve_draft")
        )
    status = asked.status()["draft"]
    assert float(lines['homeserve_draft_rounds_total{carried="false"}']) == status["uncarried"]["rounds"] > 0
    assert float(lines['homeserve_draft_rounds_total{carried="true"}']) == 0
    drafted, accepted = (float(lines[f"homeserve_draft_{name}_total"]) for name in ("drafted", "accepted"))
    assert status["accept_rate"] == pytest.approx(accepted / drafted, abs=1e-4) and accepted > 0


# -------------------------------------------------------------------------------------------------------- several ranks

RANKS = ("--devices", "cpu:3")


@pytest.mark.parametrize(
    "flags",
    [("--layout", "tensor"), ("--layout", "tensor", "--memory", "unified"), ("--weight-vector", "2,1,1")],
    ids=" ".join,
)
def test_ranks_side_by_side_draft_what_one_does(box: Box, plain: Asked, flags: tuple[str, ...]) -> None:
    asked = Asked(box.up(str(COUNTER), *SIZES, *RANKS, *flags, "--draft", "3"))
    answers = asked.together(COUNTS)
    assert texts(answers) == texts(plain.together(COUNTS))
    counts = draft_of(answers)
    assert counts["accepted"] > counts["rounds"] > 0
    held_as_planned(asked.run, ranks=3, unified="unified" in flags)
    asked.stop()


def test_ranks_in_a_row_serve_without_drafts_and_say_so(box: Box, plain: Asked) -> None:
    asked = Asked(box.up(str(COUNTER), *SIZES, *RANKS, "--layout", "pipeline"))
    answer = asked.complete(COUNTS[1])
    assert texts([answer]) == texts([plain.complete(COUNTS[1])]) and answer["homeserve"]["draft"] is None
    draft = asked.status()["draft"]
    assert draft["enabled"] is False and draft["accept_len"] is None
    assert draft["why_not"] == "several ranks draft in the tensor layout, and they stay in the pipeline layout"
    assert not any("drafts" in rank["lines_mib"] for rank in asked.status()["ranks"])
    asked.stop()


@pytest.mark.parametrize("memory", ["discrete", "unified"])
def test_a_request_that_a_flip_carries_drafts_on(box: Box, plain: Asked, memory: str) -> None:
    """Prefilled in the pipeline layout, where nothing is drafted."""
    flags = ("--memory", memory, "--layout", "pipeline", "--flip", "manual", "--draft", "3")
    asked = Asked(box.up(str(COUNTER), *SIZES, *RANKS, *flags))
    resting = asked.status()["draft"]
    assert (resting["enabled"], resting["why_not"]) == (False, "the ranks are in the pipeline layout")
    want = plain.complete(COUNTS[1], tokens=400)["choices"][0]["text"]
    stream = asked.client.completions.create(
        model=asked.model, prompt=COUNTS[1], max_tokens=400, temperature=0, stream=True
    )
    chunks = [next(stream).model_dump()]
    record = flipped(asked, "tensor")
    chunks += [chunk.model_dump() for chunk in stream]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == want
    draft = chunks[-1]["homeserve"]["draft"]
    assert chunks[-1]["homeserve"]["flips_crossed"] == 1 and record["live"]["draft_rows"] == record["live"]["rows"] > 0
    assert draft["carried"] == draft["rounds"] > 0 and draft["accept_len"] > 3
    status = asked.status()["draft"]
    assert status["enabled"] and status["why_not"] is None
    assert status["carried"]["rounds"] == draft["rounds"] and status["first"]["rounds"] == 1
    assert status["first"]["accept_len"] == 4.0, "its first round is as good as any"
    held_as_planned(asked.run, ranks=3, unified=memory == "unified", flips=True)
    asked.stop()


def flipped(asked: Asked, to: str) -> Answer:
    made = asked.client.post("/homeserve/flip", body={"to": to}, cast_to=dict[str, Any])

    def over() -> Answer | None:
        record: Answer = asked.run.get(str(made["url"]))[1]
        return record if record["state"] in ("committed", "abandoned") else None

    record: Answer = wait_until("the flip", over)
    assert record["state"] == "committed", record
    return record


# --------------------------------------------------------------------------------------------------- memory, refusals


def held_as_planned(run: Run, *, ranks: int, unified: bool = False, flips: bool = False) -> None:
    """Every line that is a mapping has the bytes that were planned, in whole huge pages, on each rank."""
    rows = {row["line"]: row for row in run.get("/v1/homeserve/budget")[1]["measured"]}
    several = [f", rank {rank}" for rank in range(ranks)] if ranks > 1 else [""]
    names = [f"{line}{rank}" for rank in several for line in ("workspace", "drafts")]
    pools = [""] if unified else several
    names += [f"{line}{rank}" for rank in pools for line in ("weights", "kv", "state")]
    for name in names:
        row = rows[name]
        assert row["measured_mib"] is not None, row
        # In unified memory ranks pack a few small things for themselves, each in huge pages of its own; with a flip
        # there are buffers of two programs.
        spare = 2.2 * ((ranks + 1) if unified else 2 if flips and name.startswith("workspace") else 1)
        assert -0.3 <= row["measured_mib"] - row["predicted_mib"] <= spare, row


@pytest.mark.parametrize("way", ["off", "1", "4"])
def test_what_drafting_holds_was_planned(servers: Any, way: str) -> None:
    asked = servers("--draft", way)
    rows = {row["line"]: row for row in asked.run.get("/v1/homeserve/budget")[1]["measured"]}
    assert ("drafts" in rows) == (way != "off")
    if way != "off":
        held_as_planned(asked.run, ranks=1)
        document = asked.run.get("/v1/homeserve/budget")[1]["plan"]["drafting"]
        assert document == {"drafts": int(way), "why_not": None}


def test_a_number_of_drafts_without_a_block_is_refused_by_name(box: Box, tiny: str) -> None:
    run = box.run("up", tiny, "--port", "0", "--draft", "3")
    assert run.process.returncode == 2 and "--draft 3: the model has no drafting block" in run.err
    assert "starting the worker" not in run.out and run.left_behind() == []


@pytest.mark.parametrize("name", ["blk.6.nextn.hnorm.weight", "blk.6.attn_v.weight", "blk.6.nextn.eh_proj.weight"])
def test_a_block_that_lacks_a_tensor_serves_without_and_says_so(
    box: Box, plain: Asked, tmp_path: Path, name: str
) -> None:
    path = without_tensor(COUNTER, tmp_path / "lacking.gguf", name)
    refused = box.run("up", str(path), "--port", "0", "--draft", "1")
    assert refused.process.returncode == 2 and name in refused.err and "--draft 1: " in refused.err
    asked = Asked(box.up(str(path), *SIZES))
    assert texts([asked.complete(COUNTS[1])]) == texts([plain.complete(COUNTS[1])])
    status = asked.status()
    assert status["draft"]["enabled"] is False and name in status["draft"]["why_not"]
    (event,) = status["events"]
    assert event["kind"] == "no_drafting" and event["text"].startswith("served without drafting: ")
    assert name in event["text"] and "served without drafting" in asked.run.err
    asked.stop()


def test_a_model_without_a_block_is_no_event(box: Box, tiny: str) -> None:
    asked = Asked(box.up(tiny, "--kv-tokens", "512"))
    status = asked.status()
    assert status["draft"]["why_not"] == "the model has no drafting block" and status["events"] == []
    assert "served without drafting" in asked.run.err
    asked.stop()
