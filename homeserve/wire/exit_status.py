"""With what status a worker process ends: the last word of one that cannot write to its engine any more."""

from __future__ import annotations

EXIT_OK = 0
EXIT_WIRE = 3
"""The plan log is damaged."""
EXIT_ENGINE_GONE = 4
EXIT_DEVICE_LOST = 5
"""Nothing of the rank's card can be used any more by that process (`backends.gpu.errors.DeviceLost`)."""
