"""Where a figure of scripts/bench comes from: how the run is repeated, and on which commit."""

from __future__ import annotations

import argparse
from pathlib import Path

from homeserve.bench import origin


def command(options: argparse.Namespace) -> str:
    """How the run is repeated, without paths."""
    words = ["scripts/bench"]
    if options.peer:
        words += ["--peer", Path(options.peer).name, "--full" if options.full else "--quick"]
    words += ["--model", Path(options.model).name] if options.model else []
    for name in ("models", "tests", "isa"):
        words += [f"--{name}", value] if (value := getattr(options, name)) else []
    return " ".join(words)


def commit() -> str:
    """Of the checkout, when first asked."""
    return origin.commit() or "unknown"
