"""A second opinion on AMD's memory sizes from AMD's own library, where its Python package is installed.

The library opens every render node, so it is asked by nobody but `homeserve probe`: the engine and `budget` open no
device. It runs in a process of its own, since it may print, exit or hang when driver and library do not match, and its
numbers change nothing: where they differ from the kernel's, both are shown.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from importlib.util import find_spec

from budget.facts import Card, Doubt
from budget.probe_pci import address

_WHERE = "amdsmi"
_DISAGREE = 0.01
_SCRIPT = """
import json, amdsmi
amdsmi.amdsmi_init()
kinds = amdsmi.AmdSmiMemoryType.VRAM, amdsmi.AmdSmiMemoryType.GTT
handles = amdsmi.amdsmi_get_processor_handles()
sizes = lambda handle: [amdsmi.amdsmi_get_gpu_memory_total(handle, kind) for kind in kinds]
rows = [[amdsmi.amdsmi_get_gpu_device_bdf(handle), *sizes(handle)] for handle in handles]
print()
print(json.dumps(rows))
"""


def second_opinion(cards: Iterable[Card], deadline_s: float) -> list[Doubt]:
    """What amdsmi says otherwise of AMD `cards`; nothing where it is not installed or agrees."""
    known = {card.pci: card for card in cards if card.vendor == "amd" and card.pci}
    if not known or find_spec("amdsmi") is None:
        return []
    try:
        done = subprocess.run(
            [sys.executable, "-c", _SCRIPT],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=deadline_s,
            check=True,
        )
        rows = json.loads(done.stdout.strip().splitlines()[-1])
        said = [(address(bdf), int(vram), int(gtt)) for bdf, vram, gtt in rows]
    except subprocess.TimeoutExpired:
        return [Doubt(_WHERE, f"did not answer within {deadline_s:g} s", "sysfs and KFD alone")]
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or [f"exit {error.returncode}"])[-1]
        return [Doubt(_WHERE, f"is installed and does not work: {last[:200]}", "sysfs and KFD alone")]
    except (OSError, ValueError, TypeError, IndexError) as error:
        return [Doubt(_WHERE, f"gave no answer that can be read: {error}", "sysfs and KFD alone")]
    return [doubt for pci, vram, gtt in said if pci in known for doubt in _differences(known[pci], vram, gtt)]


def _differences(card: Card, vram: int, gtt: int) -> Iterable[Doubt]:
    for name, own, other in (("VRAM", card.total_bytes, vram), ("GTT", card.gtt_total_bytes, gtt)):
        if own is not None and other > 0 and abs(own - other) > _DISAGREE * max(own, other):
            what = f"says {other >> 20} MiB of {name} for {card.name} at {card.pci}, the kernel {own >> 20} MiB"
            yield Doubt(_WHERE, what, "the kernel's number")
