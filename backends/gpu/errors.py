"""What can go wrong between the shipped sources and a card that runs them.

    GpuError                  message, fix, log
    ├── KernelError           from source to code
    │   ├── UnknownArch       a name that is no arch, or one that a compiler does not know
    │   ├── SourcesMissing    the kernel trees are not where the package has them
    │   ├── CompilerMissing   no NVRTC, hiprtc, nvcc or clang; `fix` says what to install
    │   └── CompileFailed     `log` is what the compiler said, whole
    └── DriverError           from a driver; `card` is the one that it was about, empty: none
        ├── DriverMissing     no library of the driver, or it finds no card at all
        ├── DriverTooOld      it lacks a function, or loads no code of ours
        ├── CardMissing       a card that was asked for is not among those that the driver shows: hidden, or gone
        ├── OutOfDeviceMemory     also a MemoryError; the card is usable on
        ├── HostMemoryRefused     likewise: memory of the system that cannot be had, or not be pinned for a card
        └── DeviceLost            nothing of it is usable any more by this process

The text of an error is the message and what to do next, in one line, and the log below it if there is one.
"""

from __future__ import annotations


class GpuError(Exception):
    def __init__(self, message: str, *, fix: str, log: str = "") -> None:
        self.message = message
        self.fix = fix
        self.log = log.strip()
        super().__init__("\n".join(part for part in (f"{message}; {fix}", self.log) if part))


class KernelError(GpuError):
    pass


class UnknownArch(KernelError):
    pass


class SourcesMissing(KernelError):
    pass


class CompilerMissing(KernelError):
    pass


class CompileFailed(KernelError):
    pass


class DriverError(GpuError):
    def __init__(self, message: str, *, fix: str, log: str = "", card: str = "") -> None:
        self.card = card
        super().__init__(message, fix=fix, log=log)


class DriverMissing(DriverError):
    pass


class DriverTooOld(DriverError):
    pass


class CardMissing(DriverError):
    pass


class OutOfDeviceMemory(DriverError, MemoryError):
    pass


class HostMemoryRefused(DriverError, MemoryError):
    pass


class DeviceLost(DriverError):
    pass
