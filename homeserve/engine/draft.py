"""What the scheduler hands out: a plan to be issued, and what readers are to be told."""

from __future__ import annotations

import msgspec
from msgspec import field

from homeserve.engine.request import FinishReason
from homeserve.engine.sequence import Sequence
from homeserve.wire.records import LaneRows, Logprobs, NewLane, PlanKind


class Draft(msgspec.Struct):
    """A plan to be issued, and the sequences that it names. `number` rises from one draft to the next."""

    number: int
    drop: tuple[int, ...] = ()
    new: list[NewLane] = field(default_factory=list)
    rows: list[LaneRows] = field(default_factory=list)
    named: list[Sequence] = field(default_factory=list)
    reach: dict[int, int] = field(default_factory=dict)
    """Sequence key -> positions computed once this plan is back; of a round, the most that may be."""
    saves: list[tuple[Sequence, int, int]] = field(default_factory=list)
    """(sequence, positions computed, state slot): checkpoints that this plan saves."""
    new_bytes: int = 0
    logprob_rows: int = 0
    embeddings: int = 0
    """Prompts of which this plan brings the embedding."""
    decodes: set[int] = field(default_factory=set)
    """Keys of the sequences whose rows decode,"""
    rounds: dict[int, int] = field(default_factory=dict)
    """and of those that draft, with how many drafts,"""
    usual: dict[int, int] = field(default_factory=dict)
    """and how many each would have had if nothing were tried (`speculation`)."""

    def name(self, sequence: Sequence) -> None:
        """From here on the sequence counts as in flight: its lane, and what of the pool its next row sees, are not
        given back before this plan is acknowledged."""
        if sequence.turn != self.number:
            self.named.append(sequence)
            sequence.in_flight += 1
            sequence.turn = self.number

    @property
    def decode_rows(self) -> int:
        return len(self.decodes)

    @property
    def kind(self) -> PlanKind:
        if self.decode_rows == len(self.rows):
            return PlanKind.DECODE
        return PlanKind.MIXED if self.decode_rows else PlanKind.PREFILL

    @property
    def prompt_rows(self) -> int:
        """Rows that are not of a decoding sequence. (One of those may carry its token all the same, behind a flip.)"""
        return sum(max(1, len(row.tokens) // 4) for row in self.rows) - self.decode_rows


class Emit(msgspec.Struct, frozen=True):
    """Something a sequence's reader is to be told."""

    sequence: Sequence
    tokens: tuple[int, ...] = ()
    logprobs: tuple[Logprobs, ...] = ()
    prompt_logprobs: tuple[Logprobs, ...] = ()
    finish: FinishReason | None = None
    error: str | None = None
    """What went wrong, where `finish` is ERROR."""
    embedding: bytes = b""
    """What a call with pooling ends with."""
