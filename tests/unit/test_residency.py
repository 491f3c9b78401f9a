"""Which models are in: every rule of the state machine, and thousands of random traces in a world of sizes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from homeserve.residency import (
    Act,
    CancelLoad,
    Grant,
    Load,
    Look,
    ModelState,
    Open,
    Refuse,
    Residency,
    Unload,
    Why,
)
from homeserve.server.context import MODEL_STATES

WAIT_S = 10.0


@dataclass
class World:
    """Executes acts in no time, over models of sizes and one budget. What takes time is done by `open`, `look`,
    `finish` and `out`; with `at_once` all of it is."""

    sizes: dict[str, int]
    budget: int
    ttl_s: dict[str, float] = field(default_factory=dict)
    waiting_max: int = 100
    at_once: bool = True
    broken: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        ttl = {key: self.ttl_s.get(key, 0.0) for key in self.sizes}
        self.now = 0.0
        self.machine = Residency(ttl, wait_s=WAIT_S, waiting_max=self.waiting_max)
        self.inside: set[str] = set()
        self.held: dict[int, str] = {}
        self.waits: dict[int, tuple[str, float]] = {}
        self.refused: dict[int, Refuse] = {}
        self.log: list[Act] = []
        self.todo: list[Act] = []
        self.serial = 0

    # what a client does

    def ask(self, key: str) -> int:
        self.serial += 1
        self.waits[self.serial] = (key, self.now)
        self.do(self.machine.ask(key, self.serial, self.now))
        return self.serial

    def end(self, ticket: int) -> None:
        self.do(self.machine.release(self.held.pop(ticket), self.now))

    def leave(self, ticket: int) -> None:
        key, _ = self.waits.pop(ticket)
        self.do(self.machine.leave(key, ticket, self.now))

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.do(self.machine.tick(self.now))

    # what the host does

    def do(self, acts: list[Act]) -> None:
        for act in acts:
            self.log.append(act)
            if isinstance(act, Grant):
                assert self.waits.pop(act.ticket)[0] == act.key and act.key in self.inside
                self.held[act.ticket] = act.key
            elif isinstance(act, Refuse):
                del self.waits[act.ticket]
                self.refused[act.ticket] = act
            elif isinstance(act, CancelLoad):
                self.cancel(act.key)
            else:
                if isinstance(act, Unload) and not act.cut:
                    assert act.key not in self.held.values(), "a model with a lease is not unloaded"
                self.todo.append(act)
        while self.at_once and self.todo:
            self.work(0)

    def cancel(self, key: str) -> None:
        loading = [act for act in self.todo if isinstance(act, Load) and act.key == key]
        self.todo = [act for act in self.todo if not (isinstance(act, Open | Look | Load) and act.key == key)]
        if loading:
            self.do(self.machine.load_failed(key, "", self.now, why=Why.UNLOADED))

    def work(self, index: int) -> None:
        """One thing that takes time ends."""
        act = self.todo.pop(index)
        if isinstance(act, Open):
            failed = act.key in self.broken
            event = self.machine.load_failed(act.key, "broken", self.now) if failed else None
            self.do(self.machine.opened(act.key, self.now) if event is None else event)
        elif isinstance(act, Look):
            self.do(self.machine.looked(act.look, self.leaving(act), "too large", self.now))
        elif isinstance(act, Load):
            self.inside.add(act.key)
            assert self.total() <= self.budget, "never over budget"
            self.do(self.machine.loaded(act.key, self.now))
        elif isinstance(act, Unload):
            for ticket in [ticket for ticket, key in self.held.items() if key == act.key]:
                self.end(ticket)
            self.inside.discard(act.key)
            self.do(self.machine.unloaded(act.key, self.now))

    def leaving(self, act: Look) -> tuple[str, ...] | None:
        if act.ahead:
            beside = self.sizes[act.key] + sum(self.sizes[key] for key in act.others)
            gone = sum(self.sizes[key] for key in act.leaving if key in act.others)
            return () if max(beside, beside - gone + self.sizes[act.ahead]) <= self.budget else None
        for count in range(len(act.others) + 1):
            if self.fits(act, act.others[:count]):
                found = list(act.others[:count])
                for key in reversed(found[:-1]):
                    if self.fits(act, [each for each in found if each != key]):
                        found.remove(key)
                return tuple(found)
        return None

    def fits(self, act: Look, leaving: Sequence[str]) -> bool:
        stay = sum(self.sizes[key] for key in act.others if key not in leaving)
        return self.sizes[act.key] + stay <= self.budget

    def total(self) -> int:
        return sum(self.sizes[key] for key in self.inside)

    def state(self, key: str) -> ModelState:
        return self.machine.entries[key].state


def kinds(acts: list[Act]) -> list[str]:
    return [type(act).__name__ for act in acts]


def test_a_model_comes_in_with_its_first_request_and_is_loaded_once_for_all() -> None:
    world = World({"a": 1, "b": 1}, 2, at_once=False)
    tickets = [world.ask("a") for _ in range(3)]
    assert kinds(world.log) == ["Open"]
    while world.todo:
        world.work(0)
    assert kinds(world.log) == ["Open", "Look", "Load", "Grant", "Grant", "Grant"]
    assert list(world.held) == tickets
    world.ask("a")
    assert kinds(world.log)[-1] == "Grant" and world.state("b") is ModelState.UNLOADED


def test_models_that_fit_stay_beside_one_another() -> None:
    world = World({"a": 1, "b": 1, "c": 1}, 3)
    for key in "abc":
        world.end(world.ask(key))
        world.pass_time(1)
    assert world.inside == {"a", "b", "c"} and world.machine.by_use() == ["c", "b", "a"]


def test_the_one_used_longest_ago_makes_room_and_no_more_than_are_needed() -> None:
    world = World({"a": 1, "b": 1, "c": 1, "d": 2}, 3)
    for key in "abca":
        world.pass_time(1)
        world.end(world.ask(key))
    world.pass_time(1)
    world.ask("d")
    assert world.inside == {"a", "d"}, "b and c, in that order"
    assert [act.key for act in world.log if isinstance(act, Unload)] == ["b", "c"]


def test_what_does_not_fit_even_alone_is_refused_and_nobody_leaves() -> None:
    world = World({"a": 1, "huge": 9}, 3)
    world.end(world.ask("a"))
    refused = world.ask("huge")
    assert world.refused[refused] == Refuse(refused, "huge", Why.DOES_NOT_FIT, "too large")
    assert world.inside == {"a"} and not any(isinstance(act, Unload) for act in world.log)
    assert (world.state("huge"), world.machine.entries["huge"].reason) == (ModelState.FAILED, "too large")
    world.ask("huge")
    assert len([act for act in world.log if isinstance(act, Look) and act.key == "huge"]) == 2, (
        "asked again, tried again"
    )


def test_a_busy_one_is_waited_for_and_gets_nothing_new_ahead_of_who_waits() -> None:
    world = World({"a": 2, "b": 2}, 3)
    first = world.ask("a")
    waits, late = world.ask("b"), world.ask("a")
    assert set(world.held) == {first} and set(world.waits) == {waits, late}
    world.end(first)
    assert set(world.held) == {waits} and world.inside == {"b"}
    world.end(waits)
    assert set(world.held) == {late} and world.inside == {"a"}


def test_who_has_waited_long_enough_is_refused_and_the_busy_one_is_open_again() -> None:
    world = World({"a": 2, "b": 2}, 3)
    world.ask("a")
    waits = world.ask("b")
    world.pass_time(WAIT_S / 2)
    late = world.ask("a")
    assert world.machine.next_due() == WAIT_S
    world.pass_time(WAIT_S / 2)
    assert world.refused[waits] == Refuse(waits, "b", Why.BUSY, others=("a",))
    assert late in world.held, "nobody waits any more whom it would be ahead of"
    assert world.state("b") is ModelState.UNLOADED


def test_a_model_that_comes_in_is_not_late() -> None:
    world = World({"a": 1}, 3, at_once=False)
    ticket = world.ask("a")
    for _ in range(3):
        world.pass_time(10 * WAIT_S)
        assert ticket in world.waits and world.machine.next_due() is None
        world.work(0)
    assert ticket in world.held


def test_one_too_many_is_refused() -> None:
    world = World({"a": 1}, 3, waiting_max=2, at_once=False)
    tickets = [world.ask("a") for _ in range(3)]
    assert world.refused[tickets[2]].why is Why.FULL and world.machine.waiting == world.machine.waiting_for("a") == 2


@pytest.mark.parametrize("done", range(3))
def test_when_all_who_wait_have_left_nothing_comes_in_but_what_is_loading(done: int) -> None:
    world = World({"a": 1}, 3, at_once=False)
    ticket = world.ask("a")
    for _ in range(done):
        world.work(0)
    world.leave(ticket)
    loading = done == 2
    assert (world.state("a") is ModelState.LOADING) is loading
    assert (world.log[-1] == CancelLoad("a")) is not loading
    while world.todo:
        world.work(0)
    assert (world.inside == {"a"}) is loading


def test_a_load_that_fails_tells_all_who_wait_and_the_next_one_tries_again() -> None:
    world = World({"a": 1, "b": 1}, 3, broken={"b"})
    world.ask("a")
    ticket = world.ask("b")
    assert world.refused[ticket] == Refuse(ticket, "b", Why.FAILED, "broken")
    assert world.machine.entries["b"].reason == "broken" and world.inside == {"a"}
    assert not world.todo, "nobody tries again by itself"
    world.broken.clear()
    assert world.ask("b") in world.held and world.machine.entries["b"].reason == ""


def test_a_model_that_gives_up_is_unloaded_and_has_failed() -> None:
    world = World({"a": 1, "b": 1}, 3)
    ticket, other = world.ask("a"), world.ask("b")
    world.do(world.machine.gave_up("a", "its worker died too often", world.now))
    assert (world.state("a"), world.machine.entries["a"].reason) == (ModelState.FAILED, "its worker died too often")
    assert ticket not in world.held and other in world.held
    assert world.ask("a") in world.held, "the next request tries again"


def test_idle_for_long_enough_is_out() -> None:
    world = World({"a": 1, "b": 1}, 3, ttl_s={"a": 5})
    ticket = world.ask("a")
    world.end(world.ask("b"))
    world.pass_time(100)
    assert world.inside == {"a", "b"} and world.machine.next_due() is None, "busy is not idle"
    world.end(ticket)
    assert world.machine.next_due() == world.now + 5
    world.pass_time(4)
    world.end(world.ask("a"))
    world.pass_time(4)
    assert world.inside == {"a", "b"}
    world.pass_time(1)
    assert world.inside == {"b"}


def test_by_hand() -> None:
    world = World({"a": 1}, 3, at_once=False)
    world.do(world.machine.load("a", world.now))
    assert world.state("a") is ModelState.LOADING and world.machine.in_use("a")
    world.do(world.machine.unload("a", world.now, force=False))
    assert world.state("a") is ModelState.LOADING, "without force a load goes on"
    world.do(world.machine.unload("a", world.now, force=True))
    assert world.state("a") is ModelState.UNLOADED and not world.todo
    world.at_once = True
    world.do(world.machine.load("a", world.now))
    ticket = world.ask("a")
    world.do(world.machine.unload("a", world.now, force=False))
    assert world.state("a") is ModelState.LOADED and world.machine.in_use("a")
    world.do(world.machine.unload("a", world.now, force=True))
    assert world.log[-1] == Unload("a", cut=True) and ticket not in world.held
    assert world.state("a") is ModelState.UNLOADED


def test_a_load_that_is_ended_by_force_tells_who_waits() -> None:
    world = World({"a": 1}, 3, at_once=False)
    ticket = world.ask("a")
    world.work(0)
    world.work(0)
    world.do(world.machine.unload("a", world.now, force=True))
    assert world.refused[ticket].why is Why.UNLOADED and world.state("a") is ModelState.UNLOADED


def test_a_drain_refuses_who_waits_and_ends_what_loads() -> None:
    world = World({"a": 1, "b": 3}, 3, at_once=False)
    first, second = world.ask("a"), world.ask("b")
    while not any(isinstance(act, Load) for act in world.todo):
        world.work(0)
    world.do(world.machine.drain(world.now))
    assert {world.refused[first].why, world.refused[second].why} == {Why.DRAINING}
    assert not any(isinstance(act, Load) for act in world.todo)
    assert world.refused[world.ask("a")].why is Why.DRAINING


def test_who_names_none_means_the_one_used_last_else_the_first() -> None:
    world = World({"a": 1, "b": 1}, 3)
    assert world.machine.used_last() == "a"
    world.end(world.ask("b"))
    world.pass_time(1)
    world.do(world.machine.unload("b", world.now, force=False))
    assert world.machine.used_last() == "b", "also when it is out"


def test_a_second_look_when_somebody_else_has_left() -> None:
    """Who waits for a busy one need not, when another one leaves by itself."""
    world = World({"a": 1, "b": 1, "c": 2}, 3, ttl_s={"b": 5})
    busy = world.ask("a")
    ticket = world.ask("b")
    waits = world.ask("c")
    assert waits in world.waits
    world.end(ticket)
    assert waits in world.held, "b was idle then, and it was enough"
    assert busy in world.held


def test_who_fits_overtakes_one_that_waits_for_a_busy_model() -> None:
    world = World({"a": 3, "b": 3, "c": 1}, 5)
    busy, waits, small = world.ask("a"), world.ask("b"), world.ask("c")
    assert small in world.held and waits in world.waits, "beside a it fits, and beside b too"
    assert world.inside == {"a", "c"}
    world.end(busy)
    assert waits in world.held and world.inside == {"b", "c"}


def test_one_at_a_time_overtakes_and_only_while_there_is_room() -> None:
    world = World({"a": 3, "b": 3, "c": 1, "d": 2}, 5)
    busy = world.ask("a")
    waits = world.ask("b")
    large, small = world.ask("d"), world.ask("c")
    assert waits in world.waits and world.state("b") is ModelState.LOADING
    assert large in world.held, "beside a it fits, and beside b too"
    assert small in world.waits, "with it nothing fits beside a"
    world.end(busy)
    assert waits in world.held and world.inside == {"b", "d"}


def test_overtaking_leaves_the_one_that_waits_its_room() -> None:
    world = World({"a": 2, "b": 4, "c": 2}, 5)
    busy, waits, next_one = world.ask("a"), world.ask("b"), world.ask("c")
    assert next_one in world.waits, "beside a there is room, and then there would be none for b"
    world.end(busy)
    assert waits in world.held and next_one in world.waits
    world.end(waits)
    assert next_one in world.held


@pytest.mark.parametrize("seed", range(60))
def test_random_traces(seed: int) -> None:
    """Leases are never unloaded and the budget is never passed (asserted as it goes); at the end, when clients have
    gone home, everybody was answered, and nobody waited longer than loads and `wait_s` explain."""
    draw = random.Random(seed)
    sizes = {key: draw.randint(1, 4) for key in "abcdef"[: draw.randint(2, 6)]} | {"huge": 99}
    world = World(sizes, draw.randint(4, 8), at_once=False, waiting_max=draw.choice((2, 5, 100)))
    world.ttl_s = {}
    for entry in world.machine.entries.values():
        entry.ttl_s = draw.choice((0.0, 0.0, 3.0))
    for _ in range(300):
        step(world, draw)
        if draw.random() < 0.1:
            world.broken = {key for key in sizes if draw.random() < 0.2}
    for _ in range(400):
        if not (world.waits or world.todo or world.held):
            break
        if world.todo:
            world.work(draw.randrange(len(world.todo)))
        elif world.held:
            world.end(draw.choice(sorted(world.held)))
        else:
            world.pass_time(WAIT_S)
    assert not world.waits and not world.held and not world.todo, "everybody was answered"
    assert all(entry.leases == 0 for entry in world.machine.entries.values())
    assert all(refused.why is Why.DOES_NOT_FIT for refused in world.refused.values() if refused.reason == "too large")
    assert {key for key in sizes if world.state(key) is ModelState.LOADED} == world.inside


def step(world: World, draw: random.Random) -> None:
    roll, keys = draw.random(), sorted(world.sizes)
    if roll < 0.30:
        world.ask(draw.choice(keys))
    elif roll < 0.50 and world.held:
        world.end(draw.choice(sorted(world.held)))
    elif roll < 0.80 and world.todo:
        world.work(draw.randrange(len(world.todo)))
    elif roll < 0.86 and world.waits:
        world.leave(draw.choice(sorted(world.waits)))
    elif roll < 0.94:
        world.pass_time(draw.random() * 4)
    else:
        by_hand(world, draw, draw.choice(keys))


def by_hand(world: World, draw: random.Random, key: str) -> None:
    roll = draw.random()
    if roll < 0.4:
        world.do(world.machine.load(key, world.now))
    elif roll < 0.8:
        world.do(world.machine.unload(key, world.now, force=draw.random() < 0.3))
    elif key in world.inside:
        world.do(world.machine.gave_up(key, "gave up", world.now))


@pytest.mark.parametrize("seed", range(20))
def test_nobody_starves_while_others_keep_on_asking(seed: int) -> None:
    """Two models that do not fit together; one of them always has a request running. Whoever waits for the other gets
    in when those that were running have ended, whatever came later."""
    draw = random.Random(seed)
    world = World({"a": 2, "b": 2}, 3)
    running = [world.ask("a") for _ in range(draw.randint(1, 4))]
    waits = world.ask("b")
    for ticket in running:
        world.ask("a")
        world.end(ticket)
    assert waits in world.held


def test_the_states_are_those_that_the_server_tells() -> None:
    assert tuple(ModelState) == MODEL_STATES
