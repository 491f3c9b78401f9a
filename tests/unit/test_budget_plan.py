"""The plan of one CPU rank: what fits, and what is said of what does not."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from budget.facts import MemoryFacts, ModelShape
from budget.plan import MIB, HostPlan, Refusal, Wish, plan_host

MEMORY = MemoryFacts(8192 * MIB, 8192 * MIB, "MemTotal", 6000 * MIB, 0)
SHAPE = ModelShape("tiny", 100 * MIB, 32 << 10, 2048, 576, 1536, 49152)
WISH = Wish(0, 0, 16, 272, 16, 256 * MIB)


def test_the_pool_is_what_all_requests_need() -> None:
    plan = plan_host(MEMORY, SHAPE, WISH)
    assert isinstance(plan, HostPlan)
    assert (plan.context, plan.kv_tokens) == (2048, 16 * 2048)
    assert plan.total_bytes <= plan.ceiling_bytes == (6000 - 256) * MIB
    assert [line.name for line in plan.lines] == ["weights", "kv", "workspace", "processes"]


def test_an_unasked_pool_takes_a_quarter_of_the_rest() -> None:
    plan = plan_host(MEMORY, replace(SHAPE, context=1 << 20), WISH)
    assert isinstance(plan, HostPlan)
    rest = plan.ceiling_bytes - sum(line.bytes for line in plan.lines if line.name != "kv")
    assert plan.kv_tokens == rest // SHAPE.kv_bytes_per_token // 4 // 16 * 16
    assert plan.context == plan.kv_tokens, "a request can be no longer than the pool"


def test_an_asked_for_context_takes_more_than_its_share_where_it_must() -> None:
    plan = plan_host(MEMORY, replace(SHAPE, context=1 << 20), replace(WISH, context=100_000))
    assert isinstance(plan, HostPlan)
    assert plan.context == 100_000 and plan.kv_tokens == 100_000


def test_explicit_tokens_are_taken_as_they_are() -> None:
    plan = plan_host(MEMORY, SHAPE, replace(WISH, kv_tokens=1001))
    assert isinstance(plan, HostPlan)
    assert (plan.kv_tokens, plan.context) == (992, 992)


def test_a_refusal_shows_the_sum_and_the_nearest_that_fits() -> None:
    refusal = plan_host(MEMORY, SHAPE, replace(WISH, kv_tokens=10_000_000))
    assert isinstance(refusal, Refusal)
    assert "weights 100 + " in refusal.arithmetic and "MiB may be used" in refusal.arithmetic
    assert refusal.needed_bytes > refusal.ceiling_bytes
    nearest = plan_host(MEMORY, SHAPE, replace(WISH, kv_tokens=refusal.nearest_tokens))
    assert isinstance(nearest, HostPlan)
    assert isinstance(plan_host(MEMORY, SHAPE, replace(WISH, kv_tokens=refusal.nearest_tokens + 16)), Refusal)


def test_weights_that_do_not_fit_leave_nothing() -> None:
    refusal = plan_host(MEMORY, replace(SHAPE, weights_bytes=7000 * MIB), WISH)
    assert isinstance(refusal, Refusal) and refusal.nearest_tokens == 0


@settings(max_examples=60, deadline=None)
@given(
    available=st.integers(0, 1 << 36),
    weights=st.integers(1, 1 << 35),
    per_token=st.integers(1, 1 << 22),
    context=st.integers(1, 1 << 22),
    wish_context=st.integers(0, 1 << 22),
    wish_tokens=st.integers(0, 1 << 26),
    running=st.integers(1, 256),
)
def test_a_plan_always_fits_and_a_wish_is_never_cut(
    available: int, weights: int, per_token: int, context: int, wish_context: int, wish_tokens: int, running: int
) -> None:
    memory = replace(MEMORY, available_bytes=available)
    shape = replace(SHAPE, weights_bytes=weights, kv_bytes_per_token=per_token, context=context)
    plan = plan_host(memory, shape, replace(WISH, context=wish_context, kv_tokens=wish_tokens, running=running))
    if isinstance(plan, Refusal):
        assert plan.needed_bytes > plan.ceiling_bytes or plan.nearest_tokens == 0
        return
    assert plan.total_bytes <= plan.ceiling_bytes
    assert plan.kv_tokens >= 16 and plan.kv_tokens % 16 == 0
    assert plan.context <= plan.kv_tokens
    if wish_tokens >= 16:
        assert plan.kv_tokens == wish_tokens // 16 * 16
    elif wish_context and not wish_tokens:
        assert plan.context == wish_context
