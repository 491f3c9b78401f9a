// MergeAttention: partial attentions of all ranks become that of a rank's own heads. docs: backends/ops.py.
//
// `every` is what the gather left, rank after rank in each row: [rows][ranks][heads * dims + heads]. A thread has one dim of a head; the
// ranks are added in their order, so every rank computes the same bits. A rank without a position has minus infinity and nothing.
//
//     grid     (own heads, rows), 128 threads
//     moves    4 bytes for each rank's dim, once, 4 written: a copy's speed, and a launch's latency for a decode.
#pragma once

#include "attention.h"

struct MergeAttention {
    float *out;             // [rows][out_stride]: own heads
    const float *every, *sinks, *gates;   // sinks [own] or null; gates as queries lie, dims behind each head's query, or null
    int ranks, heads, dims, first, out_stride, gate_stride;
};

DEVICE void merge_ranks(const MergeAttention &a) {
    const int own = block_x(), row = block_y(), width = a.heads * (a.dims + 1);
    const float *of_row = a.every + (i64)row * a.ranks * width;
    const float *logs = of_row + a.heads * a.dims + a.first + own;
    float top = a.sinks ? a.sinks[own] : nothing();
    for (int rank = 0; rank < a.ranks; rank++) top = max_(top, logs[rank * width]);
    for (int d = thread(); d < a.dims; d += threads()) {
        float sum = a.sinks ? exp_(a.sinks[own] - top) : 0.0f, mixed = 0.0f;
        for (int rank = 0; rank < a.ranks; rank++) {
            const float factor = power_below(logs[rank * width], top);
            sum += factor;
            mixed = fma_(of_row[rank * width + (a.first + own) * a.dims + d], factor, mixed);
        }
        float out = sum > 0.0f || sum != sum ? mixed / sum : 0.0f;
        if (a.gates) out *= sigmoid(a.gates[(i64)row * a.gate_stride + own * 2 * a.dims + a.dims + d]);
        a.out[(i64)row * a.out_stride + own * a.dims + d] = out;
    }
}
