"""Jinja as chat templates are written for it, in the sandbox that a stranger's template needs.

The dialect is the one of the `transformers` library: blocks trimmed, loop controls, `raise_exception`, `strftime_now`,
a `tojson` that writes plain JSON, and `{% generation %}` blocks (marks for training: their content is rendered as it
is). The environment is jinja2's immutable sandbox: no attribute that leads to Python's insides, no change of arguments.
"""

from __future__ import annotations

import datetime
import json
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class TemplateRefusal(TemplateError):
    """The template called `raise_exception`: it does not take these messages."""


class _GenerationBlock(Extension):
    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


def environment() -> ImmutableSandboxedEnvironment:
    """A fresh environment of the dialect."""
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, autoescape=False, extensions=[_GenerationBlock, loopcontrols]
    )
    env.filters["tojson"] = _tojson
    env.globals["raise_exception"] = _raise_exception
    env.globals["strftime_now"] = _strftime_now
    return env


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object = "") -> NoReturn:
    raise TemplateRefusal(str(message))


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)
