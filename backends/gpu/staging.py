"""What bytes pass through on their way between host and card, however many they are: memory of a bounded size.

    host   | half 0 | half 1 |      pinned: the card reads and writes it by itself
    card   |  card  |

One half is for the host, while the card works with the other one. There is one stream, so what lies in `card` is used
up before the next thing comes there. A `wait` before a half is sent off says that the other one is the host's again.

    fill `half` ─▶ wait (for what the other half was sent off for) ─▶ upload, launches, download ─▶ `turn`

It is had at a load and, where layouts change, kept for the flips.
"""

from __future__ import annotations

from backends.gpu.device import Device, HostMemory

LOAD_LINE, FLIP_LINE = "load staging", "flip buffer"
STAGING_BYTES = 8 << 20
"""Of a half, and on the card. A copy of so much takes some 300 us over a bus, a launch 5."""


class Staging:
    """`nbytes` on the card, and two halves of as many in pinned memory. Raises OutOfDeviceMemory, MemoryError."""

    def __init__(self, device: Device, line: str, nbytes: int = STAGING_BYTES) -> None:
        self.nbytes = nbytes
        self._now = 0
        self._halves: list[HostMemory] = []
        self._card = device.allocate(nbytes, line, "what passes between host and card")
        try:
            for _ in range(2):
                self._halves.append(device.pinned(nbytes, line))
        except BaseException:
            self.close()
            raise

    @property
    def card(self) -> int:
        """Address on the card."""
        return self._card.address

    @property
    def half(self) -> HostMemory:
        """The one that nothing on the stream uses, if `turn` is called as it should be."""
        return self._halves[self._now]

    def turn(self) -> None:
        """`half` was sent off: the other one is the host's, for what was sent off before it was waited for."""
        self._now ^= 1

    @property
    def card_bytes(self) -> int:
        return self._card.nbytes

    def close(self) -> None:
        """Nothing on the stream may use it any more."""
        for half in self._halves:
            half.close()
        self._halves.clear()
        self._card.close()
