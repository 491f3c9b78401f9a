"""Replicas on a Ray cluster: two boxes of one machine, real servers, the official client. Of the slow tier.

Ray lives in an environment of its own, made of requirements-ray.txt (every version pinned, some 600 MB) below
`build/clients`; homeserve and what it needs come from the environment of the tests. Answers are known: the model
counts.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from box import wait_until
from openai import APIError, AsyncOpenAI, BadRequestError, NotFoundError

HERE = Path(__file__).parent
BUILD = HERE.parents[1] / "build" / "clients"
REQUIREMENTS = HERE / "requirements-ray.txt"
COUNTER = HERE.parent / "data" / "counter.gguf"
REPLICA = "x-homeserve-replica"
REQUESTS, OPEN = 200, 8
FLAGS = "--kv-tokens 65536 --context 4096 --drain-timeout-s 5"
pytestmark = [
    pytest.mark.timeout(1200),
    pytest.mark.skipif(
        os.environ.get("HOMESERVE_TEST_TIER") != "slow", reason="tools of the slow tier bring gigabytes of packages"
    ),
]


@pytest.fixture(scope="session")
def ray_python() -> Path:
    """The interpreter of Ray's environment. HOMESERVE_TEST_RAY names an environment that is there already."""
    named = os.environ.get("HOMESERVE_TEST_RAY")
    folder = Path(named) if named else BUILD / f"ray-{hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest()[:12]}"
    python = folder / "bin" / "python"
    if not named and not (folder / "complete").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True, timeout=300)
        command = [str(python), "-m", "pip", "install", "--no-deps", "-q", "-r", str(REQUIREMENTS)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
        assert done.returncode == 0, done.stderr[-4000:]
        (folder / "complete").touch()
    # After Ray's own packages: where both have one, Ray's is taken.
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    own = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    (Path(own) / "homeserve_under_test.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


class RayCluster:
    """The script's process, and what it tells of its replicas."""

    def __init__(self, python: Path, folder: Path, ray_folder: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        args = json.dumps({"model": str(COUNTER), "flags": FLAGS, "resources": {"box": 1}, "cpus": 0})
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("HOMESERVE_", "XDG_"))}
        environ |= {"HOME": str(folder), "TMPDIR": ray_folder, "RAY_USAGE_STATS_ENABLED": "0"}
        self.records = folder / ".cache" / "homeserve" / "run"
        self.log = folder / "ray.log"
        with self.log.open("wb") as err:
            self.process = subprocess.Popen(
                [str(python), str(HERE / "scripts" / "ray_cluster.py"), args, str(port)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=err,
                env=environ,
                cwd=folder,
                text=True,
            )

    def start(self) -> None:
        """Raises unless it serves."""
        self.url = str(self._read()["url"])
        self.client: dict[str, Any] = {
            "base_url": f"{self.url}/v1",
            "api_key": "none",
            "max_retries": 0,
            "timeout": 120.0,
        }

    def replicas(self) -> dict[str, int]:
        """Id -> process id of the actor, of those that live."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        told = self._read()["replicas"]
        alive = {each: facts for each, facts in told.items() if facts["alive"]}
        assert len({facts["node"] for facts in alive.values()}) == len(alive), "two on one box"
        return {each: facts["pid"] for each, facts in alive.items()}

    def servers(self) -> dict[int, tuple[int, str]]:
        """Process id of a replica's actor -> process id and URL of the server that it started."""
        found = {}
        for path in self.records.glob("*.json"):
            facts = json.loads(path.read_text())
            stat = Path(f"/proc/{facts['pid']}/stat")
            if stat.exists():
                found[int(stat.read_text().rpartition(")")[2].split()[1])] = (facts["pid"], facts["url"])
        return found

    def whole(self) -> bool:
        """Whether two replicas live and each has a server that is ready."""
        alive = set(self.replicas().values())
        return len(alive) == 2 and alive <= self.servers().keys()

    def close(self) -> int:
        with self.process:  # its pipes, and that it was waited for
            assert self.process.stdin is not None
            self.process.stdin.close()
            try:
                return self.process.wait(180)
            finally:
                self.process.kill()

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith('{"url"'):
                told: dict[str, Any] = json.loads(line)
                return told
        pytest.fail(f"the cluster ended:\n{self.log.read_text(errors='replace')[-8000:]}")


@pytest.fixture(scope="module")
def cluster(ray_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    """It must take everything down when it ends."""
    ray_folder = tempfile.mkdtemp(prefix="hs-ray-", dir="/tmp")  # names of sockets are short
    made = RayCluster(ray_python, tmp_path_factory.mktemp("ray"), ray_folder)
    try:
        made.start()
        yield made
        servers = [pid for pid, _ in made.servers().values()]
        assert len(servers) == 2
        assert made.close() == 0, made.log.read_text(errors="replace")[-8000:]
        wait_until("the end of every server", lambda: not any(Path(f"/proc/{pid}").exists() for pid in servers))
        assert made.servers() == {}
    finally:
        if made.process.returncode is None:
            made.close()
        shutil.rmtree(ray_folder, ignore_errors=True)


@pytest.fixture
def whole(cluster: RayCluster) -> RayCluster:
    wait_until("two replicas", cluster.whole, 120)
    return cluster


def counted(start: int, tokens: str) -> bool:
    """Whether an answer is the beginning of the right one."""
    right = " " + " ".join(str(number) for number in range(start + 1, start + 40))
    return len(tokens) > 4 and right.startswith(tokens)


async def ask(client: AsyncOpenAI, start: int) -> tuple[str, bool]:
    """One count, every fourth as a stream: the replica and whether the answer is right."""
    chat: Any = {
        "model": "counter",
        "messages": [{"role": "user", "content": f"count {start}:"}],
        "max_tokens": 24,
        "temperature": 0,
    }
    if start % 4:
        raw = await client.chat.completions.with_raw_response.create(**chat)
        return raw.headers[REPLICA], counted(start, raw.parse().choices[0].message.content or "")
    raw = await client.chat.completions.with_raw_response.create(**chat, stream=True)
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in raw.parse() if chunk.choices])
    return raw.headers[REPLICA], counted(start, text)


def test_a_conversation_stays_with_the_replica_that_knows_it(whole: RayCluster) -> None:
    """Ray's router sends what begins alike to where it was; conversations are spread over both."""

    async def talk() -> list[set[str]]:
        async with AsyncOpenAI(**whole.client) as client:
            seen = []
            for talker in range(6):
                messages: list[Any] = []
                replicas = set()
                for turn in range(4):
                    messages.append({"role": "user", "content": f"copy {'abcdef'[talker] * 12}: " * 10 + str(turn)})
                    chat: Any = {"model": "counter", "messages": messages, "max_tokens": 2, "temperature": 0}
                    raw = await client.chat.completions.with_raw_response.create(**chat)
                    replicas.add(raw.headers[REPLICA])
                    messages.append({"role": "assistant", "content": raw.parse().choices[0].message.content})
                seen.append(replicas)
            return seen

    seen = asyncio.run(talk())
    assert all(len(replicas) == 1 for replicas in seen), seen
    assert set.union(*seen) == whole.replicas().keys()


def test_errors_and_routes_are_those_of_one_server(whole: RayCluster) -> None:
    async def provoke() -> None:
        async with AsyncOpenAI(**whole.client) as client:
            with pytest.raises(NotFoundError, match="there is: counter"):
                await client.completions.create(model="nobody", prompt="count 3:")
            with pytest.raises(BadRequestError, match="temperature"):
                await client.completions.create(model="counter", prompt="count 3:", temperature=-1)
            assert [model.id async for model in client.models.list()] == ["counter"]
            assert (await client.models.retrieve("counter")).id == "counter"
            with pytest.raises(NotFoundError, match="there is nothing at /v1/homeserve/status"):
                await client.get("/homeserve/status", cast_to=object)

    asyncio.run(provoke())
    for path in ("/health", "/ready", "/version"):
        with urllib.request.urlopen(whole.url + path, timeout=30) as answer:
            assert answer.status == 200 and answer.headers[REPLICA]
            assert len(answer.headers.get_all("x-request-id")) == 1


@pytest.mark.parametrize("victim", ["actor", "server"])
def test_a_killed_replica_costs_no_answer(whole: RayCluster, victim: str) -> None:
    """200 requests, 8 at a time; in their middle the actor of the replica with most of them, or the server below it,
    gets SIGKILL."""
    replicas, servers = whole.replicas(), whole.servers()
    killed: list[str] = []
    cut: list[int] = []

    async def run() -> list[tuple[str, bool]]:
        done: list[tuple[str, bool]] = []
        starts = iter(range(1, REQUESTS + 1))

        async def worker(client: AsyncOpenAI) -> None:
            for start in starts:
                try:
                    answer = await ask(client, start)
                except APIError as error:
                    # Of a stream something was sent: nobody but the client can ask again.
                    assert start % 4 == 0 and error.code == "replica_lost", (start, error)
                    cut.append(start)
                    answer = await ask(client, start)
                done.append(answer)
                if len(done) >= REQUESTS // 3 and not killed:
                    killed.append(Counter(replica for replica, _ in done).most_common(1)[0][0])
                    actor = replicas[killed[0]]
                    os.kill(actor if victim == "actor" else servers[actor][0], signal.SIGKILL)

        async with AsyncOpenAI(**whole.client) as client, asyncio.TaskGroup() as group:
            for _ in range(OPEN):
                group.create_task(worker(client))
        return done

    began = time.monotonic()
    done = asyncio.run(run())
    took_s = time.monotonic() - began
    right = sum(good for _, good in done)
    assert (len(done), right) == (REQUESTS, REQUESTS)
    assert len(cut) <= OPEN
    both = (replicas[killed[0]], servers[replicas[killed[0]]][0])
    wait_until("the end of both", lambda: not any(Path(f"/proc/{pid}").exists() for pid in both))
    wait_until("a replica in its place", lambda: whole.whole() and killed[0] not in whole.replicas(), 120)
    print(f"kill -9 of the {victim}: {REQUESTS} asked, {right} right, {len(cut)} streams cut and told, {took_s:.1f} s")


@pytest.mark.parametrize("route", ["chat", "messages"])
def test_a_stream_that_is_cut_ends_with_an_error(whole: RayCluster, route: str) -> None:
    async def run() -> None:
        async with AsyncOpenAI(**whole.client) as client:
            chat: Any = {"model": "counter", "messages": [{"role": "user", "content": "count 5:"}], "max_tokens": 4000}
            raw = await client.chat.completions.with_raw_response.create(**chat, stream=True, temperature=0)
            stream = raw.parse()
            assert [(await anext(stream)) for _ in range(3)]
            os.kill(whole.replicas()[raw.headers[REPLICA]], signal.SIGKILL)
            with pytest.raises(APIError, match="the replica that computed this answer was lost") as told:
                async for _ in stream:
                    pass
            assert told.value.code == "replica_lost"

    if route == "chat":
        asyncio.run(run())
        return
    body = {
        "model": "counter",
        "messages": [{"role": "user", "content": "count 6:"}],
        "max_tokens": 4000,
        "stream": True,
    }
    request = urllib.request.Request(
        f"{whole.url}/v1/messages", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        first = answer.readline()
        os.kill(whole.replicas()[answer.headers[REPLICA]], signal.SIGKILL)
        events = (first + answer.read()).decode().strip().split("\n\n")
    assert events[0].startswith("event: message_start")
    kind, data = events[-1].split("\n")
    assert kind == "event: error" and json.loads(data.removeprefix("data: "))["error"]["type"] == "overloaded_error"
    assert all(event.startswith("event: ") for event in events), "no event was cut"


def test_a_client_that_leaves_ends_its_request(whole: RayCluster) -> None:
    async def leave() -> str:
        async with AsyncOpenAI(**whole.client) as client:
            chat: Any = {"model": "counter", "messages": [{"role": "user", "content": "count 7:"}], "max_tokens": 4000}
            raw = await client.chat.completions.with_raw_response.create(**chat, stream=True, temperature=0)
            stream = raw.parse()
            await anext(stream)
            await stream.close()
            return str(raw.headers[REPLICA])

    replica = asyncio.run(leave())
    _, url = whole.servers()[whole.replicas()[replica]]

    def ended() -> bool:
        with urllib.request.urlopen(f"{url}/v1/homeserve/status", timeout=30) as answer:
            requests = json.load(answer)["requests"]
        return bool(requests["running"] == 0 and requests["aborted"] >= 1)

    wait_until("the request is aborted", ended)
