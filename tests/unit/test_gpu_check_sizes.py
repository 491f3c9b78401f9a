"""What scripts/gpu_check measures on a real card, with a card that only looks at what it is asked for.

No emulation comes to an end at these sizes, and no time is measured. But every address of every launch must lie in
memory that was had for it, every argument must fit its parameter, and every grid a driver.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "benchmarks"))

import gpu_bandwidth
import gpu_prefill
from gpu_bench import FULL, QUICK, TYPES, Bench, OutOfTime, Sizes

from backends.gpu.arch import arch
from backends.gpu.launch import Launch
from backends.quant import QuantType

GIB = 1 << 30
PACK = {"pointer": "<Q", "i32": "<i", "u32": "<I", "i64": "<q", "u64": "<Q", "float": "<f"}
MOST = 65535
"""Blocks of a grid in its second and third direction."""


@dataclass
class Asked:
    """A card of 24 GiB that has no memory. `launches`: how many it looked at; `left`: bytes free."""

    left: int = 24 * GIB
    at: int = 1 << 32
    launches: int = 0
    held: dict[int, int] = field(default_factory=dict)
    stream: int = 1
    facts: Any = field(
        default_factory=lambda: SimpleNamespace(vendor="nvidia", index=0, uuid="GPU-1", name="card", arch=arch("sm_86"))
    )

    def __post_init__(self) -> None:
        nothing: Callable[..., None] = lambda *_: None  # noqa: E731
        self.driver = SimpleNamespace(
            attribute=lambda *_: 50 << 20,
            event=lambda: 1,
            record_event=nothing,
            wait_event=nothing,
            end_event=nothing,
            elapsed_ms=lambda *_: 1.0,
        )
        self.wait = self.prepare = nothing

    def free_bytes(self) -> int:
        return self.left

    def allocate(self, nbytes: int, line: str) -> Any:
        address, self.at = self.at, self.at + nbytes + 4096 & ~255
        self.left -= nbytes
        assert self.left > 0, "more than the card has"
        self.held[address] = nbytes

        def close() -> None:
            self.left += self.held.pop(address)

        return SimpleNamespace(address=address, nbytes=nbytes, close=close)

    def pinned(self, nbytes: int, line: str) -> Any:
        return SimpleNamespace(address=64, nbytes=nbytes, bytes=np.zeros(nbytes, np.uint8), close=lambda: None)

    def upload(self, target: int, source: int, nbytes: int) -> None:
        self._within(target, nbytes)

    def download(self, target: int, source: int, nbytes: int) -> None:
        self._within(source, nbytes)

    def copy(self, target: int, source: int, nbytes: int) -> None:
        self._within(target, nbytes)
        self._within(source, nbytes)

    def record(self, launches: Sequence[Launch]) -> Any:
        for launch in launches:
            self._look(launch)
        return SimpleNamespace(close=lambda: None)

    def replay(self, recording: Any) -> None:
        pass

    def _look(self, launch: Launch) -> None:
        self.launches += 1
        x, y, z = launch.grid
        assert 0 < x < 1 << 31 and 0 < y <= MOST and 0 < z <= MOST, launch.grid
        for param, value in zip(launch.symbol.params, launch.args, strict=True):
            struct.pack(PACK[param.kind], value)
            if param.kind == "pointer" and value:
                self._within(int(value), 1)

    def _within(self, address: int, nbytes: int) -> None:
        begin = max((each for each in self.held if each <= address), default=0)
        assert address + nbytes <= begin + self.held.get(begin, 0), f"{address:#x} is in no memory"


class Heard:
    """A teller of rows."""

    def __init__(self) -> None:
        self.rows: dict[str, tuple[float | None, dict[str, Any]]] = {}

    def at(self, what: str) -> None:
        pass

    def row(self, what: str, value: float | None = None, unit: str = "", **more: Any) -> None:
        assert what not in self.rows, "two rows of one name"
        self.rows[what] = value, more


def bench_of(sizes: Sizes, card: Asked) -> Bench:
    fast = replace(sizes, staging=4096, round_s=0.0, least_rounds=1, rows=sizes.rows[:2])
    return Bench(card, fast, float("inf"))  # type: ignore[arg-type]


@pytest.mark.parametrize("sizes", [FULL, QUICK], ids=["full", "quick"])
@pytest.mark.parametrize("types", [TYPES[:7], TYPES[7:14], TYPES[14:20], TYPES[20:]], ids=range(4))
def test_what_is_read_for_bandwidth_is_there(sizes: Sizes, types: Sequence[QuantType]) -> None:
    card, heard = Asked(), Heard()
    gpu_bandwidth.run(bench_of(sizes, card), heard, types)  # type: ignore[arg-type]
    assert not card.held, "all memory was given back"
    matrices = [more for what, (_, more) in heard.rows.items() if what.startswith("linear_few")]
    assert len(matrices) == len(types) * len(sizes.linear) and {more["goal"] for more in matrices} == {0.85}
    caches = [more for what, (_, more) in heard.rows.items() if what.startswith("decode attention")]
    assert len(caches) == 3 * len(sizes.contexts) * len(sizes.lanes) and {more["goal"] for more in caches} == {0.8}
    copy = heard.rows["device copy, read and written"][0]
    assert all(more["of"] == copy for more in matrices + caches)


@pytest.mark.parametrize("types", [TYPES[:9], TYPES[9:18], TYPES[18:]], ids=range(3))
def test_what_a_prompt_is_measured_on_is_there(types: Sequence[QuantType], monkeypatch: pytest.MonkeyPatch) -> None:
    card, heard = Asked(), Heard()
    monkeypatch.setattr(gpu_prefill, "torch_tflops", lambda *_: (100.0, ""))
    gpu_prefill.run(bench_of(FULL, card), heard, types, "python")  # type: ignore[arg-type]
    assert not card.held, "all memory was given back"
    many = [more for what, (_, more) in heard.rows.items() if what.startswith("linear_many")]
    assert len(many) == len(types) and all((more["of"], more["goal"]) == (100.0, 0.7) for more in many)
    assert sum(what.startswith("many rows are ahead") for what in heard.rows) == len(types)


def test_without_torch_a_row_says_so_and_no_goal_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    card, heard = Asked(), Heard()
    monkeypatch.setattr(gpu_prefill, "torch_tflops", lambda *_: (0.0, "torch is not installed"))
    gpu_prefill.run(bench_of(QUICK, card), heard, TYPES[:1], "python")  # type: ignore[arg-type]
    torch = next(more for what, (_, more) in heard.rows.items() if what.startswith("torch"))
    own = next(more for what, (_, more) in heard.rows.items() if what.startswith("linear_many"))
    assert "torch is not installed" in torch["note"] and own["goal"] is None and own["of"] > 0


def test_what_is_read_is_more_than_twice_the_cache_and_no_more_than_half_of_what_is_free() -> None:
    assert bench_of(FULL, Asked()).far_bytes == 512 << 20
    large = Asked()
    large.driver.attribute = lambda *_: 400 << 20
    assert bench_of(FULL, large).far_bytes == 800 << 20
    assert bench_of(FULL, Asked(left=600 << 20)).far_bytes == 300 << 20


def test_bandwidth_is_of_what_a_copy_reads_and_writes_and_of_what_a_layer_reads() -> None:
    """Everything takes this card a millisecond."""
    bench = bench_of(FULL, Asked())
    assert bench.copy_gb_s() == pytest.approx(2 * (256 << 20) / 1e6)
    arena = bench.memory(GIB)
    matrix = 4096 * 4096 // 32 * 34
    count = -(-(512 << 20) // matrix)
    assert gpu_bandwidth.few_gb_s(bench, arena, QuantType.Q8_0, 4096, 4096) == pytest.approx(count * matrix / 1e6)
    layer = 2 * 32768 * 8 * 128 * 2
    found = gpu_bandwidth.attention_gb_s(bench, arena, "f16", 32768, 1)
    assert found == pytest.approx(-(-(512 << 20) // layer) * layer / 1e6)


def test_nothing_is_begun_when_the_time_is_over() -> None:
    card, heard = Asked(), Heard()
    bench = bench_of(FULL, card)
    bench.until = 0.0
    with pytest.raises(OutOfTime):
        gpu_bandwidth.run(bench, heard, TYPES)  # type: ignore[arg-type]
    assert not card.launches and not any(what.startswith("linear") for what in heard.rows)
