"""The drafting test of scripts/bench: who is asked when and with which settings, and what is made of the answers."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_bench_ranks import Kept

from homeserve.bench import client
from homeserve.bench.prompts import Prompts

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts" / "benchmarks"))

import bench  # noqa: E402
import document  # noqa: E402
import draft_tests  # noqa: E402
import report  # noqa: E402
import subjects  # noqa: E402
from measures import DRAFTING  # noqa: E402

MODEL = f"{subjects.DRAFTING_MODEL}, drafting"
PLAIN_S, ROUND_S = 0.1, 0.15


class Asked:
    """Stands for a server whose rounds take as long as one and a half plain tokens."""

    def __init__(self, draft: str, forced: str = "") -> None:
        self.engine = draft_tests.PLAIN if draft == "off" else "homeserve"
        self.url, self.settings = f"{draft} {forced}", f"--draft {draft}"
        self.draft, self.started = draft, 0
        word = forced.rpartition(":")[2]
        self.counts = 0 if forced in ("", "wrong") else int(word)

    def start(self) -> None:
        self.started += 1

    def stop(self) -> None:
        self.started -= 1

    def timing(self, tokens: int) -> client.Timing:
        if self.draft == "off":
            arrived = tuple((1 + PLAIN_S * at, 1 + at) for at in range(tokens))
            return client.Timing(0.0, 1.0, arrived[-1][0], tokens, 8, 1, arrived)
        each = self.counts + 1
        rounds = (tokens - 1) // each
        arrived = tuple((1 + ROUND_S * at, 1 + each * at) for at in range(rounds + 1))
        drafts = {"rounds": rounds, "accepted": rounds * self.counts}
        return client.Timing(0.0, 1.0, arrived[-1][0], 1 + each * rounds, 8, 1, arrived, drafts)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The servers, in the order in which they were asked."""
    order: list[str] = []

    def complete(server: Asked, prompt: Any, tokens: int, counted: bool = False) -> client.Timing:
        order.append(server.url)
        return server.timing(tokens)

    monkeypatch.setattr(draft_tests, "complete", complete)
    return order


def measured(wanted: str, run: Callable[[draft_tests.Drafting], None], answer: int = 25) -> tuple[Kept, list[Asked]]:
    kept, made = Kept(MODEL), []

    def start(draft: str, forced: str = "") -> Asked:
        made.append(Asked(draft, forced))
        return made[-1]

    prompts = Prompts(random.Random(1), range(1000), answer)
    parts: Any = (Asked("off"), start, 2, prompts, kept, frozenset(wanted.split(",")))
    run(draft_tests.Drafting(*parts))
    assert all(server.started == 0 for server in made), "each is stopped"
    return kept, made


def of(kept: Kept, engine: str) -> dict[tuple[str, int], float]:
    return {(each.test, each.run): each.value for each in kept.samples if each.engine == engine}


def test_forced_rounds_are_timed_beside_plain_tokens_in_turns(asked: list[str]) -> None:
    kept, made = measured("draft_2,draft_3,draft_3of0", draft_tests.Drafting.forced)
    assert [server.url for server in made] == ["2 accept:2", "3 accept:2", "3 wrong"]
    assert asked[2:6] == ["2 accept:2", "off ", "off ", "2 accept:2"], "behind an answer of each that does not count"
    ours, plain = of(kept, "homeserve"), of(kept, draft_tests.PLAIN)
    assert ours["draft_3", 0] == pytest.approx(3 / ROUND_S) and plain["draft_3", 0] == pytest.approx(1 / PLAIN_S)
    assert ours["draft_3of0", 1] == pytest.approx(1 / ROUND_S)
    assert {test: value for (test, _), value in ours.items() if test.endswith("_ms")} == {
        name: pytest.approx(1000 * ROUND_S) for name in ("draft_2_ms", "draft_3_ms", "draft_3of0_ms")
    }
    model = report.report(kept.samples)["models"][0]
    ratios = {ratio["test"]: ratio for ratio in model["ratios"]}
    assert ratios["draft_3"]["median"] == pytest.approx(2.0) and ratios["draft_3"]["goal"] == 1.6
    assert ratios["draft_3of0"]["goal"] is None and ratios["draft_3_ms"]["median"] == pytest.approx(0.667)
    drafts = {(row["engine"], row["test"]): row["draft"] for row in model["rows"]}
    assert drafts["homeserve", "draft_2"] == "2" and drafts[draft_tests.PLAIN, "draft_2"] == "off"


def test_rounds_that_counted_other_drafts_than_they_were_to_are_no_measurement() -> None:
    forced = draft_tests.Forced("draft_3", 3, 2)
    right = Asked("3", "accept:2").timing(25)
    draft_tests.check(forced, right)
    for rounds, accepted in ((8, 3), (8, 17), (0, 0)):
        wrong = client.Timing(*(0.0, 1.0, 2.0, 25, 8), draft={"rounds": rounds, "accepted": accepted})
        with pytest.raises(RuntimeError, match="where 2 of each were to"):
            draft_tests.check(forced, wrong)


def test_what_nobody_foresees_is_timed_behind_what_is_learnt_from(asked: list[str]) -> None:
    kept, made = measured("draft_new", draft_tests.Drafting.new)
    assert [server.url for server in made] == ["auto "]
    assert asked[2:] == ["off ", "auto ", "off "] * 2
    assert of(kept, "homeserve")["draft_new", 0] == pytest.approx(1 / ROUND_S)
    model = report.report(kept.samples)["models"][0]
    assert (model["ratios"][0]["goal"], model["ratios"][0]["met"]) == (0.95, False)
    assert model["noise"]["draft_new"]["median"] == 1.0


def test_speeds_by_content_are_of_several_texts_together(asked: list[str]) -> None:
    chosen = draft_tests.contents(draft_tests.COUNTER)
    kept, made = measured("draft_counting,draft_code", lambda test: test.by_content(chosen))
    assert [server.url for server in made] == ["auto ", "3 "]
    ours = of(kept, "homeserve")
    speeds = {(f"draft_{kind}", run) for kind in ("counting", "code") for run in (0, 1)}
    assert ours.keys() == speeds | {("draft_counting_len", 0), ("draft_code_len", 0)}
    assert ours["draft_counting", 0] == pytest.approx(1 / ROUND_S) and ours["draft_counting_len", 0] == 1.0
    two = client.Timing(0.0, 1.0, 2.0, 31, 8, 1, (), {"rounds": 10, "accepted": 20})
    slow = client.Timing(0.0, 1.0, 5.0, 21, 8, 1, (), {"rounds": 20, "accepted": 0})
    assert draft_tests.together([two, slow]) == 10.0
    assert draft_tests.accept_length([two, slow]) == pytest.approx(1 + 20 / 30)


def test_tokens_behind_the_first_ones_are_timed_from_their_event() -> None:
    arrived = ((1.0, 1), (2.0, 40), (3.0, 70), (5.0, 100))
    timing = client.Timing(0.0, 1.0, 5.0, 100, 8, 1, arrived)
    assert timing.tok_s_after(64) == 15.0
    with pytest.raises(client.HeldBack, match="100 of 100"):
        timing.tok_s_after(80)


def test_what_a_model_is_for_and_how_its_servers_are_started(tmp_path: Path) -> None:
    asked = DRAFTING
    large, counter = Path("qwen35-nextn.Q4_K_M.gguf"), draft_tests.COUNTER
    assert draft_tests.parts(large, asked, every=False) == draft_tests.BY_TIME
    assert draft_tests.parts(counter, asked, every=False) == {each.name for each in draft_tests.contents(counter)}
    assert draft_tests.parts(large, asked, every=True) >= draft_tests.BY_TIME | {"draft_prose", "draft_code"}
    server = draft_tests.server_of(large, 2, tmp_path, ("homeserve",), "avx2", "3", "accept:1")
    assert server.command[-4:] == ["--draft", "3", "--isa", "avx2"]
    assert server.environ == {"HOMESERVE_TESTING": "1", "HOMESERVE_DRAFTS": "accept:1"}
    assert draft_tests.server_of(large, 2, tmp_path, ("homeserve",), "", "off").environ == {}


def test_which_models_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subjects.Subject, "file", lambda self: Path(f"{self.name}.gguf"))

    def names(*arguments: str) -> list[str]:
        monkeypatch.setattr(sys, "argv", ["scripts/bench", *arguments])
        return [name for name, _ in bench.drafting_models(bench.arguments())]

    assert names("--tests", "draft") == [subjects.DRAFTING_MODEL, "counter"]
    assert names("--tests", "draft_counting") == ["counter"]
    assert names("--tests", "draft_3,draft_new") == [subjects.DRAFTING_MODEL]
    assert names("--tests", "draft", "--model", "mine.gguf") == ["mine"]


def test_drafting_has_a_table_of_its_own(asked: list[str]) -> None:
    kept, _ = measured("draft_3", draft_tests.Drafting.forced)
    page = document.summary(document.latest(kept.samples))
    assert (
        f"| {subjects.DRAFTING_MODEL}, drafting (abc) |" in page and "| 3 drafts, 2 count | **2.00** of 1.6 |" in page
    )
