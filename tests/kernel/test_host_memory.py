"""Host memory by the library that has nothing else: digests, mappings, teams of threads."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import closing
from types import SimpleNamespace

import numpy as np
import pytest

from backends.digest import BLOCK
from backends.digest import digest as of_numpy
from backends.host import library
from backends.host.digest import digest, digest_at
from backends.host.memory import HUGE_PAGE, Mapping, address_of
from backends.host.team import Team

DATA = np.random.default_rng(11).integers(0, 256, 1 << 20, dtype=np.uint8)
LENGTHS = (0, 1, 63, 64, 65, BLOCK - 1, BLOCK, 4 * BLOCK + 3, 131072, 1_000_001)


@pytest.fixture(params=[1, 2, 3])
def team(request: pytest.FixtureRequest) -> Iterator[Team]:
    with closing(Team(library.load(), request.param)) as made:
        yield made


@pytest.mark.parametrize("length", LENGTHS)
def test_the_digest_is_that_of_numpy_however_many_threads(team: Team, length: int) -> None:
    data = DATA[5 : 5 + length]
    wanted = of_numpy(data.tobytes())
    assert digest(memoryview(data), team) == wanted == digest(memoryview(data.tobytes()), team)
    assert digest_at(data.ctypes.data, length, team) == wanted


def test_a_view_of_more_than_bytes_is_digested_as_its_bytes(team: Team) -> None:
    floats = np.arange(1000, dtype=np.float32)
    assert digest(memoryview(floats), team) == of_numpy(floats.tobytes())


def test_bytes_that_do_not_lie_together_have_no_address() -> None:
    with pytest.raises(BufferError, match="not C-contiguous"):
        address_of(memoryview(DATA[:100])[::2])
    assert address_of(memoryview(b"")) == 0


def test_a_mapping_is_zeros_held_on_demand_and_zeros_again_when_it_was_given_back(team: Team) -> None:
    size = 2 * HUGE_PAGE + 5
    mapping = Mapping(team.library, size, "weights image", "two and a bit")
    told: list[tuple[str, int, int]] = []
    mapping.commit(team.handle, lambda *progress: told.append(progress))
    assert told == [("weights image", size, size)]
    bytes_ = np.frombuffer((ctypes.c_uint8 * size).from_address(mapping.address), np.uint8)
    assert not bytes_.any()
    bytes_[:] = np.resize(DATA, size)
    assert digest_at(mapping.address, size, team) == of_numpy(bytes_.tobytes())
    mapping.release()
    assert not bytes_.any()
    del bytes_
    mapping.close()
    mapping.close()


def test_a_team_that_cannot_be_started_says_so_and_one_is_closed_once(team: Team) -> None:
    def create(threads: int, cores: object, count: int, spin: int, error: object) -> int:
        error._obj.value = -4  # type: ignore[attr-defined]  what a byref is of
        return 0

    with pytest.raises(OSError, match="9 threads could not be started: no thread could be started"):
        Team(SimpleNamespace(hs_team_create=create), 9)  # type: ignore[arg-type]
    team.close()
    team.close()
    assert team.handle == 0
