"""What a census says of the kernels that ranks launch."""

from __future__ import annotations

import dataclasses

from backends.gpu import capability
from homeserve.engine.census import Census
from homeserve.engine.pages import PageCensus
from homeserve.engine.request import EngineLimits
from homeserve.engine.sizes import result_bytes_limit
from homeserve.wire.codec import decode, encode
from homeserve.wire.records import PoolCensus, Result

POOL = PoolCensus("kv", 16, ())
EMPTY = {field.name: 0 for field in dataclasses.fields(PageCensus)} | {"capacity": 16, "free": 16}


def census(*results: Result) -> list[dict[str, object]]:
    pages = (PageCensus(**EMPTY),)  # type: ignore[arg-type]
    found: list[dict[str, object]] = Census(pages, [], None, [], True).answer(results, [])["ranks"]
    return found


def test_each_rank_tells_how_often_it_launched_what() -> None:
    """Null where nothing is launched by a symbol: not known is not never."""
    card = Result(0, 9, 0, census=(POOL,), launches=(("norm", 12), ("embed_rows_q4_k", 3)))
    cpu = Result(1, 9, 0, census=(POOL,))
    told = census(card, cpu)
    assert [entry["launches"] for entry in told] == [{"norm": 12, "embed_rows_q4_k": 3}, None]


def test_an_answer_has_room_for_every_symbol() -> None:
    """With the fewest samples that a server may be made for, and exchanges of a large model beside."""
    launches = tuple((symbol.name, 2**40) for symbol in capability.symbols())
    exchanges = tuple((f"feed forward {layer}", 2**40, 2**50, 2**40) for layer in range(128))
    answer = Result(7, 2**40, 9, census=(POOL,), launches=launches, exchanges=exchanges)
    limits = EngineLimits(
        context=1024, kv_tokens=1024, running=1, waiting=1, chunk=16, prefill_delay=0, plans_in_flight=2
    )
    assert len(launches) > 150
    assert len(encode(answer)) < result_bytes_limit(limits)
    assert decode(encode(answer), Result).launches == launches
