"""Plans with pooled lanes: which of them need rows behind the output norm, and what is answered of those that are done
(`homeserve.worker.pooled`)."""

from __future__ import annotations

from collections.abc import Sequence

from backends.base import Batch, Program
from homeserve.wire.records import Sample
from homeserve.worker.drawn import NO_TOKEN
from homeserve.worker.lanes import Group, Lanes

NO_LENGTH = "its states have no length, or are no numbers: there is no embedding"


def pool(lanes: Lanes, program: Program, batch: Batch, groups: Sequence[Group]) -> tuple[Sample, ...]:
    """The embeddings of lanes that are complete with the last run, whose `batch` and `groups` are given. Of a plan
    without such lanes nothing is computed. Raises what the program raises."""
    wanted = [(group, pooled) for group in groups if (pooled := lanes[group.lane].pooled) is not None]
    wanted = [(group, pooled) for group, pooled in wanted if pooled.wants(group.rows.start, last=group.rows.sample)]
    if wanted:
        hidden = program.hidden(batch)
        for group, pooled in wanted:
            pooled.add(hidden[group.first : group.first + len(group.inputs)])
    complete = [group for group in groups if group.pools and group.rows.sample]
    return tuple(_sample(lanes, group) for group in complete)


def _sample(lanes: Lanes, group: Group) -> Sample:
    pooled = lanes[group.lane].pooled
    assert pooled is not None, "the rank that draws pools"
    embedding, position = pooled.embedding(), group.rows.start + len(group.inputs)
    why = "" if embedding else NO_LENGTH
    return Sample(group.lane, group.rows.request, position, NO_TOKEN, embedding=embedding, failed=why)
