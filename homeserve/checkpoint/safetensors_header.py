"""Reading one safetensors file: the header's JSON; tensor data stays in the map.

    header length u64 | header: JSON {name: {dtype, shape, data_offsets: [begin, end]}, "__metadata__": {…}} | data

The offsets count from the end of the header. As with GGUF, nothing is believed before it was compared with the file's
real length. Why not the library of the format: see docs/decisions/0002.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from backends.base import TensorView
from backends.quant import QuantType
from homeserve.checkpoint.mapped import MappedFile, kind_of
from homeserve.errors import InvalidModelFile

HEADER_BYTES_MAX = 16 << 20
"""Room for 100 000 tensors. The format's own limit, 100 MB, would let a header of empty entries take gigabytes."""
TENSORS_MAX = 1 << 20
_FIX = "the file is damaged or incomplete: fetch it again"
_TYPES: dict[str, QuantType] = {
    "F32": QuantType.F32, "F16": QuantType.F16, "BF16": QuantType.BF16, "F64": QuantType.F64, "I8": QuantType.I8,
    "U8": QuantType.I8, "I16": QuantType.I16, "I32": QuantType.I32, "I64": QuantType.I64,
}  # fmt: skip


class _Entry(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


@dataclass(frozen=True)
class SafetensorsFile:
    """One parsed file: tensors and their shapes by the names that stand in it."""

    file: MappedFile
    tensors: dict[str, TensorView]
    shapes: dict[str, tuple[int, ...]]


def read(path: str) -> SafetensorsFile:
    """Map and parse one file. Raises InvalidModelFile for anything that is not a sound one."""
    file = MappedFile(path)
    try:
        start, entries = _header(file)
        tensors = {name: _view(file, name, entry, start) for name, entry in entries.items()}
        _refuse_overlap(path, entries)
        return SafetensorsFile(file, tensors, {name: tuple(entry.shape) for name, entry in entries.items()})
    except InvalidModelFile:
        file.close()
        raise


def _header(file: MappedFile) -> tuple[int, dict[str, _Entry]]:
    """Where the data begins, and the entries."""
    length = int.from_bytes(file.data[:8], "little")
    if file.size < 10 or file.data[8:9] != b"{":
        what = f"is no safetensors file but seems to be {kind_of(bytes(file.data[:64]))}"
        raise InvalidModelFile(file.path, "header", what, fix=_FIX)
    if length > HEADER_BYTES_MAX or length > file.size - 8:
        what = f"of {length} bytes cannot be in a file of {file.size} bytes"
        raise InvalidModelFile(file.path, "header", what, fix=_FIX)
    try:
        parts = msgspec.json.decode(file.data[8 : 8 + length], type=dict[str, msgspec.Raw])
        parts.pop("__metadata__", None)
        if len(parts) > TENSORS_MAX:
            raise InvalidModelFile(file.path, "header", f"has {len(parts)} tensors ({TENSORS_MAX} are the limit)")
        entries = {name: msgspec.json.decode(part, type=_Entry) for name, part in parts.items()}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidModelFile(file.path, "header", f"is damaged: {error}", fix=_FIX) from error
    return 8 + length, entries


def _view(file: MappedFile, name: str, entry: _Entry, start: int) -> TensorView:
    def wrong(what: str) -> InvalidModelFile:
        return InvalidModelFile(file.path, f"tensor {name!r}", what, fix=_FIX)

    kind = _TYPES.get(entry.dtype)
    if kind is None:
        what = f"has the type {entry.dtype[:40]}; read are {', '.join(_TYPES)}"
        raise InvalidModelFile(file.path, f"tensor {name!r}", what, fix="use a BF16 or F16 checkpoint, or a GGUF")
    if not entry.shape or any(dim <= 0 for dim in entry.shape):
        raise wrong(f"has the impossible shape {entry.shape[:8]}")
    rows, cols = 1, entry.shape[-1]
    for dim in entry.shape[:-1]:
        rows *= dim
    begin, end = entry.data_offsets
    if not 0 <= begin <= end <= file.size - start:
        raise wrong(f"lies at bytes {begin} to {end} of {file.size - start} bytes of data")
    if rows * kind.row_bytes(cols) != end - begin:
        raise wrong(f"takes {end - begin} bytes, its shape {entry.shape[:8]} needs {rows * kind.row_bytes(cols)}")
    return TensorView(name, kind, rows, cols, file.view(start + begin, end - begin))


def _refuse_overlap(path: str, entries: dict[str, _Entry]) -> None:
    last, owner = 0, ""
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        begin, end = entry.data_offsets
        if begin < last:
            raise InvalidModelFile(path, f"tensor {name!r}", f"overlaps tensor {owner!r}", fix=_FIX)
        last, owner = max(last, end), name
