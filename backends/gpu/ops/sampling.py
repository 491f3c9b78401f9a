"""Drawing tokens on the card: the table of rows, and the launches. Steps and numbers: homeserve/worker/sampling.py; how
they are computed, and the layout of what is handed on: backends/gpu/kernels/sample.h.

One plan's draws and its questions for log-probabilities are one table (`table_of`), and two to five launches
(`sample`). Counts for penalties lie on the card, int32 `[slots, 2, vocab]`: how often a token was seen, and how often
generated. A row of drafts draws with the counts of its lane and the inputs of the rows before it (`Draw.inputs`):
nothing is added and taken back for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from backends.gpu.launch import Launch, Symbol, params

CHUNK, CHUNK_THREADS, BINS, LIST, TOP = 4096, 256, 512, 16384, 20
"""As in sample.h."""
WHOLE = 1 << 53
"""A share of mass of one."""
VOCAB_MAX = 1 << 20
TEMPERATURE_MIN = 1e-5
"""Below it is greedy."""
DRAWN, NOT_A_NUMBER, NOTHING = 0, 1, 2
"""Statuses."""
NONE = -1

ROW = np.dtype(
    [
        *((name, "<i4") for name in ("logits", "adjusted", "slot", "input_first", "inputs", "input_generated")),
        *((name, "<i4") for name in ("bias_first", "biases", "ban_first", "bans", "mask", "top_k", "told", "token")),
        *(("drawn_by", "<i4"), ("temperature", "<f4"), ("repetition", "<f4"), ("reach", "<f4")),
        *(("seed", "<u8"), ("position", "<i8"), ("top_p", "<u8"), ("typical_p", "<u8")),
        *(("presence", "<f8"), ("frequency", "<f8")),
    ]
)
"""SampleRow of sample.h."""

TOLD = np.dtype(
    [
        *(("status", "<i4"), ("count", "<i4"), ("token", "<i4"), ("value", "<f4")),
        *(("ids", "<i4", TOP), ("values", "<f4", TOP)),
    ]
)
"""Told of sample.h."""


def _symbol(name: str, threads: int, arguments: str, *needs: str) -> Symbol:
    return Symbol(name, "sample", "Sample", params(arguments), threads, needs=needs)  # type: ignore[arg-type]


ADJUST = _symbol(
    *("sample_adjust", CHUNK_THREADS),
    *("logits, z, rows, lists, inputs, counts, masks, work, i32 vocab, i32 pitch", "load128"),
)
COUNT = _symbol("sample_count", CHUNK_THREADS, "logits, z, rows, work, i32 vocab, i32 pitch", "load128")
GATHER = _symbol("sample_gather", CHUNK_THREADS, "logits, z, rows, work, i32 vocab, i32 pitch", "load128")
DRAW = _symbol("sample_draw", BINS, "logits, z, rows, work, tokens, statuses, i32 vocab, i32 pitch")
TELL = _symbol("sample_told", BINS, "logits, rows, work, tokens, told, i32 vocab, i32 pitch")
ADD_COUNTS = _symbol(
    "counts_add", CHUNK_THREADS, "counts, tokens, slots, generated, i32 entries, i32 vocab, i32 amount"
)

SYMBOLS = (ADJUST, COUNT, GATHER, DRAW, TELL, ADD_COUNTS)


# -------------------------------------------------------------------------------------------------------------- table


@dataclass(frozen=True)
class Draw:
    """A token drawn from row `logits` for `position`. Settings as a request has them (homeserve.wire.records.Sampling).

    `slot`: whose counts the penalties look at, NONE where there are none. `inputs` (first, how many, from which of them
    on they are output): places in the launch's input tokens that count as well. `bans`: what cannot be drawn here.
    `mask`: row of the grammars' bits.
    """

    logits: int
    position: int = 0
    seed: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    slot: int = NONE
    inputs: tuple[int, int, int] = (0, 0, 0)
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    biases: Sequence[tuple[int, float]] = ()
    bans: Sequence[int] = ()
    mask: int = NONE

    @property
    def adjusts(self) -> bool:
        return self.slot != NONE or bool(self.inputs[1] or self.biases or self.bans) or self.mask != NONE

    @property
    def greedy(self) -> bool:
        return self.temperature < TEMPERATURE_MIN


@dataclass(frozen=True)
class Tell:
    """Log-probabilities of row `logits`: of `token`, or of what the table's row `drawn_by` draws, and of the `top` most
    likely ones."""

    logits: int
    top: int = 0
    token: int = NONE
    drawn_by: int = NONE


@dataclass(frozen=True)
class Table:
    """Rows of one plan as the card reads them. `adjusted`: how many rows `z` has to have."""

    rows: npt.NDArray[np.void]
    lists: npt.NDArray[np.int32]
    adjusted: int
    draws: bool
    tells: bool
    searches: bool


def table_of(asked: Sequence[Draw | Tell], vocab: int) -> Table:
    """Raises ValueError for a token outside of the vocabulary, or more log-probabilities than are told."""
    rows = np.zeros(len(asked), ROW)
    for name in ("adjusted", "slot", "mask", "told", "token", "drawn_by"):
        rows[name] = NONE
    rows["temperature"] = rows["repetition"] = 1.0
    rows["reach"] = math.inf
    rows["top_p"] = rows["typical_p"] = WHOLE
    lists: list[np.int32] = []
    adjusted = 0
    for row, each in zip(rows, asked, strict=True):
        row["logits"] = each.logits
        if isinstance(each, Tell):
            _fill_told(row, each, vocab)
            continue
        _fill_drawn(row, each)
        if each.adjusts:
            row["adjusted"] = adjusted
            adjusted += 1
            _fill_lists(row, each, lists, vocab)
    return Table(
        rows,
        np.array(lists, np.int32) if lists else np.zeros(1, np.int32),
        adjusted,
        any(isinstance(each, Draw) for each in asked),
        any(isinstance(each, Tell) for each in asked),
        any(isinstance(each, Tell) or not each.greedy for each in asked),
    )


def _fill_told(row: np.void, each: Tell, vocab: int) -> None:
    if not 0 <= each.top <= TOP or not (0 <= each.token < vocab or each.drawn_by >= 0):
        raise ValueError(f"{each} of a vocabulary of {vocab}")
    row["told"] = row["top_k"] = each.top
    row["token"], row["drawn_by"] = each.token, each.drawn_by


def _fill_drawn(row: np.void, each: Draw) -> None:
    row["temperature"] = 0.0 if each.greedy else each.temperature
    row["top_k"] = each.top_k
    row["top_p"], row["typical_p"] = _share(each.top_p), _share(each.typical_p)
    if each.min_p > 0.0:
        row["reach"] = -math.log(min(each.min_p, 1.0))
    row["seed"], row["position"] = each.seed & (2**64 - 1), each.position


def _fill_lists(row: np.void, each: Draw, lists: list[np.int32], vocab: int) -> None:
    tokens = [token for token, _ in each.biases] + list(each.bans)
    if tokens and not 0 <= min(tokens) <= max(tokens) < vocab:
        raise ValueError(f"tokens {min(tokens)} to {max(tokens)} are biased or banned of a vocabulary of {vocab}")
    row["slot"], row["mask"] = each.slot, each.mask
    row["repetition"], row["presence"], row["frequency"] = each.repetition, each.presence, each.frequency
    row["input_first"], row["inputs"], row["input_generated"] = each.inputs
    row["bias_first"], row["biases"] = len(lists), len(each.biases)
    for token, bias in each.biases:
        lists += [np.int32(token), np.float32(bias).view(np.int32)]
    row["ban_first"], row["bans"] = len(lists), len(each.bans)
    lists += [np.int32(token) for token in each.bans]


def _share(mass: float) -> int:
    return min(round(max(mass, 0.0) * WHOLE), WHOLE)


# ----------------------------------------------------------------------------------------------------------- launches


def work_bytes(rows: int, vocab: int) -> int:
    """Of the memory that the launches of a table hand on."""
    chunks = -(-vocab // CHUNK)
    return rows * (BINS * 12 + 16 + (chunks + chunks % 2) * 16 + LIST * 8)


def adjusted_bytes(rows: int, vocab: int) -> int:
    """Of `z`."""
    return rows * -(-vocab // 4) * 4 * 4


@dataclass(frozen=True)
class Memory:
    """Addresses. `logits` float32 `[.., pitch]`; `z` of `adjusted_bytes`; `rows` and `lists` of the table; `inputs`
    int32, the plan's input tokens; `counts`; `masks` uint32 `[.., ceil(vocab / 32)]`; `work` of `work_bytes`; out:
    `tokens`, `statuses` int32 and `told` (TOLD), one for each row of the table. 0 for what no row uses."""

    logits: int
    rows: int
    work: int
    tokens: int
    statuses: int
    z: int = 0
    lists: int = 0
    inputs: int = 0
    counts: int = 0
    masks: int = 0
    told: int = 0


def sample(memory: Memory, table: Table, vocab: int, pitch: int) -> tuple[Launch, ...]:
    """What draws the table's rows, in order; a table of greedy rows wants two launches, one with all kinds five.

    A row with NaN has the status NOT_A_NUMBER and the token of the first one; a row whose tokens are all at minus
    infinity has NOTHING. Rows of `Tell` have no token, rows of `Draw` are not told.
    """
    if not 0 < vocab <= min(pitch, VOCAB_MAX):
        raise ValueError(f"a vocabulary of {vocab} in rows of {pitch}, at most {VOCAB_MAX}")
    m, rows = memory, len(table.rows)
    grid = (-(-vocab // CHUNK), rows, 1)
    shape = (vocab, pitch)
    launches = [Launch(ADJUST, grid, (m.logits, m.z, m.rows, m.lists, m.inputs, m.counts, m.masks, m.work, *shape))]
    if table.searches:
        launches += [Launch(each, grid, (m.logits, m.z, m.rows, m.work, *shape)) for each in (COUNT, GATHER)]
    if table.draws:
        launches.append(Launch(DRAW, (rows, 1, 1), (m.logits, m.z, m.rows, m.work, m.tokens, m.statuses, *shape)))
    if table.tells:
        launches.append(Launch(TELL, (rows, 1, 1), (m.logits, m.rows, m.work, m.tokens, m.told, *shape)))
    return tuple(launches)


def add_counts(
    counts: int, tokens: int, slots: int, generated: int, entries: int, vocab: int, *, back: bool = False
) -> Launch:
    """Counts `entries` tokens int32, each for its slot int32 (NONE: not at all), uint8 `generated`: among the generated
    ones, too. `back` undoes it."""
    grid = (-(-entries // CHUNK_THREADS), 1, 1)
    return Launch(ADD_COUNTS, grid, (counts, tokens, slots, generated, entries, vocab, -1 if back else 1))
