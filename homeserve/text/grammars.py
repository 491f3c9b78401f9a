"""Grammars that answers have to fit, checked before a rank sees them.

`GrammarHost` keeps one helper process (`homeserve.text.grammar_worker`), started with the first grammar, and asks it
for one check at a time.

**Once each.** What was checked is remembered by its digest, errors too: clients send the same schema with every
request. Requests that come with one grammar while it is being checked wait for that check.

**What others wait.** A grammar that takes too long or too much memory costs the helper its life, and its own request.
It is remembered for a while and refused at once. Checks that wait for their turn are few, and none waits long: who
comes then is told to come again (`QueueFull`).

**Whose fault.** A helper may die of what is none of the grammar's doing (the system is out of memory, somebody kills
it). So another one is asked once more; a grammar that ends two of them is refused.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from homeserve.errors import InvalidField, QueueFull, SchemaUnsatisfiable
from homeserve.text.grammar_wire import GRAMMAR_BYTES_LIMIT, Check, Checked, Setup
from homeserve.text.helper_process import HelperEnded, HelperProcess, HelperSlow
from homeserve.text.helper_wire import frame

_log = logging.getLogger("homeserve.text")

IGNORED_NAMES_LIMIT = 256
"""Keywords that were told to be ignored: each once, later ones not at all."""
_NAME_LOG_LEN = 64
REFUSED_KEPT = 256
"""Grammars that are refused at once."""
HELPERS_TRIED = 2
REQUEST_BYTES_LIMIT = 8 * GRAMMAR_BYTES_LIMIT
"""Of one check: a schema loses its annotations on the way to a grammar, so there may be more of it here."""


@dataclass(frozen=True)
class GrammarLimits:
    """Seconds for one check and for the helper's start, MiB of address space, grammars remembered, and their bytes.
    `waiting`: different grammars at once, with the one that is being checked; `wait_s`: how long one waits for a turn.
    `refused_s`: how long a grammar that was too slow, or broke the helper, is refused unseen."""

    check_s: float = 5.0
    start_s: float = 30.0
    memory_mib: int = 1024
    kept: int = 512
    kept_bytes: int = 8 << 20
    waiting: int = 64
    wait_s: float = 10.0
    refused_s: float = 60.0


class GrammarHost:
    """Checks the grammars of requests in a helper process.

    `configure` once, `check` from any number of tasks (they take turns), `stop` once.
    """

    def __init__(self, limits: GrammarLimits | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits or GrammarLimits()
        self._clock = clock
        self._helper = HelperProcess(
            "homeserve.text.grammar_worker", "the grammar helper", start_s=self._limits.start_s
        )
        self._kept = _Kept(self._limits.kept, self._limits.kept_bytes)
        self._refused: OrderedDict[bytes, tuple[float, str]] = OrderedDict()
        """Until when, and why."""
        self._checking: dict[bytes, _Same] = {}
        self._turn = asyncio.Lock()
        """The helper's."""
        self._told: set[str] = set()

    @property
    def pid(self) -> int | None:
        """The helper's process id, None while there is none."""
        return self._helper.pid

    def configure(self, vocab: int, special: Mapping[int, str]) -> None:
        """The model's vocabulary, as far as grammars see it: how many ids, and its control tokens with their texts."""
        limits = self._limits
        self._helper.setup = Setup(
            memory_mib=limits.memory_mib, cpu_s=int(limits.check_s) + 1, vocab=vocab, special=dict(special)
        )

    async def check(
        self, asked: Check, where: str, of_calls: str = "tools", of_parameters: str = "function.parameters"
    ) -> str:
        """The grammar, as llguidance's compiler takes it. Errors name `where`, or `of_calls` for what is wrong with the
        tools, with the tool and what its schema is called in it. Raises InvalidField, SchemaUnsatisfiable, QueueFull,
        WorkerStartError."""
        try:
            request = frame(asked)
        except UnicodeEncodeError as error:
            raise InvalidField(where, "contains half a surrogate pair, which is no text") from error
        except (TypeError, RecursionError, OverflowError) as error:
            raise InvalidField(where, f"cannot be taken for a grammar: {error}") from error
        if len(request) > REQUEST_BYTES_LIMIT:
            raise InvalidField(where, f"is larger than {REQUEST_BYTES_LIMIT >> 10} KiB")
        checked = await self._checked(hashlib.sha256(request).digest(), request, where)
        self._tell_ignored(checked)
        if checked.error:
            place = f"{checked.function!r}, {of_parameters}: " if checked.function else ""
            kind = SchemaUnsatisfiable if checked.unsatisfiable else InvalidField
            raise kind(of_calls if checked.of_calls else where, place + checked.error)
        return checked.grammar

    async def stop(self) -> None:
        """End the helper and wait for it. Checks in progress fail."""
        await self._helper.stop()

    async def _checked(self, key: bytes, request: bytes, where: str) -> Checked:
        """What is known of a grammar, or is found out now. Raises what `check` raises."""
        known = self._known(key, where)
        if known is not None:
            return known
        async with self._once(key):
            known = self._known(key, where)  # who came before may have found it out
            if known is None:
                known = await self._ask(key, request, where)
                self._kept.put(key, known)
            return known

    def _known(self, key: bytes, where: str) -> Checked | None:
        """Raises InvalidField for what is refused at once."""
        until, why = self._refused.get(key, (-math.inf, ""))
        if self._clock() < until:
            raise InvalidField(where, why)
        return self._kept.get(key)

    @asynccontextmanager
    async def _once(self, key: bytes) -> AsyncIterator[None]:
        """One of those who come with the same grammar at a time. Raises QueueFull where too many others are checked."""
        same = self._checking.get(key)
        if same is None:
            if len(self._checking) >= self._limits.waiting:
                raise self._full()
            same = self._checking[key] = _Same()
        same.count += 1
        try:
            await self._take(same.turn)
            try:
                yield
            finally:
                same.turn.release()
        finally:
            same.count -= 1
            if not same.count:
                del self._checking[key]

    async def _take(self, turn: asyncio.Lock) -> None:
        """Raises QueueFull where others have it for too long."""
        try:
            async with asyncio.timeout(self._limits.wait_s):
                await turn.acquire()
        except TimeoutError:
            raise self._full() from None

    def _full(self) -> QueueFull:
        return QueueFull(
            len(self._checking), math.ceil(self._limits.check_s), why="grammars of other requests are being checked"
        )

    async def _ask(self, key: bytes, request: bytes, where: str) -> Checked:
        await self._take(self._turn)
        try:
            checked = await self._ask_helpers(request)
        except HelperSlow:
            raise self._refusal(key, where, f"took longer than {self._limits.check_s:g} s to check") from None
        except HelperEnded as error:
            raise self._refusal(key, where, "broke the process that checks it (too much memory?)") from error
        finally:
            self._turn.release()
        if checked.broke:
            _log.error("a grammar broke its check: %s", checked.broke)
            raise self._refusal(key, where, "broke its check, which is a fault of the server: its log has more")
        return checked

    async def _ask_helpers(self, request: bytes) -> Checked:
        """Raises HelperSlow; HelperEnded where one after the other ended."""
        for left in reversed(range(HELPERS_TRIED)):
            try:
                return await self._helper.ask(request, Checked, self._limits.check_s)
            except HelperEnded as error:
                _log.warning("the grammar helper ended in the middle of a check: %s", error)
                if not left:
                    raise
        raise AssertionError("the last one answers or raises")

    def _refusal(self, key: bytes, where: str, why: str) -> InvalidField:
        """For now, and for whoever comes with it soon."""
        self._refused.pop(key, None)
        self._refused[key] = self._clock() + self._limits.refused_s, why
        if len(self._refused) > REFUSED_KEPT:
            self._refused.popitem(last=False)
        return InvalidField(where, why)

    def _tell_ignored(self, checked: Checked) -> None:
        for name in checked.ignored:
            if name not in self._told and len(self._told) < IGNORED_NAMES_LIMIT:
                self._told.add(name)
                _log.info("%r in a JSON schema is not enforced (with strict it would be refused)", name[:_NAME_LOG_LEN])


@dataclass
class _Same:
    """Checks of one grammar at the same time: how many, and whose turn it is."""

    count: int = 0
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)


class _Kept:
    """The latest checks, by digest: at most so many, of at most so many bytes."""

    def __init__(self, count: int, size: int) -> None:
        self._count = count
        self._size = size
        self._held = 0
        self._entries: OrderedDict[bytes, Checked] = OrderedDict()

    def get(self, key: bytes) -> Checked | None:
        found = self._entries.get(key)
        if found is not None:
            self._entries.move_to_end(key)
        return found

    def put(self, key: bytes, checked: Checked) -> None:
        old = self._entries.pop(key, None)
        self._held += _bytes(checked) - (_bytes(old) if old is not None else 0)
        self._entries[key] = checked
        while len(self._entries) > self._count or self._held > self._size:
            _, dropped = self._entries.popitem(last=False)
            self._held -= _bytes(dropped)


def _bytes(checked: Checked) -> int:
    """At most: four bytes a character."""
    return 4 * (len(checked.grammar) + len(checked.error)) + 256
