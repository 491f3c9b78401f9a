"""The terminal chat's pure parts: blocks of Markdown, cleaning, orders, fields, the conversation, kept history."""

from __future__ import annotations

import io
import json
import stat
from pathlib import Path

import pytest

from homeserve.chat.blocks import BLOCK_CHARS_MAX, Blocks
from homeserve.chat.clean import cleaned
from homeserve.chat.conversation import MESSAGES_MAX, BadFile, Conversation
from homeserve.chat.fields import field_named, value_of
from homeserve.chat.line import HISTORY_BYTES_MAX, HISTORY_MAX, History, PipedLines
from homeserve.chat.orders import ORDERS, BadOrder, Given, help_text, parsed
from homeserve.errors import SettingError

# ------------------------------------------------------------------------------------------------------------ blocks

ANSWER = (
    "# Title\n\nFirst.\nStill first.\n\n```py\na = 1\n\nb = 2\n```\nBehind.\n\n1. one\n\n    more of one\n2. two\n"
    "\nEnd\n"
)
BLOCKS = [
    "# Title\n",
    "First.\nStill first.\n",
    "```py\na = 1\n\nb = 2\n```\n",
    "Behind.\n",
    "1. one\n\n    more of one\n2. two\n\n",
]


@pytest.mark.parametrize("size", [1, 2, 3, 7, len(ANSWER)])
def test_blocks_do_not_depend_on_how_the_text_comes(size: int) -> None:
    blocks = Blocks()
    finished = [each for at in range(0, len(ANSWER), size) for each in blocks.feed(ANSWER[at : at + size])]
    assert finished == BLOCKS
    assert blocks.open == "End\n" and blocks.rest() == "End\n" and blocks.open == ""


def test_a_fence_ends_with_its_own_kind_only() -> None:
    blocks = Blocks()
    assert blocks.feed("````\n```\n~~~~\n\n") == []
    assert blocks.feed("`````\n") == ["````\n```\n~~~~\n\n`````\n"]


def test_a_long_fence_is_cut_into_fences() -> None:
    blocks = Blocks()
    line = "x" * 99
    finished = blocks.feed("```c\n" + f"{line}\n" * 100)
    assert len(finished) == 2 and all(each.startswith("```c\n") and each.endswith("\n```\n") for each in finished)
    assert "".join([*finished, blocks.open]).count(line) == 100


@pytest.mark.parametrize("filler", ["x", "word "])
def test_what_is_open_stays_short_also_in_a_line_without_an_end(filler: str) -> None:
    blocks, finished = Blocks(), 0
    for _ in range(4 * BLOCK_CHARS_MAX // len(filler)):
        finished += sum(map(len, blocks.feed(filler)))
        assert len(blocks.open) <= 2 * BLOCK_CHARS_MAX
    assert finished > 2 * BLOCK_CHARS_MAX


# ---------------------------------------------------------------------------------------------------------- cleaning


def test_no_control_character_passes() -> None:
    every = "".join(map(chr, range(0x100)))
    shown = cleaned(every)
    left = {char for char in shown if ord(char) < 0x20 or 0x7F <= ord(char) < 0xA0}
    assert left == {"\n", "\t"}
    assert cleaned("\x1b]0;evil\x07 a\r\nb\x9b2J") == "^[]0;evil^G a\nb\\x9b2J"


def test_what_turns_the_direction_of_writing_goes_and_words_stay() -> None:
    assert cleaned("a\u202eb\u2066c") == "abc"
    assert cleaned("日本語 👩‍🚀 é שלום") == "日本語 👩‍🚀 é שלום"


# ------------------------------------------------------------------------------------------------------------ orders


@pytest.mark.parametrize(
    ("line", "given"),
    [
        ("/reset", Given("reset", "")),
        ("/new", Given("reset", "")),
        ("/quit", Given("exit", "")),
        ("/system  Be kind. ", Given("system", "Be kind.")),
        ("/set top_k 5", Given("set", "top_k 5")),
        ("/model", Given("model", "")),
        ("what is /reset?", None),
        ("/usr/bin/env does what?", None),
        ("/reset\nand more lines", None),
    ],
)
def test_a_line_is_an_order_or_a_question(line: str, given: Given | None) -> None:
    assert parsed(line) == given


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/rest", "did you mean /reset?"),
        ("/zzzz", "there is no /zzzz; /help"),
        ("/save", "/save FILE: FILE is missing"),
        ("/undo it", "/undo takes nothing"),
    ],
)
def test_a_wrong_order_says_what_there_is(line: str, words: str) -> None:
    with pytest.raises(BadOrder, match=r"^[\s\S]*$") as caught:
        parsed(line)
    assert words in str(caught.value)


@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_help_names_every_order_and_fits(width: int) -> None:
    text = help_text(width)
    assert all(order.usage in text for order in ORDERS)
    assert all(len(line) <= width for line in text.splitlines())


def test_fields_are_checked_and_near_names_told() -> None:
    assert field_named("Top-K") == "top_k" and value_of("top_k", "5") == 5
    with pytest.raises(SettingError, match="did you mean temperature"):
        field_named("temprature")
    with pytest.raises(SettingError):
        value_of("temperature", "9")


# ------------------------------------------------------------------------------------------------------ conversation


def test_an_unanswered_question_is_kept_and_an_answer_that_was_cut_counts() -> None:
    talk = Conversation("Be kind.")
    assert talk.asking("one") == [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "one"}]
    talk.answered("")
    assert talk.unanswered == "one" and talk.messages == []
    assert talk.undo() == "one" and talk.unanswered == ""
    talk.asking("two")
    talk.answered("half an ans")
    assert [each["content"] for each in talk.asking("three")] == ["Be kind.", "two", "half an ans", "three"]
    assert (talk.undo(), talk.undo(), talk.undo()) == ("three", "two", "")


def test_a_reset_keeps_the_system_message_alone() -> None:
    talk = Conversation("s", unanswered="q")
    talk.asking("a")
    talk.answered("b")
    talk.reset()
    assert (talk.system, talk.messages, talk.undo()) == ("s", [], "")


def test_a_request_has_a_bound() -> None:
    talk = Conversation("s")
    for number in range(MESSAGES_MAX):
        talk.asking(str(number))
        talk.answered("a")
    asked = talk.asking("last")
    assert len(asked) == MESSAGES_MAX and asked[0]["role"] == "system" and asked[1]["role"] == "user"


def test_what_is_saved_can_be_read_again() -> None:
    talk = Conversation("s")
    talk.asking("q\n`x`")
    talk.answered("a")
    other = Conversation()
    other.read(talk.as_json())
    assert other == talk
    assert talk.as_markdown() == "*s*\n\n## You\n\nq\n`x`\n\n## Answer\n\na\n"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# Markdown",
        "[]",
        "[" * 100_000,
        '{"system": "", "messages": [{"role": "user", "content": "x"}]}',
        '{"system": "", "messages": [{"role": "user", "content": 1}, {"role": "assistant", "content": ""}]}',
        '{"system": null, "messages": []}',
    ],
)
def test_another_file_changes_nothing(text: str) -> None:
    talk = Conversation("s", unanswered="q")
    with pytest.raises(BadFile):
        talk.read(text)
    assert talk == Conversation("s", unanswered="q")


# ------------------------------------------------------------------------------------------------------------- lines


def test_a_pipe_has_a_question_a_line_or_between_quotes() -> None:
    lines = PipedLines(io.StringIO('one\n\n"""two\n  more\n"""\n"""\nthree\n"""\n"""short"""\n"""cut'), None)
    read = list(iter(lines.read, None))
    assert read == ["one", "", "two\n  more", "three", "short", "cut"]
    assert not lines.by_hand


def test_history_is_the_users_alone_and_bounded(tmp_path: Path) -> None:
    path = tmp_path / "state" / "history"
    told: list[str] = []
    history = History(path, told.append)
    assert history.load() == []
    history.add("a\nb")
    history.add("日本")
    assert History(path, told.append).load() == ["a\nb", "日本"]
    path.chmod(0o644)
    history.add("c")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.write_text("".join(json.dumps(str(number)) + "\n" for number in range(3 * HISTORY_MAX)))
    assert history.load() == [str(number) for number in range(2 * HISTORY_MAX, 3 * HISTORY_MAX)]
    assert len(path.read_text().splitlines()) == HISTORY_MAX and told == []


def test_a_broken_or_huge_history_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    path = tmp_path / "history"
    path.write_bytes(b"\xff\xfe\n{}\n" + b'"x"\n' + b"not json\n" + b'"y"')
    assert History(path, pytest.fail).load() == ["x", "y"]
    path.write_bytes(b"z" * (2 * HISTORY_BYTES_MAX) + b'\n"last"\n')
    assert History(path, pytest.fail).load() == ["last"]
    assert path.stat().st_size < 100, "what is no history is not carried on"


def test_a_history_that_cannot_be_kept_is_told_once(tmp_path: Path) -> None:
    told: list[str] = []
    history = History(tmp_path, told.append)  # a folder
    assert history.load() == []
    history.add("x")
    history.add("y")
    assert len(told) == 1 and str(tmp_path) in told[0]
