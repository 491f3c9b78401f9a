"""What a person sees while a server starts: the box, the plan, the load, and how to use it. Log lines go elsewhere."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import IO, TYPE_CHECKING, Any

from budget.facts import GIB, MIB, Box, CpuFacts
from budget.page import safe
from budget.plan import Plan
from budget.report import Measured, measured_table, summary
from homeserve.commands.notify import Notifier
from homeserve.commands.progress import ProgressLines
from homeserve.settings import chosen

if TYPE_CHECKING:
    from homeserve.server.context import LoadProgress, ModelInfo
    from homeserve.settings import Settings


class Heard:
    """A text stream that may go away (a full disk, a reader that left): the server it tells of goes on without it, and
    says so once on stderr, but for a reader that left by itself."""

    def __init__(self, out: IO[str]) -> None:
        self._out = out
        self._lost = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._out, name)

    def write(self, text: str) -> int:
        self._do(lambda: self._out.write(text))
        return len(text)

    def flush(self) -> None:
        self._do(self._out.flush)

    def _do(self, act: Callable[[], object]) -> None:
        if self._lost:
            return
        try:
            act()
        except OSError as error:
            self._lost = True
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._out.fileno())  # for what still lies in the buffer
            os.close(null)
            if not isinstance(error, BrokenPipeError):
                print(f"warning: standard output cannot be written: {error.strerror}", file=sys.stderr, flush=True)


class Announcer:
    """Implements `app.Watcher` on a stream (stdout); warnings go to stderr. Who started the server hears how far it is
    through `notifier`."""

    def __init__(self, settings: Settings, out: IO[str] | None = None, notifier: Notifier | None = None) -> None:
        self._settings = settings
        self._notifier = notifier or Notifier(None)
        heard: Any = Heard(out or sys.stdout)
        self._out: IO[str] = heard
        self._progress = ProgressLines(self._out)

    def on_warning(self, text: str) -> None:
        print(f"warning: {safe(text)}", file=sys.stderr, flush=True)

    def on_box(self, box: Box) -> None:
        words = []
        if box.cpu is not None:
            cores = cores_text(box.cpu)
            each = f"{self._settings.threads} threads on {cores}" if self._settings.threads else cores
            ranks = 1 if self._settings.wants_cards else self._settings.ranks
            words = [box.cpu.name, each if ranks == 1 else f"{ranks} ranks, {each}"]
        if box.memory is not None and box.memory.available_bytes is not None:
            free, limit = box.memory.available_bytes / GIB, box.memory.limit_bytes / GIB
            words.append(f"{free:.1f} of {limit:.1f} GiB free")
        if box.cpu is not None:
            words.append(box.cpu.isa)
        self._say("box", " · ".join(words))

    def on_cards(self, told: Sequence[str]) -> None:
        """Why a card is not used, or what its use takes."""
        for line in told:
            self._say("cards", line)

    def on_plan(self, model: ModelInfo, plan: Plan) -> None:
        self._say("model", f"{model.id} · {model.arch} {model.quant} · {-(-plan.shape.weights_bytes // MIB)} MiB")
        for head, line in zip_longest(("plan",), summary(plan), fillvalue=""):
            self._say(head, line)

    def on_progress(self, progress: LoadProgress) -> None:
        self._progress.update(progress.stage, progress.done_bytes, progress.total_bytes)
        done, total = progress.done_bytes, progress.total_bytes
        self._notifier.status(f"{progress.stage} {100 * (done or 0) // total} %" if total else progress.stage)

    def on_ready(self, url: str, model: ModelInfo, seconds: float) -> None:
        self.close()
        self._notifier.ready(f"{url} serves {model.id}")
        self._say("ready", f"in {seconds:.1f} s: {url} serves {model.id}")
        others = [entry.id for entry in chosen(self._settings) if entry.id != model.id]
        if others:
            self._say("models", f"{', '.join(others)}: loaded with the first request")
        print(f"\nTry it:\n\n  {curl(url, model.id, self._settings.api_key_file)}\n", file=self._out)
        print(f"or open {url} in a browser. Ctrl-C stops the server.", file=self._out, flush=True)

    def on_measured(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Predicted against measured, line by line."""
        told = [Measured(*(row[name] for name in Measured._fields)) for row in rows]
        if told:
            print("\nMemory: predicted against measured, in MiB", file=self._out)
            print("\n".join(measured_table(told)), file=self._out, flush=True)

    def close(self) -> None:
        """Leave the terminal as it was."""
        self._progress.close()

    def _say(self, head: str, text: str) -> None:
        print(f"{head:6} {safe(text)}", file=self._out, flush=True)


def cores_text(cpu: CpuFacts) -> str:
    """The cores that a worker computes on (one thread each), and of how many."""
    cores = f"{cpu.usable} core{'s' * (cpu.usable != 1)}"
    if cpu.source == "physical cores":
        return f"{cores} ({cpu.logical} hardware threads)"
    return f"{cpu.usable} of {cpu.logical} cores" if cpu.usable < cpu.logical else cores


def curl(url: str, model: str, key_file: str | None) -> str:
    """A command that can be pasted as it stands. A key is read from its file, never shown."""
    question = [{"role": "user", "content": "What is the capital of France?"}]
    body = json.dumps({"model": model, "messages": question, "temperature": 0})
    key = (
        f" -H \"Authorization: Bearer $(awk 'NF && !/^#/ {{print $NF; exit}}' {shlex.quote(key_file)})\""
        if key_file
        else ""
    )
    return f"curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d {shlex.quote(body)}"
