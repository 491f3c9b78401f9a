"""What errors of a card become on their way to whoever started the server."""

from __future__ import annotations

import logging
from typing import Any, cast

import pytest

from backends.gpu.card_memory import Books, Pinned, anonymous, where
from backends.gpu.errors import (
    CardMissing,
    CompileFailed,
    CompilerMissing,
    DriverError,
    DriverTooOld,
    GpuError,
    HostMemoryRefused,
    OutOfDeviceMemory,
)
from homeserve.errors import BudgetError, DeviceError
from homeserve.wire.codec import decode, encode
from homeserve.wire.records import Boot, LoadSpec, Result
from homeserve.wire.refusal import error_of, refused
from homeserve.worker import load as loading
from homeserve.worker.cards import LOG_LINES, told
from homeserve.worker.load import Loaded

BOOT = Boot(1, 2, 3, 256, 7, 256, "cuda", 0, 1, (), device="GPU-1", device_name="NVIDIA GeForce RTX 3090")


@pytest.mark.parametrize(
    "error",
    [
        DriverTooOld("CUDA 11.4 is older than 12.0", fix="update NVIDIA's driver"),
        CardMissing("no card GPU-1 with CUDA_VISIBLE_DEVICES='' set", fix="unset CUDA_VISIBLE_DEVICES"),
        CompilerMissing("NVRTC 12 was not found", fix="pip install nvidia-cuda-nvrtc-cu12"),
    ],
)
def test_what_a_card_lacks_arrives_with_its_words_and_its_fix(error: GpuError) -> None:
    made = told(BOOT, error)
    assert isinstance(made, DeviceError) and (made.code, made.field, made.exit_code) == ("device", "devices", 2)
    assert made.message.startswith("rank 1: ") and error.message in made.message and "GPU-1" in made.message
    arrived = error_of(decode(encode(refused(1, 1, 0, made)), Result))
    assert type(arrived) is DeviceError
    assert (arrived.message, arrived.field, arrived.fix) == (made.message, "devices", error.fix)


def test_memory_that_a_card_lacks_is_a_budget_that_was_wrong() -> None:
    error = OutOfDeviceMemory("kv: 900 MiB of 800", fix="lower --kv-tokens", card="RTX 3090 (GPU-1)")
    made = told(BOOT, error)
    assert isinstance(made, BudgetError) and (made.field, made.fix) == ("kv_tokens", "lower --kv-tokens")
    assert made.message == "rank 1: RTX 3090 (GPU-1): kv: 900 MiB of 800"


def test_memory_of_the_system_that_cannot_be_pinned_is_no_matter_of_the_pool() -> None:
    cannot = f"staging: 4096 bytes of host memory could not be pinned for {BOOT.device_name}"
    made = told(BOOT, HostMemoryRefused(cannot, fix="raise ulimit -l", card=BOOT.device_name))
    assert isinstance(made, BudgetError) and (made.field, made.fix) == (None, "raise ulimit -l")
    assert made.message == f"rank 1: {BOOT.device_name}: {cannot}"


def test_a_card_for_which_nothing_can_be_pinned_says_so_in_one_line() -> None:
    class Full:
        def host_register(self, address: int, nbytes: int) -> None:
            raise OutOfDeviceMemory("cuMemHostRegister failed: out of memory", fix="ask for less")

    memory = anonymous(4096, "staging")
    with pytest.raises(MemoryError) as caught:
        Pinned(Books(cast(Any, Full()), "RTX 3090"), where(memory), 4096, "staging", memory, 0)
    assert isinstance(caught.value, HostMemoryRefused) and caught.value.card == "RTX 3090"
    for text in (caught.value.message, str(caught.value)):
        assert "could not be pinned for RTX 3090: cuMemHostRegister failed" in text and text.isprintable()
    assert "ulimit -l" in caught.value.fix and "--kv-tokens" not in caught.value.fix


def test_a_driver_that_speaks_in_lines_is_told_in_one() -> None:
    error = DriverError("the driver says:\n  no\n", fix="look at dmesg")
    assert told(BOOT, error).message.endswith(": the driver says:; no")


def test_a_compilers_log_is_in_the_log_whole_and_in_the_error_at_its_beginning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    lines = [f"norm.cu:{n}: error" for n in range(40)]
    with caplog.at_level(logging.ERROR):
        made = told(BOOT, CompileFailed("NVRTC could not compile norm.cu", log="\n".join(lines), fix="report this"))
    assert [record.getMessage() for record in caplog.records] == lines
    assert made.message.endswith("; ".join(["NVRTC could not compile norm.cu", *lines[:LOG_LINES]]))
    assert made.message.isprintable(), "an error is one line"


def test_what_cannot_be_given_back_keeps_nothing_else_from_it() -> None:
    order: list[str] = []

    class Part:
        def __init__(self, name: str) -> None:
            self.name = name

        def close(self) -> None:
            order.append(self.name)
            if self.name == "layouts":
                raise DriverError("an address that is not mapped", fix="report this")

    backend, collective, layouts, flip = (
        cast(Any, Part(name)) for name in ("backend", "collective", "layouts", "flip")
    )
    loaded = Loaded(backend, collective, layouts, {}, cast(Any, None), 16, cast(Any, None), flip)
    with pytest.raises(DriverError):
        loaded.close()
    assert order == ["flip", "layouts", "collective", "backend"]


def test_a_load_that_failed_says_why_though_not_everything_can_be_given_back(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def run(self: Any) -> None:
        def close() -> None:
            raise DriverError("an address that is not mapped", fix="report this")

        self._opened.callback(close)
        raise BudgetError("kv does not fit", fix="lower --kv-tokens")

    monkeypatch.setattr(loading._Load, "run", run)
    nothing = cast(Any, None)
    spec = LoadSpec(path="model.gguf", kv_slots=16, kv_type="f16", rows=1, logit_rows=1, lanes=1, lane_pages=1)
    with caplog.at_level(logging.ERROR), pytest.raises(BudgetError, match="kv does not fit"):
        loading.load(BOOT, spec, nothing, nothing)
    assert "an address that is not mapped" in caplog.text
