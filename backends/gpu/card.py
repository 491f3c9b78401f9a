"""A card over a driver: `Device` of backends.gpu.device, for real.

    card = open_card("nvidia", uuid="GPU-…")
    arena = card.allocate(nbytes, "weights", "12 layers x ...")
    recording = card.record(launches)        # once
    card.replay(recording)                   # every step: one call of the driver
    card.wait()

A launch costs one call of the driver: its arguments were laid out in memory before, by `_Prepared`. A recording is a
graph of the driver, captured from the stream; a driver that refuses to capture is told about once, and what was
recorded is then launched one by one.

A card belongs to one thread at a time, whichever: each call makes the card that of the calling thread first, since
libraries beside us may have chosen another. Once the driver has lost the card every call raises DeviceLost, and `close`
just forgets.
"""

from __future__ import annotations

import ctypes
import os
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from backends.gpu.arch import Vendor, arch
from backends.gpu.cache import Cache, Compiler, default_folder
from backends.gpu.card_memory import Books, CardMemory, Granules, Pinned, anonymous, where
from backends.gpu.device import CardFacts, Memory, Recording
from backends.gpu.driver import Driver, Identity, open_driver
from backends.gpu.errors import DriverError, OutOfDeviceMemory
from backends.gpu.kernel_store import KernelStore
from backends.gpu.launch import SLOT, Launch, Symbol

_NAP_S = 0.0002


def open_card(
    vendor: Vendor,
    *,
    index: int | None = None,
    uuid: str = "",
    say: Callable[[str], None],
    library: str | None = None,
    compiler: Compiler | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Card:
    """The card of a number (in the driver's order) or of a UUID. `say` is told what users should know, each thing once.
    `library`: the driver's file, `compiler`: of the kernels, instead of what is found. Raises DriverMissing,
    DriverTooOld, CardMissing, DriverError, UnknownArch."""
    driver = open_driver(vendor, library, environ)
    identity = driver.find(index=index, uuid=uuid)
    driver.use(identity)
    try:
        return Card(driver, facts_of(driver, identity), Cache(default_folder(environ), say), compiler, say)
    except BaseException:
        driver.leave()
        raise


def facts_of(driver: Driver, identity: Identity) -> CardFacts:
    """Of a card in use. Raises UnknownArch for one that is too old, DriverError for waves that no kernel is for."""
    index, numbers = identity.index, driver.names.attributes
    known = arch(driver.arch_name(index))
    warp = driver.attribute(numbers.warp, index)
    if warp not in known.warps:
        raise DriverError(
            f"{identity.told} says that its waves have {warp} lanes; of {known.name} they have"
            f" {' or '.join(map(str, known.warps))}",
            fix="leave this card out of --devices, and report this",
            card=identity.told,
        )
    virtual = bool(driver.attribute(numbers.virtual_memory, index))
    return CardFacts(
        vendor=driver.names.vendor,
        index=index,
        uuid=identity.uuid,
        pci=identity.pci,
        name=identity.name,
        arch=known,
        warp=warp,
        units=driver.attribute(numbers.units, index),
        total_bytes=driver.total_bytes(index),
        unified=bool(driver.attribute(numbers.integrated, index)),
        driver=f"{driver.names.title} {driver.version_text}",
        virtual_memory=virtual,
        granularity=driver.granularity() if virtual else 0,
    )


class _Prepared:
    """A launch as the driver takes it. `call`: all arguments of one call, which point into `held`."""

    __slots__ = ("call", "held")

    def __init__(self, launch: Launch, function: int, stream: int) -> None:
        count = len(launch.args)
        values = ctypes.create_string_buffer(SLOT * max(1, count))
        try:
            launch.symbol.packing.pack_into(values, 0, *launch.args)
        except struct.error as error:
            raise _wrong_argument(launch, error) from None
        begin = ctypes.addressof(values)
        places = (ctypes.c_void_p * max(1, count))(*range(begin, begin + SLOT * count, SLOT))
        numbers = (*launch.grid, launch.symbol.threads, 1, 1, launch.shared)
        self.held = (values, places)
        self.call = (
            ctypes.c_void_p(function),
            *map(ctypes.c_uint, numbers),
            ctypes.c_void_p(stream),
            ctypes.c_void_p(ctypes.addressof(places)),
            ctypes.c_void_p(),
        )


class CardRecording:
    """`Recording` of backends.gpu.device. `graph`: 0 where the driver would not capture, and `prepared` is launched."""

    def __init__(self, launches: tuple[Launch, ...], prepared: tuple[_Prepared, ...], graph: int, card: Card) -> None:
        self.launches = launches
        self.prepared = prepared
        self.graph = graph
        self.replays = 0
        self.card: Card | None = card

    def close(self) -> None:
        if self.card is not None:
            card, self.card = self.card, None
            card.forget(self)


class Card:
    """`Device` of backends.gpu.device, and `StreamDevice`, `Timed` and `PeerDevice`."""

    def __init__(
        self, driver: Driver, facts: CardFacts, cache: Cache, compiler: Compiler | None, say: Callable[[str], None]
    ) -> None:
        """`driver` uses the card that `facts` are of."""
        self.facts = facts
        self.driver = driver
        self._say = say
        self._stream = driver.stream()
        self._books = Books(driver, facts.told)
        self._store = KernelStore(driver, facts.arch, cache, compiler)
        self._launched: Counter[str] = Counter()
        self._recordings: list[CardRecording] = []
        self._capture = True
        self._closed = False

    @property
    def counts(self) -> Mapping[str, int]:
        total = self._launched.copy()
        for recording in self._recordings:
            total.update(_counts(recording))
        return total

    # ---------------------------------------------------------------------------------------------------------- memory

    def allocate(self, nbytes: int, line: str, arithmetic: str = "") -> CardMemory:
        self.driver.enter()
        try:
            address = self.driver.allocate(max(nbytes, 1))
        except OutOfDeviceMemory as error:
            raise self._books.does_not_fit(error, nbytes, line, arithmetic) from error
        memory = CardMemory(self._books, address, nbytes, line, self.driver.free)
        self.driver.fill(address, 0, nbytes, self._stream)
        return memory

    def reserve(self, nbytes: int, line: str, arithmetic: str = "") -> Granules:
        self.driver.enter()
        if not self.facts.virtual_memory:
            raise DriverError(
                f"{self.facts.told} has no virtual memory of its own, so {line} cannot be given back and had again",
                fix="serve one layout (--layout), or leave this card out of --devices",
                card=self.facts.told,
            )
        return Granules(self._books, nbytes, self.facts.granularity, line, arithmetic, self._stream)

    def pinned(self, nbytes: int, line: str) -> Pinned:
        self.driver.enter()
        memory = anonymous(nbytes, line)
        return Pinned(self._books, where(memory), nbytes, line, memory, self._stream)

    def pin(self, address: int, nbytes: int, line: str) -> Pinned:
        self.driver.enter()
        return Pinned(self._books, address, nbytes, line, None, self._stream)

    def free_bytes(self) -> int:
        self.driver.enter()
        return self.driver.memory_info()[0]

    # ------------------------------------------------------------------------------------------------------------ work

    def prepare(self, symbols: Iterable[Symbol]) -> None:
        self.driver.enter()
        self._store.prepare(symbols)

    def upload(self, target: int, source: int, nbytes: int) -> None:
        self._books.refuse_unpinned(source, nbytes, "an upload")
        self._move("upload", target, source, nbytes)

    def download(self, target: int, source: int, nbytes: int) -> None:
        self._books.refuse_unpinned(target, nbytes, "a download")
        self._move("download", target, source, nbytes)

    def copy(self, target: int, source: int, nbytes: int) -> None:
        self._move("copy", target, source, nbytes)

    def _move(self, key: str, target: int, source: int, nbytes: int) -> None:
        driver = self.driver
        driver.enter()
        if nbytes:
            status = driver.calls[key](target, source, nbytes, self._stream)
            if status:
                raise driver.failed(status, key)

    def fill(self, target: int, byte: int, nbytes: int) -> None:
        self.driver.enter()
        if nbytes:
            self.driver.fill(target, byte, nbytes, self._stream)

    def launch(self, launches: Sequence[Launch]) -> None:
        self.driver.enter()
        self._run(self._ready(launches))
        self._launched.update(launch.symbol.name for launch in launches)

    def record(self, launches: Sequence[Launch]) -> CardRecording:
        self.driver.enter()
        prepared = self._ready(launches)
        graph = 0
        if launches and self._capture:
            graph = self.driver.capture(self._stream, lambda: self._run(prepared))
            if not graph:
                self._capture = False
                self._say(
                    f"{self.facts.told}: its driver records no launches; they are made one by one, which is slower"
                )
        recording = CardRecording(tuple(launches), prepared, graph, self)
        self._recordings.append(recording)
        return recording

    def replay(self, recording: Recording) -> None:
        if not isinstance(recording, CardRecording) or recording.card is not self:
            raise ValueError("a recording that was closed, or is of another card")
        driver = self.driver
        driver.enter()
        if recording.graph:
            status = driver.calls["graph_launch"](recording.graph, self._stream)
            if status:
                raise driver.failed(status, "graph_launch")
        else:
            self._run(recording.prepared)
        recording.replays += 1

    def wait(self) -> None:
        self.driver.enter()
        self.driver.wait(self._stream)

    def seconds(self, work: Callable[[], None]) -> float:
        """Between two events of the driver, one ahead of the work and one behind it."""
        self.driver.enter()
        driver = self.driver
        begin, end = driver.event(), driver.event()
        try:
            driver.record_event(begin, self._stream)
            work()
            driver.record_event(end, self._stream)
            driver.wait_event(end)
            return driver.elapsed_ms(begin, end) / 1e3
        finally:
            for event in (begin, end):
                self._books.ending(lambda event=event: driver.end_event(event))  # type: ignore[misc]

    # ------------------------------------------------------------------- libraries on the stream, cards of other ranks

    @property
    def stream(self) -> int:
        self.driver.enter()
        return self._stream

    def idle(self) -> bool:
        self.driver.enter()
        return self.driver.is_done(self._stream)

    def reaches(self, uuid: str) -> str:
        self.driver.enter()
        other = next((each for each in self.driver.identities() if each.uuid == uuid), None)
        if other is None:
            return "this process is not shown that card"
        return "" if self.driver.reaches(self.facts.index, other.index) else "there is no peer access between them"

    def export(self, memory: Memory) -> bytes:
        self.driver.enter()
        return self.driver.ipc_get(memory.address)

    def open(self, handle: bytes, nbytes: int) -> CardMemory:
        self.driver.enter()
        return CardMemory(self._books, self.driver.ipc_open(handle), nbytes, "", self._unmap)

    def _unmap(self, address: int) -> None:
        self.driver.wait(self._stream)
        self.driver.ipc_close(address)

    def try_copy(self, target: int, source: int, nbytes: int, timeout_s: float) -> bool:
        """A stream that hangs is left as it is, and from then on so is all memory of this card that is closed: the
        driver would wait for it. The end of the process gives it back."""
        self.wait()
        driver, stream = self.driver, self.driver.stream()
        try:
            status = driver.calls["copy"](target, source, nbytes, stream)
            if status:
                raise driver.failed(status, "copy")
            deadline = time.monotonic() + timeout_s
            while not driver.is_done(stream):
                if time.monotonic() > deadline:
                    self._books.hangs = True
                    return False
                time.sleep(_NAP_S)
            return True
        finally:
            if not self._books.hangs:
                self._books.ending(lambda: driver.end_stream(stream))

    def close(self) -> None:
        """Waits for the stream, then gives everything back that was had: recordings, memory, kernels, the stream."""
        if self._closed:
            return
        self._closed = True
        if self._books.hangs:
            self._say(f"{self.facts.told}: a copy on it never ended; the end of the process gives its memory back")
            return
        books, driver = self._books, self.driver
        try:
            books.ending(driver.enter)
            books.ending(lambda: driver.wait(self._stream))
            for recording in self._recordings.copy():
                recording.close()
            books.close()
            books.ending(self._store.close)
            books.ending(lambda: driver.end_stream(self._stream))
        finally:
            driver.leave()

    def forget(self, recording: CardRecording) -> None:
        """A recording that is closed: its graph goes, its launches stay counted. The stream is waited for: what becomes
        of a graph that runs is another thing in each version of HIP."""
        self._recordings.remove(recording)
        self._launched.update(_counts(recording))
        if recording.graph:
            self._books.ending(self.driver.enter)
            self._books.ending(lambda: self.driver.wait(self._stream))
            self._books.ending(lambda: self.driver.end_graph(recording.graph))

    def _ready(self, launches: Sequence[Launch]) -> tuple[_Prepared, ...]:
        self._store.prepare(dict.fromkeys(launch.symbol for launch in launches))
        function = self._store.function
        return tuple(_Prepared(each, function(each.symbol, each.shared), self._stream) for each in launches)

    def _run(self, prepared: Sequence[_Prepared]) -> None:
        call = self.driver.calls["launch"]
        for each in prepared:
            status = call(*each.call)
            if status:
                raise self.driver.failed(status, "launch")


def _counts(recording: CardRecording) -> dict[str, int]:
    once = Counter(launch.symbol.name for launch in recording.launches)
    return {name: count * recording.replays for name, count in once.items() if recording.replays}


def _wrong_argument(launch: Launch, error: struct.error) -> ValueError:
    """Which one does not fit."""
    for param, value in zip(launch.symbol.params, launch.args, strict=True):
        try:
            param.packing.pack(value)
        except struct.error as own:
            return ValueError(f"{launch.symbol.name}: {param.name} = {value} is no {param.kind} ({own})")
    return ValueError(f"{launch.symbol.name}: {error}")
