"""Ranks as threads over one shared memory, on every ISA level: divided attention of the oracle and of the CPU
backend, and the errors of a rank that fails or does not come."""

from __future__ import annotations

from functools import cache

import kernel_rig as rig
import numpy as np
import pytest
from ranks import over_memory
from split_attention import Case, bind_rank, bind_whole, random_case, rank_batch, whole_batch

from backends.acts import PeerLate
from backends.base import Backend, Batch, Buffer, Limits, OpenOptions, ReceiveRows, Softcap, Stamp
from backends.cpu.backend import CpuBackend
from backends.quant import QuantType
from backends.reference.backend import ReferenceBackend
from backends.reference.exchange import Exchanges

SOON_S = 0.05
NOISE = 1e-5


@cache
def own_backend(level: str, rank: int) -> CpuBackend:
    """Ranks of one process must not share a team: one would wait for another while it has the team."""
    opened: CpuBackend = rig.backend.__wrapped__(level, threads=1)
    return opened


def whole(case: Case, device: Backend, kind: QuantType = QuantType.F32) -> list[np.ndarray]:
    program = bind_whole(case, device, kind)
    logits = [program.run(whole_batch(case, plan)).copy() for plan in range(len(case.plans))]
    program.close()
    return logits


def divided(case: Case, devices: list[Backend], library: object, kind: QuantType = QuantType.F32) -> list[np.ndarray]:
    """What every rank gives for each plan, `[ranks, rows, width]`; each has a device of its own."""
    with over_memory(library, case.ranks) as group:  # type: ignore[arg-type]
        programs = [bind_rank(case, devices[acts.rank], acts, kind) for acts in group.acts]
        gave = [
            np.stack(group.run(programs, [rank_batch(case, plan, rank) for rank in range(case.ranks)]))
            for plan in range(len(case.plans))
        ]
        for program in programs:
            program.close()
        return gave


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("seed", range(1, 7))
def test_the_oracle_divides_attention_over_native_exchanges(level: str, seed: int, dtype: str) -> None:
    """Doubles travel whole: rounding them to floats would show."""
    case = random_case(seed)
    kind = QuantType.F64 if dtype == "float64" else QuantType.F32
    device = ReferenceBackend(OpenOptions(extra={"dtype": dtype}))
    expected = whole(case, device, kind)
    gave = divided(case, [device] * case.ranks, rig.backend(level).library, kind)
    for wanted, got in zip(expected, gave, strict=True):
        assert np.abs(got - wanted).max() < (1e-6 if dtype == "float64" else NOISE)
        assert all(np.array_equal(each, got[0]) for each in got)


@pytest.mark.parametrize("seed", range(14))
def test_cpu_ranks_divide_attention_that_is_whole_on_the_oracle(level: str, seed: int) -> None:
    """Against the undivided oracle; every rank has the same bits."""
    case = random_case(seed, head_dims=(32, 64))
    expected = whole(case, ReferenceBackend(OpenOptions()))
    devices: list[Backend] = [own_backend(level, rank) for rank in range(case.ranks)]
    gave = divided(case, devices, rig.backend(level).library)
    for wanted, got in zip(expected, gave, strict=True):
        assert np.abs(got - wanted).max() < NOISE
        assert all(np.array_equal(each, got[0]) for each in got)


def test_a_double_travels_whole(level: str) -> None:
    numbers = np.random.default_rng(5).standard_normal((3, 4, 9))
    with over_memory(rig.backend(level).library, 3) as group:
        acts = [Exchanges(each, np.dtype(np.float64)) for each in group.acts]
        gave = group.together(lambda rank: acts[rank].gather(Stamp(0, 1, 4, "x"), numbers[rank], (9, 9, 9)))
        sums = group.together(lambda rank: acts[rank].sum(Stamp(0, 2, 4, "x"), numbers[rank]))
    for got, total in zip(gave, sums, strict=True):
        assert np.array_equal(got, np.concatenate(list(numbers), axis=1))
        assert np.array_equal(total, numbers[0] + numbers[1] + numbers[2])


def test_the_first_error_is_raised_with_its_rank_and_not_what_follows_from_it(level: str) -> None:
    with over_memory(rig.backend(level).library, 2, timeout_s=SOON_S) as group:

        def step(rank: int) -> None:
            if rank == 1:
                raise KeyError("lost")
            group.acts[rank].sum(Stamp(0, 1, 1, "x"), np.zeros((1, 1), np.float32))

        with pytest.raises(KeyError, match="lost") as caught:
            group.together(step)
        assert caught.value.__notes__ == ["on rank 1 of 2"]


def test_a_rank_that_leaves_an_exchange_out_is_waited_for_within_the_bound(level: str) -> None:
    with over_memory(rig.backend(level).library, 2, timeout_s=SOON_S) as group:
        with pytest.raises(PeerLate, match="rank 1 did not come") as caught:
            group.together(lambda rank: rank or group.acts[0].sum(Stamp(0, 1, 1, "x"), np.zeros((1, 1), np.float32)))
        assert caught.value.__notes__ == ["on rank 0 of 2"]


def test_a_batch_that_points_outside_is_no_fault_of_the_exchange_that_comes_first(level: str) -> None:
    x = Buffer("x", 16)
    with over_memory(rig.backend(level).library, 2) as group:
        ops = (ReceiveRows((x,), 0, "stream 0"), Softcap(x, 1.0))
        device, limits = own_backend(level, 1), Limits(4, 4, 1, 1)
        program = device.bind(ops, {}, rig.NO_KV, limits, lambda *_: None, collective=group.acts[1])
        row, tables = np.zeros(1, np.int32), np.zeros((1, 1, 1), np.int32)
        batch = Batch(row, row - 1, row[None], row, tables, np.zeros(0, np.int32))
        with pytest.raises(ValueError, match="^a batch that points outside"):
            program.run(batch)
        program.close()
