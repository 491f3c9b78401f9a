"""A worker that the kernel kills for memory while it loads: told as a budget that does not hold, with what to do."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import Path

import pytest

from budget.facts import MemoryFacts
from budget.probe import read_box
from homeserve import app as app_module
from homeserve.app import App
from homeserve.errors import BudgetError, HomeserveError, WorkerStartError
from homeserve.fleet import life
from homeserve.settings import Settings

TINY = Path(__file__).parents[1] / "data" / "tiny" / "mistral.f32.gguf"
GIB = 1 << 30


class Silent:
    """A watcher that tells nobody."""

    def __getattr__(self, name: str) -> object:
        return lambda *_: None


async def failure(tmp_path: Path, **changes: object) -> HomeserveError:
    """What a server says whose worker gets a SIGKILL while it loads."""
    fault = "rank=0,step=load,nth=1,action=kill"
    settings = Settings(model=str(TINY), port=0, fault=fault, **changes)  # type: ignore[arg-type]
    app = App(settings, {"HOME": str(tmp_path)}, Silent())  # type: ignore[arg-type]
    try:
        with pytest.raises(HomeserveError) as caught:
            await app.start()
    finally:
        await app.stop()
    return caught.value


@pytest.fixture
def killer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control group counts a kill for memory between any two looks."""
    count = itertools.count()
    monkeypatch.setattr(life, "oom_kill_count", lambda: next(count))


async def test_a_plan_that_was_too_small_names_half_its_pool(tmp_path: Path, killer: None) -> None:
    error = await failure(tmp_path, kv_tokens=1 << 20)
    assert isinstance(error, BudgetError) and error.exit_code == 2
    assert "rank 0 was killed by SIGKILL for want of memory" in error.message
    assert "weights 1 + kv " in error.message and "MiB are free now under " in error.message
    assert (error.field, error.fix) == ("kv_tokens", f"try --kv-tokens {1 << 19}, or free some memory")


async def test_a_box_that_filled_up_meanwhile_names_what_fits_now(
    tmp_path: Path, killer: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    box = read_box()
    now = MemoryFacts(2 * GIB, 2 * GIB, "/group/memory.max", 3 * GIB // 4, None)
    looks = iter([box, replace(box, memory=now)])
    monkeypatch.setattr(app_module, "read_box", lambda _: next(looks))
    error = await failure(tmp_path, kv_tokens=1 << 21)
    assert isinstance(error, BudgetError) and "768 MiB are free now under /group/memory.max" in error.message
    found = re.search(r"the nearest that fits is .*--kv-tokens (\d+)", error.fix or "")
    assert found is not None and 0 < int(found.group(1)) < 1 << 21


async def test_a_small_pool_is_not_to_blame(tmp_path: Path, killer: None) -> None:
    error = await failure(tmp_path, kv_tokens=512)
    assert isinstance(error, BudgetError) and (error.fix or "").startswith("use a smaller model")


async def test_any_other_kill_stays_a_workers_death(tmp_path: Path) -> None:
    error = await failure(tmp_path)
    assert isinstance(error, WorkerStartError) and error.exit_code == 3
