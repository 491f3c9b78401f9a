"""What plans and results are counted as: never less than they are."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from homeserve.engine.sizes import new_lane_bytes
from homeserve.wire import codec
from homeserve.wire.records import Dry, NewLane, Sampling

LARGE = 2**31 - 1
_real = st.floats(allow_nan=False, allow_infinity=False)
_token = st.integers(0, LARGE)
_dry = st.builds(
    Dry,
    multiplier=_real,
    base=_real,
    allowed_len=_token,
    last_n=st.integers(-1, LARGE),
    breakers=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=64), max_size=64).map(tuple),
)
_sampling = st.builds(
    Sampling,
    seed=st.integers(0, 2**63 - 1),
    logit_bias=st.lists(st.tuples(_token, _real), max_size=30).map(tuple),
    forbidden=st.lists(_token, max_size=30).map(tuple),
    min_tokens=_token,
    top_k=_token,
    top_n_sigma=_real,
    xtc_probability=_real,
    dry=st.none() | _dry,
)


@settings(max_examples=60, deadline=None)
@given(_sampling, _token)
def test_a_newcomer_is_not_larger_than_it_is_counted(sampling: Sampling, number: int) -> None:
    newcomer = NewLane(number, 2**40 + number, LARGE, sampling, b"", LARGE, "mean")
    assert len(codec.encode(newcomer)) <= new_lane_bytes(sampling)


def test_breakers_are_counted_by_their_bytes() -> None:
    told = [Sampling(dry=Dry(1.0, breakers=(text,) * 64)) for text in ("", "x" * 64, "\N{GRINNING FACE}" * 64)]
    sizes = [len(codec.encode(NewLane(0, 1, 1, each))) for each in told]
    assert sizes[0] < sizes[1] < sizes[2]
    assert all(size <= new_lane_bytes(each) for size, each in zip(sizes, told, strict=True))
