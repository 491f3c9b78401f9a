"""From a model's measurements (how many layers, how wide, how many heads) to what each of its parts weighs.

A checkpoint that is here says exactly how many bytes each tensor takes. Of a model that is not here one knows its
measurements and the size of the file. Then the bytes are shared over the parts by the number of their weights, with
largest remainders, so that the parts sum to the file exactly. That is right to a few percent for each part (a mix gives
some tensors wider types than others) and exact in the sum, in KV rows and in recurrent states, which follow from the
measurements alone.

Weights of one layer, with E the width of the residual:

    attention      q: E x heads x head_dim (twice that where the output has a gate), k and v: E x kv_heads x head_dim
                   each, o: heads x head_dim x E
    latent         (MLA) q: through q_rank where there is one; kv down: E x (kv_rank + rope_dim); up: kv_rank x heads x
                   (head_dim - rope_dim + value_dim); o: heads x value_dim x E
    linear         (gated delta net, Mamba 2) with KD = key_heads x key_dim, VD = value_heads x value_dim:
                   in: E x (2 KD + VD), gate: E x VD, two numbers a head: E x 2 value_heads, conv: (2 KD + VD) x conv,
                   out: VD x E
    feed-forward   3 x E x ffn; experts: 3 x E x expert_ffn each, router E x experts, shared 3 x E x shared_ffn
    drafting       one attention layer with the model's feed-forward, and its joining projection 2E x E

Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction

from budget.facts import KvShape, LayerShape, LayerWork, ModelShape
from budget.quants import bits_per_weight, block_weights
from budget.vectors import apportion, heads_together

FINE_UNITS = 8
"""Experts are cut by columns where that gives at least so many parts; else they are dealt out whole."""


@dataclass(frozen=True)
class Linear:
    """Layers with recurrent state instead of KV rows."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv: int

    @property
    def channels(self) -> int:
        """Of the convolution: q, k and v side by side."""
        return 2 * self.key_heads * self.key_dim + self.values

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention: a token leaves `kv_rank` + `rope_dim` numbers, whatever the number of heads."""

    kv_rank: int
    rope_dim: int
    q_rank: int = 0
    value_dim: int = 128


@dataclass(frozen=True)
class Geometry:
    """Measurements of a model; 0, None and () are "not used".

    Layer i attends to everything if (i + 1) is a multiple of `full_attention_every`, or if `attention_layers` names it;
    the others are linear where there is a `linear`, else they see `window` tokens. With neither rule all layers are
    alike. `window_kv_heads` and `window_head_dim` differ from the full layers' in some families. The last
    `shared_kv_layers` layers read KV rows of earlier ones and write none. The first `leading_dense` layers have a plain
    feed-forward of `ffn` before the experts begin.
    """

    name: str
    arch: str
    quant: str
    weights_bytes: int
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int
    ffn: int = 0
    nextn_layers: int = 0
    window: int = 0
    window_kv_heads: int = 0
    window_head_dim: int = 0
    full_attention_every: int = 0
    attention_layers: tuple[int, ...] | None = None
    shared_kv_layers: int = 0
    head_gate: bool = False
    experts: int = 0
    experts_used: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    leading_dense: int = 0
    linear: Linear | None = None
    latent: Latent | None = None
    tied: bool = False
    vision_bytes: int = 0
    embedding_bytes: int = 0
    head_bytes: int = 0

    def is_full(self, layer: int) -> bool:
        """Whether a layer keeps and reads every token."""
        if self.attention_layers is not None:
            return layer in self.attention_layers
        if self.full_attention_every:
            return (layer + 1) % self.full_attention_every == 0
        return not self.window and self.linear is None

    def is_dense(self, layer: int) -> bool:
        return not self.experts or layer < self.leading_dense


def shape_of_geometry(geometry: Geometry) -> ModelShape:
    """Every part of the model with its bytes; they sum to `weights_bytes` exactly."""
    layers = tuple(_layer(geometry, index) for index in range(geometry.layers))
    nextn = tuple(_nextn(geometry) for _ in range(geometry.nextn_layers))
    table = geometry.vocab * geometry.hidden
    given_embedding, given_head = geometry.embedding_bytes, 0 if geometry.tied else geometry.head_bytes
    parts = [part for layer in (*layers, *nextn) for part in layer.parts]
    joining = geometry.nextn_layers * (2 * geometry.hidden + 3) * geometry.hidden
    tail = [0 if given_embedding else table, 0 if given_head or geometry.tied else table, joining, geometry.hidden]
    given = apportion(geometry.weights_bytes - given_embedding - given_head, [*parts, *tail])
    shares, (embedding, head, joining_bytes, norm_bytes) = given[: len(parts)], given[len(parts) :]
    width = geometry.hidden
    placed = tuple(_placed(layer, width, *shares[3 * at : 3 * at + 3]) for at, layer in enumerate((*layers, *nextn)))
    blocks = tuple(replace(layer, conv_elements=2 * width, held_elements=width) for layer in placed[len(layers) :])
    return ModelShape(
        name=geometry.name,
        arch=geometry.arch,
        quant=geometry.quant,
        layers=placed[: len(layers)],
        hidden=geometry.hidden,
        mixer_width=max(layer.width for layer in (*layers, *nextn)),
        ffn=max(_ffn_width(geometry, index) for index in range(geometry.layers)),
        vocab=geometry.vocab,
        context=geometry.context,
        embedding_bytes=embedding or given_embedding,
        head_bytes=head or given_head,
        tied=geometry.tied,
        nextn=blocks,
        nextn_bytes=joining_bytes,
        nextn_params=joining,
        nextn_units=_blocks(geometry, geometry.hidden),
        vision_bytes=geometry.vision_bytes,
        other_bytes=norm_bytes,
        query_heads=geometry.heads if any(layer.mixer.attended for layer in layers) else 0,
        attended_elements=max(layer.mixer.attended for layer in layers),
        kv_sources=_kv_sources(geometry),
    )


def _kv_sources(geometry: Geometry) -> tuple[tuple[int, int], ...]:
    """Layers without K and V read those of the last layer of their kind that has some."""
    own = geometry.layers - geometry.shared_kv_layers
    last = {geometry.is_full(index): index for index in range(own)}
    readers = [index for index in range(own, geometry.layers) if geometry.is_full(index) in last]
    return tuple((index, last[geometry.is_full(index)]) for index in readers)


def weights_of(geometry: Geometry) -> int:
    """How many weights the model has, a vision tower aside."""
    layers = [_layer(geometry, index) for index in range(geometry.layers)]
    layers += [_nextn(geometry)] * geometry.nextn_layers
    tables = geometry.vocab * geometry.hidden * (1 if geometry.tied else 2)
    joining = geometry.nextn_layers * (2 * geometry.hidden + 3) * geometry.hidden
    return sum(sum(layer.parts) for layer in layers) + tables + joining + geometry.hidden


def requantised(shape: ModelShape, quant: str) -> ModelShape:
    """What the model would weigh in another mix: every part by the same factor, a vision tower unchanged. Raises
    ValueError for a mix that is not known, or a model whose weights are not counted."""
    bits = bits_per_weight(quant)
    if bits is None:
        raise ValueError(f"the mix {quant!r} is not known")
    tables = shape.vocab * shape.hidden * (1 if shape.tied else 2)
    weights = sum(layer.params for layer in (*shape.layers, *shape.nextn)) + tables
    weights += shape.nextn_params or (2 * shape.hidden * shape.hidden * len(shape.nextn) if shape.nextn_bytes else 0)
    if weights <= 0 or shape.weights_bytes <= 0:
        raise ValueError(f"{shape.name}: the number of its weights is not known")
    factor = Fraction(bits) * weights / (8 * shape.weights_bytes)

    def scaled(layer: LayerShape) -> LayerShape:
        return replace(
            layer,
            mixer_bytes=round(layer.mixer_bytes * factor),
            kv_bytes=round(layer.kv_bytes * factor),
            mixer_copies=round(layer.mixer_copies * factor),
            ffn_copies=round(layer.ffn_copies * factor),
            table_bytes=round(layer.table_bytes * factor),
            table_copies=round(layer.table_copies * factor),
            ffn_bytes=round(layer.ffn_bytes * factor),
            shared_bytes=round(layer.shared_bytes * factor),
            expert_bytes=round(layer.expert_bytes * factor),
        )

    return replace(
        shape,
        name=f"{shape.name} in {quant.upper()}",
        quant=quant.upper(),
        layers=tuple(scaled(layer) for layer in shape.layers),
        nextn=tuple(scaled(layer) for layer in shape.nextn),
        nextn_bytes=round(shape.nextn_bytes * factor),
        nextn_table_bytes=round(shape.nextn_table_bytes * factor),
        embedding_bytes=round(shape.embedding_bytes * factor),
        head_bytes=round(shape.head_bytes * factor),
        other_bytes=round(shape.other_bytes * factor),
    )


# --------------------------------------------------------------------------------------------------------- one layer


@dataclass(frozen=True)
class _Mixer:
    """Weights of a mixer; `kv` of them project K and V. `width`: what it computes for a token; `attended`: for each
    query head the values of an attention over some of the rows, and one number beside them."""

    weights: int
    width: int
    units: int
    kv: int = 0
    shape: KvShape | None = None
    state: int = 0
    conv: int = 0
    held: int = 0
    attended: int = 0
    work: LayerWork = LayerWork()


@dataclass(frozen=True)
class _Layer:
    """A layer in weights, before bytes are given to it. `parts`: mixer, feed-forward, experts. `copies`: of the second,
    its norm and its router."""

    mixer: _Mixer
    parts: tuple[int, int, int]
    used_experts: float
    ffn_units: int
    copies: int = 0
    work: LayerWork = LayerWork()

    @property
    def width(self) -> int:
        return self.mixer.width


def _layer(geometry: Geometry, index: int) -> _Layer:
    if geometry.is_full(index):
        mixer = _attention(geometry, 0)
    elif geometry.linear is not None:
        mixer = _linear(geometry, geometry.linear)
    else:
        mixer = _attention(geometry, geometry.window)
    if index >= geometry.layers - geometry.shared_kv_layers and mixer.shape is not None:
        work = replace(mixer.work, kv_heads=0)
        mixer = replace(mixer, weights=mixer.weights - mixer.kv, kv=0, shape=None, work=work)
    return _with_ffn(geometry, mixer, geometry.is_dense(index))


def _nextn(geometry: Geometry) -> _Layer:
    """The drafting block's layer: full attention, and the feed-forward of the last layers."""
    return _with_ffn(geometry, _attention(geometry, 0), not geometry.experts)


def _with_ffn(geometry: Geometry, mixer: _Mixer, dense: bool) -> _Layer:
    hidden = geometry.hidden
    if dense:
        ffn = (3 * geometry.ffn + 1) * hidden
        work = replace(mixer.work, ffn=geometry.ffn)
        return _Layer(mixer, (mixer.weights, ffn, 0), 0.0, _blocks(geometry, geometry.ffn), hidden, work)
    shared = 3 * geometry.shared_ffn + geometry.experts + 1
    experts = 3 * geometry.expert_ffn * geometry.experts
    columns = _blocks(geometry, geometry.expert_ffn)
    units = columns if columns >= FINE_UNITS else geometry.experts
    used = geometry.experts_used / geometry.experts
    parts = (mixer.weights, shared * hidden, experts * hidden)
    work = replace(
        mixer.work,
        experts=geometry.experts,
        used=geometry.experts_used,
        expert_ffn=geometry.expert_ffn,
        dealt=columns < FINE_UNITS,
        shared_ffn=geometry.shared_ffn,
        shared_units=_blocks(geometry, geometry.shared_ffn) if geometry.shared_ffn else 1,
        shared_gated=bool(geometry.shared_ffn),
    )
    return _Layer(mixer, parts, used, units, (geometry.experts + 1) * hidden, work)


def _attention(geometry: Geometry, window: int) -> _Mixer:
    if geometry.latent is not None:
        return _latent(geometry, geometry.latent, window)
    kv_heads = (window and geometry.window_kv_heads) or geometry.kv_heads
    head_dim = (window and geometry.window_head_dim) or geometry.head_dim
    queries, keys = geometry.heads * head_dim, kv_heads * head_dim
    q_width = queries * (2 if geometry.head_gate else 1)
    hidden = geometry.hidden
    return _Mixer(
        weights=hidden * (q_width + 2 * keys + queries + 1),
        width=q_width + 2 * keys,
        units=_head_units(geometry, geometry.heads, head_dim),
        kv=hidden * 2 * keys,
        shape=KvShape(2 * keys, window, kv_heads, head_dim),
        attended=queries + geometry.heads,
        work=LayerWork(
            heads=geometry.heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            q_step=head_dim * (2 if geometry.head_gate else 1),
            window=window,
        ),
    )


def _latent(geometry: Geometry, latent: Latent, window: int) -> _Mixer:
    hidden, heads, queries = geometry.hidden, geometry.heads, geometry.heads * geometry.head_dim
    down = latent.kv_rank + latent.rope_dim
    q = latent.q_rank * (hidden + queries) if latent.q_rank else hidden * queries
    up = latent.kv_rank * heads * (geometry.head_dim - latent.rope_dim + latent.value_dim)
    values = heads * latent.value_dim
    return _Mixer(
        weights=hidden * (down + values + 1) + q + up,
        width=queries + latent.q_rank + down + values,
        units=_head_units(geometry, heads, latent.value_dim),
        kv=hidden * down,
        shape=KvShape(down, window, 1),
        attended=values + heads,
        work=LayerWork(heads=heads, kv_heads=1, head_dim=down, q_step=down, window=window),
    )


def _linear(geometry: Geometry, linear: Linear) -> _Mixer:
    hidden, values = geometry.hidden, linear.values
    rows = linear.channels + values + 2 * linear.value_heads
    per_key_head = values // linear.key_heads
    return _Mixer(
        weights=hidden * (rows + values + 1) + linear.channels * linear.conv,
        width=rows,
        units=_head_units(geometry, linear.key_heads, per_key_head),
        state=values * linear.key_dim,
        conv=linear.channels * linear.conv,
        held=2 * (linear.channels + linear.value_heads),
        work=LayerWork(
            key_heads=linear.key_heads,
            value_heads=linear.value_heads,
            key_dim=linear.key_dim,
            value_dim=linear.value_dim,
        ),
    )


def _placed(layer: _Layer, hidden: int, mixer_bytes: int, ffn_bytes: int, expert_bytes: int) -> LayerShape:
    mixer = layer.mixer
    return LayerShape(
        mixer_bytes=mixer_bytes,
        ffn_bytes=ffn_bytes,
        expert_bytes=expert_bytes,
        used_experts=layer.used_experts,
        kv_bytes=mixer_bytes * mixer.kv // mixer.weights,
        params=sum(layer.parts),
        mixer_units=mixer.units,
        ffn_units=layer.ffn_units,
        kv=mixer.shape,
        state_elements=mixer.state,
        conv_elements=mixer.conv,
        held_elements=mixer.held,
        mixer_copies=mixer_bytes * hidden // mixer.weights,
        ffn_copies=ffn_bytes * layer.copies // layer.parts[1] if layer.parts[1] else 0,
        shared_bytes=ffn_bytes * 3 * layer.work.shared_ffn * hidden // layer.parts[1] if layer.parts[1] else 0,
        work=layer.work,
    )


def _ffn_width(geometry: Geometry, index: int) -> int:
    """The inner side of a layer's feed-forward that one token computes."""
    if geometry.is_dense(index):
        return geometry.ffn
    return geometry.experts_used * geometry.expert_ffn + geometry.shared_ffn


def _head_units(geometry: Geometry, heads: int, columns_per_head: int) -> int:
    """Heads can be parted where the columns of the output projection that belong to them are whole blocks."""
    return max(1, heads // heads_together(columns_per_head, block_weights(geometry.quant)))


def _blocks(geometry: Geometry, width: int) -> int:
    block = block_weights(geometry.quant)
    return max(1, width // block) if width % block == 0 else 1
