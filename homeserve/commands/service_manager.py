"""The user's service manager: systemd, spoken to through `systemctl --user`."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from homeserve.commands.service_unit import NAME
from homeserve.errors import HomeserveError, SettingError

CALL_LIMIT_S = 60.0
STOP_MARGIN_S = 30.0
_PROPERTIES = (
    "LoadState",
    "UnitFileState",
    "ActiveState",
    "SubState",
    "Result",
    "MainPID",
    "ExecMainCode",
    "ExecMainStatus",
    "NRestarts",
    "ActiveEnterTimestamp",
    "StatusText",
    "TimeoutStopUSec",
)
_CODES = {"1": "exited", "2": "killed", "3": "dumped core"}
"""ExecMainCode: the CLD_ numbers of wait(2)."""


class ManagerError(HomeserveError):
    """`systemctl` refused, or did not answer."""

    code = "service_manager"
    exit_code = 3


@dataclass(frozen=True)
class State:
    """What the manager knows of the unit. `active` is its word (active, activating, failed, inactive, ...); `since` the
    Unix time when it last became active; `last_exit` how its first process ended, None where none has."""

    loaded: bool
    enabled: bool
    active: str
    sub: str
    result: str
    pid: int | None
    restarts: int
    since: float | None
    status: str
    last_exit: dict[str, Any] | None

    @property
    def is_settled(self) -> bool:
        """Whether a start is over, well or not."""
        return self.active not in ("activating", "reloading", "deactivating", "inactive") or self.sub == "auto-restart"


class Manager:
    """`environ` is the process's: the manager is found through it (XDG_RUNTIME_DIR)."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = dict(environ)

    def check(self) -> None:
        """Raises SettingError where no manager of the user answers, with what to do instead."""
        if shutil.which("systemctl", path=self._environ.get("PATH")) is None:
            raise SettingError("there is no systemd here: no systemctl", field="service", fix=_instead())
        done = self._call("show", "--property=Version", "--value")
        if done.returncode != 0:
            said = (done.stderr or done.stdout).strip().splitlines() or ["it does not answer"]
            raise SettingError(
                f"the user's systemd cannot be asked: {said[0]}", field="service", fix=_instead(self._environ)
            )

    def reload(self) -> None:
        self._do("daemon-reload")

    def enable(self) -> None:
        self._do("enable", NAME)

    def disable(self) -> None:
        self._do("disable", NAME)

    def start(self, stop_s: float) -> None:
        """Asks for it and does not wait for it. One that runs is stopped first, so that what is seen from here on is of
        the new one; one that failed before is tried anew."""
        self.stop(stop_s)
        self._call("reset-failed", NAME)  # where it never failed, there is nothing to reset
        self._do("start", "--no-block", NAME)

    def stop(self, limit_s: float) -> None:
        self._do("stop", NAME, limit_s=limit_s + STOP_MARGIN_S)

    def forget(self) -> None:
        """After its file is gone: neither the file nor a failure is remembered."""
        self.reload()
        self._call("reset-failed", NAME)

    def state(self) -> State:
        done = self._do("show", NAME, "--timestamp=unix", f"--property={','.join(_PROPERTIES)}")
        return state_of(dict(line.split("=", 1) for line in done.splitlines() if "=" in line))

    def last_lines(self, count: int) -> list[str]:
        """What the service said last, oldest first; [] where there is no journal that can be read."""
        words = ["--user", f"--unit={NAME}", f"--lines={count}", "--output=cat", "--no-pager", "--quiet"]
        done = self._run(["journalctl", *words])
        return done.stdout.splitlines() if done is not None and done.returncode == 0 else []

    def lingers(self) -> bool | None:
        """Whether services of this user run without a login; None where nobody can tell."""
        user = self._user()
        done = self._run(["loginctl", "show-user", user, "--property=Linger", "--value"])
        if done is None:
            return None
        if done.returncode == 0:
            return done.stdout.strip() == "yes"
        return Path(f"/var/lib/systemd/linger/{user}").exists()

    def linger(self) -> None:
        """Raises ManagerError."""
        done = self._run(["loginctl", "enable-linger", self._user()])
        if done is None or done.returncode != 0:
            said = "loginctl is not installed" if done is None else done.stderr.strip() or "loginctl failed"
            raise ManagerError(
                f"lingering could not be turned on: {said}",
                field="linger",
                fix="the service starts at login; ask an administrator for: loginctl enable-linger USER",
            )

    def _user(self) -> str:
        import getpass

        try:
            return getpass.getuser()
        except (KeyError, OSError):
            return str(os.getuid())

    def _do(self, *words: str, limit_s: float = CALL_LIMIT_S) -> str:
        done = self._call(*words, limit_s=limit_s)
        if done.returncode != 0:
            said = done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}"
            raise ManagerError(
                f"systemctl --user {' '.join(words)}: {said}", fix="see systemctl --user status homeserve"
            )
        return done.stdout

    def _call(self, *words: str, limit_s: float = CALL_LIMIT_S) -> subprocess.CompletedProcess[str]:
        done = self._run(["systemctl", "--user", *words], limit_s)
        if done is None:
            raise ManagerError("systemctl is gone", fix=_instead())
        return done

    def _run(self, argv: list[str], limit_s: float = CALL_LIMIT_S) -> subprocess.CompletedProcess[str] | None:
        """None where there is no such program."""
        environ = self._environ | {"LC_ALL": "C", "SYSTEMD_COLORS": "0", "SYSTEMD_PAGER": ""}
        try:
            return subprocess.run(
                argv,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=limit_s,
                env=environ,
                check=False,
            )
        except FileNotFoundError:
            return None
        except subprocess.TimeoutExpired:
            raise ManagerError(f"{' '.join(argv)} did not end within {limit_s:g} s") from None


def state_of(told: Mapping[str, str]) -> State:
    """Of what `systemctl show` prints."""
    pid = _whole(told.get("MainPID"))
    since = told.get("ActiveEnterTimestamp", "").removeprefix("@")
    ended = told.get("ExecMainCode", "0")
    last_exit = None
    if ended in _CODES:
        how = {"how": _CODES[ended], "status": _whole(told.get("ExecMainStatus"))}
        last_exit = how | {"result": told.get("Result", "")}
    return State(
        loaded=told.get("LoadState") == "loaded",
        enabled=told.get("UnitFileState") in ("enabled", "enabled-runtime"),
        active=told.get("ActiveState", "unknown"),
        sub=told.get("SubState", ""),
        result=told.get("Result", ""),
        pid=pid or None,
        restarts=_whole(told.get("NRestarts")),
        since=float(since) if since.isdigit() else None,
        status=told.get("StatusText", ""),
        last_exit=last_exit,
    )


def _whole(text: str | None) -> int:
    return int(text) if text and text.isdigit() else 0


def _instead(environ: Mapping[str, str] | None = None) -> str:
    """What helps where no user's manager answers."""
    if platform.system() == "Darwin":
        return (
            "macOS has launchd, for which homeserve writes nothing: run `homeserve up` in a terminal or a launch agent"
        )
    if "microsoft" in platform.release().lower():
        return "in WSL write [boot] systemd=true into /etc/wsl.conf, then: wsl --shutdown"
    if Path("/.dockerenv").exists() or Path("/run/.containerenv").exists():
        return "a container is the service itself: let it run `homeserve up` (docs/DEPLOYMENT.md has a Compose file)"
    if environ is not None and not environ.get("XDG_RUNTIME_DIR"):
        return (
            "XDG_RUNTIME_DIR is not set, as after su or sudo: log in as this user (ssh, or machinectl shell USER@) and"
            " run it again"
        )
    return (
        "log in as this user (not by su or sudo) on a system that systemd booted; elsewhere let whatever starts"
        " programs there run `homeserve up` (docs/DEPLOYMENT.md)"
    )
