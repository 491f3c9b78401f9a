"""Reading GGUF: header, metadata, tensor table; tensor data stays in the map.

    magic "GGUF" | version u32 | tensor count u64 | key count u64
    key count x    (key string | type u32 | value)
    tensor count x (name string | dimension count u32 | dimensions u64, fastest first | type u32 | offset u64)
    zeros up to general.alignment | tensor data, each at data start + offset

The rule: *nothing in the file is believed before it was compared with the file's real length.* A count is checked
against the bytes that so many entries need at least, a string or array against what is left, a tensor against the data
section; only then is anything allocated, so memory is bounded by the bytes that are really there (and those of the
header by `HEADER_BYTES_MAX`). Every breach is an `InvalidModelFile` with path, place and reason. Python's integers do
not overflow, so products of dimensions are exact.

Why an own reader: the format's reference package builds an object per array element and takes seconds for a large
vocabulary. Here arrays are kept as their bytes (`Array`) and decoded when somebody looks: strings are only walked once
to find the end of the array.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import overload

from backends.base import TensorView
from backends.quant import BY_GGUF_ID, QuantType
from homeserve.checkpoint.mapped import MappedFile, kind_of
from homeserve.errors import InvalidModelFile

HEADER_BYTES_MAX = 128 << 20
"""Several times the largest header in use. It bounds what is copied out of a file whose length is a lie (sparse)."""
KEYS_MAX = 1 << 16
TENSORS_MAX = 1 << 20
STRINGS_MAX = 1 << 22
"""Strings in the arrays of one file together: walking them takes time, and an empty one costs eight bytes."""
KEY_LEN_MAX = 1 << 16
NAME_LEN_MAX = 128
DIMENSIONS_MAX = 4
DIMENSION_MAX = 1 << 48
ALIGNMENT_MAX = 1 << 20
ALIGNMENT_DEFAULT = 32

Scalar = int | float | bool | str

_STRING, _ARRAY = 8, 9
_NUMBERS: dict[int, str] = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_STRUCTS = {kind: struct.Struct("<" + code) for kind, code in _NUMBERS.items()}
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_KEY_BYTES_MIN = 8 + 1 + 4 + 1
_TENSOR_BYTES_MIN = 8 + 1 + 4 + 8 + 4 + 8

_OTHER_TYPES: dict[int, str] = {
    4: "Q4_2 (removed from the format)", 5: "Q4_3 (removed from the format)", 9: "Q8_1 (never stored in files)",
    15: "Q8_K (never stored in files)", 31: "Q4_0_4_4 (removed from the format)",
    32: "Q4_0_4_8 (removed from the format)", 33: "Q4_0_8_8 (removed from the format)",
    36: "IQ4_NL_4_4 (removed from the format)", 37: "IQ4_NL_4_8 (removed from the format)",
    38: "IQ4_NL_8_8 (removed from the format)", 41: "Q1_0", 42: "Q2_0",
}  # fmt: skip
_FETCH_AGAIN = "the file is damaged or incomplete: fetch it again"


class Array(Sequence[Scalar]):
    """An array value of the metadata: its bytes, decoded on first use and kept. Compares like a tuple.

    Strings that are no valid UTF-8 are decoded with replacement characters (old files hold such tokens).
    """

    __slots__ = ("_count", "_kind", "_raw", "_values")

    def __init__(self, kind: int, count: int, raw: bytes) -> None:
        self._kind = kind
        self._count = count
        self._raw = raw
        self._values: tuple[Scalar, ...] | None = None

    @property
    def raw(self) -> bytes:
        """The elements as they lie in the file, for digests."""
        return self._raw

    def values(self) -> tuple[Scalar, ...]:
        """All elements as Python values."""
        if self._values is None:
            self._values = self._first(self._count)
        return self._values

    def _first(self, count: int) -> tuple[Scalar, ...]:
        return self._strings(count) if self._kind == _STRING else self._numbers(count)

    def _numbers(self, count: int) -> tuple[Scalar, ...]:
        return struct.unpack_from(f"<{count}{_NUMBERS[self._kind]}", self._raw)

    def _strings(self, count: int) -> tuple[str, ...]:
        raw, at, unpack = self._raw, 0, _U64.unpack_from
        strings = []
        for _ in range(count):
            start = at + 8
            at = start + unpack(raw, at)[0]
            strings.append(raw[start:at].decode("utf-8", "replace"))
        return tuple(strings)

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Scalar: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Scalar, ...]: ...
    def __getitem__(self, index: int | slice) -> Scalar | tuple[Scalar, ...]:
        return self.values()[index]

    def __iter__(self) -> Iterator[Scalar]:
        return iter(self.values())

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Sequence) and not isinstance(other, (str, bytes)):
            return len(other) == self._count and self.values() == tuple(other)
        return NotImplemented

    def __hash__(self) -> int:
        return hash((self._kind, self._raw))

    def __repr__(self) -> str:
        shown = ", ".join(repr(value) for value in self._first(min(4, self._count)))
        return f"Array([{shown}{', …' if self._count > 4 else ''}], len={self._count})"


@dataclass(frozen=True)
class GgufFile:
    """One parsed file. `tensors` are in the file's order."""

    file: MappedFile
    version: int
    metadata: Mapping[str, object]
    tensors: Mapping[str, TensorView]


def read(path: str) -> GgufFile:
    """Map and parse one GGUF file. Raises InvalidModelFile for anything that is not a sound one, ModelNotFound."""
    file = MappedFile(path)
    try:
        cursor = _Cursor(file)
        version, tensor_count, key_count = _preamble(cursor)
        metadata = _metadata(cursor, key_count)
        infos = [_tensor_info(cursor, index) for index in range(tensor_count)]
        tensors = _place(file, infos, cursor.at, _alignment(path, metadata))
        return GgufFile(file, version, metadata, tensors)
    except InvalidModelFile:
        file.close()
        raise


class _Cursor:
    """A position in the header that cannot leave the file."""

    def __init__(self, file: MappedFile) -> None:
        self.path = file.path
        self.data: mmap.mmap = file.data
        self.size = file.size
        self.end = min(file.size, HEADER_BYTES_MAX)
        self.at = 0
        self.strings_left = STRINGS_MAX

    def error(self, where: str, what: str, fix: str = _FETCH_AGAIN) -> InvalidModelFile:
        return InvalidModelFile(self.path, where, what, fix=fix)

    def require(self, length: int, where: str) -> None:
        """Raises where fewer than `length` bytes are left."""
        if length <= self.end - self.at:
            return
        if length <= self.size - self.at:
            raise self.error(where, f"the header is larger than {HEADER_BYTES_MAX >> 20} MiB", "use another file")
        raise self.error(where, f"needs {length} bytes at byte {self.at}, but the file ends at byte {self.size}")

    def unpack(self, layout: struct.Struct, where: str) -> int | float | bool:
        self.require(layout.size, where)
        (value,) = layout.unpack_from(self.data, self.at)
        self.at += layout.size
        number: int | float | bool = value
        return number

    def u32(self, where: str) -> int:
        return int(self.unpack(_U32, where))

    def u64(self, where: str) -> int:
        return int(self.unpack(_U64, where))

    def take(self, length: int, where: str) -> bytes:
        self.require(length, where)
        raw = self.data[self.at : self.at + length]
        self.at += length
        return raw

    def text(self, where: str) -> str:
        return self.take(self.u64(where), where).decode("utf-8", "replace")

    def name(self, limit: int, where: str) -> str:
        """A key or tensor name: not empty, valid UTF-8, at most `limit` bytes."""
        length = self.u64(where)
        if not 0 < length <= limit:
            raise self.error(where, f"has a name of {length} bytes (1 to {limit} are allowed)")
        try:
            return self.take(length, where).decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.error(where, f"has a name that is no UTF-8 text ({error.reason})") from error


def _preamble(cursor: _Cursor) -> tuple[int, int, int]:
    """version, tensor count, key count; refuses what is no GGUF, and GGUF that cannot be read here, by name."""
    head = bytes(cursor.data[:64])
    if head[:4] != b"GGUF":
        what = f"is not GGUF but seems to be {kind_of(head)}"
        raise cursor.error("magic", what, "give a GGUF file, or a folder with config.json and *.safetensors")
    cursor.at = 4
    version = cursor.u32("version")
    if version and version & 0xFFFF == 0:
        what = "the file is big-endian; only little-endian GGUF is read"
        raise cursor.error("version", what, "convert it to little-endian (gguf-convert-endian)")
    if version not in (2, 3):
        age = "old" if version < 2 else "new"
        what = f"GGUF version {version} is too {age}: versions 2 and 3 are read"
        raise cursor.error("version", what, "convert the model again with current tools")
    tensor_count = cursor.u64("tensor count")
    key_count = cursor.u64("key count")
    left = cursor.size - cursor.at
    if key_count > KEYS_MAX or key_count * _KEY_BYTES_MIN > left:
        raise cursor.error("key count", f"{key_count} metadata keys cannot be in a file of {cursor.size} bytes")
    if tensor_count > TENSORS_MAX or tensor_count * _TENSOR_BYTES_MIN > left:
        raise cursor.error("tensor count", f"{tensor_count} tensors cannot be in a file of {cursor.size} bytes")
    return version, tensor_count, key_count


def _metadata(cursor: _Cursor, count: int) -> dict[str, object]:
    metadata: dict[str, object] = {}
    for index in range(count):
        key = cursor.name(KEY_LEN_MAX, f"key {index}")
        if key in metadata:
            raise cursor.error(f"key {key!r}", "appears twice")
        metadata[key] = _value(cursor, cursor.u32(f"key {key!r}"), f"key {key!r}")
    return metadata


def _value(cursor: _Cursor, kind: int, where: str) -> object:
    if kind in _STRUCTS:
        return cursor.unpack(_STRUCTS[kind], where)
    if kind == _STRING:
        return cursor.text(where)
    if kind == _ARRAY:
        return _array(cursor, where)
    raise cursor.error(where, f"has the unknown value type {kind}")


def _array(cursor: _Cursor, where: str) -> Array:
    kind = cursor.u32(where)
    count = cursor.u64(where)
    if kind in _STRUCTS:
        return Array(kind, count, cursor.take(count * _STRUCTS[kind].size, where))
    if kind == _STRING:
        return Array(kind, count, cursor.take(_strings_length(cursor, count, where), where))
    raise cursor.error(where, f"is an array of the unsupported value type {kind}")


def _strings_length(cursor: _Cursor, count: int, where: str) -> int:
    """Bytes of the `count` strings from here on, each of which was seen to end inside the file."""
    if count > cursor.strings_left:
        raise cursor.error(where, f"is an array of {count} strings ({STRINGS_MAX} in all arrays are the limit)")
    cursor.strings_left -= count
    cursor.require(8 * count, where)
    at, last, data, unpack = cursor.at, cursor.end - 8, cursor.data, _U64.unpack_from
    for _ in range(count):
        if at > last:
            break
        at += 8 + unpack(data, at)[0]
    else:
        return at - cursor.at
    cursor.require(at - cursor.at + 8, where)
    raise AssertionError("the walk stopped inside the file")


@dataclass(frozen=True)
class _TensorInfo:
    name: str
    type: QuantType
    rows: int
    cols: int
    offset: int
    length: int


def _tensor_info(cursor: _Cursor, index: int) -> _TensorInfo:
    name = cursor.name(NAME_LEN_MAX, f"tensor {index}")
    where = f"tensor {name!r}"
    dimension_count = cursor.u32(where)
    if not 1 <= dimension_count <= DIMENSIONS_MAX:
        raise cursor.error(where, f"has {dimension_count} dimensions (1 to {DIMENSIONS_MAX} are allowed)")
    dims = [cursor.u64(where) for _ in range(dimension_count)]
    if not all(0 < dim <= DIMENSION_MAX for dim in dims):
        raise cursor.error(where, f"has the impossible shape {dims}")
    type_id = cursor.u32(where)
    offset = cursor.u64(where)
    kind = BY_GGUF_ID.get(type_id)
    if kind is None:
        label = _OTHER_TYPES.get(type_id, "unknown")
        known = ", ".join(quant.name for quant in BY_GGUF_ID.values())
        raise cursor.error(where, f"has the type {type_id}, {label}; known: {known}", "use another quantisation")
    rows = 1
    for dim in dims[1:]:
        rows *= dim
    try:
        length = rows * kind.row_bytes(dims[0])
    except ValueError as error:
        raise cursor.error(where, str(error)) from error
    return _TensorInfo(name, kind, rows, dims[0], offset, length)


def _alignment(path: str, metadata: Mapping[str, object]) -> int:
    value = metadata.get("general.alignment", ALIGNMENT_DEFAULT)
    sound = isinstance(value, int) and not isinstance(value, bool) and 0 < value <= ALIGNMENT_MAX
    if not (isinstance(value, int) and sound and value & (value - 1) == 0):
        what = f"is {value!r}; it must be a power of two up to {ALIGNMENT_MAX}"
        raise InvalidModelFile(path, "key 'general.alignment'", what, fix=_FETCH_AGAIN)
    return value


def _place(file: MappedFile, infos: list[_TensorInfo], header_end: int, alignment: int) -> dict[str, TensorView]:
    """Views of all tensors, after each was seen to lie alone inside the data section."""
    start = -(-header_end // alignment) * alignment
    room = max(0, file.size - start)
    tensors: dict[str, TensorView] = {}
    for info in infos:
        problem = None
        if info.name in tensors:
            problem = "appears twice"
        elif info.offset % alignment:
            problem = f"lies at offset {info.offset}, which is no multiple of the alignment {alignment}"
        elif info.offset + info.length > room:
            problem = (
                f"needs bytes {info.offset} to {info.offset + info.length} of the data section, which has only {room}"
            )
        if problem:
            raise InvalidModelFile(file.path, f"tensor {info.name!r}", problem, fix=_FETCH_AGAIN)
        data = file.view(start + info.offset, info.length)
        tensors[info.name] = TensorView(info.name, info.type, info.rows, info.cols, data)
    _refuse_overlap(file.path, infos)
    return tensors


def _refuse_overlap(path: str, infos: list[_TensorInfo]) -> None:
    end, owner = 0, ""
    for info in sorted(infos, key=lambda each: each.offset):
        if info.offset < end:
            raise InvalidModelFile(path, f"tensor {info.name!r}", f"overlaps tensor {owner!r}", fix=_FETCH_AGAIN)
        end, owner = info.offset + info.length, info.name
