"""What is chosen from what was measured, what is kept of it, and what the user's variables say."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from backends.gpu import library_gemm, library_torch, tuning
from backends.gpu.arch import arch
from backends.gpu.device import CardFacts
from backends.gpu.entries import Entries
from backends.gpu.forms import FEW_MOST, NEVER, Forms, ShapeClass, class_of, possible
from backends.gpu.library_gemm import GemmRefused, Product
from backends.gpu.steps.base import Stored
from backends.gpu.trial import Timing
from backends.quant import QuantType

KIND = arch("sm_86")
FACTS = CardFacts(KIND.vendor, 0, "GPU-1", "0000:0a:00.0", "A card", KIND, 32, 80, 8 << 30, False, "12", True, 1 << 21)
FAST, SLOW = Timing(1.0, 0.1), Timing(2.0, 0.1)
ABOUT = {"card": "A card", "class": "Q4_K 4096 x 4096"}


# --------------------------------------------------------------------------------------------------------------- forms


def test_matrices_of_like_sizes_are_one_class_and_others_are_not() -> None:
    matrix = Stored(QuantType.Q4_K, 0, 4096, 4096)
    assert class_of(matrix) == ShapeClass(QuantType.Q4_K, 4096, 4096)
    assert class_of(Stored(QuantType.Q4_K, 1, 2049, 3072)) == class_of(matrix)
    for other in (Stored(QuantType.Q5_K, 0, 4096, 4096), Stored(QuantType.Q4_K, 0, 2048, 4096)):
        assert class_of(other) != class_of(matrix)


def test_a_border_is_of_its_class_alone() -> None:
    matrix, other = Stored(QuantType.Q4_K, 0, 4096, 4096), Stored(QuantType.Q4_K, 0, 64, 4096)
    forms = Forms(KIND, {class_of(matrix): 4}, {class_of(matrix): 64})
    assert forms.is_few(matrix, 4) and not forms.is_few(matrix, 5)
    assert forms.is_few(other, 8) and not forms.is_few(other, 9)
    assert forms.is_library(matrix, 64) and not forms.is_library(matrix, 63)
    assert not forms.is_library(other, 1 << 20)


def test_a_library_is_possible_only_where_there_is_one() -> None:
    matrix = Stored(QuantType.Q4_K, 0, 64, 64)
    assert not any(forms.is_library(matrix, 1 << 20) for forms in possible(KIND, library=False))
    assert any(forms.is_library(matrix, 3) for forms in possible(KIND, library=True))


# ------------------------------------------------------------------------------------------------------------- borders


@pytest.mark.parametrize(
    ("leaders", "fixed", "border"),
    [
        ("fff", 8, 16),
        ("ffm", 16, 8),
        ("fmm", 8, 4),
        ("mmm", 8, 2),
        ("mff", 8, 2),
        ("???", 8, 8),
        ("???", 16, 16),
        ("?m?", 8, 4),
        ("f?f", 8, 16),
        ("ff?", 8, 8),
        ("f", 8, 4),
    ],
)
def test_few_is_taken_as_long_as_it_leads_and_as_ever_where_nobody_does(leaders: str, fixed: int, border: int) -> None:
    sides = {"f": (FAST, SLOW), "m": (SLOW, FAST), "?": (Timing(1.0, 0.5), Timing(1.2, 0.0))}
    found = [(rows, *sides[leader]) for rows, leader in zip(tuning.FEW_ROWS, leaders, strict=False)]
    assert tuning.few_border(found, fixed) == border


def test_a_lead_is_larger_than_what_measurements_differ_by() -> None:
    steady, shaky = Timing.of([1.0, 1.0, 1.1, 1.0, 9.0]), Timing.of([1.3, 2.9, 0.8, 1.4, 1.3])
    assert steady.seconds == 1.0 and steady.spread == pytest.approx(0.1), "one that was disturbed is left out"
    assert shaky.seconds == 1.3 and not Timing(1.25, 0.0).leads(shaky)
    assert not steady.leads(Timing(1.05, 0.0)) and steady.leads(Timing(1.2, 0.0))


# ------------------------------------------------------------------------------------------------------------- entries


@dataclass
class Kept:
    entries: Entries
    told: list[str] = field(default_factory=list)


@pytest.fixture
def kept(tmp_path: Path) -> Kept:
    told: list[str] = []
    return Kept(Entries(tmp_path / "kernels", told.append), told)


def test_an_entry_is_found_by_all_that_it_depends_on(kept: Kept) -> None:
    assert kept.entries.get(ABOUT) is None
    kept.entries.put(ABOUT, 16)
    assert kept.entries.get(ABOUT) == 16
    for name in ABOUT:
        assert kept.entries.get({**ABOUT, name: "another"}) is None
    assert [path.name for path in kept.entries.folder.iterdir()] == [kept.entries.path(ABOUT).name], "nothing beside it"
    assert not kept.told


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", "\x80", '{"border": 4}', '{"version": 1, "about": {}, "border": 4}']
)
def test_a_broken_or_foreign_file_reads_as_nothing_and_is_written_anew(kept: Kept, text: str) -> None:
    kept.entries.put(ABOUT, 8)
    kept.entries.path(ABOUT).write_bytes(text.encode("latin-1"))
    assert kept.entries.get(ABOUT) is None
    kept.entries.put(ABOUT, 4)
    assert kept.entries.get(ABOUT) == 4


@pytest.mark.parametrize("border", ["8", True, -1, 8.0, None])
def test_a_border_is_a_whole_number(kept: Kept, border: Any) -> None:
    kept.entries.put(ABOUT, 8)
    path = kept.entries.path(ABOUT)
    path.write_text(json.dumps({**json.loads(path.read_text()), "border": border}))
    assert kept.entries.get(ABOUT) is None


def test_a_folder_that_cannot_be_written_is_told_once(tmp_path: Path) -> None:
    told: list[str] = []
    (tmp_path / "file").write_text("")
    entries = Entries(tmp_path / "file" / "kernels", told.append)
    for _ in range(2):
        assert entries.get(ABOUT) is None
        entries.put(ABOUT, 8)
    assert len(told) == 1 and "each start measures again" in told[0]


# ----------------------------------------------------------------------------------------------------------- variables


class Clocked:
    """As much of a device as is asked before a bind."""

    facts = FACTS
    stream = 7

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_: None


def opened(
    monkeypatch: pytest.MonkeyPatch, folder: Path, environ: dict[str, str], *, torch: bool = False
) -> tuning.Tuning | None:
    monkeypatch.setattr(library_torch, "installed", lambda: torch)
    monkeypatch.setattr(library_torch, "Finding", lambda: library_torch.find)
    return tuning.open_tuning(Clocked(), {"XDG_CACHE_HOME": str(folder), **environ}, print)


@pytest.mark.parametrize(
    ("environ", "torch", "libraries"),
    [
        ({}, True, False),
        ({"HOMESERVE_GEMM": "own"}, True, False),
        ({"HOMESERVE_GEMM": "auto"}, False, False),
        ({"HOMESERVE_GEMM": "auto"}, True, True),
        ({"HOMESERVE_GEMM": "torch", "HOMESERVE_TUNE": "on"}, False, True),
    ],
)
def test_a_library_is_looked_for_where_the_user_asks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, environ: dict[str, str], torch: bool, libraries: bool
) -> None:
    found = opened(monkeypatch, tmp_path, environ, torch=torch)
    assert found is not None
    assert any(forms.every_library != NEVER for forms in found.possible()) == libraries
    assert max(forms.every_few for forms in found.possible()) == FEW_MOST


def test_nothing_is_measured_where_it_is_off_or_there_is_no_clock(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert opened(monkeypatch, tmp_path, {"HOMESERVE_TUNE": "off"}) is None
    blind: Any = SimpleNamespace(facts=FACTS)
    assert tuning.open_tuning(blind, {}, print) is None


@pytest.mark.parametrize(
    ("environ", "error", "told"),
    [
        ({"HOMESERVE_TUNE": "fast"}, tuning.TuneRefused, "HOMESERVE_TUNE=fast is neither on nor off"),
        ({"HOMESERVE_GEMM": "cublas"}, GemmRefused, "HOMESERVE_GEMM=cublas is no library"),
        ({"HOMESERVE_GEMM": "torch", "HOMESERVE_TUNE": "off"}, GemmRefused, "nothing is measured"),
    ],
)
def test_words_that_say_nothing_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, environ: dict[str, str], error: type[Exception], told: str
) -> None:
    with pytest.raises(error, match=told):
        opened(monkeypatch, tmp_path, environ)


# --------------------------------------------------------------------------------------------------------------- torch


class Tensor:
    """As much of torch's tensor as multiplying takes, over NumPy."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array

    def t(self) -> Tensor:
        return Tensor(self.array.T)

    def mul_(self, other: Tensor) -> None:
        self.array *= other.array

    def add_(self, other: Tensor) -> None:
        self.array += other.array


class Near:
    """A context that notes what it was made with."""

    def __init__(self, notes: list[Any], what: Any = None) -> None:
        self._notes, self._what = notes, what

    def __enter__(self) -> None:
        self._notes.append(self._what)

    def __exit__(self, *_: object) -> None: ...


class FakeTorch:
    """A torch whose cards' memory is the host's."""

    float32 = "float32"

    def __init__(
        self, version: str = "2.13.0+cu130", cuda: str | None = "13.0", pci: tuple[int, ...] = (0, 10, 0)
    ) -> None:
        self.__version__ = version
        self.streams: list[Any] = []
        hip = None if cuda else "7.1"
        self.version = SimpleNamespace(cuda=cuda, hip=hip)
        cards = [SimpleNamespace(pci_domain_id=9, pci_bus_id=9, pci_device_id=9), _properties(*pci)]
        self.cuda = SimpleNamespace(
            device_count=lambda: len(cards),
            get_device_properties=cards.__getitem__,
            stream=lambda stream: Near(self.streams, stream),
            ExternalStream=lambda handle, device: (handle, device),
        )
        self.backends = SimpleNamespace(
            cuda=SimpleNamespace(matmul=SimpleNamespace(allow_fp16_reduced_precision_reduction=True))
        )

    def no_grad(self) -> Near:
        return Near([])

    def as_tensor(self, view: Any, device: str) -> Tensor:
        assert device == "cuda:1"
        holder = SimpleNamespace(__array_interface__=view.__cuda_array_interface__)
        return Tensor(np.asarray(holder))

    def mm(self, x: Tensor, w: Tensor, *, out_dtype: str, out: Tensor) -> None:
        assert (out_dtype, x.array.dtype, w.array.dtype) == ("float32", np.float16, np.float16)
        out.array[:] = x.array.astype(np.float32) @ w.array.astype(np.float32)


def _properties(*pci: int) -> SimpleNamespace:
    if not pci:
        return SimpleNamespace()
    return SimpleNamespace(pci_domain_id=pci[0], pci_bus_id=pci[1], pci_device_id=pci[2])


def found(monkeypatch: pytest.MonkeyPatch, torch: Any) -> library_torch.TorchGemm:
    monkeypatch.setattr("importlib.import_module", lambda name: torch)
    gemm = library_torch.find(Clocked())
    assert isinstance(gemm, library_torch.TorchGemm)
    return gemm


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("GPU-5ee1c0de-0000-4000-8000-000000000001", "5ee1c0de-0000-4000-8000-000000000001"),
        ("GPU-00000000a11d0001", "30303030-3030-3030-6131-316430303031"),
    ],
)
def test_a_card_is_known_by_its_uuid_where_torch_tells_no_address(ours: str, theirs: str) -> None:
    facts = replace(FACTS, uuid=ours)
    assert library_torch.is_card(SimpleNamespace(uuid=theirs), facts)
    assert not library_torch.is_card(SimpleNamespace(uuid=theirs[:-1] + "2"), facts)
    assert not library_torch.is_card(SimpleNamespace(), facts)


@pytest.mark.parametrize("biased", [False, True])
def test_torch_multiplies_over_our_addresses_on_our_stream(monkeypatch: pytest.MonkeyPatch, biased: bool) -> None:
    torch, rng = FakeTorch(), np.random.default_rng(1)
    gemm = found(monkeypatch, torch)
    assert gemm.title == "torch 2.13.0+cu130"
    assert not torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction
    rows, outs, cols = 3, 5, 4
    x, w = (rng.standard_normal((count, 8)).astype(np.float16) for count in (rows, outs))
    scales, bias = np.array([1, 2, 0.5], np.float32), np.arange(outs, dtype=np.float32)
    out = np.full((rows, 16), 7, np.float32)
    places = [each.ctypes.data for each in (x, scales, w, out, bias)]
    product = Product(
        *(places[0], 8, places[1], places[2], 8, places[3], 16, places[4] if biased else 0), rows, outs, cols
    )
    for _ in range(2):
        gemm.multiply(product)
        want = scales[:, None] * (x[:, :cols].astype(np.float32) @ w[:, :cols].astype(np.float32).T)
        np.testing.assert_allclose(out[:, :outs], want + bias if biased else want, rtol=1e-6)
        assert (out[:, outs:] == 7).all(), "behind the row's end"
    assert torch.streams == [(7, 1)] * 2


@pytest.mark.parametrize(
    ("torch", "told"),
    [
        (FakeTorch("2.7.1"), "torch 2.7.1 is older than 2.8"),
        (FakeTorch(cuda=None), r"is built for amd, not for A card"),
        (FakeTorch(pci=(0, 11, 0)), "does not show A card"),
        (FakeTorch(pci=()), "does not show A card"),
    ],
)
def test_a_torch_of_another_card_is_refused(monkeypatch: pytest.MonkeyPatch, torch: Any, told: str) -> None:
    with pytest.raises(GemmRefused, match=told):
        found(monkeypatch, torch)


def test_a_torch_that_cannot_be_imported_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> Any:
        raise OSError("libcudart.so.13: cannot open shared object file")

    monkeypatch.setattr("importlib.import_module", broken)
    finding = library_torch.Finding()
    with pytest.raises(GemmRefused, match=r"cannot be imported \(libcudart"):
        finding(Clocked())


def test_a_torch_that_does_not_multiply_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = FakeTorch()
    gemm = found(monkeypatch, torch)

    def mm(*_: object, **__: object) -> None:
        raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED")

    monkeypatch.setattr(torch, "mm", mm)
    x = np.zeros(16, np.float32).ctypes.data
    with pytest.raises(GemmRefused, match="does not multiply here .*NOT_SUPPORTED"):
        gemm.multiply(Product(x, 8, x, x, 8, x, 16, 0, 1, 1, 1))


def test_torch_keeps_views_of_a_bounded_number_of_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library_torch, "VIEWS_MOST", 2)
    gemm, x = found(monkeypatch, FakeTorch()), np.zeros(64, np.float32)
    for rows in range(1, 6):
        at = x.ctypes.data
        gemm.multiply(Product(at, 4, at, at, 4, at, 4, 0, rows, 1, 1))
    assert len(gemm._tensors) <= 2


def test_a_line_that_no_slab_holds_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from backends.gpu.ops import many

    monkeypatch.setattr(library_gemm, "SLAB_BYTES", 128)
    with pytest.raises(ValueError, match="does not fit"):
        library_gemm.linear(many.Matrix(QuantType.Q8_0, 0, 32, 256), many.Halved(0, 0, 256), 64, 0, 32, 0, 256)
