"""The systemd user unit of a server: what is in it and why, and whether one that lies there is ours.

Its command line holds what a person said after `install`: flags as they are, HOMESERVE_ variables of that shell as
flags (the manager's services do not see that shell), paths made absolute. homeserve.toml stays where it is and is read
at each start: the one of the user always, the one of the folder where `install` ran because that folder is the unit's.

What the lines are for:

- Type=notify: started means that requests are answered. A load takes as long as it takes (a model of 40 GB from a slow
  disk), so there is no limit for the start.
- Restart=on-failure, but not after exit code 2: what settings or a model make impossible does not become possible by
  trying again. 130 is a stop during the start.
- KillMode=mixed: the first process gets SIGTERM and ends its workers itself; whoever is left after that is killed.
- OOMPolicy=continue: a worker that the kernel killed for memory is restarted by the server, with every open request
  going on; systemd would stop the whole service.
- LimitMEMLOCK: pools for cards are page-locked. Where the user may not, systemd takes the most that is allowed.
- Of the hardening only what takes nothing away that a server uses: cards are devices and compile kernels at run time
  (no PrivateDevices, no MemoryDenyWriteExecute), evidence of deaths and spilled weights are files (no ProtectSystem).

`%` begins a specifier of systemd in every value and is doubled. `$` would be a variable in a command line: the colon
before the program turns that off. Quotes and backslashes are C's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from homeserve.errors import SettingError

NAME = "homeserve.service"
MARKER = "# homeserve-service: 1"
"""A unit with this line was written by `homeserve service install`."""
KEPT_VARIABLES = (
    "CUDA_PATH",
    "CUDA_VISIBLE_DEVICES",
    "HF_HOME",
    "HF_HUB_OFFLINE",
    "HIP_VISIBLE_DEVICES",
    "LD_LIBRARY_PATH",
    "PYTHONPATH",
    "ROCM_PATH",
    "ROCR_VISIBLE_DEVICES",
    "XDG_CACHE_HOME",
    "XDG_CONFIG_HOME",
    "XDG_STATE_HOME",
)
"""Variables of the shell that change what a server does and that are no secret: they go into the unit."""
STOP_MARGIN_S = 10.0
_READABLE_LIMIT_BYTES = 1 << 16
_PLAIN = re.compile(r"[A-Za-z0-9_@+=:,./-]+")


@dataclass(frozen=True)
class Service:
    """What a unit says. `program` are the interpreter and its arguments up to `up`, `arguments` those of `up`;
    `stop_s` is when a server that was asked to stop has ended for certain."""

    program: Sequence[str]
    arguments: Sequence[str]
    folder: str
    environ: Mapping[str, str]
    model: str
    stop_s: float


def render(service: Service) -> str:
    """The text of the unit. Raises SettingError for a name that no unit can hold."""
    _check_folder(service.folder)
    command = ":" + " ".join(map(_word, [*service.program, *service.arguments]))
    lines = [
        "# Written by `homeserve service install`: run that again to change it, or add to it with",
        "# `systemctl --user edit homeserve`. A change in this file stays until `homeserve service install --force`.",
        MARKER,
        "",
        "[Unit]",
        f"Description=homeserve: {_line(service.model)}",
        "StartLimitIntervalSec=300",
        "StartLimitBurst=5",
        "",
        "[Service]",
        "Type=notify",
        "NotifyAccess=main",
        f"ExecStart={command}",
        f"WorkingDirectory={_percent(service.folder)}",
        *(f"Environment={_word(f'{name}={value}', always=True)}" for name, value in sorted(service.environ.items())),
        "Restart=on-failure",
        "RestartSec=2",
        "RestartPreventExitStatus=2",
        "SuccessExitStatus=130",
        "KillMode=mixed",
        "KillSignal=SIGTERM",
        "TimeoutStartSec=infinity",
        f"TimeoutStopSec={service.stop_s + STOP_MARGIN_S:.0f}",
        "OOMPolicy=continue",
        "LimitMEMLOCK=infinity",
        "NoNewPrivileges=yes",
        "LockPersonality=yes",
        "RestrictRealtime=yes",
        "UMask=0077",
        "",
        "[Install]",
        "WantedBy=default.target",
    ]
    return "\n".join(lines) + "\n"


def unit_path(environ: Mapping[str, str]) -> Path:
    """Where the user's manager reads it."""
    config = environ.get("XDG_CONFIG_HOME") or str(Path(environ.get("HOME") or Path.home()) / ".config")
    return Path(config) / "systemd" / "user" / NAME


def read_unit(path: Path) -> str | None:
    """The text that lies there; None where nothing does. What cannot be one of ours raises SettingError."""
    try:
        if path.is_symlink() or (path.exists() and not path.is_file()):
            what = "a link" if path.is_symlink() else "no regular file"
            raise SettingError(f"{path}: is {what}, not a unit of homeserve", field="service", fix=_FOREIGN_FIX)
        with open(path, encoding="utf-8") as file:
            return file.read(_READABLE_LIMIT_BYTES)
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "is not UTF-8 text"
        raise SettingError(f"{path}: {why}", field="service", fix=_FOREIGN_FIX) from None


def is_ours(text: str) -> bool:
    return MARKER in text.splitlines()


def check_ours(path: Path, text: str) -> None:
    """Raises SettingError for a unit that somebody else wrote."""
    if not is_ours(text):
        what = f"{path}: there is a unit of that name that `homeserve service install` did not write; it stays"
        raise SettingError(what, field="service", fix=_FOREIGN_FIX)


_FOREIGN_FIX = "move it away, or keep it and leave `homeserve service` alone: that one starts `homeserve up` as well"


def meaning(text: str) -> list[str]:
    """The lines that systemd reads, without comments and blank ones: units that are alike in these do the same."""
    stripped = (line.strip() for line in text.splitlines())
    return [line for line in stripped if line and not line.startswith(("#", ";"))]


def differences(old: str, new: str) -> list[str]:
    """Lines of one that the other lacks, as `- old` and `+ new`."""
    before, after = meaning(old), meaning(new)
    gone = [f"- {line}" for line in before if line not in after]
    return gone + [f"+ {line}" for line in after if line not in before] or ["the same lines in another order"]


def _word(text: str, *, always: bool = False) -> str:
    """One word of a command line or of Environment=, quoted where it has to be."""
    _check_text(text)
    if not always and _PLAIN.fullmatch(text):
        return text
    escaped = "".join(_ESCAPES.get(each, each) if each.isprintable() else _escaped(each) for each in text)
    return f'"{_percent(escaped)}"'


_ESCAPES = {"\\": "\\\\", '"': '\\"'}


def _escaped(character: str) -> str:
    """As systemd reads it back: \\xHH is a byte, \\uHHHH and \\UHHHHHHHH a character."""
    number = ord(character)
    return f"\\x{number:02x}" if number < 0x80 else f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        shown = ascii(text)[1:-1]
        raise SettingError(
            f"{shown}: is not UTF-8, and a unit has to be", field="service", fix="rename it, or link to it"
        ) from None


def _check_folder(folder: str) -> None:
    """WorkingDirectory= takes the rest of its line as it is, without quotes."""
    _check_text(folder)
    if not folder.isprintable() or folder != folder.strip() or folder.endswith("\\"):
        raise SettingError(
            f"{folder!r}: a unit cannot name this folder as its working directory",
            field="service",
            fix="run `homeserve service install` in another folder",
        )


def _line(text: str) -> str:
    return _percent("".join(each if each.isprintable() else "?" for each in text))[:200].rstrip("\\")


def _percent(text: str) -> str:
    return text.replace("%", "%%")
