"""What homeserve's own processes hold on the host, line by line: the weights as the CPU keeps them, the buffers of a
plan, the plan log, the processes, and what comes with the first guided answer.

Two sorts of numbers. What the CPU backend maps is *computed*: its arena and its buffers are sums over widths, and the
formulas here are the ones that the recorder uses, so they are right to the byte (the kernel rounds a mapping up to a
huge page). What an interpreter with its libraries holds is *measured*: a constant for each kind of process, and one
number for each token of the vocabulary, because a tokenizer keeps every token several times (text, index, merges).

Shared pages of libraries are counted by share (Pss): three processes of one interpreter hold one copy of its code. So a
constant is what a process adds on a box that runs nothing else of this Python; beside other Pythons it adds less.

What comes with the first guided answer is in every plan: any request may be that one, and a plan is a proof. Nobody is
asked at the start whether there will be any, and a server whose memory is full would die by its first JSON schema.

The names below are the names of ledger lines; what is measured after the start (`homeserve.measure`) bears the same.

Pure.
"""

from __future__ import annotations

from budget.facts import KV_BLOCKS, MIB, KvShape, LayerShape, ModelShape
from budget.wish import PAGE

WEIGHTS = "weights"
COPIES = "k and v copies"
"""They lie among a rank's weights."""
KV = "kv"
STATE = "state"
WORKSPACE = "workspace"
ENGINE_PROCESS = "engine process"
WORKER_PROCESSES = "worker processes"
TEMPLATE_PROCESS = "template process"
VOCABULARY = "vocabulary"
"""What the rank that draws reads at its first guided answer or DRY breaker, and keeps."""
GRAMMAR_PROCESS = "grammar process"
"""It checks grammars; started with the first."""
PLAN_LOG = "plan log"
ACTS = "acts"
"""Shared memory through which ranks exchange rows and tokens."""
MODEL_FILE = "model file (page cache)"
WEIGHTS_COPY = "weights copy"
"""One packed copy of the model in shared memory, from which ranks fill their arenas at a flip."""
IMAGE = "weights image"
"""What a rank's arena will hold after the next flip, where there is no such copy."""
SIDE = "weights side"
"""Parts of weights that cannot be read from the copy, which a rank keeps for itself."""
DRAFTS = "drafts"
"""What is kept of rows whose input is a draft, until it is known how many of them count."""
STAGING = "staging"
"""Pinned memory through which a card gets its batches and gives its logits."""
EXCHANGE = "exchange"
"""Pinned memory through which a card's rows go to other ranks."""
MAILBOXES = "mailboxes"
"""Memory of a card into which other cards of its vendor write rows."""
TRANSIT = "flip transit"
"""Shared memory for live rows and states on their way between the ranks."""

# Resident after a start beside which nothing else of the same Python ran; x86-64, CPython 3.11, glibc. Sums of smaps as
# `homeserve.measure` makes them, of first starts and of later ones, two to five readings each:
#   engine    54.1 to 55.5 MiB with 512 tokens, 63 with 20 000, 80 with 50 000, 81.5 to 84.6 with SmolLM2's 49 152, 114
#             with 100 000, 133 to 142 with 150 000 (made-up merges of 10 bytes a token: real ones have 7 to 8), and 247
#             with 250 000 of 17 bytes, longer than those of any model; 2 more after 48 requests
#   worker    31.9 to 32.0 MiB with 2 threads and the library of avx512vnni; with 1 to 8 threads differences of 0.8,
#             after 48 requests 2 more
#   template  14.2 MiB
_ENGINE_BASE = 54 * MIB
_ENGINE_PER_TOKEN = 620
_WORKER_BASE = 33 * MIB
_WORKER_THREAD = MIB // 32
_TEMPLATE_BASE = 14 * MIB + MIB // 2
# Of the vocabulary the worst moment counts, which is while it is read, a second or two. Resident memory of a worker
# beside what it had before, at that moment and afterwards (two libraries of code are 14 MiB of either):
#   tokens     32 000   49 152   128 256   151 936   262 144   262 144
#   merges    rebuilt   48 900   280 147   151 387   514 906   rebuilt, from the cache
#   reading      50.7     43.9     151.9     131.8     267.2   370.9 MiB
#   afterwards   45.7     42.7      96.3     103.6     179.0   200.7
# A plan knows tokens, and neither merges nor how they come: the worst of them binds.
_VOCABULARY_BASE = 20 * MIB
_VOCABULARY_PER_TOKEN = 1440
# 15 to 25 MiB, by how much of the libraries' code others share.
_GRAMMAR_BASE = 26 * MIB

_FLOAT = 4
_LANES = 16
"""Floats that a row of a buffer is padded to."""
_ACTIVATION_BLOCK = (32, 80)
"""Columns of one block of quantised activations, and its bytes."""
_PARTITION_PAGES = 16
"""Pages of one part of a split attention, and parts that may be open for each thread."""
_SPLIT_ITEMS = 4
_GRAMMAR = 64 * 1024
"""Bytes of the largest grammar of a request."""
_PLAN_EMBEDDINGS = 32
"""Embeddings that one plan may bring."""
_FLIP_RESULT = 48 * 16
"""What a rank says of a flip, beside what it says of a plan. (A plan of a flip is never the largest plan.)"""


def of_rank(name: str, rank: int) -> str:
    """The line `name` of one of several ranks that hold it on one device."""
    return f"{name}, rank {rank}"


def engine_bytes(shape: ModelShape) -> int:
    """The engine process at rest after a start: interpreter, HTTP, engine, and a tokenizer of `shape.vocab` tokens."""
    return _ENGINE_BASE + _ENGINE_PER_TOKEN * shape.vocab


def engine_base_bytes() -> int:
    """Of that, what several models of one engine process have once."""
    return _ENGINE_BASE


def worker_bytes(backend: str, threads: int = 1) -> int:
    """One worker process without what its program maps: interpreter, NumPy, the native library, `threads` stacks."""
    return _WORKER_BASE + (_WORKER_THREAD * threads if backend == "cpu" else 0)


def template_bytes() -> int:
    """The helper process that renders chat templates."""
    return _TEMPLATE_BASE


def vocabulary_bytes(shape: ModelShape) -> int:
    """What a rank may take to know how `shape.vocab` tokens are spelled: spellings, a tokenizer, llguidance's tries."""
    return _VOCABULARY_BASE + _VOCABULARY_PER_TOKEN * shape.vocab


def grammar_bytes() -> int:
    """The helper process that checks grammars, between two checks."""
    return _GRAMMAR_BASE


def plan_log_bytes(
    ranks: int,
    running: int,
    chunk: int,
    context: int,
    plans_in_flight: int = 2,
    *,
    groups: int = 1,
    flip: bool = False,
    drafts: int = 0,
    hidden: int = 0,
) -> int:
    """Shared memory of the plan log and of each rank's report ring, reserved when the fleet starts.

    `context` is the longest request in tokens, `groups` how many page tables it has: one, and one for each window;
    `drafts` the most of a round, which stays within the context and answers with a token for each of them more,
    `hidden` the floats of an embedding. The slots are made for the largest plan and the largest result that these
    limits allow (the same sums as the scheduler's).
    """
    lane_pages = _parts(context, PAGE)
    newcomers = 2 * (4 * context + 64 * 1024) + _GRAMMAR
    plan = newcomers + 64 * running + 4 * chunk + 4 * running * (1 + lane_pages) * groups + 4096
    samples = running * (1 + drafts)
    result = (samples + 32) * (32 + 16 * 21) + 64 * samples + 16384 + (_FLIP_RESULT if flip else 0)
    result += min(running, _PLAN_EMBEDDINGS) * hidden * _FLOAT
    log = 64 + plans_in_flight * _slot(plan)
    report = 64 + (plans_in_flight + 4) * _slot(result)
    return log + ranks * report


def packed_bytes(shape: ModelShape) -> int:
    """Weights as the CPU backend keeps them: what the checkpoint has, to the byte, where matrices have a multiple of 16
    rows and norms are stored as floats, which is so in nearly every one (see `packed_tensor_bytes`)."""
    return shape.weights_bytes


def packed_tensor_bytes(block_bytes: int, block_cols: int, rows: int, cols: int) -> int:
    """Bytes of one matrix in the CPU backend's layout, of any type: blocks of `block_cols` columns take `block_bytes` a
    row (Q4_K: 144 for 256), as in the file, but the last group of 16 rows is full; aligned to a cache line."""
    return _padded(_parts(rows, _LANES) * _LANES * (cols // block_cols) * block_bytes, 64)


def kv_elements(kv: KvShape, kv_type: str) -> int:
    """Elements that one token takes in a layer of the CPU backend's pool: V of each head is padded to 16 dims; types
    with blocks have none to pad."""
    if not kv.head_dim or kv_type in KV_BLOCKS:
        return kv.elements
    return kv.elements + kv.heads * (_padded(kv.head_dim) - kv.head_dim)


def workspace_bytes(
    shape: ModelShape,
    rows: int,
    logit_rows: int,
    threads: int,
    context: int = 0,
    *,
    head: bool = True,
    block: bool = False,
    lanes: int = 0,
) -> int:
    """Buffers and scratch of the CPU backend for plans of `rows` rows, `logit_rows` of them with logits.

    `context` is the longest request in tokens (0: the model's own); `head` False is a rank of a pipeline that computes
    no logits. `block`: the drafting block is here, and all rows pass the last norm, not only those with logits;
    `lanes`: so many requests take a step of drafting together.
    """
    context = context or shape.context
    total = (shape.row_elements or _row_elements(shape)) * rows * _FLOAT
    if block:
        total += (shape.draft_elements or _draft_elements(shape)) * rows * _FLOAT
        total += 2 * _padded(shape.hidden) * lanes * _FLOAT
    if head:
        behind = 1 if block else 2
        total += (behind * _padded(shape.hidden) + _padded(shape.vocab)) * logit_rows * _FLOAT
    partitions = _parts(_parts(context, PAGE), _PARTITION_PAGES)
    total += _SPLIT_ITEMS * threads * partitions * (shape.partial_elements or _partial_elements(shape)) * _FLOAT
    tiles, frequencies = 2 * rows * _FLOAT, _attention_of(shape)[2] // 2 * 8
    return total + tiles + frequencies


def _row_elements(shape: ModelShape) -> int:
    """An estimate where declarations do not tell: x, update, normed; q, k, v and the mixed heads; gate, up and their
    product; the rotations; and the quantised input of the widest projection."""
    hidden, mixer, ffn = shape.hidden, shape.mixer_width, shape.ffn
    q_width, _, head_dim = _attention_of(shape)
    columns, block = _ACTIVATION_BLOCK
    quantised = max(hidden, q_width, ffn) // columns * block // _FLOAT
    return 3 * _padded(hidden) + mixer + q_width + 3 * _padded(ffn) + head_dim + quantised


def _draft_elements(shape: ModelShape) -> int:
    """Likewise of drafting: the state behind the last norm and the block's norm of it, the embedding, and both side by
    side."""
    return 5 * _padded(shape.hidden)


def _partial_elements(shape: ModelShape) -> int:
    _, group, head_dim = _attention_of(shape)
    return group * (16 + _padded(head_dim))


def _attention_of(shape: ModelShape) -> tuple[int, int, int]:
    """(width of q, query heads of one KV head, head size) of the widest attention layer; zeros where there is none."""
    widest: LayerShape | None = max(
        (layer for layer in shape.layers if layer.kv is not None), key=lambda layer: _elements(layer), default=None
    )
    if widest is None or widest.kv is None:
        return 0, 0, 0
    heads = max(1, widest.kv.heads)
    head_dim = widest.kv.elements // 2 // heads
    q_width = max(head_dim * heads, shape.mixer_width - widest.kv.elements)
    return q_width, max(1, q_width // max(1, head_dim * heads)), head_dim


def _elements(layer: LayerShape) -> int:
    return 0 if layer.kv is None else layer.kv.elements


def _slot(record_bytes: int) -> int:
    """A ring's slot for records of so many bytes: a stamp of 8 and a frame header of 16 beside them."""
    return _padded(record_bytes + 24, 64)


def _padded(size: int, unit: int = _LANES) -> int:
    return _parts(size, unit) * unit


def _parts(size: int, unit: int) -> int:
    return -(-size // unit)
