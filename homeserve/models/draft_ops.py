"""The ops of a drafting block: what fills its K and V beside the trunk's, and one step of drafting.

The block's row of position p takes the token there and what the trunk made of the one before, h of p - 1 behind the
output norm. Both are known when the trunk computes row p, so the block's K and V are filled in the same run, for all
rows of every one, prompts and decoding alike: they are as complete as the trunk's at all times.

    e = rms(embed(token), enorm);  u = rms(h of the row before, hnorm);  x = eh_proj [e ; u]
    fill    x ─attn_norm─▶ k, v ─▶ the pool                             nothing else of the row is ever asked for
    draft   x ─attention─▶ ─feed-forward─▶ h' = rms(x, norm) ─▶ logits  and h' stands for h in the next step

What is kept of h is u, and only the columns that this rank's part of eh_proj reads: a state of one row without heads,
the last one of the model. So it goes where states go: to checkpoints, to copies, to the other layout.

In the tensor layout eh_proj is cut by the same columns of both halves, so that a rank reads its columns of e and of u.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from backends.base import Buffer, JoinHidden, Linear, LinearPart, Norm, StateLayer, SumRows, Weight, Zero
from homeserve.errors import UnsupportedModel
from homeserve.layouts.partition import Run
from homeserve.models.config import OUTPUT_NORM, TOKEN_EMBD, ModelConfig
from homeserve.models.end_ops import logits, look_up
from homeserve.models.family import Family
from homeserve.models.op_list import OpList
from homeserve.models.stages import Attention, Dense, Experts, Stage

EMBED, JOIN, ENORM, HNORM, NORM, HEAD = (
    f"nextn.{part}" for part in ("embed_tokens", "eh_proj", "enorm", "hnorm", "shared_head_norm", "shared_head_head")
)
FINAL, FINAL_OF_DRAFT = "final", "draft_final"
HIDDEN, HIDDEN_OF_DRAFT = "hidden_in", "draft_hidden"
_STATE_ROWS = 2
"""The kernel of a state that keeps one row."""


class Drafting:
    """One drafting block on a rank. `out` is the rank's list, `names` the block's tensors by role."""

    def __init__(self, out: OpList, config: ModelConfig, layer: int, names: Mapping[str, str]) -> None:
        self.out = out
        self.config = config
        self.layer = layer
        self.names = names
        self.columns = Run(0, 0)

    def fill(self) -> None:
        """From `final` of every row to x, what the block's attention reads. The state is declared here."""
        out, hidden = self.out, self.out.hidden
        own = Buffer(HIDDEN, hidden)
        self._embed("embed")
        out.add(Norm(Buffer(FINAL, hidden), self._norm(HNORM), self.config.norm_eps, own))
        self.columns = out.source.first_columns(self.names[JOIN], hidden, 2 * hidden)
        state = StateLayer(self.columns.size, _STATE_ROWS, 0, 0, 0) if self.columns.size else None
        out.keep_state(state, self.columns.first)
        self._join(own, chained=False)

    def begin_step(self) -> None:
        """The same in a step of drafting, from what the step before left."""
        self._embed("embed")
        self._join(Buffer(HIDDEN_OF_DRAFT, self.out.hidden), chained=True)

    def end_step(self) -> None:
        out, hidden = self.out, self.out.hidden
        final = Buffer(FINAL_OF_DRAFT, hidden)
        own = self.names[NORM] if out.source.has(self.names[NORM]) else OUTPUT_NORM
        out.add(Norm(out.x, out.source.take(own, 1, hidden), self.config.norm_eps, final, out.settle_owed()))
        out.add(Norm(final, self._norm(HNORM), self.config.norm_eps, Buffer(HIDDEN_OF_DRAFT, hidden)))
        head = self.names[HEAD] if out.source.has(self.names[HEAD]) else ""
        logits(out, self.config, final, head)

    def _embed(self, label: str) -> None:
        out = self.out
        table = self.names[EMBED] if out.source.has(self.names[EMBED]) else TOKEN_EMBD
        rows = out.source.take(table, self.config.vocab, out.hidden)
        look_up(out, rows, out.embedded, 1.0, table, out.label(label, self.layer))
        out.add(Norm(out.embedded, self._norm(ENORM), self.config.norm_eps, out.normed))

    def _join(self, right: Buffer, *, chained: bool) -> None:
        out, columns = self.out, self.columns
        weight = out.source.take(self.names[JOIN], out.hidden, 2 * out.hidden)
        joined = out.buffer("joined", 2 * columns.size)
        if columns.size:
            state = len(out.state_layers) - 1
            out.add(JoinHidden(out.normed, right, joined, state, columns.first, columns.end, chained))
            out.add(Linear(joined, (LinearPart(weight, out.x),)))
        else:
            out.add(Zero(out.x))
        if out.divided:
            out.add(SumRows(out.x, out.label("join", self.layer)))

    def _norm(self, role: str) -> Weight:
        return self.out.source.take(self.names[role], 1, self.out.hidden)


def checked_stages(stages: tuple[Stage, ...], layer: int) -> tuple[Attention, Dense | Experts]:
    """Those of a block that can draft. Raises UnsupportedModel."""
    match stages:
        case (Attention(kv_source=None) as mixer, Dense() | Experts() as feed):
            return mixer, feed
    raise UnsupportedModel(
        f"the drafting block {layer} is no attention with K and V of its own and a feed-forward behind it",
        field="layers",
    )


def lacks_block(family: Family, config: ModelConfig, names: Collection[str]) -> str:
    """Why a model with tensors `names` has no drafting block that can be bound; empty: it has one. `config` is that of
    the file's keys, before it is settled."""
    join = f"blk.{config.layers}.{JOIN}.weight"
    if family.nextn_facts is None or (not config.nextn and not any(f".{JOIN.partition('.')[0]}." in n for n in names)):
        return "the model has no drafting block"
    if config.nextn > 1:
        return f"the model has {config.nextn} drafting blocks, and one can be used"
    return "" if join in names else f"{join} is missing: there is no drafting block without it"
