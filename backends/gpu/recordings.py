"""Which shapes of batches a program has seen, and the recordings of their launches.

    a shape comes      the first time        again                       from then on
    its launches       made one by one       recorded, then replayed     replayed

The shapes that came last are kept, `RECORDINGS_MOST` of them: decoding repeats a few, prompts hardly any. A recording
takes memory of the card that only the driver knows. Where there is none left for it those of other shapes go; where
that is not enough launches are made one by one, and the log says so: no plan fails for it.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from backends.gpu.device import Device, Recording
from backends.gpu.errors import OutOfDeviceMemory
from backends.gpu.recorder import Segment, joined
from backends.gpu.steps.base import BatchShape

log = logging.getLogger(__name__)

RECORDINGS_MOST = 64
"""Shapes whose launches are kept."""


@dataclass
class Known:
    """A shape that was seen: its segments, and their recordings once it came again (None: nothing to launch)."""

    segments: tuple[Segment, ...]
    recordings: list[Recording | None] | None = None

    def recorded(self, device: Device) -> list[Recording | None]:
        """Of each segment. Raises what recording does, and then has none."""
        if self.recordings is None:
            self.recordings = []
            try:
                for each in self.segments:
                    self.recordings.append(device.record(each.launches) if each.launches else None)
            except BaseException:
                self.close()
                raise
        return self.recordings

    def close(self) -> None:
        for recording in self.recordings or ():
            if recording is not None:
                recording.close()
        self.recordings = None


class Shapes:
    """The shapes of a program that came last, at most `RECORDINGS_MOST`."""

    def __init__(self, card: str) -> None:
        self._card = card
        self._fits = True  # a recording, if it is alone
        self._known: OrderedDict[tuple[int, BatchShape], Known] = OrderedDict()

    def of(self, section: int, shape: BatchShape) -> Known | None:
        key = section, shape
        if key in self._known:
            self._known.move_to_end(key)
        return self._known.get(key)

    def keep(self, section: int, shape: BatchShape, parts: Iterable[Segment]) -> None:
        """A shape that came for the first time, and has been run."""
        key = section, shape
        self._known[key] = Known(joined(parts))
        if len(self._known) > RECORDINGS_MOST:
            self._known.popitem(last=False)[1].close()

    def recorded(self, device: Device, known: Known) -> Sequence[Recording | None] | None:
        """Of a shape's segments; None where the card has no memory for them."""
        if not self._fits and known.recordings is None:
            return None
        try:
            return known.recorded(device)
        except OutOfDeviceMemory:
            device.wait()
            self._forget_recordings()
        try:
            return known.recorded(device)
        except OutOfDeviceMemory as error:
            self._fits = False
            log.warning(
                "%s: launches are not recorded from here on and made one by one, which is slower: %s; leave more of the"
                " card's memory free",
                *(self._card, error.message),
            )
            return None

    def _forget_recordings(self) -> None:
        for known in self._known.values():
            known.close()

    def close(self) -> None:
        self._forget_recordings()
        self._known.clear()
