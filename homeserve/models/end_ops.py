"""The ends of a model: rows of the embedding table at one, the head's logits at the other, and beside these the states
that embeddings are made of: all rows behind the output norm, where the head reads a few.

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
    HiddenStep,
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


def head(out: OpList, config: ModelConfig) -> Norm:
    """Gives what the same norm of every row is."""
    selected, final = Buffer("selected", config.hidden), Buffer("final", config.hidden)
    norm, owed = out.source.take(OUTPUT_NORM, 1, config.hidden), out.settle_owed()
    out.add(SelectRows(out.x, selected, owed))
    out.add(Norm(selected, norm, config.norm_eps, final))
    logits(out, config, final)
    return Norm(out.x, norm, config.norm_eps, out.normed, owed)


def hidden(out: OpList, norm: Norm | None, final: Buffer | None = None) -> None:
    """What embeddings are made of, at the end of a list: `norm` of what the list has left, or `final` where the list
    has it already. `normed` is free then: no buffer is held for it."""
    if norm is not None:
        out.add(HiddenStep(norm.out))
        out.add(norm)
    elif final is not None:
        out.add(HiddenStep(final))


def final_of_all(out: OpList, config: ModelConfig) -> Buffer:
    """What `head` reads, of every row."""
    final = Buffer("final", config.hidden)
    norm = out.source.take(OUTPUT_NORM, 1, config.hidden)
    out.add(Norm(out.x, norm, config.norm_eps, final, out.settle_owed()))
    return final


def head_of(out: OpList, config: ModelConfig, final: Buffer) -> None:
    """Logits of the rows that are asked for, where every row is normalised already."""
    selected = Buffer("selected", config.hidden)
    out.add(SelectRows(final, selected))
    logits(out, config, selected)


def logits(out: OpList, config: ModelConfig, final: Buffer, own_head: str = "") -> None:
    """Of all rows of `final`, by the model's head or by the tensor `own_head`."""
    source = out.source
    name = own_head or (TOKEN_EMBD if config.tied_head else OUTPUT)
    table = source.take(name, config.vocab, config.hidden)
    biased = not own_head and OUTPUT_BIAS in config.optional
    bias = source.take(OUTPUT_BIAS, 1, config.vocab) if biased else None
    widths = source.rows_by_rank(name, 0, config.vocab)
    every = Buffer("logits", config.vocab)
    own = every if widths is None else Buffer("own_logits", widths[source.rank])
    out.linear(final, LinearPart(table, own, held(bias)))
    if config.logit_softcap and own.width:
        out.add(Softcap(own, config.logit_softcap))
    if widths is not None:
        gathered = GatherPart(own, every, widths)
        out.add(GatherRows((gathered,), out.label("logits"), target=len(widths) - 1))
