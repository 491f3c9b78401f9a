"""Fetch a model into the cache and print where it lies. NAME is an alias, hf:owner/repo[:quant], or a path.

Without NAME the default model is fetched.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from homeserve.commands.progress import ProgressLines
from homeserve.settings import cache_dir, resolve

INTERRUPTED = 130

_BLOCK_BYTES = 1 << 20
_PART = re.compile(r"-\d{5}-of-(\d{5})\.gguf$")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help="what to fetch (default: the default model)")
    parser.add_argument("--cache-dir", metavar="DIR", help="folder for the default model (hf: models: HF_HOME)")
    parser.add_argument(
        "--json", action="store_true", help="print {path, bytes, sha256}; sha256 is null for several files"
    )


def run(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    from homeserve.checkpoint import names

    settings = resolve(argparse.Namespace(cache_dir=args.cache_dir), environ, Path.cwd())
    progress = ProgressLines(sys.stderr)
    cache = str(cache_dir(settings, environ))
    interrupt = _Interrupt()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt.on_signal)

    def report(stage: str, done_bytes: int, total_bytes: int) -> None:
        interrupt.raise_if_asked()
        progress.update(stage, done_bytes, total_bytes)

    try:
        path = names.resolve(args.name, cache_dir=cache, progress=report)
    except InterruptedError:
        # The fetch has removed what was half-done, and the process that fetched, on its way out.
        return INTERRUPTED
    finally:
        progress.close()
    facts = describe(Path(path))
    if args.json:
        print(json.dumps({"schema": 1, **facts}))
    else:
        print(facts["path"])
    return 0


class _Interrupt:
    """The first signal ends the fetch at its next word of progress, which cleans up; the second ends the process."""

    def __init__(self) -> None:
        self._asked = False

    def on_signal(self, number: int, frame: object) -> None:
        if self._asked:
            os._exit(INTERRUPTED)
        self._asked = True

    def raise_if_asked(self) -> None:
        if self._asked:
            raise InterruptedError


def describe(path: Path) -> dict[str, object]:
    """{path, bytes, sha256} of a model file, of all parts of a split one, or of a folder."""
    files = _files(path)
    digest = sha256(files[0]) if len(files) == 1 else None
    return {"path": str(path), "bytes": sum(file.stat().st_size for file in files), "sha256": digest}


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        return sorted(file for file in path.iterdir() if file.is_file())
    split = _PART.search(path.name)
    if split is None:
        return [path]
    stem = path.name[: split.start()]
    return sorted(path.parent.glob(f"{_literal(stem)}-?????-of-{split[1]}.gguf"))


def _literal(text: str) -> str:
    return re.sub(r"([*?[])", r"[\1]", text)
