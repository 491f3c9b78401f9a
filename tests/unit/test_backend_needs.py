"""What ops need, in the words of a capability table, and exchanges that are refused before a rank waits for another."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from backends.base import (
    Attention,
    Buffer,
    Capability,
    EmbedRows,
    ExpertMatrix,
    Experts,
    GatherPart,
    GatherRows,
    KvLayer,
    KvPool,
    MergeAttention,
    Op,
    OpenOptions,
    ReceiveRows,
    Routing,
    SendRows,
    SumRows,
    TensorView,
    Unsupported,
    Weight,
    Zero,
)
from backends.cpu import capability
from backends.needs import SHARES, check_exchanges, needed, refuse_missing
from backends.quant import QuantType
from backends.reference.backend import ReferenceBackend

WIDTH = 24
X, UPDATE = Buffer("x", WIDTH), Buffer("update", WIDTH)
PARTIAL = Attention(Buffer("q", 32), Buffer("part", 34), 0, 2, 2, 16, 1.0, partial=True)
MERGE = MergeAttention(PARTIAL.out, Buffer("own", 16), 2, 16, 1, 1, "merge 0")


class Place:
    """Rank 1 of 2; whatever it is asked to exchange fails the test."""

    rank, ranks = 1, 2


@pytest.mark.parametrize(
    "op",
    [
        SumRows(X, "x"),
        GatherRows((GatherPart(Buffer("a", 2), Buffer("b", 5), (3, 2)),), "x", 0),
        GatherRows((GatherPart(Buffer("a", 0), Buffer("b", 3), (3, 0)),), "x"),
        MERGE,
        replace(MERGE, first=2, own=0, out=Buffer("own", 0)),
        SendRows((X,), 0, "x"),
        ReceiveRows((X, UPDATE), 0, "x"),
    ],
    ids=lambda op: type(op).__name__,
)
def test_a_fitting_exchange_is_accepted_with_a_collective_alone(op: Op) -> None:
    check_exchanges([op], Place())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=f"{type(op).__name__} without a collective"):
        check_exchanges([op], None)


@pytest.mark.parametrize(
    "op",
    [
        GatherRows((GatherPart(Buffer("a", 2), Buffer("b", 5), (3, 2, 0)),), "x"),
        GatherRows((GatherPart(Buffer("a", 3), Buffer("b", 5), (3, 2)),), "x"),
        GatherRows((GatherPart(Buffer("a", 2), Buffer("b", 6), (3, 2)),), "x"),
        GatherRows((GatherPart(Buffer("a", 2), Buffer("b", 5), (3, 2)),), "x", 2),
        replace(MERGE, first=2),
        replace(MERGE, src=Buffer("part", 32)),
        replace(MERGE, out=Buffer("own", 17)),
        SendRows((X,), 1, "x"),
        ReceiveRows((X,), 2, "x"),
        replace(PARTIAL, gated=True),
        replace(PARTIAL, sinks=Weight("sinks", 1, 2)),
        replace(PARTIAL, out=Buffer("part", 32)),
    ],
    ids=lambda op: type(op).__name__,
)
def test_an_exchange_that_does_not_fit_is_refused_by_name(op: Op) -> None:
    named = "partial attention of layer 0" if isinstance(op, Attention) else f"{type(op).__name__} on rank 1"
    with pytest.raises(ValueError, match=named):
        check_exchanges([op], Place())  # type: ignore[arg-type]
    check_exchanges([PARTIAL], None)


def test_shares_of_a_model_are_needs_that_both_tables_answer() -> None:
    routing, matrix = Routing(5, 2), ExpertMatrix(Weight("e", 40, WIDTH), 8, 8)
    experts = Experts(X, Buffer("logits", 5), UPDATE, routing, matrix, matrix, matrix, held=(0, 5))
    merge = replace(MERGE, sinks=Weight("e", 40, WIDTH), gate=Buffer("own q", 32))
    gather = GatherRows((GatherPart(X, X, (WIDTH,)),), "x")
    embed = EmbedRows(Weight("e", 40, WIDTH), X, first=0)
    ops = [Zero(X), embed, SumRows(X, "x"), gather, PARTIAL, merge, experts, SendRows((X,), 0, "x")]
    views = {"e": TensorView("e", QuantType.F32, 40, WIDTH, np.zeros(40 * WIDTH * 4, np.uint8))}
    kv = KvPool((KvLayer(2, 16),), 16, QuantType.F32)
    needs = needed([*ops, ReceiveRows((X,), 0, "x")], views, kv)
    assert set(SHARES) <= set(needs)
    for table in (capability.TABLE, ReferenceBackend(OpenOptions()).capabilities()):
        refuse_missing("any", table, ops, views, kv)
        lacking = [entry for entry in table if (entry.op, entry.type) not in SHARES]
        with pytest.raises(Unsupported) as refused:
            refuse_missing("any", lacking, [*ops, ReceiveRows((X,), 0, "x")], views, kv)
        assert {(entry.op, entry.type) for entry in refused.value.missing} == set(SHARES)
        assert Capability("Attention", "partial", None) in refused.value.missing
