"""What a driver's statuses mean: which error of backends.gpu.errors, and what to do next.

CUDA and HIP count alike: HIP's numbers are CUDA's wherever both have the thing. So this is one table for both, and what
a message names is the driver's own word for the status.

A *sticky* status is one after which every call of the process fails: the card's context is dead. There is no way back
but a new process, so it becomes DeviceLost.
"""

from __future__ import annotations

from backends.gpu.errors import CardMissing, DeviceLost, DriverError, DriverMissing, DriverTooOld, OutOfDeviceMemory

OUT_OF_MEMORY = 2
NOT_INITIALISED = 3
NO_DEVICE = 100
INVALID_DEVICE = 101
NOT_READY = 600
UNKNOWN = 999
CAPTURE_REFUSED = frozenset({801, 900, 901})
"""NOT_SUPPORTED, STREAM_CAPTURE_UNSUPPORTED, STREAM_CAPTURE_INVALIDATED: work can still be launched as it is."""

_LOST = {
    214: "its memory had an error that ECC could not correct: `nvidia-smi -q -d ECC` or `rocm-smi --showrasinfo` tells"
    " where; reset or replace the card if that comes again",
    220: "its NVLink had an error that could not be corrected: look into the kernel's log (dmesg) for Xid",
    226: "an error was contained to this process: start homeserve again",
    700: "a kernel read or wrote where no memory is: a fault of homeserve, report it with the log",
    702: "a kernel ran longer than the display's watchdog allows: take the card off the display, or leave it out of"
    " --devices",
    709: "its context was destroyed: another part of the process, or a reset of the card",
    710: "a kernel stopped itself: a fault of homeserve, report it with the log",
    714: "a kernel's stack was damaged: report it with the log",
    715: "a kernel has an instruction that the card does not know: remove the cache of compiled kernels"
    " (~/.cache/homeserve/kernels), and report it if that comes again",
    716: "a kernel read or wrote at an address that is not aligned: a fault of homeserve, report it with the log",
    717: "a kernel took an address for one of another memory: a fault of homeserve, report it with the log",
    718: "a kernel ran off its code: report it with the log",
    719: "a kernel failed: the kernel's log (dmesg: Xid, amdgpu) says why. A card that does so under load often lacks"
    " power or cooling",
    UNKNOWN: "it does not answer any more: the kernel's log (dmesg: Xid, amdgpu) says why. A card that fell off the bus"
    " comes back with a restart of the machine",
}

_TOO_OLD = frozenset({35, 209, 222, 223})
"""INSUFFICIENT_DRIVER, NO_BINARY_FOR_GPU, UNSUPPORTED_PTX_VERSION, JIT_COMPILATION_DISABLED."""

_FIXES = {
    46: "another process holds the card alone: end it, or set `nvidia-smi -c DEFAULT`",
    101: "a card's number is out of range: `homeserve probe` lists the cards",
    200: "the compiled kernel is damaged: remove the cache of compiled kernels (~/.cache/homeserve/kernels)",
    218: "the compiled kernel is damaged: remove the cache of compiled kernels (~/.cache/homeserve/kernels)",
    221: "the driver's library libnvidia-ptxjitcompiler.so.1 is missing: install the driver's package with it",
    304: "the system refuses the driver something: see that this user may open /dev/nvidia*, /dev/kfd, /dev/dri",
    802: "the driver is not ready yet: on machines with NVSwitch, start nvidia-fabricmanager",
    803: "the driver's library and its kernel module are of different versions: restart the machine",
    804: "this card may not run with a compatibility package of CUDA: update NVIDIA's driver itself",
}
_PLAIN = "report this with the log; without this card homeserve runs as before (leave it out of --devices)"
_BROKEN = (
    "the driver is there but does not start: `nvidia-smi` or `rocminfo` should say more; after an update or a suspend,"
    " restart the machine"
)


def error_of(status: int, call: str, named: str, card: str, *, open_: bool, update: str) -> DriverError:
    """The error of a status other than 0. `call`: the driver's function; `named`: the status as the driver tells it;
    `card`: as in messages, empty where none is chosen yet; `open_`: whether a card is in use; `update`: what to install
    where the driver is too old."""
    message = f"{f'{card}: ' if card else ''}{call} failed: {named}"
    if open_ and status in _LOST:
        return DeviceLost(f"{message}; nothing of this card is usable any more", fix=_LOST[status], card=card)
    if status in _TOO_OLD:
        return DriverTooOld(message, fix=update, card=card)
    if status == OUT_OF_MEMORY:
        return OutOfDeviceMemory(message, fix=SMALLER, card=card)
    if status == NO_DEVICE:
        return DriverMissing(message, fix="`homeserve probe` lists the cards of this machine", card=card)
    if status == INVALID_DEVICE:
        return CardMissing(message, fix=_FIXES[INVALID_DEVICE], card=card)
    plain = _BROKEN if status in (NOT_INITIALISED, UNKNOWN) else _PLAIN
    return DriverError(message, fix=_FIXES.get(status, plain), card=card)


SMALLER = (
    "free memory of this card (`nvidia-smi`, `rocm-smi --showpids` list who has it), or ask for less: --context, a"
    " smaller model, more cards"
)
