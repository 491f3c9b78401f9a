"""Records to bytes and back: one frame per record, checked before it is believed.

    offset  0        4          6           8            12          16
            ┌────────┬──────────┬───────────┬────────────┬───────────┬──────────────────┐
            │ "HSrv" │ version  │ zero      │ length     │ crc32     │ payload: msgpack │
            └────────┴──────────┴───────────┴────────────┴───────────┴──────────────────┘
              4 bytes  u16 LE     u16 LE      u32 LE       u32 LE      `length` bytes

`length` and `crc32` are those of the payload. Bytes behind the frame are not looked at (a slot is longer than its
frame). Whatever is wrong, `decode` raises `WireError` saying which part; nothing else escapes it.
"""

from __future__ import annotations

import functools
import struct
import zlib
from collections.abc import Hashable
from typing import Any

import msgspec

from homeserve.errors import WireError
from homeserve.wire.records import RECORD_VERSION

MAGIC = b"HSrv"
_HEADER = struct.Struct("<4sHHII")
HEADER_BYTES = _HEADER.size


def encode(record: msgspec.Struct) -> bytes:
    """One frame."""
    payload = msgspec.msgpack.encode(record)
    return _HEADER.pack(MAGIC, RECORD_VERSION, 0, len(payload), zlib.crc32(payload)) + payload


def frame_bytes(data: bytes | memoryview) -> int:
    """Length of the frame that `data` begins with, header included. Raises WireError if that is no frame, or is cut."""
    return _header(data)[0]


def _header(data: bytes | memoryview) -> tuple[int, int]:
    """(length of the frame, header included, and checksum of its payload)"""
    if len(data) < HEADER_BYTES:
        raise WireError(f"frame header: {len(data)} bytes, needs {HEADER_BYTES}")
    magic, version, zero, length, crc = _HEADER.unpack_from(data)
    if magic != MAGIC or zero:
        raise WireError(f"frame magic: {bytes(data[:8])!r} is not the start of a record")
    if version != RECORD_VERSION:
        raise WireError(f"frame version: {version}, this process speaks {RECORD_VERSION}")
    if length > len(data) - HEADER_BYTES:
        raise WireError(f"frame length: says {length} bytes of payload, there are {len(data) - HEADER_BYTES}")
    return HEADER_BYTES + int(length), int(crc)


def decode(data: bytes | memoryview, kind: Hashable) -> Any:
    """The record in the frame that `data` begins with; `kind` is a record type or a union of them."""
    end, crc = _header(data)
    payload = data[HEADER_BYTES:end]
    if zlib.crc32(payload) != crc:
        raise WireError(f"frame checksum: payload of {len(payload)} bytes does not match {crc:#010x}")
    try:
        return _decoder(kind).decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"frame payload: {error}") from error


@functools.cache
def _decoder(kind: Hashable) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind)
