"""Which cards CUDA_VISIBLE_DEVICES and its like hide, as far as it can be known without asking a driver."""

from __future__ import annotations

from dataclasses import replace

import pytest

from budget.facts import Card
from budget.visible import Hidden, hidden

A, B, C = (
    Card("nvidia", f"GPU-{begin}-d72c-4106-c12f-20bd9faed9f6", "RTX 3090", "sm_86", pci=f"0000:0{n}:00.0")
    for n, begin in enumerate(("8932f937", "8932aaaa", "10c3e2f0"), start=1)
)
THREE = (A, B, C)
R, S = (Card("amd", f"GPU-{n:016x}", "RX 7900 XTX", "gfx1100", pci=f"0000:0{n}:00.0", order=3 - n) for n in (1, 2))
"""KFD lists the second one first."""


@pytest.mark.parametrize(
    ("value", "through"),
    [
        ("0,1,2", "ABC"),
        ("2", "C"),
        ("2,0", "AC"),
        ("0,2,-1,1", "AC"),  # NVIDIA's own example: what comes behind an invalid one does not count
        ("-1", ""),
        ("", ""),
        (" ", ""),
        ("3", ""),
        ("0,3,1", "A"),
        ("1,NoDevFiles,0", "B"),
        (A.id, "A"),
        (A.id.upper().replace("GPU-", "GPU-"), "A"),
        ("GPU-8932f", "A"),
        ("GPU-8932", ""),  # two cards begin so
        ("GPU-", ""),
        ("GPU-10c3e2f0,0", "AC"),
        ("0,GPU-8932a", "AB"),
        ("0" * 40, "A"),
        ("9" * 40, ""),
    ],
)
def test_what_cuda_lets_through(value: str, through: str) -> None:
    found = hidden(THREE, {"CUDA_VISIBLE_DEVICES": value})
    assert "".join(name for name, card in zip("ABC", THREE, strict=True) if card.id not in found) == through
    assert set(found.values()) <= {Hidden("CUDA_VISIBLE_DEVICES", value)}


def test_without_a_variable_nothing_is_hidden() -> None:
    assert hidden((*THREE, R, S), {"PATH": "/bin"}) == {}


def test_a_number_means_no_card_that_is_known_where_cuda_counts_by_speed() -> None:
    other = replace(B, name="RTX 2070", arch="sm_75")
    assert hidden((A, other), {"CUDA_VISIBLE_DEVICES": "0"}) == {}
    assert set(hidden((A, other), {"CUDA_VISIBLE_DEVICES": "0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"})) == {other.id}
    assert set(hidden((A, other), {"CUDA_VISIBLE_DEVICES": ""})) == {A.id, other.id}
    assert set(hidden((A, other), {"CUDA_VISIBLE_DEVICES": B.id})) == {A.id}, "a UUID is no number"


def test_slices_are_named_whole() -> None:
    parts = [Card("nvidia", f"MIG-GPU-8932f937/{n}/0", "slice", "sm_80") for n in (1, 2)]
    assert set(hidden(parts, {"CUDA_VISIBLE_DEVICES": parts[0].id})) == {parts[1].id}
    assert set(hidden(parts, {"CUDA_VISIBLE_DEVICES": "MIG-GPU-8932f937"})) == {part.id for part in parts}


@pytest.mark.parametrize(
    ("environ", "through", "variable"),
    [
        ({"ROCR_VISIBLE_DEVICES": "0"}, [S], "ROCR_VISIBLE_DEVICES"),
        ({"ROCR_VISIBLE_DEVICES": R.id}, [R], "ROCR_VISIBLE_DEVICES"),
        ({"HIP_VISIBLE_DEVICES": "1"}, [R], "HIP_VISIBLE_DEVICES"),
        ({"HIP_VISIBLE_DEVICES": R.id}, [], "HIP_VISIBLE_DEVICES"),  # it takes no UUIDs
        ({"CUDA_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "0"}, [S], "HIP_VISIBLE_DEVICES"),
        ({"HIP_VISIBLE_DEVICES": "-1"}, [], "HIP_VISIBLE_DEVICES"),
    ],
)
def test_what_rocm_lets_through(environ: dict[str, str], through: list[Card], variable: str) -> None:
    found = hidden((R, S), environ)
    assert [card for card in (R, S) if card.id not in found] == through
    assert {each.variable for each in found.values()} == {variable}


def test_hip_counts_what_rocr_leaves() -> None:
    assert set(hidden((R, S), {"ROCR_VISIBLE_DEVICES": R.id, "HIP_VISIBLE_DEVICES": "0"})) == {S.id}
    both = hidden((R, S), {"ROCR_VISIBLE_DEVICES": R.id, "HIP_VISIBLE_DEVICES": "1"})
    assert both == {
        S.id: Hidden("ROCR_VISIBLE_DEVICES", R.id),
        R.id: Hidden("HIP_VISIBLE_DEVICES", "1"),
    }


def test_an_order_that_kfd_does_not_tell_is_not_made_up() -> None:
    one, two = replace(R, order=None), replace(S, order=None)
    assert hidden((one, two), {"HIP_VISIBLE_DEVICES": "0"}) == {}
    assert set(hidden((one, two), {"HIP_VISIBLE_DEVICES": ""})) == {one.id, two.id}
    assert hidden((one,), {"HIP_VISIBLE_DEVICES": "0"}) == {}
    assert set(hidden((one,), {"HIP_VISIBLE_DEVICES": "1"})) == {one.id}


def test_each_vendor_has_its_own_variables() -> None:
    found = hidden((A, R), {"ROCR_VISIBLE_DEVICES": "", "CUDA_VISIBLE_DEVICES": "0"})
    assert set(found) == {R.id}
    assert set(hidden((A, R), {"CUDA_VISIBLE_DEVICES": ""})) == {A.id}, "what HIP makes of it depends on its version"
