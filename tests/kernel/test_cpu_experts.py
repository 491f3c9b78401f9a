"""Experts against the reference backend: routing, types, odd sizes, fused tensors, and the same bits in any batch."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import kernel_rig as rig
import numpy as np
import pytest

from backends.base import (
    Buffer,
    ExpertMatrix,
    Experts,
    Linear,
    LinearPart,
    Op,
    Routing,
    SelectRows,
    TensorView,
    Unsupported,
    Weight,
)
from backends.cpu.backend import CpuProgram
from budget.host_lines import packed_tensor_bytes

KINDS = ("silu", "gelu", "swiglu_oai")
ROWS = 40


@dataclass(frozen=True)
class Form:
    """Types and sizes of one mixture; `fused` puts gate and up of an expert behind each other in one tensor."""

    types: tuple[str, str, str] = ("F32", "F32", "F32")
    cols: int = 64
    inner: int = 48
    width: int = 64
    routing: Routing = Routing(8, 3)
    kind: str = "silu"
    fused: bool = False
    biased: bool = False
    selected: bool = False
    gained: bool = False


class Mixture:
    """A mixture of experts whose inputs and logits are rows of tables; `held`: it has the matrices of those alone, cut
    from the same whole stacks."""

    def __init__(
        self, form: Form, seed: int = 0, logits: rig.F32 | None = None, held: tuple[int, int] | None = None
    ) -> None:
        random = np.random.default_rng(seed)
        experts = form.routing.experts
        first, end = held or (0, experts)
        self.views: list[TensorView] = []

        def matrices(name: str, kind: str, heights: tuple[int, ...], cols: int) -> list[ExpertMatrix]:
            pitch = sum(heights)
            view, _ = rig.weights_of(kind, experts * pitch, cols, seed=len(self.views) + 1)
            view = replace(view, name=name)
            if kind == "F32":  # of the size that trained ones have
                view = rig.table_of(name, view.data.view(np.float32).reshape(experts * pitch, cols) / np.sqrt(cols))
            rows = slice(first * pitch, end * pitch)
            data = view.data.reshape(view.rows, -1)[rows].reshape(-1)
            self.views.append(replace(view, rows=(end - first) * pitch, data=data))
            bias = None
            if form.biased:
                bias = Weight(f"{name}.bias", 1, (end - first) * pitch)
                values = random.standard_normal(experts * pitch).astype(np.float32)
                self.views.append(rig.vector_of(bias.name, values[rows]))
            firsts = [sum(heights[:index]) for index in range(len(heights))]
            weight = Weight(name, (end - first) * pitch, cols)
            return [
                ExpertMatrix(weight, height, pitch, first, bias) for height, first in zip(heights, firsts, strict=True)
            ]

        if form.fused:
            gate, up = matrices("gate_up", form.types[0], (form.inner, form.inner), form.cols)
        else:
            (gate,) = matrices("gate", form.types[0], (form.inner,), form.cols)
            (up,) = matrices("up", form.types[1], (form.inner,), form.cols)
        (down,) = matrices("down", form.types[2], (form.width,), form.inner)
        routing = form.routing
        if form.selected:
            routing = replace(routing, selection=Weight("selection", 1, experts))
            self.views.append(rig.vector_of("selection", random.standard_normal(experts).astype(np.float32)))
        if form.gained:
            routing = replace(routing, gains=Weight("gains", 1, experts))
            self.views.append(rig.vector_of("gains", random.uniform(0.5, 2.0, experts).astype(np.float32)))
        self.x = random.standard_normal((ROWS, form.cols)).astype(np.float32)
        if logits is None:
            logits = random.standard_normal((ROWS, experts)).astype(np.float32)
        (feed_x, table_x, x), (feed_l, table_l, given) = rig.feed("x", self.x), rig.feed("l", logits)
        self.views += [table_x, table_l]
        self.out = Buffer("out", form.width)
        self.op = Experts(x, given, self.out, routing, gate, up, down, form.kind, held)
        self.ops: list[Op] = [feed_x, feed_l, self.op]

    def bind(self, level: str, threads: int = 2) -> CpuProgram:
        return rig.bind(rig.backend(level, threads), self.ops, self.views)

    def run(self, level: str, rows: int = ROWS, threads: int = 2) -> rig.F32:
        program = self.bind(level, threads)
        got = program.run(rig.plain_batch(rows)).copy()
        program.close()
        return got

    def want(self) -> np.ndarray:
        return rig.Oracle(self.ops, self.views).run(rig.plain_batch(ROWS), "out")

    def check(self, level: str, relative: float) -> None:
        want = self.want()
        rig.close_to(self.run(level), want, np.full_like(want, np.abs(want).max()), relative)


ROUTINGS = (
    Routing(8, 3),
    Routing(8, 3, normalise=False),
    Routing(8, 1, normalise=False, scale=2.5),
    Routing(8, 8, "sigmoid", scale=0.5),
    Routing(17, 4, "sigmoid", normalise=False),
    Routing(17, 4, "chosen", normalise=False, scale=1.5),
    Routing(32, 4, "chosen"),
)


@pytest.mark.parametrize(("selected", "gained"), [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_every_routing_equals_the_reference(level: str, routing: Routing, selected: bool, gained: bool) -> None:
    Mixture(Form(routing=routing, selected=selected, gained=gained)).check(level, 3e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fused", (False, True))
def test_activations_biases_and_fused_tensors(level: str, kind: str, fused: bool) -> None:
    for biased in (False, True):
        Mixture(Form(kind=kind, fused=fused, biased=biased)).check(level, 3e-6)


@pytest.mark.parametrize("cols, inner, width", ((64, 48, 64), (7, 5, 3), (33, 17, 100), (48, 90, 31)))
def test_odd_sizes_are_padded_for_each_expert(level: str, cols: int, inner: int, width: int) -> None:
    for fused in (False, True):
        mixture = Mixture(Form(cols=cols, inner=inner, width=width, fused=fused, biased=True))
        mixture.check(level, 3e-6)


@pytest.mark.parametrize("kind", rig.ALL_TYPES)
def test_every_type_of_weight(level: str, kind: str) -> None:
    block = 256 if kind in rig.K_TYPES else 32 if kind in rig.SIMPLE_TYPES else 1
    inner = max(2 * block, 40) if block > 1 else 40
    types = (kind, kind, kind)
    # What int16 takes from inputs and inner activations is some 3e-5 of the largest of each block.
    for fused in (False, True):
        Mixture(Form(types=types, cols=max(block, 64), inner=inner, width=40, fused=fused)).check(level, 2e-4)


def test_types_may_differ_between_the_matrices(level: str) -> None:
    for types in (("MXFP4", "F16", "Q8_0"), ("F32", "Q4_K", "BF16"), ("Q5_0", "Q6_K", "IQ4_NL")):
        Mixture(Form(types=types, cols=256, inner=64, width=33, biased=True)).check(level, 2e-4)


def test_equal_logits_choose_the_lower_index(level: str) -> None:
    logits = np.zeros((ROWS, 8), np.float32)
    logits[1::2, 5:] = 1.0
    for func in ("softmax", "sigmoid", "chosen"):
        Mixture(Form(routing=Routing(8, 2, func)), logits=logits).check(level, 3e-6)


def test_tiny_sums_do_not_divide_and_far_logits_stay_finite(level: str) -> None:
    logits = np.full((ROWS, 8), -60.0, np.float32)
    logits[1::3] = np.linspace(-300, 300, 8)
    logits[2::3] = 88.0
    for func in ("softmax", "sigmoid", "chosen"):
        Mixture(Form(routing=Routing(8, 3, func)), logits=logits).check(level, 3e-6)


@pytest.mark.parametrize("kind", ("F32", "Q8_0", "MXFP4", "Q4_K"))
def test_a_row_has_the_same_bits_in_every_batch_and_for_every_thread_count(level: str, kind: str) -> None:
    cols = 256
    mixture = Mixture(Form(types=(kind, kind, kind), cols=cols, inner=cols, width=72, routing=Routing(8, 3)))
    whole = mixture.run(level)
    for threads in (1, 2, 5):
        program = mixture.bind(level, threads)
        for count in (1, 2, 3, 5, 12, 29):
            rows = np.arange(ROWS - count, ROWS, dtype=np.int32)
            got = program.run(replace(rig.plain_batch(count), tokens=rows))
            assert np.array_equal(rig.bits(got), rig.bits(whole[rows])), (threads, count)
        program.close()


def test_all_rows_may_choose_one_expert_and_some_experts_none(level: str) -> None:
    logits = np.full((ROWS, 8), -1.0, np.float32)
    logits[:, 6] = 5.0
    logits[:, 2] = 3.0
    Mixture(Form(routing=Routing(8, 2)), logits=logits).check(level, 3e-6)


def test_after_the_selection_of_rows_only_those_run(level: str) -> None:
    """Behind SelectRows, router and experts see the wanted rows alone, and give them the bits of a whole batch."""
    mixture = Mixture(Form(types=("Q8_0", "Q8_0", "F16")))
    router = rig.table_of("router", np.random.default_rng(9).standard_normal((8, 64)).astype(np.float32))
    kept, logits = Buffer("kept", 64), Buffer("logits", 8)
    route = LinearPart(Weight("router", 8, 64), logits)
    feed_x, source = mixture.ops[0], mixture.op.src

    def bound(x: Buffer, *before: Op) -> CpuProgram:
        ops = [feed_x, *before, Linear(x, (route,)), replace(mixture.op, src=x, logits=logits)]
        return rig.bind(rig.backend(level), ops, [*mixture.views, router])

    everything, selected = bound(source), bound(kept, SelectRows(source, kept))
    whole = everything.run(rig.plain_batch(ROWS)).copy()
    for wanted in ([3], [0, 7, 19, 39], []):
        got = selected.run(rig.plain_batch(ROWS, wanted))
        assert np.array_equal(rig.bits(got), rig.bits(whole[wanted]))
    everything.close()
    selected.close()


def test_stacks_hold_the_bits_of_the_file_and_no_more(level: str) -> None:
    for fused in (False, True):
        mixture = Mixture(Form(types=("MXFP4", "MXFP4", "Q8_0"), cols=64, inner=96, width=48, fused=fused))
        program = mixture.bind(level)
        tables = sum(packed_tensor_bytes(4, 1, ROWS, cols) for cols in (64, 8))
        sizes = [view.nbytes for view in mixture.views if view.name in ("gate", "up", "gate_up", "down")]
        assert program.memory_lines()["weights"] == sum(sizes) + tables
        program.close()


class OneByOne(TensorView):
    """A stack whose matrices are made one at a time; `most` were alive together, and nobody may ask for the whole."""

    def __init__(self, view: TensorView, experts: int) -> None:
        for field in ("name", "type", "rows", "cols"):
            object.__setattr__(self, field, getattr(view, field))
        object.__setattr__(self, "stored", view.data.reshape(experts, -1))
        object.__setattr__(self, "most", 0)

    @property
    def data(self) -> Any:
        raise AssertionError("the stack was put together")

    def pieces(self) -> Iterator[Any]:
        alive: list[weakref.ref[Any]] = []
        for index in range(len(self.stored)):  # type: ignore[attr-defined]
            made = self.stored[index].copy()  # type: ignore[attr-defined]
            alive.append(weakref.ref(made))
            object.__setattr__(self, "most", max(self.most, sum(each() is not None for each in alive)))  # type: ignore[attr-defined]
            yield made
            del made


@pytest.mark.parametrize("fused", (False, True))
def test_a_stack_is_packed_matrix_by_matrix(level: str, fused: bool) -> None:
    """Equal bits, and no more than one matrix of the file at any moment."""
    mixture = Mixture(Form(types=("Q8_0", "F32", "MXFP4"), inner=96, width=48, fused=fused))
    want = mixture.run(level)
    stacks = [OneByOne(view, 8) for view in mixture.views if view.rows % 8 == 0 and view.name[0] in "gud"]
    assert len(stacks) == (2 if fused else 3)
    named = {view.name: view for view in stacks}
    mixture.views = [named.get(view.name, view) for view in mixture.views]
    assert np.array_equal(rig.bits(mixture.run(level)), rig.bits(want))
    assert [each.most for each in stacks] == [1] * len(stacks)  # type: ignore[attr-defined]


@pytest.mark.parametrize("pieces", [7, 9])
def test_a_stack_of_another_length_is_refused(level: str, pieces: int) -> None:
    mixture = Mixture(Form())
    down = next(view for view in mixture.views if view.name == "down")
    other = rig.table_of("down", np.ones((pieces * 64, 48), np.float32))
    wrong = OneByOne(other, pieces)
    object.__setattr__(wrong, "rows", down.rows)
    mixture.views = [wrong if view is down else view for view in mixture.views]
    with pytest.raises(ValueError, match="down: .* bytes of data"):
        mixture.bind(level)


def test_what_does_not_fit_is_refused(level: str) -> None:
    mixture = Mixture(Form(selected=True))
    good = mixture.op
    assert good.routing.selection is not None

    def refused(op: Experts) -> None:
        with pytest.raises(ValueError):
            rig.bind(rig.backend(level), [*mixture.ops[:2], op], mixture.views)

    refused(replace(good, routing=replace(good.routing, used=9)))
    refused(replace(good, routing=replace(good.routing, used=0)))
    refused(replace(good, gate=replace(good.gate, first=1)))
    refused(replace(good, up=replace(good.up, height=47)))
    refused(replace(good, out=Buffer("out", 63)))
    refused(replace(good, routing=replace(good.routing, selection=Weight("selection", 1, 9))))
    refused(replace(good, routing=replace(good.routing, gains=Weight("selection", 1, 9))))


def test_a_selection_that_is_no_floats_and_a_strange_type_are_named(level: str) -> None:
    mixture = Mixture(Form(routing=Routing(32, 2), selected=True, gained=True))
    packed, _ = rig.weights_of("Q8_0", 1, 32)
    for vector in ("selection", "gains"):
        views = [replace(packed, name=vector) if view.name == vector else view for view in mixture.views]
        with pytest.raises(Unsupported, match=f"{vector} must be floats"):
            rig.bind(rig.backend(level), mixture.ops, views)
    strange = replace(mixture.op, kind="relu2")
    with pytest.raises(Unsupported, match="relu2"):
        rig.bind(rig.backend(level), [*mixture.ops[:2], strange], mixture.views)


@pytest.mark.parametrize("held", [(0, 3), (3, 8), (5, 6), (0, 8)])
@pytest.mark.parametrize("kind", ("F32", "MXFP4"))
def test_a_rank_with_some_of_the_experts_adds_those_alone(level: str, held: tuple[int, int], kind: str) -> None:
    form = Form(types=(kind, kind, kind), biased=True, selected=True, gained=True, inner=64)
    Mixture(form, held=held).check(level, 3e-6 if kind == "F32" else 2e-4)


def test_rows_without_an_expert_here_are_zero_and_ranks_add_up(level: str) -> None:
    logits = np.random.default_rng(5).standard_normal((ROWS, 8)).astype(np.float32)
    logits[::3, 6:] += 9.0
    form = Form(routing=Routing(8, 2), fused=True)
    whole = Mixture(form, logits=logits).run(level)
    parts = [Mixture(form, logits=logits, held=held).run(level) for held in ((0, 6), (6, 8))]
    assert (parts[0][::3] == 0).all() and not (parts[0][1::3] == 0).all()
    assert np.allclose(parts[0] + parts[1], whole, rtol=0, atol=3e-6 * np.abs(whole).max())
    none = Mixture(form, logits=np.where(np.arange(8) > 5, logits + 50, logits), held=(0, 2)).run(level)
    assert (none == 0).all()


def test_with_experts_elsewhere_a_row_keeps_its_bits_in_any_batch(level: str) -> None:
    mixture = Mixture(Form(types=("Q8_0", "Q8_0", "Q8_0"), inner=64), held=(2, 7))
    whole = mixture.run(level)
    for threads in (1, 3):
        program = mixture.bind(level, threads)
        for count in (1, 2, 7, 29):
            rows = np.arange(ROWS - count, ROWS, dtype=np.int32)
            got = program.run(replace(rig.plain_batch(count), tokens=rows))
            assert np.array_equal(rig.bits(got), rig.bits(whole[rows])), (threads, count)
        program.close()


@pytest.mark.parametrize("held", [(3, 3), (-1, 4), (5, 9), (2, 4)])
def test_a_range_that_the_stacks_are_not_of_is_refused(level: str, held: tuple[int, int]) -> None:
    mixture = Mixture(Form(), held=(2, 5))
    with pytest.raises(ValueError, match=r"experts"):
        rig.bind(rig.backend(level), [*mixture.ops[:2], replace(mixture.op, held=held)], mixture.views)
