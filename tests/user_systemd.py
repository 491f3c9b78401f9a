"""A systemd of the test's own: a real `systemd --user` with its home, runtime folder and control group, in a mount
namespace where /run says that systemd booted this machine. Needs root, systemd and writable control groups."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from box import wait_until

SYSTEMD = "/lib/systemd/systemd"
_ROOTS = [Path("/sys/fs/cgroup") / name for name in ("systemd", "unified", "")]
_BEGIN = """
set -e
mount -t tmpfs tmpfs /run/systemd
mkdir /run/systemd/system
for group in "$@"; do echo $$ > "$group/cgroup.procs"; done
exec %s --user --log-target=console --log-level=info
"""


@dataclass
class UserManager:
    """Where commands find the manager (`environ`), and what they and it said."""

    folder: Path
    environ: dict[str, str]

    def homeserve(self, *argv: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        return self._run(sys.executable, "-P", "-m", "homeserve", *argv, cwd=cwd)

    def systemctl(self, *argv: str) -> str:
        done = self._run("systemctl", "--user", *argv)
        return done.stdout.strip()

    def verify(self, path: Path) -> str:
        """What `systemd-analyze verify` finds wrong with a unit."""
        done = self._run("systemd-analyze", "--user", "verify", str(path))
        return done.stdout + done.stderr + (f"exit code {done.returncode}" if done.returncode else "")

    @property
    def unit(self) -> Path:
        return Path(self.environ["HOME"]) / ".config/systemd/user/homeserve.service"

    def _run(self, *argv: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            argv, cwd=cwd or self.folder, env=self.environ, capture_output=True, text=True, timeout=120, check=False
        )


@contextmanager
def user_manager(folder: Path) -> Iterator[UserManager]:
    """Skips the test where such a manager cannot be."""
    missing = [name for name in ("systemctl", "systemd-analyze", "unshare") if shutil.which(name) is None]
    if missing or not Path(SYSTEMD).exists():
        pytest.skip("systemd is not installed")
    home, runtime = folder / "home", folder / "runtime"
    home.mkdir()
    runtime.mkdir(mode=0o700)
    groups = _groups()
    if os.getuid() != 0 or not groups:
        pytest.skip("a systemd of the test's own needs root and control groups")
    environ = {
        name: value for name, value in os.environ.items() if not name.startswith(("HOMESERVE_", "XDG_", "DBUS_"))
    }
    environ |= {"HOME": str(home), "XDG_RUNTIME_DIR": str(runtime), "TMPDIR": str(folder)}
    argv = ["unshare", "--mount", "sh", "-c", _BEGIN % SYSTEMD, "sh", *map(str, groups)]
    with (folder / "systemd.log").open("wb") as log:
        process = subprocess.Popen(argv, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        manager = UserManager(folder, environ)
        wait_until("a user's systemd", lambda: _is_up(manager, process))
        yield manager
    finally:
        _end(process)
        _remove(groups)


def _is_up(manager: UserManager, process: subprocess.Popen[bytes]) -> bool:
    said = (manager.folder / "systemd.log").read_text(errors="replace")
    assert process.poll() is None, f"systemd --user ended with {process.returncode}:\n{said}"
    return bool(manager.systemctl("show", "--property=Version", "--value"))


def _groups() -> list[Path]:
    """A control group of its own in each tree that systemd keeps its processes in."""
    name, made = f"homeserve-test-{os.getpid()}-{secrets.token_hex(4)}", []
    for root in _ROOTS:
        if (root / "cgroup.procs").exists() and (root.name != "cgroup" or not made):
            try:
                (root / name).mkdir()
            except OSError:
                _remove(made)
                return []
            made.append(root / name)
    return made


def _end(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM has it stop its services, too."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _remove(groups: list[Path]) -> None:
    """Whoever is still in them is killed."""
    end = time.monotonic() + 10
    for group in groups:
        while group.exists() and time.monotonic() < end:
            for each in sorted(group.rglob("cgroup.procs"), reverse=True):
                with suppress(OSError):
                    for pid in each.read_text().split():
                        os.kill(int(pid), signal.SIGKILL)
                    each.parent.rmdir()
            with suppress(OSError):
                group.rmdir()
            time.sleep(0.01)
