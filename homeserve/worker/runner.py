"""Runs plans on this rank's device: load once, then rows to logits to tokens.

    LOAD     checkpoint ─▶ family ─▶ bind ─▶ Backend.bind ─▶ Program, pools, lanes
    rows     LaneRows ─▶ Lanes.check, apply ─▶ Batch ─▶ Program.run ─▶ logits ─▶ draw ─▶ Sample
    CENSUS   what the lanes hold        FLUSH   forget all lanes

Raises what ended a plan; the plan loop turns it into the plan's one answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from backends.acts import fleet_shape
from backends.base import (
    PAGE_LEN,
    Backend,
    Collective,
    Counts,
    KvPool,
    Limits,
    LoadProgress,
    MemoryRegion,
    OpenOptions,
    PoolParts,
    Pools,
    Program,
    Shared,
    SharedPools,
    StatePool,
    Unsupported,
)
from backends.quant import QuantType
from homeserve.errors import BudgetError, SettingError, UnsupportedModel, told_of
from homeserve.layouts.share import TENSOR, Share
from homeserve.wire.records import Boot, LoadSpec, Logprobs, Plan, PlanKind, PoolCensus, RankFacts, Sample
from homeserve.worker.drawn import Drawn, TokenReceiver, TokenSender, request_bits
from homeserve.worker.lanes import Group, LaneRefused, Lanes
from homeserve.worker.places import PagePlaces, own_pages, shared_pages
from homeserve.worker.sampling import draw, logprobs

if TYPE_CHECKING:
    from homeserve.models.bind import Bound

KV_TYPES = ("F16", "BF16", "F32", "Q8_0", "F8")
NO_TOKEN = -1


@dataclass(frozen=True)
class Answer:
    """What a plan gives beside its number."""

    samples: tuple[Sample, ...] = ()
    facts: RankFacts | None = None
    census: tuple[PoolCensus, ...] = ()
    exchanges: tuple[tuple[str, int, int, int], ...] = ()
    """(label, calls, bytes moved, microseconds waited) of each exchange with other ranks since the load."""


class Runner:
    """The model on this rank. Holds nothing before its LOAD plan."""

    def __init__(self, boot: Boot, progress: LoadProgress) -> None:
        self._boot = boot
        self._progress = progress
        self._backend: Backend | None = None
        self._program: Program | None = None
        self._pools: Pools | None = None
        self._lanes: Lanes | None = None
        self._kv_slots = 0
        self._collective: Collective | None = None
        self._sender: TokenSender | None = None
        self._receiver: TokenReceiver | None = None

    def run(self, plan: Plan) -> Answer:
        """Execute one plan. Raises HomeserveError, LaneRefused or NotANumber: the reason that goes into its answer."""
        if plan.kind == PlanKind.LOAD:
            if plan.load is None:
                raise LaneRefused("a load plan without a load")
            return Answer(facts=self._load(plan.load))
        if plan.kind == PlanKind.STOP:
            return Answer()
        lanes = self._lanes
        if lanes is None:
            raise LaneRefused(f"plan kind {plan.kind} before any load")
        lanes.check(plan)
        lanes.apply(plan)
        if plan.kind == PlanKind.CENSUS:
            return Answer(census=(PoolCensus("kv", self._kv_slots, lanes.occupied()),), exchanges=self._exchanges())
        if plan.kind == PlanKind.FLUSH:
            lanes.lanes[:] = [None] * len(lanes.lanes)
            return Answer()
        return Answer(samples=self._compute(lanes, plan)) if plan.rows else Answer()

    def close(self) -> None:
        """Give the device back."""
        for held in (self._program, self._pools, self._collective, self._backend):
            if held is not None:
                held.close()
        self._program = self._pools = self._backend = None
        self._lanes = self._collective = self._sender = self._receiver = None

    def exchanged(self) -> tuple[int, int, int]:
        """Since the load: exchanges with other ranks, bytes that they moved, microseconds waited in them."""
        calls, moved, waited_ns = self._collective.totals() if self._collective is not None else (0, 0, 0)
        return calls, moved, waited_ns // 1000

    def _exchanges(self) -> tuple[tuple[str, int, int, int], ...]:
        counts = self._collective.counts() if self._collective is not None else {}
        return tuple((label, each.calls, each.moved_bytes, _waited_us(each)) for label, each in counts.items())

    # -------------------------------------------------------------------------------------------------------- load

    def _load(self, spec: LoadSpec) -> RankFacts:
        # Imported here: the worker says Hello before it reads what only a load needs.
        from backends.registry import open_backend
        from homeserve import checkpoint as checkpoints
        from homeserve.models.bind import bind
        from homeserve.models.registry import family, folder_families

        self.close()
        self._progress("reading the model", 0, 0)
        checkpoint = checkpoints.open(spec.path, folder_families)
        try:
            declared = family(checkpoint.arch)
            with told_of(spec.path):
                config = declared.config_from(checkpoint.metadata)
                shares = [_share(spec, rank) for rank in range(self._boot.ranks)]
                share = shares[self._boot.rank]
                bound = bind(declared, config, checkpoint.tensors, share)
                whole, fleet = None, [bound]
                if self._boot.weights_fd >= 0:
                    whole = bind(declared, config, checkpoint.tensors)
                    fleet = [bind(declared, config, checkpoint.tensors, each) for each in shares]
            boot = self._boot
            options = OpenOptions(boot.device_index, boot.threads, boot.cores, boot.isa)
            try:
                self._backend = backend = open_backend(boot.backend, options)
            except (ValueError, OSError, ImportError, RuntimeError) as error:
                raise SettingError(f"backend {boot.backend} cannot be opened: {error}", field="backend") from error
            _require_invariant(spec, backend)
            limits = Limits(spec.rows, spec.logit_rows, spec.lanes, spec.lane_pages)
            self._collective = self._open_collective(options)
            divided = share is not None and share.divides
            shared = None if whole is None else self._shared(whole, fleet)
            every = _pool(bound, spec)
            places = _places(every, spec, boot.rank, one_pool=whole is not None)
            state_slots = max(spec.lanes, spec.state_slots) if spec.state_slots or bound.state_layers else 0
            slots = every.group_slots if places is None else places.slots
            if whole is not None:
                slots = tuple(own + PAGE_LEN for own in every.group_slots)
            kv = bound.kv_pool(slots[0], every.type, slots[1:])
            try:
                states = _states(bound, state_slots)
                parts = None
                if whole is not None:
                    pool = whole.kv_pool(slots[0], every.type, slots[1:])
                    parts = self._pool_parts(backend, bound, pool, _states(whole, state_slots))
                self._program = backend.bind(
                    bound.ops, bound.weights, kv, limits, self._progress, states, self._collective, shared, parts
                )
            except Unsupported as error:
                raise UnsupportedModel(str(error), fix="use another backend or another quantisation") from error
            except MemoryError as error:
                raise BudgetError(
                    f"rank {boot.rank} ran out of memory while loading: {error}", fix="lower --kv-tokens or --context"
                ) from error
            checkpoint.drop_pages()
        finally:
            # The program keeps what it still reads of the mapped files alive.
            checkpoint.close()
        self._kv_slots = every.slots
        pages = tuple(slots // PAGE_LEN for slots in every.group_slots)
        embeds = boot.rank in bound.embedding_ranks
        self._lanes = lanes = Lanes(
            limits, config.vocab, pages, kv.group_windows, state_slots, places, draws=bound.samples, embeds=embeds
        )
        if self._collective is not None:
            self._exchange_tokens(self._collective, bound, lanes)
        facts = backend.facts
        lines, regions = self._held()
        return RankFacts(
            facts.backend,
            facts.name,
            facts.isa,
            facts.threads,
            facts.batch_invariant,
            tuple(lines.items()),
            None if divided else (bound.layers.start, bound.layers.stop),
            tuple((region.line, region.address, region.bytes) for region in regions),
        )

    def _held(self) -> tuple[dict[str, int], list[MemoryRegion]]:
        """Bytes by ledger line, and where they lie: the program's, and those of pools that it does not own."""
        lines: dict[str, int] = {}
        regions: list[MemoryRegion] = []
        for held in (self._program, self._pools):
            if held is not None:
                regions += held.memory_regions()
                for line, size in held.memory_lines().items():
                    lines[line] = lines.get(line, 0) + size
        return lines, regions

    def _open_collective(self, options: OpenOptions) -> Collective | None:
        """This rank's end of what the ranks exchange; None where they exchange nothing."""
        from backends.registry import open_collective

        boot = self._boot
        if boot.acts_fd < 0:
            return None
        sizes = (boot.piece_floats, boot.message_floats, boot.token_floats, boot.acts_depth)
        shape = fleet_shape(boot.ranks, *sizes)
        timeout_s, spin_us = boot.exchange_timeout_s, boot.spin_us
        return open_collective(options, boot.acts_fd, shape, boot.rank, timeout_s=timeout_s, spin_us=spin_us)

    def _shared(self, whole: Bound, fleet: Sequence[Bound]) -> Shared:
        """The weights that this rank holds together with the others."""
        boot, parts = self._boot, [(each.ops, each.weights) for each in fleet]
        return Shared(boot.rank, boot.ranks, whole.ops, whole.weights, boot.weights_fd, parts)

    def _pool_parts(self, backend: Backend, bound: Bound, kv: KvPool, states: StatePool) -> PoolParts:
        """What of the pools of the whole model, which all ranks hold together, is this rank's."""
        boot = self._boot
        shared = SharedPools(boot.rank, boot.ranks, boot.kv_fd, boot.state_fd)
        self._pools = backend.pools(kv, states, self._progress, shared)
        return PoolParts(self._pools, bound.kv_places, bound.state_parts)

    def _exchange_tokens(self, collective: Collective, bound: Bound, lanes: Lanes) -> None:
        rank, sampler = self._boot.rank, self._boot.ranks - 1
        if bound.samples:
            others = [target for target in bound.embedding_ranks if target != rank]
            self._sender = TokenSender(collective, others)
        elif lanes.embeds:
            self._receiver = TokenReceiver(collective, sampler, self._boot.log_slots, lanes.take_token)

    # ---------------------------------------------------------------------------------------------------- computing

    def _compute(self, lanes: Lanes, plan: Plan) -> tuple[Sample, ...]:
        assert self._program is not None
        if self._receiver is not None:
            self._receiver.before(plan.seq, [rows.lane for rows in plan.rows if not rows.tokens])
        batch, groups = lanes.batch(plan.rows, plan.epoch, plan.seq)
        self._program.copy_states([(new.restore, new.lane) for new in plan.new if new.restore >= 0])
        logits = self._program.run(batch)
        self._program.copy_states([(rows.lane, rows.save) for rows in plan.rows if rows.save >= 0])
        for group in groups:
            lanes.advance(group)
        if self._receiver is not None:
            self._receiver.expect(plan.epoch, plan.seq, [rows.lane for rows in plan.rows if rows.sample])
        if not lanes.draws:
            return ()
        samples = tuple(
            self._sample(lanes, group, logits[group.logits_first :][: group.logit_count])
            for group in groups
            if group.logit_count
        )
        if self._sender is not None:
            drawn = [Drawn(each.lane, request_bits(each.request), each.token) for each in samples if each.token >= 0]
            self._sender.send(plan.epoch, plan.seq, drawn)
        return samples

    def _sample(self, lanes: Lanes, group: Group, logits: npt.NDArray[np.float32]) -> Sample:
        """The group's answer from its own logits `[logit_count, vocab]`."""
        rows, lane = group.rows, lanes[group.lane]
        position = rows.start + len(group.inputs)
        prompt: tuple[Logprobs, ...] = ()
        if rows.prompt_logprobs >= 0:
            before = [] if lane.last_logits is None else [lane.last_logits]
            inputs = group.inputs[1 - len(before) :]
            prompt = tuple(
                logprobs(row, int(token), rows.prompt_logprobs)
                for row, token in zip([*before, *logits[:-1]], inputs, strict=True)
            )
            lane.last_logits = None if rows.sample else logits[-1].copy()
        if not rows.sample:
            return Sample(group.lane, rows.request, position, NO_TOKEN, prompt_logprobs=prompt)
        row, sampling = logits[-1], lane.sampling
        token = draw(row, sampling, lane.counts, position, position - lane.prompt_len)
        lane.last_token = token
        told = logprobs(row, token, sampling.top_logprobs) if sampling.top_logprobs >= 0 else None
        return Sample(group.lane, rows.request, position, token, told, prompt)


def _require_invariant(spec: LoadSpec, backend: Backend) -> None:
    if spec.deterministic and not backend.facts.batch_invariant:
        raise UnsupportedModel(
            f"backend {backend.facts.backend} gives a row other last digits in another batch",
            field="deterministic",
            fix="leave --deterministic off there",
        )


def _share(spec: LoadSpec, rank: int) -> Share | None:
    """What of the model this rank runs; None: all of it."""
    if spec.layout == TENSOR and len(spec.weight_vector) > 1:
        return Share.tensor(rank, spec.weight_vector)
    return Share.pipeline(rank, spec.ranges) if len(spec.ranges) > 1 else None


def _places(pool: KvPool, spec: LoadSpec, rank: int, *, one_pool: bool) -> PagePlaces | None:
    """Where the engine's pages lie here; None: all of them, each at its own place."""
    if spec.layout != TENSOR or len(spec.token_vector) < 2:
        return None
    return (shared_pages if one_pool else own_pages)(pool.group_slots, spec.token_vector, rank)


def _states(bound: Bound, slots: int) -> StatePool:
    return StatePool(bound.state_layers, slots if bound.state_layers else 0)


def _waited_us(counts: Counts) -> int:
    return (counts.spun_ns + counts.slept_ns) // 1000


def _pool(bound: Bound, spec: LoadSpec) -> KvPool:
    """The pool that the plan wants. Raises SettingError where it was planned for other windows than the model has."""
    planned = tuple(window for window, _ in spec.window_slots)
    if planned != bound.windows:
        raise SettingError(f"the plan has pools for windows {planned}, the model has {bound.windows}", field="model")
    slots = [_whole_pages(slots) for _, slots in spec.window_slots]
    return bound.kv_pool(_whole_pages(spec.kv_slots), _kv_type(spec.kv_type), slots)


def _kv_type(name: str) -> QuantType:
    if name.upper() not in KV_TYPES:
        known = ", ".join(KV_TYPES).lower()
        raise SettingError(f"KV type {name!r} is not supported; there is: {known}", field="kv_type")
    return QuantType[name.upper()]


def _whole_pages(slots: int) -> int:
    return max(1, slots // PAGE_LEN) * PAGE_LEN
