// experts_few: for each row of x and each expert it chose, the expert's matrix times the row. Bound by reading the matrices.
//
//     out        [pairs, height]; pair p = row * used + choice
//     w          planes of [matrix_rows, cols]: expert e's matrix is rows (e - first_expert) * pitch + first, ... + height
//     bias       [matrix_rows] or null, cut like the rows
//     chosen     i32 [pairs], the expert of each pair (route.h)
//     x          row p / share: `used` pairs share one where the input is the layer's (gate, up), a pair has its own else (down)
//     first_expert, experts      which experts are here; a pair of another one gets zeros
//     team       lanes for a row of the matrix (few_products.h)
//
// Grid: (ceil(height / outs of a block), pairs), 128 threads, 96 registers, no block memory: linear_few at one row with another
// place of the matrix for each block_y, and with its bytes and instructions. Two pairs with one expert read its matrix twice,
// at the same time and so mostly from L2 (a matrix of 2048 x 768 in Q4_K is 0.9 MB): with 8 of 128 experts two rows share
// less than one in two. Where more share, experts_many sorts the pairs first.
//
// Roofline: memory. 8 experts of 768 x 2048 x 3 matrices in Q4_K are 21 MB a row and layer, 23 us at 936 GB/s. The grid of a
// gate is 48 x 8 blocks of four warps (teams of 16, two outputs each): 4.7 to each of 82 multiprocessors, 600 lanes of which
// each has 36 bytes under way, 21 KB where 6.8 are needed.
#pragma once

#include "few_products.h"

struct ExpertRows { int first_expert, experts, matrix_rows, pitch, first, height; };

template <class Q, class X>
DEVICE void experts_few(float *out, const void *w, const float *bias, const X &x, const int *chosen, int share,
                        const ExpertRows &e, int cols, int team) {
    const int pair = block_y(), expert = chosen[pair] - e.first_expert;
    const int out0 = (block_x() * (threads() / team) + thread() / team) * FEW_OUTS;
    const bool here = expert >= 0 && expert < e.experts;   // the same for the whole block
    const i64 base = here ? (i64)expert * e.pitch + e.first : 0;
    FewRows at;
    UNROLL for (int n = 0; n < FEW_OUTS; n++) at.weight[n] = base + (out0 + n < e.height ? out0 + n : e.height - 1);
    at.first = at.last = pair / share;
    float sums[1][FEW_OUTS] = {};
    if (here) few_products(Q(), sums, w, e.matrix_rows, cols, x, at, team);
    UNROLL for (int n = 0; n < FEW_OUTS; n++) {
        const float sum = team_sum(sums[0][n], team);
        if (lane() % team == 0 && out0 + n < e.height)
            out[(i64)pair * e.height + out0 + n] = here && bias ? sum + bias[base + out0 + n] : sum;
    }
}

#define EXPERTS_FEW(type)                                                                                                      \
    KERNEL(experts_few_##type, 128, 5)                                                                                         \
    (float *out, const u8 *w, const float *bias, const i8 *hi, const i8 *lo, const float *scale, const float *sum,             \
     const int *chosen, i32 share, i32 first_expert, i32 experts, i32 matrix_rows, i32 pitch, i32 first, i32 height, i32 cols, \
     i32 team) {                                                                                                               \
        experts_few<type>(out, w, bias, Acts{hi, lo, scale, sum}, chosen, share,                                               \
                          ExpertRows{first_expert, experts, matrix_rows, pitch, first, height}, cols, team);                   \
    }
#define EXPERTS_FEW_FLOAT(type)                                                                                                \
    KERNEL(experts_few_##type, 128, 5)                                                                                         \
    (float *out, const u8 *w, const float *bias, const float *x, i32 x_stride, const int *chosen, i32 share, i32 first_expert, \
     i32 experts, i32 matrix_rows, i32 pitch, i32 first, i32 height, i32 cols, i32 team) {                                     \
        experts_few<type>(out, w, bias, FloatActs{x, x_stride}, chosen, share,                                                 \
                          ExpertRows{first_expert, experts, matrix_rows, pitch, first, height}, cols, team);                   \
    }
