"""`hf:OWNER/REPO[:WHICH]`: models from the hub, through `huggingface_hub`.

The library knows endpoints, tokens, offline mode and the shape of its cache (HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE,
HF_HOME), and is left to it. Two things it does not do, and a home line needs them: it throws a half-done file away when
the process ends, and it does not compare the digest. So large files are brought here, into a `.part` file beside the
blob that the library's cache wants; the part is continued by the next attempt, verified, renamed to the blob, and then
the library is asked for the file, finds the blob and links it.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from homeserve.checkpoint import store
from homeserve.checkpoint.store import Progress
from homeserve.errors import FetchError, ModelNotFound

_log = logging.getLogger("homeserve.checkpoint")

PREFERRED = ("Q4_K_M", "Q4_K_S", "Q4_0", "Q4_1", "Q5_K_M", "Q8_0", "Q6_K", "BF16", "F16", "F32")
"""Which file of several is taken where the name does not say."""
FILES_MAX = 10_000
_PLAIN_BYTES_MAX = 48 << 30
"""Larger files are not served over plain HTTP; the library has its own way for them."""
_READ_TIMEOUT_S = 30.0
_ATTEMPTS = 5
_NAME = re.compile(r"hf:(?P<repo>\w[\w.-]*/\w[\w.-]*)(?::(?P<which>[^:]+))?", re.ASCII)
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
_FOLDER_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


@dataclass(frozen=True)
class RepoFile:
    """A file of the repository; `sha256` is None for small ones, which are kept in Git itself."""

    name: str
    size: int
    sha256: str | None


def fetch(name: str, progress: Progress) -> str:
    """The path of the model `hf:OWNER/REPO[:WHICH]`. Raises ModelNotFound for a name that is none, FetchError."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise ModelNotFound(f"{name!r} is not of the form hf:OWNER/REPO[:QUANT]", field="model", fix="check the name")
    repo, which = match["repo"], match["which"]
    if _offline():
        return _from_cache(repo, which, FetchError(f"{repo} is not in the cache, and HF_HUB_OFFLINE is set"))
    try:
        files = _list(repo)
    except FetchError as error:
        if error.field != "network":
            raise
        path = _from_cache(repo, which, error)
        _log.warning("%s; the copy in the cache is used", error.message)
        return path
    wanted = choose(repo, which, files)
    _require_space(repo, wanted)
    paths = [_bring(repo, file, progress) for file in wanted]
    return paths[0] if wanted[0].name.endswith(".gguf") else os.path.dirname(paths[0])


def choose(repo: str, which: str | None, files: list[RepoFile]) -> list[RepoFile]:
    """The files of the model: a GGUF (all parts, first one first), or those of a safetensors folder.

    Raises FetchError with what there is, where `which` names nothing.
    """
    models = [file for file in files if _is_model(file.name)]
    if not models:
        return _folder_files(repo, which, files)
    for candidate in (which,) if which else PREFERRED:
        found = [file for file in models if file.name == candidate or _carries(file.name, candidate)]
        if found:
            return _with_parts(min(found, key=lambda file: (file.name.count("/"), file.name)), files)
    if which:
        there = ", ".join(file.name for file in models[:20])
        raise FetchError(f"{repo} has no file for {which!r}; there is: {there}", field="model", fix="name one of them")
    return _with_parts(models[0], files)


def _is_model(name: str) -> bool:
    """A GGUF that is a model, or the first part of one."""
    base = name.rpartition("/")[2].lower()
    part = _PART.search(base)
    return base.endswith(".gguf") and not base.startswith(("mmproj", "imatrix")) and (not part or int(part[1]) == 1)


def _carries(name: str, quant: str) -> bool:
    """Whether `quant` stands in the file's name as a word: Q4_K is not Q4_K_M."""
    return re.search(rf"(?<![A-Za-z0-9]){re.escape(quant)}(?![A-Za-z0-9_])", name, re.IGNORECASE) is not None


def _with_parts(first: RepoFile, files: list[RepoFile]) -> list[RepoFile]:
    part = _PART.search(first.name)
    if part is None:
        return [first]
    prefix = first.name[: part.start()]
    names = [f"{prefix}-{number:05d}-of-{part[2]}.gguf" for number in range(1, int(part[2]) + 1)]
    by_name = {file.name: file for file in files}
    missing = [name for name in names if name not in by_name]
    if missing:
        raise FetchError(f"the repository lacks {missing[0]}", field="model", fix="choose another file of it")
    return [by_name[name] for name in names]


def _folder_files(repo: str, which: str | None, files: list[RepoFile]) -> list[RepoFile]:
    weights = [file for file in files if file.name.endswith(".safetensors") and "/" not in file.name]
    names = {file.name for file in files}
    if which or not weights or "config.json" not in names:
        what = f"{repo} holds no GGUF" + (f" {which!r}" if which else " and no safetensors model")
        raise FetchError(what, field="model", fix="choose a repository with GGUF files")
    small = [
        file
        for file in files
        if file.name in _FOLDER_FILES or ("/" not in file.name and file.name.endswith((".jinja", ".index.json")))
    ]
    return sorted(small, key=lambda file: file.name != "config.json") + weights


def _offline() -> bool:
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def _cache_folder() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def _list(repo: str) -> list[RepoFile]:
    """The repository's files. Raises FetchError; its field is 'network' where the hub could not be reached."""
    from huggingface_hub import HfApi

    try:
        siblings = HfApi().model_info(repo, files_metadata=True, timeout=_READ_TIMEOUT_S).siblings or []
    except Exception as error:  # several HTTP libraries' trees, with no common root but this
        if (explained := _explained(repo, error)) is None:
            raise
        raise explained from error
    return [
        RepoFile(each.rfilename, each.size or 0, each.lfs.sha256 if each.lfs else None) for each in siblings[:FILES_MAX]
    ]


def _from_cache(repo: str, which: str | None, otherwise: FetchError) -> str:
    """The model as the cache has it, else raises `otherwise`."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        root = Path(snapshot_download(repo, local_files_only=True))
    except LocalEntryNotFoundError:
        raise otherwise from None
    there = [
        RepoFile(path.relative_to(root).as_posix(), path.stat().st_size, None)
        for path in sorted(root.rglob("*"))
        if path.is_file()
    ]
    try:
        wanted = choose(repo, which, there)
    except FetchError:
        raise otherwise from None
    first = root / wanted[0].name
    return str(first if first.suffix == ".gguf" else first.parent)


def _require_space(repo: str, files: list[RepoFile]) -> None:
    folder = _cache_folder()
    store.make_folder(folder)
    missing = sum(file.size - _have(repo, file) for file in files)
    if missing > 0:
        try:
            store.require_space(folder, missing)
        except FetchError as error:
            raise _of_hub_cache(error) from None


def _of_hub_cache(error: FetchError) -> FetchError:
    """The same complaint about a disk, for the folder that the hub's library uses."""
    return FetchError(error.message, field="HF_HOME", fix="make room, or name another folder in HF_HOME")


def _have(repo: str, file: RepoFile) -> int:
    """Bytes of the file that are on disk already."""
    if file.sha256 is None:
        return 0
    blob = _blob(repo, file.sha256)
    for path in (blob, _part(blob)):
        if path.exists():
            return min(path.stat().st_size, file.size)
    return 0


def _blob(repo: str, sha256: str) -> Path:
    """Where the library's cache keeps a file of this digest."""
    return _cache_folder() / f"models--{repo.replace('/', '--')}" / "blobs" / sha256


def _part(blob: Path) -> Path:
    return blob.with_name(blob.name + ".part")


def _bring(repo: str, file: RepoFile, progress: Progress) -> str:
    """The file's path in the library's cache, fetched and verified if it is not there."""
    from huggingface_hub import hf_hub_download

    folder = _cache_folder()
    try:
        with store.disk_errors(folder):
            if file.sha256 is not None and file.size <= _PLAIN_BYTES_MAX:
                _bring_blob(repo, file, file.sha256, progress)
            return str(hf_hub_download(repo, file.name, etag_timeout=_READ_TIMEOUT_S))
    except FetchError as error:
        if error.field == "HOMESERVE_CACHE":
            raise _of_hub_cache(error) from error
        raise
    except Exception as error:  # several HTTP libraries' trees, with no common root but this
        if (explained := _explained(repo, error)) is None:
            raise
        raise explained from error


def _bring_blob(repo: str, file: RepoFile, sha256: str, progress: Progress) -> None:
    blob = _blob(repo, sha256)
    if blob.exists():
        return
    store.make_folder(blob.parent)
    part = _part(blob)
    # Beside the library's own locks, and like them left in place: to remove a lock file is to let two in.
    locks = _cache_folder() / ".locks" / blob.parent.parent.name
    store.make_folder(locks)
    with store.lock(locks / f"{sha256}.homeserve.lock", progress):
        if not blob.exists():
            _download(repo, file, part, progress)
            found = store.sha256_of(part, progress)
            if found != sha256:
                part.unlink()
                raise store.wrong_digest(file.name, sha256, found)
            store.put_in_place(part, blob)


def _download(repo: str, file: RepoFile, part: Path, progress: Progress) -> None:
    """Fill `part` up to the file's size, going on where it ends; a broken connection is taken up again."""
    fruitless = 0
    while (have := part.stat().st_size if part.exists() else 0) < file.size:
        try:
            _continue(repo, file, part, have, progress)
        except _transport_errors() as error:
            fruitless = fruitless + 1 if part.exists() and part.stat().st_size == have else 0
            if fruitless >= _ATTEMPTS or _status(error) is not None:
                raise
            _log.warning("the connection broke while fetching %s: %s; it is taken up again", file.name, error)
        else:
            if part.stat().st_size == have:
                raise FetchError(f"the server sent nothing of {file.name}", field="network", fix="try again")


def _continue(repo: str, file: RepoFile, part: Path, have: int, progress: Progress) -> None:
    from huggingface_hub import get_session, hf_hub_url
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined, unused-ignore]

    headers = build_hf_headers() | {"Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    url = hf_hub_url(repo, file.name)
    with get_session().stream("GET", url, headers=headers, follow_redirects=True, timeout=_READ_TIMEOUT_S) as response:
        if response.status_code == 416:
            part.unlink()
            return
        response.raise_for_status()
        done = have if response.status_code == 206 else 0
        with open(part, "ab" if done else "wb") as out:
            for chunk in response.iter_bytes(store.CHUNK_BYTES):
                done += len(chunk)
                if done > file.size:
                    raise store.wrong_digest(file.name, f"over {file.size} bytes", "a larger file")
                out.write(chunk)
                progress("fetch", done, file.size)
            out.flush()
            os.fsync(out.fileno())


def _transport_errors() -> tuple[type[Exception], ...]:
    """The root of the errors of the HTTP library that `huggingface_hub` uses: it has changed it more than once."""
    roots = (("httpx2", "HTTPError"), ("httpx", "HTTPError"), ("requests", "RequestException"))
    return tuple(getattr(sys.modules[module], name) for module, name in roots if module in sys.modules)


def _status(error: BaseException) -> int | None:
    """The HTTP status of an error that carries a response."""
    response: Any = getattr(error, "response", None)
    status = getattr(response, "status_code", None)
    return status if isinstance(status, int) else None


def _explained(repo: str, error: Exception) -> FetchError | None:
    """What went wrong, in the user's terms; None for an error that is no failure of the fetch."""
    from huggingface_hub.errors import GatedRepoError, HFValidationError, LocalEntryNotFoundError

    status = _status(error)
    token = "log in at the hub, accept the model's terms if it has some, and set HF_TOKEN"
    if isinstance(error, GatedRepoError) or status == 403:
        return FetchError(f"{repo} is gated: the hub asks for permission first", field="HF_TOKEN", fix=token)
    if status == 401:
        return FetchError(f"the hub does not let you read {repo} (401): no such repository, or private", fix=token)
    if status == 404:
        return FetchError(f"the hub has no {repo} (404)", field="model", fix="check the name")
    if status is not None:
        return FetchError(f"the hub answered {status} for {repo}", fix="try again later")
    if isinstance(error, HFValidationError):
        return FetchError(f"{repo} is no repository name: {error}", field="model", fix="check the name")
    if isinstance(error, (LocalEntryNotFoundError, ConnectionError, TimeoutError, *_transport_errors())):
        what = f"the hub could not be reached for {repo}: {type(error).__name__}: {str(error)[:300]}"
        return FetchError(what, field="network", fix="check the network, or use a model file that you have")
    return None


__all__ = ["FILES_MAX", "PREFERRED", "RepoFile", "choose", "fetch"]
