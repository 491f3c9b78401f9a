"""How an error is told: to a person on stderr, to a program as JSON on stdout."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from homeserve.errors import HomeserveError


def report(error: HomeserveError, *, as_json: bool = False) -> int:
    """Returns the exit code."""
    if as_json:
        print(json.dumps(error.as_json()), flush=True)
        return error.exit_code
    print(f"homeserve: error: {_safe(error.message)}", file=sys.stderr)
    if error.fix:
        print(f"  {_safe(error.fix)}", file=sys.stderr)
    sys.stderr.flush()
    return error.exit_code


def _safe(text: str) -> str:
    """What a message quotes of a file or of argv must not move the terminal's cursor. (`budget.page` has the same: the
    package `budget` may be somebody else's when this is said.)"""
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)
