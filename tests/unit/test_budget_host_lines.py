"""Lines of host memory: the same sums as those who take the memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from budget import host_lines
from budget.facts import MIB, KvShape, LayerShape, ModelShape
from homeserve.engine.request import EngineLimits
from homeserve.engine.scheduler import plan_bytes_limit, result_bytes_limit
from homeserve.wire.ring import PROGRESS_SLOTS, ring_bytes, slot_bytes_for

LAYER = LayerShape(1000, 2000, kv=KvShape(elements=2 * 3 * 64, heads=3))
SHAPE = ModelShape(
    "smollm2", "llama", "Q4_1", (LAYER,) * 30, hidden=576, mixer_width=9 * 64 + 2 * 3 * 64, ffn=1536, vocab=49152,
    context=8192, embedding_bytes=5000, head_bytes=0, tied=True,
)  # fmt: skip


@settings(max_examples=50)
@given(
    ranks=st.integers(1, 8),
    running=st.integers(1, 1024),
    chunk=st.integers(1, 8192),
    context=st.integers(1, 1 << 20),
    in_flight=st.integers(1, 8),
    windows=st.sets(st.integers(1, 8192), max_size=2),
    drafts=st.integers(0, 8),
    hidden=st.integers(1, 8192),
)
def test_the_plan_log_is_what_the_fleet_makes(
    ranks: int, running: int, chunk: int, context: int, in_flight: int, windows: set[int], drafts: int, hidden: int
) -> None:
    limits = EngineLimits(
        context=context, kv_tokens=context, running=running, waiting=1, chunk=chunk, prefill_delay=0,
        plans_in_flight=in_flight, prefix_cache=True, windows=tuple((each, 16) for each in sorted(windows)),
        drafts=drafts, hidden=hidden,
    )  # fmt: skip
    log = ring_bytes(in_flight, slot_bytes_for(plan_bytes_limit(limits)))
    report = ring_bytes(in_flight + PROGRESS_SLOTS, slot_bytes_for(result_bytes_limit(limits)))
    sizes = ranks, running, chunk, context, in_flight
    assert (
        host_lines.plan_log_bytes(*sizes, groups=1 + len(windows), drafts=drafts, hidden=hidden) == log + ranks * report
    )


def test_buffers_grow_with_rows_threads_and_context_and_by_what() -> None:
    size = host_lines.workspace_bytes(SHAPE, 272, 48, 2, 8192)
    # One row: x, update, normed; q, k, v, mixed; gate, up, act. Then its int16 activations, its tiles, its rope angles.
    row = 4 * (3 * 576 + (576 + 2 * 192) + 576 + 3 * 1536) + 1536 // 32 * 80 + 8 + 4 * 64
    assert host_lines.workspace_bytes(SHAPE, 273, 48, 2, 8192) - size == row
    assert host_lines.workspace_bytes(SHAPE, 272, 49, 2, 8192) - size == 4 * (2 * 576 + 49152)
    partials = 4 * (8192 // 16 // 16) * 3 * (16 + 64) * 4
    assert host_lines.workspace_bytes(SHAPE, 272, 48, 3, 8192) - size == partials
    assert host_lines.workspace_bytes(SHAPE, 272, 48, 2, 16384) - size == 2 * partials
    assert host_lines.workspace_bytes(SHAPE, 272, 48, 2) == size, "0: the model's own context"
    headless = host_lines.workspace_bytes(SHAPE, 272, 48, 2, 8192, head=False)
    assert size - headless == 48 * 4 * (2 * 576 + 49152)


def test_a_model_without_attention_has_buffers_all_the_same() -> None:
    bare = replace(SHAPE, layers=(LayerShape(1000, 2000, state_elements=64),), mixer_width=2000)
    assert host_lines.workspace_bytes(bare, 16, 1, 1) > 16 * 4 * (3 * 576 + 2000 + 3 * 1536)


@pytest.mark.parametrize(("rows", "groups"), [(1, 1), (16, 1), (17, 2), (32001, 2001)])
def test_a_packed_matrix_has_whole_groups_of_rows(rows: int, groups: int) -> None:
    assert host_lines.packed_tensor_bytes(144, 256, rows, 512) == groups * 16 * 2 * 144
    assert host_lines.packed_tensor_bytes(2, 1, rows, 7) == -(-groups * 16 * 7 * 2 // 64) * 64


def test_processes_grow_with_what_they_keep() -> None:
    larger = replace(SHAPE, vocab=SHAPE.vocab + 100_000)
    more = host_lines.engine_bytes(larger) - host_lines.engine_bytes(SHAPE)
    assert 40 * MIB < more < 80 * MIB
    assert host_lines.worker_bytes("cpu", 64) - host_lines.worker_bytes("cpu", 1) < 4 * MIB
    assert host_lines.worker_bytes("reference", 64) == host_lines.worker_bytes("reference", 1)
    assert host_lines.template_bytes() < host_lines.worker_bytes("cpu") < host_lines.engine_bytes(SHAPE)


@pytest.mark.parametrize(
    ("vocab", "reading_mib"), [(32_000, 50.7), (49_152, 43.9), (128_256, 151.9), (151_936, 131.8), (262_144, 370.9)]
)
def test_a_vocabulary_takes_no_more_than_is_planned(vocab: int, reading_mib: float) -> None:
    """As measured of real ones, at the worst moment (see `host_lines`)."""
    assert reading_mib * MIB <= host_lines.vocabulary_bytes(replace(SHAPE, vocab=vocab)) < 2.1 * reading_mib * MIB
