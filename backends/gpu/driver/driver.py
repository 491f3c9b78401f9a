"""A vendor's driver, typed: one method for a thing that a card can be asked.

    driver = open_driver("nvidia")       # raises DriverMissing, DriverTooOld
    driver.identities()                  # every card that this process can see
    driver.use(identity)                 # this one from now on: its context, its errors
    address = driver.allocate(1 << 20)

A `Driver` is of one process and, once `use` was called, of one card; whoever wants two cards opens two drivers. Both
vendors keep the chosen card per thread, and libraries beside us (collectives, torch) may choose another one, so `enter`
chooses ours again: `Card` calls it wherever work begins.

Every status that is not 0 is raised as an error of backends.gpu.errors with the driver's own word for it. After a
DeviceLost every later call raises DeviceLost again, whatever the driver would answer.

What differs between the vendors are methods of `backends.cuda.driver` and `backends.rocm.driver`.
"""

from __future__ import annotations

import ctypes
import importlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from ctypes import byref, c_float, c_int, c_size_t, c_uint64, c_void_p

from backends.gpu.arch import Vendor
from backends.gpu.driver import names as n
from backends.gpu.driver.finding import Identity, chosen, no_card, refuse_twins
from backends.gpu.driver.names import Names
from backends.gpu.driver.status import CAPTURE_REFUSED, NO_DEVICE, NOT_READY, error_of
from backends.gpu.errors import DeviceLost, DriverError, DriverMissing, DriverTooOld

_MODULES: dict[Vendor, tuple[str, str]] = {
    "nvidia": ("backends.cuda.driver", "CudaDriver"),
    "amd": ("backends.rocm.driver", "RocmDriver"),
}
_NAME_BYTES = 256


def open_driver(vendor: Vendor, path: str | None = None, environ: Mapping[str, str] = os.environ) -> Driver:
    """The driver's library, loaded and initialised. `path`: a file, instead of the names that the system's loader looks
    for. Raises DriverMissing, DriverTooOld, CardMissing where a variable hides every card."""
    module, name = _MODULES[vendor]
    made: Driver = getattr(importlib.import_module(module), name)(path, environ)
    return made


class Driver(ABC):
    names: Names

    def __init__(self, path: str | None, environ: Mapping[str, str]) -> None:
        self.path, self._library = _loaded(self.names, (path,) if path else self._places(environ))
        self._environ = environ
        self._lost: DeviceLost | None = None
        self.identity: Identity | None = None
        self.calls: dict[str, Callable[..., int]] = {key: self._bound(key) for key in self.names.symbols}
        self._start()

    def _places(self, environ: Mapping[str, str]) -> Iterable[str]:
        """Where the library is looked for: names for the system's loader, then files."""
        return self.names.libraries

    def _bound(self, key: str) -> Callable[..., int]:
        symbol = self.names.symbols[key]
        try:
            function = getattr(self._library, symbol)
        except AttributeError:
            raise DriverTooOld(
                f"{self.names.title}'s driver {self.path} has no {symbol}; homeserve needs {self.names.title}"
                f" {self.names.oldest_text} or later",
                fix=self.names.update,
            ) from None
        function.argtypes = self.names.signature(key)
        function.restype = ctypes.c_int
        return function  # type: ignore[no-any-return]

    def _start(self) -> None:
        """The version first: CUDA tells it before it is initialised, and too old a driver may not initialise at all."""
        self._prepare()
        number = c_int()
        status = self.calls["version"](byref(number))
        if status == NO_DEVICE:  # HIP starts with the first call, whichever it is
            raise no_card(self.names, self._environ)
        self._check(status, "version")
        self.version = number.value
        if self.version < self.names.oldest:
            raise DriverTooOld(
                f"{self.names.title} {self.version_text} is older than {self.names.oldest_text}, the oldest that"
                " homeserve runs on",
                fix=self.names.update,
            )
        status = self.calls["init"](0)
        if status == NO_DEVICE:
            raise no_card(self.names, self._environ)
        self._check(status, "init")

    @abstractmethod
    def _prepare(self) -> None:
        """What else has to be told of the library's functions."""

    # ----------------------------------------------------------------------------------------------------- cards

    @property
    @abstractmethod
    def version_text(self) -> str:
        """Like 12.8."""

    @abstractmethod
    def arch_name(self, index: int) -> str:
        """As backends.gpu.arch takes it."""

    @abstractmethod
    def _uuid(self, raw: bytes, pci: str) -> str: ...

    def identities(self) -> tuple[Identity, ...]:
        """Every card that this process can see, in the driver's order. Raises DriverMissing where there is none,
        CardMissing where a variable hides all of them, DriverError for two of one UUID."""
        count = c_int()
        status = self.calls["device_count"](byref(count))
        if status == NO_DEVICE or (not status and not count.value):
            raise no_card(self.names, self._environ)
        self._check(status, "device_count")
        found = tuple(self._identity(index) for index in range(count.value))
        refuse_twins(self.names, found)
        return found

    def _identity(self, index: int) -> Identity:
        device = c_int()
        self._call("device_get", byref(device), index)
        name = ctypes.create_string_buffer(_NAME_BYTES)
        pci = ctypes.create_string_buffer(32)
        uuid = n.Uuid()
        self._call("device_name", name, _NAME_BYTES, device)
        self._call("device_pci", pci, 32, device)
        self._call("device_uuid", byref(uuid), device)
        where = pci.value.decode().lower()
        return Identity(index, self._uuid(bytes(uuid.bytes), where), where, name.value.decode(errors="replace"))

    def find(self, *, index: int | None = None, uuid: str = "") -> Identity:
        """The card of a number or of a UUID (or PCI address). Raises CardMissing, and what `identities` does."""
        return chosen(self.names, self._environ, self.identities(), index, uuid)

    def attribute(self, number: int, index: int) -> int:
        value = c_int()
        self._call("device_attribute", byref(value), number, index)
        return value.value

    def total_bytes(self, index: int) -> int:
        value = c_size_t()
        self._call("device_total", byref(value), index)
        return value.value

    def reaches(self, index: int, other: int) -> bool:
        """Whether card `index` can read and write the memory of `other`, as the driver says."""
        value = c_int()
        self._call("device_reaches", byref(value), index, other)
        return bool(value.value)

    def use(self, identity: Identity) -> None:
        """This card from now on."""
        self.identity = identity
        self._open(identity.index)
        self.enter()

    @abstractmethod
    def _open(self, index: int) -> None: ...

    @abstractmethod
    def enter(self) -> None:
        """Make the card that of the calling thread. Raises DeviceLost where it is lost."""

    @abstractmethod
    def leave(self) -> None:
        """Give the card's context back."""

    # ---------------------------------------------------------------------------------------------------- memory

    def memory_info(self) -> tuple[int, int]:
        """(free, total) bytes."""
        free, total = c_size_t(), c_size_t()
        self._call("memory_info", byref(free), byref(total))
        return free.value, total.value

    def allocate(self, nbytes: int) -> int:
        return self._out("allocate", nbytes)

    def free(self, address: int) -> None:
        self._call("free", address)

    def fill(self, target: int, byte: int, nbytes: int, stream: int) -> None:
        self._call("fill", target, byte, nbytes, stream)

    def host_register(self, address: int, nbytes: int) -> None:
        self._call("host_register", address, nbytes, n.REGISTER_PORTABLE)

    def host_unregister(self, address: int) -> None:
        self._call("host_unregister", address)

    def granularity(self) -> int:
        """Of memory behind addresses of `reserve`."""
        value = c_size_t()
        self._call("granularity", byref(value), byref(self._prop()), 0)
        return value.value

    def reserve(self, nbytes: int) -> int:
        return self._out("reserve", nbytes, 0, None, 0)

    def unreserve(self, address: int, nbytes: int) -> None:
        self._call("unreserve", address, nbytes)

    def back(self, address: int, nbytes: int) -> int:
        """Memory behind reserved addresses, whole granules: its handle, for `unback`. Where anything of it fails there
        is none."""
        made = c_uint64()
        self._call("create", byref(made), nbytes, byref(self._prop()), 0)
        try:
            self._call("map", address, nbytes, 0, made, 0)
            try:
                desc = n.AccessDesc(self._location(), n.READ_WRITE)
                self._call("set_access", address, nbytes, byref(desc), 1)
            except DriverError:
                self.calls["unmap"](address, nbytes)
                raise
        except DriverError:
            self.calls["release"](made)
            raise
        return made.value

    def unback(self, address: int, nbytes: int, handle: int) -> None:
        """The handle is kept until here: CUDA's mappings hold their memory without it, HIP's not in every version."""
        self._call("unmap", address, nbytes)
        self._call("release", handle)

    def _location(self) -> n.Location:
        return n.Location(n.ON_DEVICE, self._index)

    def _prop(self) -> n.AllocationProp:
        return n.AllocationProp(type=n.PINNED, location=self._location())

    # -------------------------------------------------------------------------------------------- modules, launches

    def load(self, image: bytes) -> int:
        """A module of a cubin, PTX or code object."""
        return self._out("load", image, 0, None, None)

    def unload(self, module: int) -> None:
        self._call("unload", module)

    def function(self, module: int, name: str) -> int:
        return self._out("function", module, name.encode())

    @abstractmethod
    def allow_shared(self, function: int, nbytes: int) -> None:
        """Let launches of a function ask for so much block memory, where that has to be asked for."""

    def stream(self) -> int:
        return self._out("stream_create", n.NON_BLOCKING)

    def wait(self, stream: int) -> None:
        self._call("stream_wait", stream)

    def is_done(self, stream: int) -> bool:
        """Whether all that was asked of a stream is done. Never waits."""
        if self._lost is not None:
            raise self.lost_again()
        status = self.calls["stream_query"](stream)
        if status not in (0, NOT_READY):
            raise self.failed(status, "stream_query")
        return not status

    def end_stream(self, stream: int) -> None:
        self._call("stream_destroy", stream)

    # ------------------------------------------------------------------------------------------------------ events

    def event(self) -> int:
        return self._out("event_create", 0)

    def record_event(self, event: int, stream: int) -> None:
        self._call("event_record", event, stream)

    def wait_event(self, event: int) -> None:
        self._call("event_wait", event)

    def elapsed_ms(self, begin: int, end: int) -> float:
        value = c_float()
        self._call("event_elapsed", byref(value), begin, end)
        return value.value

    def end_event(self, event: int) -> None:
        self._call("event_destroy", event)

    # ------------------------------------------------------------------------------------------------------ graphs

    def capture(self, stream: int, work: Callable[[], None]) -> int:
        """What `work` puts on the stream as a graph that can be launched; nothing of it runs. 0 where the driver
        refuses to capture."""
        graph = c_void_p()
        status = self.calls["capture_begin"](stream, n.CAPTURE_OF_THREAD)
        if status in CAPTURE_REFUSED:
            return 0
        self._check(status, "capture_begin")
        try:
            work()
        except BaseException:
            self.calls["capture_end"](stream, byref(graph))
            if graph.value:
                self.calls["graph_destroy"](graph)
            raise
        status = self.calls["capture_end"](stream, byref(graph))
        if status in CAPTURE_REFUSED:
            return 0
        self._check(status, "capture_end")
        try:
            return self._instantiate(graph)
        finally:
            self.calls["graph_destroy"](graph)

    @abstractmethod
    def _instantiate(self, graph: c_void_p) -> int: ...

    def end_graph(self, graph: int) -> None:
        self._call("exec_destroy", graph)

    # --------------------------------------------------------------------------------------- memory of other processes

    def ipc_get(self, address: int) -> bytes:
        """A handle of an allocation, for `ipc_open` in another process. Memory behind `reserve` has none."""
        handle = n.IpcHandle()
        self._call("ipc_get", byref(handle), address)
        return ctypes.string_at(byref(handle), n.IPC_BYTES)

    def ipc_open(self, handle: bytes) -> int:
        """Where the allocation lies in this process."""
        return self._out("ipc_open", n.IpcHandle.from_buffer_copy(handle), n.LAZY_PEER_ACCESS)

    def ipc_close(self, address: int) -> None:
        self._call("ipc_close", address)

    # ------------------------------------------------------------------------------------------------------ statuses

    @property
    def _index(self) -> int:
        assert self.identity is not None, "no card is in use"
        return self.identity.index

    def _out(self, key: str, *arguments: object) -> int:
        """The handle or address that a function writes where its first argument points."""
        made = c_void_p()
        self._call(key, byref(made), *arguments)
        return made.value or 0

    def _call(self, key: str, *arguments: object) -> None:
        if self._lost is not None:
            raise self.lost_again()
        status = self.calls[key](*arguments)
        if status:
            raise self.failed(status, key)

    def _check(self, status: int, key: str) -> None:
        if status:
            raise self.failed(status, key)

    @property
    def lost(self) -> bool:
        return self._lost is not None

    def failed(self, status: int, key: str) -> DriverError:
        """The error of a status."""
        named = f"{self._error('error_name', status)} ({self._error('error_text', status)})"
        told = self.identity.told if self.identity else ""
        symbol = self.names.symbols[key]
        error = error_of(status, symbol, named, told, open_=self.identity is not None, update=self.names.update)
        if isinstance(error, DeviceLost):
            self._lost = self._lost or error
        return error

    def lost_again(self) -> DeviceLost:
        assert self._lost is not None
        return DeviceLost(self._lost.message, fix=self._lost.fix, card=self._lost.card)

    @abstractmethod
    def _error(self, key: str, status: int) -> str:
        """The driver's name or words for a status."""


def text_of(value: bytes | None, status: int) -> str:
    return value.decode(errors="replace") if value else f"status {status}"


def _loaded(names: Names, places: Iterable[str]) -> tuple[str, ctypes.CDLL]:
    said = []
    for place in places:
        try:
            return place, ctypes.CDLL(place)
        except OSError as error:
            said.append(str(error))
    raise DriverMissing(f"{names.title}'s driver cannot be loaded", log="\n".join(said), fix=names.install)
