"""Where the next line comes from: an editor of lines on a terminal, else standard input.

The editor is prompt_toolkit's: Enter sends, Alt-Enter or Ctrl-J begins a line, what is pasted stays one message, Ctrl-R
searches what was typed before, Tab completes orders. Without a terminal a message is a line, or the lines between two
lines of three double quotes.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol

from homeserve.chat.fields import FIELDS
from homeserve.chat.orders import ORDERS, SLASH

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.document import Document
    from prompt_toolkit.key_binding import KeyBindings

PROMPT, GOES_ON, QUOTES = "> ", ". ", '"""'
HISTORY_MAX = 1000
HISTORY_BYTES_MAX = 1 << 20


class Lines(Protocol):
    by_hand: bool
    """Whether a person types them, who reads what is wrong with one and goes on."""

    def read(self, begun: str = "") -> str | None:
        """A message, perhaps one that is `begun`; None at the end of all. Raises KeyboardInterrupt."""


class History:
    """What was typed, the last HISTORY_MAX messages: a file of the user's alone, a JSON text on each line. One that
    cannot be read or written costs the history and not the chat: `warn` gets why, once."""

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        self._path = path
        self._warn_user = warn
        self._broken = False

    def load(self) -> list[str]:
        """The oldest first."""
        try:
            with self._open(os.O_RDONLY, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                file.seek(max(0, size - HISTORY_BYTES_MAX))
                lines = file.read(HISTORY_BYTES_MAX).decode(errors="replace").splitlines()
        except FileNotFoundError:
            return []
        except OSError as error:
            self._warn(error)
            return []
        kept = [text for line in lines if (text := _text_of(line))][-HISTORY_MAX:]
        if len(lines) > 2 * HISTORY_MAX or size > HISTORY_BYTES_MAX:
            self._write(kept, "w")
        return kept

    def add(self, text: str) -> None:
        self._write([text], "a")

    def _write(self, texts: Iterable[str], mode: str) -> None:
        if self._broken:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            flags = os.O_WRONLY | os.O_CREAT | (os.O_APPEND if mode == "a" else os.O_TRUNC)
            with self._open(flags, mode) as file:
                os.fchmod(file.fileno(), 0o600)
                file.writelines(json.dumps(text) + "\n" for text in texts)
        except OSError as error:
            self._warn(error)

    def _open(self, flags: int, mode: str) -> IO[Any]:
        """Not waiting for the other end, where somebody has put a pipe there. Raises OSError."""
        number = os.open(self._path, flags | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
        if not stat.S_ISREG(os.fstat(number).st_mode):
            os.close(number)
            raise OSError(errno.EINVAL, "is no file")
        return open(number, mode, encoding=None if "b" in mode else "utf-8")

    def _warn(self, error: OSError) -> None:
        if not self._broken:
            self._broken = True
            self._warn_user(f"what is typed is not kept: {self._path}: {error.strerror}")


def _text_of(line: str) -> str:
    """Empty for a line that is none of ours: a file may have been cut, or broken."""
    try:
        found = json.loads(line)
    except ValueError:
        return ""
    return found if isinstance(found, str) else ""


class PipedLines:
    """From a file that is no terminal, or a terminal that can do nothing. `prompts` gets the prompt, if anybody."""

    def __init__(self, source: IO[str], prompts: IO[str] | None) -> None:
        self._source, self._prompts = source, prompts
        self.by_hand = prompts is not None

    def read(self, begun: str = "") -> str | None:
        """What is begun cannot be changed here, and is left out."""
        line = self._line(PROMPT)
        if line is None or not line.strip().startswith(QUOTES):
            return line if line is None else line.strip()
        text = line.strip().removeprefix(QUOTES)
        while not text.rstrip().endswith(QUOTES) and (line := self._line(GOES_ON)) is not None:
            text += f"\n{line}"
        return text.rstrip().removesuffix(QUOTES).strip("\n")

    def _line(self, prompt: str) -> str | None:
        if self._prompts is not None:
            self._prompts.write(prompt)
            self._prompts.flush()
        line = self._source.readline()
        return line.rstrip("\r\n") if line else None


class EditedLines:
    """prompt_toolkit's editor, on the terminal of standard input."""

    by_hand = True

    def __init__(self, history: History, environ: Mapping[str, str]) -> None:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.history import InMemoryHistory
        from prompt_toolkit.output import ColorDepth

        self._history = history
        self._plain = bool(environ.get("NO_COLOR"))
        self._session: PromptSession[str] = PromptSession(
            PROMPT,
            multiline=True,
            history=InMemoryHistory(history.load()),
            key_bindings=_keys(),
            completer=_completer(),
            complete_while_typing=False,
            enable_history_search=False,
            prompt_continuation=GOES_ON,
            color_depth=ColorDepth.DEPTH_1_BIT if self._plain else None,
        )

    def read(self, begun: str = "") -> str | None:
        try:
            text = self._session.prompt(default=begun)
        except EOFError:
            return None
        if text.strip():
            self._history.add(text)
        return text.strip()


def _keys() -> KeyBindings:
    """Enter sends; Alt-Enter and Ctrl-J, which terminals can tell from it, begin a line. Ctrl-C gives up what was
    typed, and leaves where nothing was."""
    from prompt_toolkit.filters import is_searching
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()

    @keys.add("c-c", filter=~is_searching)
    def give_up(event: Any) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt, style="class:aborting")

    @keys.add("enter", filter=~is_searching)
    def send(event: Any) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    @keys.add("c-j")
    def begin_line(event: Any) -> None:
        event.current_buffer.insert_text("\n")

    return keys


def _completer() -> Any:
    from prompt_toolkit.completion import Completer, Completion

    class OfOrders(Completer):
        def get_completions(self, document: Document, complete_event: object) -> Iterable[Completion]:
            word, said = document.text_before_cursor, SLASH + "set "
            names = [SLASH + order.name for order in ORDERS]
            if word.startswith(said):
                names = [said + field for field in FIELDS]
            if word.startswith(SLASH):
                yield from (Completion(name, -len(word)) for name in names if name.startswith(word))

    return OfOrders()


def can_edit(environ: Mapping[str, str]) -> bool:
    """Whether there is a terminal to type into and to see it in, and it can move its cursor."""
    return sys.stdin.isatty() and sys.stdout.isatty() and environ.get("TERM", "") not in ("", "dumb")
