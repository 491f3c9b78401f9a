"""The memory for what ranks exchange, as the engine makes it."""

from __future__ import annotations

import os

import pytest

from backends.acts import nameless
from homeserve.fleet import acts
from homeserve.fleet.acts import ActsMemory
from homeserve.fleet.spec import ActSizes

SIZES = ActSizes(piece_floats=16, message_floats=16, token_floats=4, depth=2)


def open_descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("unified", [False, True])
def test_each_descriptor_is_closed_once(unified: bool) -> None:
    before = open_descriptors()
    memory = ActsMemory(2, SIZES, unified=unified)
    assert len(open_descriptors() - before) == len(memory.fds) == (4 if unified else 1)
    memory.close()
    memory.close()
    assert open_descriptors() == before


@pytest.mark.parametrize("failing", ["homeserve-weights", "homeserve-kv", "homeserve-state"])
def test_where_the_system_has_no_more_nothing_is_left_open(failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def make(label: str) -> int:
        if label == failing:
            raise OSError(24, "too many open files")
        return nameless(label)

    monkeypatch.setattr(acts, "nameless", make)
    before = open_descriptors()
    with pytest.raises(OSError, match="too many"):
        ActsMemory(2, SIZES, unified=True)
    assert open_descriptors() == before


def test_a_copy_of_the_weights_and_the_memory_of_flips_are_handed_on_too() -> None:
    memory = ActsMemory(2, SIZES, copy=True, transit_bytes=1 << 20)
    assert min(memory.weights_fd, memory.transit_fd) >= 0 and memory.kv_fd == memory.state_fd == -1
    assert os.fstat(memory.transit_fd).st_size == 1 << 20
    memory.close()


def test_the_memory_of_flips_takes_none_before_it_is_written() -> None:
    memory = ActsMemory(2, SIZES, transit_bytes=1 << 20)
    try:
        assert os.fstat(memory.transit_fd).st_blocks == 0
    finally:
        memory.close()
