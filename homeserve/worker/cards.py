"""What a card's error says to whoever started the server: the same words, under a code of the error tree.

    OutOfDeviceMemory    budget     what did not fit, with the arithmetic; a smaller pool is what helps
    HostMemoryRefused    budget     memory of the system, which no setting of the pool gives back
    any other            device     a driver that is missing or too old, a card that is hidden or gone, a compiler

A compiler's log goes to the worker's own log, whole; of it the error has the first lines. An error is one line.
"""

from __future__ import annotations

import logging

from backends.gpu.errors import GpuError, HostMemoryRefused, OutOfDeviceMemory
from homeserve.errors import BudgetError, DeviceError, HomeserveError
from homeserve.wire.records import Boot

log = logging.getLogger(__name__)

LOG_LINES = 5
"""Of a compiler's log in an error."""


def told(boot: Boot, error: GpuError) -> HomeserveError:
    """The error of the tree that `error` is at a load."""
    lines = error.log.splitlines()
    for line in lines:
        log.error("%s", line)
    message = error.message
    if boot.device and boot.device not in message:
        message = f"{getattr(error, 'card', '') or f'{boot.device_name} ({boot.device})'}: {message}"
    said = (line.strip() for line in (*message.splitlines(), *lines[:LOG_LINES]))
    message = f"rank {boot.rank}: " + "; ".join(line for line in said if line)
    if isinstance(error, OutOfDeviceMemory):
        return BudgetError(message, field="kv_tokens", fix=error.fix)
    if isinstance(error, HostMemoryRefused):
        return BudgetError(message, fix=error.fix)
    return DeviceError(message, field="devices", fix=error.fix)
