"""What `up` asks of the planner."""

from __future__ import annotations

from budget.facts import Box, CpuFacts, MemoryFacts
from homeserve.settings import Settings
from homeserve.sizing import wish_of

BOX = Box("box", MemoryFacts(1 << 33, 1 << 33, "MemTotal", 1 << 32, 0), CpuFacts("CPU", 4, 3, "affinity", frozenset()))


def test_the_cpu_is_asked_for_with_its_cores_and_packed_weights() -> None:
    wish = wish_of(Settings(), BOX)
    assert (wish.devices, wish.threads, wish.dense, wish.kv_type) == (("cpu",), 3, 0, "f16")


def test_the_reference_backend_is_priced_with_what_it_holds() -> None:
    """Weights and KV rows as float32, whatever the file and --kv-type say."""
    wish = wish_of(Settings(backend="reference"), BOX)
    assert (wish.dense, wish.kv_type) == (4, "f32")
