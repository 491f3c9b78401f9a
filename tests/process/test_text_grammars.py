"""The grammar helper process: what it takes and refuses, what it survives, and what that costs others."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import psutil
import pytest

from homeserve.errors import InvalidField, QueueFull, SchemaUnsatisfiable, WorkerStartError
from homeserve.text.grammar_compile import Compiler
from homeserve.text.grammar_wire import (
    CHOICE,
    GBNF,
    GRAMMAR_BYTES_LIMIT,
    JSON_SCHEMA,
    LARK,
    REGEX,
    Calls,
    Check,
    Checked,
    Function,
)
from homeserve.text.grammar_worker import checked
from homeserve.text.grammars import REQUEST_BYTES_LIMIT, GrammarHost, GrammarLimits
from homeserve.text.helper_process import HelperEnded

VOCAB = 1000
SPECIAL = {1: "<|im_start|>", 2: "<|im_end|>", 999: "<|x|>"}
FINE = Check(REGEX, "[0-9]+")


@asynccontextmanager
async def host(
    limits: GrammarLimits | None = None, clock: Callable[[], float] = time.monotonic
) -> AsyncIterator[GrammarHost]:
    made = GrammarHost(limits, clock)
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
        async with host(GrammarLimits(check_s=0.3), lambda: now[0]) as made:
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
            with pytest.raises(InvalidField, match="x: took longer"):
                await made.check(Check(REGEX, "b"), "x")
            assert made.pid is None, "and is refused unseen for a while"
            now[0] += made._limits.refused_s
            assert await made.check(Check(REGEX, "b"), "x"), "and then tried again"
            assert made.pid not in (None, pid)

    now = [0.0]
    run(body)


async def kill_in_the_middle(made: GrammarHost) -> None:
    """The helper, while it is at a check."""
    pid = made.pid
    assert pid is not None
    while psutil.Process(pid).status() != psutil.STATUS_STOPPED:
        await asyncio.sleep(0)
    for _ in range(100):
        await asyncio.sleep(0)
    os.kill(pid, signal.SIGKILL)
    while made.pid == pid:
        await asyncio.sleep(0)


def test_a_helper_that_is_killed_in_the_middle_fails_no_check() -> None:
    """It may be none of the grammar's doing: another helper is asked."""

    async def body() -> None:
        async with host() as made:
            await made.check(FINE, "x")
            os.kill(made.pid or 0, signal.SIGSTOP)
            cut, waiting = (asyncio.create_task(made.check(Check(REGEX, text), "x")) for text in ("c", "d"))
            await kill_in_the_middle(made)
            assert await cut and await waiting

    run(body)


def test_a_grammar_that_ends_two_helpers_is_refused_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[bytes]()
    now = [0.0]

    async def body() -> None:
        async with host(clock=lambda: now[0]) as made:
            ask = made._helper.ask

            async def ends(request: bytes, kind: type[Any], seconds: float) -> Any:
                asked.append(request)
                if b'"deadly"' in request:
                    raise HelperEnded("EOFError")
                return await ask(request, kind, seconds)

            monkeypatch.setattr(made._helper, "ask", ends)
            for _ in range(3):
                with pytest.raises(InvalidField, match="guided_regex: broke the process that checks it"):
                    await made.check(Check(REGEX, "deadly"), "guided_regex")
            assert len(asked) == 2, "once, and once more with another helper; then it is known"
            assert await made.check(FINE, "x")
            now[0] += made._limits.refused_s
            with pytest.raises(InvalidField, match="broke the process"):
                await made.check(Check(REGEX, "deadly"), "x")
            assert len(asked) == 5

    run(body)


def test_those_who_come_with_one_grammar_have_it_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        asked = list[bytes]()
        async with host() as made:
            ask = made._helper.ask

            async def counted(request: bytes, kind: type[Any], seconds: float) -> Any:
                asked.append(request)
                return await ask(request, kind, seconds)

            monkeypatch.setattr(made._helper, "ask", counted)
            found = await asyncio.gather(*(made.check(Check(REGEX, "once"), "x") for _ in range(50)))
            assert len(set(found)) == 1 and len(asked) == 1
            refused = await asyncio.gather(
                *(made.check(Check(REGEX, "("), "x") for _ in range(50)), return_exceptions=True
            )
            assert all(isinstance(each, InvalidField) for each in refused) and len(asked) == 2
            assert not made._checking

    run(body)


def test_one_who_leaves_lets_the_next_with_the_same_grammar_have_it_checked() -> None:
    async def body() -> None:
        async with host() as made:
            await made.check(FINE, "x")
            os.kill(made.pid or 0, signal.SIGSTOP)
            leaving, staying = (asyncio.create_task(made.check(Check(REGEX, "same"), "x")) for _ in range(2))
            for _ in range(100):
                await asyncio.sleep(0)
            leaving.cancel()
            assert "/same/" in await staying and not made._checking

    run(body)


def test_checks_that_wait_are_few_and_the_others_are_told_to_come_again() -> None:
    async def body() -> None:
        async with host(GrammarLimits(waiting=3)) as made:
            await made.check(FINE, "x")
            pid = made.pid or 0
            os.kill(pid, signal.SIGSTOP)
            waiting = [asyncio.create_task(made.check(Check(REGEX, text), "x")) for text in "abc"]
            await asyncio.sleep(0)
            with pytest.raises(QueueFull) as full:
                await made.check(Check(REGEX, "d"), "x")
            assert (full.value.status, full.value.retry_after_s) == (429, 5) and "3 grammars" in str(full.value)
            assert await made.check(FINE, "x"), "what is known waits for nobody"
            same = asyncio.create_task(made.check(Check(REGEX, "b"), "x"))
            await asyncio.sleep(0)
            os.kill(pid, signal.SIGCONT)
            assert all(await asyncio.gather(*waiting, same)) and await made.check(Check(REGEX, "d"), "x")

    run(body)


def test_nobody_waits_long_for_the_checks_of_others() -> None:
    async def body() -> None:
        async with host(GrammarLimits(wait_s=0.05)) as made:
            await made.check(FINE, "x")
            pid = made.pid or 0
            os.kill(pid, signal.SIGSTOP)
            slow = asyncio.create_task(made.check(Check(REGEX, "slow"), "x"))
            await asyncio.sleep(0)
            for text in ("other", "slow"):
                with pytest.raises(QueueFull, match="try again in 5 s"):
                    await made.check(Check(REGEX, text), "x")
            os.kill(pid, signal.SIGCONT)
            assert await slow and await made.check(Check(REGEX, "other"), "x") and not made._checking

    run(body)


def test_a_fault_in_the_check_itself_is_logged_with_its_place(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def faulty(self: Compiler, asked: Check) -> Checked:
        raise AssertionError("a token within a mark")

    monkeypatch.setattr(Compiler, "check", faulty)
    made_here = checked(Compiler(VOCAB, SPECIAL), FINE)
    assert made_here.broke.startswith("AssertionError (faulty, line ")

    async def body() -> None:
        async with host() as made:

            async def ask(*args: Any) -> Checked:
                return made_here

            monkeypatch.setattr(made._helper, "ask", ask)
            with pytest.raises(InvalidField, match="x: broke its check, which is a fault of the server"):
                await made.check(FINE, "x")

    run(body)
    assert [each.getMessage() for each in caplog.records if each.levelno == logging.ERROR] == [
        f"a grammar broke its check: {made_here.broke}"
    ]


def test_what_is_wrong_with_a_tool_names_it_and_the_routes_own_field() -> None:
    async def body() -> None:
        async with host() as made:
            wrong = [Function("fine"), Function("bad", {"properties": {"a": {"type": "nil"}}})]
            asked = Check(REGEX, "a", calls=Calls("", wrong))
            with pytest.raises(InvalidField, match="^tools: 'bad', function.parameters: properties.a: Invalid"):
                await made.check(asked, "regex")
            with pytest.raises(InvalidField, match="^tools: 'bad', input_schema: properties.a"):
                await made.check(asked, "regex", "tools", "input_schema")
            none = Check(calls=Calls("", [Function("never", False)]))
            with pytest.raises(SchemaUnsatisfiable, match="^tools: 'never', parameters: ") as caught:
                await made.check(none, "tools", "tools", "parameters")
            assert caught.value.field == "tools"

    run(body)


def test_a_helper_that_died_between_two_checks_fails_none(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        async with host() as made:
            await made.check(FINE, "x")
            pid = made.pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            while not ended(pid):
                pass  # the loop hears nothing of it
            assert await made.check(Check(REGEX, "b"), "x") and made.pid not in (None, pid)
            assert not caplog.records, "nor was it asked first"

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
            large: Any = {"type": "object", "properties": {f"p{i}": {"const": "x" * 300} for i in range(300)}}
            with pytest.raises(InvalidField, match=f"larger than {GRAMMAR_BYTES_LIMIT >> 10} KiB"):
                await made.check(Check(JSON_SCHEMA, large), "x")
            told: Any = {"properties": {f"p{i}": {"type": "null", "description": "d" * 300} for i in range(300)}}
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
