"""The host of models over residents that load at once: leases, who leaves while waiting, what fails, what is left."""

from __future__ import annotations

import asyncio
import gc
import logging
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import standing

from homeserve import model_host
from homeserve.errors import (
    BudgetError,
    DoesNotFit,
    Draining,
    ModelError,
    ModelInUse,
    ModelLoadFailed,
    ModelUnloaded,
    UnknownModel,
)
from homeserve.model_host import ModelHost
from homeserve.server.context import Loaded, LoadProgress, ModelInfo
from homeserve.settings import ModelEntry, Settings


class FakeResident:
    """Loads when `gate` is open. `broken` has errors by model id."""

    gate: asyncio.Event
    going: asyncio.Event
    """Open: `stop` ends at once."""
    broken: dict[str, Exception]
    made: list[FakeResident]

    def __init__(self, settings: Settings, *more: Any) -> None:
        self.settings = settings
        self.progress = LoadProgress("reading")
        self.facts, self.plan = object(), None
        self.loaded: Loaded | None = None
        self.stops = 0
        self.made.append(self)

    async def open(self) -> None:
        if error := self.broken.get(f"open {self.settings.model_id}"):
            raise error

    async def load(self, box: Any) -> Loaded:
        await self.gate.wait()
        name = self.settings.model_id or "alone"
        if error := self.broken.get(name):
            raise error
        engine = SimpleNamespace(gave_up=asyncio.Event(), failure=None, state="ready")
        nothing = SimpleNamespace(pid=None, regions=list)
        info = ModelInfo(name, "/m", "llama", "F16", 64)
        self.loaded = standing.loaded(
            settings=self.settings, model=info, engine=engine, fleet=nothing, templates=nothing, grammars=nothing
        )
        return self.loaded

    async def drain(self, timeout_s: float, hurry: asyncio.Event) -> None:
        pass

    async def stop(self) -> None:
        self.loaded = None
        self.stops += 1
        await self.going.wait()
        if error := self.broken.get(f"stop {self.settings.model_id}"):
            raise error

    def pids(self) -> list[int]:
        return [len(self.made)]


class OneAtATime:
    """A room for one model."""

    def __init__(self, *more: Any) -> None:
        pass

    def in_the_way(self, resident: Any, inside: Any, pids: Any) -> list[int]:
        return list(range(len(inside)))

    def both_fit(self, *more: Any) -> bool:
        return False

    def beside(self, inside: Any, pids: Any) -> object:
        return object()


@asynccontextmanager
async def hosting(monkeypatch: pytest.MonkeyPatch, *names: str, on_change: Any = None) -> AsyncIterator[ModelHost]:
    FakeResident.gate, FakeResident.broken, FakeResident.made = asyncio.Event(), {}, []
    FakeResident.going = asyncio.Event()
    FakeResident.gate.set()
    FakeResident.going.set()
    monkeypatch.setattr(model_host, "Resident", FakeResident)
    monkeypatch.setattr(model_host, "Room", OneAtATime)
    monkeypatch.setattr(model_host, "_give_back", lambda: None)
    nobody: Any = None
    settings = Settings(models=tuple(ModelEntry(name, f"{name}.gguf") for name in names))
    host = ModelHost(settings, {}, nobody, nobody, nobody, on_change or (lambda: None))
    await host.load_first(nobody)
    try:
        yield host
    finally:
        await host.stop()
        assert all(each.loaded is None for each in FakeResident.made), "everything is taken down"


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0)


def state(host: ModelHost, name: str) -> str:
    return next(each.state for each in host.tell() if each.id == name)


async def test_models_take_turns_and_what_is_out_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    changes: list[int] = []
    async with hosting(monkeypatch, "a", "b", on_change=lambda: changes.append(1)) as host:
        gone = []
        for name in "abab":
            async with host.lease(name) as loaded:
                assert loaded.model.id == name and [each.model.id for each in host.loaded] == [name]
                gone.append(weakref.ref(loaded))
            del loaded
        assert len(changes) == 7, "four came in, three went out"
        FakeResident.made.clear()
        gc.collect()
        assert [ref() is None for ref in gone] == [True, True, True, False], "nothing holds what is out"


async def test_who_leaves_while_waiting_is_forgotten_and_the_load_goes_on_for_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with hosting(monkeypatch, "a", "b") as host, AsyncExitStack() as stack:
        FakeResident.gate.clear()
        waiting = [asyncio.create_task(stack.enter_async_context(host.lease("b"))) for _ in range(2)]
        await until(lambda: state(host, "a") == "unloaded" and state(host, "b") == "loading")
        waiting[0].cancel()
        await asyncio.wait({waiting[0]})
        assert next(each.waiting for each in host.tell() if each.id == "b") == 1
        FakeResident.gate.set()
        assert (await waiting[1]).model.id == "b"
        assert [(each.running, each.waiting) for each in host.tell()] == [(0, 0), (1, 0)]


async def test_a_request_cancelled_in_the_moment_of_its_grant_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async with hosting(monkeypatch, "a", "b") as host:
        FakeResident.gate.clear()
        task = asyncio.create_task(host.lease("b").__aenter__())
        await until(lambda: state(host, "b") == "loading")
        answer = next(iter(host._tickets.values()))
        answer.add_done_callback(lambda _: task.cancel())
        FakeResident.gate.set()
        await asyncio.wait({task})
        assert task.cancelled() or task.result().model.id == "b"
        if task.cancelled():
            assert [each.running for each in host.tell()] == [0, 0]


async def test_each_failure_has_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async with hosting(monkeypatch, "a", "b") as host:
        with pytest.raises(UnknownModel, match="there is: a, b"):
            async with host.lease("nobody"):
                pass
        for where, error, kind in (
            ("open b", ModelError("no such file", fix="write it"), ModelLoadFailed),
            ("b", ModelError("its worker died"), ModelLoadFailed),
            ("b", BudgetError("9 of 8 MiB"), DoesNotFit),
        ):
            FakeResident.broken = {where: error}
            with pytest.raises(kind, match=error.message):
                async with host.lease("b"):
                    pass
            assert state(host, "b") == "failed"
        FakeResident.broken = {}
        async with host.lease("b") as loaded:
            assert loaded.model.id == "b"


async def test_a_model_in_use_is_unloaded_by_force_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async with hosting(monkeypatch, "a", "b") as host:
        async with host.lease("a"):
            with pytest.raises(ModelInUse, match="computes 1 request;"):
                host.begin_unload("a", force=False)
            assert host.begin_unload("a", force=True).state == "unloading"
        await until(lambda: state(host, "a") == "unloaded")
        FakeResident.gate.clear()
        waiting = asyncio.create_task(host.lease("b").__aenter__())
        await until(lambda: state(host, "b") == "loading" and len(FakeResident.made) == 2)
        with pytest.raises(ModelInUse, match="is being loaded"):
            host.begin_unload("b", force=False)
        host.begin_unload("b", force=True)
        with pytest.raises(ModelUnloaded):
            await waiting
        assert state(host, "b") == "unloaded"


async def test_of_several_one_gives_up_alone_and_one_alone_gives_up_for_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for names in (("a", "b"), ()):
        async with hosting(monkeypatch, *names) as host:
            failed = asyncio.create_task(host.wait_failed())
            engine: Any = host.loaded[0].engine
            engine.failure = ModelError("its worker died too often")
            engine.gave_up.set()
            if names:
                await until(lambda host=host: state(host, "a") == "failed")  # type: ignore[misc]
                assert not failed.done()
            else:
                assert (await failed).message == "its worker died too often"
            failed.cancel()


async def test_a_drain_sends_away_who_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    async with hosting(monkeypatch, "a", "b") as host:
        FakeResident.gate.clear()
        waiting = asyncio.create_task(host.lease("b").__aenter__())
        await until(lambda: state(host, "b") == "loading")
        await host.drain(1, asyncio.Event())
        with pytest.raises(Draining):
            await waiting


async def test_a_load_that_is_called_off_twice_is_told_once_and_the_next_one_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second one strikes while the first one's take-down is under way."""
    async with hosting(monkeypatch, "a", "b") as host:
        FakeResident.gate.clear()
        FakeResident.going.clear()
        host.begin_load("b")
        FakeResident.going.set()  # a goes
        await until(lambda: len(FakeResident.made) == 2 and state(host, "b") == "loading" and not host.loaded)
        for _ in range(8):
            await asyncio.sleep(0)
        FakeResident.going.clear()
        host.begin_unload("b", force=True)
        await until(lambda: FakeResident.made[-1].stops > 0)
        host.begin_unload("b", force=True)
        FakeResident.going.set()
        await until(lambda: state(host, "b") == "unloaded")
        FakeResident.gate.set()
        async with asyncio.timeout(5), host.lease("b") as loaded:
            assert loaded.model.id == "b"


@pytest.mark.parametrize("where", ["open b", "b"])
async def test_an_error_that_nobody_foresaw_fails_the_model_and_not_the_host(
    monkeypatch: pytest.MonkeyPatch, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with hosting(monkeypatch, "a", "b") as host:
        FakeResident.broken[where] = ValueError("a bug")
        with caplog.at_level(logging.CRITICAL), pytest.raises(ModelLoadFailed, match="error of the server's own"):
            async with asyncio.timeout(5), host.lease("b"):
                pass
        FakeResident.broken.clear()
        for name in "ab":
            async with asyncio.timeout(5), host.lease(name) as loaded:
                assert loaded.model.id == name


async def test_a_model_that_goes_with_an_error_is_out_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with hosting(monkeypatch, "a", "b") as host:
        FakeResident.broken["stop a"] = OSError("busy")
        with caplog.at_level(logging.CRITICAL):
            async with asyncio.timeout(5), host.lease("b"):
                assert state(host, "a") == "unloaded"
            FakeResident.broken.clear()
            async with asyncio.timeout(5), host.lease("a") as loaded:
                assert loaded.model.id == "a"


async def test_processes_of_a_model_count_until_they_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    async with hosting(monkeypatch, "a", "b") as host:
        FakeResident.going.clear()
        host.begin_unload("a", force=True)
        await until(lambda: FakeResident.made[0].stops > 0)
        assert host._pids()[1:] == FakeResident.made[0].pids()
        FakeResident.going.set()
        await until(lambda: state(host, "a") == "unloaded")
        assert len(host._pids()) == 1
