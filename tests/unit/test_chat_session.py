"""A session of the terminal chat: lines and pieces of answers in, what is shown and asked out."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from homeserve.chat.client import Client, Facts, ListedModel, Piece, Text, Thought, Waits
from homeserve.chat.conversation import Conversation
from homeserve.chat.echo import Echo
from homeserve.chat.screen import FRAME_S, PlainScreen, RichScreen, facts_line
from homeserve.chat.session import Session
from homeserve.errors import SettingError


class Script(Client):
    """Answers with `pieces`; an error among them is raised."""

    def __init__(self) -> None:
        super().__init__("http://x", None)
        self.pieces: list[Piece | Exception] = [Text("yes")]
        self.asked: list[tuple[list[str], dict[str, Any]]] = []

    async def models(self) -> list[ListedModel]:
        return [ListedModel("small", "loaded"), ListedModel("large", "unloaded")]

    async def ask(self, messages: Any, fields: Any) -> AsyncIterator[Piece]:
        self.asked.append(([each["content"] for each in messages], dict(fields)))
        for piece in self.pieces:
            if isinstance(piece, Exception):
                raise piece
            yield piece


class Typed:
    by_hand = True

    def __init__(self, *lines: str) -> None:
        self._lines = list(lines)
        self.begun: list[str] = []

    def read(self, begun: str = "") -> str | None:
        self.begun.append(begun)
        return self._lines.pop(0) if self._lines else None


class World:
    def __init__(self, environ: dict[str, str] | None = None) -> None:
        self.client = Script()
        self.out, self.err = io.StringIO(), io.StringIO()
        self.session = Session(
            self.client,
            PlainScreen(self.out, self.err),
            lambda work: asyncio.run(work) is None,
            conversation=Conversation(),
            fields={},
            environ=environ or {},
            width=lambda: 80,
        )

    def type(self, *lines: str) -> Typed:
        typed = Typed(*lines)
        self.session.converse(typed)
        return typed


@pytest.fixture
def world() -> World:
    return World()


def test_answers_go_out_and_everything_else_to_err(world: World) -> None:
    world.client.pieces = [Waits("loading 5 %"), Waits("loading 5 %"), Thought("hm"), Text("a\x1b[2J"), Text("b")]
    world.client.pieces.append(Facts(completion_tokens=2, decode_tok_s=3.0, ttft_ms=4.0, finish="length"))
    world.type("q")
    assert world.out.getvalue() == "a^[[2Jb\n"
    assert world.err.getvalue() == (
        "loading 5 %\n2 tokens · 3.0 a second · first after 4 ms · cut off by the limit of tokens\n"
    )


def test_a_server_that_goes_away_costs_no_word(world: World) -> None:
    world.client.pieces = [SettingError("gone", fix="see ps")]
    world.type("q")
    assert "error: gone\n  see ps\n" in world.err.getvalue() and "/retry" in world.err.getvalue()
    world.client.pieces = [Text("half"), SettingError("gone")]
    world.type("/retry")
    assert "what came of the answer is kept; /retry" in world.err.getvalue()
    world.client.pieces = [Text("whole")]
    world.type("/retry", "next")
    assert [asked for asked, _ in world.client.asked] == [["q"], ["q"], ["q"], ["q", "whole", "next"]]


def test_where_nobody_sits_an_error_is_the_end(world: World) -> None:
    typed = Typed("q", "never asked")
    typed.by_hand = False
    world.client.pieces = [SettingError("gone")]
    with pytest.raises(SettingError, match="gone"):
        world.session.converse(typed)
    assert len(world.client.asked) == 1


def test_undo_gives_the_question_back_to_be_changed(world: World) -> None:
    typed = world.type("first", "second", "/undo", "/undo", "/undo", "third")
    assert typed.begun[3:6] == ["second", "first", ""]
    assert "nothing was asked yet" in world.err.getvalue()
    assert world.client.asked[-1][0] == ["third"]


def test_fields_model_and_system_are_of_the_next_request(world: World) -> None:
    world.type("/set top_k 5", "/set seed x", "/set bogus 1", "/model large", "/model none", "/system kind", "q")
    assert world.client.asked == [(["kind", "q"], {"top_k": 5, "model": "large"})]
    said = world.err.getvalue()
    assert "* large  unloaded" in said and "there is no model 'none'" in said and "there is no 'bogus'" in said
    world.type("/set top_k", "/system", "q2")
    assert world.client.asked[-1] == (["q", "yes", "q2"], {"model": "large"})


def test_save_and_load(world: World, tmp_path: Path) -> None:
    kept, shown = tmp_path / "talk.json", tmp_path / "talk.md"
    world.type("q", f"/save {kept}", f"/save {shown}", f"/save {kept}", f"/load {shown}", f"/load {tmp_path}")
    said = world.err.getvalue()
    assert "is there already" in said and "is no conversation" in said and "Is a directory" in said
    assert shown.read_text() == "## You\n\nq\n\n## Answer\n\nyes\n"
    other = World()
    other.type(f"/load {kept}", "next")
    assert other.client.asked[0][0] == ["q", "yes", "next"]


def test_edit_asks_what_the_editor_wrote(tmp_path: Path) -> None:
    editor = tmp_path / "an editor"
    editor.write_text('#!/bin/sh\nprintf " and more" >> "$1"\n')
    editor.chmod(0o700)
    world = World({"EDITOR": f"'{editor}'"})
    world.type("q", "/undo", "/edit")
    assert world.client.asked[-1][0] == ["q and more"]
    for environ, words in (
        ({}, "names an editor"),
        ({"VISUAL": "/nowhere/ed"}, "No such file"),
        ({"EDITOR": "false"}, "nothing to ask"),
    ):
        without = World(environ)
        without.type("/edit")
        assert words in without.err.getvalue() and without.client.asked == []


def test_facts_that_are_unknown_are_left_out() -> None:
    assert facts_line(Facts()) == ""
    assert facts_line(Facts(completion_tokens=0, restarts=1)) == "0 tokens · a worker was restarted"


# ------------------------------------------------------------------------------------------------------------ screen


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def rich_screen(width: int = 40) -> tuple[RichScreen, io.StringIO, Clock]:
    out, clock = io.StringIO(), Clock()
    console = Console(file=out, force_terminal=True, width=width, height=10, color_system=None, _environ={})
    return RichScreen(console, Echo(-1), clock), out, clock


def test_a_block_is_printed_once_and_what_is_open_no_more_often_than_the_eye_sees() -> None:
    screen, out, clock = rich_screen()
    screen.begin()
    for piece in ["w0 ", *["word "] * 20, *["x"] * 179]:
        clock.now += FRAME_S / 10
        screen.text(piece)
    drawn = out.getvalue().count("w0 ")
    assert 15 <= drawn <= 22
    screen.text("\n\nsecond")
    screen.end()
    behind = out.getvalue()[-120:]
    assert behind.rstrip().endswith("second")


@pytest.mark.parametrize("width", [1, 20, 40])
def test_narrow_screens_and_wide_characters(width: int) -> None:
    screen, out, clock = rich_screen(width)
    screen.begin()
    for piece in [
        "日本語と👩‍🚀 ",
        "| a | b |\n|---|---|\n| 長い長い長い | x |\n\n",
        "```\n" + "x" * 90 + "\n```\n",
        "- i",
    ]:
        clock.now += 1
        screen.text(piece)
    screen.end()
    assert out.getvalue()


def test_thoughts_give_way_to_a_line() -> None:
    screen, out, clock = rich_screen()
    screen.begin()
    screen.thought("deep\n" * 100)
    clock.now += 2.5
    screen.text("answer")
    screen.end()
    assert out.getvalue().count("deep") <= 8
    assert "thought for 2.5 s" in out.getvalue() and "answer" in out.getvalue()


def test_what_a_model_writes_moves_no_cursor() -> None:
    screen, out, clock = rich_screen()
    screen.begin()
    screen.thought("\x1b]52;c;AAAA\x07")
    clock.now += 1
    screen.text("\x1b[31m`\x1b[32m`\n\n```\n\x9b2J\x1b[H\n```\n[red]x[/red] [link](javascript:x)")
    screen.end()
    screen.note("\x1b[41m")
    ours = out.getvalue()
    assert "\x1b]52" not in ours and "\x9b" not in ours and "\x1b[31m" not in ours and "\x1b[32m" not in ours
    assert "\x1b[41m" not in ours and "\x1b[H" not in ours and "\x1b]8" not in ours and "^[[31m" in ours
