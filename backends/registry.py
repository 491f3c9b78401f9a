"""Which backends there are. A name maps to a module that is imported when it is asked for, and never before."""

from __future__ import annotations

from importlib import import_module

from backends.acts import ActShape
from backends.base import Backend, Collective, OpenOptions

MODULES = {
    "cpu": ("backends.cpu.backend", "CpuBackend"),
    "cuda": ("backends.gpu.backend", "open_cuda"),
    "reference": ("backends.reference.backend", "ReferenceBackend"),
    "rocm": ("backends.gpu.backend", "open_rocm"),
}


class UnknownBackend(ValueError):
    """No backend of this name."""

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(f"backend {name!r} is not known; known: {', '.join(MODULES)}")


def open_backend(name: str, options: OpenOptions) -> Backend:
    """Open a backend's device. Raises UnknownBackend, or what its module says of a device that cannot be opened."""
    if name not in MODULES:
        raise UnknownBackend(name)
    module, attribute = MODULES[name]
    backend: Backend = getattr(import_module(module), attribute)(options)
    return backend


def open_collective(fd: int, shape: ActShape, rank: int, *, timeout_s: float, spin_us: int) -> Collective:
    """Rank `rank`'s end of exchanges through the shared memory `fd` (backends.acts), for any backend whose rows lie in
    host memory, or are brought there. Raises backends.host.library.NativeLibraryError, and ValueError where the memory
    is of another shape."""
    from backends.host import library
    from backends.host.collective import HostCollective

    return HostCollective(library.load(), fd, shape, rank, timeout_s=timeout_s, spin_us=spin_us)
