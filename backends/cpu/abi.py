"""The C ABI of `native/hs_cpu.h` and `native/hs_collective.h` in ctypes: a struct for each of theirs, a prototype for
each function.

The headers are the truth; `load` compares versions and struct sizes with what the library says of itself, and a
contract test compares the names here, those in the headers and those that the library exports.
"""

from __future__ import annotations

import ctypes
from ctypes import (
    POINTER,
    Structure,
    c_char,
    c_char_p,
    c_float,
    c_int32,
    c_int64,
    c_size_t,
    c_uint32,
    c_uint64,
    c_void_p,
)
from pathlib import Path
from typing import Any

ABI_VERSION = 7

OK = 0
E_LATE = -5
E_STAMP = -6
E_CREDIT = -7
ERRORS = {
    -1: "a type that this library does not know",
    -2: "a shape that its type does not allow",
    -3: "a batch that points outside the pools, tables or vocabulary",
    -4: "no thread could be started",
    -5: "a peer that did not come within the bound",
    -6: "a peer that is at another exchange",
    -7: "a channel that is full",
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


class Pieces(Structure):
    """`hs_pieces`: memory that stands in a stream, piece by piece."""

    _fields_ = [("places", c_void_p), ("ends", c_void_p), ("count", c_int64), ("chunk", c_int64)]


class Stamp(Structure):
    """`hs_stamp`: which exchange a message belongs to."""

    _fields_ = [
        ("epoch", c_int64),
        ("seq", c_int64),
        ("kind", c_int32),
        ("rows", c_int32),
        ("width", c_int32),
        ("piece", c_int32),
        ("label", c_char * 32),
    ]


class Exchange(Structure):
    """`hs_exchange`: the exchanges of one label."""

    _fields_ = [
        ("timeout_ns", c_int64),
        ("spin_ns", c_int64),
        ("calls", c_int64),
        ("bytes", c_int64),
        ("spun_ns", c_int64),
        ("slept_ns", c_int64),
        ("stamp", Stamp),
        ("wanted", Stamp),
        ("found", Stamp),
        ("peer", c_int32),
        ("reserved", c_int32),
    ]


class Mail(Structure):
    """`hs_mail`: the mailboxes of all ranks."""

    _fields_ = [
        ("memory", c_void_p),
        ("piece_bytes", c_int64),
        ("rank", c_int32),
        ("ranks", c_int32),
        ("posted", c_uint32),
        ("reserved", c_int32),
    ]


class Channel(Structure):
    """`hs_channel`: one end of a channel."""

    _fields_ = [
        ("memory", c_void_p),
        ("message_bytes", c_int64),
        ("depth", c_int32),
        ("peer", c_int32),
        ("count", c_uint32),
        ("reserved", c_int32),
    ]


class ActPart(Structure):
    """`hs_act_part`: one matrix of an exchange."""

    _fields_ = [
        ("src", c_void_p),
        ("out", c_void_p),
        ("src_stride", c_int64),
        ("out_stride", c_int64),
        ("widths", POINTER(c_int32)),
        ("width", c_int32),
        ("reserved", c_int32),
    ]


class Act(Structure):
    """`hs_act`: an exchange as a step of a program."""

    _fields_ = [
        ("mail", POINTER(Mail)),
        ("channel", POINTER(Channel)),
        ("exchange", POINTER(Exchange)),
        ("parts", POINTER(ActPart)),
        ("part_count", c_int32),
        ("target", c_int32),
    ]


class Merge(Structure):
    """`hs_merge`: partial attentions of all ranks into a rank's own heads."""

    _fields_ = [
        ("src", c_void_p),
        ("out", c_void_p),
        ("sinks", c_void_p),
        ("gate", c_void_p),
        ("src_stride", c_int64),
        ("out_stride", c_int64),
        ("gate_stride", c_int64),
        ("heads", c_int32),
        ("head_dim", c_int32),
        ("first", c_int32),
        ("own", c_int32),
    ]


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
    Pieces,
)
COLLECTIVE_STRUCTS: tuple[type[Structure], ...] = (Stamp, Exchange, Mail, Channel, ActPart, Act, Merge)

FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "hs_abi_version": (c_int32, []),
    "hs_abi_sizes": (None, [POINTER(c_int32)]),
    "hs_level": (c_char_p, []),
    "hs_host_levels": (c_int32, []),
    "hs_map": (c_void_p, [c_size_t, c_int32, c_char_p, POINTER(c_int32)]),
    "hs_unmap": (None, [c_void_p, c_size_t]),
    "hs_commit": (c_int32, [c_void_p, c_void_p, c_size_t]),
    "hs_release": (c_int32, [c_void_p, c_size_t]),
    "hs_pack": (c_int32, [c_void_p, POINTER(Pieces), c_void_p, POINTER(c_uint64)]),
    "hs_fill": (c_int32, [c_void_p, POINTER(Pieces), c_void_p, POINTER(c_uint64)]),
    "hs_unpack": (c_int32, [c_void_p, POINTER(Pieces), c_void_p]),
    "hs_digest": (c_uint64, [c_void_p, c_void_p, c_size_t]),
    "hs_team_create": (c_void_p, [c_int32, POINTER(c_int32), c_int32, c_int32, POINTER(c_int32)]),
    "hs_team_destroy": (None, [c_void_p]),
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

COLLECTIVE_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "hs_collective_sizes": (None, [POINTER(c_int32)]),
    "hs_sum": (c_int32, [POINTER(Mail), POINTER(Exchange), c_void_p, c_int64]),
    "hs_gather": (c_int32, [POINTER(Mail), POINTER(Exchange), POINTER(ActPart), c_int32, c_int32]),
    "hs_merge_heads": (c_int32, [POINTER(Mail), POINTER(Exchange), POINTER(Merge)]),
    "hs_credit": (c_int32, [POINTER(Channel)]),
    "hs_send": (c_int32, [POINTER(Channel), POINTER(Exchange), POINTER(ActPart), c_int32]),
    "hs_receive": (c_int32, [POINTER(Channel), POINTER(Exchange), POINTER(ActPart), c_int32]),
}
"""Of `hs_collective.h`; bound by `with_collective`."""


class NativeLibraryError(Exception):
    """The native library is missing, cannot be loaded, or is of another version. The message says what to do."""


def load(path: Path) -> ctypes.CDLL:
    """Load one level's library and prove that it speaks this ABI. Raises NativeLibraryError."""
    if not path.exists():
        raise NativeLibraryError(
            f"the native CPU library {path} is not built: install the package again (pip install .), or build it in the"
            " checkout as CMakeLists.txt says"
        )
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeLibraryError(f"the native CPU library {path} cannot be loaded: {error}") from error
    _bind(library, path, FUNCTIONS)
    if library.hs_abi_version() != ABI_VERSION or not _same_sizes(STRUCTS, library.hs_abi_sizes):
        raise NativeLibraryError(f"{path} is of another version than this package: install the package again")
    return library


def with_collective(library: ctypes.CDLL) -> ctypes.CDLL:
    """The same library, proven to speak the ABI of exchanges between ranks too. Raises NativeLibraryError."""
    path = Path(library._name)
    _bind(library, path, COLLECTIVE_FUNCTIONS)
    if not _same_sizes(COLLECTIVE_STRUCTS, library.hs_collective_sizes):
        raise NativeLibraryError(f"{path} is of another version than this package: install the package again")
    return library


def _bind(library: ctypes.CDLL, path: Path, functions: dict[str, tuple[Any, list[Any]]]) -> None:
    for name, (result, arguments) in functions.items():
        try:
            function = getattr(library, name)
        except AttributeError as error:
            raise NativeLibraryError(
                f"{path} lacks {name}: it is of another version, install the package again"
            ) from error
        function.restype = result
        function.argtypes = arguments


def _same_sizes(structs: tuple[type[Structure], ...], told_by: Any) -> bool:
    """Are the structs as large as the library says?"""
    sizes = (c_int32 * len(structs))()
    told_by(sizes)
    return list(sizes) == [ctypes.sizeof(struct) for struct in structs]
