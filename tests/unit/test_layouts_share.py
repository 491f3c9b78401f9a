"""What one rank runs, as a value."""

from __future__ import annotations

import pytest

from homeserve.layouts.share import Share


def test_a_rank_of_a_pipeline_has_its_own_layers() -> None:
    shares = [Share.pipeline(rank, [(0, 3), (3, 4), (4, 9)]) for rank in range(3)]
    assert [share.layers for share in shares] == [range(3), range(3, 4), range(4, 9)]
    assert [share.is_last for share in shares] == [False, False, True]
    assert not any(share.divides for share in shares)


def test_a_rank_of_the_tensor_layout_has_a_part_of_each() -> None:
    assert Share.tensor(1, [2, 1, 1]) == Share("tensor", 1, 3, weight_vector=(2, 1, 1))
    assert Share.tensor(1, (2, 1)).divides and Share.tensor(1, (2, 1)).is_last
    assert not Share.tensor(0, (5,)).divides


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: Share.tensor(2, (1, 1)), "rank 2 of 2 ranks"),
        (lambda: Share("tensor", 0, 3, weight_vector=(1, 1)), "a weight vector of 2 numbers for 3 ranks"),
        (lambda: Share("pipeline", 1, 2, range(4)), "rank 1 cannot have layers 0 to 3"),
        (lambda: Share("pipeline", 0, 2, range(0)), "rank 0 cannot have layers"),
        (lambda: Share("ring", 0, 1), "no layout 'ring'"),
    ],
)
def test_a_share_that_cannot_be_is_refused(wrong: object, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        wrong()  # type: ignore[operator]
