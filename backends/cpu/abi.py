"""The C ABI of `native/hs_cpu.h` in ctypes: a struct for each of its own, a prototype for each function.

A level's library has the ABI of host memory too (`backends.host.abi`). The headers are the truth; `load` compares
versions and struct sizes with what the library says of itself, and a test of the kernel tier compares the names here,
those in the headers and those that the library exports.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_char_p, c_float, c_int32, c_int64, c_size_t, c_void_p
from pathlib import Path

from backends.host import abi as host
from backends.host.abi import OK as OK
from backends.host.abi import Act as Act
from backends.host.abi import ActPart as ActPart
from backends.host.abi import Pieces as Pieces
from backends.host.library import NativeLibraryError as NativeLibraryError
from backends.host.library import OtherVersion, opened, proven, same_sizes

ABI_VERSION = 8

ERRORS = host.ERRORS | {
    -1: "a type that this library does not know",
    -3: "a batch that points outside the pools, tables or vocabulary",
}

STEP_ROPE_TABLE = 1
STEP_EMBED = 2
STEP_NORM = 3
STEP_QUANTISE = 4
STEP_LINEAR = 5
STEP_ROPE_STORE = 6
STEP_ATTENTION = 7
STEP_GATE = 8
STEP_SELECT = 9
STEP_SOFTCAP = 10
STEP_ADD_GATED = 11
STEP_EXPERTS = 12
STEP_DELTA = 13
STEP_SCALE = 14
STEP_ZERO = 15
STEP_JOIN = 16
STEP_SUM = 17
STEP_GATHER = 18
STEP_MERGE = 19
STEP_SEND = 20
STEP_RECEIVE = 21

WRITE_STATES = (STEP_DELTA, STEP_JOIN)
"""Kinds that write states, a chained `STEP_JOIN` apart."""

GATES = {"silu": 0, "gelu": 1, "swiglu_oai": 2}
ROUTES = {"softmax": 0, "sigmoid": 1, "chosen": 2}
DELTA_KERNEL_MOST = 8


class Matrix(Structure):
    """`hs_matrix`: a packed weight."""

    _fields_ = [("data", c_void_p), ("type", c_int32), ("rows", c_int32), ("cols", c_int32), ("stored_cols", c_int32)]


class Part(Structure):
    """`hs_part`: one matrix of a linear step."""

    _fields_ = [("matrix", Matrix), ("bias", c_void_p), ("dst", c_void_p), ("dst_stride", c_int64)]


class Stack(Structure):
    """`hs_stack`: one matrix of each expert."""

    _fields_ = [("matrix", Matrix), ("expert_bytes", c_int64), ("bias", c_void_p)]


class Experts(Structure):
    """`hs_experts`: what a step of experts needs besides its buffers."""

    _fields_ = [
        ("count", c_int32),
        ("used", c_int32),
        ("func", c_int32),
        ("normalise", c_int32),
        ("scale", c_float),
        ("first", c_int32),
        ("held", c_int32),
        ("reserved", c_int32),
        ("selection", c_void_p),
        ("gains", c_void_p),
        ("gate", Stack),
        ("up", Stack),
        ("down", Stack),
        ("scores", c_void_p),
        ("chosen", c_void_p),
        ("weights", c_void_p),
        ("places", c_void_p),
        ("pair_rows", c_void_p),
        ("starts", c_void_p),
        ("active", c_void_p),
        ("active_count", c_void_p),
        ("gate_out", c_void_p),
        ("up_out", c_void_p),
        ("down_out", c_void_p),
        ("pair_activation", c_void_p),
        ("inner_stride", c_int64),
        ("out_stride", c_int64),
    ]


class Delta(Structure):
    """`hs_delta`: what a delta net needs besides its buffers."""

    _fields_ = [
        ("key_heads", c_int32),
        ("value_heads", c_int32),
        ("key_dim", c_int32),
        ("value_dim", c_int32),
        ("kernel", c_int32),
        ("tiled", c_int32),
        ("eps", c_float),
        ("first_key", c_int32),
        ("state_key_heads", c_int32),
        ("state_value_heads", c_int32),
        ("alpha", c_void_p),
        ("alpha_stride", c_int64),
        ("conv", c_void_p),
        ("dt_bias", c_void_p),
        ("a", c_void_p),
        ("norm", c_void_p),
        ("convolved", c_void_p),
        ("convolved_stride", c_int64),
        ("states", c_void_p),
        ("slot_floats", c_int64),
        ("matrix_at", c_int64),
        ("kept", c_void_p),
        ("kept_mixed", c_void_p),
        ("mixed_stride", c_int64),
        ("copies", c_void_p),
        ("copy_floats", c_int64),
    ]


class Join(Structure):
    """`hs_join`: what a row beside the hidden state of the row before it needs besides its buffers."""

    _fields_ = [
        ("chained", c_int32),
        ("reserved", c_int32),
        ("states", c_void_p),
        ("slot_floats", c_int64),
        ("kept", c_void_p),
        ("kept_stride", c_int64),
    ]


class Step(Structure):
    """`hs_step`: one recorded op."""

    _fields_ = [
        ("kind", c_int32),
        ("scope", c_int32),
        ("width", c_int32),
        ("part_count", c_int32),
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("head_dim", c_int32),
        ("window", c_int32),
        ("rope_pairs", c_int32),
        ("interleaved", c_int32),
        ("gate", c_int32),
        ("kv_type", c_int32),
        ("kv_group", c_int32),
        ("q_step", c_int32),
        ("gated", c_int32),
        ("v_norm", c_int32),
        ("partial", c_int32),
        ("first", c_int32),
        ("softcap", c_float),
        ("eps", c_float),
        ("scale", c_float),
        ("reserved", c_int32),
        ("src", c_void_p),
        ("add", c_void_p),
        ("dst", c_void_p),
        ("third", c_void_p),
        ("src_stride", c_int64),
        ("add_stride", c_int64),
        ("dst_stride", c_int64),
        ("third_stride", c_int64),
        ("weight", c_void_p),
        ("k_weight", c_void_p),
        ("frequencies", c_void_p),
        ("table", c_void_p),
        ("activation", c_void_p),
        ("parts", POINTER(Part)),
        ("k_pool", c_void_p),
        ("v_pool", c_void_p),
        ("partials", c_void_p),
        ("experts", POINTER(Experts)),
        ("delta", POINTER(Delta)),
        ("join", POINTER(Join)),
        ("act", c_void_p),
    ]


class KvGroup(Structure):
    """`hs_kv_group`: slots of its pool, the last tokens that it keeps (0: all), whether its attention is partial."""

    _fields_ = [("slots", c_int32), ("window", c_int32), ("partial", c_int32), ("reserved", c_int32)]


class ProgramRecord(Structure):
    """`hs_program`: the steps and the limits that a batch is checked against."""

    _fields_ = [
        ("steps", POINTER(Step)),
        ("step_count", c_int32),
        ("vocab_rows", c_int32),
        ("group_count", c_int32),
        ("max_rows", c_int32),
        ("max_logit_rows", c_int32),
        ("state_slots", c_int32),
        ("held_rows", c_int32),
        ("chained", c_int32),
        ("state_step_count", c_int32),
        ("reserved", c_int32),
        ("state_steps", POINTER(c_int32)),
        ("places", c_void_p),
        ("tiles", c_void_p),
        ("lane_runs", c_void_p),
        ("groups", POINTER(KvGroup)),
    ]


class BatchRecord(Structure):
    """`hs_batch`."""

    _fields_ = [
        ("rows", c_int32),
        ("logit_row_count", c_int32),
        ("lanes", c_int32),
        ("lane_pages", c_int32),
        ("tokens", c_void_p),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("row_lanes", c_void_p),
        ("tables", c_void_p),
        ("logit_rows", c_void_p),
        ("states", c_void_p),
        ("hold", c_void_p),
        ("chain", c_void_p),
        ("epoch", c_int64),
        ("seq", c_int64),
        ("failed_step", c_int32),
        ("chain_rows", c_int32),
    ]


class Kept(Structure):
    """`hs_kept`: of a lane whose state was held, what becomes of it."""

    _fields_ = [("slot", c_int32), ("place", c_int32), ("rows", c_int32), ("position", c_int32)]


STRUCTS: tuple[type[Structure], ...] = (
    Matrix,
    Part,
    Stack,
    Experts,
    Delta,
    Join,
    Step,
    KvGroup,
    ProgramRecord,
    BatchRecord,
    Kept,
)

FUNCTIONS: host.Functions = {
    "hs_abi_version": (c_int32, []),
    "hs_abi_sizes": (None, [POINTER(c_int32)]),
    "hs_level": (c_char_p, []),
    "hs_host_levels": (c_int32, []),
    "hs_packed_bytes": (c_size_t, [c_int32, c_int32, c_int32]),
    "hs_activation_bytes": (c_size_t, [c_int32]),
    "hs_partial_floats": (c_size_t, [c_int32, c_int32, c_int32, c_int32, c_int32]),
    "hs_repack": (c_int32, [c_void_p, c_int32, c_int32, c_int32, c_void_p, c_void_p]),
    "hs_repack_stack": (
        c_int32,
        [c_void_p, c_int32, c_int32, c_int32, c_int32, c_int32, c_int32, c_void_p, c_void_p],
    ),
    "hs_unpack_row": (c_int32, [POINTER(Matrix), c_int32, c_void_p]),
    "hs_run": (c_int32, [c_void_p, POINTER(ProgramRecord), POINTER(BatchRecord)]),
    "hs_accept": (c_int32, [c_void_p, POINTER(ProgramRecord), POINTER(Kept), c_int32]),
}


def load(path: Path) -> ctypes.CDLL:
    """Load one level's library and prove that it speaks this ABI and that of host memory. Raises NativeLibraryError."""
    library = opened(path, "CPU")
    proven(library, path, FUNCTIONS)
    if library.hs_abi_version() != ABI_VERSION or not same_sizes(STRUCTS, library.hs_abi_sizes):
        raise OtherVersion(path)
    return library
