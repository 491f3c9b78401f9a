"""Weights into the arena: every tensor in the form in which the plan stores it, one after the other."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_void_p

import numpy as np
import numpy.typing as npt

from backends.base import ExpertMatrix, LoadProgress
from backends.cpu import abi
from backends.cpu.memory import floats_at
from backends.cpu.stored import MATRIX, STACK, STACK_BIAS, TRANSPOSED, StoredWeight
from backends.cpu.widths import padded
from backends.quant import QuantType

Bytes = npt.NDArray[np.uint8]


class Onward:
    """Progress of a later step of a load: `before` bytes of `total` were done by earlier ones."""

    def __init__(self, progress: LoadProgress, before: int, total: int) -> None:
        self._progress = progress
        self._before = before
        self._total = total

    def __call__(self, stage: str, done_bytes: int, total_bytes: int) -> None:
        self._progress(stage, self._before + done_bytes, self._total)


def load_weights(library: ctypes.CDLL, team: int, weights: Sequence[StoredWeight], progress: LoadProgress) -> None:
    """Fill the placed memory of `weights`. Raises ValueError where a tensor's bytes are not what its shape says."""
    total = sum(stored.source_bytes for stored in weights)
    done = 0
    progress("weights", 0, total)
    for stored in weights:
        address = stored.address
        if stored.form == STACK:
            _pack_stack(library, team, stored, address)
        else:
            data = np.ascontiguousarray(stored.view.data)
            if data.nbytes != stored.view.nbytes:
                raise _wrong_length(stored, data.nbytes)
            if stored.form == MATRIX:
                _pack(library, team, stored, data, address)
            else:
                floats = _in_form(stored, _as_floats(stored.view.type, data))
                floats_at(address, floats.size)[:] = floats
        done += stored.source_bytes
        progress("weights", done, total)


def _pack(library: ctypes.CDLL, team: int, stored: StoredWeight, data: Bytes, address: int) -> None:
    view = stored.view
    source, target = c_void_p(data.ctypes.data), c_void_p(address)
    _check(stored, library.hs_repack(team, view.type.gguf_id, view.rows, view.cols, source, target))


def _pack_stack(library: ctypes.CDLL, team: int, stored: StoredWeight, address: int) -> None:
    """Piece by piece, so that a stack whose matrices are made one by one is never held together."""
    view, rows = stored.view, stored.rows
    assert rows is not None, "a stack is some rows of every expert"
    kind, shape = view.type.gguf_id, (rows.pitch, rows.first, rows.height, view.cols)
    matrix_bytes = rows.pitch * view.type.row_bytes(view.cols)
    packed_bytes = library.hs_packed_bytes(kind, rows.height, view.cols)
    read = 0
    for piece in view.pieces():
        data = np.ascontiguousarray(piece)
        if data.nbytes % matrix_bytes or read + data.nbytes > view.nbytes:
            raise _wrong_length(stored, read + data.nbytes)
        count, target = data.nbytes // matrix_bytes, address + read // matrix_bytes * packed_bytes
        code = library.hs_repack_stack(team, kind, count, *shape, c_void_p(data.ctypes.data), c_void_p(target))
        _check(stored, code)
        read += data.nbytes
        del piece, data
    if read != view.nbytes:
        raise _wrong_length(stored, read)


def _check(stored: StoredWeight, code: int) -> None:
    if code != abi.OK:
        raise ValueError(f"{stored.view.name}: {abi.ERRORS[code]}")


def _wrong_length(stored: StoredWeight, length: int) -> ValueError:
    view = stored.view
    return ValueError(f"{view.name}: {length} bytes of data for [{view.rows}, {view.cols}] of {view.type.name}")


def _in_form(stored: StoredWeight, floats: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    if stored.form == TRANSPOSED:
        return np.ascontiguousarray(floats.reshape(stored.view.rows, stored.view.cols).T).reshape(-1)
    if stored.form == STACK_BIAS:
        assert stored.rows is not None
        return _stacked(stored.rows, floats)
    return floats


def _stacked(rows: ExpertMatrix, floats: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Each expert's share of a bias, padded to 16."""
    cut = floats.reshape(-1, rows.pitch)[:, rows.first : rows.first + rows.height]
    wide = np.zeros((len(cut), padded(rows.height)), np.float32)
    wide[:, : rows.height] = cut
    return wide.reshape(-1)


def _as_floats(kind: QuantType, data: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    if kind is QuantType.F32:
        return data.view(np.float32).reshape(-1)
    if kind is QuantType.F16:
        return data.view(np.float16).reshape(-1).astype(np.float32)
    return (data.view(np.uint16).reshape(-1).astype(np.uint32) << np.uint32(16)).view(np.float32)
