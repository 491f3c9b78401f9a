"""Frames: every record survives the trip, and no bytes do anything but decode or raise WireError."""

from __future__ import annotations

import struct
import zlib

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from homeserve.errors import WireError
from homeserve.wire.codec import HEADER_BYTES, decode, encode, frame_bytes
from homeserve.wire.records import (
    RECORD_VERSION,
    Boot,
    Hello,
    LaneRows,
    LoadSpec,
    Logprobs,
    NewLane,
    Plan,
    PlanKind,
    PoolCensus,
    Progress,
    RankFacts,
    Report,
    Result,
    Sample,
    Sampling,
    pack_ints,
    unpack_ints,
)

few = settings(max_examples=20, deadline=None)
"""For records that take long to draw."""

_i32 = st.integers(-(2**31), 2**31 - 1)
_count = st.integers(0, 2**31 - 1)
_ints = st.lists(_i32, max_size=20).map(pack_ints)
_float = st.floats(allow_nan=False)
_sampling = st.builds(
    Sampling,
    temperature=_float,
    top_k=_count,
    top_p=_float,
    seed=st.integers(-(2**63), 2**64 - 1),
    logit_bias=st.lists(st.tuples(_count, _float), max_size=4).map(tuple),
    forbidden=st.lists(_count, max_size=4).map(tuple),
)
_plan = st.builds(
    Plan,
    seq=_count,
    epoch=_count,
    kind=st.sampled_from(PlanKind).map(int),
    ranks=_count,
    drop=st.lists(_count, max_size=4).map(tuple),
    new=st.lists(st.builds(NewLane, _count, _count, _count, _sampling, _ints), max_size=3).map(tuple),
    rows=st.lists(st.builds(LaneRows, _count, _count, _count, _ints, _ints, st.booleans()), max_size=3).map(tuple),
    load=st.none() | st.builds(LoadSpec, st.text(), _count, st.text(max_size=4), _count, _count, _count, _count),
)
_logprobs = st.builds(Logprobs, _count, _float, st.lists(st.tuples(_count, _float), max_size=5).map(tuple))
_result = st.builds(
    Result,
    rank=_count,
    seq=_count,
    epoch=_count,
    ok=st.booleans(),
    reason=st.text(),
    samples=st.lists(
        st.builds(
            Sample, _count, _count, _count, _i32, st.none() | _logprobs, st.lists(_logprobs, max_size=2).map(tuple)
        ),
        max_size=3,
    ).map(tuple),
    facts=st.none()
    | st.builds(
        RankFacts,
        st.text(),
        st.text(),
        st.text(),
        _count,
        st.booleans(),
        st.just(()),
        regions=st.just((("weights", 2**47 - 2**21, 2**40),)),
    ),
    census=st.lists(st.builds(PoolCensus, st.text(), _count, st.just(((1, 2, 3),))), max_size=2).map(tuple),
)
_report = st.builds(Hello, _count, _count) | st.builds(Progress, _count, st.text(), _count, _count) | _result
_boot = st.builds(
    Boot,
    _count,
    _count,
    _count,
    _count,
    _count,
    _count,
    st.text(),
    _count,
    _count,
    st.lists(_count, max_size=3).map(tuple),
)


@few
@given(_plan)
def test_plan_survives_the_trip(plan: Plan) -> None:
    assert decode(encode(plan), Plan) == plan


@given(_report)
def test_report_survives_the_trip(report: Report) -> None:
    assert decode(encode(report), Report) == report


@given(_boot)
def test_boot_survives_the_trip(boot: Boot) -> None:
    assert decode(encode(boot), Boot) == boot


@few
@given(_plan, st.binary(max_size=40))
def test_bytes_behind_the_frame_do_not_matter(plan: Plan, tail: bytes) -> None:
    frame = encode(plan)
    assert decode(memoryview(frame + tail), Plan) == plan
    assert frame_bytes(frame + tail) == len(frame)


@few
@given(_report, st.data())
def test_any_changed_byte_is_an_error(report: Report, data: st.DataObject) -> None:
    frame = bytearray(encode(report))
    index = data.draw(st.integers(0, len(frame) - 1))
    frame[index] ^= data.draw(st.integers(1, 255))
    with pytest.raises(WireError, match="^frame "):
        decode(bytes(frame), Report)


@few
@given(_report, st.data())
def test_any_cut_is_an_error(report: Report, data: st.DataObject) -> None:
    frame = encode(report)
    with pytest.raises(WireError, match="^frame "):
        decode(frame[: data.draw(st.integers(0, len(frame) - 1))], Report)


@given(st.binary(max_size=200))
def test_any_bytes_decode_or_are_an_error(data: bytes) -> None:
    with pytest.raises(WireError):
        decode(data, Report)


@given(st.binary(max_size=120))
def test_any_payload_with_a_right_checksum_decodes_or_is_an_error(payload: bytes) -> None:
    frame = struct.pack("<4sHHII", b"HSrv", RECORD_VERSION, 0, len(payload), zlib.crc32(payload)) + payload
    try:
        record = decode(frame, Report)
    except WireError as error:
        assert error.message.startswith("frame payload: ")
    else:
        assert isinstance(record, Report)


@pytest.mark.parametrize(
    ("offset", "value", "part"),
    [
        (0, b"X", "magic"),
        (4, b"\x63", "version"),
        (6, b"\1", "magic"),
        (8, b"\xff\xff\xff", "length"),
        (12, b"\0\0\0\0", "checksum"),
    ],
)
def test_the_error_names_the_damaged_part(offset: int, value: bytes, part: str) -> None:
    frame = bytearray(encode(Hello(rank=1, pid=2)))
    frame[offset : offset + len(value)] = value
    with pytest.raises(WireError, match=f"^frame {part}: "):
        decode(bytes(frame), Hello)


def test_a_deeply_nested_payload_is_an_error() -> None:
    payload = b"\x91" * 100_000 + b"\xc0"
    frame = struct.pack("<4sHHII", b"HSrv", RECORD_VERSION, 0, len(payload), zlib.crc32(payload)) + payload
    with pytest.raises(WireError, match="^frame payload: "):
        decode(frame, Report)


def test_another_record_kind_is_an_error() -> None:
    with pytest.raises(WireError, match="^frame payload: "):
        decode(encode(Hello(rank=0, pid=1)), Plan)
    assert encode(Hello(rank=0, pid=1))[HEADER_BYTES:] == msgspec.msgpack.encode(Hello(rank=0, pid=1))


@given(st.lists(_i32))
def test_integers_survive_the_trip(values: list[int]) -> None:
    assert list(unpack_ints(pack_ints(values))) == values
