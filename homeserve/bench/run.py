"""A run: every test in order, each some times, and a row as soon as one is done.

    start                      restarts of the server, before it has seen anything else
    requests, first layout     tests that share a prompt's length share the request: its prefill, its time to the first
                               token and the decode behind it
    step, rss                  of the engine, and of what all that has left resident
    requests, second layout    where several ranks can change between two; behind it the layout is as it was found
    flip                       round trips

Each is taken once before the first time, which does not count: the first request of a shape touches memory that nobody
has touched. What cannot be measured is a row that says why, and the run goes on. A server that goes away ends it, and
so does Ctrl-C: what is known by then is kept, also of the test that was under way.
"""

from __future__ import annotations

import http.client
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import NamedTuple, Protocol

from homeserve.bench import flips, measures, steps, subject
from homeserve.bench.client import Target, Unmeasured, complete
from homeserve.bench.document import Row
from homeserve.bench.memory import ProcessError, memory_mib
from homeserve.bench.names import Test
from homeserve.bench.prompts import Prompts
from homeserve.bench.spread import spread
from homeserve.bench.subject import Subject
from homeserve.errors import WorkerError

OTHER = {"pipeline": "tensor", "tensor": "pipeline"}
MOVED_TRIES = 3
"""Runs that are made again because the server changed its layout meanwhile."""
LIVE_TOKENS = 512
"""Rows that lie in the prefix cache when a flip moves them."""
FLIP_UNITS = ("ms", "MiB/s")
STREAMS = (1, 64)
STEP_ANSWER = {1: 960, 64: 200}
STEP_WINDOWS_S = {1: (4.0, 1.0, 0.25), 64: (6.0, 2.0, 0.5)}
"""The first that ends before the streams do: on a fast model an answer is soon over."""
STEP_ANSWER_LEAST = 24
PAGE_TOKENS = 16
INTERRUPTED = "interrupted"

Values = Mapping[str, float]


class Figure(NamedTuple):
    """What a row is of. `layout`: None where it is of no layout, or of a server that has one rank."""

    test: str
    unit: str
    layout: str | None = None


class Host(Protocol):
    """Where the server runs: `pid` of its engine process, where that is one of this machine and known."""

    target: Target
    pid: int | None

    def restart(self) -> float:
        """Start it anew. Returns when it was spawned, on the monotonic clock. Raises Unmeasured where it is not ours to
        end."""
        ...


class Watch(Protocol):
    """Who is told of the run as it goes."""

    def row(self, row: Row) -> None: ...

    def doing(self, test: str, run: int, runs: int) -> None:
        """`run` 0 is the one that does not count."""
        ...

    def note(self, text: str) -> None: ...


class WentAway(WorkerError):
    """The server does not answer any more."""

    code = "went_away"


class Run:
    """`clock`: monotonic seconds. After `go`, also one that raised, `rows` has what is known."""

    def __init__(
        self,
        host: Host,
        about: Subject,
        prompts: Prompts | Unmeasured,
        repeat: int,
        watch: Watch,
        clock: Callable[[], float],
    ) -> None:
        self.rows: list[Row] = []
        self._host, self._about, self._prompts = host, about, prompts
        self._repeat, self._watch, self._clock = repeat, watch, clock
        self._layout = about.layout

    def go(self, tests: Sequence[Test]) -> None:
        """Raises WentAway."""
        kinds = {test.kind for test in tests}
        asks = [test for test in tests if test.asks]
        if "start" in kinds:
            self._measure({"start": Figure("start", "s")}, self._start, warm=False)
        self._requests(asks)
        if "step" in kinds:
            self._steps()
        if "rss" in kinds:
            self._measure({"rss": Figure("rss", "MiB")}, self._rss, warm=False)
        if asks and self._about.several:
            self._other_layout(asks)
        if "flip" in kinds:
            self._flips()

    # ------------------------------------------------------------------------------------------------------- requests

    def _requests(self, asks: Sequence[Test]) -> None:
        for depth, answer, names in grouped(asks):
            run = partial(self._ask, depth, answer)
            self._measure({name: self._here(name) for name in names}, partial(self._steady, run))
        for test in asks:
            if test.kind == "conc":
                self._measure({test.name: self._here(test.name)}, partial(self._steady, partial(self._at_once, test)))

    def _here(self, name: str) -> Figure:
        return Figure(name, "ms" if name.startswith(("ttft", "step")) else "tok/s", self._layout)

    def _ask(self, depth: int, answer: int) -> Values:
        """One request, and all that it tells. Without an answer to time one token is asked for."""
        prompts = self._drawn()
        found: dict[str, float] = {}
        if answer:
            length = depth or measures.SHORT_PROMPT
            timing, speed = measures.decoded(self._host.target, prompts.shorter(answer), length)
            found[f"tg{answer}@{depth}"] = speed
        else:
            timing = measures.prefill(self._host.target, prompts, depth)
        if depth:
            measures.check_computed(timing)
            found |= {f"pp{depth}": measures.prefill_tok_s(timing), f"ttft{depth}": timing.ttft_s * 1e3}
        return found

    def _at_once(self, test: Test) -> Values:
        return {test.name: measures.at_once(self._host.target, self._drawn(), test.count)}

    def _drawn(self) -> Prompts:
        if isinstance(self._prompts, Unmeasured):
            raise self._prompts
        return self._prompts

    def _steady(self, run: Callable[[], Values]) -> Values:
        """`run` in one layout: where the server changed it meanwhile, once more."""
        if not self._about.several:
            return run()
        for _ in range(MOVED_TRIES):
            before = self._standing()
            found = run()
            if before == self._standing() and before[0] == self._layout:
                return found
        raise Unmeasured("the server changed its layout meanwhile: start it with --flip manual to measure each")

    def _standing(self) -> tuple[object, object]:
        told = subject.status(self._host.target) or {}
        return told.get("layout"), told.get("epoch")

    # -------------------------------------------------------------------------------------------------------- layouts

    def _other_layout(self, asks: Sequence[Test]) -> None:
        """The same requests in the other layout. Afterwards, whatever happened, the first is in force again."""
        if not self._about.flips or self._about.layout not in OTHER:
            why = self._about.no_flip or "no flips here"
            self._watch.note(f"one layout is measured, {self._about.layout}: {why}")
            return
        home = self._about.layout
        self._layout = OTHER[home]
        try:
            with self._answering():
                flips.flip(self._host.target, self._layout)
        except Unmeasured as error:
            for test in asks:
                self._keep(self._here(test.name), (), str(error))
            self._layout = home
            return
        try:
            self._requests(asks)
        finally:
            self._layout = home
            self._restore(home)

    def _restore(self, home: str) -> None:
        try:
            flips.flip(self._host.target, home)
        except Unmeasured as error:
            self._watch.note(f"the server stays in the {OTHER[home]} layout: {error}")

    def _flips(self) -> None:
        about = self._about
        if not about.ours or not about.flips or about.layout not in OTHER:
            self._keep(Figure("flip", FLIP_UNITS[0]), (), _why_no_flip(about))
            return
        ways = (OTHER[about.layout], about.layout)
        figures = {f"{to} {unit}": Figure("flip", unit, to) for to in ways for unit in FLIP_UNITS}
        self._measure(figures, partial(self._round_trip, ways))

    def _round_trip(self, ways: Sequence[str]) -> Values:
        target = self._host.target
        found: dict[str, float] = {}
        if isinstance(self._prompts, Prompts):
            # Rows of a fresh prompt lie in the prefix cache, where it is on, and move with the layout.
            room = (self._about.context or LIVE_TOKENS) // 2
            complete(target, self._prompts.draw(min(LIVE_TOKENS, max(1, room))), 1)
        for to in ways:
            record = flips.flip(target, to)
            found[f"{to} ms"] = flips.total_ms(record)
            found[f"{to} MiB/s"] = flips.total_mib_s(record)
        return found

    # ------------------------------------------------------------------------------------------------- of the processes

    def _start(self) -> Values:
        began = self._host.restart()
        complete(self._host.target, self._drawn().draw(measures.SHORT_PROMPT), 1)
        return {"start": self._clock() - began}

    def _rss(self) -> Values:
        return {"rss": memory_mib(self._pid())}

    def _pid(self) -> int:
        if self._host.pid is None:
            raise Unmeasured("the server's processes are not known: homeserve ps on this machine does not list it")
        return self._host.pid

    def _steps(self) -> None:
        for streams in STREAMS:
            suffix = "" if streams == 1 else str(streams)
            names = (f"step{suffix}", f"step_gap{suffix}")
            figures = {name: self._here(name) for name in names}
            self._measure(figures, partial(self._step_values, streams, names), warm=False)

    def _step_values(self, streams: int, names: Sequence[str]) -> Values:
        return dict(zip(names, self._step(streams), strict=True))

    def _step(self, streams: int) -> tuple[float, float]:
        if not self._about.ours:
            raise Unmeasured(subject.NOT_OURS)
        answer = self._step_answer(streams)
        *windows, last = STEP_WINDOWS_S[streams]
        for window_s in windows:
            try:
                return steps.step(self._host.target, self._pid(), streams, self._drawn(), answer, window_s)
            except steps.StreamsEnded:
                continue
        return steps.step(self._host.target, self._pid(), streams, self._drawn(), answer, last)

    def _step_answer(self, streams: int) -> int:
        """As long as one request, and all together, have room for. Raises Unmeasured."""
        rooms = [STEP_ANSWER[streams]]
        if self._about.context is not None:
            rooms.append(self._about.context - steps.PROMPT - 1)
        if self._about.kv_tokens is not None:
            rooms.append(self._about.kv_tokens // streams // PAGE_TOKENS * PAGE_TOKENS - steps.PROMPT - 1)
        if (room := min(rooms)) < STEP_ANSWER_LEAST:
            raise Unmeasured(f"{streams} streams have room for {max(0, room)} tokens each (--context, --kv-tokens)")
        return room

    # ----------------------------------------------------------------------------------------------------------- rows

    def _measure(self, figures: Mapping[str, Figure], run: Callable[[], Values], *, warm: bool = True) -> None:
        """Rows of `figures`, by the name that `run` has for each: every value `repeat` times. Raises WentAway, and what
        interrupts it."""
        values: dict[str, list[float]] = {name: [] for name in figures}
        tests = ", ".join(dict.fromkeys(figure.test for figure in figures.values()))
        why: str | None = INTERRUPTED
        try:
            for number in range(0 if warm else 1, self._repeat + 1):
                self._watch.doing(tests, number, self._repeat)
                with self._answering():
                    found = run()
                if number:
                    for name in figures:
                        values[name].append(found[name])
            why = None
        except (Unmeasured, WentAway) as error:
            why = str(error)
            if isinstance(error, WentAway):
                raise
        finally:
            # Interrupted: what is known of it is a row, and what is not is none.
            done = len(next(iter(values.values())))
            if why == INTERRUPTED:
                why = f"{INTERRUPTED} after {done} of {self._repeat} runs" if done else None
            for name, figure in figures.items():
                if values[name] or why is not None:
                    self._keep(figure, values[name], why)

    @contextmanager
    def _answering(self) -> Iterator[None]:
        """Raises WentAway for a connection that breaks or is refused, and for processes that are gone."""
        try:
            yield
        except (OSError, http.client.HTTPException, ProcessError) as error:
            url = self._host.target.url
            raise WentAway(f"{url}: the server went away: {str(error) or type(error).__name__}", field="url") from None

    def _keep(self, figure: Figure, values: Sequence[float], why: str | None) -> None:
        about = self._about
        row = Row(
            engine=about.engine,
            model=about.model,
            quant=about.quant,
            test=figure.test,
            layout=figure.layout,
            draft=about.draft,
            unit=figure.unit,
            why=why,
            **(asdict(spread(values)) if values else {}),
        )
        self.rows.append(row)
        self._watch.row(row)


def grouped(asks: Sequence[Test]) -> list[tuple[int, int, tuple[str, ...]]]:
    """Requests that are made: (prompt tokens, answer tokens, names of what each gives), in order of the tests. A prompt
    of a length is sent once for all that is asked of it, with the first answer that is timed behind it."""
    found: dict[tuple[int, int], list[str]] = {}
    for test in asks:
        if test.kind == "conc":
            continue
        depth = test.depth if test.kind == "tg" else test.count
        answer = test.count if test.kind == "tg" else _answer_behind(asks, depth)
        found.setdefault((depth, answer), []).append(test.name)
    return [(depth, answer, tuple(names)) for (depth, answer), names in found.items()]


def _answer_behind(asks: Sequence[Test], depth: int) -> int:
    return next((test.count for test in asks if test.kind == "tg" and test.depth == depth), 0)


def labels(tests: Sequence[Test], about: Subject) -> list[str]:
    """Of all rows that a run may give: for the width of a column."""
    names = [test.name for test in tests if test.kind != "step"]
    if any(test.kind == "step" for test in tests):
        names += ["step_gap64"]
    return [f"{name} pipeline" for name in names] if about.several else names


def _why_no_flip(about: Subject) -> str:
    if not about.ours:
        return subject.NOT_OURS
    if not about.several:
        return f"a flip needs at least 2 ranks, and this server has {about.ranks} (--devices cpu:2)"
    return f"this server does not flip: {about.no_flip or 'its policy is off'} (--flip manual)"
