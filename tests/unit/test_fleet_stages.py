"""Progress of several ranks that load at the same time, told as one load."""

from __future__ import annotations

from homeserve.fleet.stages import LoadStages, Told


def told(stages: LoadStages, *steps: tuple[int, str, int, int]) -> list[Told]:
    return [each for step in steps for each in stages.progress(*step)]


def test_one_rank_is_told_as_it_says() -> None:
    stages = LoadStages(1)
    steps = [(0, "reading", 0, 0), (0, "weights", 5, 10), (0, "weights", 10, 10), (0, "kv", 3, 3)]
    assert told(stages, *steps) == [
        ("reading", 0, 0),
        ("reading", 0, 0),
        ("weights", 5, 10),
        ("weights", 10, 10),
        ("kv", 3, 3),
    ]
    assert list(stages.end()) == []


def test_a_stage_is_over_when_the_last_rank_is_done_with_it() -> None:
    stages = LoadStages(2)
    assert told(stages, (0, "weights", 4, 10)) == [("weights of 2 ranks", 4, 0)], "rank 1 has said nothing yet"
    assert told(stages, (1, "weights", 1, 20)) == [("weights of 2 ranks", 5, 30)]
    assert told(stages, (0, "weights", 10, 10), (0, "kv", 7, 7)) == 2 * [("weights of 2 ranks", 11, 30)]
    assert told(stages, (1, "weights", 20, 20)) == [("weights of 2 ranks", 30, 30), ("kv of 2 ranks", 7, 0)]
    assert told(stages, (1, "kv", 3, 6)) == [("kv of 2 ranks", 10, 13)]
    assert list(stages.end()) == [("kv of 2 ranks", 13, 13)]


def test_a_rank_without_a_stage_holds_nobody_up() -> None:
    stages = LoadStages(2)
    last = told(stages, (0, "weights", 10, 10), (1, "kv", 2, 2))[-2:]
    assert last == [("weights of 2 ranks", 10, 10), ("kv of 2 ranks", 2, 0)]
    assert list(stages.end()) == [("kv of 2 ranks", 2, 2)]
