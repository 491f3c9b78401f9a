"""`GpuProgram`: a bound op list on a card.

    run(batch)     check ─▶ fill the block, upload ─▶ segments, with exchanges between them ─▶ logits come down ─▶ wait
    draft(batch)   the same with the ops behind the mark `DraftStep`
    hidden(batch)  the ops behind the mark `HiddenStep` on what the last run left; the batch lies there already
    accept(kept)   launches that make held rows part of the states, recorded for each number of lanes

Batches of one shape have the same launches. The first of a shape are launched one by one, as they are made: the card
computes the first layers while the last are put together. When the shape comes again each of its segments is recorded,
and replayed from then on (`backends.gpu.recordings`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from backends.base import Batch, LoadProgress, MemoryRegion, PoolParts, Stamp
from backends.gpu import held
from backends.gpu.batch import PAIRS, STAGING_LINE, Block, checked
from backends.gpu.device import Device, HostMemory, Memory
from backends.gpu.errors import DeviceLost
from backends.gpu.library_gemm import LINE
from backends.gpu.plan import Bases, Output, Placed, Plan, turns_of
from backends.gpu.pools import GpuPools, all_of, checked_parts
from backends.gpu.recorder import Segment, pieces
from backends.gpu.recordings import Shapes
from backends.gpu.staging import LOAD_LINE, STAGING_BYTES, Staging
from backends.gpu.states import check_pairs
from backends.gpu.steps import exchange, recurrent
from backends.gpu.steps.base import BatchShape, stride_of
from backends.gpu.transport.base import Transport
from backends.gpu.tuning import Tuned, Tuning
from backends.gpu.weights import CardWeights, OfFile, fill
from backends.sections import draft_section, hidden_rows

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]

ACCEPT = -1
"""Beside the sections: what held lanes take that are accepted, whose shape is how many they are."""
NO_INTS: Ints = np.zeros(0, np.int32)


class GpuProgram:
    """A bound op list. One call at a time, from any thread.

    `weights` are filled from the checkpoint, unless they are `placed` already: then the caller fills them. With `parts`
    the pools are the caller's; `own_transport`: it closes with the program. `tuning` measures which forms are ahead,
    once the weights lie on the card. Raises OutOfDeviceMemory with the arithmetic, ValueError for a tensor whose bytes
    are not what its shape says, GemmRefused for a library that has to multiply and cannot.
    """

    def __init__(
        self,
        device: Device,
        plan: Plan,
        weights: CardWeights,
        progress: LoadProgress,
        transport: Transport | None = None,
        parts: PoolParts | None = None,
        placed: bool = False,
        own_transport: bool = False,
        tuning: Tuning | None = None,
    ) -> None:
        self._device, self._plan, self._transport = device, plan, transport
        self._own_transport, self._tuning = own_transport, tuning
        self._tuned: Tuned | None = None
        self._memories: list[Memory] = []
        self._hosts: list[HostMemory] = []
        self._own_pools: GpuPools | None = None
        self._block: Block | None = None
        self._shapes: Shapes | None = None
        try:
            self._place(weights, progress, parts, placed)
        except BaseException:
            self.close()
            raise

    def _place(self, weights: CardWeights, progress: LoadProgress, parts: PoolParts | None, placed: bool) -> None:
        device, plan = self._device, self._plan
        if not placed:
            weights.place(self._allocate(weights.nbytes, "weights", weights.arithmetic))
        if parts is None:
            self._own_pools = GpuPools(device, plan.kv, plan.states)
            parts = all_of(self._own_pools)
        pools = checked_parts(parts, plan.kv, plan.states)
        drafts = self._allocate(plan.drafts.nbytes, held.LINE, f"{plan.held_rows} rows whose states are held")
        told = f"{len(plan.buffers)} buffers for {plan.limits.rows} rows, and scratch"
        workspace = self._allocate(plan.workspace.nbytes, "workspace", told)
        states = [part.layer for part in parts.states]
        self._places = Placed(plan, Bases(workspace, drafts), weights, pools, parts.kv_layers, states)
        self._block = Block(device, plan.block, self._places.block)
        self._shapes = Shapes(device.facts.told)
        self._rules = [plan.rules(section) for section in range(len(plan.sections))]
        self._outputs = [plan.output(section) for section in range(len(plan.sections))]
        self._logits = self._pinned(max(*map(self._logit_bytes, range(len(self._outputs))), self._hidden_bytes()))
        self._store_turns(workspace)
        if not placed:
            self._fill(weights, progress)
        self._tune()
        self._draft_section, self._hidden = draft_section(plan.ops), hidden_rows(plan.ops)
        self._held = held.HeldLanes()
        self._drafted = 0  # rows of the last step of drafting
        self._ran = 0  # rows of the last run, while what it left is there

    # ---------------------------------------------------------------------------------------------------------- plans

    def run(self, batch: Batch) -> Floats:
        """Execute every op up to the first mark. Returns logits float32 `[len(logit_rows), vocab]`, valid until the
        next call.

        Raises ValueError for a batch that exceeds the limits or points outside vocabulary, tables, pool or store of
        held rows; what its transport raises (backends.acts.ExchangeError); and DeviceLost, DriverError.
        """
        self._held.forget()
        self._drafted = self._ran = 0
        batch = _whole(batch)
        holds = bool(len(batch.hold)) and bool((batch.hold != -1).any())
        logits = self._call(0, batch, batch.logit_rows)
        if holds:
            self._held.note(batch.hold, batch.states, batch.lanes, batch.positions)
        self._ran = len(batch.tokens)
        return logits

    def hidden(self, batch: Batch) -> Floats:
        """Every row of the last run, whose batch it was, behind the output norm: float32 `[rows, hidden]`, valid until
        the next call. Raises ValueError on a rank that does not have them, and for another batch; DeviceLost,
        DriverError."""
        hidden, rows = self._hidden, len(batch.tokens)
        if hidden is None:
            raise ValueError("this rank has no rows behind the output norm")
        if not self._ran or rows != self._ran:
            raise ValueError("the batch is not that of the last run")
        shape = BatchShape(rows, 0, 0)
        if hidden.section is not None:
            self._ran = 0  # the residual has its last update now
            self._execute(hidden.section, shape, pieces(self._plan, self._places, hidden.section, shape))
        return self._fetched(Output(hidden.buffer, hidden.buffer.width, 0), shape)

    def draft(self, batch: Batch) -> Floats:
        """Execute the ops behind the mark: one row of each lane. Returns logits of all rows, and raises, as `run` does;
        ValueError too where there is no mark, or `batch.chain` names a row that the step before did not have."""
        if self._draft_section is None:
            raise ValueError("this program has no step of drafting")
        batch = _whole(batch)
        if len(batch.chain) != len(batch.tokens):
            raise ValueError(f"a chain of {len(batch.chain)} rows for a step of drafting of {len(batch.tokens)}")
        before, self._drafted, self._ran = self._drafted, 0, 0
        logits = self._call(self._draft_section, batch, NO_INTS, chain_rows=before)
        self._drafted = len(batch.tokens)
        return logits

    def accept(self, kept: Sequence[tuple[int, int]]) -> None:
        """States of (lane, rows) that the last run held become what the lane's first rows leave. Raises ValueError,
        before anything is written, for a lane that is not held, or was accepted, or has not so many rows. It is asked
        of the card and not waited for: what goes wrong there the next call raises."""
        lanes = self._held.taken(kept)
        if not lanes or not self._plan.states.layers:
            return
        self._filled_block.write_accepts(held.accepts_of(lanes))
        self._execute(ACCEPT, BatchShape(len(lanes), 0, 0), self._accepting(len(lanes)))

    def copy_states(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy state slots (source, target) of all layers, in this order. Raises ValueError for a slot that there is
        not. As `accept` it is not waited for."""
        if not self._plan.states.layers:
            return
        check_pairs(self._plan.states, pairs)
        for first in range(0, len(pairs), PAIRS):
            some = np.array(pairs[first : first + PAIRS], np.int32)
            self._filled_block.write_pairs(some)
            self._device.launch(recurrent.copies(self._places, self._places.batch("pairs"), len(some)))

    # --------------------------------------------------------------------------------------------------------- memory

    def memory_lines(self) -> Mapping[str, int]:
        """Bytes held on the card: weights, own pools, buffers and scratch, kept rows; in pinned host memory what
        batches and logits pass through, and of either what exchanges and a library that multiplies do. All of it is had
        since the bind."""
        lines: dict[str, int] = {}
        for memory in self._memories:
            lines[memory.line] = lines.get(memory.line, 0) + memory.nbytes
        host = sum(memory.nbytes for memory in self._hosts) + (self._block.nbytes if self._block is not None else 0)
        lines[STAGING_LINE] = host
        if self._tuned is not None and self._tuned.library_bytes:
            lines[LINE] = lines.get(LINE, 0) + self._tuned.library_bytes
        lines |= self._own_pools.memory_lines() if self._own_pools is not None else {}
        return lines | (dict(self._transport.memory_lines()) if self._transport and self._own_transport else {})

    def memory_regions(self) -> tuple[MemoryRegion, ...]:
        """None: a card's memory is in no mapping of this process."""
        return ()

    def close(self) -> None:
        """Give the memory back, once nothing on the stream uses it: a call that ended with an error may have left
        launches there. Arrays returned by `run` are invalid from here on."""
        if self._shapes is not None:
            with suppress(DeviceLost):  # whose memory is gone, and who is told of it by every other call
                self._device.wait()
            self._shapes.close()
        if self._block is not None:
            self._block.close()
        self._shapes, self._block = None, None
        for memory in (*self._hosts, *self._memories):
            memory.close()
        self._hosts.clear()
        self._memories.clear()
        if self._own_pools is not None:
            self._own_pools.close()
        if self._transport is not None and self._own_transport:
            self._transport.close()

    # --------------------------------------------------------------------------------------------------------- inside

    def _call(self, section: int, batch: Batch, logit_rows: Ints, chain_rows: int | None = None) -> Floats:
        runs = checked(batch, self._rules[section], logit_rows, chain_rows)
        plan = self._plan
        states, tables = bool(plan.states.layers), bool(plan.kv.layers)
        shape = self._filled_block.write(batch, runs, logit_rows, states=states, tables=tables)
        self._execute(section, shape, pieces(plan, self._places, section, shape), batch)
        return self._fetched(self._outputs[section], shape)

    def _execute(self, section: int, shape: BatchShape, made: Iterator[Segment], batch: Batch | None = None) -> None:
        """Launches one by one as they are `made` where a shape is new, recordings where it is not. `batch`: whose
        exchanges they are."""
        assert self._shapes is not None, "closed"
        known = self._shapes.of(section, shape)
        if known is None:
            self._shapes.keep(section, shape, self._launched(made, batch))
            return
        recordings = self._shapes.recorded(self._device, known)
        if recordings is None:
            self._launched(known.segments, batch)
            return
        for recording, segment in zip(recordings, known.segments, strict=True):
            if recording is not None:
                self._device.replay(recording)
            self._between(segment, batch)

    def _launched(self, parts: Iterable[Segment], batch: Batch | None) -> list[Segment]:
        """All of them, one by one."""
        done = []
        for part in parts:
            if part.launches:
                self._device.launch(part.launches)
            self._between(part, batch)
            done.append(part)
        return done

    def _between(self, segment: Segment, batch: Batch | None) -> None:
        """What comes behind the launches of a segment."""
        if segment.product is not None:
            assert self._tuned is not None and self._tuned.gemm is not None, "chosen with its library"
            self._tuned.gemm.multiply(segment.product)
        if segment.exchange is None:
            return
        assert self._transport is not None and batch is not None, "checked at bind"
        stamp = Stamp(batch.epoch, batch.seq, segment.rows, segment.exchange.label)
        exchange.make(segment.exchange, self._places, self._transport, stamp)

    def _fetched(self, output: Output, shape: BatchShape) -> Floats:
        """The rows that a section leaves, in pinned memory, once all of it is done."""
        if output.buffer is None:
            self._settle()
            return np.zeros((0, output.width), np.float32)
        rows = shape.logit_rows if output.scope else shape.rows
        place = self._places.rows(output.buffer)
        nbytes = 4 * rows * place.stride
        if nbytes:
            self._device.download(self._logits.address, place.at, nbytes)
        self._settle()
        return self._logits.bytes[:nbytes].view(np.float32).reshape(rows, place.stride)[:, : output.width]

    def _accepting(self, count: int) -> Iterator[Segment]:
        """What `count` lanes take: a launch for each layer, at every round of drafts."""
        yield Segment(held.accepts(self._plan.ops, self._places, count))

    def _settle(self) -> None:
        """Wait until the stream has nothing left to do: then the block may be written again."""
        self._device.wait()
        self._filled_block.waited()

    @property
    def _filled_block(self) -> Block:
        assert self._block is not None, "closed"
        return self._block

    def _logit_bytes(self, section: int) -> int:
        output, rules = self._outputs[section], self._rules[section]
        return 4 * (rules.logit_rows if output.scope else rules.rows) * stride_of(output.width)

    def _hidden_bytes(self) -> int:
        found = hidden_rows(self._plan.ops)
        return 0 if found is None else 4 * self._plan.limits.rows * stride_of(found.buffer.width)

    def _allocate(self, nbytes: int, line: str, arithmetic: str) -> int:
        """An address; 0 where nothing is wanted."""
        if not nbytes:
            return 0
        self._memories.append(self._device.allocate(nbytes, line, arithmetic))
        return self._memories[-1].address

    def _pinned(self, nbytes: int) -> HostMemory:
        self._hosts.append(self._device.pinned(max(nbytes, 4), STAGING_LINE))
        return self._hosts[-1]

    def _store_turns(self, workspace: int) -> None:
        """Upload what ropes turn by."""
        turns = turns_of(self._plan)
        if not turns:
            return
        passing = self._device.pinned(max(array.nbytes for _, array in turns), STAGING_LINE)
        try:
            for offset, array in turns:
                passing.bytes[: array.nbytes] = array.view(np.uint8)
                self._device.upload(workspace + offset, passing.address, array.nbytes)
                self._device.wait()
        finally:
            passing.close()

    def _tune(self) -> None:
        if self._tuning is not None:
            self._tuned = self._tuning.tune(self._plan, self._places)
            self._memories += [self._tuned.slab] if self._tuned.slab is not None else []

    def _fill(self, weights: CardWeights, progress: LoadProgress) -> None:
        staging = Staging(self._device, LOAD_LINE, min(STAGING_BYTES, max(weights.nbytes, 4096)))
        try:
            fill(self._device, staging, weights, OfFile(), progress)
        finally:
            staging.close()


def _whole(batch: Batch) -> Batch:
    """The same with arrays of int32 in one piece."""
    fields = ("tokens", "positions", "slots", "lanes", "tables", "logit_rows", "states", "hold", "chain")
    whole = {name: np.ascontiguousarray(getattr(batch, name), dtype=np.int32) for name in fields}
    return Batch(**whole, epoch=batch.epoch, seq=batch.seq)
