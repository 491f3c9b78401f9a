"""The ends of a model: rows of the embedding table at one, the head's logits at the other.

In the tensor layout each rank has some rows of the vocabulary. A token's row is on one rank, the others give zeros, so
the sum is the row itself, bit for bit. Of the logits every rank computes its own columns, and the last one, which
samples, gets them all.
"""

from __future__ import annotations

from backends.base import (
    Buffer,
    EmbedRows,
    GatherPart,
    GatherRows,
    LinearPart,
    Norm,
    SelectRows,
    Softcap,
    SumRows,
    Weight,
    Zero,
)
from homeserve.models.config import OUTPUT, OUTPUT_BIAS, OUTPUT_NORM, TOKEN_EMBD, ModelConfig
from homeserve.models.op_list import OpList, held


def embed(out: OpList, config: ModelConfig, to: Buffer, label: str) -> None:
    table = out.source.take(TOKEN_EMBD, config.vocab, config.hidden)
    look_up(out, table, to, config.embedding_scale, TOKEN_EMBD, label)


def look_up(out: OpList, table: Weight, to: Buffer, scale: float, name: str, label: str) -> None:
    """Rows of what this rank has of the table `name`, times `scale`."""
    by_rank = out.source.rows_by_rank(name, 0, out.source.tensors[name].rows)
    if by_rank is None:
        out.add(EmbedRows(table, to, scale))
        return
    first = sum(by_rank[: out.source.rank])
    out.add(EmbedRows(table, to, scale, first) if held(table) else Zero(to))
    out.add(SumRows(to, label))


def head(out: OpList, config: ModelConfig) -> None:
    source = out.source
    selected, final = Buffer("selected", config.hidden), Buffer("final", config.hidden)
    name = TOKEN_EMBD if config.tied_head else OUTPUT
    norm = source.take(OUTPUT_NORM, 1, config.hidden)
    table = source.take(name, config.vocab, config.hidden)
    bias = source.take(OUTPUT_BIAS, 1, config.vocab) if OUTPUT_BIAS in config.optional else None
    widths = source.rows_by_rank(name, 0, config.vocab)
    logits = Buffer("logits", config.vocab)
    own = logits if widths is None else Buffer("own_logits", widths[source.rank])
    out.add(SelectRows(out.x, selected, out.settle_owed()))
    out.add(Norm(selected, norm, config.norm_eps, final))
    out.linear(final, LinearPart(table, own, held(bias)))
    if config.logit_softcap and own.width:
        out.add(Softcap(own, config.logit_softcap))
    if widths is not None:
        out.add(GatherRows((GatherPart(own, logits, widths),), "logits", target=len(widths) - 1))
