"""The native library of host memory, and how any library with its ABI is opened: proven before it is believed."""

from __future__ import annotations

import ctypes
from ctypes import Structure, c_int32
from pathlib import Path
from typing import Any

from backends.host import abi

PATH = Path(__file__).parent / "lib" / "libhomeserve_host.so"


class NativeLibraryError(Exception):
    """A native library is missing, cannot be loaded, or is of another version. The message says what to do."""


class OtherVersion(NativeLibraryError):
    """A library of another version than this package."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"{path} is of another version than this package: install the package again")


def load(path: Path = PATH) -> ctypes.CDLL:
    """The library of host memory alone. Raises NativeLibraryError."""
    return opened(path, "host")


def opened(path: Path, name: str) -> ctypes.CDLL:
    """Load a native library, `name` for messages, and prove that it speaks the ABI of host memory. Raises
    NativeLibraryError."""
    if not path.exists():
        raise NativeLibraryError(
            f"the native {name} library {path} is not built: install the package again (pip install .), or build it in"
            " the checkout as CMakeLists.txt says"
        )
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeLibraryError(f"the native {name} library {path} cannot be loaded: {error}") from error
    proven(library, path, abi.FUNCTIONS)
    if library.hs_host_version() != abi.HOST_VERSION or not same_sizes(abi.STRUCTS, library.hs_host_sizes):
        raise OtherVersion(path)
    return library


def proven(library: ctypes.CDLL, path: Path, functions: abi.Functions) -> None:
    """Give its functions their prototypes. Raises NativeLibraryError for one that it lacks."""
    for name, (result, arguments) in functions.items():
        try:
            function = getattr(library, name)
        except AttributeError as error:
            raise NativeLibraryError(
                f"{path} lacks {name}: it is of another version, install the package again"
            ) from error
        function.restype = result
        function.argtypes = arguments


def same_sizes(structs: tuple[type[Structure], ...], told_by: Any) -> bool:
    """Are the structs as large as the library says?"""
    sizes = (c_int32 * len(structs))()
    told_by(sizes)
    return list(sizes) == [ctypes.sizeof(struct) for struct in structs]
