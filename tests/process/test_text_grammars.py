"""The grammar helper process: what it takes and refuses, what it survives, and what that costs others."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import psutil
import pytest

from homeserve.errors import InvalidField, SchemaUnsatisfiable, WorkerStartError
from homeserve.text.grammar_wire import CHOICE, GBNF, GRAMMAR_BYTES_LIMIT, JSON_SCHEMA, LARK, REGEX, Check
from homeserve.text.grammars import REQUEST_BYTES_LIMIT, GrammarHost, GrammarLimits

VOCAB = 1000
SPECIAL = {1: "<|im_start|>", 2: "<|im_end|>", 999: "<|x|>"}
FINE = Check(REGEX, "[0-9]+")


@asynccontextmanager
async def host(limits: GrammarLimits | None = None) -> AsyncIterator[GrammarHost]:
    made = GrammarHost(limits)
    made.configure(VOCAB, SPECIAL)
    try:
        yield made
    finally:
        await made.stop()
    assert made.pid is None


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 90))  # type: ignore[arg-type]


def ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_the_helper_starts_with_the_first_grammar_and_one_is_checked_once() -> None:
    async def body() -> None:
        async with host() as made:
            assert made.pid is None
            first = await made.check(FINE, "regex")
            pid = made.pid
            assert pid is not None and psutil.pid_exists(pid) and json.loads(first)["grammars"]
            os.kill(pid, signal.SIGSTOP)
            assert await made.check(FINE, "grammar") == first, "what is known needs no helper"
            os.kill(pid, signal.SIGCONT)
            await asyncio.gather(*(made.check(Check(REGEX, f"a{{{i}}}"), "regex") for i in range(1, 20)))
            assert made.pid == pid
        assert not psutil.pid_exists(pid)

    run(body)


REFUSED: dict[str, tuple[Check, str]] = {
    "place": (
        Check(JSON_SCHEMA, {"properties": {"a": {"items": {"anyOf": [{}, {"type": "nil"}]}}}}),
        "properties.a.items.anyOf[1]: Invalid type: nil",
    ),
    "place in definitions": (
        Check(JSON_SCHEMA, {"$ref": "#/$defs/d", "$defs": {"d": {"properties": {"q": {"type": 3}}}}}),
        "$defs.d.properties.q: ",
    ),
    "pattern": (Check(JSON_SCHEMA, {"items": {"type": "string", "pattern": "(?<=a)b"}}), "items: regex parse error"),
    "reference": (Check(JSON_SCHEMA, {"$ref": "#/$defs/none"}), "does not exist"),
    "reference elsewhere": (Check(JSON_SCHEMA, {"$ref": "http://127.0.0.1:1/x.json"}), "http://127.0.0.1:1/x.json"),
    "strict keyword": (Check(JSON_SCHEMA, {"properties": {"a": {"not": {}}}}, strict=True), "properties.a: not cannot"),
    "strict format": (Check(JSON_SCHEMA, {"items": {"type": "string", "format": "zip"}}, strict=True), "items: format"),
    "strict oneOf": (
        Check(JSON_SCHEMA, {"oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, strict=True), "oneOf cannot"
    ),
    "regex": (Check(REGEX, "(a"), "unclosed group"),
    "anchors": (Check(REGEX, "a$b"), "cannot stand within a pattern"),
    "look-ahead": (Check(REGEX, "(?=a)"), "look-around"),
    "lark name": (Check(LARK, "start: nothing"), 'unknown name: "nothing"'),
    "lark text": (Check(LARK, "%%%"), "lexer error"),
    "lark without start": (Check(LARK, 'root: "a"'), "no start rule"),
    "lark token": (Check(LARK, "start: <|no|>"), "unknown special token"),
    "lark id": (Check(LARK, "start: <[2000]>"), "Token range"),
    "gbnf text": (Check(GBNF, "root ::= ("), "is no GBNF"),
    "gbnf name": (Check(GBNF, 'root ::= a\nb ::= "x"'), "'a' not found"),
    "gbnf without root": (Check(GBNF, 'a ::= "x"'), "'root'"),
    "gbnf depth": (Check(GBNF, "root ::= " + "(" * 20_000), "nested too deeply"),
    "gbnf surrogate": (Check(GBNF, 'root ::= "\\ud800"'), "no character"),
}  # fmt: skip
UNSATISFIABLE: dict[str, Check] = {
    "false": Check(JSON_SCHEMA, False),
    "required": Check(JSON_SCHEMA, {"type": "object", "properties": {"a": False}, "required": ["a"]}),
    "bounds": Check(JSON_SCHEMA, {"items": {"type": "integer", "minimum": 3, "maximum": 2}, "minItems": 1,
                                  "type": "array"}),
    "types": Check(JSON_SCHEMA, {"allOf": [{"type": "string"}, {"type": "null"}]}),
    "enum": Check(JSON_SCHEMA, {"enum": []}),
    "itself": Check(JSON_SCHEMA, {"$ref": "#"}),
    "endless": Check(JSON_SCHEMA, {"$ref": "#/$defs/n", "$defs": {
        "n": {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}, "required": ["n"]}}}),
    "regex": Check(REGEX, "[a&&b]"),
    "lark": Check(LARK, 'start: start "a"'),
}  # fmt: skip


def test_what_is_wrong_is_said_with_its_place_and_the_field() -> None:
    async def body() -> None:
        async with host() as made:
            for case, (asked, words) in REFUSED.items():
                with pytest.raises(InvalidField, match="^the.field: ") as caught:
                    await made.check(asked, "the.field")
                assert words in str(caught.value) and len(str(caught.value)) < 500, case
            for case, asked in UNSATISFIABLE.items():
                with pytest.raises(SchemaUnsatisfiable) as none:
                    await made.check(asked, "the.field")
                assert none.value.field == "the.field" and none.value.code == "schema_unsatisfiable", case
            with pytest.raises(SchemaUnsatisfiable, match="items"):
                await made.check(UNSATISFIABLE["bounds"], "x")

    run(body)


def test_what_is_not_enforced_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        async with host() as made:
            with caplog.at_level(logging.INFO, "homeserve.text"):
                for schema in ({"not": {}}, {"items": {"not": {}, "uniqueItems": True, "type": "array"}}, {"not": {}}):
                    assert await made.check(Check(JSON_SCHEMA, schema), "x")
        told = [record.getMessage() for record in caplog.records]
        assert len(told) == 2 and sum("'not'" in text for text in told) == 1 and "uniqueItems" in told[1]

    run(body)


HOSTILE: dict[str, Check] = {
    "nested counts": Check(REGEX, "((((a{1,999}){1,999}){1,999}){1,999}){1,999}"),
    "ambiguous": Check(REGEX, "(.*a){30}.{30}" * 20),
    "look-behind by states": Check(REGEX, "(.*a.{300})&(.*b.{299})|.*c.{400}d"),
    "intersections": Check(LARK, "start: " + " & ".join(f"/(.*[a-f]){{{n}}}.{{{n}}}/" for n in range(20, 40))),
    "rules": Check(LARK, "start: " + " ".join('("a"|"b")?' for _ in range(5000))),
    "doubling": Check(LARK, "start: a0\n" + "\n".join(f"a{i}: a{i + 1} a{i + 1}" for i in range(60)) + '\na60: "x"?'),
    "doubling words": Check(
        LARK, "start: A0\n" + "\n".join(f"A{i}: A{i + 1} A{i + 1}" for i in range(60)) + '\nA60: "x"'
    ),
    "definitions": Check(JSON_SCHEMA, {"$ref": "#/$defs/0", "$defs": {
        str(i): {"anyOf": [{"$ref": f"#/$defs/{(i * 7 + j) % 300}"} for j in range(8)]} for i in range(300)}}),
    "all of": Check(JSON_SCHEMA, {"allOf": [{"anyOf": [{"properties": {f"{i}{j}": {}}} for j in range(8)]}
                                            for i in range(8)]}),
    "patterns": Check(JSON_SCHEMA, {"patternProperties": {f"(.*{c}){{30}}.{{30}}": {} for c in "abcdefgh"}}),
    "many texts": Check(CHOICE, [f"{i:05}" for i in range(4096)]),
    "long counts": Check(JSON_SCHEMA, {"type": "array", "minItems": 10**9, "items": {"type": "string"}}),
    "gbnf rules": Check(GBNF, "root ::= a0\n" + "\n".join(f"a{i} ::= a{i + 1} | a{i + 2}" for i in range(3000))
                        + '\na3000 ::= "x"\na3001 ::= "y"'),
    "gbnf marks": Check(GBNF, "root ::= " + '"' * 60_001),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_grammars_cost_their_own_request_alone(case: str) -> None:
    """Within the time and memory of the limits, and the next one is served."""

    async def body() -> None:
        limits = GrammarLimits(check_s=2.0, memory_mib=512)
        async with host(limits) as made:
            try:
                await made.check(HOSTILE[case], "x")
            except (InvalidField, SchemaUnsatisfiable) as error:
                assert len(str(error)) < 500
            assert await made.check(FINE, "x")

    run(body)


def test_a_check_that_takes_too_long_ends_and_the_loop_is_free_meanwhile() -> None:
    async def body() -> None:
        async with host(GrammarLimits(check_s=0.3)) as made:
            await made.check(FINE, "x")
            pid = made.pid
            assert pid is not None
            os.kill(pid, signal.SIGSTOP)  # as one that computes for ever
            turns = 0
            check = asyncio.create_task(made.check(Check(REGEX, "b"), "guided_regex"))
            while not check.done():
                await asyncio.sleep(0)
                turns += 1
            with pytest.raises(InvalidField, match="guided_regex: took longer than 0.3 s"):
                await check
            assert turns > 100 and not psutil.pid_exists(pid)
            assert await made.check(Check(REGEX, "b"), "x"), "and what was slow once is tried again"
            assert made.pid not in (None, pid)

    run(body)


def test_a_helper_that_is_killed_in_the_middle_fails_one_check() -> None:
    async def body() -> None:
        async with host() as made:
            await made.check(FINE, "x")
            pid = made.pid
            assert pid is not None
            os.kill(pid, signal.SIGSTOP)
            cut, waiting = (asyncio.create_task(made.check(Check(REGEX, text), "x")) for text in ("c", "d"))
            while not psutil.Process(pid).status() == psutil.STATUS_STOPPED:
                await asyncio.sleep(0)
            for _ in range(100):
                await asyncio.sleep(0)
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(InvalidField, match="broke the process"):
                await cut
            assert await waiting, "who waited for a turn gets a new helper"

    run(body)


def test_a_helper_that_died_between_two_checks_fails_none() -> None:
    async def body() -> None:
        async with host() as made:
            await made.check(FINE, "x")
            pid = made.pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            while not ended(pid):
                pass  # the loop hears nothing of it
            assert await made.check(Check(REGEX, "b"), "x") and made.pid not in (None, pid)

    run(body)


def test_memory_is_bounded() -> None:
    async def body() -> None:
        async with host(GrammarLimits(memory_mib=300)) as made:
            await made.check(FINE, "x")
            process = psutil.Process(made.pid)
            if hasattr(process, "rlimit"):
                assert process.rlimit(psutil.RLIMIT_AS) == (300 << 20, 300 << 20)
                assert process.rlimit(psutil.RLIMIT_FSIZE) == (0, 0)

    run(body)


def test_sizes_are_bounded() -> None:
    async def body() -> None:
        async with host() as made:
            large: Any = {"type": "object", "properties": {f"p{i}": {"const": "x" * 100} for i in range(700)}}
            with pytest.raises(InvalidField, match=f"larger than {GRAMMAR_BYTES_LIMIT >> 10} KiB"):
                await made.check(Check(JSON_SCHEMA, large), "x")
            told: Any = {"properties": {f"p{i}": {"type": "null", "description": "d" * 200} for i in range(700)}}
            assert len(json.dumps(told)) > GRAMMAR_BYTES_LIMIT
            assert len(await made.check(Check(JSON_SCHEMA, told), "x")) < GRAMMAR_BYTES_LIMIT, (
                "what is told is left out"
            )
            with pytest.raises(InvalidField, match="larger than"):
                await made.check(Check(LARK, "a" * (REQUEST_BYTES_LIMIT + 1)), "x")

    run(body)


def test_what_is_kept_is_bounded() -> None:
    async def body() -> None:
        async with host(GrammarLimits(kept=8, kept_bytes=64 << 10)) as made:
            for i in range(1, 40):
                await made.check(Check(REGEX, f"a{{{i}}}"), "x")
            assert len(made._kept._entries) == 8
            for i in range(1, 9):
                await made.check(Check(CHOICE, ["x" * 10_000, str(i)]), "x")
            assert 1 <= len(made._kept._entries) < 8 and made._kept._held <= 64 << 10
            for i in range(12):
                with pytest.raises(InvalidField):
                    await made.check(Check(REGEX, "(" * i + "("), "x")
            assert made._kept._held == sum(
                4 * (len(c.grammar) + len(c.error)) + 256 for c in made._kept._entries.values()
            )

    run(body)


def test_a_caller_who_leaves_does_not_shift_the_answers() -> None:
    async def body() -> None:
        async with host() as made:
            await made.check(FINE, "x")
            assert made.pid is not None
            os.kill(made.pid, signal.SIGSTOP)
            leaving = asyncio.create_task(made.check(Check(REGEX, "e"), "x"))
            await asyncio.sleep(0.05)
            leaving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await leaving
            for text in "fgh":
                assert f"/{text}/" in await made.check(Check(REGEX, text), "x")

    run(body)


def test_a_helper_that_cannot_start_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")

    async def body() -> None:
        async with host() as made:
            with pytest.raises(WorkerStartError, match="grammar helper"):
                await made.check(FINE, "x")

    run(body)
