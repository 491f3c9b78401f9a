"""The template helper process: it renders, can be killed, dies with its parent, and hostile templates end there."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from homeserve.errors import InvalidField, WorkerStartError
from homeserve.text.helper_process import HelperEnded
from homeserve.text.templates import TemplateHost, TemplateLimits

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ bos_token }}<|im_start|>assistant\n{% endif %}"
)
HELLO = [{"role": "user", "content": "Größe <b> 日本 😀"}]


@asynccontextmanager
async def host(template: str, limits: TemplateLimits | None = None, **more: str) -> AsyncIterator[TemplateHost]:
    made = TemplateHost(limits)
    await made.start({"default": template} | more, {"bos_token": "<s>"})
    try:
        yield made
    finally:
        await made.stop()
    assert made.pid is None


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 90))  # type: ignore[arg-type]


def test_messages_are_rendered_by_one_process() -> None:
    async def body() -> None:
        async with host(CHATML) as made:
            text = await made.render(HELLO)
            assert text == "<|im_start|>user\nGröße <b> 日本 😀<|im_end|>\n<s><|im_start|>assistant\n"
            pid = made.pid
            again = await asyncio.gather(*(made.render(HELLO, add_generation_prompt=bool(i % 2)) for i in range(20)))
            assert len(set(again)) == 2 and made.pid == pid
            assert pid is not None and psutil.pid_exists(pid)
        assert not psutil.pid_exists(pid)

    run(body)


def test_tools_choose_the_template_and_kwargs_reach_it() -> None:
    async def body() -> None:
        async with host("{{ thinking }}|{{ tools }}|{{ x is defined }}", tool_use="T{{ tools[0].name }}") as made:
            assert await made.render(HELLO, thinking=False, x=None) == "False|None|False"
            assert await made.render(HELLO, tools=[{"name": "f"}]) == "Tf"
            assert await made.render(HELLO, tools=[]) == "|None|False"

    run(body)


HOSTILE = {
    "loop": ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "longer than 1 s"),
    "power": ("{{ 10 ** (10 ** 10) }}", "longer than 1 s"),
    "memory": ("{% set x = 'a' * 10 ** 11 %}", "memory"),
    "output": ("{% for i in range(99999) %}{{ 'a' * 1000 }}{% endfor %}", "more than 65536 characters"),
    "one large text": ("{{ messages[0].content * 99999 }}", "more than 65536 characters"),
    "attributes": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "sandbox"),
    "attributes by name": ("{{ ''|attr('__class__') | string | length * (1 // 0) }}", "ZeroDivisionError"),
    "change": ("{{ messages.append(1) }}", "sandbox"),
    "import": ("{% import 'os' as os %}", "failed"),
    "no Jinja": ("{% if %}", "not valid"),
    "refusal": ("{{ raise_exception('only users, please') }}", "only users, please"),
    "missing": ("{{ messages[0].tool_calls[0].name }}", "misses"),
    "recursion": ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "nested too deeply"),
    "half a pair": ("{{ '\\ud83d' }}", "surrogate"),
    "types": ("{{ 1 + 'a' }}", "TypeError"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_templates_fail_their_request_only(case: str) -> None:
    template, words = HOSTILE[case]

    async def body() -> None:
        limits = TemplateLimits(render_s=1.0, output_chars=65536)
        async with host(template, limits, tool_use="fine") as made:
            with pytest.raises(InvalidField, match="^messages: ") as caught:
                await made.render(HELLO)
            assert words in str(caught.value) and len(str(caught.value)) < 1000
            assert await made.render(HELLO, tools=[{}]) == "fine", "the next request is served"

    run(body)


def test_messages_that_are_no_text() -> None:
    async def body() -> None:
        async with host(CHATML) as made:
            for content in ("\ud83d", object(), {1, 2}):
                with pytest.raises(InvalidField, match="messages"):
                    await made.render([{"role": "user", "content": content}])
            with pytest.raises(InvalidField, match="TypeError"):
                await made.render([{"role": "user", "content": None}])
            deep: list[object] = []
            for _ in range(5000):
                deep = [deep]
            with pytest.raises(InvalidField, match="messages"):
                await made.render([{"role": "user", "content": deep}])
            assert (await made.render(HELLO)).startswith("<|im_start|>")

    run(body)


def test_no_template_is_said_and_starts_nothing() -> None:
    async def body() -> None:
        made = TemplateHost()
        await made.start({}, {})
        assert made.pid is None
        with pytest.raises(InvalidField, match="no chat template"):
            await made.render(HELLO)
        await made.stop()

    run(body)


def test_a_killed_helper_is_replaced() -> None:
    async def body() -> None:
        async with host(CHATML) as made:
            await made.render(HELLO)
            assert (first := made.pid) is not None
            os.kill(first, signal.SIGKILL)
            while psutil.pid_exists(first) and psutil.Process(first).status() != psutil.STATUS_ZOMBIE:
                await asyncio.sleep(0.01)
            assert await made.render(HELLO) and made.pid not in (None, first)

    run(body)


def test_a_helper_that_is_killed_in_the_middle_costs_nobody_an_answer() -> None:
    async def body() -> None:
        async with host(CHATML) as made:
            assert (first := made.pid) is not None
            os.kill(first, signal.SIGSTOP)
            cut, waiting = (asyncio.create_task(made.render(HELLO)) for _ in range(2))
            await asyncio.sleep(0.05)
            os.kill(first, signal.SIGKILL)
            # Both are waited for, whatever comes: asyncio cannot end while it is starting a process.
            texts = await asyncio.gather(cut, waiting, return_exceptions=True)
            assert texts[0] == texts[1] == await made.render(HELLO) and made.pid not in (None, first)

    run(body)


def test_a_template_that_ends_two_helpers_is_to_blame(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        async with host(CHATML) as made:
            asked = []

            async def ends(request: bytes, kind: type[object], seconds: float) -> object:
                asked.append(request)
                raise HelperEnded("EOFError")

            monkeypatch.setattr(made._helper, "ask", ends)
            with pytest.raises(InvalidField, match="messages: the chat template broke its process"):
                await made.render(HELLO)
            assert len(asked) == 2

    run(body)


def test_a_caller_who_leaves_does_not_shift_the_answers() -> None:
    async def body() -> None:
        slow = "{% for i in range(3000) %}{% for j in range(3000) %}{% endfor %}{% endfor %}slow"
        async with host(slow, tool_use="{{ tools[0] }}") as made:
            leaving = asyncio.create_task(made.render(HELLO))
            await asyncio.sleep(0.05)
            leaving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await leaving
            assert [await made.render(HELLO, tools=[{"n": i}]) for i in range(3)] == [f"{{'n': {i}}}" for i in range(3)]

    run(body)


def test_stop_in_the_middle_of_a_rendering() -> None:
    async def body() -> None:
        async with host(HOSTILE["loop"][0]) as made:
            rendering = asyncio.create_task(made.render(HELLO))
            await asyncio.sleep(0.1)
            pid = made.pid
            await made.stop()
            with pytest.raises(InvalidField):
                await rendering
        assert pid is not None and not psutil.pid_exists(pid)

    run(body)


def test_the_helper_sees_no_secrets_and_cannot_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")

    async def body() -> None:
        async with host(CHATML) as made:
            process = psutil.Process(made.pid)
            assert "HF_TOKEN" not in process.environ()
            if hasattr(process, "rlimit"):
                assert process.rlimit(psutil.RLIMIT_FSIZE) == (0, 0)
                assert process.rlimit(psutil.RLIMIT_AS) == (1 << 30, 1 << 30)

    run(body)


def test_a_helper_that_cannot_start_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")

    async def body() -> None:
        with pytest.raises(WorkerStartError, match="template helper"):
            await TemplateHost().start({"default": "x"}, {})

    run(body)


_PARENT = """
import asyncio, sys
from homeserve.text.templates import TemplateHost
async def main():
    host = TemplateHost()
    await host.start({"default": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"}, {})
    print(host.pid, flush=True)
    await host.render([])
asyncio.run(main())
"""


def test_the_helper_dies_with_its_parent() -> None:
    parent = subprocess.Popen([sys.executable, "-c", _PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    helper = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait(10)
    parent.stdout.close()
    deadline = time.monotonic() + 20
    while helper.is_running() and helper.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the helper outlived its parent"
        time.sleep(0.02)
