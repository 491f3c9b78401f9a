"""Chat templates: messages to the prompt text that a model was trained on.

`TemplateHost` keeps one helper process (`homeserve.text.template_worker`) and asks it for one rendering at a time. A
rendering that takes too long, or whose caller went away in the middle, costs the helper its life; the next call gets a
new one. So a hostile template can fail requests, never the server.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from homeserve.errors import InvalidField, WorkerStartError
from homeserve.text import template_wire
from homeserve.text.template_wire import LENGTH, Ready, Render, Rendered, Setup
from homeserve.wire.children import environment

_log = logging.getLogger("homeserve.text")
_Message = TypeVar("_Message", Ready, Rendered)

_KEPT_VARIABLES = (
    "PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ", "SYSTEMROOT",
)  # fmt: skip
"""What the helper sees of the environment: what Python needs to start, and the clock's zone. No tokens or keys."""


@dataclass(frozen=True)
class TemplateLimits:
    """Seconds for one rendering and for the helper's start, characters of one prompt, MiB of address space."""

    render_s: float = 5.0
    start_s: float = 30.0
    output_chars: int = 16 << 20
    memory_mib: int = 1024


class TemplateHost:
    """Renders a model's chat templates in a helper process.

    `start` once, `render` from any number of tasks (they take turns), `stop` once. After `configure` alone the helper
    starts with the first rendering.
    """

    def __init__(self, limits: TemplateLimits | None = None) -> None:
        self._limits = limits or TemplateLimits()
        self._templates: dict[str, str] = {}
        self._special_tokens: dict[str, str] = {}
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()

    @property
    def pid(self) -> int | None:
        """The helper's process id, None while there is none."""
        return None if self._process is None else self._process.pid

    @property
    def due(self) -> bool:
        """Whether there are templates, and the helper that renders them does not run (yet)."""
        return bool(self._templates) and self._process is None

    def configure(self, templates: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        """Templates by name ('default', 'tool_use', …), and variables that every rendering gets (`bos_token`, …)."""
        self._templates = dict(templates)
        self._special_tokens = dict(special_tokens)

    async def start(self, templates: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        """Configure, and start the helper if there is a template. Raises WorkerStartError."""
        self.configure(templates, special_tokens)
        if self._templates:
            async with self._turn:
                await self._ensure()

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """The prompt. `kwargs` reach the template as variables (`enable_thinking`, …); None of them means not given.

        Raises InvalidField('messages') where there is no template, it refuses, fails, or takes too long.
        """
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        if name not in self._templates:
            what = "this model has no chat template"
            raise InvalidField("messages", what, fix="use /v1/completions, or a model with a template")
        given = {key: value for key, value in kwargs.items() if value is not None}
        context = self._special_tokens | given
        context |= {
            "messages": messages,
            "tools": tools or None,
            "documents": given.get("documents"),
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            request = template_wire.frame(Render(name, context))
        except UnicodeEncodeError as error:
            raise InvalidField("messages", "contains half a surrogate pair, which is no text") from error
        except (TypeError, RecursionError, OverflowError) as error:
            raise InvalidField("messages", f"cannot be passed to the chat template: {error}") from error
        if len(request) > template_wire.MESSAGE_BYTES_MAX:
            raise InvalidField("messages", f"are larger than {template_wire.MESSAGE_BYTES_MAX >> 20} MiB")
        answer = await self._ask(request)
        if answer.text is None:
            raise InvalidField("messages", answer.error or "the chat template gave no text")
        return answer.text

    async def stop(self) -> None:
        """End the helper and wait for it. Renderings in progress fail."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None, "it was started with pipes"
        process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), 1.0)
        except TimeoutError:
            await _kill(process)

    async def _ask(self, request: bytes) -> Rendered:
        async with self._turn:
            process = await self._ensure()
            try:
                async with asyncio.timeout(self._limits.render_s):
                    return await _exchange(process, request, Rendered)
            except TimeoutError:
                await self._give_up(process)
                what = f"the chat template took longer than {self._limits.render_s:g} s"
                raise InvalidField("messages", what) from None
            except (EOFError, ConnectionError, msgspec.MsgspecError) as error:
                await self._give_up(process)
                _log.warning("the template helper ended in the middle of a rendering: %s", error)
                raise InvalidField("messages", "the chat template broke its process (too much memory?)") from error
            except BaseException:
                # The caller is going away. An answer that nobody reads would be taken for the next one's.
                await self._give_up(process)
                raise

    async def _ensure(self) -> asyncio.subprocess.Process:
        """The running helper, started if there is none. Call with the turn held."""
        if self._process is not None and self._process.returncode is None:
            return self._process
        self._process = None
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-B", "-m", "homeserve.text.template_worker", str(os.getpid())),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=environment({name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}),
            # The terminal's Ctrl-C is not for the helper, least of all before it has come to ignore it.
            start_new_session=True,
        )
        limits = self._limits
        cpu_s = int(limits.render_s) + 1
        setup = Setup(self._templates, limits.output_chars, limits.memory_mib, cpu_s)
        try:
            async with asyncio.timeout(limits.start_s):
                await _exchange(process, template_wire.frame(setup), Ready)
        except (TimeoutError, EOFError, ConnectionError, msgspec.MsgspecError) as error:
            await _kill(process)
            raise WorkerStartError(f"the template helper did not start: {type(error).__name__} {error}") from error
        except BaseException:
            await _kill(process)
            raise
        self._process = process
        return process

    async def _give_up(self, process: asyncio.subprocess.Process) -> None:
        if self._process is process:
            self._process = None
        await _kill(process)


async def _exchange(process: asyncio.subprocess.Process, request: bytes, kind: type[_Message]) -> _Message:
    """Send a framed message and read the answer. Raises EOFError or ConnectionError where the helper has ended."""
    assert process.stdin is not None and process.stdout is not None, "it was started with pipes"
    process.stdin.write(request)
    await process.stdin.drain()
    (length,) = LENGTH.unpack(await process.stdout.readexactly(LENGTH.size))
    if length > template_wire.MESSAGE_BYTES_MAX:
        raise ConnectionError(f"a message of {length} bytes")
    return msgspec.json.decode(await process.stdout.readexactly(length), type=kind)


async def _kill(process: asyncio.subprocess.Process) -> None:
    """Kill, and reap even if the caller is being cancelled: a zombie must not stay."""
    if process.returncode is None:
        try:
            process.kill()
        except ProcessLookupError:
            pass
    await asyncio.shield(process.wait())
