"""A card whose time is what the test says, and a library over its memory: for programs that measure at their bind."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from emulated_device import EmulatedDevice

from backends.gpu.device import Device
from backends.gpu.launch import Launch
from backends.gpu.library_gemm import Product

Work = Launch | Product
Price = Callable[[Work], float]


@dataclass
class ClockedDevice(EmulatedDevice):
    """A device whose time is what its launches cost by `price`. `made`: products so far."""

    price: Price = lambda work: 0.0
    measured: int = 0
    made: int = 0
    noted: list[Work] = field(default_factory=list)

    def launch(self, launches: Sequence[Launch]) -> None:
        self.noted += launches
        super().launch(launches)

    def multiply(self, product: Product, work: Callable[[], None]) -> None:
        self.made += 1
        self.noted.append(product)
        self._queue.append(work)

    def seconds(self, work: Callable[[], None]) -> float:
        self.measured += 1
        self.settle()
        self.noted.clear()
        work()
        self.settle()
        return float(sum(map(self.price, self.noted)))


class HostGemm:
    """A library over the emulated card's memory; `factor` is its mistake."""

    title = "NumPy"

    def __init__(self, device: Device, factor: float = 1.0) -> None:
        assert isinstance(device, ClockedDevice)
        self._device, self._factor = device, np.float32(factor)

    def multiply(self, product: Product) -> None:
        self._device.multiply(product, lambda: self._make(product))

    def _make(self, p: Product) -> None:
        x, w = _at(p.x, np.float16, p.rows, p.x_stride), _at(p.w, np.float16, p.outs, p.w_stride)
        total = x[:, : p.cols].astype(np.float32) @ w[:, : p.cols].astype(np.float32).T
        total *= _at(p.scales, np.float32, p.rows, 1) * self._factor
        if p.bias:
            total += _at(p.bias, np.float32, 1, p.outs)
        for row in range(p.rows):  # a row at a time: behind the last one nothing is ours
            _at(p.out + 4 * row * p.out_stride, np.float32, 1, p.outs)[0] = total[row]


class Greedy(HostGemm):
    """It takes memory of the card when it first multiplies."""

    TAKES = 1 << 20

    def multiply(self, product: Product) -> None:
        if not self._device.made:
            self._device.take(self.TAKES, "what a library wants")
        super().multiply(product)


def _at(address: int, kind: type[np.generic], rows: int, stride: int) -> np.ndarray[Any, Any]:
    size = rows * stride * np.dtype(kind).itemsize
    lies: np.ndarray[Any, Any] = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
    return lies.view(kind).reshape(rows, stride)


def numbers(launch: Launch) -> dict[str, int | float]:
    return {param.name: value for param, value in zip(launch.symbol.params, launch.args, strict=True)}


def price(*, few_most: int = 8, library: float = 2.0) -> Price:
    """A second for a matrix in the many-row form; half of it in the few-row form up to `few_most` rows, and twice as
    much above; `library` for a product."""

    def of(work: Work) -> float:
        if isinstance(work, Product):
            return library * 1e-6
        if work.symbol.name.startswith("linear_few"):
            return 0.5e-6 if numbers(work)["rows"] <= few_most else 2e-6
        return 1e-6 if work.symbol.name.startswith("linear_many") else 0.0

    return of
