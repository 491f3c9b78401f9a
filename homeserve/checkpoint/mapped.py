"""A file mapped read-only into memory, and what its first bytes say it is.

Tensor data is never copied: a `TensorView` points into the map. The map therefore lives until the last view on it is
gone; `close` drops this side's hold. If somebody truncates a mapped file, touching the lost pages ends the process with
SIGBUS. That is why everything that the engine process keeps of a file (metadata, vocabulary) is copied out of the map,
and only workers, which may die and be restarted, hold views.
"""

from __future__ import annotations

import mmap
import os
import stat

import numpy as np
import numpy.typing as npt

from homeserve.errors import InvalidModelFile, ModelNotFound

_SIGNATURES: tuple[tuple[bytes, str], ...] = (
    (b"\x89PNG", "a PNG picture"),
    (b"\xff\xd8\xff", "a JPEG picture"),
    (b"PK\x03\x04", "a ZIP archive (a wheel, or a PyTorch pickle)"),
    (b"\x1f\x8b", "a gzip archive"),
    (b"%PDF", "a PDF document"),
    (b"version https://git-lfs", "a Git LFS pointer: the real file was not downloaded"),
    (b"<!DOCTYPE", "an HTML page: probably an error page saved under this name"),
    (b"<html", "an HTML page: probably an error page saved under this name"),
    (b"ggml", "a GGML file of before GGUF"),
    (b"ggjt", "a GGML file of before GGUF"),
    (b"\x80\x02", "a Python pickle, which homeserve never loads"),
    (b"\x7fELF", "an executable"),
)


class MappedFile:
    """One file, mapped. `data` is its bytes as a read-only buffer, `size` their count (never 0)."""

    def __init__(self, path: str) -> None:
        self.path = path
        descriptor = _open_regular(path)
        try:
            self.size = os.fstat(descriptor).st_size
            if self.size == 0:
                raise InvalidModelFile(path, "file", "is empty", fix="fetch the model again")
            self.data = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise InvalidModelFile(path, "file", f"cannot be mapped: {error.strerror or error}") from error
        finally:
            os.close(descriptor)

    def view(self, offset: int, length: int) -> npt.NDArray[np.uint8]:
        """uint8 `[length]`: the bytes from `offset`, not copied."""
        return np.frombuffer(self.data, np.uint8, length, offset)

    def will_need(self) -> None:
        """Ask the kernel to read ahead: loading touches every byte once, in order."""
        if hasattr(mmap, "MADV_WILLNEED"):
            self.data.madvise(mmap.MADV_WILLNEED)

    def drop_pages(self) -> None:
        """Give the map's resident pages back; a later access reads them from the file again."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self.data.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        """Unmap now if no view is held, otherwise when the last one goes."""
        try:
            self.data.close()
        except BufferError:
            # Views into the map are alive: they own it from here on, and unmapping under them would be a crash.
            pass


def kind_of(head: bytes) -> str:
    """What a file that begins with `head` (16 bytes or more) seems to be, in words for an error message."""
    for signature, words in _SIGNATURES:
        if head.startswith(signature):
            return words
    if len(head) >= 9 and head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 1 << 32:
        return "a safetensors file"
    if head.lstrip()[:1] in (b"{", b"["):
        return "a JSON text"
    if head and all(byte in b"\t\n\r" or 32 <= byte < 127 for byte in head):
        return "a text file"
    return "unknown data"


def _open_regular(path: str) -> int:
    """A descriptor of a regular file. A pipe or device is refused before it is opened, for opening could block."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise InvalidModelFile(path, "file", "is no regular file", fix="give a GGUF file or a safetensors folder")
        return os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    except FileNotFoundError as error:
        raise ModelNotFound(f"there is no file {path}", field="model", fix="check the path") from error
    except (OSError, ValueError) as error:
        what = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise InvalidModelFile(path, "file", f"cannot be opened: {what}", fix="check its permissions") from error
