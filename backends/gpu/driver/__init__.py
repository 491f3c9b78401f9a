"""A vendor's driver by ctypes: `Driver`, what it can be asked, and `open_driver`."""

from backends.gpu.driver.driver import Driver, open_driver
from backends.gpu.driver.finding import Identity
from backends.gpu.driver.names import Names

__all__ = ["Driver", "Identity", "Names", "open_driver"]
