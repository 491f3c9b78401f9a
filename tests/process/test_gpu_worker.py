"""Workers with cards, seen from outside: what they import, which kernels they launch and which none ever does, what
of a card's memory they hold from flip to flip, how a fleet of both vendors goes on when one of its cards is lost.

Drivers and compilers are fakes (tests/fake_cards.py). That tokens are the oracle's: tests/model/test_gpu_models.py.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
from card_play import COUNTER, CUDA, CUDA1, ROCM, SYMBOLS, CardPlay, talk, tokens_of
from fake_cards import LAUNCH_FAILED, FakeCards, fake_cards
from patchwork import TYPES, patchwork

from homeserve.fleet import Fleet
from homeserve.layouts.ranks import RankDevice

SLOW = os.environ.get("HOMESERVE_TEST_TIER") == "slow"
Run = Callable[[Callable[[], Awaitable[None]]], None]
DRAFTS = 3
HOOK = """
import os, sys
if "homeserve.worker" in sys.orig_argv:
    seen = os.open(os.path.join({folder!r}, f"imports-{{os.getpid()}}"), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    def note(event, arguments):
        if event == "import":
            os.write(seen, arguments[0].encode() + b"\\n")
    sys.addaudithook(note)
"""
"""For sitecustomize: a worker writes down each module that it begins to import, whoever asks for it and whenever."""
FOREIGN = ("backends.cpu", "backends.reference", "torch", "triton", "gguf", "transformers")

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def cards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeCards:
    made = fake_cards(tmp_path, cuda=2)
    for name, value in made.environment.items():
        monkeypatch.setenv(name, value)
    return made


async def counting(play: CardPlay) -> bytes:
    """A count that is drafted and flipped there and back: its first 24 tokens."""
    play.begin(1, 0, list(b"count 730:"))
    await play.run(64)
    for length in (6, 18, 24):
        await play.until({1: length}, drafts=DRAFTS)
        await play.flip()
    return bytes(play.answer(1))


COUNTED = b" 731 732 733 734 735 736"


def pids(play: CardPlay) -> list[int]:
    assert isinstance(play.fleet, Fleet)
    found = [status.pid for status in play.fleet.ranks]
    assert all(found)
    return [pid for pid in found if pid is not None]


# -------------------------------------------------------------------------------------------------------------- imports


def test_a_worker_with_a_card_imports_no_other_backend(
    cards: FakeCards, run_once: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor anything that only the oracles need; and it maps no library of the CPU backend. In a fleet that loads, drafts
    and flips, whatever function imports it."""
    (tmp_path / "sitecustomize.py").write_text(HOOK.format(folder=str(tmp_path)))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH")))))

    async def main() -> None:
        async with CardPlay(COUNTER, (CUDA, ROCM), drafts=DRAFTS) as play:
            assert await counting(play) == COUNTED and play.flips == 3 and play.requests[1].rounds
            for pid, driver in zip(pids(play), ("libcuda.so", "libamdhip64.so"), strict=True):
                seen = set((tmp_path / f"imports-{pid}").read_text().split())
                assert {"backends.gpu.program", "backends.gpu.layouts", "backends.host.collective"} <= seen
                wrong = {name for name in seen for root in FOREIGN if name == root or name.startswith(f"{root}.")}
                assert not wrong
                maps = Path(f"/proc/{pid}/maps").read_text()
                assert driver in maps and "libhomeserve_host" in maps
                assert "libhomeserve_cpu" not in maps and "/backends/cpu/" not in maps

    run_once(main)


# ------------------------------------------------------------------------------------------------------------- launches


IN_FULL = tuple(quant for quant in TYPES if quant.name in ("F16", "Q8_0", "Q4_K", "MXFP4"))
OF_TYPES = ("pack", "linear_few", "linear_many", "experts_few", "experts_many")
"""Files of kernels for weights, of which every type of the patchwork has all to launch."""
NEVER = {
    "dequantize_*": "for library GEMMs, which no worker uses yet",
    "sample_*": "tokens are drawn on the host",
    "counts_add": "tokens are drawn on the host",
    "attention_latent_*": "no family has latent attention",
    "route_512": "no model here has so many experts",
    "delta_recurrent_128": "heads of 64 at most here",
    "delta_recurrent_256": "heads of 64 at most here",
    "delta_chunks_128": "heads of 64 at most here",
    "delta_chunks_256": "heads of 64 at most here",
}
"""Kernels that no worker here launches, whatever the model, and why. Each by itself is proven in tests/kernel."""
UNLIKE = {
    "embed_rows_*": "tables of vocabularies here are F32 and F16",
    "attention_*_d*": "one size of heads, and one type of keys, to a model",
    "rope_store_*": "one type of keys to a model",
}
"""Of these there is one for each type or size; the runs here have some of them."""


async def patched(play: CardPlay) -> None:
    """Batches of every form: 140 rows, 20, 8, 4, 2 and 1."""
    play.begin(1, 0, tokens_of(1, 80))
    play.begin(2, 1, tokens_of(2, 60))
    await play.run(80)
    await play.run(only=[1])
    await play.run()
    play.begin(3, 2, tokens_of(3, 32))
    for rows in (4, 8, 20):
        await play.run(rows, only=[3])
    await play.run()


async def drafted(play: CardPlay) -> None:
    assert await counting(play) == COUNTED


def runs(folder: Path, types: Sequence[Any]) -> list[tuple[str | Path, Sequence[RankDevice], Any, dict[str, Any]]]:
    """Models, cards, what is asked of them, and how they are loaded."""
    quants = {"types": types}
    return [
        (patchwork("llama", folder, **quants), [CUDA], patched, {"rows": 160}),
        (patchwork("qwen3moe", folder, **quants), [ROCM], patched, {"rows": 160, "kv_type": "f16"}),
        (patchwork("gemma4", folder, **quants), [CUDA], talk, {"kv_type": "q8_0"}),
        (COUNTER, [CUDA, CUDA1], drafted, {"drafts": DRAFTS}),
        ("qwen3_5_moe_text", [CUDA, CUDA1], talk, {"kv_type": "f8"}),
        ("gemma3_text", [CUDA], talk, {"kv_type": "bf16"}),
        ("gpt_oss", [ROCM], talk, {}),
        ("llama", [CUDA, ROCM], talk, {"vector": (7, 1)}),
    ]


@pytest.mark.timeout(1800 if SLOW else 600)
def test_every_kernel_is_launched_by_a_worker_or_is_told_of(cards: FakeCards, tmp_path: Path) -> None:
    """Over many models together: what ran is of the compile gate's symbols, and what did not stands in a list here."""
    types = TYPES if SLOW else IN_FULL
    launched: set[str] = set()

    async def main() -> None:
        for model, devices, play_it, more in runs(tmp_path, types):
            async with CardPlay(model, devices, **more) as play:
                await play_it(play)
                counted = await play.counted()
                assert play.missing(counted) == [], model
                launched.update(name for each in counted for name in each.launches)

    asyncio.run(main())
    assert launched <= SYMBOLS
    left = sorted(SYMBOLS - launched)
    families = Counter("_".join(name.split("_")[:2]) for name in left)
    print(f"{len(launched)} of {len(SYMBOLS)} kernels ran; never: {dict(families)}")
    named = {quant.name.lower() for quant in types}
    missed = [name for name in left if not any(fnmatchcase(name, each) for each in (*NEVER, *UNLIKE))]
    unknown = [name for name in missed if type_of(name) in named or not type_of(name)]
    assert not unknown, unknown
    for pattern in UNLIKE:
        assert any(fnmatchcase(name, pattern) for name in launched), pattern
    wrong = [name for name in launched if any(fnmatchcase(name, each) for each in NEVER)]
    assert not wrong, f"told of as never launched, and launched: {wrong}"


def type_of(name: str) -> str:
    """The weights' type in a symbol's name; "" where it has none."""
    file = next((each for each in OF_TYPES if name.startswith(f"{each}_")), "")
    return name.removeprefix(f"{file}_").split("_r", 1)[0] if file else ""


# --------------------------------------------------------------------------------------------------------------- memory


def held_bytes(pid: int) -> int:
    """What the system holds for the cards of a process: blocks of their memory's files."""
    total = 0
    for each in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if os.readlink(each).startswith("/memfd:card"):
                total += os.stat(each).st_blocks * 512
        except FileNotFoundError:
            continue  # closed meanwhile
    return total


def test_pools_are_released_and_restored_while_a_model_is_served(cards: FakeCards, run_once: Run) -> None:
    """At every flip the layout that is left gives its pools' memory back, and the other one gets its own behind the
    addresses that recordings have: never more is held, and the answer goes on through recordings of both layouts."""

    async def main() -> None:
        async with CardPlay(COUNTER, (CUDA, ROCM), vector=(1, 2)) as play:
            workers = pids(play)
            play.begin(1, 0, list(b"count 730:"))
            await play.run(64)
            held: dict[str, list[list[int]]] = {"pipeline": [], "tensor": []}
            for _ in range(6):
                await play.until({1: len(play.answer(1)) + 4})
                held[play.layout].append([held_bytes(pid) for pid in workers])
                await play.flip()
            assert bytes(play.answer(1))[: len(COUNTED)] == COUNTED
            assert play.flips == 6 and pids(play) == workers
            for layout, found in held.items():
                assert found[0] == found[1] == found[2] and all(found[0]), layout
            print(f"held by the workers: {held}")

    run_once(main)


# --------------------------------------------------------------------------------------------------------------- faults


def test_a_fleet_of_both_vendors_goes_on_when_one_card_is_lost(cards: FakeCards, run_once: Run) -> None:
    """Inside a plan of the layout in which both exchange. The loss names the card; the rank beside it ends no worse
    than a killed rank's does, and the next life answers as the first."""

    async def main() -> None:
        async with CardPlay("qwen3_moe", (CUDA, ROCM), layout="tensor") as play:
            before = {number: [each.token for each in own] for number, own in (await talk(play)).items()}
            described = (cards.folder / "rocm.cards").read_text()
            play.begin(9, 1, tokens_of(9, 30))
            for call in ("hipModuleLaunchKernel", "hipGraphLaunch"):
                cards.fail("amd", call, LAUNCH_FAILED, card=0, count=0)
            with pytest.raises(AssertionError):
                await play.run(30, only=[9])
            (loss,) = play.losses
            assert loss.rank == 1 and loss.device and "AMD Radeon 780M Graphics" in loss.why and ROCM.id in loss.why
            (cards.folder / "rocm.cards").write_text(described)
            await play.again()
            after = {number: [each.token for each in own] for number, own in (await talk(play)).items()}
            assert after == before and not play.losses

    run_once(main)
