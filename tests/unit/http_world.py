"""A server over real sockets for tests of the HTTP routes: the real engine, on a fleet that answers from a script.

    async with serving() as world:
        status, body = await world.chat(max_tokens=5)

Every prompt is answered with `world.fleet.script`; a token is a byte.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec
import standing

from homeserve.engine.engine import Engine
from homeserve.engine.request import EngineLimits
from homeserve.fleet import RankStatus
from homeserve.server.application import HttpServer
from homeserve.server.context import Loaded, LoadProgress, ModelInfo, ServerContext
from homeserve.settings import Settings
from homeserve.wire.records import (
    LaneRows,
    Logprobs,
    NewLane,
    PlanKind,
    PoolCensus,
    Result,
    Sample,
    unpack_ints,
)

END = 256
ANSWER = "Hi, wörld!"


class ByteTokenizer:
    """Ids 0..255 are bytes, 256 ends."""

    vocab_size = 257
    end_ids = frozenset({END})
    special_ids = frozenset({END})
    bos_id = None
    eos_id = END
    add_bos = False

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        if text == "boom":
            raise RuntimeError("secret detail")
        return list(text.encode())

    def decode(self, ids: Any) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else b""

    def token_text(self, token: int) -> str:
        return "<end>" if token == END else chr(token)


class PlainTemplates:
    """`role: content` a line."""

    async def render(self, messages: Any, tools: Any = None, add_generation_prompt: bool = True, **more: Any) -> str:
        return "".join(f"{m['role']}: {m['content']}\n" for m in messages)


class PlainGrammars:
    """Takes every grammar; what it gives is what was asked."""

    async def check(self, asked: Any, where: str, of_calls: str = "tools", of_parameters: str = "") -> str:
        return msgspec.json.encode(asked).decode()


RANK = RankStatus(0, None, "cpu:0", "cpu", "avx2", 2, 2, 7, [0, 4], 1.5, 0.5, 2.5, None, {"weights": 3.0}, None)


class ScriptFleet:
    """One rank that says `script` (then the end token) to every prompt. `held` keeps its results back."""

    def __init__(self) -> None:
        self.engine: Engine
        self.script = ANSWER.encode()
        self.held = False
        self.kept: list[tuple[int, Result]] = []
        self.said: dict[int, int] = {}
        self.logprobs: dict[int, int] = {}
        self.lanes: dict[int, int] = {}
        self.seq = 0
        self.in_flight = 0
        self.ranks = [RANK]

    def credit(self) -> int:
        return 2 - self.in_flight

    def issue(
        self,
        kind: PlanKind,
        *,
        epoch: int,
        drop: tuple[int, ...] = (),
        new: tuple[NewLane, ...] = (),
        rows: tuple[LaneRows, ...] = (),
    ) -> int:
        self.seq += 1
        for lane in drop:
            self.lanes.pop(lane, None)
        for fresh in new:
            self.lanes[fresh.lane] = fresh.request
            self.logprobs[fresh.request] = fresh.sampling.top_logprobs
        samples = tuple(self._sample(row) for row in rows if row.sample)
        census: tuple[PoolCensus, ...] = ()
        if kind is PlanKind.CENSUS:
            census = (PoolCensus("kv", 64, tuple((lane, request, 0) for lane, request in self.lanes.items())),)
        self.in_flight += 1
        self.kept.append((self.seq, Result(0, self.seq, epoch, samples=samples, census=census)))
        if not self.held:
            asyncio.get_running_loop().call_soon(self.release)
        return self.seq

    def release(self, count: int | None = None) -> None:
        """Give back `count` results (None: all that are kept)."""
        for seq, result in self.kept[:count]:
            self.kept.pop(0)
            self.in_flight -= 1
            self.engine.on_results(seq, (result,))

    def _sample(self, row: LaneRows) -> Sample:
        count = self.said.get(row.request, 0)
        self.said[row.request] = count + 1
        token = self.script[count] if count < len(self.script) else END
        tokens = unpack_ints(row.tokens)
        top = self.logprobs[row.request]
        about = tuple(Logprobs(t, -0.25, ((t, -0.25),)) for t in tokens[1:]) if row.prompt_logprobs >= 0 else ()
        entry = Logprobs(token, -0.5, ((65, -1.0), (66, float("-inf")))[:top]) if top >= 0 else None
        return Sample(row.lane, row.request, row.start + max(1, len(tokens)), token, entry, about)

    async def restart(self, kv_slots: int, window_slots: tuple[tuple[int, int], ...]) -> None:
        raise AssertionError("not in these tests")

    def shared_memory_names(self) -> list[str]:
        return ["homeserve-1-x"]


class World:
    """A running server and a client."""

    def __init__(self, port: int, context: ServerContext, fleet: ScriptFleet, client: aiohttp.ClientSession) -> None:
        self.port = port
        self.context = context
        self.fleet = fleet
        self.client = client
        self.state = "ready"

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}{path}"

    async def get(self, path: str, **more: Any) -> tuple[int, Any]:
        async with self.client.get(self.url(path), **more) as response:
            return response.status, await response.json()

    async def post(self, path: str, body: Any, **more: Any) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.client.post(self.url(path), data=data, **more) as response:
            return response.status, await response.json()

    async def chat(self, **fields: Any) -> tuple[int, Any]:
        return await self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "q"}], **fields})

    async def complete(self, **fields: Any) -> tuple[int, Any]:
        return await self.post("/v1/completions", {"prompt": "abc", **fields})

    async def stream(self, path: str, **fields: Any) -> list[Any]:
        """Every event of a stream; `[DONE]` as a string, comments left out."""
        async with self.client.post(self.url(path), json={"stream": True, **fields}) as response:
            assert response.status == 200
            assert response.headers["Content-Type"].startswith("text/event-stream")
            text = await response.text()
        assert text.endswith("\n\n")
        datas = [line[6:] for line in text.split("\n") if line.startswith("data: ")]
        return [data if data == "[DONE]" else json.loads(data) for data in datas]

    async def chat_stream(self, **fields: Any) -> list[Any]:
        return await self.stream("/v1/chat/completions", messages=[{"role": "user", "content": "q"}], **fields)

    @property
    def model(self) -> Loaded:
        """The model that is in."""
        assert self.context.first is not None
        return self.context.first

    def change(self, **parts: Any) -> None:
        """Other parts for the model that is in."""
        models: Any = self.context.models
        models.loaded[0] = dataclasses.replace(models.loaded[0], **parts)

    @property
    def running(self) -> int:
        snapshot = self.model.engine.snapshot()
        return snapshot.running + snapshot.waiting

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                await asyncio.sleep(0)


@asynccontextmanager
async def serving(
    loaded: bool = True, waiting: int = 8, context: int = 256, prefix_cache: bool = False, **settings: Any
) -> AsyncIterator[World]:
    """A server on a port of its own, and a client. `settings` are those of `homeserve up`."""
    fleet = ScriptFleet()
    limits = EngineLimits(
        context=context,
        kv_tokens=4 * context,
        running=4,
        waiting=waiting,
        chunk=64,
        prefill_delay=0,
        plans_in_flight=2,
        prefix_cache=prefix_cache,
    )
    engine: Any = Engine(fleet, limits)
    fleet.engine = engine
    model = standing.loaded(
        settings=Settings(**settings),
        model=ModelInfo("tiny", "/models/tiny.gguf", "llama", "Q4_1", context, vocab=257, created=5),
        engine=engine,
        tokenizer=ByteTokenizer(),
        templates=PlainTemplates(),
        grammars=PlainGrammars(),
        fleet=fleet,
    )
    world: World
    served = ServerContext(
        Settings(**settings),
        state=lambda: world.state,
        load=lambda: LoadProgress("reading weights", 3, 10),
        models=standing.Standing(*([model] if loaded else [])),
    )
    server = HttpServer(served)
    listener = socket.create_server(("127.0.0.1", 0))
    port = await server.start(listener)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(5)) as client:
        world = World(port, served, fleet, client)
        try:
            yield world
        finally:
            await client.close()
            await engine.stop()
            await server.stop()
            listener.close()
