"""Flips that are asked for and waited for, and what a flip's record says of its cost."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from homeserve.bench.client import Refused, Target, Unmeasured

ROUTE = "/v1/homeserve/flip"
LAYOUTS = ("tensor", "pipeline")
"""The two ways of a round trip, from the layout in which ranks rest."""
BOUND_S = 120.0
POLL_S = 0.01
MIB = 1 << 20

Record = Mapping[str, Any]


class FlipFailed(Unmeasured):
    """A flip was refused, or given up."""


def flip(target: Target, to: str) -> Record:
    """Ask for a flip and wait for its end. Raises FlipFailed."""
    try:
        told = target.post(ROUTE, {"to": to})
    except Refused as error:
        said = f"{error.said} [{error.code}]" if error.code else error.said
        raise FlipFailed(f"a flip to the {to} layout is refused ({error.status}): {said}") from None
    end = time.monotonic() + BOUND_S
    while time.monotonic() < end:
        record: Record = target.get(told["url"])
        if record["state"] == "committed":
            return record
        if record["state"] == "abandoned":
            break
        time.sleep(POLL_S)
    raise FlipFailed(f"the flip to the {to} layout is {record['state']}: {record['reason']}")


# ------------------------------------------------------------------------------------------------------ from a record


def part_ms(record: Record, *names: str) -> float:
    """Of the slowest rank."""
    return max(sum(float(rank["parts_ms"].get(name, 0.0)) for name in names) for rank in record["ranks"])


def total_ms(record: Record) -> float:
    return float(record["ms"]["total"])


def beside_refill_ms(record: Record) -> float:
    return total_ms(record) - part_ms(record, "refill")


def refill_bytes(record: Record) -> int:
    """Weights that were written into the ranks' arenas."""
    return sum(rank["refill_bytes"] for rank in record["ranks"])


def moved_bytes(record: Record) -> int:
    """What was packed of KV rows and states, by all ranks; as much was unpacked."""
    return sum(rank["sent_bytes"] + rank["local_bytes"] for rank in record["ranks"])


def total_mib_s(record: Record) -> float:
    """All that a flip put into place (weights, KV rows, states) over its whole time."""
    return (refill_bytes(record) + moved_bytes(record)) / MIB / (total_ms(record) / 1e3)


def refill_gb_s(record: Record) -> float:
    return refill_bytes(record) / part_ms(record, "refill") / 1e6


def move_gb_s(record: Record) -> float:
    taken = part_ms(record, "pack") + part_ms(record, "write_kv", "write_state")
    return 2 * moved_bytes(record) / taken / 1e6
