"""Grammars that answers have to fit, checked before a rank sees them.

`GrammarHost` keeps one helper process (`homeserve.text.grammar_worker`), started with the first grammar, and asks it
for one check at a time. What was checked is remembered by its digest, errors too: clients send the same schema with
every request. A grammar that takes too long or too much memory costs the helper its life, and its own request.
"""

from __future__ import annotations

import hashlib
import logging
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from homeserve.errors import InvalidField, SchemaUnsatisfiable
from homeserve.text.grammar_wire import GRAMMAR_BYTES_LIMIT, Check, Checked, Setup
from homeserve.text.helper_process import HelperEnded, HelperProcess, HelperSlow
from homeserve.text.helper_wire import frame

_log = logging.getLogger("homeserve.text")

IGNORED_NAMES_LIMIT = 256
"""Keywords that were told to be ignored: each once, later ones not at all."""
_NAME_LOG_LEN = 64
REQUEST_BYTES_LIMIT = 8 * GRAMMAR_BYTES_LIMIT
"""Of one check: a schema loses its annotations on the way to a grammar, so there may be more of it here."""


@dataclass(frozen=True)
class GrammarLimits:
    """Seconds for one check and for the helper's start, MiB of address space, grammars remembered, and their bytes."""

    check_s: float = 5.0
    start_s: float = 30.0
    memory_mib: int = 1024
    kept: int = 512
    kept_bytes: int = 8 << 20


class GrammarHost:
    """Checks the grammars of requests in a helper process.

    `configure` once, `check` from any number of tasks (they take turns), `stop` once.
    """

    def __init__(self, limits: GrammarLimits | None = None) -> None:
        self._limits = limits or GrammarLimits()
        self._helper = HelperProcess(
            "homeserve.text.grammar_worker", "the grammar helper", start_s=self._limits.start_s
        )
        self._kept = _Kept(self._limits.kept, self._limits.kept_bytes)
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

    async def check(self, asked: Check, where: str, of_calls: str = "tools") -> str:
        """The grammar, as llguidance's compiler takes it. Errors name `where`, or `of_calls` for what is wrong with the
        tools. Raises InvalidField, SchemaUnsatisfiable, WorkerStartError."""
        try:
            request = frame(asked)
        except UnicodeEncodeError as error:
            raise InvalidField(where, "contains half a surrogate pair, which is no text") from error
        except (TypeError, RecursionError, OverflowError) as error:
            raise InvalidField(where, f"cannot be taken for a grammar: {error}") from error
        if len(request) > REQUEST_BYTES_LIMIT:
            raise InvalidField(where, f"is larger than {REQUEST_BYTES_LIMIT >> 10} KiB")
        key = hashlib.sha256(request).digest()
        checked = self._kept.get(key)
        if checked is None:
            checked = await self._ask(request, where)
            self._kept.put(key, checked)
        self._tell_ignored(checked)
        if checked.error:
            field = of_calls if checked.of_calls else where
            if checked.unsatisfiable:
                raise SchemaUnsatisfiable(field, checked.error)
            raise InvalidField(field, checked.error)
        return checked.grammar

    async def stop(self) -> None:
        """End the helper and wait for it. Checks in progress fail."""
        await self._helper.stop()

    async def _ask(self, request: bytes, where: str) -> Checked:
        try:
            return await self._helper.ask(request, Checked, self._limits.check_s)
        except HelperSlow:
            raise InvalidField(where, f"took longer than {self._limits.check_s:g} s to check") from None
        except HelperEnded as error:
            _log.warning("the grammar helper ended in the middle of a check: %s", error)
            raise InvalidField(where, "broke the process that checks it (too much memory?)") from error

    def _tell_ignored(self, checked: Checked) -> None:
        for name in checked.ignored:
            if name not in self._told and len(self._told) < IGNORED_NAMES_LIMIT:
                self._told.add(name)
                _log.info("%r in a JSON schema is not enforced (with strict it would be refused)", name[:_NAME_LOG_LEN])


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
