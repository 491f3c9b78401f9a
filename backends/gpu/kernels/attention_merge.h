// Parts of attention put together: out = sum over parts of e^(top_p - top) values_p, divided by the same sum of their sums.
//
// A block has one query: its threads first find the largest score of all parts, then walk the parts in ascending order, a dim each.
// The order is that of positions, so the bits do not depend on who computed which part when. Sinks join the sum of exponentials here,
// gates multiply here, and a partial attention leaves its logarithm here: a part knows of none of them.
//
//     grid     (heads, rows of a tile, tiles), 128 threads
//     moves    4 bytes for each dim of each query's part, once: with 8 queries for a kv head and parts of 256 positions of f16, 3 % of what
//              `attention_few` reads, from the second cache where it was just written. Lanes side by side read dims side by side.
#pragma once

#include "attention.h"

constexpr int MERGE_THREADS = 128;

DEVICE void merge_parts(const Attention &a, int dims) {
    SHARED(float, some, MERGE_THREADS / 32);
    SHARED(float, factors, MERGE_THREADS);
    const Tile tile = tile_at(a, block_z());
    if (block_y() >= tile.rows) return;
    const int row = tile.row + block_y(), head = block_x(), last = a.positions[row];
    const int first = a.window > 0 && last >= a.window ? last - a.window + 1 : 0;
    const int begin = first / (a.part_pages * PAGE), end = last / (a.part_pages * PAGE) + 1;

    float top = nothing();
    for (int part = begin + thread(); part < end; part += MERGE_THREADS) top = max_(top, a.part_stats[2 * part_at(a, tile, row, head, part)]);
    top = block_max(top, some);

    float sum = 0.0f, mixed[4] = {0.0f, 0.0f, 0.0f, 0.0f};   // dims thread(), + 128, ...
    for (int base = begin; base < end; base += MERGE_THREADS) {
        const int count = end - base < MERGE_THREADS ? end - base : MERGE_THREADS;
        block_barrier();
        if (thread() < count) factors[thread()] = power_below(a.part_stats[2 * part_at(a, tile, row, head, base + thread())], top);
        block_barrier();
        for (int i = 0; i < count; i++) {
            const i64 at = part_at(a, tile, row, head, base + i);
            sum = fma_(a.part_stats[2 * at + 1], factors[i], sum);
            UNROLL for (int j = 0; j < 4; j++) {
                const int d = thread() + j * MERGE_THREADS;
                if (d < dims) mixed[j] = fma_(a.part_values[at * dims + d], factors[i], mixed[j]);
            }
        }
    }
    const float scale = normaliser(top, sum, a.sinks, head);
    float *out = a.out + (i64)row * a.out_stride;
    const float *gate = a.q + (i64)row * a.q_stride + head * a.q_step + dims;
    UNROLL for (int j = 0; j < 4; j++) {
        const int d = thread() + j * MERGE_THREADS;
        if (d < dims) out[head * dims + d] = mixed[j] * scale * (a.gated ? sigmoid(gate[d]) : 1.0f);
    }
    if (a.partial && thread() == 0) out[a.heads * dims + head] = log_sum(top, sum);
}
