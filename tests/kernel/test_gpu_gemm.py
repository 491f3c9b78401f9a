"""Whole models whose linear layers take the forms that were measured ahead, on an emulated card with a clock of the
test's and a library that is NumPy: what is chosen, what is launched then, what is held, and that answers stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simt_rig as rig
from emulated_device import EmulatedDevice
from gpu_program_rig import TINY, Floats, Sides, worst
from gpu_tuned import ClockedDevice, Greedy, HostGemm, Price, price

from backends.base import Linear
from backends.gpu import library_gemm, trial
from backends.gpu.backend import GpuBackend
from backends.gpu.device import Device
from backends.gpu.entries import Entries
from backends.gpu.library_gemm import LINE, Gemm, GemmRefused, Product
from backends.gpu.tuning import Tuning

TOKENS = [(7 * at * at + 31 * at + 5) % 61 for at in range(96)]
ROWS = 40
"""Of a batch: a library is measured at 32."""
NEAR = 8e-3
"""As of packed matrices in test_gpu_program.py."""

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(rig.compiler() is None, reason="no C++ compiler"),
]


def refused(device: Device) -> Gemm:
    raise GemmRefused("there is no such library", fix="install it")


@dataclass
class Opened:
    """`told`: what users are."""

    sides: Sides
    device: ClockedDevice
    told: list[str]

    def prompt(self, rows: int = ROWS) -> tuple[Floats, Floats]:
        return self.sides.run([(0, 0, TOKENS[:rows])])

    def launched(self, rows: int) -> set[str]:
        """Symbols of linear layers that so many rows take, and "product"."""
        before, made = dict(self.device.counts), self.device.made
        self.prompt(rows)
        found = {name for name, count in self.device.counts.items() if count > before.get(name, 0)}
        return {name for name in found if name.startswith("linear")} | (
            {"product"} if self.device.made > made else set()
        )


Opener = Callable[..., Opened]


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Opener]:
    monkeypatch.setattr(trial, "TRIES", 1)
    monkeypatch.setattr(trial, "MATRICES_MOST", 2)
    every: list[Sides] = []

    def opener(
        price: Price, name: str = "qwen3", quant: str = "Q8_0", arch: str = "sm_86", finder: Any = None, **options: Any
    ) -> Opened:
        told: list[str] = []
        device = ClockedDevice(arch, price=price, capacity=options.pop("capacity", 1 << 32))
        sides = Sides(TINY / f"{name}.f32.gguf", quant=quant, arch=arch, rows=ROWS)
        sides.program.close()
        sides.card.close()
        entries = Entries(tmp_path, told.append)
        sides.device = device
        sides.card = GpuBackend(device, tuning=Tuning(device, entries, told.append, finder, **options))
        try:
            sides.program = sides.bind(sides.card)
        except BaseException:
            assert device.held == 0
            raise
        every.append(sides)
        return Opened(sides, device, told)

    yield opener
    for each in every:
        each.close()


# ----------------------------------------------------------------------------------------------------------------- few


@pytest.mark.parametrize(("few_most", "border"), [(0, 2), (4, 4), (16, 16)])
def test_the_border_of_few_rows_is_where_it_was_measured(opened: Opener, few_most: int, border: int) -> None:
    both = opened(price(few_most=few_most))
    few, many = both.launched(border), both.launched(border + 1)
    assert few == {f"linear_few_q8_0_r{min(border, 8)}"}
    assert many == {"linear_many_q8_0_r32"}
    assert worst(both.prompt()) < NEAR and not both.told


def test_sides_that_nobody_can_tell_apart_leave_the_border_where_it_is(opened: Opener) -> None:
    both = opened(lambda work: 1e-6)
    assert both.launched(8) == {"linear_few_q8_0_r8"} and both.launched(9) == {"linear_many_q8_0_r32"}


def test_what_was_measured_once_is_not_measured_again(opened: Opener, tmp_path: Path) -> None:
    first = opened(price(few_most=16))
    assert first.device.measured
    second = opened(price(few_most=0))
    assert second.device.measured == 0 and second.launched(16) == {"linear_few_q8_0_r8"}
    for path in tmp_path.iterdir():
        path.write_text("{")
    third = opened(price(few_most=0))
    assert third.device.measured == first.device.measured and third.launched(3) == {"linear_many_q8_0_r32"}


def test_another_cards_entries_are_foreign(opened: Opener) -> None:
    opened(price(few_most=16))
    assert opened(price(few_most=16), arch="gfx1103").device.measured


def test_measuring_ends_with_its_time(opened: Opener) -> None:
    both = opened(lambda work: 10.0, finder=HostGemm)
    assert both.device.measured == 2 and not both.device.made, "what the first class would take is known after a run"
    assert both.launched(8) == {"linear_few_q8_0_r8"}


def test_measuring_leaves_nothing_but_the_choice(opened: Opener) -> None:
    both = opened(price())
    plain = EmulatedDevice()
    backend = GpuBackend(plain)
    program = both.sides.bind(backend)
    assert dict(program.memory_lines()) == dict(both.sides.program.memory_lines())
    batch = both.sides.batch([(0, 0, TOKENS[:12])])
    assert np.array_equal(program.run(batch), both.sides.program.run(batch))
    program.close()
    backend.close()


# ------------------------------------------------------------------------------------------------------------- library


@pytest.mark.parametrize(
    ("name", "quant", "arch"), [("qwen3", "Q8_0", "sm_86"), ("qwen2", "F16", "gfx1103"), ("qwen3", "BF16", "sm_86")]
)
def test_a_library_that_leads_multiplies_and_answers_stay(opened: Opener, name: str, quant: str, arch: str) -> None:
    both = opened(price(library=0.1), name, quant, arch, finder=HostGemm)
    got, wanted = both.prompt()
    assert worst((got, wanted)) < NEAR
    best = np.sort(wanted, axis=1)
    clear = best[:, -1] - best[:, -2] > 2 * NEAR
    assert clear.any() and np.array_equal(got.argmax(axis=1)[clear], wanted.argmax(axis=1)[clear])
    assert "product" in both.launched(32) and "product" not in both.launched(31)
    assert not any("linear_many" in symbol for symbol in both.launched(ROWS))
    unpacked = any(count for symbol, count in both.device.counts.items() if symbol.startswith("dequantize_"))
    assert unpacked == (quant != "F16") and not both.told


def test_products_are_made_between_replays(opened: Opener) -> None:
    both = opened(price(library=0.1), finder=HostGemm)
    before, each = both.device.replays, []
    for _ in range(3):
        made = both.device.made
        assert worst(both.prompt()) < NEAR
        each.append(both.device.made - made)
    assert each[0] == each[1] == each[2] > 0
    assert both.device.replays - before == 2 * each[0], "what lies between two products is a recording of its own"


def test_a_matrix_larger_than_the_slab_goes_piece_by_piece(opened: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library_gemm, "SLAB_BYTES", 2 * 128 * 24)
    both = opened(price(library=0.1), finder=HostGemm)
    assert worst(both.prompt()) < NEAR
    matrices = sum(len(op.parts) for op in both.sides.bound.ops if isinstance(op, Linear))
    made = both.device.made
    both.prompt()
    assert both.device.made - made > 2 * matrices


def test_a_library_that_does_not_lead_is_left_and_takes_no_memory(opened: Opener) -> None:
    both = opened(price(library=1.0), finder=HostGemm)
    assert both.launched(ROWS) == {"linear_many_q8_0_r32"}
    assert LINE not in both.sides.program.memory_lines() and not both.told


def test_the_slab_is_in_the_ledger_where_it_is_held(opened: Opener) -> None:
    both = opened(price(library=0.1), finder=HostGemm)
    lines = both.sides.program.memory_lines()
    assert lines[LINE] == library_gemm.SLAB_BYTES
    assert sum(lines[line] for line in ("weights", "kv", "workspace", LINE)) <= both.device.held


@pytest.mark.parametrize("leads", [True, False])
def test_what_a_library_takes_for_itself_is_in_the_ledger(opened: Opener, leads: bool) -> None:
    both = opened(price(library=0.1 if leads else 1.0), finder=Greedy)
    slab = library_gemm.SLAB_BYTES if leads else 0
    assert both.sides.program.memory_lines()[LINE] == Greedy.TAKES + slab
    both.device.give(Greedy.TAKES)


def test_the_library_is_compared_also_where_its_border_is_known(opened: Opener) -> None:
    first = opened(price(library=0.1), finder=HostGemm)
    second = opened(price(library=0.1), finder=HostGemm)
    assert second.device.measured == 0 and second.device.made and "product" in second.launched(32)
    wrong = opened(price(library=0.1), finder=lambda device: HostGemm(device, 1.01))
    assert wrong.device.measured == 0 and "product" not in wrong.launched(32)
    assert wrong.told and all("own kernels do that" in line for line in wrong.told) and first.told == []


@pytest.mark.parametrize("factor", [1.01, -1.0, float("nan")])
def test_a_library_that_is_wrong_is_not_used_and_told(opened: Opener, factor: float) -> None:
    both = opened(price(library=0.1), finder=lambda device: HostGemm(device, factor))
    assert both.launched(ROWS) == {"linear_many_q8_0_r32"} and LINE not in both.sides.program.memory_lines()
    assert worst(both.prompt()) < NEAR
    assert both.told and all("NumPy multiplies Q8_0" in line for line in both.told)


def test_a_library_that_cannot_be_had_is_told_or_where_it_is_required_an_error(opened: Opener) -> None:
    both = opened(price(), finder=refused)
    assert len(both.told) == 1 and "there is no such library; own kernels multiply" in both.told[0]
    assert worst(both.prompt()) < NEAR
    with pytest.raises(GemmRefused, match="no such library"):
        opened(price(), finder=refused, required=True)


class Failing(HostGemm):
    """A library that refuses when it is to multiply."""

    def multiply(self, product: Product) -> None:
        raise GemmRefused("it does not multiply here", fix="do without")


def test_a_library_that_fails_at_its_first_product_is_left(opened: Opener) -> None:
    both = opened(price(), finder=Failing)
    assert both.launched(ROWS) == {"linear_many_q8_0_r32"} and len(both.told) == 1
    with pytest.raises(GemmRefused, match="does not multiply here"):
        opened(price(), finder=Failing, required=True)


def test_without_room_for_the_slab_own_kernels_multiply(opened: Opener) -> None:
    both = opened(price(library=0.1), finder=HostGemm, capacity=16 << 20)
    assert both.launched(ROWS) == {"linear_many_q8_0_r32"}
    assert len(both.told) == 1 and "do not fit" in both.told[0] and "own kernels multiply" in both.told[0]
