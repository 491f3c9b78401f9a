"""What a rank of the tensor layout must have built of a declared stage: the declaration's facts in terms of its share.

The numbers come from the partitions (how many heads, columns, experts the rank has), the ops' from the parts of tensors
that were handed out; so the two are held against each other by way of different sums. Where a rank has nothing of a
stage, all that is left of it is how it reads and updates the residual.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from homeserve.layouts.partition import Partition
from homeserve.models.stage_shards import COLUMNS, EXPERTS, KEY_HEADS, KV_HEADS, QUERY_HEADS, SHARED
from homeserve.models.stages import Attention, Dense, Experts, GatedDeltaNet, Stage

Facts = dict[str, object]
NOTHING = "nothing"
"""The stage of which a rank holds no unit."""
_OF_ALL = ("norm", "eps", "update", "post_norm_eps", "joined_eps", "scales_residual")


@dataclass(frozen=True)
class Parts:
    """`stages[layer][index]` are the partitions of a stage, by name."""

    stages: Mapping[int, Sequence[Mapping[str, Partition]]]
    rank: int

    def of(self, layer: int, index: int, stage: Stage, facts: Facts) -> Facts:
        """The facts that the rank's ops must show."""
        parts = self.stages[layer][index]
        match stage:
            case Attention():
                return facts | self._attention(stage, parts)
            case GatedDeltaNet():
                own = self._size(parts[KEY_HEADS])
                numbers = {"key_heads": own, "value_heads": own * stage.value_heads // stage.key_heads}
                return facts | numbers if own else _nothing(facts)
            case Dense():
                if not (own := self._size(parts[COLUMNS])):
                    return _nothing(facts)
                down = stage.down_bias and self._adds_once(parts[COLUMNS])
                return facts | {"width": own, "biases": (stage.gate_bias, stage.up_bias, down)}
            case Experts():
                return self._experts(stage, parts, facts)
        return facts

    def has_kv(self, layer: int) -> bool:
        """Whether the rank computes K and V of the attention that is the first stage of `layer`."""
        return self._has_kv(self.stages[layer][0])

    def _has_kv(self, parts: Mapping[str, Partition]) -> bool:
        return KV_HEADS not in parts or self._size(parts[KV_HEADS]) > 0

    def _attention(self, stage: Attention, parts: Mapping[str, Partition]) -> Facts:
        heads = parts[QUERY_HEADS].runs[self.rank]
        own_kv = stage.kv_source is None
        has_kv = own_kv and self._has_kv(parts)
        once = stage.output_bias and self._adds_once(parts[QUERY_HEADS])
        return {
            "gated": stage.gated and heads.size > 0,
            "sinks": stage.sinks and heads.size > 0,
            "v_from_k": stage.v_from_k and has_kv,
            "merged": (stage.heads, stage.head_dim, heads.first, heads.size),
            "biases": (
                *((stage.q_bias,) if heads.size else ()),
                *((stage.k_bias, stage.v_bias) if has_kv else ()),
                *((once,) if heads.size else ()),
            ),
        }

    def _experts(self, stage: Experts, parts: Mapping[str, Partition], facts: Facts) -> Facts:
        own = parts[EXPERTS]
        run = own.runs[self.rank]
        shared = None
        if stage.shared is not None and (columns := self._size(parts[SHARED])):
            shared = replace(stage.shared, width=columns)
        if not run.size:
            router = {"router_eps": stage.router_eps} if stage.router_eps else {}
            return _nothing(facts) | router | ({"shared": shared} if shared is not None else {})
        biases = (stage.gate_bias, stage.up_bias, stage.down_bias)
        if own.family == "experts":
            held = None if run.size == own.whole else (run.first, run.end)
            return facts | {"shared": shared, "held": held}
        once = stage.down_bias and self._adds_once(own)
        return facts | {"shared": shared, "width": run.size, "expert_biases": (*biases[:2], once)}

    def _size(self, partition: Partition) -> int:
        return partition.sizes[self.rank]

    def _adds_once(self, partition: Partition) -> bool:
        """Whether this rank adds the bias behind the sum."""
        return partition.first_holder == self.rank


def _nothing(facts: Facts) -> Facts:
    return {"stage": NOTHING} | {name: facts[name] for name in _OF_ALL}
