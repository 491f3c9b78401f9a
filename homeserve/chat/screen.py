"""What an answer looks like while it comes.

`PlainScreen` writes text as it is, for files, pipes and terminals that can do no more. `RichScreen` shows Markdown: a
block that is finished is printed and stays (`homeserve.chat.blocks`), the open one is drawn again below it, no more
often than the eye sees. Of a block that is higher than the screen the end is shown. Thoughts are shown while they come,
and then give way to a line.

All text goes through `cleaned`: a model's words are no orders to the terminal.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import IO, TYPE_CHECKING, Protocol

from homeserve.chat.blocks import BLOCK_CHARS_MAX, Blocks
from homeserve.chat.clean import cleaned
from homeserve.chat.client import Facts
from homeserve.chat.echo import Echo

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live
    from rich.text import Text

FRAME_S = 1 / 15
THOUGHT_LINES = 4
_SPARE_LINES = 2
"""Of a screen, that the open block does not fill."""


class Screen(Protocol):
    def begin(self) -> None:
        """An answer is awaited."""

    def waits(self, text: str) -> None:
        """For the server, which is as far as `text` says."""

    def thought(self, text: str) -> None: ...

    def text(self, text: str) -> None: ...

    def end(self) -> None:
        """Nothing more comes; right after `begin` in any case."""

    def note(self, text: str) -> None:
        """A line about the answer, or of the command itself."""


class PlainScreen:
    """Answers to `out`, everything else to `err`."""

    def __init__(self, out: IO[str], err: IO[str]) -> None:
        self._out, self._err = out, err
        self._waits = ""
        self._ends_line = True

    def begin(self) -> None:
        self._waits, self._ends_line = "", True

    def waits(self, text: str) -> None:
        if text != self._waits:
            self._waits = text
            self.note(text)

    def thought(self, text: str) -> None:
        """Not shown: what is read here is the answer."""

    def text(self, text: str) -> None:
        self._out.write(shown := cleaned(text))
        self._out.flush()
        self._ends_line = shown.endswith("\n") if shown else self._ends_line

    def end(self) -> None:
        if not self._ends_line:
            self._out.write("\n")
            self._out.flush()

    def note(self, text: str) -> None:
        print(cleaned(text), file=self._err, flush=True)


class RichScreen:
    """On a terminal that moves its cursor."""

    def __init__(self, console: Console, echo: Echo, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._echo = echo
        self._clock = clock
        self._blocks = Blocks()
        self._live: Live | None = None
        self._drawn = 0.0
        self._thought = ""
        self._thinking_since = 0.0

    def begin(self) -> None:
        from rich.live import Live

        self._blocks, self._thought, self._drawn = Blocks(), "", 0.0
        self._echo.off()
        self._live = Live(console=self._console, auto_refresh=False, transient=True, vertical_overflow="crop")
        self._live.start()
        self._draw(lambda: self._dim("…"))

    def waits(self, text: str) -> None:
        self._draw(lambda: self._dim(cleaned(text)), at_once=True)

    def thought(self, text: str) -> None:
        if not self._thought:
            self._thinking_since = self._clock()
        self._thought = (self._thought + cleaned(text))[-BLOCK_CHARS_MAX:] or " "
        self._draw(self._end_of_thought)

    def text(self, text: str) -> None:
        self._end_thought()
        for block in self._blocks.feed(cleaned(text)):
            self._print(block)
        self._draw(self._open_block)

    def end(self) -> None:
        self._end_thought()
        rest = self._blocks.rest()
        live, self._live = self._live, None
        if live is not None:
            live.update("", refresh=True)
            live.stop()
        self._echo.restore()
        for line in self._rendered(rest):
            self._console.print(line, soft_wrap=True)

    def note(self, text: str) -> None:
        self._console.print(self._dim(cleaned(text)))

    def _end_thought(self) -> None:
        if self._thought:
            seconds = self._clock() - self._thinking_since
            self._thought = ""
            self._erase()
            self.note(f"thought for {seconds:.1f} s")

    def _print(self, block: str) -> None:
        """For good, above what is drawn, with an empty line behind it."""
        self._erase()
        for line in [*self._rendered(block), ""]:
            self._console.print(line, soft_wrap=True)

    def _open_block(self) -> RenderableType:
        from rich.text import Text

        most = max(1, self._console.height - _SPARE_LINES)
        return Text("\n").join(self._rendered(self._blocks.open)[-most:])

    def _rendered(self, markdown: str) -> list[Text]:
        """Lines as wide as the screen at most, without the empty ones at the ends."""
        from rich.text import Text

        lines = self._console.render_lines(_markdown(markdown), self._console.options.update(width=self._console.width))
        made = [Text.assemble(*((part.text, part.style or "") for part in line)) for line in lines]
        for line in made:
            line.rstrip()
        full = [at for at, line in enumerate(made) if line]
        return made[full[0] : full[-1] + 1] if full else []

    def _end_of_thought(self) -> RenderableType:
        """Its last lines, as the screen breaks them."""
        lines = list(self._dim(self._thought).wrap(self._console, self._console.width))
        return self._dim("\n").join(lines[-THOUGHT_LINES:])

    def _draw(self, what: Callable[[], RenderableType], *, at_once: bool = False) -> None:
        """`what` is made only when it is time for it."""
        now = self._clock()
        if self._live is not None and (at_once or now - self._drawn >= FRAME_S):
            self._live.update(what(), refresh=True)
            self._drawn = now

    def _erase(self) -> None:
        if self._live is not None:
            self._live.update("", refresh=True)

    def _dim(self, text: str) -> Text:
        from rich.text import Text

        return Text(text, style="dim")


def facts_line(facts: Facts) -> str:
    """Of what is known, what a person looks at."""
    parts = []
    if facts.completion_tokens is not None:
        parts.append(f"{facts.completion_tokens} tokens")
    if facts.decode_tok_s:
        parts.append(f"{facts.decode_tok_s:.1f} a second")
    if facts.ttft_ms is not None:
        parts.append(f"first after {facts.ttft_ms:.0f} ms")
    if facts.restarts:
        parts.append("a worker was restarted")
    if facts.finish == "length":
        parts.append("cut off by the limit of tokens")
    return " · ".join(parts)


def _markdown(text: str) -> RenderableType:
    from rich.markdown import Markdown

    return Markdown(text, code_theme="ansi_dark", hyperlinks=False)
