"""Weights into the arena: every tensor in the form in which the plan stores it, one after the other."""

from __future__ import annotations

import ctypes
from ctypes import c_void_p

import numpy as np
import numpy.typing as npt

from backends.base import ExpertMatrix, LoadProgress
from backends.cpu import abi
from backends.cpu.memory import floats_at
from backends.cpu.record import MATRIX, STACK, STACK_BIAS, TRANSPOSED, Plan, StoredWeight
from backends.cpu.widths import padded
from backends.quant import QuantType


def load_weights(library: ctypes.CDLL, team: int, plan: Plan, progress: LoadProgress) -> None:
    """Fill the placed arena. Raises ValueError where a tensor's bytes are not what its shape says."""
    total = sum(stored.source_bytes for stored in plan.stored.values())
    done = 0
    progress("weights", 0, total)
    for stored in plan.stored.values():
        view = stored.view
        data = np.ascontiguousarray(view.data)
        if data.nbytes != view.nbytes:
            raise ValueError(
                f"{view.name}: {data.nbytes} bytes of data for [{view.rows}, {view.cols}] of {view.type.name}"
            )
        address = plan.weights.address(stored.offset)
        if stored.form in (MATRIX, STACK):
            _pack(library, team, stored, data, address)
        else:
            floats = _in_form(stored, _as_floats(view.type, data))
            floats_at(address, floats.size)[:] = floats
        done += stored.source_bytes
        progress("weights", done, total)


def _pack(library: ctypes.CDLL, team: int, stored: StoredWeight, data: npt.NDArray[np.uint8], address: int) -> None:
    view, rows = stored.view, stored.rows
    source, target = c_void_p(data.ctypes.data), c_void_p(address)
    if rows is None:
        code = library.hs_repack(team, view.type.gguf_id, view.rows, view.cols, source, target)
    else:
        count, shape = view.rows // rows.pitch, (rows.pitch, rows.first, rows.height, view.cols)
        code = library.hs_repack_stack(team, view.type.gguf_id, count, *shape, source, target)
    if code != abi.OK:
        raise ValueError(f"{view.name}: {abi.ERRORS[code]}")


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
