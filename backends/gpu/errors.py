"""What can go wrong between the shipped sources and code that a card runs.

    KernelError           message, fix, log
    ├── UnknownArch       a name that is no arch, or one that a compiler does not know
    ├── SourcesMissing    the kernel trees are not where the package has them
    ├── CompilerMissing   no NVRTC, hiprtc, nvcc or clang; `fix` says what to install
    └── CompileFailed     `log` is what the compiler said, whole

The text of an error is the message, the log if there is one, and what to do next.
"""

from __future__ import annotations


class KernelError(Exception):
    def __init__(self, message: str, *, fix: str, log: str = "") -> None:
        self.message = message
        self.fix = fix
        self.log = log.strip()
        super().__init__("\n".join(part for part in (message, self.log, fix) if part))


class UnknownArch(KernelError):
    pass


class SourcesMissing(KernelError):
    pass


class CompilerMissing(KernelError):
    pass


class CompileFailed(KernelError):
    pass
