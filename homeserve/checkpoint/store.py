"""Files in the cache folder: complete and verified, or absent.

A file gets its name only when it is whole, synced and of the right digest (written beside its place, then renamed). A
small sidecar `<file>.verified` remembers size, modification time and digest, so that a warm start need not hash a model
again: it costs two `stat` calls and a read. Two processes that want the same file take turns by `flock`, which a dead
owner releases by dying.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import msgspec

from homeserve.errors import FetchError

Progress = Callable[[str, int, int], None]
"""(stage, done bytes, total bytes). Called a few times a second; what it raises ends the fetch, cleaned up."""

LOCK_WAIT_S = 3600.0
CHUNK_BYTES = 1 << 20
_SPARE_BYTES = 16 << 20
"""Left free beside what a fetch writes: file systems need room for themselves."""
_FULL = (errno.ENOSPC, errno.EDQUOT)
_UNUSABLE = (
    *(errno.EACCES, errno.EPERM, errno.EROFS),
    *(errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EIO, errno.ESTALE),
)
CHANGE_FOLDER = "make room, or name another folder in HOMESERVE_CACHE"


class _Verified(msgspec.Struct):
    size: int
    mtime_ns: int
    sha256: str


def quiet(stage: str, done_bytes: int, total_bytes: int) -> None:
    """The progress callback that shows nothing."""


def is_verified(path: Path, sha256: str) -> bool:
    """Whether the file was once seen to have this digest and has not been touched since."""
    try:
        stat = path.stat()
        noted = msgspec.json.decode(_sidecar(path).read_bytes(), type=_Verified)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return False
    return noted == _Verified(stat.st_size, stat.st_mtime_ns, sha256)


def note_verified(path: Path, sha256: str) -> None:
    """Remember that the file as it is now has this digest. A folder that cannot be written means hashing next time."""
    stat = path.stat()
    temporary = _sidecar(path).with_name(f".{path.name}.verified-{os.getpid()}")
    with contextlib.suppress(PermissionError):
        temporary.write_bytes(msgspec.json.encode(_Verified(stat.st_size, stat.st_mtime_ns, sha256)))
        os.replace(temporary, _sidecar(path))


def _sidecar(path: Path) -> Path:
    return path.with_name(path.name + ".verified")


def sha256_of(path: Path, progress: Progress = quiet) -> str:
    """The file's SHA-256 in hex."""
    digest = hashlib.sha256()
    total = path.stat().st_size
    with open(path, "rb") as file:
        done = 0
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            done += len(chunk)
            progress("verify", done, total)
    return digest.hexdigest()


def require_space(folder: Path, needed_bytes: int) -> None:
    """Raises FetchError where `folder` (which exists) lacks the room."""
    free = shutil.disk_usage(folder).free
    if free < needed_bytes + _SPARE_BYTES:
        needed_mib, free_mib = -(-(needed_bytes + _SPARE_BYTES) >> 20), free >> 20
        raise FetchError(
            f"the fetch needs {needed_mib} MiB in {folder}, and {free_mib} MiB are free",
            field="HOMESERVE_CACHE",
            fix=CHANGE_FOLDER,
        )


@contextlib.contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Turn what a disk may answer into FetchError: full, over quota, read-only, no permission, no such place."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            what = f"the disk that holds {folder} is full"
        elif error.errno in _UNUSABLE:
            what = f"{error.filename or folder} cannot be written: {error.strerror}"
        else:
            raise
        raise FetchError(what, field="HOMESERVE_CACHE", fix=CHANGE_FOLDER) from error


def make_folder(folder: Path) -> None:
    """Create the folder and its parents. Raises FetchError."""
    with disk_errors(folder):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise FetchError(f"{folder} is in the way: a folder is needed there", fix=CHANGE_FOLDER) from error


@contextlib.contextmanager
def lock(path: Path, progress: Progress = quiet, wait_s: float = LOCK_WAIT_S) -> Iterator[None]:
    """Hold the lock file `path` (created, and left in place). Raises FetchError after `wait_s` seconds."""
    with disk_errors(path.parent):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o644)
    try:
        deadline = time.monotonic() + wait_s
        while not _try_lock(descriptor):
            if time.monotonic() >= deadline:
                what = f"another process has held {path} for {wait_s:.0f} s"
                raise FetchError(what, fix="end the other fetch, or wait for it")
            progress("wait", 0, 0)
            time.sleep(0.1)
        yield
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def write_verified(
    source: IO[bytes], target: Path, sha256: str, size: int, progress: Progress = quiet, stage: str = "unpack"
) -> None:
    """Copy `source` to `target` so that target is whole and of the given digest, or not there.

    Raises FetchError on a wrong size or digest, or a full disk; nothing is left behind then.
    """
    temporary = target.with_name(f".{target.name}.part-{os.getpid()}")
    digest = hashlib.sha256()
    done = 0
    try:
        with disk_errors(target.parent), open(temporary, "wb") as file:
            while chunk := source.read(CHUNK_BYTES):
                done += len(chunk)
                if done > size:
                    break
                digest.update(chunk)
                file.write(chunk)
                progress(stage, done, size)
            file.flush()
            os.fsync(file.fileno())
        if done != size or digest.hexdigest() != sha256:
            raise wrong_digest(target.name, sha256, digest.hexdigest())
        put_in_place(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
    note_verified(target, sha256)


def put_in_place(temporary: Path, target: Path) -> None:
    """Rename, and make the rename last through a power cut."""
    with disk_errors(target.parent):
        os.replace(temporary, target)
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def wrong_digest(name: str, wanted: str, found: str) -> FetchError:
    return FetchError(
        f"{name} arrived damaged or altered: SHA-256 {found} instead of {wanted}; it was deleted",
        fix="try again; if it stays so, the mirror or proxy in use serves a wrong file",
    )
