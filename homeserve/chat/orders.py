"""Lines that begin with a slash: what each of them asks for. Pure."""

from __future__ import annotations

import difflib
import textwrap
from dataclasses import dataclass

from homeserve.errors import SettingError

SLASH = "/"


@dataclass(frozen=True)
class Order:
    """`argument` is what `/help` calls what comes behind the name; empty: nothing may."""

    name: str
    argument: str
    help: str

    @property
    def usage(self) -> str:
        return f"{SLASH}{self.name} {self.argument}".rstrip()


ORDERS = (
    Order("help", "", "this list"),
    Order("exit", "", "leave, as Ctrl-D does"),
    Order("reset", "", "forget what was said"),
    Order("retry", "", "ask the last question again, for another answer"),
    Order("undo", "", "take back the last question and its answer"),
    Order("edit", "", "write the next message in $VISUAL or $EDITOR; behind /undo the one that was taken back"),
    Order("system", "[TEXT]", "say what the model should be, or nothing again"),
    Order("model", "[ID]", "list the server's models, or talk to another one"),
    Order("set", "[NAME [VALUE]]", "a field of sampling, such as temperature 0.7; without a value the server's own"),
    Order("save", "FILE", "write the conversation: Markdown, or what /load reads where the name ends in .json"),
    Order("load", "FILE", "go on with a conversation that was saved as .json"),
    Order("stats", "", "numbers of the last answer"),
)
_ALIASES = {"quit": "exit", "new": "reset", "clear": "reset", "regenerate": "retry", "?": "help"}
_BY_NAME = {order.name: order for order in ORDERS}


class BadOrder(SettingError):
    """Why a line is none of the orders, or one that cannot be done."""


@dataclass(frozen=True)
class Given:
    """An order with its argument, as it was typed."""

    name: str
    argument: str


def parsed(line: str) -> Given | None:
    """None where a line is no order but something to ask. Raises BadOrder."""
    if not line.startswith(SLASH) or "\n" in line:
        return None
    word, _, argument = line[1:].strip().partition(" ")
    if SLASH in word:  # a path is a question, too
        return None
    name = _ALIASES.get(word, word)
    order = _BY_NAME.get(name)
    if order is None:
        near = difflib.get_close_matches(word, [*_BY_NAME, *_ALIASES], 1)
        hint = f"; did you mean {SLASH}{near[0]}?" if near else f"; {SLASH}help lists what there is"
        raise BadOrder(f"there is no {SLASH}{word}{hint}")
    argument = argument.strip()
    if argument and not order.argument:
        raise BadOrder(f"{SLASH}{name} takes nothing behind it")
    if not argument and order.argument and not order.argument.startswith("["):
        raise BadOrder(f"{order.usage}: {order.argument} is missing")
    return Given(name, argument)


def help_text(width: int) -> str:
    """Usage and help side by side, or below each other where the terminal is narrow."""
    column = max(len(order.usage) for order in ORDERS) + 2
    if column + 30 > width:
        return "\n".join(
            f"{order.usage}\n{textwrap.indent(textwrap.fill(order.help, width - 2), '  ')}" for order in ORDERS
        )
    indent = " " * column
    return "\n".join(
        textwrap.fill(f"{order.usage:{column}}{order.help}", width, subsequent_indent=indent) for order in ORDERS
    )
