// sum_rows: out = part 0 + part 1 + ... of up to eight ranks, in that order: the same bits on every rank that does it.
//
// A part is float32 memory of `count` numbers: this card's own, a peer's that is mapped here, or pinned memory of the host
// that a rank wrote its part to. Whoever launches this has waited for all of them. `out` may be a part. More than eight: a
// second launch whose part 0 is the first one's out gives the same sum as one would.
//
// Block: 256 threads, each 4 numbers, loads of 16 bytes (a bus carries reads of peers' and the host's memory in packets: 512
// bytes a warp fill them), those of all parts before the first addition, so one trip over the bus and not one for each rank.
// 42 to 52 registers, no block memory. Roofline: the slowest part's bus, or its latency. 4 * (ranks + 1) bytes a number, all
// useful; 4 rows of 4096 over PCIe 4.0 x16 are 64 KB a peer, 3 us, of the order of one read's 1 to 2 us.
#pragma once

#include "floats.h"

constexpr int SUM_PARTS = 8;

DEVICE void sum_rows_of(float *out, const float *const (&parts)[SUM_PARTS], int ranks, i64 count) {
    const i64 at = 4 * ((i64)block_x() * threads() + thread());
    if (at >= count) return;
    const int here = count - at < 4 ? (int)(count - at) : 4;
    Floats4 x[SUM_PARTS];
    UNROLL for (int r = 0; r < SUM_PARTS; r++) {
        if (r < ranks) x[r] = load4(parts[r] + at, here);
    }
    Floats4 sum = x[0];
    UNROLL for (int r = 1; r < SUM_PARTS; r++) {
        if (r >= ranks) continue;
        UNROLL for (int i = 0; i < 4; i++) sum.v[i] += x[r].v[i];
    }
    store4(out + at, sum, here);
}
