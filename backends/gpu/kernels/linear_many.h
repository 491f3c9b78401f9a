// linear_many: out [rows, outs] = x [rows, cols] W^T + bias, for many rows. What a block does, and why so: many_block.h.
//
//     out       float32, lines `out_stride` apart
//     x         halves of halve_rows.h, lines `pitch` apart; scales [rows]: what a line must be multiplied with
//     w         a matrix of planes (quants.h) or float lines, [outs, cols]
//     bias      [outs] or null
//
// Grid: (blocks over rows, blocks over outs). Blocks that follow each other share their part of W, which then comes from L2;
// x, 2 bytes a value, stays there altogether. So each byte of W is read from memory once where all blocks over the rows run
// at a time: up to 82 x 2 x 128 rows on a card of 82 multiprocessors.
#pragma once

#include "many_block.h"

template <class Q, class S>
DEVICE void linear_many(float *out, const half_t *x, const float *scales, const void *w, const float *bias, int rows, int outs,
                        int cols, int pitch, int out_stride) {
    SHARED(half_t, memory, S::LINES * S::STRIDE);
    const int first_row = block_x() * S::ROWS, first_out = block_y() * S::OUTS;
    many_block<Q, S>(
        memory, x, scales, pitch, lines_of(Q(), w, outs, cols), bias, first_out, outs - 1, cols,
        [&](int row) { return first_row + row < rows ? first_row + row : rows - 1; },
        [&](int row, int col, float value) {
            row += first_row;
            col += first_out;
            if (row < rows && col < outs) out[(i64)row * out_stride + col] = value;
        });
}

#define LINEAR_MANY(type, variant, Shape)                                                                                      \
    KERNEL(linear_many_##type##_##variant, Shape::THREADS, Shape::BLOCKS)                                                      \
    (float *out, const half_t *x, const float *scales, const void *w, const float *bias, i32 rows, i32 outs, i32 cols,         \
     i32 pitch, i32 out_stride) {                                                                                              \
        linear_many<type, Shape>(out, x, scales, w, bias, rows, outs, cols, pitch, out_stride);                                \
    }
#define LINEAR_MANY_OF(type) LINEAR_MANY(type, r32, ManyR32) LINEAR_MANY(type, r128, ManyR128)
