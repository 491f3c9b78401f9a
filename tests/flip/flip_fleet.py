"""Real rank processes driven plan by plan: requests prefill, decode, draft, are saved and restored and given up, with a
flip between any two of these.

The same script runs on one rank, where a flip does nothing, and without drafts: what the tokens must be.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from homeserve import checkpoint as checkpoints
from homeserve.fleet import ActSizes, Fleet, FleetSpec, Loss
from homeserve.layouts.ranks import RankDevice
from homeserve.models import registry
from homeserve.wire.records import (
    PACK,
    VERIFY,
    Boot,
    FlipAnswer,
    FlipDigest,
    FlipLive,
    FlipOrder,
    LaneRows,
    LoadSpec,
    NewLane,
    Plan,
    PlanKind,
    RankFacts,
    Result,
    Sample,
    Sampling,
    pack_ints,
)
from homeserve.worker.runner import Runner

TINY = Path(__file__).parents[1] / "data" / "tiny"
OTHER = {"pipeline": "tensor", "tensor": "pipeline"}
PAGE, LANES, LANE_PAGES, ROWS, PAGES, CHECKPOINTS = 16, 4, 8, 64, 64, 2
HIDDEN = 192
PATIENCE_S = 60.0
COMPILES_S = 900.0
"""How long a load may be silent on cards: emulated kernels are compiled by g++."""
TRANSIT_BYTES = 8 << 20


NAN = b"\x00\x00\xc0\x7f"
"""As 32-bit floats have it."""


def poison(rows: Iterable[tuple[int, int, int]]) -> None:
    """Write NaN over the memory of processes: (pid, address, bytes)."""
    for pid, address, size in rows:
        with open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
            memory.seek(address)
            assert memory.write(NAN * (size // 4)) == size


def bits(numbers: Iterable[int]) -> bytes:
    found = bytearray(PAGES // 8)
    for number in numbers:
        found[number // 8] |= 1 << number % 8
    return bytes(found)


@dataclass
class Request:
    """A request in its lane: `tokens` are prompt and answer, of which `computed` have been inputs."""

    number: int
    lane: int
    tokens: list[int]
    prompt_len: int
    sampling: Sampling
    pages: list[int] = field(default_factory=list)
    computed: int = 0
    paged: int = 0
    """Pages that the ranks have been told."""
    begun: bool = False
    told: bool = False
    """Whether the ranks know its last token: they do not behind a flip."""
    answers: list[Sample] = field(default_factory=list)
    rounds: list[tuple[int, int]] = field(default_factory=list)
    """Of each plan in which it drafted: drafts, and how many of them counted."""


class Inside:
    """Stands for a fleet of one rank: its runner, in this process."""

    def __init__(self, spec: FleetSpec, listener: Play) -> None:
        self._listener, self._seq = listener, 0
        sizes = spec.plans_in_flight, spec.slot_bytes, spec.plans_in_flight, spec.report_slot_bytes
        self._runner = Runner(Boot(0, 1, *sizes, spec.backend, 0, spec.threads, ()), lambda *_: None)

    async def start(self) -> None:
        pass

    async def load(self, spec: LoadSpec) -> tuple[RankFacts, ...]:
        facts = self._runner.run(Plan(0, 0, PlanKind.LOAD, 1, load=spec)).facts
        assert facts is not None
        return (facts,)

    async def stop(self) -> None:
        self._runner.close()

    def issue(self, kind: PlanKind, *, epoch: int, **parts: Any) -> int:
        self._seq += 1
        answer = self._runner.run(Plan(self._seq, epoch, kind, 1, **parts))
        self._listener.on_results(self._seq, (Result(0, self._seq, epoch, samples=answer.samples),))
        return self._seq


class Play:
    """A fleet and its requests. `ranks` 1: no flips. `model`: a name of tests/data/tiny, or a file. `drafts`: the most
    that a row may ask for, and `drafts_test` what is done to them. `inside`: one rank, in this process. `devices`: what
    each rank opens. `rows`: of a plan, at most, without drafts."""

    def __init__(
        self,
        model: str | Path,
        ranks: int = 3,
        *,
        layout: str = "pipeline",
        ranges: tuple[tuple[int, int], ...] = (),
        weight_vector: tuple[int, ...] = (2, 1, 1),
        token_vector: tuple[int, ...] = (3, 2, 1),
        unified: bool = False,
        image_dir: str = "",
        kv_type: str = "f16",
        windows: tuple[int, ...] = (),
        fault: str = "",
        captures: str | None = None,
        transit_bytes: int = TRANSIT_BYTES,
        drafts: int = 0,
        drafts_test: str = "",
        inside: bool = False,
        backend: str = "cpu",
        devices: tuple[RankDevice, ...] = (),
        rows: int = ROWS,
    ) -> None:
        self.ranks, self.layout, self.windows = ranks, layout, windows
        path = model if isinstance(model, Path) else TINY / f"{model}.f32.gguf"
        self.recurrent = path.name.startswith(("qwen3_5", "qwen3_next", "counter"))
        most = rows + LANES * drafts
        several = ranks > 1
        flight = ranks + 1
        self.spec = FleetSpec(
            ranks=ranks,
            backend=backend,
            device_index=0,
            threads=1,
            isa="",
            plans_in_flight=flight,
            plan_timeout_s=20.0,
            slot_bytes=16384,
            report_slot_bytes=32768,
            fault=fault,
            capture_dir=captures,
            acts=ActSizes(8192, most * 2 * HIDDEN, 4 * LANES * (1 + drafts), flight + 1) if several else None,
            unified=unified and several,
            weights_copy=several and not unified and not image_dir,
            transit_bytes=0 if unified or not several else transit_bytes,
            devices=devices,
            load_silence_s=COMPILES_S if devices else FleetSpec.load_silence_s,
        )
        shares: dict[str, Any] = {}
        if several:
            shares = {
                "flip": True,
                "layout": layout,
                "ranges": ranges,
                "weight_vector": weight_vector,
                "token_vector": token_vector,
                "transit_bytes": 0 if unified else transit_bytes,
                "image_dir": image_dir,
            }
        self.load_spec = LoadSpec(
            str(path),
            PAGES * PAGE,
            kv_type,
            most,
            most,
            LANES,
            LANE_PAGES,
            state_slots=LANES + CHECKPOINTS,
            window_slots=tuple((window, PAGES * PAGE) for window in windows),
            drafts=drafts,
            drafts_test=drafts_test,
            deterministic=not devices,  # cards never are
            **shares,
        )
        self.fleet: Fleet | Inside = Inside(self.spec, self) if inside else Fleet(self.spec, self)
        self.facts: tuple[RankFacts, ...] = ()
        self.results: dict[int, tuple[Result, ...]] = {}
        self.losses: list[Loss] = []
        self.epoch = self.flips = 0
        self.requests: dict[int, Request] = {}
        self.saved: dict[int, tuple[list[int], list[int]]] = {}
        """Of each checkpoint its tokens and pages."""
        self._dropped: list[int] = []
        self._changed = asyncio.Event()
        self._free = list(range(PAGES))
        random.Random(5).shuffle(self._free)

    async def __aenter__(self) -> Self:
        await self.fleet.start()
        try:
            self.facts = await self.fleet.load(self.load_spec)
        except BaseException:
            await self.fleet.stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.fleet.stop()

    def on_results(self, seq: int, results: tuple[Result, ...]) -> None:
        self.results[seq] = results
        self._changed.set()

    def on_lost(self, loss: Loss) -> None:
        self.losses.append(loss)
        self._changed.set()

    async def answered(self, seq: int) -> tuple[Result, ...]:
        async with asyncio.timeout(PATIENCE_S):
            while seq not in self.results and not self.losses:
                self._changed.clear()
                await self._changed.wait()
        assert not self.losses, self.losses
        return self.results.pop(seq)

    async def again(self) -> None:
        """Another life, behind a loss: nothing of the requests is left, and epochs go on."""
        assert isinstance(self.fleet, Fleet)
        await self.fleet.restart()
        self.losses.clear()
        self.results.clear()
        self.requests.clear()
        self.saved.clear()
        self.layout = self.load_spec.layout
        self.flips += 1
        self.epoch = self.flips

    def lies_in_transit(self) -> int:
        """Bytes of memory that the transit memory takes now."""
        assert isinstance(self.fleet, Fleet)
        life = self.fleet._life
        assert life is not None and life._acts is not None
        fd = life._acts.transit_fd
        return os.fstat(fd).st_blocks * 512 if fd >= 0 else 0

    # ---------------------------------------------------------------------------------------------------- requests

    def begin(self, number: int, lane: int, prompt: list[int], **sampling: Any) -> None:
        """A request takes a lane; nothing is computed."""
        drawn = Sampling(**({"temperature": 0.0} | sampling))
        self.requests[number] = Request(number, lane, list(prompt), len(prompt), drawn)

    def begin_from(self, number: int, lane: int, slot: int, more: list[int]) -> None:
        """A request that goes on from a checkpoint: the prefix hit of a recurrent model."""
        tokens, pages = self.saved[slot]
        self.begin(number, lane, [*tokens, *more])
        self.requests[number].computed, self.requests[number].pages = len(tokens), list(pages)

    def give_up(self, number: int) -> Request:
        """A client has gone: the next plan drops the lane, and its pages are dealt out again at once."""
        gone = self.requests.pop(number)
        self._dropped.append(gone.lane)
        kept = {page for _, pages in self.saved.values() for page in pages}
        self._free += [page for page in gone.pages if page not in kept]
        return gone

    async def run(
        self,
        rows: int = 1,
        save: dict[int, int] | None = None,
        only: Iterable[int] = (),
        drafts: Mapping[int, int] | None = None,
    ) -> None:
        """One plan: the next `rows` tokens of a prompt that is not computed, one of an answer. `save`: checkpoint slot
        of a request. `drafts`: of those whose last token alone is to be computed, how many more, where ranks draft."""
        chosen = [each for each in self.requests.values() if not list(only) or each.number in set(only)]
        new = tuple(self._new(each) for each in chosen if not each.begun)
        asked = (drafts or {}) if self.may_draft else {}
        plan = tuple(
            self._drafting(each, asked[each.number])
            if asked.get(each.number) and each.computed == len(each.tokens) - 1 >= each.prompt_len
            else self._rows(each, rows, (save or {}).get(each.number, -1))
            for each in chosen
        )
        for number, slot in (save or {}).items():
            each = self.requests[number]
            self.saved[slot] = each.tokens[: each.computed], list(each.pages)
        drop, self._dropped = tuple(self._dropped), []
        seq = self.fleet.issue(PlanKind.MIXED, epoch=self.epoch, drop=drop, new=new, rows=plan)
        samples = (await self.answered(seq))[-1].samples
        for each, told in zip(chosen, plan, strict=True):
            own = [sample for sample in samples if sample.request == each.number and sample.token >= 0]
            assert [sample.position for sample in own] == list(range(len(each.tokens), len(each.tokens) + len(own)))
            each.tokens += [sample.token for sample in own]
            each.answers += own
            each.told |= bool(own)
            if told.drafts:
                assert 1 <= len(own) <= 1 + told.drafts
                each.rounds.append((told.drafts, len(own) - 1))
                each.computed += len(own)

    async def until(self, wanted: Mapping[int, int], rows: int = 1, drafts: int = 0) -> None:
        """Plans until each of these requests has answered with exactly so many tokens, with at most `drafts`."""
        while short := {number: n - len(self.answer(number)) for number, n in wanted.items()}:
            short = {number: left for number, left in short.items() if left > 0}
            if not short:
                return
            most = {number: min(drafts, left - 1) for number, left in short.items()}
            await self.run(rows, only=short, drafts=most)

    @property
    def may_draft(self) -> bool:
        """The drafting block lies on the last rank alone in the pipeline layout."""
        return self.load_spec.drafts > 0 and (self.ranks == 1 or self.layout == "tensor")

    def _new(self, each: Request) -> NewLane:
        each.begun = True
        slot = next((slot for slot, (tokens, _) in self.saved.items() if each.computed == len(tokens)), -1)
        restore = slot if each.computed else -1
        history = pack_ints(each.tokens[: each.computed])
        return NewLane(each.lane, each.number, each.prompt_len, each.sampling, history, restore)

    def _rows(self, each: Request, rows: int, save: int) -> LaneRows:
        start = each.computed
        end = min(len(each.tokens), start + rows) if start < each.prompt_len else start + 1
        each.pages += [self._free.pop() for _ in range(-(-end // PAGE) - len(each.pages))]
        fresh, each.paged = each.pages[each.paged :], len(each.pages)
        known = each.told and end > each.prompt_len
        tokens = b"" if known else pack_ints(each.tokens[start:end])
        each.computed, each.told = end, False
        groups = 1 + len(self.windows)
        pages = pack_ints(fresh * groups)
        return LaneRows(each.lane, each.number, start, tokens, pages, end == len(each.tokens), save=save)

    def _drafting(self, each: Request, drafts: int) -> LaneRows:
        """The token that is known, and drafts behind it. How many rows count is known with the answer."""
        start, end = each.computed, each.computed + 1 + drafts
        each.pages += [self._free.pop() for _ in range(-(-end // PAGE) - len(each.pages))]
        fresh, each.paged = each.pages[each.paged :], len(each.pages)
        pages = pack_ints(fresh * (1 + len(self.windows)))
        tokens = pack_ints(each.tokens[start:])
        return LaneRows(each.lane, each.number, start, tokens, pages, sample=True, drafts=drafts)

    def answer(self, number: int) -> list[int]:
        each = self.requests[number]
        return each.tokens[each.prompt_len :]

    # ------------------------------------------------------------------------------------------------------- flips

    def order(self) -> FlipOrder:
        """The next flip, of all that is live."""
        self.flips += 1
        pages = {page for each in self.requests.values() for page in each.pages}
        pages |= {page for _, held in self.saved.values() for page in held}
        slots = {each.lane for each in self.requests.values()} | set(self.saved) if self.recurrent else ()
        live = FlipLive((bits(pages),) * (1 + len(self.windows)), bits(slots))
        return FlipOrder(self.flips, self.flips, OTHER[self.layout], PACK, live)

    def drafting_rows(self) -> list[tuple[int, int, int]]:
        """(pid, address, bytes) of the drafting block's K and V on each rank that has some, in every layout's pool: its
        layer is the last one. Of a rank in this process too."""
        held = self.fleet.regions() if isinstance(self.fleet, Fleet) else [(0, os.getpid(), self.facts[0].regions)]
        found = []
        for rank, pid, regions in held:
            pools = [(address, size) for line, address, size in regions if line == "kv"]
            for (address, size), layers in zip(pools, self.kv_layers(rank), strict=True):
                if layers:
                    assert size % layers == 0
                    found.append((pid, address + size - size // layers, size // layers))
        return found

    def kv_layers(self, rank: int) -> list[int]:
        """Of each pool on a rank, in the order of its regions: layers, all of one shape; 0 where none drafts."""
        checkpoint = checkpoints.open(self.load_spec.path, registry.folder_families)
        try:
            declared = registry.family(checkpoint.arch)
            config = declared.config_from(checkpoint.metadata)
            attention = [not config.is_recurrent(layer) for layer in range(config.layers)]
        finally:
            checkpoint.close()
        whole = sum(attention) + 1
        if self.ranks == 1 or self.spec.unified:
            return [whole]
        first, end = self.load_spec.ranges[rank]
        sizes = {"tensor": whole, "pipeline": sum(attention[first:end]) + 1 if rank == self.ranks - 1 else 0}
        return [sizes[self.load_spec.layout], sizes[OTHER[self.load_spec.layout]]]

    async def plan(self, kind: PlanKind, order: FlipOrder) -> tuple[Result, ...]:
        epoch = order.epoch if kind is PlanKind.FLIP_COMMIT else self.epoch
        return await self.answered(self.fleet.issue(kind, epoch=epoch, flip=order))

    async def pack(self, order: FlipOrder) -> tuple[Result, ...]:
        return await self.plan(PlanKind.FLIP_PREPARE, order)

    async def verify(self, order: FlipOrder, packed: tuple[Result, ...]) -> tuple[Result, ...]:
        digests: tuple[FlipDigest, ...] = tuple(each for r in packed if r.flip for each in r.flip.digests)
        to_compare = FlipOrder(order.flip, order.epoch, order.to, VERIFY, None, digests)
        return await self.plan(PlanKind.FLIP_PREPARE, to_compare)

    async def commit(self, order: FlipOrder) -> list[FlipAnswer]:
        results = await self.plan(PlanKind.FLIP_COMMIT, FlipOrder(order.flip, order.epoch, order.to))
        self.layout, self.epoch = order.to, order.epoch
        for each in self.requests.values():
            each.told = False
        return [result.flip for result in results if result.flip is not None]

    async def abandon(self, order: FlipOrder) -> None:
        await self.plan(PlanKind.FLIP_ABANDON, FlipOrder(order.flip, order.epoch, order.to))

    async def flip(self) -> list[FlipAnswer]:
        """All of it; on one rank nothing, but that inputs are told again."""
        if self.ranks == 1:
            for each in self.requests.values():
                each.told = False
            return []
        order = self.order()
        packed = await self.pack(order)
        assert all(result.ok for result in packed), [result.reason for result in packed]
        verified = await self.verify(order, packed)
        assert all(result.ok for result in verified), [result.reason for result in verified]
        return await self.commit(order)
