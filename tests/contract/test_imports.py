"""Who may import whom: the contracts of pyproject.toml hold, and each one fails on a violation planted for it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CONTRACTS = {
    contract["id"]: contract["name"]
    for contract in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
}

VIOLATIONS = [
    ("packages", "backends/base.py", "import homeserve.errors"),
    ("packages", "budget/__init__.py", "import backends.base"),
    ("layers", "homeserve/errors.py", "import homeserve.settings"),
    ("layers", "homeserve/engine/request.py", "import homeserve.server"),
    ("layers", "homeserve/text/__init__.py", "import homeserve.models"),
    ("layers", "homeserve/newcomer.py", "import sys"),
    ("engine-process", "homeserve/engine/request.py", "import backends.cpu"),
    ("engine-process", "homeserve/fleet/__init__.py", "import homeserve.worker"),
    ("pure", "homeserve/engine/scheduler.py", "import time"),
    ("pure", "homeserve/wire/records.py", "import random"),
    ("torch", "homeserve/models/__init__.py", "import torch"),
    ("backends", "backends/quant.py", "import asyncio"),
    ("acts", "homeserve/engine/request.py", "import backends.acts"),
    ("acts", "homeserve/sizing.py", "from backends.acts import fleet_shape"),
    ("kinds", "backends/gpu/device.py", "import backends.cpu.memory"),
    ("host", "backends/host/collective.py", "from backends.cpu import abi"),
]
"""(contract, file, line): the sixth and tenth reach a rule through another module than the one that it names."""


def lint(folder: Path) -> str:
    """What lint-imports says of `folder`, on one line. `PYTHONPATH` lets that tree win over the installed package."""
    done = subprocess.run(
        [str(Path(sys.executable).parent / "lint-imports"), "--no-logo", "--no-cache"],
        cwd=folder,
        env=dict(os.environ, PYTHONPATH=str(folder)),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    return f"exit {done.returncode}\n{' '.join((done.stdout + done.stderr).split())}"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the Python packages and their contracts."""
    shutil.copy2(ROOT / "pyproject.toml", tmp_path)
    for package in ("homeserve", "backends", "budget"):
        shutil.copytree(
            ROOT / package,
            tmp_path / package,
            ignore=lambda folder, names: [n for n in names if _is_no_source(folder, n)],
        )
    return tmp_path


def _is_no_source(folder: str, name: str) -> bool:
    return name == "__pycache__" or (not name.endswith((".py", ".pyi")) and not (Path(folder) / name).is_dir())


def test_the_contracts_hold(tree: Path) -> None:
    said = lint(tree)
    assert said.startswith("exit 0"), said
    for name in CONTRACTS.values():
        assert f"{name} KEPT" in said


def test_every_backend_module_but_the_seam_is_kept_from_the_engine_process() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    by_id = {contract["id"]: contract for contract in contracts}
    kept = {*by_id["engine-process"]["forbidden_modules"], *by_id["acts"]["protected_modules"]}
    modules = {f"backends.{path.stem}" for path in (ROOT / "backends").iterdir() if _is_module(path)}
    assert modules - kept == {
        "backends.base",
        "backends.needs",
        "backends.ops",
        "backends.quant",
        "backends.support",
    }


def _is_module(path: Path) -> bool:
    return (path.suffix == ".py" and path.stem != "__init__") or (path / "__init__.py").is_file()


def test_every_contract_has_a_violation_planted_for_it() -> None:
    assert {contract for contract, _, _ in VIOLATIONS} == set(CONTRACTS)


@pytest.mark.parametrize(("contract", "file", "line"), VIOLATIONS)
def test_a_planted_violation_is_named(tree: Path, contract: str, file: str, line: str) -> None:
    path = tree / file
    text = path.read_text() if path.exists() else '"""A module that the layers do not know."""\n'
    path.write_text(f"{text}\n\n{line}\n")
    said = lint(tree)
    assert not said.startswith("exit 0")
    if file.endswith("newcomer.py"):
        assert "newcomer" in said
    else:
        assert f"{CONTRACTS[contract]} BROKEN" in said
