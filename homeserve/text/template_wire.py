"""What the template host and its helper process say to each other: length (u32, little-endian), then JSON.

The helper's first message is a `Ready`; after that, one `Rendered` for each `Render`, in order.
"""

from __future__ import annotations

import struct
from typing import Any

import msgspec

LENGTH = struct.Struct("<I")
MESSAGE_BYTES_MAX = 256 << 20


class Setup(msgspec.Struct):
    """Sent once. Bounds: characters of one text, MiB of address space, seconds of CPU for one rendering."""

    templates: dict[str, str]
    output_chars_max: int
    memory_mib: int
    cpu_s: int


class Ready(msgspec.Struct):
    pid: int


class Render(msgspec.Struct):
    template: str
    context: dict[str, Any]


class Rendered(msgspec.Struct):
    """`text`, or `error`: why there is none."""

    text: str | None = None
    error: str | None = None


def frame(message: msgspec.Struct) -> bytes:
    """Raises UnicodeEncodeError for texts that are none (lone surrogates), TypeError for values that JSON lacks."""
    body = msgspec.json.encode(message)
    return LENGTH.pack(len(body)) + body
