"""What the routes of the machine itself answer, as types: for the document (`openapi.py`), as in `answer_schemas.py`.

Unknown is null, never 0.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from homeserve.fleet.spec import RankStatus

Layout = Literal["pipeline", "tensor"]


class Health(msgspec.Struct, kw_only=True):
    """Whether requests are taken."""

    schema: Literal[1]
    status: Literal["ok"]


class NotHealthy(msgspec.Struct, kw_only=True):
    """Why none are taken, or not at once; while loading, how far it is."""

    schema: Literal[1]
    status: Literal["loading", "draining", "recovering"]
    stage: str | UnsetType = UNSET
    done_bytes: int | None | UnsetType = UNSET
    total_bytes: int | None | UnsetType = UNSET


class Ready(msgspec.Struct, kw_only=True):
    """A request sent now is computed now."""

    schema: Literal[1]
    status: Literal["ready"]


class Version(msgspec.Struct, kw_only=True):
    """What runs here."""

    schema: Literal[1]
    version: str
    commit: str | None


class Introduction(msgspec.Struct, kw_only=True):
    """What a program gets that asks `/` for JSON."""

    schema: Literal[1]
    name: Literal["homeserve"]
    state: str
    model: str | None
    api: str


class LoadFacts(msgspec.Struct, kw_only=True):
    """How far the load is."""

    stage: str
    done_bytes: int | None
    total_bytes: int | None


class ServedModel(msgspec.Struct, kw_only=True):
    """The model that is served."""

    id: str | None
    path: str | None
    arch: str | None
    quant: str | None
    context: int | None


class Vectors(msgspec.Struct, kw_only=True):
    """Shares of the ranks in the tensor layout."""

    weight: list[int] | None
    token: list[int] | None


class Pipeline(msgspec.Struct, kw_only=True):
    """Layers [first, end) of each rank in the pipeline layout."""

    ranges: list[list[int]] | None


class RequestCounts(msgspec.Struct, kw_only=True):
    """Sequences by what became of them."""

    running: int | None
    waiting: int | None
    finished: int | None
    aborted: int | None
    failed: int | None


class TokenCounts(msgspec.Struct, kw_only=True):
    """Tokens of prompts taken in, and tokens generated, since the load."""

    prompt: int | None
    generated: int | None


class WindowFacts(msgspec.Struct, kw_only=True):
    """Layers that keep the last tokens alone."""

    window: int
    capacity_tokens: int
    used_tokens: int
    cached_tokens: int


class KvFacts(msgspec.Struct, kw_only=True):
    """The pool of keys and values, in tokens."""

    capacity_tokens: int | None
    used_tokens: int | None
    cached_tokens: int | None
    windows: list[WindowFacts] | None


class PrefixFacts(msgspec.Struct, kw_only=True):
    """What the prefix cache saved."""

    lookups: int | None
    hits: int | None
    hit_tokens: int | None


class Percentiles(msgspec.Struct, kw_only=True):
    """Of the last samples."""

    p50: float | None
    p99: float | None


class EngineFacts(msgspec.Struct, kw_only=True):
    """The engine's own pace."""

    plans_issued: int | None
    plans_acked: int | None
    preemptions: int | None
    decode_skips_max: int | None
    loop_lag_ms: Percentiles
    """How late the event loop is."""
    step_overhead_ms: Percentiles
    """Work of the engine between two plans."""


class AcceptFacts(msgspec.Struct, kw_only=True):
    """Rounds of drafting, and tokens per round."""

    accept_len: float | None
    rounds: int | None


class DraftFacts(msgspec.Struct, kw_only=True):
    """What drafting brought since the start."""

    enabled: bool | None
    why_not: str | None
    accept_len: float | None
    accept_rate: float | None
    by_position: list[float] | None
    carried: AcceptFacts
    uncarried: AcceptFacts
    first: AcceptFacts
    most: int | None
    adapts: bool | None


class FlipCounts(msgspec.Struct, kw_only=True):
    """Changes of the layout since the start, and why none happens now."""

    policy: Literal["auto", "manual", "off"] | None
    committed: int | None
    abandoned: dict[str, int] | None
    hold_reason: str | None
    unarmed_work_count: int | None


class LayoutSpeed(msgspec.Struct, kw_only=True):
    """What a layout was measured to do, over `n` plans."""

    prefill_tok_s: float | None
    decode_tok_s: float | None
    n: int


class MeasuredLayouts(msgspec.Struct, kw_only=True):
    """Both layouts; null where there is nothing to measure."""

    pipeline: LayoutSpeed | None
    tensor: LayoutSpeed | None


class PlanFacts(msgspec.Struct, kw_only=True):
    """A plan that was computed; of each rank: its number, when it began, how long it computed and waited, in ms."""

    life: int
    seq: int
    kind: str
    rows: int
    prompt_rows: int
    drafts: int
    drawn: int
    ranks: list[list[float]]


class EventFacts(msgspec.Struct, kw_only=True):
    """Something that happened to the machine."""

    at: float
    """Seconds of the epoch."""
    kind: str
    rank: int | None
    seq: int | None
    text: str
    folder: str | None
    """Where evidence lies."""


class ModelFacts(msgspec.Struct, kw_only=True):
    """One model, in or out."""

    id: str
    state: Literal["unloaded", "loading", "loaded", "unloading", "failed"]
    reason: str | None
    """Why it failed."""
    last_used: float | None
    """Seconds of the epoch; null: never."""
    idle_s: float | None
    """Since then, while nothing runs on it."""
    ttl_s: float | None
    """Idle for so long it is unloaded; null: never for that."""
    running: int
    """Requests that hold it."""
    waiting: int
    """Requests that wait for it."""
    planned_mib: dict[str, float]
    """What its plan promises it on each device at the peak, while it is in."""
    load: LoadFacts | None
    """While it is loading."""


class ModelChange(msgspec.Struct, kw_only=True):
    """What is being done to a model; its URL tells what becomes of it."""

    schema: Literal[1]
    id: str
    state: Literal["unloaded", "loading", "loaded", "unloading", "failed"]
    url: str


class Status(msgspec.Struct, kw_only=True):
    """The whole machine."""

    schema: Literal[1]
    version: str
    commit: str | None
    started: float
    """When the server was started, in seconds of the epoch."""
    at: float
    """The server's clock as it told this, in seconds of the epoch."""
    state: Literal["loading", "ready", "draining", "recovering"]
    load: LoadFacts
    models: list[ModelFacts]
    """Every model of this server. The rest is of one that is in: the one used last, or the one asked for."""
    model: ServedModel
    layout: Layout | None
    epoch: int | None
    vectors: Vectors
    pipeline: Pipeline
    memory_domain: str | None
    requests: RequestCounts
    tokens: TokenCounts
    kv: KvFacts
    prefix: PrefixFacts
    engine: EngineFacts
    draft: DraftFacts
    flip: FlipCounts
    layouts_measured: MeasuredLayouts
    ranks: list[RankStatus]
    plans: list[PlanFacts]
    events: list[EventFacts]


class Leak(msgspec.Struct, kw_only=True):
    """Pages that nobody owns."""

    page: int | None
    request: str
    pages: int


class PoolCensus(msgspec.Struct, kw_only=True):
    """A pool of one rank."""

    rank: int
    pool: Literal["kv", "state", "draft"]
    capacity: int
    free: int
    live: int
    cached: int
    protected: int
    leaks: list[Leak]
    launches: dict[str, int] | None
    """Of kernels by name, on a card."""
    window: int | UnsetType = UNSET


class Census(msgspec.Struct, kw_only=True):
    """What pools hold: `ok` where nothing is missing and engine and ranks agree."""

    schema: Literal[1]
    idle: bool
    ok: bool
    ranks: list[PoolCensus]
    shared_memory: list[str]


class FlipBegun(msgspec.Struct, kw_only=True, rename={"source": "from"}):
    """A flip that was accepted; the URL tells what becomes of it."""

    schema: Literal[1]
    id: int
    epoch: int
    source: str
    to: Layout
    state: Literal["accepted"]
    url: str


class FlipParts(msgspec.Struct, kw_only=True):
    """Milliseconds of each part that is over."""

    drain: float | None
    prepare: float | None
    commit: float | None
    verify: float | None
    refill: float | None
    total: float | None


class FlipLoad(msgspec.Struct, kw_only=True):
    """What it carries."""

    requests: int | None
    decoding: int | None
    half_done: int | None
    rows: int | None
    states: int | None
    checkpoints: int | None
    draft_rows: int | None


class RankFlip(msgspec.Struct, kw_only=True):
    """A rank's part of it."""

    rank: int
    answer: str | None
    reason: str | None
    sent_bytes: int | None
    received_bytes: int | None
    local_bytes: int | None
    refill_bytes: int | None
    refill_tries: int | None
    digest: str | None
    parts_ms: dict[str, float]


class FlipFacts(msgspec.Struct, kw_only=True, rename={"source": "from"}):
    """A change of the layout."""

    id: int
    epoch: int
    source: str
    to: str
    cause: Literal["policy", "request"]
    at: float
    """When it was asked for, in seconds of the epoch."""
    state: Literal["accepted", "draining", "preparing", "committing", "committed", "abandoned"]
    reason: str | None
    ms: FlipParts
    live: FlipLoad
    ranks: list[RankFlip]


class Flip(FlipFacts, kw_only=True, rename={"source": "from"}):
    """One change of the layout."""

    schema: Literal[1]


class Flips(msgspec.Struct, kw_only=True):
    """The policy, and the last changes, oldest first."""

    schema: Literal[1]
    policy: Literal["auto", "manual", "off"]
    last: list[FlipFacts]


class Budget(msgspec.Struct, kw_only=True):
    """The plan (docs/budget.schema.json), and predicted against measured memory."""

    schema: Literal[1]
    host: dict[str, Any]
    devices: list[dict[str, Any]]
    doubts: list[dict[str, Any]]
    plan: dict[str, Any] | None
    refusal: dict[str, Any] | None
    unknown: dict[str, Any] | None
    measured: list[dict[str, Any]]
    measured_total: dict[str, Any]
    measured_cards: list[dict[str, Any]]
    measured_all: dict[str, Any] | UnsetType = UNSET
    """Where several models are in: all of them together, the engine's process once."""
    models: list[dict[str, Any]] | UnsetType = UNSET


class DeviceCorridor(msgspec.Struct, kw_only=True):
    """Free memory of one device. A sample: seconds, MiB, phase."""

    index: int
    floor_mib: float | None
    min_free_mib: float | None
    at: float | None
    phase: str | None
    breaches: int
    samples: list[tuple[float, float | None, str]]


class MomentPeak(msgspec.Struct, kw_only=True):
    """The most that a rank held at a moment of a flip."""

    moment: str
    peak_mib: float
    ledger_mib: float | None
    at: float
    phase: str


class RankPeak(msgspec.Struct, kw_only=True):
    """A rank's moment that came nearest to what the ledger has for it."""

    rank: int
    peak_mib: float
    ledger_mib: float | None
    moment: str
    moments: list[MomentPeak]


class FlipPeaks(msgspec.Struct, kw_only=True):
    """What ranks held while the layout changed."""

    period_ms: float
    taken: int
    ranks: list[RankPeak]


class Corridor(msgspec.Struct, kw_only=True):
    """Free memory since before the load."""

    schema: Literal[1]
    floor_mib: float | None
    period_ms: float
    taken: int
    seconds: float | None
    longest_gap_ms: float
    began: float
    """What the seconds of samples count from, in seconds of the epoch."""
    devices: list[DeviceCorridor]
    flips: FlipPeaks
