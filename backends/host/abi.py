"""The C ABI of `native/hs_host.h` and `native/hs_collective.h` in ctypes: a struct for each of theirs, a prototype for
each function.

Whatever library is bound by these tables (`backends.host.library`) will do: the one of host memory alone, or that of
the CPU's kernels at any level. Both have the same source, and their records may be used by either in turn: nothing of
them lies in a library.
"""

from __future__ import annotations

from ctypes import POINTER, Structure, c_char, c_char_p, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from typing import Any

HOST_VERSION = 1

OK = 0
E_LATE = -5
E_STAMP = -6
E_CREDIT = -7
ERRORS = {
    -2: "a shape that its type does not allow",
    -4: "no thread could be started",
    -5: "a peer that did not come within the bound",
    -6: "a peer that is at another exchange",
    -7: "a channel that is full",
}

Functions = dict[str, tuple[Any, list[Any]]]
"""Name -> (result, arguments)."""


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


STRUCTS: tuple[type[Structure], ...] = (Pieces, Stamp, Exchange, Mail, Channel, ActPart, Act, Merge)

FUNCTIONS: Functions = {
    "hs_host_version": (c_int32, []),
    "hs_host_sizes": (None, [POINTER(c_int32)]),
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
    "hs_sum": (c_int32, [POINTER(Mail), POINTER(Exchange), c_void_p, c_int64]),
    "hs_gather": (c_int32, [POINTER(Mail), POINTER(Exchange), POINTER(ActPart), c_int32, c_int32]),
    "hs_merge_heads": (c_int32, [POINTER(Mail), POINTER(Exchange), POINTER(Merge)]),
    "hs_credit": (c_int32, [POINTER(Channel)]),
    "hs_send": (c_int32, [POINTER(Channel), POINTER(Exchange), POINTER(ActPart), c_int32]),
    "hs_receive": (c_int32, [POINTER(Channel), POINTER(Exchange), POINTER(ActPart), c_int32]),
}
