"""Which backends there are. A name maps to a module that is imported when it is asked for, and never before."""

from __future__ import annotations

from importlib import import_module

from backends.acts import ActShape
from backends.base import Backend, Collective, OpenOptions

MODULES = {
    "cpu": ("backends.cpu.backend", "CpuBackend"),
    "reference": ("backends.reference.backend", "ReferenceBackend"),
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


def open_collective(
    options: OpenOptions, fd: int, shape: ActShape, rank: int, *, timeout_s: float, spin_us: int
) -> Collective:
    """Rank `rank`'s end of exchanges through the shared memory `fd` (backends.acts), for any backend whose buffers lie
    in host memory. Raises what the CPU backend raises where its library cannot be loaded."""
    from backends.cpu import levels
    from backends.cpu.collective import CpuCollective

    library = levels.load(levels.choose(options.isa, levels.host_levels()))
    return CpuCollective(library, fd, shape, rank, timeout_s=timeout_s, spin_us=spin_us)
