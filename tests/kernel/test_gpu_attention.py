"""Attention on a card, emulated: every form of the op, and that a row's bits are its own."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import simt_rig as rig
from gpu_cases import Array, Case, Maker
from gpu_cases.attention import Asked, Filled, few_case, latent_case, many_case, ranks_case

from backends.gpu.ops import attention as ops

SEED = int(os.environ.get("HOMESERVE_TEST_SEED") or "0", 16)
RIGS: tuple[tuple[rig.Vendor, int], ...] = (("cuda", 32), ("hip", 32), ("hip", 64))
widths = pytest.mark.parametrize(("vendor", "warp"), RIGS, ids=[f"{vendor}{warp}" for vendor, warp in RIGS])
FORMS = {"few": few_case, "many": many_case, "split": partial(many_case, parts=True)}
forms = pytest.mark.parametrize("form", FORMS)

ASKED = {
    "window": Asked("f16", 64, window=37),
    "window of one": Asked("f16", 64, window=1),
    "long window": Asked("f16", 64, sequences=((410, 6), (300, 20)), tile_rows=7, window=130),
    "soft cap": Asked("f16", 64, softcap=2.0, window=20),
    "sinks": Asked("f16", 64, sinks=True),
    "gated": Asked("f16", 64, gated=True, sinks=True),
    "partial": Asked("f16", 64, partial=True, sequences=((150, 3), (20, 2), (3, 1))),
    "partial under a window": Asked("f16", 64, partial=True, window=50, sequences=((180, 4), (20, 2))),
    "wide group": Asked("f16", 64, heads=24, kv_heads=2, tile_rows=8, sequences=((140, 5), (9, 3))),
    "several parts": Asked("f16", 64, heads=3, kv_heads=1, sequences=((530, 2), (300, 9)), part_pages=16, tile_rows=5),
    "beginning": Asked("f16", 64, sequences=((1, 1), (33, 33))),
    "loud": Asked("f16", 64, scale=4.0),
}


@pytest.fixture
def rng() -> np.random.Generator:
    print(f"HOMESERVE_TEST_SEED={SEED:x}")
    return np.random.default_rng(SEED)


def run(case: Case, vendor: rig.Vendor, warp: int, *, backwards: bool = False) -> int:
    most = 0
    for launch in case.launches:
        of = (f"QUANT={launch.symbol.quant}",) if launch.symbol.quant else ()
        most = max(most, rig.load(launch.symbol.file, vendor, warp, *of).run(launch, backwards=backwards))
    return most


def outs(asked: Asked, form: str, vendor: rig.Vendor, warp: int, seed: int = 5, *, backwards: bool = False) -> Array:
    """The bits of out."""
    case = FORMS[form](np.random.default_rng(seed), warp, asked)
    run(case, vendor, warp, backwards=backwards)
    return case.arrays[0].view(np.uint32).reshape(case.arrays[0].shape)


@widths
@forms
@pytest.mark.parametrize("name", ASKED)
def test_attention_equals_that_in_double_precision(
    vendor: rig.Vendor, warp: int, form: str, name: str, rng: np.random.Generator
) -> None:
    case = FORMS[form](rng, warp, ASKED[name])
    run(case, vendor, warp)
    case.check()


@widths
@pytest.mark.parametrize("parts", (False, True))
def test_latent_rows_have_their_values_in_front(
    vendor: rig.Vendor, warp: int, parts: bool, rng: np.random.Generator
) -> None:
    case = latent_case(rng, warp, "f16", parts=parts)
    run(case, vendor, warp)
    case.check()


@widths
@pytest.mark.parametrize("sinks", (False, True))
@pytest.mark.parametrize("gates", (False, True))
def test_ranks_are_merged(vendor: rig.Vendor, warp: int, sinks: bool, gates: bool, rng: np.random.Generator) -> None:
    case = ranks_case(rng, warp, sinks=sinks, gates=gates, first=int(rng.integers(3)), own=int(rng.integers(1, 3)))
    run(case, vendor, warp)
    case.check()


def test_a_rank_without_heads_launches_nothing() -> None:
    assert ops.merge_ranks(ops.MergeShape(3, 2, 4, 64, 2, 0, 0), 0, 0) == ()


# --------------------------------------------------------------------------------------------- a row's bits are its own


@widths
@forms
def test_a_row_has_the_same_bits_alone_and_among_others(vendor: rig.Vendor, warp: int, form: str) -> None:
    """Two sequences together, each alone, and tiles that are cut otherwise: other passes, other queries in a pass."""
    asked = Asked("f16", 64, heads=6, kv_heads=2, sequences=((190, 5), (40, 3)), tile_rows=8)
    both = Filled(asked, np.random.default_rng(8))

    def of(lanes: tuple[int, ...], tile_rows: int) -> Array:
        some = replace(asked, sequences=tuple(asked.sequences[lane] for lane in lanes), tile_rows=tile_rows)
        filled = Filled(some, np.random.default_rng(8))
        lane_pages = both.shape.lane_pages
        filled.tables = both.tables[list(lanes)]
        filled.k, filled.v, filled.q = both.k, both.v, both.q[np.isin(both.lanes, lanes)]
        filled.shape = replace(filled.shape, lane_pages=lane_pages, pool_pages=both.shape.pool_pages)
        cut = ops.cut_tiles(filled.lanes, tile_rows)
        tiles = ops.Tiles(len(cut), tile_rows)
        parts = None if form == "many" else ops.parts(8, filled.shape, tile_rows)
        memory = filled.memory(cut, ops.part_floats(filled.shape, tiles, parts) if parts else (0, 0))
        make = ops.few if form == "few" else ops.many
        launches = make(filled.shape, memory, tiles, parts)  # type: ignore[arg-type]
        run(Case(launches, (), lambda: None), vendor, warp)
        return filled.out.view(np.uint32)

    together = of((0, 1), 8)
    assert np.array_equal(together, np.concatenate([of((0,), 8), of((1,), 8)]))
    assert np.array_equal(together, of((0, 1), 1))
    assert np.array_equal(together, of((0, 1), 3))


@widths
@forms
@pytest.mark.parametrize("backwards", (True,))
def test_blocks_run_in_any_order(vendor: rig.Vendor, warp: int, form: str, backwards: bool) -> None:
    asked = Asked("f16", 64, sequences=((300, 3), (20, 2)))
    forwards = outs(asked, form, vendor, warp)
    assert np.array_equal(forwards, outs(asked, form, vendor, warp, backwards=backwards))


@widths
@pytest.mark.parametrize("form", ["few", "split"])
@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize(
    "asked",
    [
        Asked("f16", 64, sequences=((257, 2),), window=129),
        Asked("f16", 64, sequences=((260, 4),), window=129),
        Asked("f16", 64, sequences=((770, 4),), window=512, part_pages=16),
    ],
)
def test_a_tile_that_sees_a_part_more_than_each_of_its_rows(
    vendor: rig.Vendor, warp: int, form: str, backwards: bool, asked: Asked
) -> None:
    """At a window's edge: no part lies where another one of the tile does, whichever block is the last."""
    rng = np.random.default_rng(1)
    case = few_case(rng, warp, asked) if form == "few" else many_case(rng, warp, asked, parts=True)
    run(case, vendor, warp, backwards=backwards)
    case.check()


@widths
def test_a_row_that_is_no_number_spoils_none_before_it(vendor: rig.Vendor, warp: int) -> None:
    """Drafts that are verified together: the second's K is infinite, its V no number; the first does not see them."""
    asked = Asked("f16", 64, sequences=((140, 2),))
    filled = Filled(asked, np.random.default_rng(3))
    last = filled.slots(0, 139, 140)
    filled.k[last], filled.v[last] = np.inf, np.nan
    cut = ops.cut_tiles(filled.lanes, 2)
    tiles, parts = ops.Tiles(1, 2), ops.parts(8, filled.shape, 2)
    memory = filled.memory(cut, ops.part_floats(filled.shape, tiles, parts))
    run(Case(ops.few(filled.shape, memory, tiles, parts), (), lambda: None), vendor, warp)
    assert np.isnan(filled.out[1]).all()
    filled.positions, filled.lanes, filled.q, filled.out = (
        filled.positions[:1],
        filled.lanes[:1],
        filled.q[:1],
        filled.out[:1],
    )
    filled.check(2e-5)


@pytest.mark.parametrize("form", ("few", "many"))
def test_no_thread_reads_what_another_may_still_write(form: str) -> None:
    """ThreadSanitizer sees what only barriers order: shuffles order nothing."""
    case = FORMS[form](np.random.default_rng(SEED), 32, Asked("f16", 64, heads=4, kv_heads=1, gated=True))
    for launch in case.launches:
        of = (f"QUANT={launch.symbol.quant}",) if launch.symbol.quant else ()
        rig.sanitized(rig.build(launch.symbol.file, "cuda", 32, *of, sanitizer="thread"), [launch], case.arrays)
    case.check()


# ------------------------------------------------------------------------------------------------------------- launches


def test_block_memory_fits_cards_that_have_64_kib() -> None:
    blocks = [ops.many_block(dims) for dims in ops.HEAD_DIMS] + [ops.LATENT_BLOCK]
    assert max(block.shared for block in blocks) <= 65536
    assert max(ops.many_block(dims).shared for dims in (64, 80, 96, 128)) <= 48 * 1024


@widths
@pytest.mark.parametrize("make", (partial(latent_case, kv="f16"), partial(many_case, asked=Asked("f16", 64))))
def test_block_memory_is_what_the_kernel_uses(vendor: rig.Vendor, warp: int, make: Maker) -> None:
    """Eight bytes less, and the last thing in it lies outside."""
    case = make(np.random.default_rng(1), warp)
    assert run(case, vendor, warp) == case.launches[0].shared
    less = replace(case.launches[0], shared=case.launches[0].shared - 8)
    with pytest.raises(rig.Fault):
        run(replace(case, launches=(less,)), vendor, warp)


def test_tiles_are_runs_of_one_lane() -> None:
    assert ops.cut_tiles([3, 3, 3, 0, 0, 3], 2).tolist() == [[0, 2], [2, 1], [3, 2], [5, 1]]
    assert ops.cut_tiles([], 2).shape == (0, 2)


@pytest.mark.parametrize("pages", (0, 12, 264))
def test_parts_are_whole_steps(pages: int) -> None:
    shape = ops.Shape("f16", 2, 1, 64, 1.0, 64, 128, 128, 40, 80)
    with pytest.raises(ValueError, match=f"parts of {pages} pages"):
        ops.parts(pages, shape, 1)


def test_a_window_bounds_the_parts() -> None:
    shape = ops.Shape("f16", 2, 1, 64, 1.0, 64, 128, 128, 8192, 9000, window=1024)
    assert ops.parts(16, shape, 1) == ops.Parts(16, 5)
    assert ops.parts(16, shape, 2) == ops.Parts(16, 5), "the second row sees one position more, of 1023"
    assert ops.parts(16, shape, 3) == ops.Parts(16, 6)
    assert ops.parts(16, replace(shape, window=0), 3) == ops.Parts(16, 512)
    assert ops.parts(16, replace(shape, window=1), 1) == ops.Parts(16, 1)
    with pytest.raises(ValueError, match="3 rows of a tile see 6 parts, there are places for 5"):
        ops.few(shape, ops.Memory(*[0] * 8), ops.Tiles(1, 3), ops.parts(16, shape, 1))


def test_parts_are_as_small_as_their_memory_allows() -> None:
    shape = ops.Shape("f16", 32, 8, 128, 1.0, 128, 4096, 4096, 2048, 9000)
    tiles = ops.Tiles(16, 1)
    each = 4 * sum(ops.part_floats(shape, tiles, ops.Parts(16, 1)))
    assert ops.fitting_parts(shape, tiles, 128 * each) == ops.Parts(16, 128)
    assert ops.fitting_parts(shape, tiles, 128 * each - 1) == ops.Parts(24, 86)
    with pytest.raises(ValueError, match="16 tiles of 1 rows take more than"):
        ops.fitting_parts(shape, tiles, 7 * each)


def test_few_queries_are_those_of_two_passes() -> None:
    shape = ops.Shape("f16", 8, 2, 64, 1.0, 64, 512, 512, 40, 80)
    assert [ops.is_few(shape, rows) for rows in (1, 4, 5)] == [True, True, False]
    assert [ops.is_few(replace(shape, kv="f8"), rows) for rows in (2, 3)] == [True, False]


def test_a_partial_attention_leaves_sinks_and_gates_to_the_merge() -> None:
    shape = ops.Shape("f16", 8, 2, 64, 1.0, 128, 1024, 520, 40, 80, gated=True, partial=True)
    with pytest.raises(AssertionError, match="wait for MergeAttention"):
        ops.many(shape, ops.Memory(*[0] * 8), ops.Tiles(1, 4))


def test_without_rows_there_is_no_launch() -> None:
    shape = ops.Shape("f16", 2, 1, 64, 1.0, 64, 128, 128, 40, 80)
    nowhere = ops.Memory(*[0] * 8)
    assert ops.few(shape, nowhere, ops.Tiles(0, 4), ops.Parts(8, 5)) == ()
    assert ops.many(shape, nowhere, ops.Tiles(0, 4)) == ()
