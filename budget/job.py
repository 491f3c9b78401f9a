"""What is to be placed: a model and a wish with every "choose for me" settled, and what one rank holds of it.

    Job      bytes of a token, of a request and of a layer, from a shape and a wish
    Share    a rank's part of a job in one layout: weights, states, and KV rows as a function of the pool's tokens

Layers that keep every token have a row for each token of the pool. Layers with a window have a pool of their own, which
grows with that one and stops: `budget.wish.window_slots`.

Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property

from budget import host_lines
from budget.card_work import Part, whole
from budget.facts import KV_BITS, MIB, KvShape, LayerShape, ModelShape
from budget.ledger import Term
from budget.wish import DEFAULT_DRAFTS, DEFAULT_RUNNING, Wish, window_slots

LOGPROB_ROWS = 32
_STATES_AT_MOST = 512 * MIB
"""Unasked, a model with large recurrent states runs so many requests that their states take about this (but four)."""
_ENDLESS = 1 << 60
"""Tokens: more than any pool holds."""
_STEP = 256
"""Tokens of context by which the buffers of a split attention grow."""
LEAST_TOKENS = 512
"""A pool below this serves no conversation."""


@dataclass(frozen=True)
class WindowRows:
    """Rows of a rank's layers with one window: `row` bytes for each token of the pool, of no more than `slots`."""

    window: int
    layers: int
    row: float
    slots: int


@dataclass(frozen=True)
class Share:
    """What one rank holds of the model in one layout.

    `kv_row` is bytes of a token in the layers that keep every token, `windows` the rows of the others, `kv_fixed` what
    the pool takes without any token.
    """

    weights: float
    kv_copies: float = 0.0
    kv_row: float = 0.0
    kv_fixed: float = 0.0
    windows: tuple[WindowRows, ...] = ()
    state: float = 0.0
    read: float = 0.0
    """Weights read for one decoded token."""
    held: float = 0.0
    """Of states, for each row whose input is a draft."""
    part: float = 1.0
    """The largest share that it has of any stage,"""
    vocabulary: int = 0
    """and its rows of the head, in the tensor layout."""
    parts: frozenset[Part] = frozenset()
    """What it computes, by kind of layer,"""
    joined: int = 0
    """its columns of a drafting block's joining projection, of both halves,"""
    kept: int = 0
    """and bytes that a card keeps of rows whose input is a draft."""

    @property
    def has_rows(self) -> bool:
        return bool(self.kv_row or self.kv_fixed or self.windows)

    @property
    def windows_most(self) -> float:
        """Bytes of all rows of layers with a window, when they have stopped to grow."""
        return sum(rows.row * rows.slots for rows in self.windows)

    def kv_read(self, depth: int) -> float:
        """Bytes of the rows that a token reads which has `depth` tokens before it."""
        return self.kv_row * depth + sum(rows.row * min(depth, rows.window) for rows in self.windows)


@dataclass(frozen=True)
class Job:
    """A model and a wish, with what was left open settled. Bytes a token and a request, by layer."""

    shape: ModelShape
    wish: Wish
    running: int
    memo: dict[tuple[object, ...], tuple[Share, ...]] = field(default_factory=dict, compare=False, repr=False)
    """Shares that were computed: many options look at the same cut."""
    standing: dict[tuple[object, ...], list[Term]] = field(default_factory=dict, compare=False, repr=False)
    """What a rank on a card holds whatever the cut, by where and in which layouts."""
    workspaces: dict[tuple[int, int, bool, bool, int], tuple[int, float]] = field(
        default_factory=dict, compare=False, repr=False
    )
    """Buffers that were computed, by threads, rows of logits, whether there is a head, a drafting block, and the
    requests that draft with it."""

    @cached_property
    def layers(self) -> tuple[LayerShape, ...]:
        return (
            tuple(_dense(layer, self.wish.dense) for layer in self.shape.layers)
            if self.wish.dense
            else self.shape.layers
        )

    @cached_property
    def drafting(self) -> tuple[LayerShape, ...]:
        """The drafting block's layers, where it is wanted."""
        if not self.wish.draft:
            return ()
        return (
            tuple(_dense(layer, self.wish.dense) for layer in self.shape.nextn) if self.wish.dense else self.shape.nextn
        )

    @cached_property
    def alike(self) -> tuple[tuple[LayerShape, bool, int], ...]:
        """Each different layer, whether it drafts, and how many there are of it."""
        counts = Counter((layer, False) for layer in self.layers) + Counter((layer, True) for layer in self.drafting)
        return tuple((layer, drafting, times) for (layer, drafting), times in counts.items())

    @cached_property
    def recurrent_layers(self) -> int:
        """Layers that keep something of a request beside rows."""
        return sum(bool(layer.conv_elements) for layer in (*self.layers, *self.drafting))

    @cached_property
    def kinds(self) -> tuple[tuple[Part, ...], tuple[int, ...]]:
        """The different parts that layers are, as a whole, and which of them each layer is, the drafting block's
        behind the trunk's."""
        every = [whole(layer.work) for layer in (*self.layers, *self.drafting)]
        found = {part: at for at, part in enumerate(dict.fromkeys(every))}
        return tuple(found), tuple(found[part] for part in every)

    @cached_property
    def weights_per_byte(self) -> float:
        """Weights in a packed byte: an operation is counted for a weight, not for its bits."""
        params = sum(layer.params for layer in self.layers)
        packed = sum(layer.bytes for layer in self.layers)
        return params / packed if params and packed else 1.75

    @property
    def drafting_bytes(self) -> int:
        """Of the drafting block beside its layers."""
        if not self.drafting:
            return 0
        return self.shape.nextn_params * self.wish.dense if self.wish.dense else self.shape.nextn_bytes

    @property
    def drafting_table_bytes(self) -> int:
        """Of these, its own embedding and head."""
        own = self.drafting_bytes * self.shape.nextn_table_bytes
        return round(own / self.shape.nextn_bytes) if own else 0

    @property
    def drafting_looks_up(self) -> bool:
        """Whether the rank of the drafting block reads rows of the model's embedding."""
        return bool(self.drafting) and not self.shape.nextn_embeds

    @property
    def drafts(self) -> int:
        """The most drafts of a round."""
        return (self.wish.drafts or DEFAULT_DRAFTS) if self.drafting else 0

    @property
    def decode_rows(self) -> int:
        """Rows of one plan in which every running request has as many drafts as it may."""
        return self.running * (1 + self.drafts)

    @property
    def context(self) -> int:
        """The longest request that shall be possible."""
        return self.wish.context or self.shape.context

    @property
    def least_tokens(self) -> int:
        """The smallest pool that is worth a plan: what was asked for, else a short conversation."""
        return self.wish.kv_tokens or self.wish.context or min(self.shape.context, LEAST_TOKENS)

    @property
    def rows(self) -> int:
        """Rows of the largest plan: a chunk of prompts beside those of each running request."""
        return self.wish.chunk + self.decode_rows

    @property
    def logit_rows(self) -> int:
        """Rows of a plan with logits: those of each request, and those whose log-probabilities `echo` asks for."""
        return self.wish.logit_rows or self.decode_rows + LOGPROB_ROWS

    @property
    def checkpoints(self) -> int:
        """States of recurrent layers that the prefix cache keeps beside those of running requests: two for each."""
        return 2 * self.running if self.state_bytes and self.wish.prefix_cache else 0

    def workspace(
        self, threads: int, logit_rows: int, *, head: bool, block: bool = False, drafts: bool = False
    ) -> tuple[int, float]:
        """Bytes of the buffers of a rank's largest plan, and of each token of its longest request beside them. `block`:
        it has the drafting block, where the model has one; `drafts`: and drafts with it."""
        block = block and bool(self.drafting)
        lanes = self.running if block and drafts else 0
        key = threads, logit_rows, head, block, lanes
        if key not in self.workspaces:
            sizes = self.shape, self.rows, logit_rows, threads
            short, long = (
                host_lines.workspace_bytes(*sizes, context, head=head, block=block, lanes=lanes)
                for context in (_STEP, 2 * _STEP)
            )
            self.workspaces[key] = short, (long - short) / _STEP
        return self.workspaces[key]

    @property
    def embedding_bytes(self) -> int:
        return self._table(self.shape.embedding_bytes)

    @property
    def head_bytes(self) -> int:
        """Of the head as a rank that computes it holds it: a tied head is a copy of the embedding there."""
        return self._table(self.shape.embedding_bytes if self.shape.tied else self.shape.head_bytes)

    def kv_row(self, kv: KvShape, *, on_cpu: bool) -> float:
        """Bytes of one token in an attention layer. `on_cpu`: as the pool of the CPU backend has them."""
        packed = on_cpu and not self.wish.dense
        elements = host_lines.kv_elements(kv, self.wish.kv_type) if packed else kv.elements
        return elements * KV_BITS[self.wish.kv_type] / 8

    def window_slots(self, window: int) -> int:
        """The most slots that layers with this window ever have, however many tokens the pool holds."""
        return window_slots(window, _ENDLESS, self.running, self.wish.chunk, kept=self.wish.prefix_cache)

    def state(self, layer: LayerShape) -> float:
        """Bytes of one request's recurrent state; the convolution window is held in 16 bits."""
        return layer.state_elements * self.wish.state_bits / 8 + layer.conv_elements * 2

    @cached_property
    def state_bytes(self) -> float:
        """Of one request, over all layers, the drafting block's among them."""
        return sum(self.state(layer) for layer in (*self.layers, *self.drafting))

    def _table(self, packed: int) -> int:
        return self.shape.vocab * self.shape.hidden * self.wish.dense if self.wish.dense and packed else packed

    def rows_of(self, layers: Iterable[LayerShape], *, on_cpu: bool) -> tuple[float, tuple[WindowRows, ...]]:
        """Bytes of a token in those of `layers` that keep every token, and the rows of the others by their windows."""
        row, windows = 0.0, dict[int, tuple[int, float]]()
        for layer in layers:
            if layer.kv is None:
                continue
            own = self.kv_row(layer.kv, on_cpu=on_cpu)
            if layer.kv.window:
                count, together = windows.get(layer.kv.window, (0, 0.0))
                windows[layer.kv.window] = count + 1, together + own
            else:
                row += own
        found = (WindowRows(w, count, own, self.window_slots(w)) for w, (count, own) in sorted(windows.items()))
        return row, tuple(found)


def settle(shape: ModelShape, wish: Wish, running: int = 0) -> Job:
    """`running` wins over the wish's; without either it is what the model's states allow."""
    state = shape.state_bytes_per_request(wish.state_bits)
    most = DEFAULT_RUNNING if not state else max(4, min(DEFAULT_RUNNING, round(_STATES_AT_MOST / state)))
    return Job(shape, wish, running or wish.running or most)


def _dense(layer: LayerShape, each: int) -> LayerShape:
    """The layer as a backend without packed kernels holds it: `each` bytes a weight."""
    factor = layer.params * each / layer.bytes if layer.bytes else 1.0
    return replace(
        layer,
        mixer_bytes=round(layer.mixer_bytes * factor),
        ffn_bytes=round(layer.ffn_bytes * factor),
        shared_bytes=round(layer.shared_bytes * factor),
        expert_bytes=round(layer.expert_bytes * factor),
        kv_bytes=round(layer.kv_bytes * factor),
        mixer_copies=round(layer.mixer_copies * factor),
        ffn_copies=round(layer.ffn_copies * factor),
        table_bytes=round(layer.table_bytes * factor),
        table_copies=round(layer.table_copies * factor),
    )
