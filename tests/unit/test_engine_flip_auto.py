"""The policy at work: when the engine looks, what it begins by itself, and how it measures both layouts."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from engine_flip_rig import PIPELINE, TENSOR, Asked, FlipTrace, SimFleet, Trouble, ask, flip_limits, limits, run

from homeserve.engine.calibration import DRAWN, TRIES, Calibration
from homeserve.engine.engine import Engine
from homeserve.engine.flip_driver import DEADLY, LOOK_S
from homeserve.engine.request import FlipLimits

SPEEDS = {PIPELINE: (8000.0, 20.0), TENSOR: (2000.0, 80.0)}


def auto(**more: Any) -> FlipLimits:
    fields = {"policy": "auto", "estimates": SPEEDS, "cost_s": 0.02, "dwell_s": 0.5, "idle_s": 5.0}
    return flip_limits(**{**fields, **more})


def make(flips: FlipLimits | None = None, step_s: float = 0.001, **sizes: Any) -> tuple[Engine, SimFleet]:
    fleet = SimFleet(
        limits(flips or auto(), **{"kv_tokens": 4096, "context": 1024, "recurrent": False, **sizes}), step_s
    )
    fleet.times = False
    return fleet.engine, fleet


def go(fleet: SimFleet, seconds: float) -> None:
    """Answers come, and timers go off."""
    until = fleet.timers.now + seconds
    while fleet.timers.now < until:
        if fleet.plans:
            fleet.answer()
        fleet.timers.pass_(0.001)


def submit(engine: Engine, length: int, max_tokens: int) -> Asked:
    call = ask(tuple(n % 40 + 8 for n in range(length)), max_tokens)
    call = type(call)(call.request_id, call.prompt, call.sampling, max_tokens, frozenset())
    return Asked(call, engine.submit(call))


def told(engine: Engine) -> list[tuple[str, str, str]]:
    return [(record.to, record.cause, record.state) for record in engine.flip_records()]


def test_decoding_pulls_to_tensor_and_a_prompt_back() -> None:
    """One cycle with no hand in it (I15)."""

    async def body() -> None:
        engine, fleet = make()
        submit(engine, 5, 900)
        go(fleet, 0.7)
        assert told(engine) == [(TENSOR, "policy", "committed")]
        for n in range(3):
            submit(engine, 400 + n, 900)
        go(fleet, 0.02)
        assert told(engine)[1:] == [(PIPELINE, "policy", "committed")]
        go(fleet, 0.9)
        assert told(engine)[2:] == [(TENSOR, "policy", "committed")]
        assert engine.snapshot().flip["unarmed_work_count"] == 0

    run(body)


def test_it_looks_soon_after_a_call_and_again_while_one_is_open() -> None:
    async def body() -> None:
        engine, fleet = make(auto(estimates={}))
        driver = engine._flips
        assert driver is not None
        looks: list[float] = []
        look = driver._policy.look
        driver._policy.look = lambda *args: (looks.append(fleet.timers.now), look(*args))[1]  # type: ignore[method-assign]
        stream = submit(engine, 5, 900)
        submit(engine, 6, 900)
        fleet.timers.pass_(1.0)
        assert looks[0] == pytest.approx(0.005), "one look at both"
        assert len(looks) in (10, 11) and looks[1] == pytest.approx(0.005 + LOOK_S)
        assert engine.snapshot().flip["hold_reason"].endswith("not known yet")
        for stream in list(engine._sequences):
            engine.abort(stream)
        fleet.answer_all()
        fleet.timers.pass_(60.0)
        count = len(looks)
        fleet.timers.pass_(3600.0)
        assert len(looks) == count and fleet.timers.waiting == 0, "no timer runs with nothing to do"

    run(body)


def test_idle_it_goes_back_to_rest_once() -> None:
    async def body() -> None:
        engine, fleet = make()
        submit(engine, 5, 300)
        while engine._streams:
            go(fleet, 0.01)
        assert engine.snapshot().layout == TENSOR
        go(fleet, 4.0)
        assert len(told(engine)) == 1
        go(fleet, 2.0)
        assert told(engine)[1:] == [(PIPELINE, "policy", "committed")]
        go(fleet, 20.0)
        assert len(told(engine)) == 2 and fleet.timers.waiting == 0

    run(body)


def test_a_hold_is_logged_once_and_shown_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        engine, fleet = make(auto(transit_bytes=10, estimates={PIPELINE: (8.0, 1.0), TENSOR: (2.0, 99.0)}))
        with caplog.at_level(logging.INFO):
            submit(engine, 5, 900)
            go(fleet, 1.0)
        assert "MiB, is more than the" in engine.snapshot().flip["hold_reason"]
        assert sum("the layout stays" in record.message for record in caplog.records) == 1
        assert told(engine) == []

    run(body)


def test_manual_means_that_nothing_looks() -> None:
    async def body() -> None:
        engine, fleet = make(auto(policy="manual"))
        await engine.start()
        submit(engine, 5, 100)
        go(fleet, 1.0)
        assert fleet.timers.waiting == 0 and told(engine) == []
        assert engine.snapshot().flip["hold_reason"] == "the policy is manual"
        await engine.stop()

    run(body)


def test_flips_that_cost_lives_in_a_row_are_not_begun_any_more() -> None:
    async def body() -> None:
        engine, fleet = make()
        submit(engine, 5, 2000 // 3)
        for _ in range(2000):
            if fleet.trouble is None:
                fleet.trouble = Trouble("check", "miscount")
            while engine.state != "ready":
                await asyncio.sleep(0)
            go(fleet, 0.02)
            if not engine._streams:
                submit(engine, 5, 2000 // 3)
            if engine.snapshot().flip["hold_reason"] == f"the last {DEADLY} flips cost the ranks their lives":
                break
        assert len(told(engine)) == DEADLY and fleet.restarts == DEADLY

    run(body)


def test_what_is_measured_replaces_the_estimates_of_both_layouts() -> None:
    async def body() -> None:
        engine, fleet = make(auto(policy="manual"), step_s=0.002, chunk=64, prefix_cache=False)
        fleet.times = True
        assert engine.snapshot().layouts_measured[PIPELINE] == {"prefill_tok_s": None, "decode_tok_s": None, "n": 0}
        for to in (TENSOR, PIPELINE):
            submit(engine, 700, 40)
            fleet.answer_all()
            engine.flip_ask(to)
            fleet.answer_all()
        for layout in (PIPELINE, TENSOR):
            measured = engine.snapshot().layouts_measured[layout]
            assert measured["n"] >= 40
            assert measured["prefill_tok_s"] > 30_000, "64 rows each 2 ms, or less"
            assert 300 < measured["decode_tok_s"] < 1_500

    run(body)


def test_draining_is_no_cost_of_a_flip() -> None:
    """Ranks compute meanwhile. What is left of this flip takes no time on the engine's clock."""

    async def body() -> None:
        engine, fleet = make(auto(policy="manual", cost_s=7.0), step_s=0.25, chunk=64, prefix_cache=False)
        submit(engine, 700, 40)
        fleet.answer()
        record = engine.flip_ask(TENSOR)
        while fleet.plans:
            fleet.timers.pass_(0.25)
            fleet.answer()
        assert record.state == "committed"
        drain, total = record.ms["drain"], record.ms["total"]
        assert drain and total and drain > 200
        assert engine._flips is not None
        assert engine._flips.rates.cost_s == pytest.approx(2 * (total - drain) / 1e3)

    run(body)


# --------------------------------------------------------------------------------------------------------- calibration


def idle_engine(**more: Any) -> tuple[Engine, SimFleet]:
    engine, fleet = make(auto(calibrate=True, estimates={}, **more), chunk=64)
    fleet.times = True
    assert engine._flips is not None
    engine._flips.begin()
    return engine, fleet


def test_the_first_idle_moment_measures_both_layouts_and_ends_at_rest() -> None:
    async def body() -> None:
        engine, fleet = idle_engine()
        go(fleet, 4.9)
        assert fleet.kinds == [], "not at once"
        go(fleet, 40.0)
        snapshot = engine.snapshot()
        for layout in (PIPELINE, TENSOR):
            assert (
                snapshot.layouts_measured[layout]["prefill_tok_s"] and snapshot.layouts_measured[layout]["decode_tok_s"]
            )
        assert told(engine) == [(TENSOR, "policy", "committed"), (PIPELINE, "policy", "committed")]
        assert snapshot.layout == PIPELINE and fleet.timers.waiting == 0
        assert (snapshot.finished, snapshot.aborted, snapshot.prompt_tokens, snapshot.generated_tokens) == (0, 0, 0, 0)
        assert snapshot.running == snapshot.waiting == 0

    run(body)


def test_a_real_call_ends_the_measuring_at_once() -> None:
    async def body() -> None:
        engine, fleet = idle_engine()
        while not fleet.plans:
            fleet.timers.pass_(0.1)
        call = submit(engine, 5, 5)
        while fleet.plans[0].draft.rows[0].request == 1:
            fleet.answer()
        assert fleet.plans[0].draft.rows[0].request == 2, "what was in flight, and then the call"
        fleet.answer_all()
        await asyncio.wait_for(call.read(), 5)
        assert len(call.tokens) == 5
        go(fleet, 60.0)
        assert engine.snapshot().layouts_measured[TENSOR]["prefill_tok_s"], "it was tried again at the next idle moment"
        assert engine.snapshot().finished == 1

    run(body)


def test_a_call_during_the_flip_between_measurements_goes_on_behind_it() -> None:
    async def body() -> None:
        engine, fleet = idle_engine()
        while not engine.flip_records():
            fleet.timers.pass_(0.001)
            while fleet.plans and not engine.flip_records():
                fleet.answer()
        assert not engine.flip_records()[0].over
        call = submit(engine, 5, 5)
        fleet.answer_all()
        await asyncio.wait_for(call.read(), 5)
        assert len(call.tokens) == 5

    run(body)


def test_a_fleet_that_tells_no_times_is_tried_a_few_times_only() -> None:
    async def body() -> None:
        engine, fleet = idle_engine()
        fleet.step_s = 0.0
        assert engine._flips is not None
        engine._flips.rates.add = lambda *a: None  # type: ignore[method-assign]
        go(fleet, 200.0)
        tries = engine._flips._calibration.tries
        assert tries == {PIPELINE: TRIES, TENSOR: TRIES}
        assert fleet.timers.waiting == 0 and engine.snapshot().layout == PIPELINE

    run(body)


def test_a_server_that_is_drained_does_not_wait_for_a_measurement() -> None:
    async def body() -> None:
        engine, fleet = idle_engine()
        while not fleet.plans:
            fleet.timers.pass_(0.1)
        await asyncio.wait_for(engine.drain(5), 1)
        fleet.answer_all()
        assert engine._scheduler.idle and fleet.timers.waiting == 0

    run(body)


def test_a_measurement_is_short_and_no_prompt_is_known() -> None:
    async def body() -> None:
        engine, fleet = idle_engine()
        go(fleet, 60.0)
        assert engine._scheduler.prefix.hit_tokens == 0
        assert engine._flips is not None
        call = engine._flips._calibration._call(100)
        assert len(call.prompt) + call.max_tokens == 99 and call.max_tokens == DRAWN

    run(body)


# ------------------------------------------------------------------------------------------------------- random loads


@pytest.mark.parametrize("seed", range(12))
def test_automatic_flips_under_a_mixed_load_alter_nothing(seed: int) -> None:
    """With a dwell of a tenth of a second: many flips, each by the policy, among refusals, lies and losses."""

    async def body() -> None:
        speeds = {PIPELINE: (10_000.0, 1.0), TENSOR: (10.0, 1_000.0)}
        flips = flip_limits(policy="auto", estimates=speeds, cost_s=0.001, dwell_s=0.1, idle_s=0.05, cache_bytes=3000)
        trace = FlipTrace(seed, flip=flips, recurrent=seed % 2 == 0, windows=0)
        trace.fleet.times = False
        trace.flip = lambda: None  # type: ignore[method-assign]
        for _ in range(900):
            trace.fleet.timers.pass_(0.004)
            if trace.random.random() < 0.01:
                trace.fleet.trouble = Trouble(*trace.random.choice([("pack", "refuse"), ("verify", "lose")]))
            await trace.step()
        trace.engine._flips.stop()  # type: ignore[union-attr]
        await trace.finish()
        records = trace.engine.flip_records()
        assert len(records) > 2 and {record.cause for record in records} == {"policy"}

    run(body)


def test_flips_to_measure_elsewhere_are_asked_for_a_few_times_only() -> None:
    """One that is given up each time would be asked for again every few milliseconds, for ever."""
    measuring = Calibration(limits(auto()))
    for _ in range(TRIES):
        assert measuring.may_try(TENSOR, away=True)
        measuring.going(TENSOR)
    assert not measuring.may_try(TENSOR, away=True)
    assert measuring.may_try(TENSOR) and measuring.may_try(PIPELINE, away=True), "where it is, nothing bars it"
