"""A conversation from its first line to its last: lines are read, orders done, questions asked, answers shown."""

from __future__ import annotations

import shlex
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any, Protocol

from homeserve.chat.client import Client, Facts, Text, Thought, Waits
from homeserve.chat.conversation import BadFile, Conversation
from homeserve.chat.fields import FIELDS, field_named, value_of
from homeserve.chat.line import Lines
from homeserve.chat.orders import BadOrder, Given, help_text, parsed
from homeserve.chat.screen import Screen, facts_line
from homeserve.errors import HomeserveError, SettingError

FILE_BYTES_MAX = 64 << 20


class Runs(Protocol):
    """Runs a coroutine so that Ctrl-C cuts it short. Returns whether it came to its end."""

    def __call__(self, work: Any, /) -> bool: ...


class Session:
    """`fields` of every request; `model` empty: the server's own choice."""

    def __init__(
        self,
        client: Client,
        screen: Screen,
        run: Runs,
        *,
        conversation: Conversation,
        fields: dict[str, Any],
        environ: Mapping[str, str],
        width: Callable[[], int],
        quiet: bool = False,
    ) -> None:
        self.conversation = conversation
        self.fields = fields
        self.model = ""
        self._client = client
        self._screen = screen
        self._run = run
        self._environ = environ
        self._width = width
        self._quiet = quiet
        self._facts: Facts | None = None
        self._taken_back = ""
        """By /undo, for /edit."""
        self._begun = ""
        """What the next line begins with."""

    def converse(self, lines: Lines) -> None:
        """Until somebody leaves. An error of one question is told, and the next one may be asked; where nobody sits
        there, it is the end. Raises HomeserveError."""
        while True:
            begun, self._begun = self._begun, ""
            try:
                line = lines.read(begun)
                if line is None or (line and not self.take(line)):
                    return
            except KeyboardInterrupt:
                return
            except HomeserveError as error:
                if not lines.by_hand:
                    raise
                self._tell(error)

    def take(self, line: str) -> bool:
        """An order or a question; False: to leave. Raises BadOrder, HomeserveError."""
        order = parsed(line)
        if order is None:
            self.ask(line)
            return True
        if order.name == "exit":
            return False
        getattr(self, f"_order_{order.name}")(order)
        return True

    def ask(self, question: str) -> bool:
        """Ask, and show the answer; False where it was cut short. What came is kept in any case. Raises
        HomeserveError."""
        answer: list[str] = []
        facts: list[Facts] = []
        self._facts = None
        self._screen.begin()
        try:
            whole = self._run(self._answer(self.conversation.asking(question), answer, facts))
        except HomeserveError as error:
            if answer and not error.fix:
                error.fix = "what came of the answer is kept; /retry asks again"
            raise
        finally:
            self._screen.end()
            self.conversation.answered("".join(answer))
        if not whole:
            self._screen.note("cut short" if answer else "cut short; /retry asks again")
        elif facts and not self._quiet and (line := facts_line(facts[-1])):
            self._screen.note(line)
        self._facts = facts[-1] if facts else None
        return whole

    async def _answer(self, messages: list[dict[str, str]], answer: list[str], facts: list[Facts]) -> None:
        if not self.model:
            self.model = await self._client.first_model()
        fields = self.fields | ({"model": self.model} if self.model else {})
        async with aclosing(self._client.ask(messages, fields)) as pieces:  # type: ignore[type-var]
            async for piece in pieces:
                if isinstance(piece, Text):
                    answer.append(piece.text)
                    self._screen.text(piece.text)
                elif isinstance(piece, Thought):
                    self._screen.thought(piece.text)
                elif isinstance(piece, Waits):
                    self._screen.waits(piece.text)
                else:
                    facts.append(piece)

    def _tell(self, error: HomeserveError) -> None:
        self._screen.note(f"error: {error.message}" + (f"\n  {error.fix}" if error.fix else ""))
        if self.conversation.unanswered:
            self._screen.note("the question is kept: /retry asks it again, /edit changes it")

    # ----------------------------------------------------------------------------------------------------------- orders

    def _order_help(self, order: Given) -> None:
        self._screen.note(help_text(self._width()))

    def _order_reset(self, order: Given) -> None:
        self.conversation.reset()
        self._screen.note("forgotten")

    def _order_retry(self, order: Given) -> None:
        question = self.conversation.undo()
        if not question:
            raise BadOrder("nothing was asked yet")
        self.ask(question)

    def _order_undo(self, order: Given) -> None:
        self._begun = self.conversation.undo()
        if not self._begun:
            raise BadOrder("nothing was asked yet")
        self._taken_back = self._begun
        self._screen.note("taken back")

    def _order_edit(self, order: Given) -> None:
        editor = self._environ.get("VISUAL") or self._environ.get("EDITOR")
        if not editor:
            raise BadOrder("/edit: neither $VISUAL nor $EDITOR names an editor")
        with tempfile.TemporaryDirectory(prefix="homeserve-chat-") as folder:
            path = Path(folder, "message.md")
            path.write_text(self.conversation.unanswered or self._taken_back, encoding="utf-8", errors="replace")
            try:
                code = subprocess.run([*shlex.split(editor), str(path)], check=False).returncode
            except (OSError, ValueError) as error:
                raise BadOrder(f"/edit: {editor}: {error}") from error
            text = path.read_text(encoding="utf-8", errors="replace").strip() if code == 0 else ""
        if text:
            self.conversation.unanswered = self._taken_back = ""
            self.ask(text)
        else:
            self._screen.note("nothing to ask")

    def _order_system(self, order: Given) -> None:
        self.conversation.system = order.argument
        self._screen.note("system message set" if order.argument else "no system message")

    def _order_model(self, order: Given) -> None:
        found: list[Any] = []

        async def look() -> None:
            found.extend(await self._client.models())

        if not self._run(look()):
            return
        names = [each.id for each in found]
        if order.argument:
            if order.argument not in names:
                raise SettingError(
                    f"there is no model {order.argument!r}", field="model", fix=f"there is {', '.join(names)}"
                )
            self.model = order.argument
        mine = self.model or (names[0] if names else "")
        lines = [f"{'*' if each.id == mine else ' '} {each.id}  {each.state}".rstrip() for each in found]
        self._screen.note("\n".join(lines) or "the server has no model")

    def _order_set(self, order: Given) -> None:
        name, _, value = order.argument.partition(" ")
        if name:
            field = field_named(name)
            if value:
                self.fields[field] = value_of(field, value.strip())
            else:
                self.fields.pop(field, None)
        lines = [f"{field:20}{self.fields.get(field, '-')!s:9}{FIELDS[field].help}" for field in FIELDS]
        if self._width() < 60:
            lines = [f"{field} {self.fields.get(field, '-')}" for field in FIELDS]
        self._screen.note("\n".join(lines))

    def _order_save(self, order: Given) -> None:
        path = Path(order.argument).expanduser()
        text = self.conversation.as_json() if path.suffix == ".json" else self.conversation.as_markdown()
        try:
            with open(path, "x", encoding="utf-8", errors="replace") as file:
                file.write(text)
        except FileExistsError:
            raise BadOrder(f"/save: {path} is there already; name another file") from None
        except OSError as error:
            raise BadOrder(f"/save: {path}: {error.strerror}") from error
        self._screen.note(f"written to {path}")

    def _order_load(self, order: Given) -> None:
        path = Path(order.argument).expanduser()
        try:
            if path.stat().st_size > FILE_BYTES_MAX:
                raise BadOrder(f"/load: {path} is larger than {FILE_BYTES_MAX >> 20} MiB")
            self.conversation.read(path.read_text(encoding="utf-8"))
        except BadFile as error:
            raise BadOrder(f"/load: {path} {error}") from error
        except (OSError, ValueError) as error:
            raise BadOrder(f"/load: {path}: {getattr(error, 'strerror', None) or 'is no text'}") from error
        self._screen.note(f"{len(self.conversation.messages)} messages; go on")

    def _order_stats(self, order: Given) -> None:
        if self._facts is None:
            raise BadOrder("there are no numbers yet")
        told = [f"{name}: {value}" for name, value in vars(self._facts).items() if value is not None]
        self._screen.note("\n".join(told))
