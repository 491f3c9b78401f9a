"""`--draft` and HOMESERVE_DRAFTS: what they take, and what they refuse by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from homeserve.errors import SettingError
from homeserve.settings import Settings, load, why_no_drafting

IN_A_PIPELINE = "several ranks draft in the tensor layout, and they stay in the pipeline layout"


def settings(words: str, **environ: str) -> Settings:
    return load(words.split(), environ, Path("/"))


@pytest.mark.parametrize(
    ("word", "taken"),
    [("auto", "auto"), ("AUTO", "auto"), ("off", "off"), ("none", "off"), ("1", "1"), ("8", "8"), ("03", "3")],
)
def test_what_is_taken(word: str, taken: str) -> None:
    assert settings(f"--draft {word}").draft == taken


def test_without_a_word_as_many_as_pay_are_drafted() -> None:
    assert settings("").draft == "auto" and why_no_drafting(settings("")) == ""


@pytest.mark.parametrize(
    ("word", "what"),
    [
        ("0", "--draft: 0 is outside 1 to 8, the drafts for which a round has room"),
        ("9", "--draft: 9 is outside 1 to 8, the drafts for which a round has room"),
        ("-1", "--draft: -1 is outside 1 to 8, the drafts for which a round has room"),
        (
            "9" * 5000,
            "--draft: 99999999999999999999… (5000 digits) is outside 1 to 8, the drafts for which a round has",
        ),
        ("1.5", "--draft: '1.5' is not auto, off or a number of drafts"),
        ("many", "--draft: 'many' is not auto, off or a number of drafts"),
        ("²", "--draft: '²' is not auto, off or a number of drafts"),
    ],
)
def test_what_is_refused(word: str, what: str) -> None:
    with pytest.raises(SettingError) as caught:
        load([f"--draft={word}"], {}, "/")
    assert caught.value.message.startswith(what)
    assert (caught.value.field, caught.value.fix) == ("draft", "use auto, off, or 1 to 8")


@pytest.mark.parametrize("words", ["", "--layout pipeline", "--pipeline-ratio 2,1", "--deterministic"])
def test_ranks_that_stay_in_a_pipeline_are_not_asked_to_draft(words: str) -> None:
    ranks = f"--devices cpu:2 {words}{' --flip off --layout pipeline' * (not words)}"
    assert why_no_drafting(settings(ranks)) == IN_A_PIPELINE, "auto serves without, and says so"
    with pytest.raises(SettingError) as caught:
        settings(f"{ranks} --draft 3")
    assert caught.value.message == f"--draft 3: {IN_A_PIPELINE}" and caught.value.field == "draft"
    with pytest.raises(SettingError, match="^HOMESERVE_DRAFT 2: several ranks"):
        settings(ranks, HOMESERVE_DRAFT="2")


@pytest.mark.parametrize(
    "words",
    [
        "",
        "--devices cpu:2",
        "--devices cpu:2 --layout tensor",
        "--devices cpu:2 --layout pipeline --flip manual",
        "--devices cpu:2 --pipeline-ratio 2,1 --flip auto",
        "--deterministic",
    ],
)
def test_one_rank_the_tensor_layout_and_ranks_that_flip_draft(words: str) -> None:
    assert why_no_drafting(settings(f"{words} --draft 3")) == ""


def test_off_says_where_it_was_said() -> None:
    assert why_no_drafting(settings("--draft off")) == "--draft off"
    assert why_no_drafting(settings("", HOMESERVE_DRAFT="off")) == "HOMESERVE_DRAFT off"


@pytest.mark.parametrize("text", ["wrong", "accept:0", "accept:2", "accept:8"])
def test_drafts_for_tests_need_the_switch_for_tests(text: str) -> None:
    assert settings("", HOMESERVE_DRAFTS=text, HOMESERVE_TESTING="1").drafts_test == text
    with pytest.raises(SettingError, match="HOMESERVE_DRAFTS is for tests and needs HOMESERVE_TESTING=1") as caught:
        settings("", HOMESERVE_DRAFTS=text)
    assert caught.value.field == "drafts_test"
    with pytest.raises(SettingError, match=f"HOMESERVE_DRAFTS {text}: nothing is drafted with --draft off"):
        settings("--draft off", HOMESERVE_DRAFTS=text, HOMESERVE_TESTING="1")


@pytest.mark.parametrize("text", ["right", "accept", "accept:", "accept:9", "accept:-1", "accept:11", "accept:²"])
def test_other_drafts_for_tests_are_refused(text: str) -> None:
    with pytest.raises(SettingError, match="is not known") as caught:
        settings("", HOMESERVE_DRAFTS=text, HOMESERVE_TESTING="1")
    assert caught.value.fix == "use wrong, or accept:N with N from 0 to 8"
    assert settings("").warnings == () and settings("", HOMESERVE_DRAFTS="wrong", HOMESERVE_TESTING="1").warnings == ()
