"""One sequence being generated: its tokens, where it stands, and what it holds.

            add                 rows issued            last chunk issued
    WAITING ───▶ PREFILL ─────────────────▶ PREFILL ─────────────────▶ DECODE
       ▲            │                          │                          │
       │            └──────── no page left ────┴──────────┬───────────────┤
       └── all plans that name it acknowledged ── PREEMPTED               │ end token, limit, abort, fault
                                                          └───────────┐   ▼
    DONE ◀───────────── all plans that name it acknowledged ───────── ENDING

The lane, and the pages that the next row sees, are given back only in the last step: a plan in flight may still write
through them.

Positions. `tokens` holds what is known. `issued` positions have been put into plans, `pending` tokens have been asked
for and are not back yet. A decode row computes position `issued`, whose input is either the last known token or one
that is pending (then the rank uses the token that it sampled itself). A round of drafting counts as one position until
it is back (`engine.decoding`).
"""

from __future__ import annotations

from array import array
from enum import Enum

from homeserve.engine.pages import Node
from homeserve.engine.request import FinishReason, GenerateCall
from homeserve.engine.speculation import Drafted


class SequenceState(Enum):
    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    PREEMPTED = "preempted"
    ENDING = "ending"
    DONE = "done"

    __hash__ = object.__hash__  # that of Enum is made of the name, in Python, and each token asks for it


_S = SequenceState
TRANSITIONS: dict[SequenceState, frozenset[SequenceState]] = {
    _S.WAITING: frozenset({_S.PREFILL, _S.DONE}),
    _S.PREFILL: frozenset({_S.DECODE, _S.PREEMPTED, _S.ENDING, _S.WAITING}),
    _S.DECODE: frozenset({_S.PREEMPTED, _S.ENDING, _S.WAITING}),
    _S.PREEMPTED: frozenset({_S.WAITING, _S.ENDING}),
    _S.ENDING: frozenset({_S.DONE}),
    _S.DONE: frozenset(),
}
"""Every legal change of state. PREFILL and DECODE fall back to WAITING when the fleet is lost."""

RUNNING = frozenset({_S.PREFILL, _S.DECODE})


class Sequence:
    """Mutable state of one sequence; only the scheduler changes it."""

    __slots__ = (
        "anchors",
        "barred",
        "call",
        "chain",
        "decode_turn",
        "died_at",
        "drafted",
        "finish",
        "held",
        "hit_tokens",
        "in_flight",
        "issued",
        "kept",
        "key",
        "lane",
        "logprobs_seen",
        "passed_over",
        "pending",
        "prompt_len",
        "resumed",
        "round",
        "saves",
        "sent_pages",
        "skipped",
        "state",
        "strikes",
        "suspect",
        "tables",
        "target",
        "tokens",
        "turn",
    )

    def __init__(self, key: int, call: GenerateCall, drafted: Drafted | None = None) -> None:
        self.key = key
        """Number of the sequence, unique in the engine's life and rising with arrival."""
        self.call = call
        self.prompt_len = len(call.prompt)
        self.tokens = array("i", call.prompt)
        self.state = SequenceState.WAITING
        self.finish: FinishReason | None = None
        self.lane = -1
        self.issued = 0
        self.pending = 0
        self.target = len(self.tokens)
        """Tokens that prefill must cover: the prompt, or after a restart all tokens known."""
        self.chain: list[Node] = []
        """Locked nodes of the prefix tree that spell this sequence's first pages."""
        self.tables: list[list[int]] = []
        """Its pages in order, for each KV group (`engine.tables`)."""
        self.kept: list[int] = []
        """The first entry of each table that it holds: those before lie before a window."""
        self.anchors: tuple[int, ...] = ()
        """Pages behind which somebody else may want to go on (`engine.tables`)."""
        self.sent_pages = 0
        """Entries of each table that the ranks know."""
        self.saves: list[tuple[int, int]] = []
        """(positions computed, state slot) of checkpoints that plans save and no node of the tree has yet."""
        self.hit_tokens = 0
        self.in_flight = 0
        """Plans that name this sequence and are not acknowledged."""
        self.held = False
        """Its reader is too slow; no rows until it has caught up."""
        self.resumed = False
        """The layout has changed since its last row: the next one brings its token."""
        self.round = 0
        """Drafts of the round that is in flight: until it is back there is no other row of it."""
        self.drafted = drafted or Drafted()
        """What its rounds have brought so far."""
        self.barred = False
        """It was in a round when a worker died: it never drafts again."""
        self.suspect = False
        """It was in flight when a worker died, and has not come past that place since."""
        self.died_at = 0
        """Positions that it must have computed to be no suspect any more: as far as the oldest plan went that was not
        acknowledged at the death."""
        self.strikes = 0
        """Deaths in a row at which it was the only one in flight."""
        self.logprobs_seen = 1
        """Prompt positions whose log-probability its reader has (position 0 has none)."""
        self.skipped = 0
        """Plans in a row that could have carried its decode row and did not,"""
        self.passed_over = 0
        """and how many of these carried decode rows of others."""
        self.turn = 0
        """Number of the last draft with a row of it,"""
        self.decode_turn = 0
        """and of the last one with its decode row among those that have any."""

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def wants_decode(self) -> bool:
        """A further token may be asked for."""
        if self.state is not _S.DECODE or self.held or self.round:
            return False
        return len(self.tokens) - self.prompt_len + self.pending < self.call.max_tokens

    def forget_memory(self) -> None:
        """Keep nothing but the tokens: prefill starts over, with all of them as its target."""
        self.lane = -1
        self.issued = 0
        self.pending = 0
        self.target = len(self.tokens)
        self.chain = []
        self.tables = []
        self.kept = []
        self.sent_pages = 0
        self.saves = []
        self.skipped = 0
        self.passed_over = 0
        self.in_flight = 0
        self.resumed = False
        self.round = 0
        self.drafted.rebuilt()

    def move(self, to: SequenceState) -> None:
        assert to in TRANSITIONS[self.state], f"sequence {self.key}: {self.state.value} -> {to.value} is no transition"
        self.state = to
