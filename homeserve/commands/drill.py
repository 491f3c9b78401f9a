"""`doctor --flip-drill`: does an answer survive a change of the layout under it?

    answer   ──numbers──▶ … 41 42 43 ┃ 44 45 46 …… 97 98 ┃ 99 100 …
                                    ▲                   ▲
                               flip there          flip back        each asked for while the answer streams

The proof needs two things at once. The answer must be right past every flip: how much of it had come when a commit was
known is its *watermark*, and the right part must reach behind it. And each flip must be *committed* on the server's own
record, with a request on board: an accepted flip that was given up looks just like one that did its work.

A stream that falls silent is not waited for: whoever dropped it would never say so. The first leg leads to the other
layout and the second one back, each under an answer of its own, or both under one with `--round-trip`.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from homeserve.commands.drill_answer import ANY, COUNTS_LEAST, QUESTIONS, Count, Judge, Leg, Question, Same, faults
from homeserve.commands.reach import first_key, running_urls
from homeserve.commands.temporary import TemporaryServer
from homeserve.errors import SettingError

if TYPE_CHECKING:
    import argparse

    import aiohttp

LEAD, MARGIN = 20, 40
"""Characters of an answer before its first flip, and that must be right behind each watermark."""
TRIED_TOKENS, ANSWER_TOKENS = 64, 3000
FLIP_S, STALL_S = 120.0, 30.0
"""How long a flip may take, and how long an answer may be silent."""
_POLL_S = 0.01
_CONNECT_S = 10.0
OTHER = {"pipeline": "tensor", "tensor": "pipeline"}
FIXTURE = Path("tests/data/counter.gguf")
FLAGS = ("--devices", "cpu:2", "--threads", "1", "--flip", "manual")


@dataclass(frozen=True)
class Report:
    """What a drill found. `faults` empty: every answer survived every flip."""

    url: str
    measure: str
    legs: tuple[Leg, ...]
    faults: tuple[str, ...]
    peaks: tuple[dict[str, Any], ...]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class CannotDrill(SettingError):
    """This server has no flip to try."""


# ---------------------------------------------------------------------------------------------------------- one answer


class Reading:
    """A stream that is read as it comes."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self.text = ""
        self.ended = ""
        """How, in words; empty while it has not."""
        self._response = response
        self._came = asyncio.Event()

    async def run(self) -> None:
        import aiohttp

        try:
            async for line in self._response.content:
                if line.startswith(b"data:") and line.strip() != b"data: [DONE]":
                    self._take(json.loads(line[5:]))
            self.ended = self.ended or "the stream broke off"
        except (aiohttp.ClientError, ValueError) as error:
            self.ended = f"the stream broke off: {error}"
        finally:
            self._came.set()

    async def until(self, enough: Callable[[str], bool]) -> bool:
        """Wait until the text is enough. False: it ended before, or fell silent."""
        while not enough(self.text):
            if self.ended:
                return False
            self._came.clear()
            try:
                async with asyncio.timeout(STALL_S):
                    await self._came.wait()
            except TimeoutError:
                self.ended = f"it has been silent for {STALL_S:g} s"
        return True

    def _take(self, chunk: dict[str, Any]) -> None:
        if "error" in chunk:
            self.ended = f"it failed: {chunk['error'].get('message')}"
        for choice in chunk.get("choices", ()):
            self.text += choice.get("text") or choice.get("delta", {}).get("content") or ""
            if choice.get("finish_reason"):
                self.ended = f"it ended ({choice['finish_reason']})"
        self._came.set()


# ---------------------------------------------------------------------------------------------------------- one server


class Drill:
    """One server, asked over `session`."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url.rstrip("/")

    async def run(self, *, round_trip: bool) -> Report:
        """Raises CannotDrill where there is no flip, SettingError for a server that does not answer as one."""
        status = await self._get("/v1/homeserve/status")
        flip = status.get("flip") or {}
        if flip.get("policy") not in ("auto", "manual"):
            why = flip.get("hold_reason") or "its layout stays"
            raise CannotDrill(
                f"{self._url}: {why}", field="url", fix="serve several ranks: --devices cpu:2 --flip manual"
            )
        here = str(status["layout"])
        room = int(status["model"]["context"]) - TRIED_TOKENS
        question, judge = await self._measure(min(room, ANSWER_TOKENS))
        targets = [OTHER[here], here]
        legs: list[Leg] = []
        found: list[str] = []
        for under_one in [targets] if round_trip else [[to] for to in targets]:
            reading, own = await self._answer(question, judge, under_one, min(room, ANSWER_TOKENS))
            legs += own
            found += faults(judge, reading.text, own, MARGIN, reading.ended)
            if found:
                break
        found += await self._on_record(legs) if not found else []
        corridor = await self._get("/v1/homeserve/corridor")
        peaks = tuple((corridor.get("flips") or {}).get("ranks") or ())
        return Report(self._url, judge.words, tuple(legs), tuple(found), peaks)

    async def _measure(self, tokens: int) -> tuple[Question, Judge]:
        """What to ask, and what its right answer is."""
        for question in QUESTIONS:
            text = await self._whole(question, min(tokens, TRIED_TOKENS))
            judge = Count(question.start)
            if text is not None and judge.numbers(text) >= COUNTS_LEAST:
                return question, judge
        known = await self._whole(ANY, tokens)
        if known is None:
            raise SettingError(f"{self._url}: no completion could be had", field="url", fix="see its log")
        return ANY, Same(known)

    async def _whole(self, question: Question, tokens: int) -> str | None:
        """The answer without a flip; None where the server refuses the request (a model without a chat template)."""
        body = question.body | {"temperature": 0, "max_tokens": tokens}
        async with self._session.post(self._url + question.route, json=body) as response:
            if response.status != 200:
                return None
            (choice,) = (await response.json())["choices"]
            return str(choice.get("text") or choice.get("message", {}).get("content") or "")

    async def _answer(
        self, question: Question, judge: Judge, targets: Sequence[str], tokens: int
    ) -> tuple[Reading, list[Leg]]:
        """One answer, with a flip to each of the targets in turn under it; it is left once it is long enough."""
        body = question.body | {"temperature": 0, "max_tokens": tokens, "stream": True}
        legs: list[Leg] = []
        async with self._session.post(self._url + question.route, json=body) as response:
            reading = Reading(response)
            task = asyncio.create_task(reading.run())
            try:
                enough = partial(_settled, judge, goal=LEAD)
                for to in targets:
                    if not await reading.until(enough):
                        break
                    leg = await self._leg(to, reading)
                    legs.append(leg)
                    enough = partial(_settled, judge, goal=leg.watermark + MARGIN)
                    if leg.state != "committed":
                        break
                await reading.until(enough)
            finally:
                task.cancel()
                await asyncio.wait({task})
        return reading, legs

    async def _leg(self, to: str, reading: Reading) -> Leg:
        """Ask for a flip and see it through."""
        end = time.monotonic() + FLIP_S
        while True:
            async with self._session.post(f"{self._url}/v1/homeserve/flip", json={"to": to}) as response:
                told = await response.json()
                if response.status == 202:
                    break
            error = told.get("error") or {}
            if error.get("code") != "flip_running" or time.monotonic() > end:
                return Leg(to, None, "refused", error.get("message"), len(reading.text))
            await asyncio.sleep(_POLL_S)
        while time.monotonic() < end:
            record = await self._get(told["url"])
            if record["state"] in ("committed", "abandoned"):
                live, took = record["live"].get("requests"), record["ms"].get("total")
                return Leg(to, told["id"], record["state"], record["reason"], len(reading.text), took, live)
            await asyncio.sleep(_POLL_S)
        return Leg(to, told["id"], "unfinished", f"not over within {FLIP_S:g} s", len(reading.text))

    async def _on_record(self, legs: Sequence[Leg]) -> list[str]:
        """What the server's own list of flips does not say of legs that were seen to commit."""
        last = (await self._get("/v1/homeserve/flip"))["last"]
        known = {each["id"]: (each["to"], each["state"]) for each in last}
        return [
            f"the flip to {leg.to} is not on record as committed"
            for leg in legs
            if leg.id is None or known.get(leg.id) != (leg.to, "committed")
        ]

    async def _get(self, path: str) -> dict[str, Any]:
        async with self._session.get(self._url + path) as response:
            body: dict[str, Any] = await response.json(content_type=None)
            if response.status != 200:
                message = (body.get("error") or {}).get("message") or f"{path} answered {response.status}"
                raise SettingError(f"{self._url}: {message}", field="url")
            return body


def _settled(judge: Judge, text: str, *, goal: int) -> bool:
    """As much as is waited for is right, or it is wrong already."""
    return judge.right(text) >= goal or bool(judge.wrong(text))


# --------------------------------------------------------------------------------------------------------- the command


def run(args: argparse.Namespace, environ: Mapping[str, str]) -> Report:
    """The drill on `--url`, on a running server that can flip, or on one of its own. Raises HomeserveError where there
    is nothing to try it on."""
    key = first_key(args.api_key_file, environ)
    if args.url and args.model:
        raise SettingError("--model is for a server of the drill's own, and --url names one", field="url")
    for url in [args.url] if args.url else [] if args.model else running_urls(environ):
        try:
            return asyncio.run(drill(url, key, round_trip=args.round_trip))
        except CannotDrill as error:
            if args.url:
                raise
            print(error.message, file=sys.stderr, flush=True)
    with ExitStack() as stack:
        model = args.model or fixture_path()
        server = TemporaryServer(model, FLAGS)
        stack.callback(server.stop)
        print(f"starting a server of two ranks for {model or 'the default model'} …", file=sys.stderr, flush=True)
        return asyncio.run(drill(server.start(), None, round_trip=args.round_trip))


def fixture_path() -> str | None:
    """The model that counts, where this runs from a checkout."""
    for folder in (Path.cwd(), Path(__file__).resolve().parents[2]):
        if (folder / FIXTURE).is_file():
            return str(folder / FIXTURE)
    return None


async def drill(url: str, key: str | None, *, round_trip: bool) -> Report:
    """Raises CannotDrill or SettingError."""
    import aiohttp

    headers = {"Authorization": f"Bearer {key}"} if key else {}
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=FLIP_S + STALL_S)
    try:
        async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:
            return await Drill(session, url).run(round_trip=round_trip)
    except (aiohttp.ClientError, TimeoutError, ValueError, KeyError) as error:
        raise SettingError(f"{url}: {error or 'no answer'}", field="url", fix="see homeserve ps") from None
