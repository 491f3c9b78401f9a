"""Servers that tests ask things: each in a world of its own (`box`)."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from box import Box, Run, wait_until

TINY = Path(__file__).parent.parent / "data" / "tiny" / "llama.f32.gguf"


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Box]:
    made = Box(tmp_path)
    yield made
    made.close()


@pytest.fixture(scope="session")
def new_box() -> Callable[[Path], Box]:
    """`new_box(folder)`, for servers that outlive a test. Its maker closes it."""
    return Box


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, smollm2: str) -> Iterator[Run]:
    """One server of the default model for all tests that only ask it things; it must drain and leave nothing."""
    box = Box(tmp_path_factory.mktemp("server"))
    run = box.up(smollm2, "--deterministic", "--max-running", "20", "--context", "1024", "--kv-tokens", "16384")
    try:
        yield run
        run.send(signal.SIGTERM)
        assert run.wait() == 0, run.err
        assert run.left_behind() == []
    finally:
        box.close()


@pytest.fixture(name="wait_until")
def wait_until_fixture() -> Callable[..., Any]:
    """`wait_until(what, condition)`: the first true value of `condition`."""
    return wait_until


@pytest.fixture
def tiny() -> str:
    """A model that loads at once: random weights, vocabulary of 512."""
    return str(TINY)


@pytest.fixture
def start_server(box: Box, smollm2: str) -> Callable[..., AbstractContextManager[Run]]:
    """`with start_server(*flags) as run:` a ready server of the default model, which must drain and leave nothing."""

    @contextmanager
    def start(*flags: str, **environ: str) -> Iterator[Run]:
        run = box.up(smollm2, *flags, **environ)
        yield run
        run.send(signal.SIGTERM)
        assert run.wait() == 0, run.err
        assert run.left_behind() == []

    return start
