"""Models that are on this machine already. Nothing is fetched here, and of a file only the header is read.

The rooms that read files are imported when a file is asked about: a plan from a shape is there before they are.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from budget.facts import ModelShape
from homeserve.errors import FetchError, ModelNotFound

FILES_MAX = 24
"""Files that are looked at where no model was asked for."""
ENTRIES_MAX = 20_000
"""Of folders that are searched for them."""
DEFAULT_SHAPE = "smollm2-135m-q4_1"
"""The built-in shape of the default model."""

_PART = re.compile(r"-(\d{5})-of-\d{5}\.gguf$", re.IGNORECASE)
_NO_MODEL = ("mmproj", "imatrix")


def find(name: str, cache: Path, environ: Mapping[str, str]) -> str | None:
    """The path of the model called `name`, as `up` would find it; None for the default model where it was not fetched.

    Raises ModelNotFound for what is not here, with how to get it.
    """
    from homeserve.checkpoint import names

    if name and "\0" not in name and os.path.exists(name):
        return name
    full = names.ALIASES.get(name.lower(), name)
    if full is None:
        path = default_path(cache)
        return str(path) if path.is_file() else None
    if full.startswith("hf:"):
        found = _in_hub_cache(full, environ)
        if found is None:
            raise ModelNotFound(
                f"{name} is not on this machine, and budget fetches nothing",
                field="model",
                fix=f"fetch it with homeserve pull {name}, or plan with --shape{_shapes_like(name)}",
            )
        return found
    shown = name if len(name) <= 200 else name[:200] + "..."
    raise ModelNotFound(
        f"there is no model {shown!r} here",
        field="model",
        fix="give a GGUF file, a folder, hf:OWNER/REPO[:QUANT] or an alias that was fetched; or plan for a model that"
        f" is not here with --shape{_shapes_like(name)}",
    )


def default_path(cache: Path) -> Path:
    """Where the default model lies once it was fetched."""
    from homeserve.checkpoint.packaged_model import SMOLLM2_135M

    return cache / "models" / SMOLLM2_135M.file_name


def default_shape() -> ModelShape:
    """The default model's shape, under the name by which `--shape` knows it."""
    from dataclasses import replace

    from budget.shape import load_shape

    return replace(load_shape(DEFAULT_SHAPE), name=DEFAULT_SHAPE)


def listed(cache: Path, environ: Mapping[str, str], cwd: Path) -> tuple[list[Path], int]:
    """GGUF files of models: in the current folder, the cache, the hub's cache. At most FILES_MAX, and how many more."""
    found: dict[str, Path] = {}
    for path in _candidates(cache, environ, cwd):
        found.setdefault(os.path.realpath(path), path)
    paths = list(found.values())
    return paths[:FILES_MAX], max(0, len(paths) - FILES_MAX)


def hub_cache(environ: Mapping[str, str]) -> Path:
    """The hub's own cache folder, as its library finds it."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if environ.get(name):
            return Path(os.path.expanduser(environ[name]))
    if environ.get("HF_HOME"):
        return Path(os.path.expanduser(environ["HF_HOME"])) / "hub"
    base = environ.get("XDG_CACHE_HOME") or os.path.join(environ.get("HOME") or os.path.expanduser("~"), ".cache")
    return Path(base) / "huggingface" / "hub"


# ------------------------------------------------------------------------------------------------------------- details


def _candidates(cache: Path, environ: Mapping[str, str], cwd: Path) -> Iterator[Path]:
    left = [ENTRIES_MAX]
    for folder in (cwd, cache / "models"):
        yield from _models(folder, left)
    for repo in _entries(hub_cache(environ), left):
        if repo.name.startswith("models--"):
            snapshot = _snapshot(repo)
            if snapshot is not None:
                yield from _models(snapshot, left)
                for inner in _entries(snapshot, left):
                    if inner.is_dir():
                        yield from _models(inner, left)


def _models(folder: Path, left: list[int]) -> Iterator[Path]:
    return (path for path in _entries(folder, left) if _is_model(path.name) and path.is_file())


def _is_model(name: str) -> bool:
    """A GGUF that is a model, or the first part of one."""
    part = _PART.search(name)
    whole = part is None or int(part[1]) == 1
    return name.lower().endswith(".gguf") and not name.lower().startswith(_NO_MODEL) and whole


def _entries(folder: Path, left: list[int]) -> list[Path]:
    """What lies in a folder, sorted; nothing of one that cannot be read. `left` bounds all folders together."""
    found = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if left[0] == 0:
                    break
                left[0] -= 1
                found.append(Path(entry.path))
    except OSError:
        return []
    return sorted(found)


def _snapshot(repo: Path) -> Path | None:
    """The snapshot that a repository's main branch points to; the only one where nothing points."""
    snapshots = repo / "snapshots"
    try:
        with open(repo / "refs" / "main", encoding="utf-8") as file:
            commit = file.read(100).strip()
        if commit and "/" not in commit and (snapshots / commit).is_dir():
            return snapshots / commit
    except (OSError, UnicodeDecodeError):
        pass  # no such branch is in the cache: the snapshots themselves are looked at
    there = [path for path in _entries(snapshots, [ENTRIES_MAX]) if path.is_dir()]
    return there[0] if len(there) == 1 else None


def _in_hub_cache(name: str, environ: Mapping[str, str]) -> str | None:
    """The path of `hf:OWNER/REPO[:WHICH]` in the hub's cache, by the rules of a fetch."""
    from homeserve.checkpoint import hub

    repo, _, which = name.removeprefix("hf:").partition(":")
    root = _snapshot(hub_cache(environ) / f"models--{repo.replace('/', '--')}")
    if root is None:
        return None
    left = [ENTRIES_MAX]
    top = _entries(root, left)
    paths = [*top, *(inner for path in top if path.is_dir() for inner in _entries(path, left))]
    there = [
        hub.RepoFile(path.relative_to(root).as_posix(), path.stat().st_size, None) for path in paths if path.is_file()
    ]
    try:
        wanted = hub.choose(repo, which or None, there)
    except FetchError:
        return None
    first = root / wanted[0].name
    return str(first if first.suffix == ".gguf" else first.parent)


def _shapes_like(name: str) -> str:
    """` NAME` of the built-in shape that is nearest, or ` FILE`."""
    import difflib

    from budget.shape import built_in

    word = name.rpartition("/")[2].partition(".gguf")[0].lower().replace(":", "-")
    found = difflib.get_close_matches(word, built_in(), n=1, cutoff=0.5)
    return f" {found[0]}" if found else " FILE"
