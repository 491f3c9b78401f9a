"""What planning gives: a plan that fits, a refusal with its sum, or that nothing is known. Values alone.

Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from budget.ceilings import Ceilings
from budget.facts import Doubt, ModelShape
from budget.ledger import Line
from budget.speed import LayoutSpeed
from budget.wish import Wish, window_slots


@dataclass(frozen=True)
class Binds:
    """Which device and which of its lines leave no room for more."""

    device: int
    line: str
    why: str


@dataclass(frozen=True)
class Advice:
    """One change of a setting, and what planning again with it gives. `flags` are settings by name (kv_type: "q8_0").

    `gain_tokens` counts tokens of `of`: of the context while it is shorter than the model's, else of the pool."""

    flags: Mapping[str, str | int]
    gain_tokens: int
    text: str
    of: str = "context"


@dataclass(frozen=True)
class Priced:
    """An option that was looked at: what it would give, and why it was not taken ("" for the one that was)."""

    option: str
    kv_tokens: int | None
    prefill_tok_s: float | None
    decode_tok_s: float | None
    why_not: str


@dataclass(frozen=True)
class Plan:
    """A plan that fits. Tokens are whole pages; `rank_tokens[r]` is what rank r alone could hold: the least of them
    binds.

    `ranks[r]` is the device (its index) of rank r. `layouts` are those that serve: ("pipeline", "tensor") with a flip
    between them, one of them, or ("pipeline",) for a single rank. `ranges[r]` are the layers [first, end) of rank r in
    the pipeline layout; `expert_layers` how many layers' routed experts stay on the CPU.
    """

    shape: ModelShape
    wish: Wish
    ceilings: Ceilings
    option: str
    ranks: tuple[int, ...]
    layouts: tuple[str, ...]
    ranges: tuple[tuple[int, int], ...]
    weight_vector: tuple[int, ...]
    token_vector: tuple[int, ...]
    expert_layers: int
    context: int
    kv_tokens: int
    running: int
    lines: tuple[Line, ...]
    binds: Binds
    rank_tokens: tuple[int, ...]
    speeds: Mapping[str, LayoutSpeed]
    flip_s: float | None
    break_even_tokens: int | None
    checkpoints: int = 0
    """State slots of the prefix cache, beside one for each running request (models with recurrent layers)."""
    choice: str = ""
    """Which layout serves and why, where it was chosen among several ("": it was not)."""
    most_tokens: int = 0
    """The largest pool that fits; `kv_tokens` may be less where nobody asked for so many."""
    priced: tuple[Priced, ...] = ()
    advice: tuple[Advice, ...] = ()
    doubts: tuple[Doubt, ...] = ()

    @property
    def window_slots(self) -> Mapping[int, int]:
        """Window -> slots of the pool of the layers that have it, beside `kv_tokens` of the others. (The windows of the
        model: a rank may hold no layer of some.)"""
        sizes = self.kv_tokens, self.running, self.wish.chunk
        return {each: window_slots(each, *sizes, kept=self.wish.prefix_cache) for each in self.shape.windows}


@dataclass(frozen=True)
class Refusal:
    """Why nothing fits: the sum of the option that came nearest. `nearest` is a complete set of settings with which
    planning again gives a plan (None: nothing was found)."""

    shape: ModelShape
    wish: Wish
    ceilings: Ceilings
    option: str
    reason: str
    device: int
    needed_bytes: int
    available_bytes: int
    lines: tuple[Line, ...]
    nearest: Mapping[str, str | int] | None = None
    nearest_text: str = ""
    priced: tuple[Priced, ...] = ()
    doubts: tuple[Doubt, ...] = ()


@dataclass(frozen=True)
class Unknown:
    """No plan and no refusal: the box says nothing about its memory."""

    ceilings: Ceilings
    why: str
    doubts: tuple[Doubt, ...] = field(default_factory=tuple)
