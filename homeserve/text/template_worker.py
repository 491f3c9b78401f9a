"""The helper process that renders chat templates: `python -m homeserve.text.template_worker PARENT_PID`.

A template comes with the model file and is a program: it may loop for ever, eat memory, or look for a way out. So it
runs here, in jinja2's sandbox, in a process with bounds (`homeserve.text.helper_child`).
"""

from __future__ import annotations

import sys

import msgspec
from jinja2 import Template, TemplateError
from jinja2.exceptions import SecurityError, TemplateSyntaxError, UndefinedError

from homeserve.text import template_dialect
from homeserve.text.helper_child import serve
from homeserve.text.helper_wire import frame
from homeserve.text.template_wire import Render, Rendered, Setup

_ERROR_CHARS_MAX = 500


def main() -> int:
    """Serve until standard input ends."""
    return serve(Setup, lambda setup: _Renderer(setup).answer)


class _Renderer:
    """Compiles each template once, when it is first asked for."""

    def __init__(self, setup: Setup) -> None:
        self._environment = template_dialect.environment()
        self._sources = setup.templates
        self._chars_max = setup.output_chars_max
        self._compiled: dict[str, Template] = {}

    def answer(self, body: bytes) -> bytes:
        rendered = self.render(msgspec.json.decode(body, type=Render))
        try:
            return frame(rendered)
        except UnicodeEncodeError:
            return frame(Rendered(error="the chat template wrote half a surrogate pair"))

    def render(self, call: Render) -> Rendered:
        try:
            return Rendered(text=self._text(call))
        except _TooLong:
            return Rendered(error=f"the chat template wrote more than {self._chars_max} characters")
        except template_dialect.TemplateRefusal as error:
            return _failed("the chat template refuses these messages", error)
        except TemplateSyntaxError as error:
            return _failed(f"the model's chat template is not valid (line {error.lineno})", error)
        except SecurityError as error:
            return _failed("the model's chat template does what the sandbox forbids", error)
        except UndefinedError as error:
            return _failed("the chat template misses something in the messages", error)
        except TemplateError as error:
            return _failed("the chat template failed", error)
        except MemoryError:
            return Rendered(error="the chat template used more memory than it may")
        except RecursionError:
            return Rendered(error="the chat template or the messages are nested too deeply")
        except Exception as error:  # noqa: BLE001  a template is a program of strangers: it may raise anything
            return _failed(f"the chat template failed with {type(error).__name__}", error)

    def _text(self, call: Render) -> str:
        template = self._compiled.get(call.template)
        if template is None:
            template = self._compiled[call.template] = self._environment.from_string(self._sources[call.template])
        parts: list[str] = []
        left = self._chars_max
        for part in template.generate(call.context):
            left -= len(part)
            if left < 0:
                raise _TooLong
            parts.append(part)
        return "".join(parts)


class _TooLong(Exception):
    pass


def _failed(what: str, error: Exception) -> Rendered:
    said = str(error).strip()[:_ERROR_CHARS_MAX].encode("utf-8", "replace").decode()
    return Rendered(error=f"{what}: {said}" if said else what)


if __name__ == "__main__":
    sys.exit(main())
