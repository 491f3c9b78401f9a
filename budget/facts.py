"""Facts about a box and a model, as plain values. Bytes everywhere; None is unknown, never 0."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

_AVX512 = frozenset({"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512dq"})

ISA_LEVELS: Mapping[str, frozenset[str]] = {
    "avx512vnni": _AVX512 | {"avx512_vnni"},
    "avx512": _AVX512,
    "avx2": frozenset({"avx2", "fma", "f16c"}),
    "baseline": frozenset(),
}
"""Levels of CPU kernels, the best first, and the flags that each needs. This is what is told to people before anything
is loaded; the backend asks the CPU itself."""


MIB = 1 << 20
GIB = 1 << 30

KV_BITS: Mapping[str, float] = {"f32": 32.0, "f16": 16.0, "bf16": 16.0, "q8_0": 8.5, "f8": 8.0}
"""Bits of one element of a KV row, by the type's name. q8_0: 32 int8 and one f16 scale."""
KV_BLOCKS: Mapping[str, int] = {"q8_0": 32}
"""Dims of one head that share a scale, of types that have one: a head is a whole number of them."""


@dataclass(frozen=True)
class Doubt:
    """What could not be known or cannot be believed: where it was read, what is wrong with it, what was taken."""

    where: str
    what: str
    taken: str


# ------------------------------------------------------------------------------------------------------------- the box


@dataclass(frozen=True)
class MemoryFacts:
    """Host memory as this process may use it.

    `limit_bytes` is the least of MemTotal and every control group's limit; `limit_source` names the one that binds.
    `available_bytes` is what may still be taken: the least of MemAvailable and, for each limited group, its limit minus
    what it holds, with page cache that the kernel gives back first (`inactive_file`) not counted as held. It is None
    only in a profile of another box that does not say it, and so is `total_bytes` where a profile knows a limit alone.
    """

    total_bytes: int | None
    limit_bytes: int
    limit_source: str
    available_bytes: int | None
    swap_bytes: int | None = None


@dataclass(frozen=True)
class CpuFacts:
    """What computes here. `logical` counts hardware threads of the machine.

    `usable` is how many cores a worker that has them to itself computes on, and its number of threads unless it is told
    one: a hardware thread of each physical core that the affinity allows, and no more than the control groups' quota.
    `source` names what binds: "processors" (all of them), "affinity", "physical cores", or the quota's file.
    `flags` are the instruction-set words of the first processor, as the kernel spells them.
    """

    name: str
    logical: int
    usable: int
    source: str
    flags: frozenset[str]
    numa_nodes: int = 1

    @property
    def levels(self) -> tuple[str, ...]:
        """The levels of CPU kernels that the flags allow, the best first."""
        return tuple(name for name, needed in ISA_LEVELS.items() if needed <= self.flags)

    @property
    def isa(self) -> str:
        """The best level."""
        return self.levels[0]


@dataclass(frozen=True)
class HostFacts:
    memory: MemoryFacts
    cpu: CpuFacts


@dataclass(frozen=True)
class Link:
    """A PCIe link: the best generation and width that card and slot agree on (an idle card reads generation 1)."""

    gen: int | None
    width: int | None


@dataclass(frozen=True)
class Card:
    """A graphics device as the probe saw it. Never identified by its index: cards are renumbered.

    `unified` says that it computes in system memory: then `total_bytes` is only the firmware's carve-out, and
    `gtt_total_bytes` bounds what it may pin of the host's memory. `used_bytes` is what others hold, `reserved_bytes`
    (which is not part of it) what the driver never hands out. `visible_bytes` is the part of an AMD card's memory that
    the host can map (its BAR 0); on NVIDIA cards `bar1_*` is the aperture.
    """

    vendor: str
    """nvidia | amd | intel | other"""
    id: str
    """UUID where the driver has one, else the PCI address; in a profile without either, vendor and position."""
    name: str
    arch: str | None = None
    """sm_86, gfx1103, ..."""
    unified: bool = False
    total_bytes: int | None = None
    reserved_bytes: int | None = None
    used_bytes: int | None = None
    free_bytes: int | None = None
    visible_bytes: int | None = None
    gtt_total_bytes: int | None = None
    gtt_used_bytes: int | None = None
    bar1_total_bytes: int | None = None
    bar1_free_bytes: int | None = None
    link: Link | None = None
    display: bool | None = None
    pci: str | None = None
    numa_node: int | None = None
    bandwidth_bytes_s: float | None = None
    """Memory bandwidth, where clock and bus width are readable."""
    peers: Mapping[str, str] = field(default_factory=dict)
    """id of another card -> what the driver says of peer access to it: OK, CNS, GNS, TNS, NS, DR, U."""
    twin: str = ""
    """The UUID that it shares with another card of this box: then `id` is something else, or the first one's."""
    order: int | None = None
    """Its place among the GPUs as the compute driver (KFD) lists them."""


@dataclass(frozen=True)
class Box:
    """One machine: what the probe found, or what a profile of another one says. None is unknown."""

    id: str
    memory: MemoryFacts | None
    cpu: CpuFacts | None
    cards: tuple[Card, ...] = ()
    os: str | None = None
    kernel: str | None = None
    environment: str | None = None
    """bare | vm | container | wsl2 | windows; None where nothing tells."""
    p2p: str | None = None
    """What a profile says of peer access between its cards, in its own words."""
    notes: str = ""
    doubts: tuple[Doubt, ...] = ()


# ----------------------------------------------------------------------------------------------------------- the model


@dataclass(frozen=True)
class KvShape:
    """What one token leaves in one attention layer: `elements` of K and V together (of the latent and its rotary part
    in MLA). `window` > 0: only the last so many tokens of a request are ever read, and no more are kept. `heads` is
    what a tensor layout can split the K and V projections by; `head_dim` the size of one, 0 where K and V are no heads
    of one size."""

    elements: int
    window: int = 0
    heads: int = 1
    head_dim: int = 0


@dataclass(frozen=True)
class LayerWork:
    """What of a layer the buffers and the scratch of a card follow from (`budget.card_work`); zeros: it has none.

    heads, kv_heads, head_dim, q_step   of an attention; `q_step` floats of q's projection for each head (twice
                         `head_dim` with a gate), `kv_heads` 0 where it reads K and V of another layer; `window` as in
                         KvShape
    key_heads, value_heads, key_dim, value_dim   of a delta net
    ffn                  inner columns of a dense feed-forward
    experts, used, expert_ffn   how many, how many of them a row runs, inner columns of one; `dealt`: a tensor layout
                         deals them out whole
    shared_ffn, shared_units   columns of a shared expert, and in how many parts they can be cut; `shared_gated`: with a
                         logit of its own
    token_ffn            width of inputs by token
    beside               buffers as wide as the residual that it has beside the usual ones, by name
    """

    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    q_step: int = 0
    window: int = 0
    key_heads: int = 0
    value_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    ffn: int = 0
    experts: int = 0
    used: int = 0
    expert_ffn: int = 0
    dealt: bool = False
    shared_ffn: int = 0
    shared_units: int = 1
    shared_gated: bool = False
    token_ffn: int = 0
    beside: tuple[str, ...] = ()


@dataclass(frozen=True)
class LayerShape:
    """One layer as the budget counts it. Bytes are packed, as they lie in the checkpoint.

    mixer_bytes      attention or delta-net projections, their norms
    kv_bytes         of these, the K and V projections (a tensor layout copies them where heads do not suffice)
    ffn_bytes        dense feed-forward, router and shared experts, their norms
    expert_bytes     all routed experts
    used_experts     share of the routed experts that one token runs (8 of 256: 1/32); 0 where there are none
    params           weights of the layer, counted (what a backend without packed kernels would hold in bf16)
    mixer_units, ffn_units   in how many parts a tensor layout can cut them
    state_elements   recurrent state of one request (value heads x key dim x value dim), 0 for attention
    conv_elements    its convolution window (channels x kernel width); of a drafting block the hidden state that the
                     next row of a request goes on from
    mixer_copies, ffn_copies   of mixer_bytes and ffn_bytes, what every rank of a tensor layout has: norms, routers
    held_elements    floats that are kept of each row whose input is a draft, until it is known whether it counts
    table_bytes      its own columns of a table of inputs by token, and their projection
    table_copies     of these, the projection, which every rank of a tensor layout has
    made_bytes       what ranks that flip make for themselves of it: no copy of the file has it as it is used
    shared_bytes     of ffn_bytes, the matrices of a shared expert, which are cut by columns of their own
    work             what it computes, in numbers of heads and columns
    """

    mixer_bytes: int
    ffn_bytes: int
    expert_bytes: int = 0
    used_experts: float = 0.0
    kv_bytes: int = 0
    params: int = 0
    mixer_units: int = 1
    ffn_units: int = 1
    kv: KvShape | None = None
    state_elements: int = 0
    conv_elements: int = 0
    mixer_copies: int = 0
    ffn_copies: int = 0
    held_elements: int = 0
    table_bytes: int = 0
    table_copies: int = 0
    made_bytes: int = 0
    shared_bytes: int = 0
    work: LayerWork = LayerWork()

    @property
    def bytes(self) -> int:
        return self.mixer_bytes + self.ffn_bytes + self.expert_bytes + self.table_bytes

    @property
    def read_bytes(self) -> float:
        """Weights that one token reads."""
        return self.mixer_bytes + self.ffn_bytes + self.expert_bytes * self.used_experts


@dataclass(frozen=True)
class ModelShape:
    """What a plan needs of a model. Filled from a checkpoint's declarations by `homeserve.models`, or from a shape file
    (`budget.shape`): `budget` imports nothing of homeserve.

    `nextn` are the layers of the drafting block, counted beside the trunk. `embedding_bytes` and `head_bytes` are two
    tables, or one when `tied` (then `head_bytes` is 0 and the embedding table is also the head). `vision_bytes` is a
    tower that a checkpoint carries. Widths are in elements: `hidden` of the residual, `mixer_width` of the widest thing
    that a mixer computes for a token (q, k, v, gate together), `ffn` of a feed-forward's inner side (for experts: those
    that one token runs, together).
    """

    name: str
    arch: str
    quant: str
    layers: tuple[LayerShape, ...]
    hidden: int
    mixer_width: int
    ffn: int
    vocab: int
    context: int
    embedding_bytes: int
    head_bytes: int
    tied: bool
    nextn: tuple[LayerShape, ...] = ()
    nextn_bytes: int = 0
    """Of the drafting block beside its layers: its norms, its joining projection, tables of its own."""
    nextn_params: int = 0
    """The same as weights, counted,"""
    nextn_table_bytes: int = 0
    """and of these bytes its own embedding and head."""
    nextn_units: int = 0
    """In how many parts a tensor layout can cut the joining projection; 0: as finely as you like."""
    nextn_embeds: bool = False
    """Whether it has an embedding of its own; without, it reads the model's."""
    vision_bytes: int = 0
    other_bytes: int = 0
    """The final norm, and tensors of the checkpoint that no layer declares."""
    row_elements: int = 0
    """Floats of buffers and scratch for one row of a plan on the CPU; 0: estimated from the widths above."""
    draft_elements: int = 0
    """The same of what drafting adds for a row; 0: estimated."""
    held_thread_elements: int = 0
    """Floats that each thread has beside `LayerShape.held_elements` of the rows."""
    partial_elements: int = 0
    """Floats of one partial result of a split attention; 0: estimated."""
    query_heads: int = 0
    """The fewest query heads that an attention layer has: what ranks of a tensor layout share; 0: no attention layer,
    or not known."""
    divided_elements: int = 0
    """Of `row_elements`, what a rank of a tensor layout has its share of; 0: not known."""
    attended_elements: int = 0
    """Of a row of the widest attention in parts: for each query head its values, and one number; 0: not known."""
    kv_sources: tuple[tuple[int, int], ...] = ()
    """(layer, the earlier layer whose K and V it reads) of each layer that has none of its own: both lie on one rank of
    a pipeline."""

    @property
    def weights_bytes(self) -> int:
        """Everything that is loaded, without a vision tower."""
        layers = sum(layer.bytes for layer in (*self.layers, *self.nextn))
        return layers + self.embedding_bytes + self.head_bytes + self.nextn_bytes + self.other_bytes

    @property
    def read_bytes(self) -> float:
        """Weights that one decoded token reads (a row of the embedding is nothing)."""
        head = self.embedding_bytes if self.tied else self.head_bytes
        return sum(layer.read_bytes for layer in self.layers) + head

    @property
    def windows(self) -> tuple[int, ...]:
        """The distinct windows of its attention layers, ascending: each is a KV group of its own."""
        return tuple(sorted({layer.kv.window for layer in (*self.layers, *self.nextn) if layer.kv and layer.kv.window}))

    def ragged(self, kv_type: str) -> tuple[int, ...]:
        """Attention layers that cannot have rows of this type: a head is no whole number of its blocks. The drafting
        block's are counted behind the trunk's."""
        block = KV_BLOCKS.get(kv_type, 1)
        every = enumerate((*self.layers, *self.nextn))
        return tuple(index for index, layer in every if layer.kv is not None and layer.kv.head_dim % block)

    def kv_bytes_per_token(self, kv_type: str, *, windows: bool = False) -> float:
        """Bytes of one more token in the layers that keep every token (with `windows`: in all attention layers)."""
        return sum(
            layer.kv.elements * KV_BITS[kv_type] / 8
            for layer in (*self.layers, *self.nextn)
            if layer.kv is not None and (windows or not layer.kv.window)
        )

    def state_bytes_per_request(self, state_bits: int = 32) -> float:
        """Recurrent state of one request; the convolution windows are held in 16 bits."""
        return sum(layer.state_elements * state_bits / 8 + layer.conv_elements * 2 for layer in self.layers)
