"""A model bound on a backend and driven batch by batch, as a worker would drive it; the report of measured errors."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from backends.base import PAGE_LEN, Batch, Limits, OpenOptions, StatePool
from backends.quant import QuantType
from backends.registry import open_backend
from homeserve import checkpoint
from homeserve.models import registry
from homeserve.models.bind import bind

# The test folders are no package (pytest's importlib mode); this one has modules of its own.
sys.path.insert(0, str(Path(__file__).parent))

TINY = Path(__file__).parent.parent / "data" / "tiny"
LANES, ROWS, SPARE = 8, 128, 2


@dataclass
class Greedy:
    """One prompt's greedy continuation: the tokens, and the logits that each was chosen by, `[steps, vocab]`."""

    tokens: list[int]
    logits: np.ndarray

    def gaps(self) -> np.ndarray:
        """How far the best token leads the second, by step."""
        best = np.sort(self.logits, axis=1)[:, -2:]
        return np.asarray(best[:, 1] - best[:, 0])


@dataclass
class Model:
    """Sequences have a lane each; their pages are shuffled, so that a mistake in addressing shows. The recurrent states
    of lanes lie in slots of their own, in another order; `SPARE` more slots keep copies."""

    path: str
    backend_name: str = "reference"
    kv_type: str = "f32"
    lane_pages: int = 16
    extra: Mapping[str, str] = field(default_factory=dict)
    threads: int = 2
    lanes: int = LANES

    def __post_init__(self) -> None:
        self.checkpoint = checkpoint.open(self.path, registry.folder_families)
        family = registry.family(self.checkpoint.arch)
        self.config = family.config_from(self.checkpoint.metadata)
        self.bound = bind(family, self.config, self.checkpoint.tensors)
        self.backend = open_backend(self.backend_name, OpenOptions(threads=self.threads, extra=self.extra))
        assert self.backend.facts.backend == self.backend_name
        pages = self.lanes * self.lane_pages
        self.program = self.backend.bind(
            self.bound.ops,
            self.bound.weights,
            self.bound.kv_pool(pages * PAGE_LEN, QuantType[self.kv_type.upper()]),
            Limits(rows=ROWS, logit_rows=ROWS, lanes=self.lanes, lane_pages=self.lane_pages),
            lambda *_: None,
            StatePool(self.bound.state_layers, self.lanes + SPARE if self.bound.state_layers else 0),
        )
        self.states = np.arange(self.lanes, dtype=np.int32)[::-1].copy()
        rng = np.random.default_rng(7)
        order = np.stack([rng.permutation(pages) for _ in range(1 + len(self.bound.windows))])
        self.tables = order.astype(np.int32).reshape(-1, self.lanes, self.lane_pages)

    def run(self, pieces: Sequence[tuple[int, int, Sequence[int]]], wanted: Sequence[int] | None = None) -> np.ndarray:
        """Logits of rows `wanted` (all by default) of one batch. A piece is (lane, first position, tokens)."""
        lanes = np.concatenate([np.full(len(tokens), lane, np.int32) for lane, _, tokens in pieces])
        positions = np.concatenate([np.arange(at, at + len(tokens), dtype=np.int32) for _, at, tokens in pieces])
        tokens = np.fromiter(itertools.chain.from_iterable(piece[2] for piece in pieces), np.int32)
        slots = self.tables[:, lanes, positions // PAGE_LEN] * PAGE_LEN + positions % PAGE_LEN
        rows = np.arange(len(tokens)) if wanted is None else np.asarray(wanted)
        tables = self.tables.copy()
        for group, window in enumerate(self.bound.windows, 1):
            for lane, first, _ in pieces:  # pages before the window are nobody's: a reader of them finds no page
                tables[group, lane, : max(0, first - window + 1) // PAGE_LEN] = -1
        batch = Batch(tokens, positions, slots.astype(np.int32), lanes, tables, rows.astype(np.int32), self.states)
        return self.program.run(batch).copy()

    def logits(self, tokens: Sequence[int], chunk: int = ROWS, lane: int = 0) -> np.ndarray:
        """Logits after every token, `[len(tokens), vocab]`, the prompt cut into chunks of at most `chunk`."""
        starts = range(0, len(tokens), chunk)
        return np.concatenate([self.run([(lane, at, tokens[at : at + chunk])]) for at in starts])

    def greedy(self, prompts: Sequence[Sequence[int]], steps: int) -> list[Greedy]:
        """Continue all prompts together, one lane each, always with the likeliest token."""
        assert len(prompts) <= self.lanes
        rows = [self.run([(lane, 0, prompt)], [len(prompt) - 1])[0] for lane, prompt in enumerate(prompts)]
        found = [Greedy([], np.empty((steps, len(rows[0])), np.float32)) for _ in prompts]
        for step in range(steps):
            for result, row in zip(found, rows, strict=True):
                result.logits[step] = row
                result.tokens.append(int(np.argmax(row)))
            last = [(i, len(prompts[i]) + step, [result.tokens[-1]]) for i, result in enumerate(found)]
            rows = list(self.run(last))
        return found

    def share_prefix(self, source: int, target: int, pages: int) -> None:
        """What a prefix hit is made of: the first `pages` pages of lane `source` are also those of `target`, which gets
        a copy of its state as it is now, by way of a spare slot as a checkpoint would."""
        self.tables[:, target, :pages] = self.tables[:, source, :pages]
        if self.bound.state_layers:
            kept, given = int(self.states[source]), int(self.states[target])
            self.program.copy_states([(kept, self.lanes), (self.lanes, given)])

    def close(self) -> None:
        self.program.close()
        self.backend.close()
        self.checkpoint.close()


Opener = Callable[..., Model]


@pytest.fixture
def open_model() -> Iterator[Opener]:
    """Opens models that end with the test."""
    opened: list[Model] = []

    def opener(path: str | Path, backend: str = "reference", **options: object) -> Model:
        opened.append(Model(str(path), backend, **options))  # type: ignore[arg-type]
        return opened[-1]

    yield opener
    for model in opened:
        model.close()


@pytest.fixture(scope="session")
def tiny() -> Path:
    """The folder of tiny checkpoints."""
    return TINY


@pytest.fixture(scope="session")
def smollm2_reference(smollm2: str) -> Iterator[Model]:
    model = Model(smollm2, "reference")
    yield model
    model.close()


@pytest.fixture(scope="session")
def smollm2_cpu(smollm2: str) -> Iterator[Model]:
    model = Model(smollm2, "cpu")
    yield model
    model.close()


# ------------------------------------------------------------------------------------------------- measured errors

_REPORT = pytest.StashKey[list[str]]()


@pytest.fixture(scope="session")
def measured(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Call it with a line; the lines are printed when the tier ends, whether it passed or not."""
    return request.config.stash.setdefault(_REPORT, []).append


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    lines = config.stash.get(_REPORT, [])
    if lines:
        terminalreporter.section("measured errors")
        for line in lines:
            terminalreporter.write_line(line)
