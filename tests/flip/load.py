"""A mixed load, asked first of a server that never flips and then of one whose policy flips all the time.

    asks ─▶ server that stays as it is    ─▶ what each of them is answered: the reference
    asks ─▶ the same, with `--flip auto`  ─▶ asked again and again until there were flips enough, each answer compared

*What pulls.* Measured on few cores, prompts go faster through the pipeline layout and many short answers are drawn
faster in the tensor layout. So a storm of long prompts beside answers that stream pulls both ways, and the shipped
policy turns at every end of its dwell. Behind a storm come *ends*: a request for several choices that end with their
first token, alone on the server. It may draw thousands of tokens, so the policy goes to the tensor layout for it; by
the time that all plans are answered there is nobody left, and the flip carries no request at all. A few long prompts
pull back.

*Lives.* How fast the layout is that is not in force was measured the last time that it was, maybe while somebody else
had the processors; a policy that believes one layout to be the better one for everything stays there. A storm that
brings no flip therefore ends the server's life, by the book, and the next one begins: with the plan's estimates, as
each does.

*What is equal.* Every answer, to the byte, where the model is sure (the model that counts). Of others a greedy answer
may part at the first place where the two best tokens of the reference are nearer than sums of another order make
them; that error is measured on the log-probabilities of the same run, told, and has a bound of its own, so that a
wrong row is not taken for one.

Run as a program it is the soak:  python tests/flip/load.py MODEL --flips 1000
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import aiohttp

sys.path.insert(0, str(Path(__file__).parents[1]))

from box import Box, Run

T = TypeVar("T")
SIZES = ("--devices", "cpu:3", "--threads", "1", "--kv-type", "f32", "--max-running", "8", "--chunk", "64")
STAYS = ("--layout", "pipeline", "--flip", "manual")
"""Rests where the other one does, with all that a flip needs, and nobody asks for one."""
TURNS = ("--layout", "pipeline", "--flip", "auto", "--flip-dwell-s", "0.1")
DWELL_S = 0.15
"""Longer than the policy's dwell: it may flip again."""
AT_ONCE = 10
"""Open requests of a storm."""
STORM = 16
"""Requests of a storm."""
CHOICES = (2, 3, 4, 5, 6, 7)
"""Of a request that ends at once: how many are under way when the policy looks depends on the machine."""
ERROR_MOST = 1e-2
"""No rounding makes a log-probability differ by more, with rows and weights of 32 bits."""
QUIET_S = 60.0
"""A stream that says nothing for so long was forgotten."""


@dataclass(frozen=True)
class Ask:
    """One request. `leave_after`: pieces after which its client goes. `sure`: no other answer is right."""

    kind: str
    body: dict[str, Any]
    leave_after: int = 0
    sure: bool = False


@dataclass
class Said:
    """One choice of an answer."""

    text: str = ""
    tokens: list[str] = field(default_factory=list)
    tops: list[dict[str, float]] = field(default_factory=list)
    finish: str | None = None


@dataclass
class Answer:
    """`whole`: its end was read. `crossed`: flips while it was open."""

    choices: dict[int, Said]
    whole: bool = False
    crossed: int = 0
    cached: int = 0
    draft: dict[str, Any] = field(default_factory=dict)
    """What was drafted for it."""


# ------------------------------------------------------------------------------------------------------------- the asks


def counted(start: int, length: int) -> str:
    """The first bytes of a count."""
    return "".join(f" {number}" for number in range(start + 1, start + 2 + length // 2))[:length]


def counting(seed: int, count: int) -> list[Ask]:
    """For the model that counts: a token is a byte."""
    draw = random.Random(seed)
    makers = _shares((8, _long_count), (4, _count), (2, _drawn), (1, _penalised), (2, _left), (1, _series), (1, _copy))
    return [make(draw) for make in islice(dealt(draw, makers), count)]


def dealt(draw: random.Random, cards: Sequence[T]) -> Iterator[T]:
    """Without end, like cards: each is dealt as often as it is there before the first one comes again. Of what is drawn
    by chance alone, something rare is missing from a short load one time in five."""
    while True:
        yield from draw.sample(cards, len(cards))


def _shares(*parts: tuple[int, Callable[[random.Random], Ask]]) -> list[Callable[[random.Random], Ask]]:
    return [make for share, make in parts for _ in range(share)]


def _count(draw: random.Random) -> Ask:
    body = {"prompt": f"count {draw.randrange(100, 9000)}:", "max_tokens": draw.randrange(60, 240), "temperature": 0}
    return Ask("count", body | draw.choice(({}, {"logprobs": 2})), sure=True)


def _long_count(draw: random.Random) -> Ask:
    """A count that is far on already. Few starts: many have their beginning in the prefix cache."""
    start = 1000 * draw.randrange(1, 9)
    text = counted(start, draw.randrange(700, 1300))
    return Ask("long", {"prompt": f"count {start}:{text}", "max_tokens": 16, "temperature": 0}, sure=True)


def _drawn(draw: random.Random) -> Ask:
    more = {"n": 3, "temperature": 0.7, "top_k": 20, "seed": draw.randrange(1 << 30), "logprobs": 2}
    return Ask("drawn", {"prompt": f"count {draw.randrange(100, 9000)}:", "max_tokens": 40} | more)


def _penalised(draw: random.Random) -> Ask:
    more = {"frequency_penalty": 0.3, "presence_penalty": 0.2, "repetition_penalty": 1.05, "logprobs": 2}
    return Ask("penalised", {"prompt": f"count {draw.randrange(9000)}:", "max_tokens": 60, "temperature": 0} | more)


def _left(draw: random.Random) -> Ask:
    body = {"prompt": f"count {draw.randrange(100, 9000)}:", "max_tokens": 240, "temperature": 0}
    return Ask("left", body, leave_after=draw.randrange(3, 90), sure=True)


def _series(draw: random.Random) -> Ask:
    prompt = f"series {draw.randrange(1000)} step {draw.randrange(2, 10)}:"
    return Ask("series", {"prompt": prompt, "max_tokens": 80, "temperature": 0}, sure=True)


def _copy(draw: random.Random) -> Ask:
    word = "".join(draw.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(draw.randrange(3, 12)))
    return Ask("copy", {"prompt": f"copy {word}:", "max_tokens": 40, "temperature": 0}, sure=True)


def babbling(seed: int, count: int) -> list[Ask]:
    """For models of random weights with a vocabulary of 512 and a context of as much: prompts are token ids."""
    draw = random.Random(seed)
    stems = [[draw.randrange(3, 500) for _ in range(400)] for _ in range(6)]

    def prompt(length: int) -> list[int]:
        stem = draw.choice(stems)[: draw.randrange(0, length)]
        return stem + [draw.randrange(3, 500) for _ in range(length - len(stem))]

    def make(kind: str) -> Ask:
        body: dict[str, Any] = {"prompt": prompt(draw.randrange(4, 40)), "temperature": 0, "logprobs": 2}
        body["ignore_eos"] = True
        if kind == "long":
            return Ask(kind, body | {"prompt": prompt(draw.randrange(250, 440)), "max_tokens": 12})
        if kind == "drawn":
            return Ask(
                kind,
                body | {"max_tokens": 40, "n": 3, "temperature": 0.7, "top_k": 20, "seed": draw.randrange(1 << 30)},
            )
        if kind == "penalised":
            more = {"frequency_penalty": 0.3, "presence_penalty": 0.2, "repetition_penalty": 1.05}
            return Ask(kind, body | more | {"max_tokens": 60})
        leave_after = draw.randrange(3, 60) if kind == "left" else 0
        return Ask(kind, body | {"max_tokens": draw.randrange(70, 200)}, leave_after)

    kinds = ("long",) * 8 + ("stream",) * 4 + ("drawn",) * 2 + ("left",) * 2 + ("penalised",)
    return [make(kind) for kind in islice(dealt(draw, kinds), count)]


# ----------------------------------------------------------------------------------------------------------- the client


class Client:
    """Asks a server; every answer is read as a stream."""

    def __init__(self, run: Run) -> None:
        self.run, self.url = run, run.url
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None, sock_read=QUIET_S), connector=aiohttp.TCPConnector(limit=0)
        )

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def get(self, path: str) -> Any:
        async with self._session.get(self.url + path) as answer:
            return await answer.json()

    async def whole(self, **body: Any) -> Any:
        async with self._session.post(f"{self.url}/v1/completions", json=body) as answer:
            told = await answer.json()
            assert answer.status == 200, told
            return told

    async def ask(self, ask: Ask) -> Answer:
        """Reads it to its end, or leaves. Raises TimeoutError for a stream that fell silent."""
        answer, pieces = Answer({}), 0
        body = ask.body | {"stream": True, "stream_options": {"include_usage": True}}
        async with self._session.post(f"{self.url}/v1/completions", json=body) as response:
            assert response.status == 200, await response.text()
            async for line in response.content:
                if line.startswith(b"data: [DONE]"):
                    answer.whole = True
                    break
                if not line.startswith(b"data: "):
                    continue
                pieces += _take(answer, json.loads(line[6:]))
                if ask.leave_after and pieces >= ask.leave_after:
                    response.close()
                    return answer
        assert answer.whole, f"cut off: {ask}"
        return answer

    async def idle(self) -> dict[str, Any]:
        """The census of a server that has nothing to do; what it measures of its own is waited for."""
        async with asyncio.timeout(QUIET_S):
            while True:
                census: dict[str, Any] = await self.get("/v1/homeserve/census")
                if census["idle"]:
                    return census
                await asyncio.sleep(0.02)


def _take(answer: Answer, told: dict[str, Any]) -> int:
    """Adds a chunk; returns how many pieces of text it had."""
    assert "error" not in told, told
    if told.get("homeserve"):
        answer.crossed = told["homeserve"]["flips_crossed"]
        answer.cached = told["homeserve"]["cached_tokens"]
        answer.draft = told["homeserve"]["draft"] or {}
        assert told["homeserve"]["restarts"] == 0, "a rank was lost"
    pieces = 0
    for choice in told["choices"]:
        said = answer.choices.setdefault(choice["index"], Said())
        said.text += choice["text"]
        said.finish = choice.get("finish_reason") or said.finish
        pieces += bool(choice["text"])
        if choice.get("logprobs"):
            said.tokens += choice["logprobs"]["tokens"]
            said.tops += choice["logprobs"]["top_logprobs"] or []
    return pieces


# ----------------------------------------------------------------------------------------------------------- comparison


@dataclass
class Compared:
    """Answers that were compared, and where some parted."""

    answers: Counter[str] = field(default_factory=Counter)
    parted: list[str] = field(default_factory=list)
    """Where two tokens were as good as equal."""
    error: float = 0.0
    """The largest difference of a log-probability of the same token behind the same tokens."""
    waiting: list[tuple[str, float]] = field(default_factory=list)
    """Answers that parted, with the gap there: judged when the error is known."""

    def add(self, ask: Ask, known: Answer, found: Answer) -> None:
        """Raises AssertionError for an answer that is another one."""
        self.answers[ask.kind] += 1
        for index, said in sorted(known.choices.items()):
            other = found.choices.get(index, Said())
            self._measure(said, other)
            if not found.whole:
                assert said.text.startswith(other.text), (ask, said.text, other.text)
            elif other.text != said.text or other.finish != said.finish:
                assert not ask.sure, f"{ask}\n{said.text!r} became\n{other.text!r}"
                self._part(ask, said, other)

    def judge(self) -> None:
        assert self.error < ERROR_MOST, f"log-probabilities differ by {self.error}"
        for told, gap in self.waiting:
            assert gap < 2 * self.error, f"{told}: the better token led by {gap:.2e}, the error is {self.error:.2e}"
        self.parted += [f"{told}, gap {gap:.2e}" for told, gap in self.waiting]
        self.waiting.clear()

    def _measure(self, said: Said, other: Said) -> None:
        for token, value, mine, theirs in zip(other.tokens, said.tokens, other.tops, said.tops, strict=False):
            for word in mine.keys() & theirs.keys():
                self.error = max(self.error, abs(mine[word] - theirs[word]))
            if token != value:
                return

    def _part(self, ask: Ask, said: Said, other: Said) -> None:
        at = next(
            (at for at, pair in enumerate(zip(said.tokens, other.tokens, strict=False)) if len(set(pair)) > 1), -1
        )
        assert at >= 0 and ask.body["temperature"] == 0, f"{ask}\n{said.text!r} became\n{other.text!r}"
        best, second = sorted(said.tops[at].values(), reverse=True)[:2]
        self.waiting.append((f"{ask.kind} at token {at}", best - second))


# ------------------------------------------------------------------------------------------------------------ the flips


@dataclass
class Flips:
    """What the records of all lives say, by (life, number)."""

    records: dict[tuple[int, int], dict[str, Any]] = field(default_factory=dict)
    life: int = 0

    async def watch(self, client: Client) -> None:
        """Read the records for ever: a server keeps the last 64."""
        while True:
            await self.read(client)
            await asyncio.sleep(1.0)

    async def read(self, client: Client) -> None:
        for record in (await client.get("/v1/homeserve/flip"))["last"]:
            if record["state"] in ("committed", "abandoned"):
                self.records[self.life, record["id"]] = record

    def of_life(self, state: str) -> int:
        """How many of this life ended so."""
        return sum(life == self.life and each["state"] == state for (life, _), each in self.records.items())

    @property
    def committed(self) -> list[dict[str, Any]]:
        """Those of the policy."""
        return [each for each in self.records.values() if each["state"] == "committed" and each["cause"] == "policy"]

    def counts(self) -> dict[str, int]:
        """Of flips that the policy began and that were committed."""
        live = [each["live"] for each in self.committed]
        return {
            "policy": len(live),
            "decoding": sum(each["decoding"] > 0 for each in live),
            "half_done": sum(each["half_done"] > 0 for each in live),
            "checkpoints": sum(each["checkpoints"] > 0 for each in live),
            "cached_rows": sum(each["requests"] == 0 and each["rows"] > 0 for each in live),
            "empty": sum(each["requests"] == 0 for each in live),
        }

    @property
    def moved_bytes(self) -> int:
        return sum(
            (rank["sent_bytes"] or 0) + (rank["local_bytes"] or 0) for each in self.committed for rank in each["ranks"]
        )

    @property
    def abandoned(self) -> list[dict[str, Any]]:
        return [each for each in self.records.values() if each["state"] == "abandoned"]


@dataclass
class Soak:
    """The load, over as many lives as it takes."""

    asks: Sequence[Ask]
    known: Sequence[Answer]
    wanted: dict[str, int]
    """Flips that there are to be, by the names of `Flips.counts`."""
    seed: int = 0
    tell: Callable[[str], None] = print
    flips: Flips = field(default_factory=Flips)
    compared: Compared = field(default_factory=Compared)
    crossed: Counter[int] = field(default_factory=Counter)
    hits: int = 0
    left: int = 0

    async def run(self, client: Client, limit_s: float) -> None:
        """Storms and ends until the counts are reached, or until a storm brings no flip. Raises TimeoutError."""
        self.flips.life += 1
        draw = random.Random(f"{self.seed} {self.flips.life}")
        ending = await ends(client)
        async with asyncio.timeout(limit_s):
            watching = asyncio.create_task(self.flips.watch(client))
            try:
                before = -1
                while self.short() and len(self.flips.committed) > before:
                    before = len(self.flips.committed)
                    await self.storm(client, [draw.randrange(len(self.asks)) for _ in range(STORM)])
                    await self.end(client, ending, draw)
                    await self.flips.read(client)
                    self.tell(f"life {self.flips.life}: {self.flips.counts()} error {self.compared.error:.1e}")
            finally:
                watching.cancel()
                with suppress(asyncio.CancelledError):
                    await watching

    def short(self) -> list[str]:
        """Which counts are not reached."""
        found = self.flips.counts()
        return [name for name, count in self.wanted.items() if found[name] < count]

    async def storm(self, client: Client, chosen: Iterable[int], pulls: Sequence[int] = ()) -> None:
        """Those of the load that were chosen; or for each of `pulls` a prompt that nobody has asked before."""
        todo = deque(chosen)

        async def one() -> None:
            while todo:
                at = todo.popleft()
                answer = await client.ask(self.asks[at])
                self.compared.add(self.asks[at], self.known[at], answer)
                self._count(answer)

        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(one())
            for seed in pulls:
                group.create_task(client.ask(unknown(seed)))

    async def end(self, client: Client, ending: Ask, draw: random.Random) -> None:
        """To the tensor layout with nobody on board, and back for some prompts."""
        for _ in range(2):
            await self.storm(client, [], pulls=[draw.randrange(1 << 30) for _ in range(6)])
            await asyncio.sleep(DWELL_S)
            for choices in draw.sample(CHOICES, len(CHOICES)):
                if (await client.get("/v1/homeserve/status"))["layout"] != "pipeline":
                    break
                answer = await client.ask(replace(ending, body=ending.body | {"n": choices}))
                assert "".join(said.text for said in answer.choices.values()) == "", answer
                self._count(answer)
            await asyncio.sleep(DWELL_S)

    def _count(self, answer: Answer) -> None:
        self.hits += answer.cached > 0
        if answer.whole:
            self.crossed[answer.crossed] += 1
        else:
            self.left += 1

    def summary(self) -> list[str]:
        ms = sorted(each["ms"]["total"] for each in self.flips.committed)
        return [
            f"flips {self.flips.counts()} in {self.flips.life} lives, {self.flips.moved_bytes} bytes moved",
            f"ms of a flip: median {ms[len(ms) // 2]:.0f}, most {ms[-1]:.0f}" if ms else "no flips",
            f"answers {dict(self.compared.answers)}, {self.hits} with a cached prefix, {self.left} left early",
            f"flips_crossed of those that ended: {dict(sorted(self.crossed.items()))}",
            f"error {self.compared.error:.2e}; parted where two tokens were equal: {len(self.compared.parted)},"
            f" not judged: {len(self.compared.waiting)}",
            *self.compared.parted[:20],
            f"abandoned: {[(each['id'], each['reason']) for each in self.flips.abandoned]}",
        ]


async def ends(client: Client) -> Ask:
    """A request whose choices all end at once, though they may be long."""
    prompt = list(range(7, 19))
    told = await client.whole(prompt=prompt, max_tokens=1, temperature=0, return_token_ids=True)
    first = told["choices"][0]["token_ids"][0]
    context = (await client.get("/v1/homeserve/status"))["model"]["context"]
    body = {"prompt": prompt, "temperature": 0, "max_tokens": context - 10, "stop_token_ids": [first]}
    return Ask("ends", body)


def unknown(seed: int) -> Ask:
    """A long prompt that is in no cache, for one token: only a pull, for nobody knows what is right."""
    draw = random.Random(seed)
    return Ask("pull", {"prompt": [draw.randrange(3, 250) for _ in range(450)], "max_tokens": 1, "temperature": 0})


async def reference(run: Run, asks: Sequence[Ask]) -> list[Answer]:
    """What a server that does not flip answers. Clients stay to the end."""
    known: dict[int, Answer] = {}
    todo = deque(range(len(asks)))
    async with Client(run) as client:

        async def one() -> None:
            while todo:
                at = todo.popleft()
                known[at] = await client.ask(Ask(asks[at].kind, asks[at].body))

        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(one())
        flip = (await client.get("/v1/homeserve/status"))["flip"]
        assert flip["committed"] == 0 and flip["abandoned"] == {}, "the reference has flipped"
    return [known[at] for at in range(len(asks))]


async def soak(run: Run, plan: Soak, limit_s: float) -> None:
    """A life of a server whose policy flips, and what has to hold at its end."""
    async with Client(run) as client:
        await plan.run(client, limit_s)
        census = await client.idle()
        await plan.flips.read(client)
        status = await client.get("/v1/homeserve/status")
    plan.compared.judge()
    assert census["ok"], census
    for pool in census["ranks"]:
        assert pool["free"] == pool["capacity"] - pool["cached"] and pool["leaks"] == [], pool
    assert [rank["restarts"] for rank in status["ranks"]] == [0] * len(status["ranks"]), status["events"]
    assert status["flip"]["unarmed_work_count"] == 0, status["flip"]
    assert {each["cause"] for each in plan.flips.records.values()} == {"policy"}
    assert status["flip"]["committed"] == plan.flips.of_life("committed"), "a record was missed"
    assert sum(status["flip"]["abandoned"].values()) == plan.flips.of_life("abandoned")
    assert all(each["reason"] for each in plan.flips.abandoned), plan.flips.abandoned


def stopped(run: Run) -> None:
    """Drained, with no process and no shared memory left."""
    run.send(15)
    assert run.wait() == 0, run.err
    assert run.left_behind() == []


def play(
    box: Box, model: Path, wanted: dict[str, int], *, asks: int, seed: int, limit_s: float, tell: Callable[[str], None]
) -> Soak:
    """Both servers, one after the other; returns what the second one's life was."""
    counter = model.name.startswith("counter")
    sizes = (*SIZES, "--context", "1536" if counter else "512", "--kv-tokens", "16384" if counter else "8192")
    mixed = (counting if counter else babbling)(seed, asks)
    began = time.monotonic()
    still = box.up(str(model), *sizes, *STAYS)
    known = asyncio.run(reference(still, mixed))
    stopped(still)
    tell(f"{len(mixed)} answers without a flip in {time.monotonic() - began:.0f} s")
    plan = Soak(mixed, known, wanted, seed, tell)
    try:
        while plan.short():
            run = box.up(str(model), *sizes, *TURNS)
            asyncio.run(soak(run, plan, limit_s - (time.monotonic() - began)))
            stopped(run)
    finally:
        for line in plan.summary():
            tell(line)
    assert plan.flips.moved_bytes > 0 and max(plan.crossed) > 0
    return plan


def main(argv: list[str]) -> int:
    import argparse
    import tempfile

    parser = argparse.ArgumentParser(description="Flips under a mixed load.")
    parser.add_argument("model", type=Path)
    parser.add_argument("--flips", type=int, default=1000)
    parser.add_argument("--each", type=int, default=100)
    parser.add_argument("--asks", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit-s", type=float, default=6 * 3600)
    given = parser.parse_args(argv)
    began = time.monotonic()

    def tell(text: str) -> None:
        print(f"{time.monotonic() - began:7.1f}  {text}", flush=True)

    recurrent = given.model.name.startswith("counter")
    with tempfile.TemporaryDirectory(prefix="homeserve-flips-") as folder:
        box = Box(Path(folder))
        try:
            play(
                box,
                given.model.resolve(),
                wanted(given.flips, given.each, recurrent),
                asks=given.asks,
                seed=given.seed,
                limit_s=given.limit_s,
                tell=tell,
            )
        finally:
            box.close()
    return 0


def wanted(flips: int, each: int, recurrent: bool) -> dict[str, int]:
    """Flips in all, and of each kind at least; only recurrent models have checkpoints."""
    kinds = ("decoding", "half_done", "empty", *(("checkpoints",) if recurrent else ()))
    return {"policy": flips} | dict.fromkeys(kinds, each)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
