"""The helper process that renders chat templates: `python -m homeserve.text.template_worker PARENT_PID`.

A template comes with the model file and is a program: it may loop for ever, eat memory, or look for a way out. So it
runs here, in jinja2's sandbox, in a process that holds nothing worth taking (few environment variables, no files),
that cannot write files, that has bounds on memory and CPU, and that its parent can kill. It ends when its parent does:
by the end of its standard input, and on Linux by a signal.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from typing import IO

import msgspec
from jinja2 import Template, TemplateError
from jinja2.exceptions import SecurityError, TemplateSyntaxError, UndefinedError

from homeserve.text import template_dialect, template_wire
from homeserve.text.template_wire import LENGTH, MESSAGE_BYTES_MAX, Ready, Render, Rendered, Setup

_PR_SET_PDEATHSIG = 1
_ERROR_CHARS_MAX = 500


def main() -> int:
    """Serve until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _die_with(int(sys.argv[1]))
    incoming, outgoing = sys.stdin.buffer, sys.stdout.buffer
    first = _read(incoming)
    if first is None:
        return 0
    setup = msgspec.json.decode(first, type=Setup)
    renderer = _Renderer(setup)
    _limit(setup.memory_mib)
    _send(outgoing, Ready(os.getpid()))
    while (body := _read(incoming)) is not None:
        _limit_cpu(setup.cpu_s)
        _send(outgoing, renderer.render(msgspec.json.decode(body, type=Render)))
    return 0


class _Renderer:
    """Compiles each template once, when it is first asked for."""

    def __init__(self, setup: Setup) -> None:
        self._environment = template_dialect.environment()
        self._sources = setup.templates
        self._chars_max = setup.output_chars_max
        self._compiled: dict[str, Template] = {}

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


def _read(incoming: IO[bytes]) -> bytes | None:
    """The next message; None at the end of the stream, or of what can be trusted."""
    head = incoming.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    if length > MESSAGE_BYTES_MAX:
        return None
    body = incoming.read(length)
    return body if len(body) == length else None


def _send(outgoing: IO[bytes], message: Ready | Rendered) -> None:
    try:
        data = template_wire.frame(message)
    except UnicodeEncodeError:
        data = template_wire.frame(Rendered(error="the chat template wrote half a surrogate pair"))
    outgoing.write(data)
    outgoing.flush()


def _die_with(parent: int) -> None:
    """Have the kernel end this process with its parent, where it can; the end of standard input does it elsewhere."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(0)


def _limit(memory_mib: int) -> None:
    """Bounds that hold from here on. A system that refuses one (macOS: address space) still has the parent's clock."""
    wanted = [(resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CORE, 0), (resource.RLIMIT_AS, memory_mib << 20)]
    for kind, bound in wanted:
        try:
            resource.setrlimit(kind, (bound, bound))
        except (ValueError, OSError) as error:
            sys.stderr.write(f"template helper: no bound on resource {kind}: {error}\n")


def _limit_cpu(seconds: int) -> None:
    """A bound on the CPU time of the rendering that follows, should the parent be too busy to look at its clock."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    soft = int(usage.ru_utime + usage.ru_stime) + 1 + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


if __name__ == "__main__":
    sys.exit(main())
