"""The terminal's own echo: off while an answer is drawn, because what is typed meanwhile (`^C` too) would move the
cursor that the drawing counts on. It is not lost: the next line begins with it, and its Enter sends, because a
carriage return stays one."""

from __future__ import annotations

import termios
from typing import Any


class Echo:
    """Of the terminal `descriptor`; of anything else nothing is changed."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._before: list[Any] | None = None

    def off(self) -> None:
        try:
            now = termios.tcgetattr(self._descriptor)
        except (termios.error, ValueError, OSError):
            return
        self._before = [*now]
        now[0] &= ~termios.ICRNL
        now[3] &= ~(termios.ECHO | termios.ECHOCTL)
        termios.tcsetattr(self._descriptor, termios.TCSANOW, now)

    def restore(self) -> None:
        if self._before is not None:
            termios.tcsetattr(self._descriptor, termios.TCSANOW, self._before)
            self._before = None
