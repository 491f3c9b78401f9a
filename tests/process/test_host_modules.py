"""What a worker of another backend loads of the CPU's: nothing, to come up and to exchange rows with other ranks.

Each in a process of its own, which says at its end what it has imported: imports made by functions are seen too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

from backends.acts import ActShape, make_memory

SECONDS = 60
COLLECTIVE = """
from backends.acts import ActShape, Stamp
from backends.registry import open_collective
import numpy as np
shape = ActShape(1, 16, 16, 1)
acts = open_collective({fd}, shape, 0, timeout_s=1.0, spin_us=0)
acts.sum(Stamp(0, 0, 1, "alone"), np.ones((1, 4), np.float32))
acts.close()
"""
WORKER = """
import importlib, pkgutil
import homeserve.worker
for found in pkgutil.walk_packages(homeserve.worker.__path__, "homeserve.worker."):
    if not found.name.endswith("__main__"):
        importlib.import_module(found.name)
from backends.base import OpenOptions
from backends.registry import open_backend
open_backend("reference", OpenOptions()).close()
"""
HOST = """
import importlib, pkgutil
import backends.host
for found in pkgutil.walk_packages(backends.host.__path__, "backends.host."):
    importlib.import_module(found.name)
"""
TELL = """
import json, sys
print(json.dumps(sorted(sys.modules)))
"""


def modules_of(script: str, *fds: int) -> set[str]:
    """What a Python that runs `script` has imported at its end."""
    done = subprocess.run(
        [sys.executable, "-c", script + TELL],
        pass_fds=fds,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def of_backends(modules: set[str]) -> set[str]:
    return {".".join(name.split(".")[:2]) for name in modules if name.startswith("backends.")}


def test_ranks_exchange_without_a_module_of_the_cpu_backend() -> None:
    fd = make_memory(ActShape(1, 16, 16, 1))
    try:
        seen = modules_of(COLLECTIVE.format(fd=fd), fd)
    finally:
        os.close(fd)
    assert "backends.host.collective" in seen
    assert not of_backends(seen) & {"backends.cpu", "backends.gpu", "backends.reference"}


def test_a_worker_of_another_backend_loads_no_module_of_the_cpu_backend() -> None:
    seen = of_backends(modules_of(WORKER))
    assert "backends.reference" in seen and "backends.cpu" not in seen


def test_what_is_used_of_the_host_loads_no_backend() -> None:
    seen = of_backends(modules_of(HOST))
    assert "backends.host" in seen and not seen & {"backends.cpu", "backends.gpu", "backends.reference"}
