"""Chat templates: messages to the prompt text that a model was trained on.

`TemplateHost` keeps one helper process (`homeserve.text.template_worker`) and asks it for one rendering at a time. A
rendering that takes too long, or whose caller went away in the middle, costs the helper its life; the next call gets a
new one. So a hostile template can fail requests, never the server.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from homeserve.errors import InvalidField
from homeserve.text.helper_process import HelperEnded, HelperProcess, HelperSlow
from homeserve.text.helper_wire import MESSAGE_BYTES_MAX, frame
from homeserve.text.template_wire import Render, Rendered, Setup

_log = logging.getLogger("homeserve.text")

HELPERS_TRIED = 2
"""By one rendering, where they end in the middle of it."""


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
        self._helper = HelperProcess(
            "homeserve.text.template_worker", "the template helper", start_s=self._limits.start_s
        )

    @property
    def pid(self) -> int | None:
        """The helper's process id, None while there is none."""
        return self._helper.pid

    @property
    def due(self) -> bool:
        """Whether there are templates, and the helper that renders them does not run (yet)."""
        return bool(self._templates) and self._helper.pid is None

    def configure(self, templates: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        """Templates by name ('default', 'tool_use', …), and variables that every rendering gets (`bos_token`, …)."""
        self._templates = dict(templates)
        self._special_tokens = dict(special_tokens)
        limits = self._limits
        self._helper.setup = Setup(
            memory_mib=limits.memory_mib,
            cpu_s=int(limits.render_s) + 1,
            templates=self._templates,
            output_chars_max=limits.output_chars,
        )

    async def start(self, templates: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        """Configure, and start the helper if there is a template. Raises WorkerStartError."""
        self.configure(templates, special_tokens)
        if self._templates:
            await self._helper.start()

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
            request = frame(Render(name, context))
        except UnicodeEncodeError as error:
            raise InvalidField("messages", "contains half a surrogate pair, which is no text") from error
        except (TypeError, RecursionError, OverflowError) as error:
            raise InvalidField("messages", f"cannot be passed to the chat template: {error}") from error
        if len(request) > MESSAGE_BYTES_MAX:
            raise InvalidField("messages", f"are larger than {MESSAGE_BYTES_MAX >> 20} MiB")
        answer = await self._ask(request)
        if answer.text is None:
            raise InvalidField("messages", answer.error or "the chat template gave no text")
        return answer.text

    async def stop(self) -> None:
        """End the helper and wait for it. Renderings in progress fail."""
        await self._helper.stop()

    async def _ask(self, request: bytes) -> Rendered:
        """The template is to blame where two helpers end: one may be killed by others, as by a kernel short of memory.
        Raises InvalidField, WorkerStartError."""
        for left in reversed(range(HELPERS_TRIED)):
            try:
                return await self._helper.ask(request, Rendered, self._limits.render_s)
            except HelperSlow:
                what = f"the chat template took longer than {self._limits.render_s:g} s"
                raise InvalidField("messages", what) from None
            except HelperEnded as error:
                _log.warning("the template helper ended in the middle of a rendering: %s", error)
                if not left:
                    what = "the chat template broke its process (too much memory?)"
                    raise InvalidField("messages", what) from error
        raise AssertionError("the last one answers or raises")
