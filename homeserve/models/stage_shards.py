"""Shards of a declared stage: for each role of its tensors, which part each rank holds in the tensor layout.

    stage        by rows (what a projection gives)              by columns (into a sum)   on every rank
    attention    q by query heads; k, v by KV head or copied    attn_output               norms
    delta net    q, k by key heads; v, z, beta, alpha, conv,    ssm_out                   norms
                 decay by their value heads
    dense        gate, up by columns of the down projection     ffn_down                  norms
    experts      by expert, or by columns where a down          ffn_down_exps             router, norms
                 projection has at least 8 blocks of them
    by token     the table by rows of the vocabulary                                      all else

Each stage but the last leaves one partial sum on each rank; a bias behind it is added once, so one rank holds it. Where
a rank has no unit of a family it holds nothing of the role. In a fused tensor each projection is cut at its place.
Shards of attention count query heads: a KV head may lie on another rank than the query heads that read it, because the
K and V of new tokens are gathered anyway.

Value heads follow their key heads. In the tiled order value head h goes with key head h mod n, so that the value heads
of key heads [a, b) are one run in each tile:

    n = 4, two tiles     0 1 2 3 | 4 5 6 7      key heads [2, 4): value heads 2 3 | 6 7

Pure: `TensorForm`s come in, `Split`s go out. `layer_shards` refuses a role that no stage divides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from homeserve.errors import UnsupportedModel
from homeserve.layouts import partition
from homeserve.layouts.partition import Partition, Run, checked_vector
from homeserve.layouts.shards import (
    Split,
    TensorForm,
    along,
    by_columns,
    by_rows,
    copied,
    copied_along,
    joined,
    once,
)
from homeserve.layouts.transition import StateForm
from homeserve.models.config import OUTPUT, OUTPUT_BIAS, OUTPUT_NORM, ROPE_FREQS, TOKEN_EMBD, TOKEN_INPUT
from homeserve.models.stages import Attention, Dense, Experts, GatedDeltaNet, Stage, TokenInput

FIELD = "weight_vector"
QUERY_HEADS, KV_HEADS, KEY_HEADS, COLUMNS, SHARED, EXPERTS = "query", "kv", "key", "columns", "shared", "experts"
"""Names of a stage's partitions. Without one of KV heads every rank has all of them."""
_FLOAT_BYTES = 4
_VECTORS = frozenset({"attn_sinks", "ssm_dt", "ssm_a"})
"""Roles of vectors with a number for each head; biases are vectors, too."""
_COPIED_ROLES = frozenset({"layer_output_scale", "ffn_gate_inp_shexp", "exp_probs_b", "ffn_down_exps.scale"})


@dataclass
class LayerShards:
    """Of one layer: the split of each role, the partitions that they come from (`stages[i]` are those of stage i, by
    name), the states of its delta net, or of a drafting block."""

    splits: dict[str, Split] = field(default_factory=dict)
    stages: list[dict[str, Partition]] = field(default_factory=list)
    state: StateForm | None = None

    @property
    def partitions(self) -> list[Partition]:
        return [partition for stage in self.stages for partition in stage.values()]


def layer_shards(stages: Sequence[Stage], present: Mapping[str, TensorForm], vector: Sequence[int]) -> LayerShards:
    """Of a layer whose tensors are `present`, under the weight vector.

    Raises SettingError for a vector with a zero and for more ranks than query heads, UnsupportedModel for a tensor that
    no stage divides.
    """
    build = _Build(present, checked_vector(vector, FIELD))
    for stage in stages:
        build.out.stages.append({})
        match stage:
            case Attention():
                build.attention(stage)
            case GatedDeltaNet():
                build.delta_net(stage)
            case Dense():
                build.dense(COLUMNS, stage.width, "ffn_gate", "ffn_up", "ffn_down")
            case Experts():
                build.experts(stage)
            case TokenInput():
                build.whole("inp_gate", "proj")
    return build.finish()


def model_shards(present: Mapping[str, TensorForm], vector: Sequence[int]) -> Mapping[str, Split]:
    """Of the tensors beside the layers, by their names: head and tables by rows of the vocabulary, the others on every
    rank."""
    vector = checked_vector(vector, FIELD)
    found: dict[str, Split] = {}
    for name, form in present.items():
        if name in (TOKEN_EMBD, TOKEN_INPUT[0], OUTPUT, OUTPUT_BIAS):
            rows = partition.vocabulary(form.cols if name == OUTPUT_BIAS else form.rows, vector)
            found[name] = along(form, [(run,) for run in rows.runs], vector=name == OUTPUT_BIAS)
        elif name in (OUTPUT_NORM, ROPE_FREQS, *TOKEN_INPUT[1:]):
            found[name] = copied(form, len(vector))
        else:
            raise UnsupportedModel(f"the tensor layout does not know how to divide {name}", field=name)
    return found


class _Build:
    def __init__(self, present: Mapping[str, TensorForm], vector: tuple[int, ...]) -> None:
        self.present = present
        self.vector = vector
        self.ranks = len(vector)
        self.out = LayerShards()

    def finish(self) -> LayerShards:
        for role, form in self.present.items():
            if role in self.out.splits:
                continue
            if role.startswith("nextn."):
                self.out.splits[role] = self._drafting(role, form)
                continue
            if not (role.endswith("_norm") or role in _COPIED_ROLES or role.startswith("ffn_gate_inp")):
                raise UnsupportedModel(f"the tensor layout does not know how to divide {role}", field=role)
            self.out.splits[role] = copied(form, self.ranks)
        return self.out

    def _drafting(self, role: str, form: TensorForm) -> Split:
        """What a drafting block has beside its layer: the joining projection is one more sum, cut by the same columns
        of its two halves, of which the rank keeps one as a state; tables and a head of its own are cut by rows of the
        vocabulary, norms are on every rank."""
        match role.removeprefix("nextn."):
            case "eh_proj":
                half = form.cols // 2
                columns = partition.ffn_columns(half, form.block_len, self.vector).runs
                self.out.state = StateForm(
                    tuple((run,) if run.size else () for run in columns), ((),) * self.ranks, _FLOAT_BYTES, 0
                )
                return by_columns(form, [_both_halves(run, half) for run in columns])
            case "embed_tokens" | "shared_head_head":
                return by_rows(form, _each(partition.vocabulary(form.rows, self.vector), 1))
            case _:
                return copied(form, self.ranks)

    # ---------------------------------------------------------------------------------------------------- attention

    def attention(self, stage: Attention) -> None:
        heads = partition.query_heads(stage.heads, stage.head_dim, self._block("attn_output"), self.vector)
        self._by(QUERY_HEADS, heads)
        queries = _each(heads, stage.q_step)
        self._along("attn_q", queries)
        self._along("attn_sinks", _each(heads, 1))
        self._columns("attn_output", _each(heads, stage.head_dim), heads)
        if stage.kv_source is not None:
            return
        kv_heads = partition.kv_heads(stage.kv_heads, self.vector)
        if kv_heads is not None:
            self._by(KV_HEADS, kv_heads)
        width = stage.kv_heads * stage.head_dim
        for role in ("attn_k", "attn_v"):
            self._kv(role, stage.head_dim, kv_heads, (0,), width)
        q_rows = stage.heads * stage.q_step
        self._kv("attn_qkv", stage.head_dim, kv_heads, (q_rows, q_rows + width), width)
        for name in ("attn_qkv", "attn_qkv.bias"):
            if name in self.present:
                self.out.splits[name] = joined(self._part(name, queries), self.out.splits[name])

    def _kv(self, role: str, head_dim: int, heads: Partition | None, firsts: Sequence[int], width: int) -> None:
        """K and V heads of a tensor that begin at `firsts`, and of its bias."""
        for name in (role, f"{role}.bias"):
            if (form := self.present.get(name)) is None:
                continue
            if heads is None:
                runs = [Run(first, first + width) for first in firsts]
                self.out.splits[name] = copied_along(form, runs, self.ranks, vector=_is_vector(name))
            else:
                each = [[run.times(head_dim, first) for first in firsts] for run in heads.runs]
                self.out.splits[name] = self._part(name, each)

    # ---------------------------------------------------------------------------------------------------- delta net

    def delta_net(self, stage: GatedDeltaNet) -> None:
        share = stage.value_heads // stage.key_heads
        block = self._block("ssm_out")
        keys = partition.key_heads(stage.key_heads, share, stage.value_dim, stage.tiled, block, self.vector)
        self._by(KEY_HEADS, keys)
        heads = [value_heads(run, stage) for run in keys.runs]
        channels = [_channels(run, own, stage) for run, own in zip(keys.runs, heads, strict=True)]
        values = [[run.times(stage.value_dim) for run in own] for own in heads]
        self._along("attn_qkv", channels)
        self._along("ssm_conv1d", channels)
        self._along("attn_gate", values)
        for role in ("ssm_beta", "ssm_alpha", "ssm_dt", "ssm_a"):
            self._along(role, heads)
        # Fused tensors are ordered by key head, whatever the order of the value heads elsewhere.
        self._along("ssm_in", _each(keys, 2 * stage.key_dim + 2 * share * stage.value_dim))
        self._along("ssm_ba", _each(keys, 2 * share))
        self._columns("ssm_out", values, keys)
        self.out.state = StateForm(
            tuple(map(tuple, channels)),
            tuple(map(tuple, heads)),
            (stage.kernel - 1) * _FLOAT_BYTES,
            stage.key_dim * stage.value_dim * _FLOAT_BYTES,
        )

    # ------------------------------------------------------------------------------------------------- feed-forwards

    def whole(self, *roles: str) -> None:
        """The same on every rank."""
        for role in roles:
            if (form := self.present.get(role)) is not None:
                self.out.splits[role] = copied(form, self.ranks)

    def dense(self, name: str, width: int, gate: str, up: str, down: str) -> None:
        columns = partition.ffn_columns(width, self._block(down), self.vector)
        self._by(name, columns)
        for role in (gate, up):
            self._along(role, _each(columns, 1))
        self._columns(down, _each(columns, 1), columns)

    def experts(self, stage: Experts) -> None:
        if stage.shared is not None:
            self.dense(SHARED, stage.shared.width, "ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp")
        own = partition.experts(stage.count, stage.width, self._block("ffn_down_exps"), self.vector)
        self._by(EXPERTS, own)
        if own.family == "experts":
            self._experts_whole(stage, own)
        else:
            self._experts_by_columns(stage, own)

    def _experts_whole(self, stage: Experts, own: Partition) -> None:
        for role in ("ffn_gate_exps", "ffn_up_exps", "ffn_gate_up_exps", "ffn_down_exps"):
            for name in (role, f"{role}.bias"):
                if (form := self.present.get(name)) is not None:
                    self.out.splits[name] = by_rows(form, _each(own, form.rows // stage.count))

    def _experts_by_columns(self, stage: Experts, columns: Partition) -> None:
        for role, parts in (("ffn_gate_exps", 1), ("ffn_up_exps", 1), ("ffn_gate_up_exps", 2)):
            if (form := self.present.get(role)) is not None:
                starts = range(0, stage.count * parts * stage.width, stage.width)
                self.out.splits[role] = by_rows(form, [[run.times(1, s) for s in starts] for run in columns.runs])
            if (form := self.present.get(f"{role}.bias")) is not None:
                starts = range(0, parts * stage.width, stage.width)
                split = by_columns(form, [[run.times(1, s) for s in starts] for run in columns.runs])
                self.out.splits[f"{role}.bias"] = split
        self._columns("ffn_down_exps", _each(columns, 1), columns)

    # ------------------------------------------------------------------------------------------------------- details

    def _by(self, name: str, partition: Partition) -> None:
        self.out.stages[-1][name] = partition

    def _block(self, role: str) -> int:
        form = self.present.get(role)
        if form is None:
            raise UnsupportedModel(f"{role} is missing: it says where a shard may end", field=role)
        return form.block_len

    def _along(self, role: str, runs: Sequence[Sequence[Run]]) -> None:
        """A projection and its bias by what it gives."""
        for name in (role, f"{role}.bias"):
            if name in self.present:
                self.out.splits[name] = self._part(name, runs)

    def _part(self, role: str, runs: Sequence[Sequence[Run]]) -> Split:
        return along(self.present[role], runs, vector=_is_vector(role))

    def _columns(self, role: str, runs: Sequence[Sequence[Run]], family: Partition) -> None:
        """A matrix into a sum; its bias is added once."""
        self.out.splits[role] = by_columns(self.present[role], runs)
        if (bias := self.present.get(f"{role}.bias")) is not None:
            self.out.splits[f"{role}.bias"] = once(bias, family.first_holder, self.ranks)


def _is_vector(role: str) -> bool:
    return role.endswith(".bias") or role in _VECTORS


def value_heads(keys: Run, stage: GatedDeltaNet) -> tuple[Run, ...]:
    """The value heads of some key heads, in as many runs as there are."""
    share = stage.value_heads // stage.key_heads
    if not keys.size:
        return ()
    if not stage.tiled or keys.size == stage.key_heads:
        return (keys.times(share),)
    return tuple(keys.times(1, tile * stage.key_heads) for tile in range(share))


def _channels(keys: Run, heads: Sequence[Run], stage: GatedDeltaNet) -> tuple[Run, ...]:
    """Of the convolution: q and k of the key heads, v of their value heads."""
    if not keys.size:
        return ()
    width = stage.key_heads * stage.key_dim
    return (
        keys.times(stage.key_dim),
        keys.times(stage.key_dim, width),
        *(run.times(stage.value_dim, 2 * width) for run in heads),
    )


def _both_halves(columns: Run, half: int) -> tuple[Run, ...]:
    """Some columns of one half of a matrix, and the same ones of the other half."""
    if columns.size == half:
        return (Run(0, 2 * half),)
    return (columns, columns.times(1, half))


def _each(family: Partition, width: int) -> list[tuple[Run, ...]]:
    """One run for each rank, where each thing of the family is `width` wide."""
    return [(run.times(width),) for run in family.runs]
