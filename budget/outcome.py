"""What planning gives: a plan that fits, a refusal with its sum, or that nothing is known. Values alone.

Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from budget.ceilings import Ceilings
from budget.facts import Doubt, LayerShape, ModelShape
from budget.ledger import Line
from budget.speed import LayoutSpeed
from budget.wish import DEFAULT_DRAFTS, Wish, window_slots


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
class FlipTerms:
    """Whether a plan's ranks may change their layout, and what that takes. With `fits` False only `why_not` says
    anything (and the three numbers it is made of): that sum is of the smallest flip, beside the plan as it is.

    needed_bytes, available_bytes   where it does not fit: what both layouts would need of the device, and what there is
    short_device   index of that device
    resting        the layout in which the ranks begin, and to which they return; `Plan.layouts[0]`
    home           where the arena is filled from: copy (one of the model, for all ranks), images (of each rank),
                   resident (both layouts lie on the devices), unified (nothing is filled)
    ranges, weight_vector, token_vector   the parts of both layouts
    transit_bytes  the most that one flip may carry: live rows and states on their way; 0 in unified memory
    transit_file_bytes   how large the memory for it is: every payload begins with a cache line
    cache_bytes    of it, what may be of the prefix cache alone
    page_bytes     what a page of each KV group has, K and V of all its layers, all ranks together: the group of layers
                   that keep every token, then one for each window of the model, ascending
    state_bytes    what one slot of recurrent states has, all layers, all ranks together
    copy_bytes     of host memory for one copy of the weights; 0 where there is none
    image_bytes    of host memory for each rank's image; () where there is none
    peaks          phase -> what each rank itself holds of its device then (`budget.flip.PHASES`)
    addressable    layout -> the tokens for which it alone would have rows: the pool is no larger than the least of them
    shared_peaks   phase -> what is held then on the host beside that: processes, the copy, transit
    """

    fits: bool
    why_not: str = ""
    resting: str = ""
    home: str = ""
    ranges: tuple[tuple[int, int], ...] = ()
    weight_vector: tuple[int, ...] = ()
    token_vector: tuple[int, ...] = ()
    transit_bytes: int = 0
    cache_bytes: int = 0
    page_bytes: tuple[int, ...] = ()
    state_bytes: int = 0
    copy_bytes: int = 0
    image_bytes: tuple[int, ...] = ()
    peaks: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    shared_peaks: Mapping[str, int] = field(default_factory=dict)
    addressable: Mapping[str, int] = field(default_factory=dict)
    transit_file_bytes: int = 0
    needed_bytes: int = 0
    available_bytes: int = 0
    short_device: int = -1


NO_FLIP = FlipTerms(False)
"""Nobody asked: there is one rank, or one layout was chosen."""


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
    flip: FlipTerms = NO_FLIP
    """Whether and how its ranks may change their layout."""
    no_drafts: str = ""
    """Why the model's drafting block was left out, where it was wanted."""
    priced: tuple[Priced, ...] = ()
    advice: tuple[Advice, ...] = ()
    doubts: tuple[Doubt, ...] = ()

    @property
    def drafts(self) -> int:
        """The most drafts of a round for which there is room; 0 where the drafting block is not held."""
        return (self.wish.drafts or DEFAULT_DRAFTS) if self.wish.draft and self.shape.nextn else 0

    @property
    def held_layers(self) -> tuple[LayerShape, ...]:
        """All layers that are held: the trunk's, and the drafting block's where it drafts."""
        return (*self.shape.layers, *(self.shape.nextn if self.drafts else ()))

    @property
    def window_slots(self) -> Mapping[int, int]:
        """Window -> slots of the pool of the layers that have it, beside `kv_tokens` of the others. (The windows of the
        model: a rank may hold no layer of some.)"""
        sizes = self.kv_tokens, self.running, self.wish.chunk
        return {each: window_slots(each, *sizes, kept=self.wish.prefix_cache) for each in self.shape.windows}

    def flip_peak(self, rank: int, phase: str) -> int:
        """The most that `rank` itself holds in a phase of `budget.flip.PHASES`. Raises KeyError without a
        flip."""
        return self.flip.peaks[phase][rank]


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
