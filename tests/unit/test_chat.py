"""A conversation in the terminal, without one: what was said, orders, blocks, and what a screen and a history do."""

from __future__ import annotations

import io
import json
import random
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from homeserve.chat.blocks import BLOCK_CHARS_MAX, Blocks
from homeserve.chat.clean import cleaned
from homeserve.chat.client import Client, Facts, ListedModel, Text, Thought
from homeserve.chat.conversation import BadFile, Conversation, Message
from homeserve.chat.fields import field_named, value_of
from homeserve.chat.line import HISTORY_MAX, History, PipedLines
from homeserve.chat.orders import ORDERS, BadOrder, Given, help_text, parsed
from homeserve.chat.screen import PlainScreen, RichScreen, facts_line
from homeserve.chat.session import Session
from homeserve.errors import SettingError

# ------------------------------------------------------------------------------------------------------- conversation


def said(*texts: str) -> Conversation:
    made = Conversation("Be brief.")
    for question, answer in zip(texts[::2], texts[1::2], strict=True):
        made.asking(question)
        made.answered(answer)
    return made


def test_a_request_has_all_that_was_said_and_the_question() -> None:
    asked = said("a", "b").asking("c")
    assert [each["role"] for each in asked] == ["system", "user", "assistant", "user"]
    assert [each["content"] for each in asked] == ["Be brief.", "a", "b", "c"]


def test_a_question_without_an_answer_is_kept_and_no_part_of_the_next_request() -> None:
    made = said("a", "b")
    made.asking("lost?")
    made.answered("")
    assert made.unanswered == "lost?" and len(made.messages) == 2
    assert [each["content"] for each in made.asking("next")] == ["Be brief.", "a", "b", "next"]


def test_undo_takes_back_the_unanswered_one_first() -> None:
    made = said("a", "b", "c", "d")
    made.asking("e")
    assert [made.undo(), made.undo(), made.undo(), made.undo()] == ["e", "c", "a", ""]
    assert not made.messages


def test_what_is_saved_is_read_again() -> None:
    made, again = said("a", "b\n\n## You\n\nc"), Conversation()
    again.read(made.as_json())
    assert again == made
    assert made.as_markdown().startswith("*Be brief.*\n\n## You\n\na\n\n## Answer\n\nb")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[1]",
        '{"system": "", "messages": [{"role": "user"}]}',
        '{"system": 3, "messages": []}',
        '{"system": "", "messages": [{"role": "user", "content": 1}, {"role": "assistant", "content": "x"}]}',
        '{"system": "", "messages": [{"role": "assistant", "content": "x"}, {"role": "user", "content": "y"}]}',
    ],
)
def test_a_file_that_is_no_conversation_changes_nothing(text: str) -> None:
    made = said("a", "b")
    with pytest.raises(BadFile):
        made.read(text)
    assert made == said("a", "b")


# --------------------------------------------------------------------------------------------------------------- orders


def test_every_order_is_known_and_done_by_the_session() -> None:
    for order in ORDERS:
        assert parsed(order.usage.replace("[", "").replace("]", "")) is not None
        assert order.name == "exit" or callable(getattr(Session, f"_order_{order.name}"))


@pytest.mark.parametrize("line", ["hello", "/usr/bin/env is what?", "/etc/hosts", "/help\nme with this", "a /help"])
def test_a_question_is_no_order(line: str) -> None:
    assert parsed(line) is None


def test_an_unknown_order_names_the_nearest() -> None:
    with pytest.raises(BadOrder, match=r"no /hlep; did you mean /help\?"):
        parsed("/hlep")
    with pytest.raises(BadOrder, match="lists what there is"):
        parsed("/qqqqq")
    with pytest.raises(BadOrder, match="takes nothing"):
        parsed("/undo twice")
    with pytest.raises(BadOrder, match="FILE is missing"):
        parsed("/save")
    assert parsed("/quit") == Given("exit", "") and parsed("/set top-p 0.5") == Given("set", "top-p 0.5")


def test_help_fits_a_narrow_terminal() -> None:
    assert max(map(len, help_text(200).splitlines())) > 60
    assert all(line.startswith(("  ", "/")) for line in help_text(40).splitlines())


def test_fields_are_checked() -> None:
    assert field_named("Top-P") == "top_p" and value_of("top_p", "0.5") == 0.5
    with pytest.raises(SettingError, match="did you mean temperature"):
        field_named("temprature")
    with pytest.raises(SettingError, match="outside"):
        value_of("temperature", "3")


# --------------------------------------------------------------------------------------------------------------- blocks

MARKDOWN = """# Title

A paragraph
of two lines.

- one
- two

```python
a = 1

b = 2
```
After it.

~~~
```
~~~
last"""


def test_blocks_end_at_empty_lines_and_fences_and_nothing_is_lost() -> None:
    blocks = Blocks()
    finished = blocks.feed(MARKDOWN)
    assert finished[3] == "```python\na = 1\n\nb = 2\n```\n" and finished[5] == "~~~\n```\n~~~\n"
    assert blocks.rest() == "last" and blocks.open == ""


def test_blocks_do_not_depend_on_how_the_text_comes() -> None:
    chance = random.Random(3)
    whole = Blocks()
    expected = [*whole.feed(MARKDOWN), whole.rest()]
    for _ in range(200):
        blocks, found, at = Blocks(), [], 0
        while at < len(MARKDOWN):
            step = chance.randint(1, 9)
            found += blocks.feed(MARKDOWN[at : at + step])
            at += step
        assert [*found, blocks.rest()] == expected


def test_a_block_without_an_end_is_cut_and_stays_in_its_fence() -> None:
    blocks = Blocks()
    finished = blocks.feed("```python\n" + "x = 1\n" * 4000)
    assert len(finished) > 3
    assert all(block.startswith("```python\n") and block.endswith("```\n") for block in finished)
    assert all(len(block) < BLOCK_CHARS_MAX + 40 for block in finished)
    assert sum(block.count("x = 1") for block in finished) + blocks.rest().count("x = 1") == 4000


# --------------------------------------------------------------------------------------------------------------- screen


def test_no_order_of_a_model_reaches_the_terminal() -> None:
    hostile = "\x1b]0;owned\x07\x1b[2J\x9b31m\x00\x7f\r\u202etext\u2066 \tok\n"
    assert cleaned(hostile) == "^[]0;owned^G^[[2J\\x9b31m^@^?text \tok\n"
    out = io.StringIO()
    screen = PlainScreen(out, io.StringIO())
    screen.begin()
    screen.text(hostile)
    screen.end()
    assert "\x1b" not in out.getvalue() and out.getvalue().endswith("ok\n")


def rich_screen(width: int) -> tuple[RichScreen, io.StringIO, list[str]]:
    from rich.console import Console

    out, echo, now = io.StringIO(), _Echo(), iter(range(1 << 20))
    console = Console(file=out, force_terminal=True, width=width, height=12, color_system=None, legacy_windows=False)
    return RichScreen(console, echo, clock=lambda: float(next(now))), out, echo.did  # type: ignore[arg-type]


class _Echo:
    def __init__(self) -> None:
        self.did: list[str] = []

    def off(self) -> None:
        self.did.append("off")

    def restore(self) -> None:
        self.did.append("restore")


@pytest.mark.parametrize("width", [20, 40, 100])
def test_markdown_comes_out_whole_and_in_order(width: int) -> None:
    screen, out, echo = rich_screen(width)
    screen.begin()
    for at in range(0, len(MARKDOWN), 5):
        screen.text(MARKDOWN[at : at + 5])
    screen.end()
    stays = out.getvalue().rpartition("\x1b[2K")[0] + out.getvalue().rpartition("\x1b[2K")[2]
    places = [stays.rindex(word) for word in ("Title", "paragraph", "one", "two", "After it", "last")]
    assert places == sorted(places)
    assert echo == ["off", "restore"]


def test_thoughts_give_way_to_a_line() -> None:
    screen, out, _ = rich_screen(80)
    screen.begin()
    screen.thought("first I \x1b[31mthink")
    screen.text("Then I speak.")
    screen.end()
    assert "thought for" in out.getvalue() and "^[[31mthink" in out.getvalue()
    assert out.getvalue().rindex("Then I speak") > out.getvalue().rindex("thought for")


def test_numbers_that_nobody_told_are_left_out() -> None:
    assert facts_line(Facts()) == ""
    told = facts_line(Facts(completion_tokens=3, decode_tok_s=10.04, ttft_ms=12.4, finish="length", restarts=1))
    assert (
        told == "3 tokens · 10.0 a second · first after 12 ms · a worker was restarted · cut off by the limit of tokens"
    )


# ---------------------------------------------------------------------------------------------------------------- lines


def test_what_was_typed_is_kept_for_the_user_alone(tmp_path: Path) -> None:
    path = tmp_path / "state" / "chat_history"
    history = History(path, pytest.fail)
    assert history.load() == []
    history.add("two\nlines")
    history.add("ümlaut")
    assert History(path, pytest.fail).load() == ["two\nlines", "ümlaut"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_history_is_bounded_and_what_is_broken_in_it_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "chat_history"
    lines = [json.dumps(str(number)) for number in range(3 * HISTORY_MAX)]
    path.write_bytes(b"\xff\xfe\n{}\nnull\n" + "\n".join(lines).encode() + b'\n"half')
    kept = History(path, pytest.fail).load()
    assert kept == [str(number) for number in range(2 * HISTORY_MAX, 3 * HISTORY_MAX)]
    assert len(path.read_text().splitlines()) == HISTORY_MAX


def test_a_history_that_cannot_be_written_costs_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    told: list[str] = []
    history = History(tmp_path / "file" / "chat_history", told.append)
    history.add("x")
    history.add("y")
    assert len(told) == 1 and "what is typed is not kept" in told[0]
    folder = History(tmp_path, told.append)
    assert folder.load() == [] and len(told) == 2


def test_lines_of_a_pipe_are_messages_and_quotes_join_them() -> None:
    lines = PipedLines(io.StringIO('one\n"""\ntwo\n\n three\n"""\n\nlast'), None)
    assert [lines.read() for _ in range(5)] == ["one", "two\n\n three", "", "last", None]


def test_quotes_that_never_end_end_with_the_file() -> None:
    prompts = io.StringIO()
    lines = PipedLines(io.StringIO('"""\nopen'), prompts)
    assert lines.read() == "open" and lines.read() is None
    assert prompts.getvalue() == "> . . > "


# -------------------------------------------------------------------------------------------------------------- session


class FakeClient:
    """Answers from a list; an exception of it is raised."""

    url = "http://x"

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[list[Any], dict[str, Any]]] = []

    async def ask(self, messages: Sequence[Any], fields: dict[str, Any]) -> Any:
        self.asked.append((list(messages), dict(fields)))
        for piece in self.answers.pop(0):
            if isinstance(piece, BaseException):
                raise piece
            yield piece

    async def first_model(self) -> str:
        return ""

    async def models(self) -> list[Any]:
        from homeserve.chat.client import ListedModel

        return [ListedModel("one", "loaded"), ListedModel("two", "unloaded")]


def run_now(work: Any) -> bool:
    """Coroutines of the fakes never wait."""
    try:
        work.send(None)
    except StopIteration:
        return True
    except KeyboardInterrupt:
        return False
    raise AssertionError("it waits for something")


def session_of(*answers: Any, environ: dict[str, str] | None = None) -> tuple[Session, FakeClient, io.StringIO]:
    client, out = FakeClient(*answers), io.StringIO()
    made = Session(
        client,  # type: ignore[arg-type]
        PlainScreen(out, out),
        run_now,
        conversation=Conversation(),
        fields={},
        environ=environ or {},
        width=lambda: 80,
    )
    return made, client, out


def conversed(text: str, *answers: Any, environ: dict[str, str] | None = None) -> tuple[FakeClient, str]:
    made, client, out = session_of(*answers, environ=environ)
    made.converse(PipedLines(io.StringIO(text), io.StringIO()))
    return client, out.getvalue()


def test_an_answer_and_its_numbers_are_shown_and_go_into_the_next_request() -> None:
    client, shown = conversed("a\nb\n", [Thought("hm"), Text("A"), Facts(completion_tokens=1)], [Text("B")])
    assert shown == "A\n1 tokens\nB\n"
    assert [each["content"] for each in client.asked[1][0]] == ["a", "A", "b"]


def test_a_question_that_failed_can_be_asked_again() -> None:
    client, shown = conversed("a\n/retry\n", [SettingError("gone", field="url", fix="see ps")], [Text("A")])
    assert "error: gone\n  see ps\n" in shown and "/retry asks it again" in shown
    assert [asked[0][-1]["content"] for asked in client.asked] == ["a", "a"]


def test_what_came_before_a_failure_is_kept() -> None:
    made, _, _ = session_of([Text("half"), SettingError("gone", field="url")])
    with pytest.raises(SettingError):
        made.ask("a")
    assert made.conversation.messages == [Message("user", "a"), Message("assistant", "half")]


def test_cut_short_is_said_and_counts_as_far_as_it_came() -> None:
    made, _, out = session_of([Text("half"), KeyboardInterrupt()], [KeyboardInterrupt()])
    assert not made.ask("a") and made.conversation.last_answer == "half"
    assert not made.ask("b") and made.conversation.unanswered == "b"
    assert out.getvalue() == "half\ncut short\ncut short; /retry asks again\n"


def test_orders_change_the_next_request() -> None:
    text = "/system Be kind.\n/set temperature 0.5\n/set top_k 5\n/set top_k\n/model two\na\n/reset\nb\n/model three\n"
    client, shown = conversed(text, [Text("A")], [Text("B")])
    assert client.asked[0][1] == {"temperature": 0.5, "model": "two"}
    assert [each["content"] for each in client.asked[0][0]] == ["Be kind.", "a"]
    assert [each["content"] for each in client.asked[1][0]] == ["Be kind.", "b"]
    assert "no model 'three'" in shown and "* two  unloaded" in shown


def test_saved_files_are_never_written_over(tmp_path: Path) -> None:
    path = tmp_path / "kept.json"
    text = f"a\n/save {path}\n/save {path}\n/reset\n/load {path}\nb\n/load {tmp_path / 'none.json'}\n/load {tmp_path}\n"
    client, shown = conversed(text, [Text("A")], [Text("B")])
    assert "is there already" in shown and "none.json: No such file" in shown and "Is a directory" in shown
    assert [each["content"] for each in client.asked[1][0]] == ["a", "A", "b"]


def test_a_message_is_written_in_the_editor(tmp_path: Path) -> None:
    editor = tmp_path / "editor.sh"
    editor.write_text('#!/bin/sh\nprintf "from the editor" > "$1"\n')
    editor.chmod(0o755)
    client, _ = conversed("/edit\n", [Text("A")], environ={"EDITOR": str(editor)})
    assert client.asked[0][0][-1]["content"] == "from the editor"
    _, shown = conversed("/edit\n/edit\n", environ={"EDITOR": str(tmp_path / "none")})
    assert shown.count("error: /edit:") == 2
    assert "names an editor" in conversed("/edit\n")[1]


def test_an_unknown_order_ends_nothing() -> None:
    client, shown = conversed("/nope\na\n/exit\nb\n", [Text("A")])
    assert "there is no /nope" in shown and len(client.asked) == 1


async def test_a_server_of_others_is_told_its_first_model_and_ours_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked until one is listed, and then never again."""
    lists: list[Any] = [SettingError("away", field="url"), [], [ListedModel("x", "")]]

    async def models(client: Client) -> list[ListedModel]:
        found = lists.pop(0)
        if isinstance(found, Exception):
            raise found
        return list(found)

    monkeypatch.setattr(Client, "models", models)
    client = Client("http://x", None)
    assert [await client.first_model() for _ in range(4)] == ["", "", "x", "x"] and not lists
    lists = [[ListedModel("ours", "loaded")]]
    client = Client("http://x", None)
    assert [await client.first_model() for _ in range(2)] == ["", ""] and not lists
