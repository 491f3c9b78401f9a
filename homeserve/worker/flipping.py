"""What a flip of this model on these ranks is made of, from what each of them is bound to; and that it can be done.

A row keeps its bytes in a flip: a page of KV takes the same room in both layouts, and so does a head's state. And both
layouts address every slot. A load that finds otherwise is refused; it is not left to the first flip.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from backends.base import PAGE_LEN, KvPool, Layouts, PoolRuns
from homeserve.errors import UnsupportedModel
from homeserve.layouts.moves import FlipGeometry, KvHome, StateHome
from homeserve.layouts.owner import GroupRows, OwnerRule, check_addressable
from homeserve.layouts.partition import Run
from homeserve.layouts.share import PIPELINE, TENSOR
from homeserve.layouts.transition import StateForm

if TYPE_CHECKING:
    from homeserve.models.bind import Bound

_FIRST = np.zeros(1, np.int32)


def checked_geometry(
    pipeline: Sequence[Bound],
    forms: Mapping[int, StateForm],
    token_vector: Sequence[int],
    group_slots: Sequence[int],
    state_slots: int,
    layouts: Layouts,
    rank: int,
    pools: Mapping[str, KvPool],
    *,
    unified: bool,
) -> FlipGeometry:
    """Of the fleet whose ranks run `pipeline` in the pipeline layout and have the states `forms` (by layer) in the
    tensor layout. `pools` are those of `rank` by layout.

    Raises SettingError where the tensor layout cannot address every slot, UnsupportedModel where the layouts have rows
    of different length.
    """
    rule = OwnerRule.of(token_vector, PAGE_LEN)
    check_pools(rule, group_slots, rank, pools, unified=unified)
    placed = {
        place: (stage, layer.group)
        for stage, bound in enumerate(pipeline)
        for place, layer in zip(bound.kv_places, bound.kv_layers, strict=True)
    }
    stages = {part.layer: stage for stage, bound in enumerate(pipeline) for part in bound.state_parts}
    kv = tuple(KvHome(*placed[at], 0 if unified else layouts.run_bytes(TENSOR, _page(at))) for at in range(len(placed)))
    states = tuple(StateHome(stages[at], form) for at, (_, form) in enumerate(sorted(forms.items())))
    pages = tuple(slots // PAGE_LEN for slots in group_slots)
    geometry = FlipGeometry(rule, kv, states, pages, state_slots if states else 0, unified)
    if not unified:
        check_rows(geometry, layouts, rank)
    return geometry


def check_pools(
    rule: OwnerRule, group_slots: Sequence[int], rank: int, pools: Mapping[str, KvPool], *, unified: bool
) -> None:
    """Both layouts address every slot of every group, with the pools that this rank has."""
    for group, slots in enumerate(group_slots):
        own = pools[PIPELINE].group_slots[group]
        assert own >= slots, f"the pipeline layout has {own} rows for {slots} slots of KV group {group}"
        if unified:
            continue
        rows = list(GroupRows(slots, rule).tensor_rows)
        rows[rank] = pools[TENSOR].group_slots[group]
        check_addressable(slots, rows, rule)


def check_rows(geometry: FlipGeometry, layouts: Layouts, rank: int) -> None:
    """What this rank has in the pipeline layout takes as many bytes there as in the tensor layout."""
    for at, layer in enumerate(geometry.kv_layers(PIPELINE, rank)):
        own, dealt = layouts.run_bytes(PIPELINE, _page(at)), geometry.kv[layer].page_bytes
        _same(f"a page of attention layer {layer}", own, dealt)
    for at, layer in enumerate(geometry.state_layers(PIPELINE, rank)):
        form = geometry.states[layer].form
        for channels, heads in zip(form.channels, form.heads, strict=True):
            own = layouts.run_bytes(PIPELINE, _state(at, channels, heads))
            _same(f"states of linear layer {layer}", own, _state_bytes(form, channels, heads))
    for at, layer in enumerate(geometry.state_layers(TENSOR, rank)):
        form = geometry.states[layer].form
        channels, heads = _packed(form.channels[rank]), _packed(form.heads[rank])
        dealt = layouts.run_bytes(TENSOR, _state(at, channels, heads))
        _same(f"states of linear layer {layer}", _state_bytes(form, channels, heads), dealt)


def _same(what: str, own: int, dealt: int) -> None:
    if own != dealt:
        raise UnsupportedModel(
            f"{what} takes {own} bytes in the pipeline layout and {dealt} in the tensor layout: rows cannot move",
            field="flip",
            fix="--flip off",
        )


def _page(layer: int) -> PoolRuns:
    return PoolRuns(kv=(((layer,), _FIRST),))


def _state(layer: int, channels: Sequence[Run], heads: Sequence[Run]) -> PoolRuns:
    given = [tuple((run.first, run.end) for run in runs if run.size) for runs in (channels, heads)]
    return PoolRuns(states=_FIRST, parts=((layer, given[0], given[1]),))


def _state_bytes(form: StateForm, channels: Sequence[Run], heads: Sequence[Run]) -> int:
    return sum(run.size for run in channels) * form.channel_bytes + sum(run.size for run in heads) * form.head_bytes


def _packed(runs: Sequence[Run]) -> tuple[Run, ...]:
    """All of them as one run from 0 on."""
    return (Run(0, sum(run.size for run in runs)),)
