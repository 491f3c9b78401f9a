"""Every record that crosses a process boundary, and nothing else.

Two directions. The engine writes *plans* into one log that all ranks read in the same order; each rank writes *reports*
into its own ring. A plan has a number `seq` (consecutive from 1 in one fleet life) and the layout `epoch`; a rank runs
every plan whose `ranks` names it, in order, and answers each with exactly one `Result` that carries the same `seq`. A
plan that does not name it is answered as well, with an empty result: it says that the rank is past that record, so that
the slot can be written again.

    engine ── Plan(seq=7) ──▶ log ──▶ rank 0, rank 1, …        rank r ── Result(seq=7, rank=r) ──▶ ring r ──▶ engine

Records are frozen msgspec structs, encoded by `homeserve.wire.codec` (msgpack, arrays not maps, with version and
checksum in the frame). Bulk integers travel as little-endian int32 bytes (`pack_ints`).

A *lane* is the index of a running request in a rank's tables (page table, sampling state); the engine hands it out.
"""

from __future__ import annotations

from array import array
from enum import IntEnum

import msgspec

RECORD_VERSION = 9


class PlanKind(IntEnum):
    LOAD = 1
    PREFILL = 2
    DECODE = 3
    MIXED = 4
    FLUSH = 5
    CENSUS = 6
    STOP = 7
    FLIP_PREPARE = 8
    FLIP_COMMIT = 9
    FLIP_ABANDON = 10


class _Record(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    pass


class Dry(_Record, frozen=True):
    """The DRY penalty: a token that would go on a repetition of at least `allowed_len` tokens loses
    `multiplier * base ** (length - allowed_len)`. It looks back `last_n` tokens (-1: all, prompt and output), and no
    repetition reaches over a token whose text has one of `breakers` in it."""

    multiplier: float
    base: float = 1.75
    allowed_len: int = 2
    last_n: int = -1
    breakers: tuple[str, ...] = ()


class Guide(_Record, frozen=True):
    """What an answer has to look like, whatever the logits say; for the rank that draws.

    `grammar` is llguidance's JSON of a grammar (a string, as its compiler takes it), empty for none. It holds for the
    output from its first token on, or from behind the thought where there is one. A thought is opened by the ids
    `thought_opens` as the first tokens of the output, or `in_thought`: by the prompt. It ends with `thought_closes`,
    which are forced once the thought has `thought_budget` tokens (-1: no bound). Ids are int32 bytes; `ends` are the
    tokens that end the answer: they can be drawn where the grammar is complete and nowhere else.
    """

    grammar: str = ""
    ends: bytes = b""
    thought_opens: bytes = b""
    thought_closes: bytes = b""
    in_thought: bool = False
    thought_budget: int = -1


class Sampling(_Record, frozen=True):
    """How a request's tokens are drawn. `temperature` 0 is greedy. Random numbers are f(seed, position)."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    top_logprobs: int = -1
    """-1: no log-probabilities; n >= 0: of the drawn token and the n most likely ones."""
    forbidden: tuple[int, ...] = ()
    """Token ids not to be drawn while fewer than `min_tokens` are out (end tokens under min_tokens/ignore_eos)."""
    min_tokens: int = 0
    top_n_sigma: float = 0.0
    """n > 0: only logits within n standard deviations of the largest."""
    xtc_probability: float = 0.0
    """How often the most likely tokens are left out, all but the last of those at least `xtc_threshold` likely."""
    xtc_threshold: float = 0.1
    dry: Dry | None = None
    guide: Guide | None = None


MEAN, LAST, CLS = "mean", "last", "cls"
POOLINGS = (MEAN, LAST, CLS)
"""How the states of a prompt become its embedding: their mean, the last one, the first one."""


def needs_all_rows(pooling: str) -> bool:
    """Whether an embedding is made of rows that a cached prefix does not compute."""
    return pooling in (MEAN, CLS)


class NewLane(_Record, frozen=True):
    """A request takes a lane: its settings travel once. `prompt_len` tells prompt tokens from generated ones (penalties
    count generated tokens for presence and frequency, all tokens for repetition). `history` holds the int32 tokens
    before the first computed row (a prefix-cache hit), empty where no setting needs them."""

    lane: int
    request: int
    prompt_len: int
    sampling: Sampling
    history: bytes = b""
    restore: int = -1
    """State slot whose content the lane begins with, copied before the plan's rows (a prefix hit of a recurrent
    model)."""
    pooling: str = ""
    """`mean`, `last` or `cls`: no token is drawn for the lane; the rows that ask to `sample` give the embedding of all
    rows so far (`Sample.embedding`)."""


class LaneRows(_Record, frozen=True):
    """Rows of one lane in a plan: consecutive positions from `start`.

    `tokens` (int32 bytes) are their inputs; empty means one row whose input is the token that this lane sampled last.
    `pages` (int32 bytes, `[groups, n]`) are appended to the lane's page table in each KV group before the rows run; -1
    stands for a page before a group's window, which no row will read. `sample` asks for a token after the
    last row; otherwise no logits are computed.
    """

    lane: int
    request: int
    start: int
    tokens: bytes
    pages: bytes = b""
    sample: bool = False
    prompt_logprobs: int = -1
    """n >= 0: also report the log-probability of each of these tokens (but the prompt's first), and the n most likely
    ones in its place (`echo` with logprobs)."""
    save: int = -1
    """State slot into which the lane's recurrent state is copied after these rows."""
    drafts: int = 0
    """n > 0, with the one token that is known: the rank drafts n more, computes a row of each, and answers with a
    sample for each row that counts: that behind the known token, and those behind each draft that was drawn before."""


class LoadSpec(_Record, frozen=True):
    """What a rank loads: the model, its slice of it, and how large its pools are."""

    path: str
    kv_slots: int
    kv_type: str
    rows: int
    logit_rows: int
    lanes: int
    lane_pages: int
    deterministic: bool = True
    state_slots: int = 0
    """Slots of recurrent states: one for each lane, the rest for checkpoints."""
    window_slots: tuple[tuple[int, int], ...] = ()
    """(window, slots) of each KV group that keeps the last tokens only, by window; `kv_slots` is of the others."""
    layout: str = "pipeline"
    """`pipeline` or `tensor`: one record for all ranks, each takes its own part of what follows."""
    ranges: tuple[tuple[int, int], ...] = ()
    """Pipeline layout: layers [first, end) of each rank. Empty: one rank with all of them."""
    weight_vector: tuple[int, ...] = ()
    """Tensor layout: shares of the weights, one entry for each rank,"""
    token_vector: tuple[int, ...] = ()
    """and of the KV rows."""
    flip: bool = False
    """Whether the ranks are to be able to change the layout: then `ranges` and both vectors are given, and `layout` is
    where they begin."""
    transit_bytes: int = 0
    """The most that one flip may carry (all ranks together)."""
    image_dir: str = ""
    """Where the image of a layout that is not the next one lies meanwhile; empty: one copy of the model in memory
    serves both layouts."""
    drafts: int = 0
    """The most drafts that a row may ask for (`LaneRows.drafts`); 0: the drafting block is not loaded."""
    cache_dir: str = ""
    """Where what is slow to build of a tokenizer is kept; empty: nowhere."""
    drafts_test: str = ""
    """For tests alone: `wrong` turns every draft into another token, `accept:N` counts the first N drafts of a row as
    drawn whatever was (what is answered is not the model's then)."""


PACK, VERIFY = "pack", "verify"


class FlipLive(_Record, frozen=True):
    """What is live at a flip: bit i of a map (byte i // 8, lowest bit first) stands for page or state slot i."""

    pages: tuple[bytes, ...]
    """One map for each KV group,"""
    states: bytes = b""
    """and one of the state slots."""


class FlipDigest(_Record, frozen=True):
    """One payload: what rank `source` packed for rank `target`, and the digest of these bytes."""

    source: int
    target: int
    nbytes: int
    digest: int


class FlipOrder(_Record, frozen=True):
    """A flip, as each of its plans carries it. `epoch` is that of the layout `to`, once it is committed."""

    flip: int
    epoch: int
    to: str
    stage: str = ""
    """Of a prepare: `pack`, then `verify`."""
    live: FlipLive | None = None
    """With `pack`."""
    digests: tuple[FlipDigest, ...] = ()
    """With `verify`: all that were packed, of all ranks."""


class FlipAnswer(_Record, frozen=True):
    """What a rank did for a plan of a flip. Bytes; times in microseconds by part (`check`, `pack`, `exchange`,
    `digest`, `release`, `map`, `write_kv`, `write_state`, `refill`, `verify`, `rebind`)."""

    sent_bytes: int = 0
    received_bytes: int = 0
    local_bytes: int = 0
    refill_bytes: int = 0
    refill_tries: int = 0
    rows: int = 0
    """KV rows that this rank has afterwards, counted once for each of its layers,"""
    states: int = 0
    """and states, likewise."""
    digests: tuple[FlipDigest, ...] = ()
    """Of what it packed."""
    digest: int = 0
    """Of the arena, after a commit."""
    us: tuple[tuple[str, int], ...] = ()


class Plan(_Record, frozen=True):
    seq: int
    epoch: int
    kind: int
    ranks: int
    """Bit r set: rank r runs this plan."""
    drop: tuple[int, ...] = ()
    """Lanes released before anything else happens."""
    new: tuple[NewLane, ...] = ()
    rows: tuple[LaneRows, ...] = ()
    load: LoadSpec | None = None
    flip: FlipOrder | None = None


class Logprobs(_Record, frozen=True):
    """Log-probability of `token`, and of the most likely tokens: log-softmax of the model's own logits, before
    penalties, bias and temperature. Most likely first, equal ones by token id."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Sample(_Record, frozen=True):
    """A token drawn for a lane by one plan. `position` is the position that it will take. `token` -1: rows that drew
    nothing but report `prompt_logprobs`. Rows with drafts give one or more, positions rising."""

    lane: int
    request: int
    position: int
    token: int
    logprobs: Logprobs | None = None
    prompt_logprobs: tuple[Logprobs, ...] = ()
    embedding: bytes = b""
    """Of a lane with pooling: float32 `[hidden]`, of length 1; `token` is -1."""
    failed: str = ""
    """Why this lane alone cannot go on (a grammar beyond its bounds); `token` is -1. Other lanes are not concerned."""


class PoolCensus(_Record, frozen=True):
    """What a rank knows of a pool: rows that its lanes address. (Free, cached and protected pages are the engine's.)"""

    pool: str
    capacity: int
    lanes: tuple[tuple[int, int, int], ...]
    """(lane, request, pages in its table) of every occupied lane."""


class RankFacts(_Record, frozen=True):
    """What a rank found and holds, said once after its load."""

    backend: str
    device: str
    isa: str
    threads: int
    batch_invariant: bool
    lines: tuple[tuple[str, int], ...]
    """Ledger line -> bytes held."""
    layers: tuple[int, int] | None = None
    """First layer held, and the one behind the last; None in the tensor layout, where every rank has a part of each."""
    regions: tuple[tuple[str, int, int], ...] = ()
    """(ledger line, address, bytes) of each line that is a mapping of its own in the rank's process."""


class Hello(_Record, frozen=True):
    """First record of a worker: it is up and has mapped its rings. (Its device is opened by the load.)"""

    rank: int
    pid: int
    record_version: int = RECORD_VERSION


class Progress(_Record, frozen=True):
    """Load progress; no answer to a plan."""

    rank: int
    stage: str
    done_bytes: int
    total_bytes: int


class Result(_Record, frozen=True):
    """A rank's one answer to a plan. `ok` False carries the reason; the verdict is the engine's."""

    rank: int
    seq: int
    epoch: int
    ok: bool = True
    reason: str = ""
    code: str = ""
    """Error word when not ok: an `errors` code such as unsupported_model, checkpoint, budget; or "fault"."""
    samples: tuple[Sample, ...] = ()
    facts: RankFacts | None = None
    census: tuple[PoolCensus, ...] = ()
    busy_us: int = 0
    """Microseconds this rank computed for the plan."""
    idle_us: int = 0
    """Microseconds it waited for the plan before."""
    field: str = ""
    fix: str = ""
    parts: tuple[str, ...] = ()
    """What the error of `code` is made of, so that the engine can raise the same one (homeserve.wire.refusal)."""
    began_us: int = 0
    """When the rank began with the plan: microseconds of the system's monotonic clock, the same for all processes."""
    waited_us: int = 0
    """Microseconds of `busy_us` in which it waited for other ranks."""
    exchanges: tuple[tuple[str, int, int, int], ...] = ()
    """What a census adds: (label, calls, bytes moved, microseconds waited) of each exchange since the load."""
    flip: FlipAnswer | None = None
    draft_us: int = 0
    """Microseconds of `busy_us` for steps of drafting."""
    launches: tuple[tuple[str, int], ...] | None = None
    """What a census adds: (symbol, launches since the load) of each kernel; None on a device that counts none."""
    notes: tuple[str, ...] = ()
    """What is not as it was asked for on this rank, and stops nothing: told once, with the first answer behind it that
    is not one to a load."""


class Boot(_Record, frozen=True):
    """What the parent hands a worker at spawn, over an inherited pipe: who it is and where its rings are."""

    rank: int
    ranks: int
    log_slots: int
    log_slot_bytes: int
    report_slots: int
    report_slot_bytes: int
    backend: str
    device_index: int
    """Of a card, its number among its kind in this box: for people. The driver is told `device`."""
    threads: int
    cores: tuple[int, ...]
    isa: str = ""
    fault: str = ""
    log_level: str = "INFO"
    log_fd: int = -1
    """Descriptors that the child inherits under the same numbers: the plan log's memory, the rank's report memory,"""
    report_fd: int = -1
    plan_bell_fd: int = -1
    """the read end of the bell for plans, the write end of the bell for reports,"""
    report_bell_fd: int = -1
    life_fd: int = -1
    """the read end of a pipe that ends when the parent does, and a file for stack traces."""
    stacks_fd: int = -1
    parent_pid: int = 0
    acts_fd: int = -1
    """The memory for what ranks exchange (backends.acts), -1 with one rank; its shape:"""
    piece_floats: int = 0
    message_floats: int = 0
    token_floats: int = 0
    acts_depth: int = 0
    exchange_timeout_s: float = 60.0
    spin_us: int = 0
    """How long a wait for another rank spins before it sleeps."""
    weights_fd: int = -1
    """Memory that all ranks share (unified memory), -1 where each has its own: packed weights,"""
    kv_fd: int = -1
    """KV rows,"""
    state_fd: int = -1
    """and states of recurrent layers."""
    transit_fd: int = -1
    """Memory through which ranks hand each other what moves at a flip, -1 where there is none."""
    device: str = ""
    """UUID or PCI address of the rank's card, empty on the CPU,"""
    device_name: str = ""
    """and what it is called, for messages."""
    fleet: tuple[str, ...] = ()
    """Backends of all ranks, by rank: which ways rows can go between cards depends on them."""


Report = Hello | Progress | Result
Record = Plan | Report | Boot


def pack_ints(values: list[int] | array[int]) -> bytes:
    """Little-endian int32 bytes."""
    return array("i", values).tobytes()


def unpack_ints(data: bytes) -> array[int]:
    values = array("i")
    values.frombytes(data)
    return values
