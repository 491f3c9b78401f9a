"""Measure a server over its HTTP API: prefill, decode, many streams, first token, start, memory, flips, steps.

The server at --url, or a temporary one of MODEL (without it the default model) that is started with the options of
`homeserve up` given here and ended with the command.

Tests, by --tests with commas between: ppN prompt tokens/s, tgN@D tokens/s of an answer of N behind D tokens, concN
total tokens/s of N streams, ttftN ms to the first token, start seconds to the first token, rss MiB of all processes,
flip ms and MiB/s of a change of layout, step engine ms of a step. Of several ranks both layouts are measured.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from http.client import HTTPException
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn
from urllib.parse import urlsplit

from homeserve import settings as table
from homeserve.bench import document, names, origin
from homeserve.bench.client import Refused, Target, Unmeasured
from homeserve.bench.machine import Machine, examine
from homeserve.bench.names import Test
from homeserve.bench.prompts import Prompts
from homeserve.bench.run import STREAMS, Run, WentAway, labels
from homeserve.bench.subject import Subject, read, token_ids
from homeserve.commands import written
from homeserve.commands.bench_told import Told
from homeserve.commands.reach import first_key
from homeserve.commands.report import report
from homeserve.commands.temporary import TemporaryServer
from homeserve.errors import SettingError
from homeserve.instances import running
from homeserve.settings import Option, flag, options, runtime_dir

if TYPE_CHECKING:
    import argparse

    from homeserve.settings import Settings

INTERRUPTED = 130
REPEAT_MOST = 1000
STDOUT = "-"
REFUSED_FLAGS = ("host", "port", "ready_file", "print_config")
"""Those of `up` that are the temporary server's own matter."""
WITH_URL = ("api_key_file", "model_id")
"""Those of `up` that also say how a running server is asked."""
UNREPEATED = ("api_key_file", "cache_dir", "capture_dir", "ready_file")
"""Folders and files of this machine: not in the command that a result names."""

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Ctrl-C, the request to end, and what comes when the window is closed."""
_REPEAT = Option("int", "", "", low=1, high=REPEAT_MOST)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    own = parser.add_argument_group("Bench")
    own.add_argument("--url", metavar="URL", help="a server that runs, such as http://127.0.0.1:8000")
    own.add_argument("--tests", metavar="A,B", default=names.USUAL, help=f"{names.FORMS} (default: {names.USUAL})")
    own.add_argument("--repeat", metavar="N", default="3", help="runs of each test that count (default: 3)")
    own.add_argument("--json", metavar="FILE", help="write the result there; - for stdout")
    own.add_argument("--csv", metavar="FILE", help="write the rows there")
    own.add_argument("--svg", metavar="FILE", help="draw the rows there")
    table.add_flags(parser)


def run(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    tests = names.parse(args.tests)
    repeat = int(_REPEAT.convert(args.repeat, "--repeat", "repeat"))
    for name, kind in (("json", written.JSON), ("csv", written.CSV), ("svg", written.PICTURE)):
        if (path := getattr(args, name)) is not None and (name, path) != ("json", STDOUT):
            written.check(flag(name), path, kind)
    out = sys.stderr if args.json == STDOUT else sys.stdout
    told = Told(out, sys.stderr, environ)
    with ExitStack() as stack:
        stack.enter_context(_interruptible())
        try:
            host = _running(args, environ) if args.url is not None else _temporary(args, tests, environ, told)
            machine = examine() if host.here else None
            if isinstance(host, Temporary):
                stack.callback(host.stop)
                told.note("starting a temporary server …", keep=False)
                host.restart()
            return Bench(args, tests, repeat, told, host, machine).go()
        except KeyboardInterrupt:
            told.note("interrupted: what is above is what was measured")
            return INTERRUPTED
        finally:
            _deaf()


class Bench:
    """One run of the command, from the first look at the server to the files."""

    def __init__(
        self,
        args: argparse.Namespace,
        tests: Sequence[Test],
        repeat: int,
        told: Told,
        host: Temporary | Running,
        machine: Machine | None,
    ) -> None:
        self._args, self._tests, self._repeat = args, tests, repeat
        self._told, self._host, self._machine = told, host, machine

    def go(self) -> int:
        """The exit code. What is known when it ends, however it ends, is written."""
        about, prompts = _look(self._host)
        machine = self._machine
        if machine is not None and not machine.load.quiet:
            load = f"load average {machine.load.load_average:.1f} on {machine.load.cores} cores"
            self._told.note(f"the machine is busy ({load}): figures are lower than on a quiet one, and vary more")
        self._told.begin(about, labels(self._tests, about), machine.words() if machine is not None else None)
        made = Run(self._host, about, prompts, self._repeat, self._told, time.monotonic)
        whole = False
        try:
            made.go(self._tests)
            whole = True
        except WentAway as error:
            self._told.end()
            return report(error)
        finally:
            self._told.end()
            self._write(made, about, whole)
        return 0

    def _write(self, made: Run, about: Subject, whole: bool) -> None:
        args = self._args
        if args.json is not None:
            found = document.document(made.rows, self._facts(about) | {"complete": whole})
            text = json.dumps(found, indent=1, allow_nan=False) + "\n"
            if args.json == STDOUT:
                sys.stdout.write(text)
                sys.stdout.flush()
            else:
                written.write("--json", args.json, text)
        if args.csv is not None:
            written.write("--csv", args.csv, document.as_csv(made.rows))
        if args.svg is not None:
            written.write("--svg", args.svg, document.picture(f"{about.model}, {about.engine}", made.rows))

    def _facts(self, about: Subject) -> dict[str, Any]:
        machine = self._machine
        device = {name: getattr(machine, name, None) for name in ("cpu", "cores", "read_gb_s")}
        return {
            "commit": about.commit or (origin.commit() if isinstance(self._host, Temporary) else None),
            "date": origin.today(),
            "command": _command(self._args),
            "version": about.version,
            "device": device | {"isa": about.isa},
            "model": about.as_json(),
            "repeat": self._repeat,
            "load": machine.load.as_json() if machine is not None else None,
            "notes": list(self._told.notes),
        }


# ------------------------------------------------------------------------------------------------------------- servers


class Temporary:
    """A server of this command's own."""

    here = True

    def __init__(self, model: str | None, flags: Sequence[str], target: Target) -> None:
        self.target = target
        self.pid: int | None = None
        self._model, self._flags = model, flags
        self._server: TemporaryServer | None = None

    def restart(self) -> float:
        self.stop()
        self._server = TemporaryServer(self._model, self._flags)
        self.target.url = self._server.start()
        self.pid = self._server.pid
        return self._server.spawned

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop()
        self._server = None


class Running:
    """A server that runs already. `pid`: of one of this user on this machine; `here` then."""

    def __init__(self, target: Target, pid: int | None) -> None:
        self.target, self.pid = target, pid
        self.here = pid is not None

    def restart(self) -> float:
        raise Unmeasured("the server at --url runs already: without --url a temporary one is started")


def _temporary(args: argparse.Namespace, tests: Sequence[Test], environ: Mapping[str, str], told: Told) -> Temporary:
    """Not yet started. Raises SettingError."""
    given = next((name for name in REFUSED_FLAGS if getattr(args, name, None)), None)
    if given is not None:
        what = f"{flag(given)}: the temporary server has its own"
        raise SettingError(
            what, field=given, fix="leave it out, or start a server with homeserve up and name its --url"
        )
    settings = table.check_together(table.resolve(args, environ, os.getcwd()))
    key = first_key(settings.api_key_file, environ)
    own = _own_flags(settings, tests)
    for name, value in zip(own[::2], own[1::2], strict=True):
        told.note(f"the temporary server has {name} {value}: a test needs it")
    return Temporary(settings.model, [*_flags(args), *own], Target(engine="homeserve", key=key))


def _own_flags(settings: Settings, tests: Sequence[Test]) -> list[str]:
    """What tests need and nobody has said otherwise: as many streams at once; ranks that keep their layout until they
    are asked."""
    own: list[str] = []
    streams = max([0, *(test.count for test in tests if test.kind == "conc")])
    if any(test.kind == "step" for test in tests):
        streams = max(streams, *STREAMS)
    if streams > settings.max_running and "max_running" not in settings.sources:
        own += ["--max-running", str(streams)]
    if table.flip_mode(settings) == "auto" and "flip" not in settings.sources:
        own += ["--flip", "manual"]
    return own


def _flags(args: argparse.Namespace) -> list[str]:
    """The words of the command line for `up`, MODEL left out. An open request ends with this command at once."""
    words = ["--drain-timeout-s", "0"]
    for name, option in options().items():
        value = getattr(args, name, None)
        if value is None or name == "model":
            continue
        if option.kind == "flag":
            words.append(flag(name) if value else f"--no-{name.replace('_', '-')}")
        else:
            words += [flag(name), str(value)]
    return words


def _running(args: argparse.Namespace, environ: Mapping[str, str]) -> Running:
    """Raises SettingError for what is no address, and for settings of a server that is not started here."""
    url = _address(args.url)
    model = getattr(args, "positional_model", None)
    if model is not None:
        raise SettingError("MODEL is for a temporary server, and --url names one", field="url", fix="leave one out")
    for name in options():
        if name not in WITH_URL and getattr(args, name, None) is not None:
            what = f"{flag(name)} is for a temporary server, and --url names one"
            raise SettingError(what, field=name, fix="leave one out")
    place = urlsplit(url)
    found = [
        each
        for each in running(runtime_dir(environ))
        if each.port == place.port and place.hostname in ("127.0.0.1", "::1", "localhost", urlsplit(each.url).hostname)
    ]
    target = Target(engine="unknown", url=url, key=first_key(args.api_key_file, environ), model=args.model_id)
    return Running(target, found[0].pid if found else None)


def _address(url: str) -> str:
    """`http://host:port`, also of an address that ends in /v1. Raises SettingError."""
    bare = url.strip().rstrip("/").removesuffix("/v1").rstrip("/")
    try:
        place = urlsplit(bare)
        good = place.scheme in ("http", "https") and place.hostname and not place.path and not place.query
        _ = place.port
    except ValueError:
        good = None
    if not good:
        fix = "write it like http://127.0.0.1:8000"
        raise SettingError(f"--url: {url[:80]!r} is not the address of a server", field="url", fix=fix)
    return bare


def _look(host: Temporary | Running) -> tuple[Subject, Prompts | Unmeasured]:
    """What the server tells of itself, and prompts for it, or why there are none. Raises SettingError where it does not
    answer, or not to us."""
    url = host.target.url
    try:
        about = read(host.target, here=host.here)
        return about, _prompts(host.target)
    except Refused as error:
        if error.status in (401, 403):
            said = "wants an API key" if host.target.key is None else f"refuses this API key: {error.said}"
            raise SettingError(f"{url}: {said}", field="api_key_file", fix="give --api-key-file FILE") from None
        raise SettingError(f"{url}: {error}", field="url", fix="see homeserve ps") from None
    except Unmeasured as error:
        raise SettingError(f"{url}: {error}", field="url", fix="name a server with an OpenAI API") from None
    except (OSError, HTTPException) as error:
        what = f"{url}: no server answers: {getattr(error, 'strerror', None) or error or type(error).__name__}"
        raise SettingError(what, field="url", fix="see homeserve ps") from None


def _prompts(target: Target) -> Prompts | Unmeasured:
    # Drawn anew for each run of the command: a prompt that the server has met before would be read from its cache.
    source = random.Random()
    try:
        return Prompts(source, token_ids(target, source))
    except Unmeasured as error:
        return error


# --------------------------------------------------------------------------------------------------------- the command


def _command(args: argparse.Namespace) -> str:
    """How the run is repeated, without folders of this machine."""
    words = ["homeserve", "bench"]
    model = args.positional_model or args.model
    if args.url is not None:
        words += ["--url", args.url]
    if model is not None:
        words.append(os.path.basename(model.rstrip("/")))
    words += ["--tests", args.tests, "--repeat", args.repeat]
    for name in options():
        value = getattr(args, name, None)
        if value is not None and name not in ("model", *UNREPEATED):
            words += [flag(name), str(value)]
    return " ".join(words)


@contextmanager
def _interruptible() -> Iterator[None]:
    """What ends the run does so by the ordinary way out, which stops a temporary server. Under nohup the end of the
    terminal is none."""
    heard = [each for each in _ENDING if each != signal.SIGHUP or signal.getsignal(each) != signal.SIG_IGN]
    before = {number: signal.signal(number, _interrupt) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def _deaf() -> None:
    """From here on what was started is ended: a second Ctrl-C must not leave it behind."""
    for number in _ENDING:
        signal.signal(number, signal.SIG_IGN)
