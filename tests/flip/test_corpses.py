"""One test for each way in which the flip of this product's ancestor died, or would have next. Each says what happened
there, and tries the property of this design that excludes it; a mutant of its name (`tests/mutants/corpse_*.patch`)
brings the ancestor's behaviour back.

    corpses_wire    deadlocks: who waits for whom, how an order arrives, what is paired with what
    corpses_bounds  what may end a flip, and from when on it counts
    corpses_steps   when a flip begins, what must not hold it up, whose yes counts, how serving goes on
    corpses_rows    what is carried, and what goes on behind a flip
"""

from __future__ import annotations

from corpses_bounds import (
    test_b14,
    test_b15,
    test_b16,
    test_b17,
    test_C,
)
from corpses_rows import (
    test_J1,
    test_J2,
    test_J3,
    test_K,
    test_N1,
    test_pp_outputs,
    test_radix_diverge,
    test_short_read,
    test_spec_merge,
)
from corpses_steps import (
    test_batch_full,
    test_D,
    test_E,
    test_E2,
    test_G,
    test_H,
    test_L,
    test_N,
    test_O,
    test_Q0,
    test_resume_gate,
)
from corpses_wire import (
    test_A,
    test_B,
    test_B_prime,
    test_bounded_recv,
    test_F,
    test_I,
    test_I_w,
    test_lone_rank,
    test_M,
    test_pre_1,
    test_pre_2,
    test_proxy_strand,
    test_Q,
    test_R,
    test_S,
)

__all__ = [
    "test_A",
    "test_B",
    "test_B_prime",
    "test_C",
    "test_D",
    "test_E",
    "test_E2",
    "test_F",
    "test_G",
    "test_H",
    "test_I",
    "test_I_w",
    "test_J1",
    "test_J2",
    "test_J3",
    "test_K",
    "test_L",
    "test_M",
    "test_N",
    "test_N1",
    "test_O",
    "test_Q",
    "test_Q0",
    "test_R",
    "test_S",
    "test_b14",
    "test_b15",
    "test_b16",
    "test_b17",
    "test_batch_full",
    "test_bounded_recv",
    "test_lone_rank",
    "test_pp_outputs",
    "test_pre_1",
    "test_pre_2",
    "test_proxy_strand",
    "test_radix_diverge",
    "test_resume_gate",
    "test_short_read",
    "test_spec_merge",
]
