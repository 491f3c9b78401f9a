"""Run a server as a service of this user: started at login, started again when it fails.

  homeserve service install [MODEL] [flags of up]   check them, write the unit, start it and wait until it is ready
  homeserve service status                          what runs, where and since when, or why it does not
  homeserve service remove                          stop it and remove the unit

The unit is systemd's, of the user: no root is needed. `install --dry-run` prints it and changes nothing.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from budget.page import safe
from homeserve import settings as table
from homeserve.commands import service_unit as unit
from homeserve.commands.ps import duration
from homeserve.commands.service_manager import Manager, ManagerError, State
from homeserve.errors import SettingError
from homeserve.instances import CANCEL_LIMIT_S, TEARDOWN_LIMIT_S, running, write_atomically
from homeserve.settings import Settings, cache_dir, chosen, flag, runtime_dir

if TYPE_CHECKING:
    import argparse

POLL_S = 0.2
IDLE_POLLS = 50
"""A start that was asked for and of which nothing is seen for so many polls is over: somebody stopped it."""
LAST_LINES = 8
"""Of the log, told where a start failed."""
NOT_ACTIVE = 1
"""Exit code of `status` where nothing serves."""
_NOT_OF_A_SERVICE = ("ready_file",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="install | status | remove", required=True)
    install = actions.add_parser("install", allow_abbrev=False, help="write the unit and start it")
    table.add_flags(install)
    group = install.add_argument_group("Service")
    group.add_argument("--dry-run", action="store_true", help="print the unit and change nothing")
    group.add_argument("--force", action="store_true", help="replace a unit of homeserve that says something else")
    group.add_argument("--linger", action="store_true", help="run it without a login too (loginctl enable-linger)")
    status = actions.add_parser("status", allow_abbrev=False, help="say what runs, or why it does not")
    status.add_argument("--json", action="store_true", help="print {installed, enabled, active, pid, url, model, ...}")
    actions.add_parser("remove", allow_abbrev=False, help="stop it and remove the unit")


def run(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    if args.action == "install":
        return _install(args, environ)
    if args.action == "status":
        return _status(environ, as_json=args.json)
    return _remove(environ)


# -------------------------------------------------------------------------------------------------------------- install


def _install(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    settings = table.check_together(table.resolve(args, environ, os.getcwd()))
    if settings.print_config:
        print(json.dumps(settings.as_json(), indent=2))
        return 0
    service = service_of(settings, environ, os.getcwd())
    text = unit.render(service)
    if args.dry_run:
        print(text, end="")
        return 0
    manager = Manager(environ)
    manager.check()
    for warning in settings.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    path = unit.unit_path(environ)
    _write(path, text, force=args.force)
    if args.linger:
        manager.linger()
    manager.reload()
    if not manager.state().loaded:
        fix = "is XDG_CONFIG_HOME set in this shell alone? Then unset it, or set it at login too"
        raise ManagerError(f"systemd does not read {path}", field="service", fix=fix)
    manager.enable()
    manager.start(service.stop_s)
    state = wait_settled(manager.state, tell=lambda status: print(f"       {status}", flush=True))
    _tell_start(state, environ, manager)
    return 0


def service_of(settings: Settings, environ: Mapping[str, str], cwd: str) -> unit.Service:
    """The service that starts `homeserve up` with what flags and variables say. Raises SettingError for a model or key
    file that is not there, before anything is written."""
    table.read_api_keys(settings.api_key_file)
    entries = chosen(settings)
    names: list[str | None] = [entry.path for entry in entries]
    for name in names or [settings.model]:
        _check_model(name)
    here = (Path(cwd) / "homeserve.toml").is_file()
    home = environ.get("HOME") or str(Path.home())
    return unit.Service(
        program=[os.path.abspath(sys.executable), "-P", "-m", "homeserve", "up"],
        arguments=arguments_of(settings, cwd),
        folder=cwd if here else home,
        environ={name: environ[name] for name in unit.KEPT_VARIABLES if environ.get(name)},
        model=settings.model or ("the models of homeserve.toml" if entries else "the default model"),
        stop_s=settings.leaving_s + CANCEL_LIMIT_S + TEARDOWN_LIMIT_S,
    )


def arguments_of(settings: Settings, cwd: str) -> list[str]:
    """Arguments of `up` for every setting that a flag or a variable gave. Those of homeserve.toml stay in it."""
    words: list[str] = []
    for name, option in table.options().items():
        said = settings.sources.get(name)
        if said not in (flag(name), table.variable(name)):
            continue
        if name in _NOT_OF_A_SERVICE:
            fix = "leave it out: systemd itself is told when the server is ready"
            raise SettingError(f"{said}: is not for a service", field=name, fix=fix)
        value = getattr(settings, name)
        if option.kind == "flag":
            words.append(flag(name) if value else f"--no-{name.replace('_', '-')}")
            continue
        words += [flag(name), _said(name, option.kind, value, cwd)]
    return words


def _said(name: str, kind: str, value: Any, cwd: str) -> str:
    """A value as `up` reads it, wherever it is started: paths are absolute."""
    if kind == "folder" and value is None:
        return "off"
    if kind in ("path", "folder") or (name == "model" and os.path.exists(value)):
        return os.path.normpath(os.path.join(cwd, value))
    if kind == "switch":
        return "on" if value else "off"
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "auto"
    return f"{value:.15g}" if isinstance(value, float) else str(value)


def _check_model(name: str | None) -> None:
    """Raises ModelNotFound for what is neither a file, an alias nor of the hub: nothing is fetched here."""
    if name is None or name.startswith("hf:") or os.path.exists(name):
        return
    from homeserve.checkpoint import names

    if name.lower() not in names.ALIASES:
        names.resolve(name, cache_dir="")


def _write(path: Path, text: str, *, force: bool) -> None:
    """Raises SettingError where a unit lies there that must stay."""
    there = unit.read_unit(path)
    if there is not None:
        unit.check_ours(path, there)
        if unit.meaning(there) == unit.meaning(text):
            print(f"unit   {path} is there already and says the same")
            return
        if not force:
            print(
                "\n".join(["what is there (-) and what you ask for (+):", *unit.differences(there, text)]),
                file=sys.stderr,
            )
            raise SettingError(
                f"{path}: there is a unit of homeserve that says something else",
                field="service",
                fix="add --force to replace it",
            )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text)
    except OSError as error:
        raise SettingError(f"{path}: cannot be written: {error.strerror}", field="service") from None
    print(f"unit   {path} {'replaced' if there is not None else 'written'}")


def wait_settled(
    read: Callable[[], State], *, tell: Callable[[str], None], pause: Callable[[float], None] = time.sleep
) -> State:
    """The state once the start is over, however long the load takes. `tell` gets each new status line on the way."""
    told, idle = "", 0
    while not (state := read()).is_settled:
        idle = idle + 1 if state.active == "inactive" else 0
        if idle >= IDLE_POLLS:
            break
        if state.status and state.status != told:
            told = state.status
            tell(told)
        pause(POLL_S)
    return state


def _tell_start(state: State, environ: Mapping[str, str], manager: Manager) -> None:
    """Raises ManagerError where it did not come up."""
    if state.active != "active":
        how = _ended(state)
        for line in manager.last_lines(LAST_LINES):
            print(f"       {safe(line)}", file=sys.stderr)
        raise ManagerError(
            f"the service did not come up: {how}",
            field="service",
            fix="why: journalctl --user -u homeserve -n 30; the unit stays, homeserve service remove takes it away",
        )
    url, model = _served_by(state.pid, environ)
    print(f"ready  {url or 'the server'} serves {model or 'its model'} (pid {state.pid})")
    print("log    journalctl --user -u homeserve -f")
    if not manager.lingers():
        print("note   it runs while you are logged in; from boot on with: loginctl enable-linger")


# --------------------------------------------------------------------------------------------------------------- status


def _status(environ: Mapping[str, str], *, as_json: bool) -> int:
    path = unit.unit_path(environ)
    text = unit.read_unit(path)
    manager = Manager(environ)
    manager.check()
    state = manager.state()
    facts = facts_of(path, text, state, environ)
    if as_json:
        print(json.dumps(facts))
    else:
        print("\n".join(lines_of(facts, time.time())))
    return 0 if state.active == "active" and text is not None else NOT_ACTIVE


def facts_of(path: Path, text: str | None, state: State, environ: Mapping[str, str]) -> dict[str, Any]:
    """What `status --json` prints."""
    url, model = _served_by(state.pid, environ)
    return {
        "schema": 1,
        "installed": text is not None,
        "ours": text is not None and unit.is_ours(text),
        "path": str(path),
        "enabled": state.enabled,
        "active": state.active == "active",
        "state": f"{state.active} ({state.sub})" if state.sub else state.active,
        "status": state.status,
        "pid": state.pid,
        "url": url,
        "model": model,
        "since": state.since if state.active == "active" else None,
        "restarts": state.restarts,
        "last_exit": state.last_exit,
    }


def lines_of(facts: Mapping[str, Any], now: float) -> list[str]:
    """What `status` prints to a person."""
    if not facts["installed"]:
        return [f"no service: {facts['path']} is not there; homeserve service install makes it"]
    since = f" for {duration(max(0.0, now - facts['since']))}" if facts["since"] else ""
    pid = f", pid {facts['pid']}" if facts["pid"] else ""
    restarts = f", restarted {facts['restarts']} times" if facts["restarts"] else ""
    lines = [
        f"unit     {facts['path']}{'' if facts['ours'] else ' (not written by homeserve)'}",
        f"starts   {'at login' if facts['enabled'] else 'only by hand: it is not enabled'}",
        f"state    {facts['state']}{since}{pid}{restarts}",
    ]
    if facts["url"]:
        lines.append(f"serves   {facts['model']} at {facts['url']}")
    elif facts["status"]:
        lines.append(f"says     {facts['status']}")
    if facts["last_exit"] and not facts["active"]:
        lines.append(f"ended    {_exit_text(facts['last_exit'])}")
    if not facts["active"]:
        lines.append("log      journalctl --user -u homeserve -n 30")
    return lines


def _served_by(pid: int | None, environ: Mapping[str, str]) -> tuple[str | None, str | None]:
    """URL and model of the server with this pid."""
    found = [each for each in running(runtime_dir(environ)) if each.pid == pid]
    return (found[0].url, found[0].model) if found else (None, None)


def _ended(state: State) -> str:
    return _exit_text(state.last_exit) if state.last_exit else state.result or state.active


def _exit_text(last: Mapping[str, Any]) -> str:
    if last["how"] != "exited":
        return f"{last['how']} by signal {last['status']}"
    meaning = {0: "it ended by itself", 2: "a setting, the model or the memory cannot work", 3: "a worker failed"}
    words = meaning.get(last["status"], last["result"])
    return f"exit code {last['status']} ({words})"


# --------------------------------------------------------------------------------------------------------------- remove


def _remove(environ: Mapping[str, str]) -> int:
    path = unit.unit_path(environ)
    text = unit.read_unit(path)
    if text is None:
        print(f"no service: {path} is not there")
        return 0
    unit.check_ours(path, text)
    manager = Manager(environ)
    manager.check()
    manager.stop(_stop_s(text))
    manager.disable()
    path.unlink(missing_ok=True)
    manager.forget()
    print(f"stopped, and {path} removed")
    for line in left_behind(path, environ):
        print(f"left   {line}")
    return 0


def _stop_s(text: str) -> float:
    """How long the unit lets a server take to end."""
    found = [line.partition("=")[2] for line in unit.meaning(text) if line.startswith("TimeoutStopSec=")]
    return float(found[-1]) if found and found[-1].isdigit() else 90.0


def left_behind(path: Path, environ: Mapping[str, str]) -> list[str]:
    """What `remove` does not touch and a person may look for."""
    left = [f"{folder}: your additions to the unit" for folder in [path.with_name(path.name + ".d")] if folder.exists()]
    left += [f"{each}: settings" for each in table.toml_paths(environ, environ.get("HOME") or Path.home())]
    cache = cache_dir(Settings(), environ)
    return left + [f"{cache}: fetched models and kernels"] if cache.exists() else left
