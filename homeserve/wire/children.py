"""The environment of helper processes, so that they import the same `homeserve` as the process that starts them.

Helpers run with `-P`: what lies in the current folder is not imported, because somebody's `json.py` may lie there. But
where homeserve itself came from that folder (`python -m homeserve` in a source tree), a helper would find none, or
worse, another one that is installed. Then, and only then, the folder is named in the helper's PYTHONPATH.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path

import homeserve


def environment(base: Mapping[str, str]) -> dict[str, str]:
    """`base` for a helper process, with PYTHONPATH where it needs one."""
    root = import_root()
    if root is None:
        return dict(base)
    paths = [str(root), *filter(None, [base.get("PYTHONPATH")])]
    return {**base, "PYTHONPATH": os.pathsep.join(paths)}


@cache
def import_root() -> Path | None:
    """The folder that `homeserve` was imported from, where a helper would not find it there; else None."""
    own = Path(homeserve.__file__)
    found = _found_by_a_helper()
    return None if found is not None and os.path.realpath(found) == os.path.realpath(own) else own.parents[1]


def _found_by_a_helper() -> str | None:
    """The file of the `homeserve` that a process with `-P` imports: it lacks the first entry of our path, which is the
    current folder or the script's."""
    path = sys.path if sys.flags.safe_path else sys.path[1:]
    for finder in sys.meta_path:
        spec = PathFinder.find_spec("homeserve", path) if finder is PathFinder else finder.find_spec("homeserve", None)
        if spec is not None:
            return spec.origin
    return None
