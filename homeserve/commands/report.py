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
    print(f"homeserve: error: {error.message}", file=sys.stderr)
    if error.fix:
        print(f"  {error.fix}", file=sys.stderr)
    sys.stderr.flush()
    return error.exit_code
