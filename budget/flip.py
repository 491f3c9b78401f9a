"""What a flip of a plan's layout takes of memory, phase by phase.

    phase                the rank's own lines                     of all ranks, on the host
    at rest, LAYOUT      arena, pools of that layout              the copy (or images)
    prepare, LAYOUT      the same: nothing has been touched       the copy, and transit memory: what is packed
    commit, LAYOUT       arena, pools of the layout flipped to    the copy, and transit memory: what is unpacked

LAYOUT is the one that is in force, in "commit" the one that will be. The pools of the old layout are given back before
those of the new one are made, so no phase has both.

Pure.
"""

from __future__ import annotations

from budget.ledger import PIPELINE, TENSOR

REST, PREPARE, COMMIT = "at rest", "prepare", "commit"
PHASES = tuple(f"{step}, {layout}" for layout in (PIPELINE, TENSOR) for step in (REST, PREPARE, COMMIT))
