"""A LOAD plan: from the model's files to programs, pools and tables of this rank, in one layout or in two.

    checkpoint ─▶ family ─▶ bind    for each layout this rank's share, and where anything is held together those of all
        one layout         Backend.bind            a program with pools of its own
        unified memory     Backend.pools, bind     a program for each layout, all over the same pools and weights
        two layouts        Backend.bind_layouts    programs that take turns in one arena, pools that take turns

Two layouts between which a rank is to change must have the same rows. That is checked here, before anything is served
(`flipping`).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from backends.acts import fleet_shape
from backends.base import (
    PAGE_LEN,
    Backend,
    Binding,
    Collective,
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
    Unsupported,
    WeightHome,
)
from backends.gpu.errors import DeviceLost, GpuError
from backends.quant import QuantType
from homeserve.errors import BudgetError, SettingError, UnsupportedModel, told_of
from homeserve.layouts.share import PIPELINE, TENSOR, Share
from homeserve.wire.faults import ForcedDrafts, parse_drafts
from homeserve.wire.records import Boot, LoadSpec, RankFacts
from homeserve.worker.cards import told
from homeserve.worker.faults import FaultPoint
from homeserve.worker.flip import RankFlip
from homeserve.worker.flipping import checked_geometry
from homeserve.worker.guide import Guides
from homeserve.worker.lanes import Lanes
from homeserve.worker.places import PagePlaces, own_pages, shared_pages
from homeserve.worker.side import InPlace, Side
from homeserve.worker.transit import Transit
from homeserve.worker.vocabulary import Source, Vocabulary

if TYPE_CHECKING:
    from homeserve.checkpoint import Checkpoint
    from homeserve.layouts.transition import StateForm
    from homeserve.models.bind import Bound

log = logging.getLogger(__name__)

KV_TYPES = ("F16", "BF16", "F32", "Q8_0", "F8")
OTHER = {PIPELINE: TENSOR, TENSOR: PIPELINE}
Run = tuple[Sequence[Op], Mapping[str, TensorView]]
"""What a program is made of: ops and weights."""


@dataclass(frozen=True)
class Loaded:
    """What a rank holds after its load. `flip` None: one layout."""

    backend: Backend
    collective: Collective | None
    layouts: Layouts
    sides: Mapping[str, Side]
    lanes: Lanes
    kv_slots: int
    facts: RankFacts
    flip: RankFlip | None
    forced: ForcedDrafts = ForcedDrafts()
    """What a test makes of drafts."""
    guides: Guides | None = None
    """Of the rank that draws."""
    notes: deque[str] = field(default_factory=deque)
    """What is not as it was asked for, and was not told yet. Other threads add to it."""

    def close(self) -> None:
        """Give the device back: each of them, whatever becomes of the one before."""
        with ExitStack() as closing:
            for held in (self.backend, self.collective, self.layouts, self.flip, self.guides):
                if held is not None:
                    closing.callback(held.close)


@dataclass(frozen=True)
class Part:
    """One layout of the model: this rank's side of it, what it runs, its pools. `fleet`: what each rank runs, where
    that has to be known."""

    side: Side
    bound: Bound
    kv: KvPool
    states: StatePool
    fleet: tuple[Bound, ...]

    @property
    def runs(self) -> list[Run]:
        return [_run(each) for each in self.fleet]


@dataclass(frozen=True)
class _Read:
    """What the files say. `bounds`: for each layout those of this rank, or of all ranks in their order; `whole` is one
    rank that would run everything, where ranks hold anything together. `forms`: states of the linear layers by layer,
    of a model that is to flip."""

    bounds: Mapping[str, tuple[Bound, ...]]
    whole: Bound | None
    forms: Mapping[int, StateForm]
    vocab: int


def load(boot: Boot, spec: LoadSpec, progress: LoadProgress, faults: FaultPoint) -> Loaded:
    """Raises HomeserveError; nothing is left open then. Raises DeviceLost as it is: with it the process ends, and what
    is open is left to that."""
    opened = ExitStack()
    try:
        return _Load(boot, spec, progress, faults, opened).run()
    except DeviceLost:
        raise
    except GpuError as error:
        _put_away(opened)
        raise told(boot, error) from error
    except BaseException:
        _put_away(opened)
        raise


def _put_away(opened: ExitStack) -> None:
    """Of a failed load. Why it failed is to be told, so what goes wrong here is logged and no more."""
    try:
        opened.close()
    except Exception:  # the failure of the load is on its way
        log.exception("not everything of a failed load was given back")


class _Load:
    def __init__(
        self, boot: Boot, spec: LoadSpec, progress: LoadProgress, faults: FaultPoint, opened: ExitStack
    ) -> None:
        self._boot = boot
        self._spec = spec
        self._progress = progress
        self._faults = faults
        self._opened = opened
        self._notes: deque[str] = deque()
        self._forced = parse_drafts(spec.drafts_test)
        held_rows = spec.lanes * (1 + spec.drafts) if spec.drafts else 0
        self._limits = Limits(spec.rows, spec.logit_rows, spec.lanes, spec.lane_pages, held_rows)
        self._unified = boot.kv_fd >= 0
        self._names = (spec.layout, OTHER[spec.layout]) if spec.flip else (spec.layout,)

    def run(self) -> Loaded:
        # Imported here: the worker says Hello before it reads what only a load needs.
        from homeserve import checkpoint as checkpoints
        from homeserve.models.registry import folder_families

        self._progress("reading the model", 0, 0)
        checkpoint = checkpoints.open(self._spec.path, folder_families)
        try:
            with told_of(self._spec.path):
                read = self._read(checkpoint)
            backend = self._open_backend()
            collective = self._open_collective()
            parts = [self._part(name, read.bounds[name]) for name in self._names]
            try:
                layouts = self._bind(backend, collective, parts, read)
                self._opened.callback(layouts.close)
            except Unsupported as error:
                raise UnsupportedModel(str(error), fix="use another backend or another quantisation") from error
            except GpuError:
                raise
            except MemoryError as error:
                raise BudgetError(
                    f"rank {self._boot.rank} ran out of memory while loading: {error}",
                    fix="lower --kv-tokens or --context",
                ) from error
            source = Source(checkpoint.path, checkpoint.tokenizer, self._spec.cache_dir)
            checkpoint.drop_pages()
        finally:
            # Programs keep what they still read of the mapped files alive.
            checkpoint.close()
        return self._loaded(backend, collective, layouts, parts, read, Vocabulary(source, read.vocab))

    def _loaded(
        self,
        backend: Backend,
        collective: Collective | None,
        layouts: Layouts,
        parts: Sequence[Part],
        read: _Read,
        vocabulary: Vocabulary,
    ) -> Loaded:
        first, slots = parts[0], self._group_slots(parts[0].bound)
        pages = tuple(own // PAGE_LEN for own in slots)
        side = first.side
        guides = Guides(vocabulary) if side.draws else None
        lanes = Lanes(
            self._limits,
            read.vocab,
            pages,
            first.kv.group_windows,
            self._state_slots(first.bound),
            side.places,
            draws=side.draws,
            embeds=side.embeds,
            drafts=side.drafts,
            tokens_with=vocabulary.containing,
            guides=guides,
        )
        known = backend.facts
        facts = RankFacts(
            known.backend,
            known.name,
            known.isa,
            known.threads,
            known.batch_invariant,
            tuple(layouts.memory_lines().items()),
            side.layers,
            tuple((region.line, region.address, region.bytes) for region in layouts.memory_regions()),
        )
        flip = self._flip(layouts, parts, read) if len(parts) > 1 else None
        sides = {part.side.name: part.side for part in parts}
        return Loaded(
            backend, collective, layouts, sides, lanes, slots[0], facts, flip, self._forced, guides, self._notes
        )

    # -------------------------------------------------------------------------------------------------------- read

    def _read(self, checkpoint: Checkpoint) -> _Read:
        from homeserve.models.bind import bind
        from homeserve.models.config import settle
        from homeserve.models.dividing import divided
        from homeserve.models.registry import family

        declared = family(checkpoint.arch)
        config, tensors = declared.config_from(checkpoint.metadata), checkpoint.tensors
        together, drafts = self._boot.weights_fd >= 0 or len(self._names) > 1, self._spec.drafts > 0
        bounds = {}
        for name in self._names:
            ranks = range(self._boot.ranks) if together else [self._boot.rank]
            shares = [self._share(name, rank) for rank in ranks]
            bounds[name] = tuple(bind(declared, config, tensors, share, drafts=drafts) for share in shares)
        whole = bind(declared, config, tensors, drafts=drafts) if self._boot.weights_fd >= 0 else None
        forms: Mapping[int, StateForm] = {}
        if len(self._names) > 1:
            settled = settle(config, tensors.keys())
            forms = divided(declared, settled, tensors, self._spec.weight_vector, drafts=drafts).states
        return _Read(bounds, whole, forms, config.vocab)

    def _share(self, name: str, rank: int) -> Share | None:
        """What of the model `rank` runs; None: all of it."""
        spec = self._spec
        if name == TENSOR and len(spec.weight_vector) > 1:
            return Share.tensor(rank, spec.weight_vector)
        if name == PIPELINE and len(spec.ranges) > 1:
            return Share.pipeline(rank, spec.ranges)
        if len(self._names) > 1:
            raise SettingError(f"a fleet that flips was not told how to divide the {name} layout", field="layout")
        return None

    # -------------------------------------------------------------------------------------------------------- pools

    def _part(self, name: str, bounds: tuple[Bound, ...]) -> Part:
        bound = bounds[self._boot.rank] if len(bounds) > 1 else bounds[0]
        slots = self._group_slots(bound)
        places = self._places(name, slots)
        if self._unified:
            slots = tuple(own + PAGE_LEN for own in slots)
        elif places is not None:
            slots = places.slots
        divided = bound.share is not None and bound.share.divides
        side = Side(
            name,
            self._boot.rank,
            self._boot.ranks,
            None if divided else (bound.layers.start, bound.layers.stop),
            places,
            bound.embedding_ranks,
            bound.samples,
            bound.drafting_block,
            self._spec.drafts if bound.drafts else 0,
        )
        kv = bound.kv_pool(slots[0], _kv_type(self._spec.kv_type), slots[1:])
        return Part(side, bound, kv, self._states(bound), bounds)

    def _places(self, name: str, slots: Sequence[int]) -> PagePlaces | None:
        """Where the engine's pages lie here; None: all of them, each at its own place."""
        vector = self._spec.token_vector
        if name != TENSOR or len(vector) < 2:
            return None
        return (shared_pages if self._unified else own_pages)(slots, vector, self._boot.rank)

    def _group_slots(self, bound: Bound) -> tuple[int, ...]:
        """The engine's slots of each KV group. Raises SettingError where the plan was made for other windows than the
        model has."""
        planned = tuple(window for window, _ in self._spec.window_slots)
        if planned != bound.windows:
            raise SettingError(
                f"the plan has pools for windows {planned}, the model has {bound.windows}", field="model"
            )
        return tuple(map(_whole_pages, (self._spec.kv_slots, *(slots for _, slots in self._spec.window_slots))))

    def _states(self, bound: Bound) -> StatePool:
        return StatePool(bound.state_layers, self._state_slots(bound) if bound.state_layers else 0)

    def _state_slots(self, bound: Bound) -> int:
        spec = self._spec
        return max(spec.lanes, spec.state_slots) if spec.state_slots or bound.state_layers else 0

    # --------------------------------------------------------------------------------------------------------- bind

    def _open_backend(self) -> Backend:
        from backends.registry import open_backend

        boot = self._boot
        try:
            backend = open_backend(boot.backend, self._options)
        except GpuError:
            raise
        except (ValueError, OSError, ImportError, RuntimeError) as error:
            raise SettingError(f"backend {boot.backend} cannot be opened: {error}", field="backend") from error
        self._opened.callback(backend.close)
        if self._spec.deterministic and not backend.facts.batch_invariant:
            raise UnsupportedModel(
                f"backend {backend.facts.backend} gives a row other last digits in another batch",
                field="deterministic",
                fix="leave --deterministic off there",
            )
        return backend

    @property
    def _options(self) -> OpenOptions:
        boot = self._boot
        extra = {"device": boot.device, "fleet": ",".join(boot.fleet)} if boot.device else {}
        return OpenOptions(boot.device_index, boot.threads, boot.cores, boot.isa, extra, self._tell)

    def _open_collective(self) -> Collective | None:
        """This rank's end of what the ranks exchange; None where they exchange nothing."""
        from backends.registry import open_collective

        boot = self._boot
        if boot.acts_fd < 0:
            return None
        sizes = (boot.piece_floats, boot.message_floats, boot.token_floats, boot.acts_depth)
        shape = fleet_shape(boot.ranks, *sizes)
        timeout_s, spin_us = boot.exchange_timeout_s, boot.spin_us
        collective = open_collective(boot.acts_fd, shape, boot.rank, timeout_s=timeout_s, spin_us=spin_us)
        self._opened.callback(collective.close)
        return collective

    def _bind(self, backend: Backend, collective: Collective | None, parts: Sequence[Part], read: _Read) -> Layouts:
        if self._unified:
            assert read.whole is not None, "ranks that hold rows together hold weights together"
            return self._bind_in_place(backend, collective, parts, read.whole)
        if len(parts) > 1:
            assert collective is not None, "ranks that flip exchange"
            bindings = [Binding(part.side.name, *_run(part.bound), part.kv, part.states, part.runs) for part in parts]
            return backend.bind_layouts(bindings, self._limits, self._progress, collective, self._home(read.whole))
        (part,) = parts
        ops, weights = _run(part.bound)
        program = backend.bind(ops, weights, part.kv, self._limits, self._progress, part.states, collective)
        return InPlace({part.side.name: program}, part.side.name)

    def _home(self, whole: Bound | None) -> WeightHome:
        boot = self._boot
        if self._spec.image_dir or whole is None:
            folder = self._spec.image_dir
            return WeightHome("images", boot.rank, boot.ranks, folder=folder, at=self._faults.at, tell=self._tell)
        return WeightHome("copy", boot.rank, boot.ranks, *_run(whole), weights_fd=boot.weights_fd)

    def _tell(self, what: str) -> None:
        """Into the log now, and to the engine with the next answer."""
        log.warning("%s", what)
        self._notes.append(what)

    def _bind_in_place(
        self, backend: Backend, collective: Collective | None, parts: Sequence[Part], whole: Bound
    ) -> Layouts:
        """Programs over pools and weights that all ranks hold together. The first bind fills the weights."""
        boot, kv = self._boot, parts[0].kv
        pool = whole.kv_pool(kv.slots, kv.type, kv.group_slots[1:])
        pools = backend.pools(
            pool, self._states(whole), self._progress, SharedPools(boot.rank, boot.ranks, boot.kv_fd, boot.state_fd)
        )
        programs: dict[str, Program] = {}
        try:
            for part in parts:
                every = [run for each in parts for run in each.runs]
                shared = Shared(boot.rank, boot.ranks, *_run(whole), boot.weights_fd, every, packed=bool(programs))
                own = PoolParts(pools, part.bound.kv_places, part.bound.state_parts)
                ops, weights = _run(part.bound)
                programs[part.side.name] = backend.bind(
                    ops, weights, part.kv, self._limits, self._progress, part.states, collective, shared, own
                )
        except BaseException:
            for program in programs.values():
                program.close()
            pools.close()
            raise
        return InPlace(programs, parts[0].side.name, pools)

    def _flip(self, layouts: Layouts, parts: Sequence[Part], read: _Read) -> RankFlip:
        boot, spec = self._boot, self._spec
        by_name = {part.side.name: part for part in parts}
        geometry = checked_geometry(
            read.bounds[PIPELINE],
            read.forms,
            spec.token_vector,
            self._group_slots(parts[0].bound),
            self._state_slots(parts[0].bound),
            layouts,
            boot.rank,
            {name: part.kv for name, part in by_name.items()},
            unified=self._unified,
        )
        transit = None
        if boot.transit_fd >= 0:
            transit = Transit(boot.transit_fd, spec.transit_bytes)
            self._opened.callback(transit.close)
        return RankFlip(boot.rank, geometry, layouts, transit, self._faults)


def _run(bound: Bound) -> Run:
    return bound.ops, bound.weights


def _kv_type(name: str) -> QuantType:
    if name.upper() not in KV_TYPES:
        known = ", ".join(KV_TYPES).lower()
        raise SettingError(f"KV type {name!r} is not supported; there is: {known}", field="kv_type")
    return QuantType[name.upper()]


def _whole_pages(slots: int) -> int:
    return max(1, slots // PAGE_LEN) * PAGE_LEN
