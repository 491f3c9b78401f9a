"""torch's matrix product as a `Gemm`: `torch.mm` of halves into single precision, over addresses of ours.

    find(device)     import torch ─▶ its card that is ours ─▶ our stream as `torch.cuda.ExternalStream`
    multiply(p)      mm(x, w^T, out_dtype=float32, out=out) ─ out *= scales ─ out += bias      all in place

torch and our driver share the card's primary context, so an address of ours is one of torch's, and so is a stream.
Tensors are views over `__cuda_array_interface__`; torch allocates nothing but cuBLAS's workspace, with the first
product (HIP's torch calls itself `cuda` too, and hipBLAS has one as well). `mm` with `out_dtype` is of torch 2.8 and
later. Sums in half precision are switched off.

torch is imported only here, and only after the user asked for it: it takes more than a second and most of a gigabyte
of the host's memory. `Finding` does it in a thread of its own, while kernels compile and weights load.

What is not proven: no test of this project has run torch on a card. Tests make the same calls of a torch that is NumPy,
so views, strides and the order of calls are held. That mm with `out=` allocates nothing, that a pad behind a row's end
is left alone, and that torch's builds for ROCm multiply halves into single precision are at most read in its sources:
builds before autumn 2025 refuse (pytorch 161540) or write another type (pytorch 162600). What it computes is compared
with our own kernel on the card at every bind, and a torch that raises is not used and told about, so a wrong guess here
costs speed and not answers.
"""

from __future__ import annotations

import importlib
import importlib.util
import threading
from typing import Any

from backends.gpu.device import CardFacts, Device, StreamDevice
from backends.gpu.library_gemm import Gemm, GemmRefused, Product

OLDEST = (2, 8)
VIEWS_MOST = 4096
"""Products whose tensors are kept: of a model's matrices a few hundred, for each number of rows."""
FIX = "install a torch for this card (docs/INSTALL_GPU.md), or set HOMESERVE_GEMM=own"


def installed() -> bool:
    """Whether there is a torch to import. Imports nothing."""
    return importlib.util.find_spec("torch") is not None


def find(device: Device) -> Gemm:
    """Raises GemmRefused with the reason."""
    if not isinstance(device, StreamDevice):
        raise GemmRefused(f"{device.facts.told} gives no stream to libraries", fix=FIX)
    try:
        torch: Any = importlib.import_module("torch")
    except (ImportError, OSError) as error:
        raise GemmRefused(f"torch cannot be imported ({error})", fix=FIX) from error
    refuse_old(torch)
    index = index_of(torch, device.facts)
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    return TorchGemm(torch, f"cuda:{index}", torch.cuda.ExternalStream(device.stream, device=index))


def refuse_old(torch: Any) -> None:
    """Raises GemmRefused for a torch whose mm takes no `out_dtype`."""
    version = str(torch.__version__)
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    if numbers < OLDEST:
        raise GemmRefused(f"torch {version} is older than {'.'.join(map(str, OLDEST))}", fix=FIX)


def index_of(torch: Any, facts: CardFacts) -> int:
    """torch's number of a card. Raises GemmRefused for a build of another vendor, or one that does not see the card."""
    build = "amd" if torch.version.hip else "nvidia" if torch.version.cuda else ""
    if build != facts.vendor:
        raise GemmRefused(f"torch {torch.__version__} is built for {build or 'the CPU'}, not for {facts.told}", fix=FIX)
    for index in range(torch.cuda.device_count()):
        if is_card(torch.cuda.get_device_properties(index), facts):
            return index
    raise GemmRefused(f"torch {torch.__version__} does not show {facts.told} at {facts.pci}", fix=FIX)


def is_card(properties: Any, facts: CardFacts) -> bool:
    """By the PCI address where this torch tells it, else by the UUID: NVIDIA's is printed as we do, AMD's are the bytes
    of 16 hexadecimal digits."""
    names = ("pci_domain_id", "pci_bus_id", "pci_device_id")
    if all(hasattr(properties, name) for name in names):
        return tuple(int(getattr(properties, name)) for name in names) == _place(facts.pci)
    uuid = str(getattr(properties, "uuid", ""))
    raw = bytes.fromhex(uuid.replace("-", "")).decode("ascii", "replace")
    return bool(uuid) and facts.uuid.lower() in (f"gpu-{uuid}".lower(), f"gpu-{raw}".lower())


def _place(pci: str) -> tuple[int, int, int]:
    """Of 0000:01:00.0."""
    domain, bus, rest = pci.split(":")
    return int(domain, 16), int(bus, 16), int(rest.split(".")[0], 16)


class View:
    """What torch takes for an array that somebody else holds. `kind` as NumPy writes it, strides in numbers."""

    def __init__(self, at: int, kind: str, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
        size = int(kind[2:])
        self.__cuda_array_interface__ = {
            "data": (at, False),
            "typestr": kind,
            "shape": shape,
            "strides": tuple(size * stride for stride in strides),
            "version": 3,
        }


class TorchGemm:
    """`Gemm`. `place`: torch's name of the card; `stream`: ours, as torch has it (None: torch's own, for tests)."""

    def __init__(self, torch: Any, place: str, stream: Any) -> None:
        self.title = f"torch {torch.__version__}"
        self._torch, self._place, self._stream = torch, place, stream
        self._tensors: dict[Product, tuple[Any, ...]] = {}

    def multiply(self, product: Product) -> None:
        torch = self._torch
        try:
            with torch.cuda.stream(self._stream), torch.no_grad():
                x, transposed, out, scales, bias = self._known(product)
                torch.mm(x, transposed, out_dtype=torch.float32, out=out)
                out.mul_(scales)
                if bias is not None:
                    out.add_(bias)
        except (RuntimeError, TypeError) as error:
            raise GemmRefused(f"{self.title} does not multiply here ({error})", fix=FIX) from error

    def _known(self, p: Product) -> tuple[Any, ...]:
        if p not in self._tensors:
            if len(self._tensors) >= VIEWS_MOST:
                self._tensors.clear()
            self._tensors[p] = (
                self._tensor(View(p.x, "<f2", (p.rows, p.cols), (p.x_stride, 1))),
                self._tensor(View(p.w, "<f2", (p.outs, p.cols), (p.w_stride, 1))).t(),
                self._tensor(View(p.out, "<f4", (p.rows, p.outs), (p.out_stride, 1))),
                self._tensor(View(p.scales, "<f4", (p.rows, 1), (1, 1))),
                self._tensor(View(p.bias, "<f4", (p.outs,), (1,))) if p.bias else None,
            )
        return self._tensors[p]

    def _tensor(self, view: View) -> Any:
        return self._torch.as_tensor(view, device=self._place)


class Finding:
    """`find` in a thread: begun when a load begins, asked for when weights lie on the card. The import is what takes
    time and touches no card; what does is done by who asks."""

    def __init__(self) -> None:
        self._thread = threading.Thread(target=self._import, name="import torch", daemon=True)
        self._thread.start()

    @staticmethod
    def _import() -> None:
        """A failure is met again, and told, by who asks."""
        try:
            importlib.import_module("torch")
        except (ImportError, OSError):
            return

    def __call__(self, device: Device) -> Gemm:
        self._thread.join()
        return find(device)
