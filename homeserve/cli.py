"""The `homeserve` command: argv in, exit code out.

Two things are done before anything slow is imported. Signals: until a command has something to clean up, Ctrl-C and
SIGTERM end the process at once with 130, without a traceback. And the names: `backends` and `budget` are so general
that another distribution may have installed them over ours, which would fail later in a way nobody understands.

Commands are modules of `homeserve.commands`, imported when they are asked for, each with `add_arguments(parser)` and
`run(args, environ) -> int`. The user's mistakes are `HomeserveError`s: one message and what to do about it on stderr,
or JSON on stdout where JSON was asked for.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, NoReturn, Protocol, cast

if TYPE_CHECKING:
    import argparse

INTERRUPTED = 130

COMMANDS = {
    "up": "load a model and serve it",
    "serve": "the same as up",
    "chat": "talk to a model in the terminal",
    "bench": "measure a server: speed, memory, start, flips",
    "ps": "list the servers that run",
    "down": "stop a server",
    "logs": "show the log of a server",
    "budget": "say what fits on this box, what binds and what to change",
    "probe": "say what this box is, as a profile that budget can plan with",
    "pull": "fetch a model and print where it lies",
    "doctor": "say what was found on this machine and what is missing",
    "service": "run a server as a service of this user, from login on",
}
_ALIASES = {"serve": "up"}
_SERVING = ("up", "serve")
"""Commands that do their work also where nobody hears them."""


class Command(Protocol):
    """What a module of `homeserve.commands` offers."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, args: argparse.Namespace, environ: Mapping[str, str]) -> int: ...


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that `argv` (default: the process's) asks for; returns the exit code."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _leave)
    given = list(sys.argv[1:] if argv is None else argv)
    if not _hold_streams() and given[:1] not in ([name] for name in _SERVING):
        print("homeserve: error: standard output is closed: nothing could be said", file=sys.stderr)
        return 1
    try:
        code = _run(given)
        sys.stdout.flush()
    except OSError as error:
        if not _is_of_stdout(error):
            raise
        return _unheard(error)
    return code


def _run(given: list[str]) -> int:
    from homeserve.errors import HomeserveError

    try:
        return _dispatch(given)
    except HomeserveError as error:
        from homeserve.commands.report import report

        return report(error, as_json=_wants_json(given))


def _hold_streams() -> bool:
    """Files that are opened later must not become the standard streams: those that are closed are put on the null
    device. False where stdout is one of them."""
    heard = sys.stdout is not None
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # The lowest number that is free is the stream's own: the streams are held in the order of their numbers.
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))
    return heard


def _is_of_stdout(error: OSError) -> bool:
    """Whether standard output is what cannot be written. A file that could not be opened has a name; what failed on
    flush stays in the buffer and fails again."""
    if error.filename is not None:
        return False
    if isinstance(error, BrokenPipeError) or error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
        return True
    try:
        sys.stdout.flush()
    except OSError:
        return True
    return False


def _unheard(error: OSError) -> int:
    """Standard output cannot be written. Where its reader went away (`homeserve ps | head`) nothing is left to say."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())  # for what still lies in the buffer
    os.close(null)
    if not isinstance(error, BrokenPipeError):
        print(f"homeserve: error: standard output cannot be written: {error.strerror}", file=sys.stderr)
    return 1


def _dispatch(given: list[str]) -> int:
    if not given or given[0] in ("-h", "--help", "help"):
        print(_overview())
        return 0 if given else 2
    if given[0] in ("-V", "--version", "version"):
        from homeserve import __version__

        print(f"homeserve {__version__}")
        return 0
    name = given[0]
    if name not in COMMANDS:
        _refuse(name)
    _check_owner()

    from importlib import import_module

    from homeserve.settings import environment, refuse_unknown

    command = cast("Command", import_module(f"homeserve.commands.{_ALIASES.get(name, name)}"))
    parser = _parser(name, command)
    command.add_arguments(parser)
    args, unknown = parser.parse_known_args(given[1:])
    refuse_unknown(parser, unknown)
    return command.run(args, environment())


def _parser(name: str, command: Command) -> argparse.ArgumentParser:
    import argparse

    class Parser(argparse.ArgumentParser):
        """Mistakes become SettingErrors, so that they are told like all others."""

        def error(self, message: str) -> NoReturn:
            from homeserve.errors import SettingError

            raise SettingError(message, field=_argument_of(message), fix=f"see {self.prog} --help")

    return Parser(
        prog=f"homeserve {name}",
        description=(command.__doc__ or "").strip(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def _argument_of(message: str) -> str | None:
    """The argument that one of argparse's messages is about."""
    import re

    match = re.match(r"argument (?:\S+/)?-*([\w-]+):", message)
    return match.group(1).replace("-", "_") if match else None


def _refuse(name: str) -> NoReturn:
    from homeserve.errors import SettingError
    from homeserve.settings import near

    fix = f"use one of {', '.join(COMMANDS)}; see homeserve --help"
    raise SettingError(f"{name}: no such command{near(name, list(COMMANDS))}", field="command", fix=fix)


def _overview() -> str:
    from homeserve import __version__

    lines = [
        f"homeserve {__version__}: an LLM server for the box you have at home",
        "",
        "usage: homeserve COMMAND [...]",
    ]
    lines += ["", *(f"  {name:8} {summary}" for name, summary in COMMANDS.items()), ""]
    lines += ["homeserve COMMAND --help tells more. `homeserve up` alone serves a small default model."]
    return "\n".join(lines)


def _check_owner() -> None:
    """Raise SettingError when `backends` or `budget` is somebody else's package."""
    from homeserve.errors import SettingError

    for name in ("backends", "budget"):
        where, owner = _owner(name)
        if owner != "homeserve":
            raise SettingError(
                f"the package {name!r} at {where} is not homeserve's{_distribution(name)}",
                field=name,
                fix="install homeserve into an environment of its own",
            )


def _owner(name: str) -> tuple[str, str | None]:
    from importlib import import_module

    try:
        module = import_module(name)
    except ImportError as error:
        return str(error.path or error), None
    return module.__file__ or str(getattr(module, "__path__", "?")), getattr(module, "OWNER", None)


def _distribution(name: str) -> str:
    """`, but of the distribution X` where the installed metadata tell."""
    from importlib.metadata import packages_distributions

    others = [other for other in packages_distributions().get(name, []) if other != "homeserve"]
    return f", but of the distribution {', '.join(others)}" if others else ""


def _wants_json(given: Sequence[str]) -> bool:
    """Also where the word is misspelt (`--js`, `--json=1`): who asks so reads the answer with a program."""
    return any(word.startswith("--js") or word == "--print-config" for word in given)


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    os._exit(INTERRUPTED)
