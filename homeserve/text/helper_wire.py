"""What the server and a helper process of its own say to each other: length (u32, little-endian), then JSON.

The first message to the helper is its setup, its first one is a `Ready`; after that, one answer for each request, in
order.
"""

from __future__ import annotations

import struct

import msgspec

LENGTH = struct.Struct("<I")
MESSAGE_BYTES_MAX = 256 << 20


class Bounds(msgspec.Struct):
    """Part of every setup: MiB of address space, and seconds of CPU for one request."""

    memory_mib: int
    cpu_s: int


class Ready(msgspec.Struct):
    pid: int


def frame(message: msgspec.Struct) -> bytes:
    """Raises UnicodeEncodeError for texts that are none (lone surrogates), TypeError for values that JSON lacks."""
    body = msgspec.json.encode(message)
    return LENGTH.pack(len(body)) + body
