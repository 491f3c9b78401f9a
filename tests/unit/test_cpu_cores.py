"""How many threads a worker takes here. The rules are those of `budget.host`, and tested there."""

from __future__ import annotations

from backends.cpu import cores
from budget.host import read_host


def test_this_machine_gives_at_least_one_thread_and_a_name() -> None:
    assert 1 <= cores.thread_count() <= len(cores.allowed_cores())
    assert cores.cpu_name()


def test_what_is_announced_is_what_a_worker_takes() -> None:
    assert cores.thread_count() == read_host().cpu.usable
    assert cores.cpu_name() == read_host().cpu.name
