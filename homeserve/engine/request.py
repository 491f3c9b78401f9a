"""What a request asks of the engine, and what comes back.

`GenerateCall` is one sequence to generate (an HTTP request with `n` choices submits n of them). The engine answers with
`TokenEvent`s on a `TokenStream`; text is made of them outside the engine (`homeserve.text`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum

import msgspec

from backends.base import PAGE_LEN
from homeserve.wire.records import Logprobs, Sampling


class FinishReason(Enum):
    """Why a sequence ended. The value is what OpenAI's API calls it."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    UNDRAWN = "undrawn"
    """Its guide let no token be drawn: a grammar beyond its bounds, or that no token of the vocabulary fits."""


@dataclass(frozen=True)
class GenerateCall:
    """One sequence: prompt token ids, how to draw, and when to end.

    `max_tokens` is already clipped to the context. `end_tokens` finish the sequence and are not part of its text.
    `prompt_logprobs` n >= 0 asks for log-probabilities of the prompt's own tokens (`echo`).
    """

    request_id: str
    prompt: tuple[int, ...]
    sampling: Sampling
    max_tokens: int
    end_tokens: frozenset[int]
    prompt_logprobs: int = -1
    drafts: bool = True
    """Whether its tokens may be drafted, where the engine drafts at all."""
    pooling: str = ""
    """`mean`, `last` or `cls`: no token is generated, the prompt's embedding comes with the last event."""

    @property
    def least_tokens(self) -> int:
        """What has to have room in the context: the prompt, and the token that is drawn behind it."""
        return len(self.prompt) + (not self.pooling)


@dataclass
class Timings:
    """Moments of one sequence in seconds of the engine's clock; None until they happen."""

    submitted: float
    scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None
    cached_tokens: int = 0
    restarts: int = 0
    flips_crossed: int = 0
    """Flips that were committed while it was open."""


class TokenEvent(msgspec.Struct, frozen=True):
    """Tokens that became known together; `finish` is set on the last event of a stream.

    `tokens` excludes the end token. `logprobs` runs parallel to `tokens` where asked for. `prompt_logprobs` comes once,
    with the first event (entry i belongs to prompt token i+1).
    """

    tokens: tuple[int, ...] = ()
    logprobs: tuple[Logprobs, ...] = ()
    prompt_logprobs: tuple[Logprobs, ...] = ()
    finish: FinishReason | None = None
    error: str | None = None
    embedding: bytes = b""
    """Float32 `[hidden]`, of length 1, with the last event of a call with pooling."""


@dataclass
class Usage:
    """Token counts of a finished or running sequence."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True)
class LayoutLimits:
    """What the engine must know of one layout."""

    name: str
    decode_groups: int
    plans_in_flight: int
    token_vector: tuple[int, ...] = ()
    drafts: int = 0
    """The most drafts of a round there."""


@dataclass(frozen=True)
class FlipLimits:
    """A fleet that can change its layout. `layouts` holds both, by name; `resting` is where it begins, and returns to.

    page_bytes    what a page of each KV group costs at a flip: K and V of all layers of the group, all ranks together.
                  Exact: what ranks say to have packed is compared with it
    state_bytes   the same of a state slot
    transit_bytes the most that one flip may carry
    cache_bytes   of it for pages and checkpoints that only the prefix cache keeps: more is dropped before a flip
    policy        auto | manual
    dwell_s       the least time between two flips of the policy
    idle_s        with nothing to do for so long, the policy goes back to the resting layout
    window_s      how long a prompt may keep the pipeline layout while something decodes; 0: as long as `dwell_s`
    group_layers, state_layers
                  layers of each KV group, and linear layers: what the ranks' counts of rows and states are compared
                  with; () and 0: unknown, and not compared
    estimates     (prompt tokens/s, drawn tokens/s) by layout, believed until measured
    cost_s        likewise: seconds of two flips, there and back
    """

    layouts: dict[str, LayoutLimits]
    resting: str
    page_bytes: tuple[int, ...]
    state_bytes: int
    transit_bytes: int
    cache_bytes: int
    policy: str = "auto"
    dwell_s: float = 15.0
    idle_s: float = 5.0
    park_deadline_s: float = 30.0
    unified: bool = False
    window_s: float = 0.0
    group_layers: tuple[int, ...] = ()
    state_layers: int = 0
    estimates: dict[str, tuple[float, float]] = field(default_factory=dict)
    cost_s: float = 3.0
    calibrate: bool = True
    """With `auto`: measure both layouts at the first idle moment (`engine.calibration`)."""


@dataclass(frozen=True)
class NoFlip:
    """Why the layout of a fleet stays as it is: `code` as `FlipRefused` has it."""

    code: str
    message: str
    needed_mib: float | None = None
    available_mib: float | None = None
    device: str | None = None


@dataclass(frozen=True)
class EngineLimits:
    """Bounds that the engine keeps; every one has a flag."""

    context: int
    kv_tokens: int
    running: int
    waiting: int
    chunk: int
    prefill_delay: int
    plans_in_flight: int
    stream_tokens: int = 1024
    """Tokens a slow reader may leave unread before its request is held."""
    prefix_cache: bool = True
    recurrent: bool = False
    """The model has recurrent layers: a prefix hit needs a checkpoint of their states."""
    checkpoints: int = 0
    """State slots for such checkpoints."""
    windows: tuple[tuple[int, int], ...] = ()
    """(tokens seen, slots) of each KV group whose layers see the last tokens only."""
    decode_groups: int = 1
    """Plans in a row among which the decode rows are divided: in the pipeline layout as many as there are ranks, so
    that each rank has another group's plan."""
    token_vector: tuple[int, ...] = ()
    """Shares of the KV rows in the tensor layout, an entry for each rank; empty where every rank has all pages."""
    layout: str = "pipeline"
    """Of the ranks, where there are several."""
    drafts: int = 0
    """The most drafts of a round in the layout in force; 0: nothing is drafted there."""
    hidden: int = 0
    """Floats of an embedding."""
    drafts_adapt: bool = True
    """Whether each round has as many drafts as pay (`engine.speculation`), or always `drafts`."""
    flip: FlipLimits | None = None
    """None: the layout stays,"""
    no_flip: NoFlip = NoFlip("single_rank", "one rank has one layout: there is nothing to flip to")
    """for this reason."""

    def lowered(self, share: float, least: int) -> EngineLimits:
        """The same with a pool of `share` of it, in every group: at least `least` tokens, and what one request needs of
        each window."""
        tokens = max(min(self.kv_tokens, least), _whole_pages(share * self.kv_tokens))
        windows = []
        for window, slots in self.windows:
            one = _whole_pages(window + self.chunk) + 3 * PAGE_LEN
            windows.append((window, max(min(slots, one), _whole_pages(share * slots))))
        return replace(self, kv_tokens=tokens, windows=tuple(windows))

    @property
    def most_drafts(self) -> int:
        """Drafts of a round, in the layout that allows most of them."""
        flip = self.flip.layouts.values() if self.flip is not None else ()
        return max(self.drafts, *(layout.drafts for layout in flip), 0)

    @property
    def groups(self) -> tuple[tuple[int, int], ...]:
        """(slots, window) of each KV group; the first keeps every token, and none has more slots than it."""
        return ((self.kv_tokens, 0), *((slots, window) for window, slots in self.window_slots))

    @property
    def window_slots(self) -> tuple[tuple[int, int], ...]:
        """(window, slots) of each group with a window: none has more slots than the group that keeps every token."""
        return tuple((window, min(slots, self.kv_tokens)) for window, slots in self.windows)


def _whole_pages(slots: float) -> int:
    return int(slots) // PAGE_LEN * PAGE_LEN
