"""`GpuBackend`: a card of either vendor, opened by one worker.

    open_cuda(options), open_rocm(options)     the card by its UUID (options.extra["device"]) or its number;
                                               options.extra["fleet"]: backends of all ranks, as `cuda,cuda,cpu`
      .bind(ops, …)     refuse what is missing ─▶ plan ─▶ compile kernels ─▶ memory ─▶ load weights
          GpuProgram    run, draft, accept                                        (backends.gpu.program)
      .bind_layouts     the same for several layouts, whose pools take turns      (backends.gpu.layouts)

A bind refuses before anything is allocated, and compiles before anything is loaded: what a card cannot do is known in
seconds, not after tens of gigabytes.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence

from backends import kv_shapes
from backends import states as state_shapes
from backends.base import (
    NO_STATES,
    Binding,
    Capability,
    Collective,
    DeviceFacts,
    KvPool,
    Layouts,
    Limits,
    LoadProgress,
    Op,
    OpenOptions,
    PoolParts,
    Program,
    Shared,
    SharedPools,
    StatePool,
    TensorView,
    WeightHome,
)
from backends.gpu import capability, refusals
from backends.gpu.arch import Vendor
from backends.gpu.card import open_card
from backends.gpu.device import Device
from backends.gpu.launch import Symbol
from backends.gpu.layouts import GpuLayouts
from backends.gpu.ops import moves
from backends.gpu.plan import Plan
from backends.gpu.pools import GpuPools, all_of, checked_parts
from backends.gpu.program import GpuProgram
from backends.gpu.recorder import symbols
from backends.gpu.transport.base import Room, Transport, room_of
from backends.gpu.transport.probe import fleet_of, open_transport
from backends.gpu.tuning import Tuning, open_tuning
from backends.gpu.weights import CardWeights
from backends.needs import check_exchanges
from backends.ops import EXCHANGES

log = logging.getLogger(__name__)

NAMES: dict[Vendor, str] = {"nvidia": "cuda", "amd": "rocm"}
"""Of the backends."""
COMPILING = "compiling kernels"
"""A stage of a load's progress, counted in kernels."""
NOT_SHARED = "ranks hold nothing together in a card's memory: give each rank pools and weights of its own"


def open_cuda(options: OpenOptions) -> GpuBackend:
    """A card of NVIDIA's. Raises DriverError, KernelError (backends.gpu.errors); TuneRefused, GemmRefused for variables
    that say what cannot be done."""
    return _open("nvidia", options)


def open_rocm(options: OpenOptions) -> GpuBackend:
    """A card of AMD's. Raises as `open_cuda` does."""
    return _open("amd", options)


def _open(vendor: Vendor, options: OpenOptions) -> GpuBackend:
    uuid = options.extra.get("device", "")
    index = None if uuid else options.device_index
    tell = options.tell or _warn
    card = open_card(vendor, index=index, uuid=uuid, say=tell)
    try:
        return GpuBackend(card, fleet_of(options.extra.get("fleet", "")), tell, open_tuning(card, os.environ, tell))
    except BaseException:
        card.close()
        raise


def _warn(what: str) -> None:
    log.warning("%s", what)


class GpuBackend:
    """An opened card. It closes `device` when it is closed. `fleet`: the backends of all ranks, where they are known; a
    transport between cards is looked for only then. `tell`: as OpenOptions has it. `tuning` measures at each bind which
    forms of a linear layer are ahead; without it they are the same on every card."""

    def __init__(
        self,
        device: Device,
        fleet: Sequence[str] = (),
        tell: Callable[[str], None] = _warn,
        tuning: Tuning | None = None,
    ) -> None:
        self.device = device
        self._tuning = tuning
        self._tell = tell
        self._fleet = tuple(fleet)
        facts = device.facts
        self.name = NAMES[facts.vendor]
        self.facts = DeviceFacts(
            backend=self.name, name=facts.name, isa=facts.arch.name, threads=0, batch_invariant=False
        )

    def capabilities(self) -> tuple[Capability, ...]:
        return capability.table(self.device.facts.arch.base)

    def launch_counts(self) -> Mapping[str, int]:
        """Launches since the card was opened, by symbol, those of replays among them."""
        return dict(self.device.counts)

    def pools(
        self, kv: KvPool, states: StatePool, progress: LoadProgress, shared: SharedPools | None = None
    ) -> GpuPools:
        """KV rows and states of these shapes. Raises OutOfDeviceMemory with the arithmetic, ValueError for `shared`."""
        if shared is not None:
            raise ValueError(NOT_SHARED)
        return GpuPools(self.device, kv, states)

    def bind(
        self,
        ops: Sequence[Op],
        weights: Mapping[str, TensorView],
        kv: KvPool,
        limits: Limits,
        progress: LoadProgress,
        states: StatePool = NO_STATES,
        collective: Collective | None = None,
        shared: Shared | None = None,
        parts: PoolParts | None = None,
    ) -> Program:
        """Check, plan, compile, reserve memory, load the weights.

        Raises Unsupported with everything that is missing, ValueError where ops, weights and pool do not fit each
        other, KernelError, GemmRefused, OutOfDeviceMemory with the arithmetic. Nothing refers to `weights` afterwards.
        """
        if shared is not None:
            raise ValueError(NOT_SHARED)
        plan, own = self._planned(ops, weights, kv, limits, states, collective)
        if parts is not None:
            checked_parts(parts, kv, states)
        transport = self._transport([plan], collective)
        try:
            self._compile([(plan, own)], progress, ())
            return GpuProgram(
                self.device, plan, own, progress, transport, parts, own_transport=True, tuning=self._tuning
            )
        except BaseException:
            if transport is not None:
                transport.close()
            raise

    def bind_layouts(
        self,
        bindings: Sequence[Binding],
        limits: Limits,
        progress: LoadProgress,
        collective: Collective,
        home: WeightHome,
    ) -> Layouts:
        """Plan every layout, fill the arena once with each, make every program (`backends.gpu.layouts`)."""
        planned = {
            each.name: self._planned(each.ops, each.weights, each.kv, limits, each.states, collective)
            for each in bindings
        }
        transport = self._transport([plan for plan, _ in planned.values()], collective)
        first = bindings[0].name

        def make(binding: Binding, placed: CardWeights, pools: GpuPools) -> Program:
            plan, _ = planned[binding.name]
            owner = binding.name == first
            return GpuProgram(
                *(self.device, plan, placed, progress, transport, all_of(pools)),
                placed=True,
                own_transport=owner,
                tuning=self._tuning,
            )

        try:
            self._compile(list(planned.values()), progress, moves.SYMBOLS)
            return GpuLayouts(self.device, bindings, collective, home, progress, make)
        except BaseException:
            if transport is not None:
                transport.close()
            raise

    def close(self) -> None:
        """Programs, layouts and pools must be closed before."""
        self.device.close()

    # ---------------------------------------------------------------------------------------------------------- inside

    def _planned(
        self,
        ops: Sequence[Op],
        weights: Mapping[str, TensorView],
        kv: KvPool,
        limits: Limits,
        states: StatePool,
        collective: Collective | None,
    ) -> tuple[Plan, CardWeights]:
        """What a program needs, checked; no memory is had yet."""
        facts = self.device.facts
        refusals.refuse(self.name, facts.arch.base, ops, weights, kv)
        check_exchanges(ops, collective)
        kv_shapes.check(ops, kv)
        state_shapes.check(ops, states)
        rank, ranks = (collective.rank, collective.ranks) if collective is not None else (None, 1)
        forms = self._tuning.possible() if self._tuning is not None else ()
        return Plan(facts, ops, weights, kv, limits, states, rank, ranks, forms), CardWeights(ops, weights)

    def _compile(
        self, planned: Sequence[tuple[Plan, CardWeights]], progress: LoadProgress, more: Sequence[Symbol]
    ) -> None:
        """Every kernel that these will launch. Raises Unsupported, KernelError."""
        wanted: dict[str, Symbol] = {symbol.name: symbol for symbol in more}
        for plan, weights in planned:
            wanted |= {symbol.name: symbol for symbol in (*symbols(plan), *weights.symbols)}
        every = tuple(wanted.values())
        ready = 0

        def done(count: int) -> None:
            nonlocal ready
            ready = max(ready, count)
            progress(COMPILING, ready, len(every))

        done(0)
        for plan, _ in planned:
            refusals.compile_unknown(self.name, self.device, plan.ops, plan.weights, plan.kv, every, done)

    def _transport(self, plans: Sequence[Plan], collective: Collective | None) -> Transport | None:
        """One for all plans, which take turns; None where nothing is exchanged. Ranks may meet in it: it is had before
        kernels are compiled, which takes each rank a time of its own."""
        exchanging = any(isinstance(op, EXCHANGES) for plan in plans for op in plan.ops)
        if collective is None or not exchanging:
            return None
        room = Room()
        for plan in plans:
            room |= room_of(plan.exchanged_rows(), collective.ranks)
        return open_transport(self.device, collective, room, self._fleet, tell=self._tell)
