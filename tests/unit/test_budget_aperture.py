"""Windows into cards: whether peers reach through them, and whether all process groups fit into them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from budget.aperture import aperture_of, check_groups
from budget.facts import MIB, Box, Card

FIRST = Card(
    "nvidia", "GPU-0", "RTX 3090", "sm_86", total_bytes=24576 * MIB, bar1_total_bytes=32768 * MIB, bar1_free_bytes=MIB
)
SECOND = replace(FIRST, id="GPU-1")


def answer(*cards: Card, p2p: str | None = None, environment: str | None = None) -> tuple[str, str]:
    found = aperture_of(cards[0], Box("test", None, None, cards, p2p=p2p, environment=environment))
    return found.p2p, found.why


def test_the_window_is_told_as_it_was_read() -> None:
    found = aperture_of(FIRST, Box("test", None, None, (FIRST, SECOND)))
    assert (found.total_bytes, found.free_bytes) == (32768 * MIB, MIB)
    nothing = aperture_of(
        replace(FIRST, bar1_total_bytes=None, bar1_free_bytes=None), Box("test", None, None, (FIRST,))
    )
    assert (nothing.total_bytes, nothing.free_bytes) == (None, None)


def test_one_card_has_no_peers() -> None:
    assert answer(FIRST) == ("no", "there is no other card")
    assert answer(FIRST, replace(SECOND, unified=True))[0] == "no", "an integrated GPU is no peer"


def test_only_a_transfer_on_record_is_yes() -> None:
    assert answer(FIRST, SECOND, p2p="works with patched driver")[0] == "yes"
    for text in (None, "PHB", "topo -p2p r: OK", "does not work", "works, then hangs", "transfer fails"):
        assert answer(FIRST, SECOND, p2p=text)[0] == "unknown", text


def test_a_driver_that_says_ok_alone_is_unknown() -> None:
    p2p, why = answer(replace(FIRST, peers={"GPU-1": "OK"}), SECOND)
    assert p2p == "unknown" and "seen to hang" in why


@pytest.mark.parametrize("code", ["CNS", "GNS", "TNS", "NS", "DR"])
def test_a_refusing_driver_is_no(code: str) -> None:
    for box in (
        (replace(FIRST, peers={"GPU-1": code}), SECOND),
        (FIRST, replace(SECOND, peers={"GPU-0": code})),
    ):
        p2p, why = answer(*box)
        assert p2p == "no" and code in why
    assert answer(FIRST, SECOND, p2p=f"topo -p2p r and w: {code} on every pair")[0] == "no"
    assert answer(FIRST, SECOND, p2p="PHB; P2P off")[0] == "no"


def test_other_generations_and_vendors_are_no_even_with_a_record() -> None:
    newer = replace(SECOND, arch="sm_120", name="RTX 5090")
    assert answer(FIRST, newer, p2p="works")[0] == "no"
    assert "sm_86 and sm_120" in answer(FIRST, newer)[1]
    assert answer(FIRST, replace(SECOND, vendor="amd"), p2p="works")[0] == "no"


def test_an_unknown_generation_is_not_another_one() -> None:
    assert answer(replace(FIRST, arch=None), SECOND)[0] == "unknown"


def test_a_window_smaller_than_the_memory_is_no() -> None:
    p2p, why = answer(FIRST, replace(SECOND, bar1_total_bytes=256 * MIB))
    assert p2p == "no" and "256 MiB" in why and "24576 MiB" in why
    amd = replace(FIRST, vendor="amd", visible_bytes=256 * MIB)
    assert answer(amd, replace(amd, id="GPU-1"))[0] == "no", "on AMD cards the visible memory is the window"
    assert answer(replace(FIRST, bar1_total_bytes=None), SECOND)[0] == "unknown"


def test_in_a_virtual_machine_the_window_proves_nothing() -> None:
    small = replace(FIRST, bar1_total_bytes=256 * MIB), replace(SECOND, bar1_total_bytes=256 * MIB)
    assert answer(*small, environment="vm")[0] == "unknown"
    assert answer(FIRST, SECOND, environment="vm")[0] == "unknown"
    assert answer(FIRST, SECOND, environment="vm", p2p="topo -p2p r: still CNS")[0] == "no"


def test_of_several_peers_the_best_answer_counts() -> None:
    newer = replace(SECOND, id="GPU-2", arch="sm_120", name="RTX 5090")
    assert answer(FIRST, newer, SECOND)[0] == "unknown"
    assert answer(newer, FIRST, SECOND)[0] == "no"


# ------------------------------------------------------------------------------------------------------ process groups


def test_four_groups_of_96_do_not_fit_into_216() -> None:
    refused = check_groups([96 * MIB] * 4, 216 * MIB)
    assert refused == (
        "4 groups x 96 MiB = 384 MiB of peer window against 216 MiB usable: 168 MiB too much; 54 MiB a group would fit"
    )


def test_96_48_32_24_fit_into_216() -> None:
    assert check_groups([96 * MIB, 48 * MIB, 32 * MIB, 24 * MIB], 216 * MIB) is None
    refused = check_groups([96 * MIB, 48 * MIB, 32 * MIB, 24 * MIB], 199 * MIB)
    assert refused is not None and refused.startswith("96 + 48 + 32 + 24 = 200 MiB of peer window against 199 MiB")


def test_both_layouts_alive_double_the_groups() -> None:
    one = [48 * MIB, 48 * MIB]
    assert check_groups(one, 216 * MIB - 24 * MIB) is None
    assert check_groups(one * 2, 216 * MIB - 25 * MIB) is not None


def test_no_groups_need_nothing_and_one_is_counted_as_one() -> None:
    assert check_groups([], 0) is None
    refused = check_groups([3 * MIB // 2], MIB)
    assert refused is not None and refused.startswith("1 group x 1.50 MiB = 1.50 MiB of peer window against 1 MiB")


def test_a_negative_window_is_a_fault_of_the_caller() -> None:
    for groups, usable in (([-1], 1), ([1], -1)):
        with pytest.raises(ValueError, match="negative"):
            check_groups(groups, usable)


@given(st.lists(st.integers(0, 1 << 34), max_size=8), st.integers(0, 1 << 36))
@settings(max_examples=40)
def test_groups_are_refused_exactly_when_their_sum_is_too_large(groups: list[int], usable: int) -> None:
    refused = check_groups(groups, usable)
    assert (refused is None) == (sum(groups) <= usable)
    if refused is not None:
        even = usable // len(groups) // MIB * MIB
        assert check_groups([even] * len(groups), usable) is None, "what it says would fit, fits"
