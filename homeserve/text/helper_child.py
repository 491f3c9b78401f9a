"""The inside of a helper process: it does what strangers wrote, within bounds, and ends when its parent does.

It holds nothing worth taking (few environment variables, no files), cannot write files, has bounds on memory and on the
CPU time of one request, and its parent can kill it. It ends with its parent: by the end of its standard input, and on
Linux by a signal.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import IO, TypeVar

import msgspec

from homeserve.text.helper_wire import LENGTH, MESSAGE_BYTES_MAX, Bounds, Ready, frame

_PR_SET_PDEATHSIG = 1
_Setup = TypeVar("_Setup", bound=Bounds)


def serve(setup_kind: type[_Setup], make: Callable[[_Setup], Callable[[bytes], bytes]]) -> int:
    """Answer requests until standard input ends. `make` is called before the bounds hold, and gives what makes a framed
    answer from the body of a request."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _die_with(int(sys.argv[1]))
    incoming, outgoing = sys.stdin.buffer, sys.stdout.buffer
    first = _read(incoming)
    if first is None:
        return 0
    setup = msgspec.json.decode(first, type=setup_kind)
    answer = make(setup)
    _limit(setup.memory_mib)
    _send(outgoing, frame(Ready(os.getpid())))
    while (body := _read(incoming)) is not None:
        _limit_cpu(setup.cpu_s)
        _send(outgoing, answer(body))
    return 0


def _read(incoming: IO[bytes]) -> bytes | None:
    """The next message; None at the end of the stream, or of what can be trusted."""
    head = incoming.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    if length > MESSAGE_BYTES_MAX:
        return None
    body = incoming.read(length)
    return body if len(body) == length else None


def _send(outgoing: IO[bytes], data: bytes) -> None:
    outgoing.write(data)
    outgoing.flush()


def _die_with(parent: int) -> None:
    """Have the kernel end this process with its parent, where it can; the end of standard input does it elsewhere."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(0)


def _limit(memory_mib: int) -> None:
    """Bounds that hold from here on. A system that refuses one (macOS: address space) still has the parent's clock."""
    wanted = [(resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CORE, 0), (resource.RLIMIT_AS, memory_mib << 20)]
    for kind, bound in wanted:
        try:
            resource.setrlimit(kind, (bound, bound))
        except (ValueError, OSError) as error:
            sys.stderr.write(f"helper process: no bound on resource {kind}: {error}\n")


def _limit_cpu(seconds: int) -> None:
    """A bound on the CPU time of the request that follows, should the parent be too busy to look at its clock."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    soft = int(usage.ru_utime + usage.ru_stime) + 1 + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))
