// The norm of a row, with the sum into the residual before it and the quantised form of its result behind it.
//
//     src += add;  out = src / sqrt(mean(src^2) + eps) * weight;  out as two planes of bytes for the linear layer that reads it
//
// Block: 256 threads, one row; grid rows. Each thread has 4 columns of every 1024, and keeps those of the first 8192 in registers
// (32 of them) from the sum of squares to the result; wider rows are read again, from the first cache. 74 registers, 3 blocks (24
// warps) to a multiprocessor, and each warp has all its loads of a row in flight at once.
//
// Roofline: at many rows memory, 20 bytes a column (src and add read, src, out and weight, which stays cached) of which all are
// useful; at one row latency: two dependent trips to memory and a sum over the block, near 3 us, as much as a launch costs. So
// what would be three launches (sum, norm, quantise) is one: that is the whole gain there, and the largest of this file.
//
// A row's bits do not depend on other rows, and the sum's order is fixed: by column within a thread, then lanes, then warps.
#pragma once

#include "quantised.h"
#include "rows.h"

struct NormRow {
    float *src, *out;
    const float *add, *weight;
    int width;
    float eps;
};

// Four columns from `c` on of src + add, which src then is.
DEVICE Floats4 norm_input(const NormRow &row, int c) {
    const int left = row.width - c;
    Floats4 x = load4(row.src + c, left);
    if (!row.add) return x;
    const Floats4 more = load4(row.add + c, left);
    UNROLL for (int j = 0; j < 4; j++) x.v[j] += more.v[j];
    store4(row.src + c, x, left);
    return x;
}

DEVICE void norm_output(const NormRow &row, const Quantised &to, int c, Floats4 x, float scale) {
    const int left = row.width - c;
    const Floats4 weight = load4(row.weight + c, left);
    UNROLL for (int j = 0; j < 4; j++) x.v[j] = x.v[j] * scale * weight.v[j];
    if (row.out) store4(row.out + c, x, left);
    if (to.hi) quantise4(to, block_x(), c, x.v, left > 0);
}

// `add`, `out` and the planes of `to` may be null. The planes want a width that is a multiple of 32.
DEVICE void norm_block(const NormRow &row, const Quantised &to) {
    constexpr int HELD = 8, STEP = 1024;
    SHARED(float, parts, 256 / WARP);
    Floats4 held[HELD];
    float squares = 0.0f;
    UNROLL for (int i = 0; i < HELD; i++) {
        held[i] = norm_input(row, 4 * thread() + STEP * i);
        UNROLL for (int j = 0; j < 4; j++) squares = fma_(held[i].v[j], held[i].v[j], squares);
    }
    for (int c = 4 * thread() + STEP * HELD; c < row.width; c += STEP) {
        const Floats4 x = norm_input(row, c);
        UNROLL for (int j = 0; j < 4; j++) squares = fma_(x.v[j], x.v[j], squares);
    }
    const float scale = 1.0f / sqrt_(block_sum(squares, parts) / (float)row.width + row.eps);
    UNROLL for (int i = 0; i < HELD; i++)
        if (STEP * i < row.width) norm_output(row, to, 4 * thread() + STEP * i, held[i], scale);
    for (int first = STEP * HELD; first < row.width; first += STEP) {
        const int c = first + 4 * thread();
        norm_output(row, to, c, load4(row.src + c, row.width - c), scale);
    }
}
