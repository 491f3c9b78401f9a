"""The clients that people have: official packages for Python and JavaScript, AI SDK, and an agent that uses tools."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parent / "scripts"
MODEL = "smollm2"
TIER = "full"
pytestmark = pytest.mark.timeout(900)


@pytest.mark.parametrize(("package", "least"), [("openai", 10), ("anthropic", 7)])
def test_official_packages_for_python(server: Any, visit: Callable[..., Any], package: str, least: int) -> None:
    script = SCRIPTS / f"{package}_python.py"
    argv = [sys.executable, str(script), server.url, MODEL]
    shown = f"python tests/clients/scripts/{script.name} URL {MODEL}"
    visit(f"{package} (Python)", version(package), argv, shown=shown, least=least, refused=1)


@pytest.mark.parametrize(
    ("tool", "package", "script", "least", "refused"),
    [
        ("openai (npm)", "openai", "openai_npm.mjs", 7, 1),
        ("@ai-sdk/openai-compatible (npm)", "@ai-sdk/openai-compatible", "ai_sdk_compatible.mjs", 5, 0),
        ("AI SDK's ToolLoopAgent (npm)", "ai", "agent.mjs", 12, 0),
    ],
)
def test_clients_for_javascript(
    server: Any,
    visit: Callable[..., Any],
    npm: Path,
    npm_version: Callable[[str], str],
    tool: str,
    package: str,
    script: str,
    least: int,
    refused: int,
) -> None:
    argv = ["node", script, server.url, MODEL]
    shown = f"node {script} URL {MODEL}"
    visit(tool, npm_version(package), argv, cwd=npm, shown=shown, least=least, refused=refused)
